"""What is in the data: one statement per axis, each with the recall of its own method.

A detector is a function `(subject, limits, seed) -> Statement`. It plants faults in a copy of the
data first and states how many it found; only then does its "none found" mean something.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from . import baselines, drift, duplicates, labels, leakage, samples
from .statement import draft
from .structure import structure
from .subject import Limits, Statement, Subject, rounded

__all__ = ["AXES", "Audit", "Limits", "Statement", "Subject", "run_audit"]

DETECTORS = (
    samples.corrupt,
    duplicates.exact_duplicates,
    duplicates.near_duplicates,
    duplicates.conflicting_labels,
    leakage.cross_split_leakage,
    labels.imbalance,
    samples.outliers,
    samples.constant_columns,
    leakage.target_leakage,
    drift.order_and_groups,
    drift.split_drift,
    labels.label_noise,
)
AXES = tuple(detector.__name__ for detector in DETECTORS)


@dataclass(frozen=True)
class Audit:
    """Everything the audit measured."""

    statements: tuple[Statement, ...]
    counts: dict[str, dict[str, int]]  # rows per split and class
    ladder: dict[str, dict[str, float]]  # baselines scored on validation
    structure: dict
    loss_floor: float  # nats; no model gets below it on train (conflicting duplicates)
    draft: dict[str, str]  # architecture, because, findings

    def statement(self, axis: str) -> Statement:
        return next(found for found in self.statements if found.axis == axis)

    @property
    def to_review(self) -> tuple[str, ...]:
        """The suspected labels that a person should judge for `data.label_review`."""
        return labels.review_list(self.statement("label_noise").ids, seed=0)

    def handoff(self) -> dict:
        """What later stages read, and nothing that makes them stale when a sentence changes."""
        ladder = {
            name: {key: rounded(value) for key, value in scores.items()}
            for name, scores in self.ladder.items()
        }
        return {
            "loss_floor": rounded(self.loss_floor),
            "ladder": ladder,
            "label_suspects": list(self.statement("label_noise").ids),
        }

    def row(self) -> dict:
        """The audit as JSON, for people and their tools."""
        return {
            "statements": [statement.row() for statement in self.statements],
            "counts": self.counts,
            "structure": self.structure,
            "draft": self.draft,
            "label_review": list(self.to_review),
            **self.handoff(),
        }


def run_audit(
    subject: Subject, limits: Limits, *, seed: int, review: Mapping[str, str] | None = None
) -> Audit:
    """Every axis in order, the baselines and the draft; the same numbers on every run.

    `review` maps ids to "wrong" or "right": a person's word on suspected labels. Runs on one
    thread: sums in another order differ in the last bits.
    """
    from threadpoolctl import threadpool_limits

    with threadpool_limits(limits=1):
        statements = tuple(
            detector(subject, limits, seed, review)
            if detector is labels.label_noise
            else detector(subject, limits, seed)
            for detector in DETECTORS
        )
        train, validation = subject.rows("train"), subject.rows("validation")
        ladder = baselines.ladder(
            subject.vectors[train],
            subject.labels[train],
            subject.vectors[validation],
            subject.labels[validation],
            num_classes=subject.num_classes,
            seed=seed,
        )
        found = structure(subject, seed)
    return Audit(
        statements,
        labels.counts(subject),
        ladder,
        found,
        duplicates.loss_floor(subject),
        draft(statements, ladder, found),
    )
