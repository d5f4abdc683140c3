"""harness/instruments.py: what is read off a run, against curves and networks made for it."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from {{cookiecutter.project_slug}}.harness import instruments, loop
from {{cookiecutter.project_slug}}.harness.instruments import (
    NonFiniteLoss,
    StepRecorder,
    curve_shape,
    finite,
)
from {{cookiecutter.project_slug}}.task import Task

EPOCHS = np.arange(30)
NOISE = np.random.default_rng(0).standard_normal(30)
TASK = Task(SimpleNamespace(metric="accuracy"), ("a", "b"))


def step_output(loss, grad_norm=None):
    norm = None if grad_norm is None else torch.tensor(grad_norm)
    return loop.StepOutput(torch.tensor(float(loss)), norm)


# ---- rows of steps ------------------------------------------------------------------------------


def recorded(losses, every_steps=5, rate=0.1, grad_norm=2.0):
    """A recorder that saw steps with these losses, each changing the weights by 1 %."""
    network = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(network.parameters(), lr=rate)
    recorder = StepRecorder(network, optimizer, every_steps)
    for loss in losses:
        recorder.before()
        with torch.no_grad():
            for parameter in network.parameters():
                parameter.mul_(1.01)
        optimizer.param_groups[0]["lr"] *= 0.5  # as a scheduler does at the end of a step
        recorder.after(step_output(loss, grad_norm))
    return recorder


def test_every_so_many_steps_leave_a_row_with_the_first_one():
    recorder = recorded([10 - k for k in range(12)])
    assert [row["step"] for row in recorder.rows] == [1, 6, 11]
    assert [row["loss"] for row in recorder.rows] == [10, 5, 0]
    assert {row["grad_norm"] for row in recorder.rows} == {2.0}


def test_the_update_ratio_is_the_size_of_the_change_over_the_size_of_the_weights():
    for row in recorded(range(12)).rows:
        assert row["update_ratio"] == pytest.approx(0.01, rel=1e-3)


def test_the_rate_in_a_row_is_the_one_its_step_was_taken_with():
    assert [row["lr"] for row in recorded(range(12)).rows] == [0.1, 0.1 / 2**5, 0.1 / 2**10]


def test_without_clipping_the_gradient_norm_is_measured():
    network = nn.Linear(3, 2)
    recorder = StepRecorder(network, torch.optim.SGD(network.parameters(), lr=0.1), 5)
    recorder.before()
    for parameter in network.parameters():
        parameter.grad = torch.full_like(parameter, 2.0)
    recorder.after(step_output(1.0))
    assert recorder.rows[0]["grad_norm"] == pytest.approx(2 * 8**0.5)


def test_the_epoch_loss_is_the_mean_since_it_was_last_asked():
    recorder = recorded([4.0, 2.0, 3.0])
    assert recorder.epoch_loss() == 3.0
    recorder.before()
    recorder.after(step_output(7.0))
    assert recorder.epoch_loss() == 7.0
    assert math.isnan(recorder.epoch_loss())


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_loss_that_is_no_number_is_named_with_its_step_when_it_is_read(value):
    losses = [1.0, 1.0, value, 1.0]
    recorder = recorded(losses)  # not read yet: that would wait for the device
    with pytest.raises(NonFiniteLoss, match=f"the loss is {value} at step 3"):
        recorder.epoch_loss()
    with pytest.raises(NonFiniteLoss, match="at step 3"):
        recorded([*losses, 1.0, 1.0])  # the sixth step reads


def test_a_gradient_that_is_no_number_is_named():
    with pytest.raises(NonFiniteLoss, match="the grad norm is inf at step 1"):
        recorded([1.0], grad_norm=math.inf)


def test_frozen_weights_are_no_part_of_the_ratio():
    network = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2))
    network[0].requires_grad_(False).weight.data.fill_(1e6)
    recorder = StepRecorder(network, torch.optim.SGD(network[1].parameters(), lr=0.1), 5)
    recorder.before()
    with torch.no_grad():
        for parameter in network[1].parameters():
            parameter.mul_(1.01)
    recorder.after(step_output(1.0, 1.0))
    assert recorder.rows[0]["update_ratio"] == pytest.approx(0.01, rel=1e-3)


def test_recording_changes_no_weight_and_keeps_no_graph():
    network = nn.Linear(3, 2)
    weights = [p.detach().clone() for p in network.parameters()]
    recorder = StepRecorder(network, torch.optim.SGD(network.parameters(), lr=0.1), 1)
    recorder.before()
    recorder.after(step_output(1.0, 1.0))
    assert all(torch.equal(p, w) for p, w in zip(network.parameters(), weights, strict=True))
    assert recorder.rows[0]["update_ratio"] == 0.0
    assert not any(copy.requires_grad for copy in recorder._copies)


def test_finite_names_the_figure():
    row = {"step": 3, "loss": 1.0, "validation_loss": math.nan}
    with pytest.raises(NonFiniteLoss, match="the validation loss is nan at step 3"):
        finite(row)
    assert finite({"step": 3, "loss": 1.0}) == {"step": 3, "loss": 1.0}


# ---- learning-rate range ------------------------------------------------------------------------


def blobs(count=128, seed=0):
    draw = torch.Generator().manual_seed(seed)
    y = torch.randint(2, (count,), generator=draw)
    x = torch.randn(count, 8, generator=draw) + 2.0 * y[:, None]
    return {"x": x, "y": y, "id": torch.arange(count)}


def swept(step=None, **options):
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2))
    optimizer = torch.optim.SGD(network.parameters(), lr=1.0)
    batches = loop.Loader(blobs(), 32, shuffle=True)

    def train_step(network, optimizer, batch):
        return loop.train_step(network, optimizer, batch, TASK.loss)

    options = {"num_steps": 80, "highest": 1e4} | options
    return instruments.lr_range(network, optimizer, step or train_step, batches, **options)


def test_the_range_test_finds_where_the_loss_falls_and_where_it_breaks():
    found = swept()
    assert found["drop"] > 0.5
    assert 1e-3 < found["steepest"] < found["divergence"] <= 1e4
    assert found["usable"] == found["divergence"] / 10
    assert len(found["lrs"]) == len(found["losses"]) == len(found["smoothed"]) < 80
    assert found["lrs"] == sorted(found["lrs"])
    steps = np.diff(np.log(found["lrs"]))
    assert steps == pytest.approx(steps[0])  # exponential


def test_a_range_without_divergence_recommends_the_steepest_rate():
    found = swept(highest=0.1)
    assert found["divergence"] is None and len(found["lrs"]) == 80
    assert found["usable"] == found["steepest"]


def test_a_loss_that_no_rate_lowers_has_no_drop():
    def idle(network, optimizer, batch):
        return loop.StepOutput(TASK.loss(network(batch["x"]), batch["y"]).detach(), None)

    assert swept(idle)["drop"] < 0.1


@pytest.mark.parametrize("good_steps", [0, 1, 2, 10])
def test_a_loss_that_leaves_the_numbers_is_the_divergence_however_early(good_steps):
    calls = []

    def broken(network, optimizer, batch):
        calls.append(1)
        if len(calls) > good_steps:
            raise NonFiniteLoss("the loss is nan")
        return step_output(1.0)

    found = swept(broken)
    assert len(found["losses"]) == good_steps
    assert found["divergence"] == pytest.approx(1e-6 * 1e10 ** (good_steps / 79))
    assert found["drop"] == 0.0


def test_the_forecast_is_of_real_steps():
    calls = []

    def step(batch):
        calls.append(len(batch["y"]))
        return step_output(1.0)

    assert instruments.seconds_per_step(step, loop.Loader(blobs(), 100)) > 0
    assert calls == [100, 28] * 4  # it goes round as often as it must


# ---- the shape of a curve -----------------------------------------------------------------------

SHAPES = {
    "descended then plateaued": [
        2 * np.exp(-EPOCHS / 2) + 0.1,
        2 * np.exp(-EPOCHS / 2) + 0.5 + 0.01 * NOISE,
    ],
    "still descending": [2 * np.exp(-EPOCHS / 10), 2 - 0.05 * EPOCHS],
    "flat from step one": [np.full(30, 2.3), 2.3 + 0.005 * NOISE],
    "rising from the start": [2 + 0.1 * EPOCHS, 2.3 * 1.2**EPOCHS],
    "turned": [2 - 0.1 * EPOCHS + 0.006 * EPOCHS**2, np.r_[np.linspace(2, 0.5, 15), [1.5] * 15]],
    "oscillating": [1 + np.exp(-EPOCHS / 3) + 0.4 * (-1.0) ** EPOCHS],
    "not finite": [np.r_[2.0, 1.0, np.nan, [1.0] * 9], np.r_[[2.0] * 9, np.inf]],
    "too short": [np.array([2.0, 1.0, 0.5, 0.4])],
}


@pytest.mark.parametrize("shape", SHAPES)
def test_each_shape_is_told_from_the_whole_history(shape):
    assert [curve_shape(list(curve)) for curve in SHAPES[shape]] == [shape] * len(SHAPES[shape])


# ---- units --------------------------------------------------------------------------------------


def activity(network, x=None):
    rows = {"x": blobs()["x"] if x is None else x, "y": torch.zeros(128, dtype=torch.int64)}
    loader = loop.Loader({**rows, "id": torch.arange(128)}, 50)
    return instruments.unit_activity(network, lambda n, b: loop.evaluate(n, b, TASK), loader)


def test_units_that_never_fire_are_counted_per_layer():
    network = nn.Sequential(nn.Linear(8, 10), nn.ReLU(), nn.Linear(10, 4), nn.ReLU())
    with torch.no_grad():
        network[0].bias[:3] = -1e6
        network[0].bias[3:] = 1e3
    first, second = activity(network)
    assert (first["layer"], first["kind"], first["num_units"]) == ("1", "ReLU", 10)
    assert first["dead_share"] == pytest.approx(0.3) and first["saturated_share"] == 0.0
    assert second["layer"] == "3"


def test_a_unit_that_fires_for_one_row_is_alive():
    network = nn.Sequential(nn.Linear(8, 2), nn.ReLU())
    with torch.no_grad():
        network[0].weight.zero_()
        network[0].weight[:, 0] = 1.0
        network[0].bias[:] = -50.0
    x = torch.zeros(128, 8)
    x[77, 0] = 60.0
    assert activity(network, x)[0]["dead_share"] == 0.0


@pytest.mark.parametrize("kind", [nn.Sigmoid, nn.Tanh, nn.Hardtanh])
def test_units_stuck_at_a_bound_are_saturated(kind):
    network = nn.Sequential(nn.Linear(8, 4), kind())
    with torch.no_grad():
        network[0].weight.mul_(0.01)
        network[0].bias[:] = torch.tensor([0.0, 0.1, 100.0, -100.0])
    (found,) = activity(network)
    assert found["saturated_share"] == 0.5 and found["dead_share"] == 0.0


def test_units_of_convolutions_are_channels():
    network = nn.Sequential(nn.Conv2d(1, 5, 3), nn.ReLU(), nn.Flatten(), nn.LazyLinear(2))
    x = torch.randn(128, 1, 4, 4)
    network(x)
    with torch.no_grad():
        network[0].bias[0] = -1e6
    assert activity(network, x)[0]["dead_share"] == pytest.approx(0.2)


class Shared(nn.Module):
    """One activation module used behind layers of different width, as in many residual networks."""

    def __init__(self):
        super().__init__()
        self.wide, self.narrow, self.relu = nn.Linear(8, 10), nn.Linear(10, 2), nn.ReLU()

    def forward(self, x):
        return self.relu(self.narrow(self.relu(self.wide(x))))


def test_an_activation_shared_by_layers_of_different_width_is_read_too():
    network = Shared()
    with torch.no_grad():
        network.wide.bias[:5] = -1e6
        network.narrow.bias[:] = 1e3
    wide, narrow = sorted(activity(network), key=lambda row: -row["num_units"])
    assert (wide["num_units"], wide["dead_share"]) == (10, 0.5)
    assert (narrow["num_units"], narrow["dead_share"]) == (2, 0.0)


def test_looking_leaves_no_hook_and_no_mode_behind():
    network = nn.Sequential(nn.Linear(8, 2), nn.ReLU()).train()
    activity(network)
    assert network.training and not network[1]._forward_hooks
    with pytest.raises(RuntimeError):
        activity(network, torch.zeros(128, 3))
    assert not network[1]._forward_hooks


def test_a_network_without_activations_has_no_rows():
    assert activity(nn.Sequential(nn.Linear(8, 2))) == []
