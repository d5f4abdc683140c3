"""Wrong answers: each has a gradient, and the larger the error the more it costs."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch

from ..instruments import NonFiniteLoss
from . import Finding, layout
from .asking import Given, declared_loss, in_place


def errors(given: Given) -> Iterator[Finding]:
    """Every wrong answer has a gradient; and an error costs more the larger it is, unless the task
    declares a loss that is bounded."""
    y, real = given.known.y, given.task.targets == "real"
    still = _without_gradient(given)
    if still > 0 and in_place(given.task, given.known):
        because = f"{still:.3g} of the targets have no gradient where the answers are wrong"
        causes = ("outputs are detached before the loss", "the loss is cut or rounded")
        if still < 1:
            causes = ("some targets are left out of the loss", "the loss is cut or bounded")
        yield Finding(still, 0.0, because, causes)
    start = given.best if real or given.flat is None else given.flat
    outputs = [given.known.wrong(scale) for scale in ((3.0, 10.0) if real else (1.0, 2.0))]
    losses = [given.loss(z, y) for z in outputs]
    growth = (losses[1] - start) / (losses[0] - start) if losses[0] > start else 0.0
    if growth >= 1.5 or _is_declared(given, outputs, losses):
        yield from () if real else _overflow(given)
        return
    larger = "errors of 10 deviations cost" if real else "errors twice as sure cost"
    unit = "those of 3" if real else "the others"
    because = f"{larger} {growth:.3g} times as much as {unit}, above the start"
    causes = ("the loss is clamped or bounded", "a softmax stands before the loss")
    yield Finding(growth, 1.5, because, causes[: 1 if real else 2])


def _overflow(given: Given) -> Iterator[Finding]:
    """Logits 120 apart, where a probability is zero in float32, still cost a number."""
    try:
        loss = given.loss(given.known.wrong(4.0), given.known.y)
    except NonFiniteLoss:
        loss = math.inf
    if not math.isfinite(loss):
        because = "answers that are very sure and wrong cost no number"
        causes = ("the log of a probability that is zero: take log_softmax of the logits",)
        yield Finding(None, None, because, causes)


def _without_gradient(given: Given) -> float:
    """Share of the targets whose outputs have no gradient when they are somewhat wrong."""
    gradient = given.ask(given.known.hard, given.known.y).gradient
    if given.task.targets in layout.CLASSES:
        gradient = layout.flat_outputs(given.task, gradient).norm(dim=1)
    return (gradient == 0).double().mean().item()


def _is_declared(given: Given, outputs: list[torch.Tensor], losses: list[float]) -> bool:
    """Whether the formula says the same of these outputs with exactly their targets."""
    if not hasattr(given.task, "expected_loss"):
        return False
    declared = [_exact(given, z) for z in outputs]
    return all(
        math.isclose(loss, value, rel_tol=0.02, abs_tol=1e-6)
        for loss, value in zip(losses, declared, strict=True)
    )


def _exact(given: Given, outputs: torch.Tensor, num_targets: int = 64) -> float:
    """Mean of the formula over targets one by one, each as if it were the only one there is."""
    task, y, costs = given.task, given.known.y, []
    if task.targets in layout.CLASSES:
        outputs, y = layout.flat_outputs(task, outputs), y.flatten()
    for at in torch.linspace(0, len(y) - 1, min(num_targets, len(y))).long().tolist():
        z, target = layout.single(task, outputs[at : at + 1].cpu()), y[at : at + 1].cpu()
        target = target.reshape(1, *layout.ONE_TARGET.get(task.targets, y.shape[1:]))
        costs.append(declared_loss(task, z, target))
    return sum(costs) / len(costs)
