"""The model from inside: axes keep their meaning, every field is read, units differ."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from statistics import median
from typing import Any

import torch
from torch import nn

from ..instruments import NonFiniteLoss
from ..loop import take
from . import Check, Finding, Pipeline, inconclusive, probe, shut_if_any
from .order import order_is_seen
from .reshapes import Reshape, watched
from .twins import Copies, Twins, copies, twins

_ROW_COUNTS = (7, 5, 11, 13)  # primes that are rarely a size of a network


def axis_identity(pipeline: Pipeline, *, max_mixed: int = 0) -> Check:
    """No reshape in the forward pass or the loss does more than split and merge neighbouring axes.

    One pass over a few rows, their number no divisor of the model's sizes. Sound is a reshape whose
    pieces fit into each other, that tears no axis apart and that does not exchange sizes; a
    transpose must do that. The relative shift of Transformer-XL (pad, view, cut) only warns. Sizes
    are compared, so the limits are the same in fp32 and bf16. Blind where both readings have the
    same sizes: `(B, 16, 4, 4)` viewed as `(B, 16, 16)`.
    """
    name = "axis_identity"
    model = probe.without_dropout(copy.deepcopy(pipeline.make_model(0))).eval()
    num_rows = _odd_rows(pipeline, model)
    batch = probe.join(probe.batches_of(pipeline.train, min_rows=num_rows))
    batch = take(batch, torch.arange(min(num_rows, len(batch["y"]))))
    if len(batch["y"]) < num_rows:
        return inconclusive(name, f"It needs {num_rows} rows, the loader hands out fewer.")
    with torch.no_grad(), watched(model, num_rows) as seen:
        outputs = probe.forward(pipeline, model, batch["x"])
        pipeline.task.loss(outputs, batch["y"])
    mixed = [each for each in seen.found if not each.shift]
    because = f"{seen.seen} reshapes split and merge neighbouring axes only."
    found = []
    if len(mixed) > max_mixed:
        causes = ("permute or transpose was meant, not view or reshape",)
        found = [Finding(float(len(mixed)), float(max_mixed), _words(mixed[0]), causes)]
        if len(mixed) > 1:
            found[0] = Finding(
                found[0].value,
                found[0].limit,
                f"{_words(mixed[0])}, and {len(mixed) - 1} more",
                causes,
            )
    elif seen.found:
        because = f"{_words(seen.found[0])}: right only for a relative shift (pad, view, cut)."
        causes = ("a relative shift of positions", "transpose was meant, not view")
        return Check(name, "warn", 0.0, float(max_mixed), "reshapes", because, causes)
    good = Check(name, "open", 0.0, float(max_mixed), "reshapes", because)
    return shut_if_any(found, good)


def _words(each: Reshape) -> str:
    return f"{each.where} reshapes {each.before} to {each.after}: {each.why}"


def _odd_rows(pipeline: Pipeline, model: nn.Module) -> int:
    """The number of rows that divides the fewest sizes of the model and of its inputs."""
    x = probe.batches_of(pipeline.train, min_rows=1)[0]["x"]
    sizes = [size for p in model.parameters() for size in p.shape]
    sizes += [size for value in probe.tensors(x).values() for size in value.shape[1:]]
    return min(_ROW_COUNTS, key=lambda rows: sum(size % rows == 0 for size in sizes))


# ---- fields -------------------------------------------------------------------------------------


def field_influence(
    pipeline: Pipeline,
    *,
    min_relative_change: float = 1e-6,
    max_fields: int = 64,
    max_rows: int = 64,
    num_models: int = 3,
) -> Check:
    """Each field of a dict, each channel or column of a float input (up to `max_fields`) and each
    quarter of a picture's height and width, exchanged between rows, moves the outputs by
    `min_relative_change` of their norm (median over fresh models; after a few steps where nothing
    moves at first). Constant fields are left out.

    Where tokens are read in order (a causal task, or token targets), exchanging earlier tokens must
    reach the first layer that mixes positions: else the model has no word of their order. Both hold
    in fp32 and bf16: what is not read changes nothing at all.
    """
    name = "field_influence"
    batch = probe.join(probe.batches_of(pipeline.train, min_rows=max_rows))
    num_rows = min(max_rows, len(batch["y"]))
    x = take(batch["x"], torch.arange(num_rows, device=batch["y"].device))
    model = _quiet(pipeline.make_model(0))
    swaps = dict(_swaps(x, model, max_fields)) if num_rows > 1 else {}
    size = _influences(pipeline, [model], x, swaps)
    if size and min(size.values()) < min_relative_change:
        models = [model, *(_quiet(pipeline.make_model(seed)) for seed in range(1, num_models))]
        size = _influences(pipeline, models, x, swaps)
    if size and min(size.values()) < min_relative_change:
        # A branch or a last layer that starts at zero hides what it will read.
        models = [_quiet(probe.warmed(pipeline, seed)) for seed in range(num_models)]
        size = _influences(pipeline, models, x, swaps)
    order = order_is_seen(pipeline, model, x)
    dead = [key for key, change in size.items() if change < min_relative_change]
    found = [order.finding] if order.finding is not None else []
    live = [change for key, change in size.items() if key not in dead]
    least = min(size.values(), default=None)
    words = f"{len(size)} fields each move the outputs by at least {least:.2g}" if size else ""
    because = "; ".join(filter(None, [words, order.words])) or "Inputs have no fields to exchange"
    if dead and live and min(live) < 100 * min_relative_change:
        because = f"{_some(dead)} hardly move the outputs ({least:.2g}); influence fades along axis"
        return Check(
            name, "warn", least, min_relative_change, "", f"{because} 1.", ("memory is short",)
        )
    if len(dead) == len(size) > 1 and order.finding is None:
        because = f"None of {len(size)} fields moves the outputs: they do not depend on the input."
        return inconclusive(name, because, ("the network is dead, or its input is not used",))
    if dead:
        because_ = f"{_some(dead)} exchanged between rows move the outputs by {least:.2g}"
        causes = ("a field or column is never used", "its scale is far below the others'")
        found.insert(0, Finding(least, min_relative_change, because_, causes))
    if not found and order.doubt:
        return Check(name, "warn", least, min_relative_change, "", order.doubt)
    if not found and not size and not order.words:
        return Check(name, "not_applicable", None, None, "", f"{because}.")
    return shut_if_any(found, Check(name, "open", least, min_relative_change, "", f"{because}."))


def _some(names: list[str]) -> str:
    shown = ", ".join(names[:4])
    return f"{len(names)} fields ({shown}{', ...' if len(names) > 4 else ''})"


def _quiet(model: nn.Module) -> nn.Module:
    return probe.without_dropout(copy.deepcopy(model)).eval()


def _swaps(x: Any, model: nn.Module, max_fields: int) -> Iterator[tuple[str, Any]]:
    """(name, inputs with this field taken from other rows) for every field that varies."""
    parts = probe.tensors(x)
    order = _others(len(next(iter(parts.values()))))
    for key, value in parts.items():
        if isinstance(x, dict):
            yield from _swapped(x, key, value[order.to(value.device)])
        axis = _channel_axis(value, model)
        for side in {1, 2, 3} - {axis} if value.is_floating_point() and value.ndim == 4 else ():
            yield from _quarters(x, key, side, order)
        if axis is None or not 1 < value.shape[axis] <= max_fields:
            continue
        for index in range(value.shape[axis]):
            other = value.clone()
            place = (slice(None),) * axis + (index,)
            other[place] = value[order.to(value.device)][place]
            yield from _swapped(x, f"{key} channel {index}", other, key)


def _quarters(x: Any, key: str, side: int, order: torch.Tensor) -> Iterator[tuple[str, Any]]:
    """Pictures with a quarter of their height or width taken from other rows."""
    value = probe.tensors(x)[key]
    if value.shape[side] < 4:
        return
    for number, part in enumerate(torch.arange(value.shape[side]).tensor_split(4), 1):
        other = value.clone()
        place = (slice(None),) * side + (part,)
        other[place] = value[order.to(value.device)][place]
        yield from _swapped(x, f"{key} quarter {number} of axis {side}", other, key)


def _swapped(x: Any, name: str, other: torch.Tensor, key: str | None = None) -> Iterator:
    parts = probe.tensors(x)
    if not torch.equal(other, parts[key or name]):
        yield name, probe.like(x, {**parts, key or name: other})


def _others(num_rows: int) -> torch.Tensor:
    """Every row gets another one's values."""
    mixed = torch.randperm(num_rows, generator=torch.Generator().manual_seed(0))
    other = torch.empty_like(mixed)
    other[mixed] = mixed.roll(1)
    return other


def _channel_axis(value: torch.Tensor, model: nn.Module) -> int | None:
    """The axis of columns or channels of measurements; None where it may be positions."""
    if not value.is_floating_point() or value.ndim not in (2, 3, 4):
        return None
    if value.ndim != 3:
        return 1
    weights = [p.shape for p in model.parameters() if p.ndim >= 2]
    if any(len(shape) == 3 and shape[1] == value.shape[1] for shape in weights):
        return 1
    return 2 if any(len(s) == 2 and s[1] == value.shape[2] for s in weights) else None


def _influences(
    pipeline: Pipeline, models: list[nn.Module], x: Any, swaps: dict[str, Any]
) -> dict[str, float]:
    """Relative change of the outputs for each swapped field, median over the models."""
    if not swaps:
        return {}
    found: dict[str, list[float]] = {key: [] for key in swaps}
    with torch.no_grad():
        for model in models:
            base = _outputs(pipeline, model, x)
            size = base.norm().clamp_min(1e-12)
            for key, other in swaps.items():
                change = (_outputs(pipeline, model, other) - base).norm() / size
                found[key].append(change.nan_to_num(float("inf")).item())
    return {key: median(changes) for key, changes in found.items()}


def _outputs(pipeline: Pipeline, model: nn.Module, x: Any) -> torch.Tensor:
    torch.manual_seed(0)
    return probe.forward(pipeline, model, x).double().nan_to_num()


# ---- symmetry -----------------------------------------------------------------------------------


def symmetry(
    pipeline: Pipeline,
    *,
    max_cosine: float = 0.999,
    max_twin_share: float = 0.1,
    num_steps: int = 20,
) -> Check:
    """At most `max_twin_share` of the units of a layer have a twin, another unit with weights of
    the same direction (cosine above `max_cosine`), at the start; and in no layer are all units
    identical after `num_steps` of the project's steps on a copy. Layers that start at zero are
    judged after the steps only. Then cosines say nothing: classes that have not come up yet move a
    zero head in one direction, and it heals. Two modules that start as copies and move as one (to
    1e-2 of the way) shut as well; copies that part are fine. Weights are fp32 in either precision.

    Units with fewer than 8 inputs, embeddings, frozen and tied weights are left out; channels of a
    grouped convolution and gates of a recurrent layer are compared among their own.
    """
    name = "symmetry"
    model = pipeline.make_model(0).train()
    start = twins(model, max_cosine)
    pairs = copies(model)
    if not start:
        return Check(name, "not_applicable", None, None, "", "No trainable layer has 8 inputs.")
    finished = _train(pipeline, model, num_steps)
    end = twins(model, max_cosine) if finished else {}
    found = [
        *(() if pipeline.pretrained_head else _same_at_start(start, max_twin_share)),
        *_same_after(end, num_steps, max_twin_share),
        *(_moved_as_one(pairs, num_steps) if finished else ()),
    ]
    worst = max(start.values(), key=lambda each: each.share)
    because = (
        f"At most {worst.share:.0%} of the units of a layer start with a twin ({len(start)} layers)"
        + (f", and none stay alike in {num_steps} steps." if finished else ".")
    )
    return shut_if_any(found, Check(name, "open", worst.share, max_twin_share, "share", because))


def _train(pipeline: Pipeline, model: nn.Module, num_steps: int) -> bool:
    """Whether the steps could be made; a loss that is not finite is for other checks to name."""
    optimizer = pipeline.make_optimizer(model)
    try:
        for _, batch in zip(range(num_steps), probe.endless(pipeline.train), strict=False):
            pipeline.train_step(model, optimizer, batch)
    except NonFiniteLoss:
        return False
    return all(bool(p.isfinite().all()) for p in model.parameters())


def _same_at_start(start: dict[str, Twins], limit: float) -> list[Finding]:
    same = {key: each for key, each in start.items() if not each.zero and each.share > limit}
    if not same:
        return []
    key, worst = max(same.items(), key=lambda pair: pair[1].share)
    because = (
        f"{worst.share:.0%} of the units of {key} start with the weights of another one (cosine "
        f"{worst.cosine:.4f})" + (f", and those of {len(same) - 1} more" if len(same) > 1 else "")
    )
    causes = ("a constant initialisation", "units or blocks copied after initialisation")
    return [Finding(worst.share, limit, because, causes)]


def _same_after(end: dict[str, Twins], num_steps: int, limit: float) -> list[Finding]:
    stuck = {key: each for key, each in end.items() if each.identical}
    if not stuck:
        return []
    key, worst = next(iter(stuck.items()))
    what = "are still zero" if worst.zero else "have the same weights"
    because = f"after {num_steps} steps the units of {key} {what}"
    causes = ("an initialisation with zeros or a constant", "gradients that are equal by symmetry")
    return [Finding(1.0, limit, because, causes)]


def _moved_as_one(pairs: list[Copies], num_steps: int) -> list[Finding]:
    for pair in pairs:
        apart = pair.apart()
        if apart is not None and apart < 1e-2:
            because = (
                f"{pair.first} and {pair.second} start with the same weights and after {num_steps} "
                f"steps are {apart:.2g} of their way apart"
            )
            causes = ("blocks copied after initialisation (deepcopy) that see the same input",)
            return [Finding(apart, 1e-2, because, causes)]
    return []
