"""Agreement of this package, and of math-verify alone, with the tables of answer cases, side by side.

What a checker pays for wrong answers comes first: a policy finds it, while a right answer that earns nothing costs a
sample.

    python scripts/compare_answers.py [--wrong]

math-verify is called as its authors show: reference and prediction in dollar signs, completions as they are.
``--wrong`` prints the cases that each gets wrong.
"""

import argparse
import logging
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

from math_verify import parse, verify

from mindrlhf.rewards.answers.equality import answers_equal
from mindrlhf.rewards.registry import built_in

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "rewards" / "answers"))
import case_tables  # noqa: E402

logging.disable(logging.CRITICAL)


def by_math_verify(prediction: str, reference: str) -> bool:
    """math-verify's verdict, within its own time limit of 5 s."""
    try:
        text = prediction if "\\boxed" in prediction else f"${prediction}$"
        return bool(verify(parse(f"${reference}$"), parse(text)))
    except Exception:
        return False


def completion_by_math_verify(completion: str, reference: str) -> bool:
    """The same for a completion, in which math-verify searches for the answer itself."""
    try:
        return bool(verify(parse(f"${reference}$"), parse(completion)))
    except Exception:
        return False


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--wrong", action="store_true")
    arguments = parser.parse_args()
    accuracy_reward = built_in("accuracy_reward")
    ways: dict[bool, dict[str, Callable[[str, str], bool]]] = {
        False: {"ours": answers_equal, "math-verify": by_math_verify},
        True: {
            "ours": lambda completion, answer: accuracy_reward(completion, answer) == 1.0,
            "math-verify": completion_by_math_verify,
        },
    }
    print(f"{'table':24s}{'checker':14s}{'wrong paid':>12s}{'right unpaid':>14s}{'agreement':>11s}{'longest':>9s}")
    totals: dict[str, list[int]] = defaultdict(lambda: [0] * 4)  # wrong, those paid, right, those unpaid
    for table in (*case_tables.table_names(), *case_tables.completion_tables()):
        cases = case_tables.read_cases(table)
        for checker, is_equal in ways[table.startswith("completions")].items():
            counts, longest_s, wrong = {True: [0, 0], False: [0, 0]}, 0.0, []
            for case in cases:
                start_s = time.perf_counter()
                agrees = is_equal(case.prediction, case.reference) is case.is_equal
                longest_s = max(longest_s, time.perf_counter() - start_s)
                counts[case.is_equal][0] += agrees
                counts[case.is_equal][1] += 1
                if not agrees:
                    wrong.append(case)
            share = (counts[True][0] + counts[False][0]) / len(cases)
            missed = [(number - agreed, number) for agreed, number in (counts[False], counts[True])]
            for place, value in enumerate((missed[0][1], missed[0][0], missed[1][1], missed[1][0])):
                totals[checker][place] += value
            shares = [f"{number}/{of}" for number, of in missed]
            print(f"{table:24s}{checker:14s}{shares[0]:>12s}{shares[1]:>14s}{share:11.1%}{longest_s:8.2f}s")
            for case in wrong if arguments.wrong else ():
                sign = "==" if case.is_equal else "!="
                print(f"    {ascii(case.prediction)} {sign} {ascii(case.reference)}: {case.reason}")
    for checker, (num_wrong, num_paid, num_right, num_unpaid) in totals.items():
        share = 1 - (num_paid + num_unpaid) / (num_wrong + num_right)
        shares = f"{num_paid}/{num_wrong}", f"{num_unpaid}/{num_right}"
        print(f"{'all':24s}{checker:14s}{shares[0]:>12s}{shares[1]:>14s}{share:11.1%}")


if __name__ == "__main__":
    main()
