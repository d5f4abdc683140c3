"""The schedule: the learning rate of every step of the project's own loop, in dry runs."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.optim import lr_scheduler

from . import Check, Finding, Pipeline, inconclusive, not_applicable, shut_if_any
from .dryrun import Trace, dry_run

RUNS = ((4, 7), (4, 3), (3, 3))  # epochs x batches: more batches, then more epochs, than another
CYCLICAL = (lr_scheduler.CyclicLR, lr_scheduler.CosineAnnealingWarmRestarts)
SAME = 1e-3  # of the base rate
MOVED = 0.05  # of the base rate


def schedule(
    pipeline: Pipeline,
    *,
    max_zero_share: float = 0.05,
    min_peak: float = 0.75,
    max_rises: int = 0,
) -> Check:
    """`fit` of three lengths on a few rows, with every gradient set to zero at the step: rates and
    modes are the real ones, and nothing can diverge.

    Open when there is one optimizer step per batch (per window, where batches are accumulated), the
    rate reaches its base within the first half, is below a thousandth of it in `max_zero_share` of
    the steps at most (and one), rises again `max_rises` times after it fell (a scheduler that is
    cyclical by its class may), all groups follow, a schedule per epoch does not depend on the
    number of batches, and every module is in training mode at every step. Rates are exact, so the
    limits hold in any precision.
    """
    name = "schedule"
    if pipeline.fit is None:
        return not_applicable(name, "The pipeline has no `fit`: hand over the whole loop.")
    if not isinstance(pipeline.make_optimizer(pipeline.make_model(0)), torch.optim.Optimizer):
        return inconclusive(name, "The optimizer is no torch optimizer: its steps cannot be seen.")
    traces = [dry_run(pipeline, *length) for length in RUNS]
    long, short, shortest = traces
    if not long.shares:
        causes = ("the loop never calls optimizer.step",)
        return Check(name, "shut", 0.0, 1.0, "steps", "No optimizer step in a whole run.", causes)
    found = [
        *_steps(pipeline, long),
        *_never_stepped(long),
        *_zero(traces, max_zero_share),
        *_rises(long, max_rises),
        *_wrong_unit(long, short),
        *_peak(traces, min_peak),
        *_groups(long),
        *_plateau(pipeline, long),
        *_modes(traces),
    ]
    peak = max(long.first)
    because = f"{len(long.shares)} steps in {long.num_epochs} epochs of {long.asked} batches; the "
    because += f"rate starts at {long.first[0]:.2g} of its base, peaks at {peak:.2g} and ends at "
    good = Check(name, "open", peak, min_peak, "", because + f"{long.first[-1]:.2g}.")
    if not found and (why := _doubts(long, short, shortest, min_peak)):
        return Check(name, "warn", peak, min_peak, "", f"{good.because[:-1]}; {why}.", (why,))
    return shut_if_any(found, good)


# ---- what shuts -------------------------------------------------------------------------------


def _steps(pipeline: Pipeline, trace: Trace) -> Iterator[Finding]:
    """One step per batch; where the loop accumulates batches, one per window, the last included."""
    made, handed, k = len(trace.shares), sum(trace.taken), pipeline.accumulate
    good = {handed}
    if k > 1:
        good |= {math.ceil(handed / k), sum(math.ceil(count / k) for count in trace.taken)}
    if made not in good:
        because = f"{made} optimizer steps for {handed} batches" + (f" in {k} parts" * (k > 1))
        causes = ("the step is made twice",) if made > handed else ("steps are skipped",)
        if k > 1 and made < handed:
            causes = ("the last window of accumulated batches is lost", *causes)
        yield Finding(float(made), float(min(good)), because, causes)
    left = [count for count in trace.taken if count < trace.asked]
    if left:
        because = f"the loop takes {left[0]} of the {trace.asked} batches of an epoch"
        yield Finding(float(left[0]), float(trace.asked), because, ("the loop breaks off early",))


def _constant(shares: Iterable[float]) -> bool:
    values = list(shares)
    return max(values) - min(values) < SAME


def _never_stepped(trace: Trace) -> Iterator[Finding]:
    idle = [s for s in trace.schedulers if getattr(s, "last_epoch", 1) <= 0]
    if idle and len(idle) == len(trace.schedulers) and _constant(trace.first):
        because = f"a {type(idle[0]).__name__} is built and never stepped: the rate stays constant"
        yield Finding(0.0, 1.0, because, ("scheduler.step() is missing",))


def _zero(traces: list[Trace], limit: float) -> Iterator[Finding]:
    for trace in traces:
        shares = trace.first
        count = sum(share < SAME for share in shares)
        if count - 1 > limit * len(shares):
            where = next(i for i, share in enumerate(shares, 1) if share < SAME)
            because = f"the rate is zero in {count} of {len(shares)} steps, from step {where} on"
            causes = ("the decay counts in the wrong unit", "the scheduler is stepped twice")
            yield Finding(count / len(shares), limit, because, causes)
            return


def _rises(trace: Trace, limit: int) -> Iterator[Finding]:
    if any(isinstance(scheduler, CYCLICAL) for scheduler in trace.schedulers):
        return
    rises, high, low = 0, 0.0, math.inf  # low: since the last peak
    for share in trace.first:
        if low < high - MOVED and share > low + MOVED:
            rises, high, low = rises + 1, share, math.inf
        high = max(high, share) if math.isinf(low) or low >= high - MOVED else high
        low = min(low, share) if share < high - MOVED else low
    if rises > limit:
        because = f"the rate rises again {rises} times after it fell"
        causes = ("the decay runs past its end: wrong unit, or stepped too often",)
        causes += ("a scheduler is built anew; if it is cyclical, raise max_rises",)
        yield Finding(float(rises), float(limit), because, causes)


def _wrong_unit(long: Trace, short: Trace) -> Iterator[Finding]:
    """Epochs alike, batches not: what changes once per epoch must not see the batches."""
    per_epoch = all(_constant(shares) for shares in long.by_epoch)
    if not per_epoch or _constant(long.first):
        return
    pairs = zip(long.by_epoch, short.by_epoch, strict=False)
    gap = max(abs(a[0] - b[0]) for a, b in pairs)
    if gap > SAME:
        because = f"the rate changes once per epoch and ends at {long.first[-1]:.2g} of its base "
        because += f"with {long.asked} batches, at {short.first[-1]:.2g} with {short.asked}"
        causes = ("the horizon is counted in steps while the scheduler is stepped per epoch",)
        yield Finding(gap, SAME, because, causes)


def _peak(traces: list[Trace], limit: float) -> Iterator[Finding]:
    long, short, shortest = traces
    if long.ended_early:
        return
    peak = max(long.first)
    if peak < limit and not (_fixed_steps(long, short) or _fixed_epochs(short, shortest)):
        because = f"the rate reaches {peak:.2g} of its base in the whole run"
        yield Finding(peak, limit, because, ("warm-up is longer than the run",))
    when = long.first.index(peak) + 1
    if peak >= limit and when > len(long.first) / 2 and not _doubtful(long, short, shortest):
        because = f"the rate peaks at step {when} of {len(long.first)}"
        yield Finding(float(when), len(long.first) / 2, because, ("warm-up takes half the run",))


def _groups(trace: Trace) -> Iterator[Finding]:
    """A group that stays while the first one moves is not scheduled."""
    still = [
        g
        for g in range(1, len(trace.shares[0]))
        if _constant(row[g] for row in trace.shares if len(row) > g)
    ]
    if still and not _constant(trace.first):
        because = f"the rates of {len(still)} of {len(trace.shares[0])} groups stay constant while "
        because += "the first one's moves"
        yield Finding(float(len(still)), 0.0, because, ("only the first group is scheduled",))


def _plateau(pipeline: Pipeline, trace: Trace) -> Iterator[Finding]:
    """A scheduler that waits for a plateau of what it is told: is its direction right?"""
    rows = getattr(trace.result, "epochs", None) or []
    metric = getattr(pipeline.task, "metric_name", "metric")
    for scheduler in trace.schedulers:
        if not isinstance(scheduler, lr_scheduler.ReduceLROnPlateau):
            continue
        told = [k for row in rows for k, v in row.items() if _close(v, scheduler.best)]
        losses = [key for key in told if key.endswith("loss")]
        scores = [key for key in told if key.endswith(metric)]
        way = getattr(pipeline.task, "metric_direction", "max") if scores else "min"
        if (losses or scores) and scheduler.mode != way:
            told = (losses or scores)[0]
            because = f"the scheduler waits for the {scheduler.mode}imum of {told}, whose best is "
            yield Finding(None, None, because + f"its {way}imum", ("mode of ReduceLROnPlateau",))


def _close(a: Any, b: Any) -> bool:
    return isinstance(a, float) and math.isclose(a, float(b), rel_tol=1e-9)


def _modes(traces: list[Trace]) -> Iterator[Finding]:
    for trace in traces:
        if any(trace.off):
            share = sum(trace.off) / len(trace.off)
            because = f"{share:.0%} of the steps run with modules that are not in training mode"
            causes = ("evaluation leaves eval() on and the loop does not call train() again",)
            yield Finding(share, 0.0, because, causes)
            return


# ---- what a short run cannot tell -------------------------------------------------------------


def _fixed_steps(long: Trace, short: Trace) -> bool:
    """The rate is a function of the step alone, whatever the length of the run."""
    pairs = zip(long.first, short.first, strict=False)
    return not _constant(long.first) and all(abs(a - b) < SAME for a, b in pairs)


def _fixed_epochs(short: Trace, shortest: Trace) -> bool:
    pairs = zip(short.by_epoch, shortest.by_epoch, strict=False)
    moves = not _constant(short.first)
    return moves and all(_constant([*a, *b]) for a, b in pairs)


def _doubtful(long: Trace, short: Trace, shortest: Trace) -> bool:
    return _fixed_steps(long, short) or _fixed_epochs(short, shortest)


def _doubts(long: Trace, short: Trace, shortest: Trace, limit: float) -> str:
    """In words, what to look at; empty if there is nothing."""
    peak, end = max(long.first), long.first[-1]
    if peak < limit:
        return "a warm-up of fixed length is not over by then: compare it with the real run"
    if peak > 1 + MOVED:
        return "the schedule goes above the rate that the optimizer was given"
    cyclical = any(isinstance(scheduler, CYCLICAL) for scheduler in long.schedulers)
    if _fixed_steps(long, short) and end < peak - MOVED and not (cyclical or long.ended_early):
        return "the decay is fixed in steps and ignores the length of the run"
    rows = [row for row in long.shares if len(row) > 1 and min(row) < max(row) - MOVED]
    if rows:
        return "groups do not keep their proportions"
    return ""
