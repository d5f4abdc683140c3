"""The axes that are fitted or scored: labels, columns, drift, order, outliers."""

from dataclasses import replace

import numpy as np
import pytest
from audit_case import LIMITS, NUM_ROWS, changed, make_subject
from sklearn.datasets import load_digits

from {{cookiecutter.project_slug}}.harness import audit
from {{cookiecutter.project_slug}}.harness.audit import drift, labels, leakage, samples


@pytest.fixture(scope="module")
def sound():
    return make_subject()


# ---- imbalance --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kept", "verdict"), [(0, "shut"), (9, "shut"), (10, "warn"), (40, "open")]
)
def test_a_class_with_few_train_rows_warns_and_with_too_few_shuts(sound, kept, verdict):
    rare = np.flatnonzero((sound.labels == 1) & (sound.split == "train"))
    split = sound.split.copy()
    split[rare[kept:]] = ""
    found = labels.imbalance(replace(sound, split=split), LIMITS, 0)
    assert found.verdict == verdict, found.because
    assert f"{kept} (b)" in found.because


# ---- outliers ---------------------------------------------------------------------------------


def test_a_wrong_unit_on_a_feature_axis_is_listed(sound):
    row = sound.rows("train")[3]
    size = sound.features["size"].copy()
    size[row] *= 10
    found = samples.outliers(replace(sound, features={"size": size}), LIMITS, 0)
    assert (found.verdict, found.ids) == ("warn", (f"r{row}",))
    assert "size 1" in found.because


def test_a_row_far_from_its_class_is_listed(sound):
    row, x = sound.rows("validation")[3], sound.vectors.copy()
    x[row] *= 10
    found = samples.outliers(changed(sound, vectors=x), LIMITS, 0)
    assert (found.verdict, found.ids) == ("warn", (f"r{row}",))


def test_what_is_not_finite_is_infinitely_far_and_equal_values_are_not():
    assert samples.robust_z(np.array([1.0, 1.0, 1.0, np.nan])).tolist() == [0, 0, 0, np.inf]


# ---- columns ----------------------------------------------------------------------------------


def test_constant_columns_are_counted_and_nothing_but_them_shuts(sound):
    x = sound.vectors.copy()
    x[:, :5] = 1
    found = samples.constant_columns(changed(sound, vectors=x), LIMITS, 0)
    assert (found.verdict, found.estimate) == ("open", 0.25)
    x[:] = 1
    assert samples.constant_columns(changed(sound, vectors=x), LIMITS, 0).verdict == "shut"


@pytest.mark.parametrize("scale", [1.0, -0.5])
def test_a_column_that_counts_the_rows_warns(sound, scale):
    x = sound.vectors.copy()
    x[:, 7] = scale * np.arange(NUM_ROWS)
    found = samples.constant_columns(changed(sound, vectors=x), LIMITS, 0)
    assert found.verdict == "warn"
    assert "column 7" in found.because


@pytest.mark.parametrize("codes", [[0, 1, 2], [5, -3, 1]])
def test_the_label_written_in_a_column_shuts(sound, codes):
    x = sound.vectors.copy()
    x[:, 4] = np.array(codes)[sound.labels] + np.random.default_rng(0).normal(0, 0.05, NUM_ROWS)
    found = leakage.target_leakage(changed(sound, vectors=x), LIMITS, 0)
    assert found.verdict == "shut"
    assert "column 4" in found.because


def test_the_label_written_in_a_feature_axis_shuts(sound):
    subject = replace(sound, features={"size": sound.labels.astype(float)})
    found = leakage.target_leakage(subject, LIMITS, 0)
    assert (found.verdict, "look at size" in found.because) == ("shut", True)


def test_a_mark_on_one_class_warns(sound):
    x = sound.vectors.copy()
    x[:, 4] = 9.0 * (sound.labels == 2)
    found = leakage.target_leakage(changed(sound, vectors=x), LIMITS, 0)
    assert (found.verdict, "look at column 4" in found.because) == ("warn", True)


def test_rows_sorted_by_class_warn(sound):
    order = np.argsort(sound.labels, kind="stable")
    split = sound.split[np.random.default_rng(1).permutation(NUM_ROWS)]
    subject = changed(sound, vectors=sound.vectors[order], labels=sound.labels[order], split=split)
    found = leakage.target_leakage(subject, LIMITS, 0)
    assert (found.verdict, "sorted by class" in found.because) == ("warn", True)
    assert drift.order_and_groups(subject, LIMITS, 0).verdict == "open"


# ---- order and groups -------------------------------------------------------------------------


def by_source(sound, shift=1.0):
    """Ten sources, one after another; each moves its rows and says less of the class."""
    rng = np.random.default_rng(4)
    source = np.arange(NUM_ROWS) * 10 // NUM_ROWS
    moved = sound.vectors * 0.8 + shift * rng.normal(size=(10, sound.vectors.shape[1]))[source]
    return changed(sound, vectors=moved.astype(np.float32)), source


def test_rows_that_come_source_by_source_warn_under_a_random_split(sound):
    subject, source = by_source(sound)
    found = drift.order_and_groups(subject, LIMITS, 0)
    assert found.verdict == "warn"
    assert found.interval[0] > 0
    groups = tuple(f"s{number}" for number in source)
    kept = replace(subject, groups=groups, strategy="group", split=split_of(source))
    found = drift.order_and_groups(kept, LIMITS, 0)
    assert (found.verdict, "group folds" in found.because) == ("open", True)
    assert drift.order_and_groups(replace(kept, split=sound.split), LIMITS, 0).verdict == "warn"


def split_of(source):
    return np.array(["train"] * 6 + ["validation"] * 2 + ["test"] * 2)[source]


# ---- split drift ------------------------------------------------------------------------------


def shifted(sound, by, columns):
    x = sound.vectors.copy()
    x[np.ix_(sound.rows("validation"), columns)] += by * x[:, columns].std(axis=0)
    return changed(sound, vectors=x)


def test_a_shift_of_half_a_deviation_in_one_column_warns(sound):
    assert drift.split_drift(shifted(sound, 0.6, [3]), LIMITS, 0).verdict == "warn"


@pytest.mark.parametrize(("strategy", "verdict"), [("random", "shut"), ("time", "warn")])
def test_splits_that_differ_throughout_shut_where_chance_drew_them(sound, strategy, verdict):
    subject = replace(shifted(sound, 2.0, list(range(20))), strategy=strategy)
    assert drift.split_drift(subject, LIMITS, 0).verdict == verdict


def test_other_class_shares_in_validation_warn(sound):
    rows = sound.rows("validation")
    split = sound.split.copy()
    split[rows[sound.labels[rows] == 0]] = ""
    assert drift.split_drift(replace(sound, split=split), LIMITS, 0).verdict == "warn"


def test_too_few_validation_rows_are_said_to_be_too_few(sound):
    split = sound.split.copy()
    split[sound.rows("validation")[20:]] = ""
    found = drift.split_drift(replace(sound, split=split), LIMITS, 0)
    assert (found.verdict, "cannot see" in found.because) == ("warn", True)


# ---- label noise ------------------------------------------------------------------------------


def digits_with_flips(share, seed=0):
    """Digits with a share of their labels changed, and the ids of the changed ones."""
    digits, rng = load_digits(), np.random.default_rng(seed)
    y = digits.target.astype(np.int64)
    rows = rng.choice(len(y), round(share * len(y)), replace=False)
    y[rows] = (y[rows] + rng.integers(1, 10, len(rows))) % 10
    x = ((digits.data - digits.data.mean()) / digits.data.std()).astype(np.float32)
    names = tuple(map(str, range(len(y))))
    subject = audit.Subject(
        ids=names,
        split=np.where(np.arange(len(y)) % 5 == 4, "validation", "train"),
        labels=y,
        class_names=tuple("0123456789"),
        content=names,
        vectors=x,
        shape=(8, 8),
        raw=lambda row: x[row],
    )
    return subject, {names[row] for row in rows}


def test_flipped_labels_are_listed_worst_first():
    subject, wrong = digits_with_flips(0.03)
    found = labels.label_noise(subject, LIMITS, 0)
    hits = wrong & set(found.ids)
    assert len(hits) / len(found.ids) >= 0.85
    assert len(hits) / len(wrong) >= 0.95
    assert set(found.ids[:20]) <= wrong
    assert (found.verdict, found.interval[0]) == ("open", 0)
    assert "unreviewed" in found.because


def test_a_review_turns_the_bound_into_a_rate_whose_interval_holds_the_truth():
    subject, wrong = digits_with_flips(0.03)
    found = labels.label_noise(subject, LIMITS, 0)
    listed = labels.review_list(found.ids, 0)
    assert len(listed) == labels.REVIEW_SIZE
    review = {name: "wrong" if name in wrong else "right" for name in listed}
    told = labels.label_noise(subject, LIMITS, 0, review)
    assert told.interval[0] < 0.03 < told.interval[1]
    assert told.estimate == pytest.approx(0.03, abs=0.006)
    strict = replace(LIMITS, max_label_noise=0.01)
    assert labels.label_noise(subject, strict, 0, review).verdict == "shut"
    right = dict.fromkeys(listed, "right")
    assert labels.label_noise(subject, strict, 0, right).verdict == "open"


def test_suspects_above_the_limit_shut_until_someone_reviews_them():
    subject, _ = digits_with_flips(0.06)
    assert labels.label_noise(subject, replace(LIMITS, max_label_noise=0.05), 0).verdict == "shut"


def test_a_fifth_of_wrong_labels_needs_a_review_to_be_told_from_hard_rows():
    subject, wrong = digits_with_flips(0.2)
    found = labels.label_noise(subject, LIMITS, 0)
    assert found.verdict == "inconclusive"
    assert "Not identifiable without review" in found.because
    review = {name: "wrong" if name in wrong else "right" for name in found.ids[:40]}
    assert labels.label_noise(subject, LIMITS, 0, review).verdict == "shut"


def test_overlapping_classes_are_not_called_noise(sound):
    rng = np.random.default_rng(0)
    x = (0.8 * sound.labels[:, None] + rng.normal(size=(NUM_ROWS, 3))).astype(np.float32)
    found = labels.label_noise(changed(sound, vectors=x, shape=(3,)), LIMITS, 0)
    assert found.verdict == "warn"


def test_a_review_in_other_words_is_refused():
    subject, _ = digits_with_flips(0.03)
    review = dict.fromkeys(subject.ids, "bad")
    with pytest.raises(ValueError, match="'wrong' or 'right', not 'bad'"):
        labels.label_noise(subject, LIMITS, 0, review)
