"""What a run leaves: its result, and weights on disk as safetensors and JSON, never pickle."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors.torch import save as save_tensors
from torch import nn

from . import files


@dataclass
class FitResult:
    """`best_state` is the checkpoint of the lowest watched loss, `best_validation_state` that of
    the lowest validation loss; both on the CPU."""

    num_steps: int = 0
    num_epochs: int = 0
    stopped: str = ""
    best_epoch: int = 0
    best_loss: float = math.inf
    best_validation_epoch: int = 0
    best_validation_loss: float = math.inf
    best_state: dict = field(default_factory=dict)
    best_validation_state: dict = field(default_factory=dict)
    epochs: list[dict] = field(default_factory=list)  # one row per epoch
    steps: list[dict] = field(default_factory=list)  # one row per fetched step


def cpu_state(model: nn.Module) -> dict[str, torch.Tensor]:
    """A copy of all weights and buffers on the CPU, from whatever device."""
    copy = {key: value.detach().cpu().clone() for key, value in model.state_dict().items()}
    return {key: value.contiguous() for key, value in copy.items()}


def save_checkpoint(path: Path, state: dict, about: dict) -> None:
    """PATH.safetensors and PATH.json beside it."""
    files.write_bytes(path, save_tensors(state))
    files.write_json(path.with_suffix(".json"), about)
