"""Precision: is the declared one in effect, and does rounding lose what a step adds?"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from . import Check, Finding, Pipeline, probe, shut_if_any

REDUCED = (torch.bfloat16, torch.float16)
PRODUCTS = {  # what autocast runs in reduced precision
    *("linear", "bilinear", "conv1d", "conv2d", "conv3d", "matmul", "mm", "bmm", "addmm"),
    *("conv_transpose1d", "conv_transpose2d", "conv_transpose3d", "baddbmm", "einsum"),
    *("lstm", "gru", "rnn_tanh", "rnn_relu", "multi_head_attention_forward"),
    *("scaled_dot_product_attention", "__matmul__", "__rmatmul__"),
}
MIN_LOSS_SCALE = 4.0  # a gradient scaler starts at 65,536


@dataclass
class _Seen:
    """What a few project steps showed."""

    dtypes: dict[torch.dtype, int] = field(default_factory=dict)  # of products, how often
    asked: int = 0  # entries of reduced-precision weights with a gradient, over all steps
    moved: int = 0  # of those
    scale: float | None = None  # of the gradient at the outputs, against the loss's own
    loss: torch.dtype = torch.float32


def precision(pipeline: Pipeline, *, num_steps: int = 3, max_lost_share: float = 0.5) -> Check:
    """`num_steps` of the project's steps, with the dtype of every matrix product and convolution.

    Shut when reduced precision is declared and no product runs in it, or the other way round; when
    more than `max_lost_share` of the entries of weights kept in bf16 or fp16 do not move although
    they have a gradient; when the optimizer's epsilon is 0 in the dtype of its weights. fp16
    without a scaled loss, and a loss in reduced precision, warn.
    """
    name = "precision"
    model = pipeline.make_model(0).train()
    optimizer = pipeline.make_optimizer(model)
    blind = list(_epsilon(optimizer))
    if blind:  # the steps themselves would end in NaN
        return shut_if_any(blind, Check(name, "open", None, None, "", ""))
    seen = _observe(pipeline, model, optimizer, num_steps)
    lost = 1 - seen.moved / seen.asked if seen.asked else 0.0
    found = [*_declared(pipeline, seen), *_lost(lost, max_lost_share)]
    kinds = ", ".join(sorted(_word(dtype) for dtype in seen.dtypes)) or "none"
    because = f"Declared is {pipeline.precision}; {sum(seen.dtypes.values())} products ran in "
    because += f"{kinds}, and {lost:.0%} of the updates are lost to rounding"
    good = Check(name, "open", lost, max_lost_share, "", because + ".")
    doubt = _doubt(seen)
    if not found and doubt:
        return Check(name, "warn", lost, max_lost_share, "", f"{because}; {doubt}.", (doubt,))
    return shut_if_any(found, good)


def _word(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _declared(pipeline: Pipeline, seen: _Seen) -> Iterator[Finding]:
    """A model without a single product says nothing about autocast."""
    reduced = sum(count for dtype, count in seen.dtypes.items() if dtype in REDUCED)
    total = sum(seen.dtypes.values())
    if pipeline.precision == "fp32" and reduced:
        because = f"fp32 is declared and {reduced} of {total} products run in reduced precision"
        causes = ("the model was cast, or autocast is on somewhere",)
        yield Finding(float(reduced), 0.0, because, causes)
    if pipeline.precision != "fp32" and total and not reduced:
        because = f"{pipeline.precision} is declared and none of {total} products runs in it"
        yield Finding(0.0, 1.0, because, ("autocast is not applied in the step",))


def _lost(lost: float, limit: float) -> Iterator[Finding]:
    if lost > limit:
        because = f"{lost:.0%} of the entries of weights in reduced precision do not move in a step"
        causes = ("the update is below half a unit in the last place: keep weights in fp32",)
        yield Finding(lost, limit, because, causes)


def _epsilon(optimizer: torch.optim.Optimizer) -> Iterator[Finding]:
    for group in optimizer.param_groups:
        eps = group.get("eps")
        dtypes = {p.dtype for p in group["params"] if p.dtype in REDUCED}
        gone = [d for d in dtypes if eps and torch.tensor(eps, dtype=d).item() == 0]
        if gone:
            because = f"the optimizer's epsilon {eps:g} is 0 in {_word(gone[0])}"
            causes = ("eps is too small for the dtype: a gradient of zero becomes NaN",)
            yield Finding(0.0, float(eps), because, causes)
            return


def _doubt(seen: _Seen) -> str:
    if torch.float16 in seen.dtypes and (seen.scale or 1.0) < MIN_LOSS_SCALE:
        return "fp16 runs without a scaled loss: small gradients become 0"
    if seen.loss in REDUCED:
        return f"the loss is computed in {_word(seen.loss)}"
    return ""


# ---- observing --------------------------------------------------------------------------------


class _Products(TorchFunctionMode):
    """Counts the dtypes in which products and convolutions are made."""

    def __init__(self, dtypes: dict[torch.dtype, int]):
        super().__init__()
        self.dtypes = dtypes

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if getattr(func, "__name__", "") in PRODUCTS:
            first = made[0] if isinstance(made, tuple) else made
            self.dtypes[first.dtype] = self.dtypes.get(first.dtype, 0) + 1
        return made


def _observe(
    pipeline: Pipeline, model: nn.Module, optimizer: torch.optim.Optimizer, num_steps: int
) -> _Seen:
    seen, asked = _Seen(), {}

    def before_step(*_: Any) -> None:
        for group in optimizer.param_groups:
            for p in group["params"]:
                if p.dtype in REDUCED and p.grad is not None:
                    asked[p] = (p.detach().clone(), p.grad.ne(0))

    handle = optimizer.register_step_pre_hook(before_step)
    try:
        for batch in itertools.islice(probe.endless(pipeline.train), num_steps):
            with _Products(seen.dtypes), _outputs(model) as outputs:
                seen.loss = pipeline.train_step(model, optimizer, batch).loss.dtype
            if torch.float16 in seen.dtypes:
                seen.scale = _scale(pipeline, outputs, batch)
            for p, (before, wanted) in asked.items():
                seen.asked += int(wanted.sum())
                seen.moved += int((wanted & (p.detach() != before)).sum())
            asked.clear()
    finally:
        handle.remove()
    return seen


@contextlib.contextmanager
def _outputs(model: nn.Module) -> Iterator[list[torch.Tensor]]:
    """The model's outputs of each call and, once backward ran, their gradients, in turn."""
    seen: list[torch.Tensor] = []

    def listen(outputs: torch.Tensor, call: int) -> None:
        if outputs.requires_grad:
            outputs.register_hook(lambda g: seen.extend((outputs.detach(), g.detach().float())))

    with probe.seam(model, replace=listen, inputs=False):
        yield seen


def _scale(pipeline: Pipeline, seen: list[torch.Tensor], batch: dict) -> float | None:
    """How much larger the gradient of the first part's outputs is than that of the plain loss."""
    if len(seen) < 2:
        return None
    outputs, gradient = seen[0].float().requires_grad_(), seen[1]
    pipeline.task.loss(outputs, batch["y"][: len(outputs)]).backward()
    return (gradient.norm() / outputs.grad.norm().clamp_min(1e-30)).item()
