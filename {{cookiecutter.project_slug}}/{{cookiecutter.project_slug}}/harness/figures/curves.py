"""Curves: training against validation, and the learning-rate range."""

from __future__ import annotations

import math
from pathlib import Path

from . import canvas, save


def draw_curves(path: Path, curves: list[dict], title: str) -> None:
    """One panel per run: loss per epoch on a logarithmic scale, training and validation."""
    figure, axes = canvas(len(curves), 1, width=3.6, height=2.8)
    for axis, curve in zip(axes[0], curves, strict=True):
        epochs = [row["epoch"] for row in curve["epochs"]]
        key = "train_loss" if "train_loss" in curve["epochs"][0] else "running_train_loss"
        label = "training" if key == "train_loss" else "training (running, augmented)"
        axis.plot(epochs, [_positive(row[key]) for row in curve["epochs"]], label=label)
        axis.plot(epochs, [row["validation_loss"] for row in curve["epochs"]], label="validation")
        axis.axvline(curve["best_validation_epoch"], color="0.6", linestyle=":", linewidth=1)
        axis.set_yscale("log")
        axis.set_xlabel("epoch")
        axis.set_title(f"{title}, seed {curve['seed']}", fontsize=9)
    axes[0][0].set_ylabel("loss (nats)")
    axes[0][0].legend(fontsize=7, title="dotted: best validation", title_fontsize=7)
    save(figure, path)


def draw_lr_range(path: Path, found: dict, configured: float) -> None:
    """Loss against the growing rate, with the rates read off it."""
    figure, axes = canvas(1, 1, width=5.0, height=3.2)
    axis = axes[0][0]
    axis.plot(found["lrs"], found["losses"], color="0.75", linewidth=1, label="loss")
    axis.plot(found["lrs"], found["smoothed"], label="smoothed")
    axis.axvline(configured, color="C1", label=f"configured {configured:.1e}")
    axis.axvline(found["usable"], color="C2", linestyle="--", label=f"usable {found['usable']:.1e}")
    if found["divergence"]:
        text = f"diverges {found['divergence']:.1e}"
        axis.axvline(found["divergence"], color="C3", linestyle=":", label=text)
    axis.set_ylim(0, 2 * found["smoothed"][0])
    axis.set_xscale("log")
    axis.set_xlabel("learning rate")
    axis.set_ylabel("loss (nats)")
    axis.legend(fontsize=7)
    save(figure, path)


def _positive(value: float) -> float:
    return value if value > 0 else math.nan
