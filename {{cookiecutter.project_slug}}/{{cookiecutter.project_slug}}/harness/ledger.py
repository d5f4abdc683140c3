"""The sealed test set's ledger: every opening is a line, written before the rows are read."""

from __future__ import annotations

from datetime import datetime, timezone
from pathlib import Path

from . import files

WHAT = ("weights", "ids", "task")  # another opening with any of these changed is a second look


def open_seal(path: Path, *, weights: str, ids: str, task: str, command: str) -> list[dict]:
    """Write the line of this opening; returns the earlier openings that looked at something else.

    `weights`, `ids` and `task` are digests. The same weights on the same rows under the same task
    give the same number, so that reading it again is no second look. Any other earlier opening may
    have steered what is measured now: the number is then optimistic.
    """
    entry = {
        "time": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "weights": weights,
        "ids": ids,
        "task": task,
        "command": command,
    }
    before = files.read_jsonl(path) if path.exists() else []
    lines = [files.canonical(row).decode() for row in [*before, entry]]
    files.write_text(path, "\n".join(lines) + "\n")
    return [row for row in before if any(row[key] != entry[key] for key in WHAT)]
