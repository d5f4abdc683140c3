"""Instruments: what is read off a run. Step records, learning-rate range, curve shape, units."""

from __future__ import annotations

import itertools
import math
import time
from collections import defaultdict
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn

RECTIFIED = (nn.ReLU, nn.LeakyReLU, nn.ReLU6, nn.GELU, nn.SiLU)
BOUNDED = {nn.Sigmoid: (0.0, 1.0), nn.Tanh: (-1.0, 1.0), nn.Hardtanh: (-1.0, 1.0)}


class NonFiniteLoss(RuntimeError):
    """The loss, or a figure of the training it drives, is NaN or infinite."""


def finite(row: dict) -> dict:
    """The row itself. Raises NonFiniteLoss naming the first figure that is no number."""
    for key, value in row.items():
        if not math.isfinite(value):
            raise NonFiniteLoss(f"the {key.replace('_', ' ')} is {value} at step {row['step']}")
    return row


class StepRecorder:
    """Loss, gradient norm and update ratio of the steps, read from the device in one go.

    Update ratio = norm(change of the parameters) / norm(parameters) over all of them, measured
    on one step in `every_steps`; its healthy range is about 1e-4 to 1e-1 per step. That step costs
    a copy of the parameters and six kernels; all others keep a reference to their loss.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, every_steps: int):
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        self.optimizer, self.every_steps = optimizer, every_steps
        self.step, self.rows = 0, []
        self._copies = [torch.empty_like(p) for p in self.parameters]
        self._pending: list[torch.Tensor] = []
        self._epoch: list[float] = []
        self._rate: float | None = None  # set before a step that is measured

    def before(self) -> None:
        if self.step % self.every_steps == 0:
            with torch.no_grad():
                torch._foreach_copy_(self._copies, self.parameters)
            self._rate = self.optimizer.param_groups[0]["lr"]  # after the step: the next one's

    def after(self, output: Any) -> None:
        self.step += 1
        self._pending.append(output.loss)
        if self._rate is not None:
            self._fetch(output)

    def epoch_loss(self) -> float:
        """Mean training loss of the steps since it was last asked (augmented, training mode)."""
        self._read([])
        mean = math.fsum(self._epoch) / len(self._epoch) if self._epoch else math.nan
        self._epoch = []
        return mean

    @torch.no_grad()
    def _fetch(self, output: Any) -> None:
        sizes = torch._foreach_norm(self._copies)
        torch._foreach_sub_(self._copies, self.parameters)
        changes = torch._foreach_norm(self._copies)
        if output.grad_norm is not None:
            grads = [output.grad_norm]
        else:
            grads = torch._foreach_norm([p.grad for p in self.parameters if p.grad is not None])
        rate, self._rate = self._rate, None
        norms = self._read([*sizes, *changes, *grads])
        count = len(self.parameters)
        size, change = math.hypot(*norms[:count]), math.hypot(*norms[count : 2 * count])
        row = {"step": self.step, "loss": self._epoch[-1], "lr": rate}
        row |= {"grad_norm": math.hypot(*norms[2 * count :]), "update_ratio": change / (size or 1)}
        self.rows.append(finite(row))

    def _read(self, also: list[torch.Tensor]) -> list[float]:
        """The values of `also`, and the pending losses into the epoch; one wait for the device."""
        asked = [*also, *self._pending]
        values = torch.stack(asked).tolist() if asked else []
        losses = values[len(also) :]
        self._pending = []
        for step, loss in enumerate(losses, start=self.step - len(losses) + 1):
            if not math.isfinite(loss):
                finite({"step": step, "loss": loss})
        self._epoch += losses
        return values[: len(also)]


# ---- learning-rate range ------------------------------------------------------------------------


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
    steepest = float(rates[int(np.argmin(slope))]) if losses else divergence
    drop = 1 - min(smoothed) / smoothed[0] if smoothed and smoothed[0] > 0 else 0.0
    return {
        "lrs": [float(rate) for rate in rates],
        "losses": losses,
        "smoothed": smoothed,
        "steepest": steepest,
        "divergence": divergence,
        "usable": divergence / 10 if divergence else steepest,
        "drop": float(drop),
    }


# ---- the shape of a curve -----------------------------------------------------------------------


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


# ---- units --------------------------------------------------------------------------------------


def unit_activity(model: nn.Module, evaluate: Any, loader: Any) -> list[dict]:
    """For every activation module: share of units that never fire and that are always saturated.

    `evaluate(model, loader)` is the project's own. A unit is a channel (dimension 1). Saturated
    means within 1e-3 of the bounds of a bounded activation on more than 95 % of its values. A
    module that several layers share has one row per width it is used with.
    """
    seen: dict[tuple[str, int], list[torch.Tensor]] = defaultdict(list)
    modules = model.named_modules()
    kinds = {n: m for n, m in modules if isinstance(m, RECTIFIED) or type(m) in BOUNDED}
    handles = [m.register_forward_hook(partial(_watch, seen, n)) for n, m in kinds.items()]
    try:
        evaluate(model, loader)
    finally:
        for handle in handles:
            handle.remove()
    return [_activity(name, kinds[name], torch.stack(parts)) for (name, _), parts in seen.items()]


def _watch(seen: dict, name: str, module: nn.Module, inputs: Any, output: torch.Tensor) -> None:
    """Per unit: the largest output, or the share of values at a bound."""
    units = output.detach().float().transpose(0, 1).flatten(1)
    if isinstance(module, RECTIFIED):
        found = units.amax(dim=1)
    else:
        low, high = BOUNDED[type(module)]
        found = ((units < low + 1e-3) | (units > high - 1e-3)).float().mean(dim=1)
    seen[name, len(units)].append(found)


def _activity(name: str, module: nn.Module, parts: torch.Tensor) -> dict:
    if isinstance(module, RECTIFIED):
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
