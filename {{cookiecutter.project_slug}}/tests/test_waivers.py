from datetime import date

import pytest
from paper_project import PaperProject, check

from {{cookiecutter.project_slug}}.harness import files, gates

TODAY = date(2030, 6, 1)
WAIVER = {"check": "loss_at_init", "reason": "the head is pretrained"}
SHUT = check(verdict="shut", value=4.1)


@pytest.fixture
def paper(tmp_path):
    return PaperProject(tmp_path)


# ---- the owner's file -------------------------------------------------------------------------


def test_a_waiver_counts_through_its_last_day():
    last = [{**WAIVER, "expires": "2030-06-01"}]
    assert len(gates.active_waivers(last, TODAY)) == 1
    assert gates.active_waivers(last, date(2030, 6, 2)) == []


def test_dates_may_come_as_dates_and_no_date_never_expires():
    read = gates.active_waivers([{**WAIVER, "expires": date(2031, 1, 1)}, WAIVER], TODAY)
    assert [waiver["expires"] for waiver in read] == ["2031-01-01", None]


@pytest.mark.parametrize(
    ("entry", "said"),
    [
        ({"check": "gain"}, "the waiver of gain has no reason"),
        ({"check": "gain", "reason": "  "}, "the waiver of gain has no reason"),
        ({"reason": "because"}, "names no check"),
        ({**WAIVER, "expiry": "2031-01-01"}, "did you mean expires"),
        ({**WAIVER, "expires": "soon"}, "write it as 2030-12-31"),
        ("loss_at_init", "write check and reason"),
    ],
)
def test_a_waiver_that_cannot_be_read_is_refused_with_what_to_write(entry, said):
    with pytest.raises(ValueError, match=said):
        gates.active_waivers([entry], TODAY)


# ---- in the gates -----------------------------------------------------------------------------


def test_a_waived_check_keeps_its_verdict_and_lets_the_gate_open(paper):
    gate = paper.record("data_audit", [SHUT], waivers=[WAIVER])
    assert (gate["verdict"], gate["checks"][0]["verdict"]) == ("open", "shut")
    assert gate["waivers"] == [{"kind": "waiver", "stage": "data_audit", **WAIVER, "expires": None}]
    assert list(gate["waivers"][0]) == ["kind", "stage", "check", "reason", "expires"]
    assert "1 shut (loss_at_init)" in paper.judge("data_audit").because


def test_a_waiver_covers_only_its_check_and_its_stage(paper):
    other = [SHUT, check("gain", "shut", 0.0, 1.0)]
    assert paper.record("data_audit", other, waivers=[WAIVER])["verdict"] == "shut"
    assert paper.judge("data_audit").because == "gain 0 < 1"
    elsewhere = {**WAIVER, "stage": "skeleton"}
    gate = paper.record("data_audit", [SHUT], waivers=[elsewhere])
    assert (gate["verdict"], gate["waivers"]) == ("shut", [])


def test_a_waiver_that_is_not_needed_is_not_listed(paper):
    assert paper.record("data_audit", [check()], waivers=[WAIVER])["waivers"] == []


def test_later_gates_list_the_waivers_and_loosened_limits_they_inherited(paper):
    paper.record("data_audit", [SHUT], waivers=[WAIVER])
    limit = {"limit": "max_gap", "shipped": 0.3, "value": 0.5}
    paper.record("skeleton", loosened=[limit])
    inherited = paper.record("overfit")["waivers"]
    assert [(e["kind"], e["stage"]) for e in inherited] == [
        ("limit", "skeleton"),
        ("waiver", "data_audit"),
    ]
    assert inherited[0] == {"kind": "limit", "stage": "skeleton", **limit}
    assert list(paper.judge("overfit").waivers) == inherited


def test_an_inherited_waiver_covers_no_check_of_a_later_gate(paper):
    paper.record("data_audit", [SHUT], waivers=[WAIVER])
    assert paper.record("skeleton", [SHUT])["verdict"] == "shut"


def test_adding_a_waiver_makes_no_later_gate_stale(paper):
    checks = [check("a", "shut", 1.0, 0.0), check("b")]
    paper.record("data_audit", checks, waivers=[{"check": "a", "reason": "known"}])
    paper.record("skeleton")
    both = [{"check": "a", "reason": "known better"}, {"check": "b", "reason": "too"}]
    paper.record("data_audit", [checks[0], check("b", "shut", 1.0, 0.0)], waivers=both)
    assert paper.judge("skeleton").status == "open"


def test_waivers_edited_in_the_gate_file_are_noticed(paper):
    paper.record("data_audit", [SHUT])
    gate = files.read_json(paper.artifact("data_audit"))
    gate["waivers"] = [{"kind": "waiver", "stage": "data_audit", **WAIVER, "expires": None}]
    files.write_json(paper.artifact("data_audit"), gate)
    assert paper.judge("data_audit").status == "tampered"
