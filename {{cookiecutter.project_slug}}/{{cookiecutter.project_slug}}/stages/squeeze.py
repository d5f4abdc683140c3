"""Question: what is the last honest gain?
Evidence: each candidate against the reference, case by case; the sealed test set, read once.
Leaves: the bundle that serves, the final table.
If it fails suspect: a candidate that breaks what worked; or a gain that was only on validation.
"""

from __future__ import annotations

from ..harness import files, hard_cases
from ..harness.checks import final as measured
from ..harness.checks.metric import human_reference
from ..harness.figures import squeeze as figures
from ..harness.schema import with_values
from . import entrants, sealed, setup


def run(cfg, run):
    # ---- load: what the earlier stages left
    entrants.refuse_unknown(cfg.stage.candidates)
    loaded = setup.load(cfg, run)
    audit = files.read_json(run.earlier("data_audit", "audit.json"))
    best = files.read_json(run.earlier("tune", "best.json"))
    tuned = with_values(cfg, best["settings"])  # exactly what tune trained with

    # ---- act: train the candidates that are not there yet
    if not run.reaffirm and "longer" in cfg.stage.candidates:
        _train_longer(tuned, loaded, run, best["runs"][0])
    models = entrants.load(cfg, run)

    # ---- measure: case by case on the hard ones, then choose by validation
    scored = {
        name: entrants.score(tuned, loaded, run, name, states, loaded.validation)
        for name, states in models.items()
    }
    suspects = entrants.label_suspects(audit, loaded.records)
    reference = scored["tune"]
    most = {"max_cases": cfg.stage.max_hard_cases}
    cases = hard_cases.suite(reference.joint, loaded.task, suspects, **most)
    churn = hard_cases.allowance(reference.members, loaded.task, suspects, **most)
    compared = {
        name: hard_cases.compare(reference.joint, scored[name].joint, cases, loaded.task)
        for name in cfg.stage.candidates
    }
    spare = cfg.stage.limits["max_negative_flips_above_churn"]
    chosen = measured.choose(scored, compared, churn["allowed"] + spare)

    # ---- act: open the seal once, write the bundle
    if not run.reaffirm:
        sealed.read_test(tuned, loaded, run, models, scored, chosen, audit)
        states = models[chosen][:1] if chosen == "tune" else models[chosen]
        sealed.write_bundle(tuned, loaded, run, states, chosen, scored[chosen])
    final = files.read_json(run.result("final.json"))

    # ---- draw and tell
    pipeline = setup.pipeline(tuned, loaded, run)
    for name, found in compared.items():
        path = run.sample_figure(f"hard_cases_{name}.png")
        figures.draw_hard_cases(path, found.rows, pipeline.draw, loaded.task.answer)
    run.tell(measured.final_section(final, compared, churn, chosen))
    run.closing.append(measured.final_text(final))
    return [
        measured.candidates(scored, compared, churn["allowed"] + spare, chosen),
        measured.sealed_test(final),
        measured.stands(final),
        measured.above_baseline_on_test(final),
        measured.bundle_parity(sealed.parity(tuned, loaded, run, chosen, models[chosen])),
        human_reference(pipeline),
    ]


def _train_longer(tuned, loaded, run, first):
    """The reference's own seed and settings, for more epochs."""
    _, result = setup.train(
        tuned,
        loaded,
        run,
        seed=first["seed"],
        num_epochs=round(tuned.stage.longer_factor * first["num_epochs"]),
        folder=run.folder / "longer",
    )
    setup.keep(run.handoff / "longer.safetensors", result.best_validation_state)
