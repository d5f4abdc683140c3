"""What the audit looks at, what it states about each axis, and the limits it judges by."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from ..checks import Check
from . import neighbours

MIN_PLANTED_RECALL = 0.8  # below it a detector may say "cannot see", never "none found"
NUM_PLANTED = 20  # faults planted per detector


@dataclass(frozen=True)
class Limits:
    """The limits of the stage's YAML; what lies beyond shuts an axis, or warns where said so."""

    max_corrupt_share: float  # share of all rows
    max_label_noise: float  # share of wrong labels, and of rows with conflicting labels
    min_class_rows: float  # train rows of the rarest class
    max_duplicate_share: float = 0.05  # share of readable rows that repeat another; warns
    max_class_ratio: float = 10.0  # rows of the largest class over the smallest; warns
    max_column_score: float = 0.99  # balanced accuracy of one column alone
    max_split_auc: float = 0.9  # train against validation rows, of a split drawn by chance


@dataclass(frozen=True)
class Subject:
    """The data as arrays: no detector knows what the numbers stand for.

    All parts are per row, N rows in the order of the source. `split` names each row's split, ""
    for none; `content` is its content hash, "" where it cannot be read; `vectors` (N, D) float32
    are the preprocessed rows, flattened from `shape`, zeros where unreadable; `raw(row)` decodes
    one row to an array and may raise; `features` maps an axis to (N,) numbers. `raw_shape` and
    `value_range` [low, high] are what the source declares, or None. `strategy` is how the rows
    were split: "random", "group", "time", "given" or "kfold".
    """

    ids: tuple[str, ...]
    split: np.ndarray
    labels: np.ndarray
    class_names: tuple[str, ...]
    content: tuple[str, ...]
    vectors: np.ndarray
    shape: tuple[int, ...]
    raw: Callable[[int], np.ndarray]
    features: dict[str, np.ndarray] = field(default_factory=dict)
    groups: tuple[str, ...] | None = None
    times: tuple[str, ...] | None = None
    unreadable: dict[str, str] = field(default_factory=dict)
    raw_shape: tuple[int, ...] | None = None
    value_range: tuple[float, float] | None = None
    strategy: str = "random"

    def __post_init__(self) -> None:
        parts = {"split": self.split, "labels": self.labels, "content": self.content}
        parts |= {"vectors": self.vectors, "groups": self.groups, "times": self.times}
        for name, part in (parts | self.features).items():
            if part is not None and len(part) != len(self.ids):
                raise ValueError(f"{len(self.ids)} ids but {len(part)} rows of {name}.")
        if math.prod(self.shape) != self.vectors.shape[1]:
            raise ValueError(f"Rows of {self.vectors.shape[1]} numbers are not of {self.shape}.")

    @property
    def num_classes(self) -> int:
        return len(self.class_names)

    @cached_property
    def readable(self) -> np.ndarray:
        """Numbers of the rows that could be read."""
        rows = [row for row, name in enumerate(self.ids) if name not in self.unreadable]
        return np.array(rows, dtype=np.int64)

    def rows(self, *splits: str) -> np.ndarray:
        """Numbers of the readable rows in these splits, ascending."""
        return self.readable[np.isin(self.split[self.readable], splits)]

    @cached_property
    def learnable(self) -> np.ndarray:
        """The rows that anything may be fitted or scored on: train and validation, at most
        `neighbours.MAX_ROWS` of them, drawn once."""
        return neighbours.sample(self.rows("train", "validation"))

    @cached_property
    def project(self) -> Callable[[np.ndarray], np.ndarray]:
        """Maps (M, D) rows to few columns for distances and probes: principal components of wide
        rows, fitted on train rows; narrow rows stay as they are."""
        return neighbours.projection(self.vectors[self.rows("train")])

    @cached_property
    def compact(self) -> np.ndarray:
        return self.project(self.vectors)

    @cached_property
    def inputs(self) -> tuple[str, ...]:
        """A hash of what the model sees of each row, "" where unreadable: rows of other content
        may still be the same input."""
        hashes = [""] * len(self.ids)
        for row in self.readable:
            data = (self.vectors[row] + 0.0).tobytes()  # -0.0 is the same input as 0.0
            hashes[row] = hashlib.blake2b(data, digest_size=16).hexdigest()
        return tuple(hashes)

    @cached_property
    def graph(self) -> neighbours.Graph:
        """Nearest neighbours among the readable rows of all splits, for duplicates and leakage."""
        rows = neighbours.sample(self.readable)
        return neighbours.graph(self.compact, self.vectors, rows)

    @cached_property
    def learnable_graph(self) -> neighbours.Graph:
        """Nearest neighbours among `learnable`: nothing in it depends on a test row."""
        return neighbours.graph(self.compact, self.vectors, self.learnable)

    def names(self, rows: Sequence[int] | np.ndarray) -> tuple[str, ...]:
        return tuple(self.ids[row] for row in rows)


@dataclass(frozen=True)
class Statement:
    """What was found along one axis, how it was looked for, and how well the looking works.

    `n` rows were looked at; `interval` is 95 % (equal ends: every row was looked at);
    `planted_recall` is the share of faults found that were planted into a copy first, and
    `planted_false` counts what was named there though it was neither planted nor named before.
    `ids` lists the rows concerned, worst first. `more` holds further figures by name.
    """

    axis: str
    method: str
    n: int
    verdict: str
    because: str
    estimate: float | None = None
    interval: tuple[float, float] | None = None
    unit: str = ""
    limit: float | list | None = None
    planted_recall: float | None = None
    planted_false: int | None = None
    ids: tuple[str, ...] = ()
    suspect: tuple[str, ...] = ()
    more: dict[str, float] = field(default_factory=dict)

    def check(self) -> Check:
        """The statement as a check of the gate; recall and method stay in the statement."""
        return Check(
            self.axis,
            self.verdict,
            self.estimate,
            self.limit,
            self.unit,
            self.because,
            self.suspect if self.verdict in ("shut", "warn", "inconclusive") else (),
        )

    def row(self) -> dict:
        """The statement as JSON; floats to 6 significant digits, as in the gate."""
        interval = None if self.interval is None else [rounded(end) for end in self.interval]
        return {
            "axis": self.axis,
            "method": self.method,
            "n": self.n,
            "estimate": rounded(self.estimate),
            "interval": interval,
            "planted_recall": rounded(self.planted_recall),
            "planted_false": self.planted_false,
            "verdict": self.verdict,
            "because": self.because,
            "ids": list(self.ids),
            "more": {name: rounded(value) for name, value in self.more.items()},
        }


@dataclass(frozen=True)
class Control:
    """How many planted faults a detector found, and how many it named beside them."""

    found: int
    planted: int
    false: int

    @property
    def recall(self) -> float | None:
        return self.found / self.planted if self.planted else None

    @property
    def blind(self) -> bool:
        return self.recall is None or self.recall < MIN_PLANTED_RECALL


def state(axis: str, control: Control, *, verdict: str, because: str, **fields) -> Statement:
    """A statement that is as sure as its control: a detector that misses what was planted warns
    that it cannot see, and never says that nothing is there. What it did find stays found."""
    if verdict == "open" and control.blind:
        verdict = "warn"
        because = (
            f"This detector cannot see here: it found {control.found} of {control.planted} planted "
            f"faults; for what it is worth: {because[0].lower()}{because[1:]}"
        )
        fields["suspect"] = ("the data hides such faults from this method", "too few rows")
    return Statement(
        axis,
        verdict=verdict,
        because=because,
        planted_recall=control.recall,
        planted_false=control.false,
        **fields,
    )


def many(number: int, noun: str) -> str:
    """ "1 pair", "1,200 pairs"."""
    return f"{number:,} {noun}" + ("" if number == 1 else "s")


def rounded(value: float | None) -> float | None:
    """To 6 significant digits; what is not finite becomes None."""
    if value is None or not math.isfinite(value):
        return None
    return float(f"{value:.6g}")


def census(share: float) -> tuple[float, float]:
    """The interval of a share that was counted over every row."""
    return (share, share)


def wilson(hits: int, n: int, z: float = 1.96) -> tuple[float, float]:
    """95 % interval of a share (Wilson 1927): sound for few rows and for shares near 0 and 1."""
    if n == 0:
        return (0.0, 1.0)
    share, square = hits / n, z * z
    middle = (share + square / (2 * n)) / (1 + square / n)
    half = z * math.sqrt(share * (1 - share) / n + square / (4 * n * n)) / (1 + square / n)
    return (max(0.0, middle - half), min(1.0, middle + half))
