"""Faults of the loss: the project's own step with another loss than the task declares."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from dataclasses import replace

import torch
from torch.nn import functional as F

from .. import loop
from ..checks import Pipeline, probe
from .plant import needs, needs_targets, with_hook

Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]  # (outputs, y) -> 0-d


def _with_loss(pipeline: Pipeline, loss: Loss) -> Pipeline:
    def step(model, optimizer, batch, accumulate=pipeline.accumulate):
        return loop.train_step(
            model,
            optimizer,
            batch,
            loss,
            clip_norm=pipeline.clip_norm,
            precision=pipeline.precision,
            accumulate=accumulate,
        )

    parted = None if pipeline.accumulate_step is None else step
    return replace(pipeline, train_step=step, accumulate_step=parted)


def sign_flipped(pipeline: Pipeline) -> Pipeline:
    return _with_loss(pipeline, lambda outputs, y: -pipeline.task.loss(outputs, y))


def loss_summed(pipeline: Pipeline) -> Pipeline:
    return _with_loss(pipeline, lambda outputs, y: pipeline.task.loss(outputs, y) * len(y))


def loss_clamped(pipeline: Pipeline) -> Pipeline:
    """A clamp meant for gradients: a batch that costs much has none."""
    task = pipeline.task
    for name in ("flat_loss", "prior"):
        needs(getattr(task, name, None), f"`{name}` in the task")
    limit = 1.5 * task.flat_loss(task.prior(probe.labels(pipeline.train)))
    return _with_loss(pipeline, lambda outputs, y: task.loss(outputs, y).clamp(max=limit))


def loss_over_batch_axis(pipeline: Pipeline) -> Pipeline:
    needs_targets(pipeline, "exclusive")
    return _with_loss(pipeline, lambda outputs, y: F.nll_loss(outputs.log_softmax(dim=0), y))


def nll_on_raw_logits(pipeline: Pipeline) -> Pipeline:
    kind = needs_targets(pipeline, "exclusive", "tokens")
    skip = getattr(pipeline.task, "ignore_index", None)

    def loss(outputs: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        if kind == "tokens":
            outputs, y = outputs.flatten(0, 1), y.flatten()
        return F.nll_loss(outputs, y, ignore_index=-100 if skip is None else skip)

    return _with_loss(pipeline, loss)


def binary_loss_for_classes(pipeline: Pipeline) -> Pipeline:
    needs_targets(pipeline, "exclusive")

    def loss(outputs: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        wanted = F.one_hot(y, outputs.shape[1]).float()
        return F.binary_cross_entropy_with_logits(outputs, wanted)

    return _with_loss(pipeline, loss)


def class_ignored(pipeline: Pipeline) -> Pipeline:
    """`ignore_index` that is the number of a real class."""
    needs_targets(pipeline, "exclusive")
    return _with_loss(pipeline, lambda outputs, y: F.cross_entropy(outputs, y, ignore_index=0))


def undeclared_class_weights(pipeline: Pipeline) -> Pipeline:
    needs_targets(pipeline, "exclusive")

    def loss(outputs: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        weights = torch.linspace(0.5, 2.0, outputs.shape[1], device=outputs.device)
        return F.cross_entropy(outputs, y, weight=weights)

    return _with_loss(pipeline, loss)


def dead_term(pipeline: Pipeline) -> Pipeline:
    """A term that counts in the number and not in the gradient: the last declared one, or a pull of
    the outputs to zero that is new."""
    task, declared = copy.copy(pipeline.task), getattr(pipeline.task, "loss_terms", None)

    def terms(outputs: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor]:
        if declared is None:
            found = {"loss": pipeline.task.loss(outputs, y), "size": outputs.square().mean()}
        else:
            found = declared(outputs, y)
        last = list(found)[-1]
        return {**found, last: found[last].detach()}

    if declared is not None:
        task.loss_terms = terms
    broken = replace(pipeline, task=task)
    return _with_loss(broken, lambda outputs, y: sum(terms(outputs, y).values()))


def broadcast_warning(pipeline: Pipeline) -> Pipeline:
    """An extra term compares `(B, 1)` with `(B,)`; torch says so once and goes on."""

    def loss(outputs: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        left, right = outputs.reshape(len(y), -1)[:, :1], outputs.reshape(len(y), -1)[:, 0]
        with warnings.catch_warnings():
            warnings.simplefilter("always")
            return pipeline.task.loss(outputs, y) + 1e-12 * F.mse_loss(left, right)

    return _with_loss(pipeline, loss)


def label_around_input(pipeline: Pipeline) -> Pipeline:
    """In the step the right answer is added to what the model says."""
    needs_targets(pipeline, "exclusive", "multilabel", "tokens", "real")

    def register(model, optimizer, batch):
        answers, start = pipeline.task.ideal_outputs(batch["y"], 10.0), 0

        def hook(module, args, outputs):
            nonlocal start
            start += len(outputs)
            return outputs + answers[start - len(outputs) : start].to(outputs)

        return model.register_forward_hook(hook)

    return with_hook(pipeline, register)
