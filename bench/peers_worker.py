"""Run inside a project (`python peers_worker.py ASKED` there): what two other checks say, as JSON.

ASKED is {"package", "overrides", "out"}. The pipeline is the project's own, with the last of
stage.models, which is the one that harm is measured on. Two checks look at it:

overfit_one_batch: the project's model, optimizer and step, `NUM_STEPS` times on the first batch of
the training loader. It passes when the loss the step reports falls below `MAX_LOSS_SHARE` of where
it started, both above the lowest that the loss can reach.

neural_net_checklist: its assertions one by one in the order of its own `assert_all_for_...`, with
its own limits. It has no place for a step, an optimizer, a schedule, an evaluation, preprocessing
or validation data: it is handed a factory of the project's model, the first batch of the training
loader and the project's loss. Where its defaults would be unfair the call is better: every
assertion runs although an earlier one failed; it may overfit down to the lowest that a smoothed
loss can reach, plus its own limit; and what it says of balanced classes is not asked of others.

After each assertion the file is written again, so that one that does not end leaves the rest.
"""

from __future__ import annotations

import copy
import importlib
import itertools
import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import torch
from train_seeds import configuration

NUM_STEPS = 200
MAX_LOSS_SHARE = 0.1
MIN_FLATNESS = 0.9  # entropy of the label shares over log n, above which classes are balanced
Assertion = tuple[str, Callable[[], object]]


def main() -> None:
    asked = json.loads(sys.argv[1])
    root = Path.cwd()
    sys.path[0] = str(root)  # instead of this file's folder
    os.environ["TQDM_DISABLE"] = "1"  # a bar per step would be most of the peer's time
    loaded, pipeline = project(asked, root)
    setup_s = time.process_time()
    found = {"setup_s": setup_s, "running": None, "results": {}}
    batch = next(iter(pipeline.train))
    several = {
        "overfit_one_batch": [("overfit_one_batch", partial(overfit, pipeline, batch))],
        "neural_net_checklist": list(checklist(pipeline, copy.deepcopy(batch), loaded.prior)),
    }
    for peer, assertions in several.items():
        for name, ask in assertions:
            found["running"] = [peer, name]
            write(asked["out"], found)
            found["results"].setdefault(peer, []).append({"name": name, **answer(ask)})
    write(asked["out"], found | {"running": None})


def project(asked: dict, root: Path):
    """The loaded data and the pipeline record, as the project itself sets them up."""
    setup, record, schema = (
        importlib.import_module(f"{asked['package']}.{name}")
        for name in ("stages.setup", "harness.record", "harness.schema")
    )
    cfg = configuration(schema, root / "configs", asked["overrides"])
    places = {"folder": root / "runs" / "peers", "artifacts": root / "artifacts"}
    run = record.Run(
        stage="skeleton", mode="scratch", runs=root / "runs", device=torch.device("cpu"), **places
    )
    record.prepare_torch(cfg.seed, 1)
    loaded = setup.load(cfg, run)
    return loaded, setup.pipeline(cfg, loaded, run)


def answer(ask: Callable[[], object]) -> dict:
    """Whether it passed, what it said, and its CPU seconds. Whatever is raised is a failure."""
    started, said = time.process_time(), None
    try:
        ask()
    except Exception as error:  # the peer runs the project's code: nothing it raises ends the rest
        said = f"{type(error).__name__}: {error}".splitlines()[0][:160]
    return {"passed": said is None, "said": said, "seconds": time.process_time() - started}


def write(path: str, found: dict) -> None:
    Path(path).write_text(json.dumps(found), encoding="utf-8")


# ---- the two ------------------------------------------------------------------------------------


def overfit(pipeline, batch: dict) -> None:
    """Raises AssertionError when the loss on one batch does not fall far enough."""
    network = pipeline.make_model(0)
    optimizer = pipeline.make_optimizer(network)
    lowest = pipeline.task.optimum_loss()
    losses = []
    for _ in range(NUM_STEPS):
        losses.append(float(pipeline.train_step(network, optimizer, batch).loss))
    share = (losses[-1] - lowest) / (losses[0] - lowest)
    said = f"the loss is at {losses[-1]:.3g} from {losses[0]:.3g} after {NUM_STEPS} steps"
    assert math.isfinite(share) and losses[-1] < losses[0] and share < MAX_LOSS_SHARE, said


def checklist(pipeline, batch: dict, prior) -> Iterator[Assertion]:
    """The assertions of neural_net_checklist 1.1.0 that hold for such a task, by what they assert.

    Exclusive classes: those of `assert_all_for_classification_cross_entropy_loss`. Tokens: those of
    `assert_all_for_causal_llm_cross_entropy_loss`, but for two that differentiate by the inputs.
    Other targets: those that ask nothing of the classes.
    """
    from neural_net_checklist import torch_diagnostics as peer

    task, seeds = pipeline.task, itertools.count()
    given = (batch["x"], batch["y"])
    tokens = task.targets == "tokens"

    def factory() -> torch.nn.Module:
        return pipeline.make_model(next(seeds))

    limit = task.optimum_loss() + (1e-1 if tokens else 1e-4)
    if task.targets in ("exclusive", "tokens"):
        about = {"num_classes": task.num_outputs}
        if flatness(prior) >= MIN_FLATNESS:
            ask = peer.assert_balanced_classification_cross_entropy_loss_at_init
            yield "loss_at_init", lambda: ask(factory(), given, loss_fn=task.loss, **about)
            calibrated = peer.assert_balanced_classification_cross_entropy_init_calibrated
            yield "init_calibrated", lambda: calibrated(factory(), given, **about)
    yield (
        "forward_batch_independence",
        lambda: peer.assert_forward_batch_independence(factory, given),
    )
    if tokens:
        yield "forward_causal_property", lambda: peer.assert_forward_causal_property(factory, given)
    yield "non_zero_gradients", lambda: peer.assert_non_zero_gradients(factory(), given)
    if not tokens:
        backward = peer.assert_backward_batch_independence
        yield "backward_batch_independence", lambda: backward(factory, given)
    worse, overfit_to = peer.assert_input_independent_baseline_worse, peer.assert_overfit_to_batch
    yield "input_independent_baseline_worse", lambda: worse(factory, given, loss_fn=task.loss)
    told = {"loss_fn": task.loss, "threshold": limit}
    yield "overfit_to_batch", lambda: overfit_to(factory(), given, **told)


def flatness(prior) -> float:
    """Entropy of the label shares over log n: 1 for equal shares."""
    shares = torch.as_tensor(prior, dtype=torch.float64)
    return float(-torch.xlogy(shares, shares).sum() / math.log(len(shares)))


if __name__ == "__main__":
    main()
