"""Checks of a finished study: what the trials say, and whether the best of them was luck."""

from __future__ import annotations

import math

import numpy as np

from ..report import table
from . import Check

MIN_TRIALS = 8  # below, quartiles hold fewer than two trials each


def trials(rows: list[dict], asked: int) -> Check:
    """All trials have ended, and enough of them with a number."""
    ended = {state: sum(row["state"] == state for row in rows) for state in ("complete", "pruned")}
    failed = len(rows) - sum(ended.values())
    because = (
        f"{len(rows)} of {asked} trials ended: {ended['complete']} complete, {ended['pruned']} "
        f"pruned, {failed} failed."
    )
    share = failed / len(rows) if rows else 0.0
    verdict, suspects = "open", ()
    if share > 0.5:
        suspects = ("the search space reaches into divergence", "the reasons in trials.json")
        verdict = "shut"
    elif len(rows) < asked:
        verdict, suspects = "inconclusive", ("another run of this stage tops the study up",)
    return Check("trials", verdict, share, 0.5, "share of trials failed", because, suspects)


def sensitivities(ranked: list[dict], rows: list[dict]) -> Check:
    """Which parameter the result depends on; "none detected" is an answer."""
    unit, figure = "share of the rank variance", "sensitivities.png"
    numbered = sum(row["value"] is not None for row in rows)
    if numbered < MIN_TRIALS:
        because = (
            f"{numbered} trials with a value are too few to rank anything; {MIN_TRIALS} are needed."
        )
        return Check("sensitivities", "inconclusive", None, None, unit, because, (), figure)
    found = [item for item in ranked if item["detected"]]
    top = ranked[0]
    said = f"Most sensitive to {', '.join(item['parameter'] for item in found)}"
    because = (
        f"{said if found else 'None detected'} in {numbered} trials; the first, "
        f"{top['parameter']}, explains {top['share']:.2f} ({top['interval'][0]:.2f} to "
        f"{top['interval'][1]:.2f}), chance alone up to {top['null_95']:.2f}."
    )
    limit = top["null_95"]
    return Check("sensitivities", "open", top["share"], limit, unit, because, (), figure)


def best_configuration(found: dict, before: list[dict], limit: float) -> Check:
    """The best trial's configuration, on fresh seeds, against regularize's; in pooled spreads."""
    fresh = np.array([curve["best_validation_loss"] for curve in found["runs"]])
    former = np.array([curve["best_validation_loss"] for curve in before])
    unit = "pooled spreads above regularize"
    if len(fresh) < 2 or len(former) < 2:
        because = (
            f"{len(fresh)} fresh and {len(former)} earlier seeds: two or more of each are needed."
        )
        return Check("best_configuration", "inconclusive", None, limit, unit, because)
    pooled = math.sqrt(
        (fresh.var(ddof=1) * (len(fresh) - 1) + former.var(ddof=1) * (len(former) - 1))
        / (len(fresh) + len(former) - 2)
    )
    value = float(fresh.mean() - former.mean()) / max(pooled, 1e-12)
    optimism = float(fresh.mean()) - found["trial"]["value"]
    because = (
        f"Mean validation loss {fresh.mean():.4f} over {len(fresh)} fresh seeds against "
        f"{former.mean():.4f} of regularize (pooled spread {pooled:.4f}); the best trial had "
        f"{found['trial']['value']:.4f} in {found['trial']['epochs']} epochs, fresh seeds differ "
        f"from it by {optimism:+.4f}."
    )
    suspects = (
        "the best trial was lucky: more trials, or more epochs per trial",
        "the space leaves out what regularize uses",
    )
    verdict = "open" if value <= limit else "shut"
    shown = suspects if verdict == "shut" else ()
    return Check("best_configuration", verdict, value, limit, unit, because, shown)


def trial_line(row: dict) -> str:
    """One line per trial, as it ends."""
    value = "" if row["value"] is None else f" {row['value']:.4f}"
    parameters = ", ".join(f"{key}={_short(v)}" for key, v in row["parameters"].items())
    ended = f"{row['state']:<8}{value} after {row['epochs']} epochs"
    return f"trial {row['index']:>3} {ended}: {parameters}"


def study_section(rows: list[dict], ranked: list[dict], found: dict) -> str:
    listed = [
        {"trial": row["index"], "state": row["state"], "validation loss": row["value"]}
        | {key: row["parameters"][key] for key in sorted(row["parameters"])}
        for row in rows
    ]
    best = found["trial"]
    chosen = ", ".join(f"{key}={_short(value)}" for key, value in best["parameters"].items())
    lines = ["## Sensitivities", ""]
    lines += [
        table(ranked, ["parameter", "share", "interval", "null_95", "detected", "method"]),
        "",
    ]
    lines += ["## Trials", "", table(listed, list(listed[0])), ""]
    lines += [f"Best: trial {best['index']} ({chosen})."]
    return "\n".join(lines)


def _short(value: object) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)
