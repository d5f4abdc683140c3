"""Every planted fault and every healthy pipeline under the project's own gates.

    python bench/faults.py                 both halves; writes docs/faults.md and bench/results/
    python bench/faults.py --half chosen   one half; what is known of the other one stays
    python bench/faults.py --thin 2        one fault in two by its name, all healthy pipelines
    python bench/faults.py --only NAME     one of them, told in full, nothing written
    python bench/faults.py --page          the documents again from the rows of the last run

What a launch found is kept below build/bench-faults/, by the digest of all it depends on: an
interrupted run goes on where it stopped, and a changed check runs the gates again but no training.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict
from pathlib import Path

import faults_page
import judging
import planting
import rates
import recipes
from jobs import NUM_EPOCHS, SEEDS, Jobs, NotComparable
from recipes import Collection, Recipe

CACHE = planting.ROOT / "build" / "bench-faults"
RESULTS = planting.ROOT / "bench" / "results"
ROWS, TOTALS = RESULTS / "faults_rows.json", RESULTS / "faults.json"
PAGE = planting.ROOT / "docs" / "faults.md"


def main() -> int:
    asked = arguments().parse_args()
    collection = recipes.read(asked.folder)
    if asked.page:
        write(collection, *known(collection))
        return 0
    chosen = select(collection, asked.half, asked.only, tenth=asked.tenth, thin=asked.thin)
    with tempfile.TemporaryDirectory(prefix="bench-faults-") as folder:
        project = planting.bake(Path(folder) / "bake")
        jobs = Jobs(project, collection.folder / "bases", asked.cache)
        require_open(jobs)
        rows, failed = run(jobs, chosen, asked.jobs, with_harm=not asked.no_harm)
    for text in failed:
        print(f"\n{text}", file=sys.stderr)
    if asked.only:
        print(json.dumps(rows, indent=1))
    elif not (failed or asked.tenth or asked.no_harm):
        write(collection, *merged(collection, rows, asked.half))
    return 1 if failed else 0


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--half", choices=recipes.HALVES, help="default: both")
    parser.add_argument("--jobs", type=int, default=2, help="launches at a time")
    parser.add_argument("--only", action="append", help="a fault or pipeline; may be repeated")
    parser.add_argument("--tenth", action="store_true", help="the fixed tenth; nothing is written")
    parser.add_argument("--thin", type=int, default=1, help="one fault in so many, by its name")
    parser.add_argument("--no-harm", action="store_true", help="gates alone; nothing is written")
    parser.add_argument(
        "--page", action="store_true", help="write the documents again, run nothing"
    )
    parser.add_argument("--folder", type=Path, default=recipes.FOLDER)
    parser.add_argument("--cache", type=Path, default=CACHE)
    return parser


def select(
    collection: Collection,
    half: str | None,
    only: list[str] | None,
    *,
    tenth: bool = False,
    thin: int = 1,
) -> list[Recipe]:
    """What to run. Raises SystemExit for a name that is not there."""
    found = [*collection.faults, *collection.healthy]
    if absent := set(only or ()) - {recipe.id for recipe in found}:
        raise SystemExit(f"There is no fault or pipeline {', '.join(sorted(absent))}.")
    found = [r for r in found if half in (None, r.half) and (not only or r.id in only)]
    found = [r for r in found if not tenth or recipes.in_tenth(r.id)]
    return [r for r in found if r.kind == "healthy" or recipes.in_thinned(r.id, thin)]


# ---- running ------------------------------------------------------------------------------------


def row_of(jobs: Jobs, recipe: Recipe, *, with_harm: bool = True) -> dict:
    """Everything the documents need of one fault or healthy pipeline, launched where needed."""
    facts, audit = jobs.gate(recipe)
    if recipe.kind == "healthy":
        return judging.gate_row(recipe, facts, audit)
    clean, _ = jobs.gate(recipes.clean_of(recipe))
    row = judging.gate_row(recipe, facts, audit, clean)
    if with_harm:
        row["harm"] = asdict(jobs.harm(recipe))
    return row


def require_open(jobs: Jobs) -> None:
    """Raises SystemExit if the project's gate does not open as it is: nothing could be told."""
    facts, _ = jobs.gate(Recipe("as it is", "healthy", "chosen"))
    if judging.outcome(facts) != "open":
        raise SystemExit(f"The project as it is has a gate that does not open: {facts['because']}")


def run(
    jobs: Jobs,
    chosen: list[Recipe],
    num_jobs: int,
    *,
    with_harm: bool = True,
    tell: Callable[[str], None] = print,
) -> tuple[list[dict], list[str]]:
    """The rows, and what is wrong with recipes that cannot be planted or compared."""
    rows, failed, started = [], [], time.perf_counter()
    with ThreadPoolExecutor(num_jobs) as pool:
        futures = {pool.submit(row_of, jobs, r, with_harm=with_harm): r for r in chosen}
        try:
            for place, future in enumerate(as_completed(futures), 1):
                passed = time.perf_counter() - started
                where = f"[{place:3d}/{len(chosen)}] {passed:5.0f} s  {futures[future].id}"
                try:
                    rows.append(future.result())
                except (ValueError, NotComparable) as error:
                    failed.append(str(error))
                    tell(f"{where}: FAILED")
                else:
                    tell(f"{where}: {told(rows[-1])}")
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
    return sorted(rows, key=lambda row: row["id"]), failed


def told(row: dict) -> str:
    """One line about one row."""
    first = f" {row['first']}" if row["first"] else ""
    text = f"{row['outcome']}{first}, {row['seconds']:.1f} s"
    if "alarm" in row:
        return f"{text}, healthy" + (": FALSE ALARM" if row["alarm"] else "")
    if row["clean_outcome"] != "open":
        text += f", {row['clean_outcome']} without the fault, too"
    elif row["detected"] and not row["named"]:
        text += f", expected {' or '.join(row['expected'])}"
    harm = row.get("harm")
    return text + (f", harm: {harm['direction']}" if harm else "")


# ---- writing ------------------------------------------------------------------------------------


def known(collection: Collection) -> tuple[list[dict], list[dict]]:
    """The rows of earlier runs, of faults and of healthy pipelines that still exist."""
    if not ROWS.exists():
        return [], []
    rows = json.loads(ROWS.read_text(encoding="utf-8"))
    alive = {recipe.id for recipe in [*collection.faults, *collection.healthy]}
    return tuple([r for r in rows[kind] if r["id"] in alive] for kind in ("faults", "healthy"))


def merged(
    collection: Collection, rows: list[dict], half: str | None
) -> tuple[list[dict], list[dict]]:
    """The rows of this run, and of earlier ones those of the half that was not asked for."""
    others = [[r for r in found if half not in (None, r["half"])] for found in known(collection)]
    new = [[r for r in rows if "alarm" not in r], [r for r in rows if "alarm" in r]]
    return tuple(
        sorted([*old, *found], key=lambda row: row["id"])
        for old, found in zip(others, new, strict=True)
    )


def write(collection: Collection, faults: list[dict], healthy: list[dict]) -> None:
    """The rows, the totals and the page, and the totals in words."""
    RESULTS.mkdir(parents=True, exist_ok=True)
    parts = [
        f'"{name}": {_lines(rows)}' for name, rows in [("faults", faults), ("healthy", healthy)]
    ]
    totals = rates.totals(faults, healthy)
    about = {"seeds": len(SEEDS), "epochs": NUM_EPOCHS, "written": len(collection.faults)}
    text = faults_page.page(faults, healthy, list(collection.impossible), **about)
    _write(ROWS, "{" + ",\n".join(parts) + "}\n")
    _write(TOTALS, json.dumps(totals, indent=2) + "\n")
    _write(PAGE, text)
    for half, row in totals.items():
        print(f"\n{half}: detected {rates.share(row['detected'], row['harmful'])}")
        print(f"  named {rates.share(row['named'], row['harmful'])}")
        print(f"  false alarms {rates.share(row['false_alarms'], row['healthy'])}")
        print(f"  median {row['median_s']:.1f} CPU seconds")


def _lines(rows: Iterable[dict]) -> str:
    """A JSON list with a row to a line, so that a change of one shows as one."""
    return "[\n" + ",\n".join(json.dumps(row, ensure_ascii=False) for row in rows) + "\n]"


def _write(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8", newline="\n")


if __name__ == "__main__":
    sys.exit(main())
