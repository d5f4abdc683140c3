"""docs/faults.md, from the rows, and from the totals of the peers where they were run. Names of
faults stand without backticks there: the tests of the documents hold whatever stands in backticks
against the code of the project."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from pathlib import Path

import rates
from judging import MAX_LOSS_RATIO, MIN_METRIC_GAP, MIN_STANDARD_ERRORS
from recipes import HALVES

PEERS = Path(__file__).parent / "results" / "peers.json"  # written by peers.py
HEAD = """\
# Planted faults and healthy pipelines

`make bench-faults` plants every fault of `tests/faults/` in a fresh project, one at a time,
launches the stage, and reads what its gate says. It does the same with healthy pipelines. This page
and `bench/results/faults.json` are what it found. The command writes them; nobody edits them.

A fault is detected if its gate is shut or its launch is refused in one clear line, while the gate
of the same pipeline without the fault opens. Its cause is named if the check that the report says
to repair first is one of those written down for the fault beforehand. A fault that ends in a
traceback is not silent and is left out of the rates. So is one that does no harm. Harm is measured
by training the project with the fault and without it, {seeds} seeds of {epochs} epochs each: the
validation metric moves by more than {gap} of its range and {errors:g} standard errors, or the
validation loss by a factor of {ratio:g}, in either direction, or the training does not end. A false
alarm is a healthy pipeline whose gate does not open. Intervals are 95 % Wilson intervals. Seconds
are CPU seconds of the launch on one thread, without those that a fresh interpreter needs to import
the libraries.

Which half a fault is in follows from a digest of its name. Rules and limits were chosen on the half
called chosen. The half called frozen was run when they were fixed.
"""


def page(
    faults: list[dict],
    healthy: list[dict],
    impossible: list[dict],
    *,
    seeds: int,
    epochs: int,
    written: int,
) -> str:
    """The whole document; `written` is the number of faults in tests/faults/, run or not."""
    settings = {"seeds": seeds, "epochs": epochs, "gap": MIN_METRIC_GAP, "ratio": MAX_LOSS_RATIO}
    parts = [HEAD.format(errors=MIN_STANDARD_ERRORS, **settings)]
    if len(faults) < written:
        parts.append(f"{len(faults)} of {written} faults were run, picked by the same digest.\n")
    parts.append(_totals(faults, healthy))
    parts += (
        [peers_section(json.loads(PEERS.read_text(encoding="utf-8")))] if PEERS.exists() else []
    )
    parts += [_not_caught(faults), _alarms(healthy), _checks(faults, healthy)]
    parts += [_faults(faults, half) for half in HALVES if rates.of_half(faults, half)]
    parts += [_healthy(healthy), _impossible(impossible)]
    return "\n".join(part for part in parts if part)


def plain(text: str) -> str:
    """Text for a cell or a sentence: no mark of Markdown in it, on one line."""
    return re.sub(r"[`|*<>\[\]]", " ", " ".join(str(text).split())).strip()


def table(head: list[str], rows: Iterable[Iterable[object]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "".join("| " + " | ".join(str(cell) for cell in line) + " |\n" for line in lines)


def code(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


# ---- the sections -------------------------------------------------------------------------------


def _totals(faults: list[dict], healthy: list[dict]) -> str:
    found = rates.totals(faults, healthy)
    rows = []
    for label, key, total in [
        ("harmful faults detected", "detected", "harmful"),
        ("cause named, of all harmful faults", "named", "harmful"),
        ("false alarms on healthy pipelines", "false_alarms", "healthy"),
    ]:
        rows.append([label, *(rates.share(row[key], row[total]) for row in found.values())])
    rows.append(["median CPU seconds", *(f"{row['median_s']:.1f}" for row in found.values())])
    text = "## Totals\n\n" + table(["", *found], rows)
    for half in found:
        mine = rates.of_half(faults, half)
        loud = sum(row["outcome"] == rates.LEFT_OUT for row in mine)
        idle = sum(not row["harm"]["harmful"] for row in mine)
        caught = sum(row["detected"] and not row["harm"]["harmful"] for row in mine)
        text += (
            f"\nOf {len(mine)} faults in the half called {half}, {loud} end in a traceback and "
            f"{idle} do no measurable harm; {caught} of the harmless ones are detected all the "
            "same.\n"
        )
    return text


def peers_section(totals: dict[str, dict]) -> str:
    """`totals`: half -> who -> figures, as peers.py has them."""
    text = (
        "## Peers, side by side\n\nThe same harmful faults and healthy pipelines under "
        "neural_net_checklist 1.1.0 and under a plain check that overfits one batch and looks at "
        "the loss. bench/peers.py runs them and says how they are asked, which assertion names "
        "which cause, and what neither has a place for; a fault of that kind is not taken by it. "
        "A peer detects a fault if an assertion fails that passes without the fault, a false alarm "
        "is any that fails on a healthy pipeline.\n"
    )
    names = ["this gate", "neural_net_checklist", "overfit one batch"]
    for half, found in totals.items():
        rows = []
        for label, key, total in [
            ("harmful faults taken", "taken", "harmful"),
            ("detected, of all harmful faults", "detected", "harmful"),
            ("detected, of those taken", "detected", "taken"),
            ("cause named, of all harmful faults", "named", "harmful"),
            ("cause named, of those taken", "named", "taken"),
            ("false alarms on healthy pipelines", "false_alarms", "healthy"),
        ]:
            rows.append([label, *(rates.share(row[key], row[total]) for row in found.values())])
        rows.append(["median CPU seconds", *(row["median_s"] for row in found.values())])
        text += f"\nThe half called {half}:\n\n" + table(["", *names], rows)
    return text


def _not_caught(faults: list[dict]) -> str:
    told = rates.harmful(faults)
    missed = [row for row in told if not row["detected"]]
    wrong = [row for row in told if row["detected"] and not row["named"]]
    text = "## What was not caught\n\n"
    text += "" if missed else "Every harmful fault was detected.\n"
    for row in missed:
        text += f"- {row['id']} ({row['half']}): {plain(row['why'])}{_said_otherwise(row)}\n"
    if wrong:
        text += "\nDetected, but another check was named first:\n\n"
        text += table(
            ["fault", "half", "named", "expected", "shut as well"],
            (
                [r["id"], r["half"], code([r["first"] or "none"]), code(r["expected"]), _rest(r)]
                for r in wrong
            ),
        )
    return text


def _said_otherwise(row: dict) -> str:
    """What spoke although it does not count."""
    if row["clean_outcome"] != "open":
        return f" Without the fault the gate is {row['clean_outcome']}, too, so it says nothing."
    audit = row["audit"]
    if not audit or audit["outcome"] == "open":
        return ""
    return f" Its data_audit, which comes before, is {audit['outcome']}: {code(audit['shut'])}."


def _rest(row: dict) -> str:
    return code(name for name in [*row["shut"], *row["inconclusive"]] if name != row["first"])


def _alarms(healthy: list[dict]) -> str:
    alarmed = [row for row in healthy if row["alarm"]]
    text = "## False alarms\n\n"
    if not alarmed:
        return text + f"None on {len(healthy)} healthy pipelines.\n"
    for row in alarmed:
        spoke = code([*row["shut"], *row["inconclusive"]]) or row["outcome"]
        text += f"- {row['id']} ({row['half']}): {spoke}. {plain(row['because'])}\n"
    return text


def _checks(faults: list[dict], healthy: list[dict]) -> str:
    rows = [
        [f"`{c.name}`", c.expected, c.hits, c.first, c.misnamed, c.false_alarms]
        for c in rates.per_check(faults, healthy)
    ]
    head = ["check", "expected", "hits", "named", "named for another", "false alarms"]
    return (
        "## Per check\n\nOver the harmful faults of both halves. expected: faults for which the "
        "check was written down beforehand, alone or beside others; hits: those of them on which "
        "it did not open; named: those of them where it was the one to repair first.\n\n"
        + table(head, rows)
    )


def _faults(faults: list[dict], half: str) -> str:
    head = ["fault", "sources", "mode", "expected", "named first", "gate", "harm", "CPU s"]
    rows = (
        [
            row["id"],
            " ".join(row["source"]),
            row["failure_mode"],
            code(row["expected"]),
            _first(row),
            row["outcome"],
            _harm(row["harm"]),
            f"{row['seconds']:.1f}",
        ]
        for row in sorted(rates.of_half(faults, half), key=lambda row: row["id"])
    )
    return f"## Faults: {half}\n\nharm: validation metric, clean to faulty.\n\n" + table(head, rows)


def _first(row: dict) -> str:
    if row["first"] is None:
        return "none"
    return code([row["first"]]) + (", as expected" if row["named"] else "")


def _harm(found: dict) -> str:
    figures = [
        "none" if value is None else f"{value:.3f}"
        for value in (found["clean_metric"], found["metric"])
    ]
    return f"{found['direction']}, {figures[0]} to {figures[1]}"


def _healthy(healthy: list[dict]) -> str:
    rows = (
        [row["id"], row["half"], row["outcome"], f"{row['seconds']:.1f}"]
        for row in sorted(healthy, key=lambda row: (row["half"], row["id"]))
    )
    return "## Healthy pipelines\n\n" + table(["pipeline", "half", "gate", "CPU s"], rows)


def _impossible(entries: list[dict]) -> str:
    if not entries:
        return ""
    rows = ([e["id"], " ".join(e["source"]), plain(e["impossible"])] for e in entries)
    text = "## Impossible in this project\n\nFaults of the collections that cannot be planted.\n\n"
    return text + table(["fault", "sources", "why"], rows)
