"""What holds for every check: nothing outlasts it, it never crashes, several are read as one."""

import hashlib
import math
import random

import numpy as np
import pytest
import torch
from checks_case import Net, broken_evaluate, broken_step, make_pipeline, rows, shut, unbalanced
from torch import nn
from torch.nn import functional as F

from {{cookiecutter.project_slug}}.harness import checks, loop
from {{cookiecutter.project_slug}}.harness.checks import Check, explain, merge, run_check
from {{cookiecutter.project_slug}}.harness.checks.catalogue import (
    PREFLIGHT,
    REGULARIZED,
    SKELETON,
    TUNED,
)
from {{cookiecutter.project_slug}}.harness.figures import checks as figures
from {{cookiecutter.project_slug}}.harness.instruments import NonFiniteLoss

GATES = (
    "loss_at_init",
    "prior_bias",
    "human_metric",
    "input_independent_baseline",
    "overfit_one_batch",
    "last_seam",
    "sample_boundary",
)


# What images in one loss, without a loop of their own, have no place for.
ELSEWHERE = {
    "target_offset",
    "supervised_share",
    "loss_terms",
    "pad_invariance",
    "schedule",
    "best_checkpoint",
}
CHECKS = {check.__name__: check for check in SKELETON}


def names(check):
    return check.__name__


def found(name, verdict, *suspect, value=0.0):
    return Check(name, verdict, value, 1.0, "", f"{name} measured.", suspect)


def copied(start, stop):
    return {key: value.clone() for key, value in rows(start, stop).items()}


def digest_of(pipeline):
    """Everything a check could leave behind: generators, rows, the loaders' own state."""
    digest = hashlib.sha256()
    for part in (random.getstate(), np.random.get_state()):  # noqa: NPY002
        digest.update(repr(part).encode())
    digest.update(torch.get_rng_state().numpy().tobytes())
    for loader in (pipeline.train, pipeline.validation):
        digest.update(f"{loader.epoch} {loader.batch_size} {loader.num_rows}".encode())
        for key in sorted(loader.rows):
            digest.update(loader.rows[key].numpy().tobytes())
    hooks = nn.modules.module._global_forward_pre_hooks
    digest.update(f"{len(hooks)} {torch.is_grad_enabled()} {torch.get_default_dtype()}".encode())
    return digest.hexdigest()


@pytest.mark.parametrize("check", SKELETON, ids=names)
@pytest.mark.parametrize("broken", [False, True])
def test_nothing_a_check_does_outlasts_it(check, broken):
    fault = {"net": lambda: Net(lambda s, x: s.plain(x).softmax(1))} if broken else {}
    pipeline = make_pipeline(
        **{"net": lambda: Net(norm=nn.BatchNorm1d, dropout=0.2), **fault},
        train=copied(0, 300),
        validation=copied(900, 1000),
        augment=lambda x, generator: x + 0.01 * torch.randn(x.shape, generator=generator),
    )
    next(iter(pipeline.train))
    before = digest_of(pipeline)
    run_check(check, pipeline)
    assert digest_of(pipeline) == before


@pytest.mark.parametrize("check", SKELETON, ids=names)
def test_the_same_run_gives_the_same_evidence(check):
    first = run_check(check, make_pipeline())
    torch.manual_seed(99)
    assert run_check(check, make_pipeline()) == first


@pytest.mark.parametrize("check", SKELETON, ids=names)
def test_every_check_writes_one_sentence_with_what_it_measured(check):
    result = run_check(check, make_pipeline(train=unbalanced(), prior_bias=True))
    assert result.name == check.__name__
    verdict = "not_applicable" if check.__name__ in ELSEWHERE else "open"
    assert result.verdict == ("warn" if check.__name__ == "human_reference" else verdict)
    assert result.because.endswith(".") and "\n" not in result.because
    assert result.because.count(". ") == 0


def test_the_catalogue_has_every_check_once_and_the_seven_gates_among_them():
    assert len(CHECKS) == len(SKELETON)
    assert set(GATES) < set(CHECKS)
    assert set(REGULARIZED) | set(TUNED) | set(PREFLIGHT) <= set(SKELETON)


def test_a_check_explains_checks_of_the_catalogue_and_never_itself():
    for cause, effects in checks._EXPLAINS.items():
        assert {cause, *effects} <= set(CHECKS)
        assert cause not in set(effects) - set(checks._TRAINING)  # these explain each other


# ---- one fault, and all that shuts ------------------------------------------------------------


def cut(self, x):
    return self.head(self.trunk(x).detach())


PERMUTED = torch.randperm(900, generator=torch.Generator().manual_seed(0))
FAULTS = {
    "softmax in the model": (
        {"net": lambda: Net(lambda s, x: s.plain(x).softmax(1))},
        {"loss_contract", "overfit_one_batch"},
    ),
    "summed loss": (
        {"loss": lambda z, y: F.cross_entropy(z, y, reduction="sum")},
        {"loss_contract", "loss_at_init", "step_oracle"},
    ),
    "clamped loss": (
        {"loss": lambda z, y: F.cross_entropy(z, y).clamp(max=9.0)},
        {"loss_contract"},
    ),
    "unbalanced, zero bias": ({"train": unbalanced(20)}, {"prior_bias"}),
    "mean of batch means": ({"evaluate": broken_evaluate("mean of batch means")}, {"human_metric"}),
    "labels permuted": (
        {"train": {**rows(), "y": rows()["y"][PERMUTED]}},
        {"input_independent_baseline"},
    ),
    "tanh on the logits": (
        {"net": lambda: Net(lambda s, x: s.plain(x).tanh())},
        {"overfit_one_batch"},
    ),
    "validation not normalised": (
        {"validation": {**rows(900, 1300), "x": rows(900, 1300)["x"] * 3 + 1}},
        {"last_seam"},
    ),
    "row leaks forward in evaluation": (
        {
            "net": lambda: Net(
                lambda s, x: s.plain(x) + (0.1 * s.plain(x).roll(1, 0) * (not s.training))
            )
        },
        {"sample_boundary"},
    ),
    "trunk detached": ({"net": lambda: Net(cut)}, {"trainable_parameters"}),
    "zero_grad missing": ({"step": broken_step(zero_grad="never")}, {"step_oracle"}),
    "never eval": ({"evaluate": broken_evaluate("never eval")}, {"modes"}),
    "validation path scales": (
        {
            "prepare": lambda s: {
                **rows(0, 32),
                "x": rows(0, 32)["x"] * (1.01 if s == "train" else 1),
            }
        },
        {"split_parity"},
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_shuts_exactly_its_checks(fault):
    parts, expected = FAULTS[fault]
    torch.manual_seed(0)
    assert shut(make_pipeline(**parts)) == expected


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_healthy_pipeline_opens_them_all(precision):
    assert shut(make_pipeline(precision=precision)) == set()


# ---- running and reading ----------------------------------------------------------------------


def test_a_check_that_raises_is_inconclusive_and_never_a_pass():
    def fragile(pipeline):
        raise KeyError("x")

    result = run_check(fragile, make_pipeline())
    assert result.verdict == "inconclusive"
    assert "KeyError" in result.because


def test_a_loss_that_is_not_finite_shuts():
    def diverging(pipeline):
        raise NonFiniteLoss("the loss is nan")

    assert run_check(diverging, make_pipeline()).verdict == "shut"


def test_limits_are_keyword_arguments():
    pipeline = make_pipeline()
    (strict,) = checks.run_checks(
        [CHECKS["loss_at_init"]], pipeline, {"loss_at_init": {"max_scale": 0.99, "min_scale": 0.1}}
    )
    assert strict.verdict == "warn"


def test_a_value_that_is_no_number_is_left_out():
    assert found("loss_at_init", "shut", value=math.nan).value is None
    with pytest.raises(ValueError, match="fine"):
        found("loss_at_init", "fine")


def test_merging_keeps_the_worst_verdict_and_every_sentence():
    good, bad = found("modes", "open"), Check("modes", "shut", 2.0, 0.0, "", "Two.", ("b",))
    worst = merge("modes", {"Linear": good, "Net": bad})
    assert (worst.verdict, worst.value, worst.suspect) == ("shut", 2.0, ("b",))
    assert worst.because == "Linear: modes measured. Net: Two."
    assert merge("modes", {"Linear": good, "Net": good}).because == good.because


def test_one_cause_explains_the_rest():
    several = [
        found("split_parity", "open"),
        found("loss_contract", "shut", "the model ends in softmax"),
        found("loss_at_init", "shut", "something"),
        found("overfit_one_batch", "shut", "a stall"),
    ]
    text = explain(several)
    assert text.startswith("Repair loss_contract first (the model ends in softmax)")
    assert "explains loss_at_init and overfit_one_batch" in text
    assert "apart" not in text


def test_what_the_cause_does_not_explain_stands_apart():
    text = explain([found("loss_contract", "shut", "softmax"), found("modes", "shut", "eval")])
    assert text == "Repair loss_contract first (softmax). modes stands apart."


def test_nothing_bad_needs_no_explanation():
    assert explain([found("modes", "open"), found("human_reference", "warn")]) is None


def test_an_undecided_check_alone_is_the_one_to_repair():
    assert "Repair modes first" in explain([found("modes", "inconclusive", "it raises")])


# ---- other shapes of pipeline -----------------------------------------------------------------


class Two(Net):
    """Takes a dict: the picture and its mean."""

    def forward(self, x):
        return self.plain(x["picture"] + x["mean"][:, None, None])


def as_dict(given):
    x = given["x"]
    return {**given, "x": {"picture": x, "mean": x.flatten(1).mean(1, keepdim=True)}}


class Tokens(Net):
    """Takes whole numbers."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(17, 4)
        self.trunk[1] = nn.Linear(256, 32)

    def forward(self, x):
        return self.plain(self.embed(x))


def as_tokens(given):
    return {**given, "x": (given["x"].flatten(1) * 4).round().long().clamp(0, 16)}


@pytest.mark.parametrize(("net", "form"), [(Two, as_dict), (Tokens, as_tokens)])
def test_inputs_may_be_dicts_or_whole_numbers(net, form):
    pipeline = make_pipeline(
        net,
        train=form(rows()),
        validation=form(rows(900, 1300)),
        prepare=lambda split: form(rows(0, 32)),
        preprocessing=None,
    )
    assert shut(pipeline) == set()


def test_loaders_without_rows_of_their_own_are_iterated():
    train = list(loop.Loader(rows(), 64, shuffle=True))
    validation = list(loop.Loader(rows(900, 1300), 256))
    pipeline = make_pipeline()
    object.__setattr__(pipeline, "train", train)
    object.__setattr__(pipeline, "validation", validation)
    assert shut(pipeline) == {"loader"}  # a list hands out the same batches in every epoch


def test_other_targets_are_not_applicable_with_a_reason_and_never_crash():
    class Values:
        targets, metric_name = "real", "mean_squared_error"

        def loss(self, outputs, y):
            return F.mse_loss(outputs.mean(1), y)

        def metric(self, outputs, y):
            return self.loss(outputs, y).item()

    def valued(given):
        return {**given, "y": given["y"].float()}

    pipeline = make_pipeline(
        task=Values(),
        train=valued(rows()),
        validation=valued(rows(900, 1300)),
        prepare=lambda split: valued(rows(0, 32)),
    )
    results = checks.run_checks(SKELETON, pipeline)
    assert {r.verdict for r in results} <= {"open", "warn", "not_applicable"}
    asked = {r.name: r.because for r in results if r.verdict == "not_applicable"}
    assert "hand it over" in asked["loss_at_init"]
    assert "hand it over" in asked["human_metric"]


# ---- figures ----------------------------------------------------------------------------------


def test_figures_are_small_and_the_same_bytes_each_time(tmp_path):
    pipeline = make_pipeline(net=lambda: Net(dropout=0.2))
    before = digest_of(pipeline)
    for draw in (figures.draw_seam, figures.draw_overfit_batch):
        one, two = tmp_path / "one.png", tmp_path / "two.png"
        assert draw(one, pipeline) and draw(two, pipeline)
        assert one.read_bytes() == two.read_bytes()
        assert len(one.read_bytes()) < 100_000
    assert digest_of(pipeline) == before


def test_what_cannot_be_drawn_leaves_no_file(tmp_path):
    blank = make_pipeline(train={**rows(), "x": torch.zeros(900, 1, 8, 8)}, preprocessing=None)
    assert not figures.draw_seam(tmp_path / "seam.png", blank)
    assert not figures.draw_overfit_batch(tmp_path / "batch.png", blank)
    raising = make_pipeline(validation={**rows(900, 1300), "y": rows(900, 1300)["y"] + 1})
    assert not figures.draw_seam(tmp_path / "seam.png", raising)
    assert list(tmp_path.iterdir()) == []
