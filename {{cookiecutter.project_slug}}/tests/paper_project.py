"""A project of a few lines, to record gates in and then to break: no torch, no data."""

import copy
from pathlib import Path

from {{cookiecutter.project_slug}}.harness import gates
from {{cookiecutter.project_slug}}.harness.checks import Check

ORDER = ("data_audit", "skeleton", "overfit", "regularize", "tune", "squeeze")
SOURCES = {
    "data.py": '"""Rows."""\n\n\ndef load():\n    return [1, 2]\n',
    "preprocessing.py": "def fit(rows):\n    return sum(rows)  # over all of them\n",
    "task.py": "def loss(outputs, y):\n    return outputs - y\n",
    "model.py": "class Net:\n    width = 16\n",
    "harness/loop.py": "def fit(model):\n    return model\n",
    "harness/checks/loss.py": "def loss_at_init(pipeline):\n    return 1\n",
    "harness/checks/step.py": "def step_oracle(pipeline):\n    return 2\n",
}
CONFIG = {
    "data": {"source": "paper", "path": None, "split": {"seed": 0, "test_fraction": 0.2}},
    "task": {"metric": "accuracy"},
    "model": {"name": "Net", "params": {"width": 16}},
}
HANDED_OVER = {
    "data_audit": {
        "splits.json": '{"train": ["a"], "validation": ["b"], "test": ["c"]}\n',
        "preprocessing.json": '{"mean": 1.5}\n',
    },
    "overfit": {"best.safetensors": "weights"},
}


def check(name="loss_at_init", verdict="open", value=2.3, limit=2.9, **more) -> Check:
    because = more.pop("because", f"{name} is {value} where {limit} is the limit.")
    return Check(name, verdict, value, limit, more.pop("unit", ""), because, **more)


def write(path: Path, text: str) -> None:
    """Plain, not atomic: waiting for the disk would be most of these tests' time."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8", newline="\n")


class PaperProject:
    """Records stages without running anything; `config` and `data` are today's."""

    def __init__(self, root: Path) -> None:
        self.project = gates.Project(root, "paper", ORDER)
        self.config = copy.deepcopy(CONFIG)
        self.data = gates.DataNow("d1", 3)
        for name, text in SOURCES.items():
            self.write_source(name, text)
        for stage in ORDER:
            self.write_source(f"stages/{stage}.py", f"def run(cfg, run):\n    return {stage!r}\n")

    def write_source(self, name: str, text: str) -> None:
        write(self.project.source / name, text)

    def hand_over(self, stage: str, contents: dict | None = None) -> Path:
        """A launch's hand-off folder, with the stage's outputs, a report and a figure."""
        number = len(list(self.project.runs.glob("*"))) if self.project.runs.exists() else 0
        folder = self.project.runs / f"{stage}-{number}"
        chosen = HANDED_OVER.get(stage, {}) if contents is None else contents
        for name, text in {"report.md": "# Report\n", **chosen}.items():
            write(folder / name, text)
        return folder

    def record(self, stage: str, checks=None, *, contents=None, **more) -> dict:
        folder = self.hand_over(stage, contents)
        more = {"config": self.config, "data": self.data, "provenance": {"seed": 0}, **more}
        found = [check(), check("step_oracle")] if checks is None else checks
        return gates.record(self.project, stage, found, folder, **more)

    def walk(self, upto: str = "squeeze") -> None:
        for stage in ORDER[: ORDER.index(upto) + 1]:
            self.record(stage)

    def judge(self, stage: str, today=None) -> gates.Judgement:
        return gates.judge(self.project, stage, self.config, self.data, today)

    def statuses(self) -> list[str]:
        return [j.status for j in gates.judge_all(self.project, self.config, self.data)]

    def ask(self, stage: str, **more):
        return gates.ask(self.project, stage, self.config, self.data, **more)

    def artifact(self, stage: str, name: str = "gate.json") -> Path:
        return self.project.artifacts / stage / name
