"""Question: is the pipeline wired right?
Evidence: the seven gates and their companions on models one cannot get wrong.
Leaves: the report, with the batch that was overfitted and the batch on the line above the model.
If it fails suspect: loss, labels, preprocessing or the step, in the order of the checks.
"""

from __future__ import annotations

from ..harness.checks import merge
from ..harness.checks.catalogue import SKELETON
from ..harness.figures import checks as figures
from . import setup


def run(cfg, run):
    # ---- load
    loaded = setup.load(cfg, run)
    pipelines = {
        name: setup.pipeline(cfg, loaded, run, name=name, params={}) for name in cfg.stage.models
    }

    # ---- measure: every check on every model, the worst speaks
    checks = [
        merge(
            check.__name__,
            {name: setup.run_check(check, pipe, cfg) for name, pipe in pipelines.items()},
        )
        for check in SKELETON
    ]

    # ---- draw what a person should look at
    last = pipelines[cfg.stage.models[-1]]
    figures.draw_seam(run.sample_figure("last_seam.png"), last)
    figures.draw_overfit_batch(run.sample_figure("overfit_one_batch.png"), last)
    return checks
