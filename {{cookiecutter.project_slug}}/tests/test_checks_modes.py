import pytest
from checks_case import Net, broken_evaluate, broken_step, make_pipeline
from torch import nn
from torch.nn import functional as F

from {{cookiecutter.project_slug}}.harness.checks import run_check
from {{cookiecutter.project_slug}}.harness.checks.modes import modes


def normed(**options):
    return Net(norm=lambda width: nn.BatchNorm1d(width, **options), dropout=0.3)


class Frozen(Net):
    """A frozen trunk with batch norm; `held` keeps it in evaluation mode, as it should."""

    def __init__(self, held):
        super().__init__(norm=nn.BatchNorm1d)
        self.held = held
        for parameter in self.trunk.parameters():
            parameter.requires_grad_(False)

    def train(self, mode=True):
        super().train(mode)
        if self.held:
            self.trunk.eval()
        return self


@pytest.mark.parametrize("net", [Net, normed, lambda: Frozen(held=True)])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_modes_that_are_kept_open(net, precision):
    assert run_check(modes, make_pipeline(net, precision=precision)).verdict == "open"


def always_dropped(self, x):
    return self.head(F.dropout(self.trunk(x), 0.5))


@pytest.mark.parametrize(
    ("fault", "cause"),
    [
        ({"evaluate": broken_evaluate("never eval"), "net": normed}, "model.eval() is not called"),
        ({"evaluate": broken_evaluate("never eval")}, "model.eval() is not called"),
        ({"step": broken_step(mode=False)}, "the step calls model.eval()"),
        ({"net": lambda: Net(always_dropped)}, "functional dropout"),
        ({"net": lambda: normed(momentum=0.0)}, "momentum 0"),
        ({"net": lambda: Frozen(held=False)}, "frozen BatchNorm"),
    ],
)
def test_a_wrong_mode_shuts_and_is_named(fault, cause):
    found = run_check(modes, make_pipeline(**fault))
    assert found.verdict == "shut"
    assert any(cause in text for text in found.suspect)


def test_an_evaluation_that_leaves_the_model_in_evaluation_mode_shuts():
    healthy = make_pipeline(normed)

    def evaluate(model, loader):
        found = healthy.evaluate(model, loader)
        model.eval()
        return found

    found = run_check(modes, make_pipeline(normed, evaluate=evaluate))
    assert found.verdict == "shut"
    assert "put the modes back" in found.suspect[0]


def test_an_evaluation_that_trains_shuts():
    healthy = make_pipeline()

    def evaluate(model, loader):
        for parameter in model.parameters():
            parameter.data.mul_(0.99)
        return healthy.evaluate(model, loader)

    found = run_check(modes, make_pipeline(evaluate=evaluate))
    assert found.verdict == "shut"
    assert "change in evaluation" in found.because


class Thick(Net):
    """Three layers with batch norm over rows alone."""

    def __init__(self):
        super().__init__()
        layers = [
            layer
            for width in (64, 32, 32)
            for layer in (nn.Linear(width, 32), nn.BatchNorm1d(32), nn.ReLU())
        ]
        self.trunk = nn.Sequential(nn.Flatten(), *layers)


def test_batches_too_small_for_their_statistics_warn():
    found = run_check(modes, make_pipeline(Thick, batch_size=2))
    assert found.verdict == "warn"
    assert "BatchNorm" in found.suspect[0]


@pytest.mark.parametrize("parts", [{"batch_size": 4}, {"net": Thick, "batch_size": 64}])
def test_small_batches_without_batch_norm_and_large_ones_with_it_open(parts):
    assert run_check(modes, make_pipeline(**parts)).verdict == "open"
