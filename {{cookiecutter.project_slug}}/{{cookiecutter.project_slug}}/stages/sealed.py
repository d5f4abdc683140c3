"""What squeeze does behind the seal: read the test rows once, and write the bundle that serves."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any

import torch

from .. import data, model, preprocessing
from ..harness import bundle, files, hard_cases, ledger
from ..harness.audit import baselines
from ..harness.sources import source_digest
from . import entrants, setup

NUM_GOLDEN = 16
NUM_PARITY = 512


class Bundle(bundle.Bundle):
    """This project's bundle, as serve.py loads it."""

    models, preprocessing = model, preprocessing


def read_test(cfg, loaded, run, models, scored, chosen, audit) -> None:
    """Open the seal, score every entrant on the test rows, and leave final.json.

    Only a recorded run with a test set opens it; any other leaves the table without test figures
    and says why.
    """
    task = loaded.task
    final = {"chosen": chosen, "metric": task.metric_name, "direction": task.metric_direction}
    final["why_sealed"] = None
    baseline = _best_baseline(audit, loaded.task)
    tested = {}
    if cfg.data.split.test == "none":
        final["why_sealed"] = "the data has no test rows (data.split.test=none)"
    elif run.mode != "recorded":
        final["why_sealed"] = f"a {run.mode} run leaves the test rows sealed"
    else:
        rows, ids, shared = entrants.test_rows(cfg, loaded, run)
        earlier = ledger.open_seal(
            run.artifacts / "test_ledger.jsonl",
            weights=entrants.weights_digest(models[chosen]),
            ids=files.sha256_json(list(ids)),
            task=source_digest(setup.SOURCE.joinpath("task.py").read_bytes()),
            command=" ".join(["python", *sys.argv]),
        )
        tested = {
            name: entrants.score(cfg, loaded, run, name, states, rows)
            for name, states in models.items()
        }
        baseline |= _test_baseline(baseline["model"], loaded, rows)
        final |= {
            "num_test_rows": len(ids),
            "shared_rows": shared,
            "earlier_openings": len(earlier),
            "against": {
                stage: hard_cases.difference(tested[stage].joint, tested[chosen].joint, loaded.task)
                for stage in ("overfit", "regularize")
            },
        }
    final["table"] = entrants.final_table(scored, tested, loaded.task, baseline)
    files.write_json(run.handoff / "final.json", final)


def _best_baseline(audit: dict, task: Any) -> dict:
    name = max(audit["ladder"], key=lambda rung: audit["ladder"][rung]["accuracy"])
    rung = audit["ladder"][name]
    return {
        "model": f"baseline: {name}",
        "members": 1,
        "validation loss": rung["log_loss"],
        f"validation {task.metric_name}": rung.get(task.metric_name),
        f"test {task.metric_name}": None,
        "interval": None,
    }


def _test_baseline(title: str, loaded: setup.Loaded, rows: dict) -> dict:
    """The audit's best baseline, fitted on the same training rows, on the same test rows."""
    x_train, x = (loaded.task.embed(part["x"]) for part in (loaded.train, rows))
    y_train, y = loaded.train["y"].numpy(), rows["y"].numpy()
    scores = baselines.ladder(x_train, y_train, x, y, num_classes=loaded.task.num_outputs)
    found = scores[title.removeprefix("baseline: ")]
    if loaded.task.metric_name not in found:
        return {}
    right = round(found["accuracy"] * len(y))
    return {
        f"test {loaded.task.metric_name}": found[loaded.task.metric_name],
        "interval": list(hard_cases.wilson(right, len(y))),
    }


def write_bundle(cfg, loaded, run, states, chosen, scored) -> None:
    """bundle/ in the hand-off: the chosen model with all that answers a request."""
    proof = on_cpu(cfg, loaded, run, chosen, states, NUM_GOLDEN)
    shape = list(loaded.train["x"].shape[1:])
    names = ("preprocessing.py", "model.py", "task.py")
    metric = loaded.task.metric_name
    bundle.write(
        run.handoff / "bundle",
        members=states,
        model={
            "name": cfg.model.name,
            "params": cfg.model.params,
            "input_shape": shape,
            "num_outputs": loaded.task.num_outputs,
            "dropout": cfg.regularization.dropout,
        },
        preprocessing=loaded.preprocessing.dumps(),
        outputs=loaded.task.targets,
        class_names=loaded.task.class_names,
        facts={
            "chosen": chosen,
            f"validation {metric}": f"{scored.metric:.4f} of {scored.joint.num_rows} rows",
            "training rows": str(len(loaded.train["y"])),
        },
        limits=(
            "Measured on rows of the audited data only; artifacts/squeeze/report.md has the table.",
        ),
        provenance={
            "seed": cfg.seed,
            "data": run.data.identity,
            "tune": files.read_json(run.earlier("tune", "gate.json"))["binding"],
        },
        sources={n: source_digest(setup.SOURCE.joinpath(n).read_bytes()) for n in names},
        golden={
            "raws": [data.read(loaded.records.raw[row]) for row in proof["rows"]],
            "x": proof["x"],
            "outputs": proof["scored"].joint.outputs,
        },
    )


def on_cpu(cfg, loaded, run, name: str, states: list[dict], num_rows: int) -> dict:
    """The training path of an entrant on the first validation rows, on the processor that serves:
    another one rounds differently."""
    part = {key: value[:num_rows] for key, value in loaded.validation.items()}
    here = replace(run, device=torch.device("cpu"))
    scored = entrants.score(cfg, loaded, here, name, states[:1] if name == "tune" else states, part)
    return {"rows": part["id"].tolist(), "x": part["x"], "scored": scored}


def parity(cfg, loaded, run, name: str, states: list[dict]) -> dict:
    """The bundle as a server loads it against the training path, on up to 512 validation rows."""
    served = Bundle.load(run.result("bundle"))
    proof = on_cpu(cfg, loaded, run, name, states, NUM_PARITY)
    trained = proof["scored"].joint
    raws = [data.read(loaded.records.raw[row]) for row in proof["rows"]]
    answers = [answer["class"] for answer in served.predict_batch(raws)]
    x = torch.stack([served.prepare(raw) for raw in raws])
    ours = loaded.task.predict(trained.outputs).tolist()
    return {
        "num_rows": len(raws),
        "inputs_equal": torch.equal(x, proof["x"]),
        "answers_differ": sum(a != b for a, b in zip(answers, ours, strict=True)),
        "largest_gap": (served.outputs(x) - trained.outputs).abs().max().item(),
        "tolerance": bundle.OUTPUT_TOLERANCE,
    }
