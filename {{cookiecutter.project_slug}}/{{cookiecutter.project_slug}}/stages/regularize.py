"""Question: does it generalise better, for a reason?
Evidence: best validation losses against overfit's over the same seeds; filters, units, curves.
Leaves: the best checkpoint of every seed, the curves.
If it fails suspect: this regularization does not suit the data; or more real data is missing.
"""

from __future__ import annotations

from dataclasses import asdict

from ..harness import files, instruments
from ..harness.checks import training as measured
from ..harness.checks.catalogue import REGULARIZED
from ..harness.checks.metric import human_reference
from ..harness.figures import curves, weights
from . import setup


def run(cfg, run):
    # ---- load
    loaded = setup.load(cfg, run)
    reference = files.read_json(run.earlier("overfit", "curves.json"))["runs"]

    # ---- act: the same seeds as overfit, best validation checkpoint of each
    if not run.reaffirm:
        found = [_train(cfg, loaded, run, curve["seed"]) for curve in reference]
        files.write_json(run.handoff / "curves.json", {"runs": found})
    found = files.read_json(run.result("curves.json"))["runs"]

    # ---- measure
    network = setup.make_model(cfg, loaded, run.device, cfg.seed)
    setup.load_weights(network, run.result(f"seed-{found[0]['seed']}.safetensors"))
    pipeline = setup.pipeline(cfg, loaded, run)
    layers = instruments.unit_activity(network, pipeline.evaluate, pipeline.validation)
    first = measured.first_weights(network)
    pictures = loaded.task.draw_weights(first, tuple(loaded.train["x"].shape[1:]))

    # ---- draw
    curves.draw_curves(run.figure("curves.png"), found, "regularized")
    if pictures is not None:
        weights.draw_weights(run.figure("first_layer.png"), pictures)
    return [
        *setup.run_checks(REGULARIZED, pipeline, cfg, run),
        measured.paired_gain(reference, found, cfg.stage.limits["min_gain_in_standard_errors"]),
        measured.unit_activity(layers, cfg.stage.limits["max_inactive_share"]),
        measured.first_layer(pictures, cfg.seed),
        measured.dropout_beside_norm(network),
        measured.one_change(run, asdict(cfg)),
        human_reference(pipeline),
    ]


def _train(cfg, loaded, run, seed):
    _, result = setup.train(
        cfg,
        loaded,
        run,
        seed=seed,
        num_epochs=cfg.stage.num_epochs,
        folder=run.folder / f"seed-{seed}",
    )
    setup.keep(run.handoff / f"seed-{seed}.safetensors", result.best_validation_state)
    return setup.curve(seed, result)
