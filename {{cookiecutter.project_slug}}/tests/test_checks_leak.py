from dataclasses import replace

import numpy as np
import pytest
import torch
from checks_case import Digits, make_pipeline, rows
from other_tasks import (
    MultiLabel,
    Real,
    make_imbalanced_pipeline,
    make_multilabel_pipeline,
    make_real_pipeline,
    make_tokens_pipeline,
    multilabel_rows,
    real_rows,
)
from sklearn.datasets import load_breast_cancer, load_iris, load_wine

from {{cookiecutter.project_slug}}.harness import loop
from {{cookiecutter.project_slug}}.harness.checks import run_check
from {{cookiecutter.project_slug}}.harness.checks.leak import feature_leak


class Kinds(Digits):
    def __init__(self, count):
        self.num_outputs, self.class_names = count, tuple(map(str, range(count)))


def with_rows(x, y, task, size=64):
    """A pipeline of which feature_leak needs the training rows and the task alone."""
    given = {"x": x, "y": y, "id": torch.arange(len(y))}
    return replace(make_pipeline(), train=loop.Loader(given, size, shuffle=True), task=task)


def tabular(load, seed=0):
    data = load()
    order = np.random.default_rng(seed).permutation(len(data.target))[: len(data.target) * 3 // 4]
    x, y = data.data[order], data.target[order]
    x = ((x - x.mean(axis=0)) / x.std(axis=0)).astype(np.float32)
    return torch.from_numpy(x), torch.from_numpy(y.astype(np.int64)), len(data.target_names)


def drawn(size, seed=0):
    return torch.randn(size, generator=torch.Generator().manual_seed(seed))


def spots(num_classes, distance):
    """Classes far apart in every column."""
    y = torch.arange(600) % num_classes
    centres = distance * drawn((num_classes, 10), 1)
    return centres[y] + drawn((600, 10)), y


def test_pictures_open():
    found = run_check(feature_leak, make_pipeline())
    assert found.verdict == "open"
    assert found.value < 0.5


@pytest.mark.parametrize("load", [load_breast_cancer, load_iris, load_wine])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_easy_tables_do_not_shut(load, seed):
    x, y, count = tabular(load, seed)
    assert run_check(feature_leak, with_rows(x, y, Kinds(count))).verdict == "open"


@pytest.mark.parametrize(
    "make", [make_multilabel_pipeline, make_real_pipeline, make_imbalanced_pipeline]
)
def test_other_tasks_open(make):
    found = run_check(feature_leak, make())
    assert found.verdict == "open", found


@pytest.mark.parametrize(("count", "distance"), [(2, 6.0), (3, 20.0), (5, 20.0)])
def test_classes_that_every_column_tells_apart_do_not_shut(count, distance):
    x, y = spots(count, distance)
    found = run_check(feature_leak, with_rows(x, y, Kinds(count)))
    assert found.verdict in ("open", "warn"), found


def in_pixel(change):
    given = rows()
    x = given["x"].clone()
    change(x, given["y"])
    return make_pipeline(train={**given, "x": x})


def one_pixel(x, y):
    x[:, 0, 0, 0] = y / 9


def noisy_pixel(x, y):
    x[:, 0, 0, 0] = y + 0.1 * drawn(len(y))


def a_code(x, y):
    """Whatever order of the classes a lookup does not mind."""
    x[:, 0, 3, 4] = torch.tensor([3.0, 8, 1, 0, 6, 9, 2, 7, 4, 5])[y]


def a_patch(x, y):
    x[:, 0, :2, :2] = y[:, None, None] / 9


def the_row_number(x, y):
    """Of rows that are sorted by class."""
    x[:, 0, 0, 0] = y.argsort(stable=True).argsort() / 900


def one_hot(x, y):
    x.flatten(1)[torch.arange(len(y)), y] = 4.0


@pytest.mark.parametrize("change", [one_pixel, noisy_pixel, a_code, a_patch, the_row_number])
def test_a_label_written_into_a_pixel_shuts_and_is_placed(change):
    found = run_check(feature_leak, in_pixel(change))
    assert found.verdict == "shut", found
    assert "value (0, " in found.because


def test_a_mark_whose_place_and_value_tell_the_class_shuts():
    """Two classes share a place: each is told by its own value there, not by a straight line."""
    given = rows()
    x, y = given["x"].clone(), given["y"]
    x[torch.arange(len(y)), 0, y % 8, 0] = 2.0 + (y // 8)
    found = run_check(feature_leak, with_rows(x, y, Digits()))
    assert found.verdict == "shut"
    assert "10 of 10 labels have a column" in found.because


def test_labels_written_into_a_row_of_pixels_shut():
    def corner(x, y):
        x[:, 0, 0] = 0
        x[:, 0, 1, :2] = 0
        one_hot(x, y)

    found = run_check(feature_leak, in_pixel(corner))
    assert found.verdict == "shut"
    assert "10 of 10 labels have a column" in found.because


@pytest.mark.parametrize("load", [load_breast_cancer, load_iris, load_wine])
def test_a_label_among_the_columns_of_a_table_shuts(load):
    x, y, count = tabular(load)
    x = torch.cat([x, y[:, None].float()], dim=1)
    found = run_check(feature_leak, with_rows(x, y, Kinds(count)))
    assert found.verdict == "shut", found
    assert f"value {x.shape[1] - 1} of x alone" in found.because


def test_the_target_among_the_inputs_of_a_regression_shuts():
    given = real_rows()
    x = torch.cat([given["x"], 2 * given["y"][:, None] + 1], dim=1)
    found = run_check(feature_leak, with_rows(x, given["y"], Real()))
    assert found.verdict == "shut"
    assert "value 10 of x" in found.because


def test_labels_that_do_not_exclude_each_other_among_the_inputs_shut():
    given = multilabel_rows()
    x = torch.cat([given["x"], given["y"]], dim=1)
    found = run_check(feature_leak, with_rows(x, given["y"], MultiLabel()))
    assert found.verdict == "shut"


def test_a_row_number_of_rows_sorted_by_class_shuts_as_an_input():
    given = loop.take(rows(), rows()["y"].argsort(stable=True))
    x = {"picture": given["x"], "number": torch.arange(900.0)[:, None]}
    found = run_check(feature_leak, with_rows(x, given["y"], Digits()))
    assert found.verdict == "shut"
    assert "value 0 of number" in found.because


def test_a_row_number_that_is_no_input_is_nobodys_leak():
    given = loop.take(rows(), rows()["y"].argsort(stable=True))
    assert run_check(feature_leak, make_pipeline(train=given)).verdict == "open"


def test_an_id_that_names_the_class_anywhere_in_a_sequence_shuts():
    generator = torch.Generator().manual_seed(0)
    x = torch.randint(10, (600, 12), generator=generator)
    y = torch.arange(600) % 3
    place = torch.randint(12, (600,), generator=generator)
    x[torch.arange(600), place] = 20 + y
    found = run_check(feature_leak, with_rows(x, y, Kinds(3)))
    assert found.verdict == "shut", found
    assert "number of each id" in found.because


def test_a_label_that_is_a_threshold_of_one_input_shuts():
    x = drawn((900, 20))
    found = run_check(feature_leak, with_rows(x, (x[:, 4] > 0.3).long(), Kinds(2)))
    assert found.verdict == "shut"
    assert "value 4 of x" in found.because


def test_one_strong_input_among_idle_ones_warns():
    y = torch.arange(900) % 2
    x = drawn((900, 20))
    x[:, 4] += 6 * y
    found = run_check(feature_leak, with_rows(x, y, Kinds(2)))
    assert found.verdict == "warn", found


def test_a_label_made_of_two_inputs_warns():
    votes = torch.rand((900, 20), generator=torch.Generator().manual_seed(0))
    y = ((votes[:, 0] > 0.3) & (votes[:, 1] > 0.3)).long()
    found = run_check(feature_leak, with_rows(votes, y, Kinds(2)))
    assert found.verdict == "warn", found
    assert "a tree of few columns" in found.because


def test_sequences_of_targets_are_left_to_another_check():
    assert run_check(feature_leak, make_tokens_pipeline()).verdict == "not_applicable"


def test_a_single_input_has_no_rest():
    y = torch.arange(100) % 2
    found = run_check(feature_leak, with_rows(y[:, None].float(), y, Kinds(2)))
    assert found.verdict == "not_applicable"


def test_a_handful_of_rows_is_inconclusive():
    given = rows(0, 30)
    found = run_check(feature_leak, with_rows(given["x"], given["y"], Digits()))
    assert found.verdict == "inconclusive"


def test_nothing_feature_leak_does_outlasts_it():
    pipeline, before = make_pipeline(), torch.get_rng_state()
    run_check(feature_leak, pipeline)
    assert torch.equal(torch.get_rng_state(), before)
    assert pipeline.train.epoch == 0
