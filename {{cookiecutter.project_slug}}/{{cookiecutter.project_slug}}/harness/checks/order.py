"""Whether a model that reads tokens in order has any word of that order."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from ..loop import take
from . import Finding, Pipeline, positions, probe

_ATTENTION = {"scaled_dot_product_attention", "softmax", "multi_head_attention_forward"}
_NUM_ROWS = 4
_LIMIT = 1e-5  # of an output's norm, in float32: sums in another order differ by 1e-7


@dataclass(frozen=True)
class Order:
    """What was found: nothing to test leaves all three empty."""

    words: str = ""
    doubt: str = ""
    finding: Finding | None = None


class _Names(TorchFunctionMode):
    """Names of the torch functions that a forward pass calls."""

    def __init__(self) -> None:
        super().__init__()
        self.called: set[str] = set()

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.called.add(getattr(func, "__name__", ""))
        return func(*args, **(kwargs or {}))


def order_is_seen(pipeline: Pipeline, model: nn.Module, x: Any) -> Order:
    """Exchange earlier tokens and look at the last position in every module, in the order they
    finish. The first one that earlier tokens reach at all must feel their order: an attention over
    a set does not, however many layers with a causal mask follow.

    A model that is not reached by earlier tokens (a bigram model) has nothing to show. Computed in
    float32 whatever the precision: sums in another order differ too much in bf16.
    """
    task = pipeline.task
    key = _tokens(x)
    if key is None or not (getattr(task, "causal", False) or task.targets == "tokens"):
        return Order()
    rows = _rows(pipeline, x, key)
    found = None if rows is None else _look(task, model, key, *rows)
    if rows is not None and found is None:  # branches that start at zero hide what they will mix
        later = probe.without_dropout(probe.warmed(pipeline, 0)).eval()
        found = _look(task, later, key, *rows)
    return found or Order()


def _look(task: Any, model: nn.Module, key: str, mine: Any, places: torch.Tensor) -> Order | None:
    """None where earlier tokens do not reach the last position."""
    ids = probe.tensors(mine)[key]
    earlier, last = places[:-1], int(places[-1])
    order = torch.randperm(len(earlier), generator=torch.Generator().manual_seed(0))
    turned, strange = ids.clone(), ids.clone()
    turned[:, earlier] = ids[:, earlier[order]]
    strange[:, earlier] = positions.foreign(task, ids)[:, earlier]
    if torch.equal(turned, ids):
        return None
    size = tuple(ids.shape)
    base, names = _outputs(model, mine, last, size)
    other, _ = _outputs(model, _with(mine, key, strange), last, size)
    permuted, _ = _outputs(model, _with(mine, key, turned), last, size)
    reached = [i for i in range(len(base)) if _change(base[i], other[i]) > _LIMIT]
    if not reached:
        return None
    felt = _change(base[reached[0]], permuted[reached[0]])
    if felt > _LIMIT:
        return Order(words=f"exchanged tokens move a last output by {felt:.2g}")
    whole = _change(base[-1], permuted[-1])
    because = (
        f"exchanging earlier tokens moves the first mixing of positions by {felt:.2g} of it (and "
        f"the last output by {whole:.2g}): it sees a set, not an order"
    )
    if not names & _ATTENTION:
        return Order(doubt=f"The model takes earlier tokens as a bag: {because}.")
    causes = ("position information is missing", "the positional encoding is not added or is zero")
    return Order(finding=Finding(felt, _LIMIT, because, causes))


def _tokens(x: Any) -> str | None:
    for key, value in probe.tensors(x).items():
        integer = not value.is_floating_point() and value.dtype != torch.bool
        if integer and value.ndim == 2 and not positions.STRUCTURE.search(key):
            return key
    return None


def _rows(pipeline: Pipeline, x: Any, key: str) -> tuple[Any, torch.Tensor] | None:
    """The rows with the least padding, and the positions where none of them has any."""
    ids = probe.tensors(x)[key]
    kept = positions.real(pipeline.task, x, ids.shape[1])
    kept = torch.ones_like(ids, dtype=torch.bool) if kept is None else kept
    num_rows = next(n for n in (_NUM_ROWS, _NUM_ROWS - 1) if n != ids.shape[1])
    index = kept.sum(dim=1).argsort(descending=True, stable=True)[:num_rows]
    places = torch.where(kept[index].all(dim=0))[0]
    return (take(x, index), places) if len(places) >= 3 else None


def _with(x: Any, key: str, value: torch.Tensor) -> Any:
    return probe.like(x, {**probe.tensors(x), key: value})


def _outputs(
    model: nn.Module, x: Any, last: int, size: tuple[int, ...]
) -> tuple[list[torch.Tensor], set[str]]:
    """The outputs at position `last` of every module whose output has `size` = (B, T) in front, in
    order of completion; and the torch functions called."""
    found: list[torch.Tensor] = []

    def keep(module: nn.Module, args: tuple, output: Any) -> None:
        output = output[0] if isinstance(output, tuple) and output else output
        if not isinstance(output, torch.Tensor) or output.ndim < 2:
            return
        if output.shape[:2] == size:
            found.append(output[:, last].detach().double())
        elif output.shape[:2] == size[::-1]:
            found.append(output[last].detach().double())

    handles = [module.register_forward_hook(keep) for module in model.modules()]
    try:
        torch.manual_seed(0)
        with torch.no_grad(), _Names() as names:
            model(x)
    finally:
        for handle in handles:
            handle.remove()
    return found, names.called


def _change(before: torch.Tensor, after: torch.Tensor) -> float:
    change = (after - before).norm() / before.norm().clamp_min(1e-12)
    return change.nan_to_num(float("inf")).item()
