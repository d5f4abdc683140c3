import copy

import pytest
import torch
from checks_case import Digits, Net, make_pipeline
from other_tasks import make_multilabel_pipeline, make_real_pipeline, make_tokens_pipeline
from torch.nn import functional as F

from {{cookiecutter.project_slug}}.harness import loop
from {{cookiecutter.project_slug}}.harness.checks import run_check
from {{cookiecutter.project_slug}}.harness.checks.terms import loss_terms

CE = F.cross_entropy
torch.manual_seed(0)
TEACHER = Net().requires_grad_(False)
START = Net().head.weight.detach().clone()


def step_on(total):
    """The project's step with another loss: `total(model, outputs, x, y)`."""

    def step(model, optimizer, batch, loss_fn, *, clip_norm, precision, accumulate):
        optimizer.zero_grad()
        with loop.autocast(torch.device("cpu"), precision):
            outputs = model(batch["x"]).float()
        loss = total(model, outputs, batch["x"], batch["y"])
        loss.backward()
        optimizer.step()
        return loop.StepOutput(loss.detach(), None)

    return step


def judged(total, **changes):
    return run_check(loss_terms, make_pipeline(step=step_on(total), **changes))


def distance(a, b):
    return F.kl_div(a.log_softmax(1), b.softmax(1), reduction="batchmean")


def decay(model):
    return sum(p.square().sum() for p in model.parameters())


def in_place(model, z, x, y):
    total = torch.zeros(())
    total += CE(z, y)
    total += 0.1 * distance(z, TEACHER(x))
    return total


def in_place_dead(model, z, x, y):
    total = torch.zeros(())
    total += CE(z, y)
    total += 0.1 * distance(TEACHER(x), TEACHER(x))
    return total


def value_of_another(model, z, x, y):
    loss = CE(z, y)
    return loss + (distance(z, TEACHER(x)) - loss).detach()


def by_hand(model, z, x, y):
    """The entropy of the teacher is a constant of the divergence."""
    p = TEACHER(x).softmax(1)
    return CE(z, y) - (p * z.log_softmax(1)).sum(1).mean() + (p * p.log()).sum(1).mean()


HEALTHY = {
    "distilled": lambda m, z, x, y: 0.5 * CE(z, y) + 0.5 * distance(z, TEACHER(x)),
    "decay": lambda m, z, x, y: CE(z, y) + 1e-4 * decay(m),
    "stacked": lambda m, z, x, y: torch.stack([CE(z, y), distance(z, TEACHER(x))]).sum(),
    "listed": lambda m, z, x, y: sum([CE(z, y), distance(z, TEACHER(x))]) / 2,
    "in place": in_place,
    "annealed from zero": lambda m, z, x, y: CE(z, y) + 0.0 * distance(z, TEACHER(x)),
    "a hinge out of reach": lambda m, z, x, y: CE(z, y) + F.relu(z.abs() - 20).mean(),
    "divergence by hand": by_hand,
    "class by class": lambda m, z, x, y: sum(CE(z[y == c], y[y == c]) for c in range(10)) / 10,
    "entropy bonus": lambda m, z, x, y: (
        CE(z, y) + 0.01 * (z.softmax(1) * z.log_softmax(1)).sum(1).mean()
    ),
    "distance from the start": lambda m, z, x, y: (
        CE(z, y) + 0.1 * (m.head.weight - START).square().sum()
    ),
}


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("case", HEALTHY)
def test_a_sum_whose_terms_all_teach_is_open(case, precision):
    found = judged(HEALTHY[case], precision=precision)
    assert found.verdict == "open", found.because
    assert 0 < found.value <= 1


ONE_TERM = {
    "plain": lambda m, z, x, y: CE(z, y),
    "a constant": lambda m, z, x, y: CE(z, y) + torch.tensor(1e-8),
    "halved": lambda m, z, x, y: CE(z, y) * 0.5,
    "row by row": lambda m, z, x, y: sum(CE(z[i : i + 1], y[i : i + 1]) for i in range(20)),
    "the value of another": value_of_another,
}


@pytest.mark.parametrize("case", ONE_TERM)
def test_a_loss_of_one_term_is_not_applicable(case):
    found = judged(ONE_TERM[case])
    assert (found.verdict, found.because) == ("not_applicable", "The loss has one term.")


@pytest.mark.parametrize(
    "make", [make_multilabel_pipeline, make_real_pipeline, make_tokens_pipeline]
)
def test_the_plain_losses_of_other_targets_have_one_term(make):
    assert run_check(loss_terms, make()).verdict == "not_applicable"


DEAD = {
    "teacher with itself": lambda m, z, x, y: CE(z, y) + distance(TEACHER(x), TEACHER(x)),
    "outputs with themselves": lambda m, z, x, y: CE(z, y) + distance(z, z),
    "squares of nothing": lambda m, z, x, y: CE(z, y) + F.mse_loss(z, z),
    "outputs detached": lambda m, z, x, y: CE(z, y) + distance(z.detach(), TEACHER(x)),
    "term detached": lambda m, z, x, y: CE(z, y) + distance(z, TEACHER(x)).detach(),
    "rounded": lambda m, z, x, y: CE(z, y) + (z.argmax(1) != y).float().mean(),
    "labels with the teacher": lambda m, z, x, y: 0.5 * CE(z, y) + 0.5 * CE(TEACHER(x), y),
    "in place": in_place_dead,
    "decay of copies": lambda m, z, x, y: (
        CE(z, y) + 1e-3 * sum(p.data.square().sum() for p in m.parameters())
    ),
}


@pytest.mark.parametrize("case", DEAD)
def test_a_term_without_a_gradient_shuts_and_is_named_by_its_place(case):
    found = judged(DEAD[case])
    assert found.verdict == "shut"
    assert "term 2 of 2" in found.because
    assert "no gradient" in found.because


def test_a_penalty_that_drowns_the_loss_warns():
    found = judged(lambda m, z, x, y: CE(z, y) + 10 * decay(m))
    assert found.verdict == "warn"
    assert found.value > found.limit
    assert "weight is too large" in found.suspect[0]


def test_a_term_whose_gradient_is_no_number_shuts():
    found = judged(lambda m, z, x, y: CE(z, y) + (z - z).square().sum().sqrt())
    assert found.verdict == "shut"
    assert "no number" in found.because


class Distilled(Digits):
    """Declares its terms; `soft(outputs)` is the second."""

    def __init__(self, soft, left_out=False):
        self.soft, self.left_out = soft, left_out

    def loss_terms(self, outputs, y):
        return {"hard": CE(outputs, y), "soft": self.soft(outputs)}

    def loss(self, outputs, y):
        terms = self.loss_terms(outputs, y)
        return terms["hard"] if self.left_out else sum(terms.values())


def spread(z):
    return 0.1 * (z - z.mean(dim=1, keepdim=True)).square().mean()


def test_declared_terms_are_judged_by_name():
    good = run_check(loss_terms, make_pipeline(task=Distilled(spread)))
    assert good.verdict == "open"
    dead = run_check(loss_terms, make_pipeline(task=Distilled(lambda z: spread(z.detach()))))
    assert dead.verdict == "shut"
    assert "term 'soft'" in dead.because


def test_one_of_two_terms_with_targets_that_drowns_the_other_warns():
    class Twice(Distilled):
        def loss_terms(self, outputs, y):
            return {"one": CE(outputs, y), "much": 1000 * CE(outputs, y)}

    found = run_check(loss_terms, make_pipeline(task=Twice(spread)))
    assert found.verdict == "warn"
    assert found.value > found.limit == 0.99
    assert "'much'" in found.because


def test_declared_terms_that_do_not_add_up_to_the_loss_shut():
    found = run_check(loss_terms, make_pipeline(task=Distilled(spread, left_out=True)))
    assert found.verdict == "shut"
    assert found.value > found.limit
    assert "missing" in found.suspect[0]


def test_a_declared_term_that_drowns_the_others_warns():
    found = run_check(loss_terms, make_pipeline(task=Distilled(lambda z: 1000 * spread(z))))
    assert found.verdict == "warn"
    assert "'soft'" in found.because


def test_nothing_outlasts_the_look_at_the_terms():
    pipeline = make_pipeline(step=step_on(DEAD["teacher with itself"]))
    before = copy.deepcopy(TEACHER.state_dict())
    random, epoch = torch.get_rng_state(), pipeline.train.epoch
    run_check(loss_terms, pipeline)
    assert torch.equal(random, torch.get_rng_state())
    assert pipeline.train.epoch == epoch
    assert all(torch.equal(before[key], value) for key, value in TEACHER.state_dict().items())
