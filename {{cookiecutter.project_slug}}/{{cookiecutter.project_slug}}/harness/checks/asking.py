"""Known outputs in the place of the model's: what to ask a loss, and asking it through the step."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch.nn import functional as F

from ..loop import take
from . import Pipeline, answers, layout, probe
from .answers import FAR

MAX_VALUES = 4_000_000  # outputs asked about at once


@dataclass(frozen=True)
class Answer:
    loss: float
    gradient: torch.Tensor  # of the loss with respect to the given outputs, same shape


Ask = Callable[..., Answer]


@dataclass(frozen=True)
class Known:
    """Targets, and outputs of which it is known what they should cost."""

    y: torch.Tensor  # every class equally often; of real targets some of the training split's
    prior: np.ndarray  # of `y`
    labels: list[int]  # the classes in `y`, in its order
    nothing: torch.Tensor  # outputs without opinion
    mixed: tuple[torch.Tensor, torch.Tensor]  # outputs and targets, each output with every target
    wrong: Callable[[float], torch.Tensor]  # outputs that are wrong by so much
    easy: torch.Tensor  # outputs that are equally right in every row
    hard: torch.Tensor  # outputs that are equally wrong in every row
    positions: tuple[int, ...] = ()  # targets of one row


def asker(pipeline: Pipeline) -> Ask:
    """(outputs, y, length=None) -> the loss of the project's step on them, and its gradient.

    The weights stay as they are, so that a penalty on them is the same in every answer. Outputs
    take the form of the model's where both differ by axes of one entry only. `length` cuts rows.
    """
    model = pipeline.make_model(0)
    optimizer = pipeline.make_optimizer(model)
    probe.set_rate(optimizer, 0.0)
    rows = _fullest(pipeline, 64)

    def ask(outputs: torch.Tensor, y: torch.Tensor, length: int | None = None) -> Answer:
        given = outputs.to(pipeline.device, torch.float32).clone().requires_grad_()
        index = torch.arange(len(y), device=pipeline.device) % len(rows["y"])
        batch = {**take(rows, index), "y": y}
        if length is not None:
            cut = {name: x[:, :length] for name, x in probe.tensors(batch["x"]).items()}
            batch["x"] = probe.like(batch["x"], cut)
        start = 0

        def instead(made: torch.Tensor, call: int) -> torch.Tensor:
            nonlocal start
            start += len(made)
            part = given[start - len(made) : start]
            return part.reshape(made.shape) if _same(part, made) else part

        with probe.seam(model, replace=instead, inputs=False), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of broadcasts: their cost is what is measured
            loss = pipeline.train_step(model, optimizer, batch).loss.item()
        gradient = torch.zeros_like(given) if given.grad is None else given.grad
        return Answer(loss, gradient)

    return ask


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return [n for n in a.shape if n != 1] == [n for n in b.shape if n != 1]


def _fullest(pipeline: Pipeline, num_rows: int) -> dict:
    """Rows with the most targets that count: the step may look for padding in the inputs."""
    rows = probe.few_rows(pipeline.train, 512)
    if pipeline.task.targets not in layout.CLASSES or rows["y"].ndim == 1:
        return probe.few_rows(pipeline.train, num_rows)
    counts = layout.supervised(pipeline.task, rows["y"]).flatten(1).sum(dim=1)
    return take(rows, counts.argsort(descending=True, stable=True)[:num_rows])


def in_place(task: Any, known: Known) -> bool:
    """Whether an output stands where its target does (a loss may shift them against each other)."""
    if task.targets not in layout.CLASSES:
        return True
    ideal = layout.flat_outputs(task, answers.right(task, known.y, FAR))
    return bool((ideal.argmax(dim=1) == known.y.flatten()).double().mean() > 0.999)


@dataclass(frozen=True)
class Given:
    """What every clause gets. `penalty` is a part of the loss that no output can change."""

    task: Any
    ask: Ask
    known: Known
    best: float  # the optimum of the loss
    flat: float | None  # the loss of outputs without opinion, if the task says it
    penalty: float = 0.0

    def loss(self, outputs: torch.Tensor, y: torch.Tensor, **cut: Any) -> float:
        return self.ask(outputs, y, **cut).loss - self.penalty

    def ideal(self) -> torch.Tensor:
        return answers.right(self.task, self.known.y, FAR)

    def scale(self) -> float:
        """From the optimum to no opinion: the unit in which losses are compared."""
        if self.flat is not None and self.flat > self.best:
            return self.flat - self.best
        return abs(self.loss(self.known.hard, self.known.y) - self.best) or 1.0

    def share(self, loss: float) -> float:
        return (loss - self.best) / self.scale()

    def where(self, outputs: torch.Tensor, y: torch.Tensor, loss: float) -> str:
        """Which side of the seam is to blame: the loss called alone gives the same, or not."""
        alone = self.task.loss(outputs.to(y.device), y).item()
        return "task.loss" if math.isclose(alone, loss, rel_tol=1e-3, abs_tol=1e-4) else "the step"


def given_of(pipeline: Pipeline) -> Given:
    task, ask, asked = pipeline.task, asker(pipeline), known(pipeline)
    flat = task.flat_loss(asked.prior) if hasattr(task, "flat_loss") else None
    given = Given(task, ask, asked, task.optimum_loss(), flat)
    return replace(given, penalty=_penalty(given))


def _penalty(given: Given) -> float:
    """What the loss is above its declared value on three different outputs, if that is the same
    for all: a penalty on the weights, which changes no output's gradient."""
    if given.flat is None or not hasattr(given.task, "expected_loss"):
        return 0.0
    outputs, y = given.known.mixed
    declared = [
        (given.ideal(), given.known.y, given.best),
        (given.known.nothing, given.known.y, given.flat),
    ]
    declared.append((outputs, y, declared_loss(given.task, outputs, y)))
    gaps = [given.ask(z, targets).loss - value for z, targets, value in declared]
    same = max(gaps) - min(gaps) <= 1e-3 * abs(given.flat - given.best)
    return sum(gaps) / len(gaps) if same and min(gaps) > 0 else 0.0


def declared_loss(task: Any, outputs: torch.Tensor, y: torch.Tensor) -> float:
    """The task's formula where every output meets every target."""
    if task.targets == "real":
        return layout.expected_loss(task, outputs.cpu(), y.cpu())
    return task.expected_loss(outputs.cpu(), layout.exact_prior(task, y))


# ---- what to ask, by kind of target -------------------------------------------------------------


def known(pipeline: Pipeline) -> Known:
    task = pipeline.task
    if task.targets == "multilabel":
        return _multilabel(task, pipeline.device)
    if task.targets == "real":
        return _real(task, probe.few_rows(pipeline.train, 64)["y"])
    return _classes(task, probe.few_rows(pipeline.train, 512)["y"])


def _classes(task: Any, y: torch.Tensor) -> Known:
    """Every class equally often, over rows as long as the project's."""
    n, positions = task.num_outputs, tuple(y.shape[1:])
    labels, per_row = _labels(task, y), y[0].numel()
    copies = max(1, 64 // len(labels)) if not positions else 1
    num_rows = max(2, min(len(labels) * copies, MAX_VALUES // (per_row * n)))
    targets = torch.tensor(labels, device=y.device)
    targets = targets.repeat(-(-num_rows * per_row // len(labels)))[: num_rows * per_row]
    generator = torch.Generator().manual_seed(0)
    groups = torch.randn(-(-len(targets) // len(labels)), n, generator=generator).mul(3)
    mixed = groups.to(y.device).repeat_interleave(len(labels), dim=0)[: len(targets)]
    following = targets.roll(-1)  # the next class in the list is never the same

    def put(flat: torch.Tensor) -> torch.Tensor:
        return layout.shaped(task, flat, positions)

    right = F.one_hot(targets, n).float()
    shaped_y = targets.reshape(-1, *positions)
    return Known(
        y=shaped_y,
        prior=(torch.bincount(targets, minlength=n).double() / len(targets)).cpu().numpy(),
        labels=labels,
        nothing=put(torch.zeros_like(right)),
        mixed=(put(mixed), shaped_y),
        wrong=lambda scale: put(F.one_hot(following, n).float() * FAR * scale),
        easy=put(right * 2),
        hard=put(-right),
        positions=positions,
    )


def _labels(task: Any, y: torch.Tensor) -> list[int]:
    """All classes; of tokens those that occur as targets, the most frequent 64."""
    ignored = getattr(task, "ignore_index", None)
    if task.targets != "tokens":
        return [c for c in range(task.num_outputs) if c != ignored]
    unasked = {ignored, getattr(task, "pad_id", None)} - {getattr(task, "end_id", None)}
    counts = torch.bincount(y[layout.supervised(task, y)].cpu(), minlength=task.num_outputs)
    order = [int(c) for c in counts.argsort(descending=True, stable=True) if counts[c] > 0]
    return sorted([c for c in order if c not in unasked and c != ignored][:64])


def _multilabel(task: Any, device: torch.device) -> Known:
    """Random sets of labels and their complements: each label in half of the rows."""
    n, generator = task.num_outputs, torch.Generator().manual_seed(0)
    half = (torch.rand(32, n, generator=generator) < 0.5).float()
    y = torch.cat([half, 1 - half]).to(device)
    outputs = torch.randn(32, n, generator=generator).mul(3).repeat(2, 1).to(device)
    sign = 2 * y - 1
    return Known(
        y=y,
        prior=np.full(n, 0.5),
        labels=list(range(n)),
        nothing=torch.zeros_like(y),
        mixed=(outputs, y),
        wrong=lambda scale: -sign * FAR * scale,
        easy=sign * 2,
        hard=-sign,
    )


def _real(task: Any, y: torch.Tensor) -> Known:
    """Targets of the training split; errors in units of their standard deviation."""
    y = y.float()
    sd = y.std().item() if len(y) > 1 and y.std() > 0 else 1.0
    every = y[:16]
    generator = torch.Generator().manual_seed(0)
    outputs = y.mean() + 2 * sd * torch.randn(8, *y.shape[1:], generator=generator).to(y.device)
    sign = torch.where(torch.arange(len(y), device=y.device) % 2 == 0, 1.0, -1.0)
    sign = sign.reshape(-1, *[1] * (y.ndim - 1)) * sd
    prior = task.prior(y) if hasattr(task, "prior") else np.array([y.mean().item(), sd**2])
    made = getattr(task, "constant_outputs", None)
    constant = torch.full_like(y, y.mean().item()) if made is None else made(prior, len(y))
    return Known(
        y=y,
        prior=prior,
        labels=[],
        nothing=_like_targets(constant.to(y.device), y),
        mixed=(outputs.repeat_interleave(len(every), dim=0), every.repeat(8, *[1] * (y.ndim - 1))),
        wrong=lambda scale: y + sign * scale,
        easy=y + sign * 0.3,
        hard=y + sign * 2,
    )


def _like_targets(outputs: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Constant outputs in the shape of the targets, one for all columns where there is but one."""
    return outputs.reshape(len(y), -1).expand(-1, y[0].numel()).reshape(y.shape)
