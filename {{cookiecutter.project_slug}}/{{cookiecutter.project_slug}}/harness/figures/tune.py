"""The study as a picture: how much each parameter explains, and the trials behind it."""

from __future__ import annotations

import math
from pathlib import Path
from statistics import median
from typing import Any

from . import canvas, save

NUM_COLUMNS = 3
STATES = {"complete": ("C0", "o"), "pruned": ("0.6", "v"), "failed": ("C3", "x")}


def draw_sensitivities(path: Path, rows: list[dict], found: list[dict]) -> None:
    """First the shares with their 95 % intervals and what chance reaches, then one scatter per
    parameter, in the order of `found`. Failed trials stand as crosses at the upper edge."""
    panels = 1 + len(found)
    columns = min(NUM_COLUMNS, panels)
    figure, axes = canvas(columns, math.ceil(panels / columns), width=3.1, height=2.5)
    flat = list(axes.flat)
    _draw_shares(flat[0], found)
    for axis, row in zip(flat[1:], found, strict=False):
        _draw_trials(axis, rows, row["parameter"])
    flat[1].legend(fontsize=6)
    for axis in flat[panels:]:
        axis.set_axis_off()
    save(figure, path)


def _draw_shares(axis: Any, found: list[dict]) -> None:
    known = [row for row in found if row["share"] is not None]
    for place, row in enumerate(known):
        colour = "C0" if row["detected"] else "0.75"
        axis.barh(place, row["share"], color=colour, height=0.6)
        axis.plot(row["interval"], [place, place], color="black", linewidth=1)
        axis.plot([row["null_95"]] * 2, [place - 0.4, place + 0.4], color="C3", linestyle=":")
    names = [_short(row["parameter"]) for row in known]
    axis.set_yticks(range(len(known)), names, fontsize=7)
    axis.invert_yaxis()
    axis.set_xlim(0, 1)
    axis.set_xlabel("share of the ranking (dotted: chance)", fontsize=7)


def _draw_trials(axis: Any, rows: list[dict], parameter: str) -> None:
    values = [row["value"] for row in rows if row["value"] is not None]
    top = max(values, default=1.0)
    scale = _scale([row["parameters"][parameter] for row in rows])
    for state, (colour, marker) in STATES.items():
        part = [row for row in rows if row["state"] == state]
        x = [scale["place"](row["parameters"][parameter]) for row in part]
        y = [top if row["value"] is None else row["value"] for row in part]
        style = {"color": colour, "marker": marker, "markersize": 4, "linestyle": "none"}
        axis.plot(x, y, label=state, **style)
    if scale["labels"]:
        axis.set_xticks(range(len(scale["labels"])), scale["labels"])
    elif scale["log"]:
        axis.set_xscale("log")
    if values and min(values) > 0 and top > 10 * min(values):
        axis.set_yscale("log")
    axis.tick_params(labelsize=7)
    axis.set_xlabel(_short(parameter), fontsize=7)
    axis.set_ylabel("value", fontsize=7)


def _scale(values: list[Any]) -> dict:
    """How values stand on the axis: choices and few numbers side by side, others as they are."""
    numbers = all(isinstance(v, (int, float)) and not isinstance(v, bool) for v in values)
    kinds = sorted(set(values), key=lambda v: (v if numbers else 0, str(v)))
    if not numbers or len(kinds) <= 4:
        return {"place": kinds.index, "labels": [str(kind) for kind in kinds], "log": False}
    spread = kinds[0] > 0 and kinds[-1] > 20 * kinds[0] and kinds[-1] > 4 * median(values)
    return {"place": float, "labels": [], "log": spread}


def _short(parameter: str) -> str:
    return parameter.rpartition(".")[2]
