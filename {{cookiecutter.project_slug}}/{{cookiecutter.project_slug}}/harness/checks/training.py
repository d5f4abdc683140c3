"""Checks of finished training runs: they read the curves and weights a stage has left."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import nn

from .. import files, instruments
from ..evidence import NOT_EVIDENCE
from ..report import table
from . import Check


def lr_range(found: dict, configured: float, min_drop: float) -> Check:
    """Some learning rate must lower the smoothed loss; the configured one must lie in reach."""
    divergence, usable = found["divergence"], found["usable"]
    far = f"diverges at {divergence:.1e}" if divergence else "never diverges up to the highest rate"
    because = (
        f"The smoothed loss falls by {found['drop']:.0%} at best, {far}; usable rate "
        f"{usable:.1e}, configured {configured:.1e}."
    )
    numbers = (found["drop"], min_drop, "relative fall of the loss", because)
    if found["drop"] < min_drop:
        suspects = ("no gradient reaches the weights", "the loss does not depend on the model")
        return Check("lr_range", "shut", *numbers, suspects, "lr_range.png")
    if configured > (divergence or math.inf) or not usable / 100 <= configured:
        suspects = (f"optimizer.lr={configured:.1e}: try {usable:.1e}",)
        return Check("lr_range", "warn", *numbers, suspects, "lr_range.png")
    return Check("lr_range", "open", *numbers, (), "lr_range.png")


def train_loss(found: dict, floor: float, limit: float) -> Check:
    """The worst seed's training loss on the whole split, against the data's own floor."""
    losses = [curve["best_loss"] for curve in found["runs"]]
    worst = max(losses)
    sizes = "".join(f", {row['best_loss']:.3g} on {row['num_rows']} rows" for row in found["sizes"])
    because = (
        f"Lowest training loss {worst:.3g} nats for the worst of {len(losses)} seeds{sizes}; the "
        f"floor of conflicting duplicates is {floor:.3g}; scope: {found['scope']}."
    )
    numbers = (worst, floor + limit, "nats", because)
    if worst <= floor + limit:
        return Check("train_loss", "open", *numbers, (), "curves.png")
    suspects = ["the learning rate (see lr_range)"]
    if capacity_gain(found["capacity"]) > 0.1:
        suspects.insert(0, "too little capacity: the wider network does better")
    falling = instruments.curve_shape(_train_losses(_worst(found["runs"]))) == "still descending"
    # early in training a wider network is always ahead: it says nothing while the loss still falls
    suspects.insert(0 if falling else len(suspects), "too few epochs (see curve_shape)")
    return Check("train_loss", "shut", *numbers, tuple(suspects), "curves.png")


def _worst(runs: list[dict]) -> dict:
    return max(runs, key=lambda curve: curve["best_loss"])


def _train_losses(curve: dict) -> list[float]:
    """One per epoch, of the whole split where it was scored."""
    return [row.get("train_loss", row["running_train_loss"]) for row in curve["epochs"]]


def capacity_gain(capacity: dict) -> float:
    """Relative fall of the training loss when the network is made wider, epochs being equal."""
    narrow, wide = capacity["configured"]["best_loss"], capacity["wider"]["best_loss"]
    return 1 - wide / narrow if narrow > 0 else 0.0


def capacity_section(capacity: dict) -> str:
    rows = [
        {"network": name, "epochs": c["num_epochs"], "training loss": c["best_loss"]}
        for name, c in capacity.items()
    ]
    gain = capacity_gain(capacity)
    said = "lowers" if gain > 0.1 else "does not lower"
    return (
        f"## Capacity\n\nMore capacity {said} the training loss at equal epochs "
        f"({gain:+.0%}).\n\n{table(rows, ['network', 'epochs', 'training loss'])}"
    )


def curve_shape(runs: list[dict]) -> Check:
    """How the training loss fell, read from the whole history of the seed that did worst."""
    curve = _worst(runs)
    losses = _train_losses(curve)
    shape = instruments.curve_shape(losses)
    told = "too short to have a shape (5 epochs do)" if shape == "too short" else shape
    because = (
        f"Training loss {told}: {losses[0]:.3g} after epoch 1, lowest {min(losses):.3g}, "
        f"{losses[-1]:.3g} after epoch {len(losses)} ({curve['stopped']})."
    )
    causes = {
        "flat from step one": ("no gradient", "labels that do not belong to the inputs", "tiny lr"),
        "rising from the start": ("the sign of the loss", "a learning rate far too high"),
        "not finite": ("a learning rate too high", "values that are not finite in the data"),
        "turned": ("the learning rate is too high for the end of training",),
        "oscillating": ("the learning rate is too high", "very small batches"),
    }
    mild = {"turned": "warn", "oscillating": "warn", "too short": "not_applicable"}
    verdict = mild.get(shape, "shut" if shape in causes else "open")
    value = losses[-1] / losses[0] if losses[0] else None
    unit = "last / first loss"
    return Check(
        "curve_shape", verdict, value, None, unit, because, causes.get(shape, ()), "curves.png"
    )


def one_change(run: Any, cfg: dict) -> Check:
    """What differs from the last recorded run of this stage: only one change can be understood."""
    path = run.earlier(run.stage, "gate.json")
    changes: list[str] = []
    if path.exists():
        gate = files.read_json(path)
        before, now = _leaves(gate["provenance"]["config"]), _leaves(cfg)
        keys = sorted(k for k in before.keys() | now.keys() if not f"{k}.".startswith(_FREE))
        changes = [
            f"{key} {before.get(key)} to {now.get(key)}"
            for key in keys
            if before.get(key) != now.get(key)
        ]
    listed = f": {'; '.join(changes[:6])}" if changes else ", or there is none"
    because = f"{len(changes)} settings changed against the last recorded run{listed}."
    verdict = "warn" if len(changes) > 1 else "open"
    suspects = (
        ("more than one change at a time: none of them can be credited",) if changes[1:] else ()
    )
    return Check("one_change", verdict, float(len(changes)), 1, "settings", because, suspects)


def carried_settings(run: Any, settings: dict[str, Any], before: str) -> Check:
    """The optimizer and regularization that the stage before was recorded with are still in use:
    a choice made on the command line there is forgotten here unless it is made again."""
    config = _leaves(files.read_json(run.earlier(before, "gate.json"))["provenance"]["config"])
    now = _leaves(settings)
    changes = [
        f"{key} was {config.get(key)}, now {value}"
        for key, value in now.items()
        if config.get(key) != value
    ]
    listed = f": {'; '.join(changes[:6])}" if changes else ""
    because = (
        f"{len(changes)} training settings differ from those {before} was recorded with{listed}."
    )
    suspects = (f"give the same choices as in stage={before}, or set them in configs/stage",)
    verdict, shown = ("warn", suspects) if changes else ("open", ())
    return Check("carried_settings", verdict, float(len(changes)), 0, "settings", because, shown)


# What changes no training, as prefixes of dotted keys.
_FREE = (
    "scratch.",
    "reaffirm.",
    "device.",
    "num_threads.",
    "logger.",
    "trial.",
    "commit_samples.",
    "data.label_review.",
    *(f"data.{name}." for name in NOT_EVIDENCE),
)


def _leaves(node: Any, prefix: str = "") -> dict[str, Any]:
    if not isinstance(node, dict):
        return {prefix: node}
    found: dict[str, Any] = {}
    for key, value in node.items():
        found |= _leaves(value, f"{prefix}.{key}" if prefix else str(key))
    return found


def paired_gain(reference: list[dict], runs: list[dict], limit: float) -> Check:
    """Best validation loss against overfit's over the same seeds, in standard errors of the mean
    paired gain (a one-sided t statistic)."""
    before = {curve["seed"]: curve["best_validation_loss"] for curve in reference}
    shared = [curve for curve in runs if curve["seed"] in before]
    gains = [before[curve["seed"]] - curve["best_validation_loss"] for curve in shared]
    if len(gains) < 2:
        because = f"Only {len(gains)} seeds are shared with overfit; a paired test needs 2 or more."
        return Check("paired_gain", "inconclusive", None, limit, "standard errors", because)
    mean, error = float(np.mean(gains)), float(np.std(gains, ddof=1) / math.sqrt(len(gains)))
    statistic = mean / max(error, 1e-12)
    listed = ", ".join(f"{gain:+.4f}" for gain in gains)
    because = (
        f"Validation loss {np.mean([before[c['seed']] for c in shared]):.4f} without and "
        f"{np.mean([c['best_validation_loss'] for c in shared]):.4f} with regularization; gains "
        f"per seed {listed}: mean {mean:+.4f}, {statistic:.1f} standard errors."
    )
    suspects = (
        "this regularization does not help here: try another of configs/regularization",
        "more real data helps more than any of them",
    )
    verdict = "open" if statistic > limit else "shut"
    shown = () if verdict == "open" else suspects
    unit = "standard errors"
    return Check("paired_gain", verdict, statistic, limit, unit, because, shown, "curves.png")


def unit_activity(layers: list[dict], limit: float) -> Check:
    """Dead and saturated units over the validation split; the worst layer speaks."""
    if not layers:
        because = (
            "The network has no activation module to look at (functional ones cannot be seen)."
        )
        return Check("unit_activity", "not_applicable", None, limit, "share of units", because)
    worst = max(layers, key=lambda layer: max(layer["dead_share"], layer["saturated_share"]))
    share = max(worst["dead_share"], worst["saturated_share"])
    because = (
        f"At most {share:.0%} of the units of a layer are dead or saturated ({worst['layer']}, "
        f"{worst['kind']}, {worst['num_units']} units); {len(layers)} layers looked at."
    )
    suspects = ("a learning rate too high early on", "inputs or weights on the wrong scale")
    verdict = "shut" if share > limit else "open"
    shown = suspects if verdict == "shut" else ()
    return Check("unit_activity", verdict, share, limit, "share of units", because, shown)


def first_layer(pictures: np.ndarray | None, seed: int) -> Check:
    """First-layer filters from 5x5 up: neighbouring weights must agree more than shuffled ones.

    Statistic: mean correlation of horizontally and vertically neighbouring weights; limit: the 95th
    percentile over 200 shuffles of each filter's own weights.
    """
    unit = "correlation of neighbouring weights"
    if pictures is None or min(pictures.shape[1:]) < 5:
        size = "no spatial reading" if pictures is None else "x".join(map(str, pictures.shape[1:]))
        because = (
            f"The first-layer weights are drawn; {size} is too little to tell structure from noise."
        )
        return Check(
            "first_layer", "not_applicable", None, None, unit, because, (), "first_layer.png"
        )
    rng = np.random.default_rng(seed)
    flat = pictures.reshape(len(pictures), -1)
    shuffled = [
        _neighbour_correlation(rng.permuted(flat, axis=1).reshape(pictures.shape))
        for _ in range(200)
    ]
    value, limit = _neighbour_correlation(pictures), float(np.quantile(shuffled, 0.95))
    because = (
        f"Neighbouring first-layer weights correlate by {value:.2f}; shuffled ones stay below "
        f"{limit:.2f} in 95 of 100 cases."
    )
    suspects = (
        "the filters are noise: too little training",
        "no regularization",
        "a wrong input scale",
    )
    verdict = "open" if value > limit else "warn"
    shown = suspects if verdict == "warn" else ()
    return Check("first_layer", verdict, value, limit, unit, because, shown, "first_layer.png")


def _neighbour_correlation(pictures: np.ndarray) -> float:
    centred = pictures - pictures.mean(axis=(1, 2), keepdims=True)
    scale = float((centred**2).mean()) or 1.0
    across = (centred[:, :, 1:] * centred[:, :, :-1]).mean()
    down = (centred[:, 1:] * centred[:, :-1]).mean()
    return float((across + down) / 2 / scale)


def dropout_beside_norm(model: nn.Module) -> Check:
    """Dropout shifts the variance that BatchNorm measures in training and trusts in evaluation
    (Li et al. 2019, arXiv 1801.05134)."""
    modules = list(model.modules())  # in the order they were made, mostly that of the data
    drops = [
        place
        for place, module in enumerate(modules)
        if isinstance(module, nn.modules.dropout._DropoutNd) and module.p > 0
    ]
    name, unit = "dropout_beside_norm", "BatchNorm modules behind dropout"
    if not drops:
        because = "The network drops nothing."
        return Check(name, "not_applicable", 0.0, None, unit, because)
    behind = modules[drops[0] :]
    norms = sum(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in behind)
    because = f"{norms} BatchNorm modules stand behind the first of {len(drops)} dropout modules."
    suspects = ("move dropout behind the last BatchNorm, or use GroupNorm",) if norms else ()
    return Check(name, "warn" if norms else "open", float(norms), 0, unit, because, suspects)


def first_weights(model: nn.Module) -> torch.Tensor:
    """The first parameter with an input and an output axis."""
    return next(p.detach() for p in model.parameters() if p.ndim >= 2)
