"""Start a git repository and say what to type next.

A hook that fails makes cookiecutter delete the new project, so nothing in here may: no git, a git
that refuses and an output that nobody reads are all fine.
"""

import os
import subprocess
import sys
from pathlib import Path

NEXT = """
{note}Next:

    cd {folder}
    make install
    make walk

Without make, after the same cd:

    {python} -m venv .venv
    {venv_python} -m pip install -c constraints.txt -e ".[test]"
    {venv_python} run.py
"""


def init_git(project):
    """Make a repository with the branch main; a sentence for the reader where that did not work."""
    if (project / ".git").exists():
        return ""
    # Inside a git hook or alias, GIT_DIR and the like would point at somebody else's repository.
    environment = {key: value for key, value in os.environ.items() if not key.startswith("GIT_")}
    command = ["git", "-c", "init.defaultBranch=main", "init", "--quiet"]
    try:
        done = subprocess.run(
            command,
            cwd=project,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            timeout=60,
        )
    except (OSError, subprocess.SubprocessError) as error:
        return f"No git repository was made ({type(error).__name__}). Later: git init\n"
    return f"git init failed with {done.returncode}. Later: git init\n" if done.returncode else ""


def folder_to_enter(project):
    """The project as typed from the shell's folder, where that is known and above it."""
    shell = os.environ.get("PWD", "")
    if shell and Path(shell).resolve() in project.parents:
        project = project.relative_to(Path(shell).resolve())
    text = str(project)
    return f'"{text}"' if " " in text else text


def say(text):
    """Print, or not: a closed pipe or a terminal that lacks a letter must not undo the project."""
    try:
        sys.stdout.reconfigure(errors="backslashreplace")
        print(text, flush=True)
    except (AttributeError, OSError, ValueError):
        sys.stdout = None


if __name__ == "__main__":
    here, windows = Path.cwd().resolve(), os.name == "nt"
    say(
        NEXT.format(
            note=init_git(here),
            folder=folder_to_enter(here),
            python="python" if windows else "python3",
            venv_python=".venv\\Scripts\\python" if windows else ".venv/bin/python",
        )
    )
