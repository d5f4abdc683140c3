"""What every test stands on: one thread, no screen, no network, the project's own folder."""

import os
from pathlib import Path

os.environ["MPLBACKEND"] = "Agg"
os.environ["WANDB_MODE"] = "offline"
os.environ["OMP_NUM_THREADS"] = "1"  # for the commands that tests start

import pytest
import torch

torch.set_num_threads(1)  # 3-4 times faster than the default for tensors this small

ROOT = Path(__file__).resolve().parents[1]


def pytest_collection_modifyitems(config, items):
    """Faults are planted in the project's own pipeline only when asked: pytest -m faults."""
    if "faults" in config.option.markexpr:
        return
    planted = [item for item in items if item.get_closest_marker("faults")]
    config.hook.pytest_deselected(items=planted)
    items[:] = [item for item in items if item not in planted]


@pytest.fixture
def project_root() -> Path:
    """The folder with run.py, configs/ and the package. Never write into it from a test."""
    return ROOT
