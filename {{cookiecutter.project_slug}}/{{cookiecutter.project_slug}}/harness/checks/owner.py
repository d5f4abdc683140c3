"""What only the owner of the data can say. Empty words keep the gate shut."""

from __future__ import annotations

from . import Check


def statement(said: dict[str, str], draft: dict[str, str]) -> Check:
    """The owner states which architecture this data asks for, why, and what was done about the
    findings. The audit drafts the three texts from its measurements; only the owner can sign."""
    missing = [name for name in draft if not str(said.get(name) or "").strip()]
    value, limit, unit = float(len(draft) - len(missing)), float(len(draft)), "of the texts written"
    if missing:
        because = f"Not written yet: data.statement.{', '.join(missing)}; a draft is in report.md."
        suspects = ("read the draft, decide, and write it into the data's file in configs/data",)
        return Check("statement", "shut", value, limit, unit, because, suspects)
    because = f"Architecture stated by the owner: {said['architecture'].strip()}"
    return Check("statement", "open", value, limit, unit, because)


def above_baseline(metric: float, ladder: dict, task, split: str) -> Check:
    """A network that does no better than the best simple model has not earned its cost.

    `metric` is the task's on `split`; the ladder's rungs are scored on validation. Warns only: a
    tie may be worth it for other reasons, but it must be said.
    """
    scores = {name: rung.get(task.metric_name) for name, rung in ladder.items()}
    scores = {name: score for name, score in scores.items() if score is not None}
    unit = f"{task.metric_name} on {split}"
    if not scores:
        because = f"The audit's baselines have no {task.metric_name}."
        return Check("above_baseline", "not_applicable", metric, None, unit, because)
    sign = 1 if task.metric_direction == "max" else -1
    best = max(scores, key=lambda name: sign * scores[name])
    because = f"{metric:.4f} against {scores[best]:.4f} of the best baseline ({best})."
    better = sign * metric > sign * scores[best]
    suspects = (
        () if better else (f"{best} does as well for less", "the architecture", "the training")
    )
    return Check(
        "above_baseline",
        "open" if better else "warn",
        metric,
        scores[best],
        unit,
        because,
        suspects,
    )
