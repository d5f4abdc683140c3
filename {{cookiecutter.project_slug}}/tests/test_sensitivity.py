import numpy as np
import pytest
from scipy.stats import kruskal

from {{cookiecutter.project_slug}}.harness.figures.tune import draw_sensitivities
from {{cookiecutter.project_slug}}.harness.sensitivity import sensitivities

SPACE = {
    "lr": {"low": 0.0, "high": 1.0},
    "decay": {"low": 0.0, "high": 1.0},
    "shift": {"low": 0.0, "high": 1.0},
    "batch": {"choices": [32, 64, 128]},
}
NUM_STUDIES = 60


def synthetic(seed, strength, num_trials=20, noise=0.15):
    """Random search where `lr` decides (strength 1) or nothing does (0); the others whisper."""
    draw = np.random.default_rng(seed)
    rows = []
    for index in range(num_trials):
        lr, decay, shift = draw.uniform(size=3).tolist()
        batch = int(draw.choice([32, 64, 128]))
        parameters = {"lr": lr, "decay": decay, "shift": shift, "batch": batch}
        small = 0.15 * decay + 0.15 * shift + 0.1 * (batch == 128)
        value = strength * (lr + small) + noise * draw.standard_normal()
        rows.append(row(index, value, parameters))
    return rows


def row(index, value, parameters, state="complete"):
    return {
        "index": index,
        "state": state,
        "value": value,
        "epochs": 1,
        "parameters": parameters,
        "because": "",
    }


def test_one_dominant_parameter_of_four_is_named_in_almost_all_studies_of_20_trials():
    found = [sensitivities(synthetic(s, 1.0), SPACE, 0) for s in range(NUM_STUDIES)]
    assert sum(ranked[0]["parameter"] != "lr" for ranked in found) <= 3
    detected = [next(r for r in ranked if r["parameter"] == "lr")["detected"] for ranked in found]
    assert sum(detected) >= 50


def test_pure_noise_is_none_detected_in_almost_all_studies():
    found = [sensitivities(synthetic(s, 0.0), SPACE, 0) for s in range(NUM_STUDIES)]
    assert sum(any(row["detected"] for row in ranked) for ranked in found) <= 6
    no_share = [row["interval"][0] == 0 for ranked in found for row in ranked]
    assert np.mean(no_share) > 0.9  # the true share is 0: the interval must reach it


def test_the_share_is_that_of_the_kruskal_wallis_test():
    rows = synthetic(1, 1.0, num_trials=40)
    rows[3] = row(3, rows[4]["value"], rows[3]["parameters"])  # a tie
    found = {r["parameter"]: r for r in sensitivities(rows, SPACE, 0)}
    values = np.array([r["value"] for r in rows])
    for name in SPACE:
        column = np.array([r["parameters"][name] for r in rows], dtype=float)
        quartile = np.argsort(np.argsort(column)) * 4 // len(rows)
        group = column if name == "batch" else quartile
        h = kruskal(*[values[group == g] for g in np.unique(group)]).statistic
        assert found[name]["share"] == pytest.approx(h / (len(rows) - 1))
    assert found["batch"]["method"] == "mean rank over choices"
    assert found["lr"]["method"] == "mean rank over quartiles"


def test_the_same_rows_and_seed_give_the_same_numbers_largest_share_first():
    rows = synthetic(2, 1.0)
    found = sensitivities(rows, SPACE, 7)
    assert found == sensitivities(rows, SPACE, 7)
    assert [r["share"] for r in found] == sorted((r["share"] for r in found), reverse=True)
    assert found[0]["interval"] != sensitivities(rows, SPACE, 8)[0]["interval"]


def test_a_failed_trial_is_worse_than_all_and_a_pruned_one_counts_with_its_last_value():
    rows = [row(i, 1.0, {"lr": i / 20}) for i in range(14)]
    rows += [row(i, None, {"lr": i / 20}, "failed") for i in range(14, 20)]
    (found,) = sensitivities(rows, {"lr": SPACE["lr"]}, 0)
    assert found["detected"] and found["share"] > 0.7
    rows = [row(i, i / 20, {"lr": i / 20}, "pruned" if i > 9 else "complete") for i in range(20)]
    (found,) = sensitivities(rows, {"lr": SPACE["lr"]}, 0)
    assert found["detected"] and found["share"] > 0.9


def test_a_few_whole_values_are_their_own_groups():
    space = {"width": {"low": 8, "high": 24, "step": 8}}
    rows = [row(i, float(i % 3), {"width": 8 * (1 + i % 3)}) for i in range(12)]
    (found,) = sensitivities(rows, space, 0)
    assert found["method"] == "mean rank over values"
    assert found["share"] == pytest.approx(1.0)


def test_equal_values_explain_nothing():
    rows = [row(i, 0.5, {"lr": i / 20}) for i in range(20)]
    (found,) = sensitivities(rows, {"lr": SPACE["lr"]}, 0)
    assert (found["share"], found["detected"]) == (0.0, False)


def test_too_few_trials_are_said_and_nothing_is_detected():
    found = sensitivities(synthetic(0, 1.0, num_trials=7), SPACE, 0)
    assert [r["parameter"] for r in found] == sorted(SPACE)
    assert all(r["share"] is None and not r["detected"] for r in found)
    assert found[0]["method"] == "none: 7 of the 8 trials it takes have finished"


def test_ped_anova_is_reported_from_50_complete_trials_on():
    assert all(r["ped_anova"] is None for r in sensitivities(synthetic(0, 1.0), SPACE, 0))
    found = sensitivities(synthetic(0, 1.0, num_trials=50), SPACE, 0)
    assert max(found, key=lambda r: r["ped_anova"])["parameter"] == "lr"


@pytest.mark.parametrize("num_trials", [5, 60])
def test_the_figure_is_small_and_the_same_each_time(tmp_path, num_trials):
    rows = synthetic(0, 1.0, num_trials)
    rows[1] = row(1, None, rows[1]["parameters"], "failed")
    rows[2] = row(2, rows[2]["value"], rows[2]["parameters"], "pruned")
    found = sensitivities(rows, SPACE, 0)
    for name in ("a.png", "b.png"):
        draw_sensitivities(tmp_path / name, rows, found)
    data = (tmp_path / "a.png").read_bytes()
    assert data == (tmp_path / "b.png").read_bytes()
    assert 5_000 < len(data) < 100_000
