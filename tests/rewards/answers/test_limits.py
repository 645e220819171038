"""What is not computed is refused before it costs anything, with a reason by name; what is feasible is computed."""

import pytest

from mindrlhf.rewards.answers import expressions
from mindrlhf.rewards.answers.equality import answers_equal
from mindrlhf.rewards.answers.limits import Refused
from mindrlhf.rewards.answers.spelling import plain_spelling
from mindrlhf.rewards.registry import built_in


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        ("9^{9^{9}}", "a power too large"),
        ("2^{99999999}", "a power too large"),
        ("2^{(10^9)}", "a power too large"),
        ("x^{10^{10}}", "a power too large"),
        ("e^{e^{e^{e^{9}}}}", "a power too large"),
        ("(x+1)^{99999}", "a power too large"),
        ("1/2^{10^{10}}", "a power too large"),
        ("(2^{9999})^{9999}", "a power too large"),
        ("99999!", "a factorial too large"),
        ("(2^{20})!", "a factorial too large"),
        ("(9!)!", "a factorial too large"),
        ("3!!", "a factorial of a factorial"),
        ("\\binom{10^{9}}{10^{8}}", "a binomial too large"),
        ("\\dbinom{99999}{50000}", "a binomial too large"),
        ("\\int_0^1 e^{x^2} dx", "the command int is not computed"),
        ("\\sum_{k=1}^{10^9} k", "the command sum is not computed"),
        ("\\prod_{k=1}^{10^9} k", "the command prod is not computed"),
        ("\\lim_{x \\to 0} x^x", "the command lim is not computed"),
        ("\\operatorname{eye}(99999)", "the command operatorname is not computed"),
        ("\\gcd(2^{999999}, 6)", "the command gcd is not computed"),
        ("\\weird{5}", "the command weird is not computed"),
        ("\\begin{cases}1\\\\2\\end{cases}", "the environment cases is not computed"),
        ("1e99999999", "a power of ten too large"),
        ("\\sqrt{" * 20 + "5" + "}" * 20, "nested deeper than 8"),
        ("((((5))))", "nested deeper than 3 with nothing between"),
        ("||||x||||", "more than 6 bars"),
        ("1+" * 300 + "1", "longer than 500 characters"),
        ("x+" * 180 + "x", "more than 150 operations"),
    ],
)
def test_refused(answer, reason):
    with pytest.raises(Refused, match=f"^{reason}$"):
        expressions._parse(plain_spelling(answer), True)
    assert not answers_equal(answer, "5")
    assert not answers_equal("5", answer)
    assert answers_equal(answer, answer)
    assert built_in("accuracy_reward")(f"\\boxed{{{answer}}}", "5") == 0.0


