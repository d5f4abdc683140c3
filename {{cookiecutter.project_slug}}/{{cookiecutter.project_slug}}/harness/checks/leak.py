"""A feature that holds the label: one value of the input says what the others must not."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from . import Check, Finding, Pipeline, inconclusive, not_applicable, probe, shut_if_any

MOST_VALUES = 40_000_000
MOST_MARKS = 400_000_000  # values times classes
CAUSES = (
    "the label is written into the input",
    "a feature made from the label, or known only after it",
)


def feature_leak(
    pipeline: Pipeline,
    *,
    max_rows: int = 2000,
    max_feature_score: float = 0.95,
    max_lone_score: float = 0.8,
    max_pair_score: float = 0.97,
) -> Check:
    """No single value of a training row predicts the label far beyond the rest.

    The score of a column (a feature, a pixel, a field, an id that occurs in a sequence): what a
    lookup of its binned value gets right of held-out rows above the most common label, 0 to 1; the
    explained variance for real targets. Shut, where the best column is above `max_feature_score`
    and all but constant within each class, as no other column is; where classes are its pieces, cut
    without error or gap, and no other column reaches .5; where it is perfect (.98 at the default)
    and no other reaches .7 (targets that are no classes); and above `max_lone_score`, for three
    classes and more, if no other reaches .25. Shut too: most of three and more classes have a
    column of their own that is on for them alone, where the typical column is far from that. One
    that is merely strong, or a tree of few columns above `max_pair_score`, warns. Sequences of
    targets are not judged (see `target_offset`). fp32 and bf16 alike: stored rows are read.
    """
    name = "feature_leak"
    kinds = ("exclusive", "multilabel", "real")
    if (lacking := probe.lacking(name, pipeline, targets=kinds)) is not None:
        return lacking
    rows = probe.few_rows(pipeline.train, _affordable(pipeline.train, max_rows))
    table = _table(rows["x"])
    targets = _targets(pipeline.task, rows["y"])
    if table is None or table.values.shape[1] < 2:
        return not_applicable(
            name, "The input is a single value: there is no rest to compare with."
        )
    if len(targets) < 40 or not (targets.std(dim=0) > 0).any():
        return inconclusive(
            name, f"{len(targets)} rows with {_kinds(rows['y'])} labels are too few."
        )
    scores = _scores(table.values, targets, pipeline.task.targets)
    best = int(scores.argmax())
    limits = max_feature_score, max_lone_score
    found = [*_lone(table, scores, targets, pipeline.task.targets, limits)]
    found = found or [*_written(table, targets, pipeline.task.targets)]
    because = (
        f"The best of {len(scores)} columns ({table.names(best)}) scores {scores[best]:.2f} of a "
        f"perfect 1, the typical one {scores.median():.2f}."
    )
    value = scores[best].item()
    checked = shut_if_any(found, Check(name, "open", value, max_feature_score, "", because))
    if checked.verdict == "shut":
        return checked
    if value > max_feature_score:
        more = because[:-1] + ": strong, and not alone."
        return Check(name, "warn", value, max_feature_score, "", more, CAUSES)
    pair = _tree_score(table.values, targets, pipeline.task.targets) if value < 0.6 else 0.0
    if pair > max_pair_score:
        more = f"{because[:-1]}; a tree of few columns scores {pair:.2f}."
        causes = ("the label is computed from a few of the inputs", *CAUSES)
        return Check(name, "warn", pair, max_pair_score, "", more, causes)
    return checked


# ---- columns and targets ------------------------------------------------------------------------


@dataclass(frozen=True)
class Table:
    values: torch.Tensor  # (N, D) float64
    parts: list[tuple[str, tuple[int, ...]]]  # name and shape of what the columns are, in order

    def names(self, column: int) -> str:
        """In words, e.g. "value (0, 0, 3) of x"."""
        for part, shape in self.parts:
            size = math.prod(shape)
            if column < size:
                place = []
                for side in reversed(shape):
                    place.insert(0, column % side)
                    column //= side
                where = str(place[0]) if len(place) == 1 else f"({', '.join(map(str, place))})"
                return f"value {where} of {part}"
            column -= size
        return f"column {column}"


def _affordable(loader: Any, max_rows: int) -> int:
    """So many rows that large pictures stay within some 300 MB."""
    row = probe.few_rows(loader, 1)["x"]
    size = sum(values[0].numel() for values in probe.tensors(row).values())
    return max(200, min(max_rows, MOST_VALUES // max(size, 1)))


def _table(x: Any) -> Table | None:
    """All columns of all parts; for sequences of ids also how often each id occurs."""
    columns, parts = [], []
    for part, values in probe.tensors(x).items():
        if values.is_complex():
            continue
        flat = values.detach().cpu().double().reshape(len(values), -1)
        columns.append(flat)
        parts.append((part, tuple(values.shape[1:]) or (1,)))
        if values.dtype == torch.long and values.ndim == 2 and values.shape[1] > 1:
            size = int(values.max()) + 1
            if values.min() >= 0 and size <= 2048:
                counts = torch.zeros(len(values), size, dtype=torch.float64)
                counts.scatter_add_(1, values.cpu(), torch.ones_like(flat))
                columns.append(counts)
                parts.append((f"the number of each id in {part}", (size,)))
    return Table(torch.cat(columns, dim=1), parts) if columns else None


def _targets(task: Any, y: torch.Tensor) -> torch.Tensor:
    """`(N, K)` float64: class indicators, labels, or the values themselves."""
    y = y.detach().cpu()
    if task.targets == "exclusive":
        known = y.unique()
        return (y[:, None] == known).double()
    return y.double().reshape(len(y), -1)


def _kinds(y: torch.Tensor) -> str:
    return f"{len(y.unique(dim=0))} kinds of"


# ---- scores -------------------------------------------------------------------------------------


def _scores(values: torch.Tensor, targets: torch.Tensor, kind: str) -> torch.Tensor:
    """`(D,)`: of each column, on held-out halves. Of more than 1,024 columns only the 256 that
    separate the classes best in their means are looked up; the others get that separation."""
    linear = _correlations(values, targets)
    worth = _separation(values, targets) if kind == "exclusive" else linear.amax(dim=0)
    chosen = torch.arange(len(worth))
    if len(worth) > 1024:
        chosen = worth.argsort(descending=True)[:256]
    scores = worth.clone()
    generator = torch.Generator().manual_seed(0)
    half = torch.zeros(len(values), dtype=torch.bool)
    half[torch.randperm(len(values), generator=generator)[: len(values) // 2]] = True
    looked = [_looked_up(values[:, chosen], targets, fit, kind) for fit in (half, ~half)]
    scores[chosen] = torch.stack(looked).mean(dim=0)
    if kind != "exclusive":  # a straight line is finer than any bins
        scores = torch.maximum(scores, linear.amax(dim=0))
    return scores.clamp(0, 1)


def _correlations(values: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """`(K, D)`: squared correlation of each target with each column."""
    v, t = values - values.mean(dim=0), targets - targets.mean(dim=0)
    scale = (t**2).sum(dim=0)[:, None] * (v**2).sum(dim=0)
    found = (t.T @ v) ** 2 / scale.clamp_min(1e-300)
    return found.where(scale > 1e-18, torch.zeros(()).double())


def _separation(values: torch.Tensor, indicators: torch.Tensor) -> torch.Tensor:
    """`(D,)`: the share of a column's variance that lies between the classes."""
    sizes = indicators.sum(dim=0)[:, None]
    means = (indicators.T @ values) / sizes
    total = ((values - values.mean(dim=0)) ** 2).sum(dim=0)
    between = (sizes * (means - values.mean(dim=0)) ** 2).sum(dim=0)
    return (between / total.clamp_min(1e-300)).where(total > 1e-12, torch.zeros(()).double())


def _looked_up(
    values: torch.Tensor, targets: torch.Tensor, fit: torch.Tensor, kind: str
) -> torch.Tensor:
    """`(D,)`: the mean target of each bin of the half `fit` (the most common class), scored on the
    other half. Bins are quantiles of that half, or its distinct values where those are few."""
    num_bins = max(16, min(64, int(fit.sum()) // 8))
    at = torch.linspace(0, int(fit.sum()) - 1, num_bins + 1).round().long()[1:-1]
    edges = values[fit].sort(dim=0).values[at].T.contiguous()  # (D, bins - 1)
    bins = torch.searchsorted(edges, values.T.contiguous())  # (D, N): edge values fall below
    columns = len(bins)
    sums = torch.zeros(columns, num_bins, targets.shape[1], dtype=torch.float64)
    index = bins[:, fit][..., None].expand(-1, -1, targets.shape[1])
    sums.scatter_add_(1, index, targets[fit].expand(columns, -1, -1))
    counts = torch.zeros(columns, num_bins, dtype=torch.float64)
    counts.scatter_add_(1, bins[:, fit], torch.ones(columns, int(fit.sum())).double())
    prior = targets[fit].mean(dim=0)
    means = (sums + prior * 1e-3) / (counts[..., None] + 1e-3)
    test = targets[~fit]
    said = means.gather(1, bins[:, ~fit][..., None].expand(-1, -1, targets.shape[1]))
    if kind == "exclusive":
        right = (said.argmax(dim=2) == test.argmax(dim=1)).double().mean(dim=1)
        chance = test.mean(dim=0).max()
        return (right - chance) / (1 - chance).clamp_min(1e-9)
    error = ((said - test) ** 2).mean(dim=1)
    return (1 - error / test.var(dim=0, unbiased=False).clamp_min(1e-300)).amax(dim=1)


# ---- verdicts -----------------------------------------------------------------------------------


def _lone(
    table: Table, scores: torch.Tensor, targets: torch.Tensor, kind: str, limits: tuple
) -> Iterator[Finding]:
    """One column (or a patch that says the same) far above all others."""
    limit, lone = limits
    best = int(scores.argmax())
    twins = _correlations(table.values, table.values[:, best : best + 1])[0] > 0.98
    if twins.sum() - 1 > 0.1 * len(twins):  # many columns say it: a property of the data
        return
    if kind != "real" and (1 - targets.mean(dim=0).max()) * len(targets) < 10:
        return
    nothing = torch.zeros(()).double()
    score, rest = scores[best].item(), scores.where(~twins, nothing).max().item()
    if kind == "exclusive":
        told = _separation(table.values, targets)
        own, near = told[best].item(), told.where(~twins, nothing).max().item()
        much = (0.9999, 1.0), (0.99, 0.9), (0.97, 0.7), (0.95, 0.5)
        constant = any(own > most and near < room for most, room in much) and score > limit
        shut = constant and 1 - own <= 0.2 * (1 - near)
        shut |= score > 0.9 and rest < 0.5 and _cut(table.values[:, best], targets)
        shut |= score > lone and rest < 0.25 and targets.shape[1] > 2 and len(scores) > 7
    else:
        shut = score > limit + 0.6 * (1 - limit) and rest < 0.7
    if shut:
        because = (
            f"{table.names(best)} alone predicts the label with a score of {score:.2f} of 1, the "
            f"best other column with {rest:.2f}"
        )
        yield Finding(score, limit, because, CAUSES)


def _cut(values: torch.Tensor, targets: torch.Tensor) -> bool:
    """Whether the classes are pieces of one continuous value, cut without an error and without a
    gap: nothing measured does that."""
    order = values.argsort()
    changes = targets.argmax(dim=1)[order].diff() != 0
    if int(changes.sum()) != targets.shape[1] - 1 or len(values) < 100:
        return False
    gaps = values[order].diff()[changes]
    return bool((gaps < 0.02 * (values.max() - values.min())).all())


def _written(table: Table, targets: torch.Tensor, kind: str) -> Iterator[Finding]:
    """Most classes have a column of their own: on for all of their rows, and for them alone; or one
    that has a value of theirs."""
    if kind == "real" or targets.shape[1] < 3 or table.values.shape[1] < 4:
        return  # two classes have one column between them
    supported = (targets.sum(dim=0) >= 5) & ((1 - targets).sum(dim=0) >= 5)
    if int(supported.sum()) < 2:
        return
    agree = _correlations(table.values, targets[:, supported])
    if table.values.numel() * len(agree) <= MOST_MARKS:
        marks = [_marks(table.values, target) for target in targets[:, supported].T]
        agree = torch.maximum(agree, torch.stack(marks))
    owned = agree.amax(dim=1) > 0.9
    if owned.double().mean() >= 0.8 and agree.amax(dim=0).median() < 0.5:
        columns = [table.names(int(c)) for c in agree.argmax(dim=1)[:3]]
        because = (
            f"{int(owned.sum())} of {len(owned)} labels have a column that is on for their rows "
            f"alone ({', '.join(columns)}, ...)"
        )
        yield Finding(owned.double().mean().item(), 0.8, because, CAUSES)


def _marks(values: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """`(D,)`: squared correlation of one class with standing at that class's own value."""
    own = values[target > 0].median(dim=0).values
    return _correlations((values == own).double(), target[:, None])[0]


def _tree_score(values: torch.Tensor, targets: torch.Tensor, kind: str) -> float:
    """A small tree on all columns, held out; 0 where there are too many columns or no classes."""
    if kind != "exclusive" or values.shape[1] > 256 or len(values) < 100:
        return 0.0
    from sklearn.tree import DecisionTreeClassifier

    half, labels = len(values) // 2, targets.argmax(dim=1).numpy()
    order = torch.randperm(len(values), generator=torch.Generator().manual_seed(1)).numpy()
    fit, test = order[:half], order[half:]
    if (1 - targets[test].mean(dim=0).max()) * half < 20:  # too few that are not the usual class
        return 0.0
    tree = DecisionTreeClassifier(max_depth=5, random_state=0)
    tree.fit(values[fit].numpy(), labels[fit])
    right = (tree.predict(values[test].numpy()) == labels[test]).mean()
    chance = targets[test].mean(dim=0).max().item()
    return float((right - chance) / max(1 - chance, 1e-9))
