"""What is words and what is algebra, by generated pairs: order counts in words, spelling does not."""

import datetime
import itertools
from fractions import Fraction

import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from mindrlhf.rewards.answers.equality import answers_equal
from mindrlhf.rewards.answers.wording import is_algebra

NUMBERS = st.integers(1, 999)
BETWEEN = ["R", "to", "from", "choose", "more than", "less than", "with", "per", "up", "out of"]
UNITS = ["km", "m", "cm", "ft", "in", "h", "min", "s", "kg", "lb", "oz"]
LONG = {"km": "kilometres", "m": "metres", "cm": "centimetres", "ft": "feet", "in": "inches", "h": "hours"}
LONG |= {"min": "minutes", "s": "seconds", "kg": "kilograms", "lb": "pounds", "oz": "ounces"}


@given(NUMBERS, NUMBERS, st.sampled_from(BETWEEN))
def test_numbers_around_words_do_not_commute(first, second, word):
    assume(first != second)
    assert answers_equal(f"{first} {word} {second}", f"{first} {word} {second}")
    assert not answers_equal(f"{second} {word} {first}", f"{first} {word} {second}")
    assert not answers_equal(f"{second} {first} {word}", f"{first} {word} {second}")
    assert not answers_equal(f"{first * second}", f"{first} {word} {second}") or word == "out of"


@given(st.text("ABCDEFGHKLMNOPRST", min_size=3, max_size=6), st.randoms(use_true_random=False))
def test_letters_in_order_are_a_sequence(letters, random):
    other = "".join(random.sample(letters, len(letters)))
    assert answers_equal(letters, letters)
    assert answers_equal(other, letters) == (other == letters)
    for joint in ("-", " > ", " \\to "):
        assert answers_equal(joint.join(other), joint.join(letters)) == (other == letters)


@given(st.lists(st.tuples(NUMBERS, st.sampled_from(UNITS)), min_size=2, max_size=3, unique_by=lambda part: part[1]))
def test_compound_measures_are_compared_part_by_part(parts):
    written = " ".join(f"{number} {unit}" for number, unit in parts)
    assert answers_equal(" and ".join(f"{number} {LONG[unit]}" for number, unit in parts), written)
    assert answers_equal(" ".join(f"{number}\\text{{ {unit}}}" for number, unit in parts), written)
    assert answers_equal("".join(f"{number}{unit}" for number, unit in parts), written)
    numbers = [number for number, _ in parts]
    for order in itertools.permutations(numbers):
        swapped = " ".join(f"{number} {unit}" for number, (_, unit) in zip(order, parts))
        assert answers_equal(swapped, written) == (list(order) == numbers)
    assert not answers_equal(str(numbers[0]), written)


@given(st.dates(datetime.date(1900, 1, 1), datetime.date(2099, 12, 31)), st.integers(1, 400))
def test_dates(day, shift):
    def forms(date):
        month = date.strftime("%B")
        return (
            f"{month} {date.day}, {date.year}",
            f"{date.day} {month} {date.year}",
            f"{month[:3]} {date.day}, {date.year}",
            f"{date.year}-{date.month:02d}-{date.day:02d}",
            f"{date.year}/{date.month}/{date.day}",
            f"{date.year}年{date.month}月{date.day}日",
            f"\\text{{{month} {date.day}, {date.year}}}",
        )

    other = day + datetime.timedelta(days=shift)
    for form, changed in zip(forms(day), forms(other)):
        assert answers_equal(form, forms(day)[0])
        assert not answers_equal(changed, forms(day)[0])
    assert not answers_equal(str(day.year - day.month - day.day), forms(day)[3])


@given(st.integers(0, 23), st.integers(0, 59), st.integers(0, 23), st.integers(0, 59))
def test_times_of_day(hour, minute, other_hour, other_minute):
    def twelve(hour, minute):
        return f"{(hour - 1) % 12 + 1}:{minute:02d} {'p.m.' if hour >= 12 else 'a.m.'}"

    is_same = (hour, minute) == (other_hour, other_minute)
    written = twelve(hour, minute)
    assert answers_equal(twelve(other_hour, other_minute), written) == is_same
    assert answers_equal(written.replace(".", "").upper(), written)
    assert answers_equal(f"{hour:02d}:{minute:02d}", written) or hour in (0, 12)


HAN = "零一二三四五六七八九"


def in_han(number: int) -> str:
    """Written independently of the reader: ten thousands first, then digits with their places."""
    if number >= 10_000:
        rest = number % 10_000
        return f"{in_han(number // 10_000)}万" + ("" if not rest else f"{'零' if rest < 1000 else ''}{in_han(rest)}")
    text, has_gap = "", False
    for place, name in ((1000, "千"), (100, "百"), (10, "十"), (1, "")):
        digit = number // place % 10
        if digit:
            text += ("零" if has_gap and text else "") + HAN[digit] + name
        has_gap = not digit
    return text or "零"


@given(st.integers(0, 99_999_999), st.integers(1, 50))
def test_chinese_numerals(number, shift):
    assert answers_equal(in_han(number), str(number))
    assert answers_equal(f"{in_han(number)}个", str(number))
    assert not answers_equal(in_han(number), str(number + shift))


@given(st.integers(0, 99), st.text("0123456789", max_size=3), st.text("0123456789", min_size=1, max_size=4))
@example(0, "", "1000")
@example(3, "25", "9000")
@example(0, "000", "0100")
def test_repeating_decimals(whole, fixed, period):
    value = Fraction(
        int(f"{whole}{fixed}{period}") - int(f"{whole}{fixed}"), 10 ** len(fixed) * (10 ** len(period) - 1)
    )
    reference = f"\\frac{{{value.numerator}}}{{{value.denominator}}}"
    for spelled in (f"({period})", f"\\overline{{{period}}}", "".join(f"{digit}\u0305" for digit in period)):
        assert answers_equal(f"{whole}.{fixed}{spelled}", reference)
        assert not answers_equal(f"{whole}.{fixed}{spelled}", f"{whole}.{fixed}{period}") or set(period) == {"0"}
    assert answers_equal(f"{whole}.{fixed}{period * 3}...", reference)


@given(st.integers(1_000_000, 10**9), st.integers(1, 99))
def test_thousands_and_decimals_of_other_languages(number, cents):
    digits = f"{number:,}"
    value = f"{number}.{cents:02d}"
    assert answers_equal(digits.replace(",", "."), str(number))
    assert answers_equal(digits.replace(",", "'"), str(number))
    for mark in (".", " ", "'", "\u202f"):
        assert answers_equal(f"{digits.replace(',', mark)},{cents:02d}", value)
        assert not answers_equal(f"{digits.replace(',', mark)},{cents:02d}", f"{number}{cents:02d}")


@given(st.integers(-20, 20), st.integers(1, 20), st.booleans(), st.booleans())
def test_intervals_as_inequalities(low, width, is_low_in, is_high_in):
    high = low + width
    left, right = "\\le" if is_low_in else "<", "≤" if is_high_in else "<"
    interval = f"{'[' if is_low_in else '('}{low}, {high}{']' if is_high_in else ')'}"
    assert answers_equal(f"{low} {left} x {right} {high}", interval)
    assert answers_equal(f"\\{{x \\mid {low} {left} x {right} {high}\\}}", interval)
    assert answers_equal(f"x \\in {interval}", f"{low} {left} x {right} {high}")
    assert not answers_equal(f"{low} {left} x {right} {high + 1}", interval)
    other = f"{'(' if is_low_in else '['}{low}, {high}{']' if is_high_in else ')'}"
    assert not answers_equal(f"{low} {left} x {right} {high}", other)


@pytest.mark.parametrize("text", ["2xy", "xy+1", "x^2+2xy+y^2", "\\frac{1}{2}ab\\sin C", "3 ab", "AB+BC", "2\\pi r h"])
def test_products_of_variables_are_algebra(text):
    assert is_algebra(text)


@pytest.mark.parametrize(
    "text", ["7 R 2", "4 to 3", "2 ft 6 in", "BCA", "A-B-C", "H_2O", "R2D2", "10C5", "XIV", "word"]
)
def test_words_are_not(text):
    assert not is_algebra(text)


PIECES = [
    *(
        "\\begin{pmatrix}1\\\\2\\end{pmatrix}",
        "\\begin{pmatrix}1&2\\\\3&4\\end{pmatrix}",
        "2",
        "x",
        "-",
        "+",
        "^",
        "(",
        ")",
    ),
    *(
        "\\frac{1}{2}",
        "\\sqrt{",
        "}",
        "i",
        "\\pi",
        "e^",
        "!",
        " to ",
        "cm",
        "=",
        "<",
        "\\infty",
        "{",
        "[",
        ",",
        "|",
        "四",
    ),
    *("\\text{", "/", "0", "\\log_", "...", "\\overline{3}", "°", "%", "\\cup", "\\emptyset", ":", "T", "\\cdot"),
]


@given(*[st.lists(st.sampled_from(PIECES), min_size=1, max_size=7).map("".join)] * 2)
def test_no_pair_raises(prediction, reference):
    assert answers_equal(prediction, reference) in (True, False)
    assert answers_equal(prediction, prediction)


@given(st.integers(-9, 9), st.lists(st.integers(-9, 9), min_size=2, max_size=4), st.integers(1, 9))
def test_a_scaled_matrix_is_worked_out(factor, entries, shift):
    def column(values):
        return "\\begin{pmatrix}" + " \\\\ ".join(map(str, values)) + "\\end{pmatrix}"

    product = [factor * entry for entry in entries]
    assert answers_equal(f"{factor}{column(entries)}", column(product))
    assert answers_equal(column(product), f"{factor}{column(entries)}")
    assert not answers_equal(f"{factor}{column(entries)}", column([*product[:-1], product[-1] + shift]))
