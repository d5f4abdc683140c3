"""Question: what is it sensitive to?
Evidence: a study of trials, ranked sensitivities, the best configuration on fresh seeds.
Leaves: the trials, the best configuration, its checkpoints and curves.
If it fails suspect: the best trial was luck: search longer, or keep what regularize has.
"""

from __future__ import annotations

from ..harness import files, sensitivity, study
from ..harness.checks import tuning as measured
from ..harness.checks.catalogue import TUNED
from ..harness.checks.metric import human_reference
from ..harness.checks.owner import above_baseline
from ..harness.checks.training import carried_settings
from ..harness.figures import tune as figures
from ..harness.schema import BadInput, with_values
from . import setup

FRESH = 1000  # first of the seeds that no earlier stage has used


def run(cfg, run):
    # ---- load
    loaded = setup.load(cfg, run)
    before = files.read_json(run.earlier("regularize", "curves.json"))["runs"]
    ladder = files.read_json(run.earlier("data_audit", "audit.json"))["ladder"]

    # ---- act: one trial of the study, or all that are missing and then fresh seeds of the best
    if cfg.trial is not None:
        return _trial(cfg, loaded, run, _open(cfg, run), cfg.trial)
    if not run.reaffirm:
        _tune(cfg, loaded, run)
    trials = files.read_json(run.result("trials.json"))
    found = files.read_json(run.result("best.json"))

    # ---- measure
    pipeline = setup.pipeline(with_values(cfg, found["trial"]["parameters"]), loaded, run)
    ranked = sensitivity.sensitivities(trials, cfg.stage.space, cfg.seed)
    figures.draw_sensitivities(run.figure("sensitivities.png"), trials, ranked)
    run.tell(measured.study_section(trials, ranked, found))
    return [
        *setup.run_checks(TUNED, pipeline, cfg, run),
        measured.trials(trials, cfg.stage.num_trials),
        measured.sensitivities(ranked, trials),
        carried_settings(run, setup.training_settings(cfg), "regularize"),
        measured.best_configuration(found, before, cfg.stage.limits["max_loss_in_pooled_spreads"]),
        above_baseline(found["validation_metric"], ladder, loaded.task, "validation"),
        human_reference(pipeline),
    ]


def _open(cfg, run):
    """The study of exactly this evidence and space: edited code never reuses old trials."""
    try:
        name = study.study_name(setup.trial_evidence(cfg, run), cfg.stage.space)
        return study.open_study(name, cfg.stage.storage, folder=run.runs / "studies")
    except ValueError as error:
        raise BadInput(str(error)) from None


def _trial(cfg, loaded, run, opened, index):
    """Finished, failed or pruned: a trial has no gate, it returns."""

    def objective(parameters, report):
        _, result = setup.train(
            with_values(cfg, parameters),
            loaded,
            run,
            seed=cfg.seed,
            num_epochs=cfg.stage.trial_epochs,
            folder=run.folder / f"trial-{index}",
            on_epoch=lambda row: report(row["epoch"], row["validation_loss"]),
            announce=False,
        )
        return result.best_validation_loss

    row = study.run_trial(
        opened,
        index,
        cfg.stage.space,
        cfg.seed,
        objective,
        sampler=cfg.stage.sampler,
        warmup_epochs=max(1, cfg.stage.trial_epochs // 4) if cfg.stage.prune else None,
    )
    print(measured.trial_line(row))


def _tune(cfg, loaded, run):
    opened = _open(cfg, run)
    for index in study.missing_indices(opened, cfg.stage.num_trials):
        _trial(cfg, loaded, run, opened, index)
    trials = study.table(opened)
    files.write_json(run.handoff / "trials.json", trials)
    try:
        best = study.best(trials)
    except ValueError as error:
        raise BadInput(str(error)) from None
    tuned = with_values(cfg, best["parameters"])
    seeds = range(cfg.seed + FRESH, cfg.seed + FRESH + cfg.stage.num_seeds)
    runs, metrics = [], []
    for seed in seeds:
        network, result = setup.train(
            tuned, loaded, run, seed=seed, num_epochs=cfg.stage.num_epochs
        )
        setup.keep(run.handoff / f"seed-{seed}.safetensors", result.best_validation_state)
        network.load_state_dict(result.best_validation_state)
        metrics.append(setup.evaluate(cfg, loaded, run, network, loaded.validation).metric)
        runs.append(setup.curve(seed, result))
    found = {
        "trial": best,
        "settings": setup.training_settings(tuned),
        "runs": runs,
        "validation_metric": sum(metrics) / len(metrics),
    }
    files.write_json(run.handoff / "best.json", found)
