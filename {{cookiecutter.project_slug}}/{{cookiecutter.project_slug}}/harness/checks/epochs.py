"""Whole epochs of a copy of a loader, for the checks that count and compare rows."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from . import probe

REPLACING = ("weighted", "infinite", "streamed")  # what `loader.sampler` may declare


@dataclass(frozen=True)
class Epoch:
    """One epoch, on the CPU. `ids` is None where batches carry none; `complete` is False where
    reading stopped early."""

    ids: torch.Tensor | None
    x: dict[str, torch.Tensor]
    y: torch.Tensor
    sizes: list[int]  # rows per batch
    complete: bool

    @cached_property
    def by_id(self) -> torch.Tensor:
        return self.ids.argsort(stable=True)

    def differs(self, other: Epoch) -> int:
        """How many rows with the same id have another x (both epochs hold the same ids)."""
        if len(self.ids) != len(other.ids):
            return max(len(self.ids), len(other.ids))
        wrong = torch.zeros(len(self.ids), dtype=torch.bool)
        for part, values in self.x.items():
            right = other.x.get(part)
            if right is None or right.shape != values.shape:
                return len(self.ids)
            wrong |= probe.rows_differ(values[self.by_id], right[other.by_id])
        return int(wrong.sum())


def own(loader: Any) -> Any:
    """A copy that does not share its rows with the loader: reading it changes nothing of the
    original's, even where reading writes into the rows. What a callable holds stays shared."""
    if not hasattr(loader, "rows"):
        try:
            return copy.deepcopy(loader)
        except Exception:  # open files, worker processes: a shallow copy has to do
            return copy.copy(loader)
    other = copy.copy(loader)
    other.rows = {name: _clone(value) for name, value in loader.rows.items()}
    for name, value in vars(loader).items():
        if name not in ("rows", "augment") and not callable(value):
            try:
                setattr(other, name, copy.deepcopy(value))
            except Exception:  # what cannot be copied is shared
                continue
    return other


def unaugmented(loader: Any) -> Any:
    """`own(loader)` without its augmentation, whether it asks for one before calling it or not."""
    other = own(loader)
    if getattr(other, "augment", None) is not None:
        other.augment = lambda x, *rest, **more: x
    return other


def _clone(value: Any) -> Any:
    return {k: v.clone() for k, v in value.items()} if isinstance(value, dict) else value.clone()


def batches(loader: Any, max_rows: int = 50_000) -> Iterator[dict]:
    """Those of one iteration; of a loader that declares no end, as many rows as it says it has (at
    most `max_rows` where it does not say)."""
    room, count = _room(loader, max_rows), 0
    for batch in loader:
        yield batch
        count += len(batch["y"])
        if count >= room:
            return


def _room(loader: Any, max_rows: float) -> float:
    if declared_sampler(loader) not in ("infinite", "streamed"):
        return math.inf
    rows = getattr(loader, "rows", None)
    return getattr(loader, "num_rows", None) or (len(rows["y"]) if rows else max_rows)


def epoch(loader: Any, max_rows: int) -> Epoch:
    """One iteration over the loader, cut after `max_rows` rows (an endless one after as many rows
    as it says it has)."""
    total = getattr(loader, "num_rows", None)
    endless = declared_sampler(loader) in ("infinite", "streamed")
    room = min(max_rows, _room(loader, max_rows))
    read, count, complete = [], 0, True
    for batch in loader:
        read.append(batch)
        count += len(batch["y"])
        if count >= room:
            complete = not endless and count >= (total or count + 1)
            break
    if not read:
        nothing = torch.zeros(0, dtype=torch.long)
        return Epoch(nothing, {}, nothing, [], True)
    whole = probe.join(read)
    ids = whole["id"].cpu() if "id" in whole else None
    x = {name: value.cpu() for name, value in probe.tensors(whole["x"]).items()}
    return Epoch(ids, x, whole["y"].cpu(), [len(batch["y"]) for batch in read], complete)


def listed(loader: Any) -> torch.Tensor | None:
    """The ids of all rows the loader should hand out; None where it does not keep them."""
    rows = getattr(loader, "rows", None)
    return rows["id"].cpu() if isinstance(rows, dict) and "id" in rows else None


def declared_sampler(loader: Any) -> str:
    """ "plain" (each row once), or what the loader declares: one of REPLACING, or "replacement"."""
    kind = getattr(loader, "sampler", None)
    if isinstance(kind, str) and kind in REPLACING:
        return kind
    inner = getattr(kind, "replacement", None)  # of a torch sampler
    replacing = inner is True or getattr(loader, "replacement", False) is True
    weights = hasattr(kind, "weights")
    return ("weighted" if weights else "replacement") if replacing else "plain"
