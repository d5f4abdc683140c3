"""Rows that are one row: exact and near duplicates, and duplicates whose labels disagree."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import pairwise

import numpy as np

from ..records import content_hash
from . import neighbours
from .subject import NUM_PLANTED, Control, Limits, Statement, Subject, census, many, state, wilson

JITTER = 0.05  # of each column's spread: a change that a person would not call another row


def exact_clusters(keys: Sequence[str], rows: Iterable[int] | None = None) -> list[list[int]]:
    """The sets of two or more rows that share a key; rows whose key is "" belong to none."""
    found: dict[str, list[int]] = {}
    for row in range(len(keys)) if rows is None else rows:
        if keys[row]:
            found.setdefault(keys[row], []).append(int(row))
    return [cluster for cluster in found.values() if len(cluster) > 1]


def near_clusters(vectors: np.ndarray, rows: np.ndarray | None = None) -> list[list[int]]:
    """The sets of two or more of the (N, D) rows that are near duplicates of each other.

    Above `neighbours.MAX_ROWS` rows only those of a sample are compared.
    """
    rows = neighbours.sample(np.arange(len(vectors)) if rows is None else rows)
    compact = neighbours.projection(vectors[rows])(vectors)
    pairs, _ = neighbours.near_pairs(neighbours.graph(compact, vectors, rows))
    cluster = neighbours.join(pairs, len(vectors))
    return exact_clusters([str(name) for name in cluster], rows)


def learnable_clusters(subject: Subject) -> np.ndarray:
    """(M,) cluster of every row of `subject.learnable`: exact and near duplicates together."""
    groups = exact_clusters(subject.inputs, subject.learnable)
    links = [pair for group in groups for pair in pairwise(group)]
    pairs, _ = neighbours.near_pairs(subject.learnable_graph)
    return neighbours.join([*links, *pairs], len(subject.ids))[subject.learnable]


# --------------------------------------------------------------------------- exact


def exact_duplicates(subject: Subject, limits: Limits, seed: int) -> Statement:
    """Rows of one split that repeat another row of it byte for byte."""
    keys = [f"{split} {key}" if key and split else "" for split, key in
            zip(subject.split, subject.content, strict=True)]  # fmt: skip
    rows = [row for row in subject.readable if keys[row]]
    groups = sorted(exact_clusters(keys, rows), key=lambda group: (-len(group), group[0]))
    extra = [row for group in groups for row in group[1:]]
    share = len(extra) / max(len(rows), 1)
    return state(
        "exact_duplicates",
        _plant_exact(subject, np.random.default_rng([seed, 2])),
        method="hash of each row's content, compared within each split",
        n=len(rows),
        estimate=share,
        interval=census(share),
        limit=limits.max_duplicate_share,
        verdict="warn" if share > limits.max_duplicate_share else "open",
        because=f"{len(extra):,} of {len(rows):,} rows ({share:.2%}) repeat another row of their "
        f"split byte for byte ({many(len(groups), 'set')}).",
        ids=subject.names(extra),
        suspect=("rows collected twice", "files copied or oversampled on disk"),
    )


def _plant_exact(subject: Subject, rng: np.random.Generator) -> Control:
    """Copies of decoded rows must hash alike, copies with one bit changed must not."""
    rows = rng.permutation(subject.readable)[: 2 * NUM_PLANTED]
    arrays = [array for row in rows if (array := _decoded(subject, row)) is not None]
    arrays = arrays[:NUM_PLANTED]
    found = sum(content_hash(array) == content_hash(array.copy()) for array in arrays)
    false = sum(content_hash(array) == content_hash(_one_bit_off(array)) for array in arrays)
    return Control(found, len(arrays), false)


def _decoded(subject: Subject, row: int) -> np.ndarray | None:
    try:
        array = np.array(subject.raw(int(row)))
    except Exception:  # what cannot be decoded is the business of `corrupt`
        return None
    return array if array.size and array.dtype != object else None


def _one_bit_off(array: np.ndarray) -> np.ndarray:
    data = bytearray(np.ascontiguousarray(array).tobytes())
    data[0] ^= 1
    return np.frombuffer(bytes(data), dtype=array.dtype).reshape(array.shape)


# --------------------------------------------------------------------------- near


def near_duplicates(subject: Subject, limits: Limits, seed: int) -> Statement:
    """Rows of other content that are nearer to each other than rows of this data are."""
    pairs, _ = different(subject)
    graph, total = subject.graph, len(subject.readable)
    rows = list(dict.fromkeys(int(row) for row in pairs.ravel()))
    n = len(graph.rows)
    share = len(rows) / max(n, 1)
    across = sum(subject.split[a] != subject.split[b] for a, b in pairs)
    sampled = f"; only {n:,} of {total:,} rows, drawn at random, were compared" if n < total else ""
    factor = graph.near / graph.scale if graph.scale else 0.0
    return state(
        "near_duplicates",
        plant_near(subject, np.random.default_rng([seed, 3])),
        method="nearest neighbours: a pair nearer than a fraction of the median nearest distance",
        n=n,
        estimate=share,
        interval=census(share) if n == total else wilson(len(rows), n),
        limit=limits.max_duplicate_share,
        verdict="warn" if share > limits.max_duplicate_share else "open",
        because=f"{len(rows):,} of {n:,} rows have a near duplicate (nearer than {factor:.2f} of "
        f"the median nearest distance): {many(len(pairs), 'pair')}, {across:,} across "
        f"splits{sampled}.",
        ids=subject.names(rows),
        suspect=("frames of one recording", "copies that were re-encoded or resized"),
        more={"pairs": len(pairs), "pairs_across_splits": int(across), "near_factor": factor},
    )


def different(subject: Subject) -> tuple[np.ndarray, np.ndarray]:
    """The near pairs (P, 2) whose content is not the same, and their distances, nearest first."""
    pairs, gaps = neighbours.near_pairs(subject.graph)
    keep = [subject.content[a] != subject.content[b] for a, b in pairs]
    keep = np.array(keep, dtype=bool)
    return pairs[keep], gaps[keep]


def plant_near(subject: Subject, rng: np.random.Generator) -> Control:
    """Jittered copies of rows must be found near their origin, and near nothing else."""
    graph = subject.graph
    rows = np.sort(rng.permutation(graph.rows)[:NUM_PLANTED])
    if graph.scale == 0:
        return Control(0, len(rows), 0)
    spread = subject.vectors[neighbours.sample(graph.rows, 2_000)].std(axis=0)
    copies = subject.vectors[rows] + JITTER * spread * rng.standard_normal(
        (len(rows), len(spread)), dtype=np.float32
    )
    indices, distances = neighbours.nearest(
        subject.compact, subject.vectors, graph.rows, (subject.project(copies), copies)
    )
    found = false = 0
    for origin, others, gaps in zip(rows, indices, distances, strict=True):
        close = others[gaps < graph.near]
        beside = np.linalg.norm(subject.vectors[close] - subject.vectors[origin], axis=1)
        found += origin in close or bool(np.any(beside == 0))
        false += int(np.sum(beside >= graph.near))
    return Control(found, len(rows), false)


# --------------------------------------------------------------------------- conflicting labels


def conflicting_labels(subject: Subject, limits: Limits, seed: int) -> Statement:
    """Rows that are the same input under different labels: no model can fit them all."""
    groups = conflicts(subject.inputs, subject.labels)
    rows = [row for group in groups for row in group]
    pairs, _ = different(subject)
    same = [subject.inputs[a] == subject.inputs[b] for a, b in pairs]
    near = sum(
        subject.labels[a] != subject.labels[b]
        for (a, b), alike in zip(pairs, same, strict=True)
        if not alike
    )
    share = len(rows) / max(len(subject.readable), 1)
    floor = loss_floor(subject)
    verdict = "open" if not rows else "warn" if share <= limits.max_label_noise else "shut"
    return state(
        "conflicting_labels",
        _plant_conflicts(subject, np.random.default_rng([seed, 4])),
        method="labels within each set of identical inputs; near duplicates reported apart",
        n=len(subject.readable),
        estimate=share,
        interval=census(share),
        limit=limits.max_label_noise,
        verdict=verdict,
        because=f"{len(rows):,} of {len(subject.readable):,} rows ({share:.2%}) are identical to a "
        f"row of another label ({many(len(groups), 'set')})"
        + (f", which keeps the train loss above {floor:.4g} nats" if floor else "")
        + f"; labels differ in {many(int(near), 'pair')} of near duplicates.",
        ids=subject.names(rows),
        suspect=("labels are wrong or ambiguous", "the input lacks what tells the classes apart"),
        more={"loss_floor": floor, "near_pairs": int(near)},
    )


def conflicts(inputs: Sequence[str], labels: Sequence[int]) -> list[list[int]]:
    """The sets of identical rows with more than one label, the largest first."""
    groups = [g for g in exact_clusters(inputs) if len({int(labels[row]) for row in g}) > 1]
    return sorted(groups, key=lambda group: (-len(group), group[0]))


def loss_floor(subject: Subject) -> float:
    """The lowest mean cross entropy in nats that any model reaches on the train rows: the entropy
    of the labels within each set of identical inputs, averaged over all train rows."""
    train = subject.rows("train")
    total = 0.0
    for group in exact_clusters(subject.inputs, train):
        counts = np.array(list(Counter(subject.labels[group].tolist()).values()))
        total -= float(np.sum(counts * np.log(counts / counts.sum())))
    return total / max(len(train), 1)


def _plant_conflicts(subject: Subject, rng: np.random.Generator) -> Control:
    """Copies of rows under another label, and as many under their own, which must stay unnamed."""
    rows = rng.permutation(subject.readable)[: 2 * NUM_PLANTED]
    wrong, right = np.array_split(rows, 2)
    shift = rng.integers(1, max(subject.num_classes, 2), len(wrong))
    other = (subject.labels[wrong] + shift) % subject.num_classes
    inputs = [*subject.inputs, *(subject.inputs[row] for row in (*wrong, *right))]
    labels = [*subject.labels, *other, *subject.labels[right]]
    named = {row for group in conflicts(inputs, labels) for row in group}
    before = {row for group in conflicts(subject.inputs, subject.labels) for row in group}
    first = len(subject.ids)
    found = sum(first + place in named for place in range(len(wrong)))
    same_input = {subject.inputs[row] for row in wrong} | {subject.inputs[row] for row in before}
    false = sum(inputs[row] not in same_input for row in named)
    return Control(found, len(wrong), false)
