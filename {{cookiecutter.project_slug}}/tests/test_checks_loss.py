import pytest
import torch
from checks_case import Digits, Net, broken_step, make_pipeline, rows, unbalanced
from other_tasks import (
    Gru,
    Mlp,
    make_imbalanced_pipeline,
    make_multilabel_pipeline,
    make_real_pipeline,
    make_tokens_pipeline,
    multilabel_rows,
    real_rows,
)
from torch import nn
from torch.nn import functional as F

from {{cookiecutter.project_slug}}.harness import loop
from {{cookiecutter.project_slug}}.harness.checks import run_check
from {{cookiecutter.project_slug}}.harness.checks.contract import loss_contract
from {{cookiecutter.project_slug}}.harness.checks.loss import loss_at_init, prior_bias


def task_with(loss):
    """The task of the tests with another loss."""
    task = Digits()
    task.loss = loss
    return task


class Smoothed(Digits):
    """Label smoothing of 0.1: a floor above zero, reached at finite logits."""

    def loss(self, outputs, y):
        return F.cross_entropy(outputs, y, label_smoothing=0.1)

    def expected_loss(self, outputs, prior):
        return super().expected_loss(outputs, 0.9 * prior + 0.01)

    def optimum_loss(self):
        return self.loss(self.ideal_outputs(torch.tensor([0])), torch.tensor([0])).item()

    def ideal_outputs(self, y, scale=30.0):
        return F.one_hot(y, 10).float() * torch.log(torch.tensor(0.91 / 0.01)).item()


class Focal(Digits):
    """-(1 - p)^2 log p."""

    def loss_per_row(self, outputs, y):
        log_p = outputs.log_softmax(1).gather(1, y[:, None]).squeeze(1)
        return -((1 - log_p.exp()) ** 2) * log_p

    def loss(self, outputs, y):
        return self.loss_per_row(outputs, y).mean()

    def flat_loss(self, prior):
        return 0.9**2 * super().flat_loss(prior)

    def expected_loss(self, outputs, prior):
        log_p = outputs.double().log_softmax(1)
        return (-((1 - log_p.exp()) ** 2 * log_p) @ torch.as_tensor(prior)).mean().item()

    def prior_loss(self, prior):
        return self.expected_loss(torch.as_tensor(prior).log()[None], prior)


HEALTHY = {
    "plain": {},
    "bf16": {"precision": "bf16"},
    "smoothed": {"task": Smoothed()},
    "focal": {"task": Focal()},
    "batch norm": {"net": lambda: Net(norm=nn.BatchNorm1d)},
    "unbalanced, biased": {"train": unbalanced(), "prior_bias": True},
    "accumulated": {"accumulate": 3},
}


@pytest.mark.parametrize("case", HEALTHY)
def test_healthy_losses_open_both_checks(case):
    pipeline = make_pipeline(**HEALTHY[case])
    for check in (loss_at_init, loss_contract):
        assert run_check(check, pipeline).verdict == "open", check.__name__


@pytest.mark.parametrize(
    ("loss", "cause"),
    [
        (lambda z, y: F.cross_entropy(z, y, reduction="sum"), "summed"),
        (lambda z, y: F.nll_loss(z, y), "NLL"),
        (lambda z, y: -F.cross_entropy(z, y), "sign"),
        (lambda z, y: F.cross_entropy(z, y) / 10, "over the classes"),
        (lambda z, y: F.nll_loss(z.log_softmax(0), y), "batch axis"),
        (lambda z, y: F.cross_entropy(z * torch.nan, y), "log of zero"),
    ],
)
def test_the_value_of_a_wrong_first_loss_names_its_cause(loss, cause):
    found = run_check(loss_at_init, make_pipeline(task=task_with(loss)))
    assert found.verdict == "shut"
    assert any(cause in text for text in found.suspect[:2])


def test_a_loss_that_starts_below_what_its_task_knows_shuts():
    class Halved(Digits):
        def loss(self, outputs, y):
            return super().loss(outputs, y) / 2

        def loss_per_row(self, outputs, y):
            return super().loss_per_row(outputs, y) / 2

        def expected_loss(self, outputs, prior):
            return super().expected_loss(outputs, prior) / 2

    found = run_check(loss_at_init, make_pipeline(task=Halved()))
    assert found.verdict == "shut"
    assert found.value < found.limit[0]
    assert "flat_loss" in found.suspect[0]


def test_inputs_that_are_not_normalised_start_hot_and_only_warn():
    found = run_check(loss_at_init, make_pipeline(net=lambda: Net(lambda s, x: s.plain(x * 20))))
    assert found.verdict == "warn"
    assert found.value > found.limit[1]
    assert "hot init" in found.because


def test_a_pretrained_head_has_no_start_to_predict():
    pipeline = make_pipeline(pretrained_head=True)
    for check in (loss_at_init, prior_bias):
        assert run_check(check, pipeline).verdict == "not_applicable"


@pytest.mark.parametrize("share", [10, 45])
def test_a_bias_at_the_label_shares_opens_prior_bias_and_a_zero_bias_shuts_it(share):
    train = unbalanced(share)
    good = run_check(prior_bias, make_pipeline(train=train, prior_bias=True))
    bad = run_check(prior_bias, make_pipeline(train=train))
    assert (good.verdict, bad.verdict) == ("open", "shut")
    assert good.value < good.limit < bad.value


def test_prior_bias_in_another_class_order_is_named():
    class Reversed(Net):
        def forward(self, x):
            return super().forward(x).flip(1)

    found = run_check(prior_bias, make_pipeline(Reversed, train=unbalanced(), prior_bias=True))
    assert found.verdict == "shut"
    assert "class order" in found.suspect[0]


def test_balanced_labels_need_no_prior_bias():
    assert run_check(prior_bias, make_pipeline()).verdict == "not_applicable"


@pytest.mark.parametrize(
    ("fault", "cause"),
    [
        ({"step": broken_step(change=lambda z: z.softmax(1))}, "softmax or sigmoid"),
        ({"step": broken_step(change=lambda z: z.sigmoid())}, "softmax or sigmoid"),
        ({"step": broken_step(change=lambda z: z.relu())}, "ReLU"),
        ({"step": broken_step(change=lambda z: z.detach() + 0 * z)}, "detached"),
        ({"step": broken_step(labels=lambda y: (y + 1) % 10)}, "labels are changed"),
        ({"net": lambda: Net(lambda s, x: s.plain(x).softmax(1))}, "ends in softmax"),
        ({"net": lambda: Net(lambda s, x: s.plain(x).softmax(0))}, "batch axis"),
        ({"net": lambda: Net(lambda s, x: s.plain(x).relu())}, "ReLU"),
        ({"loss": lambda z, y: F.cross_entropy(z, y, ignore_index=4)}, "ignore_index"),
        (
            {"loss": lambda z, y: F.cross_entropy(z, y, reduction="none").clamp(max=3).mean()},
            "clamp",
        ),
        (
            {"loss": lambda z, y: F.cross_entropy(z, y, weight=torch.linspace(0.2, 2, 10))},
            "weights",
        ),
        ({"loss": lambda z, y: F.cross_entropy(z, y, reduction="sum")}, "summed"),
        ({"loss": lambda z, y: F.mse_loss(z, F.one_hot(y, 10).float())}, "another loss"),
        (
            {"loss": lambda z, y: F.binary_cross_entropy_with_logits(z, F.one_hot(y, 10).float())},
            "binary",
        ),
    ],
)
def test_a_broken_loss_shuts_the_contract_and_is_named(fault, cause):
    found = run_check(loss_contract, make_pipeline(**fault))
    assert found.verdict == "shut"
    assert any(cause in text for text in found.suspect), found


def test_the_contract_says_whether_the_loss_or_the_step_is_to_blame():
    softmaxed = task_with(lambda z, y: F.cross_entropy(z.softmax(1), y))
    in_task = run_check(loss_contract, make_pipeline(task=softmaxed))
    in_step = run_check(
        loss_contract, make_pipeline(step=broken_step(change=lambda z: z.softmax(1)))
    )
    assert "in task.loss" in in_task.suspect[0]
    assert "in the step" in in_step.suspect[0]


def test_declared_class_weights_open_the_contract_and_the_reverse_shuts_it():
    weights = torch.linspace(0.5, 1.5, 10)

    class Weighted(Digits):
        class_weights = weights

        def loss(self, outputs, y):
            return F.cross_entropy(outputs, y, weight=weights)

        def expected_loss(self, outputs, prior):
            shares = torch.as_tensor(prior) * weights.double()
            return super().expected_loss(outputs, (shares / shares.sum()).numpy())

    assert run_check(loss_contract, make_pipeline(task=Weighted())).verdict == "open"
    reverse = make_pipeline(
        task=Weighted(), loss=lambda z, y: F.cross_entropy(z, y, weight=weights.flip(0))
    )
    assert run_check(loss_contract, reverse).verdict == "shut"


def test_a_last_layer_that_starts_at_zero_is_no_squashed_output():
    class ZeroHead(Net):
        def __init__(self):
            super().__init__()
            nn.init.zeros_(self.head.weight)
            nn.init.zeros_(self.head.bias)

    assert run_check(loss_contract, make_pipeline(ZeroHead)).verdict == "open"


def test_a_task_without_the_methods_is_not_applicable_and_says_what_to_hand_over():
    class Bare:
        targets = "exclusive"
        loss = staticmethod(F.cross_entropy)

    found = run_check(loss_contract, make_pipeline(task=Bare(), train=rows()))
    assert found.verdict == "not_applicable"
    assert "ideal_outputs" in found.because


# ---- other kinds of target ----------------------------------------------------------------------

CE, BCE = F.cross_entropy, F.binary_cross_entropy_with_logits
RARE = multilabel_rows(shift=-4.0)
AWAY = {**real_rows(), "y": real_rows()["y"] + 10}


def with_penalty(weight):
    """A step that adds the squared weights to the loss."""

    def step(model, optimizer, batch, loss_fn, **options):
        def total(outputs, y):
            return loss_fn(outputs, y) + weight * sum(p.square().sum() for p in model.parameters())

        return loop.train_step(model, optimizer, batch, total, **options)

    return step


OTHER = {
    "labels": make_multilabel_pipeline,
    "labels, bf16": lambda: make_multilabel_pipeline(precision="bf16"),
    "rare labels, biased": lambda: make_multilabel_pipeline(train=RARE, prior_bias=True),
    "real": make_real_pipeline,
    "real, bf16": lambda: make_real_pipeline(precision="bf16"),
    "real, off centre, biased": lambda: make_real_pipeline(train=AWAY, prior_bias=True),
    "rare class": make_imbalanced_pipeline,
    "tokens": make_tokens_pipeline,
    "tokens, biased, bf16": lambda: make_tokens_pipeline(prior_bias=True, precision="bf16"),
    "tokens, recurrent": lambda: make_tokens_pipeline(Gru),
    "penalty on the weights": lambda: make_pipeline(step=with_penalty(0.05)),
}


@pytest.mark.parametrize("case", OTHER)
def test_the_start_of_other_targets_is_predicted(case):
    found = run_check(loss_at_init, OTHER[case]())
    assert found.verdict == "open", found.because


@pytest.mark.parametrize(
    ("make", "loss", "cause"),
    [
        (make_multilabel_pipeline, lambda z, y: BCE(z, y, reduction="sum"), "summed"),
        (make_multilabel_pipeline, lambda z, y: BCE(z, y, reduction="none").sum(1).mean(), "sum"),
        (make_multilabel_pipeline, lambda z, y: -BCE(z, y), "sign"),
        (make_multilabel_pipeline, lambda z, y: CE(z, y), "not the one the task declares"),
        (make_real_pipeline, lambda z, y: F.mse_loss(z, y, reduction="sum"), "summed"),
        (make_real_pipeline, lambda z, y: F.mse_loss(z, y) / 3, "not the one the task declares"),
        (make_tokens_pipeline, lambda z, y: CE(z.transpose(1, 2), y) * y.shape[1], "summed"),
        (make_tokens_pipeline, lambda z, y: CE(z.transpose(1, 2), y) / z.shape[2], "1/classes"),
        (make_tokens_pipeline, lambda z, y: CE(z.transpose(1, 2), y) * torch.nan, "ignored"),
    ],
)
def test_the_value_of_a_wrong_first_loss_names_its_cause_for_other_targets(make, loss, cause):
    found = run_check(loss_at_init, make(loss=loss))
    assert found.verdict == "shut"
    assert any(cause in text for text in found.suspect[:2]), found


def test_real_targets_far_from_zero_start_hot_without_a_bias():
    found = run_check(loss_at_init, make_real_pipeline(train=AWAY))
    assert found.verdict == "warn"
    assert "not centred" in found.suspect[0]


@pytest.mark.parametrize(
    ("make", "train"), [(make_multilabel_pipeline, RARE), (make_real_pipeline, AWAY)]
)
def test_a_bias_at_the_shares_or_the_mean_opens_prior_bias(make, train):
    good = run_check(prior_bias, make(train=train, prior_bias=True))
    bad = run_check(prior_bias, make(train=train))
    assert (good.verdict, bad.verdict) == ("open", "shut")
    assert good.value < good.limit < bad.value
    assert "set_prior_bias" in bad.suspect[0]


def test_a_bias_of_several_real_columns_is_judged_column_by_column():
    y = torch.stack([AWAY["y"], -AWAY["y"]], dim=1)
    train = {**AWAY, "y": y}

    def net(bias):
        model = Mlp(10, 2)
        model.head.bias.data = bias
        return model

    good = make_real_pipeline(lambda: net(y.mean(dim=0)), train=train)
    bad = make_real_pipeline(lambda: net(torch.zeros(2)), train=train)
    assert run_check(prior_bias, good).verdict == "open"
    assert run_check(prior_bias, bad).verdict == "shut"
    assert run_check(loss_at_init, good).verdict == "open"
    assert run_check(loss_contract, good).verdict == "open"


def test_tokens_without_a_bias_only_warn():
    assert run_check(prior_bias, make_tokens_pipeline()).verdict == "warn"
    assert run_check(prior_bias, make_tokens_pipeline(prior_bias=True)).verdict == "open"


@pytest.mark.parametrize("make", [make_multilabel_pipeline, make_real_pipeline])
def test_balanced_labels_and_centred_targets_need_no_bias(make):
    assert run_check(prior_bias, make()).verdict == "not_applicable"


@pytest.mark.parametrize(
    "make", [make_multilabel_pipeline, make_real_pipeline, make_tokens_pipeline]
)
def test_nothing_outlasts_the_checks_of_the_start(make):
    pipeline = make()
    random, epoch = torch.get_rng_state(), pipeline.train.epoch
    for check in (loss_at_init, prior_bias):
        run_check(check, pipeline)
    assert torch.equal(random, torch.get_rng_state())
    assert pipeline.train.epoch == epoch
