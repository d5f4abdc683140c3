"""The ladder of cheap predictors that a network must beat, from majority to trees."""

from __future__ import annotations

import warnings

import numpy as np

from . import neighbours

LADDER = ("majority", "logistic", "neighbours", "trees")  # from the plainest up
NUM_TREES = 200
NUM_VOTERS = {"neighbours": neighbours.NUM_VOTERS, "trees": NUM_TREES}


def ladder(
    x_train: np.ndarray,
    y_train: np.ndarray,
    x: np.ndarray,
    y: np.ndarray,
    *,
    num_classes: int,
    seed: int = 0,
) -> dict[str, dict[str, float]]:
    """Every rung fitted on (M, D) train rows and scored on (x, y): name -> {"accuracy",
    "log_loss" (nats)}.

    More than `neighbours.MAX_ROWS` train rows are sampled, and wide rows are projected by train's
    principal components. The same call scores the test rows once they may be read.
    """
    rows = neighbours.sample(np.arange(len(x_train)))
    project = neighbours.projection(x_train[rows])
    known, labels, new = project(x_train[rows]), y_train[rows], project(x)
    found = {}
    for name in LADDER:
        shares = probabilities(name, known, labels, new, num_classes=num_classes, seed=seed)
        loss = log_loss(shares, y, NUM_VOTERS.get(name))
        found[name] = {"accuracy": float(np.mean(shares.argmax(axis=1) == y)), "log_loss": loss}
    return found


def probabilities(
    name: str,
    x_train: np.ndarray,
    y_train: np.ndarray,
    x: np.ndarray,
    *,
    num_classes: int,
    seed: int = 0,
) -> np.ndarray:
    """(N, num_classes) float64 probabilities; a class that train lacks gets the smallest share."""
    if name == "majority" or len(np.unique(y_train)) < 2:
        counts = np.bincount(y_train, minlength=num_classes) + 1.0
        return np.tile(counts / counts.sum(), (len(x), 1))
    model = _model(name, len(x_train), seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a probe that has not converged is still a probe
        model.fit(x_train.astype(np.float64), y_train)
        known = model.predict_proba(x.astype(np.float64))
    shares = np.zeros((len(x), num_classes))
    shares[:, model.classes_] = known
    return shares


def _model(name: str, num_rows: int, seed: int):
    from sklearn.ensemble import ExtraTreesClassifier
    from sklearn.linear_model import LogisticRegression
    from sklearn.neighbors import KNeighborsClassifier
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    if name == "logistic":
        return make_pipeline(StandardScaler(), LogisticRegression(max_iter=200))
    if name == "neighbours":
        return KNeighborsClassifier(min(NUM_VOTERS[name], num_rows), algorithm="brute", n_jobs=1)
    if name == "trees":
        return ExtraTreesClassifier(NUM_TREES, random_state=seed, n_jobs=1)
    raise ValueError(f"There is no baseline {name!r}; the ladder is {LADDER}.")


def log_loss(shares: np.ndarray, y: np.ndarray, num_voters: int | None = None) -> float:
    """Mean cross entropy in nats of (N, C) shares. Shares that are votes are taken as if one voter
    more had no opinion: voters say 0 too easily, and the log of 0 says nothing about them."""
    if num_voters is not None:
        shares = (num_voters * shares + 1 / shares.shape[1]) / (num_voters + 1)
    given = shares[np.arange(len(y)), y]
    return float(-np.mean(np.log(np.maximum(given, 1e-12))))
