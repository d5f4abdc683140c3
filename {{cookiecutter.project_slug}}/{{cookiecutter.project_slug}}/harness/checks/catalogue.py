"""The checks of the skeleton in order: the seven gates, their companions, the owner's word."""

from __future__ import annotations

from .baseline import input_independent_baseline
from .contract import loss_contract
from .loader import last_seam
from .loss import loss_at_init, prior_bias
from .metric import human_metric, human_reference
from .model import sample_boundary
from .modes import modes
from .overfit import overfit_one_batch
from .parameters import trainable_parameters
from .split import split_parity
from .step import step_oracle

SKELETON = (
    loss_at_init,
    prior_bias,
    human_metric,
    input_independent_baseline,
    overfit_one_batch,
    last_seam,
    sample_boundary,
    trainable_parameters,
    step_oracle,
    loss_contract,
    modes,
    split_parity,
    human_reference,
)
