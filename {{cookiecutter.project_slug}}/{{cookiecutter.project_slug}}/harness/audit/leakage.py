"""What the model must not know: validation or test rows seen in train, or the label in a column."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..records import SPLITS, time_values
from . import duplicates, neighbours
from .subject import NUM_PLANTED, Control, Limits, Statement, Subject, many, state, wilson

SAME = 1e-3  # of the median nearest distance: the same row but for rounding
TIGHT = 0.5  # rows of one group must be this much nearer than others for their distance to count
SCORED_ROWS = 4_000
SCORED_COLUMNS = 512
MARGIN = 0.2  # "far beyond the rest": this much above the median column


# --------------------------------------------------------------------------- across splits


def cross_split_leakage(subject: Subject, limits: Limits, seed: int) -> Statement:
    """Rows of validation or test that an earlier split holds too, or that tell of it."""
    exact = leaks(subject.inputs, subject.split)
    grouped = leaks(subject.groups or [], subject.split)
    late = _out_of_order(subject)
    near, close = _near_across(subject)
    bad = list(dict.fromkeys([*exact, *close, *(grouped if _binds(subject) else []), *late]))
    rows = subject.rows("validation", "test")
    return state(
        "cross_split_leakage",
        _plant_leaks(subject, np.random.default_rng([seed, 5])),
        method="identical inputs, shared groups, order of time and near duplicates across splits",
        n=len(rows),
        estimate=float(len(bad)),
        interval=(float(len(bad)), float(len(bad))),
        unit="rows",
        limit=0,
        verdict="shut" if bad else "warn" if near or grouped else "open",
        because=f"Of {len(rows):,} validation and test rows {len(exact):,} are identical to a row "
        f"of an earlier split, {len(close):,} more are the same but for rounding or by the scale "
        f"of their group, and {len(near):,} more have a near duplicate in another split"
        + _groups_sentence(subject, grouped)
        + _times_sentence(subject, late)
        + ".",
        ids=subject.names([*bad, *(row for row in (*grouped, *near) if row not in set(bad))]),
        suspect=(
            "duplicates were not kept together: delete artifacts/data_audit/splits.json and rerun",
            "rows of one source (patient, writer, recording): name groups and split by group",
        ),
        more={"exact": len(exact), "near": len(near), "groups": len(grouped), "late": len(late)},
    )


def leaks(keys: Sequence[str], split: np.ndarray) -> list[int]:
    """Rows of validation and test whose key also occurs in an earlier split, ascending."""
    first: dict[str, int] = {}
    order = [SPLITS.index(name) if name else len(SPLITS) for name in split.tolist()]
    for row, key in enumerate(keys):
        if key and order[row] < len(SPLITS):
            first[key] = min(first.get(key, len(SPLITS)), order[row])
    return [
        r for r, key in enumerate(keys) if order[r] < len(SPLITS) and key and first[key] < order[r]
    ]


def _binds(subject: Subject) -> bool:
    """Whether groups may not be shared: in a split by time, tomorrow's groups may be today's."""
    return subject.strategy != "time"


def _out_of_order(subject: Subject) -> list[int]:
    """Rows of an earlier split that are later than the first row of a later one, where the split
    was asked to follow time."""
    if subject.times is None or subject.strategy != "time":
        return []
    times, found = time_values(subject.times), []
    for place, earlier in enumerate(SPLITS[:-1]):
        ahead = subject.rows(*SPLITS[place + 1 :])
        if len(ahead):
            rows = subject.rows(earlier)
            found += rows[times[rows] > times[ahead].min()].tolist()
    return found


def _near_across(subject: Subject) -> tuple[list[int], list[int]]:
    """Validation and test rows with a near duplicate in another split, and those of them that are
    the same row for certain: equal but for rounding, or nearer than rows of one group are."""
    pairs, gaps = duplicates.different(subject)
    exact = set(leaks(subject.inputs, subject.split))
    certain = max(SAME * subject.graph.scale, _group_scale(subject))
    near, close = [], []
    for (a, b), gap in zip(pairs, gaps, strict=True):
        splits = (str(subject.split[a]), str(subject.split[b]))
        if "" in splits or splits[0] == splits[1]:
            continue
        row = int(max((a, b), key=lambda r: SPLITS.index(str(subject.split[r]))))
        if row not in exact:
            (close if gap < certain else near).append(row)
    close = list(dict.fromkeys(close))
    return [row for row in dict.fromkeys(near) if row not in set(close)], close


def _group_scale(subject: Subject) -> float:
    """Median distance of a row to the nearest row of its own group; 0 where groups are absent or
    no tighter than the rest (one kind of thing looks like another)."""
    if subject.groups is None:
        return 0.0
    graph = subject.graph
    groups = np.array(subject.groups)
    same = groups[graph.indices] == groups[graph.rows][:, None]
    own = np.where(same, graph.distances, np.inf).min(axis=1, initial=np.inf)
    other = np.where(~same, graph.distances, np.inf).min(axis=1, initial=np.inf)
    both = np.isfinite(own) & np.isfinite(other)
    if both.sum() < NUM_PLANTED or np.median(own[both]) > TIGHT * np.median(other[both]):
        return 0.0
    return float(np.median(own[both]))


def _groups_sentence(subject: Subject, grouped: list[int]) -> str:
    if subject.groups is None:
        return ""
    shared = len({subject.groups[row] for row in grouped})
    return f"; {many(shared, 'group')} shared across splits ({many(len(grouped), 'row')})"


def _times_sentence(subject: Subject, late: list[int]) -> str:
    if subject.times is None or subject.strategy != "time":
        return ""
    return f"; {many(len(late), 'row')} later than a row of a later split"


def _plant_leaks(subject: Subject, rng: np.random.Generator) -> Control:
    """Train rows copied into validation, and new rows there, which must stay unnamed."""
    rows = rng.permutation(subject.rows("train"))[:NUM_PLANTED]
    fresh = [f"new {place}" for place in range(NUM_PLANTED)]
    keys = [*subject.inputs, *(subject.inputs[row] for row in rows), *fresh]
    split = np.concatenate([subject.split, ["validation"] * (len(rows) + len(fresh))])
    named = set(leaks(keys, split)) - set(leaks(subject.inputs, subject.split))
    planted = set(range(len(subject.ids), len(subject.ids) + len(rows)))
    copied = {subject.inputs[row] for row in rows}
    return Control(
        len(named & planted),
        len(planted),
        sum(keys[row] not in copied for row in named - planted),
    )


# --------------------------------------------------------------------------- in one column


def target_leakage(subject: Subject, limits: Limits, seed: int) -> Statement:
    """A column, or an axis of the features, that tells the label all by itself."""
    rng = np.random.default_rng([seed, 9])
    rows = neighbours.sample(subject.rows("train"), SCORED_ROWS)
    labels = subject.labels[rows]
    names, columns = candidates(subject, rows)
    halves = neighbours.folds(labels, np.arange(len(rows)), 2, rng)
    scores = np.array([column_scores(column, labels, halves) for column in columns.T])
    scores = scores.reshape(-1, 2)
    typical = np.median(scores, axis=0) if len(scores) else np.array([0.0, 0.0])
    over = [place for place in range(len(names)) if scores[place, 0] > limits.max_column_score]
    far = [place for place in over if scores[place, 0] > typical[0] + MARGIN]
    marks = _marks(scores[:, 1], limits) if not over else []
    by_order = column_scores(rows.astype(np.float64), labels, halves)[0]
    chance = 1 / max(len(np.unique(labels)), 1)
    sorted_rows = by_order > (1 + chance) / 2
    best = int(np.argmax(scores[:, 0])) if len(scores) else None
    found = [names[place] for place in [*far, *over, *marks]]
    return state(
        "target_leakage",
        _plant_columns(labels, halves, limits, rng),
        method="a small tree on one column at a time, fitted on one half of the train rows and "
        "scored on the other (balanced accuracy)",
        n=len(rows),
        estimate=None if best is None else float(scores[best, 0]),
        interval=None if best is None else wilson(round(scores[best, 0] * len(rows)), len(rows)),
        limit=limits.max_column_score,
        verdict="shut" if far else "warn" if over or marks or sorted_rows else "open",
        because=_column_sentence(names, scores, best, chance, by_order, sorted_rows, found),
        suspect=_column_suspects(found, sorted_rows),
        more={"typical_score": float(typical[0]), "score_of_order": by_order},
    )


def candidates(subject: Subject, rows: np.ndarray) -> tuple[list[str], np.ndarray]:
    """Names and values (len(rows), C) of the feature axes and of the columns that vary; of very
    many columns those whose class means lie furthest apart (eta squared; a leak has nearly 1)."""
    x = subject.vectors[rows]
    varying = np.flatnonzero(x.min(axis=0) < x.max(axis=0)) if len(rows) else np.arange(0)
    if len(varying) > SCORED_COLUMNS:
        share = _between_share(x[:, varying].astype(np.float64), subject.labels[rows])
        varying = np.sort(varying[np.argsort(-share, kind="stable")[:SCORED_COLUMNS]])
    axes = {name: np.nan_to_num(values[rows]) for name, values in subject.features.items()}
    axes = {name: values for name, values in axes.items() if np.ptp(values) > 0}
    names = [*axes, *(f"column {place}" for place in varying)]
    return names, np.column_stack([*axes.values(), x[:, varying]])


def _between_share(x: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """(C,) share of each column's variance that lies between the classes."""
    total, between = x.var(axis=0), np.zeros(x.shape[1])
    for label in np.unique(labels):
        inside = labels == label
        between += inside.mean() * (x[inside].mean(axis=0) - x.mean(axis=0)) ** 2
    return between / np.maximum(total, 1e-30)


def column_scores(
    column: np.ndarray, labels: np.ndarray, halves: np.ndarray
) -> tuple[float, float]:
    """How well one column (M,) tells the labels, on rows the tree has not seen: balanced accuracy
    over all classes, and the best of one class against the rest."""
    from sklearn.tree import DecisionTreeClassifier

    classes, y = np.unique(labels, return_inverse=True)
    predicted = np.zeros(len(y), dtype=np.int64)
    for half in (0, 1):
        inside = halves == half
        if inside.all() or not inside.any():
            return 0.0, 0.0
        tree = DecisionTreeClassifier(
            max_leaf_nodes=2 * len(classes), class_weight="balanced", random_state=0
        )
        tree.fit(column[~inside, None], y[~inside])
        predicted[inside] = tree.predict(column[inside, None])
    table = np.zeros((len(classes), len(classes)))
    np.add.at(table, (y, predicted), 1)
    hit = np.diag(table) / table.sum(axis=1)
    wrong = (table.sum(axis=0) - np.diag(table)) / np.maximum(len(y) - table.sum(axis=1), 1)
    return float(hit.mean()), float(((hit + 1 - wrong) / 2).max())


def _marks(scores: np.ndarray, limits: Limits) -> list[int]:
    """Columns that single out one class almost perfectly while the next best column does not."""
    order = np.argsort(-scores, kind="stable")
    if len(order) < 2 or scores[order[0]] <= limits.max_column_score:
        return []
    return [int(order[0])] if scores[order[1]] < scores[order[0]] - MARGIN / 4 else []


def _plant_columns(
    labels: np.ndarray, halves: np.ndarray, limits: Limits, rng: np.random.Generator
) -> Control:
    """Columns that hold the label in code, a little blurred, and the same ones shuffled."""
    found = false = 0
    num_planted = NUM_PLANTED // 2
    for _ in range(num_planted):
        code = rng.permutation(int(labels.max(initial=0)) + 1)[labels]
        leak = code + rng.normal(0, 0.05, len(labels))
        for column, planted in ((leak, True), (rng.permutation(leak), False)):
            named = column_scores(column, labels, halves)[0] > limits.max_column_score
            found, false = found + (named and planted), false + (named and not planted)
    return Control(int(found), num_planted, int(false))


def _column_sentence(
    names: list[str],
    scores: np.ndarray,
    best: int | None,
    chance: float,
    by_order: float,
    sorted_rows: bool,
    found: list[str],
) -> str:
    if best is None:
        return "No column or feature axis varies over the train rows, so none tells the label."
    order = (
        f"the order of the rows tells it too ({by_order:.2f}: they are sorted by class)"
        if sorted_rows
        else f"the order of the rows scores {by_order:.2f}"
    )
    listed = f"; look at {', '.join(dict.fromkeys(found))}" if found else ""
    return (
        f"The best of {len(names)} columns and feature axes alone, {names[best]}, tells the label "
        f"with balanced accuracy {scores[best, 0]:.2f} (chance {chance:.2f}, median column "
        f"{np.median(scores[:, 0]):.2f}), and {order}{listed}."
    )


def _column_suspects(found: list[str], sorted_rows: bool) -> tuple[str, ...]:
    if found:
        return (
            "the label, or something known only after it, is written in the input",
            "a mark of the source (scanner, watermark, padding) that goes with the class",
            "the classes really are this easy",
        )
    return ("the source lists the rows class by class: shuffle before batching",) * sorted_rows
