"""What a launch of a planted pipeline amounts to, from the facts alone: no name is special here."""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass

from recipes import REFUSED, Recipe

OPEN, FAILED, SHUT, LOCKED = 0, 1, 3, 4  # exit codes of run.py

# ---- the gate -----------------------------------------------------------------------------------


def outcome(facts: dict) -> str:
    """open | shut | inconclusive | refused (one clear line) | crashed (a traceback) | timeout."""
    if facts["timed_out"]:
        return "timeout"
    if facts["code"] == OPEN:
        return "open"
    if facts["code"] == SHUT:
        return "shut" if shut(facts) else "inconclusive"
    clear = facts["code"] in (FAILED, LOCKED) and facts["message"] and not facts["traceback"]
    return "refused" if clear else "crashed"


def shut(facts: dict, verdict: str = "shut") -> list[str]:
    """Names of the checks with this verdict, in the gate's order."""
    return [check["name"] for check in facts["checks"] if check["verdict"] == verdict]


def first_named(facts: dict) -> str | None:
    """The check that the report tells its reader to repair first; None where none is named."""
    found = outcome(facts)
    if found == "refused":
        return REFUSED
    return facts["repair"] if found in ("shut", "inconclusive") else None


def gate_row(
    recipe: Recipe, facts: dict, audit: dict | None = None, clean: dict | None = None
) -> dict:
    """The row of one pipeline. `audit`: the facts of its own data_audit, if it needed one; `clean`:
    those of the gate of the same pipeline without the fault. A gate that does not open without the
    fault says nothing about the fault, which then counts as not detected.
    """
    found, first = outcome(facts), first_named(facts)
    row = {
        "id": recipe.id,
        "half": recipe.half,
        "outcome": found,
        "first": first,
        "shut": shut(facts),
        "inconclusive": shut(facts, "inconclusive"),
        "because": facts["because"] if found != "open" else "",
        "seconds": facts["seconds"],
        "wall_s": facts["wall_s"],
        "audit": audit and {"outcome": outcome(audit), "shut": shut(audit)},
    }
    if recipe.kind == "healthy":
        return row | {"alarm": found != "open"}
    without = outcome(clean) if clean else "open"
    detected = without == "open" and found in ("shut", "inconclusive", "refused")
    return row | {
        "clean_outcome": without,
        "source": list(recipe.source),
        "stage": recipe.stage,
        "base": recipe.base,
        "failure_mode": recipe.failure_mode,
        "expected": list(recipe.expected),
        "why": recipe.why,
        "detected": detected,
        "named": detected and first in recipe.expected,
    }


# ---- the harm -----------------------------------------------------------------------------------

MIN_METRIC_GAP = 0.01  # of the metric's range: one point of accuracy
MIN_STANDARD_ERRORS = 2.0  # of the difference of the two means
MAX_LOSS_RATIO = 1.5  # faulty over clean, or clean over faulty


@dataclass(frozen=True)
class Harm:
    """What a fault does to the project's own validation figures; means over the seeds."""

    harmful: bool
    direction: str  # none | worse | looks better | diverges | crashes
    clean_metric: float | None
    metric: float | None
    clean_loss: float | None
    loss: float | None


def harm(clean: dict, faulty: dict) -> Harm:
    """Harmful is a fault that moves the validation metric, moves the loss, or ends the training.

    Moved is a metric whose mean differs from the clean one by more than MIN_METRIC_GAP of its range
    and by more than MIN_STANDARD_ERRORS standard errors of that difference; a loss whose mean is
    more than MAX_LOSS_RATIO times the clean one, or less than its inverse. In either direction: a
    validation that looks better than it is misleads as much as one that is worse.
    """
    if faulty.get("crashed"):
        return Harm(True, "crashes", *_means(clean, "metric"), None, *_means(clean, "loss"), None)
    before, after = _values(clean, "metric"), _values(faulty, "metric")
    means = (*_means(clean, "metric"), *_means(faulty, "metric"))
    losses = (*_means(clean, "loss"), *_means(faulty, "loss"))
    if None in (means[1], losses[1]):
        return Harm(True, "diverges", *means, *losses)
    gap = means[1] - means[0]
    error = _standard_error(before, after)
    sign = 1 if clean["direction"] == "max" else -1
    if abs(gap) > max(MIN_METRIC_GAP * _range(clean), MIN_STANDARD_ERRORS * error):
        return Harm(True, "looks better" if sign * gap > 0 else "worse", *means, *losses)
    ratio = losses[1] / losses[0] if losses[0] > 0 else math.inf if losses[1] > 0 else 1.0
    if not 1 / MAX_LOSS_RATIO <= ratio <= MAX_LOSS_RATIO:
        return Harm(True, "worse" if ratio > 1 else "looks better", *means, *losses)
    return Harm(False, "none", *means, *losses)


def _values(found: dict, key: str) -> list[float]:
    return [row[key] for row in found["rows"]]


def _means(found: dict, key: str) -> tuple[float | None]:
    """None if one of the runs has no finite value."""
    values = _values(found, key)
    return (None if None in values else round(statistics.mean(values), 5),)


def _standard_error(one: list[float], other: list[float]) -> float:
    """Of the difference of two means of independent runs."""
    parts = [statistics.variance(v) / len(v) if len(v) > 1 else 0.0 for v in (one, other)]
    return math.sqrt(sum(parts))


def _range(found: dict) -> float:
    """The metric's range; its clean mean where it has none."""
    low, high = (math.inf if bound is None else bound for bound in found["bounds"])
    spread = abs(high - low)
    return spread if math.isfinite(spread) else abs(statistics.mean(_values(found, "metric")))
