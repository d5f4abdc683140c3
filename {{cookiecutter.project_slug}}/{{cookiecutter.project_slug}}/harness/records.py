"""What a data set is to the harness: rows with stable names, their content, and one identity.

Also the seal on the test rows: `SplitView` hands out train and validation, and refuses test.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import numpy as np

from . import files

SPLITS = ("train", "validation", "test")
# A file changed twice within one tick of the clock keeps its size and time, so the hash of a file
# that is younger than this is not remembered (the "racy" case that version control knows).
SETTLED_NS = 2_000_000_000
NUM_REMEMBERED = 50


class SealedTestError(RuntimeError):
    """Test rows were asked for before the stage that may open them."""


@dataclass(frozen=True)
class Records:
    """One row per example, in the order the source gives them.

    `raw` holds numpy arrays in memory, or Paths to read; `labels` is (N,) int64 indices into
    `class_names`; `given` names the split each row came with. Rows in `unreadable` (id -> reason)
    stay listed and are in no split. Raises ValueError when the parts do not fit together.
    """

    ids: tuple[str, ...]
    raw: Sequence
    labels: np.ndarray
    class_names: tuple[str, ...]
    groups: tuple[str, ...] | None = None
    times: tuple[str, ...] | None = None
    given: tuple[str, ...] | None = None
    unreadable: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("raw", "labels", "groups", "times", "given"):
            part = getattr(self, name)
            if part is not None and len(part) != len(self.ids):
                raise ValueError(
                    f"Records hold {len(self.ids)} ids but {len(part)} {name}: give one per row."
                )
        self._check_ids()
        self._check_labels()
        strange = sorted(set(self.given or ()) - set(SPLITS))
        if strange:
            raise ValueError(f"A row's split is {strange[0]!r}; it must be one of {SPLITS}.")

    def _check_ids(self) -> None:
        twice = [name for name, count in Counter(self.ids).items() if count > 1]
        if twice:
            raise ValueError(
                f"{len(twice)} ids name more than one row (first: {twice[0]!r}): splits and "
                "suspects are listed by id, so every row needs its own."
            )
        unknown = sorted(set(self.unreadable) - set(self.ids))
        if unknown:
            raise ValueError(f"unreadable names {unknown[0]!r}, which is no id of these records.")

    def _check_labels(self) -> None:
        if self.labels.ndim != 1 or self.labels.dtype != np.int64:
            raise ValueError(
                f"labels must be (N,) int64, not {self.labels.shape} {self.labels.dtype}."
            )
        low, high = (self.labels.min(), self.labels.max()) if len(self.labels) else (0, 0)
        if self.ids and (low < 0 or high >= len(self.class_names)):
            raise ValueError(
                f"labels run from {low} to {high}, outside the {len(self.class_names)} "
                f"class names (0 to {len(self.class_names) - 1})."
            )

    def __len__(self) -> int:
        return len(self.ids)

    def take(self, rows: Sequence[int] | np.ndarray) -> Records:
        """The records at `rows` (indices), in that order."""
        rows = np.asarray(rows, dtype=np.int64)
        ids = tuple(self.ids[row] for row in rows)
        return Records(
            ids,
            self.raw[rows] if isinstance(self.raw, np.ndarray) else [self.raw[row] for row in rows],
            self.labels[rows],
            self.class_names,
            *(_pick(part, rows) for part in (self.groups, self.times, self.given)),
            unreadable={name: self.unreadable[name] for name in ids if name in self.unreadable},
        )


def _pick(part: tuple[str, ...] | None, rows: np.ndarray) -> tuple[str, ...] | None:
    return None if part is None else tuple(part[row] for row in rows)


def time_values(times: Sequence[str]) -> np.ndarray:
    """(N,) float64 that sorts as the times do: numbers as they are, ISO dates in seconds (UTC).

    Raises ValueError for anything else: "3/4/2024" sorts wrongly as text, and silently.
    """
    try:
        return np.array([float(text) for text in times], dtype=np.float64)
    except ValueError:
        return np.array([_seconds(text) for text in times], dtype=np.float64)


def _seconds(text: str) -> float:
    try:
        moment = datetime.fromisoformat(text.strip().replace("Z", "+00:00"))
    except ValueError:
        raise ValueError(
            f"Time {text!r} is neither a number nor an ISO date such as 2024-03-31T12:00:00: "
            "write all times of the data in one of these two forms."
        ) from None
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=timezone.utc)
    return moment.timestamp()


# --------------------------------------------------------------------------- content and identity


def content_hash(raw: Any) -> str:
    """32 hex digits that two rows share exactly when their raw content is the same.

    A Path is hashed over the file's bytes (OSError when it cannot be read); an array over dtype,
    shape and values, alike on every byte order; text and bytes as they are.
    """
    digest = hashlib.blake2b(digest_size=16)
    if isinstance(raw, Path):
        with raw.open("rb") as file:
            while chunk := file.read(1 << 20):
                digest.update(chunk)
    elif isinstance(raw, (np.ndarray, np.generic)) and raw.dtype != object:
        array = np.ascontiguousarray(raw)
        array = array.astype(array.dtype.newbyteorder("<"), copy=False)
        digest.update(f"{array.dtype.str}{np.shape(raw)}".encode())
        digest.update(array.tobytes())
    elif isinstance(raw, bytes):
        digest.update(raw)
    else:
        value = raw.tolist() if isinstance(raw, np.ndarray) else raw
        digest.update(raw.encode("utf-8") if isinstance(raw, str) else files.canonical(value))
    return digest.hexdigest()


def content_hashes(records: Records, cache_path: Path | None = None) -> tuple[str, ...]:
    """One content hash per row; "" where the bytes cannot be read.

    Files are looked up in `cache_path` by (path, size, mtime_ns), so only what changed is read
    again. The cache is of this machine: the absolute path keeps two folders with the same relative
    names apart.
    """
    known = _read_cache(cache_path)
    fresh: dict[str, list] = {}
    hashes = tuple(_cached_hash(raw, known, fresh) for raw in records.raw)
    if cache_path is not None and fresh:
        files.write_json(cache_path, {**known, **fresh})
    return hashes


def _cached_hash(raw: Any, known: dict[str, list], fresh: dict[str, list]) -> str:
    if not isinstance(raw, Path):
        return content_hash(raw)
    try:
        stat = raw.stat()
        key, mark = raw.absolute().as_posix(), [stat.st_size, stat.st_mtime_ns]
        entry = known.get(key)
        if isinstance(entry, list) and entry[:2] == mark:
            return entry[2]
        found = content_hash(raw)
    except OSError:
        return ""
    if time.time_ns() - stat.st_mtime_ns > SETTLED_NS:
        fresh[key] = [*mark, found]
    return found


def identity(records: Records, hashes: Sequence[str]) -> str:
    """sha256 of the data set: class names, and every row's id, label, content, group, time, split.

    The order of the rows does not count.
    """
    rows = range(len(records))
    parts = [records.groups, records.times, records.given]
    columns = [part if part is not None else [None] * len(records) for part in parts]
    digest = hashlib.sha256(files.canonical(list(records.class_names)))
    for row in sorted(rows, key=records.ids.__getitem__):
        values = [records.ids[row], int(records.labels[row]), hashes[row]]
        digest.update(files.canonical([*values, *(column[row] for column in columns)]))
    return digest.hexdigest()


def remember(cache_path: Path, stamp: dict, identity: str, num_records: int) -> None:
    """Note which data set a stamp (paths, sizes, times) stood for when its content was hashed."""
    known = _read_cache(cache_path)
    key = files.sha256_json(stamp)
    known.pop(key, None)
    known[key] = [identity, num_records]
    files.write_json(cache_path, dict(list(known.items())[-NUM_REMEMBERED:]))


def recall(cache_path: Path, stamp: dict) -> tuple[str, int] | None:
    """(identity, number of records) of the data with this stamp, or None: hash it again."""
    entry = _read_cache(cache_path).get(files.sha256_json(stamp))
    return (str(entry[0]), int(entry[1])) if isinstance(entry, list) and len(entry) == 2 else None


def _read_cache(path: Path | None) -> dict[str, list]:
    """A cache that is absent or damaged is an empty one: everything is hashed again."""
    try:
        known = files.read_json(path) if path is not None else {}
    except (OSError, json.JSONDecodeError, UnicodeDecodeError):
        return {}
    return known if isinstance(known, dict) else {}


# --------------------------------------------------------------------------- the sealed test rows


@dataclass(frozen=True)
class SplitView:
    """The rows of each split of `splits` (the content of splits.json), with test under a seal.

    Only the stage that reads the test set once builds this with `opened=True`.
    """

    records: Records
    splits: dict
    opened: bool = False

    def rows(self, split: str) -> np.ndarray:
        """Row numbers of a split, ascending. Raises SealedTestError for test while it is sealed."""
        if split not in SPLITS:
            raise ValueError(f"There is no split {split!r}; the splits are {SPLITS}.")
        if split == "test" and not self.opened:
            raise SealedTestError(
                "The test rows are sealed: whatever is fitted, tuned or chosen on them can no "
                "longer be measured by them. Use the validation rows here; the test rows are read "
                "once, by: python run.py stage=squeeze"
            )
        wanted = set(self.splits["ids"][split])
        rows = [row for row, name in enumerate(self.records.ids) if name in wanted]
        if len(rows) != len(wanted):
            absent = sorted(wanted - {self.records.ids[row] for row in rows})
            raise ValueError(
                f"{len(absent)} {split} ids of splits.json are not in the data (first: "
                f"{absent[0]!r}). Run: python run.py stage=data_audit"
            )
        return np.array(rows, dtype=np.int64)

    def take(self, split: str) -> Records:
        return self.records.take(self.rows(split))
