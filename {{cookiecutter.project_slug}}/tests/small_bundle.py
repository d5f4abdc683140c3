"""A bundle of a small network on small pictures, made the way training makes one."""

from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
from PIL import Image

from {{cookiecutter.project_slug}} import data, model, preprocessing
from {{cookiecutter.project_slug}}.harness import bundle, loop
from {{cookiecutter.project_slug}}.harness.sources import source_digest
from {{cookiecutter.project_slug}}.task import Task

NAMES = ("cat", "dog", "eel")
TASK = Task(SimpleNamespace(metric="accuracy"), NAMES)
ABOUT = {"name": "ConvNet", "params": {"width": 4}, "input_shape": [3, 9, 12], "num_outputs": 3}


@dataclass
class Case:
    records: object
    fitted: object
    rows: dict
    members: list
    folder: Path

    def write(self, **changed) -> str:
        source = Path(preprocessing.__file__).read_bytes()
        golden = {"raws": [data.read(raw) for raw in self.records.raw[:6]], "x": self.rows["x"][:6]}
        parts = {
            "members": [loop.cpu_state(member) for member in self.members],
            "model": ABOUT,
            "preprocessing": self.fitted.dumps(),
            "outputs": "exclusive",
            "class_names": NAMES,
            "facts": {"test accuracy": "0.97 [0.95, 0.99]"},
            "limits": ["Trained on drawings of animals."],
            "provenance": {"seed": 0},
            "sources": {"preprocessing.py": source_digest(source)},
            "golden": golden | {"outputs": self.outputs(golden["x"])},
        }
        return bundle.write(self.folder, **(parts | changed))

    def outputs(self, x: torch.Tensor) -> torch.Tensor:
        """As the training side sees them: `evaluate`, and the task's own average."""
        rows = {"x": x, "y": torch.zeros(len(x), dtype=torch.int64), "id": torch.arange(len(x))}
        found = [loop.evaluate(m, loop.Loader(rows, 64), TASK).outputs for m in self.members]
        return found[0] if len(found) == 1 else TASK.average(found)


def write_images(root: Path, num_per_class: int) -> Path:
    """Colour PNGs of 20x16, larger than the network's input, so that a resize takes part."""
    draw = np.random.default_rng(0)
    for name in NAMES:
        (root / name).mkdir(parents=True)
        for number in range(num_per_class):
            pixels = draw.integers(0, 256, size=(16, 20, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(root / name / f"{number:02d}.png")
    return root


def make_case(root: Path, *, num_members: int = 1, num_per_class: int = 5) -> Case:
    images = write_images(root / "images", num_per_class)
    records = data.load(SimpleNamespace(source="folder", path=str(images), options={}))
    raws = [data.read(raw) for raw in records.raw]
    fitted = preprocessing.Preprocessing.fit(raws, {"size": [9, 12]})
    rows = data.prepare(records, fitted, "train")
    members = [_trained(seed, rows) for seed in range(num_members)]
    return Case(records, fitted, rows, members, root / "bundle")


def _trained(seed: int, rows: dict) -> torch.nn.Module:
    """A few steps: BatchNorm's statistics and every weight have left their start."""
    torch.manual_seed(seed)
    network = model.build(**ABOUT)
    optimizer = torch.optim.Adam(network.parameters(), lr=1e-2)
    for batch in loop.Loader(rows, 5, shuffle=True, seed=seed):
        loop.train_step(network, optimizer, batch, TASK.loss)
    return network
