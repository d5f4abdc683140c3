"""Two gates a person should look at: the batch learned by heart, and the batch before the model."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ..checks import Pipeline
from ..checks.overfit import one_batch
from ..checks.seam import seam_batch
from . import canvas, save


def draw_overfit_batch(path: Path, pipeline: Pipeline) -> bool:
    """The loss of the one-batch overfit over its steps, and per example the label and the outputs
    point by point. False, and no file, when there were too few examples or the step raises."""
    trial = _attempted(one_batch, pipeline)
    if trial is None:
        return False
    count = len(trial.y)
    figure, axes = canvas(count + 1, 1, width=1.45, height=2.4)
    curve, *bars = axes[0]
    curve.plot(range(1, len(trial.losses) + 1), [min(max(v, 1e-6), 1e6) for v in trial.losses])
    curve.set_yscale("log")
    curve.set_xlabel("step", fontsize=7)
    curve.set_title(f"loss at rate {trial.rate:.1e}", fontsize=7)
    curve.tick_params(labelsize=6)
    for axis, outputs, y in zip(bars, trial.outputs, trial.y, strict=True):
        _draw_answer(axis, pipeline.task, outputs, y)
    save(figure, path)
    return True


def _attempted(make: Callable[[Pipeline], Any], pipeline: Pipeline) -> Any:
    """None when the pipeline raises: its checks have said so, a figure is no reason to crash."""
    try:
        return make(pipeline)
    except Exception:
        return None


def _draw_answer(axis: Any, task: Any, outputs: torch.Tensor, y: torch.Tensor) -> None:
    """Outputs as bars, the label's in another colour; for one value, prediction beside target."""
    axis.tick_params(labelsize=6)
    if task.targets != "exclusive":
        flat, target = outputs.flatten()[:16].tolist(), y.flatten()[:16].tolist()
        axis.plot(target, "o", color="C2", markersize=4, label="target")
        axis.plot(flat, "x", color="C0", markersize=4, label="prediction")
        axis.legend(fontsize=6)
        return
    shares = torch.softmax(outputs.float(), dim=0).tolist()
    label, answer = int(y), int(task.predict(outputs[None])[0])
    colours = ["C2" if index == label else "C0" for index in range(len(shares))]
    axis.barh(range(len(shares)), shares, color=colours)
    axis.set_xlim(0, 1)
    axis.invert_yaxis()
    if len(shares) <= 12:
        axis.set_yticks(range(len(shares)), [str(name) for name in task.class_names])
    said = f"label {task.answer(label)}\npredicted {task.answer(answer)}"
    axis.set_title(said, fontsize=7, color="black" if answer == label else "C3")


def draw_seam(path: Path, pipeline: Pipeline) -> bool:
    """What the model gets, decoded for the eye, with labels, and the raw record below each where
    there is one: training left, validation right. False, and no file, when nothing can be drawn."""
    decode = getattr(pipeline.preprocessing, "inverse", None)
    draw = getattr(pipeline.task, "draw", None)
    if decode is None or draw is None:
        return False
    batches = _attempted(partial(seam_batch, num_rows=6), pipeline)
    if batches is None:
        return False
    figure, axes = canvas(12, 2, width=0.95, height=1.3)
    for axis in axes.flat:
        axis.set_axis_off()
    for side, (split, batch) in enumerate(batches.items()):
        for place in range(len(batch["y"])):
            above, below = axes[0][6 * side + place], axes[1][6 * side + place]
            _show(above, draw(decode(batch["x"][place])))
            above.set_title(f"{split}\n{pipeline.task.answer(batch['y'][place])}", fontsize=6)
            if pipeline.draw is not None:
                _show(below, pipeline.draw(int(batch["id"][place])))
                below.set_title(f"record {int(batch['id'][place])}", fontsize=6)
    save(figure, path)
    return True


def _show(axis: Any, picture: Any) -> None:
    """Colours in 0 to 255 (or 0 to 1) as they are; grey stretched to its own range."""
    if getattr(picture, "ndim", 2) == 3:
        top = 255.0 if picture.max() > 1.5 else 1.0
        axis.imshow((picture / top).clip(0, 1))
    else:
        axis.imshow(picture, cmap="gray")
