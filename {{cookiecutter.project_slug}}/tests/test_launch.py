"""What run.py answers before anything is trained: the board, refusals, and bad input."""

import pytest
from command_line import ORDER, copy_project, ended, files_below, launch

from {{cookiecutter.project_slug}}.harness import record


@pytest.fixture(scope="module")
def fresh(tmp_path_factory):
    """A copy without evidence. No launch in here may leave a file, so all tests share it."""
    return copy_project(tmp_path_factory.mktemp("fresh") / "p")


@pytest.fixture(autouse=True)
def nothing_is_left(fresh):
    before = files_below(fresh)
    yield
    assert files_below(fresh) == before


def test_without_a_stage_the_board_is_printed(fresh):
    text = ended(launch(fresh)).stdout
    rows = [line.split()[:2] for line in text.splitlines() if line.startswith(ORDER)]
    assert rows == [[stage, "missing"] for stage in ORDER]
    assert text.strip().endswith("Next. Run: python run.py stage=data_audit")


@pytest.mark.parametrize("stage", ORDER[1:])
def test_a_stage_is_refused_before_its_turn(fresh, stage):
    done = ended(launch(fresh, f"stage={stage}"), 4)
    assert done.stderr.startswith(f"Stage '{stage}' is locked: ")
    assert done.stderr.strip().endswith("Run: python run.py stage=data_audit")
    assert done.stdout == ""


def test_the_command_to_run_next_repeats_what_was_said_about_data_and_model(fresh):
    said = ["model.params.width=8", "seed=3", "data.split.seed=1"]
    done = ended(launch(fresh, "stage=tune", *said), 4)
    command = "python run.py stage=data_audit model.params.width=8 data.split.seed=1"
    assert done.stderr.strip().endswith(command)
    assert ended(launch(fresh, *said)).stdout.strip().endswith(command)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["stage=overfitt"], "Nearest: stage=overfit"),
        (["stage=overfit", "optimizer=sdg"], "Nearest: optimizer=sgd"),
        (["stage=overfit", "optimizer.lrr=1"], "Nearest: 'optimizer.lr'"),
        (["stage=overfit", "+stage.num_epoch=1"], "Nearest: 'stage.num_epochs'"),
        (["stage=overfit", "stage.limits.max_loss=1"], "'stage.limits.max_train_loss'"),
        (["stage=overfit", "stage.num_epochs=few"], "num_epochs: Value 'few'"),
        (["stage=overfit", "num_epochs=1"], "Nearest: 'stage.num_epochs'"),
        (["device=gpu"], "device=gpu is none of auto, cuda, mps, cpu"),
        (["seed=-1"], "must be between 0 and"),
        (["seed=1,2"], "-m sweeps over the values"),
        (["data.statement.because=it's"], "needs quotes of its own"),
        (["-m", "stage=data_audit,skeleton"], "make walk"),
        (["-m", "seed=0,1"], "-m needs a stage"),
    ],
)
def test_bad_input_is_one_line_with_the_way_out(fresh, arguments, told):
    done = ended(launch(fresh, *arguments), 1)
    assert told in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("waivers:\n  - check: train_loss\n", "has no reason"),
        ("waivers:\n  - chek: train_loss\n    reason: known\n", "did you mean check?"),
        ("waivers:\n  - check: a\n    reason: b\n    expires: soon\n", "write it as 2030-12-31"),
        ("waivers: train_loss\n", "needs the key waivers with a list"),
        ("- check: train_loss\n", "needs the key waivers with a list"),
        ("waivers:\n  - check: [\n", "configs/waivers.yaml is no YAML"),
    ],
)
def test_a_malformed_waiver_is_one_line_of_bad_input(fresh, text, told):
    path = fresh / "configs" / "waivers.yaml"
    shipped = path.read_bytes()
    path.write_text(text, encoding="utf-8")
    try:
        done = ended(launch(fresh, "stage=data_audit"), 1)
        assert told in done.stderr
        assert "configs/waivers.yaml: configs/waivers.yaml" not in done.stderr
        assert len(done.stderr.strip().splitlines()) == 1
    finally:
        path.write_bytes(shipped)


def test_a_stage_never_overrides_what_was_chosen_on_the_command_line(fresh):
    text = ended(launch(fresh, "stage=overfit", "optimizer=sgd", "--cfg", "job")).stdout
    assert "name: sgd" in text


def test_help_and_the_whole_configuration_are_printed(fresh):
    assert "python run.py stage=overfit" in ended(launch(fresh, "--help")).stdout
    text = ended(launch(fresh, "stage=tune", "--cfg", "job", "--resolve")).stdout
    assert "num_trials:" in text
    assert "$" + "{" not in text


# ---- the folder of a launch ---------------------------------------------------------------------


def test_two_launches_in_one_moment_get_two_folders(tmp_path):
    made = [record.make_folder(tmp_path, "tune") for _ in range(3)]
    assert len(set(made)) == 3
    assert {path.parent for path in made} == {tmp_path / "tune"}


def test_a_launch_that_did_nothing_is_forgotten_and_one_that_did_is_kept(tmp_path):
    done, nothing = (run_in(record.make_folder(tmp_path, "tune")) for _ in range(2))
    (done.folder / "history.jsonl").touch()
    for run in (done, nothing):
        record.forget(run)
    assert done.folder.exists()
    assert not nothing.folder.exists()


def run_in(folder):
    (folder / "config.json").touch()
    root = folder.parents[1]
    return record.Run("tune", "recorded", folder, root / "artifacts", root, device=None)


def test_a_device_that_is_not_there_is_never_replaced_by_another(monkeypatch):
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert record.pick_device("cpu").type == "cpu"
    with pytest.raises(ValueError, match="device=cuda is not available here; there is "):
        record.pick_device("cuda")
