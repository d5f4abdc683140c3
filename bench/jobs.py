"""The launches that a recipe needs, each done once: what came of it lies in a folder named after
the digest of everything it depends on, so an unchanged rerun costs nothing."""

from __future__ import annotations

import json
import os
import re
import shutil
import threading
import uuid
from collections import defaultdict
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

import judging
import planting
from judging import Harm
from planting import Done, digest
from recipes import BASE, Recipe, clean_of

TRAINER = Path(__file__).with_name("train_seeds.py")
GATE_LIMIT_S = 180
HARM_LIMIT_S = 600
SEEDS = (0, 1, 2)
NUM_EPOCHS = 8
# What the split and the fitted preprocessing come from: a change here and the audit runs again.
AUDITED_FILES = ("data.py", "preprocessing.py", "configs/data/")
ALWAYS = ("scratch=true", "device=cpu")


class NotComparable(RuntimeError):
    """The clean pipeline that a fault is compared with does not train."""


class Jobs:
    """Runs and remembers launches in copies of one clean bake. Safe to use from several threads:
    two that ask for the same launch get one."""

    def __init__(self, project: Path, bases: Path, cache: Path):
        self.project, self.bases, self.cache = project, bases, cache
        self.sources = planting.sources(project)
        self.training_sources = planting.training_sources(project)
        self.base_digests: dict[str, str] = {}
        self.locks: defaultdict[str, threading.Lock] = defaultdict(threading.Lock)

    # ---- what is asked --------------------------------------------------------------------------

    def gate(self, recipe: Recipe) -> tuple[dict, dict | None]:
        """The facts of the recipe's gate, and those of its own audit (None: the clean one's).

        Where the audit leaves nothing to work with, the facts of the gate are those of the audit.
        """
        about = [recipe.edits, recipe.overrides, recipe.stage, GATE_LIMIT_S]
        handoff, own = None, None
        if recipe.stage != "data_audit":
            handoff = self.audited(recipe)
            facts = _read(handoff)
            own = facts if self.needs_audit(recipe) else None
            if not facts["handed_over"]:
                return facts, own
            about.append(handoff.name)

        def launch(project: Path, folder: Path) -> dict:
            _hand_over(handoff, project)
            return self._launch(project, recipe.stage, recipe.overrides)

        key = digest("gate", self.sources, self._base(recipe), *about)
        return _read(self._cached(f"gate-{key}", recipe, launch)), own

    def harm(self, recipe: Recipe) -> Harm:
        """What the fault does to validation. Raises NotComparable if its clean pipeline fails."""
        before, after = self.trained(clean_of(recipe)), self.trained(recipe)
        if before.get("crashed") or any(row["metric"] is None for row in before["rows"]):
            why = before.get("crashed") or "its loss is not finite"
            raise NotComparable(f"{recipe.id}: the clean pipeline does not train: {why}")
        return judging.harm(before, after)

    def trained(self, recipe: Recipe) -> dict:
        """The project's own training, once per seed: see train_seeds.py."""
        handoff = self.audited(recipe)
        if not (facts := _read(handoff))["handed_over"]:
            return {"crashed": facts["message"] or f"the audit ended with {facts['code']}"}
        overrides = [
            o for o in recipe.overrides if recipe.stage == "skeleton" or not o.startswith("stage.")
        ]
        asked = {"overrides": overrides, "seeds": SEEDS, "num_epochs": NUM_EPOCHS}

        def launch(project: Path, folder: Path) -> dict:
            _hand_over(handoff, project)
            out = project / "harm.json"
            told = json.dumps(asked | {"package": project.name, "out": str(out)})
            done = planting.run([str(TRAINER), told], project, HARM_LIMIT_S)
            if out.exists():
                return _json(out) | {"seconds": done.seconds}
            why = "it did not end in time" if done.timed_out else _message(done, project)
            return {"crashed": why or f"exit code {done.code}", "seconds": done.seconds}

        about = [recipe.edits, asked, handoff.name, TRAINER.read_text(encoding="utf-8")]
        key = digest("harm", self.training_sources, self._base(recipe), *about)
        return _read(self._cached(f"harm-{key}", recipe, launch))

    def audited(self, recipe: Recipe) -> Path:
        """A folder with result.json (the facts) and what the audit of this data hands over."""
        cut = replace(
            recipe,
            edits=tuple(e for e in recipe.edits if e.file.startswith(AUDITED_FILES)),
            overrides=tuple(o for o in recipe.overrides if _is_data(o)),
        )

        def launch(project: Path, folder: Path) -> dict:
            if (project / "prepare.py").exists():
                done = planting.run(["prepare.py"], project, GATE_LIMIT_S)
                facts, made = _facts(done, project, None), project / "artifacts" / "data_audit"
            else:
                facts = self._launch(project, "data_audit", cut.overrides)
                made = next((project / "runs" / "data_audit").glob("*/handoff"), None)
            handed = sorted(made.glob("*.json")) if made and made.is_dir() else []
            for path in handed:
                shutil.copyfile(path, folder / f"handoff-{path.name}")
            return facts | {"handed_over": [path.name for path in handed]}

        about = [cut.edits, cut.overrides]
        key = digest("audit", self.training_sources, self._base(recipe), *about)
        return self._cached(f"audit-{key}", cut, launch)

    def needs_audit(self, recipe: Recipe) -> bool:
        """Whether the recipe's data is prepared otherwise than the clean project's."""
        edits = any(edit.file.startswith(AUDITED_FILES) for edit in recipe.edits)
        return edits or any(_is_data(text) for text in recipe.overrides)

    # ---- how it is done -------------------------------------------------------------------------

    def _launch(self, project: Path, stage: str, overrides: tuple[str, ...]) -> dict:
        words = ["run.py", f"stage={stage}", *ALWAYS, *overrides]
        return _facts(planting.run(words, project, GATE_LIMIT_S), project, stage)

    def _base(self, recipe: Recipe) -> str:
        name = recipe.base
        if name not in self.base_digests:
            folder = self.bases / name
            self.base_digests[name] = "" if name == BASE else planting.files_digest(folder)
        return self.base_digests[name]

    def _cached(self, name: str, recipe: Recipe, launch: Callable[[Path, Path], dict]) -> Path:
        """The folder of this launch, made by it unless it is there. It appears whole or not."""
        folder = self.cache / name
        with self.locks[name]:
            if not (folder / "result.json").exists():
                made = self.cache / f".{uuid.uuid4().hex}"
                made.mkdir(parents=True)
                try:
                    with planting.planted(self.project, recipe, self.bases) as project:
                        result = launch(project, made)
                    about = {"id": recipe.id, "overrides": recipe.overrides}
                    text = json.dumps({"about": about, "edits": list(map(asdict, recipe.edits))})
                    (made / "recipe.json").write_text(text, encoding="utf-8")
                    (made / "result.json").write_text(json.dumps(result), encoding="utf-8")
                    os.replace(made, folder)
                finally:
                    shutil.rmtree(made, ignore_errors=True)
        return folder


def _is_data(override: str) -> bool:
    return override.lstrip("+~").partition("=")[0].partition(".")[0] == "data"


def _json(path: Path) -> dict:
    return json.loads(path.read_text(encoding="utf-8"))


def _read(folder: Path) -> dict:
    return _json(folder / "result.json")


def _hand_over(handoff: Path | None, project: Path) -> None:
    """What the audit left, to where a later stage looks for it."""
    target = project / "artifacts" / "data_audit"
    for path in handoff.glob("handoff-*") if handoff else ():
        target.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, target / path.name.removeprefix("handoff-"))


# ---- facts --------------------------------------------------------------------------------------


def _facts(done: Done, project: Path, stage: str | None) -> dict:
    """What a launch left, as plain data: its exit code, its words, its checks, what to repair."""
    gates = sorted((project / "runs" / stage).glob("*/gate.json")) if stage else []
    found = {"checks": [], "repair": None, "because": ""}
    if gates:
        found = _gate_facts(gates[-1])
    message = _message(done, project)
    return found | {
        "code": done.code,
        "timed_out": done.timed_out,
        "traceback": "Traceback (most recent call last)" in done.stderr,
        "message": message,
        "because": found["because"] or message,
        "seconds": done.seconds,
        "wall_s": done.wall_s,
    }


def _gate_facts(path: Path) -> dict:
    gate, report = _json(path), path.parent / "handoff" / "report.md"
    words = re.search(r"Repair (\w+) first", report.read_text(encoding="utf-8"))
    repair = words.group(1) if words else None
    said = {check["name"]: check["because"] for check in gate["checks"]}
    checks = [{"name": c["name"], "verdict": c["verdict"]} for c in gate["checks"]]
    return {"checks": checks, "repair": repair, "because": said.get(repair, "")[:300]}


def _message(done: Done, project: Path) -> str:
    """The last line that the launch complained with, free of this machine's folders."""
    lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
    text = lines[-1] if lines else ""
    return text.replace(str(project), project.name).replace(str(project.parent), "")[:300]
