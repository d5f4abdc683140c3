"""The one split: what stays together, what never moves, and what cannot be split."""

from dataclasses import replace

import numpy as np
import pytest

from {{cookiecutter.project_slug}}.harness import files, splits
from {{cookiecutter.project_slug}}.harness.records import Records
from {{cookiecutter.project_slug}}.harness.splits import SplitSettings

PARTS = ("train", "validation", "test")


def make_records(num_rows=200, num_classes=4, **parts):
    labels = np.arange(num_rows, dtype=np.int64) % num_classes
    ids = tuple(f"r{row:04d}" for row in range(num_rows))
    names = tuple("abcdefgh"[:num_classes])
    return Records(ids, np.zeros((num_rows, 1)), labels, names, **parts)


def sizes(split):
    return {part: len(split["ids"][part]) for part in PARTS}


def where(records, split):
    return splits.column(records.ids, split)


# ---- random -----------------------------------------------------------------------------------


def test_every_row_falls_in_one_split_in_the_asked_shares_of_each_class():
    records = make_records()
    split = splits.make(records, [], SplitSettings(validation_fraction=0.2, test_fraction=0.1))
    assert sizes(split) == {"train": 140, "validation": 40, "test": 20}
    column = where(records, split)
    for label in range(4):
        inside = column[records.labels == label]
        counts = [int(np.sum(inside == part)) for part in PARTS]
        assert counts == [35, 10, 5]


def test_the_split_does_not_depend_on_the_order_of_the_rows():
    records = make_records()
    mixed = records.take(np.random.default_rng(0).permutation(len(records)))
    assert splits.make(records, [], SplitSettings()) == splits.make(mixed, [], SplitSettings())


def test_another_seed_gives_another_split():
    records = make_records()
    first, second = (splits.make(records, [], SplitSettings(seed=seed)) for seed in (0, 1))
    assert sizes(first) == sizes(second)
    assert first["ids"] != second["ids"]


def test_the_split_survives_a_file(tmp_path):
    split = splits.make(make_records(), [], SplitSettings())
    files.write_json(tmp_path / "splits.json", split)
    assert splits.read(tmp_path / "splits.json") == split
    files.write_json(tmp_path / "splits.json", split | {"schema": 2})
    with pytest.raises(ValueError, match="not a split of schema 1"):
        splits.read(tmp_path / "splits.json")


def test_duplicates_fall_in_one_split():
    records = make_records()
    clusters = [[0, 50, 101], [50, 150], [3, 7]]
    for seed in range(5):
        column = where(records, splits.make(records, clusters, SplitSettings(seed=seed)))
        assert len(set(column[[0, 50, 101, 150]])) == 1
        assert column[3] == column[7]


def test_unreadable_rows_are_in_no_split():
    records = make_records(unreadable={"r0003": "cut off", "r0009": "empty"})
    split = splits.make(records, [[3, 4]], SplitSettings())
    assert where(records, split)[[3, 9]].tolist() == ["", ""]
    assert where(records, split)[4] != ""
    assert split["left_out"] == {"r0003": "unreadable: cut off", "r0009": "unreadable: empty"}


@pytest.mark.parametrize("test", ["none", "external"])
def test_without_a_held_out_test_set_there_are_no_test_rows(test):
    split = splits.make(make_records(), [], SplitSettings(test=test, validation_fraction=0.2))
    assert sizes(split) == {"train": 160, "validation": 40, "test": 0}
    assert split["test"] == test


def test_a_class_with_one_large_cluster_still_reaches_every_split():
    records = make_records(30, 2)
    rows = np.flatnonzero(records.labels == 0).tolist()
    column = where(records, splits.make(records, [rows[:7], rows[7:13]], SplitSettings()))
    assert set(column[rows]) == set(PARTS)


def test_a_class_with_too_few_separable_rows_is_named():
    records = make_records(40, 4)
    rows = np.flatnonzero(records.labels == 2).tolist()
    with pytest.raises(ValueError, match=r"Class 'c' has 2 separable rows .* 3 parts need"):
        splits.make(records, [rows[1:]], SplitSettings())


# ---- growing ----------------------------------------------------------------------------------


def test_old_ids_never_move_and_new_ids_join_by_hash():
    records = make_records(2_000)
    half = records.take(range(1_000))
    former = splits.make(half, [], SplitSettings())
    grown = splits.make(records, [], SplitSettings(), former)
    for part in PARTS:
        assert set(former["ids"][part]) <= set(grown["ids"][part])
    joined = where(records, grown)[1_000:]
    assert 0.65 < np.mean(joined == "train") < 0.75
    assert 0.12 < np.mean(joined == "test") < 0.18
    in_two_steps = splits.make(records.take(range(1_500)), [], SplitSettings(), former)
    assert splits.make(records, [], SplitSettings(), in_two_steps) == grown


def test_a_new_copy_of_an_old_row_joins_its_split():
    records = make_records()
    former = splits.make(records.take(range(100)), [], SplitSettings())
    clusters = [[row, row + 100] for row in range(100)]
    column = where(records, splits.make(records, clusters, SplitSettings(), former))
    assert column[:100].tolist() == column[100:].tolist()


def test_rows_that_left_the_data_leave_the_split():
    records = make_records()
    former = splits.make(records, [], SplitSettings())
    fewer = records.take(range(5, 200))
    column = where(records, former)[5:]
    assert where(fewer, splits.make(fewer, [], SplitSettings(), former)).tolist() == column.tolist()


def test_other_settings_than_the_frozen_ones_are_refused():
    records = make_records()
    former = splits.make(records, [], SplitSettings())
    with pytest.raises(ValueError, match=r"seed 0 -> 1.*delete artifacts/data_audit/splits.json"):
        splits.make(records, [], SplitSettings(seed=1), former)


def test_the_split_of_another_data_set_binds_nothing():
    former = splits.make(make_records(), [], SplitSettings())
    other = replace(make_records(), ids=tuple(f"other-{row}" for row in range(200)))
    made = splits.make(other, [], SplitSettings(seed=1), former)
    assert made == splits.make(other, [], SplitSettings(seed=1))


# ---- groups -----------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", ["group", "random", "kfold"])
def test_groups_are_never_divided(strategy):
    groups = tuple(f"g{row // 5 % 37}" for row in range(400))
    records = make_records(400, groups=groups)
    split = splits.make(records, [[0, 7]], SplitSettings(strategy=strategy))
    column = where(records, split)
    for group in set(groups):
        assert len(set(column[[name == group for name in groups]])) == 1
    assert 0.6 < np.mean(column == "train") < 0.8


def test_a_split_by_group_needs_groups():
    with pytest.raises(ValueError, match="needs groups and the data has none"):
        splits.make(make_records(), [], SplitSettings(strategy="group"))


def test_too_few_groups_are_told():
    records = make_records(groups=tuple("xy" * 100))
    with pytest.raises(ValueError, match=r"2 separable rows .* cannot fill 3 parts"):
        splits.make(records, [], SplitSettings(strategy="group"))


# ---- folds ------------------------------------------------------------------------------------


def test_every_row_validates_once_over_the_folds_and_test_stays():
    records = make_records()
    made = [splits.make(records, [], SplitSettings(strategy="kfold", fold=k)) for k in range(5)]
    assert {tuple(split["ids"]["test"]) for split in made} == {tuple(made[0]["ids"]["test"])}
    validated = sorted(name for split in made for name in split["ids"]["validation"])
    assert validated == sorted(set(records.ids) - set(made[0]["ids"]["test"]))


def test_another_fold_of_a_frozen_split_keeps_folds_and_test():
    records, settings = make_records(), SplitSettings(strategy="kfold", num_folds=4)
    former = splits.make(records.take(range(150)), [], settings)
    grown = splits.make(records, [], replace(settings, fold=2), former)
    assert set(former["ids"]["test"]) <= set(grown["ids"]["test"])
    for old, new in zip(former["folds"], grown["folds"], strict=True):
        assert set(old) <= set(new)
    assert grown["ids"]["validation"] == grown["folds"][2]


# ---- time -------------------------------------------------------------------------------------


def by_time(times, clusters=(), former=None, **parts):
    records = make_records(len(times), 2, times=tuple(map(str, times)), **parts)
    return records, splits.make(records, clusters, SplitSettings(strategy="time"), former)


def test_train_comes_before_validation_before_test():
    times = np.random.default_rng(0).permutation(100)
    records, split = by_time(times)
    column = where(records, split)
    assert times[column == "train"].max() < times[column == "validation"].min()
    assert times[column == "validation"].max() < times[column == "test"].min()
    assert sizes(split) == {"train": 70, "validation": 15, "test": 15}


def test_rows_of_one_moment_are_not_divided():
    records, split = by_time([row // 30 for row in range(120)])
    column = where(records, split)
    assert all(len(set(column[start : start + 30])) == 1 for start in range(0, 120, 30))


def test_a_later_copy_of_an_earlier_row_is_left_out():
    records, split = by_time(range(100), [[3, 95, 99]])
    assert where(records, split)[[3, 95, 99]].tolist() == ["train", "", ""]
    assert split["left_out"]["r0095"] == "repeats a row of an earlier split"


def test_new_rows_join_the_stretch_of_time_they_lie_in():
    _, former = by_time(range(0, 100, 2))
    records, split = by_time([*range(0, 100, 2), 31, 200], former=former)
    assert where(records, split)[-2:].tolist() == ["train", "test"]
    assert where(records, split)[:50].tolist() == where(records.take(range(50)), former).tolist()


@pytest.mark.parametrize(
    ("times", "told"),
    [([1, 2] * 20, "2 distinct times, and 3 splits"), (["soon"] * 40, "'soon' is neither")],
)
def test_times_that_cannot_be_split_are_told(times, told):
    with pytest.raises(ValueError, match=told):
        by_time(times)


# ---- given ------------------------------------------------------------------------------------


def test_given_splits_are_kept_even_for_duplicates():
    given = tuple(PARTS[row % 3] for row in range(60))
    records = make_records(60, given=given)
    split = splits.make(records, [[0, 1]], SplitSettings(strategy="given"))
    assert tuple(where(records, split)) == given


def test_validation_is_drawn_from_train_where_none_is_given():
    given = tuple("test" if row < 40 else "train" for row in range(200))
    records = make_records(given=given)
    column = where(records, splits.make(records, [[50, 60]], SplitSettings(strategy="given")))
    assert set(column[:40]) == {"test"}
    assert 20 <= np.sum(column == "validation") <= 36
    assert column[50] == column[60]


@pytest.mark.parametrize(
    ("given", "test", "told"),
    [
        (None, "held_out", "needs given and the data has none"),
        (("train", "test") * 100, "none", "gives 100 rows as test"),
        (("train", "validation") * 100, "held_out", "No row is left for test.*split.test=none"),
    ],
)
def test_given_splits_that_contradict_the_settings_are_told(given, test, told):
    with pytest.raises(ValueError, match=told):
        splits.make(make_records(given=given), [], SplitSettings(strategy="given", test=test))


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"strategy": "stratified"}, "Unknown split strategy"),
        ({"test": "yes"}, "Unknown test"),
        ({"test_fraction": 0.0}, "leave a split empty.*split.test=none"),
        ({"validation_fraction": 0.6, "test_fraction": 0.5}, "leave a split empty"),
        ({"strategy": "kfold", "fold": 5}, "fold 5 of num_folds 5"),
    ],
)
def test_settings_that_make_no_split_are_refused(settings, told):
    with pytest.raises(ValueError, match=told):
        SplitSettings(**settings)
