"""What a training step leaves behind: a graph that lives on, a state that the next batch meets."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from . import Finding, Pipeline, probe, undisturbed

SAME = {"fp32": 1e-4, "bf16": 2e-2}  # relative, of the outputs; copies of one model are equal


def kept_graph(pipeline: Pipeline, model: nn.Module, batch: dict) -> Iterator[Finding]:
    """The loss that a step returns must be a number of its own."""
    output = pipeline.train_step(model, pipeline.make_optimizer(model), batch)
    if getattr(output.loss, "requires_grad", False):
        because = "the returned loss keeps the graph of its step: memory grows with each one kept"
        yield Finding(1.0, 0.0, because, ("return loss.detach()",))


def carried_state(pipeline: Pipeline, model: nn.Module, batches: list[dict]) -> Iterator[Finding]:
    """Outputs of the first batch by two copies of a model that met different batches before (as
    many: a counter is no fault). `model` has no dropout and fixed batch statistics."""
    first, other = batches[0]["x"], batches[-1]["x"]
    expected, found = (_after(pipeline, copy.deepcopy(model), x, first) for x in (first, other))
    gap = ((found - expected).norm() / expected.norm().clamp_min(1e-30)).item()
    limit = SAME.get(pipeline.precision, SAME["bf16"])
    if gap > limit:
        because = f"outputs of a batch differ by {gap:.2g} with the batch that came before it"
        causes = ("a hidden state is carried from batch to batch in an attribute of a module",)
        yield Finding(gap, limit, because, causes)


def _after(pipeline: Pipeline, model: nn.Module, before: Any, x: Any) -> torch.Tensor:
    """Outputs of `x` after a pass over `before`. Buffers are put back in between: a state that is
    meant to last is one of them."""
    buffers = {key: value.clone() for key, value in model.named_buffers()}
    _forward(pipeline, model, before)
    with torch.no_grad():
        for key, value in model.named_buffers():
            if key in buffers and value.shape == buffers[key].shape:
                value.copy_(buffers[key])
    return _forward(pipeline, model, x)


def _forward(pipeline: Pipeline, model: nn.Module, x: Any) -> torch.Tensor:
    with undisturbed(pipeline):
        return probe.forward(pipeline, model, x).detach()
