"""The configuration: every stage composes, options win, and what does not fit is refused."""

import copy
import re
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest
import yaml
from hydra import compose, initialize_config_dir
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import OmegaConf

from {{cookiecutter.project_slug}}.harness import schema
from {{cookiecutter.project_slug}}.harness.schema import BadInput
from {{cookiecutter.project_slug}}.stages import ORDER

GROUPS = ("data", "model", "optimizer", "regularization", "logger")
STAGES = ("status", *ORDER)


@pytest.fixture
def configs(project_root):
    return project_root / "configs"


def composed(configs, *overrides):
    with initialize_config_dir(str(configs), version_base="1.3"):
        return compose("config", list(overrides), return_hydra_config=True)


def checked(whole, configs):
    """As launch does it: types and values, then the keys of the free-form nodes."""
    choices = dict(whole.hydra.runtime.choices)
    OmegaConf.set_struct(whole, False)
    del whole["hydra"]
    config = schema.validate(whole, configs)
    schema.refuse_undeclared(whole, choices, configs)
    return config


def validated(configs, *overrides):
    return checked(composed(configs, *overrides), configs)


@pytest.fixture(scope="module")
def overfit():
    """The composed configuration of one stage, for tests that change a copy of it."""
    return composed(Path(__file__).resolve().parents[1] / "configs", "stage=overfit")


def changed(overfit, configs, override):
    """What `key=value`, `+key=value` or `~key` on the command line makes of it."""
    whole = copy.deepcopy(overfit)
    OmegaConf.set_struct(whole, False)
    parsed = OverridesParser.create().parse_override(override)
    key = parsed.key_or_group
    if parsed.is_delete():
        parent, _, last = key.rpartition(".")
        del (OmegaConf.select(whole, parent) if parent else whole)[last]
    else:
        OmegaConf.update(whole, key, parsed.value(), force_add=True)
    return checked(whole, configs)


def refused(overfit, configs, match, override):
    with pytest.raises(BadInput, match=match) as caught:
        changed(overfit, configs, override)
    assert "\n" not in str(caught.value)


# ---- what is shipped ----------------------------------------------------------------------------


@pytest.mark.parametrize("stage", STAGES)
def test_every_stage_composes_into_plain_values(configs, stage):
    config = validated(configs, f"stage={stage}")
    assert config.stage.name == stage
    plain = asdict(config)
    assert OmegaConf.to_container(OmegaConf.create(plain)) == plain
    assert type(config.model.params) is dict and type(config.optimizer.betas) is list


def options():
    root = Path(__file__).resolve().parents[1] / "configs"
    return [(g, path.stem) for g in GROUPS for path in sorted((root / g).glob("*.yaml"))]


@pytest.mark.parametrize(("group", "option"), options())
def test_every_option_of_every_group_is_valid(configs, group, option):
    validated(configs, f"{group}={option}")


def test_an_unset_interpolation_follows_what_it_points_to(configs):
    assert validated(configs, "data=digits").commit_samples is True
    assert validated(configs, "data=folder").commit_samples is False
    assert validated(configs, "data=folder", "commit_samples=true").commit_samples is True


CHOSEN = {"optimizer": "sgd", "regularization": "dropout", "model": "linear", "data": "folder"}


@pytest.mark.parametrize("stage", STAGES)
def test_options_named_on_the_command_line_are_never_overridden_by_a_stage(configs, stage):
    names = [f"{group}={option}" for group, option in CHOSEN.items()]
    for overrides in ([f"stage={stage}", *names], [*names, f"stage={stage}"]):
        found = OmegaConf.to_container(composed(configs, *overrides))
        for group, option in CHOSEN.items():
            written = yaml.safe_load((configs / group / f"{option}.yaml").read_text("utf-8"))
            for key, value in written.items():
                if key != "defaults":
                    assert found[group][key] == value, f"{group}.{key} under stage={stage}"


@pytest.mark.parametrize("stage", STAGES)
def test_a_value_named_on_the_command_line_wins_over_everything(configs, stage):
    config = validated(configs, f"stage={stage}", "optimizer.lr=0.123", "batch_size=7")
    assert config.optimizer.lr == 0.123 and config.batch_size == 7


@pytest.mark.parametrize("stage", STAGES)
def test_a_stage_chooses_options_and_touches_no_value_of_a_group(configs, stage):
    text = (configs / "stage" / f"{stage}.yaml").read_text(encoding="utf-8")
    assert text.startswith("# @package _global_\n")
    written = yaml.safe_load(text)
    assert set(written) <= {"defaults", "stage"}
    for choice in written.get("defaults", []):
        ((key, _),) = choice.items()
        assert key.startswith("override /")


def test_floats_are_written_so_that_every_yaml_reader_takes_them_for_floats(configs):
    for path in configs.rglob("*.yaml"):
        text = path.read_text(encoding="utf-8")
        for value in re.findall(r"[\s:\[,]([0-9][0-9.]*[eE][-+]?[0-9]+)", text):
            assert isinstance(yaml.safe_load(value), float), f"{value} in {path.name}: write 1.0e-3"


def test_the_config_file_reads_in_order_and_the_stage_comes_last(configs):
    defaults = yaml.safe_load((configs / "config.yaml").read_text(encoding="utf-8"))["defaults"]
    assert [next(iter(d)) for d in defaults[:5]] == list(GROUPS)
    assert defaults[5:7] == ["_self_", {"stage": "status"}]


# ---- what is refused ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("key", "nearest"),
    [
        ("optimizer.lrr", "optimizer.lr"),
        ("optimiser", "optimizer"),
        ("batchsize", "batch_size"),
        ("data.split.val_fraction", "data.split.validation_fraction"),
        ("stage.num_epoch", "stage.num_epochs"),
        ("stage.limits.max_train_los", "stage.limits.max_train_loss"),
        ("num_epochs", "stage.num_epochs"),
        ("regularization.droput", "regularization.dropout"),
    ],
)
def test_an_unknown_key_is_refused_with_the_nearest_valid_one(overfit, configs, key, nearest):
    match = f"'{key}' is no key of the configuration. Nearest: '{re.escape(nearest)}'"
    refused(overfit, configs, match, f"+{key}=1")


def test_the_keys_of_one_stage_are_unknown_in_another(configs):
    with pytest.raises(BadInput, match=r"'stage\.num_epochs' is no key"):
        validated(configs, "stage=skeleton", "+stage.num_epochs=3")


@pytest.mark.parametrize(
    ("node", "nearest"),
    [
        ("model.params.widht", "model.params.width"),
        ("model.wider.with", "model.wider.width"),
        ("data.options.sise", "data.options.size"),
        ("regularization.augment.max_shift", "regularization.augment.max_shift_px"),
    ],
)
def test_a_free_form_node_holds_what_its_file_declares(overfit, configs, node, nearest):
    match = f"'{re.escape(node)}' is not declared in configs/.*Nearest: '{re.escape(nearest)}'"
    refused(overfit, configs, match, f"+{node}=1")


def test_a_file_declares_what_the_file_it_is_based_on_declares(configs):
    assert validated(configs, "data=manifest").data.options["size"] is None
    changed = validated(configs, "regularization=dropout", "regularization.augment.flip=true")
    assert changed.regularization.augment["flip"] is True


@pytest.mark.parametrize(
    ("override", "match"),
    [
        ("optimizer.lr=fast", "optimizer.lr: .*'fast'.*Float"),
        ("optimizer.lr=null", "optimizer.lr"),
        ("batch_size=2.5", "batch_size: .*Integer"),
        ("scratch=perhaps", "scratch: Value 'perhaps' is not a valid bool"),
        ("optimizer.betas=0.9", "betas"),
        ("model.params=3", "params"),
        ("model.params.width=wide", r"model\.params\.width='wide' is a str.*declares 16"),
        ("model.params.width=2.5", "is a float"),
        ("model.params.width=null", "is a NoneType"),
        ("model.params.width=true", "is a bool"),
        ("regularization.augment.flip=1", "is a int"),
        ("stage.limits.max_train_loss=low", "max_train_loss: .*'low'.*Float"),
        ("stage.num_epochs=many", "num_epochs: .*'many'.*Integer"),
    ],
)
def test_a_wrong_type_is_refused_with_its_key(overfit, configs, override, match):
    refused(overfit, configs, match, override)


def test_a_whole_number_passes_for_a_float(overfit, configs):
    assert changed(overfit, configs, "optimizer.lr=1").optimizer.lr == 1.0
    config = changed(overfit, configs, "regularization.augment.max_shift_px=2")
    assert config.regularization.augment["max_shift_px"] == 2


@pytest.mark.parametrize(
    ("override", "match"),
    [
        ("seed=-1", "seed=-1 must be between 0 and 2147483647"),
        ("seed=2147483648", "must be between"),
        ("batch_size=0", "batch_size=0 must be above 0"),
        ("regularization.batch_size=-4", "must be above 0"),
        ("optimizer.lr=0", r"optimizer\.lr=0.* must be above 0"),
        ("optimizer.lr=nan", "must be above 0"),
        ("optimizer.clip_norm=0", "must be above 0"),
        ("stage.num_epochs=0", "must be above 0"),
        ("regularization.patience_epochs=0", "must be above 0"),
        ("regularization.dropout=1", "at least 0 and below 1"),
        ("regularization.label_smoothing=-0.1", "at least 0 and below 1"),
        ("regularization.weight_decay=-1", "at least 0"),
        ("optimizer.betas=[0.9]", "must be two numbers"),
        ("optimizer.betas=[0.9,1]", "must be two numbers"),
        ("device=gpu", "device=gpu is none of auto, cuda, mps, cpu. Nearest: cpu"),
        ("precision=fp16", "none of fp32, bf16. Nearest: bf16"),
        ("optimizer.schedule=cosin", "Nearest: cosine"),
        ("data.split.strategy=grouped", "Nearest: group"),
        ("data.split.test=external", r"needs data\.test_path"),
        ("~seed", "seed"),
        ("~optimizer.lr", r"optimizer\.lr"),
    ],
)
def test_a_value_out_of_its_bounds_is_refused(overfit, configs, override, match):
    refused(overfit, configs, match, override)


@pytest.mark.parametrize("seed", [0, 2147483647])
def test_both_ends_of_the_seeds_are_seeds(overfit, configs, seed):
    assert changed(overfit, configs, f"seed={seed}").seed == seed


def test_null_is_allowed_where_it_means_off(overfit, configs):
    assert changed(overfit, configs, "optimizer.clip_norm=null").optimizer.clip_norm is None
    assert changed(overfit, configs, "stage.subset=null").stage.subset is None


# ---- values by their dotted names ---------------------------------------------------------------


def test_values_are_read_and_replaced_by_their_dotted_names(configs):
    config = validated(configs, "stage=tune")
    assert schema.get_value(config, "optimizer.lr") == config.optimizer.lr
    shift = config.regularization.augment["max_shift_px"]
    assert schema.get_value(config, "regularization.augment.max_shift_px") == shift != 2.0
    assert schema.get_value(config, "stage.subset") is None
    values = {"optimizer.lr": 0.5, "regularization.augment.max_shift_px": 2.0, "batch_size": 8}
    changed = schema.with_values(config, values)
    assert {key: schema.get_value(changed, key) for key in values} == values
    assert config.optimizer.lr != 0.5 and config.batch_size != 8


@pytest.mark.parametrize("key", ["optimizer.lrr", "nothing.lr", "regularization.augment.shift"])
def test_replacing_a_key_that_is_none_is_refused(configs, key):
    with pytest.raises(BadInput, match=f"stage.space names '{key}'"):
        schema.with_values(validated(configs, "stage=tune"), {key: 1})


# ---- the command line ---------------------------------------------------------------------------

LIGHT = """
import runpy, sys
path = sys.argv.pop(1)
sys.argv[0] = path + "/run.py"
sys.path[0] = path
try:
    runpy.run_path(sys.argv[0], run_name="__main__")
finally:
    heavy = {"torch", "sklearn", "matplotlib", "optuna", "wandb", "PIL"}.intersection(sys.modules)
    print("heavy:", sorted(heavy), file=sys.stderr)
"""


def command(project_root, *arguments, cwd=None):
    """Exit code, output and errors of run.py, which must not have imported what is heavy."""
    done = subprocess.run(
        [sys.executable, "-c", LIGHT, str(project_root), *arguments],
        cwd=cwd or project_root,
        capture_output=True,
        text=True,
        encoding="utf-8",
        check=False,
    )
    *errors, last = done.stderr.splitlines()
    assert last == "heavy: []", done.stderr
    return done.returncode, done.stdout, "\n".join(errors)


def test_help_names_the_stages_in_order_and_every_group(project_root):
    code, out, _ = command(project_root, "--help")
    assert code == 0 and " -> ".join(ORDER) in out
    assert all(f"{group}: " in out for group in (*GROUPS, "stage"))


def test_cfg_prints_the_whole_resolved_configuration(project_root, configs):
    code, out, _ = command(project_root, "stage=overfit", "--cfg", "job", "--resolve")
    assert code == 0
    shown = yaml.safe_load(out)
    assert shown["stage"]["name"] == "overfit" and shown["commit_samples"] is True
    assert schema.validate(OmegaConf.create(shown), configs).stage.num_epochs > 0


def test_tab_completes_stages(project_root, monkeypatch):
    for key, value in {"COMP_LINE": "python run.py stage=sk", "COMP_POINT": "22"}.items():
        monkeypatch.setenv(key, value)
    code, out, _ = command(project_root, "-sc", "query=bash")
    assert code == 0 and out.split() == ["stage=skeleton"]


def test_a_typing_error_is_one_line_and_exit_code_1(project_root, tmp_path):
    for override, nearest in [("optimizer.lrr=1", "'optimizer.lr'"), ("stage=overfitt", "overfit")]:
        code, out, errors = command(project_root, override, cwd=tmp_path)
        assert (code, out) == (1, "") and len(errors.splitlines()) == 1
        assert f"Nearest: {nearest}" in errors or f"Nearest: stage={nearest}" in errors
    assert list(tmp_path.iterdir()) == []  # started elsewhere, it still works on its own folder


def test_a_limit_of_a_check_may_be_a_whole_number(overfit, configs):
    limits = changed(overfit, configs, "checks.update_ratio.max_ratio=1").checks["update_ratio"]
    assert limits["max_ratio"] == 1.0
    assert isinstance(limits["max_ratio"], float)
    refused(overfit, configs, "incompatible", "checks.update_ratio.max_ratio=abc")
    refused(overfit, configs, "incompatible", "checks.update_ratio=3")
