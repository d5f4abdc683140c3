import functools
import math
import warnings

import numpy as np
import pytest
import torch
from checks_case import CPU, Digits, Net, make_pipeline
from torch import nn
from torch.nn import functional as F
from torch.optim import lr_scheduler
from torch.utils.checkpoint import checkpoint

from {{cookiecutter.project_slug}}.harness import loop
from {{cookiecutter.project_slug}}.harness.checks import run_check
from {{cookiecutter.project_slug}}.harness.checks.kept import best_checkpoint
from {{cookiecutter.project_slug}}.harness.checks.precision import precision
from {{cookiecutter.project_slug}}.harness.checks.rates import update_ratio
from {{cookiecutter.project_slug}}.harness.checks.schedule import schedule
from {{cookiecutter.project_slug}}.harness.checks.warned import library_warnings


def adam(rate, **options):
    return lambda model: torch.optim.Adam(model.parameters(), lr=rate, **options)


def sgd(rate, **options):
    return lambda model: torch.optim.SGD(model.parameters(), lr=rate, **options)


def normed():
    return Net(norm=nn.BatchNorm1d, dropout=0.2)


class Deep(Net):
    def __init__(self):
        super().__init__()
        layers = [layer for _ in range(3) for layer in (nn.Linear(32, 32), nn.ReLU())]
        self.trunk = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), *layers)


class ZeroHead(Net):
    def __init__(self):
        super().__init__()
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)


# ---- update_ratio -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "parts",
    [
        {"optimizer": sgd(1e-2)},
        {"optimizer": sgd(5e-2, momentum=0.9), "precision": "bf16"},
        {"optimizer": sgd(0.1), "net": Deep},
        {"optimizer": adam(1e-4)},
        {"optimizer": adam(1e-2), "net": normed},
        {"optimizer": adam(3e-3), "net": ZeroHead},
        {"optimizer": adam(1e-3, eps=1e-4), "clip_norm": 1.0},
        {"accumulate": 3},
    ],
)
def test_a_sensible_rate_opens(parts):
    assert run_check(update_ratio, make_pipeline(**parts)).verdict == "open"


def test_a_warm_up_that_starts_low_is_judged_by_the_rate_it_leads_to():
    def warming(model):
        optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
        lr_scheduler.LambdaLR(optimizer, lambda step: (step + 1) / 10_000)
        return optimizer

    assert run_check(update_ratio, make_pipeline(optimizer=warming)).verdict == "open"


class Dead(Net):
    def __init__(self):
        super().__init__()
        nn.init.constant_(self.trunk[1].bias, -50.0)


@pytest.mark.parametrize(
    ("parts", "cause"),
    [
        ({"optimizer": adam(2e-6)}, "too low"),
        ({"optimizer": sgd(1e-5)}, "too low"),
        ({"optimizer": sgd(5e-2), "clip_norm": 1e-4}, "clip"),
        ({"optimizer": adam(1.0)}, "too high"),
        ({"optimizer": adam(1.0), "net": normed}, "too high"),
        ({"optimizer": sgd(50.0)}, "a rate that killed them"),
        ({"optimizer": adam(1e-3, eps=1.0)}, "eps"),
        ({"net": Dead}, "dead"),
    ],
)
def test_a_rate_a_thousand_times_off_or_dead_units_shut_and_are_named(parts, cause):
    found = run_check(update_ratio, make_pipeline(**parts))
    assert found.verdict == "shut"
    assert any(cause in text for text in found.suspect)


def test_a_high_rate_that_learns_no_worse_only_warns():
    found = run_check(update_ratio, make_pipeline(optimizer=sgd(0.5)))
    assert found.verdict == "warn"


def test_a_group_with_a_smaller_rate_of_its_own_only_warns_and_frozen_tensors_are_not_judged():
    def grouped(model):
        trunk = {"params": model.trunk.parameters(), "lr": 1e-8}
        return torch.optim.Adam([trunk, {"params": model.head.parameters()}], lr=3e-3)

    found = run_check(update_ratio, make_pipeline(optimizer=grouped))
    assert found.verdict == "warn"
    assert "trunk" in found.because

    class Frozen(Net):
        def __init__(self):
            super().__init__()
            self.trunk.requires_grad_(False)

    assert run_check(update_ratio, make_pipeline(Frozen)).verdict == "open"


def test_a_model_without_a_matrix_has_no_ratio():
    class Scale(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.ones(10))

        def forward(self, x):
            return self.scale * x.flatten(1)[:, :10]

    assert run_check(update_ratio, make_pipeline(Scale)).verdict == "not_applicable"


# ---- a loop -------------------------------------------------------------------------------------


def fit_with(build=None, per="step", change=None, precision="fp32", **settings):
    """The template's loop; `build(optimizer, num_epochs, num_batches)` makes its scheduler, which
    is stepped per step, epoch or plateau; `change(result, model)` spoils what it returns."""

    def fit(model, optimizer, train, validation, num_epochs):
        made = build(optimizer, num_epochs, len(train)) if build else None

        def tell(row):
            if made is not None and per != "step":
                made.step(*((row["validation_loss"],) if per == "plateau" else ()))

        result = loop.fit(
            model,
            optimizer,
            train,
            validation,
            Digits(),
            loop.FitSettings(num_epochs, precision=precision, **settings),
            scheduler=made if per == "step" else None,
            on_epoch=(tell,),
            announce=False,
        )
        if change is not None:
            change(result, model)
        return result

    return fit


def factor(function):
    """A schedule by a function of the step and the number of steps."""
    return lambda optimizer, epochs, batches: lr_scheduler.LambdaLR(
        optimizer, lambda step: function(step, epochs * batches)
    )


def cosine(share):
    return 0.5 * (1 + math.cos(math.pi * share))


def cosine_over(count):
    return lambda optimizer, epochs, batches: lr_scheduler.CosineAnnealingLR(
        optimizer, count(epochs, batches)
    )


# ---- schedule -----------------------------------------------------------------------------------

SCHEDULES = {
    "none": fit_with(),
    "cosine": fit_with(factor(lambda step, total: cosine(step / total))),
    "cosine per epoch": fit_with(cosine_over(lambda epochs, batches: epochs), "epoch"),
    "stopped early": fit_with(factor(lambda step, n: min(1, 4 * step / n)), patience_epochs=1),
    "warm-up, then linear": fit_with(factor(lambda s, n: min((s + 1) / (0.2 * n), 1 - s / n))),
    "steps": fit_with(lambda o, *_: lr_scheduler.StepLR(o, 2), "epoch"),
    "steps beyond the run": fit_with(lambda o, *_: lr_scheduler.StepLR(o, 30), "epoch"),
    "plateau": fit_with(lambda o, *_: lr_scheduler.ReduceLROnPlateau(o, patience=1), "plateau"),
    "restarts": fit_with(lambda o, *_: lr_scheduler.CosineAnnealingWarmRestarts(o, 5)),
}


@pytest.mark.parametrize("case", SCHEDULES)
def test_a_schedule_that_fits_the_run_opens(case):
    assert run_check(schedule, make_pipeline(fit=SCHEDULES[case])).verdict == "open"


def two_groups(model):
    groups = [{"params": model.trunk.parameters()}, {"params": model.head.parameters()}]
    return torch.optim.Adam(groups, lr=3e-3)


class FirstOnly:
    def __init__(self, optimizer, epochs, batches):
        self.group, self.left = optimizer.param_groups[0], epochs * batches

    def step(self):
        self.group["lr"] *= 1 - 1 / self.left
        self.left -= 1


class NeverStepped:
    def __init__(self, optimizer, epochs, batches):
        self.built = lr_scheduler.CosineAnnealingLR(optimizer, epochs * batches)

    def step(self):
        pass


@pytest.mark.parametrize(
    ("fit", "cause"),
    [
        (fit_with(factor(lambda step, total: cosine(min(1, step / 10)))), "wrong unit"),
        (fit_with(factor(lambda step, total: cosine(step / 10))), "past its end"),
        (fit_with(cosine_over(lambda epochs, batches: epochs)), "wrong unit"),
        (fit_with(cosine_over(lambda epochs, batches: epochs * batches), "epoch"), "in steps"),
        (fit_with(factor(lambda step, total: cosine(2 * step / total))), "past its end"),
        (fit_with(factor(lambda step, total: (step + 1) / (2 * total))), "warm-up is longer"),
        (fit_with(factor(lambda step, n: min(1, (step + 1) / (0.8 * n)))), "half the run"),
        (fit_with(NeverStepped), "scheduler.step() is missing"),
        (fit_with(FirstOnly), "only the first group"),
        (fit_with(lambda o, *_: lr_scheduler.ReduceLROnPlateau(o, "max"), "plateau"), "mode"),
    ],
)
def test_a_rate_that_does_not_fit_the_run_shuts_and_is_named(fit, cause):
    found = run_check(schedule, make_pipeline(fit=fit, optimizer=two_groups))
    assert found.verdict == "shut"
    assert any(cause in text for text in found.suspect)


def own_loop(between=lambda model: None, every=1, repeat=1, take=None):
    """A loop of one's own: steps once per `every` batches, `repeat` times."""

    def fit(model, optimizer, train, validation, num_epochs):
        result = loop.FitResult()
        for _ in range(num_epochs):
            for index, batch in enumerate(train, start=1):
                F.cross_entropy(model(batch["x"]), batch["y"]).backward()
                if index % every == 0:
                    for _ in range(repeat):
                        optimizer.step()
                    optimizer.zero_grad()
                if index == take:
                    break
            between(model)
        return result

    return fit


@pytest.mark.parametrize(
    ("fit", "parts", "cause"),
    [
        (own_loop(between=lambda model: model.eval()), {}, "eval()"),
        (own_loop(repeat=2), {}, "twice"),
        (own_loop(every=2), {}, "skipped"),
        (own_loop(every=4), {"accumulate": 4}, "last window"),
        (own_loop(take=2), {}, "breaks off"),
        (own_loop(every=100), {}, "never calls"),
    ],
)
def test_steps_that_are_lost_doubled_or_in_the_wrong_mode_shut(fit, parts, cause):
    found = run_check(schedule, make_pipeline(fit=fit, **parts))
    assert found.verdict == "shut"
    assert any(cause in text for text in found.suspect)


def test_a_window_over_several_batches_whose_last_one_is_kept_opens():
    def fit(model, optimizer, train, validation, num_epochs):
        for _ in range(num_epochs):
            for index, batch in enumerate(train, start=1):
                F.cross_entropy(model(batch["x"]), batch["y"]).backward()
                if index % 3 == 0 or index == len(train):
                    optimizer.step()
                    optimizer.zero_grad()
        return loop.FitResult()

    assert run_check(schedule, make_pipeline(fit=fit, accumulate=3)).verdict == "open"


@pytest.mark.parametrize(
    "function",
    [lambda step, n: min(1, (step + 1) / 500), lambda step, n: 1 / math.sqrt(1 + step)],
)
def test_what_ignores_the_length_of_the_run_warns(function):
    found = run_check(schedule, make_pipeline(fit=fit_with(factor(function))))
    assert found.verdict == "warn"


def test_a_pipeline_without_its_loop_has_no_schedule_and_no_checkpoint():
    assert run_check(schedule, make_pipeline()).verdict == "not_applicable"
    assert run_check(best_checkpoint, make_pipeline()).verdict == "not_applicable"
    bare = make_pipeline(fit=own_loop())
    assert run_check(best_checkpoint, bare).verdict == "not_applicable"


def test_the_dry_run_leaves_schedulers_and_loader_as_they_were():
    pipeline = make_pipeline(fit=SCHEDULES["cosine"])
    init = lr_scheduler.LRScheduler.__init__
    run_check(schedule, pipeline)
    assert lr_scheduler.LRScheduler.__init__ is init
    assert pipeline.train.epoch == pipeline.validation.epoch == 0


# ---- best_checkpoint ----------------------------------------------------------------------------


@pytest.mark.parametrize("net", [Net, normed])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("settings", [{}, {"patience_epochs": 2}, {"monitor": "train"}])
def test_a_copy_of_the_best_epoch_opens(net, precision, settings):
    fit = fit_with(precision=precision, **settings)
    pipeline = make_pipeline(net, fit=fit, precision=precision)
    assert run_check(best_checkpoint, pipeline).verdict == "open"


def live(result, model):
    result.best_validation_state = result.best_state = model.state_dict()


def worst(result, model):
    row = max(result.epochs, key=lambda row: row["validation_loss"])
    result.best_epoch = result.best_validation_epoch = row["epoch"]
    result.best_loss = result.best_validation_loss = row["validation_loss"]


def shifted(result, model):
    result.best_validation_epoch += 1


def nothing(result, model):
    result.best_validation_state = {}


def other(result, model):
    state = result.best_validation_state
    result.best_validation_state = {key: value * 1.5 for key, value in state.items()}


def stale(result, model):
    """An averaged copy of parameters alone."""
    for state in (result.best_validation_state, result.best_state):
        state["trunk.2.running_mean"] = torch.zeros(32)
        state["trunk.2.running_var"] = torch.ones(32)


@pytest.mark.parametrize(
    ("change", "cause"),
    [
        (live, "reference to the live weights"),
        (worst, "wrong direction"),
        (shifted, "not of the same moment"),
        (nothing, "never kept"),
        (other, "another moment"),
        (stale, "does not take over the buffers"),
    ],
)
def test_a_kept_state_that_is_not_the_best_shuts_and_is_named(change, cause):
    found = run_check(best_checkpoint, make_pipeline(normed, fit=fit_with(change=change)))
    assert found.verdict == "shut"
    assert any(cause in text for text in found.suspect)


def test_early_stopping_in_the_wrong_direction_shuts(monkeypatch):
    class Upside(loop.Patience):
        def ends_with(self, loss):
            return super().ends_with(-loss)

    monkeypatch.setattr(loop, "Patience", Upside)
    fit = fit_with(patience_epochs=4)
    found = run_check(best_checkpoint, make_pipeline(fit=fit))
    assert found.verdict == "shut"
    assert "early stopping" in found.suspect[0]


# ---- library_warnings ---------------------------------------------------------------------------


@pytest.mark.parametrize("parts", [{}, {"precision": "bf16", "net": normed}, {"clip_norm": 1.0}])
def test_a_silent_pipeline_opens(parts):
    fit = fit_with(factor(lambda step, total: cosine(step / total)))
    found = run_check(library_warnings, make_pipeline(fit=fit, **parts))
    assert found.verdict == "open"


class Broadcast(Digits):
    def loss(self, outputs, y):
        return F.mse_loss(outputs[:, :1], y.float())


class NoAxis(Digits):
    def loss(self, outputs, y):
        return F.nll_loss(F.log_softmax(outputs), y)


class OldReduction(Digits):
    def loss(self, outputs, y):
        return F.cross_entropy(outputs, y, size_average=True)


class ZeroByZero(Digits):
    def metric(self, outputs, y):
        np.zeros(1) / np.zeros(1)
        return super().metric(outputs, y)


def checkpointed(self, x):
    return self.head(checkpoint(self.trunk, x, use_reentrant=True))


def reads_a_gradient(self, x):
    hidden = self.trunk(x)
    assert hidden.grad is None
    return self.head(hidden)


def scheduler_first(model, optimizer, train, validation, num_epochs):
    scheduler = lr_scheduler.StepLR(optimizer, 2)
    for batch in train:
        scheduler.step()
        F.cross_entropy(model(batch["x"]), batch["y"]).backward()
        optimizer.step()


def says(text, category=UserWarning):
    def forward(self, x):
        warnings.warn(text, category, stacklevel=1)
        return self.plain(x)

    return lambda: Net(forward)


@pytest.mark.parametrize(
    ("fault", "verdict"),
    [
        ({"task": Broadcast()}, "shut"),
        ({"task": NoAxis()}, "shut"),
        ({"task": ZeroByZero()}, "shut"),
        ({"net": lambda: Net(checkpointed)}, "shut"),
        ({"fit": scheduler_first}, "shut"),
        ({"task": OldReduction()}, "warn"),
        ({"net": lambda: Net(reads_a_gradient)}, "warn"),
        ({"net": says("something is used in a wrong way")}, "warn"),
        ({"net": says("nested tensors are a prototype")}, "open"),
        ({"net": says("this goes away", DeprecationWarning)}, "open"),
    ],
)
def test_a_warning_becomes_a_finding(fault, verdict):
    found = run_check(library_warnings, make_pipeline(**fault))
    assert found.verdict == verdict
    assert verdict == "open" or '"' in found.because


def test_how_often_torch_warns_is_put_back():
    for always in (True, False):
        torch.set_warn_always(always)
        run_check(library_warnings, make_pipeline())
        assert torch.is_warn_always_enabled() is always


# ---- precision ----------------------------------------------------------------------------------


class Low(Net):
    """All weights in bf16 or fp16."""

    def __init__(self, dtype=torch.bfloat16):
        super().__init__()
        self.to(dtype)

    def forward(self, x):
        return self.plain(x.to(self.head.weight.dtype))


def step_in(precision):
    def step(model, optimizer, batch, loss_fn, **options):
        return loop.train_step(model, optimizer, batch, loss_fn, **{**options, **precision})

    return step


def half(scale):
    """fp16 autocast, the loss scaled by `scale`."""

    def step(model, optimizer, batch, loss_fn, **options):
        optimizer.zero_grad()
        with torch.autocast(CPU.type, dtype=torch.float16):
            outputs = model(batch["x"])
        loss = loss_fn(outputs.float(), batch["y"])
        (loss * scale).backward()
        for parameter in model.parameters():
            parameter.grad /= scale
        optimizer.step()
        return loop.StepOutput(loss.detach(), None)

    return step


@pytest.mark.parametrize(
    "parts",
    [
        {},
        {"precision": "bf16", "net": normed, "optimizer": adam(1e-5)},
        {"precision": "bf16", "net": Low, "optimizer": adam(1e-2)},
        {"precision": "fp16", "step": half(1024.0)},
    ],
)
def test_a_precision_that_is_in_effect_and_loses_nothing_opens(parts):
    assert run_check(precision, make_pipeline(**parts)).verdict == "open"


@pytest.mark.parametrize(
    ("fault", "cause"),
    [
        ({"precision": "bf16", "step": step_in({"precision": "fp32"})}, "autocast is not applied"),
        ({"step": step_in({"precision": "bf16"})}, "autocast is on"),
        ({"precision": "bf16", "net": Low, "optimizer": adam(1e-5)}, "half a unit"),
        (
            {
                "precision": "fp16",
                "net": functools.partial(Low, torch.float16),
                "step": step_in({"precision": "fp32"}),
                "optimizer": lambda m: torch.optim.Adagrad(m.parameters(), lr=1e-2, eps=1e-10),
            },
            "eps",
        ),
    ],
)
def test_a_precision_that_is_not_in_effect_or_loses_steps_shuts(fault, cause):
    found = run_check(precision, make_pipeline(**fault))
    assert found.verdict == "shut"
    assert any(cause in text for text in found.suspect)


def test_half_precision_without_a_scaled_loss_warns():
    found = run_check(precision, make_pipeline(precision="fp16", step=half(1.0)))
    assert found.verdict == "warn"


# ---- all of them --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "check", [update_ratio, schedule, best_checkpoint, library_warnings, precision]
)
def test_nothing_outlasts_a_check(check):
    models = []
    healthy = make_pipeline(fit=fit_with())

    def make_model(seed):
        models.append(healthy.make_model(seed))
        return models[-1]

    pipeline = make_pipeline(fit=fit_with(), make_model=make_model)
    before = torch.get_rng_state()
    run_check(check, pipeline)
    assert torch.equal(torch.get_rng_state(), before)
    assert pipeline.train.epoch == pipeline.validation.epoch == 0
    for model in models:
        assert not model._forward_hooks
        assert not model._forward_pre_hooks
        assert not any(p._backward_hooks for p in model.parameters())
