import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from {{cookiecutter.project_slug}}.harness import files, lock
from {{cookiecutter.project_slug}}.harness.gates import Refused
from {{cookiecutter.project_slug}}.harness.lock import StageLock

HOLD = """
import sys, time
from pathlib import Path
from {package}.harness.lock import StageLock
with StageLock(Path(sys.argv[1]), "overfit", beat_s=0.05):
    print("held", flush=True)
    sys.stdin.read()
"""
RACE = """
import sys, time
from pathlib import Path
from {package}.harness.gates import Refused
from {package}.harness.lock import StageLock
folder, log, name, others = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3], int(sys.argv[4])
(log / f"{name}.ready").touch()
while len(list(log.glob("*.ready"))) <= others:
    time.sleep(0.01)
try:
    with StageLock(folder, "overfit", beat_s=0.05):
        (log / f"{name}.in").touch()
        end = time.monotonic() + 60
        while len(list(log.glob("*.refused"))) < others and time.monotonic() < end:
            time.sleep(0.01)
except Refused:
    (log / f"{name}.refused").touch()
"""


def launch(code, *arguments, **more):
    package = lock.__name__.partition(".")[0]
    return subprocess.Popen(
        [sys.executable, "-c", code.replace("{package}", package), *map(str, arguments)],
        cwd=Path(lock.__file__).parents[2],
        **more,
    )


def put_back(path):
    """Make a file ten minutes old."""
    past = time.time() - 600
    os.utime(path, (past, past))


def wait_until(true, seconds=30.0):
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end
        time.sleep(0.01)


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "runs" / "locks"


@pytest.fixture
def dead(folder):
    """The lock that a launch killed ten minutes ago left behind."""
    path = folder / "overfit"
    owner = {"host": "far", "process": 7, "started": "then", "key": "k"}
    files.write_json(path / "owner.json", owner)
    (path / "heartbeat").touch()
    put_back(path / "heartbeat")
    return path


def test_nothing_is_left_when_the_stage_has_ended(folder, tmp_path):
    with StageLock(folder, "overfit") as held:
        assert sorted(p.name for p in held.path.iterdir()) == ["heartbeat", "owner.json"]
        assert held.held
        assert files.read_json(held.path / "owner.json")["process"] == os.getpid()
    assert list(tmp_path.iterdir()) == []


def test_nothing_is_left_after_an_error_and_what_was_there_stays(folder, tmp_path):
    (tmp_path / "runs").mkdir()
    with pytest.raises(RuntimeError), StageLock(folder, "overfit"):
        raise RuntimeError
    assert [p.name for p in tmp_path.rglob("*")] == ["runs"]


def test_folders_made_by_a_refused_launch_are_removed(folder, tmp_path, monkeypatch):
    def refuse(self):
        folder.mkdir(parents=True)  # as when the holder ends while the second launch looks at it
        raise Refused

    monkeypatch.setattr(StageLock, "_acquire", refuse)
    with pytest.raises(Refused):
        StageLock(folder, "overfit").__enter__()
    assert list(tmp_path.iterdir()) == []


def test_two_stages_may_run_at_once(folder):
    with StageLock(folder, "overfit"), StageLock(folder, "tune"):
        assert len(list(folder.iterdir())) == 2


def test_another_process_is_refused_by_name_and_leaves_no_file(folder, tmp_path):
    holder = launch(HOLD, folder, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert holder.stdout.readline() == "held\n"
        before = sorted(tmp_path.rglob("*"))
        with pytest.raises(Refused, match=f"already running: process {holder.pid} on .+last heard"):
            StageLock(folder, "overfit").__enter__()
        assert sorted(tmp_path.rglob("*")) == before
    finally:
        holder.communicate("")
    assert list(tmp_path.iterdir()) == []
    with StageLock(folder, "overfit"):
        pass


def test_the_lock_of_a_killed_process_is_taken_over_when_its_heartbeat_has_stopped(folder, capsys):
    holder = launch(HOLD, folder, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert holder.stdout.readline() == "held\n"
    holder.kill()
    holder.communicate()
    with pytest.raises(Refused, match=r"if it was killed, run again in \d+ s"):
        StageLock(folder, "overfit").__enter__()
    time.sleep(0.3)
    with StageLock(folder, "overfit", stopped_s=0.2) as taken:
        assert taken.held
    assert f"Took over the lock of 'overfit': process {holder.pid}" in capsys.readouterr().out
    assert not folder.exists()


def test_a_living_holder_keeps_its_lock_however_long_it_runs(folder):
    with StageLock(folder, "overfit", beat_s=0.05) as held:
        put_back(held.path / "heartbeat")
        wait_until(lambda: StageLock(folder, "overfit")._age_s() < 30)
        with pytest.raises(Refused):
            StageLock(folder, "overfit").__enter__()


def test_the_clock_of_the_disk_decides_not_the_one_of_this_machine(folder, dead, monkeypatch):
    monkeypatch.setattr(time, "time", lambda: 0.0)
    with StageLock(folder, "overfit") as taken:
        assert taken.held


def test_a_lock_that_was_never_signed_is_refused_then_taken_over(folder):
    path = folder / "overfit"
    path.mkdir(parents=True)
    with pytest.raises(Refused, match=r"process \? on an unknown host"):
        StageLock(folder, "overfit").__enter__()
    put_back(path)
    with StageLock(folder, "overfit") as taken:
        assert taken.held
    assert not folder.exists()


def test_a_launch_that_saw_a_dead_lock_cannot_move_the_one_that_replaced_it(
    folder, dead, monkeypatch
):
    """Two see the dead lock; the slower one acts on it after the faster one has taken over."""
    slow, seen, real = StageLock(folder, "overfit"), lock._owner(dead), lock._owner
    move, moved = os.rename, []
    with StageLock(folder, "overfit") as fast:
        monkeypatch.setattr(slow, "_age_s", lambda: 600.0)
        monkeypatch.setattr(lock, "_owner", lambda path: seen if path == dead else real(path))
        monkeypatch.setattr(os, "rename", lambda *paths: moved.append(move(*paths)))
        slow._clear_or_refuse()
        monkeypatch.undo()
        assert fast.held
        assert moved == []
    assert not folder.exists()


def test_a_living_lock_moved_by_mistake_is_put_back(folder, dead, monkeypatch):
    """As before, but the grave of the dead lock is gone: the faster one's successor holds it."""
    slow, seen, real = StageLock(folder, "overfit"), lock._owner(dead), lock._owner
    with StageLock(folder, "overfit"):
        pass
    with StageLock(folder, "overfit") as successor:
        answers = [seen]
        monkeypatch.setattr(slow, "_age_s", lambda: 600.0)
        monkeypatch.setattr(lock, "_owner", lambda path: answers.pop() if answers else real(path))
        slow._clear_or_refuse()
        monkeypatch.undo()
        assert successor.held
    assert not folder.exists()


def test_of_several_launches_that_find_a_dead_lock_one_gets_it(folder, dead, tmp_path):
    log = tmp_path / "log"
    log.mkdir()
    racers = [launch(RACE, folder, log, n, 3, stdout=subprocess.DEVNULL) for n in range(4)]
    assert [racer.wait(timeout=90) for racer in racers] == [0] * 4
    assert len(list(log.glob("*.in"))) == 1
    assert len(list(log.glob("*.refused"))) == 3
    assert not folder.exists()


def test_a_holder_that_lost_its_lock_says_so_and_leaves_the_new_one_alone(folder, capsys):
    with StageLock(folder, "overfit", beat_s=0.05) as sleeper:
        files.write_json(sleeper.path / "owner.json", {"key": "another"})
        wait_until(lambda: not sleeper._thread.is_alive())
        assert not sleeper.held
    assert "was taken over by another launch" in capsys.readouterr().out
    assert (folder / "overfit" / "owner.json").exists()
