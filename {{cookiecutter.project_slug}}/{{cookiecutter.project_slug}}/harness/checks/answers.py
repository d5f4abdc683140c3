"""Outputs whose worth is known: right ones, wrong ones, constant ones, for each kind of target.

`exclusive` (B, K) for y (B,), `multilabel` (B, K) for y (B, K), `real` as y, `tokens` (B, T, V) for
y (B, T).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from . import layout

FAR = 30.0  # logits apart at which a softmax is certain
KINDS = ("exclusive", "multilabel", "real", "tokens")


def constant(task: Any, prior: np.ndarray, y: torch.Tensor) -> torch.Tensor:
    """The constant answer `prior` asks for, once per target."""
    outputs = task.constant_outputs(prior, len(y)).to(y.device)
    if task.targets == "tokens":
        return outputs.reshape(-1, outputs.shape[-1])[0].expand(*y.shape, -1)
    if task.targets == "real" and outputs.shape != y.shape:
        return outputs.reshape(len(y), -1)[:, 0].reshape(-1, *[1] * (y.ndim - 1)).expand_as(y)
    return outputs


def right(task: Any, y: torch.Tensor, scale: float | None = None) -> torch.Tensor:
    """Outputs of a perfect model, at the task's own scale or at this one."""
    outputs = task.ideal_outputs(y) if scale is None else task.ideal_outputs(y, scale)
    return outputs.to(y.device).float()


def corrupted(task: Any, y: torch.Tensor, share: float) -> torch.Tensor:
    """Right outputs, but those of the first `share` of the rows are wrong: the next class (and the
    right one last), every label inverted, or a number mirrored at the mean."""
    outputs, wrong = right(task, y).clone(), round(share * len(y))
    if not wrong:
        return outputs
    given = y[:wrong]
    if task.targets == "multilabel":
        outputs[:wrong] = right(task, 1 - given)
    elif task.targets == "real":
        outputs[:wrong] = right(task, 2 * y.float().mean(dim=0) - given)
    elif task.targets == "tokens":
        counted = layout.supervised(task, given)
        outputs[:wrong] = right(task, torch.where(counted, (given + 1) % outputs.shape[-1], given))
    else:
        outputs[:wrong] = right(task, (given + 1) % outputs.shape[-1])
        outputs[torch.arange(wrong, device=y.device), given] -= FAR
    return outputs


def few(y: torch.Tensor, width: int, max_values: int = 2_000_000) -> torch.Tensor:
    """`y`, or as many evenly spaced rows of it as `max_values` outputs allow."""
    most = max(8, max_values // max(1, width * y[:1].numel()))
    if len(y) <= most:
        return y
    return y[torch.linspace(0, len(y) - 1, most, device=y.device).round().long()]
