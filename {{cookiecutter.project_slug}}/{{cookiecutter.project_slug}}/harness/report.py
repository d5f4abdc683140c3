"""What a launch says: a line at its start, report.md for people, the gate's table at its end."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table

from . import files
from .checks import Check, explain

SIGNS = {"open": "open", "shut": "SHUT", "warn": "warn", "not_applicable": "n/a"}


def console() -> Console:
    """As wide as the terminal; wide enough for sentences where there is none."""
    probe = Console(highlight=False, soft_wrap=False)
    return probe if probe.is_terminal else Console(highlight=False, width=120, color_system=None)


def announce(run: Any, config: Any) -> None:
    """What was picked, before anything happens."""
    print(
        f"Stage {run.stage} ({run.mode}): device {run.device} (asked: {config.device}), "
        f"{config.precision}, seed {config.seed}, {config.num_threads} thread(s), "
        f"{run.folder.relative_to(run.artifacts.parent).as_posix()}",
        flush=True,
    )


def number(value: Any) -> str:
    if isinstance(value, (list, tuple)):
        return " to ".join(number(v) for v in value)
    return "" if value is None else f"{value:.4g}"


def print_gate(gate: dict, run: Any, order: tuple[str, ...], given: str = "") -> None:
    """Every check with its numbers, the verdict, and what to run next (with `given` behind it)."""
    table = Table(show_edge=False, pad_edge=False)
    for column in ("check", "verdict", "value", "limit"):
        table.add_column(column, no_wrap=True)
    table.add_column("because", overflow="fold")
    for check in gate["checks"]:
        sign = SIGNS.get(check["verdict"], check["verdict"])
        because = check["because"]
        if check["verdict"] in ("shut", "warn", "inconclusive") and check["suspect"]:
            because += f" Suspect: {'; '.join(check['suspect'][:3])}."
        limit = number(check["limit"])
        table.add_row(check["name"], sign, number(check["value"]), limit, because)
    console().print(table)
    cause = explain(tuple(Check(**row) for row in gate["checks"]))
    for text in ([cause] if cause else []) + run.closing:
        print(f"\n{text}")
    print(f"\nGate {run.stage}: {gate['verdict']}.{_next(gate, run, order, given)}")


def _next(gate: dict, run: Any, order: tuple[str, ...], given: str) -> str:
    where = "artifacts" if run.mode == "recorded" else "the run's folder"
    if run.mode != "recorded":
        return f" Not recorded: this is a {run.mode} run, its gate lies in {where}."
    if gate["verdict"] == "shut":
        command = f"python run.py stage={run.stage}{given}"
        return f" Read artifacts/{run.stage}/report.md, then run: {command}"
    after = order[order.index(run.stage) + 1 :]
    if not after:
        return " All six stages are walked."
    return f" Next: python run.py stage={after[0]}{given}"


def write(run: Any, checks: list[Check]) -> None:
    """report.md in the hand-off: the table, each finding and its suspects, what the stage tells."""
    lines = [f"# {run.stage}", ""]
    cause = explain(checks)
    if cause:
        lines += [f"**{cause}**", ""]
    lines += ["| check | verdict | value | limit |", "|---|---|---|---|"]
    for check in checks:
        unit = f" {check.unit}" if check.unit and check.value is not None else ""
        value = f"{number(check.value)}{unit}"
        lines.append(f"| {check.name} | {check.verdict} | {value} | {number(check.limit)} |")
    lines.append("")
    for check in checks:
        lines.append(f"- **{check.name}** ({check.verdict}): {check.because}")
        if check.suspect and check.verdict in ("shut", "warn", "inconclusive"):
            lines.append(f"  Suspect: {'; '.join(check.suspect)}.")
    for section in [*run.sections, *_times(run)]:
        lines += ["", section]
    drawn = sorted(run.handoff.glob("figures/*.png"))
    if drawn:
        lines += ["", "## Figures", ""]
        lines += [f"![{path.stem}](figures/{path.name})" for path in drawn]
    files.write_text(run.handoff / "report.md", "\n".join(lines) + "\n")


def _times(run: Any) -> list[str]:
    """CPU seconds per check, slowest first: a slow gate gets switched off."""
    if not run.took:
        return []
    rows = [{"check": name, "CPU seconds": round(s, 2)} for name, s in run.took.most_common()]
    total = f"All checks together took {sum(run.took.values()):.1f} CPU seconds."
    return ["## Time per check\n\n" + total + "\n\n" + table(rows, ["check", "CPU seconds"])]


def table(rows: list[dict], columns: list[str]) -> str:
    """A Markdown table of the given columns."""
    body = ["| " + " | ".join(cell(row.get(c)) for c in columns) + " |" for row in rows]
    head = [f"| {' | '.join(columns)} |", "|" + "---|" * len(columns)]
    return "\n".join(head + body)


def cell(value: Any) -> str:
    return number(value) if isinstance(value, (int, float, list)) else str(value or "")
