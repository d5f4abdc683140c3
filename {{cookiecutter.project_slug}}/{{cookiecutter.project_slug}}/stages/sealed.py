"""What squeeze does behind the seal: read the test rows once, and write the bundle that serves."""

from __future__ import annotations

import sys
from typing import Any

import torch

from .. import data, model, preprocessing
from ..harness import bundle, files, hard_cases, ledger
from ..harness.audit import baselines
from ..harness.sources import source_digest
from . import entrants, setup

NUM_GOLDEN = 16


class Bundle(bundle.Bundle):
    """This project's bundle, as serve.py loads it."""

    models, preprocessing = model, preprocessing


def read_test(cfg, loaded, run, models, scored, chosen, audit) -> None:
    """Open the seal, score every entrant on the test rows, and leave final.json.

    Only a recorded run with a test set opens it; any other leaves the table without test figures
    and says why.
    """
    final = {"chosen": chosen, "metric": loaded.task.metric_name, "why_sealed": None}
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
    ids = scored.joint.ids[:NUM_GOLDEN]
    row_of = {row: place for place, row in enumerate(loaded.validation["id"].tolist())}
    places = torch.tensor([row_of[row] for row in ids.tolist()])
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
            "raws": [data.read(loaded.records.raw[row]) for row in ids.tolist()],
            "x": loaded.validation["x"][places],
            "outputs": scored.joint.outputs[:NUM_GOLDEN],
        },
    )


def parity(loaded: setup.Loaded, run: Any, scored: entrants.Scored) -> dict:
    """The bundle as a server loads it against the training path, on every validation row."""
    served = Bundle.load(run.result("bundle"))
    rows = scored.joint.ids.tolist()
    answers = served.predict_batch([data.read(loaded.records.raw[row]) for row in rows])
    ours = loaded.task.predict(scored.joint.outputs).tolist()
    place = {row: k for k, row in enumerate(loaded.validation["id"].tolist())}
    x = torch.stack([served.prepare(data.read(loaded.records.raw[row])) for row in rows])
    trained = loaded.validation["x"][torch.tensor([place[row] for row in rows])]
    return {
        "num_rows": len(rows),
        "inputs_equal": torch.equal(x, trained),
        "answers_differ": sum(a["class"] != b for a, b in zip(answers, ours, strict=True)),
        "largest_gap": (served.outputs(x) - scored.joint.outputs).abs().max().item(),
        "tolerance": bundle.OUTPUT_TOLERANCE,
    }
