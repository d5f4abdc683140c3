"""What a configuration must be: `validate` turns what Hydra composed into plain dataclasses and
refuses, in one line, what does not fit.

The free-form nodes (data.options, model.params, model.wider, regularization.augment) are declared
by the YAML file chosen for their group: a key that is not in that file is refused too.
"""

from __future__ import annotations

import copy
import difflib
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from .settings import STAGES, Config


class BadInput(ValueError):
    """What the user typed or handed over cannot be used: one line, exit code 1, no traceback."""


CHOICES = {
    "device": ("auto", "cuda", "mps", "cpu"),
    "precision": ("fp32", "bf16"),
    "optimizer.name": ("adam", "adamw", "sgd"),
    "optimizer.schedule": ("constant", "cosine"),
    "logger.name": ("none", "wandb"),
    "logger.mode": ("offline", "online"),
    "data.source": ("digits", "folder", "manifest"),
    "data.split.strategy": ("random", "group", "time", "given", "kfold"),
    "data.split.test": ("held_out", "none", "external"),
    "stage.sampler": ("random", "tpe"),
}
# Numbers beyond their types. A stage has only some of these keys, and null passes where it may.
POSITIVE = (
    "batch_size",
    "num_threads",
    "optimizer.lr",
    "optimizer.clip_norm",
    "optimizer.accumulate",
    "regularization.batch_size",
    "regularization.patience_epochs",
    "stage.num_epochs",
    "stage.num_seeds",
    "stage.trial_epochs",
    "stage.num_trials",
    "stage.capacity_epochs",
    "stage.lr_range_steps",
    "stage.budget_s",
    "stage.subset",
    "stage.longer_factor",
    "stage.max_hard_cases",
)
SHARES = (
    "optimizer.warmup_fraction",
    "optimizer.momentum",
    "regularization.dropout",
    "regularization.label_smoothing",
)

# free-form node -> the group whose chosen YAML file declares its keys
OPEN_NODES = {
    "data.options": "data",
    "model.params": "model",
    "model.wider": "model",
    "regularization.augment": "regularization",
}


def validate(composed: DictConfig, configs: Path) -> Config:
    """The composed configuration as dataclasses, interpolations resolved.

    Raises BadInput (one line) for an unknown key, naming the nearest valid one, for a value of the
    wrong type or outside its choices, and for a key that was deleted.
    """
    plain = OmegaConf.create(OmegaConf.to_container(composed, resolve=True))
    name = OmegaConf.select(plain, "stage.name")
    if name not in STAGES:
        raise BadInput(f"stage={name} is none of {', '.join(STAGES)}.")
    _refuse_unknown(plain, STAGES[name], configs)
    _whole_limits(plain)
    try:
        stage = OmegaConf.to_object(
            OmegaConf.merge(OmegaConf.structured(STAGES[name]), plain.stage)
        )
        merged = OmegaConf.merge(OmegaConf.structured(Config), plain)
        config = OmegaConf.to_object(merged)
    except OmegaConfBaseException as error:
        raise BadInput(one_line(error)) from None
    config.stage = stage
    _refuse_values(config)
    return config


def one_line(error: Exception) -> str:
    """The first line of an OmegaConf or Hydra error, with the key it is about."""
    key = getattr(error, "full_key", None)
    first = str(error).strip().splitlines()[0]
    return f"{key}: {first}" if key and key not in first else first


def keys_of(node: Any, prefix: str = "") -> set[str]:
    """Dotted keys of a nested dict, branches included."""
    found = set()
    for key, value in node.items():
        found.add(f"{prefix}{key}")
        if isinstance(value, dict):
            found |= keys_of(value, f"{prefix}{key}.")
    return found


def nearest(key: str, known: set[str]) -> str:
    """The valid key that `key` most likely meant: same last part first, then the closest text."""
    last = {name: name.rpartition(".")[2] for name in known}
    close = difflib.get_close_matches(key.rpartition(".")[2], last.values(), n=3, cutoff=0.5)
    same = [name for name in known if last[name] in close]
    pool = same or sorted(known)
    return difflib.get_close_matches(key, sorted(pool), n=1, cutoff=0.0)[0]


def _refuse_unknown(plain: DictConfig, stage: type, configs: Path) -> None:
    known = _schema_keys(Config) | _schema_keys(stage, "stage.")
    present = OmegaConf.to_container(plain)
    shipped = OmegaConf.load(configs / "stage" / f"{plain.stage.name}.yaml").get("stage", {})
    for node in ("stage.limits", "stage.space"):
        known |= keys_of({node: OmegaConf.to_container(shipped).get(node.partition(".")[2], {})})
    known |= {f"stage.limits.{key}" for key in shipped.get("limits", {})}
    known |= keys_of({"checks": shipped_checks(configs)})
    free = tuple(f"{node}." for node in (*OPEN_NODES, "stage.space"))
    for key in sorted(keys_of(present)):
        if key not in known and not key.startswith(free):
            raise BadInput(
                f"'{key}' is no key of the configuration. Nearest: '{nearest(key, known)}'. "
                "All keys: python run.py --cfg job"
            )


def _whole_limits(plain: DictConfig) -> None:
    """max_ratio=1 means 1.0: two levels deep OmegaConf would refuse a whole number."""
    for limits in plain.checks.values():
        for key, value in limits.items() if isinstance(limits, DictConfig) else ():
            if type(value) is int:
                limits[key] = float(value)


def shipped_checks(configs: Path) -> dict[str, dict[str, float]]:
    """The limits of the checks as configs/config.yaml has them."""
    return OmegaConf.to_container(OmegaConf.load(configs / "config.yaml").checks)


def refuse_undeclared(composed: DictConfig, choices: dict[str, str], configs: Path) -> None:
    """BadInput for keys and types of the free-form nodes that their YAML file does not declare."""
    for node, group in OPEN_NODES.items():
        declared = _declared(configs / group, choices[group], node.partition(".")[2])
        present = OmegaConf.to_container(composed)
        for part in node.split("."):
            present = present.get(part) or {}
        where = f"configs/{group}/{choices[group]}.yaml"
        for key, value in present.items():
            if key not in declared:
                near = nearest(key, set(declared)) if declared else None
                hint = f"Nearest: '{node}.{near}'. " if near else ""
                raise BadInput(
                    f"'{node}.{key}' is not declared in {where}. {hint}Add it there first."
                )
            if not _same_type(value, declared[key]):
                raise BadInput(
                    f"{node}.{key}={value!r} is a {type(value).__name__}, "
                    f"{where} declares {declared[key]!r}."
                )


def _declared(folder: Path, choice: str, node: str) -> dict:
    """The node in one YAML file, with what the file's own defaults list brings in."""
    loaded = OmegaConf.load(folder / f"{choice}.yaml")
    found: dict = {}
    for parent in loaded.get("defaults", []):
        if isinstance(parent, str) and parent != "_self_":
            found |= _declared(folder, parent, node)
    return found | (OmegaConf.to_container(loaded).get(node) or {})


def _same_type(value: Any, declared: Any) -> bool:
    if declared is None:
        return True
    if isinstance(declared, float) and isinstance(value, int) and not isinstance(value, bool):
        return True
    return type(value) is type(declared)


def _schema_keys(schema: type, prefix: str = "") -> set[str]:
    found = set()
    for item in fields(schema):
        found.add(f"{prefix}{item.name}")
        if is_dataclass(item.default_factory):
            found |= _schema_keys(item.default_factory, f"{prefix}{item.name}.")
    return found


def _refuse_values(config: Config) -> None:
    for key, choices in CHOICES.items():
        value = get_value(config, key)
        if value is not None and value not in choices:
            near = difflib.get_close_matches(str(value), choices, n=1, cutoff=0.0)[0]
            raise BadInput(f"{key}={value} is none of {', '.join(choices)}. Nearest: {near}.")
    for key in (*POSITIVE, *SHARES):
        value = get_value(config, key)
        if value is None:
            continue
        if key in POSITIVE and not value > 0:
            raise BadInput(f"{key}={value} must be above 0.")
        if key in SHARES and not 0 <= value < 1:
            raise BadInput(f"{key}={value} must be at least 0 and below 1.")
    if not config.regularization.weight_decay >= 0:
        decay = config.regularization.weight_decay
        raise BadInput(f"regularization.weight_decay={decay} must be at least 0.")
    betas = config.optimizer.betas
    if len(betas) != 2 or not all(0 <= beta < 1 for beta in betas):
        raise BadInput(f"optimizer.betas={betas} must be two numbers of at least 0 and below 1.")
    if not 0 <= config.seed < 2**31:
        raise BadInput(f"seed={config.seed} must be between 0 and 2147483647.")
    if config.fault is not None:
        _refuse_fault(config)
    if config.data.split.test == "external" and not config.data.test_path:
        raise BadInput(
            "data.split.test=external needs data.test_path=..., of the same form as data.path."
        )


def _refuse_fault(config: Config) -> None:
    from .faults import FAULTS, nearest  # imports torch

    if config.fault not in FAULTS:
        raise BadInput(
            f"fault={config.fault} is none of the {len(FAULTS)} in harness/faults. "
            f"Nearest: {nearest(config.fault)}."
        )
    if not config.scratch or config.stage.name not in ("skeleton", "overfit"):
        raise BadInput(
            f"fault={config.fault} breaks the pipeline on purpose, so it is no evidence. "
            f"Run: python run.py stage=skeleton fault={config.fault} scratch=true"
        )


def get_value(config: Config, key: str) -> Any:
    """The value at a dotted key, or None where the stage has no such key."""
    node: Any = config
    for part in key.split("."):
        node = node.get(part) if isinstance(node, dict) else getattr(node, part, None)
    return node


def with_values(config: Config, values: dict[str, Any]) -> Config:
    """A copy with the values at these dotted keys replaced. Raises BadInput for an unknown key."""
    changed = copy.deepcopy(config)
    for key, value in values.items():
        *parents, last = key.split(".")
        node: Any = changed
        for part in parents:
            node = node.get(part) if isinstance(node, dict) else getattr(node, part, None)
        exists = last in node if isinstance(node, dict) else hasattr(node, last)
        if not exists:
            raise BadInput(f"stage.space names '{key}', which is no key of the configuration.")
        if isinstance(node, dict):
            node[last] = value
        else:
            setattr(node, last, value)
    return changed
