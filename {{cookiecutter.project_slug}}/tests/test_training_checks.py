"""Checks of finished runs, studies and final tables: each healthy, and shut by its own fault."""

import copy
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from {{cookiecutter.project_slug}} import model
from {{cookiecutter.project_slug}}.harness import files
from {{cookiecutter.project_slug}}.harness.checks import final, owner, training, tuning
from {{cookiecutter.project_slug}}.harness.hard_cases import Comparison

EPOCHS = np.arange(30)
PLATEAU = 2 * np.exp(-EPOCHS / 2) + 0.001
FALLING = 2 * np.exp(-EPOCHS / 12)


def curve(losses=PLATEAU, seed=0, validation=0.3):
    """A run of `harness.loop.fit` as the stages keep it."""
    rows = [
        {"epoch": k, "step": k * 10, "running_train_loss": loss + 0.1, "train_loss": loss}
        for k, loss in enumerate(map(float, losses), start=1)
    ]
    return {
        "seed": seed,
        "num_epochs": len(rows),
        "stopped": f"all {len(rows)} epochs done",
        "best_loss": min(float(loss) for loss in losses),
        "best_validation_loss": validation,
        "epochs": rows,
    }


def is_open(check):
    assert check.verdict == "open" and check.suspect == (), check
    assert check.value is None or math.isfinite(check.value)
    assert check.because.endswith(".")
    return check


def is_shut(check, match, verdict="shut"):
    """Shut (or `verdict`), and its likeliest cause names what was planted."""
    assert check.verdict == verdict, check
    assert match in check.suspect[0], check.suspect
    return check


# ---- learning-rate range ------------------------------------------------------------------------

RANGE = {"drop": 0.7, "divergence": 0.3, "usable": 0.03}


def test_a_configured_rate_within_reach_is_open():
    found = is_open(training.lr_range(RANGE, 3e-3, 0.05))
    assert (found.value, found.limit) == (0.7, 0.05)
    assert "falls by 70% at best, diverges at 3.0e-01; usable rate 3.0e-02" in found.because
    endless = {**RANGE, "divergence": None, "usable": 0.01}
    assert "never diverges" in is_open(training.lr_range(endless, 1e-2, 0.05)).because


def test_a_loss_that_no_rate_lowers_shuts():
    is_shut(training.lr_range({**RANGE, "drop": 0.04}, 3e-3, 0.05), "no gradient")


@pytest.mark.parametrize("rate", [0.31, 2.9e-4])
def test_a_rate_beyond_divergence_or_far_below_use_warns_with_another(rate):
    is_shut(training.lr_range(RANGE, rate, 0.05), "try 3.0e-02", "warn")


# ---- training loss ------------------------------------------------------------------------------


def overfitted(*curves, capacity=(1.0, 1.0), sizes=()):
    wide = {
        name: curve([loss]) for name, loss in zip(("configured", "wider"), capacity, strict=True)
    }
    return {"runs": list(curves), "capacity": wide, "sizes": list(sizes), "scope": "full"}


def test_a_very_low_training_loss_of_every_seed_is_open():
    found = overfitted(curve(seed=0), curve(PLATEAU + 0.002, seed=1))
    check = is_open(training.train_loss(found, floor=0.0, limit=0.01))
    assert check.value == pytest.approx(0.003, abs=1e-4) and check.limit == 0.01


def test_the_floor_of_conflicting_labels_is_allowed_for():
    found = overfitted(curve(PLATEAU + 0.2))
    is_open(training.train_loss(found, floor=0.2, limit=0.01))
    is_shut(training.train_loss(found, floor=0.1, limit=0.01), "the learning rate")


def test_the_worst_seed_speaks():
    found = overfitted(curve(seed=0), curve(PLATEAU + 0.5, seed=1))
    assert "for the worst of 2 seeds" in is_shut(training.train_loss(found, 0, 0.01), "").because


def test_too_little_capacity_is_suspected_when_a_wider_network_does_better():
    found = overfitted(curve(PLATEAU + 0.5), capacity=(1.0, 0.5))
    is_shut(training.train_loss(found, 0, 0.01), "too little capacity")


def test_too_few_epochs_come_first_while_the_loss_still_falls():
    found = overfitted(curve(FALLING), capacity=(1.0, 0.5))
    is_shut(training.train_loss(found, 0, 0.01), "too few epochs")


def test_a_subset_is_named_with_its_sizes():
    found = overfitted(curve(), sizes=[{"num_rows": 100, "best_loss": 0.5}])
    because = training.train_loss({**found, "scope": "subset n=400"}, 0, 0.01).because
    assert "0.5 on 100 rows" in because and "scope: subset n=400" in because


@pytest.mark.parametrize(("wider", "said"), [(0.5, "lowers"), (0.95, "does not lower")])
def test_what_more_capacity_does_is_reported(wider, said):
    capacity = overfitted(curve(), capacity=(1.0, wider))["capacity"]
    section = training.capacity_section(capacity)
    assert f"More capacity {said} the training loss" in section and "| wider |" in section


# ---- the curve ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("losses", "verdict", "suspect"),
    [
        (np.full(30, 2.3), "shut", "no gradient"),
        (2 + 0.1 * EPOCHS, "shut", "the sign of the loss"),
        (np.r_[np.linspace(2, 0.5, 15), [1.5] * 15], "warn", "too high"),
        (1 + np.exp(-EPOCHS / 3) + 0.4 * (-1.0) ** EPOCHS, "warn", "too high"),
    ],
)
def test_a_curve_of_the_wrong_shape_is_told_with_its_cause(losses, verdict, suspect):
    is_shut(training.curve_shape([curve(), curve(losses, seed=1)]), suspect, verdict)


def test_a_curve_that_fell_is_open_and_is_the_worst_seed_s():
    found = is_open(training.curve_shape([curve(PLATEAU * 2), curve(seed=1)]))
    assert "descended then plateaued: 4 after epoch 1" in found.because
    assert found.value == pytest.approx(PLATEAU[-1] / PLATEAU[0])


def test_a_curve_of_a_few_epochs_has_no_shape():
    found = training.curve_shape([curve(PLATEAU[:4])])
    assert found.verdict == "not_applicable" and "too short to have a shape" in found.because


def test_where_only_the_running_loss_is_known_its_shape_is_read():
    run = curve(np.full(30, 2.3))
    for row in run["epochs"]:
        del row["train_loss"]
    is_shut(training.curve_shape([run]), "no gradient")


# ---- what changed -------------------------------------------------------------------------------

CONFIG = {
    "seed": 0,
    "optimizer": {"lr": 0.1, "betas": [0.9, 0.99]},
    "regularization": {"augment": {"flip": False}},
    "data": {"path": "a", "human_reference": {"value": None, "kind": None}, "split": {"seed": 0}},
    "logger": {"name": "none"},
    "scratch": False,
}


def recorded(folder, config=CONFIG, stage="overfit"):
    """A run whose stage was recorded before with this configuration."""
    gate = folder / stage / "gate.json"
    if config is not None:
        files.write_json(gate, {"provenance": {"config": config}})
    return SimpleNamespace(stage="overfit", earlier=lambda name, file: folder / name / file)


def test_without_an_earlier_run_or_with_one_change_there_is_nothing_to_say(tmp_path):
    is_open(training.one_change(recorded(tmp_path, None), CONFIG))
    assert is_open(training.one_change(recorded(tmp_path), CONFIG)).value == 0
    found = is_open(training.one_change(recorded(tmp_path), {**CONFIG, "seed": 1}))
    assert found.value == 1 and "seed 0 to 1" in found.because


def test_two_changes_at_a_time_warn_and_are_listed(tmp_path):
    changed = copy.deepcopy(CONFIG)
    changed["optimizer"]["lr"] = 0.2
    changed["regularization"]["augment"]["flip"] = True
    found = training.one_change(recorded(tmp_path), changed)
    is_shut(found, "none of them can be credited", "warn")
    assert "optimizer.lr 0.1 to 0.2; regularization.augment.flip False to True" in found.because


def test_what_changes_no_training_is_no_change(tmp_path):
    changed = copy.deepcopy(CONFIG) | {
        "scratch": True,
        "device": "cuda",
        "logger": {"name": "wandb"},
    }
    changed["data"] |= {"path": "b", "human_reference": {"value": 0.98, "kind": "measured"}}
    assert is_open(training.one_change(recorded(tmp_path), changed)).value == 0
    changed["data"]["split"]["seed"] = 1
    assert training.one_change(recorded(tmp_path), changed).value == 1


def test_choices_of_the_stage_before_that_were_not_made_again_warn(tmp_path):
    run = recorded(tmp_path, stage="regularize")
    now = {key: CONFIG[key] for key in ("optimizer", "regularization")}
    is_open(training.carried_settings(run, now, "regularize"))
    other = copy.deepcopy(now)
    other["optimizer"]["lr"] = 0.2
    found = training.carried_settings(run, other, "regularize")
    is_shut(found, "give the same choices as in stage=regularize", "warn")
    assert "optimizer.lr was 0.1, now 0.2" in found.because


# ---- gain of regularization ---------------------------------------------------------------------


def runs(*losses, first=0):
    return [curve(seed=first + k, validation=loss) for k, loss in enumerate(losses)]


def test_a_gain_beyond_the_spread_of_the_seeds_is_open():
    found = is_open(training.paired_gain(runs(0.30, 0.32, 0.28), runs(0.20, 0.23, 0.17), 2.92))
    gains = np.array([0.10, 0.09, 0.11])
    assert found.value == pytest.approx(gains.mean() / (gains.std(ddof=1) / math.sqrt(3)))
    assert "0.3000 without and 0.2000 with" in found.because


@pytest.mark.parametrize(
    "after",
    [(0.31, 0.33, 0.29), (0.30, 0.32, 0.28), (0.20, 0.32, 0.29), (0.40, 0.20, 0.10)],
    ids=["worse", "the same", "one lucky seed", "all over the place"],
)
def test_a_gain_within_the_spread_or_none_shuts(after):
    is_shut(training.paired_gain(runs(0.30, 0.32, 0.28), runs(*after), 2.92), "does not help")


def test_seeds_are_paired_by_their_number_and_only_shared_ones_count():
    reference = [*runs(0.30, 0.32, 0.28), curve(seed=9, validation=9.0)]
    found = is_open(training.paired_gain(reference, runs(0.20, 0.23, 0.17)[::-1], 2.92))
    assert "0.3000 without and 0.2000 with" in found.because


@pytest.mark.parametrize("first", [2, 3])
def test_fewer_than_two_shared_seeds_decide_nothing(first):
    found = training.paired_gain(runs(0.3, 0.3, 0.3), runs(0.1, 0.1, 0.1, first=first), 2.92)
    assert found.verdict == "inconclusive" and f"Only {3 - first} seeds" in found.because


# ---- units and filters --------------------------------------------------------------------------


def layer(dead=0.0, saturated=0.0):
    about = {"layer": "trunk.2", "kind": "ReLU", "num_units": 16}
    return {**about, "dead_share": dead, "saturated_share": saturated}


def test_few_dead_units_are_open_and_the_worst_layer_speaks():
    found = is_open(training.unit_activity([layer(), layer(dead=0.25), layer(0.1)], 0.5))
    assert found.value == 0.25 and "25% of the units" in found.because


@pytest.mark.parametrize("worst", [layer(dead=0.75), layer(saturated=0.75)])
def test_a_layer_of_dead_or_saturated_units_shuts(worst):
    is_shut(training.unit_activity([layer(), worst], 0.5), "a learning rate too high")


def test_a_network_without_activations_has_no_units_to_look_at():
    assert training.unit_activity([], 0.5).verdict == "not_applicable"


def smooth(count=8, side=7):
    """Filters like those of a trained network: waves."""
    rows, columns = np.mgrid[:side, :side]
    return np.stack([np.sin(0.5 * (k + 1) * rows / 2 + columns / 3) for k in range(count)])


def test_structured_filters_are_told_from_noise():
    is_open(training.first_layer(smooth(), seed=0))
    noise = np.random.default_rng(1).standard_normal((8, 7, 7))
    is_shut(training.first_layer(noise, seed=0), "the filters are noise", "warn")
    shuffled = np.random.default_rng(0).permuted(smooth().reshape(8, -1), axis=1)
    is_shut(training.first_layer(shuffled.reshape(8, 7, 7), seed=0), "noise", "warn")


def test_noise_passes_for_structure_about_one_time_in_twenty():
    draw = np.random.default_rng(0)
    passed = sum(
        training.first_layer(draw.standard_normal((4, 5, 5)), seed).verdict == "open"
        for seed in range(100)
    )
    assert passed <= 12


@pytest.mark.parametrize("pictures", [None, smooth(side=3), smooth(side=4)])
def test_filters_too_small_to_tell_are_not_applicable(pictures):
    found = training.first_layer(pictures, seed=0)
    assert found.verdict == "not_applicable" and "too little to tell" in found.because


def test_first_weights_are_the_first_with_an_input_and_an_output():
    network = model.build("ConvNet", {}, (1, 8, 8), 4)
    assert training.first_weights(network) is not None
    assert training.first_weights(network).shape == network.trunk[0].weight.shape


@pytest.mark.parametrize(
    ("layers", "verdict"),
    [
        ([nn.BatchNorm1d(4)], "not_applicable"),
        ([nn.Dropout(0.0), nn.BatchNorm1d(4)], "not_applicable"),
        ([nn.Dropout(0.5)], "open"),
        ([nn.BatchNorm1d(4), nn.Dropout(0.5)], "open"),  # where its own remedy puts it
        ([nn.Dropout(0.5), nn.BatchNorm1d(4)], "warn"),
        ([nn.Dropout2d(0.1), nn.Dropout(0.5), nn.BatchNorm2d(4)], "warn"),
        ([nn.Dropout(0.5), nn.GroupNorm(2, 4)], "open"),
    ],
)
def test_dropout_before_batchnorm_warns(layers, verdict):
    found = training.dropout_beside_norm(nn.Sequential(*layers))
    assert found.verdict == verdict
    if verdict == "warn":
        is_shut(found, "move dropout behind the last BatchNorm", "warn")


def test_the_project_s_own_network_warns_with_dropout_and_not_without():
    drops = model.build("ConvNet", {}, (1, 8, 8), 4, dropout=0.1)
    assert training.dropout_beside_norm(drops).verdict == "warn"
    plain = model.build("ConvNet", {}, (1, 8, 8), 4)
    assert training.dropout_beside_norm(plain).verdict == "not_applicable"


# ---- the study ----------------------------------------------------------------------------------


def trial_rows(complete=8, pruned=0, failed=0):
    states = ["complete"] * complete + ["pruned"] * pruned + ["failed"] * failed
    return [
        {
            "index": index,
            "state": state,
            "value": None if state == "failed" else 0.1 * index,
            "epochs": 15,
            "parameters": {"optimizer.lr": 0.01, "batch_size": 32},
        }
        for index, state in enumerate(states)
    ]


def test_a_finished_study_is_open():
    found = is_open(tuning.trials(trial_rows(complete=6, pruned=2, failed=2), 10))
    assert found.value == 0.2 and "6 complete, 2 pruned, 2 failed" in found.because
    is_open(tuning.trials(trial_rows(12), 10))  # more than asked for is no fault


def test_a_study_that_mostly_failed_shuts():
    is_shut(tuning.trials(trial_rows(complete=4, failed=6), 10), "the search space")


@pytest.mark.parametrize("rows", [[], trial_rows(9), trial_rows(8, failed=1)])
def test_a_study_that_has_not_ended_is_inconclusive(rows):
    is_shut(tuning.trials(rows, 10), "another run of this stage", "inconclusive")


RANKED = [
    {"parameter": "optimizer.lr", "share": 0.6, "interval": [0.3, 0.8], "null_95": 0.2},
    {"parameter": "batch_size", "share": 0.1, "interval": [0.0, 0.3], "null_95": 0.2},
]


def ranked(*detected):
    pairs = zip(RANKED, detected, strict=True)
    return [{**row, "detected": yes, "method": "ranks"} for row, yes in pairs]


def test_a_sensitivity_is_named_and_none_detected_is_an_answer():
    found = is_open(tuning.sensitivities(ranked(True, False), trial_rows(8)))
    assert found.because.startswith("Most sensitive to optimizer.lr in 8 trials")
    found = is_open(tuning.sensitivities(ranked(False, False), trial_rows(8)))
    assert found.because.startswith("None detected in 8 trials")


def test_too_few_trials_with_a_value_rank_nothing():
    found = tuning.sensitivities(ranked(True, False), trial_rows(5, pruned=2, failed=9))
    assert found.verdict == "inconclusive" and "7 trials with a value" in found.because


def best_of(*losses):
    return {"runs": runs(*losses), "trial": {"value": 0.15, "epochs": 15}}


def test_a_best_configuration_as_good_on_fresh_seeds_is_open():
    before = runs(0.20, 0.22, 0.21)
    found = is_open(tuning.best_configuration(best_of(0.20, 0.21, 0.22, 0.20, 0.21), before, 1.0))
    assert abs(found.value) < 1
    assert "the best trial had 0.1500 in 15 epochs" in found.because and "+0.058" in found.because
    is_open(tuning.best_configuration(best_of(0.10, 0.11, 0.12), before, 1.0))


def test_a_best_trial_that_was_luck_shuts():
    found = tuning.best_configuration(best_of(0.30, 0.31, 0.32), runs(0.20, 0.22, 0.21), 1.0)
    is_shut(found, "lucky")
    fresh, former = np.array([0.30, 0.31, 0.32]), np.array([0.20, 0.22, 0.21])
    pooled = math.sqrt((fresh.var(ddof=1) + former.var(ddof=1)) / 2)
    assert found.value == pytest.approx(0.1 / pooled)


@pytest.mark.parametrize(("fresh", "before"), [((0.2,), (0.2, 0.3)), ((0.2, 0.3), (0.2,))])
def test_one_seed_has_no_spread(fresh, before):
    found = tuning.best_configuration(best_of(*fresh), runs(*before), 1.0)
    assert found.verdict == "inconclusive"


def test_trials_are_told_by_the_line_and_in_the_report():
    rows = trial_rows(2, failed=1)
    assert tuning.trial_line(rows[0]).startswith("trial   0 complete 0.0000 after 15 epochs: ")
    assert "failed   after" in tuning.trial_line(rows[2])
    found = {"trial": rows[0]}
    section = tuning.study_section(rows, ranked(True, False), found)
    assert "Best: trial 0 (optimizer.lr=0.01, batch_size=32)" in section
    assert section.count("\n| ") >= 6


# ---- the owner's words --------------------------------------------------------------------------

DRAFT = {"architecture": "a draft", "because": "a draft", "findings": "a draft"}
SAID = {"architecture": " Small convnet. ", "because": "Pixels.", "findings": "None."}


def test_a_written_statement_is_open_and_repeated():
    found = is_open(owner.statement(SAID, DRAFT))
    assert found.because.endswith("Small convnet.") and (found.value, found.limit) == (3, 3)


@pytest.mark.parametrize("empty", ["", "  ", None])
@pytest.mark.parametrize("name", DRAFT)
def test_each_text_left_empty_keeps_the_gate_shut(name, empty):
    found = owner.statement({**SAID, name: empty}, DRAFT)
    is_shut(found, "read the draft")
    assert f"data.statement.{name}" in found.because and found.value == 2


LADDER = {"majority": {"accuracy": 0.1}, "logistic": {"accuracy": 0.95}, "trees": {"log_loss": 1}}
TASK = SimpleNamespace(metric_name="accuracy", metric_direction="max")


def test_a_network_above_the_best_baseline_is_open():
    found = is_open(owner.above_baseline(0.97, LADDER, TASK, "validation"))
    assert found.limit == 0.95 and "best baseline (logistic)" in found.because


@pytest.mark.parametrize("metric", [0.95, 0.5])
def test_a_network_no_better_than_a_baseline_warns(metric):
    is_shut(owner.above_baseline(metric, LADDER, TASK, "validation"), "logistic", "warn")


def test_where_less_is_better_the_best_baseline_is_the_lowest():
    errors = {"mean": {"rmse": 3.0}, "trees": {"rmse": 1.0}}
    task = SimpleNamespace(metric_name="rmse", metric_direction="min")
    is_open(owner.above_baseline(0.9, errors, task, "validation"))
    is_shut(owner.above_baseline(1.1, errors, task, "validation"), "trees", "warn")


def test_baselines_without_the_metric_say_nothing():
    task = SimpleNamespace(metric_name="f1", metric_direction="max")
    assert owner.above_baseline(0.9, LADDER, task, "validation").verdict == "not_applicable"


# ---- the last stage -----------------------------------------------------------------------------


def comparison(negative=0, positive=0):
    row = {"id": 7, "y": 1, "reference": 1, "candidate": 0, "reference_margin": 0.1}
    flipped = [{**row, "candidate_margin": -0.1, "change": "negative"}] * negative
    return Comparison(50, negative, positive, 0.0, 1.0, flipped)


def scored(**losses):
    return {name: SimpleNamespace(loss=loss) for name, loss in losses.items()}


SCORES = scored(tune=0.20, longer=0.18, ensemble=0.15)


def compared(longer=0, ensemble=0):
    return {"longer": comparison(longer, 5), "ensemble": comparison(ensemble, 5)}


def test_the_candidate_of_lowest_loss_that_breaks_no_more_than_another_seed_is_shipped():
    assert final.choose(SCORES, compared(), 3) == "ensemble"
    assert final.choose(SCORES, compared(ensemble=3), 3) == "ensemble"
    assert final.choose(SCORES, compared(ensemble=4), 3) == "longer"
    assert final.choose(SCORES, compared(4, 4), 3) == "tune"
    assert final.choose(scored(tune=0.1, longer=0.2, ensemble=0.3), compared(), 3) == "tune"
    assert final.choose(scored(tune=0.2, longer=0.2, ensemble=0.2), compared(), 3) == "tune"
    assert final.choose(SCORES, {}, 3) == "tune"


def test_a_candidate_that_gains_and_breaks_little_is_open():
    found = is_open(final.candidates(SCORES, compared(1, 2), 3, "ensemble"))
    assert (found.value, found.limit) == (2, 3)
    assert "ensemble breaks 2 and mends 5, validation loss 0.1500" in found.because


def test_a_candidate_that_breaks_what_worked_warns():
    found = final.candidates(SCORES, compared(longer=9), 3, "ensemble")
    is_shut(found, "longer breaks cases that worked", "warn")


def test_no_gain_at_all_warns():
    scores = scored(tune=0.1, longer=0.2, ensemble=0.3)
    is_shut(final.candidates(scores, compared(), 3, "tune"), "no candidate gains", "warn")


def test_no_candidates_at_all_are_not_applicable():
    assert final.candidates(SCORES, {}, 3, "tune").verdict == "not_applicable"


def final_of(ours=0.97, baseline=0.95, **change):
    def row(name, test):
        return {"model": name, "members": 1, "test accuracy": test, "interval": [0.95, 0.98]}

    better = {"value": 0.01, "low": -0.002, "high": 0.02}
    return {
        "chosen": "ensemble",
        "metric": "accuracy",
        "direction": "max",
        "why_sealed": None,
        "num_test_rows": 300,
        "shared_rows": 0,
        "earlier_openings": 0,
        "against": {"overfit": better, "regularize": {**better, "value": 0.005}},
        "table": [row("tune, mean single model", 0.9), row("ensemble", ours), row("b", baseline)],
    } | change


def test_the_sealed_test_is_read_with_its_interval():
    found = is_open(final.sealed_test(final_of()))
    assert found.value == 0.97 and found.limit == [0.95, 0.98]
    assert "0.9700 (0.9500 to 0.9800) on 300 sealed rows" in found.because


def test_test_rows_that_were_trained_on_shut():
    found = final.sealed_test(final_of(shared_rows=4))
    is_shut(found, "external test rows that were trained on")
    assert "4 of them are also training or validation rows" in found.because


def test_a_second_look_is_optimistic():
    found = final.sealed_test(final_of(earlier_openings=2))
    is_shut(found, "choices made after reading the test set", "warn")
    assert "Optimistic: opened 2 times before" in found.because


@pytest.mark.parametrize("check", [final.sealed_test, final.stands, final.above_baseline_on_test])
def test_without_test_rows_nothing_is_claimed(check):
    found = check(final_of(why_sealed="the data has no test rows"))
    assert found.verdict == "not_applicable" and "the data has no test rows" in found.because


def test_a_result_that_stands_against_the_earlier_stages_is_open():
    found = is_open(final.stands(final_of()))
    assert found.value == 0.005 and "+0.0100 (-0.0020 to +0.0200) over overfit" in found.because


def test_a_result_that_is_worse_than_an_earlier_stage_s_shuts():
    worse = {"value": -0.03, "low": -0.05, "high": -0.01}
    against = final_of()["against"] | {"regularize": worse}
    is_shut(final.stands(final_of(against=against)), "regularize's model is better on fresh rows")


def test_the_final_model_is_held_against_the_best_baseline_on_the_same_rows():
    assert is_open(final.above_baseline_on_test(final_of())).limit == 0.95
    is_shut(final.above_baseline_on_test(final_of(baseline=0.97)), "b does as well", "warn")
    unknown = final.above_baseline_on_test(final_of(baseline=None))
    assert unknown.verdict == "not_applicable" and "the baseline has none" in unknown.because


PARITY = {
    "num_rows": 50,
    "inputs_equal": True,
    "answers_differ": 0,
    "largest_gap": 3e-7,
    "tolerance": 1e-4,
}


def test_a_bundle_that_answers_as_trained_is_open_and_its_rounding_is_no_evidence():
    assert is_open(final.bundle_parity(PARITY)).value == 0.0


@pytest.mark.parametrize(
    "fault",
    [
        {"inputs_equal": False},
        {"answers_differ": 1},
        {"largest_gap": 1e-3},
        {"largest_gap": math.nan},
    ],
)
def test_a_bundle_that_differs_in_anything_shuts(fault):
    is_shut(final.bundle_parity(PARITY | fault), "preprocessing that differs")


def test_the_last_table_and_the_flipped_cases_are_told():
    churn = {"mean": 1.5, "allowed": 3}
    told = final.final_section(final_of(), compared(ensemble=1), churn, "ensemble")
    assert "Shipped: **ensemble**" in told and "## ensemble: hard cases that flipped" in told
    assert "| 7 | 1 |" in told and "None." in told  # longer flipped nothing
    lines = final.final_text(final_of()).splitlines()
    assert len(lines) == 4 and lines[2].startswith("ensemble")


def test_weights_can_be_drawn_and_checked_from_a_real_network():
    """From the network to the verdict, as the stage does it."""
    torch.manual_seed(0)
    network = nn.Sequential(nn.Conv2d(1, 8, 7), nn.ReLU())
    with torch.no_grad():
        network[0].weight[:, 0] = torch.tensor(smooth())
    is_open(training.first_layer(training.first_weights(network).mean(dim=1).numpy(), seed=0))
