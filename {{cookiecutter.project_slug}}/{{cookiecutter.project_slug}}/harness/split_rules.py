"""The rules by which units of rows find their part: stratified by hash, by joining, or by time."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Sequence

import numpy as np

from .records import Records


def units(
    records: Records, clusters: Iterable[Iterable[int]], groups: Sequence[str] | None
) -> list[list[int]]:
    """The readable rows, joined over `clusters` and over equal `groups`; rows ascend in a unit."""
    usable = np.array([name not in records.unreadable for name in records.ids], dtype=bool)
    links = [list(cluster) for cluster in clusters]
    if groups is not None:
        members: dict[str, list[int]] = {}
        for row, group in enumerate(groups):
            members.setdefault(group, []).append(row)
        links += members.values()
    parent = list(range(len(records)))
    for link in links:
        rows = [int(row) for row in link if usable[row]]
        for row in rows[1:]:
            parent[_root(parent, row)] = _root(parent, rows[0])
    found: dict[int, list[int]] = {}
    for row in np.flatnonzero(usable).tolist():
        found.setdefault(_root(parent, row), []).append(row)
    return list(found.values())


def _root(parent: list[int], row: int) -> int:
    while parent[row] != row:
        parent[row] = parent[parent[row]]
        row = parent[row]
    return row


def chance(seed: int, name: str) -> float:
    """A number in [0, 1) that depends on the seed and the name alone."""
    digest = hashlib.blake2b(f"{seed}:{name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") / 2**64


def _unit_chance(records: Records, unit: list[int], seed: int) -> float:
    return chance(seed, min(records.ids[row] for row in unit))


# --------------------------------------------------------------------------- a first split


def require_units(records: Records, units: list[list[int]], num_parts: int) -> None:
    """Every part needs a unit, and one of each class unless groups decide where a class can go."""
    if len(units) < num_parts:
        raise ValueError(
            f"{len(units)} separable rows (duplicates and groups count once) cannot fill "
            f"{num_parts} parts: add data, or ask for fewer splits or folds."
        )
    if records.groups is not None:
        return
    counts = Counter(label for unit in units for label in set(records.labels[unit].tolist()))
    for label, name in enumerate(records.class_names):
        if counts[label] < num_parts:
            raise ValueError(
                f"Class {name!r} has {counts[label]} separable rows (duplicates count once), and "
                f"{num_parts} parts need one each: add rows, merge or drop the class, or set "
                "data.split.test=none or fewer folds."
            )


def stratify(
    records: Records, units: list[list[int]], shares: Sequence[float], seed: int
) -> np.ndarray:
    """Part of every row, (N,), -1 for none.

    Each unit, in an order drawn by hash, goes to the part whose share of its classes is furthest
    from filled. Units of several rows come first: they are harder to place.
    """
    labels = records.labels.tolist()
    counts = [Counter(labels[row] for row in unit) for unit in units]
    total = Counter(labels[row] for unit in units for row in unit)
    missing = {label: [share * total[label] for share in shares] for label in total}
    keys = [(len(unit) == 1, _unit_chance(records, unit, seed)) for unit in units]
    order = sorted(range(len(units)), key=keys.__getitem__)
    choice = [0] * len(units)
    for unit in order:
        wish = [0.0] * len(shares)
        for label, count in counts[unit].items():
            for part, lack in enumerate(missing[label]):
                wish[part] += lack * count / total[label]
        choice[unit] = wish.index(max(wish))
        for label, count in counts[unit].items():
            missing[label][choice[unit]] -= count
    _fill_gaps(choice, counts, len(shares), order)
    parts = np.full(len(records), -1, dtype=np.int64)
    for unit, part in zip(units, choice, strict=True):
        parts[unit] = part
    return parts


def _fill_gaps(choice: list[int], counts: list[Counter], num_parts: int, order: list[int]) -> None:
    """Give a part that lacks a class the smallest unit of it, from a part that can spare one."""
    owners = Counter((label, choice[unit]) for unit in order for label in counts[unit])
    for label in sorted({label for label, _ in owners}):
        for part in range(num_parts):
            if owners[label, part]:
                continue
            spare = [u for u in order if label in counts[u] and owners[label, choice[u]] > 1]
            if spare:
                unit = min(spare, key=lambda u: counts[u].total())
                for other in counts[unit]:
                    owners[other, choice[unit]] -= 1
                    owners[other, part] += 1
                choice[unit] = part


# --------------------------------------------------------------------------- a split that grows


def join(
    records: Records,
    units: list[list[int]],
    placed: dict[int, int],
    shares: Sequence[float],
    seed: int,
) -> np.ndarray:
    """Part of every row, (N,), -1 for none: placed rows stay, the others join.

    New rows of a unit follow its placed rows (the first part, train, where those disagree); a unit
    that is all new goes where the hash of its name falls among the shares.
    """
    parts = np.full(len(records), -1, dtype=np.int64)
    edges = np.cumsum(shares)[:-1] / np.sum(shares)
    for unit in units:
        old = [placed[row] for row in unit if row in placed]
        fresh = int(np.searchsorted(edges, _unit_chance(records, unit, seed), side="right"))
        for row in unit:
            parts[row] = placed.get(row, min(old, default=fresh))
    return parts


# --------------------------------------------------------------------------- by time


def starts(times: np.ndarray, shares: Sequence[float]) -> np.ndarray:
    """First time of every part but the first; rows of one moment are never divided."""
    moments, counts = np.unique(times, return_counts=True)
    if len(moments) < len(shares):
        raise ValueError(
            f"The data has {len(moments)} distinct times, and {len(shares)} splits in order of "
            "time need one each: use finer times, or another split.strategy."
        )
    before = np.concatenate([[0], np.cumsum(counts)[:-1]]) / counts.sum()
    cuts = np.searchsorted(before, np.cumsum(shares)[:-1] - 1e-9)
    for part in range(len(cuts)):  # at least one moment for every part
        lowest = cuts[part - 1] + 1 if part else 1
        cuts[part] = min(max(cuts[part], lowest), len(moments) - len(cuts) + part)
    return moments[cuts]


def known_starts(times: np.ndarray, known: dict[int, str], names: Sequence[str]) -> np.ndarray:
    """The starts an earlier split had: new rows join the stretch of time they lie in."""
    found = []
    for name in names[1:]:
        old = [times[row] for row, split in known.items() if split == name]
        found.append(min(old) if old else np.inf)
    return np.array(found)
