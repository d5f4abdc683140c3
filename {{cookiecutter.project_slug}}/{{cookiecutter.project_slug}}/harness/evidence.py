"""What a gate is evidence about: read from today's files, and compared with what was recorded."""

from __future__ import annotations

import json
import math
import numbers
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from . import files
from .sources import siblings, source_digest

LOOP = "harness/loop.py"
# Where the data lies, and what its owner says about it, is not what the data is.
NOT_EVIDENCE = ("path", "test_path", "statement", "human_reference", "commit_samples", "public")

Read = Callable[[str], "bytes | None"]  # a path inside the package -> its bytes, None if absent


@dataclass(frozen=True)
class Project:
    """Where one project keeps its things, and the order its stages are walked in."""

    root: Path
    package: str
    order: tuple[str, ...]

    @property
    def source(self) -> Path:
        return self.root / self.package

    @property
    def artifacts(self) -> Path:
        return self.root / "artifacts"

    @property
    def runs(self) -> Path:
        return self.root / "runs"

    def gate_path(self, stage: str) -> Path:
        return self.artifacts / stage / "gate.json"

    def before(self, stage: str) -> str | None:
        """The stage whose gate must be open to launch `stage`; None for the first."""
        place = self.order.index(stage)
        return self.order[place - 1] if place else None

    def read(self, name: str) -> bytes | None:
        """The bytes of a source file, by its path inside the package."""
        path = self.source / name
        return path.read_bytes() if path.is_file() else None


@dataclass(frozen=True)
class DataNow:
    """What is known of the data before it is loaded.

    `identity` None: not known yet, to be verified after loading. `missing`: why the data is not on
    this machine, None when it is.
    """

    identity: str | None
    num_records: int | None = None
    missing: str | None = None


@dataclass(frozen=True)
class Change:
    """One thing that is no longer as recorded. `harness`: only a check or the loop changed, so
    that rerunning the checks is enough."""

    what: str
    harness: bool = False


def plain(value: Any) -> Any:
    """`value` as JSON can hold it: tuples as lists, keys as text, what is not finite as text."""
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, numbers.Integral):
        return int(value)
    if isinstance(value, numbers.Real):
        return float(value) if math.isfinite(value) else str(float(value))
    return str(value)


def gather(
    project: Project,
    stage: str,
    *,
    config: Mapping,
    data: DataNow,
    handed_over: Path | None = None,
    read: Read | None = None,
) -> dict:
    """`evidence_of` of a gate, but for its checks.

    `handed_over` is the folder of files that the stage is about to publish: data_audit's split and
    preprocessing are read there. `read` gives sources as they were at the launch.
    """
    from_overfit_on = project.order.index(stage) >= project.order.index("overfit")
    read = read or project.read
    stage_files = with_imports(f"stages/{stage}.py", read)
    names = ["data.py", "preprocessing.py", "task.py", *stage_files, LOOP]
    sections = ["data", "task"]
    if from_overfit_on:
        names.append("model.py")
        sections.append("model")
    audit = project.artifacts / "data_audit"
    split = _newest("splits.json", handed_over, audit)
    state = _newest("preprocessing.json", handed_over, audit)
    settings = {section: plain(config[section]) for section in sections}
    settings["data"] = {k: v for k, v in settings["data"].items() if k not in NOT_EVIDENCE}
    return {
        "data": {"identity": data.identity, "num_records": data.num_records},
        "split": _digest_json(split),
        "preprocessing": files.sha256_file(state) if state.is_file() else None,
        "config": settings,
        "sources": {name: version(name, read) for name in names},
    }


def with_imports(name: str, read: Read) -> list[str]:
    """A source file, and the files of its folder that it imports, directly or through others."""
    found, waiting = [], [name]
    while waiting:
        file = waiting.pop()
        if file in found:
            continue
        found.append(file)
        folder = file.rpartition("/")[0]
        for module in siblings(read(file) or b""):
            beside = f"{folder}/{module}.py"  # else a name that the package itself defines
            waiting.append(beside if read(beside) is not None else f"{folder}/__init__.py")
    return [found[0], *sorted(file for file in found[1:] if read(file) is not None)]


def version(name: str, read: Read) -> str | None:
    """Digest of a source file's syntax tree; None when the file is absent."""
    source = read(name)
    return None if source is None else source_digest(source)


def check_version(name: str, read: Read) -> str | None:
    """Digest of a check's file together with what it imports beside it: a check is as true as its
    helpers. None when the file is absent."""
    parts = [version(file, read) for file in with_imports(name, read)]
    return parts[0] if len(parts) == 1 else files.sha256_json(parts)


def check_versions(stage: str, names: Sequence[str], sources: Mapping[str, bytes]) -> dict:
    """{check name: {"file", "version"}}: the file that defines each check, and its version."""
    found = {name: _file_of_check(name, stage, sources) for name in names}
    return {
        name: {"file": file, "version": check_version(file, sources.get)}
        for name, file in found.items()
    }


def changes(recorded: Mapping, now: Mapping, read: Read) -> list[Change]:
    """What differs between recorded evidence and today's, most telling first."""
    found = list(_data_changes(recorded["data"], now["data"]))
    if recorded["split"] != now["split"]:
        found.append(Change("the split changed (artifacts/data_audit/splits.json)"))
    if recorded["preprocessing"] != now["preprocessing"]:
        found.append(
            Change("the preprocessing state changed (artifacts/data_audit/preprocessing.json)")
        )
    found += [Change(what) for what in _config_changes(recorded["config"], now["config"])]
    for name in sorted(set(recorded["sources"]) | set(now["sources"])):
        old, new = recorded["sources"].get(name), now["sources"].get(name)
        if old != new:
            found.append(Change(_changed(name, new), harness=name == LOOP))
    checks = {k: v for k, v in recorded["checks"].items() if v["file"] not in recorded["sources"]}
    return found + _check_changes(checks, read)


def _newest(name: str, handed_over: Path | None, published: Path) -> Path:
    if handed_over is not None and (handed_over / name).is_file():
        return handed_over / name
    return published / name


def _digest_json(path: Path) -> str | None:
    """Digest of a JSON file's content, so that its layout does not count."""
    if not path.is_file():
        return None
    try:
        return files.sha256_json(files.read_json(path))
    except ValueError:
        return files.sha256_file(path)


def _file_of_check(name: str, stage: str, sources: Mapping[str, bytes]) -> str:
    """The harness file that defines the function `name`, else one that spells the name as a
    string, else the stage's own file. A check's function is named as the check is."""
    harness = sorted(file for file in sources if file.startswith("harness/"))
    harness.sort(key=lambda file: not file.startswith("harness/checks/"))
    marks = (f"def {name}(", f'"{name}"', f"'{name}'")
    for mark in marks:
        for file in harness:
            if mark.encode("utf-8") in sources[file]:
                return file
    return f"stages/{stage}.py"


def _data_changes(recorded: Mapping, now: Mapping) -> Iterator[Change]:
    if now["identity"] in (None, recorded["identity"]):
        return
    counts = f"{recorded['num_records']} records, now {now['num_records']}"
    if recorded["num_records"] == now["num_records"]:
        counts = f"still {now['num_records']} records, with other content"
    yield Change(f"the data changed ({counts})")


def _config_changes(recorded: Any, now: Any, path: str = "") -> Iterator[str]:
    """Dotted paths of the values that differ, with both values."""
    if isinstance(recorded, Mapping) and isinstance(now, Mapping):
        for key in sorted(set(recorded) | set(now)):
            inner = f"{path}.{key}" if path else key
            yield from _config_changes(recorded.get(key, _ABSENT), now.get(key, _ABSENT), inner)
    elif recorded != now:
        yield f"{path} was {_shown(recorded)}, now {_shown(now)}"


_ABSENT = object()  # a config key may hold None, so None cannot mean "no such key"


def _shown(value: Any) -> str:
    if value is _ABSENT:
        return "absent"
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 60 else text[:57] + "..."


def _check_changes(recorded: Mapping, read: Read) -> list[Change]:
    """One change per check file, naming the checks in it."""
    changed: dict[str, list[str]] = {}
    for check, used in recorded.items():
        if used["version"] != check_version(used["file"], read):
            changed.setdefault(used["file"], []).append(check)
    return [
        Change(
            f"{_changed(_and_imports(file, read), read(file))} ({', '.join(checks)})",
            harness=file.startswith("harness/"),
        )
        for file, checks in changed.items()
    ]


def _and_imports(file: str, read: Read) -> str:
    """The file, and that the files it imports count: their digests are not kept apart."""
    return file if len(with_imports(file, read)) == 1 else f"{file} or what it imports"


def _changed(name: str, now: object) -> str:
    return f"{name} is gone" if now is None else f"{name} changed"
