"""The generated project comes with tests of its own: they pass in a fresh bake. Its planted faults
shut their checks, and no longer do once a limit is useless."""

import os
import subprocess
import sys

USELESS = {
    "split_parity: {max_difference: 0.0}": "split_parity: {max_difference: 1.0e+9}",
    "min_ratio: 3.0e-5, max_ratio: 0.1": "min_ratio: 0, max_ratio: 1.0e+9",
}
LOOSENED = "validation_normalised_differently or tiny_rate"


def run_tests(project, *words):
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *words],
        cwd=project,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        encoding="utf-8",
    )


def test_the_tests_of_a_fresh_project_pass(fresh):
    done = run_tests(fresh)
    assert done.returncode == 0, done.stdout[-4000:]
    assert " passed" in done.stdout


def test_planted_faults_shut_their_checks_until_the_limits_are_useless(fresh):
    asked = ("-m", "faults", "-k", LOOSENED)
    done = run_tests(fresh, *asked)
    assert done.returncode == 0, done.stdout[-4000:]
    assert "2 passed" in done.stdout
    config = fresh / "configs" / "config.yaml"
    text = config.read_text(encoding="utf-8")
    for strict, useless in USELESS.items():
        assert text.count(strict) == 1
        text = text.replace(strict, useless)
    config.write_text(text, encoding="utf-8")
    done = run_tests(fresh, *asked)
    assert done.returncode == 1, done.stdout[-4000:]
    assert "2 failed" in done.stdout
