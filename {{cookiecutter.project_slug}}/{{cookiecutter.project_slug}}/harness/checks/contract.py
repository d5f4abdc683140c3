"""The loss on outputs whose loss is known: through the project's own step, seam by seam."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch

from . import Check, Finding, Pipeline, layout, outputs_made, probe, shut_if_any
from .answers import FAR
from .asking import Given, declared_loss, given_of
from .errors import errors
from .ignored import ignored_targets
from .pulls import class_pulls


def loss_contract(
    pipeline: Pipeline,
    *,
    max_optimum_share: float = 0.01,
    max_relative_gap: float = 0.01,
    max_class_ratio: float = 1.05,
    num_models: int = 5,
) -> Check:
    """Chosen outputs are put in the place of the model's while the project's own step runs.

    Right answers reach the optimum of the loss (of logits also when all are negative), no opinion
    costs the reference, any other outputs what the task's formula says, a doubled batch (and twice
    as long rows) the same; a batch costs the mean of its rows where the task's `loss_per_row` says
    so; no class or label counts more than declared (`class_weights`, `pos_weight`, or the formula),
    errors cost more the larger they are and keep a gradient; ignored targets have no influence and
    all others do; and the model's own rows are neither probabilities nor all >= 0 (of real outputs:
    not all >= 0 where targets are negative). Any loss that the task declares is a right one.
    Outputs enter as float32, so the limits hold in fp32 and bf16.
    """
    name = "loss_contract"
    needed = ("loss", "ideal_outputs", "optimum_loss")
    if getattr(pipeline.task, "targets", None) != "real":
        needed = (*needed, "flat_loss", "expected_loss")
    missing = probe.lacking(name, pipeline, targets=layout.KINDS, task=needed)
    if missing:
        return missing
    if pipeline.task.targets != "real" and pipeline.task.num_outputs < _fewest(pipeline.task):
        because = "the task has one class of its own: the softmax of one output is always 1"
        causes = ("two classes need two outputs, or targets that are multilabel",)
        return Check(name, "shut", 1.0, 2.0, "", because + ".", causes)
    given = given_of(pipeline)
    value = given.share(given.loss(given.ideal(), given.known.y))
    found = [
        *_nothing(given, max_relative_gap),
        *_optimum(given, max_optimum_share),
        *_formula(given, max_relative_gap),
        *_doubled(given, max_relative_gap),
        *_rows_apart(given, max_relative_gap),
        *class_pulls(given, max_class_ratio),
        *errors(given),
        *ignored_targets(pipeline, given, max_relative_gap),
        *outputs_made.findings(pipeline, num_models),
    ]
    cost = "" if given.flat is None else f", no opinion {given.flat:.4g}"
    because = (
        f"Right answers cost {value * given.scale():.3g} above the optimum{cost}, each class and "
        "a doubled batch count as declared, outputs are as the loss wants them."
    )
    return shut_if_any(found, Check(name, "open", value, max_optimum_share, "", because))


def _fewest(task: Any) -> int:
    return 2 if task.targets in layout.CLASSES else 1


# ---- one clause each ----------------------------------------------------------------------------


def _nothing(given: Given, limit: float) -> Iterator[Finding]:
    """Outputs without opinion cost the reference, and have a gradient that is a number."""
    answer = given.ask(given.known.nothing, given.known.y)
    if not answer.gradient.isfinite().all():
        causes = ("the root, the log or the norm of zero in the loss",)
        yield Finding(None, None, "equal outputs have a gradient that is no number", causes)
    loss, flat, n = answer.loss - given.penalty, given.flat, given.task.num_outputs
    if flat is None or abs(loss / flat - 1) <= limit:
        return
    summed, num_rows = _summed(given, loss), len(given.known.y)
    causes = [
        (summed is not None, f"the loss is summed over {summed}, not averaged"),
        (abs(loss / flat * n - 1) < 0.05, "the mean also runs over the classes"),
        (
            given.task.targets in layout.CLASSES and abs(loss / math.log(num_rows) - 1) < 0.05,
            "softmax runs over the batch axis",
        ),
        (abs(loss + flat) < 0.05 * flat, "the sign of the loss is flipped"),
        (abs(loss) < 0.01 * flat, "NLL is taken of raw logits"),
        (
            given.task.targets != "multilabel" and abs(loss - math.log(2)) < 0.01,
            "a binary loss stands where classes exclude each other",
        ),
        (
            given.task.targets == "multilabel"
            and n > 1
            and abs(loss / (n / 2 * math.log(n)) - 1) < 0.01,
            "a softmax loss stands where labels do not exclude each other",
        ),
        (given.task.targets == "real", "outputs and targets broadcast, or another loss or factor"),
        (True, "another loss, a weight or a factor than the task declares"),
    ]
    cause = next(text for holds, text in causes if holds)
    where = given.where(given.known.nothing, given.known.y, loss)
    yield Finding(
        loss / flat,
        [1 - limit, 1 + limit],
        f"outputs without opinion cost {loss:.4g} instead of {flat:.4g}",
        (f"{cause} (in {where})",),
    )


def _summed(given: Given, loss: float) -> str | None:
    """Over what, if the loss is as many times too high as there are of it."""
    y = given.known.y
    counts = {"rows": len(y), "the targets of a row": y[0].numel(), "targets": y.numel()}
    off = {name: abs(loss / given.flat / n - 1) for name, n in counts.items() if n > 1}
    nearest = min(off, key=off.get)
    return nearest if off[nearest] < 0.05 else None


def _optimum(given: Given, limit: float) -> Iterator[Finding]:
    """Right answers reach the optimum, also with every logit negative where the formula says that
    a shift of a row does not matter."""
    ideal, y, task = given.ideal(), given.known.y, given.task
    forms = [(ideal, "right answers")]
    if _shift_is_free(given, ideal):
        forms.append((ideal - 2 * FAR, "right answers with negative logits"))
    for outputs, form in forms:
        loss = given.loss(outputs, y)
        share = given.share(loss)
        if abs(share) <= limit:
            continue
        causes = [
            (loss < given.best - 1e-3, "the sign is flipped, or NLL is taken of raw logits"),
            (_squashed(task, loss), "a softmax or sigmoid stands before the loss"),
            (task.targets == "real" and _broadcasts(given, loss), "outputs and targets broadcast"),
            (task.targets == "real", "targets or outputs are scaled or cut before the loss"),
            (_rectified(task, loss), "a ReLU stands between the model and the loss"),
            (loss > FAR / 4, "labels are changed or reordered before the loss"),
            (outputs is not ideal, "a ReLU stands between the model and the loss"),
            (True, "a softmax, a scale or another class order before the loss"),
        ]
        because = f"{form} cost {loss:.4g} instead of {given.best:.4g}"
        cause = next(text for holds, text in causes if holds)
        yield Finding(share, limit, because, (f"{cause} (in {given.where(outputs, y, loss)})",))
        return


def _shift_is_free(given: Given, ideal: torch.Tensor) -> bool:
    if given.task.targets not in layout.CLASSES:
        return False
    costs = [given.task.expected_loss(z.cpu(), given.known.prior) for z in (ideal, ideal - 2 * FAR)]
    return math.isclose(*costs, rel_tol=1e-6)


def _squashed(task: Any, loss: float) -> bool:
    """The loss of right answers behind a softmax or sigmoid."""
    n = task.num_outputs
    if task.targets == "multilabel":  # half of the labels are present
        values = [(math.log1p(math.exp(-1)) + math.log(2)) / 2]
    else:
        values = [math.log(math.e + n - 1) - 1, math.log(math.e + (n - 1) * math.e**0.5) - 1]
    return any(math.isclose(loss, value, rel_tol=0.02) for value in values)


def _rectified(task: Any, loss: float) -> bool:
    return task.targets == "multilabel" and math.isclose(loss, math.log(2) / 2, rel_tol=0.02)


def _broadcasts(given: Given, loss: float) -> bool:
    """Every output against every target costs twice the variance in squares."""
    y = given.known.y
    pairs = given.task.loss(
        y.reshape(-1, 1, *y.shape[1:]).expand(-1, *y.shape), y.expand(len(y), *y.shape)
    )
    return math.isclose(loss, pairs.item(), rel_tol=0.02)


def _formula(given: Given, limit: float) -> Iterator[Finding]:
    """The same random outputs with every target once: the mean is exactly the task's formula."""
    if not hasattr(given.task, "expected_loss"):
        return
    outputs, y = given.known.mixed
    expected = declared_loss(given.task, outputs, y)
    loss = given.loss(outputs, y)
    if not abs(loss / expected - 1) <= limit:
        because = f"known outputs cost {loss:.4g} instead of {expected:.4g}"
        where = given.where(outputs, y, loss)
        causes = (f"the loss differs from the one the task declares (in {where})",)
        yield Finding(loss / expected, [1 - limit, 1 + limit], because, causes)


def _doubled(given: Given, limit: float) -> Iterator[Finding]:
    """Every row twice; and rows twice as long with the same in both halves, where a step takes
    shorter rows."""
    outputs, y = given.known.mixed
    once, twice = given.loss(outputs, y), given.loss(torch.cat([outputs] * 2), torch.cat([y] * 2))
    if abs(twice - once) > limit * abs(once):
        because = f"every row twice costs {twice:.4g} instead of {once:.4g}"
        causes = ("the loss is summed over rows", "the loss runs over the batch axis")
        yield Finding(twice / once, [1 - limit, 1 + limit], because, causes)
    half = y.shape[1] // 2 if given.task.targets == "tokens" else 0
    if half < 2:
        return
    outputs, y = outputs[:, :half], y[:, :half]
    try:
        once = given.loss(outputs, y, length=half)
    except (RuntimeError, ValueError, IndexError):
        return  # the model takes rows of one length only
    twice = given.loss(torch.cat([outputs] * 2, dim=1), torch.cat([y] * 2, dim=1), length=2 * half)
    if abs(twice - once) > limit * abs(once):
        because = f"rows twice as long cost {twice:.4g} instead of {once:.4g}"
        causes = ("the loss is summed over the length", "the softmax runs over the length")
        yield Finding(twice / once, [1 - limit, 1 + limit], because, causes)


def _rows_apart(given: Given, limit: float) -> Iterator[Finding]:
    """A batch of easy and hard rows costs the mean of both halves, if `loss_per_row` describes the
    loss of each half (up to one factor: weights)."""
    if not hasattr(given.task, "loss_per_row"):
        return
    y = given.known.y
    parts = [(given.known.easy, y), (given.known.hard, y)]
    losses = [given.loss(z, targets) for z, targets in parts]
    ratios = [
        loss / given.task.loss_per_row(z, targets).double().mean().item()
        for loss, (z, targets) in zip(losses, parts, strict=True)
    ]
    if not math.isclose(*ratios, rel_tol=limit):
        return
    mean = sum(losses) / 2
    loss = given.loss(torch.cat([z for z, _ in parts]), torch.cat([y, y]))
    if not abs(loss - mean) <= limit * abs(mean):
        because = f"easy and hard rows together cost {loss:.4g}, apart {mean:.4g} on average"
        causes = ("a factor or power is taken of the mean over the batch, not of each row",)
        yield Finding(loss / mean, [1 - limit, 1 + limit], because, causes)
