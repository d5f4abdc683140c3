"""A dry run of the project's own loop on a few rows: what it does at each step, read as it goes."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.optim import lr_scheduler

from ..loop import take
from . import Pipeline, probe

KINDS = (lr_scheduler.LRScheduler, lr_scheduler.ReduceLROnPlateau)


@dataclass
class Trace:
    """What a dry run did: rates as shares of the base rate, one row per optimizer step."""

    num_epochs: int
    asked: int = 0  # batches in an epoch
    shares: list[list[float]] = field(default_factory=list)  # [step][group]
    epochs: list[int] = field(default_factory=list)  # of each step, from 1
    off: list[bool] = field(default_factory=list)  # a module is in another mode than in training
    taken: list[int] = field(default_factory=list)  # batches handed out in each epoch
    schedulers: list[Any] = field(default_factory=list)
    result: Any = None

    @property
    def first(self) -> list[float]:
        return [row[0] for row in self.shares]

    @property
    def by_epoch(self) -> list[list[float]]:
        """The first group's shares, epoch by epoch."""
        return [
            [share for share, epoch in zip(self.first, self.epochs, strict=True) if epoch == e]
            for e in sorted(set(self.epochs))
        ]

    @property
    def ended_early(self) -> bool:
        return len(self.taken) < self.num_epochs


class Counted:
    """A loader that tells how many batches it handed out in each epoch, and calls `at_start`."""

    def __init__(self, loader: Any, at_start: Any = None):
        self.loader, self.at_start = loader, at_start
        self.taken: list[int] = []

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[dict]:
        self.taken.append(0)
        if self.at_start is not None:
            self.at_start()
        for batch in self.loader:
            self.taken[-1] += 1
            yield batch

    def __getattr__(self, name: str) -> Any:
        if name == "loader":
            raise AttributeError(name)
        return getattr(self.loader, name)


def small(pipeline: Pipeline, num_batches: int) -> tuple[Any, Any]:
    """Copies of the project's loaders: so many batches, of a few rows each; validation alike."""
    size = max(8, 4 * pipeline.accumulate)  # two rows and more in each part, for BatchNorm
    rows = probe.few_rows(pipeline.train, size * num_batches)
    index = torch.arange(min(size * num_batches, len(rows["y"])), device=rows["y"].device)
    train = probe.rebatch(pipeline.train, rows=take(rows, index), batch_size=size)
    return train, probe.few(pipeline.validation, 64)


def dry_run(pipeline: Pipeline, num_epochs: int, num_batches: int) -> Trace:
    """`fit` with every gradient set to zero at the step: rates and modes are the real ones, and
    nothing can diverge."""
    rows, validation = small(pipeline, num_batches)
    train, trace = Counted(rows), Trace(num_epochs, len(rows))
    with schedulers_built() as trace.schedulers:
        model = pipeline.make_model(0).train()
        expected = {path: module.training for path, module in model.named_modules()}
        optimizer = pipeline.make_optimizer(model)
        base = [max(g["lr"], g.get("initial_lr", 0.0)) for g in optimizer.param_groups]

        def before_step(*_: Any) -> None:
            groups = optimizer.param_groups
            rates = [float(group["lr"]) for group in groups]
            trace.shares.append([r / b if b else 0.0 for r, b in zip(rates, base, strict=False)])
            trace.epochs.append(len(train.taken))
            trace.off.append(any(m.training != expected.get(k) for k, m in model.named_modules()))
            for parameter in (p for group in groups for p in group["params"]):
                if parameter.grad is not None:
                    parameter.grad.zero_()

        handle = optimizer.register_step_pre_hook(before_step)
        try:
            trace.result = pipeline.fit(model, optimizer, train, validation, num_epochs)
        finally:
            handle.remove()
    trace.taken = train.taken
    return trace


@contextlib.contextmanager
def schedulers_built() -> Iterator[list[Any]]:
    """Every torch scheduler that is built inside."""
    made: list[Any] = []
    own = {kind: kind.__init__ for kind in KINDS}

    def recording(init: Any) -> Any:
        @functools.wraps(init)
        def wrapped(self: Any, *args: Any, **options: Any) -> None:
            made.append(self)
            init(self, *args, **options)

        return wrapped

    for kind, init in own.items():
        kind.__init__ = recording(init)
    try:
        yield made
    finally:
        for kind, init in own.items():
            kind.__init__ = init
