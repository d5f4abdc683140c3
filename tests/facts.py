"""Run inside a project (`python facts.py` there): what its code and configuration say, as JSON.

Reads {"launches": [[...]], "settings": [[...]]} from standard input: overrides that must fit as
they stand, and overrides that must fit some stage. A process of its own, so that two bakes never
meet in one interpreter.
"""

import importlib
import inspect
import json
import sys
from pathlib import Path

from hydra import compose, initialize_config_dir
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import OmegaConf

ROOT = Path.cwd()
CONFIGS = ROOT / "configs"
sys.path.insert(0, str(ROOT))


def load(name: str):
    """A module of the project's package."""
    return importlib.import_module(f"{ROOT.name}.{name}")


def problem(overrides: list[str]) -> str | None:
    """Why the overrides cannot be used, or None. A sweep stands for its first job."""
    schema = load("harness.schema")
    parsed = OverridesParser.create().parse_overrides(overrides)
    first = [
        f"{o.get_key_element()}={next(iter(o.sweep_string_iterator()))}"
        if o.is_sweep_override()
        else o.input_line
        for o in parsed
    ]
    try:
        composed = compose("config", first, return_hydra_config=True)
        choices = dict(composed.hydra.runtime.choices)
        plain = OmegaConf.masked_copy(composed, [key for key in composed if key != "hydra"])
        schema.validate(plain, CONFIGS)
        schema.refuse_undeclared(plain, choices, CONFIGS)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


def problem_everywhere(overrides: list[str]) -> str | None:
    """As `problem`, if no stage takes them."""
    first = None
    for stage in ("overfit", "tune", "squeeze", "data_audit", "skeleton", "regularize"):
        found = problem([f"stage={stage}", *overrides])
        if found is None:
            return None
        first = first or found
    return first


def all_keys() -> list[str]:
    """Every key that some choice of options has."""
    files = CONFIGS.glob("*/*.yaml")
    choices = [f"{path.parent.name}={path.stem}" for path in sorted(files)]
    return sorted(set().union(*(keys_with(choice) for choice in choices)))


def keys_with(choice: str) -> set[str]:
    return load("harness.schema").keys_of(OmegaConf.to_container(compose("config", [choice])))


def defaults(function) -> dict:
    parameters = inspect.signature(function).parameters.values()
    return {p.name: p.default for p in parameters if isinstance(p.default, (int, float))}


def catalogue() -> dict[str, list[str]]:
    """The lists of checks by their name in small letters, e.g. skeleton and preflight."""
    module = load("harness.checks.catalogue")
    lists = ("SKELETON", "PREFLIGHT", "REGULARIZED", "TUNED")
    return {name.lower(): [check.__name__ for check in getattr(module, name)] for name in lists}


def limits_in_code() -> dict[str, dict]:
    """Check or axis -> its limits that no configuration sets."""
    audit = load("harness.audit")
    found = {check.__name__: defaults(check) for check in load("harness.checks.catalogue").SKELETON}
    return found | dict.fromkeys(audit.AXES, defaults(audit.Limits))


def attributes() -> dict[str, list[str]]:
    """Public names of the four files, and of the task."""
    task = load("task").Task(compose("config").task, ("a", "b"))
    found = {name: dir(load(name)) for name in ("data", "preprocessing", "model")}
    return found | {"task": [name for name in dir(task) if not name.startswith("_")]}


def main() -> None:
    asked = json.load(sys.stdin)
    with initialize_config_dir(str(CONFIGS), version_base="1.3"):
        launch = load("harness.launch")
        told = {
            "launches": [problem(overrides) for overrides in asked["launches"]],
            "settings": [problem_everywhere(overrides) for overrides in asked["settings"]],
            "keys": all_keys(),
            "order": list(load("stages").ORDER),
            "statuses": list(load("harness.gates").STATUSES),
            "verdicts": list(load("harness.checks").VERDICTS),
            "gate_keys": list(load("harness.artifact").KEYS),
            "exit_codes": [launch.OPEN, launch.FAILED, launch.SHUT, launch.REFUSED],
            **catalogue(),
            "axes": list(load("harness.audit").AXES),
            "limits_in_code": limits_in_code(),
            "attributes": attributes(),
        }
    json.dump(told, sys.stdout)


if __name__ == "__main__":
    main()
