"""A digest of what a source file means: comments, docstrings and formatting do not count."""

from __future__ import annotations

import ast
import hashlib
import warnings
from collections.abc import Iterator
from functools import lru_cache

# Positions, hints of the tokenizer, and Load/Store, which the place in the tree implies.
_SKIPPED = frozenset({"ctx", "kind", "type_comment", "type_ignores"})


@lru_cache(maxsize=512)
def source_digest(source: bytes) -> str:
    """sha256 over the syntax tree of `source`, the same on every Python from 3.10 on.

    `ast.dump` is not: its output changed in 3.12 and 3.13. A file that does not parse is
    digested by its bytes, so that a half-edited file still counts as changed.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # invalid escapes in a user's file are not our subject
            text = "\n".join(_tokens(ast.parse(source)))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return hashlib.sha256(source).hexdigest()
    return hashlib.sha256(text.encode("ascii")).hexdigest()


def _tokens(tree: ast.AST) -> Iterator[str]:
    """The tree as a flat list of tokens. A stack, not recursion: long expressions nest deeply."""
    stack: list = [tree]
    while stack:
        item = stack.pop()
        if isinstance(item, str):
            yield item
        elif isinstance(item, list):
            stack.append("]")
            stack.extend(_part(value) for value in reversed(item) if not _is_docstring(value))
            stack.append("[")
        else:
            stack.append(")")
            stack.extend(reversed(_fields(item)))
            stack.append("(" + type(item).__name__)


def _fields(node: ast.AST) -> list:
    """Names and values of a node's fields; absent and empty ones are left out, as versions differ
    in which of them exist."""
    if isinstance(node, ast.JoinedStr):
        return [_whole_constants(node.values)]
    parts: list = []
    for name in node._fields:
        value = getattr(node, name, None)
        if value is not None and value != [] and name not in _SKIPPED:
            parts += [name + "=", _part(value)]
    return parts


def _part(value: object) -> object:
    """A node or list to be walked further, or the token of a leaf.

    `ascii`, not `repr`: which characters repr escapes depends on Python's Unicode tables.
    """
    return value if isinstance(value, (ast.AST, list)) else ascii(value)


def _is_docstring(value: object) -> bool:
    """A string standing alone as a statement: a docstring, or a comment written as one."""
    return (
        isinstance(value, ast.Expr)
        and isinstance(value.value, ast.Constant)
        and isinstance(value.value.value, str)
    )


def _whole_constants(values: list) -> list:
    """The parts of an f-string, neighbouring constants joined: Pythons cut them differently."""
    parts: list = []
    for value in values:
        text = value.value if isinstance(value, ast.Constant) else None
        if text is None:
            parts.append(value)
        elif parts and isinstance(parts[-1], str):
            parts[-1] += text
        else:
            parts.append(text)
    return [ascii(part) if isinstance(part, str) else part for part in parts if part != ""]


@lru_cache(maxsize=512)
def siblings(source: bytes) -> tuple[str, ...]:
    """Names that `source` imports from its own folder: modules, or what the package defines."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):
        return ()
    beside = [n for n in ast.walk(tree) if isinstance(n, ast.ImportFrom) and n.level == 1]
    named = [alias.name for node in beside if node.module is None for alias in node.names]
    modules = (node.module.split(".")[0] for node in beside if node.module)
    return tuple(sorted({*named, *modules}))
