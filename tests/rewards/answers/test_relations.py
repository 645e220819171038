"""Equations and inequalities as answers: an honest rearrangement of the reference is paid, an identity never."""

import itertools

import pytest
from slow_tests import RUNS_SLOW_TESTS

from mindrlhf.rewards.answers.equality import answers_equal
from mindrlhf.rewards.registry import built_in

TURNED = {"=": "=", "<": ">", ">": "<", "\\le": "\\ge", "\\ge": "\\le", "\\ne": "\\ne"}
# Left side, sign, right side; two or three of each kind.
REFERENCES = {
    "line": [("y", "=", "2x+1"), ("3x-4y", "=", "12"), ("x+y", "=", "7")],
    "conic": [("x^2+y^2", "=", "25"), ("\\frac{x^2}{4}-y^2", "=", "1"), ("(x-1)^2+(y+2)^2", "=", "9")],
    "function": [("f(x)", "=", "x^2+1"), ("g(t)", "=", "\\frac{t}{t^2+1}")],
    "sequence": [("a_n", "=", "2n-1"), ("a_{n}", "=", "3^n+n")],
    "one variable": [("x^2", "=", "4"), ("5x^2", "=", "7x"), ("x^2", "=", "0")],
    "parameters": [("y", "=", "ax+b"), ("ax^2+bx+c", "=", "0")],
    "transcendental": [("y", "=", "e^x+1"), ("y", "=", "2\\sin x"), ("y", "=", "\\ln(x-2)")],
    "extreme coefficients": [("10^{60}x+y", "=", "1"), ("10^{-60}x+10^{-70}y", "=", "10^{-65}")],
    "inequality": [("2x+3y", "\\le", "6"), ("x^2", ">", "y+1"), ("k^2", "<", "2k-2m"), ("x+y", "\\ne", "1")],
    "never true": [("x", "=", "x+1"), ("\\sin^2 x+\\cos^2 x", "=", "2")],
}
ARGUMENTS = ("1", "2", "x", "3x", "y", "n", "(x+1)", "(x-y)", "\\frac{x}{3}", "t")


def made_identities() -> list[str]:
    """Relations that hold for all values or for none, and equations whose coefficients are nearly zero."""
    made = []
    for u in ARGUMENTS:
        squares = f"\\sin^2 {u}+\\cos^2 {u}"
        made += [f"{squares}=1", f"3\\sin^2 {u}=3-3\\cos^2 {u}", f"{squares}=3", f"{squares}+{u}={u}+1"]
        made += [f"\\tan {u}=\\frac{{\\sin {u}}}{{\\cos {u}}}", f"\\sin(2{u})=2\\sin {u}\\cos {u}"]
        made += [
            f"({u}+3)^2=({u})^2+6({u})+9",
            f"{u}={u}",
            f"{u}={u}+2",
            f"0{u}=0",
            f"(\\sqrt{{5}}+{u})^2=({u})^2+2\\sqrt{{5}}({u})+5",
        ]
        made += [f"{squares}{sign}{bound}" for sign in ("<", ">", "\\le ", "\\ge ", "\\ne ") for bound in (1, 2)]
    for number in (2, 3, 5):
        made += [f"\\log {number}+\\log {10 / number:g}{sign}1" for sign in ("=", "<", ">", "\\ge ")]
        made += [f"\\ln(e^{number})={number}", f"\\log(\\sqrt[3]{{10^{number}}})=\\frac{{{number}}}{{3}}"]
        made += [f"(\\sqrt{{{number}}}+1)^2={number + 1}+2\\sqrt{{{number}}}", f"\\sqrt{{{number}^2}}={number}"]
    for small, times in itertools.product(("e^{-200}", "e^{-2000}", "10^{-90}"), ("x", "xy", "(x+y)", "(x^2+1)", "n")):
        made += [f"{small}{times}=0", f"{small}{times}\\le 0", f"{small}{times}+1=1"]
    return made


IDENTITIES = made_identities()


def rearrangements(left: str, sign: str, right: str) -> list[str]:
    turned = TURNED[sign]
    return [
        f"{left}{sign} {right}",
        f"{right}{turned} {left}",
        f"{left}-({right}){sign} 0",
        f"0{turned} {left}-({right})",
        f"3({left}){sign} 3({right})",
        f"-\\frac{{7}}{{2}}({left}){turned} -\\frac{{7}}{{2}}({right})",
        f"\\sqrt{{2}}({left}){sign} \\sqrt{{2}}({right})",
        f"{left}+5{sign} {right}+5",
    ]


def test_the_identities_are_many():
    assert len(set(IDENTITIES)) == len(IDENTITIES) >= 200


@pytest.mark.parametrize("kind", REFERENCES)
def test_an_identity_is_paid_for_no_relation(kind):
    references = ["".join(sides) for sides in REFERENCES[kind]]
    own = {text for sides in REFERENCES[kind] for text in rearrangements(*sides)}
    # Every fifth: each identity meets two kinds of the ten; by day one.
    each = 5 if RUNS_SLOW_TESTS else 10
    for i, identity in enumerate(IDENTITIES[list(REFERENCES).index(kind) % each :: each]):
        reference = references[i % len(references)]
        assert identity in own or not answers_equal(identity, reference), (identity, reference)


@pytest.mark.parametrize("kind", [kind for kind in REFERENCES if kind != "never true"])
def test_each_rearrangement_is_the_relation(kind):
    for left, sign, right in REFERENCES[kind]:
        for text in rearrangements(left, sign, right):
            assert answers_equal(text, f"{left}{sign} {right}"), (text, left, sign, right)
        wrong = [f"{left}{sign} {right}+1", f"{left}+e^{{-200}}{sign} {right}", f"2({left}){sign} {right}"]
        wrong += [f"{left}{TURNED[sign]} {right}"] if TURNED[sign] != sign else []
        for text in wrong if right != "0" else wrong[:2]:
            assert not answers_equal(text, f"{left}{sign} {right}"), (text, left, sign, right)


@pytest.mark.parametrize("verifier", ["accuracy_reward", "qwen_accuracy_reward", "math_17k_acc", "acc_for_dapo"])
def test_a_boxed_identity_earns_nothing(verifier):
    for identity in ("\\sin^2 x+\\cos^2 x=1", "\\log 2+\\log 5=1", "e^{-200}x=0"):
        completion = f"The answer is $\\boxed{{{identity}}}$. Answer: ${identity}$"
        assert built_in(verifier)(completion, "y=2x+1") <= 0, identity


@pytest.mark.parametrize(
    "identity", ["\\ln e=1", "\\frac{x}{x}=1", "x/x=1", "\\cos 0=1", "1=1", "x-x+1=1", "\\log_2 2=1"]
)
@pytest.mark.parametrize("reference", ["x+y=1", "x-y=1", "x+y-z=1"])
def test_an_identity_whose_value_is_the_references_says_nothing_of_it(identity, reference):
    assert built_in("accuracy_reward")(f"\\boxed{{{identity}}}", reference) == 0.0
