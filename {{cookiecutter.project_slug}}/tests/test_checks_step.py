import pytest
import torch
from checks_case import Net, broken_step, make_pipeline, rows, with_x
from torch import nn

from {{cookiecutter.project_slug}}.harness import loop
from {{cookiecutter.project_slug}}.harness.checks import run_check
from {{cookiecutter.project_slug}}.harness.checks.overfit import overfit_one_batch
from {{cookiecutter.project_slug}}.harness.checks.parameters import trainable_parameters
from {{cookiecutter.project_slug}}.harness.checks.step import step_oracle


def adam(rate):
    return lambda model: torch.optim.Adam(model.parameters(), lr=rate)


def sgd(rate, **options):
    return lambda model: torch.optim.SGD(model.parameters(), lr=rate, **options)


def normed():
    return Net(norm=nn.BatchNorm1d, dropout=0.2)


HEALTHY = {
    "adam": {},
    "bf16": {"precision": "bf16"},
    "batch norm and dropout": {"net": normed},
    "clip": {"clip_norm": 1.0, "optimizer": sgd(1e-2)},
    "accumulated": {"accumulate": 3, "net": normed},
    "accumulated in bf16": {"accumulate": 3, "precision": "bf16"},
    "slow sgd": {"optimizer": sgd(1e-4)},
}


@pytest.mark.parametrize("case", HEALTHY)
def test_a_healthy_step_opens(case):
    pipeline = make_pipeline(**HEALTHY[case])
    for check in (step_oracle, trainable_parameters):
        assert run_check(check, pipeline).verdict == "open", check.__name__


@pytest.mark.parametrize(
    ("step", "parts", "cause"),
    [
        (broken_step(zero_grad="never"), {}, "zero_grad is missing"),
        (broken_step(zero_grad="never"), {"optimizer": sgd(1e-3)}, "zero_grad is missing"),
        (broken_step(zero_grad="between"), {}, "between backward and step"),
        (broken_step(clip=False), {"clip_norm": 1.0}, "clip that does not act"),
        (broken_step(mode=False), {"net": normed}, "mode"),
        (broken_step(share=lambda part, whole: 1.0), {}, "not divided"),
        (broken_step(share=lambda part, whole: -part / whole), {}, "sign"),
        (broken_step(inputs=lambda x: x + torch.rand_like(x)), {}, "batch"),
    ],
)
def test_a_wrong_line_in_the_step_shuts_the_oracle_and_is_named(step, parts, cause):
    found = run_check(step_oracle, make_pipeline(step=step, **parts))
    assert found.verdict == "shut"
    assert cause in found.suspect[0]


def test_the_same_step_without_a_fault_opens():
    assert run_check(step_oracle, make_pipeline(step=broken_step())).verdict == "open"


def test_parts_of_equal_weight_whatever_their_rows_shut_the_oracle():
    step = broken_step(share=lambda part, whole: 1 / 3 if part < whole else 1.0)
    found = run_check(step_oracle, make_pipeline(step=step))
    assert found.verdict == "shut"
    assert "unequal" in found.because


def test_an_absurd_clip_is_a_fault_although_the_step_applies_it_right():
    found = run_check(step_oracle, make_pipeline(clip_norm=1e-4))
    assert found.verdict == "shut"
    assert "clip_norm" in found.suspect[0]


def clipped(scale=1.0, *, early=False):
    """A clip of gradients `scale` times too large, or before there are any."""

    def step(model, optimizer, batch, loss_fn, *, clip_norm, **options):
        optimizer.zero_grad(set_to_none=False)
        if early:
            nn.utils.clip_grad_norm_(model.parameters(), clip_norm)
        loss = loss_fn(model(batch["x"]), batch["y"])
        (loss * scale).backward()
        if not early:
            nn.utils.clip_grad_norm_(model.parameters(), clip_norm)
        for parameter in model.parameters():
            parameter.grad /= scale
        optimizer.step()
        return loop.StepOutput(loss.detach(), None)

    return step


@pytest.mark.parametrize(
    ("step", "cause"),
    [(clipped(early=True), "before backward"), (clipped(65536.0), "before unscale")],
)
def test_a_clip_in_the_wrong_place_shuts_and_is_named(step, cause):
    assert run_check(step_oracle, make_pipeline(step=clipped(), clip_norm=5.0)).verdict == "open"
    found = run_check(step_oracle, make_pipeline(step=step, clip_norm=5.0, optimizer=sgd(1e-2)))
    assert found.verdict == "shut"
    assert cause in found.suspect[0]


def test_a_step_that_updates_nothing_shuts():
    class Skipping(torch.optim.SGD):
        def step(self, closure=None):
            return None

    def skipping(model):
        return Skipping(model.parameters(), lr=1e-2)

    assert run_check(trainable_parameters, make_pipeline(optimizer=skipping)).verdict == "shut"


def test_a_loss_that_keeps_its_graph_shuts():
    def step(model, optimizer, batch, loss_fn, **options):
        optimizer.zero_grad()
        loss = loss_fn(model(batch["x"]), batch["y"])
        loss.backward()
        optimizer.step()
        return loop.StepOutput(loss, None)

    found = run_check(step_oracle, make_pipeline(step=step))
    assert found.verdict == "shut"
    assert "detach" in found.suspect[0]


class Carrying(Net):
    """Adds what the last batch left: its mean, or the number of batches seen."""

    def __init__(self, what):
        super().__init__()
        self.what, self.left = what, 0.0

    def forward(self, x):
        hidden = self.trunk(x) + self.left
        self.left = hidden.detach().mean(dim=0) if self.what == "mean" else self.left + 1e-3
        return self.head(hidden)


def test_a_state_carried_from_batch_to_batch_shuts_and_a_counter_does_not():
    found = run_check(step_oracle, make_pipeline(lambda: Carrying("mean")))
    assert found.verdict == "shut"
    assert "carried" in found.suspect[0]
    counting = make_pipeline(lambda: Carrying("count"), accumulate_step=None)
    assert run_check(step_oracle, counting).verdict == "open"


def cut(self, x):
    return self.head(self.trunk(x).detach())


class Hidden(Net):
    """One layer in a plain list: no optimizer ever sees it."""

    def __init__(self):
        super().__init__()
        self.layers = [nn.Linear(32, 32)]

    def forward(self, x):
        return self.head(self.layers[0](self.trunk(x)).relu())


class Dead(Net):
    def __init__(self):
        super().__init__()
        nn.init.constant_(self.trunk[1].bias, -50.0)


class Unused(Net):
    def __init__(self):
        super().__init__()
        self.aside = nn.Linear(3, 3)


def early(model):
    """Built before the head was replaced."""
    old = nn.Linear(32, 10)
    return torch.optim.Adam([*model.trunk.parameters(), *old.parameters()], lr=1e-3)


def twice(model):
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    optimizer.param_groups.append(dict(optimizer.param_groups[0]))
    return optimizer


@pytest.mark.parametrize(
    ("fault", "cause"),
    [
        ({"net": lambda: Net(cut)}, "graph is cut"),
        ({"net": Hidden}, "plain list"),
        ({"net": Dead}, "dead"),
        ({"net": Unused}, "never used"),
        ({"optimizer": lambda model: torch.optim.Adam(model.head.parameters())}, "forgotten"),
        ({"optimizer": early}, "built before"),
        ({"optimizer": twice}, "overlap"),
        ({"step": broken_step(zero_grad="between")}, "no gradient|rate 0|between"),
    ],
)
def test_a_tensor_that_takes_no_part_shuts_and_is_named(fault, cause):
    found = run_check(trainable_parameters, make_pipeline(**fault))
    assert found.verdict == "shut"
    assert any(part in text for part in cause.split("|") for text in found.suspect)


class FrozenTrunk(Net):
    def __init__(self):
        super().__init__()
        for parameter in self.trunk.parameters():
            parameter.requires_grad_(False)


@pytest.mark.parametrize(
    ("declared", "verdict"), [(None, "warn"), (("trunk",), "open"), (("head",), "shut")]
)
def test_frozen_tensors_are_measured_against_what_was_declared(declared, verdict):
    found = run_check(trainable_parameters, make_pipeline(FrozenTrunk, frozen=declared))
    assert found.verdict == verdict


class FreedByEval(Net):
    """The trunk is frozen, until the model is evaluated."""

    def __init__(self):
        super().__init__()
        self.trunk.requires_grad_(False)

    def train(self, mode=True):
        if not mode:
            self.trunk.requires_grad_(True)
        return super().train(mode)


def test_freezing_that_depends_on_the_mode_shuts():
    found = run_check(trainable_parameters, make_pipeline(FreedByEval, frozen=("trunk",)))
    assert found.verdict == "shut"
    assert "train() and eval()" in found.because


def test_declared_frozen_tensors_that_move_shut():
    def step(model, optimizer, batch, loss_fn, **options):
        output = loop.train_step(model, optimizer, batch, loss_fn, **options)
        with torch.no_grad():
            model.trunk[1].weight.mul_(0.99)
        return output

    found = run_check(
        trainable_parameters, make_pipeline(FrozenTrunk, frozen=("trunk",), step=step)
    )
    assert found.verdict == "shut"
    assert "declared frozen" in found.because


class Words(nn.Module):
    """Pixels as words: a table, and a layer that is tied to it, or a copy of it."""

    def __init__(self, tied):
        super().__init__()
        self.table, self.layer = nn.Embedding(10, 16), nn.Linear(16, 10)
        if tied:
            self.layer.weight = self.table.weight
        else:
            self.layer.weight = nn.Parameter(self.table.weight.detach().clone())

    def forward(self, x):
        return self.layer(self.table((x.flatten(1) * 3).long().clamp(0, 9)).mean(dim=1))


def test_a_head_that_starts_as_a_copy_of_the_embedding_warns_and_a_tied_one_opens():
    assert run_check(trainable_parameters, make_pipeline(lambda: Words(True))).verdict == "open"
    found = run_check(trainable_parameters, make_pipeline(lambda: Words(False)))
    assert found.verdict == "warn"
    assert "tied" in found.suspect[0]


def test_an_output_layer_frozen_by_a_wrong_test_shuts():
    class Inverted(Net):
        def __init__(self):
            super().__init__()
            for parameter in self.head.parameters():
                parameter.requires_grad_(False)

    found = run_check(trainable_parameters, make_pipeline(Inverted))
    assert found.verdict == "shut"
    assert "name test" in found.suspect[0]


def test_a_bias_before_batch_norm_counts_although_its_gradient_is_rounding():
    pipeline = make_pipeline(lambda: Net(norm=nn.BatchNorm1d), optimizer=sgd(1e-3))
    assert run_check(trainable_parameters, pipeline).verdict == "open"


@pytest.mark.parametrize(
    "parts",
    [
        {},
        {"optimizer": adam(1e-2), "net": normed},
        {"optimizer": sgd(1e-2, momentum=0.9), "precision": "bf16"},
        {"augment": lambda x, g: x + 0.1 * torch.randn(x.shape, generator=g)},
    ],
)
def test_a_healthy_pipeline_learns_a_handful_of_examples_by_heart(parts):
    found = run_check(overfit_one_batch, make_pipeline(**parts))
    assert found.verdict == "open"
    assert found.value <= found.limit


def test_a_rate_that_moves_nothing_only_warns_and_one_that_wrecks_shuts():
    low = run_check(overfit_one_batch, make_pipeline(optimizer=adam(1e-7)))
    high = run_check(overfit_one_batch, make_pipeline(optimizer=sgd(100.0)))
    assert (low.verdict, high.verdict) == ("warn", "shut")
    assert "too low" in low.suspect[0]
    assert "too high" in high.suspect[0]


@pytest.mark.parametrize(
    ("fault", "cause"),
    [
        ({"net": lambda: Net(lambda s, x: s.plain(x).softmax(1))}, "softmax"),
        ({"net": lambda: Net(lambda s, x: s.plain(x).tanh())}, "tanh"),
        ({"net": Dead}, "constant output"),
        ({"optimizer": sgd(1e-2, weight_decay=3.0)}, "weight decay"),
        ({"step": broken_step(zero_grad="between")}, "train_step"),
    ],
)
def test_what_cannot_be_learned_by_heart_shuts_and_names_the_stall_or_the_part(fault, cause):
    found = run_check(overfit_one_batch, make_pipeline(**fault))
    assert found.verdict == "shut"
    assert any(cause in text for text in found.suspect)


def test_decoupled_decay_that_eats_the_weights_shuts():
    def decayed(model):
        return torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=1.0)

    found = run_check(overfit_one_batch, make_pipeline(optimizer=decayed))
    assert found.verdict == "shut"
    assert "decay" in found.suspect[0]


def test_examples_are_distinct_and_of_several_classes_or_the_check_cannot_decide():
    same = run_check(overfit_one_batch, make_pipeline(train=with_x(torch.zeros_like)))
    one_class = {**rows(), "y": torch.zeros_like(rows()["y"])}
    single = run_check(overfit_one_batch, make_pipeline(train=one_class))
    assert (same.verdict, single.verdict) == ("inconclusive", "inconclusive")
