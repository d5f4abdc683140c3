"""Question: what is in this data?
Evidence: one statement per axis, each with the recall its own method had on planted faults.
Leaves: the frozen split, the fitted preprocessing, the audit (suspects, baselines, loss floor).
If it fails suspect: the data; or the statement in configs/data is not written yet.
"""

from __future__ import annotations

from dataclasses import asdict, replace

import numpy as np

from .. import data, preprocessing
from ..harness import audit, files, splits
from ..harness.audit import report as told
from ..harness.audit.duplicates import exact_clusters, near_clusters
from ..harness.checks.owner import statement
from ..harness.schema import BadInput
from . import setup


def run(cfg, run):
    # ---- load: every record is decoded once, what cannot be read is listed
    found, hashes = setup.read_records(cfg, run)
    raws, unreadable = _read_all(found, cfg.data.value_range)
    found = replace(found, unreadable=unreadable)
    task = setup.make_task(cfg, found.class_names)

    # ---- act: split once, fit preprocessing on the training rows
    split, prepared = _freeze(cfg, run, found, raws, hashes)
    files.write_json(run.handoff / "splits.json", split)
    files.write_text(run.handoff / "preprocessing.json", prepared.dumps())

    # ---- measure: every axis, on a copy with planted faults first
    subject = _subject(cfg, found, raws, hashes, split, prepared, task)
    limits = audit.Limits(**cfg.stage.limits)
    result = audit.run_audit(subject, limits, seed=cfg.seed, review=setup.label_review(cfg))
    files.write_json(run.handoff / "audit.json", result.handoff())
    files.write_json(run.handoff / "report.json", result.row())

    # ---- draw and tell
    told.draw(run, result, subject, lambda row: task.draw(data.read(found.raw[row])))
    run.tell(told.sections(result))
    return [
        *(found.check() for found in result.statements),
        statement(asdict(cfg.data.statement), result.draft),
    ]


def _read_all(found, value_range):
    """Decoded rows (None where unusable) and why those cannot be used, by id."""
    raws, unreadable = [], {}
    for name, raw in zip(found.ids, found.raw, strict=True):
        try:
            values = data.read(raw)
            preprocessing.refuse_range(values, value_range)
            raws.append(values)
        except (ValueError, OSError) as error:
            raws.append(None)
            unreadable[name] = getattr(error, "strerror", None) or str(error)  # without the path
    return raws, unreadable


def _freeze(cfg, run, found, raws, hashes):
    """The split, in which duplicates stay together and known rows stay put, and preprocessing."""
    recorded = run.earlier("data_audit", "splits.json")
    frozen = recorded.exists() and run.mode == "recorded"  # free play may split as it likes
    former = splits.read(recorded) if frozen else None
    settings = asdict(cfg.data.split)
    near = settings.pop("near_together")
    readable = [row for row, raw in enumerate(raws) if raw is not None]
    try:
        clusters = exact_clusters(hashes)
        if near:
            fitted = preprocessing.Preprocessing.fit([raws[r] for r in readable], cfg.data.options)
            vectors = np.stack([fitted(raws[row]).numpy().ravel() for row in readable])
            groups = near_clusters(vectors)
            clusters += [[readable[place] for place in group] for group in groups]
        split = splits.make(found, clusters, splits.SplitSettings(**settings), former)
        train = set(split["ids"]["train"])
        rows = [raws[row] for row in readable if found.ids[row] in train]
        return split, preprocessing.Preprocessing.fit(rows, cfg.data.options)
    except ValueError as error:
        raise BadInput(str(error)) from None


def _subject(cfg, found, raws, hashes, split, prepared, task):
    """The data as the audit sees it: arrays, and no word of what they stand for."""
    x = [prepared(raw).numpy() if raw is not None else None for raw in raws]
    shape = next(item.shape for item in x if item is not None)
    vectors = np.stack([np.zeros(shape, np.float32) if item is None else item for item in x])
    features = [task.features(raw) if raw is not None else {} for raw in raws]
    axes = {
        name: np.array([f.get(name, np.nan) for f in features]) for name in max(features, key=len)
    }
    return audit.Subject(
        ids=found.ids,
        split=splits.column(found.ids, split),
        labels=found.labels,
        class_names=found.class_names,
        content=hashes,
        vectors=vectors.reshape(len(vectors), -1),
        shape=shape,
        raw=lambda row: data.read(found.raw[row]),
        features=axes,
        groups=found.groups,
        times=found.times,
        unreadable=found.unreadable,
        value_range=cfg.data.value_range and tuple(cfg.data.value_range),
        strategy=cfg.data.split.strategy,
    )
