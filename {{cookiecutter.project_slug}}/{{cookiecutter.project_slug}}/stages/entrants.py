"""The models that squeeze lets compete: what earlier stages left, and the candidates."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from safetensors.torch import load_file

from .. import data
from ..harness import files, hard_cases, records
from ..harness.loop import Evaluation
from ..harness.schema import BadInput, Config
from . import setup

GROUPS = ("overfit", "regularize", "tune")  # single models, one per seed
CANDIDATES = ("longer", "ensemble")


@dataclass(frozen=True)
class Scored:
    """One entrant on one split. `joint` is what it would answer: its only model, an ensemble's
    average, or the first of a group of single models."""

    members: list[Evaluation]
    joint: Evaluation
    loss: float  # of the joint answer; of a group: the mean of its single models
    metric: float


def refuse_unknown(names: list[str]) -> None:
    """BadInput for a candidate that there is not: before anything is trained."""
    if unknown := [name for name in names if name not in CANDIDATES]:
        raise BadInput(f"stage.candidates names {unknown[0]!r}; there are {', '.join(CANDIDATES)}.")


def load(cfg: Config, run: Any) -> dict[str, list[dict]]:
    """Weights of every entrant by name, one state per member."""
    left = {stage: sorted(run.earlier(stage, ".").glob(_PATTERNS[stage])) for stage in GROUPS}
    found = {stage: [load_file(path) for path in paths] for stage, paths in left.items()}
    trained = {"ensemble": found["tune"]}
    if "longer" in cfg.stage.candidates:
        trained["longer"] = [load_file(run.result("longer.safetensors"))]
    return found | {name: trained[name] for name in cfg.stage.candidates}


_PATTERNS = {
    "overfit": "seed-*-validation.safetensors",
    "regularize": "seed-*.safetensors",
    "tune": "seed-*.safetensors",
}


def score(
    cfg: Config, loaded: setup.Loaded, run: Any, name: str, states: list[dict], rows: dict
) -> Scored:
    """An entrant on the given rows, every member by itself and all together."""
    network = setup.make_model(cfg, loaded, run.device, cfg.seed)
    members = []
    for state in states:
        network.load_state_dict(state)
        members.append(setup.evaluate(cfg, loaded, run, network, rows))
    if name in GROUPS:
        count = len(members)
        loss, metric = sum(m.loss for m in members) / count, sum(m.metric for m in members) / count
        return Scored(members, members[0], loss, metric)
    joint = members[0] if len(members) == 1 else _together(loaded.task, members)
    return Scored(members, joint, joint.loss, joint.metric)


def _together(task: Any, members: list[Evaluation]) -> Evaluation:
    outputs, y = task.average([m.outputs for m in members]), members[0].y
    loss, metric = task.loss(outputs, y).item(), task.metric(outputs, y)
    return Evaluation(loss, metric, len(y), outputs, y, members[0].ids)


def label_suspects(audit: dict, found: records.Records) -> set[int]:
    """Rows whose label the audit doubts: they would look like hard cases."""
    place = {name: row for row, name in enumerate(found.ids)}
    return {place[name] for name in audit["label_suspects"] if name in place}


def test_rows(cfg: Config, loaded: setup.Loaded, run: Any) -> tuple[dict, tuple[str, ...], int]:
    """Test rows as tensors, their ids, and how many of them are also training or validation rows.

    For the one stage that has opened the seal. External rows come from data.test_path and must have
    no class that the model does not know (BadInput).
    """
    if cfg.data.split.test != "external":
        view = replace(loaded.view, opened=True)
        return setup.rows_of(view, loaded.preprocessing, "test"), view.take("test").ids, 0
    try:
        found = data.load(replace(cfg.data, path=cfg.data.test_path))
        rows = data.prepare(found, loaded.preprocessing, "test")
    except (FileNotFoundError, ValueError) as error:
        raise BadInput(f"data.test_path: {error}") from None
    names = loaded.records.class_names
    if strange := sorted(set(found.class_names) - set(names)):
        raise BadInput(
            f"data.test_path has the class {strange[0]}; the model knows {', '.join(names)}."
        )
    here = torch.tensor([names.index(name) for name in found.class_names])
    rows["y"] = here[rows["y"]]
    known = set(records.content_hashes(loaded.records, run.runs / "cache" / "hashes.json"))
    shared = sum(content in known for content in records.content_hashes(found))
    return rows, found.ids, shared


def final_table(
    scored: dict[str, Scored], tested: dict[str, Scored], task: Any, baseline: dict
) -> list[dict]:
    """One row per entrant: validation and test, the test metric with its 95 % interval."""
    rows = []
    for name, on_validation in scored.items():
        on_test = tested.get(name)
        rows.append(
            {
                "model": name if name not in GROUPS else f"{name}, mean single model",
                "members": len(on_validation.members),
                "validation loss": on_validation.loss,
                f"validation {task.metric_name}": on_validation.metric,
                f"test {task.metric_name}": on_test and on_test.metric,
                "interval": on_test and interval(on_test, task),
            }
        )
    return [*rows, baseline]


def interval(found: Scored, task: Any) -> list[float] | None:
    """95 % Wilson interval of an accuracy on these rows; None for other metrics. A mean over seeds
    has the interval of one model with that mean: the rows are what is uncertain."""
    if task.metric_name != "accuracy":
        return None
    num_rows = found.joint.num_rows
    return list(hard_cases.wilson(round(found.metric * num_rows), num_rows))


def weights_digest(states: list[dict[str, torch.Tensor]]) -> str:
    """One digest for the weights of all members."""
    parts = [
        [name, files.sha256_json(value.flatten().tolist())]
        for state in states
        for name, value in sorted(state.items())
    ]
    return files.sha256_json(parts)
