"""Small tasks of other kinds for the tests of the checks: labels that do not exclude each other, a
number, the next token, two classes of which one is rare. Each has a maker of a healthy pipeline.

Everything is made from scikit-learn, a generator with a fixed seed, or the text of a module of the
standard library, in a second, and is the same anywhere.
"""

import functools
import inspect
import math
import textwrap

import numpy as np
import torch
from checks_case import Digits, make_pipeline
from sklearn.datasets import load_diabetes
from torch import nn
from torch.nn import functional as F

from {{cookiecutter.project_slug}}.harness import loop

# ---- tasks --------------------------------------------------------------------------------------


class Imbalanced(Digits):
    """Two exclusive classes, the second one rare."""

    num_outputs = 2
    class_names = ("usual", "rare")
    metric_name = "balanced_accuracy"
    sklearn_metric = "balanced_accuracy_score"

    def metric(self, outputs, y):
        right = self.correct(outputs, y)
        return float(np.mean([right[y == c].double().mean().item() for c in y.unique()]))

    def chance(self, prior):
        return 1 / self.num_outputs


class MultiLabel:
    """Five labels, any number of them at once: outputs and targets are `(B, 5)`."""

    targets = "multilabel"
    num_outputs = 5
    class_names = tuple("abcde")
    metric_name, metric_direction, metric_bounds = "label_accuracy", "max", (0.0, 1.0)

    def loss(self, outputs, y):
        return F.binary_cross_entropy_with_logits(outputs, y)

    def loss_per_row(self, outputs, y):
        return F.binary_cross_entropy_with_logits(outputs, y, reduction="none").mean(dim=1)

    def metric(self, outputs, y):
        return (self.predict(outputs) == y).double().mean().item()

    def predict(self, outputs):
        return (outputs > 0).float()

    def correct(self, outputs, y):
        return (self.predict(outputs) == y).all(dim=1)

    def prior(self, y):
        return (y.double().sum(dim=0).cpu().numpy() + 1) / (len(y) + 2)

    def chance(self, prior):
        return float(np.maximum(prior, 1 - prior).mean())

    def prior_loss(self, prior):
        return float(-(prior * np.log(prior) + (1 - prior) * np.log(1 - prior)).mean())

    def flat_loss(self, prior):
        return math.log(2)

    def expected_loss(self, outputs, prior):
        z = outputs.double()
        return (F.softplus(z) - z * torch.as_tensor(prior)).mean().item()

    def optimum_loss(self):
        return 0.0

    def constant_outputs(self, prior, num_rows):
        return torch.as_tensor(np.log(prior / (1 - prior)), dtype=torch.float32).repeat(num_rows, 1)

    def ideal_outputs(self, y, scale=30.0):
        return (2 * y - 1) * scale

    def answer(self, prediction):
        present = [name for name, on in zip(self.class_names, prediction, strict=True) if on > 0]
        return " ".join(present) or "none"


class Real:
    """One number per row: outputs and targets are `(B,)`. The metric is "r2" or "rmse"."""

    targets = "real"
    num_outputs = 1

    def __init__(self, metric="r2"):
        self.metric_name = metric
        self.metric_direction = "max" if metric == "r2" else "min"
        self.metric_bounds = (-math.inf, 1.0) if metric == "r2" else (0.0, math.inf)
        self.sklearn_metric = "r2_score" if metric == "r2" else "root_mean_squared_error"

    def loss(self, outputs, y):
        return F.mse_loss(outputs, y)

    def loss_per_row(self, outputs, y):
        return (outputs - y).square().reshape(len(y), -1).mean(dim=1)

    def metric(self, outputs, y):
        error = (outputs.double() - y.double()).square().mean().item()
        if self.metric_name == "rmse":
            return math.sqrt(error)
        return 1 - error / max(y.double().var(unbiased=False).item(), 1e-12)

    def predict(self, outputs):
        return outputs

    def correct(self, outputs, y):
        """Within half a standard deviation of the standardised target."""
        return (outputs - y).abs() < 0.5

    def prior(self, y):
        """[mean, variance]"""
        values = y.double().cpu().numpy()
        return np.array([values.mean(), values.var()])

    def chance(self, prior):
        return 0.0 if self.metric_name == "r2" else math.sqrt(prior[1])

    def prior_loss(self, prior):
        return float(prior[1])

    def flat_loss(self, prior):
        return float(prior[1])

    def expected_loss(self, outputs, prior):
        return float(prior[1] + (outputs.double() - prior[0]).square().mean().item())

    def optimum_loss(self):
        return 0.0

    def constant_outputs(self, prior, num_rows):
        return torch.full((num_rows,), float(prior[0]))

    def ideal_outputs(self, y, scale=30.0):
        return y.float()

    def answer(self, prediction):
        return f"{float(prediction):.2f}"


PAD, END = 0, 1
LETTERS = "\n abcdefghijklmnopqrstuvwxyz0."  # digits are read as 0, everything else as a dot


class Tokens:
    """The next token of a row: outputs `(B, T, V)`, targets `(B, T)` with -100 where none is.

    `loss_per_row` is the mean over a row's own targets; the loss is the mean over all targets.
    """

    targets = "tokens"
    causal = True
    num_outputs = len(LETTERS) + 2
    class_names = ("<pad>", "<end>", *LETTERS)
    ignore_index, pad_id, end_id = -100, PAD, END
    metric_name, metric_direction, metric_bounds = "token_accuracy", "max", (0.0, 1.0)

    def loss(self, outputs, y):
        return F.cross_entropy(outputs.flatten(0, 1), y.flatten(), ignore_index=-100)

    def loss_per_row(self, outputs, y):
        each = F.cross_entropy(outputs.transpose(1, 2), y, ignore_index=-100, reduction="none")
        return each.sum(dim=1) / (y != -100).sum(dim=1).clamp(min=1)

    def metric(self, outputs, y):
        told = y != -100
        return (self.predict(outputs)[told] == y[told]).double().mean().item()

    def predict(self, outputs):
        return outputs.argmax(dim=2)

    def correct(self, outputs, y):
        """`(B, T)`; a position without a target counts as right."""
        return (self.predict(outputs) == y) | (y == -100)

    def prior(self, y):
        told = y[y != -100].cpu().numpy()
        counts = np.bincount(told, minlength=self.num_outputs) + 1.0
        return counts / counts.sum()

    def chance(self, prior):
        return float(prior.max())

    def prior_loss(self, prior):
        return float(-(prior * np.log(prior)).sum())

    def flat_loss(self, prior):
        return math.log(self.num_outputs)

    def expected_loss(self, outputs, prior):
        z = outputs.double()
        return (torch.logsumexp(z, dim=-1) - z @ torch.as_tensor(prior)).mean().item()

    def optimum_loss(self):
        return 0.0

    def constant_outputs(self, prior, num_rows, length=32):
        row = torch.as_tensor(np.log(prior), dtype=torch.float32)
        return row.repeat(num_rows, length, 1)

    def ideal_outputs(self, y, scale=30.0):
        return F.one_hot(y.clamp(min=0), self.num_outputs).float() * scale

    def answer(self, prediction):
        return "".join(self.class_names[int(token)] for token in prediction)

    def pad(self, x, num):
        return F.pad(x, (0, num), value=PAD)


# ---- data ---------------------------------------------------------------------------------------


@functools.cache
def features(num_rows=1200, num_features=20, seed=0):
    generator = np.random.default_rng(seed)
    return generator.normal(size=(num_rows, num_features)).astype(np.float32)


@functools.cache
def multilabel_rows(start=0, stop=900, shift=0.0):
    """Five labels from 20 features, each present in about half of the rows (`shift` < 0: fewer)."""
    x = features()
    weights = np.random.default_rng(1).normal(size=(20, 5)) / math.sqrt(20)
    y = (x @ weights * 3 + shift + np.random.default_rng(2).logistic(size=(len(x), 5)) * 0.3) > 0
    return _rows(x, y.astype(np.float32), start, stop)


@functools.cache
def binary_rows(start=0, stop=900, share=0.05):
    """Two classes, the second one in `share` of the rows."""
    x = features(num_features=12, seed=3)
    score = x @ (np.random.default_rng(4).normal(size=12) / math.sqrt(12))
    return _rows(x, (score > np.quantile(score, 1 - share)).astype(np.int64), start, stop)


@functools.cache
def real_rows(start=0, stop=320):
    """Diabetes: ten standardised inputs, the standardised progression after a year."""
    data = load_diabetes()
    order = np.random.default_rng(0).permutation(len(data.target))
    x, y = data.data[order], data.target[order]
    x = (x - x[:320].mean(axis=0)) / x[:320].std(axis=0)
    y = (y - y[:320].mean()) / y[:320].std()
    return _rows(x.astype(np.float32), y.astype(np.float32), start, stop)


@functools.cache
def token_rows(start=0, stop=256, length=32, shortest=20):
    """Pieces of text of `shortest` to `length` characters; the end token, then padding follow."""
    code = {letter: index + 2 for index, letter in enumerate(LETTERS)}
    text = "".join("0" if c.isdigit() else c for c in inspect.getsource(textwrap).lower())
    ids = [code.get(c, code["."]) for c in text]
    generator, rows, at = np.random.default_rng(0), [], 0
    while len(rows) < 400:
        count = int(generator.integers(shortest, length + 1))
        piece = ids[at % (len(ids) - length) :][:count]
        rows.append([*piece, END] + [PAD] * (length - count))
        at += count
    whole = torch.tensor(rows)[torch.from_numpy(generator.permutation(len(rows)))]
    x, y = whole[:, :-1].clone(), whole[:, 1:].clone()
    y[y == PAD] = -100
    x[x == END] = PAD  # nothing follows the end: it is a target, never an input
    return {"x": x[start:stop], "y": y[start:stop], "id": torch.arange(start, stop)}


def _rows(x, y, start, stop):
    stop = min(stop, len(x))
    x, y = torch.from_numpy(x[start:stop]), torch.from_numpy(y[start:stop])
    return {"x": x, "y": y, "id": torch.arange(start, stop)}


class Standardised:
    """Inputs that are standardised already, one mean and sd per column."""

    def __init__(self, num_columns):
        self.mean, self.std = (0.0,) * num_columns, (1.0,) * num_columns

    def __call__(self, raw):
        return torch.as_tensor(np.asarray(raw, dtype=np.float32))

    def inverse(self, x):
        return x.cpu().numpy()


# ---- models -------------------------------------------------------------------------------------


class Mlp(nn.Module):
    """Two layers; `change(self, x)` stands in for the forward pass. One output is `(B,)`."""

    def __init__(self, num_features, num_outputs, change=None):
        super().__init__()
        self.change = change
        self.trunk = nn.Sequential(nn.Linear(num_features, 32), nn.ReLU())
        self.head = nn.Linear(32, num_outputs)

    def forward(self, x):
        return self.plain(x) if self.change is None else self.change(self, x)

    def plain(self, x):
        outputs = self.head(self.trunk(x))
        return outputs.squeeze(-1) if self.head.out_features == 1 else outputs


class Causal(nn.Module):
    """One transformer block over at most 64 positions; `causal=False` lets the future in."""

    def __init__(self, num_outputs=Tokens.num_outputs, width=32, causal=True, change=None):
        super().__init__()
        self.causal, self.change = causal, change
        self.embed, self.place = nn.Embedding(num_outputs, width), nn.Embedding(64, width)
        self.before, self.between, self.after = (nn.LayerNorm(width) for _ in range(3))
        self.mix, self.join = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.think = nn.Sequential(nn.Linear(width, 64), nn.GELU(), nn.Linear(64, width))
        self.head = nn.Linear(width, num_outputs)
        for table in (self.embed, self.place):
            nn.init.normal_(table.weight, std=0.5)

    def forward(self, x):
        return self.plain(x) if self.change is None else self.change(self, x)

    def plain(self, x):
        z = self.embed(x) + self.place(torch.arange(x.shape[1], device=x.device))
        query, key, value = (
            part.unflatten(2, (2, -1)).transpose(1, 2)
            for part in self.mix(self.before(z)).chunk(3, -1)
        )
        seen = F.scaled_dot_product_attention(query, key, value, is_causal=self.causal)
        z = z + self.join(seen.transpose(1, 2).flatten(2))
        return self.head(self.after(z + self.think(self.between(z))))


class Gru(nn.Module):
    """A recurrent network that reads from the left."""

    def __init__(self, num_outputs=Tokens.num_outputs, width=32):
        super().__init__()
        self.embed = nn.Embedding(num_outputs, width)
        self.read = nn.GRU(width, width, batch_first=True)
        self.head = nn.Linear(width, num_outputs)

    def forward(self, x):
        return self.head(self.read(self.embed(x))[0])


# ---- pipelines ----------------------------------------------------------------------------------


def make_multilabel_pipeline(net=None, *, task=None, train=None, validation=None, **changes):
    """Healthy but for what is asked; `changes` are those of `checks_case.make_pipeline`."""
    train = multilabel_rows() if train is None else train
    validation = multilabel_rows(900, 1200) if validation is None else validation
    return _make(net or (lambda: Mlp(20, 5)), task or MultiLabel(), train, validation, changes)


def make_real_pipeline(net=None, *, task=None, train=None, validation=None, **changes):
    train = real_rows() if train is None else train
    validation = real_rows(320, 442) if validation is None else validation
    return _make(net or (lambda: Mlp(10, 1)), task or Real(), train, validation, changes)


def make_imbalanced_pipeline(net=None, *, task=None, train=None, validation=None, **changes):
    """The bias starts at the label shares unless `prior_bias=False`."""
    train = binary_rows() if train is None else train
    validation = binary_rows(900, 1200) if validation is None else validation
    changes = {"prior_bias": True, **changes}
    return _make(net or (lambda: Mlp(12, 2)), task or Imbalanced(), train, validation, changes)


def make_tokens_pipeline(net=Causal, *, task=None, train=None, validation=None, **changes):
    """The transformer; `net=Gru` for the recurrent one."""
    train = token_rows() if train is None else train
    validation = token_rows(256, 400) if validation is None else validation
    return _make(net, task or Tokens(), train, validation, {"batch_size": 32, **changes})


def _make(net, task, train, validation, changes):
    prior_bias = changes.pop("prior_bias", False)

    def build():
        model = net()
        if prior_bias:  # constant outputs are exactly what the bias should say
            bias = task.constant_outputs(task.prior(train["y"]), 1).flatten()
            model.head.bias.data = bias[-model.head.out_features :].clone()
        return model

    def fit(model, optimizer, batches, held_out, num_epochs):
        settings = loop.FitSettings(num_epochs, precision=changes.get("precision", "fp32"))
        return loop.fit(model, optimizer, batches, held_out, task, settings, announce=False)

    known = {int(row): train["x"][at] for at, row in enumerate(train["id"])}
    known |= {int(row): validation["x"][at] for at, row in enumerate(validation["id"])}
    columns = train["x"].shape[1]
    parts = {
        "preprocessing": None if task.targets == "tokens" else Standardised(columns),
        "prepare": lambda split: loop.take(train, torch.arange(32)),
        "raw": lambda row: known[int(row)].numpy(),
        "draw": None,
        "fit": fit,
    }
    given = {"task": task, "train": train, "validation": validation}
    return make_pipeline(build, **given, **{**parts, **changes})
