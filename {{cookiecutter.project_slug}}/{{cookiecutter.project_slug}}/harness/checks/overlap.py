"""Clauses of `split_hygiene`: rows, ids, groups and times on both sides of a split, and one input
with two labels."""

from __future__ import annotations

import copy
import hashlib
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from . import Finding, Pipeline, probe

COPIED = (
    "copies of training rows in validation",
    "the split was drawn after rows were repeated (oversampling, windows, several files of one)",
    "both splits are read from the same place",
)
SPOILED = ("a transform makes values that are no numbers (last_seam tells which)",)


@dataclass(frozen=True)
class Clause:
    finding: Finding
    shuts: bool  # else it warns


@dataclass(frozen=True)
class Rows:
    """The rows of one split, on the CPU."""

    x: dict[str, torch.Tensor]
    y: torch.Tensor
    ids: torch.Tensor | None
    hashes: list[bytes]  # of x, row by row; b"" where a row holds one value throughout

    def __len__(self) -> int:
        return len(self.y)

    def num_spoiled(self) -> int:
        """Rows with a value that is not finite: equal to nothing, so none can be compared."""
        values = self.floats()
        return 0 if values is None else int((~values.isfinite()).any(dim=1).sum())

    def floats(self) -> torch.Tensor | None:
        """`(N, D)` float32; None where x holds no real numbers."""
        parts = [v.float().flatten(1) for v in self.x.values() if v.is_floating_point()]
        return torch.cat(parts, dim=1) if parts else None


def stored(loader: Any) -> Rows:
    """All rows of a loader: as it keeps them, or as one pass hands them out."""
    rows = loader.rows if hasattr(loader, "rows") else probe.join(list(copy.copy(loader)))
    x = {name: value.detach().cpu() for name, value in probe.tensors(rows["x"]).items()}
    ids = rows["id"].cpu() if "id" in rows else None
    return Rows(x, rows["y"].cpu(), ids, _hashes(x))


def _hashes(x: dict[str, torch.Tensor]) -> list[bytes]:
    parts = [v.float() if v.dtype == torch.bfloat16 else v for v in x.values()]
    flat = [part.reshape(len(part), -1).contiguous() for part in parts]
    blank = torch.stack([(part == part[:, :1]).all(dim=1) for part in flat]).all(dim=0)
    blank &= sum(part.shape[1] for part in flat) > 1
    arrays = [(part + 0 if part.is_floating_point() else part).numpy() for part in flat]  # -0 is 0
    return [
        b"" if empty else hashlib.blake2b(b"|".join(a[row].tobytes() for a in arrays)).digest()
        for row, empty in enumerate(blank.tolist())
    ]


# ---- keys ---------------------------------------------------------------------------------------


def keys_apart(pipeline: Pipeline, train: Rows, validation: Rows) -> Iterator[Clause]:
    """Ids, groups and times that must not be on both sides."""
    if train.ids is None or validation.ids is None:
        return
    ids = train.ids.tolist(), validation.ids.tolist()
    both = set(ids[0]) & set(ids[1])
    if both:
        share = len(both) / len(set(ids[1]))
        equal = _equal_at(train, validation, both)
        because = f"{len(both)} of {len(set(ids[1]))} validation ids are training ids"
        because += "" if equal else ", of other rows: ids are counted per split"
        causes = COPIED if equal else ("ids must be numbers in all records, whatever the split",)
        yield Clause(Finding(share, 0.0, because, causes), equal)
    if pipeline.group is not None:
        yield from _groups_apart(*([pipeline.group(row) for row in side] for side in ids))
    if pipeline.time is not None:
        yield from _in_order(*([float(pipeline.time(row)) for row in side] for side in ids))


def _equal_at(train: Rows, validation: Rows, ids: set) -> bool:
    """Whether the rows of at least one of these ids are the same on both sides."""
    one = dict(zip(train.ids.tolist(), train.hashes, strict=True))
    other = dict(zip(validation.ids.tolist(), validation.hashes, strict=True))
    return any(one[row] == other[row] for row in ids)


def _groups_apart(train: list, validation: list) -> Iterator[Clause]:
    both = set(train) & set(validation)
    if both:
        rows = sum(group in both for group in validation)
        because = f"{len(both)} groups are in both splits, with {rows} of {len(validation)} "
        causes = ("the split is drawn over rows, not over groups",)
        finding = Finding(rows / len(validation), 0.0, because + "validation rows", causes)
        yield Clause(finding, True)


def _in_order(train: list[float], validation: list[float]) -> Iterator[Clause]:
    known = [t for t in train if math.isfinite(t)], [t for t in validation if math.isfinite(t)]
    if not all(known):
        return
    start, end = min(known[1]), max(known[0])
    if end > start:
        late = sum(t > start for t in known[0])
        because = (
            f"{late} of {len(known[0])} training rows are later than the first validation row "
            f"({end:g} against {start:g})"
        )
        causes = ("the split is not drawn by time: training sees the future",)
        yield Clause(Finding(late / len(known[0]), 0.0, because, causes), True)


# ---- equal rows ---------------------------------------------------------------------------------


def rows_in_both(train: Rows, validation: Rows, limit: float) -> Iterator[Clause]:
    """Validation rows that equal a training row, or do up to rounding. A warning where as many
    coincide by chance as rows do within training."""
    counts: dict[bytes, int] = {}
    for row in train.hashes:
        counts[row] = counts.get(row, 0) + 1
    counts.pop(b"", None)
    equal = sum(row in counts for row in validation.hashes)
    rounded = 0 if equal else _equal_up_to_rounding(train, validation)
    share = max(equal, rounded) / len(validation)
    if share <= limit:
        return
    few = train.floats() is None or _few_inputs(train, len(counts))  # texts repeat a line by nature
    pairs = sum(count * (count - 1) / 2 for count in counts.values())
    by_chance = pairs / max(1, len(train) * (len(train) - 1) / 2) * len(train) * len(validation)
    shuts = not few or max(equal, rounded) > 3 * by_chance + 5
    how = "" if equal else " up to rounding"
    because = (
        f"{max(equal, rounded)} of {len(validation)} validation rows equal a training row{how}"
    )
    if not shuts:
        because += ", which may be chance: no more than repeat within training"
    yield Clause(Finding(share, limit, because, COPIED), shuts)


def _few_inputs(train: Rows, num_distinct: int) -> bool:
    """Whether equal rows are no copies: few distinct rows at all, or so few values per column that
    two rows coincide by chance."""
    if num_distinct < 0.2 * len(train):
        return True
    log_chance = 2 * math.log(len(train))
    for values in train.x.values():
        flat = values.reshape(len(values), -1)[:2000]
        for column in flat[:, :4096].T:
            shares = column.unique(return_counts=True)[1].double() / len(column)
            log_chance += math.log((shares**2).sum().item())
            if log_chance < math.log(1e-4):
                return False
    return True


def _equal_up_to_rounding(train: Rows, validation: Rows, tolerance: float = 1e-5) -> int:
    """Validation rows within `tolerance` sd of a training row in every value. Of four and more
    varying values, so that none come so near by chance."""
    one, other = train.floats(), validation.floats()
    if one is None or other is None or one.shape[1] != other.shape[1]:
        return 0
    if any(not values.is_floating_point() for values in train.x.values()):
        return 0
    if int((one.std(dim=0) > 0).sum()) < 4:
        return 0
    scale = one.double().std().item()
    generator = torch.Generator().manual_seed(0)
    line = torch.randn(one.shape[1], generator=generator).double()
    place, order = (one.double() @ line).sort()
    at = torch.searchsorted(place, other.double() @ line)
    found = torch.zeros(len(other), dtype=torch.bool)
    for step in (-1, 0):
        near = order[(at + step).clamp(0, len(one) - 1)]
        found |= (one[near] - other).abs().amax(dim=1) <= tolerance * scale
    blank = torch.tensor([row == b"" for row in validation.hashes])
    return int((found & ~blank).sum())


def conflicts(task: Any, train: Rows, limit: float) -> Iterator[Clause]:
    """Training rows whose input occurs again with another label. A number measured twice is no
    conflict, and neither are classes that so few possible inputs cannot tell apart."""
    if task.targets not in ("exclusive", "multilabel"):
        return
    labels: dict[bytes, set] = {}
    for row, label in zip(train.hashes, train.y.tolist(), strict=True):
        labels.setdefault(row, set()).add(str(label))
    count = sum(len(labels[row]) > 1 for row in train.hashes)
    share = count / len(train)
    if share <= limit / 5:
        return
    num_distinct = sum(row != b"" for row in labels)
    blank = sum(row == b"" for row in train.hashes)
    because = f"{count} of {len(train)} training rows have an equal one with another label"
    because += (
        f", {blank} of them hold one value throughout" if blank and len(labels[b""]) > 1 else ""
    )
    causes = ("empty records kept as examples",) if blank else ()
    causes += ("labels were shuffled or merged from two sources", "records were labelled twice")
    shuts = share > limit and not _few_inputs(train, num_distinct)
    yield Clause(Finding(share, limit, because, causes), shuts)
