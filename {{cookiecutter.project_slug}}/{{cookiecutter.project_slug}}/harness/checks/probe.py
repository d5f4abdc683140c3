"""What several checks need: rows as the loaders hand them out, and the two seams of a model."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from ..loop import Loader, autocast, take
from . import Check, Pipeline, not_applicable


def lacking(
    name: str, pipeline: Pipeline, *, task: tuple[str, ...] = (), targets: tuple[str, ...] = ()
) -> Check | None:
    """`not_applicable` when the task is of another kind or lacks a method the check needs."""
    kind = getattr(pipeline.task, "targets", None)
    if targets and kind not in targets:
        return not_applicable(
            name, f"This check reads {' or '.join(targets)} targets, the task declares {kind}."
        )
    missing = [method for method in task if not hasattr(pipeline.task, method)]
    if missing:
        return not_applicable(name, f"The task does not offer {', '.join(missing)}: hand it over.")
    return None


# ---- rows -------------------------------------------------------------------------------------


def tensors(x: Any) -> dict[str, torch.Tensor]:
    """The tensors of `x` by name; a single tensor is called "x"."""
    return dict(x) if isinstance(x, dict) else {"x": x}


def like(x: Any, parts: dict[str, torch.Tensor]) -> Any:
    """`parts` in the form of `x`: a dict, or the one tensor."""
    return parts if isinstance(x, dict) else parts["x"]


def join(batches: list[dict]) -> dict:
    """Several batches as one."""
    names = batches[0].keys()
    return {name: _join([batch[name] for batch in batches]) for name in names}


def _join(parts: list[Any]) -> Any:
    if isinstance(parts[0], dict):
        return {key: torch.cat([part[key] for part in parts]) for key in parts[0]}
    return torch.cat(parts)


def batches_of(loader: Any, *, min_rows: int) -> list[dict]:
    """The first batches of a copy of the loader, until they hold `min_rows` rows. Generators that
    the copy shares are put back by `undisturbed`; rows that reading changes need `epochs.own`."""
    found, num_rows = [], 0
    for batch in copy.copy(loader):
        found.append(batch)
        num_rows += len(batch["y"])
        if num_rows >= min_rows:
            break
    return found


def endless(loader: Any) -> Iterator[dict]:
    """Epoch after epoch of a copy of the loader."""
    own = copy.copy(loader)
    while True:
        yield from own


def rebatch(
    loader: Any,
    *,
    rows: dict | None = None,
    batch_size: int | None = None,
    augment: bool = True,
) -> Any:
    """A copy of the project's own loader over other rows or in other batches.

    A loader that does not keep its rows in `.rows` is replaced by a plain one over what it hands
    out (at most 4,096 rows).
    """
    if not hasattr(loader, "rows"):
        given = rows or join(batches_of(loader, min_rows=4096))
        device = given["y"].device
        return Loader(given, batch_size or getattr(loader, "batch_size", 64), device=device)
    other = copy.copy(loader)
    if rows is not None:
        other.rows, other.num_rows = rows, len(rows["y"])
    if batch_size is not None:
        other.batch_size = batch_size
    if not augment and hasattr(other, "augment"):
        other.augment = None
    return other


def few_rows(loader: Any, max_rows: int) -> dict:
    """At most `max_rows` stored rows, evenly spaced (rows sorted by class keep all classes)."""
    if not hasattr(loader, "rows"):
        return join(batches_of(loader, min_rows=max_rows))
    total = len(loader.rows["y"])
    if total <= max_rows:
        return loader.rows
    spread = torch.linspace(0, total - 1, max_rows, device=loader.rows["y"].device)
    return take(loader.rows, spread.round().long())


def few(loader: Any, max_rows: int) -> Any:
    """The loader itself, or a copy of it over at most `max_rows` of its rows."""
    return rebatch(loader, rows=few_rows(loader, max_rows))


def stored_at(loader: Any, ids: torch.Tensor) -> dict | None:
    """The stored rows of these ids; None where the loader keeps none, or ids repeat."""
    rows = getattr(loader, "rows", None)
    if rows is None or len(rows["id"].unique()) < len(rows["id"]):
        return None
    known, where = rows["id"].sort()
    place = torch.searchsorted(known, ids.to(known.device)).clamp_max(len(known) - 1)
    return take(rows, where[place])


def rows_differ(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """`(N,)` bool, of each pair of rows. NaN equals NaN; rows of another form all differ."""
    if a.shape != b.shape:
        return torch.ones(len(b), dtype=torch.bool, device=b.device)
    unequal = (a != b) & ~(a.isnan() & b.isnan())
    return unequal.reshape(len(b), -1).any(dim=1)


def labels(loader: Any) -> torch.Tensor:
    """All targets of a loader: of its rows, or of one pass over it."""
    if hasattr(loader, "rows"):
        return loader.rows["y"]
    return torch.cat([batch["y"] for batch in copy.copy(loader)])


def sampled_labels(loader: Any) -> torch.Tensor:
    """The targets as training meets them: all of them, or, where rows repeat within an epoch (a
    weighted sampler), those it draws."""
    drawn = join(batches_of(loader, min_rows=4096))
    if hasattr(loader, "rows") and len(drawn["id"].unique()) == len(drawn["id"]):
        return labels(loader)
    return drawn["y"] if hasattr(loader, "rows") else labels(loader)


# ---- model ------------------------------------------------------------------------------------


def forward(pipeline: Pipeline, model: nn.Module, x: Any) -> torch.Tensor:
    """Outputs in float32, computed under the pipeline's precision."""
    with autocast(pipeline.device, pipeline.precision):
        return model(x).float()


def warmed(pipeline: Pipeline, seed: int, num_steps: int = 5) -> nn.Module:
    """A model after a few of the project's steps, by Adam at a rate that moves it: a last layer
    that starts at zero says something then, a dead one still does not."""
    model = pipeline.make_model(seed).train()
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    for _, batch in zip(range(num_steps), endless(pipeline.train), strict=False):
        pipeline.train_step(model, optimizer, batch)
    return model


def batch_statistics(model: nn.Module) -> list[nn.Module]:
    """Modules that use statistics of the batch in training: BatchNorm and whatever keeps running
    ones."""
    own = (nn.modules.batchnorm._BatchNorm,)
    return [
        module
        for module in model.modules()
        if isinstance(module, own)
        or any(name.startswith("running_") for name, _ in module.named_buffers(recurse=False))
    ]


def dropouts(model: nn.Module) -> list[nn.Module]:
    return [m for m in model.modules() if isinstance(m, nn.modules.dropout._DropoutNd)]


def without_dropout(model: nn.Module) -> nn.Module:
    for module in dropouts(model):
        module.p = 0.0
    for module in model.modules():  # attention and recurrent layers keep a rate, not a module
        if isinstance(getattr(module, "dropout", None), float):
            module.dropout = 0.0
    return model


def set_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """The highest learning rate becomes `rate`; groups keep their proportions."""
    top = base_rate(optimizer)
    for group in optimizer.param_groups:
        group["lr"] = group["lr"] * rate / top if top > 0 else rate


def base_rate(optimizer: torch.optim.Optimizer) -> float:
    return max(float(group["lr"]) for group in optimizer.param_groups)


@dataclass
class Seam:
    """What went into `model(...)` and came out, call by call (copies, detached)."""

    inputs: list[Any] = field(default_factory=list)
    outputs: list[torch.Tensor] = field(default_factory=list)


@contextlib.contextmanager
def seam(
    model: nn.Module,
    *,
    replace: Callable[[torch.Tensor, int], torch.Tensor] | None = None,
    inputs: bool = True,
) -> Iterator[Seam]:
    """Record both seams of a model while the project's own step or evaluation runs.

    `replace(outputs, call)` puts other outputs in the place of the model's.
    """
    record = Seam()

    def before(module: nn.Module, args: tuple, kwargs: dict) -> None:
        x = args[0] if args else next(iter(kwargs.values()))
        copied = {key: value.detach().clone() for key, value in tensors(x).items()}
        record.inputs.append(like(x, copied))

    def after(module: nn.Module, args: tuple, outputs: torch.Tensor) -> torch.Tensor | None:
        other = None if replace is None else replace(outputs, len(record.outputs))
        record.outputs.append((outputs if other is None else other).detach().float())
        return other

    handles = [model.register_forward_hook(after)]
    if inputs:
        handles.append(model.register_forward_pre_hook(before, with_kwargs=True))
    try:
        yield record
    finally:
        for handle in handles:
            handle.remove()
