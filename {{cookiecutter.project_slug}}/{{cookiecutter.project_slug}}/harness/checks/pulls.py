"""How hard each class or label pulls at the outputs, against what the task declares."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from . import Finding, layout
from .asking import Given


def class_pulls(given: Given, limit: float) -> Iterator[Finding]:
    """At outputs without opinion, each class pulls as hard as declared."""
    task, y, labels = given.task, given.known.y, given.known.labels
    if task.targets == "real":
        return
    gradient = given.ask(given.known.nothing, y).gradient
    if task.targets == "multilabel":
        pull = torch.stack([_mean_where(gradient.abs(), y == side) for side in (1, 0)], dim=1)
    else:
        flat, targets = layout.flat_outputs(task, gradient).norm(dim=1), y.flatten()
        pull = torch.stack([flat[targets == c].mean() for c in labels])[:, None]
    pull = pull.cpu().double()
    if pull.max() == 0:
        causes = ("the outputs are detached before the loss",)
        yield Finding(math.inf, limit, "outputs get no gradient", causes)
        return
    ratio, relative = min((_unevenness(pull / w) for w in _declared(given)), key=lambda r: r[0])
    if ratio <= limit:
        return
    at = int(relative.flatten().argmin()) // pull.shape[1]
    side = ("present ", "absent ")[int(relative[at].argmin())] if pull.shape[1] == 2 else ""
    because = f"{side}{_called(task, labels[at])} pulls {ratio:.3g} times less than another"
    causes = (
        "ignore_index is a real class" if relative.min() == 0 else "undeclared class weights",
        "class weights in another order",
    )
    yield Finding(ratio, limit, because, causes)


def _mean_where(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return (values * mask).sum(dim=0) / mask.sum(dim=0)


def _unevenness(relative: torch.Tensor) -> tuple[float, torch.Tensor]:
    low, high = relative.min().item(), relative.max().item()
    return (high / low if low > 0 else math.inf), relative


def _called(task: Any, label: int) -> str:
    names = getattr(task, "class_names", None)
    return f"class {names[label] if names else label}"


def _declared(given: Given) -> Iterator[torch.Tensor]:
    """What the classes should pull by: the weights the task names; or its own formula."""
    task, labels, n = given.task, given.known.labels, given.task.num_outputs
    weights = _weights(task, "class_weights", n)[labels]
    sides = [weights * _weights(task, "pos_weight", n)[labels], weights]
    yield torch.stack(sides[: 2 if task.targets == "multilabel" else 1], dim=1)
    if len(labels) <= 256:
        yield torch.stack([_slopes(task, c) for c in labels]).clamp(min=1e-12)


def _weights(task: Any, name: str, n: int) -> torch.Tensor:
    declared = getattr(task, name, None)
    weights = torch.ones(n) if declared is None else torch.as_tensor(declared).cpu()
    return weights.double().expand(n)


def _slopes(task: Any, label: int, width: float = 1e-3) -> torch.Tensor:
    """Slope of the task's own formula in the output of one label: where it is the class; of
    independent labels, where it is present and where it is absent."""
    n = task.num_outputs
    bump = torch.zeros(1, n, dtype=torch.float64)
    bump[0, label] = width
    present, absent = np.eye(n)[label], np.zeros(n)
    ends = [layout.single(task, z) for z in (bump, -bump)]
    priors = (present, absent) if task.targets == "multilabel" else (present,)
    slopes = [abs(task.expected_loss(ends[0], p) - task.expected_loss(ends[1], p)) for p in priors]
    return torch.tensor(slopes, dtype=torch.float64) / (2 * width)
