"""What the owner lets pass with a reason: waived checks, and limits loosened at the command."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from datetime import date

KEYS = ("check", "stage", "reason", "expires")
BLOCKING = ("shut", "inconclusive")


def active_waivers(waivers: Iterable[Mapping], today: date | None = None) -> list[dict]:
    """The waivers of configs/waivers.yaml that have not expired; the last day still counts.

    Raises ValueError, saying what to write, for an unknown key, no check, no reason or a date that
    is not ISO.
    """
    today = today or date.today()
    read = [_waiver(entry) for entry in waivers]
    return [waiver for waiver in read if not expired(waiver, today)]


def expired(waiver: Mapping, today: date) -> bool:
    return waiver["expires"] is not None and date.fromisoformat(waiver["expires"]) < today


def applied(stage: str, checks: Sequence[Mapping], waivers: Iterable[Mapping]) -> list[dict]:
    """Entries for gate.json: the waivers this stage's shut or inconclusive checks need."""
    needed = {check["name"] for check in checks if check["verdict"] in BLOCKING}
    return [
        {"kind": "waiver", **waiver, "stage": stage}
        for waiver in waivers
        if waiver["check"] in needed and waiver["stage"] in (None, stage)
    ]


def loosened_limits(stage: str, loosened: Iterable[Mapping]) -> list[dict]:
    """Entries for gate.json of limits that the command line moved away from the shipped value."""
    return [
        {
            "kind": "limit",
            "stage": stage,
            "limit": str(entry["limit"]),
            "shipped": entry["shipped"],
            "value": entry["value"],
        }
        for entry in loosened
    ]


def blocking(gate: Mapping, today: date | None = None) -> list[dict]:
    """The checks that keep a gate shut: shut or inconclusive, with no waiver that still runs.

    `today` None: waivers count whatever their date, as on the day the gate was recorded.
    """
    waived = {
        entry["check"]
        for entry in gate["waivers"]
        if entry["kind"] == "waiver"
        and entry["stage"] == gate["stage"]
        and not (today and expired(entry, today))
    }
    return [
        check
        for check in gate["checks"]
        if check["verdict"] in BLOCKING and check["name"] not in waived
    ]


def _waiver(entry: Mapping) -> dict:
    """One entry with all its keys: {"check", "stage" or None, "reason", "expires" ISO or None}."""
    if not isinstance(entry, Mapping):
        raise ValueError(
            f"configs/waivers.yaml: {entry!r} is not a waiver; write check and reason."
        )
    for key in entry:
        if key not in KEYS:
            near = difflib.get_close_matches(str(key), KEYS, n=1) or [", ".join(KEYS)]
            raise ValueError(f"configs/waivers.yaml: unknown key {key!r}; did you mean {near[0]}?")
    check, reason = (str(entry.get(key) or "").strip() for key in ("check", "reason"))
    if not check:
        raise ValueError("configs/waivers.yaml: a waiver names no check; write check: NAME.")
    if not reason:
        raise ValueError(
            f"configs/waivers.yaml: the waiver of {check} has no reason; write why it may pass."
        )
    stage, expires = entry.get("stage"), entry.get("expires")
    try:
        expires = None if expires is None else date.fromisoformat(str(expires)).isoformat()
    except ValueError:
        raise ValueError(
            f"configs/waivers.yaml: the waiver of {check} expires {expires!r}, which is no date; "
            "write it as 2030-12-31."
        ) from None
    return {"stage": stage, "check": check, "reason": reason, "expires": expires}
