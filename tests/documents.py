"""The documents as tests see them: fenced blocks, commands, trees, links, tables, words in code.

The convention. In a ```console block a line that begins with "$ " is a command, what follows is its
output. ```console fresh: the command is run in a new project, and the output is exact. ```yaml PATH
and ```python FILE are examples: they are written into a project and run. ```text blocks with tree
lines are trees. Everything in `backticks` in the prose is held against the code.
"""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

from bakes import ROOT

PROJECT_README = "project/README.md"  # of a bake, unlike the others
ADAPTING = "docs/adapting.md"  # its examples add files, and its commands use them
NAMES = ["README.md", *sorted(f"docs/{p.name}" for p in (ROOT / "docs").glob("*.md"))]
NAMES.append(PROJECT_README)

FENCE = re.compile(r"^```(\w*) ?(.*?)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
OVERRIDE = re.compile(r"[a-z_]+(\.[a-z_0-9]+)*=[^\s<>]+")
DOTTED = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)+")
QUIET = {"PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}


@dataclass(frozen=True)
class Block:
    language: str
    info: str  # what stands behind the language: fresh, or the file an example is for
    text: str

    def commands(self) -> list[tuple[str, str]]:
        """(command, its output) of a console block."""
        if self.language != "console":
            return []
        parts = re.split(r"^\$ (.*)\n", self.text, flags=re.MULTILINE)
        assert parts[0] == "", f"output before the first command: {parts[0]!r}"
        return list(zip(parts[1::2], parts[2::2], strict=True))


@dataclass(frozen=True)
class Document:
    name: str
    path: Path
    project: Path  # a bake

    @cached_property
    def text(self) -> str:
        return self.path.read_text(encoding="utf-8")

    @cached_property
    def blocks(self) -> list[Block]:
        return [Block(*match.groups()) for match in FENCE.finditer(self.text)]

    @cached_property
    def prose(self) -> str:
        """The text without its fenced blocks."""
        return FENCE.sub("", self.text)

    def commands(self) -> Iterator[tuple[str, Path]]:
        """Every command with the folder it is typed in: fenced ones, and those in the prose."""
        base = self.project if self.name == PROJECT_README else ROOT
        for block in self.blocks:
            folder = base
            for command, _ in block.commands():
                words = shlex.split(command)
                if words[0] == "cd":
                    assert Path(words[1]).name == self.project.name, command
                    folder = self.project
                else:
                    yield command, folder
        for text in self.in_code:
            if text.split(" ")[0] in ("python", "make", "eval"):
                yield text, base

    def launches(self) -> list[list[str]]:
        """The arguments of every `python run.py`."""
        words = [shlex.split(command, comments=True) for command, _ in self.commands()]
        return [w[2:] for w in words if w[:2] == ["python", "run.py"]]

    @cached_property
    def in_code(self) -> list[str]:
        """What stands in backticks in the prose, tables included, each once."""
        return list(dict.fromkeys(re.findall(r"`([^`\n]+)`", self.prose)))

    def settings(self) -> list[list[str]]:
        """`key=value` in the prose, alone or several in a row."""
        split = [text.split(" ") for text in self.in_code]
        return [words for words in split if all(OVERRIDE.fullmatch(word) for word in words)]

    def dotted(self) -> list[str]:
        return [name for text in self.in_code if DOTTED.fullmatch(name := text.removesuffix("()"))]

    def links(self) -> list[str]:
        return re.findall(r"\]\(([^)\s]+)\)", self.prose)

    def trees(self) -> list[list[str]]:
        """The lines of every tree."""
        texts = [block.text for block in self.blocks if "── " in block.text]
        return [text.rstrip("\n").split("\n") for text in texts]

    def section(self, heading: str) -> str:
        """The text below a "## " heading, up to the next one."""
        found = re.split(r"^## (.*)\n", self.text, flags=re.MULTILINE)
        assert heading in found[1::2], f"{self.name} has no section {heading!r}"
        return found[found.index(heading, 1) + 1]


def read(name: str, project: Path) -> Document:
    path = project / "README.md" if name == PROJECT_README else ROOT / name
    return Document(name, path, project)


def overrides_of(words: list[str]) -> list[str]:
    """The overrides among the arguments of run.py."""
    return [word for word in words if "=" in word and not word.startswith("install=")]


# ---- a project that has read the documents ------------------------------------------------------


@cache
def told(project: Path, names: tuple[str, ...] = ()) -> dict:
    """What facts.py says about the project, and of all that these documents let a reader type:
    `launches` and `settings`, by their words."""
    texts = [read(name, project) for name in names]
    launches = [overrides_of(words) for text in texts for words in text.launches()]
    settings = [words for text in texts for words in text.settings()]
    asked = {"launches": launches, "settings": settings}
    done = subprocess.run(
        [sys.executable, str(ROOT / "tests" / "facts.py")],
        cwd=project,
        input=json.dumps(asked),
        capture_output=True,
        text=True,
        encoding="utf-8",
        env=os.environ | QUIET,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    for key in ("launches", "settings"):
        words = map(tuple, asked[key])
        found[key] = dict(zip(words, found[key], strict=True))
    return found


def adapt(project: Path, folder: Path) -> Path:
    """A copy of the project in `folder` with the files that docs/adapting.md adds or changes."""
    copy = folder / project.name
    shutil.copytree(project, copy, ignore=shutil.ignore_patterns(".git", "__pycache__"))
    for block in read(ADAPTING, project).blocks:
        if block.language == "yaml":
            (copy / block.info).write_text(block.text, encoding="utf-8")
    return copy


# ---- trees, headings, tables --------------------------------------------------------------------


def anchors(text: str) -> set[str]:
    """The anchors of a document's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", FENCE.sub("", text), re.MULTILINE)
    plain = [re.sub(r"[^\w\- ]", "", heading.lower()) for heading in headings]
    return {heading.replace(" ", "-") for heading in plain}


def tree_paths(lines: list[str]) -> list[str]:
    """Paths of a tree below its root; several on a line stand apart by two blanks, and what is no
    path there is a comment."""
    folders: list[str] = []
    found = []
    for line in lines[1:]:
        match = re.match(r"((?:│   |    )*)[├└]── (.*)$", line)
        assert match, f"no line of a tree: {line!r}"
        depth = len(match.group(1)) // 4
        names = [name for name in re.split(r"\s{2,}", match.group(2)) if _is_path(name)]
        assert names, f"no path in {line!r}"
        folders = [*folders[:depth], names[0]]
        found += ["".join([*folders[:depth], name]) for name in names]
    return found


def _is_path(text: str) -> bool:
    known = text in ("Makefile", "LICENSE") or "/" in text or "." in text
    return known and re.fullmatch(r"[\w.{}/-]+", text) is not None


def rows(text: str, first: str) -> list[list[str]]:
    """The cells of every Markdown table in `text` whose first column is headed `first`."""
    found = []
    for table in re.findall(r"(?:^\|.*\|\n)+", text, re.MULTILINE):
        cells = [line.split("|")[1:-1] for line in table.rstrip("\n").split("\n")]
        if cells[0][0].strip() == first:
            found += [[cell.strip() for cell in row] for row in cells[2:]]
    return found
