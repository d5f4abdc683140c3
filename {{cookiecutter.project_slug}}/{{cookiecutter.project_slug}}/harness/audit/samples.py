"""Single rows and columns that are wrong or odd: corrupt, outlying, constant, or an id."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable

import numpy as np

from . import neighbours
from .subject import NUM_PLANTED, Control, Limits, Statement, Subject, census, many, state

MAX_ROBUST_Z = 6.0  # one row in 10^9 of a normal distribution lies beyond
COUNTED_ROWS = 2_000  # enough to tell a counter
ID_CORRELATION = 0.999  # of a column of distinct values with the order of the rows


# --------------------------------------------------------------------------- corrupt


def corrupt(subject: Subject, limits: Limits, seed: int) -> Statement:
    """Rows that cannot be decoded, or decode to nothing: every row is looked at."""
    n = len(subject.ids)
    faults, shapes = inspect(subject, subject.raw, subject.readable)
    found = {row: subject.unreadable[name] for row, name in enumerate(subject.ids)
             if name in subject.unreadable} | faults  # fmt: skip
    share = len(found) / max(n, 1)
    kinds = Counter(reason.split(":")[0] for reason in found.values())
    listed = "; ".join(f"{kind} ({count})" for kind, count in sorted(kinds.items()))
    return state(
        "corrupt",
        _plant_corrupt(subject, faults, np.random.default_rng([seed, 1])),
        method="every row decoded: error, empty, constant, not finite, dimensions, declared shape "
        "and range",
        n=n,
        estimate=share,
        interval=census(share),
        limit=limits.max_corrupt_share,
        verdict="shut" if share > limits.max_corrupt_share else "warn" if found else "open",
        because=f"{len(found):,} of {n:,} rows ({share:.2%}) are corrupt"
        + (f": {listed}" if found else "")
        + f"; the decoded rows have {many(len(shapes), 'shape')}.",
        ids=subject.names(sorted(found)),
        suspect=("files cut off or of another format", "a declared shape or range that is wrong"),
    )


def inspect(
    subject: Subject, raw: Callable[[int], np.ndarray], rows: Iterable[int]
) -> tuple[dict[int, str], Counter]:
    """Row -> what is wrong with it, and how many rows have each shape."""
    faults: dict[int, str] = {}
    shape_of: dict[int, tuple[int, ...]] = {}
    for row in map(int, rows):
        try:
            array = np.asarray(raw(row))
        except Exception as error:  # the reader is the user's: whatever it raises, the row is bad
            faults[row] = f"unreadable: {type(error).__name__}: {error}"
            continue
        shape_of[row] = array.shape
        if reason := fault(array, subject.value_range):
            faults[row] = reason
    dimensions = Counter(len(shape) for shape in shape_of.values())
    usual = max(sorted(dimensions), key=dimensions.__getitem__, default=0)
    for row, shape in shape_of.items():
        if subject.raw_shape is not None and shape != tuple(subject.raw_shape):
            faults.setdefault(row, f"shape differs from the declared one: {shape}")
        elif subject.raw_shape is None and len(shape) != usual:
            faults.setdefault(row, f"number of dimensions differs from the others: {shape}")
    return faults, Counter(shape_of.values())


def fault(array: np.ndarray, value_range: tuple[float, float] | None) -> str | None:
    """What is wrong with one decoded row, or None."""
    if array.size == 0:
        return "empty"
    if array.dtype.kind not in "biuf":
        return f"holds no numbers: {array.dtype}"
    if not np.isfinite(array).all():
        return "not finite"
    low, high = array.min(), array.max()
    if value_range is not None and (low < value_range[0] or high > value_range[1]):
        return f"outside the declared range: {low:g} to {high:g}"
    return "constant" if array.size > 1 and low == high else None


def _plant_corrupt(subject: Subject, before: dict[int, str], rng: np.random.Generator) -> Control:
    """Sound rows, a third of them spoilt by each fault in turn, inspected as all rows are."""
    sound = [row for row in subject.readable.tolist() if row not in before]
    rows = rng.permutation(np.array(sound, dtype=np.int64))[: 3 * NUM_PLANTED]
    spoilt = rows[
        : min(NUM_PLANTED, len(rows) // 3)
    ]  # most rows stay sound: they set what is usual
    kinds = _kinds(subject)
    kind_of = {int(row): kinds[place % len(kinds)] for place, row in enumerate(spoilt)}

    def raw(row: int) -> np.ndarray:
        array = np.asarray(subject.raw(row))
        return kind_of[row](array) if row in kind_of else array

    faults, _ = inspect(subject, raw, rows)
    found = sum(row in faults for row in kind_of)
    return Control(found, len(kind_of), len(faults) - found)


def _kinds(subject: Subject) -> list[Callable[[np.ndarray], np.ndarray]]:
    """The ways to spoil a row of this data."""

    def cut_off(array: np.ndarray) -> np.ndarray:
        raise OSError("planted: the file ends too early")

    def not_finite(array: np.ndarray) -> np.ndarray:
        spoilt = array.astype(np.float64)
        spoilt.flat[0] = np.nan
        return spoilt

    kinds = [cut_off, not_finite, lambda array: array[:0], lambda array: array[None]]
    if np.prod(subject.shape) > 1:
        kinds.append(lambda array: np.full_like(array, array.flat[0]))
    if subject.value_range is not None:
        low, high = subject.value_range
        kinds.append(lambda array: array.astype(np.float64) + 2 * (high - low) + 1)
    return kinds


# --------------------------------------------------------------------------- outliers


def outliers(subject: Subject, limits: Limits, seed: int) -> Statement:
    """Train and validation rows far out on an axis of the features, or from their own class."""
    rows = subject.rows("train", "validation")
    axes = {name: values[rows].astype(np.float64) for name, values in subject.features.items()}
    axes["distance to its class"] = class_distance(subject, subject.vectors[rows], rows)
    far = {name: robust_z(values) for name, values in axes.items()}
    worst = np.max(np.stack(list(far.values())), axis=0, initial=0.0)
    order = np.argsort(-worst, kind="stable")
    found = [int(place) for place in order if worst[place] > MAX_ROBUST_Z]
    by_axis = {name: int(np.sum(z > MAX_ROBUST_Z)) for name, z in far.items()}
    listed = ", ".join(f"{name} {count}" for name, count in by_axis.items() if count)
    constant = [name for name, values in axes.items() if len(values) and np.ptp(values) == 0]
    share = len(found) / max(len(rows), 1)
    return state(
        "outliers",
        _plant_outliers(subject, axes, rows, set(found), np.random.default_rng([seed, 7])),
        method="robust z (median and median deviation) on every feature axis and on the distance "
        "to the centroid of the row's class",
        n=len(rows),
        estimate=share,
        interval=census(share),
        limit=None,
        verdict="warn" if found else "open",
        because=f"{len(found):,} of {len(rows):,} train and validation rows lie beyond "
        f"{MAX_ROBUST_Z:g} robust deviations on {', '.join(axes)}"
        + (f" (found: {listed})" if listed else "")
        + (f"; constant: {', '.join(constant)}" if constant else "")
        + ".",
        ids=subject.names(rows[found]),
        suspect=(
            "wrong units or scale in some rows",
            "rows of another kind",
            "rare but sound rows",
        ),
    )


def class_distance(subject: Subject, points: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """(M,) distance of `points` (M, D) to the centroid of the class of `rows`, over the class's
    median distance; centroids are of train rows, for a train row of the others.

    In the space of the whole rows. A projection, or a centroid that a row had a part in, fits the
    rows it was made of better than new ones, and in many dimensions all these are outliers.
    """
    train = subject.rows("train")
    train_labels, labels = subject.labels[train], subject.labels[rows]
    result = np.zeros(len(rows))
    for label in np.unique(labels):
        members = subject.vectors[train[train_labels == label]].astype(np.float64)
        if len(members) == 0:
            continue
        centroid = members.mean(axis=0)
        usual = np.median(np.linalg.norm(members - centroid, axis=1))
        inside = labels == label
        gaps = np.linalg.norm(points[inside] - centroid, axis=1)
        own = (subject.split[rows[inside]] == "train") & (len(members) > 1)
        gaps[own] *= len(members) / max(len(members) - 1, 1)
        result[inside] = gaps / usual if usual > 0 else gaps
    return result


def robust_z(values: np.ndarray) -> np.ndarray:
    """(M,) distance of each value from the median in normal-equivalent median deviations; in mean
    deviations where more than half of the values are equal. What is not finite is infinitely far.
    """
    base = values[np.isfinite(values)]
    if not len(base):
        return np.full(len(values), np.inf)
    middle = np.median(base)
    gaps = np.abs(base - middle)
    scale = 1.4826 * np.median(gaps) or 1.2533 * gaps.mean()
    away = np.where(np.isfinite(values), np.abs(values - middle), np.inf)
    return away / scale if scale > 0 else np.where(away > 0, np.inf, 0.0)


def _plant_outliers(
    subject: Subject,
    axes: dict[str, np.ndarray],
    rows: np.ndarray,
    named: set[int],
    rng: np.random.Generator,
) -> Control:
    """A tenfold error of unit: on each axis in turn, a row of at least typical size is multiplied
    by ten (the whole row for the distance to its class)."""
    names = [name for name, values in axes.items() if len(values) and np.ptp(values) > 0]
    free = np.array([place for place in range(len(rows)) if place not in named], dtype=np.int64)
    found = planted = false = 0
    for trial in range(NUM_PLANTED if len(free) and names else 0):
        name = names[trial % len(names)]
        values = axes[name]
        large = free[np.abs(values[free]) >= np.median(np.abs(values[free]))]
        place = int(rng.choice(large))
        spoilt = values.copy()
        if name in subject.features:
            spoilt[place] = 10 * values[place]
        else:
            point = 10 * subject.vectors[rows[place : place + 1]]
            spoilt[place] = class_distance(subject, point, rows[place : place + 1])[0]
        beyond = set(np.flatnonzero(robust_z(spoilt) > MAX_ROBUST_Z).tolist())
        planted += 1
        found += place in beyond
        false += len(beyond - named - {place})
    return Control(found, planted, false)


# --------------------------------------------------------------------------- columns


def constant_columns(subject: Subject, limits: Limits, seed: int) -> Statement:
    """Columns and feature axes that never vary over the train rows, or merely count the rows."""
    train = neighbours.sample(subject.rows("train"))
    constant = np.ptp(subject.vectors[train], axis=0) == 0
    flat = [name for name, values in subject.features.items() if np.ptp(values[train]) == 0]
    rows = neighbours.sample(train, COUNTED_ROWS)
    x = subject.vectors[rows]
    counting = [f"column {place}" for place in counters(x, rows)]
    counting += [
        name for name, values in subject.features.items() if len(counters(values[rows, None], rows))
    ]
    share = float(constant.mean())
    verdict = "shut" if share == 1 else "warn" if counting else "open"
    return state(
        "constant_columns",
        _plant_columns(x, rows, np.random.default_rng([seed, 8])),
        method="range of each column over the train rows; distinct values that follow the order "
        "of the rows",
        n=len(train),
        estimate=share,
        interval=census(share),
        limit=1.0,
        verdict=verdict,
        because=f"{int(constant.sum()):,} of {len(constant):,} columns ({share:.1%}) and "
        f"{len(flat)} of {len(subject.features)} feature axes"
        + (f" ({', '.join(flat)})" if flat else "")
        + " are constant over the train rows, and "
        + (
            f"{len(counting)} count the rows: {', '.join(counting)}."
            if counting
            else "none counts the rows."
        ),
        suspect=("every row is the same input: look at preprocessing",)
        if share == 1
        else ("an id or a time stamp among the inputs",),
    )


def counters(x: np.ndarray, rows: np.ndarray) -> list[int]:
    """Columns of x (M, D) whose values are all distinct and follow the order of the rows."""
    if len(rows) < 3:
        return []
    place = np.argsort(np.argsort(rows)).astype(np.float64)
    found = []
    for column in _following(x, place):
        values = x[:, column]
        rank = np.argsort(np.argsort(values, kind="stable")).astype(np.float64)
        distinct = len(np.unique(values)) == len(values)
        if distinct and abs(np.corrcoef(rank, place)[0, 1]) > ID_CORRELATION:
            found.append(int(column))
    return found


def _following(x: np.ndarray, place: np.ndarray) -> np.ndarray:
    """Columns whose linear correlation with the order is at least 0.5: only their ranks are worth
    sorting. A column that rises with the rows but less than that is no plain counter."""
    y = place - place.mean()
    centred = x.astype(np.float64) - x.mean(axis=0)
    size = np.sqrt((centred**2).sum(axis=0) * (y**2).sum())
    return np.flatnonzero(np.abs(y @ centred) > 0.5 * np.maximum(size, 1e-30))


def _plant_columns(x: np.ndarray, rows: np.ndarray, rng: np.random.Generator) -> Control:
    """Columns of one value, and counters of any scale and direction; shuffled ones stay unnamed."""
    half = NUM_PLANTED // 2
    count = np.arange(len(rows), dtype=np.float64)
    scales = rng.normal(0, 10, half)
    flat = np.tile(rng.normal(0, 1, half), (len(rows), 1))
    ids = count[:, None] * scales + rng.normal(0, 100, half)
    noise = np.stack([rng.permutation(count) for _ in range(half)], axis=1)
    found = int(np.sum(np.ptp(flat, axis=0) == 0)) + len(counters(ids, rows))
    false = len(counters(noise, rows)) + int(np.sum(np.ptp(noise, axis=0) == 0))
    return Control(found, 2 * half, false)
