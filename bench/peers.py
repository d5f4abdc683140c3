"""The same faults and healthy pipelines under two other checks, beside this project's own gate.

    python bench/peers.py                 both halves, as far as bench/faults.py has run them
    python bench/peers.py --half chosen   one half; what is known of the other one stays
    python bench/peers.py --only NAME     one of them, told in full, nothing written
    python bench/peers.py --page          the table again from the rows of the last run

The peers are neural_net_checklist 1.1.0 and a plain "overfit one batch, look at the loss";
peers_worker.py says how they are asked and what they cannot be given. Only faults that
bench/faults.py found harmful are run; its figures of the gate are those of the same ones.

A fault is detected if an assertion fails that does not fail in the same pipeline without the fault;
an exception is a failure, and so is no answer within the time limit. Its cause is named if any such
assertion points, by `CAUSES`, to a check that was expected of the fault. A false alarm is a healthy
pipeline on which any assertion fails. A fault is not taken if all that it is about is in
`NOT_HANDED`, and nothing failed all the same. Launches are kept below build/bench-peers/.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor, as_completed
from importlib import metadata
from pathlib import Path

import faults
import faults_page
import planting
import rates
import recipes
from jobs import Jobs, _hand_over, _json, _message, _read
from recipes import HALVES, Recipe, clean_of

WORKER = Path(__file__).with_name("peers_worker.py")
CACHE = planting.ROOT / "build" / "bench-peers"
TOTALS, ROWS = faults_page.PEERS, faults.RESULTS / "peers_rows.json"
LIMIT_S = 180
GATE, CHECKLIST, OVERFIT = "gate", "neural_net_checklist", "overfit_one_batch"
PEERS = (CHECKLIST, OVERFIT)

# Assertion -> checks of this project of which it tells the cause. In the peers' favour: where an
# assertion says less than a check, it still counts as having named what the check would name.
_AT_INIT = {"loss_at_init", "loss_contract", "prior_bias"}
_NOTHING_LEARNED = {"overfit_one_batch", "trainable_parameters", "update_ratio"}
CAUSES = {
    "loss_at_init": _AT_INIT,
    "init_calibrated": _AT_INIT,
    "forward_batch_independence": {"sample_boundary", "axis_identity", "modes"},
    "forward_causal_property": {"sample_boundary"},
    "non_zero_gradients": {"trainable_parameters"},
    "backward_batch_independence": {"sample_boundary", "axis_identity", "field_influence"},
    "input_independent_baseline_worse": {"input_independent_baseline", "field_influence"},
    "overfit_to_batch": _NOTHING_LEARNED,
    "overfit_one_batch": _NOTHING_LEARNED,
}
# Checks that look at parts of a pipeline which the peer has no place for.
_ANYWHERE = {"split_hygiene", "split_parity", "human_metric", "confusion"}
_ANYWHERE |= {"modes", "schedule", "best_checkpoint", recipes.REFUSED}
NOT_HANDED = {
    CHECKLIST: _ANYWHERE | {"step_oracle", "update_ratio", "precision"},
    OVERFIT: _ANYWHERE,
}


def main() -> int:
    asked = arguments().parse_args()
    gate = {} if asked.only else gate_rows()
    rows = {row["id"]: row for row in known()}
    if not asked.page:
        rows |= run(asked, gate)
    if asked.only:
        print(json.dumps([rows[name] for name in asked.only], indent=1))
        return 0
    write([row for name, row in sorted(rows.items()) if name in gate], gate)
    return 0


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--half", choices=HALVES, help="default: both")
    parser.add_argument("--jobs", type=int, default=2, help="launches at a time")
    parser.add_argument("--only", action="append", help="a fault or pipeline; may be repeated")
    parser.add_argument("--page", action="store_true", help="the table again, run nothing")
    parser.add_argument("--folder", type=Path, default=recipes.FOLDER)
    parser.add_argument("--cache", type=Path, default=CACHE)
    return parser


def gate_rows() -> dict[str, dict]:
    """id -> what the project's own gate did: of the harmful faults, and of healthy pipelines."""
    if not faults.ROWS.exists():
        raise SystemExit(
            f"{faults.ROWS.name} is not there: which faults do harm is not known. "
            "Run first: python bench/faults.py"
        )
    rows = _json(faults.ROWS)
    return {row["id"]: row for row in [*rates.harmful(rows["faults"]), *rows["healthy"]]}


def known() -> list[dict]:
    return _json(ROWS) if ROWS.exists() else []


# ---- running ------------------------------------------------------------------------------------


class PeerJobs(Jobs):
    """Launches of the peers, remembered as those of the gate are."""

    def peers(self, recipe: Recipe) -> dict:
        """What peers_worker.py left; without results where the audit handed nothing over."""
        handoff = self.audited(recipe)
        if recipe.stage == "data_audit" or not _read(handoff)["handed_over"]:
            return {"results": None}

        def launch(project: Path, folder: Path) -> dict:
            _hand_over(handoff, project)
            out = project / "peers.json"
            asked = {"package": project.name, "overrides": recipe.overrides, "out": str(out)}
            words = [str(WORKER), json.dumps(asked)]
            done = planting.run(words, project, LIMIT_S)
            found = _json(out) if out.exists() else {"results": {}, "running": None}
            ended = done.code == 0
            said = f"no answer in {LIMIT_S} s" if done.timed_out else _message(done, project)
            return found | {"ended": ended, "said": said, "seconds": done.seconds}

        about = [recipe.edits, recipe.overrides, handoff.name, LIMIT_S]
        about += [WORKER.read_text(encoding="utf-8"), metadata.version(CHECKLIST)]
        key = planting.digest("peers", self.training_sources, self._base(recipe), *about)
        return _read(self._cached(f"peers-{key}", recipe, launch))

    def row(self, recipe: Recipe) -> dict:
        found = self.peers(recipe)
        row = {"id": recipe.id, "kind": recipe.kind, "half": recipe.half}
        if recipe.kind == "healthy":
            return row | {peer: alarm(found, peer) for peer in PEERS}
        clean = self.peers(clean_of(recipe))
        return row | {peer: judged(recipe, found, clean, peer) for peer in PEERS}


def run(asked: argparse.Namespace, gate: dict[str, dict]) -> dict[str, dict]:
    """id -> row, of those that were asked for and, unless by name, are known to the gate."""
    try:
        metadata.version(CHECKLIST)
    except metadata.PackageNotFoundError:
        raise SystemExit(f"{CHECKLIST} is not installed. Run: make bench-peers") from None
    collection = recipes.read(asked.folder)
    chosen = faults.select(collection, asked.half, asked.only, tenth=False)
    chosen = [recipe for recipe in chosen if asked.only or recipe.id in gate]
    rows = {}
    with tempfile.TemporaryDirectory(prefix="bench-peers-") as folder:
        project = planting.bake(Path(folder) / "bake")
        jobs = PeerJobs(project, collection.folder / "bases", asked.cache)
        with ThreadPoolExecutor(asked.jobs) as pool:
            futures = [pool.submit(jobs.row, recipe) for recipe in chosen]
            try:
                for place, future in enumerate(as_completed(futures), 1):
                    row = future.result()
                    rows[row["id"]] = row
                    print(f"[{place:3d}/{len(chosen)}] {row['id']}: {told(row)}", flush=True)
            except BaseException:
                pool.shutdown(cancel_futures=True)
                raise
    return rows


def told(row: dict) -> str:
    """One line about one row."""
    said = [f"{peer} {', '.join(row[peer]['failed']) or 'passes'}" for peer in PEERS]
    return "; ".join(said)


# ---- judging ------------------------------------------------------------------------------------


def failures(found: dict, peer: str) -> dict[str, str]:
    """assertion -> what it said, of those that failed or did not end."""
    if found["results"] is None:
        return {}
    rows = found["results"].get(peer, [])
    failed = {row["name"]: row["said"] for row in rows if not row["passed"]}
    if found["ended"]:
        return failed
    if found["running"] is None:  # it ended before there was a pipeline to ask about
        return {"pipeline": found["said"]}
    if peer not in found["results"]:  # the other one was asked first, and did not end
        return {"pipeline": found["said"]}
    where, name = found["running"]
    return failed | ({name: found["said"]} if where == peer else {})


def seconds(found: dict, peer: str) -> float | None:
    """CPU seconds from the start of the process, as if this peer had been alone in it."""
    if found["results"] is None:
        return None
    if not found["ended"] and (found["running"] or [peer])[0] == peer:
        other = [row for name in PEERS if name != peer for row in found["results"].get(name, [])]
        return round(found["seconds"] - sum(row["seconds"] for row in other), 2)
    spent = sum(row["seconds"] for row in found["results"].get(peer, []))
    return round(found["setup_s"] + spent, 2)


def alarm(found: dict, peer: str) -> dict:
    failed = failures(found, peer)
    return {"alarm": bool(failed), "failed": failed, "seconds": seconds(found, peer)}


def judged(recipe: Recipe, found: dict, clean: dict, peer: str) -> dict:
    """A fault's row of one peer; `clean`: the launch of the same pipeline without the fault."""
    before = failures(clean, peer)
    failed = {name: said for name, said in failures(found, peer).items() if name not in before}
    causes = {cause for name in failed for cause in CAUSES.get(name, ())}
    handed = found["results"] is not None and not NOT_HANDED[peer].issuperset(recipe.expected)
    return {
        "taken": handed or bool(failed),
        "detected": bool(failed),
        "named": not causes.isdisjoint(recipe.expected),
        "failed": failed,
        "seconds": seconds(found, peer),
    }


# ---- the table ----------------------------------------------------------------------------------


def totals(rows: Iterable[dict], gate: dict[str, dict]) -> dict[str, dict]:
    """half -> who -> figures, all over the same faults and pipelines: the harmful faults, those
    taken, detected, named; healthy pipelines, false alarms; median CPU seconds."""
    found = {}
    for half in HALVES:
        mine = [row | {GATE: gate[row["id"]]} for row in rates.of_half(rows, half)]
        if mine:
            found[half] = {who: figures(mine, who) for who in (GATE, *PEERS)}
    return found


def figures(rows: list[dict], who: str) -> dict:
    harms = [row[who] for row in rows if row["kind"] == "fault"]
    well = [row[who] for row in rows if row["kind"] == "healthy"]
    spent = [row["seconds"] for row in [*harms, *well] if row["seconds"] is not None]
    return {
        "harmful": len(harms),
        "taken": sum(row.get("taken", True) for row in harms),
        "detected": sum(row["detected"] for row in harms),
        "named": sum(row["named"] for row in harms),
        "healthy": len(well),
        "false_alarms": sum(row["alarm"] for row in well),
        "median_s": round(statistics.median(spent), 2) if spent else None,
    }


def write(rows: list[dict], gate: dict[str, dict]) -> None:
    """The rows, a line each, and the totals; the table on the screen."""
    lines = ",\n".join(json.dumps(row, ensure_ascii=False) for row in rows)
    found = totals(rows, gate)
    for path, text in ((ROWS, f"[\n{lines}\n]\n"), (TOTALS, json.dumps(found, indent=2) + "\n")):
        path.write_text(text, encoding="utf-8", newline="\n")
    print(faults_page.peers_section(found))


if __name__ == "__main__":
    sys.exit(main())
