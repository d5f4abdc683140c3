"""model.py: what every network keeps to, and which parameters decay."""

import pytest
import torch
from torch import nn

from {{cookiecutter.project_slug}} import model

NETWORKS = ("Linear", "TinyConvNet", "ConvNet")


def rows_of(count, shape=(1, 8, 8), seed=0):
    return torch.randn(count, *shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("shape", [(1, 8, 8), (3, 9, 12), (1, 7, 5)])
def test_every_network_turns_images_of_any_shape_into_logits(name, shape):
    network = model.build(name, {}, shape, 4)
    outputs = network(rows_of(6, shape))
    assert outputs.shape == (6, 4) and outputs.dtype == torch.float32
    assert not torch.allclose(outputs.sum(dim=1), torch.ones(6))  # logits, no probabilities
    assert (outputs < 0).any()


@pytest.mark.parametrize("name", NETWORKS)
def test_the_head_has_a_bias_of_one_value_per_output(name):
    assert model.build(name, {}, (1, 8, 8), 4).head.bias.shape == (4,)


@pytest.mark.parametrize("name", NETWORKS)
def test_one_seed_gives_one_network_and_another_seed_another(name):
    def weights(seed):
        torch.manual_seed(seed)
        network = model.build(name, {}, (1, 8, 8), 4)
        return torch.cat([p.detach().flatten() for p in network.parameters()])

    assert torch.equal(weights(0), weights(0))
    assert not torch.equal(weights(0), weights(1))


@pytest.mark.parametrize("name", NETWORKS)
def test_each_row_is_answered_by_itself_in_evaluation_mode(name):
    network = model.build(name, {}, (1, 8, 8), 4).eval()
    x = rows_of(6)
    with torch.no_grad():
        together, alone = network(x), torch.cat([network(row[None]) for row in x])
    assert torch.allclose(together, alone, atol=1e-6)


def test_params_reach_the_network():
    wide, narrow = (model.build("ConvNet", {"width": w}, (1, 8, 8), 4) for w in (32, 16))
    assert wide.head.in_features == 2 * narrow.head.in_features == 64
    deep = model.build("ConvNet", {"width": 16, "num_stages": 3}, (1, 8, 8), 4)
    assert deep.head.in_features == 64


def test_dropout_is_spatial_and_absent_at_zero():
    drops = model.build("ConvNet", {}, (1, 8, 8), 4, dropout=0.2).modules()
    assert [m.p for m in drops if isinstance(m, nn.Dropout2d)] == [0.2, 0.2]
    plain = model.build("ConvNet", {}, (1, 8, 8), 4).modules()
    assert not any(isinstance(m, nn.Dropout2d) for m in plain)


def test_an_unknown_name_is_refused_with_the_nearest():
    with pytest.raises(ValueError, match=r"model\.name='ConfNet' is not in model\.py.*: ConvNet"):
        model.build("ConfNet", {}, (1, 8, 8), 4)


@pytest.mark.parametrize("name", ["nn", "torch", "build", "Module", "__builtins__"])
def test_nothing_but_the_networks_of_this_file_can_be_named(name):
    with pytest.raises(ValueError, match=r"is not in model\.py"):
        model.build(name, {}, (1, 8, 8), 4)


def test_params_that_do_not_fit_are_refused_with_the_file():
    with pytest.raises(ValueError, match=r"model\.params do not fit Linear in model\.py.*width"):
        model.build("Linear", {"width": 3}, (1, 8, 8), 4)
    with pytest.raises(ValueError, match=r"do not fit Linear.*dropout"):
        model.build("Linear", {}, (1, 8, 8), 4, dropout=0.1)


@pytest.mark.parametrize("name", NETWORKS)
def test_every_trainable_parameter_is_in_exactly_one_group(name):
    network = model.build(name, {}, (1, 8, 8), 4)
    groups = model.parameter_groups(network, 0.1, 0.01)
    grouped = [id(p) for group in groups for p in group["params"]]
    assert sorted(grouped) == sorted(id(p) for p in network.parameters())
    assert len(set(grouped)) == len(grouped)
    assert {group["lr"] for group in groups} == {0.1}


@pytest.mark.parametrize("name", NETWORKS)
def test_biases_and_norms_do_not_decay_and_all_else_does(name):
    network = model.build(name, {}, (1, 8, 8), 4)
    decay = {
        id(p): group["weight_decay"]
        for group in model.parameter_groups(network, 0.1, 0.01)
        for p in group["params"]
    }
    for module in network.modules():
        for part, parameter in module.named_parameters(recurse=False):
            spared = part == "bias" or isinstance(module, nn.BatchNorm2d)
            assert decay[id(parameter)] == (0.0 if spared else 0.01)


def test_frozen_parameters_are_in_no_group_and_no_group_is_empty():
    network = model.build("ConvNet", {}, (1, 8, 8), 4)
    network.trunk.requires_grad_(False)
    groups = model.parameter_groups(network, 0.1, 0.01)
    assert [[p.shape for p in g["params"]] for g in groups] == [[(4, 32)], [(4,)]]
    network.head.bias.requires_grad_(False)
    assert len(model.parameter_groups(network, 0.1, 0.01)) == 1
