"""Positions inside a row: what may be replaced there, and what that does to the outputs."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ..loop import take
from . import Pipeline, probe

STRUCTURE = re.compile("document|position|segment|mask|length|pad", re.IGNORECASE)
_ROWS_AT_ONCE = 32


@dataclass(frozen=True)
class Influence:
    """What changed positions do to watched outputs, for each row of a probe."""

    change: torch.Tensor  # (R,) of the watched outputs, relative to the mean output
    gradient: torch.Tensor  # (R,) at the changed positions, relative to the largest of the row


# ---- what is replaced, and by what --------------------------------------------------------------


def content(x: Any, num_positions: int) -> dict[str, torch.Tensor]:
    """The fields of `x` with one entry per position on axis 1, without those that only say where
    or whether (documents, positions, masks)."""
    parts = {
        key: value
        for key, value in probe.tensors(x).items()
        if value.ndim >= 2 and value.shape[1] == num_positions and value.dtype != torch.bool
    }
    return {key: value for key, value in parts.items() if not STRUCTURE.search(key)} or parts


def foreign(task: Any, value: torch.Tensor) -> torch.Tensor:
    """Another entry at every position: another id that occurs (pads stay pads), or the values of
    another row, turned round and three times as far out."""
    if value.is_floating_point():
        return -3 * value.roll(1, 0) + 1
    pad, end = getattr(task, "pad_id", None), getattr(task, "end_id", None)
    known = value.unique()
    known = torch.stack([i for i in known if int(i) not in (pad, end)] or list(known))
    place = torch.searchsorted(known, value).clamp_max(len(known) - 1)
    generator = torch.Generator().manual_seed(0)
    shift = torch.randint(1, max(2, len(known)), value.shape, generator=generator)
    other = known[(place + shift.to(value.device)) % len(known)]
    return other if pad is None else torch.where(value == pad, value, other)


def real(task: Any, x: Any, num_positions: int) -> torch.Tensor | None:
    """`(B, T)` bool: positions that are no padding; None where nothing says."""
    pad = getattr(task, "pad_id", None)
    for value in content(x, num_positions).values():
        if pad is not None and value.ndim == 2 and not value.is_floating_point():
            return value != pad
    return None


def _mixed(x: Any, other: dict[str, torch.Tensor], changed: torch.Tensor) -> Any:
    parts = probe.tensors(x)
    for key, value in other.items():
        where = changed.reshape(*changed.shape, *[1] * (value.ndim - 2))
        parts[key] = torch.where(where, value, parts[key])
    return probe.like(x, parts)


# ---- what comes out -----------------------------------------------------------------------------


def run(pipeline: Pipeline, model: nn.Module, x: Any) -> torch.Tensor:
    torch.manual_seed(0)  # what draws inside draws the same each time
    return probe.forward(pipeline, model, x)


def moved(
    pipeline: Pipeline, model: nn.Module, x: Any, other: dict, changed: torch.Tensor
) -> torch.Tensor:
    """`(R, T)`: change of each output, relative to the mean norm of the outputs of its row."""
    found = []
    for rows in torch.arange(len(changed)).split(_ROWS_AT_ONCE):
        mine = take(x, rows.to(changed.device))
        theirs = _mixed(mine, take(other, rows.to(changed.device)), changed[rows])
        with torch.no_grad():
            before = run(pipeline, model, mine).unsqueeze(-1).flatten(2)
            after = run(pipeline, model, theirs).unsqueeze(-1).flatten(2)
        sound = before.isfinite()  # a row of pads only may have no number from the start
        before, after = before.where(sound, 0), after.where(sound, 0)
        size = before.norm(dim=2).mean(dim=1, keepdim=True).clamp_min(1e-12)
        found.append(((after - before).norm(dim=2) / size).nan_to_num(float("inf")).cpu())
    return torch.cat(found)


def _felt(
    pipeline: Pipeline, model: nn.Module, x: Any, watched: torch.Tensor, num_positions: int
) -> torch.Tensor:
    """`(R, T)`: largest gradient at each position of a random projection of the watched outputs,
    0 where there is none."""
    size = (len(watched), num_positions)
    leaves = {
        key: value.detach().clone().requires_grad_(value.is_floating_point())
        for key, value in probe.tensors(x).items()
    }
    with embedded(model) as found:
        outputs = run(pipeline, model, probe.like(x, leaves)).unsqueeze(-1).flatten(2)
    sources = [v for v in leaves.values() if v.requires_grad and v.shape[:2] == size]
    sources += [out for ids, out in found if ids == size]
    turned = [out for ids, out in found if ids == size[::-1]]  # ids that lie (T, B)
    if not outputs.requires_grad or not (sources or turned):
        return torch.zeros(size)
    generator = torch.Generator().manual_seed(0)
    weights = torch.randn(outputs.shape, generator=generator).to(outputs.device)
    kept = watched.to(outputs.device)[:, : outputs.shape[1], None] * outputs.isfinite()
    loss = (outputs.where(outputs.isfinite(), 0) * weights * kept).sum()
    gradients = torch.autograd.grad(loss, [*sources, *turned], allow_unused=True)
    total = torch.zeros(size)
    for index, gradient in enumerate(gradients):
        if gradient is not None:
            flat = gradient if index < len(sources) else gradient.transpose(0, 1)
            total = torch.maximum(total, flat.abs().reshape(*size, -1).amax(dim=2).cpu())
    return total


@contextlib.contextmanager
def embedded(model: nn.Module) -> Iterator[list[tuple[tuple[int, ...], torch.Tensor]]]:
    """Outputs of every nn.Embedding while the model runs, as (shape of the ids, output)."""
    found: list[tuple[tuple[int, ...], torch.Tensor]] = []

    def keep(module: nn.Module, args: tuple, output: torch.Tensor) -> torch.Tensor:
        output = output if output.requires_grad else output.detach().requires_grad_()
        found.append((tuple(args[0].shape) if args else (), output))
        return output

    tables = [module for module in model.modules() if isinstance(module, nn.Embedding)]
    handles = [table.register_forward_hook(keep) for table in tables]
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()


def influence(
    pipeline: Pipeline, model: nn.Module, x: Any, changed: torch.Tensor, watched: torch.Tensor
) -> Influence:
    """The watched outputs of every row when its changed positions are replaced; `(R, T)` bools.

    Rows of a probe share a forward pass: that they do not see each other is tested before.
    """
    num_positions = changed.shape[1]
    other = {k: foreign(pipeline.task, v) for k, v in content(x, num_positions).items()}
    change = moved(pipeline, model, x, other, changed)
    change = (change * watched[:, : change.shape[1]].cpu()).amax(dim=1)
    felt = []
    for rows in torch.arange(len(changed)).split(_ROWS_AT_ONCE):
        part = take(x, rows.to(changed.device))
        size = _felt(pipeline, model, part, watched[rows], num_positions)
        behind = (size * changed[rows].cpu()).amax(dim=1)
        felt.append(behind / size.amax(dim=1).clamp_min(1e-12))
    return Influence(change, torch.cat(felt))
