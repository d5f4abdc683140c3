"""What the tests know about the template and how they look at a bake."""

import sys
from pathlib import Path

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[1]
TEMPLATE = ROOT / "{{cookiecutter.project_slug}}"
DEFAULT_SLUG = "takin_digits"

# Folders that tools leave and git ignores: no part of a project.
IGNORED = {".git", ".ruff_cache", ".pytest_cache", "__pycache__"}


def files_of(project: Path) -> list[Path]:
    """Every file that is part of the project, relative to it, sorted."""
    found = (path.relative_to(project) for path in project.rglob("*") if path.is_file())
    return sorted(path for path in found if not IGNORED.intersection(path.parts))


def texts_of(project: Path) -> dict[str, str]:
    """Relative path with "/" -> text, of every file that is not binary. All text is UTF-8."""
    contents = {path.as_posix(): (project / path).read_bytes() for path in files_of(project)}
    return {path: data.decode("utf-8") for path, data in contents.items() if b"\0" not in data}


def read_pyproject(project: Path) -> dict:
    return tomllib.loads((project / "pyproject.toml").read_text(encoding="utf-8"))
