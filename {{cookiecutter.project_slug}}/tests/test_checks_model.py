import functools

import pytest
import torch
from checks_case import Net, broken_evaluate, make_pipeline, rows, with_x
from other_tasks import Causal, Gru, Tokens, make_real_pipeline, make_tokens_pipeline, token_rows
from torch import nn
from torch.nn import functional as F

from {{cookiecutter.project_slug}}.harness.checks import (
    baseline,
    causal,
    probe,
    run_check,
)
from {{cookiecutter.project_slug}}.harness.checks.model import sample_boundary


def normed():
    return Net(norm=nn.BatchNorm1d, dropout=0.3)


@pytest.mark.parametrize("net", [Net, normed, lambda: Net(norm=nn.LayerNorm)])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_rows_that_keep_to_themselves_open(net, precision):
    found = run_check(sample_boundary, make_pipeline(net, precision=precision))
    assert found.verdict == "open"


def test_coupling_by_batch_norm_in_training_is_information():
    found = run_check(sample_boundary, make_pipeline(normed))
    assert "as designed" in found.because


def transposed(self, x):
    hidden = self.trunk(x)
    return self.head(hidden.t().reshape(hidden.shape))


def centred(self, x):
    outputs = self.plain(x)
    return outputs - outputs.mean(dim=0).detach() if not self.training else outputs


def centred_in_training(self, x):
    outputs = self.plain(x)
    return outputs - outputs.mean(dim=0) if self.training else outputs


@pytest.mark.parametrize(
    "forward",
    [
        transposed,
        centred,  # blind for gradients
        centred_in_training,
        lambda self, x: self.plain(x).softmax(dim=0),
        lambda self, x: self.plain(x.roll(1, 0)),
        lambda self, x: self.plain(x).mean(dim=0),  # the batch axis is gone
    ],
)
def test_a_mixed_batch_shuts(forward):
    found = run_check(sample_boundary, make_pipeline(lambda: Net(forward)))
    assert found.verdict == "shut"
    assert "batch" in found.suspect[0]


def test_an_output_that_ignores_its_input_shuts():
    found = run_check(sample_boundary, make_pipeline(lambda: Net(lambda s, x: s.plain(0 * x))))
    assert found.verdict == "shut"
    assert found.value == 0


def test_a_trained_model_is_looked_at_again_and_left_as_it_was():
    class Gated(Net):
        """Leaks through a gate that starts closed."""

        def __init__(self):
            super().__init__()
            self.gate = nn.Parameter(torch.zeros(()))

        def forward(self, x):
            outputs = self.plain(x)
            return outputs + self.gate * outputs.mean(dim=0)

    pipeline, trained = make_pipeline(Gated), Gated()
    trained.gate.data.fill_(0.5)
    before = {key: value.clone() for key, value in trained.state_dict().items()}
    assert run_check(sample_boundary, pipeline).verdict == "open"
    assert run_check(sample_boundary, pipeline, model=trained).verdict == "shut"
    assert trained.training
    assert all(torch.equal(value, before[key]) for key, value in trained.state_dict().items())


def test_batches_of_one_row_are_joined():
    assert run_check(sample_boundary, make_pipeline(batch_size=1)).verdict == "open"


# ---- integer inputs and positions ---------------------------------------------------------------


class Blocks(nn.Module):
    """Two transformer blocks whose mask, and what follows them, can be planted."""

    def __init__(self, mask=None, after=lambda z: z, start=lambda model: None, encoding="learned"):
        super().__init__()
        size, width, self.mask, self.after = Tokens.num_outputs, 32, mask, after
        self.encoding = encoding
        self.embed, self.place = nn.Embedding(size, width), nn.Embedding(128, width)
        self.mixes = nn.ModuleList(nn.Linear(width, 3 * width) for _ in range(2))
        self.joins = nn.ModuleList(nn.Linear(width, width) for _ in range(2))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, size)
        start(self)

    def forward(self, x):
        ids = x["ids"] if isinstance(x, dict) else x
        z = self.embed(ids) + self.place(torch.arange(ids.shape[1]))
        mask = (self.mask or plain_mask)(x)
        for mix, join in zip(self.mixes, self.joins, strict=True):
            parts = mix(self.norm(z)).unflatten(2, (3, 2, -1)).permute(2, 0, 3, 1, 4)
            seen = F.scaled_dot_product_attention(*parts, attn_mask=mask)
            z = z + join(seen.transpose(1, 2).flatten(2))
        return self.head(self.after(z))


def plain_mask(x, diagonal=0):
    length = (x["ids"] if isinstance(x, dict) else x).shape[1]
    return torch.ones(length, length, dtype=torch.bool).tril(diagonal)


def zero_joins(model):
    for join in model.joins:
        nn.init.zeros_(join.weight)
        nn.init.zeros_(join.bias)


def zero_head(model):
    nn.init.zeros_(model.head.weight)


@pytest.mark.parametrize("net", [Causal, Gru, Blocks, lambda: Blocks(start=zero_head)])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_causal_model_opens(net, precision):
    found = run_check(sample_boundary, make_tokens_pipeline(net, precision=precision))
    assert found.verdict == "open", found.because
    assert "none sees a later position at 31 cut points" in found.because


def test_a_model_of_single_tokens_opens():
    def net():
        return nn.Embedding(Tokens.num_outputs, Tokens.num_outputs)

    assert run_check(sample_boundary, make_tokens_pipeline(net)).verdict == "open"


def reaching(z):
    return (z + z.cummax(dim=1).values) + F.pad(z, (0, 0, 0, 3))[:, 3:]


def in_blocks(z):
    return z + z.unflatten(1, (-1, 8)).mean(dim=2).repeat_interleave(8, dim=1)


LEAKS = {
    "no mask": (lambda: Causal(causal=False), "31 of 31", "no mask acts", "mask is missing"),
    "off by one": (
        lambda: Blocks(lambda x: plain_mask(x, 1), lambda z: z, one_block),
        "31 of 31",
        "one position ahead",
        "off by one",
    ),
    "target in the input": (
        lambda: Gated(lambda z: z + F.pad(z, (0, 0, 0, 1))[:, 1:]),
        "31 of 31",
        "one position ahead",
        "off by one",
    ),
    "blocks": (
        lambda: Gated(in_blocks),
        "28 of 31",
        "within blocks (clean at 8, 16, 24)",
        "blocks",
    ),
    "three ahead": (lambda: Gated(reaching), "31 of 31", "3 positions ahead", "off by one"),
    "norm over positions": (
        lambda: Gated(lambda z: z - z.mean(dim=1, keepdim=True)),
        "31 of 31",
        "no mask acts",
        "mask is missing",
    ),
    "blind for gradients": (
        lambda: Gated(lambda z: z - z.mean(dim=1, keepdim=True).detach()),
        "31 of 31",
        "no mask acts",
        "mask is missing",
    ),
    "both directions": (lambda: Both(), "31 of 31", "no mask acts", "mask is missing"),
}


def one_block(model):
    nn.init.zeros_(model.joins[1].weight)
    nn.init.zeros_(model.joins[1].bias)


class Gated(nn.Module):
    """Token by token but for what is planted between embedding and head."""

    def __init__(self, change):
        super().__init__()
        self.change = change
        self.embed = nn.Embedding(Tokens.num_outputs, 24)
        self.head = nn.Linear(24, Tokens.num_outputs)

    def forward(self, x):
        return self.head(self.change(self.embed(x)))


class Both(Gru):
    def __init__(self):
        super().__init__()
        self.read = nn.GRU(32, 16, batch_first=True, bidirectional=True)


@pytest.mark.parametrize("name", LEAKS)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_model_that_sees_the_future_shuts(name, precision):
    net, count, words, cause = LEAKS[name]
    found = run_check(sample_boundary, make_tokens_pipeline(net, precision=precision))
    assert found.verdict == "shut"
    assert count in found.because
    assert words in found.because
    assert cause in found.suspect[0]


def test_a_leak_behind_branches_that_start_at_zero_shuts():
    pipeline = make_tokens_pipeline(lambda: Blocks(lambda x: None, start=zero_joins))
    assert run_check(sample_boundary, pipeline).verdict == "shut"


def test_positions_that_nothing_reads_shut():
    def cut_off(z):
        return torch.cat([0 * z[:, :16], z[:, 16:]], dim=1).cumsum(dim=1)

    found = run_check(sample_boundary, make_tokens_pipeline(lambda: Gated(cut_off)))
    assert found.verdict == "shut"
    assert "at 16 of" in found.because


def test_long_rows_are_cut_at_some_points_and_at_the_edges_of_blocks():
    cuts = causal.cut_points(1000)
    assert {1, 2, 64, 512, 999} < set(cuts)
    assert len(cuts) <= 16 + 11
    assert causal.cut_points(128) == tuple(range(1, 128))


def test_integer_rows_that_mix_shut_by_their_embeddings():
    class First(Gru):
        """Takes the batch for time."""

        def __init__(self):
            super().__init__()
            self.read = nn.GRU(32, 32)

    found = run_check(sample_boundary, make_tokens_pipeline(First))
    assert found.verdict == "shut"
    assert "batch_first" in " ".join(found.suspect)


def test_outputs_without_positions_are_inconclusive():
    pipeline = make_tokens_pipeline(lambda: Pooled())
    assert run_check(sample_boundary, pipeline).verdict == "inconclusive"


class Pooled(Gated):
    def __init__(self):
        super().__init__(lambda z: z[:, ::2].cumsum(dim=1))


class Series(Tokens):
    """Real inputs and outputs at every position."""

    targets, pad_id = "real", None


@pytest.mark.parametrize(("bidirectional", "verdict"), [(False, "open"), (True, "shut")])
def test_series_of_measurements_are_cut_too(bidirectional, verdict):
    class Reader(nn.Module):
        def __init__(self):
            super().__init__()
            self.read = nn.LSTM(3, 8, batch_first=True, bidirectional=bidirectional)
            self.head = nn.Linear(16 if bidirectional else 8, 1)

        def forward(self, x):
            return self.head(self.read(x)[0]).squeeze(2)

    x = torch.randn(64, 12, 3, generator=torch.Generator().manual_seed(0))
    task = make_real_pipeline().task
    task.causal = True
    train = {"x": x, "y": x.sum(dim=2).cumsum(dim=1), "id": torch.arange(64)}
    pipeline = make_pipeline(Reader, task=task, train=train, validation=train)
    assert run_check(sample_boundary, pipeline).verdict == verdict


def test_a_field_of_one_number_per_row_is_replaced_with_its_row():
    class Sited(nn.Module):
        def __init__(self):
            super().__init__()
            self.image, self.site = nn.Linear(64, 10), nn.Embedding(4, 10)

        def forward(self, x):
            z = self.image(x["image"].flatten(1)) + self.site(x["site"]) + x["age"][:, None]
            return z if self.mixed is None else self.mixed(z)

    given = rows()
    x = {"image": given["x"], "site": given["id"] % 4, "age": given["id"] / 900}
    for mixed, verdict in ((None, "open"), (lambda z: z - z.mean(dim=0), "shut")):
        Sited.mixed = staticmethod(mixed) if mixed else None
        train = {**given, "x": x}
        pipeline = make_pipeline(Sited, train=train, validation=train)
        found = run_check(sample_boundary, pipeline)
        assert found.verdict == verdict, found.because


# ---- documents packed into rows -----------------------------------------------------------------


@functools.cache
def packed():
    """Pairs of rows as one, with the document of each position."""
    given = token_rows(length=16, shortest=8)
    ids, y = given["x"].unflatten(0, (-1, 2)).flatten(1), given["y"].unflatten(0, (-1, 2))
    document = torch.arange(2).repeat_interleave(16).expand(len(ids), -1).clone()
    x = {"ids": ids, "document": document}
    return {"x": x, "y": y.flatten(1), "id": torch.arange(len(ids))}


def own_document(x):
    same = x["document"][:, :, None] == x["document"][:, None]
    return (same & plain_mask(x))[:, None]


def packed_pipeline(net, **changes):
    given = {"task": Tokens(), "train": packed(), "validation": packed(), "batch_size": 32}
    return make_pipeline(net, **given, **changes)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_documents_that_keep_to_themselves_open(precision):
    pipeline = packed_pipeline(lambda: Blocks(own_document), precision=precision)
    found = run_check(sample_boundary, pipeline)
    assert found.verdict == "open", found.because


@pytest.mark.parametrize("start", [lambda model: None, zero_joins])
def test_documents_that_see_each_other_shut(start):
    found = run_check(sample_boundary, packed_pipeline(lambda: Blocks(start=start)))
    assert found.verdict == "shut"
    assert "other documents" in found.because
    assert "documents" in found.suspect[0]


@pytest.mark.parametrize("make", [make_tokens_pipeline, packed_pipeline])
def test_nothing_outlasts_the_look_at_positions(make):
    pipeline, model = make(lambda: Blocks(own_document if make is packed_pipeline else None)), None
    model = pipeline.make_model(3)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    state, epoch = torch.get_rng_state(), pipeline.train.epoch
    stored = {k: v.clone() for k, v in probe.tensors(pipeline.train.rows["x"]).items()}
    run_check(sample_boundary, pipeline, model=model)
    assert model.training
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())
    assert sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()) == 0
    assert torch.equal(state, torch.get_rng_state())
    assert pipeline.train.epoch == epoch
    now = probe.tensors(pipeline.train.rows["x"])
    assert all(torch.equal(now[key], value) for key, value in stored.items())


def sgd(rate):
    return lambda model: torch.optim.SGD(model.parameters(), lr=rate)


@pytest.mark.parametrize(
    "parts", [{}, {"net": normed}, {"precision": "bf16"}, {"optimizer": sgd(1e-5)}]
)
def test_a_model_that_reads_its_input_beats_every_blind_one(parts):
    found = run_check(baseline.input_independent_baseline, make_pipeline(**parts))
    assert found.verdict == "open"
    assert found.value > found.limit


def permuted(start=0, stop=900):
    given = rows(start, stop)
    order = torch.randperm(stop - start, generator=torch.Generator().manual_seed(0))
    return {**given, "y": given["y"][order]}


def noise(x):
    return torch.randn(x.shape, generator=torch.Generator().manual_seed(len(x)))


@pytest.mark.parametrize(
    "fault",
    [
        {"train": permuted()},
        {"train": permuted(), "net": normed},
        {"validation": {**rows(900, 1300), "y": (rows(900, 1300)["y"] + 1) % 10}},
        {"train": with_x(noise), "validation": with_x(noise, 900, 1300)},
        {"evaluate": broken_evaluate("labels reordered")},
    ],
)
def test_inputs_that_say_nothing_about_the_labels_shut(fault):
    found = run_check(baseline.input_independent_baseline, make_pipeline(**fault))
    assert found.verdict == "shut"
    assert found.value < found.limit


def test_a_held_out_class_map_that_moved_is_suspected_before_the_training_labels():
    moved = {**rows(900, 1300), "y": (rows(900, 1300)["y"] + 1) % 10}
    found = run_check(baseline.input_independent_baseline, make_pipeline(validation=moved))
    assert "validation" in found.suspect[0]


def test_a_model_that_does_not_train_is_inconclusive():
    found = run_check(
        baseline.input_independent_baseline, make_pipeline(lambda: Net(lambda s, x: s.plain(0 * x)))
    )
    assert found.verdict == "inconclusive"
    assert "overfit_one_batch" in found.because


def test_a_label_that_reaches_the_outputs_around_the_input_shuts():
    pipeline = make_pipeline(evaluate=broken_evaluate("labels in the outputs"))
    found = run_check(baseline.input_independent_baseline, pipeline)
    assert found.verdict == "shut"
    assert "around the input" in found.suspect[0]
