"""Whether the place of a number in its row means something: what a network could make use of."""

from __future__ import annotations

import numpy as np

from . import neighbours
from .subject import Subject, rounded

NUM_ROWS = 1_000
MAX_PAIRS = 1_000
NUM_PERMUTATIONS = 50
# Neighbours correlate this much more than positions drawn at random, as Fisher's z: it spreads out
# correlations near 1. Digits 2.8 and 4.3 along their two axes, a table of 30 measurements 1.4.
MIN_EXCESS = 1.6


def structure(subject: Subject, seed: int) -> dict:
    """Mean |correlation| of positions next to each other along each axis of a row, against the same
    number of positions paired at random, and the axes along which neighbours belong together.

    {"shape", "axes": [{"axis", "neighbours", "random_mean", "random_max", "local"}]}
    """
    rng = np.random.default_rng([seed, 14])
    x = subject.vectors[neighbours.sample(subject.rows("train"), NUM_ROWS)].astype(np.float64)
    usable = np.ptp(x, axis=0) > 0
    z = np.zeros(x.T.shape)  # (D, N): a column is contiguous
    z[usable] = ((x[:, usable] - x[:, usable].mean(axis=0)) / x[:, usable].std(axis=0)).T
    axes = [
        {"axis": axis, **_along(z, usable, _pairs(subject.shape, axis), rng)}
        for axis, length in enumerate(subject.shape)
        if length > 1
    ]
    return {"shape": list(subject.shape), "axes": axes}


def _pairs(shape: tuple[int, ...], axis: int) -> np.ndarray:
    """(P, 2) columns of the flattened row that are next to each other along `axis`."""
    places = np.moveaxis(np.arange(np.prod(shape)).reshape(shape), axis, 0)
    return np.stack([places[:-1].ravel(), places[1:].ravel()], axis=1)


def _along(
    z: np.ndarray, usable: np.ndarray, pairs: np.ndarray, rng: np.random.Generator
) -> dict[str, float | bool | None]:
    pairs = pairs[usable[pairs].all(axis=1)]
    if len(pairs) > MAX_PAIRS:
        pairs = pairs[rng.choice(len(pairs), MAX_PAIRS, replace=False)]
    places = np.flatnonzero(usable)
    if len(pairs) == 0 or len(places) < 4:
        return {"neighbours": None, "random_mean": None, "random_max": None, "local": False}
    found = _correlation(z, pairs)
    null = []
    for _ in range(NUM_PERMUTATIONS):
        first = rng.integers(0, len(places), len(pairs))
        step = rng.integers(1, len(places), len(pairs))
        drawn = np.stack([places[first], places[(first + step) % len(places)]], axis=1)
        null.append(_correlation(z, drawn))
    excess = np.arctanh(min(found, 1 - 1e-9)) / max(np.arctanh(np.mean(null)), 1e-9)
    local = found > max(null) and excess > MIN_EXCESS
    return {
        "neighbours": rounded(found),
        "random_mean": rounded(float(np.mean(null))),
        "random_max": rounded(max(null)),
        "local": bool(local),
    }


def _correlation(z: np.ndarray, pairs: np.ndarray) -> float:
    """Mean |correlation| over pairs of standardised columns of z (D, N)."""
    products = np.einsum("pn,pn->p", z[pairs[:, 0]], z[pairs[:, 1]])
    return float(np.abs(products / z.shape[1]).mean())
