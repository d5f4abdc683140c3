"""A user's own images: folders, a manifest, and everything that can be wrong with them."""

import csv
import shutil
from functools import partial

import numpy as np
import pytest
import walking
from PIL import Image
from sklearn.datasets import load_digits
from walking import FAILED, REFUSED, SHUT, board, checks, gate, launch, read_json, succeed, tree

ROWS_PER_CLASS = 30
STATEMENT = [
    "data.statement.architecture=a small network of filters",
    "data.statement.because=neighbouring pixels belong together",
    "data.statement.findings=none that matter",
]


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    """Digits as PNG files, DIR/CLASS/NUMBER.png. Copy it to change it."""
    folder, found, counts = tmp_path_factory.mktemp("images"), load_digits(), {}
    for row, (image, target) in enumerate(zip(found.images, found.target, strict=True)):
        counts[target] = counts.get(target, 0) + 1
        if counts[target] <= ROWS_PER_CLASS:
            path = folder / f"digit_{target}" / f"{row:04d}.png"
            path.parent.mkdir(exist_ok=True)
            Image.fromarray((image * 15).astype(np.uint8)).save(path)
    return folder


def folder(path) -> list[str]:
    return ["data=folder", f"data.path={path}"]


def copied(images, target):
    return shutil.copytree(images, target / "images")


# ---- from pictures to an open gate, and what a changed picture does -----------------------------


@pytest.fixture(scope="module")
def own(bake, images, tmp_path_factory):
    """A project on its own images, as far as skeleton: name of the launch -> what it printed, and
    which figures of samples were in artifacts/ after it."""
    place = tmp_path_factory.mktemp("own")
    project, pictures, told = bake(), copied(images, place), {}
    data = folder(pictures)
    launches = {
        "no statement": ["stage=data_audit", *data],
        "too early": ["stage=skeleton", *data],
        "stated": ["stage=data_audit", *data, *STATEMENT, "commit_samples=true"],
        "skeleton": ["stage=skeleton", *data],
    }
    for name, arguments in launches.items():
        done = launch(project, *arguments)
        shown = sorted(path.name for path in project.glob("artifacts/*/figures/*.png"))
        told[name] = done, shown, (project / "artifacts" / "data_audit" / "report.md").read_text()
    return project, pictures, told


def test_without_the_owners_statement_the_audit_is_shut_and_drafts_one(own):
    done, _, report = own[2]["no statement"]
    succeed(done, SHUT)
    assert "data.statement.architecture, because, findings" in report
    draft = report.split("## Draft of the statement")[1]
    assert all(f"\n- {name}: " in draft for name in ("architecture", "because", "findings"))


def test_commands_to_run_next_repeat_where_the_data_is(own):
    project, pictures, told = own
    again = f"data=folder data.path={pictures}"
    assert told["no statement"][0].stdout.strip().endswith(f"stage=data_audit {again}")
    refused = succeed(told["too early"][0], REFUSED).stderr
    assert "'data_audit' is shut, statement 0 < 3" in refused
    assert refused.strip().endswith(f"stage=data_audit {again}")
    assert board(project, *folder(pictures))["next"].endswith(f"stage=overfit {again}")


def test_the_statement_opens_the_audit_and_the_skeleton_holds_on_the_users_data(own):
    for name, stage in (("stated", "data_audit"), ("skeleton", "skeleton")):
        done = succeed(own[2][name][0])
        assert f"Gate {stage}: open." in done.stdout
        assert gate(own[0], stage)["verdict"] == "open"


def test_pictures_of_samples_stay_in_runs_unless_they_may_be_committed(own):
    project, _, told = own
    assert told["no statement"][1] == ["classes.png"]
    assert (walking.newest(project, "skeleton") / "samples" / "last_seam.png").exists()
    assert {"classes.png", "random.png"} <= set(told["stated"][1])
    assert "last_seam.png" not in told["skeleton"][1]


def test_changed_missing_and_moved_data(own, copies, tmp_path):
    project, pictures = copies(own[0]), copied(own[1], tmp_path)
    data = folder(pictures)
    assert board(project, *data)["skeleton"].startswith("open"), "where data lies is no evidence"

    path = sorted(pictures.rglob("*.png"))[0]
    image = Image.open(path)
    image.putpixel((0, 0), 200)
    image.save(path)
    before = {k: v for k, v in tree(project).items() if not k.startswith("runs/cache/")}
    done = succeed(launch(project, "stage=overfit", *data), REFUSED)
    assert "the data changed (still 300 records, with other content)" in done.stderr
    assert done.stderr.strip().endswith(" ".join(["python run.py stage=data_audit", *data]))
    after = {k: v for k, v in tree(project).items() if not k.startswith("runs/cache/")}
    assert after == before

    shutil.rmtree(pictures)
    found = board(project, *data)
    assert found["skeleton"].startswith("unverifiable")
    assert "the data is not on this machine" in found["skeleton"].replace("  ", " ")
    done = succeed(launch(project, "stage=overfit", *data), REFUSED)
    assert "unverifiable" in done.stderr


# ---- what is wrong with a folder ----------------------------------------------------------------


def absent(pictures):
    return folder(pictures / "nowhere"), "nowhere does not exist"


def unnamed(pictures):
    return ["data=folder"], "data=folder needs data.path=..."


def empty_class(pictures):
    (pictures / "digit_empty").mkdir()
    return folder(pictures), "class folder without images"


def one_class(pictures):
    return folder(pictures / "digit_0"), "nothing to tell apart"


def mixed_sizes(pictures):
    path = sorted(pictures.rglob("*.png"))[0]
    Image.open(path).resize((9, 7)).save(path)
    return folder(pictures), "8x8 (299 images), 7x9 (1 images). Name one to resize them to"


def absent_manifest(pictures):
    return ["data=manifest", f"data.path={pictures}/rows.csv"], "rows.csv does not exist"


def absent_column(pictures):
    (pictures / "rows.csv").write_text("file,label\na.png,1\n", encoding="utf-8")
    return ["data=manifest", f"data.path={pictures}/rows.csv"], "has no column path"


def absent_file(pictures):
    (pictures / "rows.csv").write_text("path,label\nno.png,1\n", encoding="utf-8")
    return ["data=manifest", f"data.path={pictures}/rows.csv"], "1 of 1 files"


WRONG = [
    absent,
    unnamed,
    empty_class,
    one_class,
    mixed_sizes,
    absent_manifest,
    absent_column,
    absent_file,
]


@pytest.fixture(scope="module")
def complaints(default_project, images, tmp_path_factory):
    def complain(wrong):
        place = tmp_path_factory.mktemp(wrong.__name__)
        project = walking.copy(default_project, place / "p")
        data, expected = wrong(copied(images, place))
        before = tree(project)
        done = launch(project, "stage=data_audit", *data)
        left = tree(project).items() ^ before.items()
        return done, expected, sorted(name for name, _ in left)

    return dict(zip(WRONG, walking.together(*[partial(complain, w) for w in WRONG]), strict=True))


@pytest.mark.parametrize("wrong", WRONG)
def test_data_that_cannot_be_used_is_one_clear_line_and_leaves_nothing(complaints, wrong):
    done, expected, left = complaints[wrong]
    succeed(done, FAILED)
    assert expected in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    assert not [name for name in left if not name.startswith("runs")]
    assert not [name for name in left if name.startswith("runs/data_audit")]


# ---- files that cannot be read, groups that stay together ---------------------------------------


@pytest.fixture(scope="module")
def audits(default_project, images, tmp_path_factory):
    """Two audits at once: of a folder with two unreadable files, and of a manifest with groups."""
    place = tmp_path_factory.mktemp("audits")
    damaged = copied(images, place)
    whole = sorted(damaged.rglob("*.png"))[0]
    whole.write_bytes(whole.read_bytes()[:60])
    (damaged / "digit_1" / "note.png").write_text("no image", encoding="utf-8")
    listed = place / "rows.csv"
    with listed.open("w", encoding="utf-8", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(["image", "class", "writer"])
        for path in sorted(images.rglob("*.png")):
            rows.writerow([path.as_posix(), path.parent.name, f"writer {int(path.stem) // 10}"])
    columns = {"path": "image", "label": "class", "group": "writer"}
    named = [f"data.options.{key}_column={name}" for key, name in columns.items()]
    manifest = ["data=manifest", f"data.path={listed}", *named, "data.split.strategy=group"]

    def audit(name, *data):
        project = walking.copy(default_project, place / name)
        return project, launch(project, "stage=data_audit", *data, *STATEMENT)

    calls = (partial(audit, "damaged", *folder(damaged)), partial(audit, "grouped", *manifest))
    return walking.together(*calls)


def test_unreadable_files_are_named_counted_and_left_out_below_the_limit(audits):
    project, done = audits[0]
    succeed(done)
    corrupt = checks(gate(project, "data_audit"))["corrupt"]
    assert corrupt["verdict"] == "warn"
    assert corrupt["because"].startswith("2 of 301 rows (0.66%) are corrupt")
    split = read_json(project / "artifacts" / "data_audit" / "splits.json")
    assert sorted(split["left_out"]) == ["digit_0/0000.png", "digit_1/note.png"]
    assert all("0x" not in reason for reason in split["left_out"].values()), "a memory address"
    report = (project / "artifacts" / "data_audit" / "report.md").read_text(encoding="utf-8")
    assert "- corrupt: digit_0/0000.png, digit_1/note.png" in report


def test_a_manifest_with_groups_keeps_each_group_in_one_split(audits, images):
    project, done = audits[1]
    succeed(done)
    split = read_json(project / "artifacts" / "data_audit" / "splits.json")
    writers = {
        name: {int(row.rpartition("/")[2].removesuffix(".png")) // 10 for row in rows}
        for name, rows in split["ids"].items()
    }
    assert all(writers.values())
    for one, other in (("train", "validation"), ("train", "test"), ("validation", "test")):
        assert not writers[one] & writers[other]
    assert sum(len(rows) for rows in split["ids"].values()) == len(list(images.rglob("*.png")))
