import copy
from dataclasses import replace

import numpy as np
import pytest
import torch
from checks_case import IMAGES, MEAN, STD, make_pipeline, rows, unbalanced
from torch.utils.data import DataLoader

from {{cookiecutter.project_slug}}.harness import loop
from {{cookiecutter.project_slug}}.harness.checks import run_check
from {{cookiecutter.project_slug}}.harness.checks.loader import loader, record_store
from {{cookiecutter.project_slug}}.harness.checks.seam import last_seam
from {{cookiecutter.project_slug}}.harness.checks.targets import target_offset

# ---- augmentations ------------------------------------------------------------------------------


def shifted(x, generator):
    steps = torch.randint(-1, 2, (len(x), 2), generator=generator).tolist()
    return torch.stack([row.roll(step, (1, 2)) for row, step in zip(x, steps, strict=True)])


def mirrored(x, generator):
    chosen = torch.rand(len(x), generator=generator) < 0.5
    return x.where(~chosen[:, None, None, None], x.flip(3))


def noisy(x, generator):
    return x + 0.1 * torch.randn(x.shape, generator=generator)


def global_noise(x, generator):
    return x + 0.1 * torch.randn(x.shape)


def mixed(x, generator):
    return 0.8 * x + 0.2 * x[torch.randperm(len(x), generator=generator)]


def one_shift(x, generator):
    return x.roll(int(torch.randint(-3, 4, (1,), generator=generator)), 3)


# ---- loaders ------------------------------------------------------------------------------------


class Weighted(loop.Loader):
    """Each class equally often, drawn with replacement. `power` -1 reverses the weights."""

    sampler, power = "weighted", 1

    def _order(self):
        counts = torch.bincount(self.rows["y"], minlength=10).double()
        weights = (1 / counts.clamp_min(1)) ** self.power
        drawn = weights[self.rows["y"]]
        return torch.multinomial(drawn, self.num_rows, True, generator=self._generator("cpu"))


class Reversed(Weighted):
    power = -2


class Replacing(loop.Loader):
    replacement = True

    def _order(self):
        return torch.randint(self.num_rows, (self.num_rows,), generator=self._generator("cpu"))


class Favoured(Replacing):
    def _order(self):
        return super()._order() // 8


class Partial(Weighted):
    """Class 3 has no weight."""

    def _order(self):
        kept = (self.rows["y"] != 3).nonzero().flatten()
        return kept[torch.randint(len(kept), (self.num_rows,), generator=self._generator("cpu"))]


class Infinite(loop.Loader):
    sampler = "infinite"

    def __iter__(self):
        while True:
            yield from super().__iter__()


class Ended(loop.Loader):
    """An iterator: after its first pass it is at its end."""

    def __iter__(self):
        return iter(()) if self.epoch else super().__iter__()


class Renumbered(loop.Loader):
    def __iter__(self):
        return ({**b, "id": b["id"] + 5000} for b in super().__iter__())


class Stateful(loop.Loader):
    """Draws its order and its augmentation from generators that it holds."""

    def __init__(self, *args, augment=None, **more):
        self.state = torch.Generator().manual_seed(3)
        super().__init__(*args, augment=augment and Jitter(), **more)

    def _order(self):
        return torch.randperm(self.num_rows, generator=self.state)


class Jitter:
    def __init__(self):
        self.state = torch.Generator().manual_seed(4)

    def __call__(self, x, generator):
        return x + 0.1 * torch.randn(x.shape, generator=self.state)


class Anew:
    """Validation that draws other rows each time, and keeps none."""

    def __init__(self, given):
        self.given, self.passes = given, 0

    def __iter__(self):
        self.passes += 1
        start = 100 * self.passes
        yield {name: value[start : start + 100] for name, value in self.given.items()}


class Undeclared(loop.Loader):
    _order = Replacing._order


class DropLast(loop.Loader):
    def __len__(self):
        return self.num_rows // self.batch_size

    def __iter__(self):
        yield from (batch for batch in super().__iter__() if len(batch["y"]) == self.batch_size)


class Longer(DropLast):
    __len__ = loop.Loader.__len__


class Frozen(loop.Loader):
    """set_epoch is never called: the generator is always that of the first epoch."""

    def _generator(self, device):
        return torch.Generator(device).manual_seed(self.seed)


class Unshuffled(loop.Loader):
    def _order(self):
        return torch.arange(self.num_rows)


class Rotated(loop.Loader):
    def _order(self):
        return torch.arange(self.num_rows).roll(37 * self.epoch)


class Tiled(loop.Loader):
    """The first quarter of the rows, four times."""

    def _order(self):
        return super()._order() % (self.num_rows // 4)


class Shorter(loop.Loader):
    """The last fifth of the rows is never reached."""

    def _order(self):
        return torch.randperm(self.num_rows * 4 // 5, generator=self._generator("cpu"))

    def __len__(self):
        return -(-(self.num_rows * 4 // 5) // self.batch_size)

    def __iter__(self):
        return (batch for batch in super().__iter__() if len(batch["y"]))


class Buffered(loop.Loader):
    """A shuffle buffer of a few rows over stored order."""

    def _order(self):
        moved = 40 * torch.rand(self.num_rows, generator=self._generator("cpu"))
        return (torch.arange(self.num_rows) + moved).argsort()


def unaugmented(given):
    """The batches of a loader's next epoch without its augmentation."""
    plain = copy.copy(given)
    plain.augment = None
    given.epoch += 1
    return loop.Loader.__iter__(plain)


class OneSeedPerBatch(loop.Loader):
    def __iter__(self):
        for batch in unaugmented(self):
            generator = torch.Generator().manual_seed(7 + self.epoch)
            yield {**batch, "x": self.augment(batch["x"], generator)}


class OneSeedPerEpoch(loop.Loader):
    """Rows come in another order each epoch, the draws of the augmentation do not."""

    def __iter__(self):
        generator = torch.Generator().manual_seed(7)
        for batch in unaugmented(self):
            yield {**batch, "x": self.augment(batch["x"], generator)}


class Once(loop.Loader):
    """Augmentation is drawn from the row: the same in every epoch."""

    def __iter__(self):
        for batch in unaugmented(self):
            one = [
                self.augment(batch["x"][i : i + 1], torch.Generator().manual_seed(int(row)))
                for i, row in enumerate(batch["id"])
            ]
            yield {**batch, "x": torch.cat(one)}


class InPlace(loop.Loader):
    def __iter__(self):
        for batch in super().__iter__():
            place = torch.searchsorted(self.rows["id"], batch["id"])
            self.rows["x"][place] *= 0.75
            yield batch


class Seedless(loop.Loader):
    def _order(self):
        return torch.randperm(self.num_rows, generator=torch.Generator().manual_seed(self.epoch))


def by_class():
    return loop.take(rows(), rows()["y"].argsort(stable=True))


def plain_loader(shuffle=True):
    """A torch DataLoader of dict batches: it keeps no rows."""
    given = rows()
    items = [{name: value[i] for name, value in given.items()} for i in range(900)]
    return DataLoader(items, 64, shuffle=shuffle, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(
    "parts",
    [
        {},
        {"augment": shifted},
        {"augment": mirrored},
        {"augment": noisy},
        {"augment": mixed},
        {"augment": mirrored, "batch_size": 4, "train": rows(0, 100)},
        {"train": by_class()},
        {"train": by_class(), "loader": Weighted},
        {"train": unbalanced(), "loader": Weighted},
        {"train": unbalanced(), "loader": Weighted, "augment": noisy},
        {"loader": Replacing},
        {"loader": DropLast},
        {"loader": Infinite},
        {"loader": Stateful, "augment": noisy},
        {"batch_size": 1000},
        {"batch_size": 1000, "loader": Frozen},
        {"loader": lambda given, *a, **k: plain_loader()},
        {"loader": Unshuffled, "batch_size": 5000},
    ],
)
def test_a_loader_that_does_what_it_declares_opens(parts):
    found = run_check(loader, make_pipeline(**parts))
    assert found.verdict == "open", found
    assert run_check(record_store, make_pipeline(**parts)).verdict in ("open", "not_applicable")


@pytest.mark.parametrize(
    ("fault", "cause", "number"),
    [
        ({"loader": Frozen}, "starts anew", "900"),
        ({"loader": Unshuffled}, "not shuffled", "900"),
        ({"loader": Unshuffled, "train": by_class()}, "sorted by label", "labels of training"),
        ({"loader": Buffered, "train": by_class()}, "sorted by label", "times as much"),
        ({"loader": Rotated}, "blocks", "%"),
        ({"loader": Tiled}, "repeats rows", "675 of 900"),
        ({"loader": Undeclared}, "with replacement", "of 900"),
        ({"loader": Favoured}, "favours some", "113"),
        ({"loader": Shorter}, "leaves rows out", "180"),
        ({"loader": Longer}, "drop_last", "15 batches, 14"),
        ({"loader": Reversed, "train": unbalanced()}, "reversed", "of the draws"),
        ({"loader": lambda g, *a, **k: plain_loader(False)}, "starts anew", "900"),
        ({"loader": OneSeedPerBatch, "augment": noisy}, "one seed for every worker", "192 of 192"),
        (
            {"loader": OneSeedPerBatch, "augment": mirrored},
            "one seed for every worker",
            "two batches",
        ),
        ({"loader": OneSeedPerEpoch, "augment": shifted}, "one seed for every", "two epochs"),
        ({"loader": Once, "augment": noisy}, "drawn once", "900 of 900"),
        ({"augment": lambda x, generator: x}, "discarded", "those stored"),
        ({"augment": lambda x, g: x / (noisy(x, g) > -0.5)}, "scale of zero", "not finite"),
        ({"loader": InPlace}, "writes into", "in epoch 2"),
        ({"loader": Partial}, "never reaches a class", "class 3"),
        ({"loader": Ended}, "ends after its first epoch", "no row"),
        ({"loader": Renumbered}, "change their ids", "no listed row"),
    ],
)
def test_a_loader_that_does_not_shuts_and_is_named(fault, cause, number):
    found = run_check(loader, make_pipeline(**fault))
    assert found.verdict == "shut", found
    assert any(cause in text for text in found.suspect), found
    assert number in found.because


@pytest.mark.parametrize(
    ("change", "cause"),
    [
        (lambda v: DropLast(v, 256), "drop_last in evaluation"),
        (lambda v: loop.Loader(v, 256, augment=noisy), "validation is augmented"),
        (lambda v: Undeclared(v, 256), "sampled like training"),
        (Anew, "sampled anew"),
    ],
)
def test_a_validation_pass_that_is_not_the_listed_rows_shuts(change, cause):
    pipeline = replace(make_pipeline(), validation=change(rows(900, 1300)))
    found = run_check(loader, pipeline)
    assert found.verdict == "shut"
    assert any(cause in text for text in found.suspect), found


@pytest.mark.parametrize(
    ("parts", "words"),
    [
        ({"augment": one_shift}, "one draw"),
        ({"augment": global_noise}, "seed and epoch"),
        ({"loader": Seedless}, "another one gives the same order"),
    ],
)
def test_what_is_odd_but_trains_warns(parts, words):
    found = run_check(loader, make_pipeline(**parts))
    assert found.verdict == "warn", found
    assert words in found.because


def test_batches_without_ids_are_not_judged():
    class Bare(loop.Loader):
        def __iter__(self):
            return ({"x": b["x"], "y": b["y"]} for b in super().__iter__())

    found = run_check(loader, make_pipeline(loader=Bare))
    assert found.verdict == "not_applicable"
    assert '"id"' in found.because


def test_what_a_loader_without_rows_leaves_unknown_is_said():
    found = run_check(loader, make_pipeline(loader=lambda given, *a, **k: plain_loader()))
    assert "unknown" in found.because


# ---- the store ----------------------------------------------------------------------------------


class Store:
    """Records as arrays; `fault` names how reading or preparing changes them."""

    def __init__(self, fault=None):
        self.images, self.fault = IMAGES[:900].copy(), fault
        self.generator = np.random.default_rng(0)

    def raw(self, row):
        image = self.images[row]
        if self.fault == "read":
            image -= 0.1
        if self.fault == "draws":
            return image + self.generator.normal(size=image.shape)
        return image

    def prepare(self, split):
        images = self.images[:32]
        if self.fault == "normalise":
            images -= MEAN
            images /= STD
        x = torch.from_numpy((images - MEAN) / STD)[:, None]
        return {**rows(0, 32), "x": x}


def augment_in_place(x, generator):
    return x.mul_(0.9 + 0.1 * torch.rand(1, generator=generator))


class Views(loop.Loader):
    """Batches are views of the stored rows, in stored blocks: what is written into one stays."""

    def __iter__(self):
        order = torch.randperm(len(self), generator=self._generator("cpu")).tolist()
        self.epoch += 1
        for block in order:
            place = slice(block * self.batch_size, (block + 1) * self.batch_size)
            batch = {name: value[place] for name, value in self.rows.items()}
            yield {**batch, "x": self.augment(batch["x"], self._generator("cpu"))}


def test_a_store_that_stays_as_it_is_opens():
    store = Store()
    found = run_check(record_store, make_pipeline(raw=store.raw, prepare=store.prepare))
    assert found.verdict == "open", found
    assert "raw" in found.because


@pytest.mark.parametrize(
    ("parts", "words"),
    [
        ({"loader": InPlace}, "900 of 900 stored training rows of x: mean"),
        ({"loader": Views, "augment": augment_in_place}, "stored training rows"),
        ({"fault": "read"}, "a second time"),
        ({"fault": "draws"}, "a second time"),
        ({"fault": "normalise"}, "after they were prepared: mean"),
        ({"fault": "normalise", "raw": None}, "prepared again"),
    ],
)
def test_a_store_that_reading_changes_shuts_with_its_drift(parts, words):
    store = Store(parts.pop("fault", None))
    own = {"raw": store.raw, "prepare": store.prepare, **parts}
    train = {name: value.clone() for name, value in rows().items()}
    found = run_check(record_store, make_pipeline(train=train, **own))
    assert found.verdict == "shut", found
    assert words in found.because
    assert torch.equal(train["x"], rows()["x"])


def test_records_that_reading_changes_are_put_back():
    store = Store("normalise")
    run_check(record_store, make_pipeline(raw=store.raw, prepare=store.prepare))
    assert np.array_equal(store.images, IMAGES[:900])


def test_random_preparing_is_left_to_split_parity():
    def prepare(split):
        return {**rows(0, 32), "x": rows(0, 32)["x"] + 0.01 * torch.rand(32, 1, 8, 8)}

    assert run_check(record_store, make_pipeline(prepare=prepare)).verdict == "open"


def test_without_rows_and_records_there_is_nothing_to_compare():
    plain = plain_loader()
    pipeline = replace(make_pipeline(raw=None), train=plain, validation=plain)
    assert run_check(record_store, pipeline).verdict == "not_applicable"


def states(pipeline):
    """Of every generator: the global one, and those of the loader and its augmentation."""
    parts = vars(pipeline.train), getattr(pipeline.train.augment, "__dict__", {})
    held = [value for part in parts for value in part.values()]
    found = [value.get_state() for value in held if isinstance(value, torch.Generator)]
    return torch.stack([torch.get_rng_state(), *found])


@pytest.mark.parametrize("check", [loader, record_store, last_seam, target_offset])
@pytest.mark.parametrize("kind", [loop.Loader, InPlace, Weighted, Stateful])
def test_nothing_a_check_of_loaders_does_outlasts_it(check, kind):
    train = {name: value.clone() for name, value in rows().items()}
    pipeline = make_pipeline(train=train, loader=kind, augment=noisy)
    before, epoch = states(pipeline), pipeline.train.epoch
    assert len(before) == (3 if kind is Stateful else 1)
    run_check(check, pipeline)
    assert torch.equal(states(pipeline), before)
    assert pipeline.train.epoch == epoch
    assert pipeline.train.rows["x"] is train["x"]
    assert all(torch.equal(train[name], rows()[name]) for name in train)


# ---- rows and their records ---------------------------------------------------------------------


def test_row_numbers_that_wrapped_shut():
    wrapped = {**rows(), "id": torch.arange(900).to(torch.uint8)}
    found = run_check(loader, make_pipeline(train=wrapped))
    assert found.verdict == "shut"
    assert "644 training rows have the number of another record" in found.because


def test_values_that_are_no_numbers_do_not_part_a_row_from_its_record():
    x = rows()["x"].clone()
    x[::50, 0, 2, 2] = torch.nan
    found = run_check(loader, make_pipeline(train={**rows(), "x": x}))
    assert found.verdict == "open", found


def test_rows_that_occur_twice_are_counted_twice():
    twice = {name: torch.cat([value, value[:100]]) for name, value in rows().items()}
    assert run_check(loader, make_pipeline(train=twice)).verdict == "open"


def test_labels_that_left_their_row_shut():
    class Shifted(loop.Loader):
        def __iter__(self):
            return ({**b, "y": b["y"].roll(1)} for b in super().__iter__())

    found = run_check(loader, make_pipeline(loader=Shifted))
    assert found.verdict == "shut"
    assert "reorder inputs but not labels" in found.suspect[0]


def image(row):
    return IMAGES[row]


CHANGES = [lambda x: x, lambda x: 2 * x.clamp(-1, 1), torch.sigmoid, torch.zeros_like]


@pytest.mark.parametrize("change", CHANGES)
def test_rows_made_of_their_records_open_and_blank_ones_are_left_to_last_seam(change):
    changed = make_pipeline(train={**rows(), "x": change(rows()["x"])}, raw=image)
    assert run_check(record_store, changed).verdict == "open"


@pytest.mark.parametrize(
    ("change", "cause"),
    [
        (lambda given: {**given, "id": given["id"].roll(7)}, "name other records"),
        (lambda given: {**given, "x": given["x"].transpose(2, 3)}, "axes mixed"),
        (
            lambda given: {
                **given,
                "x": given["x"].where(given["id"].view(-1, 1, 1, 1) % 5 > 0, 0),
            },
            "overwritten, blank",
        ),
    ],
)
def test_rows_that_are_not_their_records_shut(change, cause):
    found = run_check(record_store, make_pipeline(train=change(rows()), raw=image))
    assert found.verdict == "shut", found
    assert any(cause in text for text in found.suspect)
