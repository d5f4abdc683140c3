"""A process that has the libraries imported and forks for each script it is told to run.

What runs in the fork starts as in a fresh interpreter, seconds of imports later: hundreds of
launches cost a quarter of the time. One JSON line in, one out: see `Warm.run`.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib
import json
import os
import runpy
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path

# Imported and never used before the fork: no thread, no random number, no setting is made here.
LIBRARIES = (
    *("torch._inductor", "torch.optim.lr_scheduler", "safetensors.torch", "hydra", "rich.table"),
    *("matplotlib.figure", "matplotlib.backends.backend_agg", "PIL.Image", "scipy.stats"),
    *("sklearn.datasets", "sklearn.metrics", "sklearn.linear_model", "sklearn.neighbors"),
)


class Warm:
    """One such process. It runs one script at a time."""

    def __init__(self, environment: dict[str, str]):
        words = [sys.executable, __file__]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        self.process = subprocess.Popen(words, text=True, env=environment, **pipes)
        atexit.register(self.close)

    def run(self, words: Sequence[str], folder: Path, out: Path, err: Path, limit_s: float) -> dict:
        """`words` (a script and its arguments) in the folder, its words into the two files: code
        (negative: a signal), seconds (of CPU, without the imports), wall_s, timed_out. Raises
        RuntimeError if the process itself was killed."""
        asked = [list(words), str(folder), str(out), str(err), limit_s]
        print(json.dumps(asked), file=self.process.stdin, flush=True)
        answer = self.process.stdout.readline()
        if not answer:
            raise RuntimeError(f"The process that runs scripts has ended: {self.process.wait()}.")
        return json.loads(answer)

    def close(self) -> None:
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
        self.process.wait()
        self.process.stdout.close()


def serve() -> None:
    for name in LIBRARIES:
        importlib.import_module(name)
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # an answer is all that may stand on standard output
    for line in sys.stdin:
        print(json.dumps(run(*json.loads(line))), file=answers, flush=True)


def run(words: list[str], folder: str, out: str, err: str, limit_s: float) -> dict:
    """One script in a fork, with all that it started killed at the time limit."""
    started = time.perf_counter()
    child = os.fork()
    if child == 0:
        os._exit(_script(words, folder, out, err))
    late = False
    while not (ended := os.wait4(child, os.WNOHANG))[0]:
        if not late and time.perf_counter() - started > limit_s:
            late = True
            with contextlib.suppress(ProcessLookupError):  # it has just ended by itself
                os.killpg(child, signal.SIGKILL)
        time.sleep(0.01)
    _, status, usage = ended
    return {
        "code": os.waitstatus_to_exitcode(status),
        "seconds": round(usage.ru_utime + usage.ru_stime, 2),
        "wall_s": round(time.perf_counter() - started, 2),
        "timed_out": late,
    }


def _script(words: list[str], folder: str, out: str, err: str) -> int:
    """In the fork: become the script. Its exit code, as the interpreter would have it."""
    os.setsid()
    os.chdir(folder)
    for place, flags, number in ((os.devnull, os.O_RDONLY, 0), (out, None, 1), (err, None, 2)):
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC if flags is None else flags
        os.dup2(os.open(place, flags), number)
    sys.stdin, sys.stdout, sys.stderr = (os.fdopen(n, "w" if n else "r") for n in range(3))
    script = Path(folder, words[0])
    sys.argv, sys.path[0] = [str(script), *words[1:]], str(script.parent)
    code = 0
    try:
        runpy.run_path(str(script), run_name="__main__")
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else 0 if stop.code is None else 1
    except BaseException:
        traceback.print_exc()
        code = 1
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    return code


if __name__ == "__main__":
    serve()
