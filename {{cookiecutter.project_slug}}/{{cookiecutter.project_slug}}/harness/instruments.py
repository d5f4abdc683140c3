"""Instruments: what is read off a run. Step records, learning-rate range, curve shape, units."""

from __future__ import annotations

import itertools
import math
import time
from typing import Any

import numpy as np
import torch
from torch import nn


class NonFiniteLoss(RuntimeError):
    """The loss is NaN or infinite."""


class StepRecorder:
    """Loss, gradient norm and update ratio of the steps, read from the device in one go.

    Update ratio = norm(change of the parameters) / norm(parameters) over all of them, measured
    on one step in `every_steps`; its healthy range is about 1e-4 to 1e-1 per step.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, every_steps: int):
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        self.optimizer, self.every_steps = optimizer, every_steps
        self.step, self.rows = 0, []
        self._pending: list[torch.Tensor] = []
        self._epoch: list[float] = []
        self._before: list[torch.Tensor] | None = None

    def before(self) -> None:
        if self.step % self.every_steps == 0:
            self._before = [p.detach().clone() for p in self.parameters]

    def after(self, output: Any) -> None:
        self.step += 1
        self._pending.append(output.loss)
        if self._before is not None:
            self._fetch(output)

    def epoch_loss(self) -> float:
        """Mean training loss of the steps since it was last asked (augmented, training mode)."""
        self._read()
        mean = float(np.mean(self._epoch)) if self._epoch else math.nan
        self._epoch = []
        return mean

    def _fetch(self, output: Any) -> None:
        now = [p.detach() for p in self.parameters]
        change = torch._foreach_norm(torch._foreach_sub(now, self._before))
        size = torch._foreach_norm(self._before)
        ratio = torch.stack(change).norm() / torch.stack(size).norm().clamp_min(1e-12)
        grad_norm = output.grad_norm
        if grad_norm is None:
            grads = [p.grad for p in self.parameters if p.grad is not None]
            grad_norm = torch.stack(torch._foreach_norm(grads)).norm()
        self._before = None
        ratio_, norm_ = torch.stack([ratio.float(), grad_norm.detach().float()]).tolist()
        loss = self._read()[-1]
        rate = self.optimizer.param_groups[0]["lr"]
        self.rows.append(
            {
                "step": self.step,
                "loss": loss,
                "lr": rate,
                "grad_norm": norm_,
                "update_ratio": ratio_,
            }
        )

    def _read(self) -> list[float]:
        """The pending losses; one wait for the device."""
        losses = torch.stack(self._pending).tolist() if self._pending else []
        first = self.step - len(losses) + 1
        for step, loss in enumerate(losses, start=first):
            if not math.isfinite(loss):
                raise NonFiniteLoss(f"the loss is {loss} at step {step}")
        self._pending = []
        self._epoch += losses
        return losses


# ---- learning-rate range --------------------------------------------------------------------------


def lr_range(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    step: Any,
    batches: Any,
    *,
    num_steps: int,
    lowest: float = 1e-6,
    highest: float = 10.0,
) -> dict:
    """Train while the rate grows exponentially from `lowest` to `highest`, until the loss diverges.

    `step(model, optimizer, batch) -> StepOutput` is the project's own, without clipping. Returns
    {lrs, losses, smoothed, steepest, divergence, usable, drop}: the rate of steepest descent, the
    rate at which the smoothed loss had climbed back by a quarter of its fall or to 1.5 times its
    start (None if it never did: a normalised network bends rather than breaks), a usable rate ten
    times below that (else the steepest), and the largest relative fall of the smoothed loss.
    Method: Smith 2017, arXiv 1506.01186.
    """
    rates = np.geomspace(lowest, highest, num_steps)
    losses: list[float] = []
    smoothed: list[float] = []
    divergence = None
    iterator = _endless(batches)
    model.train()
    for rate in rates:
        for group in optimizer.param_groups:
            group["lr"] = float(rate)
        try:
            losses.append(step(model, optimizer, next(iterator)).loss.item())
        except NonFiniteLoss:
            losses.append(math.inf)
        if not math.isfinite(losses[-1]):
            losses.pop()
            divergence = float(rate)
            break
        past = smoothed[-1] if smoothed else losses[0]
        smoothed.append(0.8 * past + 0.2 * losses[-1])
        if len(smoothed) > 5 and _diverged(smoothed):
            divergence = float(rate)
            break
    return _read_range(rates[: len(losses)], losses, smoothed, divergence)


def _diverged(smoothed: list[float]) -> bool:
    start, low, now = smoothed[0], min(smoothed), smoothed[-1]
    fell = start - low > 0.05 * start
    return now > 1.5 * start or (fell and now - low > 0.25 * (start - low))


def seconds_per_step(step: Any, batches: Any, num_steps: int = 8) -> float:
    """Median wall time of a few real steps, for a forecast; it changes the weights."""
    times = []
    for batch in itertools.islice(_endless(batches), num_steps):
        started = time.perf_counter()
        step(batch).loss.item()
        times.append(time.perf_counter() - started)
    return float(np.median(times))


def _endless(batches: Any) -> Any:
    while True:
        yield from batches


def _read_range(rates, losses, smoothed, divergence) -> dict:
    slope = np.gradient(smoothed, np.log(rates)) if len(smoothed) > 2 else np.zeros(1)
    steepest = float(rates[int(np.argmin(slope))])
    drop = 1 - min(smoothed) / smoothed[0] if smoothed else 0.0
    return {
        "lrs": [float(rate) for rate in rates],
        "losses": losses,
        "smoothed": smoothed,
        "steepest": steepest,
        "divergence": divergence,
        "usable": divergence / 10 if divergence else steepest,
        "drop": float(drop),
    }


# ---- the shape of a curve -------------------------------------------------------------------------


def curve_shape(losses: list[float]) -> str:
    """What a loss curve did, read from its whole history (one value per epoch).

    One of: not finite, too short, rising from the start, flat from step one, turned, oscillating,
    still descending, descended then plateaued. `turned`: fell, then rose again by a quarter of the
    fall or more.
    """
    if not all(math.isfinite(value) for value in losses):
        return "not finite"
    if len(losses) < 5:
        return "too short"
    values = np.asarray(losses, dtype=np.float64)
    width = max(3, len(values) // 10)
    smooth = np.convolve(values, np.ones(width) / width, mode="valid")
    start, low, end = smooth[0], smooth.min(), smooth[-1]
    span = max(abs(start), 1e-12)
    if low > 0.98 * start and end > 1.05 * start:
        return "rising from the start"
    if start - low < 0.02 * span:
        return "flat from step one"
    if end - low > 0.25 * (start - low):
        return "turned"
    steps = np.diff(values[len(values) // 2 :])
    wobble = np.abs(steps).mean()
    if wobble > 0.2 * (start - low):
        return "oscillating"
    tail = smooth[-max(2, len(smooth) // 5) :]
    falling = (tail[0] - tail[-1]) / max(tail[0], 1e-12)
    return "still descending" if falling > 0.05 else "descended then plateaued"


# ---- units ----------------------------------------------------------------------------------------


def unit_activity(model: nn.Module, evaluate: Any, loader: Any) -> list[dict]:
    """For every activation module: share of units that never fire and that are always saturated.

    `evaluate(model, loader)` is the project's own. A unit is a channel (dimension 1). Saturated
    means within 1e-3 of the bounds of a bounded activation on more than 95 % of its values.
    """
    bounded = {nn.Sigmoid: (0.0, 1.0), nn.Tanh: (-1.0, 1.0), nn.Hardtanh: (-1.0, 1.0)}
    rectified = (nn.ReLU, nn.LeakyReLU, nn.ReLU6, nn.GELU, nn.SiLU)
    seen: dict[str, list[torch.Tensor]] = {}
    handles = []
    for name, module in model.named_modules():
        if isinstance(module, rectified):
            seen[name] = []
            handles.append(module.register_forward_hook(_recorder(seen[name], None)))
        elif type(module) in bounded:
            seen[name] = []
            hook = _recorder(seen[name], bounded[type(module)])
            handles.append(module.register_forward_hook(hook))
    try:
        evaluate(model, loader)
    finally:
        for handle in handles:
            handle.remove()
    kinds = dict(model.named_modules())
    return [
        _activity(name, kinds[name], torch.stack(parts)) for name, parts in seen.items() if parts
    ]


def _recorder(store: list[torch.Tensor], bounds: tuple[float, float] | None) -> Any:
    """Per unit: the largest output, or the share of values at a bound."""

    def hook(module: nn.Module, inputs: Any, output: torch.Tensor) -> None:
        units = output.detach().float().transpose(0, 1).flatten(1)
        if bounds is None:
            store.append(units.amax(dim=1))
        else:
            low, high = bounds
            store.append(((units < low + 1e-3) | (units > high - 1e-3)).float().mean(dim=1))

    return hook


def _activity(name: str, module: nn.Module, parts: torch.Tensor) -> dict:
    if isinstance(module, (nn.ReLU, nn.LeakyReLU, nn.ReLU6, nn.GELU, nn.SiLU)):
        dead, saturated = parts.amax(dim=0) <= 0, torch.zeros(parts.shape[1], dtype=torch.bool)
    else:
        saturated = parts.mean(dim=0) > 0.95
        dead = torch.zeros_like(saturated)
    return {
        "layer": name,
        "kind": type(module).__name__,
        "num_units": parts.shape[1],
        "dead_share": dead.float().mean().item(),
        "saturated_share": saturated.float().mean().item(),
    }
