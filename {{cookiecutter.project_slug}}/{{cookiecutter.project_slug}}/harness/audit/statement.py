"""A draft of the owner's statement, from the measurements; the owner confirms or rewrites it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from .subject import Statement


def draft(
    statements: Sequence[Statement], ladder: Mapping[str, Mapping[str, float]], structure: dict
) -> dict[str, str]:
    """{"architecture", "because", "findings"}: one short text each, free of the problem's words."""
    local = [axis for axis in structure["axes"] if axis["local"]]
    return {
        "architecture": _architecture(local),
        "because": _because(local, structure["axes"], ladder),
        "findings": _findings(statements),
    }


def _architecture(local: list[dict]) -> str:
    if local:
        return (
            f"A small network that shares local weights along {_named(local)} of its input, "
            "compared with one that treats all positions alike."
        )
    return (
        "A small fully connected network: nothing was found that a network with local or shared "
        "weights could make use of."
    )


def _because(local: list[dict], axes: list[dict], ladder: Mapping[str, Mapping[str, float]]) -> str:
    best = max(ladder, key=lambda name: ladder[name]["accuracy"])
    measured = [axis for axis in axes if axis["neighbours"] is not None]
    strongest = max(measured, key=lambda axis: axis["neighbours"], default=None)
    if strongest is None:
        structure = "Too few columns vary to look for structure"
    else:
        where = "beyond" if local else "not beyond"
        structure = (
            f"Neighbouring positions correlate at {strongest['neighbours']:.2f} along axis "
            f"{strongest['axis']}, {where} the {strongest['random_max']:.2f} that positions paired "
            "at random reach"
        )
    rungs = ", ".join(f"{name} {scores['accuracy']:.3f}" for name, scores in ladder.items())
    return (
        f"{structure}; the network has to beat the best cheap predictor, {best} (validation "
        f"accuracy: {rungs})."
    )


def _findings(statements: Sequence[Statement]) -> str:
    found = [s for s in statements if s.verdict in ("shut", "warn", "inconclusive")]
    quiet = [s.axis for s in statements if s.verdict == "open"]
    listed = " ".join(f"{s.axis}: {s.because}" for s in found)
    nothing = f"Nothing that needs a decision in: {', '.join(quiet)}." if quiet else ""
    return " ".join(part for part in (listed, nothing) if part)


def _named(axes: list[dict]) -> str:
    names = [f"axis {axis['axis']}" for axis in axes]
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)
