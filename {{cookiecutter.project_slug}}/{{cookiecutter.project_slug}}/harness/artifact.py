"""The form of gate.json: its keys, the digests over them, and reading it back with suspicion."""

from __future__ import annotations

import math
import numbers
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from . import files
from .checks import Check
from .evidence import LOOP, Project

SCHEMA = 1
KEYS = (
    "schema",
    "stage",
    "verdict",
    "checks",
    "waivers",
    "previous",
    "evidence_of",
    "outputs",
    "binding",
    "digest",
    "provenance",
)
BOUND = ("stage", "verdict", "previous", "evidence_of", "outputs")
DIGESTED = KEYS[: KEYS.index("digest")]


class Tampered(Exception):
    """A gate file that is not as it was written; the text says how."""


def sealed(parts: Mapping) -> dict:
    """`parts` with binding and digest added, in the order of KEYS."""
    gate = dict(parts)
    gate["binding"] = binding_of(gate)
    gate["digest"] = digest_of(gate)
    return {key: gate[key] for key in KEYS}


def binding_of(gate: Mapping) -> str:
    """What the next gate is chained to. No measured value is in it, so that a rerun which changes
    nothing invalidates nothing."""
    return files.sha256_json({key: gate[key] for key in BOUND})


def digest_of(gate: Mapping) -> str:
    """Over the whole evidence: says whether the file was edited by hand."""
    return files.sha256_json({key: gate[key] for key in DIGESTED})


def result_of(gate: Mapping) -> str:
    """The binding but for the versions of checks and loop, and but for the gate before: equal for
    two recordings of a stage when only its checks were run again."""
    about = {key: value for key, value in gate["evidence_of"].items() if key != "checks"}
    about["sources"] = {k: v for k, v in about["sources"].items() if k != LOOP}
    bound = {key: gate[key] for key in ("stage", "verdict", "outputs")}
    return files.sha256_json({**bound, "evidence_of": about})


def read_gate(project: Project, stage: str) -> dict:
    """The gate of `stage` as recorded. Raises FileNotFoundError, or Tampered with the reason."""
    try:
        gate = files.read_json(project.gate_path(stage))
        if not isinstance(gate, dict) or gate.get("schema") != SCHEMA:
            raise Tampered(f"gate.json is not of schema {SCHEMA}")
        if gate.get("stage") != stage:
            raise Tampered(f"gate.json is the gate of {gate.get('stage')!r}")
        lacking = [key for key in KEYS if key not in gate]
        if lacking:
            raise Tampered(f"gate.json lacks {', '.join(lacking)}")
        if (gate["binding"], gate["digest"]) != (binding_of(gate), digest_of(gate)):
            raise Tampered("gate.json was edited, its digest does not match its content")
    except FileNotFoundError:
        raise
    except (OSError, ValueError) as error:
        raise Tampered(f"gate.json cannot be read ({type(error).__name__})") from None
    return gate


def row(check: Check) -> dict:
    """A check as gate.json holds it: values to 6 significant digits, so that the last bits of a
    float sum do not show.

    A limit with no finite value against it decides nothing: `open` becomes `inconclusive`.
    """
    kept = asdict(check)
    kept["value"], kept["limit"] = _rounded(check.value), _rounded(check.limit)
    kept["suspect"] = list(check.suspect)
    if check.verdict == "open" and kept["value"] is None and kept["limit"] is not None:
        kept["because"] = f"{check.because} No finite value was measured against the limit."
        kept["verdict"] = "inconclusive"
    return kept


def _rounded(value: Any) -> Any:
    """Six significant digits; whole numbers stay whole, None and what is not finite is None."""
    if isinstance(value, (list, tuple)):
        return [_rounded(item) for item in value]
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, numbers.Integral):
        return int(value)
    number = float(value)
    return float(f"{number:.6g}") + 0.0 if math.isfinite(number) else None  # + 0.0: no "-0.0"
