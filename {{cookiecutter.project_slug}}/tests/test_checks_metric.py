import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from checks_case import (
    Digits,
    Net,
    broken_evaluate,
    broken_step,
    make_pipeline,
    rows,
    unbalanced,
    with_x,
)
from other_tasks import (
    MultiLabel,
    Real,
    Tokens,
    make_imbalanced_pipeline,
    make_multilabel_pipeline,
    make_real_pipeline,
    make_tokens_pipeline,
    multilabel_rows,
)
from sklearn import metrics
from torch import nn

from {{cookiecutter.project_slug}}.harness import loop
from {{cookiecutter.project_slug}}.harness.checks import confusion as map_gate
from {{cookiecutter.project_slug}}.harness.checks import metric as gate
from {{cookiecutter.project_slug}}.harness.checks import run_check


def counted_by(metric):
    task = Digits()
    task.metric = metric
    return task


def balanced(outputs, y):
    right = outputs.argmax(1) == y
    return float(np.mean([right[y == c].double().mean().item() for c in y.unique()]))


class Balanced(Digits):
    metric_name, sklearn_metric = "balanced_accuracy", "balanced_accuracy_score"

    def metric(self, outputs, y):
        return balanced(outputs, y)

    def chance(self, prior):
        return 0.1


@pytest.mark.parametrize("parts", [{}, {"precision": "bf16"}, {"task": Balanced()}])
def test_a_metric_that_counts_right_opens(parts):
    found = run_check(gate.human_metric, make_pipeline(**parts))
    assert found.verdict == "open"
    assert "400 held-out rows" in found.because


@pytest.mark.parametrize(
    ("metric", "cause"),
    [
        (lambda z, y: (z.argmax(0) == y).double().mean().item(), "wrong axis"),  # raises
        (lambda z, y: 1 - (z.argmax(1) == y).double().mean().item(), "inverted"),
        (lambda z, y: (z.topk(2).indices == y[:, None]).any(1).double().mean().item(), "averaging"),
    ],
)
def test_a_metric_that_counts_wrong_shuts_and_is_named(metric, cause):
    found = run_check(gate.human_metric, make_pipeline(task=counted_by(metric)))
    assert found.verdict == "shut"
    assert any(cause in text for text in found.suspect)


def test_another_averaging_than_declared_shuts():
    pipeline = make_pipeline(task=counted_by(balanced), train=unbalanced(), prior_bias=True)
    found = run_check(gate.human_metric, pipeline)
    assert found.verdict == "shut"
    assert "averaging" in found.suspect[0]


@pytest.mark.parametrize(
    ("fault", "cause"),
    [
        ("mean of batch means", "mean of batch means"),
        ("only every other batch", "dropped"),
        ("state kept", "keeps state"),
        ("labels reordered", "reordered"),
    ],
)
def test_an_evaluation_that_loses_count_shuts_and_is_named(fault, cause):
    pipeline = make_pipeline(evaluate=broken_evaluate(fault))
    found = run_check(gate.human_metric, pipeline)
    assert found.verdict == "shut"
    assert cause in found.suspect[0]


def test_the_same_evaluation_without_a_fault_opens():
    assert (
        run_check(gate.human_metric, make_pipeline(evaluate=broken_evaluate(""))).verdict == "open"
    )


def test_an_evaluation_with_another_loss_shuts():
    def evaluate(model, loader):
        found = loop.evaluate(model, loader, Digits())
        return replace(found, loss=1.1 * found.loss)

    found = run_check(gate.human_metric, make_pipeline(evaluate=evaluate))
    assert found.verdict == "shut"
    assert any("another loss" in text for text in found.suspect)


class Weighted(Digits):
    """Class 0 counts most in the loss: its best constant is not the largest class."""

    class_weights = (9.0,) + (1.0,) * 9

    def constant_outputs(self, prior, num_rows):
        return super().constant_outputs(prior * np.array(self.class_weights), num_rows)


def test_class_weights_of_the_loss_are_no_matter_of_the_metric():
    assert run_check(gate.human_metric, make_pipeline(task=Weighted())).verdict == "open"


# ---- other declared metrics, and other kinds of targets -----------------------------------------


class TopTwo(Digits):
    """Properly declared: what a constant answer scores are the two largest shares."""

    metric_name, sklearn_metric = "top_2_accuracy", None

    def metric(self, outputs, y):
        return (outputs.topk(2).indices == y[:, None]).any(1).double().mean().item()

    def chance(self, prior):
        return float(np.sort(prior)[-2:].sum())


class MacroF1(Digits):
    metric_name, sklearn_metric, sklearn_options = "macro_f1", "f1_score", {"average": "macro"}

    def metric(self, outputs, y):
        return float(metrics.f1_score(y, self.predict(outputs), average="macro"))

    def chance(self, prior):
        return 2 * prior.max() / (1 + prior.max()) / len(prior)


class LogLoss(Digits):
    """A metric of probabilities: right by little is worth less."""

    metric_name, metric_direction, metric_bounds = "log_loss", "min", (0.0, math.inf)
    sklearn_metric = None

    def metric(self, outputs, y):
        return self.loss(outputs.double(), y).item()

    def chance(self, prior):
        return self.prior_loss(prior)


def labels(name, metric, *, chance, base=MultiLabel, **parts):
    task = base()
    task.metric_name, task.metric, task.chance = name, metric, chance
    for key, value in parts.items():
        setattr(task, key, value)
    return task


def told(outputs):
    return (outputs > 0).float()


AUC = labels(
    "mean_auc",
    lambda z, y: float(metrics.roc_auc_score(y, z)),
    chance=lambda prior: 0.5,
    sklearn_metric="roc_auc_score",
)
RANKING = labels(  # of a constant order of the labels
    "lrap",
    lambda z, y: float(metrics.label_ranking_average_precision_score(y, z)),
    chance=lambda prior: metrics.label_ranking_average_precision_score(
        multilabel_rows()["y"], np.tile(prior, (900, 1))
    ),
    sklearn_metric="label_ranking_average_precision_score",
)
LOW_CUT = labels(
    "label_accuracy",
    lambda z, y: ((z > -1.0) == (y > 0)).double().mean().item(),
    chance=lambda prior: float(np.where(prior > 1 / (1 + math.e), prior, 1 - prior).mean()),
)


class Raw(Real):
    """The metric, and what a person reads, are in the stored unit: 10 per unit of y."""

    def __init__(self, undone=True):
        super().__init__("rmse")
        self.undone = undone

    def predict(self, outputs):
        return outputs * 10

    def metric(self, outputs, y):
        return super().metric(outputs, y) * (10 if self.undone else 1)

    def chance(self, prior):
        return 10 * super().chance(prior)


class Correlation(Real):
    def __init__(self):
        super().__init__()
        self.metric_name, self.metric_bounds, self.sklearn_metric = "pearson", (-1.0, 1.0), None

    def chance(self, prior):
        return 0.0

    def metric(self, outputs, y):
        if outputs.std() < 1e-9:
            return 0.0
        return torch.corrcoef(torch.stack([outputs.double(), y.double()]))[0, 1].item()


@pytest.mark.parametrize(
    "pipeline",
    [
        make_pipeline(task=TopTwo()),
        make_pipeline(task=MacroF1()),
        make_pipeline(task=LogLoss()),
        make_imbalanced_pipeline(),
        make_multilabel_pipeline(),
        make_multilabel_pipeline(task=AUC),
        make_multilabel_pipeline(task=RANKING),
        make_multilabel_pipeline(task=LOW_CUT),
        make_multilabel_pipeline(train=multilabel_rows(shift=-3.0)),
        make_real_pipeline(),
        make_real_pipeline(task=Real("rmse")),
        make_real_pipeline(task=Raw()),
        make_real_pipeline(task=Correlation()),
        make_tokens_pipeline(),
    ],
    ids=lambda pipeline: f"{pipeline.task.targets} {pipeline.task.metric_name}",
)
def test_a_declared_metric_of_any_target_opens(pipeline):
    found = run_check(gate.human_metric, pipeline)
    assert found.verdict == "open", found.because


def softmaxed(outputs, y):
    return ((outputs.softmax(1) > 0.5) == (y > 0)).double().mean().item()


def softmaxed_auc(outputs, y):
    return float(metrics.roc_auc_score(y, outputs.softmax(1)))


def pairwise(outputs, y):
    right = (told(outputs) == y).all(1)[: len(y) // 2 * 2]
    return right.reshape(-1, 2).all(1).double().mean().item()


@pytest.mark.parametrize(
    ("metric", "cause"),
    [
        (lambda z, y: ((z > 0.5) == (y > 0)).double().mean().item(), "applied to raw scores"),
        (lambda z, y: ((z < 0) == (y > 0)).double().mean().item(), "inverted"),
        (
            lambda z, y: ((z.sigmoid().sigmoid() > 0.5) == (y > 0)).double().mean().item(),
            "averaging",
        ),
        (softmaxed, "softmax across labels"),
        (softmaxed_auc, "softmax across labels"),
        (pairwise, "pairs neighbouring rows"),
        (lambda z, y: MultiLabel().metric(z[:, :1], y[:, :1]), "averaging"),
    ],
)
def test_labels_that_are_counted_wrong_shut_and_are_named(metric, cause):
    task = labels("counted", metric, chance=MultiLabel().chance)
    if metric is softmaxed_auc:
        task.chance = lambda prior: 0.5
    if metric is pairwise:
        task.chance = lambda prior: metric(
            task.constant_outputs(prior, 900), multilabel_rows()["y"]
        )
    found = run_check(gate.human_metric, make_multilabel_pipeline(task=task))
    assert found.verdict == "shut"
    assert any(cause in text for text in found.suspect), found


def test_a_metric_on_the_wrong_scale_shuts():
    for task in (Raw(undone=False), Real("rmse")):
        if not isinstance(task, Raw):
            task.metric = lambda z, y: 0.1 * (z - y).double().square().mean().sqrt().item()
        found = run_check(gate.human_metric, make_real_pipeline(task=task))
        assert found.verdict == "shut"
        assert "scale" in found.suspect[0]


def everywhere(outputs, y):
    return ((outputs.argmax(2) == y) | (y == -100)).double().mean().item()


def divided_by_all(outputs, y):
    return ((outputs.argmax(2) == y).double().sum() / y.numel()).item()


@pytest.mark.parametrize(
    ("metric", "cause"),
    [
        (everywhere, "ignored positions"),
        (divided_by_all, "class map"),
        (lambda z, y: Tokens().metric(z[:, :-1], y[:, 1:]), "class map"),
    ],
)
def test_tokens_that_are_counted_wrong_shut(metric, cause):
    task = Tokens()
    task.metric = metric
    found = run_check(gate.human_metric, make_tokens_pipeline(task=task))
    assert found.verdict == "shut"
    assert any(cause in text for text in found.suspect), found


@pytest.mark.parametrize(
    "make", [make_multilabel_pipeline, make_real_pipeline, make_tokens_pipeline]
)
def test_a_mean_of_batch_means_shuts_for_any_target(make):
    pipeline = make()
    task, whole = pipeline.task, pipeline.evaluate

    def evaluate(model, loader):
        found = whole(model, loader)
        parts = zip(
            found.outputs.split(loader.batch_size), found.y.split(loader.batch_size), strict=True
        )
        means = [task.metric(z, y) for z, y in parts if len(y) > 1]
        return type(found)(
            found.loss, float(np.mean(means)), found.num_rows, found.outputs, found.y, found.ids
        )

    found = run_check(gate.human_metric, make(evaluate=evaluate))
    assert found.verdict == "shut"
    assert "mean of batch means" in found.suspect[0]


# ---- the class map ------------------------------------------------------------------------------


def mapped(change):
    held_out = rows(900, 1300)
    return {**held_out, "y": change(held_out["y"])}


def rotated(y):
    """Classes 3 to 6 move by one, 6 becomes 3."""
    inside = (y >= 3) & (y <= 6)
    return torch.where(inside, 3 + (y - 3 + 1) % 4, y)


def swapped(y):
    return torch.where(y == 2, 7, torch.where(y == 7, 2, y))


def normed():
    return Net(norm=nn.BatchNorm1d, dropout=0.2)


@pytest.mark.parametrize(
    "parts",
    [
        {},
        {"net": normed, "precision": "bf16"},
        {"train": unbalanced(), "prior_bias": True},
        {"optimizer": lambda model: torch.optim.SGD(model.parameters(), lr=1e-3)},
        {"step": broken_step(zero_grad="before")},
        {"group": lambda row: row // 30},
        {"batch_size": 8},
    ],
)
def test_classes_that_mean_the_same_in_both_splits_open(parts):
    found = run_check(map_gate.confusion, make_pipeline(**parts))
    assert found.verdict == "open", found.because


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda y: (y + 1) % 10, "a cyclic shift of the block 0 to 9"),
        (rotated, "a cyclic shift of the block 3 to 6"),
        (swapped, "2 -> 7, 7 -> 2"),
        (lambda y: torch.where(y == 4, 9, y).where(y != 9, 4), "4 -> 9, 9 -> 4"),
    ],
)
def test_another_class_map_in_validation_shuts_and_is_spelled_out(change, words):
    found = run_check(map_gate.confusion, make_pipeline(validation=mapped(change)))
    assert found.verdict == "shut"
    assert words in found.because
    assert "another class map" in found.suspect[0]


def test_validation_inputs_that_look_like_one_class_shut_as_another_preprocessing():
    shown = with_x(lambda x: 0.05 * x - 3.0, 900, 1300)
    found = run_check(map_gate.confusion, make_pipeline(validation=shown))
    assert found.verdict == "shut"
    assert "preprocessing" in found.suspect[0]


def test_two_classes_nobody_can_tell_apart_warn():
    """Half of the threes are called five, at random."""

    def split(start, stop):
        given = rows(start, stop)
        coin = torch.rand(len(given["y"]), generator=torch.Generator().manual_seed(start)) < 0.5
        keep = given["y"] != 5
        y = torch.where((given["y"] == 3) & coin, 5, given["y"])
        return {key: value[keep] for key, value in {**given, "y": y}.items()}

    pipeline = make_pipeline(train=split(0, 900), validation=split(900, 1797))
    found = run_check(map_gate.confusion, pipeline)
    assert found.verdict == "warn"
    assert "told apart" in found.because


def test_a_class_whose_validation_rows_are_all_over_the_place_warns():
    generator = torch.Generator().manual_seed(0)
    held_out = rows(900, 1797)
    other = (held_out["y"] + torch.randint(1, 10, held_out["y"].shape, generator=generator)) % 10
    x = held_out["x"].clone()
    for row in (held_out["y"] == 4).nonzero().flatten().tolist():  # fours show other digits
        x[row] = held_out["x"][held_out["y"] == other[row]][0]
    found = run_check(map_gate.confusion, make_pipeline(validation={**held_out, "x": x}))
    assert found.verdict == "warn"
    assert "4" in found.because


@pytest.mark.parametrize(
    "pipeline",
    [
        make_pipeline(train={**rows(), "y": rows()["y"].roll(1)}),
        make_pipeline(validation=rows(900, 950)),
        make_multilabel_pipeline(),
        make_tokens_pipeline(),
    ],
    ids=["nothing learned", "few rows", "labels", "tokens"],
)
def test_without_learned_classes_confusion_does_not_apply(pipeline):
    assert run_check(map_gate.confusion, pipeline).verdict == "not_applicable"


# ---- the owner's word ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "verdict"),
    [
        (None, "warn"),
        ({"value": None, "kind": None, "num_samples": None}, "warn"),
        ({"value": 0.98, "kind": "measured", "num_samples": 200}, "open"),
        ({"value": 0.98, "kind": "measured", "num_samples": None}, "warn"),
        ({"value": 98, "kind": "published", "num_samples": 200}, "warn"),
        ({"value": 0.98, "kind": "guessed", "num_samples": 200}, "shut"),
        ({"value": None, "kind": "impossible", "num_samples": None}, "not_applicable"),
    ],
)
def test_the_human_reference_is_asked_for_until_it_is_whole(given, verdict):
    assert run_check(gate.human_reference, make_pipeline(human_reference=given)).verdict == verdict
