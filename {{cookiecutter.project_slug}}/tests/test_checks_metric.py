import numpy as np
import pytest
import torch
from checks_case import Digits, broken_evaluate, make_pipeline, unbalanced

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


def test_a_constant_answer_is_right_as_often_as_the_largest_class():
    task = Digits()
    y = torch.tensor([0, 1, 1])
    prior = task.prior(y)
    assert task.metric(task.constant_outputs(prior, 3), y) == pytest.approx(2 / 3)


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
