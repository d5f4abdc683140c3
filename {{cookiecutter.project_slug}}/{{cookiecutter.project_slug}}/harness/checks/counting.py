"""Does the metric count right? On answers whose score is known, without any model."""

from __future__ import annotations

import itertools
import math
import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from . import Finding, answers, layout

WRONG = (0.0, 0.1, 0.5, 1.0)  # shares of wrong answers
SMALL, CLEAR = 0.2, 3.0  # raw scores: right, but far from certain; right and nearly certain
# Functions of scikit-learn that read scores where others read answers.
SCORED = ("roc_auc_score", "average_precision_score", "label_ranking_average_precision_score")
OF_ERRORS = {
    "rmse": "root_mean_squared_error",
    "mae": "mean_absolute_error",
    "mse": "mean_squared_error",
}


def known_answers(task: Any, y: torch.Tensor, limit: float) -> Iterator[Finding]:
    """What is wrong with the metric of `task`, on answers to the labels `y`."""
    scores = [score(task, answers.corrupted(task, y, share), y) for share in WRONG]
    best, worst = _ends(task)
    if not close(scores[0], best, limit):
        yield _not_best(task, y, scores[0], best, worst, limit)
    elif math.isfinite(best):
        yield from _small_margins(task, y, best, limit)
    yield from _falls(task, y, scores, worst, limit)
    yield from _as_scikit_learn(task, y, limit)
    yield from _constant(task, y, limit)
    if math.isfinite(scores[2]):
        yield from _order(task, y, scores[2], limit)
        yield from _ignored(task, y, scores[2], limit)
        yield from _joined_tags(task, y, limit)


def score(task: Any, outputs: torch.Tensor, y: torch.Tensor) -> float:
    """NaN when the metric raises: it cannot count, whatever the reason."""
    try:
        return float(task.metric(outputs, y))
    except (RuntimeError, ValueError, IndexError, TypeError, ZeroDivisionError):
        return math.nan


def close(value: float, other: float, limit: float) -> bool:
    """Within `limit`, relative to values above 1; False for NaN."""
    return value == other or abs(value - other) <= limit * max(1.0, abs(other))


def _ends(task: Any) -> tuple[float, float]:
    """The best and the worst value."""
    low, high = task.metric_bounds
    return (high, low) if task.metric_direction == "max" else (low, high)


def _not_best(
    task: Any, y: torch.Tensor, found: float, best: float, worst: float, limit: float
) -> Finding:
    because = f"right answers score {found:.4g} instead of {best:.4g}"
    causes = ("argmax over the wrong axis", "another class map")
    if task.targets == "multilabel":
        causes = ("labels are read with another threshold", "labels in another order")
        counts = y.sum(dim=1)
        once = y[counts == 1]
        if len(once) and close(score(task, answers.right(task, once), once), best, limit):
            because += f", but {best:.4g} on rows with exactly one label"
            causes = ("a softmax across labels that do not exclude each other", *causes)
    elif task.targets == "real":
        causes = ("outputs and targets are compared in different units", "another target column")
    if close(found, worst, limit):
        causes = ("a score or threshold is inverted", *causes)
    return Finding(found, best, because, causes)


def _small_margins(task: Any, y: torch.Tensor, best: float, limit: float) -> Iterator[Finding]:
    """Answers that are right by little are right. A metric of probabilities (log loss) already
    differs where they are nearly certain, and is left alone; so is a cut the task declares."""
    if task.targets == "real" or getattr(task, "threshold", None) is not None:
        return
    try:
        sure, clear, small = (_by(task, y, scale) for scale in (None, CLEAR, SMALL))
    except TypeError:  # right answers come at one scale only
        return
    if close(clear, sure, limit) and close(sure, best, limit) and not close(small, best, limit):
        because = f"right answers score {small:.4g} when raw scores are {SMALL:g}, not {CLEAR:g}"
        causes = ("a cut for probabilities (0.5) is applied to raw scores", "another threshold")
        yield Finding(small, best, because, causes)


def _by(task: Any, y: torch.Tensor, scale: float | None) -> float:
    """The score of right answers at this scale; of labels only those present are that small, since
    a cut below 0 is a common choice."""
    near = answers.right(task, y, scale)
    if task.targets == "multilabel":
        near = torch.where(y > 0, near, answers.right(task, y))
    return score(task, near, y)


def _falls(
    task: Any, y: torch.Tensor, scores: list[float], worst: float, limit: float
) -> Iterator[Finding]:
    """More wrong answers score less, all wrong ones the worst. Where a row has several answers or
    a number, a tenth of them may change nothing (a median), and the worst may be out of reach."""
    sign = 1 if task.metric_direction == "max" else -1
    drops = [sign * (a - b) for a, b in itertools.pairwise(scores)]
    single, bounded = task.targets == "exclusive", math.isfinite(worst)
    falls = min(drops) > 0 if single else min(drops) >= -limit and sum(drops) > limit
    reached = not bounded or close(scores[-1], worst, limit)
    if not reached and not single and hasattr(task, "chance"):
        reached = sign * (scores[-1] - task.chance(layout.exact_prior(task, y))) <= limit
    if falls and reached:
        return
    listed = ", ".join(f"{score:.3g}" for score in scores)
    because = f"0, 10, 50 and 100 % wrong answers score {listed}"
    yield Finding(scores[-1], worst if bounded else None, because, ("answers are not counted",))


def _constant(task: Any, y: torch.Tensor, limit: float) -> Iterator[Finding]:
    if not hasattr(task, "chance"):
        return
    shares = layout.exact_prior(task, y)
    absent = task.targets != "real" and (shares.min() <= 0 or shares.max() >= 1)
    prior = task.prior(y) if absent else shares
    constant = answers.constant(task, prior, y)
    if task.targets == "exclusive" and getattr(task, "class_weights", None) is not None:
        # Weights move the best constant of the loss, not that of the metric.
        constant = answers.right(task, torch.full_like(y, int(shares.argmax())))
    found, chance = score(task, constant, y), task.chance(shares)
    room = limit
    if task.targets == "real":  # float32, and a variance may divide by N or N - 1
        room = max(limit, 1e-4) + 1 / len(y)
    if close(found, chance, room):
        return
    if absent and getattr(task, "sklearn_metric", None) != "accuracy_score":
        return  # a mean over classes may or may not count those that are absent
    because = f"a constant answer scores {found:.4g} instead of {chance:.4g}"
    causes = ("an averaging other than the one declared", "a wrong chance")
    if task.targets == "real":
        causes = ("the metric is on another scale than declared (normalised or raw)", *causes)
    yield Finding(found, chance, because, causes)


# ---- another implementation ---------------------------------------------------------------------


def reference(task: Any) -> Any:
    """The function of scikit-learn the task names, or None. Where `predict` gives other units than
    the targets have, rmse, mae and mse are known by name."""
    from sklearn import metrics

    name = getattr(task, "sklearn_metric", None)
    if not name and task.targets == "real":
        name = OF_ERRORS.get(str(getattr(task, "metric_name", "")).lower())
        y = torch.linspace(-1.0, 1.0, 8)
        name = None if torch.equal(_read(task, answers.right(task, y)), y) else name
    if name in SCORED and task.targets != "multilabel":
        return None
    return getattr(metrics, name or "", None)


def _as_scikit_learn(task: Any, y: torch.Tensor, limit: float) -> Iterator[Finding]:
    function = reference(task)
    for share in (0.1, 0.5) if function else ():
        outputs = answers.corrupted(task, y, share)
        ours, theirs = score(task, outputs, y), _theirs(task, function, outputs, y)
        if theirs is not None and not close(ours, theirs, limit):
            because = f"it says {ours:.6g} where {function.__name__} says {theirs:.6g}"
            causes = ("an averaging other than the one declared",)
            if task.targets == "real":
                causes = ("the metric is on another scale than its answers", *causes)
            yield Finding(ours, theirs, because, causes)
            return


def _read(task: Any, outputs: torch.Tensor) -> torch.Tensor:
    return task.predict(outputs) if hasattr(task, "predict") else outputs


def _theirs(task: Any, function: Any, outputs: torch.Tensor, y: torch.Tensor) -> float | None:
    """None where scikit-learn cannot take what the task predicts; NaN where `predict` raises."""
    try:
        told = _read(task, outputs) if function.__name__ not in SCORED else outputs
        meant = _read(task, answers.right(task, y)) if task.targets == "real" else y
    except (RuntimeError, ValueError, IndexError):
        return math.nan
    if task.targets == "tokens":
        counted = layout.supervised(task, y)
        told, meant = told[counted], meant[counted]
    options = getattr(task, "sklearn_options", {})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of classes that are predicted and absent
        try:
            return float(function(meant.cpu().numpy(), told.cpu().numpy(), **options))
        except (ValueError, TypeError):
            return None


# ---- what must not matter -----------------------------------------------------------------------


def _order(task: Any, y: torch.Tensor, before: float, limit: float) -> Iterator[Finding]:
    order = torch.from_numpy(np.random.default_rng(0).permutation(len(y))).to(y.device)
    found = score(task, answers.corrupted(task, y, WRONG[2])[order], y[order])
    if not close(found, before, 10 * limit):
        because = f"the same rows in another order score {found:.6g} for {before:.6g}"
        causes = ("the metric pairs neighbouring rows", "the metric takes a part of the rows")
        yield Finding(found, before, because, causes)


def _ignored(task: Any, y: torch.Tensor, before: float, limit: float) -> Iterator[Finding]:
    """Answers where no target is, and padding behind the last one, count for nothing."""
    if task.targets != "tokens" or getattr(task, "ignore_index", None) is None:
        return
    outputs = answers.corrupted(task, y, WRONG[2])
    length = max(2, y.shape[1] // 4)
    more = torch.full_like(y[:, :1], task.ignore_index).expand(-1, length)
    padded = torch.cat([y, more], dim=1)
    for token in (0, outputs.shape[-1] - 1):
        other = answers.right(task, torch.full_like(padded, token))
        other[:, : y.shape[1]][layout.supervised(task, y)] = outputs[layout.supervised(task, y)]
        found = score(task, other, padded)
        if not close(found, before, 10 * limit):
            because = f"with {length} ignored positions more the score is {found:.6g}, "
            because += f"{before:.6g} without them"
            yield Finding(found, before, because, ("ignored positions are counted",))
            return


def _joined_tags(task: Any, y: torch.Tensor, limit: float) -> Iterator[Finding]:
    """Labels that do not exclude each other have no common zero: moving all scores of a row must
    tell. A metric that only ranks the labels within a row does not mind, nor when they are scaled;
    after a softmax across them it minds the second alone."""
    if task.targets != "multilabel" or y.shape[1] < 2:
        return
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(y.shape, generator=generator).to(y.device)
    moved, scaled = torch.rand((2, len(y), 1), generator=generator).to(y.device)
    outputs = answers.right(task, y) / answers.FAR + noise
    before = score(task, outputs, y)
    shifted = score(task, outputs + 8 * (moved - 0.5), y)
    stretched = score(task, outputs * (0.2 + 3 * scaled), y)
    ranks = close(stretched, before, limit)
    if close(shifted, before, limit) and not ranks:
        because = f"raising or lowering all scores of a row leaves {shifted:.4g} as it is"
        causes = ("a softmax across labels that do not exclude each other",)
        yield Finding(shifted, before, because, causes)
