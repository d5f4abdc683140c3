import json
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from small_bundle import ABOUT, NAMES, TASK, make_case

import serve
from {{cookiecutter.project_slug}} import data, preprocessing
from {{cookiecutter.project_slug}}.harness import bundle, files, loop, manifest
from {{cookiecutter.project_slug}}.harness.bundle import BundleError

Bundle = serve.Bundle
FILES = ("card.md", "config.json", "golden.safetensors", "model.safetensors", "preprocessing.json")


@pytest.fixture
def case(tmp_path):
    made = make_case(tmp_path)
    made.write()
    return made


def refused(folder, message):
    with pytest.raises(BundleError, match=message) as refusal:
        Bundle.load(folder)
    assert "\n" not in str(refusal.value)
    return str(refusal.value)


# ---- healthy ------------------------------------------------------------------------------------


def test_a_bundle_answers_what_the_trained_network_answers(case):
    loaded = Bundle.load(case.folder)
    wanted = case.outputs(case.rows["x"]).softmax(dim=1)
    answers = loaded.predict_batch(case.records.raw)
    for row, answer in zip(wanted, answers, strict=True):
        assert answer["class"] == int(row.argmax())
        assert answer["answer"] == NAMES[answer["class"]]
        assert answer["probability"] == pytest.approx(row.max().item(), abs=1e-6)
        assert list(answer["probabilities"]) == list(NAMES)
        assert sum(answer["probabilities"].values()) == pytest.approx(1.0, abs=1e-6)


def test_an_array_the_bytes_and_the_path_of_an_image_get_one_answer(case):
    loaded, path = Bundle.load(str(case.folder)), case.records.raw[3]
    found = [loaded.predict(raw) for raw in (data.read(path), path.read_bytes(), path, str(path))]
    assert found[0] == found[1] == found[2] == found[3]


def test_members_are_averaged_as_the_task_averages_them(tmp_path):
    case = make_case(tmp_path, num_members=12)  # member-10 must not come before member-2
    case.write()
    loaded = Bundle.load(case.folder)
    assert len(loaded.members) == 12
    states = [loop.cpu_state(member) for member in case.members]
    for member, state in zip(loaded.members, states, strict=True):
        assert torch.equal(member.head.weight, state["head.weight"])
    parts = [member.eval()(case.rows["x"]).detach() for member in case.members]
    assert torch.equal(loaded.outputs(case.rows["x"]), TASK.average(parts))


def test_the_same_parts_give_the_same_bundle_and_replace_the_one_before(case):
    first = {path.name: path.read_bytes() for path in case.folder.iterdir()}
    digest = case.write()
    assert {path.name: path.read_bytes() for path in case.folder.iterdir()} == first
    assert set(first) == {*FILES, "manifest.json"}
    about = files.read_json(case.folder / "manifest.json")
    assert about["digest"] == digest == Bundle.load(case.folder).digest
    assert about["schema"] == 1 and len(about["weights"]) == 64


def test_a_single_network_replaces_an_ensemble_without_a_trace(tmp_path):
    case = make_case(tmp_path, num_members=3)
    case.write()
    case.members = case.members[:1]
    case.write()
    assert len(Bundle.load(case.folder).members) == 1


def test_loading_and_answering_leave_the_random_numbers_alone(case):
    before = torch.get_rng_state()
    Bundle.load(case.folder).predict(case.records.raw[0])
    assert torch.equal(before, torch.get_rng_state())


def test_no_inputs_give_no_answers(case):
    assert Bundle.load(case.folder).predict_batch([]) == []


def test_more_inputs_than_one_forward_pass_takes_are_all_answered(case, monkeypatch):
    loaded = Bundle.load(case.folder)
    whole = loaded.predict_batch(case.records.raw)
    monkeypatch.setattr(bundle, "BATCH_SIZE", 4)
    parts = loaded.predict_batch(case.records.raw)
    assert [a["class"] for a in parts] == [a["class"] for a in whole]


def test_the_card_says_what_it_is_its_numbers_and_limits(case):
    card = (case.folder / "card.md").read_text(encoding="utf-8")
    for words in ("ConvNet", "cat, dog, eel", "| test accuracy | 0.97", "drawings of animals"):
        assert words in card


# ---- refused ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("place", [0, 0.5, -1])
def test_one_flipped_bit_anywhere_is_refused(case, name, place):
    path = case.folder / name
    content = bytearray(path.read_bytes())
    content[int(place * len(content)) if place > 0 else place] ^= 1
    path.write_bytes(content)
    assert "stage=squeeze" in refused(case.folder, rf"{re.escape(name)} has changed")


@pytest.mark.parametrize("name", FILES)
def test_a_missing_file_is_refused(case, name):
    (case.folder / name).unlink()
    refused(case.folder, f"lacks {re.escape(name)}")


def test_a_file_too_many_is_refused(case):
    (case.folder / "member-00.safetensors").write_bytes(b"")
    refused(case.folder, "also holds member-00.safetensors")


def test_no_manifest_is_no_bundle(case, tmp_path):
    refused(tmp_path / "nowhere", "is no bundle.*stage=squeeze")
    (case.folder / "manifest.json").unlink()
    refused(case.folder, "is no bundle")


def edit_manifest(folder, change):
    about = files.read_json(folder / "manifest.json")
    change(about)
    files.write_json(folder / "manifest.json", about)


def test_an_edited_manifest_is_refused(case):
    edit_manifest(case.folder, lambda about: about["provenance"].update(seed=1))
    refused(case.folder, "was edited")


def test_an_unknown_schema_is_refused(case):
    edit_manifest(case.folder, lambda about: about.update(schema=2))
    refused(case.folder, "schema 2; this code reads 1")


@pytest.mark.parametrize("text", ["{", "[]", '{"schema": 1}'])
def test_a_manifest_that_is_none_is_refused(case, text):
    (case.folder / "manifest.json").write_text(text, encoding="utf-8")
    refused(case.folder, "cannot be read")


def test_weights_of_another_network_do_not_fit(case):
    case.write(model={**ABOUT, "params": {"width": 8}})
    refused(case.folder, "model.safetensors does not fit ConvNet")
    case.write(model={**ABOUT, "name": "ConfNet"})
    refused(case.folder, "Nearest: ConvNet")


def test_other_weights_of_the_same_shape_fail_the_self_check(case):
    state = loop.cpu_state(case.members[0])
    state["head.bias"] = state["head.bias"] + 1e-3
    case.write(members=[state])
    refused(case.folder, "equal inputs, but the outputs differ by 0.001")


def test_another_preprocessing_state_fails_the_self_check(case):
    state = json.loads(case.fitted.dumps())
    state["mean"][0] = float(np.nextafter(np.float32(state["mean"][0]), np.float32(999)))
    case.write(preprocessing=json.dumps(state))
    refused(case.folder, "self-check failed: preprocessing gives .* of the values differ")
    case.write(preprocessing=json.dumps({**state, "size": [9, 13]}))
    refused(case.folder, "another shape")
    case.write(preprocessing=json.dumps({**state, "schema": 9}))
    refused(case.folder, "cannot be rebuilt")


def with_source(folder, text):
    """This project's Bundle with another preprocessing.py."""
    path = folder / "other.py"
    path.write_text(text, encoding="utf-8")
    module = SimpleNamespace(
        Preprocessing=preprocessing.Preprocessing,
        decode=preprocessing.decode,
        __file__=str(path),
    )
    return type("Other", (Bundle,), {"preprocessing": module})


def test_an_edited_preprocessing_py_is_refused_and_a_comment_is_no_edit(case, tmp_path):
    source = Path(preprocessing.__file__).read_text(encoding="utf-8")
    with_source(tmp_path, source + "\n# nothing new\n").load(case.folder)
    edited = source.replace("BILINEAR)", "BICUBIC)")
    assert edited != source
    with pytest.raises(BundleError, match=r"preprocessing\.py is not the one"):
        with_source(tmp_path, edited).load(case.folder)


def test_outputs_of_an_unknown_kind_are_neither_written_nor_read(case, monkeypatch):
    with pytest.raises(ValueError, match="a bundle needs outputs of exclusive"):
        case.write(outputs="ranks")
    with pytest.raises(ValueError, match="golden inputs"):
        case.write(golden={"raws": [], "x": None, "outputs": None})
    monkeypatch.setitem(bundle.READERS, "ranks", None)
    case.write(outputs="ranks")
    monkeypatch.delitem(bundle.READERS, "ranks")
    refused(case.folder, "outputs 'ranks': unknown here")


def test_the_harness_alone_knows_no_network(case):
    with pytest.raises(BundleError, match="from serve import Bundle"):
        bundle.Bundle.load(case.folder)


@pytest.mark.parametrize("name", ["notes.txt", "data.json"])
def test_a_folder_with_other_things_in_it_is_not_written_to(tmp_path, name):
    (tmp_path / "x").mkdir()
    (tmp_path / "x" / name).write_text("mine", encoding="utf-8")
    with pytest.raises(BundleError, match=f"{re.escape(name)}, which is not a bundle's"):
        manifest.write(tmp_path / "x", {"card.md": b""}, {})
    assert [path.name for path in (tmp_path / "x").iterdir()] == [name]


def test_an_interrupted_write_leaves_no_bundle_and_can_be_repeated(case, monkeypatch):
    written = files.write_bytes

    def stop_at_weights(path, content):
        if path.name.startswith("model."):
            raise KeyboardInterrupt
        written(path, content)

    monkeypatch.setattr(files, "write_bytes", stop_at_weights)
    with pytest.raises(KeyboardInterrupt):
        case.write()
    refused(case.folder, "is no bundle")
    monkeypatch.undo()
    case.write()
    Bundle.load(case.folder)


# ---- bad inputs and the command -----------------------------------------------------------------


@pytest.mark.parametrize(
    "raw", [b"no image", np.zeros((3, 3, 7)), np.full((9, 12), np.nan), "what", {}]
)
def test_an_input_that_is_no_image_is_an_error_and_never_an_answer(case, raw):
    with pytest.raises((ValueError, OSError)):
        Bundle.load(case.folder).predict(raw)


def test_the_command_prints_one_line_per_image(case, capsys):
    images = [str(path) for path in case.records.raw[:2]]
    assert serve.main([str(case.folder), *images]) == 0
    lines = capsys.readouterr().out.splitlines()
    found = zip(images, map(Bundle.load(case.folder).predict, images), strict=True)
    assert lines == [f"{path}\t{a['answer']}\t{a['probability']:.4f}" for path, a in found]
    assert serve.main([str(case.folder), images[0], "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["path"] == images[0] and set(found["probabilities"]) == set(NAMES)


def test_a_bad_image_is_one_line_and_the_others_are_answered(case, capsys, tmp_path):
    (tmp_path / "bad.png").write_bytes(b"no image")
    asked = [str(tmp_path / "bad.png"), str(tmp_path / "none.png"), str(case.records.raw[0])]
    assert serve.main([str(case.folder), *asked]) == 1
    printed = capsys.readouterr()
    assert len(printed.out.splitlines()) == 1
    assert [line.startswith("serve.py: ") for line in printed.err.splitlines()] == [True, True]


def test_serving_needs_neither_hydra_nor_wandb_and_a_refusal_no_traceback(case, project_root):
    unwanted = "{'hydra', 'omegaconf', 'wandb', 'optuna', 'sklearn', 'matplotlib'}"
    code = f"import sys, serve; sys.exit(str({unwanted} & set(sys.modules)))"
    loaded = subprocess.run(
        [sys.executable, "-c", code], cwd=project_root, capture_output=True, text=True
    )
    assert loaded.stderr.strip() == "set()"
    (case.folder / "card.md").unlink()
    asked = [sys.executable, "serve.py", str(case.folder), str(case.records.raw[0])]
    found = subprocess.run(asked, cwd=project_root, capture_output=True, text=True)
    assert found.returncode == 1
    assert found.stderr.startswith("serve.py: ") and len(found.stderr.splitlines()) == 1
