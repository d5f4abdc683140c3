"""The same raw bytes become the same tensor, byte for byte, where the network is trained and where
it answers: captured on the line above its forward pass, on both sides."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image
from small_bundle import TASK, make_case

import serve
from {{cookiecutter.project_slug}} import data, preprocessing
from {{cookiecutter.project_slug}}.harness import loop
from {{cookiecutter.project_slug}}.harness.bundle import BundleError

NUM_PER_CLASS = 22  # 66 images: a batch of 64 and a rest


@pytest.fixture(scope="module")
def case(tmp_path_factory):
    made = make_case(tmp_path_factory.mktemp("parity"), num_per_class=NUM_PER_CLASS)
    made.write()
    return made


def capture(network, act) -> list[torch.Tensor]:
    """What reaches the network's forward pass while `act` runs."""
    seen = []
    hook = network.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].clone()))
    try:
        act()
    finally:
        hook.remove()
    return seen


def trained_on(case, batch_size) -> list[torch.Tensor]:
    """The training side: prepare, loader, step."""
    network = case.members[0]
    state = loop.cpu_state(network)
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
    rows = data.prepare(case.records, case.fitted, "train")

    def train():
        for batch in loop.Loader(rows, batch_size):
            loop.train_step(network, optimizer, batch, TASK.loss)

    seen = capture(network.train(), train)
    network.load_state_dict(state)
    return seen


def served_on(loaded, raws, batch_size) -> list[torch.Tensor]:
    """The serving side: bytes in, answers out."""

    def answer():
        for start in range(0, len(raws), batch_size):
            loaded.predict_batch(raws[start : start + batch_size])

    return capture(loaded.members[0], answer)


def fingerprints(tensors):
    return [(x.dtype, tuple(x.shape), x.contiguous().numpy().tobytes()) for x in tensors]


@pytest.mark.parametrize("batch_size", [1, 7, 64])
def test_the_same_bytes_reach_the_network_in_training_and_in_serving(case, batch_size):
    raws = [path.read_bytes() for path in case.records.raw]
    trained = trained_on(case, batch_size)
    served = served_on(serve.Bundle.load(case.folder), raws, batch_size)
    assert len(trained) == -(-len(raws) // batch_size)
    assert fingerprints(trained) == fingerprints(served)
    assert {x.dtype for x in served} == {torch.float32}


def test_the_batch_size_changes_no_input_and_no_answer(case):
    raws = [path.read_bytes() for path in case.records.raw]
    loaded = serve.Bundle.load(case.folder)
    one, many = (torch.cat(served_on(loaded, raws, size)) for size in (1, 64))
    assert fingerprints([one]) == fingerprints([many])
    alone = torch.cat([loaded.outputs(x[None]) for x in one])
    assert torch.allclose(alone, loaded.outputs(many), atol=1e-4)
    assert torch.equal(alone.argmax(dim=1), loaded.outputs(many).argmax(dim=1))


def test_an_extreme_neighbour_in_the_batch_changes_no_answer(case):
    loaded, x = serve.Bundle.load(case.folder), case.rows["x"][:8].clone()
    before = loaded.outputs(x)
    x[7] *= 1000
    assert torch.allclose(before[:7], loaded.outputs(x)[:7], atol=1e-5)


def test_records_in_memory_reach_the_network_alike_too(tmp_path):
    digits = data.load(SimpleNamespace(source="digits", path=None, options={})).take(range(40))
    fitted = preprocessing.Preprocessing.fit(list(digits.raw), {})
    rows = data.prepare(digits, fitted, "train")
    for row, raw in enumerate(digits.raw):
        image = tmp_path / "digit.png"
        Image.fromarray(raw).save(image)
        for given in (raw, preprocessing.decode(image.read_bytes())):
            assert fingerprints([rows["x"][row]]) == fingerprints([fitted(given)])


# ---- planted faults -----------------------------------------------------------------------------


def shaped(own, raw):
    return preprocessing._shape(raw, own.size, own.channels)


def normalised(image, mean, std, dtype=np.float32) -> torch.Tensor:
    """What Preprocessing does after its resize, open to a fault at every step."""
    image = (image.astype(dtype) - np.asarray(mean, dtype)) / np.asarray(std, dtype)
    return torch.from_numpy(np.ascontiguousarray(image.transpose(2, 0, 1).astype(np.float32)))


def healthy(own, raw):
    return normalised(shaped(own, raw), own.mean, own.std)


def divided_twice(own, raw):
    return normalised(shaped(own, raw) / 255, own.mean, own.std)


def blue_first(own, raw):
    return normalised(shaped(own, raw)[..., ::-1], own.mean, own.std)


def refitted_when_serving(own, raw):
    image = shaped(own, raw)
    return normalised(image, image.mean(axis=(0, 1)), image.std(axis=(0, 1)))


def float64_then_cast(own, raw):
    return normalised(shaped(own, raw), own.mean, own.std, np.float64)


def resized_bicubic(own, raw):
    image = Image.fromarray(raw).resize(own.size[::-1], Image.Resampling.BICUBIC)
    return normalised(np.asarray(image), own.mean, own.std)


def resized_nearest(own, raw):
    image = Image.fromarray(raw).resize(own.size[::-1], Image.Resampling.NEAREST)
    return normalised(np.asarray(image), own.mean, own.std)


def not_normalised(own, raw):
    return normalised(shaped(own, raw), 0, 1)


def scaled_by_the_inverse(own, raw):
    centred = normalised(shaped(own, raw), own.mean, 1)
    return centred * (1 / torch.tensor(own.std))[:, None, None]


def mean_rounded(own, raw):
    return normalised(shaped(own, raw), np.round(own.mean, 1), own.std)


def through_bf16(own, raw):
    return healthy(own, raw).bfloat16().float()


def in_double_precision(own, raw):
    return healthy(own, raw).double()


def mirrored(own, raw):
    return healthy(own, raw).flip(2)


def clipped(own, raw):
    return normalised(shaped(own, raw).clip(0, 200), own.mean, own.std)


FAULTS = (
    divided_twice,
    blue_first,
    refitted_when_serving,
    float64_then_cast,
    resized_bicubic,
    resized_nearest,
    not_normalised,
    scaled_by_the_inverse,
    mean_rounded,
    through_bf16,
    in_double_precision,
    mirrored,
    clipped,
)


def test_without_a_fault_the_stand_in_is_the_project_s_own_preprocessing(case, monkeypatch):
    monkeypatch.setattr(preprocessing.Preprocessing, "__call__", healthy)
    serve.Bundle.load(case.folder)


@pytest.mark.parametrize("fault", FAULTS)
def test_each_planted_fault_of_the_serving_side_turns_parity_red(case, monkeypatch, fault):
    raws = [path.read_bytes() for path in case.records.raw[:8]]
    trained, loaded = torch.cat(trained_on(case, 64))[:8], serve.Bundle.load(case.folder)

    def parity() -> bool:
        served = [loaded.prepare(preprocessing.decode(raw)) for raw in raws]
        return fingerprints(trained) == fingerprints(served)

    assert parity()
    monkeypatch.setattr(preprocessing.Preprocessing, "__call__", fault)
    assert not parity()
    with pytest.raises(BundleError, match="golden self-check failed"):
        serve.Bundle.load(case.folder)
