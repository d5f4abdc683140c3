import pytest

from {{cookiecutter.project_slug}}.harness import sources

PLAIN = b"""
def mean(values, start=0):
    total = start
    for value in values:
        total += value
    return f"{total / len(values):.2f} of" "all"
"""
SAME = b'''\
"""Another layout of the same code."""
# with comments


def mean(
    values,
    start = 0,
):
    """Mean of the values."""
    total = start  # not a number yet
    for value in values: total += value
    "a comment written as a string"
    return (
        f'{total / len(values):.2f} '
        'ofall'
    )
'''


def test_layout_comments_docstrings_and_quotes_do_not_count():
    assert sources.source_digest(PLAIN) == sources.source_digest(SAME)


def test_line_endings_and_a_byte_order_mark_do_not_count():
    windows = b"\xef\xbb\xbf" + PLAIN.replace(b"\n", b"\r\n")
    assert sources.source_digest(windows) == sources.source_digest(PLAIN)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (b"start=0", b"start=1"),
        (b"start=0", b"start=0.0"),
        (b"start=0", b"start=False"),
        (b"start=0", b"start=None"),
        (b"start=0", b"start"),
        (b"+=", b"-="),
        (b":.2f", b":.3f"),
        (b"total = start\n", b"total = values\n"),
        (b"(values, start=0)", b"(values, *, start=0)"),
        (b'"all"', b'"{all}"'),
        (b"def mean", b"async def mean"),
    ],
)
def test_every_change_of_meaning_counts(old, new):
    assert old in PLAIN
    assert sources.source_digest(PLAIN.replace(old, new)) != sources.source_digest(PLAIN)


def test_the_digest_is_the_same_on_every_python():
    """Recorded on 3.11; the versions from 3.10 to 3.13 all give it."""
    source = b"""
class A(dict[str, int]):
    x: int = -1
    def f(self, *a, k=u"s\\u0378", **b) -> None:
        return {**a, "k": [i for i in a], f"{k!r:>{self.x}} {k=}": b"b", 1e3: 0x_ff, 2j: ...}
"""
    expected = "3bd7c65219994f2b064e286d38126808faf77e81f61e9fc776786f63c87547af"
    assert sources.source_digest(source) == expected


def test_a_file_that_does_not_parse_is_digested_by_its_bytes():
    broken, null = b"def f(:\n", b"x = 1\x00"
    assert sources.source_digest(broken) != sources.source_digest(broken + b"\n")
    assert len(sources.source_digest(null)) == 64


def test_an_expression_of_thousands_of_terms_is_no_obstacle():
    long = b"x = [" + b"1, " * 20_000 + b"]\n"
    assert sources.source_digest(long) != sources.source_digest(long + b"y = 1\n")


def test_odd_escapes_in_a_source_give_no_warning():
    """Warnings are errors in these tests."""
    assert sources.source_digest(b's = "\\d"\n') == sources.source_digest(b's = "\\\\d"\n')
