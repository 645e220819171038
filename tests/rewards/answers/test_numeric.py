from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mindrlhf.rewards.answers.numeric import numbers_equal, parse_number


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("42", 42),
        ("42.", 42),
        ("42.0", 42),
        (" +42 ", 42),
        ("-3", -3),
        ("\u22123", -3),
        ("1,042", 1042),
        ("1{,}042", 1042),
        ("1\\,042", 1042),
        ("12,345,678.50", Fraction(2469135700, 200)),
        ("007", 7),
        (".5", Fraction(1, 2)),
        ("1e-3", Fraction(1, 1000)),
        ("2E3", 2000),
        ("$42", 42),
        ("\\$42", 42),
        ("-$3.50", Fraction(-7, 2)),
        ("$-3", -3),
        ("$42$", 42),
        ("\\(42\\)", 42),
        ("**42**", 42),
        ("3/4", Fraction(3, 4)),
        ("-3/4", Fraction(-3, 4)),
        ("1.5 / 2", Fraction(3, 4)),
        ("\\frac{3}{4}", Fraction(3, 4)),
        ("-\\dfrac{-3}{4}", None),
        ("\\dfrac{-3}{4}", Fraction(-3, 4)),
        ("\\frac34", Fraction(3, 4)),
        ("", None),
        (".", None),
        ("-", None),
        ("1,04", None),
        ("1,0425", None),
        ("0123,456", None),
        ("1 2", None),
        ("3/0", None),
        ("--3", None),
        ("-$-3", None),
        ("42 dollars", None),
        ("9**9**9", None),
        ("9^9", None),
        ("inf", None),
        ("nan", None),
        ("0x10", None),
        ("1_000", None),
        ("\u0664\u0662", None),
        ("1e9999", None),
        ("1" * 65, None),
    ],
)
def test_reading_of_numbers(text, value):
    number = parse_number(text)
    assert (number if number is None else number.value) == value


@pytest.mark.parametrize(
    ("a", "b", "equal"),
    [
        ("42%", "42", True),
        ("42", "42\\%", True),
        ("42%", "0.42", True),
        ("0.42", "42%", True),
        ("42%", "42%", True),
        ("42%", "0.42%", False),
        ("42%", "4200", False),
        ("0.42", "42", False),
        ("3/4", "0.75", True),
        ("1/3", "0.33", False),
        ("-0", "0", True),
    ],
)
def test_equality_with_percentages_and_fractions(a, b, equal):
    assert numbers_equal(parse_number(a), parse_number(b)) is equal
    assert numbers_equal(parse_number(b), parse_number(a)) is equal


def with_commas(digits: str) -> str:
    """Thousands separators the slow way, a digit at a time from the right."""
    reversed_digits = []
    for i, digit in enumerate(reversed(digits)):
        if i and i % 3 == 0:
            reversed_digits.append(",")
        reversed_digits.append(digit)
    return "".join(reversed(reversed_digits))


@st.composite
def written_numbers(draw):
    """A number in one of its spellings, with the value that the spelling was made from."""
    negative = draw(st.booleans())
    whole = draw(st.integers(0, 10**12))
    decimals = draw(st.text("0123456789", max_size=4))
    value = (whole * 10 ** len(decimals) + int(decimals or 0)) * Fraction(1, 10 ** len(decimals))
    text = with_commas(str(whole)) if draw(st.booleans()) else str(whole)
    if decimals:
        text += "." + decimals + "0" * draw(st.integers(0, 2))
    text = draw(st.sampled_from(["", "$"])) + text
    return ("-" if negative else "") + text, -value if negative else value


@given(written_numbers(), written_numbers())
def test_numbers_are_equal_exactly_when_their_values_are(first, second):
    (text, value), (other_text, other_value) = first, second
    number, other = parse_number(text), parse_number(other_text)
    assert number.value == value
    assert numbers_equal(number, other) == (value == other_value)
    assert parse_number(text + ".").value == value
