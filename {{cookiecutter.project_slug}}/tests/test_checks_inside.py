import copy

import pytest
import torch
from checks_case import Digits, Net, make_pipeline, rows
from other_tasks import (
    PAD,
    Causal,
    Gru,
    Mlp,
    Tokens,
    make_multilabel_pipeline,
    make_tokens_pipeline,
    token_rows,
)
from torch import nn
from torch.nn import functional as F

from {{cookiecutter.project_slug}}.harness import loop
from {{cookiecutter.project_slug}}.harness.checks import run_check
from {{cookiecutter.project_slug}}.harness.checks.inside import (
    axis_identity,
    field_influence,
    symmetry,
)
from {{cookiecutter.project_slug}}.harness.checks.padding import pad_invariance
from {{cookiecutter.project_slug}}.harness.checks.reshapes import mixes

# ---- reshapes -----------------------------------------------------------------------------------


class Maps(nn.Module):
    """16 channels of 8x8, then what is asked, then a head."""

    def __init__(self, change, channels=16):
        super().__init__()
        self.change = change
        self.stem = nn.Conv2d(1, channels, 3, padding=1)
        self.head = nn.LazyLinear(10)
        with torch.no_grad():
            self(torch.zeros(1, 1, 8, 8))

    def forward(self, x):
        return self.head(self.change(self.stem(x).relu()).flatten(1))


def windows(z):
    parts = z.permute(0, 2, 3, 1).view(-1, 2, 4, 2, 4, 16).permute(0, 1, 3, 2, 4, 5)
    merged = parts.contiguous().view(-1, 16, 16).softmax(dim=1)
    return merged.view(len(z), 2, 2, 4, 4, 16).permute(0, 1, 3, 2, 4, 5).reshape(-1, 8, 8, 16)


def patches(z):
    cut = z.reshape(len(z), 16, 4, 2, 4, 2).permute(0, 2, 4, 3, 5, 1)
    return cut.reshape(len(z), 16, 64)


HEALTHY_MAPS = {
    "flatten": lambda z: z,
    "permute": lambda z: z.flatten(2).transpose(1, 2),
    "windows": windows,
    "patches": patches,
    "patches by unfold": lambda z: F.unfold(z, 2, stride=2).transpose(1, 2),
    "detection head": lambda z: z.permute(0, 2, 3, 1).contiguous().view(len(z), -1, 4),
    "channel shuffle": lambda z: z.view(-1, 4, 4, 8, 8).transpose(1, 2).reshape(z.shape),
    "sub-pixel by hand": lambda z: (
        z.view(-1, 4, 2, 2, 8, 8).permute(0, 1, 4, 2, 5, 3).reshape(-1, 4, 16, 16)
    ),
    "sub-pixel": lambda z: F.pixel_shuffle(z, 2),
    "group statistics": lambda z: z.view(len(z), 4, -1) - z.view(len(z), 4, -1).mean(2, True),
    "unflatten": lambda z: nn.Unflatten(1, (2, 8))(z),
    "rows as a batch": lambda z: z.transpose(1, 2).reshape(-1, 16, 8).mean(2).view(len(z), 8, 16),
    "two positions as one": lambda z: z.flatten(2).transpose(1, 2).reshape(len(z), 32, 32),
}


@pytest.mark.parametrize("name", HEALTHY_MAPS)
def test_reshapes_that_split_and_merge_open(name):
    found = run_check(axis_identity, make_pipeline(lambda: Maps(HEALTHY_MAPS[name])))
    assert found.verdict == "open", found.because
    assert "reshapes split and merge" in found.because


class Modules(nn.Module):
    """The layers torch ships that reshape inside."""

    def __init__(self, layer, width=16):
        super().__init__()
        self.embed, self.layer, self.head = nn.Linear(8, 16), layer, nn.Linear(width, 10)

    def forward(self, x):
        z = self.layer(self.embed(x.squeeze(1)))
        return self.head((z[0] if isinstance(z, tuple) else z).mean(dim=1))


class Attention(nn.Module):
    """4 heads of 4 over 8 positions; `split` and `merge` can be planted."""

    def __init__(self, split=None, merge=None):
        super().__init__()
        self.mix, self.split, self.merge = nn.Linear(16, 48), split, merge

    def forward(self, z):
        split = self.split or (lambda p: p.view(len(p), 8, 4, 4).transpose(1, 2))
        merge = self.merge or (lambda p: p.transpose(1, 2).reshape(len(p), 8, 16))
        return merge(F.scaled_dot_product_attention(*map(split, self.mix(z).chunk(3, -1))))


LAYERS = {
    "lstm": lambda: nn.LSTM(16, 16, num_layers=2, batch_first=True),
    "gru": lambda: nn.GRU(16, 16, batch_first=True),
    "encoder": lambda: nn.TransformerEncoder(
        nn.TransformerEncoderLayer(16, 4, 32, batch_first=True), 2, enable_nested_tensor=False
    ),
    "attention": Attention,
}


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_layers_of_torch_and_heads_open(name, precision):
    pipeline = make_pipeline(lambda: Modules(LAYERS[name]()), precision=precision)
    assert run_check(axis_identity, pipeline).verdict == "open"


class States(nn.Module):
    """Final states `(layers, B, H)` of a recurrent layer, brought into rows."""

    def __init__(self, join, layers=2):
        super().__init__()
        self.join = join
        self.read = nn.GRU(8, 12, num_layers=layers, batch_first=True)
        self.head = nn.Linear(12 * layers, 10)

    def forward(self, x):
        return self.head(self.join(self.read(x.squeeze(1))[1]))


@pytest.mark.parametrize(
    "net",
    [
        lambda: States(lambda h: h.transpose(0, 1).flatten(1)),
        lambda: States(lambda h: h.view(h.shape[1], -1), layers=1),
    ],
)
def test_states_that_are_moved_or_single_open(net):
    assert run_check(axis_identity, make_pipeline(net)).verdict == "open"


MIXED = {
    "heads merged without moving the axis": lambda: Modules(
        Attention(merge=lambda p: p.reshape(len(p), 8, 16))
    ),
    "heads split without moving the axis": lambda: Modules(
        Attention(
            split=lambda p: p.reshape(len(p), 4, 8, 4),
            merge=lambda p: p.transpose(1, 2).flatten(2),
        )
    ),
    "states viewed as rows": lambda: States(lambda h: h.view(h.shape[1], -1)),
    "4 channels viewed last": lambda: Maps(lambda z: z.view(len(z), 64, 4).softmax(1), 4),
    "6 channels viewed last": lambda: Maps(lambda z: z.view(len(z), 64, 6).softmax(1), 6),
    "channels and columns": lambda: Maps(lambda z: z.reshape(len(z), 8, 8, 16)),
    "channel and row in one": lambda: Maps(lambda z: z[..., :5].reshape(len(z), -1, 8)),
    "rows first": lambda: Net(
        lambda s, x: s.plain(F.pad(x[..., :7].reshape(-1, 1, 7, 8), (0, 0, 0, 1)))
    ),
    "batch and positions": lambda: Maps(lambda z: z.reshape(16, len(z), 64).mean(0)),
}


@pytest.mark.parametrize("name", MIXED)
def test_a_view_in_place_of_a_transpose_shuts(name):
    found = run_check(axis_identity, make_pipeline(MIXED[name]))
    assert found.verdict == "shut", found.because
    assert "permute or transpose" in found.suspect[0]


def test_the_module_and_the_shapes_are_named():
    found = run_check(axis_identity, make_pipeline(MIXED["heads merged without moving the axis"]))
    assert "layer (Attention) reshapes (7, 4, 8, 4) to (7, 8, 16)" in found.because


def test_a_reshape_in_the_loss_is_seen_too():
    class Task(Tokens):
        def loss(self, outputs, y):
            return F.cross_entropy(outputs.reshape(len(y), self.num_outputs, -1), y)

    train = token_rows(length=24)
    found = run_check(axis_identity, make_tokens_pipeline(Gru, task=Task(), train=train))
    assert found.verdict == "shut"
    assert "the loss reshapes" in found.because


def test_a_relative_shift_only_warns():
    def shift(z):
        padded = F.pad(z, (1, 0))
        return padded.view(*z.shape[:2], 9, 8)[:, :, 1:].view_as(z)

    found = run_check(axis_identity, make_pipeline(lambda: Maps(shift)))
    assert found.verdict == "warn"
    assert "relative shift" in found.because


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ((7, 3, 4, 4), (7, 16, 3)),  # channels first read as channels last
        ((7, 16, 3), (7, 3, 16)),
        ((7, 8, 20, 16), (7, 128, 20, 1)),  # channel and time in one
        ((7, 8, 32, 16), (7, 128, 32)),
        ((2, 7, 16), (7, 32)),  # layers and batch
        ((7, 2, 8, 16), (7, 8, 32)),  # heads and positions
        ((7, 8, 32, 6, 6), (7, 1152, 8)),  # capsules
        ((7, 28, 28, 3), (7, 3, 28, 28)),
    ],
)
def test_sizes_that_only_a_transpose_explains_mix(before, after):
    assert mixes(before, after) is not None


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ((7, 8, 64), (7, 8, 4, 16)),
        ((8, 7, 64), (8, 28, 16)),  # heads join the batch, positions first
        ((7, 4, 6, 12), (7, 96, 3)),  # anchors join the positions
        ((7, 12, 6, 6), (7, 4, 108)),  # groups of channels
        ((7, 40, 24), (7, 20, 48)),  # pairs of positions
        ((7, 96), (14, 48)),
        ((7, 16, 1, 1), (7, 16)),
        ((7, 3, 5, 5), (7, 75)),
        ((7, 75), (7, 3, 5, 5)),
        ((21, 10), (7, 3, 10)),
    ],
)
def test_sizes_that_splits_and_merges_explain_do_not_mix(before, after):
    assert mixes(before, after) is None


# ---- fields -------------------------------------------------------------------------------------


def test_every_column_that_is_read_opens():
    found = run_check(field_influence, make_multilabel_pipeline())
    assert found.verdict == "open"
    assert "20 fields" in found.because
    assert found.value > found.limit


def test_every_quarter_of_a_picture_is_read():
    found = run_check(field_influence, make_pipeline())
    assert found.verdict == "open"
    assert "8 fields" in found.because


def test_half_a_picture_that_is_never_read_shuts():
    def left(self, x):
        return self.plain(torch.cat([x[..., :4], torch.zeros_like(x[..., :4])], dim=-1))

    found = run_check(field_influence, make_pipeline(lambda: Net(left)))
    assert found.verdict == "shut"
    assert "2 fields (x quarter 3 of axis 3, x quarter 4 of axis 3)" in found.because


def test_a_network_that_reads_nothing_at_all_leaves_the_cause_to_other_checks():
    found = run_check(field_influence, make_pipeline(lambda: Net(lambda s, x: s.plain(0 * x))))
    assert found.verdict == "inconclusive"
    assert "do not depend on the input" in found.because


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_columns_that_are_never_used_shut(precision):
    def net():
        return Mlp(12, 5, lambda self, x: self.plain(x[:, :12]))

    found = run_check(field_influence, make_multilabel_pipeline(net, precision=precision))
    assert found.verdict == "shut"
    assert "8 fields" in found.because
    assert "never used" in found.suspect[0]


def test_a_last_layer_that_starts_at_zero_still_reads_its_columns():
    def net():
        model = Mlp(20, 5)
        nn.init.zeros_(model.head.weight)
        return model

    assert run_check(field_influence, make_multilabel_pipeline(net)).verdict == "open"


def test_constant_columns_are_left_out():
    train = copy.copy(make_multilabel_pipeline().train.rows)
    train["x"] = torch.cat([train["x"][:, :19], torch.ones(len(train["x"]), 1)], dim=1)
    found = run_check(field_influence, make_multilabel_pipeline(train=train))
    assert "19 fields" in found.because


class TwoFields(nn.Module):
    def __init__(self, used=True):
        super().__init__()
        self.used, self.image, self.site = used, nn.Linear(64, 10), nn.Embedding(4, 10)

    def forward(self, x):
        outputs = self.image(x["image"].flatten(1))
        return outputs + self.site(x["site"]) if self.used else outputs


def two_fields(net):
    given = rows()
    site = torch.arange(len(given["y"])) % 4
    train = {**given, "x": {"image": given["x"], "site": site}}
    return make_pipeline(net, train=train, validation=train)


def test_fields_of_a_dict_are_exchanged():
    assert run_check(field_influence, two_fields(TwoFields)).verdict == "open"
    found = run_check(field_influence, two_fields(lambda: TwoFields(used=False)))
    assert found.verdict == "shut"
    assert "(site)" in found.because


def test_a_series_that_is_forgotten_little_by_little_only_warns():
    class Reader(nn.Module):
        def __init__(self):
            super().__init__()
            self.head = nn.Linear(1, 5)

        def forward(self, x):
            return self.head((x * 0.4 ** torch.arange(20).flip(0)).sum(dim=1, keepdim=True))

    assert run_check(field_influence, make_multilabel_pipeline(Reader)).verdict == "warn"


class Stack(nn.Module):
    """Causal blocks of torch; the places are added, turned into the heads, or forgotten."""

    def __init__(self, places="added", depth=2):
        super().__init__()
        self.places = places
        self.embed = nn.Embedding(Tokens.num_outputs, 32)
        self.place = nn.Parameter(torch.randn(64, 32) * 0.1)
        layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, depth, enable_nested_tensor=False)
        self.head = nn.Linear(32, Tokens.num_outputs)

    def forward(self, x):
        length = x.shape[1]
        z = self.embed(x) + (self.place[:length] if self.places == "added" else 0)
        mask = torch.full((length, length), float("-inf")).triu(1)
        if self.places == "distance":
            far = torch.arange(length)
            mask = mask - 0.3 * (far[:, None] - far).clamp(min=0)
        return self.head(self.layers(z, mask=mask))


@pytest.mark.parametrize(
    "net",
    [Causal, Gru, Stack, lambda: Stack("distance"), lambda: nn.Embedding(Tokens.num_outputs, 32)],
)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_models_that_know_the_order_of_tokens_do_not_shut(net, precision):
    found = run_check(field_influence, make_tokens_pipeline(net, precision=precision))
    assert found.verdict in ("open", "not_applicable"), found.because


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_attention_without_positions_shuts(depth, precision):
    pipeline = make_tokens_pipeline(lambda: Stack("none", depth), precision=precision)
    found = run_check(field_influence, pipeline)
    assert found.verdict == "shut"
    assert "position information is missing" in found.suspect[0]


def test_attention_without_positions_that_starts_at_zero_shuts():
    def net():
        model = Stack("none")
        for layer in model.layers.layers:
            nn.init.zeros_(layer.self_attn.out_proj.weight)
        return model

    assert run_check(field_influence, make_tokens_pipeline(net)).verdict == "shut"


def test_a_bag_of_tokens_by_design_only_warns():
    class Bag(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.mean = nn.Embedding(Tokens.num_outputs, 32), Running()
            self.head = nn.Linear(32, Tokens.num_outputs)

        def forward(self, x):
            return self.head(self.mean(self.embed(x)))

    class Running(nn.Module):
        def forward(self, z):
            return z.cumsum(dim=1) / torch.arange(1, z.shape[1] + 1)[:, None]

    assert run_check(field_influence, make_tokens_pipeline(Bag)).verdict == "warn"


# ---- symmetry -----------------------------------------------------------------------------------


def started(change, net=Net):
    def make():
        model = net()
        change(model)
        return model

    return make


def zeros(module):
    nn.init.zeros_(module.weight)
    nn.init.zeros_(module.bias)


class Depthwise(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(1, 12, 3, padding=1),
            nn.Conv2d(12, 12, 3, padding=1, groups=12),
            nn.BatchNorm2d(12),
            nn.ReLU(),
            nn.Conv2d(12, 24, 1),
            nn.Flatten(),
            nn.Linear(24 * 64, 10),
        )
        nn.init.constant_(self.layers[1].weight, 1 / 9)  # a blur: each channel has its own input

    def forward(self, x):
        return self.layers(x)


class Adapted(nn.Module):
    """A frozen layer with an adapter of rank 8 that starts at zero."""

    def __init__(self):
        super().__init__()
        self.base = nn.Linear(64, 32).requires_grad_(False)
        self.down, self.up = nn.Linear(64, 8, bias=False), nn.Linear(8, 32, bias=False)
        self.head = nn.Linear(32, 10)
        nn.init.zeros_(self.up.weight)

    def forward(self, x):
        x = x.flatten(1)
        return self.head((self.base(x) + self.up(self.down(x))).relu())


class Branches(nn.Module):
    """Two branches that start equal; `join` brings them together."""

    def __init__(self, join):
        super().__init__()
        self.one = nn.Linear(64, 16)
        self.two = copy.deepcopy(self.one)
        self.join, self.head = join, nn.LazyLinear(10)
        with torch.no_grad():
            self(torch.zeros(1, 1, 8, 8))

    def forward(self, x):
        x = x.flatten(1)
        return self.head(self.join(self.one(x).relu(), self.two(x).relu()))


class Gates(nn.Module):
    """Recurrent weights that start as the identity, once per gate."""

    def __init__(self):
        super().__init__()
        self.read, self.head = nn.GRU(8, 16, batch_first=True), nn.Linear(16, 10)
        self.read.weight_hh_l0.data.copy_(torch.eye(16).repeat(3, 1))

    def forward(self, x):
        return self.head(self.read(x.squeeze(1))[0][:, -1])


class Decays(Net):
    """A matrix with one row of decay rates per channel, the same for all."""

    def __init__(self):
        super().__init__()
        self.rates = nn.Parameter(torch.arange(1.0, 17.0).log().repeat(32, 1))

    def forward(self, x):
        hidden = self.trunk(x)
        return self.head(hidden * (-self.rates.exp()).exp().sum(dim=1))


@pytest.mark.parametrize(
    "net",
    [
        Net,
        started(lambda m: zeros(m.head)),
        Depthwise,
        Adapted,
        Gates,
        Decays,
        lambda: Modules(LAYERS["encoder"]()),  # torch copies its layers
        lambda: Branches(lambda one, two: torch.cat([one, two], dim=1)),
    ],
)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_units_that_differ_or_part_open(net, precision):
    found = run_check(symmetry, make_pipeline(net, precision=precision))
    assert found.verdict == "open", found.because


def test_tied_weights_and_tables_are_left_out():
    class Tied(Gru):
        def __init__(self):
            super().__init__()
            self.embed.weight.data[2:20] = self.embed.weight.data[1]
            self.head.weight = self.embed.weight

    assert run_check(symmetry, make_tokens_pipeline(Tied)).verdict == "open"


def constant(model):
    nn.init.constant_(model.trunk[1].weight, 0.1)


def halves(model):
    weight = model.trunk[1].weight.data
    weight[16:] = weight[:16]


class Bare(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight, self.head = nn.Parameter(torch.full((64, 32), 0.05)), nn.Linear(32, 10)

    def forward(self, x):
        return self.head((x.flatten(1) @ self.weight).relu())


@pytest.mark.parametrize(
    ("net", "words"),
    [
        (started(constant), "start with the weights of another one"),
        (started(halves), "start with the weights of another one"),
        (Bare, "start with the weights of another one"),
        (started(lambda m: (zeros(m.trunk[1]), zeros(m.head))), "are still zero"),
        (lambda: Branches(lambda one, two: one + two), "start with the same weights and after"),
    ],
)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_units_that_are_and_stay_the_same_shut(net, words, precision):
    found = run_check(symmetry, make_pipeline(net, precision=precision))
    assert found.verdict == "shut", found.because
    assert words in found.because


def test_a_layer_of_zeros_behind_a_constant_one_shuts():
    def flat(model):
        zeros(model.trunk[1])
        nn.init.constant_(model.head.weight, 0.1)

    assert run_check(symmetry, make_pipeline(started(flat))).verdict == "shut"


def test_a_rate_far_too_high_is_not_called_symmetry():
    pipeline = make_pipeline(Adapted, optimizer=lambda m: torch.optim.SGD(m.parameters(), lr=1.0))
    assert run_check(symmetry, pipeline).verdict == "open"


def test_steps_that_break_leave_the_start_to_judge():
    def step(*args, **kwargs):
        raise loop.NonFiniteLoss("the loss is nan")

    assert run_check(symmetry, make_pipeline(step=step)).verdict == "open"


# ---- padding ------------------------------------------------------------------------------------


class Sentence(Digits):
    """Rows of tokens, one of ten classes for each."""

    pad_id = PAD

    def __init__(self, left=False):
        self.left = left

    def pad(self, x, num):
        sides = (num, 0) if self.left else (0, num)
        if isinstance(x, dict):
            return {key: F.pad(value, sides) for key, value in x.items()}
        return F.pad(x, sides, value=PAD)


class Reader(nn.Module):
    """Attention over the tokens and a mean; what sees the padding can be planted."""

    def __init__(self, mask=True, mean=True, places="kept", start=lambda model: None):
        super().__init__()
        self.mask, self.mean, self.places = mask, mean, places
        self.embed, self.place = nn.Embedding(Tokens.num_outputs, 32), nn.Embedding(64, 32)
        self.mix = nn.MultiheadAttention(32, 4, batch_first=True)
        self.head = nn.Linear(32, 10)
        start(self)

    def forward(self, x):
        ids, kept = (x["ids"], x["mask"] > 0) if isinstance(x, dict) else (x, x != PAD)
        place = torch.arange(ids.shape[1]).expand(ids.shape)
        if self.places == "kept":
            place = (kept.cumsum(dim=1) - 1).clamp(min=0)
        z = self.embed(ids) + self.place(place)
        z = z + self.mix(z, z, z, key_padding_mask=~kept if self.mask else None)[0]
        if not self.mean:
            return self.head(z.mean(dim=1))
        return self.head((z * kept[..., None]).sum(dim=1) / kept.sum(dim=1, keepdim=True))


def sentences(net=Reader, *, left=False, fields=False, full=False, **changes):
    given = token_rows(shortest=32 if full else 8)
    x = given["x"]
    if left:
        x = torch.stack([row.roll(int((row == PAD).sum())) for row in x])
    if fields:
        x = {"ids": x, "mask": (x != PAD).long()}
    train = {"x": x, "y": given["y"][:, 0] % 10, "id": given["id"]}
    given = {"task": Sentence(left), "train": train, "validation": train, "batch_size": 32}
    return make_pipeline(net, **given, **changes)


@pytest.mark.parametrize("left", [False, True])
@pytest.mark.parametrize("fields", [False, True])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_rows_that_do_not_feel_padding_open(left, fields, precision):
    found = run_check(pad_invariance, sentences(left=left, fields=fields, precision=precision))
    assert found.verdict == "open", found.because


@pytest.mark.parametrize("net", [Causal, Gru])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_causal_model_does_not_feel_padding_behind(net, precision):
    found = run_check(pad_invariance, make_tokens_pipeline(net, precision=precision))
    assert found.verdict == "open", found.because


def test_a_model_of_fixed_length_is_given_shorter_rows():
    class Short(Causal):
        def __init__(self):
            super().__init__()
            self.place = nn.Embedding(32, 32)

    found = run_check(pad_invariance, make_tokens_pipeline(Short))
    assert found.verdict == "open", found.because


def test_a_model_of_one_length_only_cannot_be_tried():
    class Flat(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.head = nn.Embedding(Tokens.num_outputs, 4), nn.Linear(32 * 4, 10)

        def forward(self, x):
            return self.head(self.embed(x).flatten(1))

    found = run_check(pad_invariance, sentences(Flat))
    assert found.verdict == "not_applicable"
    assert "one length" in found.because


def zero_mix(model):
    nn.init.zeros_(model.mix.out_proj.weight)


@pytest.mark.parametrize(
    "parts",
    [
        {"mask": False},
        {"mean": False},
        {"mask": False, "start": zero_mix},
    ],
)
@pytest.mark.parametrize("left", [False, True])
@pytest.mark.parametrize("full", [False, True])
def test_padding_that_reaches_attention_or_mean_shuts(parts, left, full):
    found = run_check(pad_invariance, sentences(lambda: Reader(**parts), left=left, full=full))
    assert found.verdict == "shut"
    assert "mask" in found.suspect[0]


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_left_padding_without_position_ids_shuts(precision):
    plain = sentences(lambda: Reader(places="counted"), left=True, precision=precision)
    assert run_check(pad_invariance, plain).verdict == "shut"
    right = sentences(lambda: Reader(places="counted"), precision=precision)
    assert run_check(pad_invariance, right).verdict == "open"


def test_a_task_without_pad_says_what_to_hand_over():
    found = run_check(pad_invariance, make_pipeline())
    assert found.verdict == "not_applicable"
    assert "task.pad" in found.because


# ---- nothing stays ------------------------------------------------------------------------------


@pytest.mark.parametrize("check", [axis_identity, field_influence, symmetry, pad_invariance])
@pytest.mark.parametrize("make", [make_tokens_pipeline, make_multilabel_pipeline, sentences])
def test_nothing_outlasts_the_check(check, make):
    made, pipeline = [], make()

    def make_model(seed):
        made.append(pipeline.make_model(seed))
        return made[-1]

    state, epoch = torch.get_rng_state(), pipeline.train.epoch
    stored = pipeline.train.rows["x"].clone()
    given = copy.copy(pipeline)
    object.__setattr__(given, "make_model", make_model)
    first = run_check(check, given)
    assert first == run_check(check, given)
    for model in made:
        assert sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()) == 0
    assert torch.equal(state, torch.get_rng_state())
    assert pipeline.train.epoch == epoch
    assert torch.equal(pipeline.train.rows["x"], stored)
    assert len(torch.overrides._get_current_function_mode_stack()) == 0
