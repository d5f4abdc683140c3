"""The only training step of the project, and what stands around it: loader, fit, evaluate.

Every stage trains through it, every check runs this very step. Nothing waits for the device within
a step: losses stay on it and are read together every `FETCH_EVERY_STEPS`.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from . import tracking
from .checkpoints import FitResult, cpu_state, save_checkpoint
from .instruments import NonFiniteLoss, StepRecorder, finite

FETCH_EVERY_STEPS = 20  # one wait for the device per so many steps


# ---- batches ----------------------------------------------------------------------------------


def take(x: Any, rows: torch.Tensor) -> Any:
    """The given rows of a tensor, or of every tensor of a (nested) dict."""
    return {key: take(value, rows) for key, value in x.items()} if isinstance(x, dict) else x[rows]


def to_device(x: Any, device: torch.device) -> Any:
    return {k: to_device(v, device) for k, v in x.items()} if isinstance(x, dict) else x.to(device)


class Loader:
    """Batches {"x", "y", "id"} of rows that lie in memory, by indexing (a DataLoader costs 1.6
    times the step on small data). Anything that iterates such dicts and has `__len__` and
    `num_rows` can stand in its place (and `rows` and `batch_size` where training loss is watched).

    One epoch per iteration; the order and the augmentation follow from (seed, epoch) alone.
    `augment(x, generator) -> x` sees a batch; the stored rows never change.
    """

    def __init__(
        self,
        rows: dict,
        batch_size: int,
        *,
        shuffle: bool = False,
        seed: int = 0,
        augment: Callable | None = None,
        device: torch.device | str = "cpu",
    ):
        self.device = torch.device(device)
        self.rows = to_device(rows, self.device)
        self.num_rows = len(rows["y"])
        self.batch_size, self.shuffle, self.seed, self.augment = batch_size, shuffle, seed, augment
        self.epoch = 0

    def __len__(self) -> int:
        return math.ceil(self.num_rows / self.batch_size)

    def __iter__(self) -> Iterator[dict]:
        order, generator = self._order(), self._generator(self.device)
        self.epoch += 1
        for start in range(0, self.num_rows, self.batch_size):
            batch = take(self.rows, order[start : start + self.batch_size])
            if self.augment is not None:
                batch["x"] = self.augment(batch["x"], generator)
            yield batch

    def _generator(self, device: torch.device | str) -> torch.Generator:
        return torch.Generator(device).manual_seed((self.seed * 1_000_003 + self.epoch) % 2**63)

    def _order(self) -> torch.Tensor:
        if not self.shuffle:
            return torch.arange(self.num_rows, device=self.device)
        same = self._generator("cpu")  # one order on every device
        return torch.randperm(self.num_rows, generator=same).to(self.device)


# ---- the step ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class StepOutput:
    loss: torch.Tensor  # 0-d, on the device: reading it waits for the device
    grad_norm: torch.Tensor | None  # 0-d, before clipping; None if nothing clips


def autocast(device: torch.device, precision: str) -> contextlib.AbstractContextManager:
    if precision == "bf16":
        return torch.autocast(device.type, dtype=torch.bfloat16)
    return contextlib.nullcontext()


def train_step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batch: dict,
    loss_fn: Callable,
    *,
    clip_norm: float | None = None,
    scheduler: Any = None,
    precision: str = "fp32",
    accumulate: int = 1,
) -> StepOutput:
    """One optimizer step on one batch, in `accumulate` parts weighted by their rows.

    Raises NonFiniteLoss before any weight is changed (on the CPU; elsewhere `fit` finds it when it
    reads the losses, since looking would wait for the device).
    """
    optimizer.zero_grad(set_to_none=True)
    losses = []
    for part, share in _parts(batch, accumulate):
        with autocast(part["y"].device, precision):
            outputs = model(part["x"])
        loss = loss_fn(outputs.float(), part["y"])
        if share < 1:  # times 1 would cost a fiftieth of a small step
            loss = loss * share
        if loss.device.type == "cpu" and not math.isfinite(loss.item()):
            raise NonFiniteLoss(f"the loss is {loss.item()}")
        loss.backward()
        losses.append(loss.detach())
    grad_norm = None
    if clip_norm is not None:
        grad_norm = nn.utils.clip_grad_norm_(model.parameters(), clip_norm)
    optimizer.step()
    if scheduler is not None:
        scheduler.step()
    return StepOutput(losses[0] if accumulate == 1 else torch.stack(losses).sum(), grad_norm)


def _parts(batch: dict, count: int) -> list[tuple[dict, float]]:
    if count == 1:
        return [(batch, 1.0)]
    num_rows = len(batch["y"])
    rows = torch.arange(num_rows, device=batch["y"].device).tensor_split(count)
    return [(take(batch, part), len(part) / num_rows) for part in rows if len(part)]


def make_optimizer(settings: Any, groups: list[dict], device: Any) -> torch.optim.Optimizer:
    """The optimizer named in configs/optimizer over the model's own parameter groups."""
    if settings.name == "sgd":
        return torch.optim.SGD(groups, lr=settings.lr, momentum=settings.momentum)
    kinds = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW}
    if settings.name not in kinds:
        raise ValueError(f"optimizer.name={settings.name!r} is not one of adam, adamw, sgd.")
    fused = device.type in ("cpu", "cuda")  # .73 of the time of the default one on a CPU
    return kinds[settings.name](groups, lr=settings.lr, betas=tuple(settings.betas), fused=fused)


def make_scheduler(optimizer: torch.optim.Optimizer, settings: Any, num_steps: int) -> Any:
    """Linear warm-up over `warmup_fraction`, then constant or a half cosine to zero, per step."""
    warmup = round(settings.warmup_fraction * num_steps)
    if settings.schedule == "constant" and warmup == 0:
        return None

    def factor(step: int) -> float:
        if step < warmup:
            return (step + 1) / warmup
        if settings.schedule == "constant":
            return 1.0
        return 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(1, num_steps - warmup)))

    return torch.optim.lr_scheduler.LambdaLR(optimizer, factor)


# ---- evaluation -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Evaluation:
    """A whole split: loss and metric over all its rows at once, outputs kept row by row (CPU)."""

    loss: float
    metric: float
    num_rows: int
    outputs: torch.Tensor
    y: torch.Tensor
    ids: torch.Tensor


def evaluate(model: nn.Module, loader: Any, task: Any, *, precision: str = "fp32") -> Evaluation:
    """Evaluation mode inside, each module's former mode after. Never a mean of batch means."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    outputs, targets, ids = [], [], []
    try:
        with torch.inference_mode():
            for batch in loader:
                with autocast(batch["y"].device, precision):
                    outputs.append(model(batch["x"]).float())
                targets.append(batch["y"])
                ids.append(batch["id"])
    finally:
        for module, mode in modes:
            module.training = mode
    z, y, rows = (torch.cat(parts).cpu().clone() for parts in (outputs, targets, ids))
    return Evaluation(task.loss(z, y).item(), task.metric(z, y), len(y), z, y, rows)


# ---- fit --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class FitSettings:
    num_epochs: int
    monitor: str = "validation"  # or "train": what early stopping and `best` watch
    patience_epochs: int | None = None  # None: never stop early
    min_delta: float = 0.0  # an improvement smaller than this is none
    smoothing: float = 0.6  # weight of the past in the watched curve
    clip_norm: float | None = None
    precision: str = "fp32"
    accumulate: int = 1

    def __post_init__(self) -> None:
        if self.monitor not in ("train", "validation"):
            raise ValueError(f"monitor={self.monitor!r} is neither 'train' nor 'validation'.")


class NothingToTrain(ValueError):
    """A run of 0 steps would leave an untrained network that looks like a trained one."""


class Patience:
    """Early stopping on a loss with its noise averaged out: value = smoothing * past + the rest.

    An epoch is better if it lowers the smoothed loss by more than `min_delta`.
    """

    def __init__(self, settings: FitSettings):
        self.settings, self.value, self.best, self.waited = settings, None, math.inf, 0

    def ends_with(self, loss: float) -> bool:
        settings, past = self.settings, loss if self.value is None else self.value
        self.value = settings.smoothing * past + (1 - settings.smoothing) * loss
        better = self.value < self.best - settings.min_delta
        self.best, self.waited = (self.value, 0) if better else (self.best, self.waited + 1)
        return settings.patience_epochs is not None and self.waited >= settings.patience_epochs


def fit(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    train: Any,
    validation: Any,
    task: Any,
    settings: FitSettings,
    *,
    evaluate_task: Any = None,
    scheduler: Any = None,
    folder: Path | None = None,
    on_epoch: Iterable[Callable[[dict], None]] = (),
    announce: bool = True,
) -> FitResult:
    """Train until the watched curve stops falling. Both losses are measured on whole splits with
    `evaluate_task` (the task without label smoothing; default: `task`).

    Writes history.jsonl and best.safetensors + best.json into `folder`; `on_epoch` are told each
    epoch's row. Raises NothingToTrain for 0 steps, NonFiniteLoss with the step it happened at.
    """
    if settings.num_epochs * len(train) <= 0:
        raise NothingToTrain(
            f"Nothing to train: {settings.num_epochs} epochs of {len(train)} batches are 0 steps. "
            "Raise num_epochs, or look at the split (python run.py stage=data_audit)."
        )
    if announce:
        print(tracking.plan(model, optimizer, train, settings), flush=True)
    watched = f"{settings.monitor}_loss"
    judge, patience, started = evaluate_task or task, Patience(settings), time.perf_counter()
    recorder = StepRecorder(model, optimizer, FETCH_EVERY_STEPS)
    result = FitResult(stopped=f"all {settings.num_epochs} epochs done", steps=recorder.rows)
    step = bind_step(model, optimizer, task, settings, scheduler)
    with (
        tracking.history(folder, result.steps, result.epochs) as write,
        tracking.progress(settings.num_epochs) as show,
    ):
        for epoch in range(1, settings.num_epochs + 1):
            model.train()
            train_epoch(step, train, recorder)
            row = _measure(model, train, validation, judge, settings, epoch, recorder)
            row["time_s"] = round(time.perf_counter() - started, 3)
            result.epochs.append(row)
            result.num_steps, result.num_epochs = recorder.step, epoch
            write()
            show(row)
            _keep_best(result, row, watched, model, folder)
            for tell in on_epoch:
                tell(row)
            if patience.ends_with(row[watched]):
                why = f"no better smoothed {settings.monitor} loss for {patience.waited} epochs"
                result.stopped = why
                break
    return result


def bind_step(model, optimizer, task, settings: FitSettings, scheduler=None) -> Callable:
    """`train_step` as these settings ask for it: batch -> StepOutput."""
    return partial(
        train_step,
        model,
        optimizer,
        loss_fn=task.loss,
        clip_norm=settings.clip_norm,
        scheduler=scheduler,
        precision=settings.precision,
        accumulate=settings.accumulate,
    )


def train_epoch(step: Callable, train: Any, recorder: StepRecorder) -> None:
    """One pass over `train`. NonFiniteLoss names the step."""
    for batch in train:
        recorder.before()
        try:
            output = step(batch)
        except NonFiniteLoss as error:
            raise NonFiniteLoss(f"{error} at step {recorder.step + 1}") from None
        recorder.after(output)


def _measure(model, train, validation, task, settings, epoch, recorder) -> dict:
    """The row of one epoch, all finite. The training split is scored only where it is watched."""
    row = {"epoch": epoch, "step": recorder.step, "running_train_loss": recorder.epoch_loss()}
    if settings.monitor == "train":
        device = next(model.parameters()).device
        plain = Loader(train.rows, max(train.batch_size, 256), device=device)
        row["train_loss"] = evaluate(model, plain, task, precision=settings.precision).loss
    found = evaluate(model, validation, task, precision=settings.precision)
    row["validation_loss"], row[f"validation_{task.metric_name}"] = found.loss, found.metric
    return finite(row)


def _keep_best(result: FitResult, row: dict, watched: str, model, folder) -> None:
    better = row[watched] < result.best_loss
    better_validation = row["validation_loss"] < result.best_validation_loss
    state = cpu_state(model) if better or better_validation else {}
    if better_validation:
        result.best_validation_loss = row["validation_loss"]
        result.best_validation_epoch, result.best_validation_state = row["epoch"], state
    if better:
        result.best_loss, result.best_epoch, result.best_state = row[watched], row["epoch"], state
        if folder is not None:
            save_checkpoint(folder / "best.safetensors", state, row)
