"""The parameters: does every trainable tensor take part, and no other?"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook

from ..instruments import NonFiniteLoss
from . import Check, Finding, Pipeline, probe, shut_if_any


@dataclass
class _Record:
    """What happened to one trainable tensor over the steps."""

    start: torch.Tensor
    gradient: float = 0.0  # highest absolute value
    reached: bool = False  # by a gradient, be it zero
    used: bool = False  # its module is called
    finite: bool = True
    changed: bool = False
    handles: list = field(default_factory=list)


@dataclass(frozen=True)
class _Observed:
    """A fresh model after a few steps, and what was seen of its parameters."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    records: dict[str, _Record]
    frozen: dict[str, torch.Tensor]  # as they started
    hidden: list[str]  # parameters that take part and that the model does not list
    output_layer: list[nn.Parameter]  # of the last module with parameters that was called


def trainable_parameters(pipeline: Pipeline, *, num_steps: int = 3) -> Check:
    """After `num_steps` of the project's steps every trainable tensor is in exactly one group of
    the optimizer, got a finite gradient that is not zero, and changed; no module that takes part
    hides its parameters; what is frozen was declared so (`Pipeline.frozen`).
    """
    name = "trainable_parameters"
    seen = _observe(pipeline, num_steps, scale=1.0)
    model, records = seen.model, seen.records
    if any(r.gradient > 0 and not r.changed for r in records.values()):
        # A rate too small for the resolution of a weight is no broken wire: look again, larger.
        for key, record in _observe(pipeline, num_steps, scale=1e3).records.items():
            records[key].changed |= record.changed
    frozen = [key for key, p in model.named_parameters() if not p.requires_grad]
    found = [
        *_grouped(model, seen.optimizer),
        *_moved(records),
        *_hidden(seen.hidden),
        *_frozen(pipeline, seen, frozen),
        *_by_mode(pipeline),
    ]
    because = (
        f"All {len(records)} trainable tensors are in one group, got a gradient and changed in "
        f"{num_steps} steps"
    )
    good = Check(name, "open", 0.0, 0.0, "tensors", because + ".")
    if not found and frozen and pipeline.frozen is None:
        because += f"; {len(frozen)} are frozen without being declared ({_few(frozen)})."
        causes = ("requires_grad was switched off by a wrong name test", "declare what is frozen")
        return Check(name, "warn", float(len(frozen)), 0.0, "tensors", because, causes)
    if not found and (pair := _copied(pipeline.make_model(0))):
        because += f"; {pair[0]} and {pair[1]} start equal and are two tensors."
        causes = ("weights meant to be tied were copied", "or tied ones were untied")
        return Check(name, "warn", 1.0, 0.0, "tensors", because, causes)
    return shut_if_any(found, good)


def _observe(pipeline: Pipeline, num_steps: int, *, scale: float) -> _Observed:
    """Run the steps on a fresh model and watch its parameters, and the modules that are called."""
    model = pipeline.make_model(0).train()
    optimizer = pipeline.make_optimizer(model)
    probe.set_rate(optimizer, probe.base_rate(optimizer) * scale)
    records = {}
    frozen = {k: p.detach().clone() for k, p in model.named_parameters() if not p.requires_grad}
    for key, parameter in model.named_parameters():
        if parameter.requires_grad:
            record = _Record(parameter.detach().clone())
            record.handles.append(parameter.register_hook(_watcher(record)))
            records[key] = record
    hidden: dict[str, int] = {}
    used: set[int] = set()
    last: list[nn.Parameter] = []
    known = {id(p) for p in model.parameters()}
    known |= {id(p) for group in optimizer.param_groups for p in group["params"]}

    def called(module: nn.Module, args: tuple) -> None:
        own = [p for p in module.parameters(recurse=False) if id(p) in known]
        last[:] = own or last
        for key, parameter in module.named_parameters(recurse=False):
            used.add(id(parameter))
            if parameter.requires_grad and id(parameter) not in known:
                hidden[f"{type(module).__name__}.{key}"] = id(parameter)

    handle = register_module_forward_pre_hook(called)
    try:
        for batch in itertools.islice(probe.endless(pipeline.train), num_steps):
            pipeline.train_step(model, optimizer, batch)
    except NonFiniteLoss:
        if scale == 1.0:
            raise
    finally:
        handle.remove()
    for key, parameter in model.named_parameters():
        if key in records:
            records[key].changed = not torch.equal(parameter.detach(), records[key].start)
            records[key].used = id(parameter) in used
            records[key].handles.pop().remove()
    unseen = [*hidden, *_unregistered(model, known)]
    return _Observed(model, optimizer, records, frozen, unseen, last)


def _watcher(record: _Record) -> Callable[[torch.Tensor], None]:
    def watch(gradient: torch.Tensor) -> None:
        dense = gradient.detach().to_dense() if gradient.is_sparse else gradient.detach()
        record.gradient = max(record.gradient, dense.abs().max().nan_to_num(0.0).item())
        record.reached = True
        record.finite &= bool(torch.isfinite(dense).all())

    return watch


def _unregistered(model: nn.Module, known: set[int]) -> list[str]:
    """Parameters kept in plain lists and dicts of a module, where neither the optimizer nor `.to`
    finds them."""
    found = []
    for path, module in model.named_modules():
        for attribute, value in vars(module).items():
            if attribute.startswith("_"):
                continue
            for parameter in _inside(value):
                if parameter.requires_grad and id(parameter) not in known:
                    found.append(f"{path}.{attribute}".lstrip("."))
    return list(dict.fromkeys(found))


def _inside(value: Any) -> Iterator[nn.Parameter]:
    if isinstance(value, nn.Parameter):
        yield value
    elif isinstance(value, nn.Module):
        yield from value.parameters()
    elif isinstance(value, (list, tuple, set)):
        for item in value:
            yield from _inside(item)
    elif isinstance(value, dict):
        yield from _inside(list(value.values()))


def _few(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _grouped(model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[Finding]:
    held = [id(p) for group in optimizer.param_groups for p in group["params"]]
    named = {key: p for key, p in model.named_parameters() if p.requires_grad}
    absent = [key for key, p in named.items() if id(p) not in held]
    twice = [key for key, p in named.items() if held.count(id(p)) > 1]
    foreign = len(set(held) - {id(p) for p in model.parameters()})
    if not named:
        yield Finding(0.0, 1.0, "the model has no trainable tensor", ("everything is frozen",))
    if absent:
        because = f"{len(absent)} of {len(named)} trainable tensors are in no group of the "
        causes = ("a group was forgotten", "the optimizer was built before a layer was replaced")
        causes = causes[::-1] if foreign else causes
        yield Finding(float(len(absent)), 0.0, because + f"optimizer ({_few(absent)})", causes)
    if twice:
        because = f"{len(twice)} tensors are in two groups ({_few(twice)})"
        yield Finding(float(len(twice)), 0.0, because, ("groups overlap",))
    if foreign:
        because = f"the optimizer holds {foreign} tensors that are not the model's"
        yield Finding(float(foreign), 0.0, because, ("the optimizer was built on another model",))


def _moved(records: dict[str, _Record]) -> Iterator[Finding]:
    """Gradients that cancel by design (a bias before a norm) are rounding noise: they count as
    gradients, but need not move a weight."""
    highest = max((r.gradient for r in records.values()), default=0.0)
    broken = [key for key, r in records.items() if not r.finite]
    silent = [key for key, r in records.items() if r.finite and r.gradient == 0]
    still = [key for key, r in records.items() if not r.changed and r.gradient > 1e-6 * highest]
    if broken:
        because = f"{len(broken)} tensors got a gradient that is not finite ({_few(broken)})"
        yield Finding(float(len(broken)), 0.0, because, ("overflow", "log or root of zero"))
    if silent:
        because = f"{len(silent)} of {len(records)} trainable tensors got no gradient "
        because += f"({_few(silent)})"
        dead = ("units are dead from the start", "everything starts at zero")
        cut = ("the graph is cut (detach, no_grad, argmax, .item)", "a layer is never used")
        cut = cut if any(records[key].used for key in silent) else cut[::-1]
        causes = dead if all(records[key].reached for key in silent) else cut
        yield Finding(float(len(silent)), 0.0, because, causes)
    if still:
        because = f"{len(still)} of {len(records)} tensors got a gradient and did not change "
        because += f"({_few(still)})"
        causes = (
            "the optimizer does not hold them, or with rate 0",
            "zero_grad stands between backward and step",
        )
        yield Finding(float(len(still)), 0.0, because, causes)


def _hidden(names: list[str]) -> Iterator[Finding]:
    if names:
        because = f"{len(names)} parameters take part that the model does not list ({_few(names)})"
        causes = ("layers are kept in a plain list or dict instead of nn.ModuleList",)
        yield Finding(float(len(names)), 0.0, because, causes)


def _frozen(pipeline: Pipeline, seen: _Observed, frozen: list[str]) -> Iterator[Finding]:
    """Against the declaration; without one, only an output layer that stays as it started."""
    if pipeline.frozen is None:
        if (
            seen.records
            and seen.output_layer
            and not any(p.requires_grad for p in seen.output_layer)
        ):
            because = f"the output layer is frozen while {len(seen.records)} other tensors train"
            causes = ("a wrong name test for freezing", "declare what is frozen")
            yield Finding(float(len(frozen)), 0.0, because, causes)
        return
    declared = [key for key, _ in seen.model.named_parameters() if key.startswith(pipeline.frozen)]
    if set(declared) != set(frozen):
        wrong = sorted(set(declared) ^ set(frozen))
        because = f"{len(wrong)} tensors are frozen or free against the declaration ({_few(wrong)})"
        yield Finding(float(len(wrong)), 0.0, because, ("a wrong name test for freezing",))
    named = dict(seen.model.named_parameters())
    moved = [k for k in declared if k in seen.frozen and not torch.equal(named[k], seen.frozen[k])]
    if moved:
        because = f"{len(moved)} tensors that are declared frozen change ({_few(moved)})"
        causes = ("freezing takes effect after the optimizer was built", "the step unfreezes them")
        yield Finding(float(len(moved)), 0.0, because, causes)


def _by_mode(pipeline: Pipeline) -> Iterator[Finding]:
    """What is frozen must not depend on eval() and train()."""
    model = pipeline.make_model(0)
    before = {key: p.requires_grad for key, p in model.named_parameters()}
    model.eval()
    model.train()
    turned = [key for key, p in model.named_parameters() if p.requires_grad != before.get(key)]
    if turned:
        because = f"train() and eval() freeze or free {len(turned)} tensors ({_few(turned)})"
        causes = ("freezing takes effect only in train(): freeze when the model is built",)
        yield Finding(float(len(turned)), 0.0, because, causes)


def _copied(model: nn.Module) -> tuple[str, str] | None:
    """An embedding and a linear layer that start with equal values and share no memory."""
    tables = {f"{k}.weight": m.weight for k, m in model.named_modules() if _is(m, nn.Embedding)}
    layers = {f"{k}.weight": m.weight for k, m in model.named_modules() if _is(m, nn.Linear)}
    for a, table in tables.items():
        for b, weight in layers.items():
            if table is not weight and table.shape == weight.shape and torch.equal(table, weight):
                return a, b
    return None


def _is(module: nn.Module, kind: type) -> bool:
    return isinstance(module, kind) and module.weight.numel() > 1
