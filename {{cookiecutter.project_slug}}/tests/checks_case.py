"""A small pipeline on scikit-learn's digits for the tests of the checks, and ways to break it.

It uses none of the four files that are yours: the checks are tested as they stand, whatever the
project has become.
"""

import functools
import math
from dataclasses import replace

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F

from {{cookiecutter.project_slug}}.harness import loop
from {{cookiecutter.project_slug}}.harness.checks import Pipeline, run_checks
from {{cookiecutter.project_slug}}.harness.checks.catalogue import SKELETON

CPU = torch.device("cpu")
ORDER = np.random.default_rng(0).permutation(1797)  # they come writer by writer
IMAGES = load_digits().images.astype(np.float32)[ORDER]
LABELS = load_digits().target.astype(np.int64)[ORDER]
MEAN, STD = float(IMAGES[:900].mean()), float(IMAGES[:900].std())


class Digits:
    """Ten exclusive classes; what a task offers to the checks, and no more."""

    targets = "exclusive"
    num_outputs = 10
    class_names = tuple("0123456789")
    metric_name, metric_direction, metric_bounds = "accuracy", "max", (0.0, 1.0)
    sklearn_metric = "accuracy_score"

    def loss(self, outputs, y):
        return F.cross_entropy(outputs, y)

    def loss_per_row(self, outputs, y):
        return F.cross_entropy(outputs, y, reduction="none")

    def metric(self, outputs, y):
        return (self.predict(outputs) == y).double().mean().item()

    def predict(self, outputs):
        return outputs.argmax(dim=1)

    def correct(self, outputs, y):
        return self.predict(outputs) == y

    def prior(self, y):
        counts = np.bincount(y.cpu().numpy(), minlength=self.num_outputs) + 1.0
        return counts / counts.sum()

    def chance(self, prior):
        return float(prior.max())

    def prior_loss(self, prior):
        return float(-(prior * np.log(prior)).sum())

    def flat_loss(self, prior):
        return math.log(self.num_outputs)

    def expected_loss(self, outputs, prior):
        z = outputs.double()
        return (torch.logsumexp(z, dim=1) - z @ torch.as_tensor(prior)).mean().item()

    def optimum_loss(self):
        return 0.0

    def constant_outputs(self, prior, num_rows):
        return torch.as_tensor(np.log(prior), dtype=torch.float32).repeat(num_rows, 1)

    def ideal_outputs(self, y, scale=30.0):
        return F.one_hot(y, self.num_outputs).float() * scale

    def answer(self, prediction):
        return self.class_names[int(prediction)]

    def draw(self, raw):
        return raw


class Normalised:
    """raw `(8, 8)` -> `(1, 8, 8)`."""

    mean, std = (MEAN,), (STD,)

    def __call__(self, raw):
        return torch.from_numpy((np.asarray(raw) - MEAN) / STD)[None]

    def inverse(self, x):
        return (x[0].cpu().numpy() * STD + MEAN).astype(np.float32)


def moved(x, generator):
    """An augmentation: one step aside, and a little noise."""
    return x.roll(1, 3) + 0.05 * torch.randn(x.shape, generator=generator)


class Sorted(loop.Loader):
    """Inputs sorted by brightness, labels and ids not."""

    def __iter__(self):
        for batch in super().__iter__():
            yield {**batch, "x": batch["x"][batch["x"].flatten(1).sum(1).argsort()]}


class Net(nn.Module):
    """Two layers; `change(self, x)` stands in for the forward pass, `norm` after the first."""

    def __init__(self, change=None, norm=nn.Identity, dropout=0.0):
        super().__init__()
        self.change = change
        self.trunk = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), norm(32), nn.ReLU())
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(32, 10)

    def forward(self, x):
        return self.plain(x) if self.change is None else self.change(self, x)

    def plain(self, x):
        return self.head(self.dropout(self.trunk(x)))


@functools.cache
def rows(start=0, stop=900):
    """Rows of the digits as tensors. Cached: a test that changes them works on a copy."""
    encode = Normalised()
    x = torch.stack([encode(image) for image in IMAGES[start:stop]])
    return {"x": x, "y": torch.from_numpy(LABELS[start:stop]), "id": torch.arange(start, stop)}


def unbalanced(share=10):
    """Training rows with `share` times fewer of every class but 3."""
    y = rows()["y"]
    keep = torch.cat([torch.where(y == c)[0][: None if c == 3 else 90 // share] for c in range(10)])
    return loop.take(rows(), keep)


def with_x(change, start=0, stop=900):
    return {**rows(start, stop), "x": change(rows(start, stop)["x"])}


def make_pipeline(
    net=Net,
    *,
    task=None,
    loss=None,
    step=loop.train_step,
    optimizer=None,
    prior_bias=False,
    train=None,
    validation=None,
    loader=loop.Loader,
    batch_size=64,
    precision="fp32",
    clip_norm=None,
    accumulate=1,
    augment=None,
    **parts,
):
    """A healthy pipeline but for what is asked. `loss` is what the step uses instead of the
    task's; `step` has the signature of `loop.train_step`."""
    task = task or Digits()
    train = rows() if train is None else train
    validation = rows(900, 1300) if validation is None else validation

    def make_model(seed):
        torch.manual_seed(seed)
        model = net()
        if prior_bias:
            model.head.bias.data = torch.as_tensor(
                np.log(task.prior(train["y"])), dtype=torch.float32
            )
        return model.train()

    def train_step(model, optimizer, batch, num_parts=accumulate):
        return step(
            model,
            optimizer,
            batch,
            loss or task.loss,
            clip_norm=clip_norm,
            precision=precision,
            accumulate=num_parts,
        )

    pipeline = Pipeline(
        make_model=make_model,
        make_optimizer=optimizer or (lambda model: torch.optim.Adam(model.parameters(), lr=3e-3)),
        train_step=train_step,
        evaluate=lambda model, batches: loop.evaluate(model, batches, task, precision=precision),
        task=task,
        train=loader(train, batch_size, shuffle=True, augment=augment),
        validation=loop.Loader(validation, 256),
        device=CPU,
        precision=precision,
        clip_norm=clip_norm,
        accumulate=accumulate,
        accumulate_step=train_step,
        preprocessing=Normalised(),
        prepare=lambda split: {**rows(0, 32)},
        draw=lambda row: IMAGES[row],
    )
    return replace(pipeline, **parts)


def broken_step(
    *,
    zero_grad="before",
    change=lambda outputs: outputs,
    inputs=lambda x: x,
    labels=lambda y: y,
    mode=None,
    share=lambda part, whole: part / whole,
    clip=True,
):
    """A training step like the project's with one line wrong."""

    def step(model, optimizer, batch, loss_fn, *, clip_norm, precision, accumulate):
        if zero_grad == "before":
            optimizer.zero_grad()
        if mode is not None:
            model.train(mode)
        total = torch.zeros(())
        for index in torch.arange(len(batch["y"])).tensor_split(accumulate):
            part = loop.take(batch, index)
            with loop.autocast(CPU, precision):
                outputs = change(model(inputs(part["x"])).float())
            loss = loss_fn(outputs, labels(part["y"])) * share(len(index), len(batch["y"]))
            loss.backward()
            total += loss.detach()
        if zero_grad == "between":
            optimizer.zero_grad(set_to_none=False)
        if clip and clip_norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip_norm)
        optimizer.step()
        return loop.StepOutput(total, None)

    return step


def broken_evaluate(fault):
    """An evaluation with one line wrong: `fault` names it."""
    seen: list[float] = []

    def evaluate(model, loader):
        task, scores = Digits(), []
        if fault != "never eval":
            model.eval()
        outputs, y, ids = [], [], []
        with torch.no_grad():
            for index, batch in enumerate(loader):
                if fault == "only every other batch" and index % 2:
                    continue
                x = batch["x"] * 2 if fault == "inputs scaled" else batch["x"]
                outputs.append(model(x).float())
                y.append(batch["y"])
                ids.append(batch["id"])
                scores.append(task.metric(outputs[-1], y[-1]))
        if fault != "never train again":
            model.train()
        z, y, ids = torch.cat(outputs), torch.cat(y), torch.cat(ids)
        if fault == "labels in the outputs":
            z = z + 3 * F.one_hot(y, 10)
        if fault == "labels reordered":
            y = y.roll(1)
        metric = task.metric(z, y)
        seen.append(metric)
        if fault == "mean of batch means":
            metric = float(np.mean(scores))
        if fault == "state kept":
            metric = float(np.mean(seen))
        return loop.Evaluation(task.loss(z, y).item(), metric, len(y), z, y, ids)

    return evaluate


def shut(pipeline):
    """Names of the checks of the whole skeleton that do not open."""
    found = run_checks(SKELETON, pipeline)
    return {check.name for check in found if check.verdict in ("shut", "inconclusive")}
