"""The examples of docs/adapting.md, put into a project and run as a reader would."""

import ast
import importlib
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace

import documents
import numpy as np
import pytest
import torch
import yaml
from documents import ADAPTING, Block
from hydra import compose, initialize_config_dir
from PIL import Image

CPU = torch.device("cpu")


def purge(package: str) -> None:
    for name in [n for n in sys.modules if n == package or n.startswith(f"{package}.")]:
        del sys.modules[name]


@dataclass
class Project:
    """A bake with its package imported, to be changed by examples."""

    folder: Path

    def module(self, name: str) -> ModuleType:
        return importlib.import_module(f"{self.folder.name}.{name}")

    def example(self, part: str) -> Block:
        """The example of docs/adapting.md that contains `part`."""
        found = [b for b in documents.read(ADAPTING, self.folder).blocks if part in b.text]
        assert len(found) == 1, f"{len(found)} examples contain {part!r}"
        return found[0]

    def take_over(self, part: str) -> ModuleType:
        """Do what the example says: new names are added to its module, members of a class that is
        there replace those of the same name."""
        block = self.example(part)
        module = self.module(block.info.removesuffix(".py"))
        classes = [n.name for n in ast.parse(block.text).body if isinstance(n, ast.ClassDef)]
        known = {name: getattr(module, name) for name in classes if hasattr(module, name)}
        exec(compile(block.text, block.info, "exec"), module.__dict__)
        for name, former in known.items():
            for key, value in vars(getattr(module, name)).items():
                if not key.startswith("__"):
                    setattr(former, key, value)
            setattr(module, name, former)
        return module

    def config(self, *overrides: str):
        schema = self.module("harness.schema")
        with initialize_config_dir(str(self.folder / "configs"), version_base="1.3"):
            composed = compose("config", list(overrides))
        return schema.validate(composed, self.folder / "configs")

    def pipeline(self, *overrides: str, keep=lambda labels: np.arange(400), params=None):
        """The record that the checks see, on digits: three in four train, the others validate."""
        cfg = self.config("stage=overfit", *overrides)
        setup, records = self.module("stages.setup"), self.module("harness.records")
        everything = self.module("data").load(cfg.data)
        found = everything.take(keep(everything.labels))
        ids = {"train": [], "validation": [], "test": []}
        for row, name in enumerate(found.ids):
            ids["validation" if row % 4 == 0 else "train"].append(name)
        view = records.SplitView(found, {"ids": ids})
        fit = self.module("preprocessing").Preprocessing.fit
        prepared = fit(view.take("train").raw, cfg.data.options)
        task = self.module("task").Task(cfg.task, found.class_names)
        parts = {name: setup.rows_of(view, prepared, name) for name in ("train", "validation")}
        prior = task.prior(parts["train"]["y"])
        loaded = setup.Loaded(found, view, prepared, task, prior, **parts)
        run = SimpleNamespace(device=CPU)
        return setup.pipeline(cfg, loaded, run, params=params)

    def check(self, name: str, pipeline):
        checks, catalogue = self.module("harness.checks"), self.module("harness.checks.catalogue")
        by_name = {check.__name__: check for check in catalogue.SKELETON}
        return checks.run_check(by_name[name], pipeline)

    def verdicts(self, pipeline, *names: str) -> dict[str, str]:
        return {name: self.check(name, pipeline).verdict for name in names}


@pytest.fixture
def project(default_project, tmp_path, monkeypatch) -> Project:
    """A copy of the bake with the configuration files of docs/adapting.md, freshly imported."""
    torch.set_num_threads(1)
    folder = documents.adapt(default_project, tmp_path)
    monkeypatch.syspath_prepend(str(folder))
    purge(folder.name)
    yield Project(folder)
    purge(folder.name)


def opened(*names: str) -> dict[str, str]:
    return dict.fromkeys(names, "open")


def unbalanced(labels: np.ndarray) -> np.ndarray:
    """Many of the first three classes, few of the others."""
    rows = [np.flatnonzero(labels == c)[: 150 if c < 3 else 12] for c in range(10)]
    return np.concatenate(rows)


# ---- model --------------------------------------------------------------------------------------


def test_the_new_network_is_found_by_its_file_and_passes_its_checks(project):
    project.take_over("class ResidualNet")
    cfg = project.config("stage=overfit", "model=residual", "model.params.num_blocks=4")
    assert cfg.model.name == "ResidualNet"
    dropping = project.module("model").build("ResidualNet", {}, (1, 8, 8), 10, dropout=0.1)
    assert any(isinstance(m, torch.nn.Dropout2d) and m.p == 0.1 for m in dropping.modules())
    pipeline = project.pipeline("model=residual")
    names = ("sample_boundary", "trainable_parameters", "loss_contract", "modes")
    assert project.verdicts(pipeline, *names) == opened(*names)
    wider = cfg.model.params | cfg.model.wider
    assert (
        project.module("model").build("ResidualNet", wider, (3, 16, 16), 4).head.in_features == 64
    )


def test_the_head_learns_faster_in_groups_of_ones_own(project):
    module = project.take_over("five times faster")
    pipeline = project.pipeline()
    assert project.verdicts(pipeline, "trainable_parameters") == opened("trainable_parameters")
    groups = module.parameter_groups(pipeline.make_model(0), lr=1e-3, weight_decay=0.1)
    assert [group["lr"] for group in groups] == [1e-3, 5e-3]


# ---- task ---------------------------------------------------------------------------------------


def test_class_weights_pass_the_checks_of_the_loss(project):
    project.take_over("CLASS_WEIGHTS")
    names = ("loss_at_init", "prior_bias", "loss_contract", "overfit_one_batch")
    pipeline = project.pipeline("model=linear", keep=unbalanced)
    assert project.verdicts(pipeline, *names) == opened(*names)
    smoothed = project.pipeline("model=linear", "regularization=label_smoothing", keep=unbalanced)
    names = ("loss_at_init", "loss_contract")
    assert project.verdicts(smoothed, *names) == opened(*names)


def test_class_weights_that_are_not_declared_are_found_out(project):
    weights = torch.tensor([1.0] * 8 + [2.0] * 2)
    project.module("task").Task.loss = lambda self, outputs, y: torch.nn.functional.cross_entropy(
        outputs, y, weight=weights
    )
    found = project.check("loss_contract", project.pipeline("model=linear"))
    assert found.verdict == "shut"
    assert "undeclared class weights" in found.suspect


def test_the_focal_loss_passes_the_checks_of_the_loss(project):
    project.take_over("GAMMA")
    names = ("loss_at_init", "prior_bias", "loss_contract", "overfit_one_batch")
    names += ("input_independent_baseline",)
    pipeline = project.pipeline("model=linear", keep=unbalanced)
    assert project.verdicts(pipeline, *names) == opened(*names)


def test_the_kappa_is_the_one_of_scikit_learn(project):
    project.take_over("cohen_kappa")
    pipeline = project.pipeline("model=linear", "task.metric=cohen_kappa")
    assert pipeline.task.sklearn_metric == "cohen_kappa_score"
    assert project.verdicts(pipeline, "human_metric") == opened("human_metric")


# ---- data ---------------------------------------------------------------------------------------


def digits(count: int):
    from sklearn.datasets import load_digits

    found = load_digits()
    return (found.images[:count] * 15.9).astype(np.uint8), found.target[:count]


def write_images(folder: Path, count: int) -> list[tuple[str, int]]:
    """PNG files, one folder per class: (path relative to `folder`, label)."""
    written = []
    for place, (image, label) in enumerate(zip(*digits(count), strict=True)):
        path = folder / f"class-{label}" / f"{place:04d}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image).save(path)
        written.append((path.relative_to(folder).as_posix(), int(label)))
    return written


def test_a_folder_of_images_is_audited_and_asks_for_the_statement(default_project, tmp_path):
    """The first run as docs/adapting.md tells it: exit code 3, for lack of the owner's words."""
    write_images(tmp_path / "images", 400)
    project = documents.adapt(default_project, tmp_path / "project")
    (project / "configs" / "data" / "folder.yaml").write_bytes(
        (default_project / "configs" / "data" / "folder.yaml").read_bytes()
    )
    command = [sys.executable, "run.py", "stage=data_audit", "data=folder"]
    command += [f"data.path={tmp_path / 'images'}"]
    done = subprocess.run(
        command,
        cwd=project,
        capture_output=True,
        text=True,
        encoding="utf-8",
        env=os.environ | documents.QUIET,
    )
    assert done.returncode == 3, done.stdout + done.stderr
    assert done.stdout.count("SHUT") == 1
    report = (project / "artifacts" / "data_audit" / "report.md").read_text(encoding="utf-8")
    assert "**statement** (shut)" in report
    assert "## Draft of the statement" in report
    assert not list((project / "artifacts").rglob("random.png"))


@pytest.mark.parametrize("strategy", ["group", "time", "given"])
def test_a_manifest_splits_by_its_columns(project, tmp_path, strategy):
    lines = ["path,label,patient,taken,split"]
    for place, (path, label) in enumerate(write_images(tmp_path / "images", 200)):
        split = ("train", "train", "validation", "test")[place % 4]
        lines.append(f"{path},{label},p{place // 5},2026-01-{place % 28 + 1:02d},{split}")
    manifest = tmp_path / "images" / "manifest.csv"
    manifest.write_text("\n".join(lines) + "\n", encoding="utf-8")
    (settings,) = [
        documents.overrides_of(words)
        for words in documents.read(ADAPTING, project.folder).launches()
        if f"data.split.strategy={strategy}" in words
    ]
    settings = [s if s != "data.path=FILE" else f"data.path={manifest}" for s in settings]
    cfg = project.config(*settings)
    found, splits = project.module("data").load(cfg.data), project.module("harness.splits")
    values = vars(cfg.data.split).copy()
    values.pop("near_together")
    made = splits.make(found, [], splits.SplitSettings(**values))
    place = splits.column(found.ids, made)
    assert set(place.tolist()) >= {"train", "validation", "test"}
    if strategy == "group":
        sides = {(group, side) for group, side in zip(found.groups, place, strict=True)}
        assert len(sides) == len(set(found.groups))
    elif strategy == "time":
        days = {s: {t for t, p in zip(found.times, place, strict=True) if p == s} for s in place}
        assert max(days["train"]) < min(days["validation"])
        assert max(days["validation"]) < min(days["test"])
    else:
        assert place.tolist() == list(found.given)


def test_the_shown_manifest_has_the_columns_that_the_commands_name(project):
    header = project.example("p01,2026").text.split("\n")[0].split(",")
    assert header[:2] == ["path", "label"]
    typed = {
        word for words in documents.read(ADAPTING, project.folder).launches() for word in words
    }
    for kind, column in (("group", "patient"), ("time", "taken")):
        assert f"data.options.{kind}_column={column}" in typed
        assert column in header


def test_arrays_of_numpy_are_read_and_broken_ones_refused(project, tmp_path):
    project.take_over("np.load")
    data = project.take_over("SUFFIXES")
    folder = tmp_path / "arrays"
    for label in ("a", "b"):
        (folder / label).mkdir(parents=True)
        np.save(folder / label / "one.npy", np.arange(12.0).reshape(3, 4))
    cfg = project.config("data=folder", f"data.path={folder.as_posix()}")
    found = data.load(cfg.data)
    assert found.ids == ("a/one.npy", "b/one.npy")
    assert data.read(found.raw[0]).shape == (3, 4)
    (folder / "a" / "one.npy").write_bytes(b"\x93NUMPY")
    with pytest.raises(ValueError, match="not a readable array"):
        data.read(found.raw[0])


def test_rows_read_on_demand_are_the_rows_in_memory(project):
    data = project.module("data")
    data.ThreadPoolExecutor = ThreadPoolExecutor  # the import that stands below the example
    shipped = data.prepare
    project.take_over("class OnDemand")
    cfg = project.config()
    found = data.load(cfg.data).take(range(60))
    prepared = project.module("preprocessing").Preprocessing.fit(list(found.raw), cfg.data.options)
    whole = shipped(found, prepared, "train")
    assert torch.equal(data.prepare(found, prepared, "train")["x"], whole["x"])
    data.IN_MEMORY = 10
    rows = data.prepare(found, prepared, "train")
    assert isinstance(rows["x"], data.OnDemand)
    assert tuple(rows["x"].shape) == tuple(whole["x"].shape)
    assert torch.equal(rows["x"][5:9], whole["x"][5:9])
    loop = project.module("harness.loop")
    batches = [list(loop.Loader(r, 16, shuffle=True, seed=3)) for r in (rows, whole)]
    for one, other in zip(*batches, strict=True):
        assert torch.equal(one["x"], other["x"])
        assert torch.equal(one["y"], other["y"])


# ---- configuration ------------------------------------------------------------------------------


def test_a_further_optimizer_file_gives_its_own_rate(project):
    cfg = project.config("stage=regularize", "optimizer=sgd_warm")
    assert (cfg.optimizer.name, cfg.optimizer.lr) == ("sgd", 0.1)
    both = project.config("stage=regularize", "regularization=moved_and_dropped").regularization
    assert both.dropout == 0.1
    assert both.augment["max_shift_px"] > 0


def test_the_shown_waiver_is_taken(project):
    blocks = documents.read("docs/gates.md", project.folder).blocks
    (block,) = [block for block in blocks if block.language == "yaml"]
    waivers = project.module("harness.gates").active_waivers(yaml.safe_load(block.text)["waivers"])
    assert [(waiver["check"], waiver["stage"]) for waiver in waivers] == [
        ("label_noise", "data_audit")
    ]


def test_every_example_is_for_a_file_that_is_there(default_project):
    for block in documents.read(ADAPTING, default_project).blocks:
        if block.language == "python":
            assert (default_project / default_project.name / block.info).exists()
