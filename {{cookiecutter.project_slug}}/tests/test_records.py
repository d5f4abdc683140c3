"""Records, what identifies them, and the seal on the test rows."""

import os

import numpy as np
import pytest

from {{cookiecutter.project_slug}}.harness import records


def make(num_rows=4, **parts):
    rows = range(num_rows)
    fields = {
        "ids": tuple(f"r{row}" for row in rows),
        "raw": np.arange(2 * num_rows, dtype=np.uint8).reshape(num_rows, 2),
        "labels": np.array([row % 2 for row in rows], dtype=np.int64),
        "class_names": ("a", "b"),
    }
    return records.Records(**(fields | parts))


def identity_of(found):
    return records.identity(found, records.content_hashes(found))


# ---- what fits together -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("parts", "told"),
    [
        ({"ids": ("r0", "r1", "r1", "r3")}, "1 ids name more than one row .*'r1'"),
        ({"labels": np.array([0, 1], dtype=np.int64)}, "4 ids but 2 labels"),
        ({"labels": np.array([0, 1, 2, 0], dtype=np.int64)}, "outside the 2 class names"),
        ({"labels": np.array([0, 1, -1, 0], dtype=np.int64)}, "labels run from -1"),
        ({"labels": np.array([0.0, 1.0, 0.0, 1.0])}, r"must be \(N,\) int64"),
        ({"groups": ("g",)}, "4 ids but 1 groups"),
        ({"given": ("train", "val", "test", "test")}, "'val'; it must be one of"),
        ({"unreadable": {"other": "cut off"}}, "'other', which is no id"),
    ],
)
def test_parts_that_do_not_fit_are_refused(parts, told):
    with pytest.raises(ValueError, match=told):
        make(**parts)


def test_take_keeps_every_part_of_a_row():
    found = make(groups=tuple("wxyz"), times=tuple("1234"), unreadable={"r2": "cut off"})
    taken = found.take([2, 0])
    assert taken.ids == ("r2", "r0")
    assert taken.raw.tolist() == [[4, 5], [0, 1]]
    assert (taken.groups, taken.times, taken.given) == (("y", "w"), ("3", "1"), None)
    assert taken.unreadable == {"r2": "cut off"}
    assert found.take([0]).unreadable == {}


def test_times_sort_as_numbers_or_dates_and_nothing_else_is_guessed():
    assert records.time_values(["9", "10", "2.5"]).argsort().tolist() == [2, 0, 1]
    dates = records.time_values(["2024-03-01T00:30:00+01:00", "2024-02-29", "2024-02-29T23:45:00Z"])
    assert dates.argsort().tolist() == [1, 0, 2]
    with pytest.raises(ValueError, match="'3/4/2024' is neither a number nor an ISO date"):
        records.time_values(["2024-03-01", "3/4/2024"])


# ---- content and identity ---------------------------------------------------------------------


def test_content_hash_tells_dtype_shape_and_every_bit_apart():
    base = np.arange(6, dtype=np.uint8)
    others = [base.astype(np.int8), base.reshape(2, 3), base + np.uint8(1), base[:5]]
    hashes = {records.content_hash(array) for array in [base, *others]}
    assert len(hashes) == 5
    assert records.content_hash(base.copy()) == records.content_hash(base)
    assert records.content_hash(base.astype(">u2")) == records.content_hash(base.astype("<u2"))


def test_content_hash_does_not_depend_on_the_layout_in_memory():
    array = np.arange(6).reshape(2, 3)
    assert records.content_hash(np.asfortranarray(array)) == records.content_hash(array)


def test_a_file_hashes_over_its_bytes_and_text_over_its_characters(tmp_path):
    path = tmp_path / "a.bin"
    path.write_bytes(b"abc")
    assert records.content_hash(path) == records.content_hash(b"abc") == records.content_hash("abc")
    assert records.content_hash({"x": 1, "y": None}) == records.content_hash({"y": None, "x": 1})


def test_the_identity_ignores_the_order_of_the_rows():
    found = make()
    assert identity_of(found) == identity_of(found.take([3, 1, 0, 2]))


@pytest.mark.parametrize(
    "parts",
    [
        {"ids": ("r0", "r1", "r2", "r9")},
        {"raw": np.arange(1, 9, dtype=np.uint8).reshape(4, 2)},
        {"labels": np.array([0, 1, 1, 1], dtype=np.int64)},
        {"class_names": ("b", "a")},
        {"groups": ("g", "g", "g", "h")},
        {"times": ("1", "2", "3", "4")},
        {"given": ("train", "train", "train", "test")},
    ],
)
def test_the_identity_changes_with_every_part(parts):
    assert identity_of(make(**parts)) != identity_of(make())


# ---- caches -----------------------------------------------------------------------------------


def write_files(folder, *, settled=True):
    """Four files, one an empty class of its own, as records; settled files are an hour old."""
    paths = [folder / f"{name}.bin" for name in "abcd"]
    for path in paths:
        path.write_bytes(path.name.encode())
        if settled:
            set_time(path, path.stat().st_mtime_ns - 3_600 * 10**9)
    return make(raw=paths)


def set_time(path, nanoseconds):
    os.utime(path, ns=(nanoseconds, nanoseconds))


@pytest.fixture
def hashed(monkeypatch):
    """The names of the files that were read to be hashed."""
    seen, plain = [], records.content_hash

    def listening(raw):
        seen.append(raw.name)
        return plain(raw)

    monkeypatch.setattr(records, "content_hash", listening)
    return seen


def test_only_changed_files_are_hashed_again(tmp_path, hashed):
    cache, found = tmp_path / "cache" / "hashes.json", write_files(tmp_path)
    first = records.content_hashes(found, cache)
    hashed.clear()
    assert records.content_hashes(found, cache) == first
    assert hashed == []
    time = found.raw[1].stat().st_mtime_ns
    found.raw[1].write_bytes(b"other")
    set_time(found.raw[1], time + 1)
    again = records.content_hashes(found, cache)
    assert hashed == ["b.bin"]
    assert [a == b for a, b in zip(first, again, strict=True)] == [True, False, True, True]


def test_a_file_just_written_is_not_trusted_to_the_cache(tmp_path, hashed):
    cache, found = tmp_path / "hashes.json", write_files(tmp_path, settled=False)
    records.content_hashes(found, cache)
    hashed.clear()
    records.content_hashes(found, cache)
    assert len(hashed) == 4


def test_two_folders_with_the_same_names_sizes_and_times_do_not_share_hashes(tmp_path):
    cache = tmp_path / "hashes.json"
    for folder in ("one", "two"):
        (tmp_path / folder).mkdir()
    one, two = write_files(tmp_path / "one"), write_files(tmp_path / "two")
    two.raw[0].write_bytes(b"A.bin")
    for a, b in zip(one.raw, two.raw, strict=True):
        set_time(b, a.stat().st_mtime_ns)
    assert records.content_hashes(one, cache)[0] != records.content_hashes(two, cache)[0]


def test_a_damaged_cache_is_an_empty_one(tmp_path):
    cache, found = tmp_path / "hashes.json", write_files(tmp_path)
    cache.write_text("{", encoding="utf-8")
    first = records.content_hashes(found, cache)
    assert first == records.content_hashes(found)
    assert records.content_hashes(found, cache) == first


def test_a_file_that_is_gone_has_no_hash(tmp_path):
    found = write_files(tmp_path)
    found.raw[2].unlink()
    assert [bool(text) for text in records.content_hashes(found)] == [True, True, False, True]


def test_a_stamp_is_remembered_until_it_changes(tmp_path):
    cache, stamp = tmp_path / "cache" / "stamp.json", {"a.png": [3, 17]}
    assert records.recall(cache, stamp) is None
    records.remember(cache, stamp, "abc", 4)
    records.remember(cache, {"b.png": [1, 1]}, "def", 1)
    assert records.recall(cache, stamp) == ("abc", 4)
    assert records.recall(cache, {"a.png": [3, 18]}) is None


def test_old_stamps_are_forgotten(tmp_path):
    cache = tmp_path / "stamp.json"
    for number in range(records.NUM_REMEMBERED + 1):
        records.remember(cache, {"a": [number]}, "abc", number)
    assert records.recall(cache, {"a": [0]}) is None
    assert records.recall(cache, {"a": [1]}) == ("abc", 1)


# ---- the seal ---------------------------------------------------------------------------------

SPLITS = {"ids": {"train": ["r0", "r1"], "validation": ["r2"], "test": ["r3"]}}


def test_train_and_validation_are_handed_out_and_test_is_sealed():
    view = records.SplitView(make(), SPLITS)
    assert view.take("train").ids == ("r0", "r1")
    assert view.take("validation").ids == ("r2",)
    for ask in (view.rows, view.take):
        with pytest.raises(records.SealedTestError, match="stage=squeeze"):
            ask("test")


def test_an_opened_view_hands_out_the_test_rows():
    assert records.SplitView(make(), SPLITS, opened=True).take("test").ids == ("r3",)


def test_ids_that_left_the_data_are_named():
    splits = {"ids": {"train": ["r0", "gone"], "validation": [], "test": []}}
    with pytest.raises(ValueError, match=r"1 train ids .*'gone'.*stage=data_audit"):
        records.SplitView(make(), splits).take("train")


def test_a_split_that_is_none_is_refused():
    with pytest.raises(ValueError, match="no split 'holdout'"):
        records.SplitView(make(), SPLITS).rows("holdout")
