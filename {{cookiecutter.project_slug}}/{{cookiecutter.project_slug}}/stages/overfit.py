"""Question: can the model fit this data at all?
Evidence: the skeleton's checks on this model, the learning-rate range, a very low training loss.
Leaves: the checkpoints of every seed (lowest training and lowest validation loss), the curves.
If it fails suspect: the learning rate, then too little capacity, then what the preflight names.
"""

from __future__ import annotations

from dataclasses import asdict

from ..harness import files
from ..harness.checks import merge
from ..harness.checks import training as measured
from ..harness.checks.catalogue import PREFLIGHT
from ..harness.checks.model import sample_boundary
from ..harness.figures import curves as figures
from . import setup


def run(cfg, run):
    # ---- load
    loaded = setup.load(cfg, run)
    audit = files.read_json(run.earlier("data_audit", "audit.json"))
    pipeline = setup.pipeline(cfg, loaded, run)

    # ---- act: preflight, range of rates, then fit, one run per seed
    checks = setup.run_checks(PREFLIGHT, pipeline, cfg, run)
    if run.is_blocked(checks):
        run.closing.append("Nothing was trained: the preflight did not pass.")
        return checks
    if not run.reaffirm:
        _fit(cfg, run, loaded)
    found = files.read_json(run.result("curves.json"))

    # ---- measure
    trained = setup.make_model(cfg, loaded, run.device, cfg.seed)
    setup.load_weights(trained, run.result(f"seed-{found['runs'][0]['seed']}.safetensors"))
    again = setup.run_check(sample_boundary, pipeline, cfg, run, model=trained)
    checks = [
        merge(c.name, {"fresh": c, "trained": again}) if c.name == "sample_boundary" else c
        for c in checks
    ]
    limits = cfg.stage.limits
    figures.draw_curves(run.figure("curves.png"), found["runs"], cfg.model.name)
    figures.draw_lr_range(run.figure("lr_range.png"), found["lr_range"], cfg.optimizer.lr)
    run.tell(measured.capacity_section(found["capacity"]))
    return [
        *checks,
        measured.lr_range(found["lr_range"], cfg.optimizer.lr, limits["min_lr_range_drop"]),
        measured.train_loss(found, audit["loss_floor"], limits["max_train_loss"]),
        measured.curve_shape(found["runs"]),
        measured.one_change(run, asdict(cfg)),
    ]


def _fit(cfg, run, loaded):
    """Train every seed on the full training split, or on the subset that the budget allows."""
    found = {"lr_range": setup.lr_range(cfg, loaded, run)}
    rows = setup.affordable_rows(cfg, loaded, run)
    found["scope"] = "full" if rows is None else f"subset n={len(rows)}"
    sizes = [] if rows is None else [len(rows) // 4, len(rows) // 2]
    found["sizes"] = [
        {"num_rows": n} | _train(cfg, setup.subset(loaded, rows[:n]), run, 0) for n in sizes
    ]
    scope = loaded if rows is None else setup.subset(loaded, rows)
    found["runs"] = [_train(cfg, scope, run, k, keep=True) for k in range(cfg.stage.num_seeds)]
    found["capacity"] = {
        name: _train(cfg, scope, run, 0, params=params, num_epochs=cfg.stage.capacity_epochs)
        for name, params in {"configured": {}, "wider": cfg.model.wider}.items()
    }
    files.write_json(run.handoff / "curves.json", found)


def _train(cfg, loaded, run, k, *, num_epochs=None, params=None, keep=False):
    """One run to a very low training loss; its curve, and with `keep` its checkpoints."""
    seed = cfg.seed + k
    _, result = setup.train(
        cfg,
        loaded,
        run,
        seed=seed,
        num_epochs=num_epochs or cfg.stage.num_epochs,
        monitor="train",
        params=cfg.model.params | (params or {}),
        folder=run.folder / f"seed-{seed}" if keep else None,
    )
    if keep:
        setup.keep(run.handoff / f"seed-{seed}.safetensors", result.best_state)
        setup.keep(
            run.handoff / f"seed-{seed}-validation.safetensors", result.best_validation_state
        )
    return setup.curve(seed, result)
