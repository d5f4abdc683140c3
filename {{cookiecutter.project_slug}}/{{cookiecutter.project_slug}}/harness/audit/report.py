"""The audit for people: its tables, its draft statement, and pictures of what it found."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ..figures import samples
from ..report import table
from . import Audit, Subject

MOST = 24  # pictures on a sheet
AXES = ("axis", "verdict", "estimate", "interval", "n", "planted_recall", "planted_false", "method")
SHEETS = {  # figure -> the axes whose rows it shows
    "outliers.png": ("outliers", "corrupt"),
    "duplicates.png": ("exact_duplicates", "near_duplicates", "conflicting_labels"),
    "label_suspects.png": ("label_noise",),
}


def sections(found: Audit) -> str:
    ladder = [{"baseline": name} | scores for name, scores in found.ladder.items()]
    lines = ["## Axes", "", table([s.row() for s in found.statements], list(AXES)), ""]
    lines += ["## Baselines, scored on validation", "", table(ladder, list(ladder[0])), ""]
    lines += ["## Rows to look at", "", *_listed(found), ""]
    lines += [*_review(found), "## Draft of the statement", ""]
    lines += ["Read it, decide, and write your own into `statement` of the data's file:", ""]
    lines += [f"- {name}: {text}" for name, text in found.draft.items()]
    return "\n".join(lines)


def _listed(found: Audit) -> list[str]:
    """The rows that each axis names; all of them are in report.json."""
    lines = []
    for statement in found.statements:
        ids, more = statement.ids[:MOST], len(statement.ids) - MOST
        if ids:
            rest = f" and {more:,} more" if more > 0 else ""
            lines.append(f"- {statement.axis}: {', '.join(ids)}{rest}")
    return lines or ["None."]


def _review(found: Audit) -> list[str]:
    """The rows whose review turns the bound on wrong labels into an estimate."""
    if not found.to_review:
        return []
    asked = "Judge each, wrong or right, in a CSV with columns id and verdict (data.label_review):"
    return ["## Labels to review", "", asked, "", ", ".join(found.to_review), ""]


def draw(run: Any, found: Audit, subject: Subject, picture: Callable[[int], Any]) -> None:
    """The class histogram, a random sheet, and a sheet per kind of finding that has rows."""
    counts = {split: np.array(list(rows.values())) for split, rows in found.counts.items()}
    samples.draw_class_histogram(run.figure("classes.png"), counts, subject.class_names)
    place = {name: row for row, name in enumerate(subject.ids)}

    def caption(row: int) -> str:
        return f"{subject.ids[row][-14:]}\n{subject.class_names[subject.labels[row]]}"

    shown = subject.rows("train")
    chosen = np.random.default_rng(0).permutation(shown)[:MOST]
    samples.draw_sheet(run.sample_figure("random.png"), chosen.tolist(), picture, caption)
    for figure, axes in SHEETS.items():
        names = [name for axis in axes for name in found.statement(axis).ids if name in place]
        rows = list(dict.fromkeys(place[name] for name in names))[:MOST]
        if rows:
            samples.draw_sheet(run.sample_figure(figure), rows, picture, caption)
