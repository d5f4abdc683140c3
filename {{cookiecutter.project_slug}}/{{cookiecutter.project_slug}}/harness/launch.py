"""What run.py does: ask the gate, run the stage, record what it found, say it with the exit code.

0 the gate is open; 1 bad input or a crash; 3 the stage ran and its gate is shut; 4 refused.
Nothing heavy is imported before the gate was asked.
"""

from __future__ import annotations

import dataclasses
import importlib
import os
import re
import shlex
import sys
import time
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from types import ModuleType
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from . import board, files, gates, schema
from .gates import DataNow, Project, Refused
from .lock import StageLock
from .schema import BadInput, Config

OPEN, FAILED, SHUT, REFUSED = 0, 1, 3, 4
EVIDENCE = ("data", "model", "task")  # said on the command line, it decides what a gate is about
COMMAND = re.compile(r"python run\.py( stage=\w+)?( reaffirm=true)?$", re.MULTILINE)


def main(app: Callable, project: Project, data: ModuleType) -> int:
    """Call the Hydra application; expected failures become one line and their exit code."""
    os.environ.setdefault("HYDRA_FULL_ERROR", "1")  # errors reach us whole, and are told below
    os.chdir(project.root)  # artifacts/ and runs/ are found from every folder
    arguments = sys.argv[1:]
    try:
        if {"-m", "--multirun"} & set(arguments):
            return _multirun(app, project, data, arguments)
        app()
    except (Refused, BadInput) as error:
        return _fail(error)
    except (HydraException, OmegaConfBaseException, YAMLError) as error:
        return _fail(BadInput(_config_error(error, project)))
    except KeyboardInterrupt:
        print("Interrupted. Nothing was recorded.", file=sys.stderr)
        return 130
    return OPEN


def _fail(error: Refused | BadInput) -> int:
    print(_again(str(error)), file=sys.stderr)
    return REFUSED if isinstance(error, Refused) else FAILED


def _again(text: str) -> str:
    """`text` with the settings of this command at each command that it ends a line with."""
    return COMMAND.sub(lambda found: found.group() + _given(), text)


def _given() -> str:
    """What this command says about data, model and task: the one to run next must say it, too."""
    keys = {text: text.lstrip("+~").partition("=")[0].partition(".")[0] for text in sys.argv[1:]}
    return "".join(f" {shlex.quote(text)}" for text, key in keys.items() if key in EVIDENCE)


# ---- one launch -------------------------------------------------------------------------------


def run(composed: DictConfig, project: Project, data: ModuleType) -> None:
    """The Hydra task: the board, or one stage. A plain run leaves through SystemExit(code); a job
    of a multirun writes its code into its folder and returns."""
    if HydraConfig.get().mode == RunMode.MULTIRUN:
        folder, code = Path(HydraConfig.get().runtime.output_dir), FAILED
        try:
            code = _expected(composed, project, data, folder)
        finally:
            about = {"stage": composed.stage.name, "exit_code": code}
            files.write_json(folder / "launch.json", about)
    else:
        raise SystemExit(_expected(composed, project, data, None))


def _expected(
    composed: DictConfig, project: Project, data: ModuleType, job_folder: Path | None
) -> int:
    """The exit code; told here, since Hydra would add lines of its own to an error it sees."""
    try:
        config = _validated(composed, project)
        if config.stage.name == "status":
            return _print_board(config, project, data)
        return run_stage(config, project, data, job_folder=job_folder)
    except (Refused, BadInput) as error:
        return _fail(error)


def _print_board(config: Config, project: Project, data: ModuleType) -> int:
    now = _data_now(project, data, config)
    judged = gates.judge_all(project, dataclasses.asdict(config), now)
    judged = [dataclasses.replace(j, command=_again(j.command)) for j in judged]
    board.print_board(judged, waivers=_waivers(project))
    return OPEN


def run_stage(
    config: Config, project: Project, data: ModuleType, *, job_folder: Path | None = None
) -> int:
    """Ask, run, record: the exit code. Raises Refused, BadInput or what the stage raises."""
    name, plain = config.stage.name, dataclasses.asdict(config)
    now, waivers = _data_now(project, data, config), _waivers(project)
    if job_folder is not None or config.scratch:
        launched = gates.snapshot(project, name)
        return _act(config, plain, project, launched, job_folder=job_folder)
    why = gates.ask(project, name, plain, now, reaffirm=config.reaffirm, waivers=waivers)
    with StageLock(project.runs / "locks", name):
        launched = gates.snapshot(project, name)
        return _act(config, plain, project, launched, reaffirmed=why and why.because)


def _act(
    config: Config,
    plain: dict,
    project: Project,
    launched: gates.Snapshot,
    *,
    job_folder: Path | None = None,
    reaffirmed: str | None = None,
) -> int:
    """The stage itself, between an asked gate and a recorded one."""
    from . import record, report

    started, name = time.time(), config.stage.name
    mode = "job" if job_folder else "scratch" if config.scratch else "recorded"
    try:
        device = record.pick_device(config.device)
    except ValueError as error:
        raise BadInput(str(error)) from None
    record.prepare_torch(config.seed, config.num_threads)

    def verify(now: DataNow) -> None:
        if mode == "recorded":
            again, waivers = reaffirmed is not None, _waivers(project)
            gates.verify_data(project, name, plain, now, reaffirm=again, waivers=waivers)

    run = record.Run(
        stage=name,
        mode=mode,
        folder=job_folder or record.make_folder(project.runs, name),
        artifacts=project.artifacts,
        runs=project.runs,
        device=device,
        reaffirm=reaffirmed is not None,
        public=config.commit_samples,
        verify=verify,
        waived=frozenset(waiver["check"] for waiver in _waivers(project)),
    )
    files.write_json(run.folder / "config.json", plain)
    report.announce(run, config)
    try:
        checks = _checks(run, config, project)
    except (Refused, BadInput):
        record.forget(run)
        raise
    if checks is None:  # a trial of the study: it has no gate
        return OPEN
    report.write(run, checks)
    gate = gates.record(
        project,
        name,
        checks,
        run.handoff,
        config=plain,
        data=run.data,
        provenance=record.provenance(project.root, plain, str(device), started),
        waivers=_waivers(project),
        loosened=_loosened(config, project),
        out=None if mode == "recorded" else run.folder,
        launched=launched,
        reaffirmed=reaffirmed,
    )
    report.print_gate(gate, run, project.order, _given())
    return OPEN if gate["verdict"] == "open" else SHUT


def _checks(run: Any, config: Config, project: Project) -> list | None:
    """The stage's checks. A loss that leaves the numbers is a finding, not a crash."""
    from .checks import Check
    from .instruments import NonFiniteLoss

    stage = importlib.import_module(f"{project.package}.stages.{run.stage}")
    try:
        return stage.run(config, run)
    except FileNotFoundError as error:
        raise _not_handed_over(error, run) from None
    except NonFiniteLoss as error:
        suspects = (
            f"optimizer.lr={config.optimizer.lr:g} is too high",
            "values that are not finite",
        )
        because = f"{error}: training diverged."
        return [Check("finite_loss", "shut", None, None, "nats", because, suspects)]


def _not_handed_over(error: FileNotFoundError, run: Any) -> Exception:
    """A scratch run or a job asks no gate: what an earlier stage leaves may not be there yet."""
    path = Path(error.filename or "")
    if run.artifacts not in path.parents:
        return error
    name = path.relative_to(run.artifacts).as_posix()
    stage = name.partition("/")[0]
    return BadInput(f"artifacts/{name} is not there: run first: python run.py stage={stage}")


# ---- many launches ----------------------------------------------------------------------------


def _multirun(app: Callable, project: Project, data: ModuleType, arguments: list[str]) -> int:
    """Ask the gate once, here, before any job starts; then the highest exit code of the jobs."""
    overrides = [text for text in arguments if not text.startswith("-")]
    parsed = OverridesParser.create().parse_overrides(overrides)
    if any(o.key_or_group == "stage" and o.is_sweep_override() for o in parsed):
        raise BadInput(
            "A sweep over stages is refused: each stage needs the gate of the one before. "
            "Run them one after another (make walk), or sweep one stage: python run.py -m "
            "stage=tune 'trial=range(0,20)'"
        )
    fixed = [o.input_line for o in parsed if not o.is_sweep_override()]
    with initialize_config_dir(str(project.root / "configs"), version_base="1.3"):
        composed = compose("config", [o for o in fixed if not o.startswith("hydra")])
        choices = compose("config", fixed, return_hydra_config=True).hydra.runtime.choices
    config = schema.validate(composed, project.root / "configs")
    schema.refuse_undeclared(composed, dict(choices), project.root / "configs")
    if config.stage.name == "status":
        raise BadInput("-m needs a stage, for example: python run.py -m stage=overfit seed=0,1,2")
    if not config.scratch:
        now = _data_now(project, data, config)
        gates.ask(project, config.stage.name, dataclasses.asdict(config), now)
    folder = _sweep_folder(overrides)
    try:
        app()
    finally:
        codes = [files.read_json(p)["exit_code"] for p in sorted(folder.rglob("launch.json"))]
    return max(codes, default=FAILED)


def _sweep_folder(overrides: list[str]) -> Path:
    """Where the jobs of this multirun write; named here, so that their codes can be read."""
    asked = [o.partition("=")[2] for o in overrides if o.startswith("hydra.sweep.dir=")]
    if asked:
        return Path(asked[0])
    folder = Path("runs", "multirun", datetime.now().strftime("%Y-%m-%d_%H-%M-%S-%f"))
    sys.argv.append(f"hydra.sweep.dir={folder.as_posix()}")
    return folder


# ---- what the launch reads first ----------------------------------------------------------------


def _validated(composed: DictConfig, project: Project) -> Config:
    configs = project.root / "configs"
    config = schema.validate(composed, configs)
    schema.refuse_undeclared(composed, dict(HydraConfig.get().runtime.choices), configs)
    return config


def _data_now(project: Project, data: ModuleType, config: Config) -> DataNow:
    """What is known of the data without reading it: its stamp, and what that stamp stood for."""
    from . import records

    try:
        stamp = data.stamp(config.data)
    except FileNotFoundError as error:
        return DataNow(None, None, str(error))
    except ValueError as error:
        raise BadInput(str(error)) from None
    known = records.recall(project.runs / "cache" / "stamp.json", stamp)
    return DataNow(*known, None) if known else DataNow(None, None, None)


def _waivers(project: Project) -> list[dict]:
    path = project.root / "configs" / "waivers.yaml"
    if not path.exists():
        return []
    try:
        written = OmegaConf.to_container(OmegaConf.load(path))
    except (YAMLError, OSError, OmegaConfBaseException) as error:
        raise BadInput(f"configs/waivers.yaml is no YAML: {' '.join(str(error).split())}") from None
    entries = written.get("waivers", []) if isinstance(written, dict) else written
    if not isinstance(written, dict) or not isinstance(entries or [], list):
        raise BadInput("configs/waivers.yaml needs the key waivers with a list: - check: NAME ...")
    try:
        return gates.active_waivers(entries or [])
    except ValueError as error:
        raise BadInput(str(error)) from None


def _loosened(config: Config, project: Project) -> list[dict]:
    """Limits that this launch set more generously than configs/ ships them."""
    configs, name = project.root / "configs", config.stage.name
    limits = OmegaConf.load(configs / "stage" / f"{name}.yaml").stage.limits
    shipped = {"stage.limits": (limits, config.stage.limits)}
    for check, values in schema.shipped_checks(configs).items():
        shipped[f"checks.{check}"] = (values, config.checks[check])
    return [
        {"limit": f"{node}.{limit}", "shipped": before[limit], "value": value}
        for node, (before, now) in shipped.items()
        for limit, value in now.items()
        if (value < before[limit] if limit.startswith("min_") else value > before[limit])
    ]


def _config_error(error: Exception, project: Project) -> str:
    """One line for what Hydra could not compose, with the nearest key or option."""
    if isinstance(error, MissingConfigException) and error.options:
        asked = str(error.missing_cfg_file)
        near = schema.nearest(asked.rpartition("/")[2], set(error.options))
        group = asked.rpartition("/")[0]
        return f"{asked.replace('/', '=')} does not exist. Nearest: {group}={near}."
    if isinstance(error, YAMLError):
        return f"A file in configs/ is no YAML: {' '.join(str(error).split())}"
    if isinstance(error, OverrideParseException):
        hint = "a text with commas, quotes or brackets needs quotes of its own: 'key=\"a, b\"'"
        return f"{error.override} cannot be read; {hint}."
    if "Ambiguous value" in str(error):
        hint = "key=[1,2] is a list, 'key=\"1,2\"' a text, and -m sweeps over the values"
        return f"{schema.one_line(error)}: {hint}."
    cause = error.__cause__ or error
    key = getattr(cause, "full_key", None)
    if key and "is not in" in str(cause):
        with initialize_config_dir(str(project.root / "configs"), version_base="1.3"):
            known = schema.keys_of(OmegaConf.to_container(compose("config", ["stage=overfit"])))
        return f"'{key}' is no key of the configuration. Nearest: '{schema.nearest(key, known)}'."
    return schema.one_line(cause)
