"""YOURS: the networks. Each is looked up here by its class name, so no config can import code.

Every network takes `(B, C, H, W)` and returns logits `(B, num_outputs)`: no softmax at the end, the
loss does that. Its last layer is called `head`, so the task can set its bias to the label shares.
"""

from __future__ import annotations

import difflib
import math

import torch
from torch import nn


class Linear(nn.Module):
    """The model one cannot get wrong: one weight per input value and class."""

    def __init__(self, input_shape, num_outputs: int):
        super().__init__()
        self.head = nn.Linear(math.prod(input_shape), num_outputs)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(x.flatten(1))


class TinyConvNet(nn.Module):
    """Two convolutions without normalisation: small enough to be beyond suspicion."""

    def __init__(self, input_shape, num_outputs: int, width: int = 8):
        super().__init__()
        self.trunk = nn.Sequential(
            nn.Conv2d(input_shape[0], width, kernel_size=3, padding=1),
            nn.ReLU(),
            nn.Conv2d(width, 2 * width, kernel_size=3, stride=2, padding=1),
            nn.ReLU(),
        )
        side = [math.ceil(length / 2) for length in input_shape[1:]]
        self.head = nn.Linear(2 * width * math.prod(side), num_outputs)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.trunk(x).flatten(1))


class ConvNet(nn.Module):
    """Stages of two 3x3 convolutions with BatchNorm; each later stage halves the side and doubles
    the width; a mean over positions, then the head. Dropout is spatial: it drops whole channels."""

    def __init__(
        self,
        input_shape,
        num_outputs: int,
        width: int = 16,
        num_stages: int = 2,
        dropout: float = 0.0,
    ):
        super().__init__()
        layers, channels = [], input_shape[0]
        for stage in range(num_stages):
            out = width * 2**stage
            layers += [*_conv(channels, out, stride=1 if stage == 0 else 2), *_conv(out, out)]
            layers += [nn.Dropout2d(dropout)] if dropout > 0 else []
            channels = out
        self.trunk = nn.Sequential(*layers)
        self.head = nn.Linear(channels, num_outputs)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.trunk(x).mean(dim=(2, 3)))


def _conv(channels: int, out: int, stride: int = 1) -> list[nn.Module]:
    """No bias before BatchNorm: it would be subtracted again."""
    conv = nn.Conv2d(channels, out, kernel_size=3, stride=stride, padding=1, bias=False)
    return [conv, nn.BatchNorm2d(out), nn.ReLU()]


def build(name: str, params: dict, input_shape, num_outputs: int, dropout: float = 0.0):
    """The network called `name`, freshly initialised from torch's current generator.

    Raises ValueError naming the nearest class when there is no such network here.
    """
    networks = {
        key: value
        for key, value in globals().items()
        if isinstance(value, type) and issubclass(value, nn.Module)
    }
    if name not in networks:
        near = difflib.get_close_matches(name, networks, n=1, cutoff=0)[0]
        known = ", ".join(networks)
        raise ValueError(f"model.name={name!r} is not in model.py ({known}). Nearest: {near}.")
    extra = {"dropout": dropout} if dropout > 0 else {}
    try:
        return networks[name](input_shape, num_outputs, **params, **extra)
    except TypeError as error:
        raise ValueError(f"model.params do not fit {name} in model.py: {error}.") from error


def parameter_groups(model: nn.Module, lr: float, weight_decay: float) -> list[dict]:
    """Weight decay on matrices and filters only: biases and norm scales have no reason to shrink.

    Every trainable parameter is in exactly one group.
    """
    trainable = [p for p in model.parameters() if p.requires_grad]
    decayed = [p for p in trainable if p.ndim >= 2]
    plain = [p for p in trainable if p.ndim < 2]
    groups = [
        {"params": decayed, "lr": lr, "weight_decay": weight_decay},
        {"params": plain, "lr": lr, "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]
