"""Pairs of answers that people hold for equal or not, by form: numbers, units, intervals, sets, choices."""

import pytest

from mindrlhf.rewards.answers.equality import answers_equal

# The verdict, the prediction, the reference.
CASES = r"""
True 2x | 2 x
False 2x | 2
False 5m | 6
True 5 million | 5000000
False 5 million | 5
True 5 \text{ million dollars} | 5,000,000
False 9^{9^{9}} | 3
False 9**9**9 | 387420489
False 9^{9^9} | 387420489
False 99999! | 4
False (9!)! | 4
False 2^{99999999} | 5
False 2^{(10^9)} | 5
False 10^{10^{10}} | 5
True \text{Tuesday} | tuesday
False \text{east} | seat
False \text{east} | \text{seat}
False east | seat
True B. forty | B
True (B) forty | B
False (B) and (C) | B
True option b | B
True A and C | A, C
True CA | A, C
False C | A, C
False BC | AB
True AB | BA
True x \geq 3 | [3, \infty)
True 3 \leq x | [3, \infty)
True -1 < x \leq \frac{1}{2} | (-1, 0.5]
True 12 square meters | 12 \text{ m}^2
False 12 m^2 | 12 m^3
True 12 cm² | 12
True 60 mph | 60 miles per hour
True 20^\circ C | 20
True 45^{\circ} | 45
False 45^{\circ} | 46
True 1\frac{3}{4} \text{ cups} | 7/4
True 3 hours | 3
False 3 hours | 3 minutes
True 3 hrs | 3 hours
False 3 and 4 | 3
True 50 percent | 50\%
True \frac{1}{2} \text{ cm} | 0.5
True $5$ dollars | 5
True 5 | 5 \text{ units}
False -5 cm | 5 cm
True $-5$ cm | -5 cm
True (2, 3) | \left( 2, 3 \right)
False [2, 3] | (2, 3]
True \sqrt{50} | 5\sqrt{2}
True 5\pi \text{ cm}^2 | 5\pi
True x = \frac{1}{2} | 0.5
True 7! | 5040
True 2^{100} | 1267650600228229401496703205376
True 0.\overline{3} | 1/3
False 0.33 | 1/3
False \{1,2\} | (1,2)
True \{1, 2\} | 2, 1
True [1,2) | [1,2)
False (1,2) | [1,2]
True {1,2,3} | \{3,2,1\}
True 1 and 2 | 1, 2
True x \in [1,2] | [1,2]
True 1 1/2 | 3/2
True 1.5 \times 10^3 | 1500
False 5 cm | 5 km
True 5 cm | 5 centimeters
True 30° | 30
True B. 42 | B
False C | B
True (-\infty,1)\cup(2,\infty) | (2,\infty) \cup (-\infty, 1)
True x^2+2x+1 | (x+1)^2
True \begin{pmatrix}1\\2\end{pmatrix} | \begin{pmatrix} 1 \\ 2 \end{pmatrix}
True 50\% | 0.5
True \$5.00 | 5
False 5 | 5, 6
False (0,1) | \{0,1\}
True 0.1\overline{6} | \frac{1}{6}
""".strip().splitlines()


@pytest.mark.parametrize("case", CASES)
def test_equality(case):
    verdict, _, pair = case.partition(" ")
    prediction, reference = pair.split(" | ")
    assert answers_equal(prediction, reference) == (verdict == "True")
