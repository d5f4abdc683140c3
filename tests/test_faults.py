"""The planted faults and healthy pipelines: their form, how they are judged, and a tenth of them
under the project's own gates."""

import json
import shutil
import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
from bakes import ROOT, files_of

sys.path.insert(0, str(ROOT / "bench"))  # its files are run as scripts and import each other

import faults as bench
import faults_page
import judging
import peers
import planting
import rates
import recipes
from jobs import Jobs, NotComparable
from recipes import Edit, Recipe

KNOWN_NAMES = """
import importlib, json, pathlib
package = pathlib.Path.cwd().name
catalogue = importlib.import_module(f"{package}.harness.checks.catalogue")
audit = importlib.import_module(f"{package}.harness.audit")
print(json.dumps([*(check.__name__ for check in catalogue.SKELETON), *audit.AXES, "statement"]))
"""
OTHER_NAMES = {"finite_loss", recipes.REFUSED}  # of a loss that is no number, of a refused launch


@pytest.fixture(scope="module")
def collection():
    return recipes.read()


@pytest.fixture
def jobs(default_project, tmp_path):
    return Jobs(default_project, tmp_path / "bases", tmp_path / "cache")


def fault(**changed) -> dict:
    row = {
        "id": "a_fault",
        "source": ["M01"],
        "base": "digits",
        "edits": [{"file": "model.py", "old": "a", "new": "b"}],
        "stage": "skeleton",
        "expected": ["loss_contract"],
        "failure_mode": "optimization",
        "why": "It is one.",
    }
    return row | changed


def facts(code=0, checks=(), repair=None, **changed) -> dict:
    row = {
        "code": code,
        "timed_out": False,
        "traceback": False,
        "message": "",
        "because": "",
        "checks": [{"name": name, "verdict": verdict} for name, verdict in checks],
        "repair": repair,
        "seconds": 7.0,
        "wall_s": 8.0,
    }
    return row | changed


SHUT = facts(
    3, [("modes", "open"), ("loss_contract", "shut"), ("symmetry", "shut")], "loss_contract"
)

# ---- the recipes --------------------------------------------------------------------------------


def test_every_recipe_has_the_form_and_a_name_of_its_own(collection):
    print(f"{len(collection.faults)} faults, {len(collection.healthy)} healthy pipelines")
    assert len(collection.faults) >= 120
    assert len(collection.healthy) >= 150


def test_every_edit_applies_exactly_once_to_a_fresh_project(collection, default_project, tmp_path):
    projects = {recipes.BASE: default_project}
    for recipe in [*collection.faults, *collection.healthy]:
        if recipe.base not in projects:
            folder = tmp_path / recipe.base / default_project.name
            shutil.copytree(default_project, folder, ignore=planting.LEFT_OUT)
            planting.overlay(collection.folder / "bases" / recipe.base, folder)
            projects[recipe.base] = folder
        for edits in (recipe.edits, recipe.clean_edits):
            texts = planting.edited(projects[recipe.base], edits, recipe.id)
            for path, text in texts.items():
                if path.suffix == ".py":
                    compile(text, path, "exec")


def test_every_expected_check_is_one_of_the_project(collection, default_project):
    words = [sys.executable, "-B", "-c", KNOWN_NAMES]
    done = subprocess.run(words, cwd=default_project, capture_output=True, text=True, check=True)
    known = {*json.loads(done.stdout), *OTHER_NAMES}
    strange = {(r.id, name) for r in collection.faults for name in r.expected if name not in known}
    assert strange == set()


def test_the_name_alone_decides_half_and_tenth():
    names = [f"fault_{number}" for number in range(2000)]
    halves = [recipes.half_of(name) for name in names]
    assert 900 < halves.count("chosen") < 1100
    for half in recipes.HALVES:
        mine = [name for name, other in zip(names, halves, strict=True) if other == half]
        assert 70 < sum(map(recipes.in_tenth, mine)) < 130


@pytest.mark.parametrize(
    ("row", "said"),
    [
        (fault(id="No Snake"), "snake_case"),
        (fault(source=["1M"]), "no letter and number"),
        (fault(stage="overfit"), "none of"),
        (fault(failure_mode="bad luck"), "failure mode"),
        (fault(expected=[]), "of no check"),
        (fault(edits=[]), "changes nothing"),
        (fault(edits=[{"file": "model.py", "old": "a"}]), "other keys"),
        (fault(half="chosen"), "not known"),
        (fault(clean={"stage": "overfit"}), "not known"),
        ({"id": "cannot", "impossible": "no such thing"}, "no source"),
    ],
)
def test_what_is_wrong_with_a_fault_is_said(row, said):
    (found,) = recipes.problems([row], [], {})
    assert said in found
    assert row["id"] in found


def test_what_is_wrong_with_a_healthy_pipeline_is_said():
    row = {"id": "h", "half": "third", "stage": "skeleton", "use": ["what"], "overrides": []}
    found = recipes.problems([fault(), fault()], [row], {})
    assert [any(word in text for text in found) for word in ("third", "what", "twice")] == [
        True
    ] * 3


def test_settings_that_are_no_fault_stay_in_the_clean_pipeline():
    setting = ("stage.models=[ConvNet]", "optimizer.lr=10")
    assert recipes.not_the_fault([{"file": "model.py"}], setting) == setting
    assert recipes.not_the_fault([], setting) == setting[:1]


def test_a_base_that_is_not_there_is_said(tmp_path):
    (tmp_path / "a.json").write_text(json.dumps([fault(base="tokens")]), encoding="utf-8")
    with pytest.raises(ValueError, match="base tokens is no folder"):
        recipes.read(tmp_path)


# ---- planting -----------------------------------------------------------------------------------


def test_edits_are_made_one_after_the_other_and_may_add_a_file(default_project):
    edits = (
        Edit("model.py", "class Linear(nn.Module)", "class Plain(nn.Module)"),
        Edit("model.py", "class Plain(nn.Module)", "class Plainer(nn.Module)"),
        Edit("configs/model/new.yaml", "", "name: Plainer\n"),
    )
    found = planting.edited(default_project, edits, "x")
    assert [path.name for path in found] == ["model.py", "new.yaml"]
    assert "class Plainer(nn.Module)" in next(iter(found.values()))


@pytest.mark.parametrize(
    ("edit", "said"),
    [
        (Edit("model.py", "import", "x"), r"^a_name: 'import' stands \d+ times in model.py"),
        (Edit("model.py", "no such line", "x"), "stands 0 times"),
        (Edit("model.py", "", "x"), "stands 0 times"),
        (Edit("mdel.py", "a", "x"), "mdel.py is not there"),
    ],
)
def test_an_edit_that_does_not_fit_names_its_fault(default_project, edit, said):
    with pytest.raises(ValueError, match=said):
        planting.edited(default_project, [edit], "a_name")


def test_a_planted_copy_has_base_and_edits_and_leaves_the_project_alone(default_project, tmp_path):
    for name in ("configs/data/mine.yaml", "prepare.py", "task.py"):
        path = tmp_path / "bases" / "mine" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"# {name}\n", encoding="utf-8")
    before = {path: (default_project / path).read_bytes() for path in files_of(default_project)}
    recipe = Recipe("x", "fault", "chosen", (Edit("task.py", "task.py", "it"),), base="mine")
    with planting.planted(default_project, recipe, tmp_path / "bases") as copy:
        assert (copy / copy.name / "task.py").read_text(encoding="utf-8") == "# it\n"
        assert (copy / "prepare.py").exists() and (copy / "configs/data/mine.yaml").exists()
        assert not (copy / ".git").exists()
    assert not copy.exists()
    assert before == {path: (default_project / path).read_bytes() for path in before}


def script(folder, text):
    (folder / "script.py").write_text(text, encoding="utf-8")
    return ["script.py", "asked"]


def test_a_script_is_measured_in_cpu_seconds_and_ended_at_its_limit(tmp_path):
    busy = "import time\nstart = time.process_time()\nwhile time.process_time() < start + 0.3: pass"
    done = planting.run(script(tmp_path, busy), tmp_path, 30)
    assert (done.code, done.timed_out) == (0, False)
    assert 0.3 <= done.seconds < 2
    done = planting.run(script(tmp_path, "import time; time.sleep(60)"), tmp_path, 0.5)
    assert done.timed_out and done.code < 0
    assert done.wall_s < 10


def test_a_script_ends_and_speaks_as_in_an_interpreter_of_its_own(tmp_path):
    told = "import sys, os; print(sys.argv[1], os.getcwd()); sys.exit(3)"
    done = planting.run(script(tmp_path, told), tmp_path, 30)
    assert (done.code, done.stdout) == (3, f"asked {tmp_path.resolve()}\n")
    done = planting.run(script(tmp_path, "1 / 0"), tmp_path, 30)
    assert done.code == 1 and "ZeroDivisionError" in done.stderr
    assert planting.run(script(tmp_path, "pass"), tmp_path, 30).stderr == ""


# ---- judging a gate -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("launch", "expected"),
    [
        (facts(0, [("modes", "open")]), "open"),
        (SHUT, "shut"),
        (facts(3, [("modes", "inconclusive")], "modes"), "inconclusive"),
        (facts(1, message="optimizer.lr=-1 must be above 0."), "refused"),
        (facts(1, message="ValueError: x", traceback=True), "crashed"),
        (facts(1), "crashed"),
        (facts(-11), "crashed"),
        (facts(-9, timed_out=True), "timeout"),
    ],
)
def test_the_outcome_follows_from_exit_code_and_words(launch, expected):
    assert judging.outcome(launch) == expected


@pytest.mark.parametrize(
    ("launch", "clean", "detected", "named"),
    [
        (SHUT, facts(), True, True),
        (SHUT | {"repair": "symmetry"}, facts(), True, False),
        (facts(), facts(), False, False),
        (facts(1, message="No.", traceback=True), facts(), False, False),
        (facts(1, message="No."), facts(), True, False),
        (facts(-9, timed_out=True), facts(), False, False),
        (SHUT, SHUT, False, False),  # shut without the fault, too
    ],
)
def test_a_fault_is_detected_and_named_by_what_the_report_says_first(
    launch, clean, detected, named
):
    recipe = Recipe("x", "fault", "chosen", expected=("loss_contract",))
    row = judging.gate_row(recipe, launch, None, clean)
    assert (row["detected"], row["named"]) == (detected, named)


@pytest.mark.parametrize("launch", [SHUT, facts(1, message="No."), facts(1, traceback=True)])
def test_anything_but_an_open_gate_is_an_alarm_on_a_healthy_pipeline(launch):
    recipe = Recipe("x", "healthy", "chosen")
    assert judging.gate_row(recipe, launch)["alarm"]
    assert not judging.gate_row(recipe, facts())["alarm"]


# ---- judging the harm ---------------------------------------------------------------------------


def trained(metrics, losses=(0.1, 0.1, 0.1), direction="max", bounds=(0.0, 1.0)) -> dict:
    rows = [{"metric": m, "loss": x} for m, x in zip(metrics, losses, strict=True)]
    return {"name": "accuracy", "direction": direction, "bounds": bounds, "rows": rows}


CLEAN = trained((0.95, 0.96, 0.97))


@pytest.mark.parametrize(
    ("faulty", "expected"),
    [
        (CLEAN, "none"),
        (trained((0.945, 0.955, 0.965)), "none"),  # half a point is below the smallest gap
        (trained((0.90, 0.99, 0.93)), "none"),  # 2 points, but seeds differ by more
        (trained((0.90, 0.91, 0.92)), "worse"),
        (trained((0.999, 0.999, 0.999)), "looks better"),
        (trained((0.95, 0.96, 0.97), (0.2, 0.2, 0.2)), "worse"),
        (trained((0.95, 0.96, 0.97), (0.05, 0.05, 0.05)), "looks better"),
        (trained((0.95, None, 0.97), (0.1, None, 0.1)), "diverges"),
        ({"crashed": "RuntimeError"}, "crashes"),
    ],
)
def test_harm_is_a_moved_metric_a_moved_loss_or_no_end(faulty, expected):
    found = judging.harm(CLEAN, faulty)
    assert found.direction == expected
    assert found.harmful == (expected != "none")


def test_harm_reads_direction_and_range_of_the_metric():
    clean = trained((100.0, 100.0, 100.0), direction="min", bounds=(0.0, float("inf")))
    assert not judging.harm(clean, trained((100.9,) * 3)).harmful
    assert judging.harm(clean, trained((103.0,) * 3)).direction == "worse"
    assert judging.harm(clean, trained((97.0,) * 3)).direction == "looks better"


# ---- rates and the page -------------------------------------------------------------------------


def row(
    name, half="chosen", harmful=True, outcome="shut", first="loss_contract", **changed
) -> dict:
    detected = outcome in ("shut", "inconclusive")
    harm = {"harmful": harmful, "direction": "worse" if harmful else "none"}
    harm |= {"clean_metric": 0.96, "metric": 0.5, "clean_loss": 0.1, "loss": None}
    found = judging.gate_row(
        Recipe(name, "fault", half, expected=("loss_contract",), source=("M01",), why="It`s so."),
        facts(),
    )
    found |= {"outcome": outcome, "first": first if detected else None, "detected": detected}
    found |= {"named": detected and first == "loss_contract", "shut": [first] if detected else []}
    return found | {"harm": harm} | changed


def healthy(name, half="chosen", alarm=False) -> dict:
    launch = facts(3, [("modes", "shut")], "modes") if alarm else facts()
    return judging.gate_row(Recipe(name, "healthy", half), launch)


ROWS = [
    row("a"),
    row("b", first="symmetry"),
    row("c", outcome="open"),
    row("harmless", harmful=False),
    row("loud", outcome="crashed"),
    row("f", half="frozen"),
]
HEALTHY = [healthy("h"), healthy("i", alarm=True), healthy("j", half="frozen")]


def test_the_interval_is_wilsons():
    low, high = rates.interval(57, 60)
    assert (round(low, 3), round(high, 3)) == (0.863, 0.983)
    assert rates.interval(0, 0) == (0.0, 1.0)
    assert rates.share(57, 60) == "57 of 60, 95.0 % (86.3 to 98.3)"


def test_totals_count_harmful_silent_faults_half_by_half():
    found = rates.totals(ROWS, HEALTHY)
    assert found["chosen"] == {
        "harmful": 3,
        "detected": 2,
        "named": 1,
        "healthy": 2,
        "false_alarms": 1,
        "median_s": 7.0,
    }
    assert found["frozen"]["harmful"] == found["frozen"]["named"] == 1
    assert list(rates.totals(rates.of_half(ROWS, "chosen"), [])) == ["chosen"]


def test_each_check_has_its_hits_its_mistakes_and_its_alarms():
    found = {c.name: c for c in rates.per_check(ROWS, HEALTHY)}
    contract = found["loss_contract"]
    assert (contract.expected, contract.hits, contract.first, contract.misnamed) == (4, 2, 2, 0)
    assert (found["symmetry"].expected, found["symmetry"].misnamed) == (0, 1)
    assert found["modes"].false_alarms == 1


def test_the_page_says_what_was_missed_and_sets_only_names_of_checks_as_code():
    impossible = [{"id": "cannot", "source": ["M02"], "impossible": "there is none"}]
    text = faults_page.page(ROWS, HEALTHY, impossible, seeds=3, epochs=8, written=12)
    assert "6 of 12 faults were run" in text
    missed = text.split("## What was not caught")[1].split("## ")[0]
    assert "- c (chosen): It s so." in missed
    assert "| b | chosen | `symmetry` | `loss_contract` |" in missed
    assert "| i | chosen | shut |" in text and "there is none" in text
    code = set(text.split("`")[1::2])
    settings = {"make bench-faults", "tests/faults/", "bench/results/faults.json"}
    assert code - settings == {"loss_contract", "symmetry", "modes"}


def test_a_run_of_one_half_keeps_what_is_known_of_the_other(tmp_path, monkeypatch, collection):
    monkeypatch.setattr(bench, "ROWS", tmp_path / "rows.json")
    some = SimpleNamespace(
        faults=[Recipe("a", "fault", "chosen"), Recipe("f", "fault", "frozen")], healthy=[]
    )
    old = [row("a"), row("f", half="frozen"), row("gone", half="frozen")]
    text = f'{{"faults": {bench._lines(old)}, "healthy": {bench._lines([])}}}'
    bench.ROWS.write_text(text, encoding="utf-8")
    new = row("a", outcome="open")
    assert bench.merged(some, [new], "chosen") == ([new, old[1]], [])
    assert bench.merged(some, [new], None) == ([new], [])


# ---- the peers ----------------------------------------------------------------------------------


def asked(*failed, peer=peers.CHECKLIST, **changed) -> dict:
    """What a launch of the peers leaves, with these assertions of one peer failed."""
    names = ("non_zero_gradients", "overfit_to_batch")
    rows = {
        name: [{"name": n, "passed": (name, n) not in [(peer, f) for f in failed]} for n in names]
        for name in peers.PEERS
    }
    for row in (row for found in rows.values() for row in found):
        row |= {"said": None if row["passed"] else "It failed.", "seconds": 2.0}
    whole = {"results": rows, "running": None, "ended": True, "said": "", "setup_s": 3.0}
    return whole | {"seconds": 11.0} | changed


LATE = {"running": [peers.CHECKLIST, "overfit_to_batch"], "ended": False, "said": "no answer"}


@pytest.mark.parametrize(
    ("found", "clean", "detected", "named"),
    [
        (asked(), asked(), False, False),
        (asked("non_zero_gradients"), asked(), True, True),
        (asked("overfit_to_batch"), asked(), True, True),
        (asked("non_zero_gradients"), asked("non_zero_gradients"), False, False),
        (asked("non_zero_gradients", peer=peers.OVERFIT), asked(), False, False),
        (asked(**LATE), asked(), True, True),  # it never learns, and does not give up
        (asked(**LATE), asked(**LATE), False, False),
        (asked(results={}, ended=False, said="No."), asked(), True, False),
        ({"results": None}, asked(), False, False),
    ],
)
def test_a_peer_detects_what_fails_only_with_the_fault(found, clean, detected, named):
    recipe = Recipe("x", "fault", "chosen", expected=("trainable_parameters",))
    row = peers.judged(recipe, found, clean, peers.CHECKLIST)
    assert (row["detected"], row["named"]) == (detected, named)
    assert row["taken"] == (found["results"] is not None)


def test_a_peer_does_not_take_what_it_has_no_place_for_unless_it_speaks():
    recipe = Recipe("x", "fault", "chosen", expected=("step_oracle", "schedule"))
    taken = {p: peers.judged(recipe, asked(), asked(), p)["taken"] for p in peers.PEERS}
    assert taken == {peers.CHECKLIST: False, peers.OVERFIT: True}
    assert peers.judged(recipe, asked("overfit_to_batch"), asked(), peers.CHECKLIST)["taken"]


def test_a_peer_pays_for_its_own_assertions_and_the_start():
    assert peers.seconds(asked(), peers.CHECKLIST) == 7.0
    late = asked(**LATE, seconds=180.0)
    assert peers.seconds(late, peers.CHECKLIST) == 176.0  # all but the other's 4 s
    assert peers.seconds(late, peers.OVERFIT) == 7.0


def test_every_assertion_and_every_part_not_handed_over_maps_to_known_checks(collection):
    known = {name for recipe in collection.faults for name in recipe.expected}
    assert set().union(*peers.CAUSES.values(), *peers.NOT_HANDED.values()) <= known


def test_the_page_sets_the_peers_beside_the_gate_on_the_same_faults(tmp_path, monkeypatch):
    gate = {r["id"]: r for r in [*rates.harmful(ROWS), *HEALTHY]}
    faulty = peers.judged(
        Recipe("a", "fault", "chosen"), asked("overfit_to_batch"), asked(), peers.CHECKLIST
    )
    rows = [{"id": "a", "kind": "fault", "half": "chosen", **dict.fromkeys(peers.PEERS, faulty)}]
    fine = dict.fromkeys(peers.PEERS, peers.alarm(asked(), peers.OVERFIT))
    rows += [{"id": "i", "kind": "healthy", "half": "chosen", **fine}]
    found = peers.totals(rows, gate)
    assert (found["chosen"]["gate"]["false_alarms"], found["chosen"]["gate"]["detected"]) == (1, 1)
    monkeypatch.setattr(faults_page, "PEERS", tmp_path / "peers.json")
    assert "## Peers" not in faults_page.page(ROWS, HEALTHY, [], seeds=3, epochs=8, written=6)
    faults_page.PEERS.write_text(json.dumps(found), encoding="utf-8")
    text = faults_page.page(ROWS, HEALTHY, [], seeds=3, epochs=8, written=6).split(
        "## Peers, side by side"
    )[1]
    (line,) = (line for line in text.splitlines() if line.startswith("| false alarms on healthy"))
    assert [cell[:6] for cell in line.split(" | ")[1:]] == ["1 of 1", "0 of 1", "0 of 1"]


# ---- launches -----------------------------------------------------------------------------------


def test_a_launch_is_done_once_until_something_it_depends_on_changes(jobs, monkeypatch):
    launched = []

    def launch(words, project, limit_s):
        launched.append(words[1])
        if words[1] == "stage=data_audit":
            folder = project / "runs" / "data_audit" / "now" / "handoff"
            folder.mkdir(parents=True)
            (folder / "splits.json").write_text("{}", encoding="utf-8")
        else:
            assert (project / "artifacts" / "data_audit" / "splits.json").exists()
        return planting.Done(0, "", "", 1.0, 1.0, False)

    monkeypatch.setattr(planting, "run", launch)
    plain = Recipe("x", "healthy", "chosen", (Edit("model.py", "import difflib", "import abc"),))
    for _ in range(2):
        assert jobs.gate(plain)[1] is None, "the data is the clean project's, and so is the audit"
    assert launched == ["stage=data_audit", "stage=skeleton"]
    jobs.gate(replace(plain, edits=(Edit("data.py", "import csv", "import csv, abc"),)))
    assert launched[2:] == ["stage=data_audit", "stage=skeleton"]
    jobs.sources = jobs.sources | {"harness/checks/modes.py": "edited"}
    jobs.gate(plain)
    assert launched[4:] == ["stage=skeleton"]


def test_a_changed_check_or_limit_changes_no_training(default_project, fresh):
    package = fresh / fresh.name
    before = planting.sources(fresh), planting.training_sources(fresh)
    assert before[0] == planting.sources(default_project)
    planting.place(fresh, "harness/checks/modes.py").write_text("x = 1\n", encoding="utf-8")
    config = fresh / "configs" / "config.yaml"
    text = config.read_text(encoding="utf-8")
    config.write_text(text.replace("max_loss_share: 0.05", "max_loss_share: 0.06"), "utf-8")
    assert planting.sources(fresh) != before[0]
    assert planting.training_sources(fresh) == before[1]
    (package / "harness" / "loop.py").write_text("x = 1\n", encoding="utf-8")
    assert planting.training_sources(fresh) != before[1]


def test_a_fault_without_a_clean_pipeline_that_trains_is_refused(jobs, monkeypatch):
    monkeypatch.setattr(jobs, "trained", lambda recipe: {"crashed": "no such model"})
    with pytest.raises(NotComparable, match="no_clean: the clean pipeline does not train: no such"):
        jobs.harm(Recipe("no_clean", "fault", "chosen"))


@pytest.mark.slow
def test_a_fixed_tenth_does_what_was_recorded(collection, default_project, tmp_path):
    known = {row["id"]: row for rows in bench.known(collection) for row in rows}
    tenth = [r for r in bench.select(collection, None, None, tenth=True) if r.id in known]
    if not tenth:
        pytest.skip("there are no results yet: make bench-faults")
    print(f"{len(tenth)} of {len(known)} faults and healthy pipelines")
    jobs = Jobs(default_project, collection.folder / "bases", tmp_path / "cache")
    rows, failed = bench.run(jobs, tenth, 2, with_harm=False)
    assert failed == []
    keys = ("detected", "named", "alarm")
    found = {row["id"]: {key: row.get(key) for key in keys} for row in rows}
    assert found == {r.id: {key: known[r.id].get(key) for key in keys} for r in tenth}
