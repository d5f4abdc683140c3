import pytest
import torch
from checks_case import (
    MEAN,
    STD,
    Net,
    Normalised,
    broken_evaluate,
    broken_step,
    make_pipeline,
    rows,
    with_x,
)
from torch import nn

from {{cookiecutter.project_slug}}.harness import loop
from {{cookiecutter.project_slug}}.harness.checks import run_check
from {{cookiecutter.project_slug}}.harness.checks.loader import last_seam, seam_batch
from {{cookiecutter.project_slug}}.harness.checks.split import split_parity


def moved(x, generator):
    return x.roll(1, 3) + 0.05 * torch.randn(x.shape, generator=generator)


@pytest.mark.parametrize(
    "parts",
    [
        {},
        {"precision": "bf16"},
        {"augment": moved},
        {"accumulate": 3},
        {"validation": rows(900, 930)},  # small: wide sampling errors
    ],
)
def test_a_seam_as_declared_opens(parts):
    found = run_check(last_seam, make_pipeline(**parts))
    assert found.verdict == "open"
    assert "float32" in found.because


def raw(x):
    return x * STD + MEAN


def both(change):
    return {"train": with_x(change), "validation": with_x(change, 900, 1300)}


def labelled(change, start=0, stop=900):
    return {**rows(start, stop), "y": change(rows(start, stop)["y"])}


class Sorted(loop.Loader):
    """Inputs sorted by brightness, labels and ids not."""

    def __iter__(self):
        for batch in super().__iter__():
            yield {**batch, "x": batch["x"][batch["x"].flatten(1).sum(1).argsort()]}


class Transposed(Normalised):
    def inverse(self, x):
        return super().inverse(x).T.copy()


def scrambled(x):
    return x.flatten(2).roll(13, 2).reshape(x.shape)


@pytest.mark.parametrize(
    ("fault", "cause"),
    [
        (both(raw), "not normalised"),
        (both(lambda x: (x - MEAN) / STD), "or twice"),
        (both(lambda x: x.to(torch.int8).float()), "whole numbers"),
        ({"validation": with_x(raw, 900, 1300)}, "validation is normalised"),
        ({"validation": with_x(lambda x: x * 1.5, 900, 1300)}, "validation is normalised"),
        ({"validation": with_x(lambda x: x + 0.3, 900, 1300)}, "validation is normalised"),
        ({"step": broken_step(inputs=lambda x: 2 * x)}, "validation is normalised"),
        ({"evaluate": broken_evaluate("inputs scaled")}, "validation is normalised"),
        (both(torch.zeros_like), "blanked"),
        (both(lambda x: x.where(x < 1.5, torch.nan)), "gaps"),
        ({"validation": with_x(lambda x: x.double(), 900, 1300)}, "prepared differently"),
        ({"train": labelled(lambda y: y.clamp_min(1))}, "count from 1"),
        ({"validation": labelled(lambda y: y + 1, 900, 1300)}, "count from 1"),
        ({"loader": Sorted}, "reorder inputs"),
        ({"preprocessing": Transposed()}, "order of axes"),
        (both(scrambled), "mixed by a reshape"),
        ({"draw": lambda row: rows(row + 1, row + 2)["x"][0, 0]}, "other records"),
    ],
)
def test_a_seam_that_is_not_as_declared_shuts_and_is_named(fault, cause):
    found = run_check(last_seam, make_pipeline(**fault))
    assert found.verdict == "shut"
    assert any(cause in text for text in found.suspect), found


def test_a_column_that_never_varies_warns():
    class Flat(Net):
        def forward(self, x):
            return super().forward(x[:, None].reshape(-1, 1, 8, 8))

    def flat(start, stop):
        return {**rows(start, stop), "x": rows(start, stop)["x"].flatten(1)}

    pipeline = make_pipeline(
        Flat, train=flat(0, 900), validation=flat(900, 1300), preprocessing=None
    )
    found = run_check(last_seam, pipeline)
    assert found.verdict == "warn"
    assert found.unit == "columns"


def test_constants_of_other_data_may_say_what_they_expect():
    class Borrowed(Normalised):
        expected_mean, expected_std = (0.5,), (1.5,)

        def __call__(self, raw):
            return super().__call__(raw) * 1.5 + 0.5

        def inverse(self, x):
            return super().inverse((x - 0.5) / 1.5)

    pipeline = make_pipeline(**both(lambda x: x * 1.5 + 0.5), preprocessing=Borrowed())
    assert run_check(last_seam, pipeline).verdict == "open"


def test_the_sheet_shows_rows_of_both_splits_as_the_model_gets_them():
    found = seam_batch(make_pipeline(step=broken_step(inputs=lambda x: 2 * x)), num_rows=4)
    assert [len(batch["y"]) for batch in found.values()] == [4, 4]
    shown = found["train"]
    assert torch.equal(shown["x"], 2 * rows()["x"][shown["id"]])
    shown = found["validation"]
    assert torch.equal(shown["x"], rows(900, 1300)["x"][shown["id"] - 900])


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
