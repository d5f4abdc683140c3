"""The one split of the data: made once, frozen in splits.json, extended when rows are added.

Rows that belong together (duplicates, groups) form a unit, and a unit falls in one split. Chance
is a hash of seed and id, never a generator: the order of the rows does not count, and a new row
joins without moving an old one. The content of splits.json:

    schema 1, the settings (strategy, test, validation_fraction, ...; the folds' are null without
    kfold), ids {train, validation, test: sorted ids}, folds (kfold: the ids of each fold, else
    null), left_out {id: reason}
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from . import files, split_rules
from .records import SPLITS, Records, time_values

STRATEGIES = ("random", "group", "time", "given", "kfold")
TESTS = ("held_out", "none", "external")
# What an extension may not change; the fold is a choice among folds that stay.
FIXED = ("strategy", "test", "validation_fraction", "test_fraction", "seed", "num_folds")


@dataclass(frozen=True)
class SplitSettings:
    """How to split. The fractions are of rows; without a held-out test set (`test` "none" or
    "external") `test_fraction` is not used, and kfold does not use `validation_fraction`."""

    strategy: str = "random"
    test: str = "held_out"
    validation_fraction: float = 0.15
    test_fraction: float = 0.15
    seed: int = 0
    num_folds: int = 5
    fold: int = 0

    def __post_init__(self) -> None:
        if self.strategy not in STRATEGIES:
            raise ValueError(f"Unknown split strategy {self.strategy!r}: choose from {STRATEGIES}.")
        if self.test not in TESTS:
            raise ValueError(f"Unknown test {self.test!r}: choose from {TESTS}.")
        if min(self.shares.values()) <= 0:
            raise ValueError(
                f"validation_fraction {self.validation_fraction} and test_fraction "
                f"{self.test_fraction} leave a split empty. For no test rows of your own set "
                "data.split.test=none, or data.split.test=external when others hold them."
            )
        if self.strategy == "kfold" and not 0 <= self.fold < self.num_folds >= 2:
            raise ValueError(
                f"fold {self.fold} of num_folds {self.num_folds}: it takes at least 2 folds, and "
                "they are counted from 0."
            )

    @property
    def shares(self) -> dict[str, float]:
        """Share of the rows for each split that is wanted; they sum to 1."""
        test = {"test": self.test_fraction} if self.test == "held_out" else {}
        train = 1 - self.validation_fraction - sum(test.values())
        return {"train": train, "validation": self.validation_fraction, **test}

    @property
    def stored(self) -> dict:
        """The settings as splits.json keeps them."""
        values = {key: getattr(self, key) for key in FIXED}
        folded = {"num_folds": self.num_folds, "fold": self.fold}
        return values | (folded if self.strategy == "kfold" else dict.fromkeys(folded))


def make(
    records: Records,
    clusters: Iterable[Iterable[int]],
    settings: SplitSettings,
    former: dict | None = None,
) -> dict:
    """The content of splits.json for these records.

    `clusters` are sets of rows that must stay together (duplicates). `former` is the split made
    before: its ids never move, and new rows join their cluster, or a split by hash. Raises
    ValueError for classes too small to split, absent groups, times or given splits, and settings
    that contradict `former`.
    """
    _require_columns(records, settings)
    known = _known(records, former, settings)
    left_out = {name: f"unreadable: {why}" for name, why in sorted(records.unreadable.items())}
    # A split by time forecasts: the groups of tomorrow may be those of today.
    groups = records.groups if settings.strategy != "time" else None
    units = split_rules.units(records, clusters, groups)
    folds = None
    if settings.strategy == "time":
        names, late = _by_time(records, units, settings, known)
        left_out |= {records.ids[row]: "repeats a row of an earlier split" for row in late}
    elif settings.strategy == "given":
        names = _as_given(records, units, settings, known)
    else:
        names, folds = _by_chance(records, units, settings, known, former)
    return _content(records, names, folds, left_out, settings)


def read(path: Path) -> dict:
    """splits.json as `make` left it; ValueError when it is of another schema."""
    splits = files.read_json(path)
    if not isinstance(splits, dict) or splits.get("schema") != 1 or "ids" not in splits:
        raise ValueError(f"{path} is not a split of schema 1. Run: python run.py stage=data_audit")
    return splits


def column(ids: Sequence[str], splits: dict) -> np.ndarray:
    """(N,) array of each id's split: "train", "validation", "test", or "" for none."""
    where = {name: split for split in SPLITS for name in splits["ids"][split]}
    return np.array([where.get(name, "") for name in ids], dtype="<U10")


# --------------------------------------------------------------------------- what is asked for


def _require_columns(records: Records, settings: SplitSettings) -> None:
    needs = {"group": "groups", "time": "times", "given": "given"}.get(settings.strategy)
    if needs is None:
        return
    if getattr(records, needs) is None:
        raise ValueError(
            f"A split by {settings.strategy} needs {needs} and the data has none: name the column "
            "in the data settings, or choose data.split.strategy=random."
        )
    if needs == "given" and "test" in records.given and settings.test != "held_out":
        raise ValueError(
            f"data.split.test={settings.test}, but the data gives "
            f"{records.given.count('test')} rows as test: use data.split.test=held_out, "
            "or drop these rows from the data."
        )


def _known(records: Records, former: dict | None, settings: SplitSettings) -> dict[int, str]:
    """Row -> split of every row that `former` has placed; empty for a first or a new data set."""
    if former is None:
        return {}
    known = {row: str(split) for row, split in enumerate(column(records.ids, former)) if split}
    stored = settings.stored
    changed = [
        f"{key} {former[key]} -> {stored[key]}" for key in FIXED if former[key] != stored[key]
    ]
    if known and changed:
        raise ValueError(
            f"splits.json is frozen and was made with other settings ({', '.join(changed)}): "
            "old ids never move. Put the settings back, or delete artifacts/data_audit/splits.json "
            "to split anew; a test set read before is then no longer fresh."
        )
    return known


# --------------------------------------------------------------------------- the strategies


def _by_chance(
    records: Records,
    units: list[list[int]],
    settings: SplitSettings,
    known: dict[int, str],
    former: dict | None,
) -> tuple[np.ndarray, list[list[str]] | None]:
    """Split names (N,) and, for kfold, the ids of each fold. Parts are the splits, or the folds
    and test: then choosing another fold leaves test and folds as they are."""
    names, shares = _parts(settings)
    if known:
        placed = _placed(records, known, names, former)
        parts = split_rules.join(records, units, placed, shares, settings.seed)
    else:
        split_rules.require_units(records, units, len(names))
        parts = split_rules.stratify(records, units, shares, settings.seed)
    if settings.strategy != "kfold":
        return np.array([*names, ""])[parts], None
    folds = [
        sorted(records.ids[row] for row in np.flatnonzero(parts == fold))
        for fold in range(settings.num_folds)
    ]
    roles = ["train"] * settings.num_folds + ["test"] * (len(names) - settings.num_folds) + [""]
    roles[settings.fold] = "validation"
    return np.array(roles)[parts], folds


def _parts(settings: SplitSettings) -> tuple[list[str], list[float]]:
    if settings.strategy != "kfold":
        return list(settings.shares), list(settings.shares.values())
    test = settings.shares.get("test", 0.0)
    names = [f"fold {fold}" for fold in range(settings.num_folds)]
    shares = [(1 - test) / settings.num_folds] * settings.num_folds
    return ([*names, "test"], [*shares, test]) if test else (names, shares)


def _placed(
    records: Records, known: dict[int, str], names: list[str], former: dict
) -> dict[int, int]:
    """Row -> index into `names` of the rows that the earlier split has placed."""
    if not former["folds"]:
        return {row: names.index(split) for row, split in known.items()}
    fold_of = {name: fold for fold, ids in enumerate(former["folds"]) for name in ids}
    return {row: fold_of.get(records.ids[row], len(names) - 1) for row in known}


def _as_given(
    records: Records, units: list[list[int]], settings: SplitSettings, known: dict[int, str]
) -> np.ndarray:
    """The split each row came with; validation is drawn from train where none was given."""
    given = np.array(records.given, dtype="<U10")
    given[[name in records.unreadable for name in records.ids]] = ""
    if "validation" in given:
        return given
    shares = [settings.shares["train"], settings.shares["validation"]]
    names = ["train", "validation"]
    inside = [rows for unit in units if (rows := [row for row in unit if given[row] == "train"])]
    if known:
        placed = {row: names.index(split) for row, split in known.items() if split in names}
        parts = split_rules.join(records, inside, placed, shares, settings.seed)
    else:
        split_rules.require_units(records, inside, len(names))
        parts = split_rules.stratify(records, inside, shares, settings.seed)
    return np.where(parts >= 0, np.array([*names, ""])[parts], given)


def _by_time(
    records: Records, units: list[list[int]], settings: SplitSettings, known: dict[int, str]
) -> tuple[np.ndarray, list[int]]:
    """Split names (N,), train before validation before test, and the rows left out.

    A unit that spans a cut keeps its rows of the earliest split: the later copies can neither stay
    (they leak) nor move (they would put the future into the past).
    """
    times = time_values(records.times)
    usable = [row for unit in units for row in unit]
    names = list(settings.shares)
    if known:
        starts = split_rules.known_starts(times, known, names)
    else:
        starts = split_rules.starts(times[usable], list(settings.shares.values()))
    parts = np.searchsorted(starts, times, side="right")
    for row, split in known.items():
        parts[row] = names.index(split)
    late = [
        row for unit in units for row in unit if row not in known and parts[row] > parts[unit].min()
    ]
    result = np.full(len(records), "", dtype="<U10")
    result[usable] = np.array(names)[parts[usable]]
    result[late] = ""
    return result, late


def _content(
    records: Records,
    names: np.ndarray,
    folds: list[list[str]] | None,
    left_out: dict[str, str],
    settings: SplitSettings,
) -> dict:
    ids = {}
    for split in SPLITS:
        ids[split] = sorted(records.ids[row] for row in np.flatnonzero(names == split))
    for split in settings.shares:
        if not ids[split]:
            raise ValueError(
                f"No row is left for {split}: add rows, change the fractions, or set "
                "data.split.test=none when there is no test set."
            )
    return {"schema": 1, **settings.stored, "ids": ids, "folds": folds, "left_out": left_out}
