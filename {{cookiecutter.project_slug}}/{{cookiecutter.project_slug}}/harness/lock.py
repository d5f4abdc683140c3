"""One launch of a stage at a time, across processes and across machines on a shared disk."""

from __future__ import annotations

import contextlib
import os
import platform
import shutil
import threading
import uuid
from datetime import datetime, timezone
from pathlib import Path

from . import files
from .gates import Refused

BEAT_S = 5.0  # how often the holder touches its heartbeat
STOPPED_S = 30.0  # six beats missed: the holder is taken for dead


class StageLock:
    """Context manager that holds runs/locks/<stage>/ while the stage runs.

    Entering raises Refused, naming the holder, while another launch is alive. The lock of a launch
    that was killed is taken over, with a printed line. Nothing is left after leaving.
    """

    def __init__(
        self, folder: Path, stage: str, *, beat_s: float = BEAT_S, stopped_s: float = STOPPED_S
    ) -> None:
        self.folder, self.stage = folder, stage
        self.path = folder / stage
        self.beat_s, self.stopped_s = beat_s, stopped_s
        self._key = uuid.uuid4().hex  # says which lock is ours: a path alone could be another's
        self._made: list[Path] = []
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    @property
    def held(self) -> bool:
        """Still ours? False after a pause so long (a laptop asleep) that another took it over."""
        return _owner(self.path).get("key") == self._key

    def __enter__(self) -> StageLock:
        self._made = [p for p in (self.folder, *self.folder.parents) if not p.exists()]
        try:
            self._acquire()
        except BaseException:
            self._remove_made()
            raise
        self._thread = threading.Thread(target=self._beat, name="heartbeat", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        if self._thread is not None:
            self._thread.join()
        if self.held:
            self._release()
        self._remove_made()

    def _acquire(self) -> None:
        while True:
            try:
                self.path.mkdir(parents=True)  # atomic: of two launches one gets FileExistsError
            except FileExistsError:
                self._clear_or_refuse()
                continue
            except FileNotFoundError:  # another launch just removed the empty parent
                continue
            return self._sign()

    def _sign(self) -> None:
        started = datetime.now(timezone.utc).isoformat(timespec="seconds")
        owner = {"host": platform.node(), "process": os.getpid(), "started": started}
        (self.path / "heartbeat").touch()
        files.write_json(self.path / "owner.json", {**owner, "key": self._key})

    def _release(self) -> None:
        try:
            os.rename(self.path, self._grave(self._key))  # in one step: nobody sees half a lock
        except OSError:  # Windows, while another launch reads it
            shutil.rmtree(self.path, ignore_errors=True)
        for grave in self.folder.glob(f"{self.stage}.*"):
            shutil.rmtree(grave, ignore_errors=True)

    def _grave(self, key: str) -> Path:
        return self.folder / f"{self.stage}.{key}"

    def _clear_or_refuse(self) -> None:
        """Move a dead launch's lock out of the way, or raise Refused for a living one's."""
        owner, age_s = _owner(self.path), self._age_s()
        if age_s is None:
            return  # released this moment: try again
        who = f"process {owner.get('process', '?')} on {owner.get('host', 'an unknown host')}"
        if age_s <= self.stopped_s:
            wait_s = self.stopped_s - age_s
            raise Refused(
                f"Stage '{self.stage}' is already running: {who}, last heard of {age_s:.0f} s ago "
                f"({self.path}).\n"
                f"Wait for it to end; if it was killed, run again in {wait_s:.0f} s."
            )
        # The grave is named after the dead lock, and a folder cannot be moved onto a full one, so
        # of several launches that saw it dead only one can move it, and none a living successor.
        grave = self._grave(owner.get("key", "unsigned"))
        try:
            os.rename(self.path, grave)
        except OSError:
            return  # another launch was faster: look again
        if _owner(grave).get("key") != owner.get("key"):
            os.rename(grave, self.path)  # it was released and taken in between: put it back
            return
        print(f"Took over the lock of '{self.stage}': {who} was last heard of {age_s:.0f} s ago.")

    def _age_s(self) -> float | None:
        """Seconds since the holder's last beat, by the clock of the disk: those of two machines
        may disagree. None when the lock is gone."""
        probe = self.folder / f".{uuid.uuid4().hex}"
        try:
            probe.touch()
            now = probe.stat().st_mtime
            return max(0.0, now - _last_beat(self.path))
        except FileNotFoundError:
            return None
        finally:
            probe.unlink(missing_ok=True)

    def _beat(self) -> None:
        while not self._ended.wait(self.beat_s):
            if _owner(self.path).get("key", self._key) != self._key:
                print(f"The lock of '{self.stage}' was taken over by another launch.")
                return
            with contextlib.suppress(OSError):  # a shared disk may be away for a moment
                os.utime(self.path / "heartbeat")

    def _remove_made(self) -> None:
        """Remove the lock folder, and parents made for it, as far as they are empty."""
        for path in dict.fromkeys([self.folder, *self._made]):
            try:
                path.rmdir()
            except OSError:
                return


def _owner(path: Path) -> dict:
    """Who signed a lock; empty while it is being taken or released."""
    try:
        return files.read_json(path / "owner.json")
    except (OSError, ValueError):
        return {}


def _last_beat(path: Path) -> float:
    """Time of the last beat; of the folder itself while the lock is not signed yet."""
    try:
        return (path / "heartbeat").stat().st_mtime
    except FileNotFoundError:
        return path.stat().st_mtime
