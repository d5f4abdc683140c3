import math

import pytest
import torch
from checks_case import Net, Sorted, broken_evaluate, broken_step, make_pipeline, moved, rows
from other_tasks import make_multilabel_pipeline, make_real_pipeline, make_tokens_pipeline
from torch import nn

from {{cookiecutter.project_slug}}.harness import loop
from {{cookiecutter.project_slug}}.harness.checks import run_check
from {{cookiecutter.project_slug}}.harness.checks.split import (
    split_hygiene,
    split_parity,
)


def changed(**parts):
    """The validation path of `prepare` with other x, y."""
    return lambda split: {**rows(0, 32), **(parts if split == "validation" else {})}


def drawing(split):
    given = rows(0, 32)
    return {**given, "x": given["x"] + 0.01 * torch.rand_like(given["x"])}


@pytest.mark.parametrize("net", [Net, lambda: Net(norm=nn.BatchNorm1d, dropout=0.3)])
def test_one_record_two_paths_one_tensor_opens(net):
    pipeline = make_pipeline(net, augment=moved, accumulate=3)
    assert run_check(split_parity, pipeline).verdict == "open"


@pytest.mark.parametrize(
    ("fault", "cause"),
    [
        ({"prepare": changed(x=rows(0, 32)["x"] * 1.001)}, "normalised"),
        ({"prepare": changed(x=rows(0, 32)["x"].flip(3))}, "normalised"),
        ({"prepare": changed(x=rows(0, 32)["x"].roll(1, 0))}, "reordered"),
        ({"prepare": changed(y=rows(0, 32)["y"].roll(1))}, "reordered"),
        ({"prepare": changed(x=rows(0, 32)["x"].half())}, "prepared differently"),
        ({"prepare": drawing}, "random numbers"),
        ({"step": broken_step(inputs=lambda x: 2 * x)}, "the step or the evaluation"),
        ({"evaluate": broken_evaluate("inputs scaled")}, "the step or the evaluation"),
        ({"loader": Sorted}, "reordered"),
    ],
)
def test_a_path_of_its_own_for_one_split_shuts_and_is_named(fault, cause):
    found = run_check(split_parity, make_pipeline(**fault))
    assert found.verdict == "shut"
    assert any(cause in text for text in found.suspect)


def test_without_prepare_it_says_what_to_hand_over():
    found = run_check(split_parity, make_pipeline(prepare=None))
    assert found.verdict == "not_applicable"
    assert "prepare" in found.because


def test_a_weighted_sampler_has_equal_paths_where_it_draws():
    class Weighted(loop.Loader):
        def _order(self):
            count = self.num_rows
            return torch.randint(count, (count,), generator=self._generator("cpu"))

    class OwnWeights(loop.Loader):
        def _order(self):
            generator = self._generator("cpu")
            return torch.multinomial(torch.ones(900), 900, True, generator=generator)

    for loader in (Weighted, OwnWeights):
        found = run_check(split_parity, make_pipeline(loader=loader))
        assert found.verdict == "open", found
    found = run_check(
        split_parity,
        make_pipeline(loader=Weighted, step=broken_step(inputs=lambda x: 2 * x)),
    )
    assert found.verdict == "shut"


# ---- what one split knows of the other ----------------------------------------------------------


def copied(share, change=lambda x: x):
    """Validation rows of which every `1/share`-th is that of a training row, changed."""
    given = rows(900, 1300)
    x, y = given["x"].clone(), given["y"].clone()
    places = torch.arange(0, 400, round(1 / share))
    x[places], y[places] = change(rows()["x"][places]), rows()["y"][places]
    return {"x": x, "y": y, "id": given["id"]}


def noise(size):
    def change(x):
        return x + size * torch.randn(x.shape, generator=torch.Generator().manual_seed(0))

    return change


def doubled_labels(count):
    """Training rows of which `count` occur again with another label."""
    given = rows()
    x, y = given["x"].clone(), given["y"].clone()
    x[:count], y[:count] = x[count : 2 * count], (y[count : 2 * count] + 1) % 10
    return {"x": x, "y": y, "id": given["id"]}


def short_sequences(start, stop):
    """Three ids of four: 64 inputs in all."""
    x = torch.randint(4, (1300, 3), generator=torch.Generator().manual_seed(0))
    return {"x": x[start:stop], "y": x[start:stop].sum(dim=1), "id": torch.arange(start, stop)}


@pytest.mark.parametrize(
    "parts",
    [
        {},
        {"group": lambda row: row // 100, "time": float},
        {"group": lambda row: f"writer {row // 50}"},
        {"time": lambda row: math.nan},
        {"validation": rows(900, 930)},
        {"train": rows(0, 100)},
        {"train": doubled_labels(3)},
    ],
)
def test_splits_that_know_nothing_of_each_other_open(parts):
    found = run_check(split_hygiene, make_pipeline(**parts))
    assert found.verdict == "open", found


@pytest.mark.parametrize(
    "make", [make_multilabel_pipeline, make_real_pipeline, make_tokens_pipeline]
)
def test_splits_of_other_tasks_do_not_shut(make):
    """One line of the text occurs in both splits: a warning."""
    found = run_check(split_hygiene, make())
    assert found.verdict in ("open", "warn"), found


@pytest.mark.parametrize(
    ("fault", "cause", "number"),
    [
        ({"validation": copied(1)}, "copies of training rows", "400 of 400"),
        ({"validation": copied(0.01)}, "copies of training rows", "4 of 400"),
        ({"validation": copied(0.1, lambda x: x + 1e-7)}, "copies", "40 of 400"),
        ({"validation": copied(0.25, noise(0.05))}, "changed copies", "% of the validation rows"),
        ({"validation": rows(500, 1000)}, "copies of training rows", "400 of 500 validation ids"),
        ({"group": lambda row: row % 50}, "not over groups", "50 groups"),
        ({"group": lambda row: row // 70}, "not over groups", "10 of 400"),
        ({"time": lambda row: float(row % 100)}, "by time", "891 of 900"),
        ({"time": lambda row: -float(row)}, "by time", "900 of 900"),
        ({"train": doubled_labels(60)}, "labelled twice", "120 of 900"),
    ],
)
def test_splits_that_do_shut_and_are_named(fault, cause, number):
    found = run_check(split_hygiene, make_pipeline(**fault))
    assert found.verdict == "shut", found
    assert any(cause in text for text in found.suspect), found
    assert number in found.because, found


@pytest.mark.parametrize(
    ("parts", "words"),
    [
        ({"train": doubled_labels(10)}, "20 of 900 training rows"),
        ({"validation": copied(0.08, noise(0.05))}, "twice as near"),
        (
            {"train": short_sequences(0, 900), "validation": short_sequences(900, 1300)},
            "may be chance",
        ),
        ({"validation": {**rows(900, 1300), "id": torch.arange(400)}}, "counted per split"),
    ],
)
def test_what_may_be_chance_warns(parts, words):
    found = run_check(split_hygiene, make_pipeline(**parts))
    assert found.verdict == "warn", found
    assert words in found.because


def test_blank_records_are_conflicts_and_named():
    given = rows()
    blank = {**given, "x": given["x"].where(given["id"][:, None, None, None] % 15 != 0, 0.5)}
    found = run_check(split_hygiene, make_pipeline(train=blank))
    assert found.verdict == "shut"
    assert "empty records" in found.suspect[0]


def test_rows_that_are_no_numbers_cannot_be_compared():
    x = rows()["x"].clone()
    x[3, 0, 2, 2] = torch.nan
    found = run_check(split_hygiene, make_pipeline(train={**rows(), "x": x}))
    assert found.verdict == "inconclusive"
    assert found.because.startswith("1 rows hold values that are not finite")


def test_what_is_not_given_is_not_judged_and_said():
    found = run_check(split_hygiene, make_pipeline(time=float))
    assert "time apart" in found.because
    assert "no group" in found.because


@pytest.mark.parametrize("check", [split_hygiene, split_parity])
def test_nothing_a_check_of_splits_does_outlasts_it(check):
    train = {name: value.clone() for name, value in rows().items()}
    pipeline = make_pipeline(train=train, augment=moved, group=lambda row: row, time=float)
    before = torch.get_rng_state()
    run_check(check, pipeline)
    assert torch.equal(torch.get_rng_state(), before)
    assert pipeline.train.epoch == pipeline.validation.epoch == 0
    assert all(torch.equal(train[name], rows()[name]) for name in train)


@pytest.mark.parametrize(
    "change",
    [
        lambda x: x.roll(1, 3),
        lambda x: x.roll((1, -1), (2, 3)),
        lambda x: x.flip(3),
        lambda x: torch.nn.functional.pad(x[:, :, 1:, 1:], (0, 1, 0, 1)),
    ],
)
def test_moved_and_mirrored_copies_shut(change):
    found = run_check(split_hygiene, make_pipeline(validation=copied(0.1, change)))
    assert found.verdict == "shut", found
    assert "40 of 400 validation rows hold the middle" in found.because


def windows(order):
    """Windows of one random walk that share four fifths with their neighbours, in this order."""
    steps = torch.randn(14_000, generator=torch.Generator().manual_seed(0))
    x = steps.cumsum(0).unfold(0, 50, 10)[:1300, None]
    y = (x[:, 0, -1] > x[:, 0, 0]).long()
    return [{"x": x[rows], "y": y[rows], "id": rows} for rows in (order[:900], order[900:1300])]


def test_overlapping_windows_shut_where_the_split_ignores_time():
    mixed = torch.randperm(1300, generator=torch.Generator().manual_seed(1))
    for order, verdict in ((mixed, "shut"), (torch.arange(1300), "open")):
        train, validation = windows(order)
        found = run_check(split_hygiene, make_pipeline(train=train, validation=validation))
        assert found.verdict == verdict, found
