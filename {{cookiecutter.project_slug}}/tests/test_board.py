import io

import pytest
from paper_project import PaperProject, check

from {{cookiecutter.project_slug}}.harness import board, gates


@pytest.fixture
def paper(tmp_path):
    return PaperProject(tmp_path)


def judged(paper):
    return gates.judge_all(paper.project, paper.config, paper.data)


def printed(judgements, **more) -> str:
    file = io.StringIO()
    board.print_board(judgements, file=file, **more)
    return file.getvalue()


def test_a_new_project_shows_six_missing_stages_in_order_and_the_first_command(paper):
    text = printed(judged(paper))
    rows = [line.split()[:2] for line in text.splitlines() if "missing" in line]
    assert rows == [[stage, "missing"] for stage in paper.project.order]
    assert text.rstrip().endswith("Next. Run: python run.py stage=data_audit")


def test_the_next_command_is_that_of_the_first_gate_that_is_not_open(paper):
    paper.walk("skeleton")
    paper.record("overfit", [check("final_loss", "shut", 0.5, 0.1, suspect=("lr too low",))])
    plain = board.as_dict(judged(paper))
    assert [row["status"] for row in plain["stages"]][:3] == ["open", "open", "shut"]
    assert plain["stages"][2]["why"] == "final_loss 0.5 > 0.1"
    assert plain["next"] == [
        "Next. Repair final_loss first (lr too low). Then run",
        "python run.py stage=overfit",
    ]


def test_after_the_whole_walk_nothing_is_left_to_run(paper):
    paper.walk()
    assert "All gates are open" in printed(judged(paper))


def test_without_the_data_the_board_says_what_to_bring(paper):
    paper.walk()
    paper.data = gates.DataNow(None, None, "there is no folder 'photos'")
    text = printed(judged(paper))
    assert "there is no folder 'photos'" in text
    assert "Bring the data or set data.path" in text


def test_a_long_reason_is_wrapped_not_cut_and_its_brackets_are_no_markup(paper):
    words = " ".join(f"word{i}" for i in range(60))
    why = f"[/red] channel [0] is {words} " + "x" * 200
    one = gates.Judgement("skeleton", "shut", why, "python run.py stage=skeleton")
    text = printed([one])
    assert "[/red] channel [0]" in text
    assert "".join(text.split()).count("x" * 200) == 1
    assert all(f"word{i}" in text for i in range(60))
    assert max(map(len, text.splitlines())) <= 100


@pytest.mark.parametrize("variable", ["", "40"])
def test_piped_output_is_plain_ascii_and_at_least_a_hundred_columns(paper, monkeypatch, variable):
    monkeypatch.delenv("FORCE_COLOR", raising=False)
    monkeypatch.setenv("COLUMNS", variable)
    text = printed([gates.Judgement("tune", "stale", "y" * 79, "python run.py stage=overfit")])
    assert "\x1b" not in text
    assert text.isascii()
    assert "y" * 70 in text


def test_warnings_are_counted_per_stage(paper):
    paper.record("data_audit", [check(), check("human_metric", "warn", None, None)])
    rows = board.as_dict(judged(paper))["stages"]
    assert rows[0]["warnings"] == ["human_metric"]
    assert printed(judged(paper)).splitlines()[1].split()[:3] == ["data_audit", "open", "1"]


def test_waivers_and_loosened_limits_are_listed_once_with_reason_and_end(paper):
    shut = check("label_noise", "shut", 0.2, 0.1)
    waiver = {"check": "label_noise", "reason": "being relabelled", "expires": "2999-12-31"}
    paper.record("data_audit", [shut], waivers=[waiver])
    limit = {"limit": "max_gap", "shipped": 0.3, "value": 0.5}
    paper.record("skeleton", loosened=[limit])
    paper.record("overfit")
    assert board.as_dict(judged(paper), [waiver])["exceptions"] == [
        "Waived in data_audit: label_noise, being relabelled (until 2999-12-31)",
        "Loosened in skeleton: max_gap 0.3 -> 0.5",
    ]
    assert "Loosened in skeleton: max_gap 0.3 -> 0.5" in printed(judged(paper))


def test_a_waiver_that_no_gate_has_used_yet_is_shown_as_such(paper):
    waiver = {"check": "gain", "stage": "tune", "reason": "seen by hand"}
    lines = board.as_dict(judged(paper), [waiver])["exceptions"]
    assert lines == ["Waiver that no gate has used: gain, seen by hand"]


def test_every_status_has_a_colour():
    assert set(board.COLOURS) == set(gates.STATUSES)


def test_a_command_is_never_broken_over_two_lines(paper):
    paper.walk("skeleton")
    cause = ("a suspect " + "that is described at length " * 4,)
    paper.record("overfit", [check("final_loss", "shut", 0.5, 0.1, suspect=cause)])
    assert printed(judged(paper)).rstrip().endswith("\npython run.py stage=overfit")
