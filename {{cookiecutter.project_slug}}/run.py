"""Ask the gate, run the stage, record the evidence.

python run.py                  the board: where you stand and what to run next
python run.py stage=overfit    one stage; python run.py --help tells the rest
"""

import sys
from pathlib import Path

import hydra

from {{cookiecutter.project_slug}} import data
from {{cookiecutter.project_slug}}.harness import launch
from {{cookiecutter.project_slug}}.harness.gates import Project
from {{cookiecutter.project_slug}}.stages import ORDER

PACKAGE = "{{cookiecutter.project_slug}}"
PROJECT = Project(Path(__file__).resolve().parent, PACKAGE, ORDER)


@hydra.main(version_base="1.3", config_path="configs", config_name="config")
def app(composed):
    launch.run(composed, PROJECT, data)


if __name__ == "__main__":
    sys.exit(launch.main(app, PROJECT, data))
