"""Faults as people make them, planted in a walked project: the gate shuts and names the cause."""

import re

import pytest
import walking
from walking import REFUSED, SHUT, append, board, checks, gate, launch, newest, source, succeed

# ---- the faults ---------------------------------------------------------------------------------


def softmax_in(*networks):
    """A softmax at the end of these networks; the loss takes raw logits."""

    def plant(project):
        path = source(project, "model.py")
        parts = re.split(r"(?m)^(?=class )", path.read_text(encoding="utf-8"))
        for place, part in enumerate(parts):
            if part.startswith(tuple(f"class {name}(" for name in networks)):
                parts[place], found = re.subn(
                    r"return (self\.head\(.*\))\n", r"return torch.softmax(\1, dim=1)\n", part
                )
                assert found == 1, "model.py has another form: adapt the test"
        path.write_text("".join(parts), encoding="utf-8", newline="\n")

    return plant


def labels_permuted(project):
    append(
        source(project, "data.py"),
        """

_prepare = prepare


def prepare(records, preprocessing, split):
    import torch

    found = _prepare(records, preprocessing, split)
    order = torch.randperm(len(found["y"]), generator=torch.Generator().manual_seed(1))
    return found | {"y": found["y"][order]}
""",
    )


def validation_prepared_differently(project):
    append(
        source(project, "data.py"),
        """

_prepare = prepare


def prepare(records, preprocessing, split):
    found = _prepare(records, preprocessing, split)
    return found | {"x": found["x"] * (0.5 if split == "validation" else 1.0)}
""",
    )


def optimizer_without_the_biases(project):
    append(
        source(project, "model.py"),
        """

_parameter_groups = parameter_groups


def parameter_groups(model, lr, weight_decay):
    return _parameter_groups(model, lr, weight_decay)[:1]
""",
    )


# ---- what the stages say ------------------------------------------------------------------------

FAULTS = {
    "softmax in all": (softmax_in("Linear", "TinyConvNet", "ConvNet"), ["stage=skeleton"]),
    "softmax in Linear": (softmax_in("Linear"), ["stage=skeleton", "scratch=true"]),
    "softmax in ConvNet": (softmax_in("ConvNet"), walking.tiny("overfit")),
    "labels permuted": (labels_permuted, ["stage=skeleton", "scratch=true"]),
    "validation prepared differently": (
        validation_prepared_differently,
        ["stage=skeleton", "scratch=true"],
    ),
    "optimizer without the biases": (
        optimizer_without_the_biases,
        ["stage=skeleton", "scratch=true"],
    ),
    "diverged": (lambda project: None, [*walking.tiny("overfit"), "optimizer.lr=1e6"]),
    "diverged to nan": (
        lambda project: None,
        [*walking.tiny("regularize"), "scratch=true", "optimizer=sgd", "optimizer.lr=1e30"],
    ),
}


@pytest.fixture(scope="module")
def faulty(walks, tmp_path_factory):
    """name of the fault -> (project, what its launch printed); two at a time."""
    folder = tmp_path_factory.mktemp("faulty")

    def make(name, plant, arguments):
        project = walking.copy(walks[0].project, folder / name.replace(" ", "_") / "p")
        plant(project)
        return project, launch(project, *arguments)

    calls = [lambda name=name, fault=fault: make(name, *fault) for name, fault in FAULTS.items()]
    return dict(zip(FAULTS, walking.together(*calls), strict=True))


def test_softmax_in_the_networks_shuts_the_skeleton_and_is_named(faulty):
    project, done = faulty["softmax in all"]
    succeed(done, SHUT)
    found = gate(project, "skeleton")
    assert found["verdict"] == "shut"
    contract = checks(found)["loss_contract"]
    assert contract["verdict"] == "shut"
    assert "softmax" in contract["because"] + " ".join(contract["suspect"])
    assert "Gate skeleton: shut. Read artifacts/skeleton/report.md" in done.stdout


def test_one_cause_explains_the_others_in_the_report(faulty):
    project, _ = faulty["softmax in all"]
    report = (project / "artifacts" / "skeleton" / "report.md").read_text(encoding="utf-8")
    cause = next(line for line in report.splitlines() if line.startswith("**"))
    assert cause.startswith("**Repair loss_contract first")
    assert "softmax" in cause
    for name in walking.shut(gate(project, "skeleton")):
        assert name in cause
    assert "apart" not in cause, "each of the other findings follows from this one"


def test_a_shut_gate_locks_what_follows_and_the_board_shows_it(faulty):
    project, _ = faulty["softmax in all"]
    found = board(project)
    assert [found[stage].split()[0] for stage in walking.STAGES] == [
        "open",
        "shut",
        *["stale"] * 4,
    ]
    assert found["next"].endswith("python run.py stage=skeleton")
    for stage in ("overfit", "squeeze"):
        done = succeed(launch(project, f"stage={stage}"), REFUSED)
        assert "'skeleton'" in done.stderr
        assert "shut" in done.stderr
        assert done.stderr.strip().endswith("run: python run.py stage=skeleton")


def test_softmax_in_one_network_alone_is_found_and_the_network_named(faulty):
    project, done = faulty["softmax in Linear"]
    succeed(done, SHUT)
    contract = checks(walking.read_json(newest(project, "skeleton") / "gate.json"))["loss_contract"]
    assert contract["verdict"] == "shut"
    said = contract["because"].split("TinyConvNet: ")
    assert said[0].startswith("Linear: ")
    assert "sum to one" in said[0]
    assert "outputs are as the loss wants them" in said[1]


def test_softmax_in_the_configured_network_shuts_overfit(faulty):
    project, done = faulty["softmax in ConvNet"]
    succeed(done, SHUT)
    contract = checks(gate(project, "overfit"))["loss_contract"]
    assert contract["verdict"] == "shut"
    assert "softmax" in contract["because"] + " ".join(contract["suspect"])
    assert walking.statuses(project)[:3] == ["open", "open", "shut"]


@pytest.mark.parametrize(
    ("fault", "check"),
    [
        ("labels permuted", "input_independent_baseline"),
        ("validation prepared differently", "split_parity"),
        ("optimizer without the biases", "trainable_parameters"),
    ],
)
def test_a_fault_shuts_the_check_that_is_made_for_it(faulty, fault, check):
    project, done = faulty[fault]
    succeed(done, SHUT)
    found = walking.read_json(newest(project, "skeleton") / "gate.json")
    assert check in walking.shut(found)
    report = (newest(project, "skeleton") / "handoff" / "report.md").read_text(encoding="utf-8")
    assert f"**Repair {check} first" in report


def test_a_learning_rate_far_too_high_shuts_the_gate_without_a_traceback(faulty):
    project, done = faulty["diverged"]
    succeed(done, SHUT)
    assert "update_ratio" in walking.shut(gate(project, "overfit"))
    assert "Repair update_ratio first (the learning rate is far too high)" in done.stdout
    assert "Nothing was trained: the preflight did not pass." in done.stdout


def test_a_loss_that_is_no_number_is_a_finding_and_no_crash(faulty):
    project, done = faulty["diverged to nan"]
    succeed(done, SHUT)
    found = walking.read_json(newest(project, "regularize") / "gate.json")
    assert walking.shut(found) == ["finite_loss"]
    assert "optimizer.lr=1e+30 is too high" in done.stdout
