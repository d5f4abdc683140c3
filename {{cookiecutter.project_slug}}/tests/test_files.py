"""harness/files.py: whole or absent, and one byte string per value."""

import hashlib
import json
import os

import pytest

from {{cookiecutter.project_slug}}.harness import files


def names(folder):
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("depth", ["", "a/b/c"])
def test_a_file_is_written_with_its_parents_and_nothing_beside_it(tmp_path, depth):
    path = tmp_path / depth / "x.bin"
    files.write_bytes(path, b"\x00\r\n\xff")
    assert path.read_bytes() == b"\x00\r\n\xff"
    assert names(path.parent) == ["x.bin"]


def test_text_is_utf_8_with_the_same_line_ends_everywhere(tmp_path):
    files.write_text(tmp_path / "x.txt", "Žluť\nзима\n")
    assert (tmp_path / "x.txt").read_bytes() == "Žluť\nзима\n".encode()


def test_an_old_file_is_replaced_by_the_whole_new_one(tmp_path, monkeypatch):
    path, replace, seen = tmp_path / "x.txt", os.replace, []
    files.write_text(path, "old and long")

    def watched(source, target):
        seen.append((source.read_bytes(), target.read_bytes()))  # complete before it takes over
        replace(source, target)

    monkeypatch.setattr(os, "replace", watched)
    files.write_text(path, "new")
    assert seen == [(b"new", b"old and long")] and path.read_bytes() == b"new"


@pytest.mark.parametrize("step", ["fsync", "replace"])
def test_a_write_that_fails_leaves_the_old_file_and_no_part_of_a_new_one(
    tmp_path, monkeypatch, step
):
    path = tmp_path / "x.txt"
    files.write_text(path, "old")

    def broken(*arguments):
        raise OSError("disk full")

    monkeypatch.setattr(os, step, broken)
    with pytest.raises(OSError, match="disk full"):
        files.write_text(path, "new")
    assert path.read_text(encoding="utf-8") == "old" and names(tmp_path) == ["x.txt"]


def test_json_keeps_the_order_of_its_keys_and_reads_back(tmp_path):
    value = {"b": [1, 2.5, None, True], "a": {"ключ": "значение"}}
    files.write_json(tmp_path / "x.json", value)
    text = (tmp_path / "x.json").read_text(encoding="utf-8")
    assert text.endswith("}\n") and text.index('"b"') < text.index('"a"') and "ключ" in text
    assert files.read_json(tmp_path / "x.json") == value


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_what_json_cannot_say_is_refused_and_no_file_is_left(tmp_path, value):
    with pytest.raises(ValueError):
        files.write_json(tmp_path / "x.json", {"loss": value})
    with pytest.raises(ValueError):
        files.canonical([value])
    assert names(tmp_path) == []


def test_rows_are_appended_one_line_each(tmp_path):
    path = tmp_path / "runs" / "history.jsonl"
    files.append_jsonl(path, [{"step": 1}, {"step": 2}])
    files.append_jsonl(path, [{"step": 3, "note": "two\nlines"}])
    assert len(path.read_bytes().splitlines()) == 3 and b"\r" not in path.read_bytes()
    assert files.read_jsonl(path) == [{"step": 1}, {"step": 2}, {"step": 3, "note": "two\nlines"}]


def test_a_line_separator_inside_a_text_is_no_new_row(tmp_path):
    path = tmp_path / "x.jsonl"
    rows = [{"name": "a\u2028b\x85c"}, {"name": "d"}]
    files.append_jsonl(path, rows)
    assert files.read_jsonl(path) == rows


def test_the_canonical_form_forgets_the_order_of_keys_and_nothing_else():
    assert files.canonical({"b": 1, "a": [1, {"d": 2, "c": 3}]}) == b'{"a":[1,{"c":3,"d":2}],"b":1}'
    assert files.canonical({"a": 1, "b": 2}) == files.canonical({"b": 2, "a": 1})
    different = [[1, 2], [2, 1], {"a": 1}, {"a": 1.5}, {"a": "1"}, {"a": None}, "ä", "a"]
    assert len({files.canonical(value) for value in different}) == len(different)
    assert files.canonical("ä") == '"ä"'.encode()


@pytest.mark.parametrize("value", [0.1, 1e-300, 123456789.123456789, 5e-324])
def test_the_canonical_form_keeps_every_bit_of_a_float(value):
    assert json.loads(files.canonical([value])) == [value]


def test_digests_are_sha256(tmp_path):
    data = os.urandom(3 * (1 << 20) + 7)  # more than one chunk
    (tmp_path / "x.bin").write_bytes(data)
    assert files.sha256_file(tmp_path / "x.bin") == hashlib.sha256(data).hexdigest()
    value = {"b": 1, "a": 2}
    assert files.sha256_json(value) == hashlib.sha256(b'{"a":2,"b":1}').hexdigest()
