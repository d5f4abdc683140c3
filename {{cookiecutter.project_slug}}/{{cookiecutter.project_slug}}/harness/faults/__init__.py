"""Faults that plant themselves around whatever model, loss, data and loop a pipeline has.

`python run.py stage=skeleton fault=NAME scratch=true` shows which checks shut; `pytest -m faults`
plants each and asserts that its check shuts. No file is edited: parts are replaced by wrapped ones.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable
from dataclasses import dataclass

from ..checks import Pipeline, undisturbed
from . import data, evaluation, loss, model, step
from .plant import NotPlantable

__all__ = ["FAULTS", "Fault", "NotPlantable", "nearest", "plant"]


@dataclass(frozen=True)
class Fault:
    plant: Callable[[Pipeline], Pipeline]  # raises NotPlantable
    check: str  # the one that must shut
    why: str  # what goes wrong while training looks as ever


_ROWS = (
    # ---- data and splits
    Fault(data.validation_rows_in_train, "split_hygiene", "Held-out rows are learned by heart."),
    Fault(data.group_in_both_splits, "split_hygiene", "A group is known from training."),
    Fault(data.future_in_train, "split_hygiene", "Training rows are later than held-out ones."),
    Fault(data.one_label_leaked, "feature_leak", "One value of a row is its label."),
    Fault(data.store_changed_by_reading, "record_store", "A record changes each time it is read."),
    Fault(data.not_shuffled, "loader", "Batches hold neighbours of the file."),
    Fault(data.same_order_each_epoch, "loader", "The same rows share a batch in every epoch."),
    Fault(data.rows_repeated, "loader", "A quarter of the rows is never seen."),
    Fault(data.labels_rolled, "last_seam", "Inputs stand beside another row's label."),
    Fault(data.labels_count_from_one, "last_seam", "Labels count from 1, outputs from 0."),
    Fault(data.inputs_blanked, "last_seam", "Every input is the same."),
    Fault(data.nan_in_inputs, "last_seam", "Some values are no numbers."),
    Fault(model.inputs_scaled_on_the_way, "last_seam", "Inputs are not as preprocessing declares."),
    Fault(data.targets_not_shifted, "target_offset", "The model is asked for what it is given."),
    Fault(data.most_targets_ignored, "supervised_share", "Hardly any target counts."),
    Fault(data.validation_normalised_differently, "split_parity", "Held-out rows are scaled."),
    Fault(data.preparing_draws_at_random, "split_parity", "Preparing adds noise to all splits."),
    Fault(evaluation.inputs_scaled_in_evaluation, "split_parity", "Evaluation scales its inputs."),
    # ---- loss
    Fault(model.softmax_before_loss, "loss_contract", "The loss gets probabilities, not logits."),
    Fault(model.softplus_on_outputs, "loss_contract", "No output can be negative."),
    Fault(loss.sign_flipped, "loss_contract", "The loss falls where answers get worse."),
    Fault(loss.loss_summed, "loss_contract", "The rate grows with the batch."),
    Fault(loss.loss_clamped, "loss_contract", "What is most wrong has no gradient."),
    Fault(loss.loss_over_batch_axis, "loss_contract", "Rows compete instead of classes."),
    Fault(loss.nll_on_raw_logits, "loss_contract", "The loss has no lowest value."),
    Fault(loss.binary_loss_for_classes, "loss_contract", "Classes do not exclude each other."),
    Fault(loss.class_ignored, "loss_contract", "One class is never learned."),
    Fault(loss.undeclared_class_weights, "loss_contract", "Some classes count four times."),
    Fault(loss.dead_term, "loss_terms", "A term of the loss has no gradient."),
    Fault(loss.label_around_input, "loss_at_init", "The label reaches the outputs."),
    # ---- evaluation
    Fault(evaluation.eval_never_called, "modes", "Dropout and batch statistics act in evaluation."),
    Fault(evaluation.train_never_restored, "modes", "After an evaluation dropout is off for good."),
    Fault(step.step_in_evaluation_mode, "modes", "Dropout never acts, statistics never learn."),
    Fault(model.dropout_always_on, "modes", "Outputs are drawn at random in evaluation."),
    Fault(model.statistics_frozen, "modes", "Running statistics stay as they started."),
    Fault(evaluation.rows_dropped_in_evaluation, "human_metric", "The last batch is not scored."),
    Fault(evaluation.mean_of_batch_means, "human_metric", "Rows of small batches count more."),
    Fault(evaluation.metric_keeps_state, "human_metric", "A score depends on those before it."),
    Fault(evaluation.targets_reordered_in_evaluation, "human_metric", "Rows lose their labels."),
    Fault(evaluation.metric_inverted, "human_metric", "Right answers score worst."),
    # ---- model
    Fault(model.batch_mixed_by_reshape, "sample_boundary", "A row is made of several."),
    Fault(model.batch_statistic_in_outputs, "sample_boundary", "Answers depend on the batch."),
    Fault(model.future_seen, "sample_boundary", "A position knows what comes next."),
    Fault(model.padding_counted, "pad_invariance", "Padding changes the answer."),
    Fault(model.axes_mixed_by_reshape, "axis_identity", "Values move to other places in a row."),
    Fault(model.field_unused, "field_influence", "Part of the input is never read."),
    Fault(model.trunk_detached, "trainable_parameters", "Early layers get no gradient."),
    Fault(model.head_frozen, "trainable_parameters", "The last layer stays as it started."),
    Fault(model.layers_in_a_list, "trainable_parameters", "No optimizer finds some layers."),
    Fault(model.all_zero_init, "trainable_parameters", "Layers get no gradient at zero."),
    Fault(model.dead_units, "trainable_parameters", "Units never fire."),
    Fault(model.constant_init, "symmetry", "All units of a layer are one unit."),
    # ---- step and loop
    Fault(step.optimizer_missing_a_tensor, "trainable_parameters", "Some tensors never change."),
    Fault(step.optimizer_of_another_model, "trainable_parameters", "Another model is updated."),
    Fault(step.rate_of_a_group_lost, "trainable_parameters", "Some tensors have a rate of zero."),
    Fault(step.zero_grad_missing, "step_oracle", "Gradients of all steps add up."),
    Fault(step.zero_grad_misplaced, "step_oracle", "Gradients are gone before the update."),
    Fault(step.gradient_ascended, "step_oracle", "Weights move uphill."),
    Fault(step.stepped_twice, "step_oracle", "Each batch updates the weights twice."),
    Fault(step.tiny_clip, "step_oracle", "Next to nothing of a gradient is left."),
    Fault(step.accumulation_not_divided, "step_oracle", "Parts of a batch count in full."),
    Fault(loss.broadcast_warning, "library_warnings", "Every row is compared with every other."),
    Fault(step.precision_not_as_declared, "precision", "Autocast is not applied."),
    Fault(step.schedule_ends_early, "schedule", "The rate is zero for most of the run."),
    Fault(step.best_by_reference, "best_checkpoint", "The best weights are the last ones."),
    Fault(step.huge_rate, "update_ratio", "The rate is a thousand times too high."),
    Fault(step.tiny_rate, "update_ratio", "The rate is far too low to learn."),
    # ---- training
    Fault(step.huge_decay, "overfit_one_batch", "Weights forget faster than they learn."),
    Fault(model.tanh_on_outputs, "overfit_one_batch", "No answer can be certain."),
    Fault(data.labels_permuted, "input_independent_baseline", "Labels belong to other inputs."),
    Fault(data.labels_permuted_in_validation, "input_independent_baseline", "Only held-out rows."),
    Fault(data.classes_swapped_in_validation, "confusion", "Two classes are mistaken."),
)
FAULTS = {row.plant.__name__: row for row in _ROWS}


def plant(pipeline: Pipeline, name: str) -> Pipeline:
    """The pipeline with this fault around it. Raises NotPlantable where it has no place for it."""
    with undisturbed(pipeline):
        return FAULTS[name].plant(pipeline)


def nearest(name: str) -> str:
    """The fault whose name is closest."""
    return difflib.get_close_matches(name, FAULTS, n=1, cutoff=0.0)[0]
