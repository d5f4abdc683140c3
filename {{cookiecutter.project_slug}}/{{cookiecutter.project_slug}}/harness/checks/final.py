"""Checks of the last stage: what was gained, what broke, and whether it stands on sealed rows."""

from __future__ import annotations

from typing import Any

from ..report import cell, table
from . import Check


def choose(scored: dict[str, Any], compared: dict[str, Any], allowed: int) -> str:
    """The entrant to ship: the lowest validation loss among the candidates that break no more hard
    cases than another seed would; "tune" if none of them is better than its mean single model."""
    fit = [name for name, found in compared.items() if found.num_negative <= allowed]
    return min(["tune", *fit], key=lambda name: scored[name].loss)


def candidates(
    scored: dict[str, Any], compared: dict[str, Any], allowed: int, chosen: str
) -> Check:
    """Hard cases that each candidate breaks (reference right, candidate wrong) against what another
    seed of the reference breaks."""
    if not compared:
        because = "No candidate was asked for (stage.candidates): the tuned model is shipped."
        return Check("candidates", "not_applicable", None, allowed, "hard cases broken", because)
    said = "; ".join(
        f"{name} breaks {found.num_negative} and mends {found.num_positive}, validation loss "
        f"{scored[name].loss:.4f}"
        for name, found in compared.items()
    )
    some = next(iter(compared.values()))
    because = (
        f"On {some.num_rows} hard cases {said} (reference {scored['tune'].loss:.4f}; another seed "
        f"may break {allowed}); shipped: {chosen}."
    )
    breaking = [name for name, found in compared.items() if found.num_negative > allowed]
    verdict = "warn" if chosen == "tune" or breaking else "open"
    suspects = tuple(f"{name} breaks cases that worked" for name in breaking)
    if chosen == "tune":
        suspects = (
            *suspects,
            "no candidate gains on validation: the tuned model is shipped as it is",
        )
    shipped = compared[chosen].num_negative if chosen in compared else 0
    return Check(
        "candidates", verdict, float(shipped), allowed, "hard cases broken", because, suspects
    )


def sealed_test(final: dict) -> Check:
    """The metric on rows that nothing was fitted or chosen on, with its interval; a second look at
    them makes it optimistic."""
    unit = f"test {final['metric']}"
    if final["why_sealed"]:
        because = (
            f"Not read: {final['why_sealed']}. The validation figures were chosen on: optimistic."
        )
        return Check("sealed_test", "not_applicable", None, None, unit, because)
    row = _row(final, final["chosen"])
    value, interval = row[unit], row["interval"]
    span = f" ({interval[0]:.4f} to {interval[1]:.4f})" if interval else ""
    because = (
        f"{final['chosen']} has {unit} {value:.4f}{span} on {final['num_test_rows']} sealed rows."
    )
    if final["shared_rows"]:
        because += f" {final['shared_rows']} of them are also training or validation rows."
        suspects = ("external test rows that were trained on: remove them",)
        return Check("sealed_test", "shut", value, interval, unit, because, suspects)
    if final["earlier_openings"]:
        because += (
            f" Optimistic: opened {final['earlier_openings']} times before for something else."
        )
        suspects = (
            "choices made after reading the test set; only fresh rows give an honest figure",
        )
        return Check("sealed_test", "warn", value, interval, unit, because, suspects)
    return Check("sealed_test", "open", value, interval, unit, because)


def stands(final: dict) -> Check:
    """The final model is not worse on the sealed rows than overfit's or regularize's (paired)."""
    unit = f"test {final['metric']} gained over the better of the two"
    if final["why_sealed"]:
        because = f"Without test rows nothing can be said: {final['why_sealed']}."
        return Check("stands", "not_applicable", None, None, unit, because)
    against = final["against"]
    said = ", ".join(
        f"{found['value']:+.4f} ({found['low']:+.4f} to {found['high']:+.4f}) over {stage}"
        for stage, found in against.items()
    )
    worst = min(against.values(), key=lambda found: found["value"])
    lost = [stage for stage, found in against.items() if found["high"] < 0]
    because = f"The final model gains {said} on the same {final['num_test_rows']} rows."
    suspects = tuple(f"{stage}'s model is better on fresh rows" for stage in lost)
    verdict = "shut" if lost else "open"
    return Check("stands", verdict, worst["value"], 0.0, unit, because, suspects)


def above_baseline_on_test(final: dict) -> Check:
    """The final model against the audit's best baseline on the sealed rows."""
    unit = f"test {final['metric']}"
    ours, baseline = _row(final, final["chosen"]), final["table"][-1]
    if final["why_sealed"] or baseline[unit] is None:
        because = f"No test figure of both: {final['why_sealed'] or 'the baseline has none'}."
        return Check("above_baseline_on_test", "not_applicable", None, None, unit, because)
    sign = 1 if final["direction"] == "max" else -1
    better = sign * ours[unit] > sign * baseline[unit]
    because = f"{ours[unit]:.4f} against {baseline[unit]:.4f} of {baseline['model']}."
    suspects = () if better else (f"{baseline['model']} does as well for less",)
    verdict = "open" if better else "warn"
    return Check(
        "above_baseline_on_test", verdict, ours[unit], baseline[unit], unit, because, suspects
    )


def bundle_parity(found: dict) -> Check:
    """Served answers are trained answers: inputs byte for byte, outputs within the tolerance."""
    because = (
        f"{found['num_rows']} validation rows through the loaded bundle: inputs "
        f"{'equal' if found['inputs_equal'] else 'DIFFER'}, {found['answers_differ']} answers "
        f"differ, outputs differ by at most {found['largest_gap']:.2g}."
    )
    good = found["inputs_equal"] and not found["answers_differ"]
    good = good and found["largest_gap"] <= found["tolerance"]
    suspects = () if good else ("preprocessing that differs by caller", "weights of another model")
    verdict, unit = "open" if good else "shut", "largest difference of an output"
    # a difference of rounding says nothing and is another one on another processor
    value = 0.0 if good else found["largest_gap"]
    return Check("bundle_parity", verdict, value, found["tolerance"], unit, because, suspects)


def final_section(final: dict, compared: dict[str, Any], churn: dict, chosen: str) -> str:
    """The last table, and the hard cases that the shipped candidate breaks."""
    lines = ["## Final table", "", table(final["table"], list(final["table"][0])), ""]
    lines += [f"Shipped: **{chosen}**. Another seed alone breaks {churn['mean']:.1f} hard cases on"]
    lines += [f"average; at most {churn['allowed']} are allowed."]
    for name, found in compared.items():
        rows = [row for row in found.rows if row["change"] != "same"]
        lines += ["", f"## {name}: hard cases that flipped", ""]
        columns = [
            "id",
            "y",
            "reference",
            "candidate",
            "reference_margin",
            "candidate_margin",
            "change",
        ]
        lines += [table(rows, columns) if rows else "None."]
    return "\n".join(lines)


def final_text(final: dict) -> str:
    """The last table in plain columns, for the terminal."""
    columns = list(final["table"][0])
    cells = [columns, *([cell(row.get(c)) for c in columns] for row in final["table"])]
    widths = [max(len(line[k]) for line in cells) for k in range(len(columns))]
    lines = [[t.ljust(w) for t, w in zip(line, widths, strict=True)] for line in cells]
    return "\n".join("  ".join(line) for line in lines)


def _row(final: dict, chosen: str) -> dict:
    return next(row for row in final["table"] if row["model"].split(",")[0] == chosen)
