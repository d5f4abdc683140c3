"""The bundle: a folder with all that answers a request. Weights, preprocessing, names, a proof.

Safetensors and JSON only: neither runs code when it is read. The proof is golden: a few raw inputs
with the tensors and outputs of the training path, which the code here must give again.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.numpy import load as load_arrays
from safetensors.numpy import save as save_arrays
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors
from torch import nn

from . import files, manifest
from .manifest import AGAIN, BundleError
from .sources import source_digest

OUTPUT_TOLERANCE = 1e-4  # absolute, on logits: other processors sum in another order (3.8e-6 seen)
BATCH_SIZE = 256  # rows per forward pass, so that a long list needs no more memory than this


# ---- writing ------------------------------------------------------------------------------------


def write(
    folder: Path,
    *,
    members: Sequence[dict[str, torch.Tensor]],
    model: dict,
    preprocessing: str,
    outputs: str,
    class_names: Sequence[str],
    facts: dict[str, str],
    limits: Sequence[str],
    provenance: dict,
    sources: dict[str, str],
    golden: dict,
) -> str:
    """Write the bundle into `folder` and return its digest.

    `members` are state dicts on the CPU (one, or the members of an ensemble); `model` holds the
    keywords of model.build; `preprocessing` its JSON; `outputs` how they are read ("exclusive");
    `facts` and `limits` go into card.md; `sources` maps source files to their digests;
    `golden` = {raws: arrays, x: (n, ...) tensor, outputs: (n, K) tensor} of the training path.
    Raises BundleError if the folder holds anything but an earlier bundle, ValueError for parts
    that could not be loaded again.
    """
    if outputs not in READERS or "preprocessing.py" not in sources or not golden["raws"]:
        raise ValueError(
            f"a bundle needs outputs of {', '.join(READERS)} (not {outputs!r}), the digest of "
            f"preprocessing.py and golden inputs ({len(golden['raws'])} given)."
        )
    config = {"model": model, "outputs": outputs, "class_names": list(class_names)}
    weights = {name: save_tensors(state) for name, state in _named(members)}
    digests = [hashlib.sha256(data).hexdigest() for data in weights.values()]
    about = {"weights": files.sha256_json(digests), "sources": dict(sources)}
    contents = {
        "card.md": _card(config, len(members), facts, limits).encode("utf-8"),
        "config.json": files.canonical(config),
        "golden.safetensors": _golden_bytes(golden),
        "preprocessing.json": preprocessing.encode("utf-8"),
        **weights,
    }
    return manifest.write(folder, contents, {**about, "provenance": provenance})


def _named(members: Sequence[dict]) -> list[tuple[str, dict]]:
    """One file per member; names in the order of the members up to a hundred."""
    if len(members) == 1:
        return [("model.safetensors", members[0])]
    return [(f"member-{number:02d}.safetensors", state) for number, state in enumerate(members)]


def _golden_bytes(golden: dict) -> bytes:
    arrays = {f"raw-{i:02d}": np.ascontiguousarray(raw) for i, raw in enumerate(golden["raws"])}
    arrays["x"] = golden["x"].cpu().contiguous().numpy()
    arrays["outputs"] = golden["outputs"].cpu().float().contiguous().numpy()
    return save_arrays(arrays)


def _card(config: dict, num_members: int, facts: dict[str, str], limits: Sequence[str]) -> str:
    """card.md: what this is, its numbers, and what it must not be used for."""
    model = config["model"]
    built = f"{model['name']} on inputs {tuple(model['input_shape'])}"
    kind = built if num_members == 1 else f"{num_members} times {built}, probabilities averaged"
    rows = [f"| {name} | {value} |" for name, value in facts.items()]
    lines = [
        "# Model card",
        "",
        f"What it is: {kind}.",
        f"It answers with one of {len(config['class_names'])}: {', '.join(config['class_names'])}.",
        "",
        "| number | value |",
        "|---|---|",
        *rows,
        "",
        "Limits:",
        "",
        *(f"- {limit}" for limit in limits),
        "- The probabilities are those of the softmax; nothing here has calibrated them.",
        "- An input of another kind gets an answer too: no class stands for `none of these`.",
        "",
        "Use: `python serve.py FOLDER IMAGE`, or `from serve import Bundle`.",
    ]
    return "\n".join(lines) + "\n"


# ---- reading ------------------------------------------------------------------------------------


class Bundle:
    """A loaded bundle: `Bundle.load(folder).predict(raw)`.

    serve.py derives the project's own class and hands in its modules: `models` with `build`, and
    `preprocessing` with `Preprocessing` and `decode`. Nothing else of the project is needed.
    """

    models: ModuleType | None = None
    preprocessing: ModuleType | None = None

    def __init__(self, about: dict, config: dict, prepare: Callable, members: list[nn.Module]):
        self.manifest, self.config, self.digest = about, config, about["digest"]
        self.class_names = tuple(config["class_names"])
        self.prepare, self.members = prepare, members
        self.read = READERS[config["outputs"]]

    @classmethod
    def load(cls, folder: Path | str) -> Bundle:
        """Raises BundleError, saying what is wrong and what to run, unless every file is there and
        untouched, the code is the one it was made with, and it still gives its golden answers."""
        if cls.models is None or cls.preprocessing is None:
            raise BundleError("this class knows no model: use `from serve import Bundle`.")
        about, contents = manifest.read(Path(folder))
        cls._check_source(about["sources"]["preprocessing.py"])
        config = json.loads(contents["config.json"])
        if config["outputs"] not in READERS:
            raise BundleError(f"{folder} has outputs {config['outputs']!r}: unknown here. {AGAIN}")
        try:
            prepare = cls.preprocessing.Preprocessing(json.loads(contents["preprocessing.json"]))
        except (ValueError, KeyError, TypeError) as error:
            raise BundleError(f"{folder}: its preprocessing cannot be rebuilt: {error}") from error
        weights = sorted(name for name in contents if name.startswith(("model.", "member-")))
        members = [cls._build(config, name, contents[name]) for name in weights]
        loaded = cls(about, config, prepare, members)
        loaded._check_golden(load_arrays(contents["golden.safetensors"]))
        return loaded

    @classmethod
    def _check_source(cls, wanted: str) -> None:
        """A few golden inputs cannot see every change of preprocessing.py; its digest does."""
        found = source_digest(Path(cls.preprocessing.__file__).read_bytes())
        if found != wanted:
            raise BundleError(
                f"preprocessing.py is not the one this bundle was made with (digest {found[:12]}, "
                f"the manifest has {wanted[:12]}). Restore it, or make the bundle again. {AGAIN}"
            )

    @classmethod
    def _build(cls, config: dict, name: str, data: bytes) -> nn.Module:
        """One member on the CPU, in evaluation mode, whatever device trained it."""
        try:
            with torch.random.fork_rng(devices=[]):  # the caller's random numbers stay untouched
                model = cls.models.build(**config["model"])
            model.load_state_dict(load_tensors(data), strict=True)
        except (RuntimeError, ValueError, TypeError, SafetensorError) as error:
            reason = " ".join(str(error).split())
            raise BundleError(f"{name} does not fit {config['model']['name']}: {reason}") from error
        return model.eval().requires_grad_(False)

    def _check_golden(self, golden: dict[str, np.ndarray]) -> None:
        """The stored raw inputs must give the stored tensors, byte for byte, and the outputs."""
        raws = [golden[name] for name in sorted(golden) if name.startswith("raw-")]
        wanted = torch.from_numpy(golden["x"])
        try:
            x = torch.stack([self.prepare(raw) for raw in raws])
        except (ValueError, TypeError, RuntimeError, LookupError) as error:
            raise BundleError(
                f"the golden self-check failed: preprocessing raises {error!r}. {AGAIN}"
            ) from error
        if x.dtype != wanted.dtype or x.shape != wanted.shape or not _same_bytes(x, wanted):
            raise BundleError(
                f"the golden self-check failed: preprocessing gives {_kind(x)}, the bundle has "
                f"{_kind(wanted)}; {_gap(x, wanted)}. Look at what changed in preprocessing.py or "
                f"in the versions of numpy and Pillow, or make the bundle again. {AGAIN}"
            )
        gap = (self.outputs(x) - torch.from_numpy(golden["outputs"])).abs().max().item()
        if not gap <= OUTPUT_TOLERANCE:
            raise BundleError(
                f"the golden self-check failed: equal inputs, but the outputs differ by {gap:.2g} "
                f"(at most {OUTPUT_TOLERANCE:g}). Look at what changed in model.py. {AGAIN}"
            )

    # ---- answering ------------------------------------------------------------------------------

    def predict(self, raw: Any) -> dict:
        """{answer, class, probability, probabilities} for one input.

        `raw` is an array, the bytes of an image file, or the path of one. Raises ValueError for
        what cannot be read, OSError for a path that is not there.
        """
        return self.predict_batch([raw])[0]

    def predict_batch(self, raws: Sequence[Any]) -> list[dict]:
        """One answer per input. The tensor of an input does not depend on the others."""
        found: list[dict] = []
        for start in range(0, len(raws), BATCH_SIZE):
            part = [self.prepare(self._raw(raw)) for raw in raws[start : start + BATCH_SIZE]]
            found += self.read(self.outputs(torch.stack(part)), self.class_names)
        return found

    def outputs(self, x: torch.Tensor) -> torch.Tensor:
        """`(B, K)`: a single model's logits, or an ensemble's log of the mean probability."""
        with torch.inference_mode():
            found = [member(x).float() for member in self.members]
        return found[0] if len(found) == 1 else _average(found)

    def _raw(self, raw: Any) -> Any:
        if isinstance(raw, (str, os.PathLike)):
            raw = Path(raw).read_bytes()
        return self.preprocessing.decode(raw) if isinstance(raw, bytes) else raw


def _same_bytes(x: torch.Tensor, y: torch.Tensor) -> bool:
    """Unlike torch.equal this tells -0.0 from 0.0 and finds NaN equal to itself."""
    return x.contiguous().numpy().tobytes() == y.contiguous().numpy().tobytes()


def _kind(x: torch.Tensor) -> str:
    return f"{tuple(x.shape)} {str(x.dtype).removeprefix('torch.')}"


def _gap(x: torch.Tensor, y: torch.Tensor) -> str:
    if x.shape != y.shape:
        return "another shape"
    return f"{(x != y).float().mean().item():.1%} of the values differ"


# ---- how outputs are read -----------------------------------------------------------------------


def _average(outputs: list[torch.Tensor]) -> torch.Tensor:
    logs = torch.stack([z.log_softmax(dim=1) for z in outputs])
    return torch.logsumexp(logs, dim=0) - math.log(len(outputs))


def _exclusive(outputs: torch.Tensor, class_names: Sequence[str]) -> list[dict]:
    """Exclusive classes: softmax over logits (B, K)."""
    answers = []
    for row in outputs.softmax(dim=1).tolist():
        place = max(range(len(row)), key=row.__getitem__)
        answers.append(
            {
                "answer": class_names[place],
                "class": place,
                "probability": row[place],
                "probabilities": dict(zip(class_names, row, strict=True)),
            }
        )
    return answers


READERS = {"exclusive": _exclusive}
