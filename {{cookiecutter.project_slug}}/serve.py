"""The answer to an input: a bundle and nothing else. Needs neither the configuration nor the data.

On the command line, one line per image (path, answer, probability):
    python serve.py artifacts/squeeze/bundle IMAGE [IMAGE ...]
In Python, for an array, the bytes of an image file or its path:
    Bundle.load("artifacts/squeeze/bundle").predict(raw)
"""

from __future__ import annotations

import argparse
import json
import sys

from {{cookiecutter.project_slug}} import model, preprocessing
from {{cookiecutter.project_slug}}.harness import bundle


class Bundle(bundle.Bundle):
    """This project's bundle: its networks and its preprocessing."""

    models = model
    preprocessing = preprocessing


def main(arguments: list[str] | None = None) -> int:
    """Print one line per image; exit code 1 when the bundle or an image could not be used."""
    asked = _parser().parse_args(arguments)
    try:
        loaded = Bundle.load(asked.bundle)
    except bundle.BundleError as error:
        print(f"serve.py: {error}", file=sys.stderr)
        return 1
    answered = [_answer(loaded, path, as_json=asked.json) for path in asked.images]
    return 0 if all(answered) else 1


def _answer(loaded: Bundle, path: str, *, as_json: bool) -> bool:
    try:
        found = loaded.predict(path)
    except (OSError, ValueError) as error:
        print(f"serve.py: {path}: {error}", file=sys.stderr)
        return False
    if as_json:
        print(json.dumps({"path": path, **found}, ensure_ascii=False))
    else:
        print(f"{path}\t{found['answer']}\t{found['probability']:.4f}")
    return True


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="serve.py", description="Ask a bundle about image files.")
    parser.add_argument("bundle", help="the folder, for instance artifacts/squeeze/bundle")
    parser.add_argument("images", nargs="+", metavar="IMAGE", help="an image file")
    parser.add_argument("--json", action="store_true", help="one JSON object per line, all classes")
    return parser


if __name__ == "__main__":
    sys.exit(main())
