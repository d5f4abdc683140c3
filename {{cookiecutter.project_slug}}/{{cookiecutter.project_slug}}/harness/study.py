"""The study: which trials there are and what each found. Optuna owns it, Hydra launches trials.

A trial is known by its index, and in random search its parameters follow from (seed, index) alone.
One process, a range of indices per machine, or a resumed launch therefore try the same points.
"""

from __future__ import annotations

import hashlib
import math
import re
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from . import files
from .space import distributions, validate_space

STARTUP_TRIALS = 5  # complete ones, before a median means anything
NUM_OPENINGS = 5  # tries: of two processes that make one database's tables, one loses the race
WAIT_S = 0.5
SQLITE_WAIT_S = 60  # how long a writer waits for another one; sqlite's own 5 s are too few


def study_name(evidence: dict, space: dict) -> str:
    """A name that changes with all that decides a trial's value, so that edited code, data or space
    never meets old trials. What else decides it (seed, epochs) belongs into `evidence`.

    Raises ValueError for a space that cannot be searched.
    """
    validate_space(space)
    return "tune-" + files.sha256_json({"evidence": evidence, "space": space})[:12]


# ---- the store ----------------------------------------------------------------------------------


def open_study(
    name: str, storage: str | None = None, *, folder: Path, direction: str = "minimize"
) -> Any:
    """The study called `name`, made if it is new; several processes may open it at once.

    Without `storage` it is the journal file FOLDER/NAME.log, otherwise a database URL. Raises
    ValueError in one line when the storage cannot be opened.
    """
    path = folder / f"{name}.log"
    for last in (*[False] * (NUM_OPENINGS - 1), True):
        try:
            return _optuna().create_study(
                study_name=name,
                storage=_journal(path) if storage is None else _database(storage),
                direction=direction,
                load_if_exists=True,
            )
        except Exception as error:  # each database driver has errors of its own
            if last or not _may_pass(error):
                raise ValueError(_refusal(storage, path, error)) from error
            time.sleep(WAIT_S)


def _may_pass(error: Exception) -> bool:
    """Whether another process making the same tables can be the reason."""
    from optuna.exceptions import StorageInternalError
    from sqlalchemy.exc import DBAPIError

    return isinstance(error, (DBAPIError, StorageInternalError))


def _journal(path: Path) -> Any:
    from optuna.storages import JournalStorage
    from optuna.storages.journal import JournalFileBackend, JournalFileOpenLock

    path.parent.mkdir(parents=True, exist_ok=True)
    # Optuna's default lock is a symbolic link, which Windows allows to administrators only.
    lock = JournalFileOpenLock(str(path))
    if path.exists():
        _drop_half_line(path, lock)
    return JournalStorage(JournalFileBackend(str(path), lock_obj=lock))


def _drop_half_line(path: Path, lock: Any) -> None:
    """A power cut can leave half a line; the next one, written behind it, would end the study."""
    lock.acquire()
    try:
        with path.open("r+b") as journal:
            journal.truncate(journal.read().rfind(b"\n") + 1)
    finally:
        lock.release()


def _database(url: str) -> Any:
    from optuna.storages import RDBStorage

    if not url.startswith("sqlite"):
        return RDBStorage(url)
    arguments = {"timeout": SQLITE_WAIT_S}
    return RDBStorage(url, engine_kwargs={"connect_args": arguments})


def _refusal(storage: str | None, path: Path, error: Exception) -> str:
    reason = (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")
    if storage is None:
        return f"The study {path} cannot be read ({reason}). Move the file away to start it anew."
    url = re.sub(r"://[^@/]*@", "://***@", storage)  # a password must not reach a log
    remedy = "Check the URL, or leave stage.storage empty for a file below runs/."
    if isinstance(error, ImportError):
        remedy = (
            "Install the database's Python driver (for postgresql: pip install psycopg2-binary)."
        )
    return f"stage.storage={url} cannot be opened: {reason.replace(storage, url)}. {remedy}"


def _optuna() -> Any:
    import optuna

    optuna.logging.set_verbosity(optuna.logging.WARNING)  # a line per trial is the stage's to print
    return optuna


# ---- trials -------------------------------------------------------------------------------------


def run_trial(
    study: Any,
    index: int,
    space: dict[str, dict],
    seed: int,
    objective: Callable[[dict, Callable[[int, float], None]], float],
    *,
    sampler: str = "random",
    warmup_epochs: int | None = None,
) -> dict:
    """The row (see `table`) of trial `index`, run unless it has finished before.

    `objective(parameters, report) -> float` calls `report(epoch, value)`. With `warmup_epochs` this
    raises TrialPruned from that epoch on, once the trial's best value is above the median of five
    or more complete trials at that epoch; with None it never does. A quarter of the epochs is a
    good start: replayed on 240 real curves of 25 epochs, 20 at a time, 6 saved 39 % of the epochs
    and missed the best loss by 0.0002; the learning rate was detected as what matters in 208 of 300
    studies (247 without pruning, 166 with 3 epochs).

    A trial whose loss is not finite, or that does not fit into the device's memory, has failed. Any
    other error is a bug: it is raised, and the trial counts as never run.
    """
    for row in table(study):
        if row["index"] == index:
            return row
    optuna = _optuna()
    study.sampler = _sampler(sampler, seed, index)
    study.pruner = optuna.pruners.NopPruner()
    if warmup_epochs is not None:
        study.pruner = optuna.pruners.MedianPruner(STARTUP_TRIALS, warmup_epochs)
    trial = study.ask(distributions(space))
    trial.set_user_attr("index", index)
    _attempt(study, trial, objective)
    return next(row for row in table(study) if row["index"] == index)


def _attempt(study: Any, trial: Any, objective: Callable) -> None:
    """Run one trial and tell the study how it ended."""
    from optuna import TrialPruned
    from optuna.trial import TrialState

    try:
        value = _finite(objective(dict(trial.params), _reporter(trial)), "the value")
    except TrialPruned:
        study.tell(trial, state=TrialState.PRUNED)
    except _expected_failures() as error:
        trial.set_user_attr("because", f"{type(error).__name__}: {error}")
        study.tell(trial, state=TrialState.FAIL)
    except BaseException:
        trial.set_user_attr("crashed", True)  # not an outcome: the index is free again
        study.tell(trial, state=TrialState.FAIL)
        raise
    else:
        study.tell(trial, value)


def _reporter(trial: Any) -> Callable[[int, float], None]:
    from optuna import TrialPruned

    def report(epoch: int, value: float) -> None:
        trial.report(_finite(value, f"the value of epoch {epoch}"), epoch)
        if trial.should_prune():
            raise TrialPruned(f"above the median at epoch {epoch}")

    return report


def _finite(value: float, what: str) -> float:
    from .instruments import NonFiniteLoss

    if not math.isfinite(value):
        raise NonFiniteLoss(f"{what} is {value}")
    return float(value)


def _expected_failures() -> tuple[type[BaseException], ...]:
    from torch import OutOfMemoryError

    from .instruments import NonFiniteLoss

    return (NonFiniteLoss, OutOfMemoryError)


def _sampler(kind: str, seed: int, index: int) -> Any:
    """A generator of its own per trial: a resumed study must not draw its first points again."""
    from optuna import samplers

    own_seed = int(hashlib.sha256(f"{seed}:{index}".encode()).hexdigest()[:8], 16)
    if kind == "random":
        return samplers.RandomSampler(seed=own_seed)
    if kind == "tpe":  # constant_liar: trials still running elsewhere repel, so none is tried twice
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # "experimental" in Optuna 4; the versions are pinned
            return samplers.TPESampler(seed=own_seed, constant_liar=True)
    raise ValueError(f"stage.sampler={kind!r} is not one of random, tpe.")


# ---- what was found -----------------------------------------------------------------------------


def table(study: Any) -> list[dict]:
    """Finished trials, one per index and sorted by it: {index, state, value, epochs, parameters,
    because}. `state` is complete, pruned (value: the last reported) or failed (value: None).

    A trial that was killed or crashed is not in it. Where two processes ran one index, the first
    complete one counts, then the first pruned one.
    """
    from optuna.trial import TrialState

    states = {
        TrialState.COMPLETE: "complete",
        TrialState.PRUNED: "pruned",
        TrialState.FAIL: "failed",
    }
    rank = {name: place for place, name in enumerate(states.values())}
    chosen: dict[int, tuple] = {}
    for trial in study.get_trials(deepcopy=False, states=tuple(states)):
        index = trial.user_attrs.get("index")
        if index is None or trial.user_attrs.get("crashed"):
            continue
        row = _row(index, states[trial.state], trial)
        entry = (rank[row["state"]], trial.number, row)
        chosen[index] = min(chosen.get(index, entry), entry, key=lambda e: e[:2])
    return [chosen[index][2] for index in sorted(chosen)]


def _row(index: int, state: str, trial: Any) -> dict:
    last = max(trial.intermediate_values, default=0)
    value = {"complete": trial.value, "pruned": trial.intermediate_values.get(last)}.get(state)
    parameters = {key: trial.params[key] for key in sorted(trial.params)}
    because = trial.user_attrs.get("because", "")
    return {
        "index": index,
        "state": state,
        "value": value,
        "epochs": last,
        "parameters": parameters,
        "because": because,
    }


def missing_indices(study: Any, num_trials: int) -> list[int]:
    """Which of the trials 0 to num_trials - 1 have not finished: never run, killed or crashed."""
    finished = {row["index"] for row in table(study)}
    return [index for index in range(num_trials) if index not in finished]


def best(rows: list[dict]) -> dict:
    """The complete trial of the lowest value; of equals, the lowest index."""
    complete = [row for row in rows if row["state"] == "complete"]
    if not complete:
        failed = sum(row["state"] == "failed" for row in rows)
        raise ValueError(
            f"no trial finished: of {len(rows)}, {failed} failed and {len(rows) - failed} were "
            "pruned. Look at why in the table of trials, narrow stage.space (a lower learning rate "
            "first), then run: python run.py stage=tune"
        )
    return min(complete, key=lambda row: (row["value"], row["index"]))
