"""preprocessing.py: one way from a file to a tensor, for training and for serving."""

import io
import json
import random

import numpy as np
import pytest
import torch
from PIL import Image

from {{cookiecutter.project_slug}} import preprocessing
from {{cookiecutter.project_slug}}.preprocessing import Preprocessing, augment, decode

NOTHING = {"max_shift_px": 0.0, "max_rotation_deg": 0.0, "max_scale": 0.0, "flip": False}


def noise(*shape, seed=0, dtype=np.uint8):
    return np.random.default_rng(seed).integers(0, 256, size=shape).astype(dtype)


def encoded(image, kind="PNG", **options):
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


# ---- fitting ------------------------------------------------------------------------------------


def test_constants_are_those_of_the_given_rows_in_float64():
    raws = [noise(5, 7, 3, seed=seed) for seed in range(9)]
    fitted = Preprocessing.fit(raws, {})
    stack = np.stack(raws).astype(np.float64)
    assert fitted.mean == pytest.approx(stack.mean(axis=(0, 1, 2)).tolist(), rel=1e-12)
    assert fitted.std == pytest.approx(stack.std(axis=(0, 1, 2)).tolist(), rel=1e-12)
    assert fitted.input_shape == (3, 5, 7)


def test_fitted_rows_come_out_with_mean_0_and_deviation_1_in_float32():
    raws = [noise(6, 6, seed=seed) for seed in range(20)]
    fitted = Preprocessing.fit(raws, {})
    x = torch.stack([fitted(raw) for raw in raws])
    assert x.dtype == torch.float32 and x.shape == (20, 1, 6, 6)
    assert abs(x.double().mean().item()) < 1e-6
    assert abs(x.double().std(correction=0).item() - 1) < 1e-6


def test_the_order_of_operations_is_shape_then_float32_then_normalise():
    raw = noise(4, 4, 3)
    fitted = Preprocessing.fit([raw, noise(4, 4, 3, seed=1)], {})
    mean, std = np.float32(fitted.mean), np.float32(fitted.std)
    expected = ((raw.astype(np.float32) - mean) / std).transpose(2, 0, 1)
    assert np.array_equal(fitted(raw).numpy(), expected)


def test_applying_learns_nothing():
    fitted = Preprocessing.fit([noise(4, 4), noise(4, 4, seed=1)], {})
    before = fitted.digest
    fitted(np.full((4, 4), 255, dtype=np.uint8))
    assert fitted.digest == before


def test_the_raw_array_is_left_alone_and_not_shared():
    raw = noise(4, 4).astype(np.float32)
    copy = raw.copy()
    fitted = Preprocessing.fit([raw, noise(4, 4, seed=1)], {})
    fitted(raw).zero_()
    assert np.array_equal(raw, copy)


@pytest.mark.parametrize("value", [0, 7, 0.1])
def test_images_of_one_value_hold_nothing_to_learn(value):
    raws = [np.full((4, 4), value, dtype=np.float32)] * 7
    with pytest.raises(ValueError, match="channel 0 of 1 has one value"):
        Preprocessing.fit(raws, {})


def test_an_empty_channel_of_a_colour_set_is_named():
    raws = [noise(4, 4, 3, seed=seed) for seed in range(3)]
    for raw in raws:
        raw[..., 2] = 9
    with pytest.raises(ValueError, match=r"channel 2 of 3 .*data\.options\.channels=1"):
        Preprocessing.fit(raws, {})
    assert Preprocessing.fit(raws, {"channels": 1}).channels == 1


@pytest.mark.parametrize("size", [28, "28", [28], [28, 28, 3], [0, 28], [28.0, 28], [True, 5]])
def test_a_size_that_is_none_is_refused(size):
    with pytest.raises(ValueError, match=r"data\.options\.size=.* is not \[height,width\]"):
        Preprocessing.fit([noise(4, 4)], {"size": size})


def test_two_channels_are_refused():
    with pytest.raises(ValueError, match=r"data\.options\.channels=2 is neither 1 .* nor 3"):
        Preprocessing.fit([noise(4, 4)], {"channels": 2})


# ---- state --------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"size": [3, 9]}, {"channels": 3}])
def test_the_state_survives_its_file_bit_for_bit(tmp_path, options):
    raws = [noise(5, 7, seed=seed) for seed in range(9)]
    fitted = Preprocessing.fit(raws, options)
    path = tmp_path / "preprocessing.json"
    path.write_text(fitted.dumps(), encoding="utf-8")
    again = Preprocessing.load(path)
    assert again.state == fitted.state and again.digest == fitted.digest
    assert again.dumps() == fitted.dumps()
    assert all(torch.equal(again(raw), fitted(raw)) for raw in raws)


def test_the_digest_tells_states_apart_and_the_order_of_keys_does_not_count():
    fitted = Preprocessing.fit([noise(4, 4)], {})
    turned = Preprocessing(dict(reversed(fitted.state.items())))
    assert turned.digest == fitted.digest
    mean = [np.nextafter(fitted.mean[0], 999)]
    assert Preprocessing({**fitted.state, "mean": mean}).digest != fitted.digest


@pytest.mark.parametrize("change", [{"schema": 2}, {"resize": "pillow-bicubic"}])
def test_a_state_of_other_code_is_refused(change):
    state = {**Preprocessing.fit([noise(4, 4)], {}).state, **change}
    with pytest.raises(ValueError, match="this code reads 1 and 'pillow-bilinear'"):
        Preprocessing(state)


def test_the_state_is_plain_json():
    state = Preprocessing.fit([noise(4, 4)], {}).state
    assert json.loads(json.dumps(state)) == state


@pytest.mark.parametrize("shape", [(4, 6), (4, 6, 3)])
def test_inverse_gives_the_raw_values_back(shape):
    raws = [noise(*shape, seed=seed) for seed in range(4)]
    fitted = Preprocessing.fit(raws, {})
    back = fitted.inverse(fitted(raws[0]))
    assert back.shape == (4, 6, fitted.channels)
    assert np.allclose(back.squeeze(), raws[0], atol=1e-3)


# ---- sizes and channels -------------------------------------------------------------------------


def test_without_a_named_size_another_size_is_refused_not_resized():
    fitted = Preprocessing.fit([noise(4, 6), noise(4, 6, seed=1)], {})
    assert fitted.state["resize"] is None
    with pytest.raises(ValueError, match=r"shape \(6, 4\) among .* 4x6 .*size=\[4,6\]"):
        fitted(noise(6, 4))


def test_a_named_size_resizes_as_the_state_says():
    raws = [noise(8, 8), noise(16, 12)]
    fitted = Preprocessing.fit(raws, {"size": [4, 6]})
    assert fitted.state["resize"] == preprocessing.RESIZE == "pillow-bilinear"
    small = np.asarray(Image.fromarray(raws[1]).resize((6, 4), Image.Resampling.BILINEAR))
    assert torch.equal(fitted(raws[1]), fitted(small))


@pytest.mark.parametrize("shape", [(1, 9), (9, 1), (1, 9, 1), (9, 1, 3), (1, 1, 1)])
def test_a_side_of_one_pixel_is_resized_too(shape):
    fitted = Preprocessing.fit([noise(8, 8), noise(*shape)], {"size": [4, 4]})
    assert fitted(noise(*shape)).shape == fitted.input_shape


def test_what_is_not_8_bits_cannot_be_resized_and_says_where_to_change_that():
    fitted = Preprocessing.fit([noise(4, 4)], {"size": [4, 4]})
    fitted(noise(4, 4, dtype=np.uint16))
    with pytest.raises(ValueError, match=r"\(8, 8\) uint16 .* 8 bits in data\.read"):
        fitted(noise(8, 8, dtype=np.uint16))


def test_grey_is_repeated_for_colour_and_colour_becomes_luminance_for_grey():
    grey, colour = noise(4, 4), noise(4, 4, 3, seed=1)
    fitted = Preprocessing.fit([grey, colour], {})  # one colour image makes all of them colour
    assert fitted.channels == 3
    repeated = np.repeat(grey[..., None], 3, axis=2)
    assert torch.equal(fitted(grey), fitted(repeated))
    fitted = Preprocessing.fit([grey, colour], {"channels": 1})
    back = fitted.inverse(fitted(colour)).squeeze()
    assert np.allclose(back, colour @ np.array([0.299, 0.587, 0.114]), atol=1e-3)


@pytest.mark.parametrize(
    ("raw", "match"),
    [
        (np.zeros((4, 4, 2), np.uint8), r"\(H, W\) or \(H, W, 3\)"),
        (np.zeros((4, 4, 4), np.uint8), r"\(H, W\) or \(H, W, 3\)"),
        (np.full((4, 4), np.nan), "finite numbers"),
        (np.full((4, 4), "a"), "finite numbers"),
        (np.zeros((4, 4), bool), "finite numbers"),
    ],
)
def test_what_is_no_image_of_numbers_is_refused(raw, match):
    fitted = Preprocessing.fit([noise(4, 4)], {})
    with pytest.raises(ValueError, match=match):
        fitted(raw)


@pytest.mark.parametrize("raw", [np.zeros(4), np.zeros((1, 4, 4, 3)), "path.png", None])
def test_what_is_no_image_at_all_is_refused(raw):
    with pytest.raises(ValueError, match="image"):
        Preprocessing.fit([noise(4, 4)], {})(raw)


# ---- decoding -----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["PNG", "BMP", "TIFF", "GIF"])
def test_lossless_grey_files_give_their_pixels(kind):
    raw = noise(5, 7)
    found = decode(encoded(Image.fromarray(raw), kind))
    assert found.dtype == np.uint8
    assert np.array_equal(found if found.ndim == 2 else found[..., 0], raw)


@pytest.mark.parametrize("kind", ["PNG", "BMP", "TIFF"])
def test_lossless_colour_files_give_their_pixels(kind):
    raw = noise(5, 7, 3)
    assert np.array_equal(decode(encoded(Image.fromarray(raw), kind)), raw)


def test_jpeg_keeps_its_kind_of_colour():
    smooth = np.tile(np.arange(0, 160, 10, dtype=np.uint8), (16, 1))
    grey = decode(encoded(Image.fromarray(smooth), "JPEG", quality=95))
    assert grey.shape == (16, 16) and np.abs(grey.astype(int) - smooth).max() < 8
    colour = decode(encoded(Image.fromarray(smooth).convert("RGB"), "JPEG", quality=95))
    assert colour.shape == (16, 16, 3)
    cmyk = decode(encoded(Image.fromarray(smooth).convert("CMYK"), "JPEG", quality=95))
    assert cmyk.shape == (16, 16, 3) and np.abs(cmyk[..., 0].astype(int) - smooth).max() < 12


def test_a_palette_is_looked_up():
    image = Image.fromarray(noise(5, 7, 3)).quantize(8)
    assert np.array_equal(decode(encoded(image)), np.asarray(image.convert("RGB")))


def test_black_and_white_is_0_and_255():
    image = Image.fromarray(noise(5, 7)).convert("1")
    assert set(np.unique(decode(encoded(image)))) == {0, 255}


def test_opaque_pixels_keep_their_colour_and_transparent_ones_are_white():
    raw = noise(5, 7, 4)
    raw[..., 3] = 255
    raw[0, :, 3] = 0
    found = decode(encoded(Image.fromarray(raw)))
    assert np.array_equal(found[1:], raw[1:, :, :3])
    assert (found[0] == 255).all()


def test_transparent_grey_stays_grey():
    grey, alpha = Image.fromarray(noise(5, 7)), Image.new("L", (7, 5), 255)
    found = decode(encoded(Image.merge("LA", [grey, alpha])))
    assert np.array_equal(found, np.asarray(grey))
    assert (decode(encoded(Image.merge("LA", [grey, Image.new("L", (7, 5), 0)]))) == 255).all()


def test_a_transparent_palette_entry_is_white_without_a_warning():
    image = Image.fromarray(np.array([[0, 1]], dtype=np.uint8), mode=None)
    image = image.convert("P")
    image.putpalette([10, 20, 30, 40, 50, 60])
    found = decode(encoded(image, transparency=bytes([0, 255])))
    assert found.tolist() == [[[255, 255, 255], [40, 50, 60]]]


def test_sixteen_bits_stay_sixteen_bits():
    raw = np.arange(35, dtype=np.uint16).reshape(5, 7) * 1800
    found = decode(encoded(Image.fromarray(raw)))
    assert np.array_equal(found, raw)
    fitted = Preprocessing.fit([found], {})
    assert abs(fitted(found).std(correction=0).item() - 1) < 1e-5


def test_floats_stay_floats():
    raw = np.linspace(0, 1, 35, dtype=np.float32).reshape(5, 7)
    assert np.array_equal(decode(encoded(Image.fromarray(raw), "TIFF")), raw)


def test_an_image_lies_as_its_exif_says():
    raw = np.zeros((4, 8, 3), np.uint8)
    raw[:, :4] = 255  # white on the left
    exif = Image.Exif()
    exif[0x0112] = 6  # turn by 90 degrees clockwise to see it upright
    found = decode(encoded(Image.fromarray(raw), "PNG", exif=exif))
    assert found.shape == (8, 4, 3)
    assert (found[:4] == 255).all() and (found[4:] == 0).all()


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "GIF", "TIFF", "WEBP"])
def test_a_truncated_file_is_no_image(kind):
    data = encoded(Image.fromarray(noise(64, 64, 3)), kind)
    with pytest.raises(ValueError, match="not a readable image"):
        decode(data[: len(data) // 2])


@pytest.mark.parametrize(
    "data", [b"", b"hello", b"\x89PNG\r\n\x1a\n", b"\xff\xd8\xff", bytes(1000)]
)
def test_other_bytes_are_no_image(data):
    with pytest.raises(ValueError, match="not a readable image"):
        decode(data)


@pytest.mark.filterwarnings("ignore")  # what Pillow thinks of damaged metadata
@pytest.mark.parametrize("kind", ["PNG", "JPEG", "GIF", "TIFF", "WEBP", "BMP"])
def test_damaged_files_raise_value_error_and_nothing_else(kind):
    data, chance = encoded(Image.fromarray(noise(16, 16, 3)), kind), random.Random(0)
    for _ in range(60):
        damaged = bytearray(data)
        for _ in range(4):
            damaged[chance.randrange(len(data))] = chance.randrange(256)
        try:
            found = decode(bytes(damaged))
        except ValueError:
            continue
        assert found.ndim in (2, 3)


# ---- augmentation -------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(5, 1, 8, 8), (5, 3, 6, 10)])
def test_all_zero_changes_nothing(shape):
    x = torch.randn(shape, generator=generator())
    assert torch.allclose(augment(x, NOTHING, generator()), x, atol=1e-5)
    assert torch.allclose(augment(x, {}, generator()), x, atol=1e-5)


@pytest.mark.parametrize("shape", [(5, 1, 8, 8), (5, 3, 6, 10)])
def test_one_generator_state_gives_one_result_and_the_batch_itself_is_not_written_to(shape):
    x = torch.randn(shape, generator=generator())
    copy = x.clone()
    options = {"max_shift_px": 1.0, "max_rotation_deg": 10.0, "max_scale": 0.1, "flip": True}
    before = torch.get_rng_state()
    first, second = (augment(x, options, generator(7)) for _ in range(2))
    assert torch.equal(first, second) and torch.equal(x, copy)
    assert torch.equal(torch.get_rng_state(), before)  # the global generator is not drawn from
    assert first.shape == x.shape and first.dtype == x.dtype
    assert not torch.allclose(first, augment(x, options, generator(8)), atol=1e-2)


def centre(x):
    """Centre of mass of each image, (B, 2): row and column in pixels."""
    mass = x[:, 0] / x[:, 0].sum(dim=(1, 2), keepdim=True)
    rows, columns = torch.arange(x.shape[2]).float(), torch.arange(x.shape[3]).float()
    return torch.stack([mass.sum(dim=2) @ rows, mass.sum(dim=1) @ columns], dim=1)


def dots(count, height, width):
    """Images with one soft dot in the middle."""
    rows = torch.arange(height).float() - (height - 1) / 2
    columns = torch.arange(width).float() - (width - 1) / 2
    dot = torch.exp(-(rows[:, None] ** 2 + columns[None] ** 2) / 4)
    return dot.expand(count, 1, height, width).clone()


@pytest.mark.parametrize(("height", "width"), [(21, 21), (21, 41), (41, 21)])
def test_a_shift_moves_by_up_to_the_asked_pixels_on_both_axes(height, width):
    x = dots(400, height, width)
    moved = centre(augment(x, {"max_shift_px": 3.0}, generator())) - centre(x)
    for axis in (0, 1):
        assert 2.8 < moved[:, axis].abs().max() < 3.05
        assert abs(moved[:, axis].mean()) < 0.3
        assert abs(moved[:, axis].std() - 3 / 3**0.5) < 0.15  # uniform over -3 to 3


@pytest.mark.parametrize(("height", "width"), [(31, 31), (31, 61)])
def test_a_rotation_turns_by_up_to_the_asked_degrees_and_keeps_distances(height, width):
    x = torch.zeros(300, 1, height, width)
    x[:, :, height // 2, width // 2 + 10] = 1  # ten pixels right of the middle
    from_middle = centre(augment(x, {"max_rotation_deg": 30.0}, generator()))
    from_middle -= torch.tensor([height // 2, width // 2])
    angle = torch.atan2(from_middle[:, 0], from_middle[:, 1]).rad2deg().abs()
    assert 28 < angle.max() < 31.5
    assert (from_middle.norm(dim=1) - 10).abs().max() < 0.5


def test_a_scale_grows_and_shrinks_by_the_asked_share():
    x = torch.zeros(300, 1, 41, 41)
    x[:, :, 20, 30] = 1
    away = centre(augment(x, {"max_scale": 0.2}, generator()))[:, 1] - 20
    assert 7.9 < away.min() < 8.6 and 11.8 < away.max() < 12.8


def test_flip_mirrors_about_half_of_the_images_left_to_right_and_no_other_way():
    x = torch.randn(1, 1, 6, 10, generator=generator()).expand(200, 1, 6, 10)
    found = augment(x, {"flip": True}, generator())
    same = torch.isclose(found, x, atol=1e-4).all(dim=3).all(dim=2).squeeze()
    mirrored = torch.isclose(found, x.flip(3), atol=1e-4).all(dim=3).all(dim=2).squeeze()
    assert (same ^ mirrored).all()
    assert 70 < mirrored.sum() < 130


def test_images_of_a_batch_move_independently_and_channels_together():
    x = dots(8, 21, 21).expand(8, 3, 21, 21)
    found = augment(x, {"max_shift_px": 3.0}, generator())
    assert torch.equal(found[:, 0], found[:, 2])
    assert len({tuple(row.tolist()) for row in centre(found).round(decimals=2)}) == 8


def test_half_precision_stays_half_precision():
    x = torch.randn(2, 1, 8, 8, generator=generator()).bfloat16()
    assert augment(x, {"max_shift_px": 1.0}, generator()).dtype == torch.bfloat16
