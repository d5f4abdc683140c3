"""Distances between rows: the graph of nearest neighbours, and what follows from it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

MAX_ROWS = 20_000  # exact neighbours of 20k rows take seconds on one thread, of 1M rows hours
MAX_COLUMNS = 512  # wider rows are projected before distances and probes
NUM_COMPONENTS = 128
PROJECTION_ROWS = 1_000
NUM_NEIGHBOURS = 5
NUM_VOTERS = 10  # of the neighbours probe; with the rule of label_noise, recall .99 on digits
NEAR_FACTOR = 0.4  # of the median nearest distance; on digits 19-20 of 20 jittered copies
CHANCE_SHARE = 1e-3  # share of rows that may lie this near by chance alone


@dataclass(frozen=True)
class Graph:
    """The k nearest other rows of `rows`: `indices` (M, k) are row numbers of the whole data,
    `distances` (M, k) float64 are exact, ascending, in the space of the full rows."""

    rows: np.ndarray
    indices: np.ndarray
    distances: np.ndarray
    scale: float  # median distance to the nearest row that is not identical; 0 if there is none
    near: float  # a pair below this distance counts as near duplicates


def sample(rows: np.ndarray, size: int = MAX_ROWS) -> np.ndarray:
    """At most `size` of the rows, ascending; always the same ones, so that axes agree."""
    if len(rows) <= size:
        return rows
    return np.sort(np.random.default_rng(0).choice(rows, size, replace=False))


def projection(train: np.ndarray) -> Callable[[np.ndarray], np.ndarray]:
    """A map of (N, D) rows to at most MAX_COLUMNS columns, fitted on (M, D) train rows alone.

    Wide rows go to their first principal components, by the Gram matrix of a few rows: its cost
    does not grow with the square of the width.
    """
    if train.shape[1] <= MAX_COLUMNS:
        return lambda rows: np.asarray(rows, dtype=np.float32)
    few = train[sample(np.arange(len(train)), PROJECTION_ROWS)].astype(np.float32)
    mean = few.mean(axis=0)
    values, directions = np.linalg.eigh((few - mean) @ (few - mean).T)
    keep = np.argsort(values)[::-1][:NUM_COMPONENTS]
    keep = keep[values[keep] > 1e-6 * max(float(values.max()), 1e-12)]
    basis = (few - mean).T @ directions[:, keep] / np.sqrt(values[keep])

    def project(rows: np.ndarray) -> np.ndarray:
        blocks = [rows[start : start + 1024] for start in range(0, len(rows), 1024)]
        return np.concatenate([(block - mean) @ basis for block in blocks]).astype(np.float32)

    return project


def nearest(
    compact: np.ndarray,
    full: np.ndarray,
    rows: np.ndarray,
    queries: tuple[np.ndarray, np.ndarray] | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """Row numbers and exact distances (M, k), ascending, of the `rows` nearest to each query.

    `queries` are (compact, full) points; without them `rows` themselves, each without itself. The
    search runs on the compact rows; the distances are taken again on the full ones, since the
    usual expansion of (a - b)^2 loses the small differences that matter here.
    """
    from sklearn.neighbors import NearestNeighbors

    k = min(NUM_NEIGHBOURS, len(rows) - (queries is None))
    if k < 1:
        return np.zeros((0, 0), dtype=np.int64), np.zeros((0, 0))
    search = NearestNeighbors(n_neighbors=k, algorithm="brute").fit(compact[rows])
    given = None if queries is None else queries[0]
    found = rows[search.kneighbors(given, return_distance=False)]
    exact = _distances(full[rows] if queries is None else queries[1], full, found)
    order = np.argsort(exact, axis=1, kind="stable")
    return np.take_along_axis(found, order, 1), np.take_along_axis(exact, order, 1)


def _distances(points: np.ndarray, full: np.ndarray, found: np.ndarray) -> np.ndarray:
    exact = np.zeros(found.shape)
    step = max(1, 2**22 // max(found.shape[1] * full.shape[1], 1))  # 32 MiB at a time
    for start in range(0, len(points), step):
        block = slice(start, start + step)
        gap = points[block, None, :].astype(np.float64) - full[found[block]]
        exact[block] = np.sqrt(np.einsum("mkd,mkd->mk", gap, gap))
    return exact


def graph(compact: np.ndarray, full: np.ndarray, rows: np.ndarray) -> Graph:
    indices, distances = nearest(compact, full, rows)
    if not len(indices):
        return Graph(rows, indices, distances, 0.0, 0.0)
    apart = np.where(distances > 0, distances, np.inf).min(axis=1)
    apart = apart[np.isfinite(apart)]
    scale = float(np.median(apart)) if len(apart) else 0.0
    return Graph(rows, indices, distances, scale, scale * near_factor(distances))


def near_factor(distances: np.ndarray) -> float:
    """How far below the median nearest distance a pair counts as near duplicates.

    In d dimensions a share 1 - 2^-(f^d) of evenly spread rows has a neighbour below f times the
    median nearest distance: a tenth of the rows for d = 2 and f = 0.4. So f falls with the
    dimension that the rows really have (Levina and Bickel 2004, from the distance ratios).
    """
    ratios = distances[:, -1:] / np.where(distances[:, :-1] > 0, distances[:, :-1], np.nan)
    logs = np.log(ratios[np.isfinite(ratios) & (ratios > 0)])
    if not len(logs) or logs.mean() <= 0:
        return NEAR_FACTOR
    dimension = 1 / logs.mean()
    return min(NEAR_FACTOR, (CHANCE_SHARE / np.log(2)) ** (1 / dimension))


def near_pairs(found: Graph) -> tuple[np.ndarray, np.ndarray]:
    """(P, 2) row numbers, lower first, of the pairs nearer than `found.near`, and (P,) distances;
    the nearest pair first."""
    m, k = np.nonzero((found.distances < found.near) | (found.distances == 0))
    pairs = np.sort(np.stack([found.rows[m], found.indices[m, k]], axis=1), axis=1)
    pairs, first = np.unique(pairs, axis=0, return_index=True)
    gaps = found.distances[m, k][first]
    order = np.lexsort((pairs[:, 1], pairs[:, 0], gaps))
    return pairs[order], gaps[order]


def join(pairs: Iterable[Sequence[int]], num_rows: int) -> np.ndarray:
    """(N,) cluster of every row, named by its lowest row, when the rows of each pair belong
    together."""
    parent = list(range(num_rows))

    def root(row: int) -> int:
        while parent[row] != row:
            parent[row] = parent[parent[row]]
            row = parent[row]
        return row

    for first, second in pairs:
        a, b = root(int(first)), root(int(second))
        parent[max(a, b)] = min(a, b)
    return np.array([root(row) for row in range(num_rows)], dtype=np.int64)


def folds(
    labels: np.ndarray, clusters: np.ndarray, num_folds: int, rng: np.random.Generator
) -> np.ndarray:
    """(M,) fold of every row: clusters whole, classes spread evenly, drawn by `rng`.

    `clusters` (M,) names each row's cluster; a cluster counts by the label of its first row.
    """
    _, first, inverse = np.unique(clusters, return_index=True, return_inverse=True)
    order = rng.permutation(len(first))
    order = order[np.argsort(labels[first][order], kind="stable")]
    fold_of = np.empty(len(first), dtype=np.int64)
    fold_of[order] = np.arange(len(first)) % num_folds
    return fold_of[inverse]


def voters(x: np.ndarray, fold_of: np.ndarray) -> np.ndarray:
    """(M, k) places in x (M, d) of each row's nearest rows that lie in other folds."""
    from sklearn.neighbors import NearestNeighbors

    k = min(NUM_VOTERS, min(int(np.sum(fold_of != fold)) for fold in np.unique(fold_of)))
    found = np.zeros((len(x), k), dtype=np.int64)
    if k == 0:  # all rows are one cluster, so in one fold
        return found
    for fold in np.unique(fold_of):
        inside, others = fold_of == fold, np.flatnonzero(fold_of != fold)
        search = NearestNeighbors(n_neighbors=k, algorithm="brute").fit(x[others])
        found[inside] = others[search.kneighbors(x[inside], return_distance=False)]
    return found


def votes(labels: np.ndarray, found: np.ndarray, num_classes: int) -> np.ndarray:
    """(M, num_classes) share of each row's voters that carry each label."""
    counts = np.zeros((len(found), num_classes))
    np.add.at(counts, (np.arange(len(found))[:, None], labels[found]), 1)
    return counts / max(found.shape[1], 1)
