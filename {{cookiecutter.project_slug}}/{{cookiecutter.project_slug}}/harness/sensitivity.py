"""What a study is sensitive to: the share of the trials' ranking that one parameter explains.

The share is the variance of the mean rank over groups of a parameter's values (quartiles, or its
choices), divided by the variance of the ranks: the correlation ratio behind the Kruskal-Wallis
test. It needs no model of the surface, and 20 trials suffice to name one dominant parameter.
"""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np

from .space import distributions

NUM_RESAMPLES = 1000
NUM_PERMUTATIONS = 2000
NUM_GROUPS = 4
MIN_TRIALS = 2 * NUM_GROUPS  # with one trial in each group, groups explain everything
MIN_TRIALS_PED_ANOVA = 50  # on 20 trials it named the wrong parameter in every third study


def sensitivities(rows: list[dict], space: dict[str, dict], seed: int) -> list[dict]:
    """{parameter, share, interval, null_95, detected, method, ped_anova} per key of `space`, the
    largest share first. `rows` are those of study.table.

    `interval` [low, high] holds the share of endless trials in 95 % of studies: 1,000 resamples of
    trials with the share that chance adds taken off each (as in epsilon squared, Kelley 1935;
    without that the interval misses a weak parameter's true share in 9 of 10 studies).
    `null_95` is what chance alone exceeds, for any parameter, in 5 % of studies: permutations, with
    the min-P rule of Westfall and Young (1993). `detected` = share above it; often none is.
    `ped_anova` is Optuna's importance, or None below 50 complete trials. Below 8 finished trials
    the numbers are None and nothing is detected.

    A pruned trial counts with its last reported value, a failed one as worse than all. Replayed on
    240 real curves, 20 trials at a time with the median pruner: wrong first parameter in 33 of 300
    studies (29 without pruning), against 157 when pruned trials were left out, 55 when they were
    ranked behind all complete ones and 128 when tied there.
    """
    names = sorted(space)
    if len(rows) < MIN_TRIALS:
        method = f"none: {len(rows)} of the {MIN_TRIALS} trials it takes have finished"
        return [_row(name, None, None, None, method, None) for name in names]
    ranks = _ranks(rows)
    columns = {name: [row["parameters"][name] for row in rows] for name in names}
    groups = {name: _groups(columns[name], space[name]) for name in names}
    generator = np.random.default_rng(seed)
    limits = _null_95(ranks, [flags for flags, _ in groups.values()], generator)
    weights, importances = _resamples(len(rows), generator), _ped_anova(rows, space)
    found = []
    for (name, (flags, over)), limit in zip(groups.items(), limits, strict=True):
        share = float(_shares(ranks, flags, np.ones((1, len(rows))))[0])
        interval, method = _interval(ranks, flags, weights), f"mean rank over {over}"
        found.append(_row(name, share, interval, float(limit), method, importances.get(name)))
    return sorted(found, key=lambda row: (-row["share"], row["parameter"]))


def _row(name, share, interval, null_95, method: str, ped_anova: float | None) -> dict:
    return {
        "parameter": name,
        "share": share,
        "interval": interval,
        "null_95": null_95,
        "detected": share is not None and share > null_95,
        "method": method,
        "ped_anova": ped_anova,
    }


def _ranks(rows: list[dict]) -> np.ndarray:
    """`(n,)` mid-ranks of the values around 0; failed trials share the last places."""
    values = np.array([np.inf if row["state"] == "failed" else row["value"] for row in rows])
    ranks = _mid_ranks(values)
    return ranks - ranks.mean()


def _mid_ranks(values: np.ndarray) -> np.ndarray:
    """Ranks from 0; equal values share the middle of their places."""
    ordered = np.sort(values)
    below, up_to = (np.searchsorted(ordered, values, side=side) for side in ("left", "right"))
    return (below + up_to - 1) / 2


def _groups(values: list[Any], spec: dict) -> tuple[np.ndarray, str]:
    """`(n, k)` flags of the group each trial is in, and what the groups are."""
    if "choices" in spec:
        places, over = np.array([spec["choices"].index(value) for value in values]), "choices"
    elif len(set(values)) <= NUM_GROUPS:
        places, over = np.unique(np.array(values, dtype=float), return_inverse=True)[1], "values"
    else:
        ranks = _mid_ranks(np.array(values, dtype=float))
        places, over = np.floor((ranks + 0.5) * NUM_GROUPS / len(values)).astype(int), "quartiles"
    return np.eye(places.max() + 1)[places], over


def _shares(ranks: np.ndarray, flags: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """`(R,)` shares, one per row of `weights` `(R, n)`: how often each trial counts."""
    counts = np.maximum(weights @ flags, 1)
    between = ((weights @ (ranks[:, None] * flags)) ** 2 / counts).sum(axis=1)
    mean = (weights @ ranks) ** 2 / weights.shape[1]
    total = weights @ ranks**2 - mean
    return np.where(total > 1e-9, (between - mean) / np.maximum(total, 1e-9), 0.0)


def _interval(ranks: np.ndarray, flags: np.ndarray, weights: np.ndarray) -> list[float]:
    shares, num_rows = _shares(ranks, flags, weights), len(ranks)
    spare = max(1, num_rows - int((flags.sum(axis=0) > 0).sum()))
    unbiased = 1 - (1 - shares) * (num_rows - 1) / spare
    return np.clip(np.quantile(unbiased, [0.025, 0.975]), 0, 1).tolist()


def _resamples(num_rows: int, generator: np.random.Generator) -> np.ndarray:
    """`(R, n)`: how often each trial was drawn, n draws with replacement."""
    share = np.full(num_rows, 1 / num_rows)
    return generator.multinomial(num_rows, share, size=NUM_RESAMPLES).astype(float)


def _null_95(ranks: np.ndarray, flags: list[np.ndarray], generator) -> np.ndarray:
    """`(num_parameters,)` shares; some parameter exceeds its own in 5 % of the permutations.

    All parameters see the same permutations of the ranks, and each limit leaves the same chance,
    so parameters with two choices and with four quartiles are judged alike.
    """
    shuffled = generator.permuted(np.tile(ranks, (NUM_PERMUTATIONS, 1)), axis=1)
    shares = np.empty((NUM_PERMUTATIONS, len(flags)))
    for column, flag in enumerate(flags):
        between = ((shuffled @ flag) ** 2 / np.maximum(flag.sum(axis=0), 1)).sum(axis=1)
        shares[:, column] = between / max(float(ranks @ ranks), 1e-9)
    ordered = np.sort(shares, axis=0)
    lower = [np.searchsorted(ordered[:, c], shares[:, c], side="left") for c in range(len(flags))]
    p_values = 1 - np.stack(lower, axis=1) / NUM_PERMUTATIONS
    return np.quantile(shares, 1 - np.quantile(p_values.min(axis=1), 0.05), axis=0)


def _ped_anova(rows: list[dict], space: dict[str, dict]) -> dict[str, float]:
    """Optuna's PED-ANOVA importances (Watanabe, Bansal and Hutter, IJCAI 2023) by parameter; they
    speak of what decides the best tenth. Empty below 50 complete trials."""
    complete = [row for row in rows if row["state"] == "complete"]
    if len(complete) < MIN_TRIALS_PED_ANOVA:
        return {}
    import optuna

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    kinds, study = distributions(space), optuna.create_study()
    for row in complete:
        study.add_trial(
            optuna.create_trial(params=row["parameters"], distributions=kinds, value=row["value"])
        )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # "experimental" in Optuna 4; the versions are pinned
        evaluator = optuna.importance.PedAnovaImportanceEvaluator()
    return optuna.importance.get_param_importances(study, evaluator=evaluator)
