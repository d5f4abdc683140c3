"""harness/loop.py: one seed is one run, a step changes all or nothing, evaluation sees all rows."""

import copy
import json
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.nn import functional as F

from {{cookiecutter.project_slug}} import model
from {{cookiecutter.project_slug}}.harness import files, loop
from {{cookiecutter.project_slug}}.harness.instruments import NonFiniteLoss
from {{cookiecutter.project_slug}}.harness.loop import FitSettings, Loader
from {{cookiecutter.project_slug}}.task import Task

TASK = Task(SimpleNamespace(metric="accuracy"), ("a", "b", "c"))
ADAM = SimpleNamespace(name="adam", lr=1e-2, betas=(0.9, 0.999), momentum=0.0)
SGD = SimpleNamespace(name="sgd", lr=0.1, betas=(0.9, 0.999), momentum=0.9)
CPU = torch.device("cpu")


def rows_of(count, seed=0):
    """Images whose bright row tells the class, with noise."""
    draw = torch.Generator().manual_seed(seed)
    y = torch.randint(3, (count,), generator=draw)
    x = torch.randn(count, 1, 6, 6, generator=draw)
    x[torch.arange(count), 0, y] += 2.0
    return {"x": x, "y": y, "id": torch.arange(count)}


def network_of(seed=0, name="ConvNet"):
    torch.manual_seed(seed)
    params = {"width": 4} if name == "ConvNet" else {}
    return model.build(name, params, (1, 6, 6), 3)


def optimizer_of(network, settings=ADAM, decay=0.0):
    groups = model.parameter_groups(network, settings.lr, decay)
    return loop.make_optimizer(settings, groups, CPU)


def trained(seed=0, *, folder=None, name="ConvNet", augment=None, on_epoch=(), **settings):
    """A short run from nothing but its seed."""
    network = network_of(seed, name)
    batches = Loader(rows_of(50), 16, shuffle=True, seed=seed, augment=augment)
    result = loop.fit(
        network,
        optimizer_of(network),
        batches,
        Loader(rows_of(30, seed=1), 64),
        TASK,
        FitSettings(**{"num_epochs": 3} | settings),
        folder=folder,
        on_epoch=on_epoch,
        announce=False,
    )
    return network, result


def untimed(rows):
    return [{k: v for k, v in row.items() if k != "time_s"} for row in rows]


def same(state, other):
    return state.keys() == other.keys() and all(torch.equal(state[k], other[k]) for k in state)


def jitter(x, generator):
    return x + 0.1 * torch.randn(x.shape, generator=generator)


# ---- batches ------------------------------------------------------------------------------------


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("batch_size", [1, 7, 50, 64])
def test_an_epoch_holds_every_row_once(batch_size, shuffle):
    rows = rows_of(50)
    loader = Loader(rows, batch_size, shuffle=shuffle)
    for _ in range(2):
        batches = list(loader)
        assert len(batches) == len(loader) == math.ceil(50 / batch_size)
        ids = torch.cat([batch["id"] for batch in batches])
        assert sorted(ids.tolist()) == list(range(50))
        for batch in batches:  # x, y and id stay together
            assert torch.equal(batch["x"], rows["x"][batch["id"]])
            assert torch.equal(batch["y"], rows["y"][batch["id"]])


def orders(loader, epochs=2):
    return [torch.cat([batch["id"] for batch in loader]).tolist() for _ in range(epochs)]


def test_the_order_differs_by_epoch_and_by_seed_and_follows_from_both_alone():
    def found(seed):
        return orders(Loader(rows_of(50), 7, shuffle=True, seed=seed))

    assert found(0)[0] != found(0)[1] != list(range(50))
    first = found(0)
    torch.manual_seed(123)
    torch.randn(5)
    assert found(0) == first
    assert found(1)[0] not in first  # seed 0 is a seed like any other


def test_without_shuffling_the_order_is_that_of_the_rows():
    assert orders(Loader(rows_of(50), 7)) == [list(range(50))] * 2


def test_the_order_does_not_depend_on_the_batch_size():
    found = [orders(Loader(rows_of(50), size, shuffle=True)) for size in (7, 50)]
    assert found[0] == found[1]


def test_a_batch_is_augmented_when_it_is_drawn_and_the_rows_stay_as_they_are():
    rows = rows_of(20)
    kept = rows["x"].clone()
    loader = Loader(rows, 7, augment=jitter)
    first, second = (torch.cat([batch["x"] for batch in loader]) for _ in range(2))
    assert torch.equal(rows["x"], kept) and torch.equal(loader.rows["x"], kept)
    assert not torch.equal(first, second) and not torch.equal(first, kept)
    again = Loader(rows, 7, augment=jitter)
    assert torch.equal(torch.cat([batch["x"] for batch in again]), first)


def test_shuffling_and_augmenting_leave_the_global_generator_alone():
    before = torch.get_rng_state()
    list(Loader(rows_of(20), 7, shuffle=True, augment=jitter))
    assert torch.equal(torch.get_rng_state(), before)


def test_x_may_be_a_dict_of_tensors():
    rows = rows_of(20)
    double = {**rows, "x": {"left": rows["x"], "right": rows["x"] * 2}}
    for batch in Loader(double, 7, shuffle=True):
        assert torch.equal(batch["x"]["left"], rows["x"][batch["id"]])
        assert torch.equal(batch["x"]["right"], rows["x"][batch["id"]] * 2)

    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.head = nn.Linear(36, 3)

        def forward(self, x):
            return self.head((x["left"] + x["right"]).flatten(1))

    network, batch = Two(), next(iter(Loader(double, 20)))
    loop.train_step(network, optimizer_of(network), batch, TASK.loss, accumulate=3)


# ---- the step -----------------------------------------------------------------------------------


def one_step(network, batch=None, *, settings=SGD, loss_fn=TASK.loss, **options):
    return loop.train_step(
        network, optimizer_of(network, settings), batch or rows_of(16), loss_fn, **options
    )


def test_a_step_is_the_gradient_of_the_loss_times_the_rate():
    network = network_of(name="Linear")
    batch, before = rows_of(16), copy.deepcopy(network)
    output = one_step(network, batch)
    loss = TASK.loss(before(batch["x"]), batch["y"])
    loss.backward()
    assert output.loss.item() == loss.item() and output.grad_norm is None
    assert not output.loss.requires_grad
    for new, old in zip(network.parameters(), before.parameters(), strict=True):
        assert torch.allclose(new, old - 0.1 * old.grad, atol=1e-7)


def test_gradients_do_not_pile_up_from_step_to_step():
    network = network_of(name="Linear")
    optimizer = optimizer_of(network)
    for parameter in network.parameters():
        parameter.grad = torch.full_like(parameter, 1e6)
    loop.train_step(network, optimizer, rows_of(16), TASK.loss)
    assert max(p.grad.abs().max() for p in network.parameters()) < 10


@pytest.mark.parametrize("parts", [2, 3, 5, 16, 40])
def test_parts_of_unequal_size_give_the_step_of_the_whole_batch(parts):
    whole, cut = network_of(name="TinyConvNet"), network_of(name="TinyConvNet")
    expected, found = one_step(whole), one_step(cut, accumulate=parts)
    assert found.loss.item() == pytest.approx(expected.loss.item(), rel=1e-6)
    for a, b in zip(whole.parameters(), cut.parameters(), strict=True):
        assert torch.allclose(a, b, atol=1e-6)


def test_clipping_bounds_the_gradient_and_tells_its_norm_before():
    plain, clipped = network_of(name="Linear"), network_of(name="Linear")
    one_step(plain)
    norm = torch.cat([p.grad.flatten() for p in plain.parameters()]).norm()
    output = one_step(clipped, clip_norm=norm.item() / 10)
    assert output.grad_norm.item() == pytest.approx(norm.item(), rel=1e-5)
    after = torch.cat([p.grad.flatten() for p in clipped.parameters()]).norm()
    assert after.item() == pytest.approx(norm.item() / 10, rel=1e-4)
    generous = network_of(name="Linear")
    one_step(generous, clip_norm=norm.item() * 10)
    assert same(generous.state_dict(), plain.state_dict())


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("parts", [1, 3])
def test_a_loss_that_is_no_number_is_raised_before_any_weight_has_changed(value, parts):
    network, batch = network_of(name="Linear"), rows_of(16)
    before = copy.deepcopy(network.state_dict())
    batch["x"][-1, 0, 0, 0] = value
    with pytest.raises(NonFiniteLoss, match="the loss is nan"):
        one_step(network, batch, accumulate=parts)
    assert same(network.state_dict(), before)


def test_the_scheduler_moves_after_the_step():
    network = network_of(name="Linear")
    optimizer = optimizer_of(network, SGD)
    settings = SimpleNamespace(warmup_fraction=0.5, schedule="constant")
    scheduler = loop.make_scheduler(optimizer, settings, 4)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.05)
    loop.train_step(network, optimizer, rows_of(16), TASK.loss, scheduler=scheduler)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.1)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_bf16_runs_on_the_cpu_and_keeps_the_weights_in_fp32(accumulate):
    network, seen = network_of(), []
    network.trunk[0].register_forward_hook(lambda module, x, y: seen.append(y.dtype))
    output = one_step(network, precision="bf16", accumulate=accumulate)
    assert set(seen) == {torch.bfloat16}
    assert output.loss.dtype == torch.float32 and math.isfinite(output.loss.item())
    assert {p.dtype for p in network.parameters()} == {torch.float32}
    found = loop.evaluate(network, Loader(rows_of(20), 8), TASK, precision="bf16")
    assert found.outputs.dtype == torch.float32


# ---- optimizers and schedules -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "kind"),
    [("adam", torch.optim.Adam), ("adamw", torch.optim.AdamW), ("sgd", torch.optim.SGD)],
)
def test_the_named_optimizer_gets_every_group_with_its_own_decay(name, kind):
    network = network_of()
    settings = SimpleNamespace(name=name, lr=0.3, betas=[0.8, 0.9], momentum=0.7)
    optimizer = optimizer_of(network, settings, decay=0.1)
    assert type(optimizer) is kind
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.1, 0.0]
    for group in optimizer.param_groups:
        assert group["lr"] == 0.3
        assert group.get("betas", (0.8, 0.9)) == (0.8, 0.9)
        assert group.get("momentum", 0.7) == 0.7


def test_an_unknown_optimizer_is_refused():
    with pytest.raises(ValueError, match=r"optimizer\.name='lion' is not one of adam, adamw, sgd"):
        optimizer_of(network_of(), SimpleNamespace(name="lion", lr=0.1, betas=(0.9, 0.99)))


def rates(schedule, warmup_fraction, num_steps):
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    settings = SimpleNamespace(schedule=schedule, warmup_fraction=warmup_fraction)
    scheduler, found = loop.make_scheduler(optimizer, settings, num_steps), []
    for _ in range(num_steps):
        found.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
    return found


def test_the_warm_up_is_a_straight_line_that_reaches_the_rate_in_its_last_step():
    found = rates("constant", 0.1, 100)
    assert found[:10] == pytest.approx([(step + 1) / 10 for step in range(10)])
    assert found[10:] == [1.0] * 90
    assert rates("constant", 0.0, 5) == [1.0] * 5


def test_the_cosine_falls_from_the_rate_to_almost_zero_over_the_planned_steps():
    found = rates("cosine", 0.0, 200)
    assert found[0] == 1.0 and found[100] == pytest.approx(0.5)
    assert found == sorted(found, reverse=True)
    assert 0 < found[-1] < 1e-3
    warm = rates("cosine", 0.25, 200)
    assert warm[:50] == sorted(warm[:50]) and max(warm) == warm[49] == warm[50] == 1.0
    assert warm[125] == pytest.approx(0.5) and 0 < warm[-1] < 1e-3
    assert sum(rate == 0 for rate in warm) == 0


# ---- evaluation ---------------------------------------------------------------------------------


def test_evaluation_is_of_the_whole_set_whatever_the_batch_size():
    network, rows = network_of(), rows_of(100)
    with torch.no_grad():
        z = network.eval()(rows["x"])
    for size in (7, 64, 100):
        found = loop.evaluate(network, Loader(rows, size), TASK)
        assert found.num_rows == 100 and torch.equal(found.y, rows["y"])
        assert torch.equal(found.ids, rows["id"])
        assert torch.allclose(found.outputs, z, atol=1e-6)
        assert found.loss == pytest.approx(TASK.loss(z, rows["y"]).item(), abs=1e-6)
        assert found.metric == TASK.metric(z, rows["y"])


def test_evaluation_changes_nothing_and_puts_every_mode_back():
    network = network_of().train()
    network.trunk[1].eval()  # one that is frozen on purpose
    before, generator = copy.deepcopy(network.state_dict()), torch.get_rng_state()
    first, second = (loop.evaluate(network, Loader(rows_of(30), 7), TASK) for _ in range(2))
    assert torch.equal(first.outputs, second.outputs)
    assert same(network.state_dict(), before)
    assert torch.equal(torch.get_rng_state(), generator)
    assert network.training and not network.trunk[1].training and network.trunk[4].training
    assert all(p.grad is None for p in network.parameters())


def test_modes_come_back_even_when_the_network_raises():
    network = network_of().train()
    with pytest.raises(RuntimeError):
        loop.evaluate(network, Loader({**rows_of(4), "x": torch.zeros(4, 2, 6, 6)}, 2), TASK)
    assert network.training


def test_outputs_of_an_evaluation_can_take_part_in_a_gradient():
    found = loop.evaluate(network_of(), Loader(rows_of(10), 4), TASK)
    scale = torch.ones(1, requires_grad=True)
    (found.outputs * scale).sum().backward()
    assert scale.grad is not None


# ---- when to stop -------------------------------------------------------------------------------


def patience_of(num_epochs, min_delta=0.0, smoothing=0.0):
    options = {"patience_epochs": num_epochs, "min_delta": min_delta, "smoothing": smoothing}
    return loop.Patience(FitSettings(num_epochs=100, **options))


def ended_after(losses, num_epochs, **options):
    patience = patience_of(num_epochs, **options)
    return next((k for k, loss in enumerate(losses, 1) if patience.ends_with(loss)), None)


def test_patience_counts_epochs_since_the_last_better_one():
    assert ended_after([5, 4, 3, 3, 3, 3, 3], 3) == 6
    assert ended_after([5, 4, 5, 3, 5, 5, 5], 3) == 7
    assert ended_after([9, 8, 7, 6, 5], 1) is None
    assert ended_after([5] * 100, None) is None


def test_a_gain_of_less_than_min_delta_is_none():
    falling = [1 - 0.01 * k for k in range(20)]
    assert ended_after(falling, 3) is None
    assert ended_after(falling, 3, min_delta=0.025) is None  # against the best, not the last
    assert ended_after(falling, 3, min_delta=0.05) == 4


def test_smoothing_looks_through_noise():
    draw = np.random.default_rng(0)
    noisy = list(2 - 0.05 * np.arange(30) + 0.2 * draw.standard_normal(30))
    assert ended_after(noisy, 3, smoothing=0.0) is not None
    assert ended_after(noisy, 3, smoothing=0.8) is None


def test_smoothing_weighs_the_past_and_starts_from_the_first_value():
    patience = patience_of(5, smoothing=0.75)
    patience.ends_with(4.0)
    assert patience.value == 4.0
    patience.ends_with(0.0)
    assert patience.value == 3.0


# ---- fit ----------------------------------------------------------------------------------------


def test_one_seed_gives_bit_equal_runs_whatever_was_drawn_before():
    network, first = trained(0, augment=jitter)
    torch.manual_seed(999)
    torch.randn(7)
    other, second = trained(0, augment=jitter)
    assert untimed(first.epochs) == untimed(second.epochs)
    assert first.steps == second.steps
    assert same(network.state_dict(), other.state_dict())
    assert same(first.best_state, second.best_state)


def test_seed_0_is_a_seed_and_another_one_gives_another_run():
    losses = {tuple(row["validation_loss"] for row in trained(s)[1].epochs) for s in (0, 1, 2)}
    assert len(losses) == 3


def test_each_epoch_trains_in_training_mode_whatever_mode_it_was_handed_or_left_in():
    network = network_of().eval()
    modes = []
    network.head.register_forward_hook(lambda *_: modes.append(network.trunk.training))
    loop.fit(
        network,
        optimizer_of(network),
        Loader(rows_of(50), 50),
        Loader(rows_of(30), 30),
        TASK,
        FitSettings(num_epochs=2),
        on_epoch=[lambda row: network.eval()],
        announce=False,
    )
    assert modes == [True, False] * 2  # one training batch, one of validation


def test_training_lowers_both_losses():
    _, result = trained(num_epochs=8, monitor="train")
    assert result.epochs[-1]["train_loss"] < 0.5 * result.epochs[0]["train_loss"]
    assert result.epochs[-1]["validation_loss"] < result.epochs[0]["validation_loss"]
    assert result.stopped == "all 8 epochs done"
    assert result.num_epochs == 8 and result.num_steps == 8 * 4


def test_history_holds_a_row_per_epoch_and_per_20_steps_in_the_order_they_happened(tmp_path):
    _, result = trained(folder=tmp_path, num_epochs=11)
    rows = files.read_jsonl(tmp_path / "history.jsonl")
    epochs = [row for row in rows if "epoch" in row]
    steps = [row for row in rows if "epoch" not in row]
    assert epochs == result.epochs and steps == result.steps
    assert [row["step"] for row in epochs] == [4 * e for e in range(1, 12)]
    assert [row["step"] for row in steps] == [1, 21, 41]
    assert [row["step"] for row in rows] == sorted(row["step"] for row in rows)
    assert set(steps[0]) == {"step", "loss", "lr", "grad_norm", "update_ratio"}
    wanted = {"epoch", "step", "running_train_loss", "validation_loss", "validation_accuracy"}
    assert set(epochs[0]) == wanted | {"time_s"}


def test_history_is_written_while_the_run_goes_on_and_survives_its_end(tmp_path):
    seen = []

    def stop_at_three(row):
        seen.append(len(files.read_jsonl(tmp_path / "history.jsonl")))
        if row["epoch"] == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        trained(folder=tmp_path, num_epochs=9, on_epoch=[stop_at_three])
    rows = files.read_jsonl(tmp_path / "history.jsonl")
    assert [row["epoch"] for row in rows if "epoch" in row] == [1, 2, 3]
    assert seen == [2, 3, 4]  # one row of a step, and each epoch's


def test_the_best_checkpoint_is_the_best_and_not_the_last(tmp_path):
    states, folder = {}, tmp_path / "run"
    network = network_of()

    def spoil(row):
        """Keep each epoch's weights; after the third the network unlearns."""
        states[row["epoch"]] = copy.deepcopy(network.state_dict())
        if row["epoch"] == 3:
            with torch.no_grad():
                network.head.weight.mul_(-1)

    result = loop.fit(
        network,
        optimizer_of(network),
        Loader(rows_of(50), 16, shuffle=True),
        Loader(rows_of(30, seed=1), 64),
        TASK,
        FitSettings(num_epochs=4),
        folder=folder,
        on_epoch=[spoil],
        announce=False,
    )
    losses = [row["validation_loss"] for row in result.epochs]
    assert result.best_epoch == 1 + losses.index(min(losses)) < 4
    assert result.best_loss == min(losses)
    saved = load_file(folder / "best.safetensors")
    assert same(saved, states[result.best_epoch]) and same(saved, result.best_state)
    about = json.loads((folder / "best.json").read_text(encoding="utf-8"))
    assert about["epoch"] == result.best_epoch and about["validation_loss"] == result.best_loss
    fresh = network_of(seed=5)
    fresh.load_state_dict(saved)
    again = loop.evaluate(fresh, Loader(rows_of(30, seed=1), 64), TASK)
    assert again.loss == pytest.approx(result.best_loss, abs=1e-7)


def test_watching_the_training_loss_also_keeps_the_best_validation_checkpoint():
    _, result = trained(num_epochs=8, monitor="train")
    train = [row["train_loss"] for row in result.epochs]
    validation = [row["validation_loss"] for row in result.epochs]
    assert result.best_loss == min(train) == train[result.best_epoch - 1]
    assert result.best_validation_loss == min(validation)
    assert result.best_validation_epoch == 1 + validation.index(min(validation))
    assert same(result.best_state, result.best_validation_state) == (
        result.best_epoch == result.best_validation_epoch
    )


def test_watching_validation_does_not_score_the_training_split():
    assert "train_loss" not in trained()[1].epochs[0]


def test_training_stops_when_the_smoothed_curve_has_not_fallen_for_patience_epochs():
    _, patient = trained(num_epochs=40)
    _, result = trained(num_epochs=40, patience_epochs=3)
    assert result.num_epochs < 40 == patient.num_epochs
    assert result.stopped == "no better smoothed validation loss for 3 epochs"
    assert untimed(result.epochs) == untimed(patient.epochs[: result.num_epochs])


def test_both_losses_are_scored_without_label_smoothing():
    network = network_of(name="Linear")
    smoothed = Task(SimpleNamespace(metric="accuracy"), TASK.class_names, label_smoothing=0.3)
    result = loop.fit(
        network,
        optimizer_of(network),
        Loader(rows_of(50), 16),
        Loader(rows_of(30, seed=1), 64),
        smoothed,
        FitSettings(num_epochs=1, monitor="train"),
        evaluate_task=TASK,
        announce=False,
    )
    found = loop.evaluate(network, Loader(rows_of(30, seed=1), 64), TASK)
    assert result.epochs[0]["validation_loss"] == pytest.approx(found.loss, abs=1e-7)
    found = loop.evaluate(network, Loader(rows_of(50), 64), TASK)
    assert result.epochs[0]["train_loss"] == pytest.approx(found.loss, abs=1e-6)


@pytest.mark.parametrize(("epochs", "count"), [(0, 50), (-1, 50), (3, 0)])
def test_a_run_of_no_steps_is_refused(epochs, count):
    network = network_of()
    with pytest.raises(ValueError, match=r"are 0 steps\. Raise num_epochs"):
        loop.fit(
            network,
            optimizer_of(network),
            Loader(rows_of(count), 16),
            Loader(rows_of(30), 64),
            TASK,
            FitSettings(num_epochs=epochs),
        )


def test_a_curve_that_is_none_cannot_be_watched():
    with pytest.raises(ValueError, match="monitor='val' is neither"):
        FitSettings(num_epochs=1, monitor="val")


def test_what_the_configuration_does_not_show_is_said_before_the_first_step(capsys):
    network = network_of(name="Linear")
    loop.fit(
        network,
        optimizer_of(network),
        Loader(rows_of(50), 16),
        Loader(rows_of(30), 64),
        TASK,
        FitSettings(num_epochs=2),
    )
    (line,) = capsys.readouterr().out.splitlines()
    assert "111 parameters, 50 training rows, 4 batches per epoch, at most 8 steps" in line
    assert "Adam lr 1.00e-02, cpu fp32" in line


def test_a_loss_that_leaves_the_numbers_is_raised_with_its_step_and_history_is_kept(tmp_path):
    def explode(x, generator):
        calls.append(1)
        return x * math.nan if len(calls) == 6 else x

    calls = []
    with pytest.raises(NonFiniteLoss, match="the loss is nan at step 6"):
        trained(folder=tmp_path, augment=explode)
    rows = files.read_jsonl(tmp_path / "history.jsonl")
    assert [row["epoch"] for row in rows if "epoch" in row] == [1]


def test_a_validation_loss_that_is_no_number_is_raised_too(tmp_path):
    network, validation = network_of(), rows_of(30)
    validation["x"][3] = math.inf
    with pytest.raises(NonFiniteLoss, match="the validation loss is nan at step 4"):
        loop.fit(
            network,
            optimizer_of(network),
            Loader(rows_of(50), 16),
            Loader(validation, 64),
            TASK,
            FitSettings(num_epochs=2, monitor="train"),
            folder=tmp_path,
            announce=False,
        )


def test_the_step_that_fit_takes_is_train_step():
    """The same rows through `train_step` by hand give the same weights."""
    network, result = trained(num_epochs=2, clip_norm=0.5, accumulate=2)
    other = network_of()
    optimizer, batches = optimizer_of(other), Loader(rows_of(50), 16, shuffle=True)
    losses = []
    for _ in range(2):
        for batch in batches:
            step = loop.train_step(other, optimizer, batch, TASK.loss, clip_norm=0.5, accumulate=2)
            losses.append(step.loss.item())
    assert same(network.state_dict(), other.state_dict())
    assert result.steps[0]["loss"] == losses[0]
    assert result.epochs[1]["running_train_loss"] == pytest.approx(sum(losses[4:]) / 4)


# ---- other devices ------------------------------------------------------------------------------

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")


@needs_cuda
def test_weights_trained_on_cuda_load_on_the_cpu(tmp_path):
    network = network_of().cuda()
    groups = model.parameter_groups(network, 1e-2, 0.0)
    result = loop.fit(
        network,
        loop.make_optimizer(ADAM, groups, torch.device("cuda")),
        Loader(rows_of(50), 16, shuffle=True, device="cuda"),
        Loader(rows_of(30, seed=1), 64, device="cuda"),
        TASK,
        FitSettings(num_epochs=2, monitor="train"),
        folder=tmp_path,
        announce=False,
    )
    saved = load_file(tmp_path / "best.safetensors")
    assert {value.device.type for value in saved.values()} == {"cpu"}
    fresh = network_of(seed=5)
    fresh.load_state_dict(saved)
    found = loop.evaluate(fresh, Loader(rows_of(50), 64), TASK)
    assert found.loss == pytest.approx(result.best_loss, abs=1e-3)


@needs_cuda
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_no_step_waits_for_the_device(precision):
    network = network_of().cuda()
    optimizer = loop.make_optimizer(
        ADAM, model.parameter_groups(network, 1e-2, 0.0), torch.device("cuda")
    )
    settings = SimpleNamespace(schedule="cosine", warmup_fraction=0.1)
    scheduler = loop.make_scheduler(optimizer, settings, 100)
    batches = list(Loader(rows_of(64), 16, shuffle=True, device="cuda"))
    options = {"clip_norm": 1.0, "scheduler": scheduler, "precision": precision}
    loop.train_step(network, optimizer, batches[0], TASK.loss, **options)  # allocates
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for batch in batches:
            loop.train_step(network, optimizer, batch, TASK.loss, **options)
            loop.train_step(network, optimizer, batch, TASK.loss, accumulate=2, **options)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_no_step_reads_a_value_off_a_device_that_is_not_the_cpu(monkeypatch):
    """The same rule where there is no such device: nothing in a step asks a tensor for a number."""
    network = network_of(name="Linear").to("meta")
    rows = {key: value.to("meta") for key, value in rows_of(16).items()}
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1)

    def loss_fn(outputs, y):
        return F.mse_loss(outputs, torch.zeros_like(outputs))

    output = loop.train_step(network, optimizer, rows, loss_fn, accumulate=2, clip_norm=1.0)
    assert output.loss.device.type == "meta"  # a meta tensor has no number: .item() would raise
