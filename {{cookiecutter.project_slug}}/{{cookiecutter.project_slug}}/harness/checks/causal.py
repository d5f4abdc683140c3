"""How far a model sees inside a row: earlier positions only, and its own document only."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from torch import nn

from ..loop import take
from . import Finding, Pipeline, probe
from .positions import Influence, content, foreign, influence, moved, real

MAX_POSITIONS = 128  # up to here every cut point is tried


@dataclass(frozen=True)
class Sight:
    """How far the outputs of a model see."""

    leak: float
    leaking: tuple[int, ...]  # cut points with an influence from behind the cut
    cuts: tuple[int, ...]
    reach: torch.Tensor  # (P, T) change of output q when only position p is replaced
    places: tuple[int, ...]  # the P positions

    def backward(self) -> dict[int, int]:
        """Position -> how many positions earlier its first reader stands."""
        first = {}
        for row, p in zip(self.reach, self.places, strict=True):
            readers = torch.where(row[:p] > 0)[0]
            if len(readers):
                first[p] = p - int(readers[0])
        return first

    def own(self) -> list[float]:
        """Effect of each position but the last on its own output and later ones (a model that
        shifts its inputs by one has none for the last)."""
        last = self.reach.shape[1] - 1
        pairs = zip(self.reach, self.places, strict=True)
        return [row[p:].max().item() for row, p in pairs if p < last]

    def remembers(self) -> bool:
        """Whether any position reaches a later output."""
        pairs = zip(self.reach, self.places, strict=True)
        return any(bool((row[p + 1 :] > 0).any()) for row, p in pairs)


# ---- causality ----------------------------------------------------------------------------------


def cut_points(num_positions: int) -> tuple[int, ...]:
    """All of them, or 16 at random and the edges of blocks: a cut at the edge of a block does not
    see a leak inside it, and one that is only ever tried there misses the leak."""
    if num_positions <= MAX_POSITIONS:
        return tuple(range(1, num_positions))
    generator = torch.Generator().manual_seed(0)
    some = torch.randperm(num_positions - 1, generator=generator)[:16] + 1
    edges = [2**k for k in range(num_positions.bit_length()) if 2**k < num_positions]
    return tuple(sorted({*some.tolist(), *edges, num_positions - 1}))


def see(pipeline: Pipeline, model: nn.Module, x: Any, num_positions: int, limit: float) -> Sight:
    """How far one model sees. Cut points behind which every row has padding only are left out."""
    place = torch.arange(num_positions)
    rows = _rows(pipeline, x, num_positions, cut_points(num_positions), lambda p: place >= p)
    cuts = tuple(rows)
    behind = torch.stack([place >= cut for cut in cuts])
    found = influence(pipeline, model, _take(x, rows), behind, ~behind)
    size = torch.maximum(found.change, found.gradient)
    leaking = tuple(c for c, s in zip(cuts, size.tolist(), strict=True) if s > limit)
    rows = _rows(pipeline, x, num_positions, (0, *cuts), lambda p: place == p)
    single, mine = torch.stack([place == p for p in rows]), _take(x, rows)
    other = {k: foreign(pipeline.task, v) for k, v in content(mine, num_positions).items()}
    reach = moved(pipeline, model, mine, other, single)
    return Sight(size.max().item(), leaking, cuts, reach.where(reach > limit, 0), tuple(rows))


def _rows(
    pipeline: Pipeline,
    x: Any,
    num_positions: int,
    places: tuple[int, ...],
    changed: Callable[[int], torch.Tensor],
) -> dict[int, int]:
    """Place -> number of a row of `x` that is no padding where it is changed, all rows in turn."""
    num_rows = len(next(iter(probe.tensors(x).values())))
    kept = real(pipeline.task, x, num_positions)
    kept = torch.ones(num_rows, num_positions, dtype=torch.bool) if kept is None else kept.cpu()
    found, turn = {}, 0
    for place in places:
        fit = torch.where((kept & changed(place)).any(dim=1))[0]
        if len(fit):
            found[place] = int(fit[turn % len(fit)])
            turn += 1
    return found


def _take(x: Any, rows: dict[int, int]) -> Any:
    device = next(iter(probe.tensors(x).values())).device
    return take(x, torch.tensor(list(rows.values()), device=device))


def judge(sight: Sight, limit: float) -> list[Finding]:
    """What is wrong with how far a causal model sees."""
    found = []
    if sight.leaking:
        words, causes = _distance(sight)
        because = (
            f"outputs before a cut depend on inputs behind it at {len(sight.leaking)} of "
            f"{len(sight.cuts)} cut points (by up to {sight.leak:.2g}): {words}"
        )
        found.append(Finding(sight.leak, limit, because, causes))
    own = sight.own()
    dead = sum(size == 0 for size in own)
    if own and dead > max(1, len(own) // 10):
        because = (
            f"replacing one position moves neither its own output nor a later one at {dead} of "
            f"{len(own)} positions"
        )
        causes = ("inputs are cut off or overwritten", "a mask that hides the position itself")
        found.append(Finding(float(dead), 0.0, because, causes))
    return found


def _distance(sight: Sight) -> tuple[str, tuple[str, ...]]:
    """The leak in words, and what causes one of this kind."""
    ahead = sight.backward()
    far = max(ahead.values(), default=0)
    clean = [cut for cut in sight.cuts if cut not in sight.leaking]
    if far == 1:
        causes = ("the causal mask is off by one (its diagonal)", "inputs are the targets' shift")
        return "each sees one position ahead", causes
    if far and not clean and median(steps / p for p, steps in ahead.items()) > 0.5:
        causes = ("the causal mask is missing, inverted or not handed on", "a bidirectional layer")
        return "each sees far later positions: no mask acts", causes
    if far and clean and len(clean) < len(sight.cuts):
        edges = ", ".join(map(str, clean[:4]))
        causes = ("a mean, norm or mixing over blocks of positions", "a mask by blocks")
        return f"up to {far} positions ahead, within blocks (clean at {edges})", causes
    causes = (
        "a convolution, norm or mean over positions that reaches ahead",
        "the causal mask acts in some layers or heads only",
    )
    if 1 < far <= 8 and all(steps in (p, far) for p, steps in ahead.items()):
        causes = ("the causal mask is off by one (its diagonal), once in each layer", causes[0])
    return f"up to {far} positions ahead" if far else "through many positions together", causes


# ---- packed documents ---------------------------------------------------------------------------


def documents(
    pipeline: Pipeline, model: nn.Module, x: Any, num_positions: int, max_probes: int = 16
) -> Influence | None:
    """Each document of a packed row while the others are replaced; None without such rows."""
    ids = probe.tensors(x).get("document")
    if ids is None or ids.shape[1:] != (num_positions,):
        return None
    kept = real(pipeline.task, x, num_positions)
    kept = torch.ones_like(ids, dtype=torch.bool) if kept is None else kept
    pairs = [
        (row, int(k))
        for row in range(len(ids))
        for k in ids[row][kept[row]].unique()
        if len(ids[row][kept[row]].unique()) > 1
    ][:max_probes]
    if not pairs:
        return None
    index = torch.tensor([row for row, _ in pairs], device=ids.device)
    mine = torch.stack([ids[row] == k for row, k in pairs])
    return influence(pipeline, model, take(x, index), ~mine, mine & kept[index])
