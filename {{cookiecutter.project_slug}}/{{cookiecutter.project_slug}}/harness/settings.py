"""The keys of the configuration and their types; the values stand in configs/*.yaml."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from omegaconf import MISSING

# ---- groups -------------------------------------------------------------------------------------


@dataclass
class SplitConfig:
    strategy: str = MISSING  # random | group | time | given | kfold
    test: str = MISSING  # held_out | none | external
    validation_fraction: float = MISSING
    test_fraction: float = MISSING
    seed: int = MISSING
    num_folds: int = MISSING  # kfold only
    fold: int = MISSING  # kfold only: which fold validates
    near_together: bool = MISSING  # near duplicates, too, always fall in one split


@dataclass
class StatementConfig:
    """The owner's words about the data; empty keeps the audit's gate shut."""

    architecture: str = MISSING
    because: str = MISSING
    findings: str = MISSING


@dataclass
class HumanReferenceConfig:
    value: float | None = MISSING
    kind: str | None = MISSING  # measured | published | inter-rater | impossible
    num_samples: int | None = MISSING


@dataclass
class DataConfig:
    source: str = MISSING
    path: str | None = MISSING
    test_path: str | None = MISSING  # with split.test=external
    public: bool = MISSING  # may pictures of samples be committed?
    value_range: list[float] | None = MISSING
    label_review: str | None = MISSING  # CSV id,verdict of reviewed suspects
    options: dict[str, Any] = MISSING
    split: SplitConfig = field(default_factory=SplitConfig)
    statement: StatementConfig = field(default_factory=StatementConfig)
    human_reference: HumanReferenceConfig = field(default_factory=HumanReferenceConfig)


@dataclass
class TaskConfig:
    metric: str = MISSING


@dataclass
class ModelConfig:
    name: str = MISSING
    params: dict[str, Any] = MISSING
    wider: dict[str, Any] = MISSING  # what more capacity means for this network


@dataclass
class OptimizerConfig:
    name: str = MISSING  # adam | adamw | sgd
    lr: float = MISSING
    betas: list[float] = MISSING
    momentum: float = MISSING
    clip_norm: float | None = MISSING
    schedule: str = MISSING  # constant | cosine
    warmup_fraction: float = MISSING
    accumulate: int = MISSING


@dataclass
class RegularizationConfig:
    augment: dict[str, Any] = MISSING
    dropout: float = MISSING
    weight_decay: float = MISSING
    label_smoothing: float = MISSING
    batch_size: int | None = MISSING  # null keeps the batch size of config.yaml
    patience_epochs: int | None = MISSING  # early stopping; null trains all epochs


@dataclass
class LoggerConfig:
    name: str = MISSING  # none | wandb
    project: str | None = MISSING
    mode: str = MISSING  # offline | online


# ---- stages: a delta plus the limits of the gate -------------------------------------------------


@dataclass
class StatusStage:
    name: str = MISSING


@dataclass
class DataAuditStage:
    name: str = MISSING
    limits: dict[str, float] = MISSING


@dataclass
class SkeletonStage:
    name: str = MISSING
    models: list[str] = MISSING
    limits: dict[str, float] = MISSING


@dataclass
class OverfitStage:
    name: str = MISSING
    num_epochs: int = MISSING
    num_seeds: int = MISSING
    budget_s: float = MISSING
    subset: int | None = MISSING
    capacity_epochs: int = MISSING
    lr_range_steps: int = MISSING
    limits: dict[str, float] = MISSING


@dataclass
class RegularizeStage:
    name: str = MISSING
    num_epochs: int = MISSING
    limits: dict[str, float] = MISSING


@dataclass
class TuneStage:
    name: str = MISSING
    num_epochs: int = MISSING
    trial_epochs: int = MISSING
    num_trials: int = MISSING
    num_seeds: int = MISSING
    sampler: str = MISSING  # random | tpe
    prune: bool = MISSING
    storage: str | None = MISSING  # null: a journal file below runs/; or a database URL
    space: dict[str, Any] = MISSING
    limits: dict[str, float] = MISSING


@dataclass
class SqueezeStage:
    name: str = MISSING
    candidates: list[str] = MISSING
    longer_factor: float = MISSING
    max_hard_cases: int = MISSING
    limits: dict[str, float] = MISSING


STAGES = {
    "status": StatusStage,
    "data_audit": DataAuditStage,
    "skeleton": SkeletonStage,
    "overfit": OverfitStage,
    "regularize": RegularizeStage,
    "tune": TuneStage,
    "squeeze": SqueezeStage,
}


@dataclass
class Config:
    stage: Any = MISSING
    data: DataConfig = field(default_factory=DataConfig)
    task: TaskConfig = field(default_factory=TaskConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    regularization: RegularizationConfig = field(default_factory=RegularizationConfig)
    logger: LoggerConfig = field(default_factory=LoggerConfig)
    checks: dict[str, dict[str, float]] = MISSING  # limits of the checks of skeleton and overfit
    batch_size: int = MISSING
    seed: int = MISSING
    device: str = MISSING  # auto | cuda | mps | cpu
    precision: str = MISSING  # fp32 | bf16
    num_threads: int = MISSING
    commit_samples: bool = MISSING
    scratch: bool = MISSING
    reaffirm: bool = MISSING
    trial: int | None = MISSING
    fault: str | None = MISSING  # one of harness/faults, planted in skeleton or overfit
