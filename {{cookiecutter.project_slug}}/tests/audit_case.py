"""Sound data as the audit sees it, to plant faults into."""

from dataclasses import replace

import numpy as np

from {{cookiecutter.project_slug}}.harness import audit

LIMITS = audit.Limits(max_corrupt_share=0.01, max_label_noise=0.1, min_class_rows=10)
NUM_ROWS = 900


def contents(vectors):
    return tuple(row.tobytes().hex() for row in vectors)


def make_subject(num_columns=20, seed=0, **parts):
    """Three classes apart by a random centre, in random order, split 60/20/20."""
    rng = np.random.default_rng(seed)
    y = rng.integers(0, 3, NUM_ROWS)
    centres = rng.normal(size=(3, num_columns))
    x = (centres[y] + rng.normal(size=(NUM_ROWS, num_columns))).astype(np.float32)
    split = np.array(["train"] * 540 + ["validation"] * 180 + ["test"] * 180)
    found = audit.Subject(
        ids=tuple(f"r{row}" for row in range(NUM_ROWS)),
        split=rng.permutation(split),
        labels=y,
        class_names=("a", "b", "c"),
        content=contents(x),
        vectors=x,
        shape=(num_columns,),
        raw=lambda row: x[row],
        features={"size": rng.normal(100, 10, NUM_ROWS)},
    )
    return replace(found, **parts)


def changed(subject, **columns):
    """The subject with other vectors, whose content follows them."""
    x = columns.pop("vectors")
    return replace(subject, vectors=x, content=contents(x), raw=lambda row: x[row], **columns)
