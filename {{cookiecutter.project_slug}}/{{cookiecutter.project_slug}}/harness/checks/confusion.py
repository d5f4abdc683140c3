"""Do training and validation mean the same by a class?"""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from torch import nn

from ..instruments import NonFiniteLoss
from ..loop import take
from . import Check, Pipeline, not_applicable, probe, runs

HELD_SHARE = 0.25  # of the training rows of each class, kept out of training
MAX_ROWS = 4096  # training rows that are looked at
ENOUGH = 0.9  # of the kept-out rows right: trained long enough


@dataclass(frozen=True)
class Table:
    """Answers by class on kept-out training rows and on validation: counts `(K, K)`, true class by
    predicted class."""

    kept: torch.Tensor
    validation: torch.Tensor


def confusion(
    pipeline: Pipeline,
    *,
    num_steps: int = 200,
    min_support: int = 10,
    min_moved_share: float = 0.5,
    min_recall: float = 0.02,
    min_learned: float = 0.5,
    min_z: float = 4.0,
) -> Check:
    """Which class validation rows are taken for, by a model trained for at most `num_steps`.

    A quarter of the training rows (whole groups, where there are any) is kept out of training: what
    is hard to learn is wrong there too. Classes with `min_support` validation rows of which more
    than `min_learned` is right on the kept-out rows count. Shut: more than `min_moved_share` of the
    validation rows of such a class are taken for one other class, too often (`min_z`) for chance.
    Warn: less than `min_recall` of them is right, or two classes cannot be told apart. Whole rows
    are counted: one limit in fp32 and bf16.
    """
    name = "confusion"
    missing = probe.lacking(name, pipeline, targets=("exclusive",), task=("predict",))
    if missing:
        return missing
    support = torch.bincount(probe.labels(pipeline.validation).flatten().cpu())
    if int((support >= min_support).sum()) < 2:
        because = f"Fewer than two classes have {min_support} validation rows."
        return not_applicable(name, because)
    table = _table(pipeline, num_steps)
    learned = _learned(table, min_support, min_learned)
    if len(learned) < 2:
        because = f"After {num_steps} steps fewer than two classes are recognised on training rows "
        because += "that were kept out: see input_independent_baseline."
        return not_applicable(name, because)
    moved = _moved(table, learned, min_moved_share)
    if moved and _z(table, moved) > min_z:
        return _shut(pipeline.task, name, table, moved, min_moved_share)
    return _rest(pipeline.task, name, table, learned, min_recall)


def _shut(task: Any, name: str, table: Table, moved: dict[int, int], limit: float) -> Check:
    rates = _rates(table.validation)
    share = max(rates[c, d].item() for c, d in moved.items())
    listed = ", ".join(f"{_called(task, c)} -> {_called(task, d)}" for c, d in moved.items())
    kept = sum(table.kept[c, d] for c, d in moved.items()) / sum(table.kept[c].sum() for c in moved)
    because = f"Up to {share:.0%} of the validation rows of a class are taken for one other class "
    because += f"({listed}), {kept:.0%} of training rows that were kept out"
    if len(set(moved.values())) < len(moved):
        because += "; several are taken for the same class."
        causes = ("validation inputs look different (another preprocessing)", "another class map")
    else:
        block = _shift(moved)
        because += f": {block}." if block else "."
        causes = ("validation has another class map", "validation rows are in another order")
    return Check(name, "shut", share, limit, "share of a class", because, causes)


def _rest(task: Any, name: str, table: Table, learned: list[int], limit: float) -> Check:
    """Single classes that are lost, or not told apart, are no proof: they warn."""
    recall = _rates(table.validation).diagonal()
    worst = min(learned, key=lambda c: recall[c].item())
    value = recall[worst].item()
    if value < limit:
        because = f"{value:.1%} of the validation rows of {_called(task, worst)} are right, "
        because += f"{_rates(table.kept)[worst, worst]:.0%} of training rows that were kept out."
        causes = ("this class is another one in validation", "its validation rows are different")
        return Check(name, "warn", value, limit, "recall", because, causes)
    pair = _merged(table)
    if pair:
        first, second = (_called(task, c) for c in pair)
        because = f"{first} and {second} are told apart no better than by chance, other classes are"
        causes = ("their rows are the same after preprocessing", "one class was split in two")
        return Check(name, "warn", None, None, "", because + ".", causes)
    because = f"Of {len(learned)} learned classes {_called(task, worst)} is recognised least, in "
    because += f"{value:.0%} of its validation rows; none is taken for one other class."
    return Check(name, "open", value, limit, "recall", because)


# ---- reading the counts -------------------------------------------------------------------------


def _rates(counts: torch.Tensor) -> torch.Tensor:
    """Rows that sum to 1."""
    return counts.double() / counts.sum(dim=1, keepdim=True).clamp(min=1)


def _learned(table: Table, min_support: int, min_learned: float) -> list[int]:
    support, kept = table.validation.sum(dim=1), table.kept.sum(dim=1)
    recall = _rates(table.kept).diagonal()
    enough = (support >= min_support) & (kept >= 3) & (recall > min_learned)
    return enough.nonzero().flatten().tolist()


def _moved(table: Table, learned: list[int], min_share: float) -> dict[int, int]:
    """Learned classes of which most validation rows are taken for one other: class -> that one."""
    rates = _rates(table.validation)
    taken = {c: int(rates[c].argmax()) for c in learned if rates[c].max() > min_share}
    return {c: d for c, d in taken.items() if c != d}


def _z(table: Table, moved: dict[int, int]) -> float:
    """Of the difference between validation and kept-out rows in the share that moves so."""
    sides = []
    for counts in (table.validation, table.kept):
        hit = sum(counts[c, d].item() for c, d in moved.items())
        sides.append((hit, sum(counts[c].sum().item() for c in moved)))
    (a, n), (b, m) = sides
    pooled = (a + b + 1) / (n + m + 2)
    return (a / n - b / m) / math.sqrt(pooled * (1 - pooled) * (1 / n + 1 / m))


def _shift(moved: dict[int, int]) -> str:
    """In words, where the moved classes form a cycle of neighbours."""
    classes = sorted(moved)
    if sorted(moved.values()) != classes:
        return ""
    steps = {(classes.index(moved[c]) - classes.index(c)) % len(classes) for c in classes}
    together = classes == list(range(classes[0], classes[-1] + 1))
    if len(steps) == 1 and together and len(classes) > 2:
        return f"a cyclic shift of the block {classes[0]} to {classes[-1]}"
    return "classes changed places"


def _merged(table: Table) -> tuple[int, int] | None:
    """Two classes of similar size that are mistaken for each other as often as not, on rows of
    either split, while most others are recognised."""
    counts = table.kept + table.validation
    rates, support = _rates(counts), counts.sum(dim=1)
    classes = (support >= 20).nonzero().flatten().tolist()
    for i, a in enumerate(classes):
        for b in classes[i + 1 :]:
            others = [rates[c, c].item() for c in classes if c not in (a, b)]
            alike = support[a] < 3 * support[b] and support[b] < 3 * support[a]
            inside = counts[a, a] + counts[b, b] + counts[a, b] + counts[b, a]
            total = support[a] + support[b]
            apart = (counts[a, a] + counts[b, b]) / inside.clamp(min=1)
            by_chance = max(support[a], support[b]) / total + 1 / math.sqrt(total)
            known = others and median(others) > 0.8 and inside > 0.8 * total
            if alike and known and apart < by_chance:
                return a, b
    return None


def _called(task: Any, index: int) -> str:
    names = getattr(task, "class_names", ())
    name = names[index] if index < len(names) else str(index)
    return str(name) if str(name) == str(index) else f"{name!s} ({index})"


# ---- training -----------------------------------------------------------------------------------


def _table(pipeline: Pipeline, num_steps: int) -> Table:
    """Counts of the best of the project's optimizer and Adam at two rates, the first that learns
    enough ending the search."""
    rows = probe.few_rows(pipeline.train, MAX_ROWS)
    held = _held(pipeline, rows)
    kept = take(rows, held)
    aside = rows["id"][held]
    found: list[tuple[float, Table]] = []
    makers = (pipeline.make_optimizer, runs.adam(1e-3), runs.adam(1e-2))
    for make_optimizer in makers:
        model = _trained(pipeline, make_optimizer, kept, aside, num_steps)
        if model is None:
            continue
        table = Table(
            _counts(pipeline, model, probe.rebatch(pipeline.validation, rows=kept)),
            _counts(pipeline, model, copy.copy(pipeline.validation)),
        )
        found.append((_mean_recall(table.kept), table))
        if found[-1][0] > ENOUGH:
            break
    if not found:
        raise NonFiniteLoss("the loss is not finite at any rate")
    return max(found, key=lambda pair: pair[0])[1]


def _held(pipeline: Pipeline, rows: dict) -> torch.Tensor:
    """`(N,)` bool: about a quarter of each class. Equal rows, or those of a group, stay together,
    or what was trained on would be asked again."""
    y, generator = rows["y"].cpu(), torch.Generator().manual_seed(0)
    keys = _keys(pipeline, rows)
    held: set = set()
    for c in y.unique().tolist():
        members = (y == c).nonzero().flatten()
        members = members[torch.randperm(len(members), generator=generator)].tolist()
        distinct = list(dict.fromkeys(keys[i] for i in members))
        count = len(distinct)
        held |= set(distinct[: max(math.floor(HELD_SHARE * count), min(3, count // 3))])
    return torch.tensor([key in held for key in keys], device=rows["y"].device)


def _keys(pipeline: Pipeline, rows: dict) -> list:
    if pipeline.group is not None:
        return [pipeline.group(int(row)) for row in rows["id"]]
    parts = [value.flatten(1).cpu().numpy() for value in probe.tensors(rows["x"]).values()]
    return [b"".join(part[i].tobytes() for part in parts) for i in range(len(rows["y"]))]


def _trained(
    pipeline: Pipeline, make_optimizer: Any, kept: dict, aside: torch.Tensor, num_steps: int
) -> nn.Module | None:
    """None when the loss stops being finite."""
    model = pipeline.make_model(0).train()
    optimizer = make_optimizer(model)
    loader = probe.rebatch(pipeline.validation, rows=kept)
    batches = probe.endless(pipeline.train)
    for step in range(1, num_steps + 1):
        whole = next(batches)
        batch = take(whole, ~torch.isin(whole["id"], aside))
        if len(batch["y"]) < min(2, len(whole["y"])):  # BatchNorm needs two
            continue
        try:
            pipeline.train_step(model, optimizer, batch)
        except NonFiniteLoss:
            return None
        look = step % runs.EVERY_STEPS == 0
        if look and _mean_recall(_counts(pipeline, model, loader)) > ENOUGH:
            break
    return model


def _counts(pipeline: Pipeline, model: nn.Module, loader: Any) -> torch.Tensor:
    """`(K, K)`: rows of each class by what they are taken for."""
    found = pipeline.evaluate(model, loader)
    told, n = pipeline.task.predict(found.outputs).flatten().cpu(), found.outputs.shape[1]
    return torch.bincount(found.y.cpu() * n + told, minlength=n * n).reshape(n, n)


def _mean_recall(counts: torch.Tensor) -> float:
    there = counts.sum(dim=1) > 0
    return _rates(counts).diagonal()[there].mean().item()
