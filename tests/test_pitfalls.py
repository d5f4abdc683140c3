"""docs/pitfalls.md: every pair is run as it stands there, and gives the numbers it says."""

import math
import re
from typing import NamedTuple

import pytest
import torch
from bakes import ROOT

TEXT = (ROOT / "docs" / "pitfalls.md").read_text(encoding="utf-8")
NUMBERS = re.compile(r"broken \*\*(\S+)\*\*,\s+repaired \*\*(\S+)\*\*")


class Pair(NamedTuple):
    title: str
    code: tuple[str, str]  # broken, repaired
    told: tuple[str, str]  # the numbers beside them


def blocks(text: str) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


def pair(section: str) -> Pair:
    title = section.partition("\n")[0]
    return Pair(title, tuple(blocks(section)), NUMBERS.search(section).groups())


BEFORE, *SECTIONS = re.split(r"^## ", TEXT, flags=re.MULTILINE)
PAIRS = [pair(section) for section in SECTIONS]


@pytest.fixture(autouse=True)
def one_thread():
    threads, state = torch.get_num_threads(), torch.get_rng_state()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
    torch.set_rng_state(state)


def measured(code: str) -> float:
    """What a block calls `number`, after the block that all start from."""
    names: dict = {}
    exec(compile(blocks(BEFORE)[0], "docs/pitfalls.md", "exec"), names)
    torch.manual_seed(0)
    exec(compile(code, "docs/pitfalls.md", "exec"), names)
    return names["number"]


def agrees(number: float, told: str) -> bool:
    """To the digits of the page: another processor rounds differently."""
    if told.startswith("<"):
        return abs(number) < float(told[1:])
    return math.isclose(number, float(told), rel_tol=0.15, abs_tol=1e-9)


def test_there_are_the_fourteen():
    assert len(PAIRS) == 14
    assert all(len(found.code) == 2 for found in PAIRS)


@pytest.mark.parametrize("found", PAIRS, ids=lambda found: found.title)
def test_a_pair_gives_the_numbers_of_the_page(found):
    numbers = [measured(code) for code in found.code]
    assert all(map(agrees, numbers, found.told)), numbers


@pytest.mark.parametrize("found", PAIRS, ids=lambda found: found.title)
def test_the_numbers_of_a_pair_are_apart(found):
    broken, repaired = (float(told.removeprefix("<")) for told in found.told)
    assert abs(broken - repaired) > 0.2 * max(abs(broken), abs(repaired))
