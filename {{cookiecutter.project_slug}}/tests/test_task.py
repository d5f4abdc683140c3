"""task.py: loss, metric and prior against their formulas, and what a person is shown."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from sklearn import metrics

from {{cookiecutter.project_slug}} import model
from {{cookiecutter.project_slug}}.task import METRICS, Task

NAMES = ("cat", "dog", "emu", "fox")


def make(metric="accuracy", **options):
    return Task(SimpleNamespace(metric=metric), NAMES, **options)


def outputs_of(count, seed=0, scale=2.0):
    draw = torch.Generator().manual_seed(seed)
    z = torch.randn(count, len(NAMES), generator=draw) * scale
    return z, torch.randint(len(NAMES), (count,), generator=draw)


# ---- loss ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_the_loss_is_the_mean_cross_entropy_in_nats(smoothing):
    task, (z, y) = make(label_smoothing=smoothing), outputs_of(50)
    target = (1 - smoothing) * torch.eye(4)[y] + smoothing / 4
    by_hand = -(target.double() * torch.log_softmax(z.double(), dim=1)).sum(dim=1)
    assert task.loss(z, y).item() == pytest.approx(by_hand.mean().item(), rel=1e-6)
    assert torch.allclose(task.loss_per_row(z, y).double(), by_hand, atol=1e-6)


def test_flat_outputs_cost_log_n_and_right_ones_nothing():
    task, (_, y) = make(), outputs_of(50)
    assert task.loss(torch.zeros(50, 4), y).item() == pytest.approx(math.log(4))
    assert task.flat_loss(task.prior(y)) == pytest.approx(math.log(4))
    assert task.loss(task.ideal_outputs(y), y).item() < 1e-9 == task.optimum_loss() + 1e-9


def test_no_outputs_beat_the_optimum_of_a_smoothed_loss():
    task, (_, y) = make(label_smoothing=0.1), outputs_of(50)
    best = task.loss(task.ideal_outputs(y), y).item()
    assert best == pytest.approx(task.optimum_loss(), abs=1e-6)
    for scale in (0.5, 0.9, 1.1, 2.0):
        assert task.loss(task.ideal_outputs(y) * scale, y).item() > best


# ---- metric -------------------------------------------------------------------------------------


@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize("seed", range(3))
def test_the_metric_is_scikit_learns(metric, seed):
    task, (z, y) = make(metric), outputs_of(60, seed)
    y = y * (torch.rand(60, generator=torch.Generator().manual_seed(seed)) < 0.5)  # unbalanced
    theirs = getattr(metrics, task.sklearn_metric)(y.numpy(), task.predict(z).numpy())
    assert task.metric(z, y) == pytest.approx(theirs, abs=1e-12)


@pytest.mark.parametrize("metric", METRICS)
def test_the_metric_reaches_both_of_its_bounds(metric):
    task, (_, y) = make(metric), outputs_of(40)
    assert task.metric(task.ideal_outputs(y), y) == task.metric_bounds[1] == 1.0
    assert task.metric(-task.ideal_outputs(y), y) == task.metric_bounds[0] == 0.0


def test_a_metric_that_is_none_is_refused():
    with pytest.raises(ValueError, match=r"task\.metric='f1' is not one of accuracy, balanced"):
        make("f1")


def test_the_margin_is_positive_exactly_where_the_answer_is_right():
    task, (z, y) = make(), outputs_of(200)
    margin = task.margin(z, y)
    assert torch.equal(margin > 0, task.correct(z, y))
    row = torch.tensor([[1.0, 4.0, 2.5, -1.0]])
    assert task.margin(row, torch.tensor([1])).item() == 1.5
    assert task.margin(row, torch.tensor([2])).item() == -1.5
    assert torch.allclose(task.margin(z + 7, y), margin, atol=1e-5)  # logits are relative


def test_the_average_of_an_ensemble_is_of_probabilities():
    task, (z, _), (w, _) = make(), outputs_of(20), outputs_of(20, seed=1)
    found = torch.softmax(task.average([z, w]), dim=1)
    assert torch.allclose(found, (z.softmax(1) + w.softmax(1)) / 2, atol=1e-6)
    assert torch.allclose(task.average([z, z]), torch.log_softmax(z, dim=1), atol=1e-6)


# ---- before training ----------------------------------------------------------------------------

Y = torch.tensor([0] * 50 + [1] * 30 + [2] * 10)  # no row of class 3


def test_the_prior_counts_every_class_once_more_than_it_occurs():
    prior = make().prior(Y)
    assert prior == pytest.approx(np.array([51, 31, 11, 1]) / 94)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_prior_loss_is_the_loss_of_the_constant_outputs_on_rows_of_that_prior(smoothing):
    task = make(label_smoothing=smoothing)
    y = torch.repeat_interleave(torch.arange(4), torch.tensor([51, 31, 11, 1]))
    prior = np.bincount(y) / len(y)
    if smoothing == 0:
        constant = task.loss(task.constant_outputs(prior, len(y)), y).item()
        assert task.prior_loss(prior) == pytest.approx(constant, abs=1e-6)
    best = min(
        task.loss(torch.log(torch.tensor(shares)).float().repeat(len(y), 1), y).item()
        for shares in [prior, (1 - smoothing) * prior + smoothing / 4, np.full(4, 0.25)]
    )
    assert task.prior_loss(prior) == pytest.approx(best, abs=1e-5)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_expected_loss_is_the_mean_over_labels_drawn_independently_of_the_outputs(smoothing):
    task, (z, _) = make(label_smoothing=smoothing), outputs_of(40)
    prior = task.prior(Y)
    exact = sum(
        prior[c] * task.loss(z.double(), torch.full((40,), c)).item() for c in range(len(prior))
    )
    assert task.expected_loss(z, prior) == pytest.approx(exact, rel=1e-9)


@pytest.mark.parametrize("metric", METRICS)
def test_chance_is_the_metric_of_the_best_constant_answer(metric):
    task, y = make(metric), torch.tensor([0] * 5 + [1] * 3 + [2] + [3])
    scores = [task.metric(torch.eye(4)[torch.full((10,), c)], y) for c in range(4)]
    assert task.chance(np.bincount(y) / 10) == pytest.approx(max(scores))


def test_the_prior_bias_makes_a_silent_network_predict_the_prior():
    task, network = make(), model.build("Linear", {}, (1, 8, 8), 4)
    torch.nn.init.zeros_(network.head.weight)
    prior = task.prior(Y)
    task.set_prior_bias(network, prior)
    found = network(torch.randn(3, 1, 8, 8)).softmax(dim=1)
    assert torch.allclose(found, torch.tensor(prior).float().repeat(3, 1), atol=1e-6)
    assert network.head.bias.requires_grad


# ---- for people ---------------------------------------------------------------------------------


def test_a_person_reads_names_shapes_and_pictures():
    task, raw = make(), np.arange(12, dtype=np.uint8).reshape(3, 4)
    assert task.answer(2) == "emu" and task.answer(torch.tensor(0)) == "cat"
    assert task.describe(raw) == "3x4, values 0 to 11"
    assert task.features(raw) == {
        "height_px": 3.0,
        "width_px": 4.0,
        "brightness": 5.5,
        "contrast": pytest.approx(raw.std()),
    }
    assert np.array_equal(task.draw(raw[..., None]), raw)
    assert task.draw(np.zeros((3, 4, 3))).shape == (3, 4, 3)


def test_vectors_in_which_near_means_alike_are_the_pixels():
    x = torch.randn(5, 3, 4, 4)
    found = make().embed(x)
    assert found.shape == (5, 48) and found.dtype == np.float32


def test_first_weights_are_drawn_where_they_lie_in_space():
    task = make()
    filters = task.draw_weights(torch.randn(8, 3, 5, 5), (3, 16, 16))
    assert filters.shape == (8, 5, 5)
    assert task.draw_weights(torch.randn(4, 48), (3, 4, 4)).shape == (4, 4, 4)
    assert task.draw_weights(torch.randn(4, 7), (3, 4, 4)) is None
