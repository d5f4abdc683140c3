"""input_independent_baseline and overfit_one_batch where targets are labels, numbers or tokens."""

import math

import pytest
import torch
from checks_case import Digits, make_pipeline, rows
from other_tasks import (
    Causal,
    Gru,
    Mlp,
    Real,
    Tokens,
    features,
    make_imbalanced_pipeline,
    make_multilabel_pipeline,
    make_real_pipeline,
    make_tokens_pipeline,
    multilabel_rows,
    real_rows,
    token_rows,
)
from torch import nn
from torch.nn import functional as F

from {{cookiecutter.project_slug}}.harness.checks import run_check
from {{cookiecutter.project_slug}}.harness.checks.baseline import (
    input_independent_baseline,
)
from {{cookiecutter.project_slug}}.harness.checks.confusion import confusion
from {{cookiecutter.project_slug}}.harness.checks.memorise import Trial
from {{cookiecutter.project_slug}}.harness.checks.overfit import (
    fingerprint,
    overfit_one_batch,
)


class TwoParts(nn.Module):
    """Reads a dict: an image, and the same upside down as whole numbers."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(128, 10)

    def forward(self, x):
        return self.head(torch.cat([x["image"].flatten(1), x["upside"].flatten(1) / 4.0], dim=1))


def two_parts(start=0, stop=900):
    given = rows(start, stop)
    upside = (given["x"].flip(2) * 4).round().long()
    return {**given, "x": {"image": given["x"], "upside": upside}}


def in_parts(**changes):
    return make_pipeline(
        TwoParts, **{"train": two_parts(), "validation": two_parts(900, 1300), **changes}
    )


@pytest.mark.parametrize("check", [input_independent_baseline, overfit_one_batch])
@pytest.mark.parametrize(
    "pipeline",
    [
        make_multilabel_pipeline(),
        make_multilabel_pipeline(
            precision="bf16",
            train=multilabel_rows(shift=-2.0),
            validation=multilabel_rows(900, 1200, shift=-2.0),
        ),
        make_real_pipeline(),
        make_real_pipeline(lambda: Mlp(10, 1), task=Real("rmse"), precision="bf16"),
        make_imbalanced_pipeline(),
        make_tokens_pipeline(),
        make_tokens_pipeline(Gru),
        in_parts(),
    ],
    ids=["labels", "rare labels", "r2", "rmse", "rare class", "tokens", "recurrent", "parts"],
)
def test_a_healthy_pipeline_of_any_target_opens(check, pipeline):
    found = run_check(check, pipeline)
    assert found.verdict == "open", found.because


# ---- learning from the input --------------------------------------------------------------------


def elsewhere(given):
    """The same rows with the targets of others."""
    order = torch.randperm(len(given["y"]), generator=torch.Generator().manual_seed(0))
    return {**given, "y": given["y"][order]}


@pytest.mark.parametrize(
    "pipeline",
    [
        make_multilabel_pipeline(train=elsewhere(multilabel_rows())),
        make_real_pipeline(train=elsewhere(real_rows())),
        make_tokens_pipeline(train=elsewhere(token_rows())),
        in_parts(train=elsewhere(two_parts())),
    ],
    ids=["labels", "numbers", "tokens", "parts"],
)
def test_targets_of_other_rows_shut(pipeline):
    found = run_check(input_independent_baseline, pipeline)
    assert found.verdict == "shut"
    assert found.value < found.limit


def test_an_update_that_goes_uphill_shuts():
    def uphill(model):
        return torch.optim.SGD(model.parameters(), lr=0.05, maximize=True)

    found = run_check(input_independent_baseline, make_pipeline(optimizer=uphill))
    assert found.verdict == "shut"
    assert found.value is None or found.value > found.limit
    assert "goes uphill" in found.suspect[0]


def test_labels_of_which_most_are_redrawn_are_a_weak_signal():
    def redrawn(start, stop):
        given, generator = rows(start, stop), torch.Generator().manual_seed(0)
        other = torch.randint(0, 10, given["y"].shape, generator=generator)
        lost = torch.rand(len(other), generator=generator) < 0.6
        return {**given, "y": torch.where(lost, other, given["y"])}

    pipeline = make_pipeline(train=redrawn(0, 900), validation=redrawn(900, 1300))
    found = run_check(input_independent_baseline, pipeline)
    assert found.verdict == "warn"
    assert "weak signal" in found.because


def test_targets_that_their_position_tells_are_no_leak():
    """Every second token is the same: a model without input knows, a constant answer does not."""

    def formatted(start, stop):
        given = token_rows(start, stop)
        every = torch.arange(given["y"].shape[1]) % 2 == 0
        y = torch.where(every & (given["y"] != -100), 5, given["y"])
        return {**given, "y": y}

    pipeline = make_tokens_pipeline(train=formatted(0, 256), validation=formatted(256, 400))
    assert run_check(input_independent_baseline, pipeline).verdict in ("open", "warn")


def noise(x, generator):
    return x + 0.3 * torch.randn(x.shape, generator=generator)


def moved(x, generator):
    down, right = torch.randint(-1, 2, (2,), generator=generator).tolist()
    return x.roll((down, right), (2, 3))


def cropped(x, generator):
    """Two by two pixels, enlarged."""
    top, left = torch.randint(0, 7, (2,), generator=generator).tolist()
    return F.interpolate(x[:, :, top : top + 2, left : left + 2], size=(8, 8))


def scrambled(x, generator):
    return x.flatten(1)[:, torch.randperm(64, generator=generator)].view_as(x)


@pytest.mark.parametrize("augment", [noise, moved])
def test_augmentation_that_keeps_the_label_opens(augment):
    found = run_check(input_independent_baseline, make_pipeline(augment=augment))
    assert found.verdict == "open", found.because


@pytest.mark.parametrize("augment", [cropped, scrambled])
def test_augmentation_that_destroys_the_label_shuts_and_is_named(augment):
    found = run_check(input_independent_baseline, make_pipeline(augment=augment))
    assert found.verdict == "shut"
    assert "augmentation" in found.suspect[0]


# ---- learning by heart --------------------------------------------------------------------------


def squared(outputs, y):
    return (outputs - y).square().mean()


def without_an_axis():
    """Outputs `(B, 1)` stay so, against targets `(B,)`."""
    return Mlp(10, 1, lambda s, x: s.head(s.trunk(x)))


class Broadcast(Real):
    """Silently."""

    def loss(self, outputs, y):
        return squared(outputs, y)

    def metric(self, outputs, y):
        return super().metric(outputs.reshape(len(y)), y)


def dead():
    model = Mlp(10, 1, lambda s, x: s.plain(x).relu())
    model.head.bias.data.fill_(-50.0)
    return model


def early(self, x):
    """The input is seen as one bit."""
    return self.plain((x[:, :1] > 0).float().expand_as(x))


@pytest.mark.parametrize(
    ("pipeline", "cause"),
    [
        (
            make_multilabel_pipeline(lambda: Mlp(20, 5, lambda s, x: s.plain(x).sigmoid())),
            "sigmoid",
        ),
        (make_multilabel_pipeline(lambda: Mlp(20, 5, early)), "conflicting duplicates"),
        (make_real_pipeline(without_an_axis, task=Broadcast(), loss=squared), "broadcast"),
        (make_real_pipeline(dead), "nothing moves"),
        (make_real_pipeline(lambda: Mlp(10, 1, lambda s, x: s.plain(0 * x))), "constant output"),
        (make_tokens_pipeline(lambda: Causal(change=lambda s, x: s.plain(0 * x))), "neutral step"),
    ],
)
def test_what_cannot_be_learned_by_heart_shuts_and_names_the_stall(pipeline, cause):
    found = run_check(overfit_one_batch, pipeline)
    assert found.verdict == "shut"
    assert any(cause in text for text in found.suspect), found


def test_sequences_that_begin_alike_are_learned_as_far_as_they_can_be():
    """One first token, then what comes: nobody can tell the second from the first."""

    def started(start, stop):
        given = token_rows(start, stop)
        x = torch.cat([torch.full_like(given["x"][:, :1], 3), given["x"][:, :-1]], dim=1)
        y = torch.cat([given["x"][:, :1], given["y"][:, :-1]], dim=1)
        return {**given, "x": x, "y": y}

    pipeline = make_tokens_pipeline(train=started(0, 256), validation=started(256, 400))
    assert run_check(overfit_one_batch, pipeline).verdict == "open"


def test_a_model_of_few_parameters_is_asked_for_few_examples():
    def line(start, stop):
        x = torch.from_numpy(features()[start:stop, :3])
        y = x @ torch.tensor([1.0, -2.0, 0.5])
        return {"x": x, "y": y, "id": torch.arange(start, stop)}

    class Line(nn.Module):
        def __init__(self):
            super().__init__()
            self.head = nn.Linear(3, 1)

        def forward(self, x):
            return self.head(x).squeeze(1)

    pipeline = make_real_pipeline(Line, train=line(0, 300), validation=line(300, 500))
    found = run_check(overfit_one_batch, pipeline)
    assert found.verdict == "open"
    assert "4 examples" in found.because


def test_targets_far_from_zero_are_not_learned_by_learning_their_mean():
    given = real_rows()
    far = {**given, "y": 50 + 5 * given["y"]}
    found = run_check(overfit_one_batch, make_real_pipeline(dead, train=far))
    assert found.verdict == "shut"


def test_a_metric_that_needs_more_rows_is_not_asked_for():
    class Picky(Tokens):
        def metric(self, outputs, y):
            if len(y) < 100:
                raise ValueError("too few rows")
            return super().metric(outputs, y)

    found = run_check(overfit_one_batch, make_tokens_pipeline(task=Picky()))
    assert found.verdict == "open"


@pytest.mark.parametrize("check", [input_independent_baseline, overfit_one_batch, confusion])
@pytest.mark.parametrize("make", [make_multilabel_pipeline, make_tokens_pipeline, make_pipeline])
def test_nothing_outlasts_it_and_it_says_the_same_again(check, make):
    pipeline = make()
    next(iter(pipeline.train))
    stored, state = pipeline.train.rows["x"].clone(), torch.get_rng_state()
    first = run_check(check, pipeline)
    assert pipeline.train.epoch == 1
    assert torch.equal(pipeline.train.rows["x"], stored)
    assert torch.equal(torch.get_rng_state(), state)
    again = run_check(check, pipeline)
    assert (again.verdict, again.because) == (first.verdict, first.because)


@pytest.mark.parametrize(
    ("value", "cause"),
    [
        (math.log(math.e + 9) - 1, "softmax or sigmoid before the loss"),
        (math.log(1 + 9 * math.exp(-2)), "tanh before the loss"),
        (math.log(10), "no gradient reaches the weights"),
        (math.log(4), "only the last bias learns"),
    ],
)
def test_the_value_of_a_stall_names_its_cause(value, cause):
    outputs = torch.eye(10)[:8]
    trial = Trial(0, 1e-3, 9.0, [value], value, 0.25, False, outputs, torch.arange(8) // 2)
    assert any(cause in text for text in fingerprint(Digits(), trial))
