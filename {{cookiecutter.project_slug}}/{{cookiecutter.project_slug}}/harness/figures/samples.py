"""Contact sheets of samples with what is known of each, and the class histogram."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from . import canvas, save


def draw_sheet(
    path: Path, rows: list[int], draw: Callable[[int], Any], caption: Callable[[int], str]
) -> None:
    """The samples at these rows, eight to a line. An unreadable one is drawn as an empty frame."""
    columns = min(8, max(1, len(rows)))
    figure, axes = canvas(columns, math.ceil(len(rows) / columns), width=1.2, height=1.6)
    for axis in axes.flat:
        axis.set_axis_off()
    for axis, row in zip(axes.flat, rows, strict=False):
        try:
            axis.imshow(draw(row), cmap="gray")
        except (ValueError, OSError):
            axis.text(0.5, 0.5, "unreadable", ha="center", va="center", fontsize=7)
        axis.set_title(caption(row).replace("$", r"\$"), fontsize=7)  # no formula
    save(figure, path)


def draw_class_histogram(path: Path, counts: dict[str, np.ndarray], names: tuple[str, ...]) -> None:
    """Rows per class, one bar group per split."""
    figure, axes = canvas(1, 1, width=max(4.0, 0.45 * len(names)), height=3.0)
    axis, width = axes[0][0], 0.8 / max(1, len(counts))
    for index, (split, values) in enumerate(counts.items()):
        axis.bar(np.arange(len(names)) + index * width, values, width, label=split)
    labels = [name.replace("$", r"\$") for name in names]
    axis.set_xticks(np.arange(len(names)) + 0.4 - width / 2, labels, rotation=45, fontsize=7)
    axis.set_ylabel("rows")
    axis.set_ylim(0, 1.35 * max(1, max(values.max() for values in counts.values())))
    axis.legend(fontsize=7, ncols=3)
    save(figure, path)
