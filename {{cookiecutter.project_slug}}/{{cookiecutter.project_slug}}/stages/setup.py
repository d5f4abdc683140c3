"""What every stage sets up from the files that are yours: data, task, models, pipeline."""

from __future__ import annotations

import csv
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from safetensors.torch import save as save_tensors

from .. import data, model, preprocessing
from ..harness import checks, faults, files, instruments, loop, records, tracking
from ..harness.checks import Check, Pipeline
from ..harness.evidence import NOT_EVIDENCE
from ..harness.gates import DataNow
from ..harness.loop import FitResult, FitSettings, Loader
from ..harness.schema import BadInput, Config
from ..harness.sources import source_digest
from ..task import Task

EVALUATION_BATCH = 256
SOURCE = Path(__file__).parent.parent  # the package, whose sources are part of the evidence


@dataclass(frozen=True)
class Loaded:
    """The data as a stage works with it: frozen splits, fitted preprocessing, tensors."""

    records: records.Records
    view: records.SplitView
    preprocessing: preprocessing.Preprocessing
    task: Task  # without label smoothing: what every split is scored with
    prior: np.ndarray
    train: dict
    validation: dict


def read_records(cfg: Config, run: Any) -> tuple[records.Records, tuple[str, ...]]:
    """All records and their content hashes; the launch is refused if they are not as audited.

    Raises BadInput for a source that is absent or cannot be used.
    """
    try:
        found = data.load(cfg.data)
        stamp = data.stamp(cfg.data)
    except (FileNotFoundError, ValueError) as error:
        raise BadInput(str(error)) from None
    hashes = records.content_hashes(found, run.runs / "cache" / "hashes.json")
    identity = records.identity(found, hashes)
    run.has_read(DataNow(identity, len(found)))
    records.remember(run.runs / "cache" / "stamp.json", stamp, identity, len(found))
    return found, hashes


def make_task(cfg: Config, class_names: tuple[str, ...], label_smoothing: float = 0.0) -> Task:
    try:
        return Task(cfg.task, class_names, label_smoothing)
    except ValueError as error:
        raise BadInput(str(error)) from None


def label_review(cfg: Config) -> dict[str, str] | None:
    """Rows of the CSV data.label_review (id, verdict: wrong or right), or None."""
    if cfg.data.label_review is None:
        return None
    try:
        with open(cfg.data.label_review, encoding="utf-8-sig", newline="") as file:
            rows = list(csv.DictReader(file))
        review = {row["id"]: row["verdict"].strip() for row in rows}
    except (OSError, KeyError) as error:
        raise BadInput(
            f"data.label_review={cfg.data.label_review} is no CSV with the columns id and verdict "
            f"({type(error).__name__}: {error})."
        ) from None
    if strange := sorted(set(review.values()) - {"wrong", "right"}):
        raise BadInput(f"data.label_review has the verdict {strange[0]!r}; write wrong or right.")
    return review


def load(cfg: Config, run: Any, *, opened: bool = False) -> Loaded:
    """What the audit froze, as tensors. The test rows stay sealed unless `opened`."""
    found, _ = read_records(cfg, run)
    splits = files.read_json(run.earlier("data_audit", "splits.json"))
    view = records.SplitView(found, splits, opened=opened)
    prepared = preprocessing.Preprocessing.load(run.earlier("data_audit", "preprocessing.json"))
    task = make_task(cfg, found.class_names)
    tensors = {name: rows_of(view, prepared, name) for name in ("train", "validation")}
    return Loaded(found, view, prepared, task, task.prior(tensors["train"]["y"]), **tensors)


def rows_of(view: records.SplitView, prepared: Any, split: str) -> dict:
    """One split as tensors; `id` is the row in all records, the same in every split."""
    tensors = data.prepare(view.take(split), prepared, split)
    return tensors | {"id": torch.as_tensor(view.rows(split))}


def subset(loaded: Loaded, rows: torch.Tensor) -> Loaded:
    """The same with fewer training rows (positions in the training split)."""
    return replace(loaded, train={key: loop.take(loaded.train[key], rows) for key in loaded.train})


def train_loader(cfg: Config, loaded: Loaded, device: Any, seed: int) -> Loader:
    """Shuffled; augmented where the regularization asks for it."""
    options = cfg.regularization.augment
    move = None
    if any(options.values()):
        move = lambda x, generator: preprocessing.augment(x, options, generator)  # noqa: E731
    size = cfg.regularization.batch_size or cfg.batch_size
    return Loader(loaded.train, size, shuffle=True, seed=seed, augment=move, device=device)


def validation_loader(loaded: Loaded, device: Any) -> Loader:
    return Loader(loaded.validation, EVALUATION_BATCH, device=device)


def make_model(
    cfg: Config,
    loaded: Loaded,
    device: Any,
    seed: int,
    *,
    name: str | None = None,
    params: dict | None = None,
) -> torch.nn.Module:
    """A fresh network of this seed on the device, its head biased to the label shares."""
    name, params = name or cfg.model.name, cfg.model.params if params is None else params
    torch.manual_seed(seed)
    shape = tuple(loaded.train["x"].shape[1:])
    try:
        network = model.build(
            name, params, shape, loaded.task.num_outputs, cfg.regularization.dropout
        )
    except ValueError as error:
        raise BadInput(str(error)) from None
    loaded.task.set_prior_bias(network, loaded.prior)
    return network.to(device)


def make_optimizer(cfg: Config, device: Any, network: torch.nn.Module) -> torch.optim.Optimizer:
    groups = model.parameter_groups(network, cfg.optimizer.lr, cfg.regularization.weight_decay)
    return loop.make_optimizer(cfg.optimizer, groups, device)


def load_weights(network: torch.nn.Module, path: Path) -> torch.nn.Module:
    """Weights of a checkpoint into `network`, wherever it lives; they were saved from the CPU."""
    network.load_state_dict(load_file(path))
    return network


def train(
    cfg: Config,
    loaded: Loaded,
    run: Any,
    *,
    seed: int,
    num_epochs: int,
    monitor: str = "validation",
    params: dict | None = None,
    folder: Path | None = None,
    on_epoch: Callable[[dict], None] = lambda row: None,
    announce: bool = True,
) -> tuple[torch.nn.Module, FitResult]:
    """One training run as configured: the network (as the last epoch left it) and its result."""
    network = make_model(cfg, loaded, run.device, seed, params=params)
    optimizer = make_optimizer(cfg, run.device, network)
    name = folder.name if folder else f"seed-{seed}"
    tracker = tracking.open_tracker(cfg.logger, run, asdict(cfg), name)
    if announce:
        print(f"Seed {seed}: ", end="")
    try:
        result = fit(
            cfg,
            loaded,
            network,
            optimizer,
            train_loader(cfg, loaded, run.device, seed),
            validation_loader(loaded, run.device),
            num_epochs,
            monitor=monitor,
            folder=folder,
            on_epoch=(tracker.log, on_epoch),
            announce=announce,
        )
    except loop.NothingToTrain as error:
        raise BadInput(str(error)) from None
    finally:
        tracker.finish()
    if announce:
        where = f"{result.best_validation_loss:.4f} in epoch {result.best_validation_epoch}"
        print(f"        {result.stopped}; best validation loss {where}", flush=True)
    return network, result


def fit(
    cfg: Config,
    loaded: Loaded,
    network: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    batches: Any,
    validation: Any,
    num_epochs: int,
    *,
    monitor: str = "validation",
    **more: Any,
) -> FitResult:
    """The loop with the settings and the schedule of the configuration, over these batches."""
    settings = FitSettings(
        num_epochs=num_epochs,
        monitor=monitor,
        patience_epochs=cfg.regularization.patience_epochs,
        clip_norm=cfg.optimizer.clip_norm,
        precision=cfg.precision,
        accumulate=cfg.optimizer.accumulate,
    )
    return loop.fit(
        network,
        optimizer,
        batches,
        validation,
        make_task(cfg, loaded.records.class_names, cfg.regularization.label_smoothing),
        settings,
        evaluate_task=loaded.task,
        scheduler=loop.make_scheduler(optimizer, cfg.optimizer, num_epochs * len(batches)),
        **more,
    )


def evaluate(cfg: Config, loaded: Loaded, run: Any, network: Any, rows: dict) -> loop.Evaluation:
    """A whole split under this project's one `evaluate`."""
    batches = Loader(rows, EVALUATION_BATCH, device=run.device)
    return loop.evaluate(network, batches, loaded.task, precision=cfg.precision)


def curve(seed: int, result: FitResult) -> dict:
    """What a hand-off keeps of a training run: everything but the time it took."""
    rows = [{k: v for k, v in row.items() if k != "time_s"} for row in result.epochs]
    return {
        "seed": seed,
        "num_steps": result.num_steps,
        "num_epochs": result.num_epochs,
        "stopped": result.stopped,
        "best_epoch": result.best_epoch,
        "best_loss": result.best_loss,
        "best_validation_epoch": result.best_validation_epoch,
        "best_validation_loss": result.best_validation_loss,
        "epochs": rows,
        "steps": result.steps,
    }


def pipeline(
    cfg: Config, loaded: Loaded, run: Any, *, name: str | None = None, params: dict | None = None
) -> Pipeline:
    """The record the checks see: this project's own step, loss, loaders, metric and model."""
    task = make_task(cfg, loaded.records.class_names, cfg.regularization.label_smoothing)

    def step(network, optimizer, batch, accumulate=cfg.optimizer.accumulate):
        return loop.train_step(
            network,
            optimizer,
            batch,
            task.loss,
            clip_norm=cfg.optimizer.clip_norm,
            precision=cfg.precision,
            accumulate=accumulate,
        )

    def build(seed: int) -> torch.nn.Module:
        return make_model(cfg, loaded, run.device, seed, name=name, params=params).train()

    some = loaded.view.take("train").take(range(min(32, len(loaded.train["y"]))))
    human = cfg.data.human_reference
    whole = Pipeline(
        make_model=build,
        make_optimizer=partial(make_optimizer, cfg, run.device),
        train_step=step,
        accumulate_step=step,
        evaluate=lambda network, batches: loop.evaluate(
            network, batches, task, precision=cfg.precision
        ),
        task=task,
        train=train_loader(cfg, loaded, run.device, cfg.seed),
        validation=validation_loader(loaded, run.device),
        device=run.device,
        precision=cfg.precision,
        clip_norm=cfg.optimizer.clip_norm,
        accumulate=cfg.optimizer.accumulate,
        preprocessing=loaded.preprocessing,
        prepare=lambda split: data.prepare(some, loaded.preprocessing, split),
        raw=lambda row: data.read(loaded.records.raw[row]),
        group=_column(loaded.records.groups),
        time=_column(loaded.records.times and records.time_values(loaded.records.times)),
        fit=partial(_quiet_fit, cfg, loaded),
        draw=lambda row: loaded.task.draw(data.read(loaded.records.raw[row])),
        human_reference={
            "value": human.value,
            "kind": human.kind,
            "num_samples": human.num_samples,
        },
    )
    return whole if cfg.fault is None else _planted(whole, cfg.fault, name or cfg.model.name)


def _planted(whole: Pipeline, fault: str, network: str) -> Pipeline:
    """With the fault where it has a place; said either way."""
    try:
        broken = faults.plant(whole, fault)
    except faults.NotPlantable as error:
        print(f"Fault {fault} is not planted in {network}: {error}.", flush=True)
        return whole
    known = faults.FAULTS[fault]
    print(f"Fault {fault} is planted in {network}: {known.check} should shut. {known.why}")
    return broken


def _column(values: Any) -> Callable[[int], Any] | None:
    return None if values is None else lambda row: values[row]


def _quiet_fit(cfg: Config, loaded: Loaded, *parts: Any) -> FitResult:
    """`fit` of the pipeline: (model, optimizer, train, validation, num_epochs), without a word."""
    return fit(cfg, loaded, *parts, announce=False)


def lr_range(cfg: Config, loaded: Loaded, run: Any) -> dict:
    """The learning-rate range test on this project's step and batches, clipping off."""
    network = make_model(cfg, loaded, run.device, cfg.seed)
    return instruments.lr_range(
        network,
        make_optimizer(cfg, run.device, network),
        lambda *batch: loop.train_step(*batch, loaded.task.loss, precision=cfg.precision),
        train_loader(cfg, loaded, run.device, cfg.seed),
        num_steps=cfg.stage.lr_range_steps,
    )


def run_check(
    check: Callable[..., Check], pipeline: Pipeline, cfg: Config, run: Any, **more: Any
) -> Check:
    """One check with the limits that configs/config.yaml has for it; the report tells its time."""
    started = time.process_time()
    found = checks.run_check(check, pipeline, **cfg.checks.get(check.__name__, {}), **more)
    run.took[check.__name__] += time.process_time() - started
    return found


def run_checks(
    several: Iterable[Callable[..., Check]], pipeline: Pipeline, cfg: Config, run: Any
) -> list[Check]:
    return [run_check(check, pipeline, cfg, run) for check in several]


def affordable_rows(cfg: Config, loaded: Loaded, run: Any) -> torch.Tensor | None:
    """Rows of a frozen random subset when the full training set is beyond `stage.budget_s` (or a
    subset was asked for), else None. An earlier run's subset is used again while it is as large."""
    total, wanted = len(loaded.train["y"]), cfg.stage.subset
    if wanted is None:
        network = make_model(cfg, loaded, run.device, cfg.seed)
        optimizer = make_optimizer(cfg, run.device, network)
        batches = train_loader(cfg, loaded, run.device, cfg.seed)
        step = partial(loop.train_step, network, optimizer, loss_fn=loaded.task.loss)
        forecast = instruments.seconds_per_step(step, batches) * len(batches)
        forecast *= cfg.stage.num_epochs * cfg.stage.num_seeds
        wanted = (
            total if forecast <= cfg.stage.budget_s else int(total * cfg.stage.budget_s / forecast)
        )
    if wanted >= total:
        return None
    frozen = run.earlier("overfit", "subset.json")
    rows = files.read_json(frozen)["rows"] if frozen.exists() else []
    if len(rows) < wanted:
        rows = torch.randperm(total, generator=torch.Generator().manual_seed(0))[:wanted].tolist()
    files.write_json(run.handoff / "subset.json", {"rows": rows[:wanted]})
    return torch.tensor(rows[:wanted])


def keep(path: Path, state: dict) -> None:
    """Weights into the hand-off."""
    files.write_bytes(path, save_tensors(state))


def training_settings(cfg: Config) -> dict[str, Any]:
    """Dotted key -> value of all that decides a training run besides data, model and seed."""
    groups = {"optimizer": asdict(cfg.optimizer), "regularization": asdict(cfg.regularization)}
    flat = {"batch_size": cfg.batch_size}
    for group, values in groups.items():
        flat |= {f"{group}.{key}": value for key, value in values.items()}
    return flat


def trial_evidence(cfg: Config, run: Any) -> dict:
    """All that decides a trial's value, besides the parameters drawn: data, code, settings."""
    names = ["data.py", "preprocessing.py", "model.py", "task.py", "harness/loop.py"]
    settings = asdict(cfg)
    free = ("stage", "trial", "fault", "scratch", "reaffirm", "logger", "commit_samples", "device")
    for key in free:
        settings.pop(key)
    settings["data"] = {k: v for k, v in settings["data"].items() if k not in NOT_EVIDENCE}
    return {
        "data": run.data.identity,
        "split": files.sha256_file(run.earlier("data_audit", "splits.json")),
        "sources": {name: source_digest((SOURCE / name).read_bytes()) for name in names},
        "settings": settings,
        "trial_epochs": cfg.stage.trial_epochs,
        "sampler": cfg.stage.sampler,
    }
