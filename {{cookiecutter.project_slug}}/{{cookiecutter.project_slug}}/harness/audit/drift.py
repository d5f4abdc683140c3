"""Whether the split is fair: train against validation, and the order and groups behind the rows."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..records import time_values
from . import duplicates, neighbours
from .leakage import leaks
from .subject import Control, Limits, Statement, Subject, many, state

NUM_PLANTS = 5  # each costs a forest or a test against permutations
NUM_NULL = 10
NULL_SPREADS = 4.0  # above the mean of the null: its spread is known from ten values only
NUM_RELABELLED = 1_000
NUM_TREES = 40
MAX_SIDE = 700  # validation rows in the two-sample tests, with twice as many train rows
MIN_SIDE = 30
MIN_AUC = 0.55  # many rows make any difference certain; below this it is too small to matter
NUM_PERMUTATIONS = 50
MAX_DISTANCE_RATIO = 0.9
NUM_FOLDS = 5
PLANTED_ROWS = 2_000
NUM_SOURCES = 10
SOURCE_SHIFT = 0.5  # of each column's spread


# --------------------------------------------------------------------------- split drift


def split_drift(subject: Subject, limits: Limits, seed: int) -> Statement:
    """Whether a classifier can tell validation rows from train rows by their features.

    It warns and does not shut, since in a split by time, by group or as given the difference may be
    the very one to expect in use. Only where chance drew the split are the rows exchangeable, and a
    large difference means that something treats the two splits differently.
    """
    rng = np.random.default_rng([seed, 11])
    x, side = _two_samples(subject, rng)
    num_rows = int(side.sum())
    if num_rows < MIN_SIDE:
        return _too_few(num_rows)
    auc, column = two_sample_auc(x, side, seed), float(column_shifts(x, side[None])[0])
    relabelled = np.stack([rng.permutation(side) for _ in range(NUM_RELABELLED)])
    null = [two_sample_auc(x, relabelled[place], seed) for place in range(NUM_NULL)]
    spread = float(np.std(null, ddof=1))
    usual = Usual(
        max(float(np.mean(null)) + NULL_SPREADS * spread, MIN_AUC),
        float(column_shifts(x, relabelled).max()),
    )
    control = _plant_shift(x, relabelled, usual, null, seed, rng)
    shift, usual_shift = _label_shift(subject, rng)
    drawn = subject.strategy in ("random", "kfold") and subject.groups is None
    differs = auc > usual.auc or column > usual.column or shift > usual_shift
    return state(
        "split_drift",
        control,
        method=f"two-sample tests on {num_rows:,} validation rows: trees out of fold, and the "
        "mean and spread of each column, against splits relabelled at random",
        n=len(side),
        estimate=auc,
        interval=(max(auc - 1.96 * spread, 0.0), min(auc + 1.96 * spread, 1.0)),
        unit="AUC",
        limit=limits.max_split_auc,
        verdict="shut" if drawn and auc > limits.max_split_auc else "warn" if differs else "open",
        because=f"Trees tell validation from train rows with AUC {auc:.3f}, random relabellings "
        f"reach {max(null):.3f} (limit of chance {usual.auc:.3f}); the column that differs most "
        f"does so by {column:.1f} standard errors (by chance up to {usual.column:.1f}), and the "
        f"class shares by {shift:.3f} (by chance up to {usual_shift:.3f}).",
        suspect=("the splits were prepared differently",)
        if drawn
        else ("validation comes from another time, group or source than train",),
        more={"label_shift": shift, "column_shift": column},
    )


@dataclass(frozen=True)
class Usual:
    """What splits relabelled at random reach."""

    auc: float
    column: float


def _too_few(num_rows: int) -> Statement:
    return Statement(
        "split_drift",
        method="two-sample test",
        n=num_rows,
        verdict="warn",
        because=f"This detector cannot see here: {num_rows} validation rows are too few to compare "
        f"with train (it takes {MIN_SIDE}).",
        planted_recall=0.0,
        planted_false=0,
    )


def _two_samples(subject: Subject, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Features and columns (M, C) of validation rows and of up to twice as many train rows, and
    their side (M,): 1 for validation."""
    validation = rng.permutation(subject.rows("validation"))[:MAX_SIDE]
    train = rng.permutation(subject.rows("train"))[: 2 * len(validation)]
    chosen = np.concatenate([train, validation])
    axes = [np.nan_to_num(values[chosen]) for values in subject.features.values()]
    both = subject.vectors[chosen]  # projected by both sides: components of train alone fit train
    columns = neighbours.projection(both)(both)
    return np.column_stack([*axes, columns]), np.repeat([0, 1], [len(train), len(validation)])


def two_sample_auc(x: np.ndarray, side: np.ndarray, seed: int) -> float:
    """Out-of-fold AUC of trees that tell side 1 from side 0; 0.5 when there is no difference."""
    from sklearn.ensemble import ExtraTreesClassifier

    fold_of = neighbours.folds(side, np.arange(len(side)), 3, np.random.default_rng(seed))
    score = np.zeros(len(side))
    for fold in range(3):
        inside = fold_of == fold
        trees = ExtraTreesClassifier(
            NUM_TREES, min_samples_leaf=3, class_weight="balanced", random_state=seed, n_jobs=1
        )
        trees.fit(x[~inside], side[~inside])
        score[inside] = trees.predict_proba(x[inside])[:, 1]
    return _auc(score, side)


def _auc(score: np.ndarray, side: np.ndarray) -> float:
    """Share of pairs in the right order, ties by half (Mann and Whitney)."""
    _, place, number = np.unique(score, return_inverse=True, return_counts=True)
    rank = (np.cumsum(number) - (number - 1) / 2)[place]
    ones = int(side.sum())
    return float((rank[side == 1].sum() - ones * (ones + 1) / 2) / (ones * (len(side) - ones)))


def column_shifts(x: np.ndarray, sides: np.ndarray) -> np.ndarray:
    """(P,) largest difference between the sides, over columns, of their means or of their mean
    distances from the median, in standard errors; `sides` (P, M) are 0 or 1."""
    both = np.concatenate([x, np.abs(x - np.median(x, axis=0))], axis=1).astype(np.float64)
    both = both[:, np.ptp(both, axis=0) > 0]
    if not both.shape[1]:
        return np.zeros(len(sides))
    both = (both - both.mean(axis=0)) / both.std(axis=0)
    ones = sides.sum(axis=1, keepdims=True)
    others = sides.shape[1] - ones
    gaps = np.where(sides == 1, 1 / ones, -1 / others) @ both
    return np.abs(gaps).max(axis=1) / np.sqrt(1 / ones + 1 / others)[:, 0]


def _plant_shift(
    x: np.ndarray,
    relabelled: np.ndarray,
    usual: Usual,
    null: list[float],
    seed: int,
    rng: np.random.Generator,
) -> Control:
    """Random halves of which one is shifted by half a standard deviation in a tenth of the columns;
    the halves alone must stay unnamed."""
    varying = np.flatnonzero(np.ptp(x, axis=0) > 0)
    found = 0
    for halves in relabelled[-NUM_PLANTS:]:
        columns = rng.permutation(varying)[: max(1, len(varying) // 10)]
        moved = x.copy()
        moved[np.ix_(halves == 1, columns)] += 0.5 * x[:, columns].std(axis=0)
        named = column_shifts(moved, halves[None])[0] > usual.column
        found += named or two_sample_auc(moved, halves, seed) > usual.auc
    return Control(int(found), NUM_PLANTS, sum(value > usual.auc for value in null))


def _label_shift(subject: Subject, rng: np.random.Generator) -> tuple[float, float]:
    """Total variation distance of the class shares, and the most that 100 relabellings reach."""
    train, validation = subject.labels[subject.rows("train")], subject.rows("validation")
    pooled = np.concatenate([train, subject.labels[validation]])
    n, classes = len(train), subject.num_classes

    def distance(labels: np.ndarray) -> float:
        shares = [
            np.bincount(part, minlength=classes) / max(len(part), 1)
            for part in (labels[:n], labels[n:])
        ]
        return float(np.abs(shares[0] - shares[1]).sum() / 2)

    return distance(pooled), max(distance(rng.permutation(pooled)) for _ in range(100))


# --------------------------------------------------------------------------- order and groups


def order_and_groups(subject: Subject, limits: Limits, seed: int) -> Statement:
    """Whether rows that stand together look alike, so that a random split flatters every score."""
    rng = np.random.default_rng([seed, 10])
    rows = subject.learnable
    labels, x = subject.labels[rows], subject.compact[rows]
    place = _places(subject, rows)
    near = np.searchsorted(rows, subject.learnable_graph.indices)
    ratio, fires = follows_order(near, place, labels, rng)
    control = _plant_order(x, labels, rng)
    right = {name: _right(subject, x, labels, fold_of) for name, fold_of in
             _ways_to_fold(subject, rows, place, rng).items()}  # fmt: skip
    gap, ends = _gap(right["random"], right["contiguous"])
    matters = fires and ends[0] > 0
    shared = len({subject.groups[row] for row in leaks(subject.groups or [], subject.split)})
    by_chance = subject.strategy in ("random", "kfold") and subject.groups is None
    scores = ", ".join(f"{right[name].mean():.3f} on {name} folds" for name in right)
    return state(
        "order_and_groups",
        control,
        method="distance in the order (of time, where times are known) between neighbours of a "
        "class, against permutations; neighbours probe on random and on contiguous folds",
        n=len(rows),
        estimate=gap,
        interval=ends,
        unit="accuracy",
        verdict="warn" if shared or (matters and by_chance) else "open",
        because=f"Rows that look alike stand {ratio:.2f} times as far apart in the order as chance "
        f"would put them; a neighbours probe scores {scores}: {_advice(subject, matters, shared)}",
        suspect=("the split does not follow the groups",)
        if shared
        else ("rows come source by source (writer, patient, day): name groups, or split by time",),
        more={"distance_ratio": ratio, "groups_shared": float(shared)}
        | {f"accuracy on {name} folds": float(hits.mean()) for name, hits in right.items()},
    )


def _places(subject: Subject, rows: np.ndarray) -> np.ndarray:
    """(M,) position of each row in time, or in the order of the source."""
    by = time_values(subject.times)[rows] if subject.times is not None else rows
    return np.argsort(np.argsort(by, kind="stable"), kind="stable")


def follows_order(
    near: np.ndarray, place: np.ndarray, labels: np.ndarray, rng: np.random.Generator
) -> tuple[float, bool]:
    """Mean distance in order between neighbours over what permutations within each class give,
    and whether none of these reaches it. Within class: rows sorted by class are no finding here."""

    def distance(places: np.ndarray) -> float:
        return float(np.abs(places[near] - places[:, None]).mean())

    slots = np.lexsort((place, labels))  # rows class by class
    null = []
    for _ in range(NUM_PERMUTATIONS):
        mixed = np.empty_like(place)
        mixed[np.lexsort((rng.random(len(place)), labels))] = place[slots]
        null.append(distance(mixed))
    ratio = distance(place) / max(float(np.mean(null)), 1e-12)
    return ratio, distance(place) < min(null) and ratio < MAX_DISTANCE_RATIO


def _plant_order(x: np.ndarray, labels: np.ndarray, rng: np.random.Generator) -> Control:
    """Rows dealt at random to sources that come one after another, each with a slight shift of its
    own, must be found; without the shift they must not."""
    few = np.sort(rng.permutation(len(x))[:PLANTED_ROWS])
    x, labels, every = x[few], labels[few], np.arange(len(few))
    found = false = 0
    for _ in range(NUM_PLANTS):
        source = rng.integers(0, NUM_SOURCES, len(x))
        place = np.argsort(np.lexsort((rng.random(len(x)), source)))
        shifts = SOURCE_SHIFT * x.std(axis=0) * rng.standard_normal((NUM_SOURCES, x.shape[1]))
        moved = (x + shifts[source]).astype(np.float32)
        for points, planted in ((moved, True), (x, False)):
            near, _ = neighbours.nearest(points, points, every)
            fires = follows_order(near, place, labels, rng)[1]
            found, false = found + (fires and planted), false + (fires and not planted)
    return Control(int(found), NUM_PLANTS, int(false))


def _ways_to_fold(
    subject: Subject, rows: np.ndarray, place: np.ndarray, rng: np.random.Generator
) -> dict[str, np.ndarray]:
    """Folds (M,) at random (duplicates together), contiguous within each class, and by group."""
    labels = subject.labels[rows]
    clusters = duplicates.learnable_clusters(subject)
    in_order = np.zeros(len(rows), dtype=np.int64)
    for label in np.unique(labels):
        members = np.flatnonzero(labels == label)
        members = members[np.argsort(place[members])]
        in_order[members] = np.arange(len(members)) * NUM_FOLDS // len(members)
    ways = {"random": neighbours.folds(labels, clusters, NUM_FOLDS, rng), "contiguous": in_order}
    if subject.groups is not None:
        groups = np.array(subject.groups)[rows]
        if len(np.unique(groups)) >= NUM_FOLDS:
            ways["group"] = neighbours.folds(labels, groups, NUM_FOLDS, rng)
    return ways


def _right(subject: Subject, x: np.ndarray, labels: np.ndarray, fold_of: np.ndarray) -> np.ndarray:
    """(M,) whether the neighbours in other folds name each row's label."""
    shares = neighbours.votes(labels, neighbours.voters(x, fold_of), subject.num_classes)
    return shares.argmax(axis=1) == labels


def _gap(random: np.ndarray, ordered: np.ndarray) -> tuple[float, tuple[float, float]]:
    """Mean paired difference of hits and its normal 95 % interval."""
    difference = random.astype(np.float64) - ordered
    gap, half = difference.mean(), 1.96 * difference.std() / np.sqrt(max(len(difference), 1))
    return float(gap), (float(gap - half), float(gap + half))


def _advice(subject: Subject, matters: bool, shared: int) -> str:
    if shared:
        return f"{many(shared, 'group')} shared across splits, so split by group."
    if not matters:
        return "the order of the rows does not need a split of its own."
    if subject.strategy in ("random", "kfold") and subject.groups is None:
        return "the order matters and the split is random, so split by group or by time if you can."
    return f"the order matters, and the split is made by {subject.strategy}."
