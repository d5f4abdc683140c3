"""A folder that knows whether it is whole: its manifest names every file, its size and its sha256.

It protects against accidents (a lost file, a flipped bit, a file too many); it is no signature.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

from . import files

SCHEMA = 1
NAME = "manifest.json"
SUFFIXES = (".json", ".md", ".safetensors")  # nothing that runs code when it is read
AGAIN = "Run: python run.py stage=squeeze"


class BundleError(RuntimeError):
    """The bundle is not whole, or does not fit the code here: one message, nothing loaded."""


def write(folder: Path, contents: dict[str, bytes], about: dict) -> str:
    """Write `contents` (file name -> bytes) and a manifest with `about`; returns its digest.

    An earlier bundle in the folder is removed, its manifest first, and the new manifest comes last:
    half a bundle has none. Raises BundleError if the folder holds anything else.
    """
    _clear(folder)
    for name, data in contents.items():
        files.write_bytes(folder / name, data)
    listed = {name: _entry(contents[name]) for name in sorted(contents)}
    manifest = {"schema": SCHEMA, "files": listed, **about}
    digest = files.sha256_json(manifest)
    files.write_json(folder / NAME, {**manifest, "digest": digest})
    return digest


def read(folder: Path) -> tuple[dict, dict[str, bytes]]:
    """The manifest and every file's bytes, read once: what is checked is what is used.

    Raises BundleError for a missing, edited or unknown manifest, and for a file that is absent, too
    many or not as it was written.
    """
    manifest = _read_manifest(folder)
    listed, present = set(manifest["files"]), {path.name for path in folder.iterdir()}
    for names, what in ((listed - present, "lacks"), (present - listed - {NAME}, "also holds")):
        if names:
            raise BundleError(f"{folder} {what} {', '.join(sorted(names))}. {AGAIN}")
    contents = {name: (folder / name).read_bytes() for name in sorted(listed)}
    for name, data in contents.items():
        if _entry(data) != manifest["files"][name]:
            raise BundleError(f"{folder / name} has changed since it was written (sha256). {AGAIN}")
    return manifest, contents


def _entry(data: bytes) -> dict:
    return {"sha256": hashlib.sha256(data).hexdigest(), "size": len(data)}


def _clear(folder: Path) -> None:
    present = {path.name for path in folder.iterdir()} if folder.exists() else set()
    strange = sorted(name for name in present if not name.endswith(SUFFIXES))
    if strange or (present and not _was_ours(present)):
        raise BundleError(
            f"{folder} holds {(strange or sorted(present))[0]}, which is not a bundle's. "
            "Move it elsewhere, or write the bundle into another folder."
        )
    for name in sorted(present, key=lambda name: name != NAME):
        (folder / name).unlink()


def _was_ours(names: set[str]) -> bool:
    """A bundle, or what an interrupted write left of one."""
    return NAME in names or bool(names & {"card.md", "config.json"})


def _read_manifest(folder: Path) -> dict:
    path = folder / NAME
    if not path.is_file():
        raise BundleError(f"{folder} is no bundle: it has no {NAME}. {AGAIN}")
    try:
        manifest = files.read_json(path)
        schema, digest = manifest["schema"], manifest.pop("digest")
    except (ValueError, KeyError, TypeError) as error:
        raise BundleError(f"{path} cannot be read ({error}). {AGAIN}") from error
    if schema != SCHEMA:
        raise BundleError(f"{path} has schema {schema!r}; this code reads {SCHEMA}. {AGAIN}")
    if files.sha256_json(manifest) != digest:
        raise BundleError(f"{path} was edited after it was written: its digest differs. {AGAIN}")
    return {**manifest, "digest": digest}
