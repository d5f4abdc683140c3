"""Hard cases: what a mean hides. Candidate against reference, sample by sample.

A negative flip is a row the reference has right and the candidate wrong. A mean can stand still
while dozens of rows flip in both directions; the rows of lowest margin are where they do.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import NormalDist, fmean
from typing import Any

import numpy as np
import torch

MIN_PER_CLASS = 4  # a rare class has few rows near the boundary, and must not be forgotten
# Only a row that the reference has right can flip negatively. Filled by margin alone, half of the
# cases of a 53 % right model could not; taking right ones caught 1.3 to 1.9 times more flips.
MAX_WRONG_SHARE = 0.2


@dataclass(frozen=True)
class Comparison:
    """`rows` are {id, y, reference, candidate, reference_margin, candidate_margin, change}, the
    negative flips first, then by the candidate's margin; `change` is negative, positive or same."""

    num_rows: int
    num_negative: int  # reference right, candidate wrong
    num_positive: int  # reference wrong, candidate right
    mean_margin_change: float  # candidate minus reference, in the task's own unit
    p_value: float  # one-sided: so many negative among the flips, if both directions were as likely
    rows: list[dict]


def suite(
    reference: Any,
    task: Any,
    suspects: set[int],
    *,
    max_cases: int = 200,
    max_share: float = 0.25,
) -> list[dict]:
    """{id, y, margin, correct} of the rows nearest to the reference's decision boundary, by margin.

    `reference` is its Evaluation on validation, `suspects` the ids whose label the audit doubts:
    ranked by margin, wrong labels would come first. At most `max_cases` and `max_share` of the
    rows; up to a fifth are rows the reference has wrong; every class has at least four of the
    right ones while there is room and it has so many.
    """
    rows = [row for row in _margins(reference, task) if row["id"] not in suspects]
    rows.sort(key=lambda row: (abs(row["margin"]), row["id"]))
    room = min(max_cases, math.floor(max_share * reference.num_rows))
    wrong = [row for row in rows if not row["correct"]][: math.floor(MAX_WRONG_SHARE * room)]
    right = [row for row in rows if row["correct"]]
    chosen = wrong + _with_every_class(right, room - len(wrong))
    return sorted(chosen, key=lambda row: (row["margin"], row["id"]))


def _with_every_class(rows: list[dict], room: int) -> list[dict]:
    """The first `room` rows, after the first few of every class."""
    classes = sorted({row["y"] for row in rows})
    least = min(MIN_PER_CLASS, room // max(1, len(classes)))
    first = [row for c in classes for row in [r for r in rows if r["y"] == c][:least]]
    taken = {row["id"] for row in first}
    return first + [row for row in rows if row["id"] not in taken][: room - len(first)]


def _margins(evaluation: Any, task: Any) -> list[dict]:
    margin = task.margin(evaluation.outputs, evaluation.y).tolist()
    correct = task.correct(evaluation.outputs, evaluation.y).tolist()
    parts = zip(evaluation.ids.tolist(), evaluation.y.tolist(), margin, correct, strict=True)
    return [{"id": i, "y": y, "margin": m, "correct": c} for i, y, m, c in parts]


# ---- two models on the same rows ----------------------------------------------------------------


def compare(reference: Any, candidate: Any, cases: list[dict] | None, task: Any) -> Comparison:
    """Row by row on `cases` (a suite), or on all rows with None.

    On a suite the p-value is too small by construction: its rows were chosen where the reference
    is right by little, so that any other model loses some. Hold a candidate to `allowance` there,
    and read the p-value over all rows. Raises ValueError when the two did not see the same rows.
    """
    first, second = _answers(reference, task), _answers(candidate, task)
    ids = sorted(first | second) if cases is None else [case["id"] for case in cases]
    rows = [_pair(row_id, first, second) for row_id in ids]
    order = {"negative": 0, "same": 1, "positive": 1}
    rows.sort(key=lambda row: (order[row["change"]], row["candidate_margin"], row["id"]))
    negative = sum(row["change"] == "negative" for row in rows)
    positive = sum(row["change"] == "positive" for row in rows)
    changes = [row["candidate_margin"] - row["reference_margin"] for row in rows]
    mean = fmean(changes) if changes else 0.0
    return Comparison(len(rows), negative, positive, mean, flip_p_value(negative, positive), rows)


def _answers(evaluation: Any, task: Any) -> dict[int, dict]:
    predicted = task.predict(evaluation.outputs).tolist()
    rows = zip(_margins(evaluation, task), predicted, strict=True)
    return {row["id"]: {**row, "answer": answer} for row, answer in rows}


def _pair(row_id: int, first: dict[int, dict], second: dict[int, dict]) -> dict:
    if row_id not in first or row_id not in second or first[row_id]["y"] != second[row_id]["y"]:
        raise ValueError(
            f"row {row_id} is not the same in both evaluations: evaluate reference and candidate "
            "on the same split of the same data."
        )
    old, new = first[row_id], second[row_id]
    change = "same" if old["correct"] == new["correct"] else "positive"
    return {
        "id": row_id,
        "y": old["y"],
        "reference": old["answer"],
        "candidate": new["answer"],
        "reference_margin": old["margin"],
        "candidate_margin": new["margin"],
        "change": "negative" if old["correct"] and not new["correct"] else change,
    }


def flip_p_value(num_negative: int, num_positive: int) -> float:
    """P(at least so many negative flips) if a flip went either way with probability 1/2.

    McNemar's test in its exact conditional form, one-sided (Agresti, Categorical Data Analysis,
    section on matched pairs): X ~ Binomial(negative + positive, 1/2). 1 when nothing flipped.
    """
    flips = num_negative + num_positive
    return sum(math.comb(flips, k) for k in range(num_negative, flips + 1)) / 2**flips


# ---- how much is only retraining ----------------------------------------------------------------


def allowance(
    seeds: Sequence[Any],
    task: Any,
    suspects: set[int],
    *,
    max_cases: int = 200,
    max_share: float = 0.25,
) -> dict:
    """{allowed, mean, flips, num_seeds}: the negative flips that another seed alone may make.

    `seeds` are evaluations of one recipe that differs in its seed; every seed is compared with
    every other on that one's own suite. `allowed` = mean + 2 standard deviations of a new pair
    (variance at least the mean, as for counts; times 1 + 1/(seeds - 1) for the mean's own error).
    Measured on two networks with 16 seeds each: an honest further seed exceeds it in 4 to 6 % of
    cases with three seeds; the largest flips seen against one reference, in 30 %. Raises ValueError
    for fewer than two seeds.
    """
    if len(seeds) < 2:
        raise ValueError(f"{len(seeds)} seed shows no churn: evaluate two or more of one recipe.")
    flips = []
    for reference in seeds:
        cases = suite(reference, task, suspects, max_cases=max_cases, max_share=max_share)
        others = [other for other in seeds if other is not reference]
        flips += [compare(reference, other, cases, task).num_negative for other in others]
    mean = fmean(flips)
    variance = max(float(np.var(flips, ddof=1)), mean) * (1 + 1 / (len(seeds) - 1))
    allowed = math.floor(mean + 2 * math.sqrt(variance))
    return {"allowed": allowed, "mean": mean, "flips": flips, "num_seeds": len(seeds)}


# ---- numbers with their interval ----------------------------------------------------------------


def wilson(successes: int, num_rows: int, confidence: float = 0.95) -> tuple[float, float]:
    """Interval of a share (Wilson, JASA 22, 1927). Unlike p +- 2 standard errors it is honest near
    0 and 1. Raises ValueError for no rows."""
    if not 0 <= successes <= num_rows or num_rows == 0:
        raise ValueError(f"{successes} of {num_rows} is no share.")
    z = NormalDist().inv_cdf(0.5 + confidence / 2)
    share, weight = successes / num_rows, z * z / num_rows
    half = z * math.sqrt(share * (1 - share) / num_rows + weight / (4 * num_rows))
    low, high = (
        (share + weight / 2 - half) / (1 + weight),
        (share + weight / 2 + half) / (1 + weight),
    )
    return max(0.0, low), min(1.0, high)


def difference(
    earlier: Any, later: Any, task: Any, *, seed: int = 0, num_resamples: int = 2000
) -> dict:
    """{value, low, high, p_value, num_won, num_lost}: the metric of `later` minus that of `earlier`
    on the same rows.

    The 95 % interval is a percentile bootstrap of whole rows, so that what both models find hard
    cancels; `p_value` is McNemar's, exact and two-sided. Raises ValueError for different rows.
    """
    rows = compare(earlier, later, None, task)
    place = {row_id: i for i, row_id in enumerate(later.ids.tolist())}
    order = torch.tensor([place[row_id] for row_id in earlier.ids.tolist()])
    metric = _paired_metric(earlier, later.outputs[order], task)
    generator = np.random.default_rng(seed)
    draws = generator.integers(0, rows.num_rows, size=(num_resamples, rows.num_rows))
    low, high = np.quantile([metric(torch.from_numpy(draw)) for draw in draws], [0.025, 0.975])
    fewer, more = sorted((rows.num_negative, rows.num_positive))
    return {
        "value": metric(torch.arange(rows.num_rows)),
        "low": float(low),
        "high": float(high),
        "p_value": min(1.0, 2 * flip_p_value(more, fewer)),
        "num_won": rows.num_positive,
        "num_lost": rows.num_negative,
    }


def _paired_metric(earlier: Any, later_outputs: torch.Tensor, task: Any) -> Callable:
    def metric(rows: torch.Tensor) -> float:
        y = earlier.y[rows]
        return task.metric(later_outputs[rows], y) - task.metric(earlier.outputs[rows], y)

    return metric
