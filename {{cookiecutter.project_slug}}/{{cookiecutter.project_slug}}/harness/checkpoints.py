"""Weights on disk: safetensors and JSON, never pickle, each file whole or absent."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import save as save_tensors
from torch import nn

from . import files


def cpu_state(model: nn.Module) -> dict[str, torch.Tensor]:
    """A copy of all weights and buffers on the CPU, from whatever device."""
    copy = {key: value.detach().cpu().clone() for key, value in model.state_dict().items()}
    return {key: value.contiguous() for key, value in copy.items()}


def save_checkpoint(path: Path, state: dict, about: dict) -> None:
    """PATH.safetensors and PATH.json beside it."""
    files.write_bytes(path, save_tensors(state))
    files.write_json(path.with_suffix(".json"), about)
