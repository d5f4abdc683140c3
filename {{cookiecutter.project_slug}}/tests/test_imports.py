"""Who may import whom: the arrows that keep the harness free of the problem, and refusals fast."""

import ast
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = "{{cookiecutter.project_slug}}"
YOURS = ("data", "preprocessing", "model", "task")
CONFIG_READERS = {"harness.launch", "harness.schema", "harness.settings"}
UNSAFE = {"pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve", "joblib"}
HEAVY = {"torch", "sklearn", "scipy", "matplotlib", "optuna", "wandb", "PIL"}
AT_THE_END = f"""
import atexit, sys
atexit.register(lambda: print(sorted({HEAVY} & sys.modules.keys()), file=sys.stderr))
"""


@pytest.fixture(scope="module")
def sources():
    """Module below the package ("harness.loop"), or "run" or "serve" beside it -> syntax tree."""
    root = Path(__file__).resolve().parents[1]
    paths = {path: path.relative_to(root / PACKAGE) for path in (root / PACKAGE).rglob("*.py")}
    paths |= {root / f"{name}.py": Path(f"{name}.py") for name in ("run", "serve")}
    found = {}
    for path, relative in paths.items():
        name = ".".join(relative.with_suffix("").parts).removesuffix(".__init__")
        found[name] = ast.parse(path.read_text(encoding="utf-8"))
    return found


def imports_of(tree, name):
    """(module, line, is it at the top) of every import; the package's own as ".harness.loop"."""
    inside = name.split(".") if name not in ("run", "serve", "__init__") else []
    top = set(tree.body)
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno, node in top) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                base = "." + ".".join([*inside[: -node.level], *([base] if base else [])])
            elif base == PACKAGE or base.startswith(f"{PACKAGE}."):
                base = base.removeprefix(PACKAGE) or "."
            for alias in node.names:
                joined = f"{base.rstrip('.')}.{alias.name}" if base.startswith(".") else base
                yield joined, node.lineno, node in top


def is_package(name, sources):
    return any(other.startswith(f"{name}.") for other in sources)


def own_imports(sources, name):
    """Modules of the package that `name` imports, at the top or inside a function."""
    tree = sources[name]
    where = f"{name}.__init__" if is_package(name, sources) else name
    found = set()
    for module, _, _ in imports_of(tree, where):
        if module.startswith("."):
            target = module[1:]
            while target and target not in sources:  # what follows is a name inside the module
                target = target.rpartition(".")[0]
            found.add(target)
    return found - {""}


def outside_imports(tree, name, *, top_only=False):
    found = {(module, top) for module, _, top in imports_of(tree, name) if module[0] != "."}
    return {module.split(".")[0] for module, top in found if top or not top_only}


def test_the_arrows_are_read_right(sources):
    assert "harness.records" in own_imports(sources, "data")
    assert "harness.checks" in own_imports(sources, "harness.checks.step")
    assert {"stages.setup", "harness.files"} <= own_imports(sources, "stages.overfit")
    assert "torch" in outside_imports(sources["harness.loop"], "harness.loop")


@pytest.mark.parametrize(
    "text", ["from ..data import load", "from .. import data", "def f():\n    from ..data import x"]
)
def test_a_planted_arrow_from_the_harness_is_seen(sources, text):
    planted = {**sources, "harness.planted": ast.parse(text)}
    assert own_imports(planted, "harness.planted") == {"data"}


def test_the_harness_never_imports_what_is_yours_or_a_stage(sources):
    for name in sources:
        if name.startswith("harness"):
            strangers = {m for m in own_imports(sources, name) if not m.startswith("harness")}
            assert not strangers, f"{name} imports {strangers}: hand it in instead"


@pytest.mark.parametrize("name", ["preprocessing", "model", "task"])
def test_preprocessing_model_and_task_stand_alone(sources, name):
    assert own_imports(sources, name) == set()


def test_data_knows_preprocessing_when_it_reads_and_the_records_type(sources):
    assert own_imports(sources, "data") == {"preprocessing", "harness.records"}
    at_top = {module for module, _, top in imports_of(sources["data"], "data") if top}
    assert ".preprocessing.decode" not in at_top


def test_stages_import_yours_the_harness_and_each_other(sources):
    for name in sources:
        if name.startswith("stages"):
            allowed = ("harness", "stages", *YOURS)
            strangers = {m for m in own_imports(sources, name) if m.split(".")[0] not in allowed}
            assert not strangers, f"{name} imports {strangers}"


def test_run_only_wires(sources):
    assert own_imports(sources, "run") == {"data", "harness.launch", "harness.gates", "stages"}
    assert outside_imports(sources["run"], "run") == {"sys", "pathlib", "hydra"}


def test_serve_needs_preprocessing_model_and_bundle_alone(sources):
    assert own_imports(sources, "serve") == {"preprocessing", "model", "harness.bundle"}


def test_only_the_launch_and_the_schema_know_hydra_and_its_configuration(sources):
    for name, tree in sources.items():
        readers = {"hydra", "omegaconf"} & outside_imports(tree, name)
        assert not readers or name in {*CONFIG_READERS, "run"}, f"{name} imports {readers}"


def test_nothing_imports_its_own_package_by_name_or_everything_of_a_module(sources):
    for name, tree in sources.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom):
                assert all(alias.name != "*" for alias in node.names), name
                assert name in ("run", "serve") or node.module != PACKAGE, name


def test_wandb_and_matplotlib_are_imported_where_they_are_used(sources):
    for name, tree in sources.items():
        late = {"wandb", "matplotlib", "optuna"} & outside_imports(tree, name, top_only=True)
        assert not late, f"{name} imports {late} at its top"


def test_nothing_unpickles(sources):
    for name, tree in sources.items():
        assert not UNSAFE & outside_imports(tree, name), name
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                words = {word.arg: ast.unparse(word.value) for word in node.keywords}
                called = ast.unparse(node.func)
                if called == "torch.load":
                    assert words.get("weights_only") == "True", f"{name}:{node.lineno}"
                assert words.get("allow_pickle", "False") == "False", f"{name}:{node.lineno}"


# ---- what is really imported --------------------------------------------------------------------


def imported(script, root, *arguments):
    """Exit code, output, and which of HEAVY a Python process had imported at its end."""
    done = subprocess.run(
        [sys.executable, "-c", AT_THE_END + script, *arguments],
        cwd=root,
        capture_output=True,
        text=True,
        encoding="utf-8",
        check=False,
    )
    *errors, last = done.stderr.splitlines()
    return done.returncode, "\n".join([done.stdout, *errors]), ast.literal_eval(last)


def test_serving_imports_neither_hydra_nor_wandb_nor_scikit_learn(project_root):
    script = (
        "import sys, serve\n"
        "known = {'hydra', 'omegaconf', 'sklearn', 'wandb', 'optuna', 'matplotlib'}\n"
        "sys.exit(', '.join(known.intersection(sys.modules)) or 0)"
    )
    code, told, _ = imported(script, project_root)
    assert code == 0, told


def test_a_refusal_imports_nothing_heavy_and_leaves_nothing_behind(project_root, tmp_path):
    for name in ("run.py", "configs", PACKAGE):
        source = project_root / name
        copy = shutil.copytree if source.is_dir() else shutil.copy
        copy(source, tmp_path / name)

    def files():
        return {path for path in tmp_path.rglob("*") if "__pycache__" not in path.parts}

    before = files()
    script = "import runpy, sys; runpy.run_path('run.py', run_name='__main__')"
    for stage in ("skeleton", "squeeze"):
        code, told, heavy = imported(script, tmp_path, f"stage={stage}")
        assert code == 4 and heavy == [], told
        assert "python run.py stage=data_audit" in told and "Traceback" not in told
    assert files() == before


def test_the_board_imports_nothing_heavy(project_root):
    script = "import runpy; runpy.run_path('run.py', run_name='__main__')"
    code, told, heavy = imported(script, project_root)
    assert code == 0 and heavy == [], told


def test_light_modules_stay_light(project_root):
    names = ["data", *(f"harness.{n}" for n in ("gates", "launch", "schema", "checks", "board"))]
    script = "\n".join(f"import {PACKAGE}.{name}" for name in names)
    code, told, heavy = imported(script, project_root)
    assert code == 0 and heavy == [], told
