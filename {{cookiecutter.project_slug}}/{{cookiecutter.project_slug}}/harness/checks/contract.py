"""The loss on outputs whose loss is known: through the project's own step, seam by seam."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch.nn import functional as F

from . import Check, Finding, Pipeline, probe, shut_if_any

SCALE = 30.0  # logits at which a softmax is certain


@dataclass(frozen=True)
class Answer:
    loss: float
    gradient: torch.Tensor  # of the loss with respect to the given outputs, same shape


Ask = Callable[[torch.Tensor, torch.Tensor], Answer]


def loss_contract(
    pipeline: Pipeline,
    *,
    max_optimum_share: float = 0.01,
    max_relative_gap: float = 0.01,
    max_class_ratio: float = 1.05,
    num_models: int = 5,
) -> Check:
    """Chosen outputs are put in the place of the model's while the project's own step runs.

    Right answers reach the optimum of the loss (also when all logits are negative), no opinion
    costs the reference, any other outputs what the task's formula says, a doubled batch the same;
    no class counts more than declared (`task.class_weights`), certain errors still have a gradient;
    and the model's own rows are neither probabilities nor all >= 0. Outputs enter as float32, so
    the limits hold in fp32 and bf16.
    """
    name = "loss_contract"
    needed = ("ideal_outputs", "optimum_loss", "flat_loss", "expected_loss")
    missing = probe.lacking(name, pipeline, targets=("exclusive",), task=needed)
    if missing:
        return missing
    task, ask = pipeline.task, _asker(pipeline)
    copies = max(1, 64 // task.num_outputs)
    y = torch.arange(task.num_outputs, device=pipeline.device).repeat(copies)
    best, flat = task.optimum_loss(), task.flat_loss(_uniform_shares(task))
    found = [
        *_uniform(task, ask, y, flat, max_relative_gap),
        *_optimum(task, ask, y, best, flat, max_optimum_share),
        *_formula(task, ask, y, max_relative_gap),
        *_doubled(task, ask, y, max_relative_gap),
        *_classes(task, ask, y, max_class_ratio),
        *_wrong(task, ask, y, flat),
        *_rows(pipeline, num_models),
    ]
    value = (ask(task.ideal_outputs(y, SCALE), y).loss - best) / (flat - best)
    because = (
        f"Right answers cost {value * (flat - best):.3g} above the optimum, no opinion "
        f"{flat:.4g}, each class and a doubled batch count as declared, outputs are raw logits."
    )
    return shut_if_any(found, Check(name, "open", value, max_optimum_share, "", because))


def _asker(pipeline: Pipeline) -> Ask:
    """(outputs, y) -> the loss of the project's step on them, and its gradient."""
    model = pipeline.make_model(0)
    optimizer = pipeline.make_optimizer(model)
    rows = probe.few_rows(pipeline.train, 64)

    def ask(outputs: torch.Tensor, y: torch.Tensor) -> Answer:
        given = outputs.to(pipeline.device, torch.float32).clone().requires_grad_()
        index = torch.arange(len(y), device=pipeline.device) % len(rows["y"])
        batch = {**probe.take_rows(rows, index), "y": y}
        start = 0

        def replace(made: torch.Tensor, call: int) -> torch.Tensor:
            nonlocal start
            start += len(made)
            return given[start - len(made) : start]

        with probe.seam(model, replace=replace, inputs=False):
            loss = pipeline.train_step(model, optimizer, batch).loss.item()
        gradient = torch.zeros_like(given) if given.grad is None else given.grad
        return Answer(loss, gradient)

    return ask


def _uniform_shares(task) -> np.ndarray:
    return np.full(task.num_outputs, 1 / task.num_outputs)


def _where(task, outputs: torch.Tensor, y: torch.Tensor, loss: float) -> str:
    """Which side of the seam is to blame: the loss called alone gives the same, or not."""
    alone = task.loss(outputs.to(y.device), y).item()
    return "task.loss" if math.isclose(alone, loss, rel_tol=1e-3, abs_tol=1e-4) else "the step"


def _optimum(task, ask: Ask, y, best: float, flat: float, limit: float) -> Iterator[Finding]:
    """Right answers reach the optimum, also with every logit negative where the formula says that
    a shift of a row does not matter."""
    ideal, n = task.ideal_outputs(y, SCALE).to(y.device), task.num_outputs
    uniform = _uniform_shares(task)
    moved = ideal - 2 * SCALE
    invariant = math.isclose(
        task.expected_loss(ideal.cpu(), uniform),
        task.expected_loss(moved.cpu(), uniform),
        rel_tol=1e-6,
    )
    for outputs, form in [(ideal, "right answers"), (moved, "right answers with negative logits")]:
        loss = ask(outputs, y).loss
        share = (loss - best) / (flat - best)
        if abs(share) <= limit or (outputs is moved and not invariant):
            continue
        squashed = (math.log(math.e + n - 1) - 1, math.log(math.e + (n - 1) * math.e**0.5) - 1)
        causes = [
            (loss < best - 1e-3, "the sign is flipped, or NLL is taken of raw logits"),
            (
                any(math.isclose(loss, value, rel_tol=0.02) for value in squashed),
                "a softmax or sigmoid stands before the loss",
            ),
            (loss > SCALE / 2, "labels are changed or reordered before the loss"),
            (outputs is moved, "a ReLU stands between the model and the loss"),
            (True, "a softmax, a scale or another class order before the loss"),
        ]
        because = f"{form} cost {loss:.4g} instead of {best:.4g}"
        cause = next(text for holds, text in causes if holds)
        yield Finding(share, limit, because, (f"{cause} (in {_where(task, outputs, y, loss)})",))
        return


def _uniform(task, ask: Ask, y, flat: float, limit: float) -> Iterator[Finding]:
    outputs = torch.zeros(len(y), task.num_outputs, device=y.device)
    loss = ask(outputs, y).loss
    if abs(loss / flat - 1) <= limit:
        return
    causes = [
        (abs(loss / flat / len(y) - 1) < 0.05, "the loss is summed over rows, not averaged"),
        (abs(loss / flat * task.num_outputs - 1) < 0.05, "the mean also runs over the classes"),
        (abs(loss / math.log(len(y)) - 1) < 0.05, "softmax runs over the batch axis"),
        (abs(loss + flat) < 0.05 * flat, "the sign of the loss is flipped"),
        (abs(loss) < 0.01 * flat, "NLL is taken of raw logits"),
        (abs(loss - math.log(2)) < 0.01, "a binary loss stands where classes exclude each other"),
        (True, "another loss, a weight or a factor than the task declares"),
    ]
    cause = next(text for holds, text in causes if holds)
    where = _where(task, outputs, y, loss)
    yield Finding(
        loss / flat,
        [1 - limit, 1 + limit],
        f"outputs without opinion cost {loss:.4g} instead of {flat:.4g}",
        (f"{cause} (in {where})",),
    )


def _formula(task, ask: Ask, y, limit: float) -> Iterator[Finding]:
    """The same random outputs with every label once: the mean is exactly the task's formula."""
    n = task.num_outputs
    generator = torch.Generator().manual_seed(0)
    outputs = torch.randn(len(y) // n, n, generator=generator).mul(3).to(y.device)
    outputs = outputs.repeat_interleave(n, dim=0)
    expected = task.expected_loss(outputs.cpu(), _uniform_shares(task))
    loss = ask(outputs, y).loss
    if abs(loss / expected - 1) > limit:
        because = f"known outputs cost {loss:.4g} instead of {expected:.4g}"
        where = _where(task, outputs, y, loss)
        causes = (f"the loss differs from the one the task declares (in {where})",)
        yield Finding(loss / expected, [1 - limit, 1 + limit], because, causes)


def _doubled(task, ask: Ask, y, limit: float) -> Iterator[Finding]:
    generator = torch.Generator().manual_seed(1)
    outputs = torch.randn(len(y), task.num_outputs, generator=generator).to(y.device)
    once, twice = ask(outputs, y).loss, ask(torch.cat([outputs, outputs]), torch.cat([y, y])).loss
    if abs(twice - once) > limit * abs(once):
        because = f"every row twice costs {twice:.4g} instead of {once:.4g}"
        causes = ("the loss is summed over rows", "the loss runs over the batch axis")
        yield Finding(twice / once, [1 - limit, 1 + limit], because, causes)


def _classes(task, ask: Ask, y, limit: float) -> Iterator[Finding]:
    """At outputs without opinion, each class pulls as hard as declared."""
    n = task.num_outputs
    gradient = ask(torch.zeros(len(y), n, device=y.device), y).gradient
    pull = torch.stack([gradient[y == c].norm(dim=1).mean() for c in range(n)]).cpu().double()
    declared = getattr(task, "class_weights", None)
    weights = torch.ones(n) if declared is None else torch.as_tensor(declared).cpu()
    relative = pull / weights.double()
    ratio = (relative.max() / relative.min()).item() if relative.min() > 0 else math.inf
    if ratio <= limit:
        return
    weakest = int(relative.argmin())
    if relative.max() == 0:
        because, causes = "outputs get no gradient", ("the outputs are detached before the loss",)
    else:
        because = f"class {task.class_names[weakest]} pulls {ratio:.3g} times less than another"
        causes = (
            "ignore_index is a real class" if relative.min() == 0 else "undeclared class weights",
            "class weights in another order",
        )
    yield Finding(ratio, limit, because, causes)


def _wrong(task, ask: Ask, y, flat: float) -> Iterator[Finding]:
    """A certain error costs more the surer it is, and still has a gradient."""
    wrong = F.one_hot((y + 1) % task.num_outputs, task.num_outputs).float()
    sure, surer = ask(wrong * SCALE, y), ask(wrong * 2 * SCALE, y)
    growth = (surer.loss - flat) / (sure.loss - flat) if sure.loss > flat else 0.0
    if growth < 1.5 or surer.gradient.norm() == 0:
        because = f"errors twice as sure cost {growth:.3g} times as much above the start"
        causes = ("the loss is clamped or bounded", "a softmax stands before the loss")
        yield Finding(growth, 1.5, because, causes)


def _rows(pipeline: Pipeline, num_models: int) -> Iterator[Finding]:
    """What the model hands to the loss, over several initialisations."""
    x = probe.few_rows(pipeline.train, 64)["x"]
    for make in (pipeline.make_model, functools.partial(probe.warmed, pipeline)):
        models = [make(seed).eval() for seed in range(num_models)]
        with torch.no_grad():
            made = [probe.forward(pipeline, model, x) for model in models]
        outputs = torch.cat(made)
        if outputs.min() != outputs.max():  # all equal: a last layer that starts at zero
            break
    lowest = outputs.min().item()
    if lowest < 0 or outputs.min() == outputs.max():
        return
    simplex = (outputs.sum(dim=1) - 1).abs().max().item() < 0.02  # bf16 keeps two digits
    columns = all((z.sum(dim=0) - 1).abs().max().item() < 0.02 for z in made)
    form = "sum to one per row" if simplex else "are never negative"
    cause = "the model ends in ReLU, sigmoid or another squashing: hand raw logits to the loss"
    if simplex:
        cause = "the model ends in softmax: hand raw logits to the loss"
    elif columns:
        cause = "the model ends in softmax over the batch axis"
    because = f"the model's outputs {form} (lowest {lowest:.3g} over {num_models} models)"
    yield Finding(lowest, 0.0, because, (cause,))
