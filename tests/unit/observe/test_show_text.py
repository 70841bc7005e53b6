from __future__ import annotations

import math
import unicodedata

from hypothesis import given
from hypothesis import strategies as st

from treadle.observe.show_text import clock, number, shorten_middle, sparkline
from treadle.printable_text import visible


def test_control_characters_are_shown_instead_of_acting() -> None:
    assert visible("a\nb\tc\rd\x00\x7f") == "a⏎b␉c␍d␀␡"
    assert visible("\x1b]0;title\x07\x9b31m") == "␛]0;title␇\\x9b31m"
    assert visible("\u202eabc\u2066\u2028\ufeff") == "\\u202eabc\\u2066\\u2028\\ufeff"
    assert visible("\ud83d") == "\\ud83d"
    assert visible("naïve 日本 👩‍🚀 [bold]") == "naïve 日本 👩‍🚀 [bold]"


@given(st.text(st.characters()))
def test_shown_text_is_one_line_of_characters_that_do_nothing(text: str) -> None:
    shown = visible(text)
    assert all(unicodedata.category(c) not in ("Cc", "Cs", "Zl", "Zp") for c in shown)
    assert len(shown.splitlines()) <= 1


@given(st.text(), st.integers(6, 60))
def test_shortened_text_keeps_both_ends_and_the_limit(text: str, limit: int) -> None:
    short = shorten_middle(text, limit)
    assert len(short) <= limit
    if len(text) <= limit:
        assert short == text
    else:
        start, end = short.split(" … ", 1) if short.count(" … ") == 1 else (text[:1], text[-1:])
        assert text.startswith(start)
        assert text.endswith(end)


def test_a_sparkline_averages_a_long_history() -> None:
    assert sparkline([0, 0, 0, 1, 1, 1], 2) == "▁█"
    assert sparkline([0, 7], 5) == "▁█"
    assert sparkline([0, 1, 2, 3, 4, 5, 6, 7], 8) == "▁▂▃▄▅▆▇█"
    assert sparkline([0.5, 0.5], 5) == "▁▁"
    assert sparkline([math.nan, 1.0, math.inf, 2.0], 9) == "▁█"
    assert sparkline([], 9) == ""


@given(st.lists(st.floats(-1e6, 1e6), max_size=50), st.integers(1, 30))
def test_a_sparkline_is_as_long_as_its_history_or_its_width(values: list[float], width: int) -> None:
    assert len(sparkline(values, width)) == min(len(values), width)


@given(st.floats())
def test_numbers_are_short(value: float) -> None:
    if 1e-99 < abs(value) < 1e12 or value == 0 or not math.isfinite(value):
        assert len(number(value)) <= 8
    if math.isfinite(value) and 1e-99 < abs(value) < 1e4:
        assert math.isclose(float(number(value)), value, rel_tol=0.06)


def test_times_that_are_unknown_are_a_dash() -> None:
    assert clock(math.inf) == clock(None) == "-"
    assert [clock(s) for s in (0, 9.94, 9.96, 59.4, 59.6, 3599.6)] == [
        "0.0 s",
        "9.9 s",
        "10 s",
        "59 s",
        "1:00",
        "1:00:00",
    ]
