"""The search space: what a study may try. Needs neither Optuna nor torch to refuse a bad one.

A space maps dotted config keys to {low, high}, with `log: true` or `step`, or to {choices}.
"""

from __future__ import annotations

import difflib
import math
from typing import Any

BOUNDS, OPTIONS = {"low", "high"}, {"log", "step"}
ALIKE = 1e-9  # relative: float ranges need not divide by their step to the last bit


def validate_space(space: dict[str, dict]) -> None:
    """Raises ValueError for a space that cannot be searched, naming the key and the remedy.

    Two whole bounds make whole numbers: write 1.0 where a fraction is meant.
    """
    if not space:
        raise ValueError("stage.space is empty: name at least one key to search.")
    for key, spec in space.items():
        where = f"stage.space.{key}"
        if not isinstance(spec, dict):
            raise ValueError(f"{where} is {spec!r}: give it low and high, or choices.")
        if "choices" in spec:
            _validate_choices(where, spec)
        else:
            _validate_range(where, spec)


def _validate_choices(where: str, spec: dict) -> None:
    _refuse_fields(where, spec, {"choices"})
    choices = spec["choices"]
    if not isinstance(choices, list) or len(choices) < 2:
        raise ValueError(f"{where}.choices={choices!r}: name two or more, or set the value itself.")
    strange = [c for c in choices if not isinstance(c, (str, int, float, bool, type(None)))]
    if strange:
        raise ValueError(f"{where}.choices holds {strange[0]!r}: a choice is one plain value.")
    twice = [c for i, c in enumerate(choices) if c in choices[:i]]
    if twice:
        raise ValueError(f"{where}.choices names {twice[0]!r} twice.")


def _validate_range(where: str, spec: dict) -> None:
    _refuse_fields(where, spec, BOUNDS | OPTIONS)
    absent = sorted(BOUNDS - set(spec))
    if absent:
        raise ValueError(f"{where} has no {absent[0]}: a range needs low and high.")
    numbers = {name: spec[name] for name in ("low", "high", "step") if spec.get(name) is not None}
    for name, value in numbers.items():
        if (
            isinstance(value, bool)
            or not isinstance(value, (int, float))
            or not math.isfinite(value)
        ):
            raise ValueError(f"{where}.{name}={value!r} is no number.")
    low, high, step = numbers["low"], numbers["high"], numbers.get("step")
    if low >= high:
        raise ValueError(f"{where}: low {low:g} must be below high {high:g}.")
    if not isinstance(spec.get("log", False), bool):
        raise ValueError(f"{where}.log={spec['log']!r}: write true or false.")
    if spec.get("log") and low <= 0:
        raise ValueError(f"{where}: a log scale has no place for low {low:g}; it must be above 0.")
    if spec.get("log") and step is not None:
        raise ValueError(f"{where}: log and step do not go together; drop one.")
    if step is not None:
        _validate_step(where, low, high, step)


def _validate_step(where: str, low: float, high: float, step: float) -> None:
    if step <= 0:
        raise ValueError(f"{where}.step={step:g} must be above 0.")
    if isinstance(low, int) and isinstance(high, int) and not isinstance(step, int):
        raise ValueError(f"{where}: low and high are whole numbers, step {step:g} is not.")
    count = round((high - low) / step)
    if abs(low + count * step - high) > ALIKE * max(abs(high), step):
        raise ValueError(
            f"{where}: steps of {step:g} from {low:g} never meet high {high:g}; "
            f"{low + math.floor((high - low) / step) * step:g} would do."
        )


def _refuse_fields(where: str, spec: dict, known: set[str]) -> None:
    for name in sorted(set(map(str, spec)) - known):
        near = difflib.get_close_matches(name, sorted(known), n=1, cutoff=0.0)[0]
        raise ValueError(f"{where}.{name} is no field here. Nearest: {near}.")


def distributions(space: dict[str, dict]) -> dict[str, Any]:
    """Optuna's distributions, sorted by key: the order in a file must not change the draws."""
    return {key: _distribution(space[key]) for key in sorted(space)}


def _distribution(spec: dict) -> Any:
    from optuna import distributions as kinds

    if "choices" in spec:
        return kinds.CategoricalDistribution(spec["choices"])
    low, high, step, log = spec["low"], spec["high"], spec.get("step"), spec.get("log", False)
    if isinstance(low, int) and isinstance(high, int):
        return kinds.IntDistribution(low, high, log=log, step=step or 1)
    return kinds.FloatDistribution(float(low), float(high), log=log, step=step)
