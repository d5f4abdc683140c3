"""Recording a launch: its files into artifacts/<stage>/, and last of all the gate over them."""

from __future__ import annotations

import os
import shutil
import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from . import evidence, files
from .artifact import SCHEMA, Tampered, read_gate, result_of, row, sealed
from .checks import Check
from .evidence import DataNow, Project, plain
from .waivers import active_waivers, applied, blocking, loosened_limits


@dataclass(frozen=True)
class Snapshot:
    """The project as a launch found it. A source edited while a training runs must not be
    recorded as the one that ran, nor an earlier gate recorded meanwhile as the one that let it in.
    """

    sources: Mapping[str, bytes]  # path inside the package -> bytes
    previous: Mapping | None  # the gate of the stage before


def snapshot(project: Project, stage: str) -> Snapshot:
    """Take it right after the gate was asked, before the stage is imported."""
    paths = sorted(project.source.rglob("*.py"))
    sources = {path.relative_to(project.source).as_posix(): path.read_bytes() for path in paths}
    before = project.before(stage)
    return Snapshot(sources, None if before is None else _gate_or_none(project, before))


def record(
    project: Project,
    stage: str,
    checks: Sequence[Check],
    folder: Path,
    *,
    config: Mapping,
    data: DataNow,
    provenance: Mapping,
    waivers: Iterable[Mapping] = (),
    loosened: Iterable[Mapping] = (),
    out: Path | None = None,
    launched: Snapshot | None = None,
    reaffirmed: str | None = None,
) -> dict:
    """Write the gate of a finished launch and return it.

    Every file below `folder` is published to artifacts/<stage>/ and is an output, except report.md
    and figures/, which are for people. `waivers` as in configs/waivers.yaml; `loosened` is a list
    of {"limit", "shipped", "value"}. With `out`, gate.json goes there and artifacts/ stays as it
    is. `launched` is the snapshot the launch began with. `reaffirmed` says why only checks ran: the
    files and the other checks of the former gate stay. Raises ValueError for checks that cannot
    decide anything and for a gate with nothing to be chained to.
    """
    launched, before = launched or snapshot(project, stage), _gate_or_none(project, stage)
    former = before if reaffirmed is not None else None
    if out is None:
        _require_chain(project, stage, data, launched)
    found, previous = _handed_over(folder), launched.previous
    about = evidence.gather(
        project, stage, config=config, data=data, handed_over=folder, read=launched.sources.get
    )
    names = [check.name for check in checks]
    versions = evidence.check_versions(stage, names, launched.sources)
    gate = {
        "schema": SCHEMA,
        "stage": stage,
        "checks": [row(check) for check in checks],
        "waivers": loosened_limits(stage, plain(list(loosened))),
        "previous": previous and {key: previous[key] for key in ("stage", "binding")},
        "evidence_of": {**about, "checks": versions},
        "outputs": {n: files.sha256_file(p) for n, p in found.items() if not _for_people(n)},
        "provenance": plain(provenance),
    }
    if former is not None:
        gate |= _upon(former, gate, str(reaffirmed))
    _require_checks(stage, names, gate["checks"])
    gate["waivers"] = applied(stage, gate["checks"], active_waivers(waivers)) + gate["waivers"]
    gate["waivers"] += previous["waivers"] if previous else []
    gate["provenance"]["previous_result"] = result_of(previous) if previous else None
    gate["verdict"] = "shut" if blocking(gate) else "open"
    gate = sealed(gate)
    if out is not None:
        files.write_json(out / "gate.json", gate)
    else:
        _publish(project, stage, found, gate, before, keep=former is not None)
    return gate


def _require_checks(stage: str, names: Sequence[str], rows: Sequence[Mapping]) -> None:
    if not rows:
        raise ValueError(f"Stage '{stage}' returned no check, so nothing can open its gate.")
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ValueError(f"Stage '{stage}' returned two checks named {', '.join(twice)}.")


def _require_chain(project: Project, stage: str, data: DataNow, launched: Snapshot) -> None:
    if data.identity is None:
        raise ValueError("A gate needs the identity of the data it is about, and it is not known.")
    before = project.before(stage)
    if before is not None and launched.previous is None:
        raise ValueError(f"'{before}' has no gate to chain the one of '{stage}' to.")


def _upon(former: Mapping, gate: Mapping, because: str) -> dict:
    """What a reaffirmation keeps of the former gate, with what was found anew.

    The provenance stays that of the run that made the outputs, each later look listed in it.
    """
    mine = [e for e in former["waivers"] if (e["kind"], e["stage"]) == ("limit", gate["stage"])]
    versions = {**former["evidence_of"]["checks"], **gate["evidence_of"]["checks"]}
    look = {"because": because, **gate["provenance"]}
    looks = [*former["provenance"].get("reaffirmed", []), look]
    return {
        "checks": _merged(former["checks"], gate["checks"], "name"),
        "waivers": _merged(mine, gate["waivers"], "limit"),
        "evidence_of": {**gate["evidence_of"], "checks": versions},
        "outputs": dict(sorted({**former["outputs"], **gate["outputs"]}.items())),
        "provenance": {**former["provenance"], "reaffirmed": looks},
    }


def _merged(former: Sequence[Mapping], new: Sequence[Mapping], key: str) -> list[dict]:
    """Former entries, replaced where a new one has the same name; further new ones after them."""
    entries = {entry[key]: dict(entry) for entry in former}
    return list({**entries, **{entry[key]: dict(entry) for entry in new}}.values())


def _gate_or_none(project: Project, stage: str) -> dict | None:
    try:
        return read_gate(project, stage)
    except (FileNotFoundError, Tampered):
        return None


def _handed_over(folder: Path) -> dict[str, Path]:
    """Every file below `folder` by its relative path with "/"; dotted names are half-written ones,
    and gate.json is written by nobody but `record`."""
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    named = {path.relative_to(folder).as_posix(): path for path in paths}
    return {n: p for n, p in named.items() if not p.name.startswith(".") and n != "gate.json"}


def _for_people(name: str) -> bool:
    return name in ("report.md", "report.json") or name.startswith("figures/")


def _publish(
    project: Project,
    stage: str,
    found: Mapping[str, Path],
    gate: Mapping,
    former: Mapping | None,
    *,
    keep: bool,
) -> None:
    """Copy, then write the gate, then remove what is no longer produced. Interrupted anywhere, the
    former gate either still tells the truth or no longer matches its outputs."""
    target = project.artifacts / stage
    for name, path in found.items():
        copy_file(path, target / name)
    files.write_json(project.gate_path(stage), gate)
    if not keep:
        for name in _written_before(target, former) - set(found):
            _remove(target, name)


def copy_file(source: Path, target: Path) -> None:
    """Copy in one step: at `target` stands the old file or the whole new one, never a part."""
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = target.with_name(f".{uuid.uuid4().hex}.part")
    try:
        with source.open("rb") as reader, temporary.open("xb") as writer:
            shutil.copyfileobj(reader, writer, 1 << 20)
            writer.flush()
            os.fsync(writer.fileno())
        os.replace(temporary, target)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def _written_before(target: Path, former: Mapping | None) -> set[str]:
    """Names below `target` that an earlier launch published; what a person put there stays."""
    names = set(former["outputs"]) if former else set()
    drawn = [path for path in (target / "figures").rglob("*") if path.is_file()]
    names |= {path.relative_to(target).as_posix() for path in drawn}
    return names | {"report.md"}


def _remove(target: Path, name: str) -> None:
    """Remove one published file and the folders it leaves empty, never outside `target`."""
    path = target / name
    if target.resolve() not in path.resolve().parents:
        return
    path.unlink(missing_ok=True)
    for parent in path.parents:
        if parent == target or not parent.is_dir() or any(parent.iterdir()):
            return
        parent.rmdir()
