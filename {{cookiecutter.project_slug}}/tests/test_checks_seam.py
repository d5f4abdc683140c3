from types import SimpleNamespace

import numpy as np
import pytest
import torch
from checks_case import (
    IMAGES,
    MEAN,
    STD,
    Digits,
    Net,
    Normalised,
    Sorted,
    broken_evaluate,
    broken_step,
    make_pipeline,
    moved,
    rows,
    unbalanced,
    with_x,
)
from other_tasks import (
    Causal,
    make_multilabel_pipeline,
    make_real_pipeline,
    make_tokens_pipeline,
    multilabel_rows,
    real_rows,
    token_rows,
)

from {{cookiecutter.project_slug}}.harness import loop
from {{cookiecutter.project_slug}}.harness.checks import run_check
from {{cookiecutter.project_slug}}.harness.checks.seam import last_seam, seam_batch


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


# ---- values, ids and targets --------------------------------------------------------------------


def truncated(x):
    return ((x * STD + MEAN) / 3).to(torch.int16).float()


class Thirds(Normalised):
    """Values of the record by three: no more than that, and no statistics to declare."""

    mean = std = None

    def inverse(self, x):
        return x[0].cpu().numpy() * 3

    def __call__(self, raw):
        return torch.from_numpy(np.asarray(raw) / 3)[None]


def test_values_lost_between_record_and_tensor_shut():
    def record(row):
        return IMAGES[row]

    pipeline = make_pipeline(**both(truncated), preprocessing=Thirds(), raw=record)
    found = run_check(last_seam, pipeline)
    assert found.verdict == "shut"
    assert "6 distinct values, all whole, its records 17" in found.because


def test_values_kept_between_record_and_tensor_open():
    pipeline = make_pipeline(raw=lambda row: IMAGES[row])
    assert run_check(last_seam, pipeline).verdict == "open"


def test_fewer_values_than_the_record_warn_where_that_may_be_meant():
    def binary(x):
        return (x > 0).float()

    pipeline = make_pipeline(**both(binary), preprocessing=None, raw=lambda row: IMAGES[row])
    found = run_check(last_seam, pipeline)
    assert found.verdict == "warn"
    assert "2 distinct values where its records have 17" in found.because


def test_rows_of_noise_in_one_split_shut():
    def some_noisy(x):
        noise = torch.randn(x.shape, generator=torch.Generator().manual_seed(0))
        return torch.where(torch.arange(len(x))[:, None, None, None] % 3 == 0, x + noise, x)

    noisy = with_x(some_noisy)
    found = run_check(last_seam, make_pipeline(train=noisy, preprocessing=None))
    assert found.verdict == "shut"
    assert "within a row of x is distributed differently" in found.because


def test_a_split_with_other_shares_of_classes_opens():
    found = run_check(last_seam, make_pipeline(train=unbalanced(), preprocessing=None))
    assert found.verdict == "open", found


def test_a_sampler_that_balances_classes_opens():
    class Weighted(loop.Loader):
        sampler = "weighted"

        def _order(self):
            y = self.rows["y"]
            weights = 1 / torch.bincount(y)[y].double()
            return torch.multinomial(weights, len(y), True, generator=self._generator("cpu"))

    train, mean = unbalanced(), unbalanced()["x"].mean()
    train = {**train, "x": (train["x"] - mean) / train["x"].std()}
    validation = with_x(lambda x: (x - mean) / unbalanced()["x"].std(), 900, 1300)

    class Own(Normalised):
        def __call__(self, raw):
            return (super().__call__(raw) - mean) / unbalanced()["x"].std()

        def inverse(self, x):
            return super().inverse(x * unbalanced()["x"].std() + mean)

    parts = {"train": train, "validation": validation, "preprocessing": Own()}
    found = run_check(last_seam, make_pipeline(loader=Weighted, **parts))
    assert found.verdict == "open", found


def test_a_channel_that_the_step_overwrites_shuts():
    def lost(batch):
        return {**batch, "x": batch["x"] * torch.tensor([1.0, 0.0])[:, None, None]}

    def step(model, optimizer, batch, *others, **more):
        return loop.train_step(model, optimizer, lost(batch), *others, **more)

    def evaluate(model, batches):
        return loop.evaluate(model, map(lost, batches), Digits())

    pipeline = make_pipeline(
        lambda: Net(lambda self, x: self.plain(x.mean(dim=1, keepdim=True))),
        **both(lambda x: torch.cat([x, x.flip(3)], dim=1)),
        step=step,
        evaluate=evaluate,
        preprocessing=SimpleNamespace(mean=(MEAN, MEAN), std=(STD, STD)),
    )
    found = run_check(last_seam, pipeline)
    assert found.verdict == "shut"
    assert "1 of 2 channels never vary" in found.because


def test_ignored_targets_that_nobody_declares_shut():
    train = labelled(lambda y: y.where(torch.arange(len(y)) > 2, -100))
    found = run_check(last_seam, make_pipeline(train=train))
    assert found.verdict == "shut"
    assert "declare ignore_index" in found.suspect[0]


def test_blank_rows_warn():
    def blanked(x):
        return torch.where(torch.arange(len(x))[:, None, None, None] % 33 == 0, 0.5, x)

    pipeline = make_pipeline(**both(blanked), preprocessing=None)
    found = run_check(last_seam, pipeline)
    assert found.verdict == "warn"
    assert "hold one value throughout" in found.because


def ids(change=lambda x: x, start=0, stop=256):
    given = token_rows(start, stop)
    return {**given, "x": change(given["x"])}


@pytest.mark.parametrize(
    ("change", "cause", "words"),
    [
        (lambda x: x.where(x < 20, x - 256), "overflow", "run from"),
        (lambda x: x.where(x < 20, x + 40), "another vocabulary", "has 64 entries"),
    ],
)
def test_ids_that_the_model_has_no_entry_for_shut(change, cause, words):
    pipeline = make_tokens_pipeline(train=ids(change), validation=ids(change, 256, 320))
    found = run_check(last_seam, pipeline)
    assert found.verdict == "shut", found
    assert words in found.because
    assert any(cause in text for text in found.suspect)


def test_ids_that_wrapped_shut():
    class Forgiving(Causal):
        def forward(self, x):
            return super().forward(x.remainder(32))

    def wrapped(x):
        return x.where(x < 20, x - 256)

    pipeline = make_tokens_pipeline(
        Forgiving,
        train=ids(wrapped),
        validation=ids(wrapped, 256, 320),
        raw=lambda row: token_rows(0, 320)["x"][row].numpy(),
    )
    found = run_check(last_seam, pipeline)
    assert found.verdict == "shut", found
    assert "those of its records" in found.because


def other(make, change, start, stop):
    given = make(start, stop)
    return {**given, "y": change(given["y"].clone())}


@pytest.mark.parametrize(
    ("make", "rows_of", "sizes", "change", "cause"),
    [
        (make_multilabel_pipeline, multilabel_rows, (900, 1200), lambda y: 2 * y - 1, "-1 and 1"),
        (make_multilabel_pipeline, multilabel_rows, (900, 1200), lambda y: y * 0, "blanked"),
        (make_real_pipeline, real_rows, (320, 442), lambda y: y.where(y < 2, torch.nan), "gaps"),
        (make_real_pipeline, real_rows, (320, 442), lambda y: y * 0 + 3, "blanked"),
        (make_tokens_pipeline, token_rows, (256, 320), lambda y: y + 9, "another map"),
    ],
)
def test_targets_that_no_such_task_has_shut(make, rows_of, sizes, change, cause):
    changed = {
        "train": other(rows_of, change, 0, sizes[0]),
        "validation": other(rows_of, change, *sizes),
    }
    found = run_check(last_seam, make(**changed))
    assert found.verdict == "shut", found
    assert any(cause in text for text in found.suspect), found


@pytest.mark.parametrize(
    "make", [make_multilabel_pipeline, make_real_pipeline, make_tokens_pipeline]
)
def test_other_tasks_open(make):
    assert run_check(last_seam, make()).verdict == "open", run_check(last_seam, make())


def test_nothing_last_seam_does_outlasts_it():
    train = {name: value.clone() for name, value in rows().items()}
    pipeline = make_pipeline(train=train, augment=moved, raw=lambda row: IMAGES[row])
    before = torch.get_rng_state()
    run_check(last_seam, pipeline)
    assert torch.equal(torch.get_rng_state(), before)
    assert pipeline.train.epoch == 0
    assert all(torch.equal(train[name], rows()[name]) for name in train)
