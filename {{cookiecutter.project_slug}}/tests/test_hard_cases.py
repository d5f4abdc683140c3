from types import SimpleNamespace

import numpy as np
import pytest
import torch
from scipy.stats import binomtest

from {{cookiecutter.project_slug}}.harness import hard_cases
from {{cookiecutter.project_slug}}.harness.figures.squeeze import draw_hard_cases
from {{cookiecutter.project_slug}}.harness.loop import Evaluation
from {{cookiecutter.project_slug}}.task import Task

NAMES = ("a", "b", "c")
TASK = Task(SimpleNamespace(metric="accuracy"), NAMES)


def evaluation(margins, y=None, ids=None) -> Evaluation:
    """Outputs with exactly these margins; row ids 100, 101, ..."""
    margins = torch.as_tensor(margins, dtype=torch.float32)
    y = torch.as_tensor(y if y is not None else torch.arange(len(margins)) % len(NAMES))
    outputs = torch.full((len(y), len(NAMES)), -50.0)
    outputs[torch.arange(len(y)), y] = margins
    outputs[torch.arange(len(y)), (y + 1) % len(NAMES)] = 0.0
    ids = torch.as_tensor(ids if ids is not None else torch.arange(100, 100 + len(y)))
    return Evaluation(0.0, TASK.metric(outputs, y), len(y), outputs, y, ids)


def seed_like(base, seed, noise=0.7) -> Evaluation:
    """Another training run: the same margins, moved by noise."""
    moved = base + noise * np.random.default_rng(seed).standard_normal(len(base))
    return evaluation(moved)


def turned_round(found) -> Evaluation:
    """The same evaluation with its rows in the opposite order."""
    parts = [part.flip(0) for part in (found.outputs, found.y, found.ids)]
    return Evaluation(found.loss, found.metric, found.num_rows, *parts)


BASE = np.random.default_rng(0).normal(2.0, 1.5, size=600)


# ---- which cases --------------------------------------------------------------------------------


def test_the_suite_holds_the_rows_nearest_to_the_boundary_in_order_of_margin():
    found = hard_cases.suite(evaluation(np.arange(1, 41)), TASK, set(), max_share=0.5)
    assert [case["id"] for case in found] == list(range(100, 120))
    assert [case["margin"] for case in found] == list(range(1, 21))
    assert found[0] == {"id": 100, "y": 0, "margin": 1.0, "correct": True}


def test_suspects_are_left_out_and_both_limits_hold():
    reference = evaluation(BASE)
    suspects = set(range(100, 400))
    found = hard_cases.suite(reference, TASK, suspects)
    assert len(found) == 150 and not suspects & {case["id"] for case in found}
    assert len(hard_cases.suite(reference, TASK, set(), max_cases=20)) == 20
    assert len(hard_cases.suite(reference, TASK, set(), max_share=0.05)) == 30


def test_a_rare_class_far_from_the_boundary_keeps_a_few_cases():
    margins = np.concatenate([np.linspace(0.1, 1, 90), np.linspace(5, 6, 10)])
    reference = evaluation(margins, y=[0, 1] * 45 + [2] * 10)
    found = hard_cases.suite(reference, TASK, set())
    assert sum(case["y"] == 2 for case in found) == 4
    few = hard_cases.suite(reference, TASK, set(), max_cases=6)
    assert sum(case["y"] == 2 for case in few) == 2


def test_at_most_a_fifth_are_rows_the_reference_has_wrong():
    reference = evaluation(np.concatenate([-np.linspace(0.1, 9, 60), np.linspace(0.1, 9, 40)]))
    found = hard_cases.suite(reference, TASK, set())
    wrong = [case for case in found if not case["correct"]]
    assert (len(found), len(wrong)) == (25, 5)
    assert min(case["margin"] for case in wrong) > -1  # nearest to right, not most surely wrong


def test_a_model_that_is_always_right_or_no_room_is_no_error():
    assert hard_cases.suite(evaluation([3.0, 4.0]), TASK, set()) == []
    assert len(hard_cases.suite(evaluation(np.full(8, -1.0)), TASK, set())) == 0


# ---- comparison ---------------------------------------------------------------------------------


def test_flips_hidden_by_an_equal_mean_are_counted_and_listed_first():
    reference = evaluation([1, 2, 3, -1, -2, 4])
    candidate = evaluation([-3, -1, 3, 1, 2, 5])
    assert reference.metric == candidate.metric
    found = hard_cases.compare(reference, candidate, None, TASK)
    assert (found.num_rows, found.num_negative, found.num_positive) == (6, 2, 2)
    assert [row["id"] for row in found.rows[:2]] == [100, 101]  # the deepest fall first
    assert found.rows[0] == {
        "id": 100,
        "y": 0,
        "reference": 0,
        "candidate": 1,
        "reference_margin": 1.0,
        "candidate_margin": -3.0,
        "change": "negative",
    }
    assert found.mean_margin_change == pytest.approx(0.0)
    assert sorted(row["change"] for row in found.rows[2:]) == ["positive"] * 2 + ["same"] * 2


def test_only_the_suite_is_compared_and_the_order_of_rows_does_not_matter():
    reference, candidate = evaluation(BASE), seed_like(BASE, 1)
    turned = turned_round(candidate)
    cases = hard_cases.suite(reference, TASK, set())
    found = hard_cases.compare(reference, candidate, cases, TASK)
    assert found == hard_cases.compare(reference, turned, cases, TASK)
    assert {row["id"] for row in found.rows} == {case["id"] for case in cases}


def test_a_model_compared_with_itself_flips_nothing():
    found = hard_cases.compare(evaluation(BASE), evaluation(BASE), None, TASK)
    assert (found.num_negative, found.num_positive, found.p_value) == (0, 0, 1.0)


@pytest.mark.parametrize(
    "other",
    [evaluation([1, 2]), evaluation([1, 2, 3], ids=[1, 2, 3]), evaluation([1, 2, 3], y=[2, 1, 0])],
)
def test_evaluations_of_other_rows_are_refused(other):
    with pytest.raises(ValueError, match="same split of the same data"):
        hard_cases.compare(evaluation([1, 2, 3]), other, None, TASK)


@pytest.mark.parametrize(("negative", "positive"), [(0, 0), (5, 0), (3, 1), (40, 35), (0, 9)])
def test_the_p_value_is_the_exact_binomial_one(negative, positive):
    flips = negative + positive
    wanted = binomtest(negative, flips, 0.5, "greater").pvalue if flips else 1.0
    assert hard_cases.flip_p_value(negative, positive) == pytest.approx(wanted)


# ---- retraining noise ---------------------------------------------------------------------------


def test_another_seed_stays_within_the_allowance_and_a_damaged_candidate_does_not():
    seeds = [seed_like(BASE, seed) for seed in range(3)]
    found = hard_cases.allowance(seeds, TASK, set())
    assert len(found["flips"]) == 6 and found["mean"] < found["allowed"] < 3 * found["mean"]
    cases = hard_cases.suite(seeds[0], TASK, set())
    honest = [seed_like(BASE, seed) for seed in range(10, 50)]
    flips = [hard_cases.compare(seeds[0], other, cases, TASK).num_negative for other in honest]
    assert np.mean(np.array(flips) > found["allowed"]) <= 0.1
    damaged = seed_like(BASE - 1.5, 50)
    assert hard_cases.compare(seeds[0], damaged, cases, TASK).num_negative > found["allowed"]


def test_a_recipe_without_noise_allows_nothing_and_one_seed_shows_none():
    assert hard_cases.allowance([evaluation(BASE), evaluation(BASE)], TASK, set())["allowed"] == 0
    with pytest.raises(ValueError, match="1 seed shows no churn"):
        hard_cases.allowance([evaluation(BASE)], TASK, set())


# ---- intervals ----------------------------------------------------------------------------------


@pytest.mark.parametrize(("successes", "num_rows"), [(0, 10), (10, 10), (8, 10), (355, 360)])
def test_the_interval_of_a_share_is_wilson_s(successes, num_rows):
    wanted = binomtest(successes, num_rows).proportion_ci(0.95, method="wilson")
    assert hard_cases.wilson(successes, num_rows) == pytest.approx((wanted.low, wanted.high))


def test_a_share_of_nothing_is_refused():
    with pytest.raises(ValueError, match="0 of 0"):
        hard_cases.wilson(0, 0)


def test_a_better_model_shows_a_difference_above_zero_and_the_same_model_none():
    earlier, later = evaluation(BASE), evaluation(BASE + 0.7)
    found = hard_cases.difference(earlier, later, TASK)
    assert found["value"] == pytest.approx(later.metric - earlier.metric)
    assert 0 < found["low"] < found["value"] < found["high"]
    assert found["num_lost"] == 0 and found["num_won"] > 10 and found["p_value"] < 0.01
    assert found == hard_cases.difference(earlier, later, TASK)
    same = hard_cases.difference(earlier, earlier, TASK)
    assert (same["value"], same["low"], same["high"], same["p_value"]) == (0.0, 0.0, 0.0, 1.0)


def test_the_difference_uses_the_task_s_metric_and_matches_rows_by_id():
    balanced = Task(SimpleNamespace(metric="balanced_accuracy"), NAMES)
    earlier, later = evaluation([1, 1, 1, -1]), evaluation([1, 1, 1, 1])
    found = hard_cases.difference(earlier, turned_round(later), balanced, num_resamples=50)
    assert found["value"] == pytest.approx(1 / 6)  # half of class a, one of three classes


# ---- the picture --------------------------------------------------------------------------------


def test_the_worst_cases_are_drawn_with_both_answers(tmp_path):
    reference, candidate = evaluation(BASE), seed_like(BASE, 1)
    rows = hard_cases.compare(reference, candidate, None, TASK).rows
    asked = []

    def draw(row_id):
        asked.append(row_id)
        if len(asked) % 5 == 0:
            raise ValueError("cannot be drawn")
        return np.full((8, 8), row_id)

    for name in ("a.png", "b.png"):
        draw_hard_cases(tmp_path / name, rows, draw, TASK.answer)
    assert asked[:24] == [row["id"] for row in rows[:24]] and len(asked) == 48
    size = (tmp_path / "a.png").stat().st_size
    assert 2_000 < size < 100_000
    draw_hard_cases(tmp_path / "none.png", [], draw, TASK.answer)


def test_a_picture_of_the_same_cases_has_the_same_bytes(tmp_path):
    rows = hard_cases.compare(evaluation(BASE), seed_like(BASE, 1), None, TASK).rows[:9]
    for name in ("a.png", "b.png"):
        draw_hard_cases(tmp_path / name, rows, lambda _: np.eye(8), lambda _: "$x$ [")
    assert (tmp_path / "a.png").read_bytes() == (tmp_path / "b.png").read_bytes()
