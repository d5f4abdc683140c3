"""Planted faults and healthy pipelines as data: tests/faults/, read and held to its form.

A fault is a list of edits of the source that a user writes, and of settings; a healthy pipeline is
the same with nothing wrong in it. Both are planted in a fresh project and judged by its own gate.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path

FOLDER = Path(__file__).resolve().parents[1] / "tests" / "faults"
HALVES = ("chosen", "frozen")
STAGES = ("data_audit", "skeleton")
MODES = ("optimization", "generalization", "pipeline", "data")
BASE = "digits"  # the project as the template makes it
REFUSED = "refusal"  # `expected` of a fault that the launch itself refuses in one line

FAULT_KEYS = {"id", "source", "base", "edits", "stage", "expected", "failure_mode", "why"}
FAULT_OPTIONS = {"overrides", "clean"}
HEALTHY_KEYS = {"id", "half", "stage"}
HEALTHY_OPTIONS = {"edits", "use", "overrides", "base"}
IMPOSSIBLE_KEYS = {"id", "source", "impossible"}
CLEAN_KEYS = {"edits", "overrides"}


@dataclass(frozen=True)
class Edit:
    """`old` stands exactly once in `file` and becomes `new`; an empty `old` makes a new file.

    `file` is relative to the package, or begins with configs/.
    """

    file: str
    old: str
    new: str


@dataclass(frozen=True)
class Recipe:
    """One pipeline to be planted and judged; a healthy one expects no check to shut."""

    id: str
    kind: str  # fault | healthy
    half: str
    edits: tuple[Edit, ...] = ()
    overrides: tuple[str, ...] = ()
    stage: str = "skeleton"
    base: str = BASE
    expected: tuple[str, ...] = ()
    source: tuple[str, ...] = ()
    failure_mode: str = ""
    why: str = ""
    clean_edits: tuple[Edit, ...] = ()  # what the same pipeline is without the fault
    clean_overrides: tuple[str, ...] = ()


@dataclass(frozen=True)
class Collection:
    faults: tuple[Recipe, ...]
    healthy: tuple[Recipe, ...]
    impossible: tuple[dict, ...]
    folder: Path


def clean_of(fault: Recipe) -> Recipe:
    """The same pipeline without the fault: what the fault is judged and measured against."""
    return replace(
        fault,
        id=f"{fault.id} (clean)",
        edits=fault.clean_edits,
        overrides=fault.clean_overrides,
    )


def half_of(name: str) -> str:
    """The half of a fault, fixed by its name alone: nobody can choose it."""
    return HALVES[_number(name) % 2]


def in_tenth(name: str) -> bool:
    """A fixed tenth of either half. The lowest bit decided the half, so the others decide this."""
    return in_thinned(name, 10)


def in_thinned(name: str, every: int) -> bool:
    """A fixed part of either half, one name in `every`."""
    return _number(name) // 2 % every == 0


def _number(name: str) -> int:
    return int(sha256(name.encode()).hexdigest(), 16)


# ---- reading ------------------------------------------------------------------------------------


def read(folder: Path = FOLDER) -> Collection:
    """All recipes of the folder. Raises ValueError that lists whatever is wrong with them."""
    entries = [row for path in sorted(folder.glob("*.json")) for row in _json(path)]
    healthy = [
        row
        for path in sorted((folder / "healthy").glob("*.json"))
        if path.name != "edits.json"
        for row in _json(path)
    ]
    named = folder / "healthy" / "edits.json"
    shared = _json(named) if named.exists() else {}
    if wrong := [*problems(entries, healthy, shared), *_absent_bases(folder, entries + healthy)]:
        raise ValueError("\n".join(wrong))
    return Collection(
        tuple(_fault(row) for row in entries if "impossible" not in row),
        tuple(_healthy(row, shared) for row in healthy),
        tuple(row for row in entries if "impossible" in row),
        folder,
    )


def _json(path: Path) -> list | dict:
    return json.loads(path.read_text(encoding="utf-8"))


def _edits(rows: Iterable[dict]) -> tuple[Edit, ...]:
    return tuple(Edit(**row) for row in rows)


def _fault(row: dict) -> Recipe:
    overrides = tuple(row.get("overrides", ()))
    clean = {"overrides": not_the_fault(row["edits"], overrides), "edits": []}
    clean |= row.get("clean", {})
    return Recipe(
        row["id"],
        "fault",
        half_of(row["id"]),
        _edits(row["edits"]),
        overrides,
        row["stage"],
        row["base"],
        tuple(row["expected"]),
        tuple(row["source"]),
        row["failure_mode"],
        row["why"],
        _edits(clean["edits"]),
        tuple(clean["overrides"]),
    )


def not_the_fault(edits: list, overrides: tuple[str, ...]) -> tuple[str, ...]:
    """The settings of the clean run to compare with: where the source is edited, the edit is the
    fault and all of them stay; where nothing is, they are the fault, but for the stage's own."""
    return overrides if edits else tuple(o for o in overrides if o.startswith("stage."))


def _healthy(row: dict, shared: dict) -> Recipe:
    edits = [edit for name in row.get("use", ()) for edit in shared[name]]
    return Recipe(
        row["id"],
        "healthy",
        row["half"],
        _edits([*edits, *row.get("edits", ())]),
        tuple(row.get("overrides", ())),
        row["stage"],
        row.get("base", BASE),
    )


# ---- the form -----------------------------------------------------------------------------------


def problems(entries: list[dict], healthy: list[dict], shared: dict) -> list[str]:
    """Everything that is wrong with the form of these entries, one sentence each."""
    found = []
    for row in entries:
        found += _impossible_problems(row) if "impossible" in row else _fault_problems(row)
    for row in healthy:
        found += _healthy_problems(row, shared)
    names = [row.get("id") for row in [*entries, *healthy]]
    twice = sorted({str(name) for name in names if names.count(name) > 1})
    return found + [f"The id {name} is given twice." for name in twice]


def _key_problems(row: dict, needed: set[str], optional: set[str]) -> list[str]:
    name = row.get("id", "?")
    missing, strange = needed - row.keys(), row.keys() - needed - optional
    found = [f"{name} has no {key}." for key in sorted(missing)]
    return found + [f"{name} has the key {key}, which is not known." for key in sorted(strange)]


def _impossible_problems(row: dict) -> list[str]:
    return _key_problems(row, IMPOSSIBLE_KEYS, set()) or _source_problems(row)


def _fault_problems(row: dict) -> list[str]:
    if found := _key_problems(row, FAULT_KEYS, FAULT_OPTIONS):
        return found
    name, found = row["id"], _source_problems(row)
    if not re.fullmatch(r"[a-z][a-z0-9_]*", name):
        found.append(f"The id {name} is not in snake_case.")
    if not row["edits"] and not row.get("overrides"):
        found.append(f"{name} changes nothing: it has neither edits nor overrides.")
    if not row["expected"]:
        found.append(f"{name} says of no check that it should name the fault.")
    if row["failure_mode"] not in MODES:
        found.append(f"The failure mode of {name}, {row['failure_mode']}, is none of {MODES}.")
    if strange := row.get("clean", {}).keys() - CLEAN_KEYS:
        found.append(f"clean of {name} has {', '.join(sorted(strange))}, which is not known.")
    edits = [*row["edits"], *row.get("clean", {}).get("edits", ())]
    return [*found, *_stage_problems(row), *_edit_problems(name, edits)]


def _healthy_problems(row: dict, shared: dict) -> list[str]:
    if found := _key_problems(row, HEALTHY_KEYS, HEALTHY_OPTIONS):
        return found
    name, found = row["id"], []
    if row["half"] not in HALVES:
        found.append(f"The half of {name}, {row['half']}, is neither of {HALVES}.")
    unknown = [use for use in row.get("use", ()) if use not in shared]
    found += [f"{name} uses the edits {use}, which edits.json does not have." for use in unknown]
    edits = [edit for use in row.get("use", ()) for edit in shared.get(use, ())]
    edits += row.get("edits", ())
    return [*found, *_stage_problems(row), *_edit_problems(name, edits)]


def _source_problems(row: dict) -> list[str]:
    wrong = [name for name in row["source"] if not re.fullmatch(r"[A-Z]\d+", name)]
    return [f"The source {name} of {row['id']} is no letter and number." for name in wrong]


def _stage_problems(row: dict) -> list[str]:
    return [] if row["stage"] in STAGES else [f"The stage of {row['id']} is none of {STAGES}."]


def _edit_problems(name: str, edits: list[dict]) -> list[str]:
    wrong = [edit for edit in edits if edit.keys() != {"file", "old", "new"}]
    return [f"An edit of {name} has other keys than file, old, new."] if wrong else []


def _absent_bases(folder: Path, rows: list[dict]) -> list[str]:
    asked = {row.get("base", BASE) for row in rows if "impossible" not in row} - {BASE}
    return [
        f"The base {name} is no folder of {folder.name}/bases."
        for name in sorted(asked)
        if not (folder / "bases" / name).is_dir()
    ]
