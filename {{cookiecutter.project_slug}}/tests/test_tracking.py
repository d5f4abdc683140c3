"""harness/tracking.py: history always, a bar for those who look, and wandb that stops no run."""

import math
import sys
from types import ModuleType, SimpleNamespace

import pytest

from {{cookiecutter.project_slug}}.harness import files, tracking

CONFIG = {
    "seed": 0,
    "optimizer": {"lr": 0.1, "betas": [0.9, 0.99]},
    "stage": {"name": "tune", "storage": "postgresql://me:secret@host/db", "limits": {}},
}
ROW = {"epoch": 1, "running_train_loss": 0.5, "validation_loss": 0.25}


# ---- history ------------------------------------------------------------------------------------


def test_each_row_is_written_once_and_in_the_order_of_the_calls(tmp_path):
    steps, epochs = [], []
    with tracking.history(tmp_path, steps, epochs) as write:
        steps.append({"step": 1})
        epochs.append({"epoch": 1})
        write()
        write()
        steps += [{"step": 21}, {"step": 41}]
        write()
        epochs.append({"epoch": 2})
    wanted = [{"step": 1}, {"epoch": 1}, {"step": 21}, {"step": 41}, {"epoch": 2}]
    assert files.read_jsonl(tmp_path / "history.jsonl") == wanted


def test_what_was_known_when_training_broke_off_is_written(tmp_path):
    steps = []
    with pytest.raises(KeyboardInterrupt), tracking.history(tmp_path, steps):
        steps.append({"step": 1})
        raise KeyboardInterrupt
    assert files.read_jsonl(tmp_path / "history.jsonl") == [{"step": 1}]


def test_without_a_folder_or_rows_no_file_is_written(tmp_path):
    with tracking.history(None, [ROW]) as write:
        write()
    with tracking.history(tmp_path, []) as write:
        write()
    assert list(tmp_path.iterdir()) == []


# ---- the bar ------------------------------------------------------------------------------------


def test_a_pipe_sees_no_bar(capsys):
    with tracking.progress(3) as show:
        show(ROW)
    assert capsys.readouterr() == ("", "")


def test_a_terminal_sees_epochs_and_losses_and_an_empty_line_at_the_end(capsys, monkeypatch):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    for key, value in {"TERM": "xterm", "COLUMNS": "100", "NO_COLOR": "1"}.items():
        monkeypatch.setenv(key, value)
    for key in ("TTY_COMPATIBLE", "TTY_INTERACTIVE", "FORCE_COLOR"):
        monkeypatch.delenv(key, raising=False)
    with tracking.progress(3) as show:
        show(ROW)
        shown = capsys.readouterr().out
        print("a line of the stage's own")
    assert "1/3" in shown and "loss 0.5000, validation 0.2500" in shown
    rest = capsys.readouterr().out
    assert "a line of the stage's own\n" in rest
    assert rest.rstrip().endswith("\x1b[2K")  # the bar is wiped


# ---- wandb --------------------------------------------------------------------------------------


class FakeWandb(ModuleType):
    """What of wandb is used, and a place to plant faults: name of a call -> what it raises."""

    def __init__(self, *, logged_in=True, **faults):
        super().__init__("wandb")
        self.calls, self.rows, self.faults, self.logged_in = [], [], faults, logged_in
        self.Settings = SimpleNamespace

    def login(self, **options):
        assert options == {"prompt": False, "verify": False}  # it never asks a person
        return self.logged_in

    def init(self, **options):
        self.calls.append(options)
        self._fail(options["mode"])
        return SimpleNamespace(log=self.log, finish=self.finish)

    def log(self, row):
        self._fail("log")
        self.rows.append(row)

    def finish(self):
        self._fail("finish")
        self.rows.append("finished")

    def _fail(self, what):
        if what in self.faults:
            raise self.faults[what]


@pytest.fixture(autouse=True)
def nothing_has_failed_yet(monkeypatch):
    monkeypatch.setattr(tracking, "_failed", set())


@pytest.fixture
def opened(tmp_path, monkeypatch):
    """Open a tracker as a stage does, with this wandb in place of the real one."""

    def open_with(fake, mode="offline", **settings):
        monkeypatch.setitem(sys.modules, "wandb", fake)
        run = SimpleNamespace(
            stage="tune", folder=tmp_path / "runs", artifacts=tmp_path / "digits" / "artifacts"
        )
        asked = {"name": "wandb", "project": None, "mode": mode} | settings
        return tracking.open_tracker(SimpleNamespace(**asked), run, CONFIG, "seed-3")

    return open_with


def used(tracker):
    tracker.log(ROW)
    tracker.log({**ROW, "epoch": 2})
    tracker.finish()


def test_no_logger_imports_no_wandb_and_says_nothing(opened, capsys):
    used(opened(None, name="none"))
    assert capsys.readouterr().out == ""


def test_wandb_is_offline_in_the_run_s_folder_under_the_project_s_name(opened, tmp_path, capsys):
    fake = FakeWandb()
    used(opened(fake))
    (call,) = fake.calls
    assert call["mode"] == "offline" and call["dir"] == str(tmp_path / "runs")
    assert (call["project"], call["group"], call["name"]) == ("digits", "tune", "seed-3")
    assert call["settings"].init_timeout <= 20
    assert fake.rows == [ROW, {**ROW, "epoch": 2}, "finished"]
    assert capsys.readouterr().out == ""


def test_the_project_can_be_named(opened):
    fake = FakeWandb()
    opened(fake, project="mine")
    assert fake.calls[0]["project"] == "mine"


def test_the_configuration_goes_as_plain_values_without_what_may_hold_a_password(opened):
    fake = FakeWandb()
    opened(fake)
    found = fake.calls[0]["config"]
    assert found["optimizer"] == CONFIG["optimizer"] and found["stage"]["name"] == "tune"
    assert "secret" not in repr(found)
    assert "storage" in CONFIG["stage"]  # the run's own is left as it is


def test_wandb_that_is_not_installed_is_one_line(opened, capsys):
    used(opened(None))  # None in sys.modules: import raises ImportError
    (line,) = capsys.readouterr().out.splitlines()
    assert "not installed (pip install -e .[wandb]); going on without it" in line
    used(opened(None))
    assert capsys.readouterr().out == ""  # said once


def test_no_account_falls_back_to_offline(opened, capsys):
    fake = FakeWandb(logged_in=False)
    used(opened(fake, mode="online"))
    assert [call["mode"] for call in fake.calls] == ["offline"]
    assert len(fake.rows) == 3
    (line,) = capsys.readouterr().out.splitlines()
    assert line == "wandb online: no account (wandb login); trying offline."


def test_a_dead_network_falls_back_to_offline_and_is_not_waited_for_again(opened, capsys):
    fake = FakeWandb(online=RuntimeError("timed out\nConsider raising init_timeout"))
    for _ in range(3):
        used(opened(fake, mode="online"))
    assert [call["mode"] for call in fake.calls] == ["online", "offline", "offline", "offline"]
    (line,) = capsys.readouterr().out.splitlines()
    assert line == "wandb online: timed out; trying offline."


def test_a_full_disk_is_no_reason_to_stop(opened, capsys):
    fake = FakeWandb(offline=OSError("no space left"))
    used(opened(fake))
    assert fake.rows == []
    (line,) = capsys.readouterr().out.splitlines()
    assert line == "wandb offline: no space left; going on without it."


@pytest.mark.parametrize("what", ["log", "finish"])
def test_wandb_that_fails_on_the_way_is_left_alone_from_then_on(opened, capsys, what):
    fake = FakeWandb(**{what: ValueError("broken pipe")})
    used(opened(fake))
    (line,) = capsys.readouterr().out.splitlines()
    assert line == f"wandb could not {what} (broken pipe): going on without it."


def test_an_error_without_words_is_named_by_its_kind():
    assert tracking._reason(TimeoutError()) == "TimeoutError"
    assert tracking._reason(ValueError("one\ntwo")) == "one"


def test_an_interruption_is_no_failure_of_wandb(opened):
    with pytest.raises(KeyboardInterrupt):
        opened(FakeWandb(offline=KeyboardInterrupt()))


def test_a_stage_hands_its_epochs_to_the_tracker_and_ends_it(monkeypatch, tmp_path):
    """setup.train on six images: what fit measures reaches the tracker, a crash still ends it."""
    import numpy as np
    import torch

    from {{cookiecutter.project_slug}}.harness import loop
    from {{cookiecutter.project_slug}}.harness import settings as s
    from {{cookiecutter.project_slug}}.stages import setup
    from {{cookiecutter.project_slug}}.task import Task

    logger = s.LoggerConfig(name="wandb", project=None, mode="offline")
    config = s.Config(
        data=s.DataConfig(public=False),
        task=s.TaskConfig(metric="accuracy"),
        model=s.ModelConfig(name="Linear", params={}, wider={}),
        optimizer=s.OptimizerConfig("sgd", 0.1, [0.9, 0.99], 0.0, None, "constant", 0.0, 1),
        regularization=s.RegularizationConfig({}, 0.0, 0.0, 0.0, None, None),
        logger=logger,
        batch_size=4,
        precision="fp32",
    )
    y = torch.tensor([0, 1, 0, 1, 0, 1])
    rows = {"x": torch.randn(6, 1, 4, 4), "y": y, "id": torch.arange(6)}
    loaded = SimpleNamespace(
        records=SimpleNamespace(class_names=("a", "b")),
        task=Task(config.task, ("a", "b")),
        prior=np.array([0.5, 0.5]),
        train=rows,
        validation=rows,
    )
    fake, told = FakeWandb(), []
    monkeypatch.setitem(sys.modules, "wandb", fake)
    run = SimpleNamespace(
        stage="overfit",
        folder=tmp_path,
        artifacts=tmp_path / "artifacts",
        device=torch.device("cpu"),
    )
    options = {"seed": 3, "num_epochs": 2, "on_epoch": told.append, "announce": False}
    _, result = setup.train(config, loaded, run, **options)
    assert fake.rows == [*result.epochs, "finished"] and told == result.epochs
    assert fake.calls[0]["name"] == "seed-3"
    assert isinstance(result, loop.FitResult)
    rows["x"][0] = math.nan
    with pytest.raises(loop.NonFiniteLoss):
        setup.train(config, loaded, run, **options)
    assert fake.rows[-1] == "finished"
