"""The checks in the order in which they diagnose, causes before consequences: the first that shuts
is the one to repair.

Which of them a stage runs: SKELETON is all of them; PREFLIGHT is what depends on the model, for
overfit; REGULARIZED and TUNED are what the changes made there can break.
"""

from __future__ import annotations

from .baseline import input_independent_baseline
from .confusion import confusion
from .contract import loss_contract
from .inside import axis_identity, field_influence, symmetry
from .kept import best_checkpoint
from .leak import feature_leak
from .loader import loader, record_store
from .loss import loss_at_init, prior_bias
from .metric import human_metric, human_reference
from .model import sample_boundary
from .modes import modes
from .overfit import overfit_one_batch
from .padding import pad_invariance
from .parameters import trainable_parameters
from .precision import precision
from .rates import update_ratio
from .schedule import schedule
from .seam import last_seam
from .split import split_hygiene, split_parity
from .step import step_oracle
from .targets import supervised_share, target_offset
from .terms import loss_terms
from .warned import library_warnings

DATA = (  # look at data and loaders alone: no model, no step
    split_hygiene,
    feature_leak,
    record_store,
    loader,
    target_offset,
    supervised_share,
)
PREFLIGHT = (
    split_parity,
    last_seam,
    loss_contract,
    loss_terms,
    loss_at_init,
    prior_bias,
    modes,
    human_metric,
    field_influence,
    trainable_parameters,
    symmetry,
    sample_boundary,
    axis_identity,
    pad_invariance,
    step_oracle,
    library_warnings,
    precision,
    schedule,
    best_checkpoint,
    update_ratio,
    overfit_one_batch,
    input_independent_baseline,
    confusion,
    human_reference,
)
SKELETON = (*DATA, *PREFLIGHT)
# Augmentation, dropout, decay and a smoothed or weighted loss: what they can break.
REGULARIZED = (
    loader,
    split_parity,
    last_seam,
    loss_contract,
    loss_terms,
    modes,
    trainable_parameters,
    step_oracle,
    library_warnings,
    schedule,
    best_checkpoint,
    update_ratio,
)
# Rate, batch size, clipping, schedule: what another setting can break.
TUNED = (loader, step_oracle, precision, schedule, best_checkpoint, update_ratio)
