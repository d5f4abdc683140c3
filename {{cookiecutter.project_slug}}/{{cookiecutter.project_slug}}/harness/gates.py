"""The gates: judge every recorded gate from today's files, and let a launch in or refuse it.

Gates guard against accident, not forgery. Asking reads gate files, sources and outputs and compares
them with what was recorded; nothing here imports torch or reads the data itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import date

from . import evidence, files
from .artifact import Tampered, read_gate, result_of
from .checks import Check, explain
from .evidence import DataNow, Project
from .publish import Snapshot, record, snapshot
from .waivers import active_waivers, applied, blocking

__all__ = [
    "DataNow",
    "Judgement",
    "Project",
    "Refused",
    "Snapshot",
    "active_waivers",
    "affected",
    "ask",
    "judge",
    "judge_all",
    "record",
    "snapshot",
    "verify_data",
]

STATUSES = ("missing", "shut", "tampered", "stale", "unverifiable", "open")
PASSABLE = ("open", "unverifiable")  # a gate that need not be recorded again


class Refused(Exception):
    """A launch that may not start: one message, no traceback."""

    exit_code = 4


@dataclass(frozen=True)
class Judgement:
    """What one gate is worth today.

    `command` is what to run next to get it open, which may be an earlier stage; `remedy` leads in
    to it. `reaffirmable`: only checks or the loop changed, so that rerunning the checks is enough.
    """

    stage: str
    status: str
    because: str
    command: str
    remedy: str = "Run"
    reaffirmable: bool = False
    waivers: tuple[dict, ...] = ()  # own and inherited, and loosened limits, as in gate.json
    warnings: tuple[str, ...] = ()  # names of the checks that warn


@dataclass(frozen=True)
class _Finding:
    status: str
    because: str
    remedy: str = "Run"
    reaffirmable: bool = False


def judge(
    project: Project, stage: str, config: Mapping, data: DataNow, today: date | None = None
) -> Judgement:
    """The gate of `stage`, judged from the files as they are now."""
    return judge_all(project, config, data, upto=stage, today=today)[-1]


def judge_all(
    project: Project,
    config: Mapping,
    data: DataNow,
    *,
    upto: str | None = None,
    today: date | None = None,
) -> list[Judgement]:
    """Every gate from the first to that of `upto` (None: of the last), each standing on the one
    before.

    `config` is the plain resolved config with "data", "task" and "model"; `today` decides which
    waivers have expired.
    """
    today = today or date.today()
    judged: list[Judgement] = []
    gate = None
    for stage in project.order:
        before = (judged[-1], gate) if judged else None
        try:
            gate = read_gate(project, stage)
        except FileNotFoundError:
            gate, found = None, _Finding("missing", "it has no recorded run")
        except Tampered as error:
            gate, found = None, _Finding("tampered", str(error), "Undo the edit, or run")
        else:
            found = _examine(project, gate, config, data, before, today)
        judged.append(_judgement(stage, found, gate, judged))
        if stage == upto:
            break
    return judged


def ask(
    project: Project,
    stage: str,
    config: Mapping,
    data: DataNow,
    *,
    reaffirm: bool = False,
    waivers: Sequence[Mapping] = (),
) -> Judgement | None:
    """Let the launch of `stage` pass, or raise Refused with the reason and what to run.

    With `reaffirm` the stage's own gate must be stale through checks or the loop alone, or shut by
    checks that `waivers` (of today) let pass; its judgement is returned, and its `because` is what
    the new gate records as the reason.
    """
    before = project.before(stage)
    if before is not None:
        earlier = judge_all(project, config, data, upto=before)
        if earlier[-1].status != "open":
            raise Refused(_locked(project, stage, earlier))
    if not reaffirm:
        return None
    own = judge(project, stage, config, data)
    if own.reaffirmable or _waived(project, own, config, data, waivers):
        return own
    why = own.because if own.status != "open" else "there is nothing to reaffirm"
    raise Refused(
        f"Stage '{stage}' cannot be reaffirmed: its gate is {own.status}, {why} "
        f"({_relative(project, stage)}).\n{own.remedy}: {own.command}"
    )


def _waived(
    project: Project,
    own: Judgement,
    config: Mapping,
    data: DataNow,
    waivers: Sequence[Mapping],
) -> bool:
    """Would these waivers open the shut gate, its evidence being as true as it was?"""
    if own.status != "shut":
        return False
    gate = read_gate(project, own.stage)
    waived = [*gate["waivers"], *applied(own.stage, gate["checks"], waivers)]
    earlier = project.before(own.stage)
    before = None
    if earlier is not None:
        before = (judge(project, earlier, config, data), read_gate(project, earlier))
    found = _examine(project, {**gate, "waivers": waived}, config, data, before, date.today())
    return found.status == "open" or found.reaffirmable


def affected(project: Project, stage: str) -> set[str]:
    """Names of the recorded checks that a reaffirmation must run again: those whose file changed,
    and all of them if the loop did."""
    gate = read_gate(project, stage)
    about = gate["evidence_of"]
    if evidence.version(evidence.LOOP, project.read) != about["sources"][evidence.LOOP]:
        return set(about["checks"])
    return {
        name
        for name, used in about["checks"].items()
        if evidence.check_version(used["file"], project.read) != used["version"]
    }


def verify_data(
    project: Project,
    stage: str,
    config: Mapping,
    data: DataNow,
    *,
    reaffirm: bool = False,
    waivers: Sequence[Mapping] = (),
) -> None:
    """Ask again now that the data is loaded: Refused if it is not what the gates were made from."""
    if data.identity is None:
        raise ValueError("The data is to be verified after loading, with its identity.")
    ask(project, stage, config, data, reaffirm=reaffirm, waivers=waivers)


def _examine(
    project: Project,
    gate: Mapping,
    config: Mapping,
    data: DataNow,
    before: tuple[Judgement, Mapping | None] | None,
    today: date,
) -> _Finding:
    """The first thing that is wrong with a readable gate, worst first; else `open`."""
    return (
        _outputs(project, gate)
        or _blocked(gate, today)
        or _outdated(project, gate, config, data, before)
        or _out_of_reach(data)
        or _Finding("open", _tally(gate), "See")
    )


def _outputs(project: Project, gate: Mapping) -> _Finding | None:
    folder = project.artifacts / gate["stage"]
    absent = [name for name in gate["outputs"] if not (folder / name).is_file()]
    for name, digest in gate["outputs"].items():
        if name not in absent and files.sha256_file(folder / name) != digest:
            return _Finding("tampered", f"{name} is not as recorded", "Undo the edit, or run")
    return _Finding("stale", f"{', '.join(absent)} is absent") if absent else None


def _blocked(gate: Mapping, today: date) -> _Finding | None:
    checks = blocking(gate, today)
    if not checks:
        return None
    first, on_its_day = checks[0], blocking(gate)
    because = _measured(first)
    remedy = f"Read artifacts/{gate['stage']}/report.md and mend the cause, then run"
    if first["suspect"]:
        remedy = f"{explain(Check(**row) for row in checks)} Then run"
    if first not in on_its_day:
        because += "; its waiver has expired"
        remedy = "Mend the cause or renew the waiver in configs/waivers.yaml, then run"
    if len(checks) > 1:
        because += f", and {len(checks) - 1} more"
    return _Finding("shut", because, remedy)


def _measured(check: Mapping) -> str:
    """As in "generalization_gap 0.41 > 0.3"; the check's own sentence where numbers lack."""
    name, value, limit = check["name"], check["value"], check["limit"]
    if check["verdict"] == "inconclusive":
        return f"{name} is inconclusive: {check['because'].rstrip('.')}"
    if value is None or limit is None:
        return f"{name}: {check['because'].rstrip('.')}"
    if isinstance(limit, list):
        return f"{name} {value:.4g} not within [{', '.join(_number(item) for item in limit)}]"
    sign = ">" if value > limit else "<" if value < limit else "="
    return f"{name} {value:.4g} {sign} {limit:.4g}"


def _number(value: float | None) -> str:
    return "any" if value is None else f"{value:.4g}"


def _outdated(
    project: Project,
    gate: Mapping,
    config: Mapping,
    data: DataNow,
    before: tuple[Judgement, Mapping | None] | None,
) -> _Finding | None:
    """What is no longer true of today's data, config and code, or of the gate before."""
    now = evidence.gather(project, gate["stage"], config=config, data=data)
    found = evidence.changes(gate["evidence_of"], now, project.read)
    broken, mendable = _broken_link(gate, before)
    if not found and not broken:
        return None
    shown = [change.what for change in found[:3]] or [broken]
    if len(found) > 3:
        shown.append(f"and {len(found) - 3} more")
    reaffirmable = mendable and all(change.harness for change in found)
    remedy = "Only checks or the loop changed, nothing is trained again; run"
    return _Finding("stale", "; ".join(shown), remedy if reaffirmable else "Run", reaffirmable)


def _broken_link(
    gate: Mapping, before: tuple[Judgement, Mapping | None] | None
) -> tuple[str, bool]:
    """What is wrong with the gate before ("" if nothing), and whether rerunning checks mends it:
    it does where the gate before still has the result that this one was built on."""
    if before is None:
        return "", True
    judgement, previous = before
    recorded = gate["previous"] or {"stage": None, "binding": None}
    same_binding = previous is not None and previous["binding"] == recorded["binding"]
    built_on = gate["provenance"].get("previous_result")
    same_result = same_binding or (previous is not None and result_of(previous) == built_on)
    if judgement.status not in PASSABLE:
        broken = f"'{judgement.stage}' is {judgement.status}"
        return broken, same_result and judgement.reaffirmable
    if same_binding:
        return "", True
    how = "with the same result but other checks" if same_result else "and is not the same"
    return f"'{judgement.stage}' was recorded again {how}", same_result


def _out_of_reach(data: DataNow) -> _Finding | None:
    if data.missing is None:
        return None
    because = f"the data is not on this machine: {data.missing.rstrip('.')}"
    return _Finding("unverifiable", because, "Bring the data or set data.path, then run")


def _tally(gate: Mapping) -> str:
    """As in "9 checks: 7 open, 1 warn (human_metric), 1 not_applicable"."""
    named: dict[str, list[str]] = {}
    for check in gate["checks"]:
        named.setdefault(check["verdict"], []).append(check["name"])
    parts = [
        f"{len(names)} {verdict}"
        + (f" ({', '.join(names)})" if verdict in ("warn", "shut", "inconclusive") else "")
        for verdict, names in named.items()
    ]
    return f"{len(gate['checks'])} checks: " + ", ".join(parts)


def _judgement(
    stage: str, found: _Finding, gate: Mapping | None, earlier: list[Judgement]
) -> Judgement:
    """The finding with the command that comes first: what stands before a gate is mended first."""
    command = f"python run.py stage={stage}" + (" reaffirm=true" if found.reaffirmable else "")
    remedy = found.remedy
    if found.status in PASSABLE:
        command = "python run.py"
    elif (root := _root(earlier)) is not None:
        command, remedy = root.command, root.remedy
    waivers = tuple(gate["waivers"]) if gate else ()
    warnings = tuple(c["name"] for c in gate["checks"] if c["verdict"] == "warn") if gate else ()
    return Judgement(
        stage,
        found.status,
        found.because,
        command,
        remedy,
        found.reaffirmable,
        waivers,
        warnings,
    )


def _root(judged: list[Judgement]) -> Judgement | None:
    """The first gate that must be recorded again."""
    return next((j for j in judged if j.status not in PASSABLE), None)


def _locked(project: Project, stage: str, earlier: list[Judgement]) -> str:
    last, root = earlier[-1], _root(earlier) or earlier[-1]
    lines = [
        f"Stage '{stage}' is locked: '{last.stage}' is {last.status}, {last.because} "
        f"({_relative(project, last.stage)})."
    ]
    if root.stage != last.stage:
        lines.append(f"'{root.stage}' comes first: it is {root.status}, {root.because}.")
    lines.append(f"{root.remedy}: {root.command}")
    return "\n".join(lines)


def _relative(project: Project, stage: str) -> str:
    return project.gate_path(stage).relative_to(project.root).as_posix()
