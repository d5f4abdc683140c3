"""What the loaders hand out over whole epochs, and whether reading changes what is stored."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch

from . import Check, Finding, Pipeline, not_applicable, probe, shut_if_any
from .augmentation import augmentation_frozen, draws_of_one_row, drifting, one_draw, repeated_draws
from .epochs import Epoch, declared_sampler, epoch, listed, own
from .mixing import label_mix, order
from .pairing import rows_paired
from .store import as_recorded, prepared_alike, raw_kept, rows_kept


def loader(
    pipeline: Pipeline,
    *,
    max_rows: int = 50_000,
    max_repeated_rows: float = 0.0,
    max_mix_ratio: float = 3.0,
    max_drift_sd: float = 0.1,
) -> Check:
    """Two epochs of a copy of each loader (three where it augments), at most `max_rows` rows each.

    Each row number stands for one record, and rows keep its input and label. Training: every
    listed row once per epoch, but for less than one dropped batch, never the same
    rows; another order each epoch; batches with the labels of the whole (chi-square per degree of
    freedom at most `max_mix_ratio`, or within 6 standard units); as many batches as `len` says. A
    loader that draws with replacement says so: `sampler = "weighted"`, `"infinite"` or
    `"streamed"`, or `replacement = True`; then it must reach every class, not draw the rare ones
    less, and (replacement) reach as many rows as chance does. Where `loader.augment` is set: the
    same row comes out differently in each epoch and batch, finite, and the data does not drift by
    more than `max_drift_sd` sd. Validation: every listed row once, the same inputs each time.
    Exact comparisons: the same in fp32 and bf16.
    """
    name = "loader"
    num_epochs = 3 if getattr(pipeline.train, "augment", None) is not None else 2
    train, passes = own(pipeline.train), own(pipeline.validation)
    epochs = [epoch(train, max_rows) for _ in range(num_epochs)]
    held_out = [epoch(passes, max_rows) for _ in range(2)]
    if any(one.ids is None for one in (*epochs, *held_out)):
        return not_applicable(name, 'Batches carry no "id": give each row its number.')
    if any(not len(one.ids) for one in (*epochs, *held_out)):
        return shut_if_any([_empty(epochs)], Check(name, "open", None, None, "", ""))
    draws = draws_of_one_row(pipeline.train)
    found = [
        *_numbered(pipeline.train, "training"),
        *_numbered(pipeline.validation, "validation"),
        *_length(pipeline.train, epochs[0]),
        *_coverage(pipeline.train, epochs, max_repeated_rows),
        *order(pipeline.train, epochs),
        *label_mix(pipeline, epochs, max_mix_ratio),
        *_validation(pipeline.validation, held_out),
        *rows_paired(pipeline),
        *augmentation_frozen(pipeline.train, epochs),
        *repeated_draws(draws),
        *drifting(epochs, max_drift_sd),
    ]
    good = Check(name, "open", 0.0, max_repeated_rows, "rows", _in_words(pipeline, epochs))
    checked = shut_if_any(found, good)
    if checked.verdict == "open":
        doubts = [*one_draw(draws), *_seeded(pipeline.train, epochs[0], max_rows)]
        return doubts[0] if doubts else checked
    return checked


def record_store(pipeline: Pipeline, *, max_rows: int = 32, min_likeness: float = 0.5) -> Check:
    """Reading leaves the data as it is: the rows of both loaders (x, y, id) are the same bytes
    after an epoch; `pipeline.raw(row)` gives the same record again, also after `pipeline.prepare`
    and an epoch; preparing the same records again gives the same tensors (without `raw`, where mean
    or sd moved: else `split_parity` judges it). Where `preprocessing` of a raw record has as many
    values as its row, all rows are made of the record they name: their correlation over the average
    row is at least `min_likeness`, and where some are made exactly so, fewer than 1 in 20 are not.
    The records compared are put back as they were first read.
    """
    name = "record_store"
    stored = any(hasattr(side, "rows") for side in (pipeline.train, pipeline.validation))
    if pipeline.raw is None and not stored:
        because = "The loaders keep no `rows` and there is no `raw`: hand over one of them."
        return not_applicable(name, because)
    found = [*raw_kept(pipeline, max_rows)] or [*as_recorded(pipeline, min_likeness)]
    found += [
        *rows_kept(pipeline.train, "training"),
        *rows_kept(pipeline.validation, "validation"),
    ]
    if pipeline.raw is None and not found:
        found = list(prepared_alike(pipeline))
    records = "" if pipeline.raw is None else " and what `raw` gives of its records"
    because = f"The stored rows{records} are the same after an epoch as before."
    return shut_if_any(found, Check(name, "open", 0.0, 0.0, "values", because))


# ---- clauses of `loader` ------------------------------------------------------------------------


def _empty(epochs: list[Epoch]) -> Finding:
    where = "training" if any(not len(one.ids) for one in epochs) else "validation"
    because = f"an epoch of the {where} loader hands out no row"
    return Finding(0.0, None, because, ("an iterator that ends after its first epoch",))


def _numbered(side: Any, split: str) -> Iterator[Finding]:
    """An id that occurs again is the same record again (oversampling), not another one."""
    ids = listed(side)
    if ids is None or len(ids.unique()) == len(ids):
        return
    codes, place = torch.unique(ids, return_inverse=True)
    first = torch.empty(len(codes), dtype=torch.long)
    first[place.flip(0)] = torch.arange(len(ids)).flip(0)  # the first row of each number
    wrong = torch.zeros(len(ids), dtype=torch.bool)
    for values in probe.tensors(side.rows["x"]).values():
        values = values.cpu()
        wrong |= probe.rows_differ(values, values[first[place]])
    if wrong.any():
        because = f"{int(wrong.sum())} {split} rows have the number of another record"
        causes = ("row numbers overflow a small integer type, or are counted per file",)
        yield Finding(float(wrong.sum()), 0.0, because, causes)


def _length(side: Any, first: Epoch) -> Iterator[Finding]:
    try:
        promised = len(side)
    except TypeError:  # a stream: it has no length and says so
        return
    if first.complete and promised != len(first.sizes):
        because = f"len(loader) says {promised} batches, {len(first.sizes)} come"
        causes = ("drop_last in one place only", "an epoch that ends early")
        yield Finding(float(len(first.sizes)), float(promised), because, causes)


def _coverage(side: Any, epochs: list[Epoch], limit: float) -> Iterator[Finding]:
    """Rows drawn twice, and rows that no epoch reached."""
    if declared_sampler(side) != "plain":
        yield from _drawn(side, epochs)
        return
    known = listed(side)
    ids = known if known is not None else torch.cat([one.ids for one in epochs]).unique()
    for number, one in enumerate(epochs, start=1):
        strange = ~torch.isin(one.ids, ids)
        if strange.any():
            because = f"{int(strange.sum())} ids of a training epoch belong to no listed row"
            yield Finding(float(strange.sum()), 0.0, because, ("batches change their ids",))
            return
        repeated = len(one.ids) - len(one.ids.unique()) - (len(ids) - len(ids.unique()))
        if repeated > limit:
            because = f"{repeated} of {len(one.ids)} rows of epoch {number} are repeats"
            causes = (
                "the sampler repeats rows",
                'drawing with replacement: say so by sampler = "weighted" on the loader',
            )
            yield Finding(float(repeated), limit, because, causes)
            return
    if known is None or not all(one.complete for one in epochs):
        return
    missing = [ids[~torch.isin(ids, one.ids)] for one in epochs]
    most = max(len(rows) for rows in missing)
    always = missing[0][torch.isin(missing[0], missing[1])]
    dropped = max(epochs[0].sizes) - 1  # less than a batch: drop_last
    if most > dropped or (len(always) == most >= 3):
        count = most if most > dropped else len(always)
        because = f"{count} of {len(ids)} listed rows are not reached in an epoch"
        because += f", {len(always)} of them never"
        causes = ("the sampler leaves rows out", "an epoch that ends early")
        yield Finding(float(count), 0.0, because, causes)


def _drawn(side: Any, epochs: list[Epoch]) -> Iterator[Finding]:
    """The law of a sampler with replacement: every class is reached, rare ones no less than they
    occur, and drawing uniformly reaches n (1 - exp(-draws / n)) rows."""
    rows = getattr(side, "rows", None)
    if rows is None:
        return
    draws, count = torch.cat([one.ids for one in epochs]), len(rows["y"])
    yield from _classes_drawn(rows["y"], torch.cat([one.y for one in epochs]))
    if declared_sampler(side) == "replacement":
        reached, rate = len(draws.unique()), len(draws) / count
        expected = count * (1 - math.exp(-rate))
        if reached < 0.8 * expected:
            because = f"{len(draws)} draws reach {reached} rows where chance reaches {expected:.0f}"
            yield Finding(float(reached), expected, because, ("the sampler favours some rows",))


def _classes_drawn(stored: torch.Tensor, drawn: torch.Tensor) -> Iterator[Finding]:
    if stored.ndim != 1 or stored.is_floating_point():
        return
    stored, drawn = stored.cpu(), drawn.cpu()
    size = int(max(stored.max(), drawn.max())) + 1
    have = torch.bincount(stored, minlength=size).double()
    got = torch.bincount(drawn, minlength=size).double()
    expected = have / have.sum() * got.sum()
    never = (expected >= 20) & (got == 0)
    if never.any():
        because = f"class {int(never.nonzero()[0])} has rows and none of {len(drawn)} draws"
        yield Finding(0.0, None, because, ("the sampler never reaches a class",))
    rare = (have > 0) & (have / have.sum() < 0.75 / int((have > 0).sum()))
    drawn_rare, rows_rare = got[rare].sum().item(), expected[rare].sum().item()
    if drawn_rare < 0.5 * rows_rare - 4 * math.sqrt(rows_rare):
        because = (
            f"the rare classes hold {rows_rare / got.sum():.1%} of the rows and "
            f"{drawn_rare / got.sum():.1%} of the draws"
        )
        causes = ("weights of the sampler are reversed",)
        yield Finding(drawn_rare, rows_rare, because, causes)


def _validation(side: Any, passes: list[Epoch]) -> Iterator[Finding]:
    """Each listed row once, and the same inputs in both passes."""
    one, two = passes
    known = listed(side)
    for ids in (one.ids, two.ids):
        repeated = len(ids) - len(ids.unique())
        repeated -= 0 if known is None else len(known) - len(known.unique())
        missing = 0 if known is None or not one.complete else int((~torch.isin(known, ids)).sum())
        if missing or repeated > 0:
            wrong = f"misses {missing} listed rows" if missing else f"repeats {repeated} rows"
            causes = ("drop_last in evaluation", "validation is sampled like training")
            yield Finding(float(missing or repeated), 0.0, f"a validation pass {wrong}", causes)
            return
    if not torch.equal(one.ids.unique(), two.ids.unique()) and one.complete:
        because = "two validation passes hand out different rows"
        yield Finding(None, 0.0, because, ("validation is sampled anew each time",))
        return
    changed = one.differs(two)
    if changed:
        because = f"{changed} of {len(one.ids)} validation rows differ between two passes"
        causes = (
            "validation is augmented: the split came after the transform",
            "reading writes into the stored rows",
        )
        yield Finding(float(changed), 0.0, because, causes)


def _seeded(side: Any, first: Epoch, max_rows: int) -> Iterator[Check]:
    """Warnings: another seed gives the same order; the same seed and epoch gives another batch."""
    seed = getattr(side, "seed", None)
    states = any(isinstance(value, torch.Generator) for value in vars(side).values())
    if not isinstance(seed, int) or not hasattr(side, "epoch") or states or len(first.ids) < 8:
        return
    again, other = own(side), own(side)
    other.seed = seed + 1
    if len(first.sizes) > 1 and torch.equal(epoch(other, max_rows).ids, first.ids):
        because = "The training loader has a seed, another one gives the same order."
        yield Check("loader", "warn", None, None, "", because, ("the seed is not used",))
        return
    same = epoch(again, max_rows)
    if not torch.equal(same.ids, first.ids) or same.differs(first):
        because = (
            "Batches do not follow from the loader's seed and epoch: a second reading differs."
        )
        causes = ("the order or the augmentation draws from a global generator",)
        yield Check("loader", "warn", None, None, "", because, causes)


def _in_words(pipeline: Pipeline, epochs: list[Epoch]) -> str:
    side, first = pipeline.train, epochs[0]
    kind, count = declared_sampler(side), len(epochs)
    drawn = "each row once" if kind == "plain" else f"rows by its own law ({kind})"
    text = f"{count} epochs of {len(first.sizes)} batches hand out {drawn}"
    text += "" if kind == "streamed" else ", in another order"
    if len(first.sizes) < 2:
        text = f"{count} epochs of one batch hand out {drawn}"
    text += ", augmented anew" if getattr(side, "augment", None) is not None else ""
    if not first.complete:
        text += f"; only the first {len(first.ids)} rows of an epoch were read"
    if listed(side) is None:
        text += "; the loader keeps no rows, so those it never hands out are unknown"
    return text + "."
