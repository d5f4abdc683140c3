"""Faults that plant themselves. `pytest -m faults` plants each in this project's own pipeline, with
the limits of configs/config.yaml, and asserts that the check which should shut does."""

import shutil
from dataclasses import asdict, dataclass, field

import pytest
import torch
from checks_case import Digits, Net, make_pipeline, rows
from hydra import compose, initialize_config_dir
from other_tasks import make_multilabel_pipeline, make_real_pipeline, make_tokens_pipeline
from torch import nn

from {{cookiecutter.project_slug}}.harness import faults, record, schema
from {{cookiecutter.project_slug}}.harness.checks import Check, run_check
from {{cookiecutter.project_slug}}.harness.checks.catalogue import SKELETON
from {{cookiecutter.project_slug}}.harness.faults import FAULTS, NotPlantable
from {{cookiecutter.project_slug}}.stages import data_audit, setup

CHECKS = {check.__name__: check for check in SKELETON}


def configured(root, *options):
    with initialize_config_dir(str(root / "configs"), version_base="1.3"):
        return schema.validate(compose("config", list(options)), root / "configs")


# ---- the table ----------------------------------------------------------------------------------


def test_every_fault_names_a_check_of_the_skeleton_and_says_what_goes_wrong():
    assert len(FAULTS) >= 70
    assert {fault.check for fault in FAULTS.values()} <= set(CHECKS)
    assert all(fault.why.endswith(".") for fault in FAULTS.values())


def test_every_check_that_a_pipeline_can_shut_has_a_fault():
    without = set(CHECKS) - {fault.check for fault in FAULTS.values()}
    assert without <= {"prior_bias", "human_reference"}  # the labels' shares, the owner's words


@pytest.mark.parametrize("name", FAULTS)
def test_planting_a_fault_leaves_the_pipeline_as_it_was(name):
    pipeline = make_pipeline()
    before, parts, state = first_step(pipeline), dict(vars(pipeline)), torch.get_rng_state()
    try:
        broken = faults.plant(pipeline, name)
    except NotPlantable as error:
        assert str(error)
    else:
        assert broken is not pipeline
    assert torch.equal(torch.get_rng_state(), state)
    assert vars(pipeline) == parts
    assert first_step(pipeline) == before
    for part, values in rows().items():
        assert torch.equal(pipeline.train.rows[part], values)


def first_step(pipeline):
    """Loss of one step and of an evaluation, to the bit."""
    model = pipeline.make_model(0)
    pipeline.train.epoch = 0
    step = pipeline.train_step(model, pipeline.make_optimizer(model), next(iter(pipeline.train)))
    pipeline.train.epoch = 0
    return step.loss.item(), pipeline.evaluate(model, pipeline.validation).loss


def test_a_fault_that_finds_no_place_says_what_is_missing():
    with pytest.raises(NotPlantable, match="there is no BatchNorm"):
        faults.plant(make_pipeline(), "statistics_frozen")


# ---- what images of one class each have no place for --------------------------------------------


class TwoTerms(Digits):
    """Cross entropy and a weak pull of the outputs to zero."""

    def loss_terms(self, outputs, y):
        return {"class": super().loss(outputs, y), "size": 0.01 * outputs.square().mean()}

    def loss(self, outputs, y):
        return sum(self.loss_terms(outputs, y).values())


ELSEWHERE = {
    "group_in_both_splits": lambda: make_pipeline(group=lambda row: row // 2),
    "future_in_train": lambda: make_pipeline(time=float),
    "targets_not_shifted": make_tokens_pipeline,
    "most_targets_ignored": make_tokens_pipeline,
    "future_seen": make_tokens_pipeline,
    "padding_counted": make_tokens_pipeline,
    "softmax_before_loss": make_tokens_pipeline,
    "field_unused": make_real_pipeline,
    "loss_summed": make_multilabel_pipeline,
    "statistics_frozen": lambda: make_pipeline(lambda: Net(norm=nn.BatchNorm1d)),
    "dead_term": lambda: make_pipeline(task=TwoTerms()),
}


@pytest.mark.parametrize("name", ELSEWHERE)
def test_a_fault_of_another_kind_of_data_shuts_its_check(name):
    pipeline, check = ELSEWHERE[name](), CHECKS[FAULTS[name].check]
    assert run_check(check, pipeline).verdict in ("open", "warn")
    assert run_check(check, faults.plant(pipeline, name)).verdict == "shut"


# ---- the command --------------------------------------------------------------------------------


def test_an_unknown_fault_is_refused_with_the_nearest_name(project_root):
    with pytest.raises(schema.BadInput, match="Nearest: softmax_before_loss"):
        configured(project_root, "stage=skeleton", "scratch=true", "fault=softmax_befor_los")


@pytest.mark.parametrize("options", [["stage=skeleton"], ["stage=tune", "scratch=true"]])
def test_a_fault_is_refused_where_it_could_pass_for_evidence(project_root, options):
    with pytest.raises(schema.BadInput, match="stage=skeleton fault=loss_summed scratch=true"):
        configured(project_root, *options, "fault=loss_summed")


def test_no_fault_is_planted_unless_asked(project_root):
    assert asdict(configured(project_root, "stage=skeleton"))["fault"] is None


# ---- this project's own pipeline ----------------------------------------------------------------


@dataclass
class Own:
    """The pipelines that skeleton and overfit would check, and what the checks say of them."""

    cfg: schema.Config
    run: record.Run
    pipelines: dict
    healthy: dict = field(default_factory=dict)

    def check(self, name, pipeline) -> Check:
        return setup.run_check(CHECKS[name], pipeline, self.cfg, self.run)

    def without_fault(self, name, network) -> Check:
        if (name, network) not in self.healthy:
            self.healthy[name, network] = self.check(name, self.pipelines[network])
        return self.healthy[name, network]

    def planted(self, name):
        """(network, its pipeline with the fault): the skeleton's last, else the configured one."""
        reasons = {}
        for network, pipeline in self.pipelines.items():
            try:
                return network, faults.plant(pipeline, name)
            except NotPlantable as error:
                reasons[str(error)] = None
        pytest.skip("; ".join(reasons))


@pytest.fixture(scope="module")
def own(request, tmp_path_factory):
    root, folder = request.config.rootpath, tmp_path_factory.mktemp("faults")
    cfg = configured(root, "stage=skeleton")
    run = record.Run(
        stage="skeleton",
        mode="scratch",
        folder=folder,
        artifacts=audited(root, folder),
        runs=folder / "runs",
        device=record.pick_device(cfg.device),
    )
    loaded, last = setup.load(cfg, run), cfg.stage.models[-1]
    pipelines = {
        last: setup.pipeline(cfg, loaded, run, name=last, params={}),
        cfg.model.name: setup.pipeline(cfg, loaded, run),
    }
    return Own(cfg, run, pipelines)


def audited(root, folder):
    """The project's artifacts, or, before its first audit, those of one that leaves no evidence."""
    if (root / "artifacts" / "data_audit" / "splits.json").exists():
        return root / "artifacts"
    cfg, artifacts = configured(root, "stage=data_audit"), folder / "artifacts"
    audit = record.Run(
        stage="data_audit",
        mode="scratch",
        folder=folder / "audit",
        artifacts=artifacts,
        runs=folder / "runs",
        device=torch.device("cpu"),
    )
    data_audit.run(cfg, audit)
    shutil.copytree(audit.handoff, artifacts / "data_audit")
    return artifacts


@pytest.mark.faults
@pytest.mark.parametrize("name", FAULTS)
def test_the_check_shuts_on(own, name):
    network, broken = own.planted(name)
    check = FAULTS[name].check
    before = own.without_fault(check, network)
    assert before.verdict not in ("shut", "inconclusive"), f"without the fault: {before.because}"
    found = own.check(check, broken)
    if before.verdict == found.verdict == "not_applicable":
        pytest.skip(f"{check} does not apply: {found.because}")
    assert found.verdict == "shut", f"{check} is {found.verdict} with {name}: {found.because}"
