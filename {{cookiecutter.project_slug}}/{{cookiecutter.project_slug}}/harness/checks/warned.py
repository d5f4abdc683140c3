"""Warnings of the libraries: what nobody reads in a log, read here."""

from __future__ import annotations

import contextlib
import copy
import re
import warnings
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from . import Check, Finding, Pipeline, probe, shut_if_any
from .dryrun import small


@dataclass(frozen=True)
class Known:
    """A warning that has a meaning: part of its text, what to make of it, and the likely cause."""

    text: str  # a regular expression
    verdict: str  # shut, warn, or open: harmless
    cause: str = ""


KNOWN = (
    Known("target size .* different to the input size", "shut", "a loss broadcasts its operands"),
    Known(
        r"lr_scheduler\.step\(\)` before `optimizer\.step\(\)|before `optimizer\.step",
        "shut",
        "the scheduler is stepped before the optimizer, or the optimizer's step is skipped",
    ),
    Known("Implicit dimension choice", "shut", "softmax without its dimension takes a wrong axis"),
    Known(
        "None of the inputs have requires_grad",
        "shut",
        "activation checkpointing cuts the graph: no gradient passes",
    ),
    Known(
        "invalid value encountered|divide by zero encountered|overflow encountered",
        "shut",
        "numbers that are not finite are made outside torch",
    ),
    Known("Mean of empty slice|Degrees of freedom <= 0", "shut", "a statistic of no values"),
    Known(r"std\(\): degrees of freedom is <= 0|var\(\): degrees", "shut", "a variance of one row"),
    Known(
        "requires_grad=True to a scalar",
        "warn",
        "a tensor that carries its graph is turned into a number: the graph may end there",
    ),
    Known(
        r"\.grad attribute of a Tensor that is not a leaf",
        "warn",
        "a gradient is read that is never kept",
    ),
    Known("size_average and reduce args", "warn", "an old reduction argument of a loss is used"),
    Known("To copy construct from a tensor", "warn", "torch.tensor(tensor) cuts the graph"),
    Known("ill-defined|only one class is present|No positive", "warn", "a score is undefined here"),
    Known("Using a non-full backward hook", "warn", "a hook may miss gradients"),
    Known("does not have a deterministic implementation", "open"),
    Known("epoch parameter in `scheduler|EPOCH_DEPRECATION|verbose parameter", "open"),
    Known("prototype|nested.tensor|nested_tensor|pin_memory|num_workers|suggested max", "open"),
    Known("CUDA|cuDNN|NNPACK|MPS|XNNPACK|mkldnn|driver|device_name", "open"),
    Known("lazy modules|Lazy|given NumPy array is not writ", "open"),
    Known("weights_only|torch.load|pytree|is deprecated|will be (removed|deprecated)", "open"),
)
WRONG_USE = (UserWarning, RuntimeWarning)  # exactly: not what derives from them
LONGEST = 160  # characters of a text that is passed on


def library_warnings(pipeline: Pipeline, *, max_unknown: int = 0) -> Check:
    """One project step, one evaluation and a short `fit`, with every warning recorded, torch's own
    from C++ too (of the fit on a few rows no RuntimeWarning: a score may be undefined on those).

    A known warning that means a fault shuts; a doubtful one, or more than `max_unknown` different
    ones that are not known (UserWarning and RuntimeWarning only), warn with their text; harmless
    ones and deprecations are passed over. The same holds in any precision.
    """
    texts = _recorded(pipeline)
    found, doubtful, unknown = [], [], []
    for text in texts:
        known = next((k for k in KNOWN if re.search(k.text, text, re.IGNORECASE)), None)
        if known is None:
            unknown.append(text)
        elif known.verdict == "shut":
            because = f'the library warns "{_short(text)}"'
            found.append(Finding(float(len(texts)), 0.0, because, (known.cause,)))
        elif known.verdict == "warn":
            doubtful.append((text, known.cause))
    because = f"A step, an evaluation and a short run raise {len(texts)} different warnings"
    because += ", none of which points to a fault." if texts else "."
    good = Check("library_warnings", "open", 0.0, 0.0, "warnings", because)
    if found:
        return shut_if_any(found, good)
    if doubtful or len(unknown) > max_unknown:
        said = [text for text, _ in doubtful] + unknown
        because = f"{len(said)} warnings to read: " + "; ".join(f'"{_short(t)}"' for t in said[:3])
        causes = tuple(dict.fromkeys(cause for _, cause in doubtful)) or ("read its text",)
        value = float(len(said))
        return Check(good.name, "warn", value, 0.0, "warnings", because + ".", causes)
    return good


def _short(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= LONGEST else line[: LONGEST - 1] + "…"


def _recorded(pipeline: Pipeline) -> list[str]:
    """Texts of the different warnings of wrong use, in order."""
    with _all_warnings() as caught:
        model = pipeline.make_model(0).train()
        optimizer = pipeline.make_optimizer(model)
        pipeline.train_step(model, optimizer, next(iter(copy.copy(pipeline.train))))
        pipeline.evaluate(model, probe.few(pipeline.validation, 1024))
    with _all_warnings() as of_fit:
        if pipeline.fit is not None:
            fresh = pipeline.make_model(0).train()
            pipeline.fit(fresh, pipeline.make_optimizer(fresh), *small(pipeline, 2), 2)
    texts = [str(w.message) for w in caught if _is_wrong_use(w.category)]
    texts += [str(w.message) for w in of_fit if w.category is UserWarning]
    return list(dict.fromkeys(texts))


def _is_wrong_use(category: type[Warning]) -> bool:
    return category in WRONG_USE or category.__name__ == "UndefinedMetricWarning"


@contextlib.contextmanager
def _all_warnings() -> Iterator[list[warnings.WarningMessage]]:
    """All warnings inside, also those that torch gives once per process; both put back after."""
    always = torch.is_warn_always_enabled()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.set_warn_always(True)
        try:
            yield caught
        finally:
            torch.set_warn_always(always)
