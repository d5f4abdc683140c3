"""YOURS: raw records and where they come from. `read` is the function to change for another format.

Sources: `digits` (embedded: 1,797 handwritten digits of scikit-learn), `folder` (DIR/CLASS/*.png)
and `manifest` (a CSV naming path and label). Splits are drawn by the audit, not here.
"""

from __future__ import annotations

import csv
import os
from importlib import metadata
from pathlib import Path

import numpy as np

from .harness.records import Records

SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tif", ".tiff")
SPLIT_FOLDERS = {"train", "training", "val", "valid", "validation", "test", "testing"}


def load(settings) -> Records:
    """Every record of the configured source, unread where it is a file.

    Raises FileNotFoundError when the source is not there, ValueError when it cannot be used.
    """
    return {"digits": _digits, "folder": _folder, "manifest": _manifest}[settings.source](settings)


def read(record) -> np.ndarray:
    """One raw record -> array `(H, W)` or `(H, W, 3)`. A record is an array or the path of a file.

    Raises ValueError when the file holds no readable image.
    """
    from .preprocessing import decode

    return decode(record.read_bytes()) if isinstance(record, Path) else record


def prepare(records: Records, preprocessing, split: str) -> dict:
    """The tensors of one split: x `(N, C, H, W)`, y `(N,)`, id `(N,)` = row in `records`.

    The only place where a split's tensors are made. `split` names which one is asked for; training
    rows are prepared exactly as all others, what differs in training is `preprocessing.augment`.
    """
    import torch

    x = torch.stack([preprocessing(read(raw)) for raw in records.raw])
    return {"x": x, "y": torch.as_tensor(records.labels), "id": torch.arange(len(records))}


def stamp(settings) -> dict[str, list]:
    """What changes when the data does, without reading it: name -> [size, mtime_ns] per file.

    Raises FileNotFoundError when the data is not on this machine.
    """
    if settings.source == "digits":
        return {"scikit-learn": [metadata.version("scikit-learn")]}
    root, files = _root(settings), _files(settings)
    return {_name(path, root): [path.stat().st_size, path.stat().st_mtime_ns] for path in files}


# ---- the sources ---------------------------------------------------------------------------------


def _digits(settings) -> Records:
    from sklearn.datasets import load_digits

    if settings.path:
        raise ValueError("data=digits is embedded: for files choose data=folder or data=manifest.")
    digits = load_digits()
    images = digits.images.astype(np.uint8)  # whole numbers from 0 to 16
    ids = tuple(f"digit-{row:04d}" for row in range(len(images)))
    names = tuple(str(name) for name in digits.target_names)
    return Records(ids, tuple(images), digits.target.astype(np.int64), names)


def _folder(settings) -> Records:
    root, files = _root(settings), _files(settings)
    names, labels = _labelled([path.relative_to(root).parts[0] for path in files], root)
    return Records(tuple(_name(path, root) for path in files), tuple(files), labels, names)


def _manifest(settings) -> Records:
    root, files, columns = _root(settings), _files(settings)[1:], settings.options
    rows = _rows(settings)
    names, labels = _labelled([row[columns["label_column"]] for row in rows], settings.path)
    ids = tuple(_name(path, root) for path in files)
    optional = {
        field: tuple(row[columns[key]] for row in rows) if columns.get(key) else None
        for field, key in [
            ("groups", "group_column"),
            ("times", "time_column"),
            ("given", "split_column"),
        ]
    }
    return Records(ids, tuple(files), labels, names, **optional)


def _root(settings) -> Path:
    """The folder that ids are relative to."""
    if not settings.path:
        raise ValueError(f"data={settings.source} needs data.path=... (a folder or a CSV file).")
    path = Path(settings.path).expanduser().resolve()
    if not path.exists():
        raise FileNotFoundError(f"data.path={settings.path} does not exist (looked for {path}).")
    if settings.source == "folder" and not path.is_dir():
        raise ValueError(
            f"data.path={settings.path} is a file: use data=manifest, or name a folder."
        )
    if settings.source == "manifest" and path.is_dir():
        raise ValueError(
            f"data.path={settings.path} is a folder: use data=folder, or name a CSV file."
        )
    return path if settings.source == "folder" else path.parent


def _name(path: Path, root: Path) -> str:
    try:
        return Path(os.path.relpath(path, root)).as_posix()
    except ValueError:  # another drive of Windows: nothing is relative to it
        return path.as_posix()


def _files(settings) -> list[Path]:
    """The image files: DIR/CLASS/**, sorted; or the manifest itself, then its own in its order."""
    root = _root(settings)
    if settings.source == "manifest":
        column = settings.options["path_column"]
        files = [root / row[column].replace("\\", "/") for row in _rows(settings)]
        missing = [path for path in files if not path.is_file()]
        if missing:
            raise FileNotFoundError(
                f"{len(missing)} of {len(files)} files of {settings.path} do not exist, "
                f"the first is {missing[0]}."
            )
        return [Path(settings.path).expanduser().resolve(), *files]
    classes = sorted(p for p in root.iterdir() if p.is_dir() and not p.name.startswith((".", "_")))
    found = {folder.name: _images(folder) for folder in classes}
    empty = [name for name, files in found.items() if not files]
    if empty:
        raise ValueError(
            f"class folder without images in {settings.path}: {', '.join(empty)}. "
            "Fill it or remove it (a class nobody can learn shifts every label)."
        )
    if found and SPLIT_FOLDERS.issuperset(name.lower() for name in found):
        raise ValueError(
            f"{settings.path} holds splits ({', '.join(found)}), not classes. Name one of them as "
            "data.path, or list all in a manifest with data.options.split_column=..."
        )
    # by file name, not class by class: names often tell when or by whom, the audit looks at order
    together = (path for files in found.values() for path in files)
    return sorted(together, key=lambda path: (path.name, path.as_posix()))


def _images(folder: Path) -> list[Path]:
    """All images below, hidden ones (.thumbnails/a.png, ._a.png) left out."""
    files = (p for p in folder.rglob("*") if p.suffix.lower() in SUFFIXES and p.is_file())
    return [p for p in files if not any(s.startswith(".") for s in p.relative_to(folder).parts)]


def _rows(settings) -> list[dict]:
    """The CSV's rows, of the named columns alone. ValueError for one that is absent or empty."""
    asked = [name for key, name in settings.options.items() if key.endswith("_column") and name]
    try:
        with Path(settings.path).expanduser().open(encoding="utf-8-sig", newline="") as file:
            reader = csv.DictReader(file)
            present = reader.fieldnames or []
            rows = [(reader.line_num, row) for row in reader]
    except (UnicodeDecodeError, csv.Error) as error:
        raise ValueError(f"{settings.path} is no CSV file in UTF-8 ({error}).") from None
    if missing := [name for name in asked if name not in present]:
        raise ValueError(
            f"{settings.path} has no column {', '.join(missing)} (it has: "
            f"{', '.join(present) or 'none'}). Name the columns with data.options.path_column=... "
            "and the like."
        )
    if not rows:
        raise ValueError(f"{settings.path} lists no rows.")
    for line, row in rows:
        blank = [name for name in asked if not (row[name] or "").strip()]
        if blank or None in row:  # None: values beyond the last column
            wrong = f"nothing in column {blank[0]}" if blank else "more values than columns"
            raise ValueError(
                f"line {line} of {settings.path} has {wrong}: complete it or take it out."
            )
    return [{name: row[name].strip() for name in asked} for _, row in rows]


def _labelled(labels: list[str], where: Path | str) -> tuple[tuple[str, ...], np.ndarray]:
    """Class names in order, and each row's index among them, `(N,)`."""
    names = sorted(set(labels))
    if len(names) < 2:
        raise ValueError(
            f"{where} has {'one class, ' + names[0] if names else 'no class'}: nothing to tell "
            "apart. Put each class in a folder of its own, or name another label column."
        )
    places = {name: place for place, name in enumerate(names)}
    return tuple(names), np.array([places[label] for label in labels], dtype=np.int64)
