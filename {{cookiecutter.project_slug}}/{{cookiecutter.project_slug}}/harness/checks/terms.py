"""A loss that is a sum: does every term of it teach the model anything?"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable

import torch

from ..instruments import NonFiniteLoss
from . import Check, Finding, Pipeline, not_applicable, probe, shut_if_any
from .summands import Recorder, Term, gradient_norm

ALIKE = 1e-5  # relative difference of the sum of the terms and the loss: float32 addition
NOTHING = 1e-6  # a gradient or value this small beside the largest is rounding


def loss_terms(
    pipeline: Pipeline,
    *,
    max_gradient_share: float = 0.9,
    max_target_share: float = 0.99,
    num_warm_steps: int = 3,
) -> Check:
    """Every term of a summed loss has a gradient in the model's parameters, and none drowns the
    others.

    The terms are those of `task.loss_terms(outputs, y)`, whose sum must be the loss, or else the
    scalars that the project's own step adds up. A term is dead when it has no gradient on a fresh
    model, after a few steps, and on weights thrown far off (a penalty may start at zero, a hinge
    may not be reached); one without any graph that is negative and knows no output of the model
    is a constant offset, not a term. Warns when a term that does not depend on the targets has more
    than `max_gradient_share` of the gradient norms, or one of several that do more than
    `max_target_share`. The limits are ratios of float32 norms and hold in bf16.
    """
    name = "loss_terms"
    missing = probe.lacking(name, pipeline, task=("loss",))
    if missing:
        return missing
    declared = hasattr(pipeline.task, "loss_terms")
    look = _declared if declared else _seen
    batches = probe.batches_of(pipeline.train, min_rows=64)
    first = look(pipeline, pipeline.make_model(0), batches[0])
    if first is None:
        return not_applicable(name, "The step calls no backward on a loss that can be followed.")
    if not declared and len(first) < 2:
        return not_applicable(name, "The loss has one term.")
    found = [] if not declared else _sum(pipeline, batches[0])
    found += _broken(first, _later_looks(pipeline, look, num_warm_steps))
    return _shares(name, first, found, max_gradient_share, max_target_share)


Looked = dict[str, Term] | None


def _seen(pipeline: Pipeline, model: torch.nn.Module, batch: dict) -> Looked:
    """The terms of one of the project's steps, by their place in the sum."""
    optimizer = pipeline.make_optimizer(model)
    with Recorder(model, batch) as recorder:
        pipeline.train_step(model, optimizer, batch)
    if recorder.terms is None:
        return None
    places = range(1, len(recorder.terms) + 1)
    count = len(recorder.terms)
    names = [f"term {place} of {count}" for place in places]
    return dict(zip(names, recorder.terms, strict=True))


def _declared(pipeline: Pipeline, model: torch.nn.Module, batch: dict) -> Looked:
    outputs, y = probe.forward(pipeline, model, batch["x"]), batch["y"]
    parameters = [p for p in model.parameters() if p.requires_grad]
    terms, others = pipeline.task.loss_terms(outputs, y), {}
    if len(y) > 1:
        others = pipeline.task.loss_terms(outputs.detach(), y.roll(1, 0))
    return {
        f"term {name!r}": Term(
            value=_value(term),
            gradient=gradient_norm(term, parameters) if torch.is_tensor(term) else 0.0,
            weight=1.0,
            connected=bool(torch.is_tensor(term) and term.requires_grad),
            from_model=True,
            from_targets=name not in others or _value(others[name]) != _value(term),
        )
        for name, term in terms.items()
    }


def _value(term: torch.Tensor | float) -> float:
    return term.item() if torch.is_tensor(term) else float(term)


def _sum(pipeline: Pipeline, batch: dict) -> list[Finding]:
    """The declared terms add up to the loss."""
    with torch.no_grad():
        outputs = probe.forward(pipeline, pipeline.make_model(0), batch["x"])
        total = sum(_value(term) for term in pipeline.task.loss_terms(outputs, batch["y"]).values())
        loss = pipeline.task.loss(outputs, batch["y"]).item()
    gap = abs(total - loss) / max(abs(loss), 1e-6)
    if gap <= ALIKE:
        return []
    because = f"the declared terms add up to {total:.6g}, the loss is {loss:.6g}"
    return [Finding(gap, ALIKE, because, ("a term is missing in the loss, or twice in it",))]


# ---- terms without a gradient -------------------------------------------------------------------


def _later_looks(pipeline: Pipeline, look: Callable, num_steps: int) -> Callable[[], list[dict]]:
    """The terms after a few steps, and with the weights thrown off, on other batches."""

    def looks() -> list[dict]:
        batches = [b for b, _ in zip(probe.endless(pipeline.train), range(3), strict=False)]
        models = [probe.warmed(pipeline, 1, num_steps)]
        models += [_thrown(pipeline, factor) for factor in (3.0, 30.0)]
        found = []
        for model, batch in zip(models, batches, strict=False):
            with contextlib.suppress(NonFiniteLoss):  # weights this far off say nothing
                found.append(look(pipeline, model, batch) or {})
        return [terms for terms in found if all(math.isfinite(t.gradient) for t in terms.values())]

    return looks


def _thrown(pipeline: Pipeline, factor: float) -> torch.nn.Module:
    model = pipeline.make_model(2)
    with torch.no_grad():
        for p in [p for p in model.parameters() if p.requires_grad and p.is_floating_point()]:
            size = p.abs().mean().clamp(min=0.01)
            p.add_(torch.randn_like(p) * size * factor)
    return model


def _broken(first: dict[str, Term], later: Callable[[], list[dict]]) -> list[Finding]:
    found = []
    for name, term in first.items():
        if not (math.isfinite(term.value) and math.isfinite(term.gradient)):
            because = (
                f"{name} of the loss has a gradient that is no number (value {term.value:.3g})"
            )
            causes = ("the root, the log or the norm of zero in that term",)
            found.append(Finding(None, None, because, causes))
    dead = [name for name in first if _is_dead(first, name)]
    looks = later() if dead else []
    for name in dead:
        if all(name in look and _is_dead(look, name) for look in looks):
            found.append(_dead(name, first[name]))
    return found


def _is_dead(terms: dict[str, Term], name: str) -> bool:
    term = terms[name]
    loss = max(abs(sum(t.value for t in terms.values())), 1e-12)
    gradient = max(t.gradient for t in terms.values())
    if not term.connected:
        return term.from_model or term.value >= -NOTHING * loss  # else a constant offset
    unseen = abs(term.value) <= NOTHING * loss * max(abs(term.weight), 1e-12)
    return term.gradient <= (NOTHING if unseen else NOTHING**2) * gradient


def _dead(name: str, term: Term) -> Finding:
    because = f"{name} of the loss ({term.value:.3g}) has no gradient in the model"
    causes = ["that term is computed without the model's outputs, or they are detached in it"]
    if abs(term.value) < 1e-6:
        causes.insert(0, "that term compares something with itself")
    return Finding(term.gradient, 0.0, because, tuple(causes))


# ---- terms that drown the others ----------------------------------------------------------------


def _shares(
    name: str, terms: dict[str, Term], found: list[Finding], max_free: float, max_target: float
) -> Check:
    pulls = {key: abs(term.weight) * term.gradient for key, term in terms.items()}
    free = [key for key, term in terms.items() if not term.from_targets]
    told = [key for key in terms if key not in free]
    total = sum(pulls.values()) or 1.0
    largest = max(pulls, key=pulls.get)
    limit = max_free if largest in free else max_target
    share = pulls[largest] / total
    because = (
        f"The loss has {len(terms)} terms, each with a gradient; {largest} has {share:.3g} of "
        "the sum of their norms"
    )
    good = Check(name, "open", share, limit, "share", because + ".")
    if found or share <= limit or len(terms) == 1 or (largest in told and len(told) == 1):
        return shut_if_any(found, good)
    because += " and does not depend on the targets" if largest in free else ""
    causes = ("that term's weight is too large", "another term's weight is too small")
    return Check(name, "warn", share, limit, "share", because + ".", causes)
