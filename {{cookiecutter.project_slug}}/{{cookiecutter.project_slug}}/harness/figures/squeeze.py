"""The hard cases as pictures: what the reference said, what the candidate says."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from . import canvas, save

MAX_CASES = 24
NUM_COLUMNS = 8
COLOURS = {"negative": "C3", "positive": "C2", "same": "black"}


def draw_hard_cases(
    path: Path, rows: list[dict], draw: Callable[[int], Any], answer: Callable[[int], str]
) -> None:
    """The first 24 rows of a Comparison (negative flips first): the picture, its label, then the
    reference's and the candidate's answer; red where the candidate broke it, green where it mended.

    `draw(row id)` gives the picture, `answer(class)` its name. One that cannot be drawn is an empty
    frame.
    """
    shown = rows[:MAX_CASES]
    columns = min(NUM_COLUMNS, max(1, len(shown)))
    figure, axes = canvas(columns, max(1, math.ceil(len(shown) / columns)), width=1.2, height=1.5)
    for axis in axes.flat:
        axis.set_axis_off()
    for axis, row in zip(axes.flat, shown, strict=False):
        try:
            axis.imshow(draw(row["id"]), cmap="gray")
        except (ValueError, OSError):
            axis.text(0.5, 0.5, "unreadable", ha="center", va="center", fontsize=7)
        names = [answer(row[key]) for key in ("y", "reference", "candidate")]
        names = [name.replace("$", r"\$") for name in names]  # a formula to matplotlib
        caption = "label {}\n{} -> {}".format(*names)
        axis.set_title(caption, fontsize=6, color=COLOURS[row["change"]])
    save(figure, path)
