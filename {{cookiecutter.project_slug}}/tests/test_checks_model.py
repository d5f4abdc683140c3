import pytest
import torch
from checks_case import Net, broken_evaluate, make_pipeline, rows, with_x
from torch import nn

from {{cookiecutter.project_slug}}.harness.checks import baseline, run_check
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
