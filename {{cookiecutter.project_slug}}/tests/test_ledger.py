"""harness/ledger.py: every opening of the test set is a line, a second look is counted."""

from datetime import datetime, timedelta, timezone

import pytest

from {{cookiecutter.project_slug}}.harness import files, ledger


def opened(path, **change):
    about = {"weights": "w1", "ids": "i1", "task": "t1", "command": "python run.py"} | change
    return ledger.open_seal(path, **about)


def test_the_first_opening_is_written_down_and_has_none_before_it(tmp_path):
    path = tmp_path / "artifacts" / "test_ledger.jsonl"
    assert opened(path) == []
    (row,) = files.read_jsonl(path)
    assert row["command"] == "python run.py" and row["weights"] == "w1"
    age = datetime.now(timezone.utc) - datetime.fromisoformat(row["time"])
    assert timedelta(0) <= age < timedelta(minutes=1)


def test_the_same_weights_on_the_same_rows_under_the_same_task_are_no_second_look(tmp_path):
    path = tmp_path / "ledger.jsonl"
    opened(path)
    assert opened(path, command="python run.py again") == []
    assert len(files.read_jsonl(path)) == 2  # but a line all the same


@pytest.mark.parametrize("what", ["weights", "ids", "task"])
def test_another_look_at_anything_else_is_counted_from_then_on(tmp_path, what):
    path = tmp_path / "ledger.jsonl"
    opened(path)
    (before,) = opened(path, **{what: "other"})
    assert before[what] != "other"
    assert len(opened(path, **{what: "third"})) == 2
    assert len(opened(path)) == 2  # the first again: the other two looked at something else


def test_old_lines_are_never_changed(tmp_path):
    path = tmp_path / "ledger.jsonl"
    opened(path)
    before = path.read_bytes()
    opened(path, weights="w2")
    assert path.read_bytes().startswith(before)


def test_a_line_that_cannot_be_written_opens_nothing(tmp_path, monkeypatch):
    path = tmp_path / "ledger.jsonl"
    opened(path)

    def broken(*arguments):
        raise OSError("disk full")

    monkeypatch.setattr(files.os, "replace", broken)
    with pytest.raises(OSError, match="disk full"):
        opened(path, weights="w2")
    assert len(files.read_jsonl(path)) == 1
