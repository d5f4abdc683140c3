"""The loss before the first step: is it wired to outputs and labels, and where does it start?"""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import median, pstdev
from typing import Any

import torch

from ..instruments import NonFiniteLoss
from . import Check, Pipeline, layout, not_applicable, probe
from .balance import balanced, of_constant, off_centre

PRETRAINED = "The head starts from trained weights, so no start can be predicted for it."
MANY = ("tokens", "dense")  # targets of which a row has many


@dataclass(frozen=True)
class Start:
    """One fresh model before its first step, over the rows of several training batches."""

    loss: float  # the project's own, as its step reports it
    expected: float  # exact for these outputs if labels did not depend on them
    standard_error: float  # of the loss, from one row to the next
    spread: float  # sd of an output around its row's mean
    outputs: torch.Tensor  # mean over all targets: (num_outputs,), of real outputs their columns
    rows_per_batch: int
    constant: float  # part of the loss that no batch changes: a penalty on the weights


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
    training mode only where batch statistics ask for it. Targets that are ignored do not count. The
    same limits hold in fp32 and bf16.
    """
    name = "loss_at_init"
    missing = probe.lacking(
        name, pipeline, task=("expected_loss", "prior", "prior_loss", "flat_loss")
    )
    if missing or pipeline.pretrained_head:
        return missing or not_applicable(name, PRETRAINED)
    batches = _batches(pipeline, min_rows)
    try:
        starts = [_start(pipeline, seed, batches) for seed in range(num_models)]
    except NonFiniteLoss as error:
        because = f"On an untrained model {error}."
        causes = ("every target of a batch is ignored", "log of zero", "non-finite inputs")
        return Check(name, "shut", None, None, "", because, causes)
    gaps = [start.loss - start.constant - start.expected for start in starts]
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


def _batches(pipeline: Pipeline, min_targets: int) -> list[dict]:
    """A row of tokens or pixels holds many targets: fewer rows are enough."""
    first = probe.batches_of(pipeline.train, min_rows=1)[0]
    num_rows = min_targets
    if pipeline.task.targets in MANY:
        num_rows = layout.num_rows_for(first["y"], min_targets)
    return probe.batches_of(pipeline.train, min_rows=num_rows)


def _start(pipeline: Pipeline, seed: int, batches: list[dict]) -> Start:
    task, model = pipeline.task, pipeline.make_model(seed)
    model.train(bool(probe.batch_statistics(model)))
    optimizer = pipeline.make_optimizer(model)
    probe.set_rate(optimizer, 0.0)  # the step is the project's, the weights stay as they started
    losses, weights = [], []
    with probe.seam(model, inputs=False) as seen:
        for batch in batches:
            losses.append(pipeline.train_step(model, optimizer, batch).loss.item())
            weights.append(layout.supervised(task, batch["y"]).sum().item())
    loss = sum(a * b for a, b in zip(losses, weights, strict=True)) / max(sum(weights), 1)
    if not math.isfinite(loss):
        raise NonFiniteLoss(f"the loss is {loss}")
    outputs = torch.cat(seen.outputs).cpu()  # float64 below: not every device has it
    y = torch.cat([batch["y"] for batch in batches]).cpu()
    told = layout.supervised_outputs(task, outputs, y)
    axis = 1 if task.targets == "dense" else -1
    spread = outputs if task.targets == "real" else outputs - outputs.mean(dim=axis, keepdim=True)
    return Start(
        loss=loss,
        expected=layout.expected_loss(task, told, y),
        standard_error=_standard_error(task, outputs, y),
        spread=spread.std().item(),
        outputs=_mean_outputs(task, told),
        rows_per_batch=len(batches[0]["y"]),
        constant=_constant(task, outputs, batches, losses),
    )


def _mean_outputs(task: Any, told: torch.Tensor) -> torch.Tensor:
    if task.targets in layout.CLASSES:
        return layout.flat_outputs(task, told).mean(dim=0)
    return told.mean(dim=0)


def _constant(task: Any, outputs: torch.Tensor, batches: list[dict], losses: list[float]) -> float:
    """What the step adds to `task.loss`, if it is the same for every batch (within 1e-3 of the
    loss): a penalty on the weights, which is no matter of the start."""
    start, added = 0, []
    for batch, loss in zip(batches, losses, strict=True):
        part = outputs[start : start + len(batch["y"])]
        added.append(loss - task.loss(part, batch["y"].cpu()).item())
        start += len(part)
    same = max(added) - min(added) <= 1e-3 * abs(losses[0])
    large = min(added) > 0.01 * abs(losses[0])  # less is in the limits anyway
    return sum(added) / len(added) if len(added) > 2 and same and large else 0.0


def _standard_error(task: Any, outputs: torch.Tensor, y: torch.Tensor) -> float:
    if not hasattr(task, "loss_per_row"):
        return 0.0
    rows = task.loss_per_row(outputs, y).double()
    return (rows.std() / math.sqrt(len(rows))).item() if len(rows) > 1 else 0.0


def _fingerprint(pipeline: Pipeline, loss: float, expected: float, start: Start) -> tuple[str, ...]:
    """What the value of a wrong first loss points to, likeliest first."""
    task, ratio, rows = pipeline.task, loss / expected, start.rows_per_batch
    one_class = task.targets in layout.CLASSES
    classes = getattr(task, "num_outputs", 0) if task.targets != "real" else 0
    per_row = probe.few_rows(pipeline.train, 1)["y"][0].numel()

    def near(value: float, to: float) -> bool:
        return abs(value / to - 1) < 0.1

    named = [
        (ratio < -0.02, "negative: the sign is flipped, or NLL is taken of raw logits"),
        (
            abs(ratio) < 0.15
            and not near(ratio * max(classes, 1), 1)
            and not near(ratio * per_row, 1),
            "near zero: NLL of raw logits, or the label reaches the model",
        ),
        (
            near(ratio, rows),
            "about the rows of a batch times too high: the loss is summed, not averaged",
        ),
        (
            per_row > 1 and (near(ratio, rows * per_row) or near(ratio, per_row)),
            "about the targets of a row or batch times too high: the loss is summed, not averaged",
        ),
        (
            classes > 2 and near(ratio * classes, 1),
            "about 1/classes of it: the mean is also taken over the classes",
        ),
        (
            one_class and near(loss, math.log(max(rows, 2))),
            "the log of the rows of a batch: softmax runs over the batch axis",
        ),
        (
            one_class and classes > 2 and near(loss, math.log(2)),
            "log 2: a binary loss stands where classes exclude each other",
        ),
        (
            task.targets == "real" and near(ratio, 2),
            "twice the variance: outputs and targets of other shapes broadcast",
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
    task, y = pipeline.task, probe.sampled_labels(pipeline.train)
    priors = [task.prior(column) for column in layout.columns(task, y)]
    flat = sum(task.flat_loss(prior) for prior in priors) / len(priors)
    informed = sum(task.prior_loss(prior) for prior in priors) / len(priors)
    if task.targets in layout.CLASSES:
        informed = min(informed, task.prior_loss(layout.shares(task, y).clip(1e-12)))
    reference = informed if loss < scale[0] * flat else flat
    limit = [scale[0] * reference - noise, scale[1] * reference]
    spread = median(start.spread for start in starts)
    because += f", and {reference:.4g} of a model that knows "
    because += "nothing" if reference == flat else "the label shares"
    if loss > limit[1]:
        because += f": hot init, outputs spread by {spread:.3g}."
        return Check(name, "warn", loss, limit, "", because, _hot(task, y))
    if loss < limit[0]:
        causes = ("the loss is scaled down: flat_loss is not of it", "the label reaches the model")
        return Check(name, "shut", loss, limit, "", because + ": too low.", causes)
    return Check(name, "open", loss, limit, "", because + ".")


def _hot(task: Any, y: torch.Tensor) -> tuple[str, ...]:
    causes = ("inputs are not normalised", "weights of the last layer start too large")
    if task.targets == "real" and off_centre(y) > 0.3:
        return ("targets are not centred, and the bias does not start at their mean", *causes)
    return causes


# ---- the bias of the last layer -----------------------------------------------------------------


def prior_bias(
    pipeline: Pipeline,
    *,
    min_rows: int = 512,
    num_models: int = 5,
    max_loss_ratio: float = 1.1,
    max_marginal_gap: float = 0.02,
    max_entropy_share: float = 0.9,
    min_label_share: float = 0.2,
    min_mean_deviations: float = 0.3,
) -> Check:
    """With unbalanced labels an untrained model should already say the label shares.

    Applies to classes whose entropy is below `max_entropy_share` of the most possible, to labels
    one of which is rarer than `min_label_share` (or as rarely absent), and to real targets whose
    mean is more than `min_mean_deviations` standard deviations from zero. Judged on outputs
    averaged over rows and fresh models, since the noise of one initialisation is no bias: their
    loss is at most `max_loss_ratio` times that of the shares (or of the mean: the variance), or the
    predicted shares are within `max_marginal_gap`. Tokens and dense targets only warn: with many
    targets per row the first steps learn the shares. The same limits hold in fp32 and bf16.
    """
    name = "prior_bias"
    needed = ("expected_loss", "prior", "prior_loss", "flat_loss")
    missing = probe.lacking(name, pipeline, targets=layout.KINDS, task=needed)
    if missing or pipeline.pretrained_head:
        return missing or not_applicable(name, PRETRAINED)
    task, y = pipeline.task, probe.sampled_labels(pipeline.train)
    prior = task.prior(y)
    flat = balanced(task, y, prior, max_entropy_share, min_label_share, min_mean_deviations)
    if flat:
        return not_applicable(name, flat)
    batches, best = _batches(pipeline, min_rows), task.prior_loss(prior)
    tries = (num_models, 4 * num_models)  # more only where a hot start drowns the bias
    for count in tries[:1] if task.targets in MANY else tries:
        outputs = [_start(pipeline, seed, batches).outputs for seed in range(count)]
        mean = torch.stack(outputs).mean(dim=0)
        loss, gap = of_constant(task, mean, y, prior)
        ratio = loss / best
        good = ratio <= max_loss_ratio or gap <= max_marginal_gap
        if good:
            break
    what = "the mean of the targets" if task.targets == "real" else "the label shares"
    because = (
        f"Untrained models start at {ratio:.3g} times the loss of {what} ({loss:.4g} "
        f"against {best:.4g})"
    )
    because += f", their predicted shares are off by up to {gap:.3g}" if gap < math.inf else ""
    causes = (
        f"the bias of the last layer does not start at {what} (task.set_prior_bias)",
        "the shares are set in another class order",
        "the last layer has no bias",
    )
    if task.targets == "real":
        causes = (causes[0], "targets are not standardised", causes[2])
    elif loss > 1.1 * task.flat_loss(prior):  # worse than saying nothing
        causes = (causes[1], causes[0], causes[2])
    bad = "warn" if task.targets in MANY else "shut"
    return Check(
        name,
        "open" if good else bad,
        ratio,
        max_loss_ratio,
        "",
        because + ".",
        () if good else causes,
    )
