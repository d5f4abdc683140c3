"""How often: detection, naming and false alarms with intervals, and the same per check."""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from dataclasses import dataclass

from recipes import HALVES
from scipy.stats import binomtest

LEFT_OUT = "crashed"  # a fault that ends in a traceback is not silent


def interval(count: int, total: int) -> tuple[float, float]:
    """The 95 % Wilson interval of a share; (0, 1) of nothing."""
    if total == 0:
        return 0.0, 1.0
    found = binomtest(count, total).proportion_ci(confidence_level=0.95, method="wilson")
    return float(found.low), float(found.high)


def share(count: int, total: int) -> str:
    """As in "57 of 60, 95.0 % (86.3 to 98.3)"."""
    if total == 0:
        return "0 of 0"
    low, high = interval(count, total)
    return f"{count} of {total}, {100 * count / total:.1f} % ({100 * low:.1f} to {100 * high:.1f})"


def harmful(rows: Iterable[dict]) -> list[dict]:
    """The faults that the rates are about: they do harm, and they do it silently."""
    return [row for row in rows if row["outcome"] != LEFT_OUT and row["harm"]["harmful"]]


def of_half(rows: Iterable[dict], half: str) -> list[dict]:
    return [row for row in rows if row["half"] == half]


def totals(faults: list[dict], healthy: list[dict]) -> dict[str, dict]:
    """half -> its figures, for the halves that were run. `detected` and `named` count among the
    harmful ones; `median_s` are CPU seconds of one gate, faulty or healthy."""
    found = {}
    for half in HALVES:
        harms, well = harmful(of_half(faults, half)), of_half(healthy, half)
        spent = [row["seconds"] for row in [*of_half(faults, half), *well]]
        if spent:
            found[half] = {
                "harmful": len(harms),
                "detected": sum(row["detected"] for row in harms),
                "named": sum(row["named"] for row in harms),
                "healthy": len(well),
                "false_alarms": sum(row["alarm"] for row in well),
                "median_s": round(statistics.median(spent), 2),
            }
    return found


@dataclass(frozen=True)
class PerCheck:
    """Counts of one check. `expected`: faults that it should name; `hits`: those of them on which
    it shut; `first`: those of them that it named; `misnamed`: other faults that it named."""

    name: str
    expected: int
    hits: int
    first: int
    misnamed: int
    false_alarms: int


def per_check(faults: list[dict], healthy: list[dict]) -> list[PerCheck]:
    """One row per check that was expected or that shut, most expected first."""
    told = harmful(faults)
    names = {name for row in told for name in [*row["expected"], *_spoke(row)]}
    names |= {name for row in healthy for name in _spoke(row)}
    return sorted(
        (_count(name, told, healthy) for name in names), key=lambda row: (-row.expected, row.name)
    )


def _spoke(row: dict) -> list[str]:
    """The checks that did not let the pipeline pass."""
    refused = ["refusal"] if row["outcome"] == "refused" else []
    return [*row["shut"], *row["inconclusive"], *refused]


def _count(name: str, faults: list[dict], healthy: list[dict]) -> PerCheck:
    mine = [row for row in faults if name in row["expected"]]
    others = [row for row in faults if name not in row["expected"]]
    return PerCheck(
        name,
        expected=len(mine),
        hits=sum(name in _spoke(row) for row in mine),
        first=sum(row["first"] == name for row in mine),
        misnamed=sum(row["first"] == name for row in others),
        false_alarms=sum(name in _spoke(row) for row in healthy),
    )
