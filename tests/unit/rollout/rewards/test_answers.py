from decimal import Decimal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from treadle.rollout.rewards.answers import find_last_box, find_last_number, label_text, without_bold
from treadle.rollout.rewards.forms import RewardFault


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("", None),
        ("no number here", None),
        ("18", "18"),
        ("The answer is 18.", "18"),
        ("18.0 dollars", "18.0"),
        ("it costs $1,234.50.", "1234.50"),
        ("-$5", "-5"),
        ("$-5", "-5"),
        ("= -4", "-4"),
        ("−4", "-4"),  # U+2212
        ("7-9", "9"),
        ("(7)-9", "9"),
        ("x-9", "9"),
        ("7 - 9 = -2.", "-2"),
        ("1, 2, 3", "3"),
        ("1,2", "2"),
        ("1,234,567", "1234567"),
        ("12,34", "34"),
        ("1,2345", "2345"),
        ("1234,567", "567"),
        (".5", ".5"),
        ("0.5%", "0.5"),
        ("1/2", "2"),
        ("2e3", "2e3"),
        ("3 eggs", "3"),
        ("5e", "5"),
        ("#### 72", "72"),
        ("**42**", "42"),
        ("٣", None),  # an Arabic digit is not read
    ],
)
def test_last_number_of_texts(text, number):
    assert find_last_number(text) == (None if number is None else Decimal(number))


@given(st.integers(-(10**12), 10**12), st.sampled_from(["so {}", "is {}.", "(${})", "a {}!\n"]))
def test_last_number_reads_integers_with_and_without_commas(number, frame):
    for text in (str(number), f"{number:,}"):
        assert find_last_number("we had 7, " + frame.format(text)) == number


@settings(max_examples=50)
@given(st.text())
def test_last_number_reads_any_text(text):
    number = find_last_number(text)
    assert number is None or number.is_finite()


def test_a_very_long_number_is_compared_exactly():
    assert find_last_number("9" * 5000) == Decimal("9" * 5000) != find_last_number("9" * 4999 + "8")


@pytest.mark.parametrize(
    ("text", "box"),
    [
        ("none", None),
        (r"\boxed{18}", "18"),
        (r"\boxed{1} and \boxed{2}", "2"),
        (r"\boxed{\frac{1}{2}}.", r"\frac{1}{2}"),
        (r"\boxed {3}", "3"),
        (r"\fboxed{4}", "4"),
        (r"\boxed{1} then \boxed{2", "1"),
        (r"\boxed{", None),
        (r"\boxed{}", ""),
        (r"} \boxed{\boxed{5}} {", "5"),
        (r"{ \boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"\boxed{" * 20_000, None),  # in one pass
    ],
)
def test_last_box(text, box):
    assert find_last_box(text) == box


def test_bold_marks_go_and_powers_stay():
    assert without_bold("**18** is 2**3 + 10**1, **not 3**") == "18 is 2**3 + 10**1, not 3"


@pytest.mark.parametrize(
    ("label", "answer"),
    [
        ("Natalia sold 48/2 = <<48/2=24>>24 clips.\n48+24 = <<48+24=72>>72\n#### 72", "72"),
        ("She makes 9*2=$<<9*2=18>>18\n#### 18\n", "18"),
        ("#### 70,000", "70,000"),
        ("#### -3", "-3"),
        ("18.", "18"),
        (18, "18"),
        (0.5, "0.5"),
        (1e-7, "0.0000001"),
        (r"\frac{1}{2}", r"\frac{1}{2}"),
    ],
)
def test_label_text(label, answer):
    assert label_text(label) == answer


@pytest.mark.parametrize(
    ("label", "cause"),
    [
        (None, "no label"),
        (True, "type bool"),
        (["1"], "type list"),
        ("work\n####  ", "holds no answer"),
        ("", "holds no answer"),
    ],
)
def test_label_without_an_answer(label, cause):
    with pytest.raises(RewardFault, match=cause):
        label_text(label)
