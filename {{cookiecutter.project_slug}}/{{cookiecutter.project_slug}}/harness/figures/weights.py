"""First-layer weights as pictures: noise means nothing was learned there."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np

from . import canvas, save


def draw_weights(path: Path, pictures: np.ndarray, most: int = 32) -> None:
    """`(K, H, W)`; one small picture per unit, on one scale symmetric around zero."""
    pictures = pictures[:most]
    columns = min(8, len(pictures))
    rows = math.ceil(len(pictures) / columns)
    figure, axes = canvas(columns, rows, width=0.9, height=0.9)
    bound = float(np.abs(pictures).max()) or 1.0
    for index, axis in enumerate(axes.flat):
        axis.set_axis_off()
        if index < len(pictures):
            axis.imshow(pictures[index], cmap="coolwarm", vmin=-bound, vmax=bound)
    save(figure, path)
