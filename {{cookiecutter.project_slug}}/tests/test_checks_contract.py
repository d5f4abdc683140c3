"""loss_contract on targets other than one class per row, and its clauses that need them."""

import pytest
import torch
from checks_case import Digits, Net, broken_step, make_pipeline
from other_tasks import (
    Causal,
    Gru,
    Mlp,
    MultiLabel,
    Real,
    Tokens,
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

from {{cookiecutter.project_slug}}.harness import loop
from {{cookiecutter.project_slug}}.harness.checks import run_check
from {{cookiecutter.project_slug}}.harness.checks.contract import loss_contract

CE, BCE = F.cross_entropy, F.binary_cross_entropy_with_logits


def flat_ce(outputs, y, **options):
    return CE(outputs.flatten(0, 1), y.flatten(), **options)


def judged(pipeline):
    return run_check(loss_contract, pipeline)


# ---- healthy ------------------------------------------------------------------------------------


class PosWeighted(MultiLabel):
    pos_weight = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0])

    def loss(self, outputs, y):
        return BCE(outputs, y, pos_weight=self.pos_weight)

    def loss_per_row(self, outputs, y):
        return BCE(outputs, y, pos_weight=self.pos_weight, reduction="none").mean(dim=1)

    def flat_loss(self, prior):
        return self.expected_loss(torch.zeros(1, 5), prior)

    def expected_loss(self, outputs, prior):
        z, p = outputs.double(), torch.as_tensor(prior)
        absent, present = F.softplus(z), F.softplus(-z) * self.pos_weight
        return (p * present + (1 - p) * absent).mean().item()


class FocalBce(MultiLabel):
    """(1 - p)^2 of the right side, a quarter of the weight on labels that are present."""

    def loss_per_row(self, outputs, y):
        return self._focal(outputs, y).mean(dim=1)

    def loss(self, outputs, y):
        return self.loss_per_row(outputs, y).mean()

    def _focal(self, z, y):
        cost = BCE(z, y, reduction="none")
        return torch.where(y > 0.5, 0.25, 0.75).to(z) * (1 - (-cost).exp()) ** 2 * cost

    def flat_loss(self, prior):
        return self.expected_loss(torch.zeros(1, 5), prior)

    def expected_loss(self, outputs, prior):
        z, p = outputs.double(), torch.as_tensor(prior)
        present, absent = self._focal(z, torch.ones_like(z)), self._focal(z, torch.zeros_like(z))
        return (p * present + (1 - p) * absent).mean().item()


class Huber(Real):
    """The prior carries a sample of the targets, from which the loss of any output is exact."""

    kind = staticmethod(F.huber_loss)

    def loss(self, outputs, y):
        return self.kind(outputs, y)

    def loss_per_row(self, outputs, y):
        return self.kind(outputs, y, reduction="none")

    def prior(self, y):
        return torch.cat([torch.stack([y.mean(), y.var(unbiased=False)]), y]).double().numpy()

    def flat_loss(self, prior):
        return self.expected_loss(torch.full((1,), float(prior[0])), prior)

    prior_loss = flat_loss

    def expected_loss(self, outputs, prior):
        z, y = torch.broadcast_tensors(outputs.double()[:, None], torch.as_tensor(prior[2:])[None])
        return self.kind(z, y).item()


class Absolute(Huber):
    kind = staticmethod(F.l1_loss)


class BareReal:
    """An undeclared formula: the loss may be any."""

    targets, num_outputs = "real", 1

    def loss(self, outputs, y):
        return F.smooth_l1_loss(outputs, y)

    def optimum_loss(self):
        return 0.0

    def ideal_outputs(self, y, scale=30.0):
        return y

    def metric(self, outputs, y):
        return F.l1_loss(outputs, y).item()


class Smoothed(Tokens):
    def loss(self, outputs, y):
        return flat_ce(outputs, y, label_smoothing=0.1)

    def expected_loss(self, outputs, prior):
        return super().expected_loss(outputs, 0.9 * prior + 0.1 / self.num_outputs)

    def optimum_loss(self):
        y = torch.zeros(1, 4, dtype=torch.long)
        return self.loss(self.ideal_outputs(y), y).item()

    def ideal_outputs(self, y, scale=30.0):
        gap = torch.log(torch.tensor((0.9 + 0.1 / 32) / (0.1 / 32))).item()
        return F.one_hot(y.clamp(min=0), 32).float() * gap


class RowMeans(Tokens):
    """The mean over rows of the mean over a row's own targets."""

    def loss(self, outputs, y):
        return self.loss_per_row(outputs, y).mean()


class Dense(Digits):
    """One class per pixel: brighter than the mean, or not."""

    targets, num_outputs, class_names, ignore_index = "dense", 2, ("dark", "bright"), 255

    def loss(self, outputs, y):
        return CE(outputs, y, ignore_index=255)

    def loss_per_row(self, outputs, y):
        return CE(outputs, y, ignore_index=255, reduction="none").mean(dim=(1, 2))

    def prior(self, y):
        return super().prior(y[y != 255])[:2]

    def flat_loss(self, prior):
        return 0.6931471805599453

    def expected_loss(self, outputs, prior):
        z = outputs.double().movedim(1, -1)
        return (torch.logsumexp(z, dim=-1) - z @ torch.as_tensor(prior)).mean().item()

    def ideal_outputs(self, y, scale=30.0):
        return F.one_hot(y.clamp(max=1), 2).movedim(-1, 1).float() * scale


def make_dense_pipeline(net=lambda: nn.Conv2d(1, 2, 3, padding=1), **changes):
    digits = make_pipeline().train.rows
    train = {**digits, "y": (digits["x"][:, 0] > 0).long()}
    return make_pipeline(net, **{"task": Dense(), "train": train, "validation": train, **changes})


def with_penalty(weight):
    """A step that adds the sum of the squared weights to the loss."""

    def step(model, optimizer, batch, loss_fn, *, clip_norm, precision, accumulate):
        optimizer.zero_grad()
        loss = loss_fn(model(batch["x"]), batch["y"])
        loss = loss + weight * sum(p.square().sum() for p in model.parameters())
        loss.backward()
        optimizer.step()
        return loop.StepOutput(loss.detach(), None)

    return step


HEALTHY = {
    "labels": make_multilabel_pipeline,
    "labels, bf16": lambda: make_multilabel_pipeline(precision="bf16"),
    "labels, weighted": lambda: make_multilabel_pipeline(task=PosWeighted()),
    "labels, focal": lambda: make_multilabel_pipeline(task=FocalBce()),
    "labels, accumulated": lambda: make_multilabel_pipeline(accumulate=3),
    "real": make_real_pipeline,
    "real, bf16": lambda: make_real_pipeline(precision="bf16"),
    "real, huber": lambda: make_real_pipeline(task=Huber()),
    "real, absolute": lambda: make_real_pipeline(task=Absolute()),
    "real, undeclared": lambda: make_real_pipeline(task=BareReal()),
    "real, all positive": lambda: make_real_pipeline(
        lambda: Mlp(10, 1, lambda s, x: F.softplus(s.plain(x))),
        train={**real_rows(), "y": real_rows()["y"] + 5},
    ),
    "tokens": make_tokens_pipeline,
    "tokens, recurrent, bf16": lambda: make_tokens_pipeline(Gru, precision="bf16"),
    "tokens, smoothed": lambda: make_tokens_pipeline(task=Smoothed()),
    "tokens, row means": lambda: make_tokens_pipeline(task=RowMeans()),
    "rare class": make_imbalanced_pipeline,
    "pixels": make_dense_pipeline,
    "penalty on the weights": lambda: make_pipeline(step=with_penalty(0.1)),
    "penalty, real": lambda: make_real_pipeline(step=with_penalty(0.01)),
}


@pytest.mark.parametrize("case", HEALTHY)
def test_a_healthy_loss_of_any_kind_of_target_opens_the_contract(case):
    found = judged(HEALTHY[case]())
    assert found.verdict == "open", found.because
    assert abs(found.value) <= found.limit


# ---- faults -------------------------------------------------------------------------------------

LABELS = {
    "softmax before": ({"step": broken_step(change=lambda z: z.softmax(1))}, "softmax"),
    "sigmoid before": ({"step": broken_step(change=lambda z: z.sigmoid())}, "sigmoid"),
    "relu before": ({"step": broken_step(change=lambda z: z.relu())}, "ReLU"),
    "sigmoid in the model": ({"net": lambda: Mlp(20, 5, lambda s, x: s.plain(x).sigmoid())}, "sig"),
    "softmax in the model": (
        {"net": lambda: Mlp(20, 5, lambda s, x: s.plain(x).softmax(1))},
        "ends in softmax",
    ),
    "softmax loss": ({"loss": lambda z, y: CE(z, y)}, "softmax loss"),
    "summed": ({"loss": lambda z, y: BCE(z, y, reduction="sum")}, "summed"),
    "summed over rows": ({"loss": lambda z, y: BCE(z, y, reduction="none").mean(1).sum()}, "rows"),
    "summed over labels": ({"loss": lambda z, y: BCE(z, y) * 5}, "targets of a row"),
    "pos_weight undeclared": (
        {"loss": lambda z, y: BCE(z, y, pos_weight=torch.arange(1.0, 6.0))},
        "weights",
    ),
    "one label lost": ({"loss": lambda z, y: BCE(z[:, :4], y[:, :4])}, "real class"),
    "labels rolled": ({"step": broken_step(labels=lambda y: y.roll(1, 1))}, "labels are changed"),
    "sign": ({"loss": lambda z, y: -BCE(z, y)}, "sign"),
    "clamped": ({"loss": lambda z, y: BCE(z, y, reduction="none").clamp(max=20).mean()}, "clamped"),
    "detached": ({"step": broken_step(change=lambda z: z.detach() + 0 * z)}, "detached"),
}
REAL = {
    "column against row": ({"net": lambda: Mlp(10, 1, lambda s, x: s.plain(x)[:, None])}, "broad"),
    "relu in the model": ({"net": lambda: Mlp(10, 1, lambda s, x: s.plain(x).relu())}, "ends in"),
    "relu before": ({"step": broken_step(change=lambda z: z.relu())}, "cut"),
    "targets scaled": ({"step": broken_step(labels=lambda y: y * 0.5)}, "scaled"),
    "summed": ({"loss": lambda z, y: F.mse_loss(z, y, reduction="sum")}, "summed"),
    "sign": ({"loss": lambda z, y: -F.mse_loss(z, y)}, "sign"),
    "clamped": ({"loss": lambda z, y: ((z - y) ** 2).clamp(max=9).mean()}, "declares"),
    "root": ({"loss": lambda z, y: F.mse_loss(z, y).sqrt()}, "declares"),
    "halved": ({"loss": lambda z, y: F.mse_loss(z, y) / 2}, "factor"),
    "detached": ({"step": broken_step(change=lambda z: z.detach() + 0 * z)}, "detached"),
}
TOKENS = {
    "mask lost": (
        {"loss": lambda z, y: flat_ce(z, y.clamp(min=0))},
        "mask of the ignored targets is lost",
    ),
    "mask inverted": (
        {
            "loss": lambda z, y: (
                (CE(z.transpose(1, 2), y.clamp(min=0), reduction="none") * (y == -100)).sum()
                / (y == -100).sum().clamp(min=1)
            )
        },
        "NLL",
    ),
    "mean over all": (
        {"loss": lambda z, y: CE(z.transpose(1, 2), y, reduction="none").mean()},
        "also runs over the ignored",
    ),
    "space ignored": ({"loss": lambda z, y: flat_ce(z, y.where(y != 3, -100))}, "real class"),
    "last position lost": ({"loss": lambda z, y: flat_ce(z[:, :-1], y[:, :-1])}, "left out"),
    "summed over time": ({"loss": lambda z, y: flat_ce(z, y) * y.shape[1]}, "targets of a row"),
    "summed over the batch": ({"loss": lambda z, y: flat_ce(z, y) * len(y)}, "over rows"),
    "softmax over time": (
        {"net": lambda: Causal(change=lambda s, x: s.plain(x).softmax(1))},
        "not the classes",
    ),
    "log_softmax over time": (
        {"net": lambda: Causal(change=lambda s, x: s.plain(x).log_softmax(1))},
        "not the classes",
    ),
    "targets shifted": ({"step": broken_step(labels=lambda y: y.roll(1, 1))}, "labels are changed"),
}


@pytest.mark.parametrize(
    ("make", "faults"),
    [
        (make_multilabel_pipeline, LABELS),
        (make_real_pipeline, REAL),
        (make_tokens_pipeline, TOKENS),
    ],
    ids=["labels", "real", "tokens"],
)
def test_a_broken_loss_of_any_kind_of_target_is_shut_and_named(make, faults):
    for case, (fault, cause) in faults.items():
        found = judged(make(**fault))
        assert found.verdict == "shut", case
        assert any(cause in text for text in found.suspect), (case, found)


@pytest.mark.parametrize(
    ("make", "fault", "words"),
    [
        (make_multilabel_pipeline, LABELS["summed"], "every row twice costs"),
        (make_tokens_pipeline, TOKENS["summed over time"], "rows twice as long cost"),
    ],
)
def test_what_is_doubled_costs_the_same_or_the_sentence_says_so(make, fault, words):
    assert words in judged(make(**fault[0])).because


def test_pixels_shut_on_a_lost_mask_and_on_a_class_that_is_ignored():
    lost = make_dense_pipeline(loss=lambda z, y: CE(z, y.clamp(max=1)))
    assert "mask" in judged(lost).suspect[0]
    void = make_dense_pipeline(loss=lambda z, y: CE(z, y.where(y != 0, 255), ignore_index=255))
    assert "ignore_index is a real class" in " ".join(judged(void).suspect)


def test_a_weight_in_another_order_shuts_where_the_right_one_is_declared():
    reverse = PosWeighted.pos_weight.flip(0)
    pipeline = make_multilabel_pipeline(
        task=PosWeighted(), loss=lambda z, y: BCE(z, y, pos_weight=reverse)
    )
    found = judged(pipeline)
    assert found.verdict == "shut"
    assert "class weights in another order" in found.suspect


class FocalOfTheMean(Digits):
    """The focusing factor is taken of the batch's mean; the formula repeats the mistake."""

    def loss(self, outputs, y):
        mean = CE(outputs, y)
        return (1 - (-mean).exp()) ** 2 * mean

    def loss_per_row(self, outputs, y):
        cost = CE(outputs, y, reduction="none")
        return (1 - (-cost).exp()) ** 2 * cost

    def flat_loss(self, prior):
        return 0.9**2 * super().flat_loss(prior)

    def expected_loss(self, outputs, prior):
        mean = torch.tensor(super().expected_loss(outputs, prior))
        return ((1 - (-mean).exp()) ** 2 * mean).item()


def test_a_focal_factor_of_the_batch_mean_is_not_one_of_each_row():
    found = judged(make_pipeline(task=FocalOfTheMean()))
    assert found.verdict == "shut"
    assert "not of each row" in found.suspect[0]


def test_a_loss_of_the_whole_batch_that_is_declared_as_such_is_open():
    class RootOfTheMean(Real):
        def loss(self, outputs, y):
            return F.mse_loss(outputs, y).add(1e-12).sqrt()

        def flat_loss(self, prior):
            return float(prior[1]) ** 0.5

        def expected_loss(self, outputs, prior):
            return super().expected_loss(outputs, prior) ** 0.5

    assert judged(make_real_pipeline(task=RootOfTheMean())).verdict == "open"


def test_a_bounded_loss_that_is_declared_is_open():
    class Bounded(Huber):
        @staticmethod
        def kind(outputs, y, reduction="mean"):
            cost = 1 - (-((outputs - y) ** 2)).exp()
            return cost.mean() if reduction == "mean" else cost

    assert judged(make_real_pipeline(task=Bounded())).verdict == "open"


def test_the_log_of_a_probability_that_rounds_to_zero_shuts():
    found = judged(make_pipeline(loss=lambda z, y: F.nll_loss(z.softmax(1).log(), y)))
    assert found.verdict == "shut"
    assert "log_softmax" in found.suspect[0]


def test_one_output_for_exclusive_classes_is_always_certain():
    class One(Digits):
        num_outputs = 1

    found = judged(make_pipeline(task=One()))
    assert found.verdict == "shut"
    assert "two outputs" in found.suspect[0]


def test_batches_without_any_target_that_counts_must_cost_a_number_where_they_occur():
    train = {**token_rows(), "y": token_rows()["y"].clone()}
    train["y"][::3] = -100
    found = judged(make_tokens_pipeline(train=train, batch_size=2))
    assert found.verdict == "shut"
    assert "can be 0" in found.suspect[0]
    safe = Tokens()
    safe.loss = lambda z, y: flat_ce(z, y, reduction="sum") / (y != -100).sum().clamp(min=1)
    assert judged(make_tokens_pipeline(train=train, batch_size=2, task=safe)).verdict == "open"
    assert judged(make_tokens_pipeline(train=train, batch_size=32)).verdict == "open"


def test_outputs_with_an_axis_of_one_are_a_matter_of_the_loss():
    def loss(outputs, y):
        return F.mse_loss(outputs.squeeze(1), y)

    column = lambda: Mlp(10, 1, lambda s, x: s.plain(x)[:, None])  # noqa: E731
    task = Real()
    task.loss = lambda outputs, y: F.mse_loss(outputs.reshape(y.shape), y)
    assert judged(make_real_pipeline(column, task=task, loss=loss)).verdict == "open"


@pytest.mark.parametrize("case", ["labels", "real, huber", "tokens", "pixels", "rare class"])
def test_nothing_outlasts_the_contract(case):
    pipeline = HEALTHY[case]()
    random, epoch = torch.get_rng_state(), pipeline.train.epoch
    rows = {key: value.clone() for key, value in pipeline.train.rows.items()}
    judged(pipeline)
    assert torch.equal(random, torch.get_rng_state())
    assert pipeline.train.epoch == epoch
    assert all(torch.equal(rows[key], pipeline.train.rows[key]) for key in rows)


def test_rare_labels_do_not_change_the_contract():
    pipeline = make_multilabel_pipeline(train=multilabel_rows(shift=-4.0))
    assert judged(pipeline).verdict == "open"


def test_a_relu_that_cuts_every_output_to_zero_is_named():
    """The bias starts at the log of the shares, so no logit is above zero and none ever will be."""

    def net():
        made = Net(lambda self, x: self.plain(x).relu())
        nn.init.zeros_(made.head.weight)
        nn.init.constant_(made.head.bias, -2.3)
        return made

    found = run_check(loss_contract, make_pipeline(net))
    assert found.verdict == "shut"
    assert "all 0, although its last bias is negative" in found.because
    assert any("ReLU" in cause for cause in found.suspect)


def test_a_last_layer_of_zeros_says_nothing_about_squashing():
    def net():
        model = Mlp(10, 1)
        nn.init.zeros_(model.head.weight)
        nn.init.zeros_(model.head.bias)
        return model

    assert judged(make_real_pipeline(net)).verdict == "open"
    assert judged(make_pipeline(lambda: Net(lambda s, x: 0 * s.plain(x) + 1))).verdict == "open"
