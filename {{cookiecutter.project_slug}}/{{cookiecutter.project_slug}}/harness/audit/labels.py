"""The labels: how many of each, and how many are wrong."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ..records import SPLITS
from . import baselines, duplicates, neighbours
from .subject import NUM_PLANTED, Control, Limits, Statement, Subject, state, wilson

NUM_FOLDS = 5
MAX_GIVEN_SHARE = 0.2  # a suspect's own label gets less than this; with argmax: precision .88,
PLANTED_FLIPS = 0.05  # recall .99 on digits with 3 % flips
MIN_PROBE_ACCURACY = 0.9  # below it, hard rows and wrong labels look alike
MIN_REVIEWED = 20
REVIEW_SIZE = 60
PROBES = ("neighbours", "logistic")
MIXTURES = (0.001, 0.003, 0.01, 0.03, 0.1)


# --------------------------------------------------------------------------- imbalance


def counts(subject: Subject) -> dict[str, dict[str, int]]:
    """Rows per split and class, {split: {class name: rows}}."""
    found = {}
    for split in SPLITS:
        per_class = np.bincount(subject.labels[subject.rows(split)], minlength=subject.num_classes)
        found[split] = dict(zip(subject.class_names, per_class.tolist(), strict=True))
    return found


def imbalance(subject: Subject, limits: Limits, seed: int) -> Statement:
    """Rows per class: too few to learn from, or very unequal."""
    train = np.bincount(subject.labels[subject.rows("train")], minlength=subject.num_classes)
    rare = rare_classes(train, limits)
    ratio = float(train.max() / train.min()) if train.min() else None
    shares = train[train > 0] / max(train.sum(), 1)
    evenness = float(-(shares * np.log(shares)).sum() / np.log(max(len(train), 2)))
    names = np.array(subject.class_names)
    strong = ratio is None or ratio > limits.max_class_ratio
    by_split = ", ".join(f"{split} {len(subject.rows(split)):,}" for split in SPLITS)
    sizes = (
        f"{train.min():,} ({names[train.argmin()]}) to {train.max():,} ({names[train.argmax()]})"
    )
    return state(
        "imbalance",
        _plant_rare(train, limits),
        method="rows counted per split and class",
        n=len(subject.rows(*SPLITS)),
        estimate=ratio,
        interval=None if ratio is None else (ratio, ratio),
        limit=limits.max_class_ratio,
        verdict="shut" if len(rare) else "warn" if strong else "open",
        because=f"Train classes have {sizes} rows, an evenness (entropy over log n) of "
        f"{evenness:.3f}; rows per split: {by_split}"
        + (f"; too few train rows (below {limits.min_class_rows:g}): " if len(rare) else "")
        + ", ".join(names[rare][:10])
        + ".",
        suspect=(
            "a class is missing or nearly so: add rows, merge it or drop it",
            "a rare class: score with balanced accuracy, weight or sample it",
        ),
        more={"evenness": evenness},
    )


def rare_classes(train: np.ndarray, limits: Limits) -> np.ndarray:
    return np.flatnonzero(train < max(limits.min_class_rows, 1))


def _plant_rare(train: np.ndarray, limits: Limits) -> Control:
    """Each class in turn (at most `NUM_PLANTED`) thinned to one row less than it may have."""
    before, found, false = set(rare_classes(train, limits).tolist()), 0, 0
    planted = range(min(len(train), NUM_PLANTED))
    for label in planted:
        thin = train.copy()
        thin[label] = max(int(np.ceil(limits.min_class_rows)) - 1, 0)
        named = set(rare_classes(thin, limits).tolist())
        found += label in named
        false += len(named - before - {label})
    return Control(found, len(planted), false)


# --------------------------------------------------------------------------- label noise


@dataclass(frozen=True)
class Noise:
    """What a probe contradicts, and what a person said of it."""

    probe: str
    accuracy: float  # agreement with the given labels, out of fold
    flagged: int
    n: int
    wrong: int
    answered: int

    @property
    def reviewed(self) -> bool:
        """Whether enough suspects were reviewed to speak for the rest."""
        return self.answered >= min(MIN_REVIEWED, max(self.flagged, 1))


def label_noise(
    subject: Subject, limits: Limits, seed: int, review: Mapping[str, str] | None = None
) -> Statement:
    """Labels that a probe, fitted on other rows, contradicts with confidence.

    `review` maps ids to "wrong" or "right", a person's word on suspects. Without it only an upper
    bound may be stated: no probe can tell a wrong label from a hard row.
    """
    rows = subject.learnable
    probe, shares, accuracy, control = _probe(subject, rows, seed)
    ids = subject.names(rows[suspects(shares, subject.labels[rows])])
    answers = [review[name] for name in ids if name in review] if review else []
    if strange := set(answers) - {"wrong", "right"}:
        raise ValueError(f"A reviewed label is 'wrong' or 'right', not {strange.pop()!r}.")
    found = Noise(probe, accuracy, len(ids), len(rows), answers.count("wrong"), len(answers))
    estimate, interval = rate(found, control)
    over = estimate > limits.max_label_noise
    sentence = _reviewed_sentence if found.reviewed else _unreviewed_sentence
    return state(
        "label_noise",
        control,
        method=f"{probe} out of fold, duplicates in one fold: another label is likelier and the "
        f"given one has less than {MAX_GIVEN_SHARE:g}",
        n=len(rows),
        estimate=estimate,
        interval=interval,
        limit=limits.max_label_noise,
        verdict=_verdict(found, over, control),
        because=sentence(found, estimate, interval)
        + f"; of {control.planted} labels flipped in a copy it found {control.found}.",
        ids=ids,
        suspect=(
            "labels are wrong: correct them",
            "classes overlap, so that hard rows look wrong: review "
            f"{min(REVIEW_SIZE, len(ids))} suspects (data.label_review) to tell",
        ),
        more={"flagged": len(ids), "probe_accuracy": accuracy, "reviewed": len(answers)},
    )


def _verdict(found: Noise, over: bool, control: Control) -> str:
    """A review decides. Without one, a probe that sees flips and is right on nearly all rows is
    taken at its word; one that is not has to be settled by a review when it names more rows than
    may be wrong; and one that misses flips decides nothing."""
    credible = found.accuracy >= MIN_PROBE_ACCURACY
    if found.reviewed or (credible and not control.blind):
        return "shut" if over else "open"
    if control.blind:
        return "open"  # which `state` turns into "cannot see"
    return "inconclusive" if over else "warn"


def _probe(subject: Subject, rows: np.ndarray, seed: int) -> tuple[str, np.ndarray, float, Control]:
    """The better probe by out-of-fold log loss: its name, shares (M, C), accuracy, and control."""
    rng = np.random.default_rng([seed, 12])
    labels, x = subject.labels[rows], subject.compact[rows]
    fold_of = neighbours.folds(labels, duplicates.learnable_clusters(subject), NUM_FOLDS, rng)
    nearest = neighbours.voters(x, fold_of)

    def out_of_fold(name: str, given: np.ndarray) -> np.ndarray:
        if name == "neighbours":
            return neighbours.votes(given, nearest, subject.num_classes)
        return _out_of_fold(name, x, given, fold_of, subject.num_classes, seed)

    shares = {name: out_of_fold(name, labels) for name in PROBES}
    best = min(PROBES, key=lambda name: _mixed_log_loss(shares[name], labels))
    accuracy = float(np.mean(shares[best].argmax(axis=1) == labels))
    flipped, planted = flip(labels, subject.num_classes, rng)
    named = set(suspects(out_of_fold(best, flipped), flipped).tolist())
    before = set(suspects(shares[best], labels).tolist())
    found = len(named & planted)
    return best, shares[best], accuracy, Control(found, len(planted), len(named - planted - before))


def _mixed_log_loss(shares: np.ndarray, labels: np.ndarray) -> float:
    """Log loss at the best mixture with equal shares: a probe that votes has zeros, and is not
    the worse for it once they are softened."""
    flat = 1 / shares.shape[1]
    return min(baselines.log_loss((1 - mix) * shares + mix * flat, labels) for mix in MIXTURES)


def _out_of_fold(
    name: str, x: np.ndarray, labels: np.ndarray, fold_of: np.ndarray, num_classes: int, seed: int
) -> np.ndarray:
    shares = np.zeros((len(x), num_classes))
    for fold in np.unique(fold_of):
        inside = fold_of == fold
        shares[inside] = baselines.probabilities(
            name, x[~inside], labels[~inside], x[inside], num_classes=num_classes, seed=seed
        )
    return shares


def suspects(shares: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """Places whose label is not the likeliest and has less than `MAX_GIVEN_SHARE`, worst first:
    the least likely label, then the most certain other one."""
    given = shares[np.arange(len(labels)), labels]
    named = np.flatnonzero((shares.argmax(axis=1) != labels) & (given < MAX_GIVEN_SHARE))
    return named[np.lexsort((named, -shares[named].max(axis=1), given[named]))]


def flip(
    labels: np.ndarray, num_classes: int, rng: np.random.Generator
) -> tuple[np.ndarray, set[int]]:
    """A copy with a share of the labels changed to any other class, and the places changed."""
    number = min(max(NUM_PLANTED, round(PLANTED_FLIPS * len(labels))), len(labels) // 5)
    places = rng.choice(len(labels), number, replace=False)
    flipped = labels.copy()
    flipped[places] += rng.integers(1, max(num_classes, 2), number)
    return flipped % num_classes, set(places.tolist())


def rate(found: Noise, control: Control) -> tuple[float, tuple[float, float]]:
    """Share of wrong labels and its interval: flagged share x reviewed precision / planted recall,
    the ends from the Wilson intervals of the last two. Unreviewed, precision is between 0 and 1 and
    the estimate is an upper one."""
    recall = max(control.recall or 0.0, 1e-9)
    low_recall, high_recall = (max(end, 1e-9) for end in wilson(control.found, control.planted))
    share = found.flagged / max(found.n, 1)
    if not found.reviewed:
        upper = wilson(found.flagged, found.n)[1] / low_recall
        return min(1.0, share / recall), (0.0, min(1.0, upper))
    low, high = wilson(found.wrong, found.answered)
    estimate = share * found.wrong / found.answered / recall
    ends = (share * low / high_recall, share * high / low_recall)
    return min(1.0, estimate), (min(1.0, ends[0]), min(1.0, ends[1]))


def review_list(ids: Sequence[str], seed: int) -> tuple[str, ...]:
    """At most `REVIEW_SIZE` suspects for a person to review, drawn at random: the worst ones alone
    would make the precision, and so the rate, too high."""
    if len(ids) <= REVIEW_SIZE:
        return tuple(ids)
    chosen = np.random.default_rng([seed, 13]).choice(len(ids), REVIEW_SIZE, replace=False)
    return tuple(ids[place] for place in np.sort(chosen))


def _unreviewed_sentence(found: Noise, estimate: float, interval: tuple[float, float]) -> str:
    bound = f"at most {estimate:.2%} of the labels are wrong (95 % bound {interval[1]:.2%})"
    if found.accuracy < MIN_PROBE_ACCURACY:
        return (
            f"Not identifiable without review: the best probe ({found.probe}) agrees with only "
            f"{found.accuracy:.1%} of the labels out of fold, so its {found.flagged:,} suspects "
            f"of {found.n:,} may be hard rows as well as wrong labels; {bound}, unreviewed"
        )
    return (
        f"{bound[0].upper()}{bound[1:]}, unreviewed: the probe ({found.probe}, agrees with "
        f"{found.accuracy:.1%} out of fold) contradicts {found.flagged:,} of {found.n:,} train and "
        "validation labels"
    )


def _reviewed_sentence(found: Noise, estimate: float, interval: tuple[float, float]) -> str:
    return (
        f"{estimate:.2%} of the labels are wrong (95 % interval {interval[0]:.2%} to "
        f"{interval[1]:.2%}): of {found.flagged:,} suspects among {found.n:,} rows (probe: "
        f"{found.probe}) {found.answered:,} were reviewed and {found.wrong:,} found wrong"
    )
