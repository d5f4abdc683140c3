"""Question: is the pipeline wired right?
Evidence: the seven gates and their companions on models one cannot get wrong.
Leaves: the report, with the batch that was overfitted and the batch on the line above the model.
If it fails suspect: loss, labels, preprocessing or the step, in the order of the checks.
"""

from __future__ import annotations

from ..harness.checks import merge
from ..harness.checks.catalogue import DATA, SKELETON
from ..harness.figures import checks as figures
from . import setup


def run(cfg, run):
    # ---- load
    loaded = setup.load(cfg, run)
    pipelines = {
        name: setup.pipeline(cfg, loaded, run, name=name, params={}) for name in cfg.stage.models
    }

    # ---- measure
    checks = [_measure(check, pipelines, cfg, run) for check in SKELETON]

    # ---- draw what a person should look at
    last = pipelines[cfg.stage.models[-1]]
    figures.draw_seam(run.sample_figure("last_seam.png"), last)
    figures.draw_overfit_batch(run.sample_figure("overfit_one_batch.png"), last)
    return checks


def _measure(check, pipelines, cfg, run):
    """The worst result over all models; a check that looks at the data alone needs only one."""
    asked = list(pipelines)[:1] if check in DATA else list(pipelines)
    found = {name: setup.run_check(check, pipelines[name], cfg, run) for name in asked}
    return merge(check.__name__, found)
