"""The board: six gates, what each is worth today, why, and what to run next."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import TextIO

from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from .gates import Judgement

COLOURS = {
    "open": "green",
    "unverifiable": "cyan",
    "missing": "dim",
    "stale": "yellow",
    "shut": "red",
    "tampered": "red",
}
MIN_WIDTH = 100  # columns when piped, and on terminals that claim fewer


def as_dict(judgements: Sequence[Judgement], waivers: Iterable[Mapping] = ()) -> dict:
    """The board as plain values: {"stages": list, "exceptions": list, "next": [lead-in, command]}.

    `waivers` are those of configs/waivers.yaml, to show the ones that no gate has used yet.
    """
    stages = [
        {
            "stage": judgement.stage,
            "status": judgement.status,
            "why": judgement.because,
            "warnings": list(judgement.warnings),
        }
        for judgement in judgements
    ]
    return {
        "stages": stages,
        "exceptions": _exceptions(judgements, waivers),
        "next": list(_next(judgements)),
    }


def board(judgements: Sequence[Judgement], waivers: Iterable[Mapping] = ()) -> Group:
    """Something rich can print. Every text is a `Text`: brackets in it are no markup."""
    plain = as_dict(judgements, waivers)
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("stage", no_wrap=True)
    table.add_column("status", no_wrap=True)
    table.add_column("warnings", justify="right", no_wrap=True)
    table.add_column("why", overflow="fold")
    for row in plain["stages"]:
        status = Text(row["status"], style=COLOURS[row["status"]])
        count = Text(str(len(row["warnings"]) or "-"))
        table.add_row(Text(row["stage"]), status, count, Text(row["why"]))
    lines = [Text(""), *(Text(line) for line in plain["exceptions"])]
    lead, command = plain["next"]
    gap = ": " if len(lead) + len(command) < MIN_WIDTH - 4 else ":\n"  # a command is not broken
    lines += [Text(""), Text(lead + gap).append(command, style="bold")]
    return Group(table, *lines) if plain["exceptions"] else Group(table, *lines[1:])


def print_board(
    judgements: Sequence[Judgement],
    *,
    waivers: Iterable[Mapping] = (),
    file: TextIO | None = None,
) -> None:
    """Print it, with colours on a terminal only."""
    console = Console(file=file or sys.stdout, highlight=False)
    width = console.width if console.is_terminal else MIN_WIDTH
    console.width = max(width, MIN_WIDTH)
    console.print(board(judgements, waivers))


def _exceptions(judgements: Sequence[Judgement], waivers: Iterable[Mapping]) -> list[str]:
    """One line per waiver and loosened limit; a later gate repeats what it inherited, we do not."""
    lines = []
    for entry in (entry for judgement in judgements for entry in judgement.waivers):
        if entry["kind"] == "limit":
            moved = f"{entry['limit']} {entry['shipped']} -> {entry['value']}"
            lines.append(f"Loosened in {entry['stage']}: {moved}")
        else:
            lines.append(f"Waived in {entry['stage']}: {_waiver(entry)}")
    used = {(e["stage"], e["check"]) for j in judgements for e in j.waivers if "check" in e}
    for entry in waivers:
        stages = [entry["stage"]] if entry.get("stage") else [j.stage for j in judgements]
        if not any((stage, entry["check"]) in used for stage in stages):
            lines.append(f"Waiver that no gate has used: {_waiver(entry)}")
    return list(dict.fromkeys(lines))


def _waiver(entry: Mapping) -> str:
    until = f" (until {entry['expires']})" if entry.get("expires") else ""
    return f"{entry['check']}, {entry['reason']}{until}"


def _next(judgements: Sequence[Judgement]) -> tuple[str, str]:
    """What to do next, and the command for it."""
    first = next((j for j in judgements if j.status != "open"), None)  # unverifiable: data first
    if first is not None:
        return f"Next. {first.remedy}", first.command
    return "All gates are open. Read", "artifacts/<stage>/report.md"
