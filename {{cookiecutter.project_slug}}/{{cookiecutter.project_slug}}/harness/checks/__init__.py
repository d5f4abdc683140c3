"""What a check is, what it may see, and how a list of them is run and read.

A check is a plain function `check(pipeline, **limits) -> Check`. It knows nothing of Hydra, stages
or files: a `Pipeline` is all it gets, so the same checks can judge any training script.
"""

from __future__ import annotations

import contextlib
import math
import random
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

VERDICTS = ("open", "warn", "not_applicable", "inconclusive", "shut")  # from best to worst


@dataclass(frozen=True)
class Check:
    """One measured value against its limit.

    `value` is finite or None; `because` is one sentence with the numbers; `suspect` lists likely
    causes, likeliest first. No timing, path or host belongs in here: the same run must give the
    same evidence anywhere.
    """

    name: str
    verdict: str
    value: float | None
    limit: float | list | None
    unit: str
    because: str
    suspect: tuple[str, ...] = ()
    figure: str | None = None

    def __post_init__(self) -> None:
        if self.verdict not in VERDICTS:
            raise ValueError(
                f"check {self.name}: verdict {self.verdict!r} is not one of {VERDICTS}"
            )
        if self.value is not None and not math.isfinite(self.value):
            object.__setattr__(
                self, "value", None
            )  # NaN is no number of evidence; `because` says it


@dataclass(frozen=True)
class Finding:
    """One broken clause of a check that has several."""

    value: float | None
    limit: float | list | None
    because: str
    suspect: tuple[str, ...]


@dataclass(frozen=True)
class Pipeline:
    """Everything a check may see of a training pipeline.

    A part that is None makes the checks that need it `not_applicable`, saying what to hand over.
    """

    make_model: Callable[[int], torch.nn.Module]  # seed -> fresh model on its device, train mode
    make_optimizer: Callable[[torch.nn.Module], torch.optim.Optimizer]
    train_step: Callable[..., Any]  # (model, optimizer, batch) -> StepOutput
    evaluate: Callable[..., Any]  # (model, loader) -> Evaluation, on the whole loader
    task: Any  # targets, loss, metric, prior and the rest of task.py
    train: Any  # iterable of {"x", "y", "id"} batches, with .rows and .num_rows
    validation: Any
    device: torch.device
    precision: str = "fp32"
    clip_norm: float | None = None  # as declared; train_step applies it
    accumulate: int = 1  # parts train_step cuts a batch into
    accumulate_step: Callable[..., Any] | None = None  # (model, optimizer, batch, num_parts)
    preprocessing: Any = None  # declared .mean and .std per channel, .inverse(x)
    prepare: Callable[[str], dict] | None = None  # split -> tensors of the same raw records
    raw: Callable[[int], Any] | None = None  # row id -> its record as it is stored
    group: Callable[[int], Any] | None = None  # row id -> the group that must stay in one split
    time: Callable[[int], float] | None = None  # row id -> when it was recorded, a number
    fit: Callable[..., Any] | None = None  # (model, optimizer, train, validation, num_epochs)
    draw: Callable[[int], Any] | None = None  # row id -> picture for a person
    human_reference: dict | None = None  # value, kind, num_samples
    pretrained_head: bool = False  # the head starts from trained weights: no start to predict
    frozen: tuple[str, ...] | None = None  # names (or prefixes) of parameters meant to stay put


# ---- verdicts ---------------------------------------------------------------------------------


def not_applicable(name: str, because: str) -> Check:
    return Check(name, "not_applicable", None, None, "", because)


def inconclusive(name: str, because: str, suspect: tuple[str, ...] = ()) -> Check:
    return Check(name, "inconclusive", None, None, "", because, suspect)


def shut_if_any(found: list[Finding], good: Check) -> Check:
    """`good` when no clause is broken; else shut by the first one, the others named with it."""
    if not found:
        return good
    first, *others = found
    also = "".join(f"; also {finding.because}" for finding in others)
    suspects = dict.fromkeys(cause for finding in found for cause in finding.suspect)
    return Check(
        good.name,
        "shut",
        first.value,
        first.limit,
        good.unit,
        f"{first.because}{also}.",
        tuple(suspects),
        good.figure,
    )


def merge(name: str, found: dict[str, Check]) -> Check:
    """The worst of one check's results on several models, with every model's sentence kept."""
    worst = max(found.values(), key=lambda check: VERDICTS.index(check.verdict))
    sentences = {check.because for check in found.values()}
    because = " ".join(f"{model}: {check.because}" for model, check in found.items())
    figure = worst.figure or next((c.figure for c in found.values() if c.figure), None)
    return Check(
        name,
        worst.verdict,
        worst.value,
        worst.limit,
        worst.unit,
        because if len(sentences) > 1 else worst.because,
        worst.suspect,
        figure,
    )


# ---- running ----------------------------------------------------------------------------------


@contextlib.contextmanager
def undisturbed(pipeline: Pipeline, seed: int = 0) -> Iterator[None]:
    """Every random generator starts from `seed` inside and is put back afterwards; those that the
    loaders hold go on from where they are, and are put back too."""
    import numpy as np
    import torch

    python_state, numpy_state = random.getstate(), np.random.get_state()  # noqa: NPY002
    cuda = list(range(torch.cuda.device_count())) if torch.cuda.is_initialized() else []
    mps_state = torch.mps.get_rng_state() if pipeline.device.type == "mps" else None
    held = [(generator, generator.get_state()) for generator in _generators(pipeline)]
    try:
        with torch.random.fork_rng(devices=cuda):
            random.seed(seed)
            np.random.seed(seed)  # noqa: NPY002  the global one: the user's code may draw from it
            torch.manual_seed(seed)
            yield
    finally:
        random.setstate(python_state)
        np.random.set_state(numpy_state)  # noqa: NPY002
        if mps_state is not None:
            torch.mps.set_rng_state(mps_state)
        for generator, state in held:
            generator.set_state(state)


def _generators(pipeline: Pipeline) -> Iterator[torch.Generator]:
    """Those kept by a loader, its sampler or its augmentation."""
    import torch

    for side in (pipeline.train, pipeline.validation):
        parts = (side, *(getattr(side, name, None) for name in ("sampler", "augment")))
        for part in parts:
            values = getattr(part, "__dict__", {}).values()
            yield from (value for value in values if isinstance(value, torch.Generator))


def run_check(check: Callable[..., Check], pipeline: Pipeline, **limits: Any) -> Check:
    """Run one check and put every random generator back: nothing a check does outlasts it.

    A check that raises is `inconclusive` with the error in its sentence, never a pass; a loss that
    is not finite shuts it.
    """
    from ..instruments import NonFiniteLoss

    name = check.__name__
    try:
        with undisturbed(pipeline):
            return check(pipeline, **limits)
    except NonFiniteLoss as error:
        because = f"{name} could not finish: {error}."
        causes = ("inputs or targets that are not finite", "log or root of zero in the loss")
        return Check(name, "shut", None, None, "", because, causes)
    except Exception as error:  # the user's code runs in here: whatever it raises is a finding
        because = f"{name} could not finish: {type(error).__name__}: {error}".rstrip(".") + "."
        return inconclusive(name, because, ("the model, the step or the loader raises",))


def run_checks(
    checks: Iterable[Callable[..., Check]],
    pipeline: Pipeline,
    limits: Mapping[str, Mapping[str, Any]] | None = None,
) -> list[Check]:
    """All of them in order; `limits` maps the name of a check to its keyword arguments."""
    given = limits or {}
    return [run_check(check, pipeline, **given.get(check.__name__, {})) for check in checks]


# ---- reading several --------------------------------------------------------------------------

# Checks come in the order of cause and consequence, so the first that shut is the one to repair. A
# broken part also breaks the checks listed with it: those are no findings of their own.
_TRAINING = ("update_ratio", "overfit_one_batch", "input_independent_baseline", "confusion")
_START = ("loss_at_init", "prior_bias")
_INSIDE = ("axis_identity", "sample_boundary", "pad_invariance", "field_influence")
_STEP = ("trainable_parameters", "symmetry", "step_oracle", "library_warnings", "precision")
_RUN = ("schedule", "best_checkpoint", *_TRAINING)
_EXPLAINS = {
    "split_hygiene": ("feature_leak", "last_seam", "input_independent_baseline", "confusion"),
    "feature_leak": ("last_seam", *_TRAINING),
    "record_store": ("loader", "split_parity", "last_seam", "modes", "human_metric", *_RUN),
    "loader": ("split_parity", "last_seam", "step_oracle", *_RUN),
    "target_offset": ("loss_at_init", "sample_boundary", *_TRAINING),
    "supervised_share": ("loss_contract", *_START, *_TRAINING),
    "split_parity": ("last_seam", "human_metric", "step_oracle", *_START, *_TRAINING),
    "last_seam": ("modes", "human_metric", *_START, *_INSIDE, *_STEP, *_RUN),
    "loss_contract": ("loss_terms", "human_metric", *_START, *_INSIDE, *_STEP, *_RUN),
    "loss_terms": (*_START, *_STEP, *_TRAINING),
    "loss_at_init": ("prior_bias", *_TRAINING),
    "prior_bias": _TRAINING,
    "modes": ("human_metric", *_START, *_INSIDE, *_STEP, *_RUN),
    "human_metric": ("best_checkpoint", *_TRAINING),
    "axis_identity": ("pad_invariance", *_TRAINING),
    "sample_boundary": (
        *("axis_identity", "pad_invariance", "modes", "human_metric"),
        *(*_START, *_STEP, *_RUN),
    ),
    "pad_invariance": ("human_metric", *_TRAINING),
    "field_influence": ("trainable_parameters", "symmetry", "sample_boundary", *_TRAINING),
    "trainable_parameters": ("symmetry", *_INSIDE, "step_oracle", "precision", *_RUN),
    "symmetry": ("modes", *_INSIDE, "step_oracle", *_TRAINING),
    "step_oracle": ("library_warnings", "precision", *_RUN),
    "library_warnings": _TRAINING,
    "precision": _TRAINING,
    "schedule": ("best_checkpoint", *_TRAINING),
    "best_checkpoint": ("input_independent_baseline", "confusion"),
    "update_ratio": _TRAINING,
    "overfit_one_batch": ("input_independent_baseline", "confusion"),
    "input_independent_baseline": ("confusion",),
}


def explain(checks: Iterable[Check]) -> str | None:
    """The one cause that explains the rest, and what it leaves unexplained; None if none is bad."""
    bad = {c.name: c for c in checks if c.verdict in ("shut", "inconclusive")}
    if not bad:
        return None
    shut = [name for name, check in bad.items() if check.verdict == "shut"]
    cause = bad[(shut or list(bad))[0]]
    effects = _EXPLAINS.get(cause.name, ())
    follows = [name for name in bad if name in effects]
    apart = [name for name in shut if name != cause.name and name not in effects]
    likely = f" ({cause.suspect[0].rstrip('.')})" if cause.suspect else ""
    text = f"Repair {cause.name} first{likely}"
    text += f": it explains {_listed(follows)}" if follows else ""
    stand = "stand" if len(apart) > 1 else "stands"
    return text + (f". {_listed(apart)} {stand} apart." if apart else ".")


def _listed(names: list[str]) -> str:
    return ", ".join(names[:-1]) + " and " + names[-1] if len(names) > 1 else names[0]
