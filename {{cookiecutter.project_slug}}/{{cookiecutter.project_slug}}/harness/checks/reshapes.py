"""Which reshapes keep the axes of a tensor, and which ones mix them."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

_RESHAPES = {"reshape", "view", "flatten", "unflatten", "view_as", "reshape_as", "_unsafe_view"}
_MOVES = {"permute", "transpose", "movedim", "moveaxis", "swapaxes", "swapdims"}
_COPIES = {"contiguous", "clone", "to", "float"}
_GROWS = {"pad", "cat", "concat"}
_MAX_AXES = 6  # of the part that changes: all orders of more would take long


@dataclass(frozen=True)
class Reshape:
    """One reshape that mixes axes."""

    where: str  # path of the module
    before: tuple[int, ...]
    after: tuple[int, ...]
    why: str
    shift: bool  # of a padded tensor: the relative shift of Transformer-XL looks like this


def mixes(before: tuple[int, ...], after: tuple[int, ...], *, moved: bool = False) -> str | None:
    """Why a reshape of these sizes does not just split and merge neighbouring axes; None if it may.

    `moved`: axes were permuted right before, so an order that looks swapped is meant.
    """
    a, b = [n for n in before if n != 1], [n for n in after if n != 1]
    a, b = _without_common_ends(a, b)
    if not a or not b:
        return None
    inner, outer = _edges(a), _edges(b)
    shared = sorted(set(inner) & set(outer))
    if _only_splits_or_merges(inner, outer, shared):
        return None
    union = sorted({*inner, *outer})
    if any(large % small for small, large in itertools.pairwise(union)):
        return "the pieces of its axes do not fit into those of the new ones"
    if _torn(inner, outer, union) or _torn(outer, inner, union):
        return "an axis is torn into pieces that go to different axes"
    if not moved and (_swapped(a, b) or _swapped(b, a)):
        return "the new sizes are the old ones in another order"
    return None


def _without_common_ends(a: list[int], b: list[int]) -> tuple[list[int], list[int]]:
    while a and b and a[0] == b[0]:
        a, b = a[1:], b[1:]
    while a and b and a[-1] == b[-1]:
        a, b = a[:-1], b[:-1]
    return a, b


def _edges(sizes: list[int]) -> list[int]:
    """Products of the sizes from the right: after how many entries each axis takes a step."""
    return list(itertools.accumulate(reversed(sizes), lambda x, y: x * y))


def _only_splits_or_merges(inner: list[int], outer: list[int], shared: list[int]) -> bool:
    """Between two edges that both have, one side has a single axis."""
    for low, high in itertools.pairwise([1, *shared]):
        counts = [sum(low < edge <= high for edge in edges) for edges in (inner, outer)]
        if min(counts) > 1:
            return False
    return True


def _torn(inner: list[int], outer: list[int], union: list[int]) -> bool:
    """An axis of `inner` of which two pieces join pieces of other axes. One piece may: channels
    `A * C` whose `A` joins the positions and whose `C` stays, as in a detection head."""

    def owner(edges: list[int], edge: int) -> int:
        return next(i for i, high in enumerate(edges) if edge <= high)

    pairs = {(owner(inner, edge), owner(outer, edge)) for edge in union}
    for i in {i for i, _ in pairs}:
        mine = [j for k, j in pairs if k == i]
        joined = [j for j in mine if any(other == j and k != i for k, other in pairs)]
        if len(joined) > 1:
            return True
    return False


def _swapped(a: list[int], b: list[int]) -> bool:
    """Whether `b` is what permuting `a` and merging neighbours would give."""
    if len(a) > _MAX_AXES or len(a) < len(b):
        return False
    orders = set(itertools.permutations(a)) - {tuple(a)}
    return any(_merges_to(list(order), b) for order in orders)


def _merges_to(sizes: list[int], wanted: list[int]) -> bool:
    return set(_edges(wanted)) <= set(_edges(sizes)) and _edges(sizes)[-1] == _edges(wanted)[-1]


# ---- watching a forward pass --------------------------------------------------------------------


class Reshapes(TorchFunctionMode):
    """Sees every reshape of a tensor with `num_rows` rows while it is active."""

    def __init__(self, num_rows: int):
        super().__init__()
        self.num_rows, self.seen, self.found = num_rows, 0, []
        self.path: list[str] = []
        self.kept: dict[int, tuple[str, torch.Tensor]] = {}  # kept alive: ids are used again

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        name = getattr(func, "__name__", "")
        source = args[0] if args else kwargs.get("input")
        if isinstance(result, torch.Tensor):
            self._look(name, source, result)
        return result

    def _look(self, name: str, source: object, result: torch.Tensor) -> None:
        tag = self.kept.get(id(source), ("", None))[0]
        if name in _MOVES:
            self._keep("moved", result)
        elif name in _GROWS:
            self._keep("grown", result)
        elif name in _COPIES or (name == "__getitem__" and tag == "shifted"):
            self._keep(tag, result)
        elif name in _RESHAPES and isinstance(source, torch.Tensor) and self._has_rows(source):
            self.seen += 1
            before, after = tuple(source.shape), tuple(result.shape)
            why = mixes(before, after, moved=tag == "moved")
            shift = why is not None and tag in ("grown", "shifted") and _turned(before, after)
            if why is not None:
                where = self.path[-1] if self.path else "the loss"
                self.found.append(Reshape(where, before, after, why, shift))
            if shift:
                self._keep("shifted", result)

    def _keep(self, tag: str, result: torch.Tensor) -> None:
        if tag:
            self.kept[id(result)] = (tag, result)

    def _has_rows(self, tensor: torch.Tensor) -> bool:
        return any(size and size % self.num_rows == 0 for size in tensor.shape)


def _turned(before: tuple[int, ...], after: tuple[int, ...]) -> bool:
    """The last two axes, which differ by at most the few positions of a pad, change places."""
    return before[:-2] == after[:-2] and before[-2:] == after[:-3:-1]


@contextlib.contextmanager
def watched(model: nn.Module, num_rows: int) -> Iterator[Reshapes]:
    """Reshapes in forward passes of `model`, with the path of the module they stand in."""
    mode = Reshapes(num_rows)
    handles = []
    for path, module in model.named_modules():
        label = f"{path} ({type(module).__name__})" if path else type(module).__name__
        handles.append(
            module.register_forward_pre_hook(lambda m, args, label=label: mode.path.append(label))
        )
        handles.append(module.register_forward_hook(lambda m, args, out: _leave(mode)))
    try:
        with mode:
            yield mode
    finally:
        for handle in handles:
            handle.remove()


def _leave(mode: Reshapes) -> None:
    mode.path.pop()
