"""What the loss really asks for, target by target: which one, and whether at all.

Both checks read it off the gradient: outputs that say nothing take the place of the model's while
the project's own step runs, and the one output its loss pulls up is the target. So a shift or a
mask counts wherever it is made: in the data, the step or the loss.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from ..instruments import NonFiniteLoss
from . import Check, Finding, Pipeline, layout, not_applicable, probe, shut_if_any
from .epochs import batches


@dataclass(frozen=True)
class Asked:
    """One batch, and what the loss asks of outputs that say nothing."""

    batch: dict
    target: torch.Tensor  # as y, int64: the output that is pulled up
    counts: torch.Tensor  # as y, bool: whether any is


def asked(pipeline: Pipeline, batch: dict) -> Asked | None:
    """None when no gradient reaches the outputs, or they are not of the form of the targets."""
    model = pipeline.make_model(0)
    optimizer = pipeline.make_optimizer(model)
    given: list[torch.Tensor] = []

    def replace(outputs: torch.Tensor, call: int) -> torch.Tensor:
        given.append(torch.zeros_like(outputs, dtype=torch.float32).requires_grad_())
        return given[-1]

    with probe.seam(model, replace=replace, inputs=False):
        pipeline.train_step(model, optimizer, batch)
    if not given or any(outputs.grad is None for outputs in given):
        return None
    gradient = torch.cat([outputs.grad for outputs in given])
    axis = 1 if pipeline.task.targets == "dense" else -1
    pulled = gradient.argmin(dim=axis)
    if pulled.shape != batch["y"].shape:
        return None
    return Asked(batch, pulled, gradient.abs().sum(dim=axis) > 0)


# ---- which target -------------------------------------------------------------------------------


def target_offset(
    pipeline: Pipeline,
    *,
    min_agreement: float = 0.95,
    max_copied_share: float = 0.5,
    max_offset: int = 3,
    min_rows: int = 64,
) -> Check:
    """By how many positions the targets of token sequences lie ahead of the inputs.

    Over targets that count and are neither end nor padding: the offset at which the target at t is
    the input at t + offset, for `min_agreement` of them, must be +1 where outputs may only depend
    on what came before (`causal`); it also opens where it leads every other offset by 0.3. Targets
    that agree best with the input at their own place, above `max_copied_share`, shut. Ids are
    compared, so precision does not matter.
    """
    name = "target_offset"
    missing = probe.lacking(name, pipeline, targets=("tokens",))
    if missing:
        return missing
    pairs = []
    for batch in probe.batches_of(pipeline.train, min_rows=min_rows):
        ids, found = _ids(batch), asked(pipeline, batch)
        if ids is None or found is None:
            because = "Inputs and targets are not ids of one length, position by position."
            return not_applicable(name, because)
        pairs.append((ids, found))
    offsets = range(-max_offset, max_offset + 1)
    agreement = {k: _agreement(pipeline.task, pairs, k) for k in offsets}
    if agreement[1] >= min_agreement:
        because = f"{agreement[1]:.0%} of the targets are the input of the next position."
        return Check(name, "open", agreement[1], min_agreement, "share", because)
    best = max(offsets, key=lambda k: agreement[k])
    others = max(share for k, share in agreement.items() if k != best)
    clear = agreement[best] >= min_agreement or agreement[best] - others > 0.3
    copied = agreement[0] > max_copied_share and agreement[0] >= agreement[best]
    if best == 1 and clear:
        because = f"{agreement[1]:.0%} of the targets are the input of the next position, more "
        because += "than at any other offset."
        return Check(name, "open", agreement[1], min_agreement, "share", because)
    if not clear and not copied:
        because = f"Targets are not the inputs moved along: at best {agreement[best]:.0%} agree "
        return not_applicable(name, because + f"(at an offset of {best:+d}).")
    because = f"{agreement[best]:.0%} of the targets are the input at an offset of {best:+d}, "
    because += f"{agreement[1]:.0%} that of the next position."
    verdict = "shut" if getattr(pipeline.task, "causal", False) else "warn"
    return Check(name, verdict, agreement[best], min_agreement, "share", because, _moved(best))


def _moved(offset: int) -> tuple[str, ...]:
    if offset == 0:
        return ("labels are not shifted: the target is the input itself",)
    if offset == 2:
        return ("shifted twice: by the data and again by the model, the step or the loss",)
    if offset < 0:
        return ("shifted backwards: the target is an input that was already seen",)
    return (f"shifted by {offset} positions instead of one",)


def _ids(batch: dict) -> torch.Tensor | None:
    """The part of x that holds one id per target; masks (two values or fewer) are none."""
    for part in probe.tensors(batch["x"]).values():
        whole = not part.is_floating_point() and part.dtype != torch.bool
        if whole and part.shape == batch["y"].shape and len(part.unique()) > 2:
            return part
    return None


def _agreement(task: Any, pairs: list[tuple[torch.Tensor, Asked]], offset: int) -> float:
    """Share of targets equal to the input `offset` positions on; 0 where there are none."""
    same = total = 0
    aside = {getattr(task, "pad_id", None), getattr(task, "end_id", None)} - {None}
    for ids, found in pairs:
        length = ids.shape[1] - abs(offset)
        if length < 1:
            continue
        start = max(-offset, 0)
        here = slice(start, start + length)
        there = slice(start + offset, start + offset + length)
        counted = found.counts[:, here].clone()
        for token in aside:
            counted &= (found.target[:, here] != token) & (ids[:, there] != token)
        same += int((found.target[:, here] == ids[:, there])[counted].sum())
        total += int(counted.sum())
    return same / total if total else 0.0


# ---- whether it counts --------------------------------------------------------------------------


def supervised_share(
    pipeline: Pipeline,
    *,
    max_idle_rows: float = 0.5,
    max_pad_share: float = 0.05,
    max_lost_share: float = 0.01,
    max_expected_gap: float = 0.1,
    max_batches: int = 4,
) -> Check:
    """Which share of the targets has a loss, where the task says that not all have.

    Every batch has some; rows without any are at most `max_idle_rows` (1 % already warns); runs of
    padding are at most `max_pad_share` of what is asked for; at most `max_lost_share` of the
    targets that count have no gradient, and at most as many of the ignored have one; the end token
    is asked for; the share is within `max_expected_gap` of `task.expected_supervised_share`, if
    declared. A gradient is zero or not in fp32 and bf16 alike.
    """
    name = "supervised_share"
    missing = probe.lacking(name, pipeline, targets=layout.CLASSES)
    task = pipeline.task
    declared = [n for n in ("ignore_index", "pad_id", "end_id") if _has(task, n)]
    if missing or not declared:
        because = "The task declares no ignore_index, pad_id or end_id: every target counts."
        return missing or not_applicable(name, because)
    y = probe.labels(pipeline.train)
    marked = layout.supervised(task, y)
    idle = 1 - marked.reshape(len(y), -1).any(dim=1).double().mean().item()
    read = list(batches(copy.copy(pipeline.train))) if idle else []
    empty = sum(not layout.supervised(task, batch["y"]).any() for batch in read)
    found: list[Finding] = []
    if empty:
        because = f"{empty} of {len(read)} batches have no target that counts"
        causes = ("truncation cuts the answers off", "every target is marked as ignored")
        found.append(Finding(float(empty), 0.0, because, causes))
    elif idle > max_idle_rows:
        because = f"{idle:.0%} of the rows have no target that counts"
        found.append(Finding(idle, max_idle_rows, because, ("truncation cuts the answers off",)))
    seen = [] if empty else _asked_of(pipeline, max_batches, found)
    share = marked.double().mean().item()
    if seen:
        counts = torch.cat([s.counts.flatten() for s in seen])
        share = counts.double().mean().item()
        found += _lost(task, seen, max_lost_share)
        found += _padding(task, seen, max_pad_share)
    found += _end(task, y[marked])
    expected = getattr(task, "expected_supervised_share", None)
    if expected is not None and abs(share - expected) > max_expected_gap:
        because = f"{share:.0%} of the targets count where {expected:.0%} are declared to"
        found.append(Finding(share, expected, because, ("the mask of the targets is lost",)))
    because = f"{share:.1%} of the targets have a loss, some in every batch"
    good = Check(name, "open", share, None, "share", because + ".")
    return shut_if_any(found, _doubts(task, good, idle, marked, seen))


def _has(task: Any, name: str) -> bool:
    return getattr(task, name, None) is not None


def _asked_of(pipeline: Pipeline, max_batches: int, found: list[Finding]) -> list[Asked]:
    """The first batches, asked; a loss that is not finite on outputs of zero is a finding."""
    seen = []
    for batch in probe.batches_of(pipeline.train, min_rows=max_batches * _batch_rows(pipeline)):
        try:
            seen.append(asked(pipeline, batch))
        except NonFiniteLoss as error:
            because = f"on outputs of zero {error}"
            found.append(Finding(None, None, because, ("every target of a batch is ignored",)))
            return []
    return [s for s in seen if s is not None]


def _batch_rows(pipeline: Pipeline) -> int:
    return len(probe.batches_of(pipeline.train, min_rows=1)[0]["y"])


def _lost(task: Any, seen: list[Asked], limit: float) -> Iterator[Finding]:
    """Targets the task counts and the loss does not, and the other way round."""
    marked = torch.cat([layout.supervised(task, s.batch["y"]).flatten() for s in seen])
    counts, y = _flat(seen, "counts"), torch.cat([s.batch["y"].flatten() for s in seen])
    lost = (marked & ~counts).sum().item() / max(1, marked.sum().item())
    never = [
        token for token in y[marked & ~counts].unique().tolist() if not counts[y == token].any()
    ]
    ignored = (~marked & counts).sum().item() / max(1, (~marked).sum().item())
    end = getattr(task, "end_id", None)
    if end in never:
        because = f"the end token {end} is a target and never has a gradient"
        yield Finding(0.0, None, because, ("the loss ignores the end token (as padding?)",))
    elif lost > limit:
        because = f"{lost:.1%} of the targets that should count have no gradient"
        because += f" (never: {', '.join(map(str, never[:5]))})" if never else ""
        yield Finding(lost, limit, because, ("the loss ignores another id than the task declares",))
    if ignored > limit:
        because = f"{ignored:.0%} of the targets to be ignored have a gradient"
        yield Finding(ignored, limit, because, ("the loss does not know the ignore_index",))


def _flat(seen: list[Asked], name: str) -> torch.Tensor:
    return torch.cat([getattr(s, name).flatten() for s in seen])


def _pads(task: Any, seen: list[Asked]) -> tuple[float, float]:
    """Shares of what is asked for: padding that follows padding, and padding at all."""
    runs = alone = total = 0
    for s in seen if task.targets == "tokens" and _has(task, "pad_id") else ():
        pads = (s.target == task.pad_id) & s.counts
        runs += int((pads[:, 1:] & pads[:, :-1]).sum())
        alone += int(pads.sum())
        total += int(s.counts.sum())
    return runs / max(1, total), alone / max(1, total)


def _padding(task: Any, seen: list[Asked], limit: float) -> Iterator[Finding]:
    """One padding token may stand for the end; a run of them is padding."""
    runs, _ = _pads(task, seen)
    if runs > limit:
        because = f"{runs:.0%} of the targets with a loss are padding after padding"
        yield Finding(runs, limit, because, ("padding is counted as an ordinary target",))


def _end(task: Any, told: torch.Tensor) -> Iterator[Finding]:
    if task.targets != "tokens" or not _has(task, "end_id"):
        return
    if not (told == task.end_id).any():
        because = f"the end token {task.end_id} is never a target that counts"
        causes = ("the end is masked as padding", "no end token is appended")
        yield Finding(0.0, None, because, causes)


def _doubts(task: Any, good: Check, idle: float, marked: torch.Tensor, seen: list[Asked]) -> Check:
    """What is not wrong for certain only warns."""
    _, alone = _pads(task, seen)
    said = [
        (idle > 0.01, f"{idle:.1%} of the rows have no target that counts", "answers are cut off"),
        (
            alone > 0 and task.pad_id != getattr(task, "end_id", None),
            f"{alone:.1%} of the targets with a loss are padding",
            "padding is counted as an ordinary target",
        ),
        (
            _has(task, "ignore_index") and task.targets == "tokens" and bool(marked.all()),
            f"none is ignored although the task names {getattr(task, 'ignore_index', None)} for it",
            "the mask of the targets is lost",
        ),
    ]
    for holds, because, cause in said:
        if holds:
            because = f"{good.because[:-1]}; {because}."
            return Check(good.name, "warn", good.value, None, good.unit, because, (cause,))
    return good
