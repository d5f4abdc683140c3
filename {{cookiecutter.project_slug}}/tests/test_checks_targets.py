import pytest
import torch
from checks_case import make_pipeline, rows
from other_tasks import (
    Causal,
    Gru,
    Tokens,
    make_multilabel_pipeline,
    make_real_pipeline,
    make_tokens_pipeline,
    token_rows,
)
from torch.nn import functional as F

from {{cookiecutter.project_slug}}.harness import loop
from {{cookiecutter.project_slug}}.harness.checks import run_check
from {{cookiecutter.project_slug}}.harness.checks.targets import (
    supervised_share,
    target_offset,
)


def asking(**parts):
    """The task of the tests that declares something else."""
    task = Tokens()
    for key, value in parts.items():
        setattr(task, key, value)
    return task


def with_y(change):
    """Training rows with other targets: `change(x, y)`."""
    given = token_rows()
    return {**given, "y": change(given["x"], given["y"].clone())}


def moved(by):
    """Targets that lie `by` positions ahead of the inputs instead of one."""

    def change(x, y):
        shifted = torch.full_like(x, -100)
        if by > 0:
            shifted[:, :-by] = x[:, by:]
        else:
            shifted[:, -by:] = x[:, : x.shape[1] + by]
        return torch.where(shifted == 0, -100, shifted)

    return with_y(change)


# ---- which target -------------------------------------------------------------------------------


class OneAhead(Tokens):
    """The loss looks one position ahead: right where the data holds the inputs themselves, once too
    often where it is shifted already."""

    def loss(self, outputs, y):
        return super().loss(outputs[:, :-1], y[:, 1:])


def noisy_inputs(share=0.2):
    given = token_rows()
    generator = torch.Generator().manual_seed(0)
    lost = torch.rand(given["x"].shape, generator=generator) < share
    return {**given, "x": torch.where(lost, 2, given["x"])}


def copied_with_noise(share=0.3):
    """Runs of three ids, so that a copy also agrees with the next position half of the time."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randint(3, 30, (256, 11), generator=generator).repeat_interleave(3, 1)[:, :32]
    noise = torch.randint(3, 30, x.shape, generator=generator)
    y = torch.where(torch.rand(x.shape, generator=generator) < share, noise, x)
    return {**token_rows(), "x": x, "y": y}


@pytest.mark.parametrize(
    "parts",
    [
        {},
        {"net": Gru, "precision": "bf16"},
        {"accumulate": 4},
        {"train": moved(0), "task": OneAhead()},
        {"train": noisy_inputs()},
        {"task": asking(pad_id=None, end_id=None)},
    ],
)
def test_targets_one_position_ahead_open(parts):
    found = run_check(target_offset, make_tokens_pipeline(**parts))
    assert found.verdict == "open", found.because


@pytest.mark.parametrize(
    ("parts", "cause"),
    [
        ({"train": moved(0)}, "not shifted"),
        ({"train": moved(2)}, "shifted twice"),
        ({"task": OneAhead()}, "shifted twice"),
        ({"train": copied_with_noise()}, "the target is the input itself"),
        ({"train": moved(-1)}, "backwards"),
        ({"train": moved(3)}, "3 positions"),
    ],
)
def test_targets_at_another_offset_shut_and_are_named(parts, cause):
    found = run_check(target_offset, make_tokens_pipeline(**parts))
    assert found.verdict == "shut"
    assert cause in found.suspect[0]


def test_a_model_that_may_see_the_future_may_be_asked_for_its_inputs():
    copying = {"train": moved(0), "task": asking(causal=False)}
    found = run_check(target_offset, make_tokens_pipeline(lambda: Causal(causal=False), **copying))
    assert found.verdict == "warn"


@pytest.mark.parametrize(
    "pipeline",
    [
        make_pipeline(),
        make_real_pipeline(),
        make_multilabel_pipeline(),
        make_tokens_pipeline(train=with_y(lambda x, y: x.flip(1))),
        make_tokens_pipeline(train=with_y(lambda x, y: (x * 7) % 5)),
    ],
    ids=["classes", "numbers", "labels", "reversed", "tagged"],
)
def test_targets_that_are_no_moved_inputs_do_not_apply(pipeline):
    assert run_check(target_offset, pipeline).verdict == "not_applicable"


# ---- whether it counts --------------------------------------------------------------------------


def prompted(x, y):
    """The first ten positions are a prompt."""
    y[:, :10] = -100
    return y


def end_is_padding(x, y):
    return torch.where(y == 1, -100, y)


class PadIsEnd(Tokens):
    """One id for both: only the first one counts."""

    pad_id = 1


class Forgetful(Tokens):
    """The loss ignores the end token as well."""

    def loss(self, outputs, y):
        return super().loss(outputs, torch.where(y == 1, -100, y))


class Counting(Tokens):
    """Padding is marked by its own id, and the loss does not know."""

    ignore_index = 0

    def loss(self, outputs, y):
        return F.cross_entropy(outputs.flatten(0, 1), y.flatten())


PADDED = with_y(lambda x, y: torch.where(y == -100, 0, y))


@pytest.mark.parametrize(
    ("parts", "share"),
    [
        ({}, 0.825),
        ({"net": Gru, "precision": "bf16", "accumulate": 2}, 0.825),
        ({"train": with_y(prompted), "task": asking(expected_supervised_share=0.5)}, 0.5),
        ({"task": PadIsEnd()}, 0.825),
    ],
)
def test_targets_that_count_open_with_their_share(parts, share):
    found = run_check(supervised_share, make_tokens_pipeline(**parts))
    assert found.verdict == "open", found.because
    assert found.value == pytest.approx(share, abs=0.03)


@pytest.mark.parametrize(
    ("parts", "cause"),
    [
        ({"train": with_y(end_is_padding)}, "end is masked"),
        ({"task": Forgetful()}, "ignores the end token"),
        ({"task": Counting(), "train": PADDED}, "does not know the ignore_index"),
        ({"task": asking(ignore_index=None), "train": PADDED}, "padding is counted"),
        ({"train": with_y(lambda x, y: torch.full_like(y, -100))}, "truncation"),
        (
            {
                "train": {
                    key: value.repeat_interleave(2, 0) if key != "id" else torch.arange(512)
                    for key, value in with_y(
                        lambda x, y: torch.where(torch.arange(len(y))[:, None] % 3 > 0, -100, y)
                    ).items()
                },
                "batch_size": 1,
            },
            "truncation",
        ),
        ({"task": asking(expected_supervised_share=0.4)}, "mask of the targets is lost"),
    ],
)
def test_targets_that_are_lost_or_should_not_count_shut_and_are_named(parts, cause):
    found = run_check(supervised_share, make_tokens_pipeline(**parts))
    assert found.verdict == "shut"
    assert cause in found.suspect[0], found


def test_some_rows_without_targets_or_a_mask_that_hides_nothing_warn():
    some = with_y(lambda x, y: torch.where(torch.arange(len(y))[:, None] % 20 == 0, -100, y))
    idle = run_check(supervised_share, make_tokens_pipeline(train=some))
    full = token_rows(length=32, shortest=32)
    assert (full["y"] != -100).all()
    whole = run_check(supervised_share, make_tokens_pipeline(train=full))
    assert (idle.verdict, whole.verdict) == ("warn", "warn")
    assert "5.1% of the rows" in idle.because and "none is ignored" in whole.because


def test_exclusive_classes_may_ignore_rows_too():
    task = make_pipeline().task
    task.ignore_index = -100
    task.loss = lambda z, y: F.cross_entropy(z, y, ignore_index=-100)
    some = {**rows(), "y": torch.where(torch.arange(900) % 300 == 0, -100, rows()["y"])}
    assert run_check(supervised_share, make_pipeline(task=task, train=some)).verdict == "open"
    none = {**rows(), "y": torch.full((900,), -100)}
    assert run_check(supervised_share, make_pipeline(task=task, train=none)).verdict == "shut"


@pytest.mark.parametrize("pipeline", [make_pipeline(), make_real_pipeline()])
def test_tasks_in_which_every_target_counts_do_not_apply(pipeline):
    assert run_check(supervised_share, pipeline).verdict == "not_applicable"


@pytest.mark.parametrize("check", [target_offset, supervised_share])
def test_nothing_outlasts_it_and_it_says_the_same_again(check):
    pipeline = make_tokens_pipeline(train=loop.take(token_rows(), torch.arange(64)))
    next(iter(pipeline.train))
    before, state = pipeline.train.epoch, torch.get_rng_state()
    first = run_check(check, pipeline)
    assert pipeline.train.epoch == before
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(99)
    assert run_check(check, pipeline) == first
    assert first.because.endswith(".") and "\n" not in first.because


def test_a_loader_without_an_end_is_read_as_far_as_it_has_rows():
    class Infinite(loop.Loader):
        sampler = "infinite"

        def __iter__(self):
            while True:
                yield from super().__iter__()

    y = token_rows()["y"].clone()
    y[:8] = -100
    train = {**token_rows(), "y": y}
    found = run_check(supervised_share, make_tokens_pipeline(train=train, loader=Infinite))
    assert found.verdict == "warn"
    assert "3.1% of the rows have no target" in found.because
