"""Every detector both ways: sound data opens its axis, and one planted fault is found and named."""

import json
from dataclasses import replace

import numpy as np
import pytest
from audit_case import LIMITS, NUM_ROWS, changed, contents, make_subject
from sklearn.datasets import load_digits

from {{cookiecutter.project_slug}}.harness import audit
from {{cookiecutter.project_slug}}.harness.audit import (
    baselines,
    drift,
    duplicates,
    labels,
    leakage,
    neighbours,
    samples,
)
from {{cookiecutter.project_slug}}.harness.audit.structure import structure
from {{cookiecutter.project_slug}}.harness.audit.subject import Control, state


@pytest.fixture(scope="module")
def sound():
    return make_subject()


def copied(subject, pairs, noise=0.0):
    """Each (source, target): the target row becomes a copy of the source."""
    x = subject.vectors.copy()
    rng = np.random.default_rng(1)
    for source, target in pairs:
        x[target] = x[source] + noise * rng.normal(size=x.shape[1])
    return changed(subject, vectors=x)


def rows_in(subject, split):
    return subject.rows(split).tolist()


# ---- what every detector has in common --------------------------------------------------------


@pytest.mark.parametrize("detector", audit.DETECTORS, ids=audit.AXES)
def test_sound_data_opens_every_axis_by_a_detector_that_sees(sound, detector):
    found = detector(sound, LIMITS, 0)
    assert (found.axis, found.verdict) == (detector.__name__, "open"), found.because
    assert found.planted_recall >= 0.8
    assert found.because.endswith(".")
    assert len(found.ids) <= 5  # a few hard rows may look mislabelled
    assert found.check().name == found.axis


@pytest.mark.parametrize("control", [Control(15, 20, 0), Control(0, 0, 0)])
def test_a_detector_that_misses_planted_faults_never_says_that_nothing_is_there(control):
    said = {"method": "m", "n": 9, "because": "None found."}
    blind = state("axis", control, verdict="open", **said)
    assert blind.verdict == "warn"
    assert "cannot see" in blind.because
    assert state("axis", control, verdict="shut", **said).verdict == "shut"
    assert state("axis", Control(16, 20, 0), verdict="open", **said).because == "None found."


def test_the_whole_audit_has_every_axis_and_gives_the_same_numbers_twice():
    subject = make_subject(seed=3)
    first, again = (audit.run_audit(replace(subject), LIMITS, seed=0).row() for _ in range(2))
    assert first == again
    assert [found["axis"] for found in first["statements"]] == list(audit.AXES)
    assert list(first["ladder"]) == list(baselines.LADDER)
    assert all(first["draft"].values())
    json.dumps(first, allow_nan=False)


def test_nothing_learned_or_scored_depends_on_the_test_rows(sound):
    test, x, y = sound.rows("test"), sound.vectors.copy(), sound.labels.copy()
    x[test] = 100 * np.random.default_rng(5).normal(size=x[test].shape)
    y[test] = (y[test] + 1) % 3
    size = np.where(sound.split == "test", 1e6, sound.features["size"])
    other = changed(sound, vectors=x, labels=y, features={"size": size})
    learned = [samples.outliers, samples.constant_columns, leakage.target_leakage]
    learned += [drift.order_and_groups, drift.split_drift, labels.label_noise]
    for detector in learned:
        assert detector(other, LIMITS, 0) == detector(sound, LIMITS, 0)


def test_digits_show_their_writers_and_little_else():
    digits = load_digits()
    x = ((digits.data - digits.data.mean()) / digits.data.std()).astype(np.float32)
    y = digits.target.astype(np.int64)
    split = np.array(["train", "train", "train", "validation", "test"])
    subject = audit.Subject(
        ids=tuple(map(str, range(len(y)))),
        split=split[np.random.default_rng(0).integers(0, 5, len(y))],
        labels=y,
        class_names=tuple("0123456789"),
        content=contents(x),
        vectors=x,
        shape=(1, 8, 8),
        raw=lambda row: digits.images[row],
        value_range=(0, 16),
    )
    found = audit.run_audit(subject, LIMITS, seed=0)
    loud = {s.axis for s in found.statements if s.verdict != "open"}
    assert "order_and_groups" in loud <= {"order_and_groups", "cross_split_leakage"}
    assert all(s.planted_recall >= 0.8 for s in found.statements)
    assert found.ladder["trees"]["accuracy"] > found.ladder["majority"]["accuracy"] + 0.8
    assert "axis 1 and axis 2" in found.draft["architecture"]


# ---- corrupt ----------------------------------------------------------------------------------

SPOILT = {
    "not finite": lambda row: np.where(np.arange(len(row)) == 3, np.nan, row),
    "constant": np.zeros_like,
    "empty": lambda row: row[:0],
    "outside the declared range": lambda row: row + 1e4,
    "number of dimensions": lambda row: row[None],
    "holds no numbers": lambda row: row.astype(str),
}


@pytest.mark.parametrize("kind", SPOILT)
@pytest.mark.parametrize(("number", "verdict"), [(9, "warn"), (10, "shut")])
def test_corrupt_rows_are_named_and_shut_above_the_limit(sound, kind, number, verdict):
    def raw(row):
        return SPOILT[kind](sound.vectors[row]) if row < number else sound.vectors[row]

    found = samples.corrupt(replace(sound, raw=raw, value_range=(-1e3, 1e3)), LIMITS, 0)
    assert found.verdict == verdict
    assert found.ids == tuple(f"r{row}" for row in range(number))
    assert f"{kind}" in found.because


def test_rows_that_cannot_be_read_count_as_corrupt_and_stop_nothing(sound):
    def raw(row):
        if row == 7:
            raise OSError("cut off")
        return sound.vectors[row]

    subject = replace(sound, raw=raw, unreadable={"r3": "empty file"})
    found = samples.corrupt(subject, LIMITS, 0)
    assert (found.verdict, found.ids) == ("warn", ("r3", "r7"))
    assert duplicates.exact_duplicates(subject, LIMITS, 0).verdict == "open"


def test_another_shape_than_the_declared_one_is_corrupt(sound):
    assert samples.corrupt(replace(sound, raw_shape=(20,)), LIMITS, 0).verdict == "open"
    assert samples.corrupt(replace(sound, raw_shape=(5, 4)), LIMITS, 0).verdict == "shut"


# ---- duplicates and conflicting labels --------------------------------------------------------


def test_exact_duplicates_in_a_split_are_counted_and_many_warn(sound):
    train = rows_in(sound, "train")
    few = copied(sound, [(train[0], train[row]) for row in (1, 2)])
    found = duplicates.exact_duplicates(few, LIMITS, 0)
    assert (found.verdict, set(found.ids)) == ("open", {few.ids[train[1]], few.ids[train[2]]})
    many = copied(sound, zip(train[:50], train[50:100], strict=True))
    assert duplicates.exact_duplicates(many, LIMITS, 0).verdict == "warn"


def test_jittered_copies_are_near_duplicates_and_no_exact_ones(sound):
    train = rows_in(sound, "train")
    subject = copied(sound, [(train[0], train[9]), (train[1], train[8])], noise=0.02)
    found = duplicates.near_duplicates(subject, LIMITS, 0)
    assert set(found.ids) == {subject.ids[train[place]] for place in (0, 1, 8, 9)}
    assert duplicates.exact_duplicates(subject, LIMITS, 0).estimate == 0
    clusters = duplicates.near_clusters(subject.vectors)
    assert clusters == sorted([[train[0], train[9]], [train[1], train[8]]])


def test_in_two_crowded_dimensions_near_duplicates_cannot_be_seen():
    found = duplicates.near_duplicates(make_subject(num_columns=2), LIMITS, 0)
    assert found.verdict == "warn"
    assert "cannot see" in found.because


def test_more_rows_than_can_be_compared_are_sampled_and_said(sound, monkeypatch):
    monkeypatch.setattr(neighbours.sample, "__defaults__", (300,))
    found = duplicates.near_duplicates(replace(sound), LIMITS, 0)
    assert found.n == 300
    assert "only 300 of 900 rows" in found.because


def test_identical_rows_under_two_labels_warn_and_raise_the_loss_floor(sound):
    train = sound.rows("train")
    pair = [train[sound.labels[train] == label][0] for label in (0, 1)]
    subject = copied(sound, [pair])
    found = duplicates.conflicting_labels(subject, LIMITS, 0)
    assert (found.verdict, set(found.ids)) == ("warn", set(subject.names(pair)))
    assert found.more["loss_floor"] == pytest.approx(2 * np.log(2) / len(train))
    strict = replace(LIMITS, max_label_noise=0.001)
    assert duplicates.conflicting_labels(subject, strict, 0).verdict == "shut"
    assert duplicates.loss_floor(sound) == 0


# ---- across splits ----------------------------------------------------------------------------


def leak_of(subject):
    return leakage.cross_split_leakage(subject, LIMITS, 0)


def test_one_row_in_two_splits_shuts(sound):
    subject = copied(sound, [(rows_in(sound, "train")[0], rows_in(sound, "test")[0])])
    found = leak_of(subject)
    assert (found.verdict, found.estimate) == ("shut", 1)
    assert found.ids == (subject.ids[rows_in(sound, "test")[0]],)


def test_a_near_duplicate_in_another_split_warns_and_one_equal_but_for_rounding_shuts(sound):
    pair = [(rows_in(sound, "train")[0], rows_in(sound, "validation")[0])]
    assert leak_of(copied(sound, pair, noise=0.02)).verdict == "warn"
    assert leak_of(copied(sound, pair, noise=1e-5)).verdict == "shut"


@pytest.mark.parametrize(("strategy", "verdict"), [("group", "shut"), ("time", "warn")])
def test_shared_groups_shut_unless_the_split_follows_time(sound, strategy, verdict):
    groups = [f"{split}-{row % 9}" for row, split in enumerate(sound.split)]
    subject = replace(sound, groups=tuple(groups), strategy=strategy)
    assert leak_of(subject).verdict == "open"
    groups[rows_in(sound, "validation")[0]] = groups[rows_in(sound, "train")[0]]
    found = leak_of(replace(subject, groups=tuple(groups)))
    assert (found.verdict, "1 group shared" in found.because) == (verdict, True)


def test_a_train_row_later_than_validation_shuts_a_split_by_time(sound):
    order = {"train": 0, "validation": 1, "test": 2}
    times = [str(order[split]) for split in sound.split]
    assert leak_of(replace(sound, times=tuple(times), strategy="time")).verdict == "open"
    row = rows_in(sound, "train")[0]
    times[row] = "5"
    found = leak_of(replace(sound, times=tuple(times), strategy="time"))
    assert (found.verdict, found.ids) == ("shut", (f"r{row}",))
    assert leak_of(replace(sound, times=tuple(times), strategy="random")).verdict == "open"


# ---- structure and baselines ------------------------------------------------------------------


def test_structure_is_seen_along_the_axis_that_has_it_and_not_in_shuffled_columns():
    walk = np.cumsum(np.random.default_rng(0).normal(size=(NUM_ROWS, 3, 16)), axis=2)
    x = walk.reshape(NUM_ROWS, -1).astype(np.float32)
    subject = changed(make_subject(), vectors=x, shape=(3, 16))
    assert [axis["local"] for axis in structure(subject, 0)["axes"]] == [False, True]
    mixed = changed(subject, vectors=x[:, np.random.default_rng(1).permutation(48)])
    assert [axis["local"] for axis in structure(mixed, 0)["axes"]] == [False, False]


def test_the_ladder_is_scored_on_rows_it_was_not_fitted_on(sound):
    noise = np.random.default_rng(2).integers(0, 3, NUM_ROWS)
    train, new = sound.rows("train"), sound.rows("validation")
    x = sound.vectors
    told = baselines.ladder(x[train], noise[train], x[new], noise[new], num_classes=3)
    assert all(scores["accuracy"] < 0.5 for scores in told.values())
    honest = baselines.ladder(
        x[train], sound.labels[train], x[new], sound.labels[new], num_classes=3
    )
    assert min(honest[name]["accuracy"] for name in baselines.LADDER[1:]) > 0.9
    assert honest["majority"]["log_loss"] == pytest.approx(np.log(3), abs=0.05)


def test_a_class_that_train_lacks_scores_badly_and_finitely():
    x, y = np.eye(4, dtype=np.float32), np.array([0, 0, 1, 1])
    told = baselines.ladder(x, y, x, np.array([2, 2, 2, 2]), num_classes=3)
    assert all(np.isfinite(scores["log_loss"]) for scores in told.values())
    assert {scores["accuracy"] for scores in told.values()} == {0.0}
