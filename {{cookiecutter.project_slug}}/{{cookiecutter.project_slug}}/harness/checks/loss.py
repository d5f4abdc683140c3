"""The loss before the first step: is it wired to outputs and labels, and where does it start?"""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import median, pstdev
from typing import Any

import numpy as np
import torch

from ..instruments import NonFiniteLoss
from . import Check, Pipeline, not_applicable, probe

PRETRAINED = "The head starts from trained weights, so no start can be predicted for it."


@dataclass(frozen=True)
class Start:
    """One fresh model before its first step, over the rows of several training batches."""

    loss: float  # the project's own, as its step reports it
    expected: float  # exact for these outputs if labels did not depend on them
    standard_error: float  # of the loss, from one row to the next
    spread: float  # sd of an output around its row's mean
    outputs: torch.Tensor
    rows_per_batch: int


def loss_at_init(
    pipeline: Pipeline,
    *,
    min_rows: int = 512,
    num_models: int = 5,
    max_relative_gap: float = 0.05,
    max_standard_errors: float = 4.0,
    min_scale: float = 0.85,
    max_scale: float = 1.25,
) -> Check:
    """The loss of the project's own step on untrained models.

    Wiring: it equals the loss expected when labels are independent of the actual outputs, within
    `max_relative_gap` or `max_standard_errors`, whichever is wider. Scale: it starts near the loss
    of flat outputs (or of the label shares, when the bias says them). Medians over fresh models;
    training mode only where batch statistics ask for it. The same limits hold in fp32 and bf16.
    """
    name = "loss_at_init"
    missing = probe.lacking(
        name, pipeline, task=("expected_loss", "prior", "prior_loss", "flat_loss")
    )
    if missing or pipeline.pretrained_head:
        return missing or not_applicable(name, PRETRAINED)
    batches = probe.batches_of(pipeline.train, min_rows=min_rows)
    try:
        starts = [_start(pipeline, seed, batches) for seed in range(num_models)]
    except NonFiniteLoss as error:
        because = f"On an untrained model {error}."
        causes = ("every target of a batch is ignored", "log of zero", "non-finite inputs")
        return Check(name, "shut", None, None, "", because, causes)
    gaps = [start.loss - start.expected for start in starts]
    expected = median(start.expected for start in starts)
    loss = expected + median(gaps)
    noise = max(median(s.standard_error for s in starts), pstdev(gaps) / math.sqrt(num_models))
    room = max(max_relative_gap * abs(expected), max_standard_errors * noise)
    limit = [expected - room, expected + room]
    because = (
        f"An untrained model starts at a loss of {loss:.4g}, {expected:.4g} is expected for its "
        f"outputs if labels do not depend on them (median of {num_models} models)"
    )
    if not limit[0] <= loss <= limit[1]:
        causes = _fingerprint(pipeline, loss, expected, starts[0])
        return Check(name, "shut", loss, limit, "", f"{because}, {causes[0]}.", causes)
    noise *= max_standard_errors
    return _scale(pipeline, name, loss, noise, starts, because, [min_scale, max_scale])


def _start(pipeline: Pipeline, seed: int, batches: list[dict]) -> Start:
    model = pipeline.make_model(seed)
    model.train(bool(probe.batch_statistics(model)))
    optimizer = pipeline.make_optimizer(model)
    for group in optimizer.param_groups:
        group["lr"] = 0.0  # the step is the project's, the weights stay as they started
    total, num_rows = 0.0, 0
    with probe.seam(model, inputs=False) as seen:
        for batch in batches:
            step = pipeline.train_step(model, optimizer, batch)
            total += step.loss.item() * len(batch["y"])
            num_rows += len(batch["y"])
    if not math.isfinite(total):
        raise NonFiniteLoss(f"the loss is {total}")
    outputs = torch.cat(seen.outputs).cpu()  # float64 below: not every device has it
    y = torch.cat([batch["y"] for batch in batches]).cpu()
    expected = pipeline.task.expected_loss(outputs, probe.shares(pipeline.task, y))
    spread = (outputs - outputs.mean(dim=-1, keepdim=True)).std().item()
    error = _standard_error(pipeline.task, outputs, y)
    return Start(total / num_rows, expected, error, spread, outputs, len(batches[0]["y"]))


def _standard_error(task: Any, outputs: torch.Tensor, y: torch.Tensor) -> float:
    if not hasattr(task, "loss_per_row"):
        return 0.0
    rows = task.loss_per_row(outputs, y).double()
    return (rows.std() / math.sqrt(len(rows))).item() if len(rows) > 1 else 0.0


def _fingerprint(pipeline: Pipeline, loss: float, expected: float, start: Start) -> tuple[str, ...]:
    """What the value of a wrong first loss points to, likeliest first."""
    ratio, classes = loss / expected, getattr(pipeline.task, "num_outputs", 0)
    named = [
        (ratio < -0.02, "negative: the sign is flipped, or NLL is taken of raw logits"),
        (abs(ratio) < 0.15, "near zero: NLL of raw logits, or the label reaches the model"),
        (
            abs(ratio / start.rows_per_batch - 1) < 0.1,
            "about the rows of a batch times too high: the loss is summed, not averaged",
        ),
        (
            classes > 2 and abs(ratio * classes - 1) < 0.1,
            "about 1/classes of it: the mean is also taken over the classes",
        ),
        (
            abs(loss / math.log(max(start.rows_per_batch, 2)) - 1) < 0.1,
            "the log of the rows of a batch: softmax runs over the batch axis",
        ),
        (
            classes > 2 and abs(loss / math.log(2) - 1) < 0.1,
            "log 2: a binary loss stands where classes exclude each other",
        ),
    ]
    found = [text for holds, text in named if holds]
    return (*found, "the loss is not the one the task declares", "the label reaches the outputs")


def _scale(
    pipeline: Pipeline,
    name: str,
    loss: float,
    noise: float,
    starts: list[Start],
    because: str,
    scale: list[float],
) -> Check:
    """Against the start of a model that knows nothing, or the label shares. The latter are those
    of the rows as they are: smoothed ones cost more on few rows than a right start."""
    y = probe.sampled_labels(pipeline.train)
    prior, bare = pipeline.task.prior(y), probe.shares(pipeline.task, y)
    bare = bare.clip(1e-12) if pipeline.task.targets == "exclusive" else prior
    flat = pipeline.task.flat_loss(prior)
    informed = min(pipeline.task.prior_loss(prior), pipeline.task.prior_loss(bare))
    reference = informed if loss < scale[0] * flat else flat
    limit = [scale[0] * reference - noise, scale[1] * reference]
    spread = median(start.spread for start in starts)
    because += f", and {reference:.4g} of a model that knows "
    because += "nothing" if reference == flat else "the label shares"
    if loss > limit[1]:
        because += f": hot init, outputs spread by {spread:.3g}."
        causes = ("inputs are not normalised", "weights of the last layer start too large")
        return Check(name, "warn", loss, limit, "", because, causes)
    if loss < limit[0]:
        causes = ("the label reaches the model", "the loss is scaled down")
        return Check(name, "shut", loss, limit, "", because + ": too low.", causes)
    return Check(name, "open", loss, limit, "", because + ".")


def prior_bias(
    pipeline: Pipeline,
    *,
    min_rows: int = 512,
    num_models: int = 5,
    max_loss_ratio: float = 1.1,
    max_marginal_gap: float = 0.02,
    max_entropy_share: float = 0.9,
) -> Check:
    """With unbalanced labels an untrained model should already say the label shares.

    Judged on outputs averaged over rows and fresh models, since the noise of one initialisation
    is no bias: their loss is at most `max_loss_ratio` times that of the shares, or the predicted
    shares are within `max_marginal_gap`.
    """
    name = "prior_bias"
    missing = probe.lacking(
        name,
        pipeline,
        targets=("exclusive",),
        task=("expected_loss", "prior", "prior_loss", "flat_loss"),
    )
    if missing or pipeline.pretrained_head:
        return missing or not_applicable(name, PRETRAINED)
    task, y = pipeline.task, probe.sampled_labels(pipeline.train)
    prior = task.prior(y)
    evenness = float(-(prior * np.log(prior)).sum()) / math.log(len(prior))
    if evenness >= max_entropy_share:
        because = (
            f"The labels are balanced: their entropy is {evenness:.3g} of the most possible "
            f"(the check applies below {max_entropy_share:g})."
        )
        return not_applicable(name, because)
    batches = probe.batches_of(pipeline.train, min_rows=min_rows)
    best = task.prior_loss(prior)
    for count in (num_models, 4 * num_models):  # more only where a hot start drowns the bias
        outputs = [_start(pipeline, seed, batches).outputs.mean(dim=0) for seed in range(count)]
        mean = torch.stack(outputs).mean(dim=0)
        loss = task.expected_loss(mean[None], prior)
        gap = float(np.abs(torch.softmax(mean.double(), 0).numpy() - prior).max())
        ratio = loss / best
        good = ratio <= max_loss_ratio or gap <= max_marginal_gap
        if good:
            break
    because = (
        f"Untrained models start at {ratio:.3g} times the loss of the label shares ({loss:.4g} "
        f"against {best:.4g}), their predicted shares are off by up to {gap:.3g}"
    )
    causes = (
        "the bias of the last layer does not start at the label shares (task.set_prior_bias)",
        "the shares are set in another class order",
        "the last layer has no bias",
    )
    if loss > 1.1 * task.flat_loss(prior):  # worse than saying nothing
        causes = (causes[1], causes[0], causes[2])
    verdict = "open" if good else "shut"
    return Check(name, verdict, ratio, max_loss_ratio, "", because + ".", () if good else causes)
