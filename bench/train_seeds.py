"""Run inside a project (`python train_seeds.py ASKED` there): how well it trains, as JSON.

ASKED is {"package", "overrides", "seeds", "num_epochs", "out"}. The project trains the last of
stage.models with its own data, step, loop and settings, once per seed, and scores the weights it
kept with its own evaluation. Beside its metric stands a loss that no fault in its task can touch:
the plain one of torch, from the outputs and targets of that evaluation. A training that leaves the
numbers is an answer; whatever else is raised ends the process.
"""

from __future__ import annotations

import importlib
import json
import math
import sys
from pathlib import Path

import torch
from hydra import compose, initialize_config_dir
from torch.nn import functional as F


def main() -> None:
    asked = json.loads(sys.argv[1])
    root = Path.cwd()
    sys.path[0] = str(root)  # instead of this file's folder
    setup, record, schema, instruments = (
        importlib.import_module(f"{asked['package']}.{name}")
        for name in ("stages.setup", "harness.record", "harness.schema", "harness.instruments")
    )
    cfg = configuration(schema, root / "configs", asked["overrides"])
    places = {"folder": root / "runs" / "harm", "artifacts": root / "artifacts"}
    run = record.Run(
        stage="skeleton", mode="scratch", runs=root / "runs", device=torch.device("cpu"), **places
    )
    loaded = setup.load(cfg, run)
    rows = []
    for seed in asked["seeds"]:
        record.prepare_torch(seed, 1)
        try:
            rows.append(scored(setup, cfg, loaded, run, seed, asked["num_epochs"]))
        except instruments.NonFiniteLoss as error:
            rows.append({"seed": seed, "metric": None, "loss": None, "because": str(error)})
    about = {"direction": loaded.task.metric_direction, "bounds": loaded.task.metric_bounds}
    text = json.dumps({"name": loaded.task.metric_name, **about, "rows": rows})
    Path(asked["out"]).write_text(text, encoding="utf-8")


def configuration(schema, configs: Path, overrides: list[str]):
    """As run.py composes it for the skeleton, with the last of its models as the configured one."""
    with initialize_config_dir(str(configs), version_base="1.3"):
        fixed = ["stage=skeleton", "scratch=true", "device=cpu"]
        composed = compose("config", [*fixed, *overrides])
    cfg = schema.validate(composed, configs)
    cfg.model.name, cfg.model.params = cfg.stage.models[-1], {}
    return cfg


def scored(setup, cfg, loaded, run, seed: int, num_epochs: int) -> dict:
    """One training run: the project's validation metric and the plain loss of what it kept."""
    network, result = setup.train(
        cfg, loaded, run, seed=seed, num_epochs=num_epochs, params={}, announce=False
    )
    network.load_state_dict(result.best_state)
    found = setup.evaluate(cfg, loaded, run, network, loaded.validation)
    loss = plain_loss(loaded.task, found.outputs, found.y)
    return {"seed": seed, "metric": finite(found.metric), "loss": finite(loss)}


def plain_loss(task, outputs: torch.Tensor, y: torch.Tensor) -> float:
    """Cross entropy in nats per supervised target; mean squared error for real targets."""
    if task.targets == "real":
        return F.mse_loss(outputs.double(), y.double().view_as(outputs)).item()
    if task.targets == "multilabel":
        return F.binary_cross_entropy_with_logits(outputs.double(), y.double()).item()
    ignored = getattr(task, "ignore_index", None)
    ignored = -100 if ignored is None else ignored
    if task.targets == "tokens":
        outputs = outputs.movedim(-1, 1)
    return F.cross_entropy(outputs.double(), y, ignore_index=ignored).item()


def finite(value: float) -> float | None:
    return float(value) if math.isfinite(value) else None


if __name__ == "__main__":
    main()
