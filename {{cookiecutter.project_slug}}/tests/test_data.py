"""data.py: the three sources, and a clear word for everything that can be wrong with them."""

import os
import re
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image

from {{cookiecutter.project_slug}} import data, preprocessing
from {{cookiecutter.project_slug}}.harness.records import content_hashes
from {{cookiecutter.project_slug}}.harness.schema import BadInput
from {{cookiecutter.project_slug}}.harness.settings import DataConfig, SplitConfig
from {{cookiecutter.project_slug}}.stages import entrants

COLUMNS = {
    "path_column": "path",
    "label_column": "label",
    "group_column": None,
    "time_column": None,
    "split_column": None,
}


def folder_of(path, **options):
    return SimpleNamespace(source="folder", path=str(path), options=options)


def manifest_of(path, **options):
    return SimpleNamespace(source="manifest", path=str(path), options=COLUMNS | options)


DIGITS = SimpleNamespace(source="digits", path=None, options={})


def draw(path, value=0, size=(4, 6), mode="L"):
    """An image of one gradient, at `path`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    pixels = (np.arange(size[0] * size[1]).reshape(size) + value).astype(np.uint8)
    Image.fromarray(pixels).convert(mode).save(path)
    return path


@pytest.fixture
def images(tmp_path):
    """Two classes of three images, in a folder beside nothing else."""
    for number in range(3):
        draw(tmp_path / "images" / "cat" / f"{number}.png", number)
        draw(tmp_path / "images" / "dog" / f"{number}.jpg", 100 + number)
    return tmp_path / "images"


def write_csv(path, *lines, encoding="utf-8", end="\n"):
    path.write_bytes(end.join([*lines, ""]).encode(encoding))
    return path


def refused(settings, match, kind=ValueError):
    with pytest.raises(kind, match=match) as caught:
        data.load(settings)
    assert "\n" not in str(caught.value)


# ---- digits -------------------------------------------------------------------------------------


def test_digits_are_1797_images_of_ten_classes_with_stable_ids():
    found = data.load(DIGITS)
    assert len(found) == 1797
    assert found.ids[0] == "digit-0000" and found.ids[-1] == "digit-1796"
    assert found.class_names == tuple("0123456789")
    assert found.labels.dtype == np.int64 and found.labels[:10].tolist() == list(range(10))
    raw = data.read(found.raw[0])
    assert raw.shape == (8, 8) and raw.dtype == np.uint8
    assert max(image.max() for image in found.raw) == 16


def test_digits_take_no_path():
    refused(SimpleNamespace(source="digits", path="x", options={}), "data=folder or data=manifest")


def test_the_stamp_of_digits_is_the_version_that_embeds_them():
    assert list(data.stamp(DIGITS)) == ["scikit-learn"]


# ---- folder -------------------------------------------------------------------------------------


def test_a_folder_of_class_folders_is_read_in_the_order_of_its_file_names(images):
    draw(images / "cat" / "2.jpg")
    found = data.load(folder_of(images))
    assert found.ids[:4] == ("dog/0.jpg", "cat/0.png", "dog/1.jpg", "cat/1.png")
    assert found.ids[4:] == ("cat/2.jpg", "dog/2.jpg", "cat/2.png")
    assert found.class_names == ("cat", "dog")  # in the order of their names
    assert found.labels.tolist() == [1, 0, 1, 0, 0, 1, 0]
    assert data.read(found.raw[3])[0, 0] == 1


def test_images_below_subfolders_belong_to_the_class_folder(images):
    draw(images / "cat" / "indoors" / "9.PNG")
    found = data.load(folder_of(images))
    assert found.ids[-1] == "cat/indoors/9.PNG" and found.labels[-1] == 0


def test_hidden_files_and_folders_are_no_data(images):
    draw(images / ".cache" / "0.png")
    draw(images / "_old" / "0.png")
    draw(images / "cat" / ".thumbnails" / "0.png")
    (images / "cat" / "._0.png").write_bytes(b"resource fork")
    (images / "cat" / "notes.txt").write_text("mine", encoding="utf-8")
    (images / "README.md").write_text("mine", encoding="utf-8")
    assert len(data.load(folder_of(images))) == 6


def test_a_hidden_folder_above_the_data_hides_nothing(tmp_path):
    for name in ("a", "b"):
        draw(tmp_path / ".data" / name / "0.png")
    assert len(data.load(folder_of(tmp_path / ".data"))) == 2


def test_a_folder_that_is_not_there(tmp_path):
    refused(folder_of(tmp_path / "no"), r"no does not exist \(looked for", FileNotFoundError)
    with pytest.raises(FileNotFoundError, match="does not exist"):
        data.stamp(folder_of(tmp_path / "no"))


def test_no_path_at_all():
    refused(SimpleNamespace(source="folder", path=None, options={}), r"needs data\.path=\.\.\.")


def test_a_class_without_images_is_named(images):
    (images / "emu").mkdir()
    (images / "fox").mkdir()
    refused(folder_of(images), "class folder without images in .*: emu, fox. Fill it or remove it")


def test_one_class_is_nothing_to_learn(tmp_path):
    draw(tmp_path / "cat" / "0.png")
    refused(folder_of(tmp_path), "has one class, cat: nothing to tell apart")


def test_images_without_class_folders_are_no_classes(tmp_path):
    draw(tmp_path / "0.png")
    refused(folder_of(tmp_path), "Put each class in a folder of its own")


def test_a_folder_of_splits_is_not_taken_for_classes(images):
    for split in ("train", "Val"):
        draw(images.parent / "split" / split / "cat" / "0.png")
    refused(folder_of(images.parent / "split"), r"holds splits \(Val, train\), not classes")
    draw(images / "test" / "0.png")  # beside other classes it is one
    assert data.load(folder_of(images)).class_names == ("cat", "dog", "test")


def test_a_file_is_no_folder_and_a_folder_no_manifest(images):
    refused(folder_of(images / "cat" / "0.png"), "is a file: use data=manifest")
    refused(manifest_of(images), "is a folder: use data=folder")


def test_ids_and_hashes_do_not_depend_on_where_the_folder_lies(images, tmp_path):
    found = data.load(folder_of(images))
    hashes = content_hashes(found)
    images.rename(tmp_path / "elsewhere")
    moved = data.load(folder_of(tmp_path / "elsewhere"))
    assert moved.ids == found.ids and content_hashes(moved) == hashes


def test_the_stamp_changes_with_a_file_s_size_time_and_name(images):
    before = data.stamp(folder_of(images))
    assert set(before) == set(data.load(folder_of(images)).ids)
    os.utime(images / "cat" / "0.png", ns=(1, 1))
    touched = data.stamp(folder_of(images))
    assert touched["cat/0.png"][1] == 1 and touched["cat/1.png"] == before["cat/1.png"]
    (images / "cat" / "2.png").rename(images / "cat" / "3.png")
    assert set(data.stamp(folder_of(images))) != set(before)


def test_an_unreadable_file_says_so_when_it_is_read_and_not_before(images):
    (images / "cat" / "1.png").write_bytes(b"not an image")
    found = data.load(folder_of(images))
    assert len(found) == 6
    for name, raw in zip(found.ids, found.raw, strict=True):
        if name == "cat/1.png":
            with pytest.raises(ValueError, match="not a readable image"):
                data.read(raw)
        else:
            data.read(raw)


# ---- manifest -----------------------------------------------------------------------------------


def test_a_manifest_names_path_and_label(images):
    path = write_csv(images / "m.csv", "path,label", "dog/0.jpg,woof", "cat/1.png,meow")
    found = data.load(manifest_of(path))
    assert found.ids == ("dog/0.jpg", "cat/1.png")  # in its own order
    assert found.class_names == ("meow", "woof") and found.labels.tolist() == [1, 0]
    assert found.groups is found.times is found.given is None
    assert set(data.stamp(manifest_of(path))) == {"m.csv", "dog/0.jpg", "cat/1.png"}


def test_a_manifest_may_name_group_time_and_split_and_call_its_columns_anything(images):
    lines = ("file;kind;who;day;part;note", "cat/0.png;a;ann;2024-01-01;train;x")
    lines = [*lines, "dog/0.jpg;b;bob;2024-01-02;test;"]
    path = write_csv(images / "m.csv", *(line.replace(";", ",") for line in lines))
    names = {"path_column": "file", "label_column": "kind", "group_column": "who"}
    found = data.load(manifest_of(path, **names, time_column="day", split_column="part"))
    assert found.groups == ("ann", "bob")
    assert found.times == ("2024-01-01", "2024-01-02")
    assert found.given == ("train", "test")


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig"])
@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_a_manifest_from_windows_reads_like_any_other(images, encoding, end):
    lines = ("path,label", r"cat\0.png, Kätzchen", r"dog\0.jpg,Hund ")
    path = write_csv(images / "m.csv", *lines, encoding=encoding, end=end)
    found = data.load(manifest_of(path))
    assert found.ids == ("cat/0.png", "dog/0.jpg")
    assert found.class_names == ("Hund", "Kätzchen")


@pytest.mark.parametrize("encoding", ["utf-16", "latin-1"])
def test_a_manifest_in_another_encoding_is_named(images, encoding):
    path = write_csv(images / "m.csv", "path,label", "cat/0.png,Kätzchen", encoding=encoding)
    refused(manifest_of(path), r"m\.csv is no CSV file in UTF-8")


def test_an_image_is_no_manifest(images):
    refused(manifest_of(images / "cat" / "0.png"), r"0\.png is no CSV file in UTF-8")


def test_a_missing_column_is_named_with_those_that_are_there(images):
    path = write_csv(images / "m.csv", "file,label", "cat/0.png,a")
    refused(manifest_of(path), r"has no column path \(it has: file, label\).*path_column")
    path = write_csv(images / "m.csv", "path,label", "cat/0.png,a")
    refused(manifest_of(path, group_column="who"), "has no column who")
    path = write_csv(images / "m.csv", "path;label", "cat/0.png;a")
    refused(manifest_of(path), r"\(it has: path;label\)")
    refused(manifest_of(write_csv(images / "m.csv")), r"\(it has: none\)")


def test_a_manifest_without_rows(images):
    refused(manifest_of(write_csv(images / "m.csv", "path,label")), "lists no rows")


@pytest.mark.parametrize("row", ["cat/0.png,", "cat/0.png,  ", "cat/0.png"])
def test_a_row_without_a_label_is_named_by_its_line(images, row):
    path = write_csv(images / "m.csv", "path,label", "dog/0.jpg,b", row)
    refused(manifest_of(path), r"line 3 of .*m\.csv has nothing in column label: complete it")


def test_an_empty_group_would_be_one_large_group_and_is_refused(images):
    lines = ("path,label,who", "cat/0.png,a,ann", "dog/0.jpg,b,")
    path = write_csv(images / "m.csv", *lines)
    assert len(data.load(manifest_of(path))) == 2  # not asked for: not looked at
    refused(manifest_of(path, group_column="who"), "line 3 .* nothing in column who")


def test_a_comma_too_many_is_named_by_its_line(images):
    path = write_csv(images / "m.csv", "path,label", "cat/0.png,a", "dog/0,1.jpg,b")
    refused(manifest_of(path), "line 3 .* has more values than columns")


def test_one_label_alone(images):
    path = write_csv(images / "m.csv", "path,label", "cat/0.png,a", "dog/0.jpg,a")
    refused(manifest_of(path), "has one class, a: .*name another label column")


def test_a_listed_path_twice_is_refused_however_it_is_spelled(images):
    lines = ("path,label", "cat/0.png,a", "dog/0.jpg,b", "dog/../cat/0.png,b")
    refused(manifest_of(write_csv(images / "m.csv", *lines)), "ids name more than one row")


def test_listed_files_that_are_not_there_are_counted(images):
    lines = ("path,label", "cat/0.png,a", "gone.png,b", "lost.png,b")
    settings = manifest_of(write_csv(images / "m.csv", *lines))
    refused(settings, r"2 of 3 files .* do not exist, the first is .*gone\.png", FileNotFoundError)
    with pytest.raises(FileNotFoundError, match="2 of 3"):
        data.stamp(settings)


def test_paths_may_lie_outside_the_manifest_s_folder_or_be_absolute(images):
    lines = ("path,label", "../images/cat/0.png,a", f"{(images / 'dog' / '0.jpg').resolve()},b")
    path = images.parent / "lists" / "m.csv"
    path.parent.mkdir()
    found = data.load(manifest_of(write_csv(path, *lines)))
    assert found.ids == ("../images/cat/0.png", "../images/dog/0.jpg")
    assert [data.read(raw).mean() for raw in found.raw] == pytest.approx([11.5, 111.5], abs=1)


def test_a_split_that_is_none_is_refused(images):
    lines = ("path,label,part", "cat/0.png,a,train", "dog/0.jpg,b,val")
    path = write_csv(images / "m.csv", *lines)
    refused(manifest_of(path, split_column="part"), "A row's split is 'val'")


# ---- tensors ------------------------------------------------------------------------------------


def test_prepare_gives_x_y_and_id_and_the_same_for_every_split(images):
    found = data.load(folder_of(images))
    fitted = preprocessing.Preprocessing.fit([data.read(raw) for raw in found.raw], {})
    train = data.prepare(found, fitted, "train")
    assert train["x"].shape == (6, 1, 4, 6) and train["x"].dtype == torch.float32
    assert train["y"].dtype == torch.int64 and train["y"].tolist() == [1, 0, 1, 0, 1, 0]
    assert train["id"].tolist() == list(range(6))
    assert torch.equal(train["x"], data.prepare(found, fitted, "validation")["x"])


def test_grey_and_colour_files_in_one_folder_become_one_shape(images):
    draw(images / "cat" / "colour.png", mode="RGB")
    found = data.load(folder_of(images))
    fitted = preprocessing.Preprocessing.fit([data.read(raw) for raw in found.raw], {})
    assert data.prepare(found, fitted, "train")["x"].shape == (7, 3, 4, 6)


def test_mixed_sizes_are_refused_with_their_counts_and_the_remedy(images):
    draw(images / "cat" / "big.png", size=(9, 5))
    raws = [data.read(raw) for raw in data.load(folder_of(images)).raw]
    with pytest.raises(ValueError, match=re.escape("4x6 (6 images), 9x5 (1 images)")) as caught:
        preprocessing.Preprocessing.fit(raws, {})
    assert "data.options.size=[H,W]" in str(caught.value)
    assert preprocessing.Preprocessing.fit(raws, {"size": [4, 6]}).input_shape == (1, 4, 6)


# ---- external test rows -------------------------------------------------------------------------


def external(settings, test_path, tmp_path):
    """The test rows as squeeze reads them: x, ids, and how many are training rows too."""
    found = data.load(settings)
    fitted = preprocessing.Preprocessing.fit([data.read(raw) for raw in found.raw], {})
    split = SplitConfig(test="external")
    config = DataConfig(**vars(settings), test_path=str(test_path), split=split)
    loaded = SimpleNamespace(records=found, preprocessing=fitted)
    run = SimpleNamespace(runs=tmp_path / "runs")
    rows, ids, shared = entrants.test_rows(SimpleNamespace(data=config), loaded, run)
    return rows, ids, shared


def test_external_test_rows_come_from_another_folder(images, tmp_path):
    for name in ("cat", "dog"):
        draw(tmp_path / "fresh" / name / "7.png", 200)
    rows, ids, shared = external(folder_of(images), tmp_path / "fresh", tmp_path)
    assert ids == ("cat/7.png", "dog/7.png") and shared == 0
    assert rows["x"].shape == (2, 1, 4, 6) and rows["y"].tolist() == [0, 1]


def test_external_test_rows_come_from_another_manifest(images, tmp_path):
    mine = write_csv(images / "m.csv", "path,label", "cat/0.png,a", "dog/0.jpg,b")
    fresh = write_csv(images / "t.csv", "path,label", "dog/1.jpg,b", "cat/1.png,a", "cat/0.png,a")
    rows, ids, shared = external(manifest_of(mine), fresh, tmp_path)
    assert ids == ("dog/1.jpg", "cat/1.png", "cat/0.png")
    assert rows["y"].tolist() == [1, 0, 0] and shared == 1  # cat/0.png was trained on


def test_external_test_rows_of_other_classes_or_from_nowhere_are_refused(images, tmp_path):
    for name in ("cat", "emu"):
        draw(tmp_path / "fresh" / name / "7.png", 200)
    with pytest.raises(BadInput, match="has the class emu; the model knows cat, dog"):
        external(folder_of(images), tmp_path / "fresh", tmp_path)
    with pytest.raises(BadInput, match=r"data\.test_path: .* does not exist"):
        external(folder_of(images), tmp_path / "gone", tmp_path)
