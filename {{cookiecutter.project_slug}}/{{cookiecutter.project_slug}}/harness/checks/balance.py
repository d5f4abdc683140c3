"""Whether targets are balanced, and what one answer for every row would cost."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch

from . import layout


def off_centre(y: torch.Tensor) -> float:
    """|mean| of the targets in their standard deviations, over all columns."""
    values = y.double().reshape(len(y), -1).cpu()
    variance = values.var(dim=0, unbiased=False).mean().clamp(min=1e-24)
    return (values.mean(dim=0).square().mean() / variance).sqrt().item()


def balanced(
    task: Any,
    y: torch.Tensor,
    prior: np.ndarray,
    max_entropy_share: float,
    min_label_share: float,
    min_mean_deviations: float,
) -> str | None:
    """Why no bias is needed; None if one is."""
    if task.targets == "real":
        mean = off_centre(y)
        if mean > min_mean_deviations:
            return None
        return (
            f"The targets are centred: their mean is {mean:.3g} standard deviations from zero "
            f"(the check applies above {min_mean_deviations:g})."
        )
    if task.targets == "multilabel":
        rarest = float(np.minimum(prior, 1 - prior).min())
        if rarest < min_label_share:
            return None
        return (
            f"The labels are balanced: none is present or absent in less than {rarest:.3g} of the "
            f"rows (the check applies below {min_label_share:g})."
        )
    evenness = float(-(prior * np.log(prior)).sum()) / math.log(len(prior))
    if evenness < max_entropy_share:
        return None
    return (
        f"The labels are balanced: their entropy is {evenness:.3g} of the most possible "
        f"(the check applies below {max_entropy_share:g})."
    )


def of_constant(
    task: Any, mean: torch.Tensor, y: torch.Tensor, prior: np.ndarray
) -> tuple[float, float]:
    """(loss of these outputs for every row, largest gap of the predicted shares)."""
    if task.targets == "real":
        return _of_constant_number(task, mean, y, prior), math.inf
    row = layout.single(task, mean[None])
    said = mean.double().sigmoid() if task.targets == "multilabel" else mean.double().softmax(0)
    gap = float(np.abs(said.numpy() - prior).max())
    return task.expected_loss(row, prior), gap


def _of_constant_number(task: Any, mean: torch.Tensor, y: torch.Tensor, prior: np.ndarray) -> float:
    """In units of the task's own best constant: by its formula, or by how far the outputs are from
    the targets' mean in deviations, whichever is less (the best constant need not be the mean). Of
    several columns the latter only: the formula takes one mean for all."""
    values = y.double().reshape(len(y), -1).cpu()
    away = (mean.double().reshape(-1) - values.mean(dim=0)).square().mean()
    squares = 1 + (away / values.var(dim=0, unbiased=False).mean()).item()
    away_from_mean = squares * task.prior_loss(prior)
    if values.shape[1] > 1:
        return away_from_mean
    return min(away_from_mean, task.expected_loss(mean[None], prior))
