"""YOURS: the task. Loss, metric, prior, and how a person reads an input, a label and a prediction.

One image, one label of `num_outputs` exclusive classes. Everything the harness needs to know about
the problem is asked here, so another problem changes this file and not the harness.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

METRICS = ("accuracy", "balanced_accuracy")


class Task:
    """Exclusive classes: outputs are logits `(B, num_outputs)`, targets `(B,)` int64."""

    targets = "exclusive"
    metric_direction = "max"
    metric_bounds = (0.0, 1.0)

    def __init__(self, settings, class_names, label_smoothing: float = 0.0):
        if settings.metric not in METRICS:
            raise ValueError(f"task.metric={settings.metric!r} is not one of {', '.join(METRICS)}.")
        self.class_names = tuple(class_names)
        self.num_outputs = len(self.class_names)
        self.metric_name = settings.metric
        self.sklearn_metric = f"{settings.metric}_score"
        self.label_smoothing = label_smoothing

    # ---- loss and metric -------------------------------------------------------------------

    def loss(self, outputs: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """Mean cross entropy in nats. Takes raw logits: a softmax before it would flatten it."""
        return F.cross_entropy(outputs, y, label_smoothing=self.label_smoothing)

    def loss_per_row(self, outputs: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """`(B,)`, in nats."""
        return F.cross_entropy(outputs, y, label_smoothing=self.label_smoothing, reduction="none")

    def metric(self, outputs: torch.Tensor, y: torch.Tensor) -> float:
        """The metric over all rows handed in: hand in the whole split, not a batch."""
        correct = self.correct(outputs, y)
        if self.metric_name == "accuracy":
            return correct.double().mean().item()
        return float(np.mean([correct[y == c].double().mean().item() for c in y.unique()]))

    def predict(self, outputs: torch.Tensor) -> torch.Tensor:
        """`(B,)` class indices."""
        return outputs.argmax(dim=1)

    def correct(self, outputs: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """`(B,)` bool."""
        return self.predict(outputs) == y

    def margin(self, outputs: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """`(B,)` log-odds of the right class against the best wrong one; negative = wrong."""
        logits = outputs.float()
        right = logits.gather(1, y[:, None]).squeeze(1)
        wrong = logits.scatter(1, y[:, None], -math.inf).max(dim=1).values
        return right - wrong

    def average(self, outputs: list[torch.Tensor]) -> torch.Tensor:
        """Outputs of an ensemble: log of the mean probability, `(B, num_outputs)`."""
        stacked = torch.stack([F.log_softmax(o.float(), dim=1) for o in outputs])
        return torch.logsumexp(stacked, dim=0) - math.log(len(outputs))

    # ---- what is expected before any training ----------------------------------------------

    def prior(self, y: torch.Tensor) -> np.ndarray:
        """`(num_outputs,)` label shares of the training rows, with +1 smoothing."""
        counts = np.bincount(y.cpu().numpy(), minlength=self.num_outputs) + 1.0
        return counts / counts.sum()

    def chance(self, prior: np.ndarray) -> float:
        """Metric of the best constant answer."""
        return float(prior.max()) if self.metric_name == "accuracy" else 1.0 / self.num_outputs

    def prior_loss(self, prior: np.ndarray) -> float:
        """Loss of the best constant prediction: the entropy of the (smoothed) labels, in nats."""
        smoothed = self._smooth(prior)
        return float(-(smoothed * np.log(smoothed)).sum())

    def flat_loss(self, prior: np.ndarray) -> float:
        """Loss of a model that has no opinion: log n."""
        return math.log(self.num_outputs)

    def expected_loss(self, outputs: torch.Tensor, prior: np.ndarray) -> float:
        """Exact mean loss of these outputs if labels were drawn from `prior` independently:
        mean(logsumexp(z) - sum_c p_c z_c)."""
        z = outputs.double()
        p = torch.as_tensor(self._smooth(prior), dtype=z.dtype, device=z.device)
        return (torch.logsumexp(z, dim=1) - z @ p).mean().item()

    def optimum_loss(self) -> float:
        """The lowest value the loss can reach: 0, or the entropy of a smoothed label."""
        smoothed = self._smooth(np.eye(self.num_outputs)[0])
        return float(-(smoothed * np.log(np.maximum(smoothed, 1e-300))).sum())

    def constant_outputs(self, prior: np.ndarray, num_rows: int) -> torch.Tensor:
        """`(num_rows, num_outputs)` logits that predict the prior for every row."""
        row = torch.as_tensor(np.log(prior), dtype=torch.float32)
        return row.repeat(num_rows, 1)

    def ideal_outputs(self, y: torch.Tensor, scale: float = 30.0) -> torch.Tensor:
        """`(B, num_outputs)` logits of a perfect model; with smoothing, the loss's own best."""
        share = self.label_smoothing / self.num_outputs
        gap = math.log((1 - self.label_smoothing + share) / share) if share > 0 else scale
        return F.one_hot(y, self.num_outputs).float() * gap

    def set_prior_bias(self, model: nn.Module, prior: np.ndarray) -> None:
        """Start from the label shares: the first steps need not learn them."""
        with torch.no_grad():
            model.head.bias.copy_(torch.as_tensor(np.log(prior)))

    def _smooth(self, shares: np.ndarray) -> np.ndarray:
        return (1 - self.label_smoothing) * shares + self.label_smoothing / self.num_outputs

    # ---- how a person reads it -------------------------------------------------------------

    def answer(self, prediction: int) -> str:
        return self.class_names[int(prediction)]

    def describe(self, raw: np.ndarray) -> str:
        return f"{'x'.join(map(str, raw.shape))}, values {raw.min():g} to {raw.max():g}"

    def features(self, raw: np.ndarray) -> dict[str, float]:
        """The axes the audit looks along, one number each."""
        values = raw.astype(np.float64)
        rows, columns = raw.shape[:2]
        return {
            "height_px": float(rows),
            "width_px": float(columns),
            "brightness": float(values.mean()),
            "contrast": float(values.std()),
        }

    def embed(self, x: torch.Tensor) -> np.ndarray:
        """`(N, D)` float32 vectors in which near means alike: the preprocessed pixels."""
        return x.flatten(1).cpu().numpy()

    def draw(self, raw: np.ndarray) -> np.ndarray:
        """A picture for a person: `(H, W)` or `(H, W, 3)`."""
        return raw[..., 0] if raw.ndim == 3 and raw.shape[2] == 1 else raw

    def draw_weights(self, weight: torch.Tensor, input_shape: tuple[int, ...]) -> np.ndarray | None:
        """First-layer weights as pictures `(K, H, W)`; None if they have no spatial reading."""
        if weight.ndim == 4:
            return weight.mean(dim=1).cpu().numpy()
        if weight.shape[1] == math.prod(input_shape):
            return weight.reshape(-1, *input_shape).mean(dim=1).cpu().numpy()
        return None
