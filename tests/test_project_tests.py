"""The generated project comes with tests of its own: they pass in a fresh bake."""

import os
import subprocess
import sys


def test_the_tests_of_a_fresh_project_pass(fresh):
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"],
        cwd=fresh,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        encoding="utf-8",
    )
    assert done.returncode == 0, done.stdout[-4000:]
    assert " passed" in done.stdout
