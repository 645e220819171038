"""Responses that say again what is asked, that are cut, or that copy the prompt: no verifier pays for them.

The first real model that was trained here had found it within nine steps: "To find 14 + 7, we start by ..." earned 1.
"""

import json
import random
from collections import Counter
from typing import NamedTuple

import pytest
from slow_tests import RUNS_SLOW_TESTS

from mindrlhf.commands.rewards import register as register_rewards
from mindrlhf.rewards.answers.restated import is_result
from mindrlhf.rewards.registry import built_in, context_of

ASKING = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
MARKED = {
    "accuracy_reward": ("\\boxed{{{}}}", "#### {}", "<answer>{}</answer>", "The answer is {}.", "Final answer: {}"),
    "qwen_accuracy_reward": ("\\boxed{{{}}}", "So $\\boxed{{{}}}$."),
    "math_17k_acc": ("\\boxed{{{}}}", "Answer: {}", "Answer: $\\boxed{{{}}}$"),
    "acc_for_dapo": ("Answer: {}", "Answer: ${}$", "Answer: \\boxed{{{}}}"),
    "base_acc": ("<think>a</think><answer>\\boxed{{{}}}</answer>",),
}
WORDS = {"+": "plus", "-": "minus", "*": "times", "/": "divided by"}
SIGNS = {"+": ("+",), "-": ("-", "\u2212"), "*": ("*", "\u00d7", "\\times", "\\cdot", "x"), "/": ("\u00f7", "\\div")}


class Response(NamedTuple):
    verifier: str
    completion: str
    answer: str
    question: str = ""
    finish_reason: str = "stop"


def reward(response: Response) -> float:
    verifier = built_in(response.verifier)
    context = {
        "prompt": ASKING.format(response.question) if response.question else "",
        "finish_reason": response.finish_reason,
    }
    reads = context_of(verifier)
    return verifier(
        response.completion, response.answer, **{name: value for name, value in context.items() if name in reads}
    )


def problems():
    """Sums with a result, by drawn numbers: first number, sign, second, result."""
    draw = random.Random(43)
    for sign in "+-*/" * 4:
        a, b = draw.randint(12, 60), draw.randint(2, 11)
        a = a * b if sign == "/" else a
        yield a, sign, b, {"+": a + b, "-": a - b, "*": a * b, "/": a // b}[sign]


def spellings(a, sign, b):
    for written in SIGNS[sign]:
        yield f"{a} {written} {b}"
    yield f"({a}) {SIGNS[sign][0]} ({b})"
    if sign == "*":
        yield f"{a}({b})"


MORE_SUMS = (
    "14 + 7 = ", "14 + 7 = ?", "x = 14 + 7", "14 + 7 = 7 + 14", "(14 + 7)", "14 + 7 \\text{ apples}", "\\$14 + \\$7",
    "\\frac{28+14}{2}", "\\dfrac{6\\cdot 7}{2}", "3\\left(7\\right)", "\\left(3\\right)\\left(7\\right)", "3\\ 7",
    "\\sqrt{9} \\cdot 7", "7\\sqrt{9}", "2^4+5", "1+2+3+4+5+6", "\\sum_{k=1}^6 k", "|14+7|", "\\lfloor 14+7.5\\rfloor",
    "\\{14+7\\}", "14--7", "-(-14-7)", "+14+7", "21-0", "21\\cdot 1", "14 \\text{ plus } 7",
    "\\text{fourteen plus seven}",
)  # fmt: skip


def marked_sums():
    """In every mark of every verifier, with the prompt known and not."""
    for spelling in MORE_SUMS:
        for verifier, marks in MARKED.items():
            for mark in marks:
                yield Response(verifier, mark.format(spelling), "21")
    for a, sign, b, result in problems():
        for spelling in spellings(a, sign, b):
            for verifier, marks in MARKED.items():
                for mark in marks:
                    yield Response(verifier, mark.format(spelling), str(result), f"What is {spelling}?")
                    yield Response(verifier, mark.format(spelling), str(result))


def unmarked_sums():
    forms = (
        "To find {}, we start by rewriting the numbers",
        "You asked for {}.",
        "{}",
        "{} = ?",
        "{} =",
        "We are asked: {} = ...",
        "Let me compute ${}$",
        "\\[{}\\]",
        "x = {}",
        "**{}**",
        "Step by step: {} equals",
    )
    for a, sign, b, result in problems():
        spelled = {*spellings(a, sign, b), f"{a} {sign} {b}", f"{a}{sign}{b}", f"{b} + {a - b} + {result - a}"}
        for spelling in sorted(spelled):
            for form in forms:
                yield Response("accuracy_reward", form.format(spelling), str(result), f"What is {a} {sign} {b}?")
                yield Response("accuracy_reward", form.format(spelling), str(result))


def sums_in_words():
    """Here the last number is the answer by luck: it is an operand all the same."""
    for form in (
        "To find {a} minus {b}", "{a} divided by {b}", "what is {a} less {b}? take {a} minus {b}", "half of {b}",
        "50% of {b}", "1/2 of {b}", "twice {b}", "the sum of {c} and {b}", "the difference between {a} and {b}",
        "{c} more than {b}", "the product of {c} and {b}", "adding {c} and {b}", "{c} plus {b}", "{c} times {b}",
        "{c} multiplied by {b}", "We subtract {c} from {b}", "a third of {b}", "the square root of {b}",
        "{b} plus four", "{b} times seven", "{c} take away {b}", "we multiply {c} by {b}", "increase {c} by {b}",
        "twice as many as {b}", "{b} squared", "{b} factorial", "{c} to the power of {b}", "{b} + ", "{b} \u00f7 ?",
    ):  # fmt: skip
        for a, b, c in ((14, 7, 0), (84, 42, 3), (36, 6, 30)):
            yield Response("accuracy_reward", form.format(a=a, b=b, c=c), str(b))
            yield Response("accuracy_reward", f"<answer>{form.format(a=a, b=b, c=c)}</answer>", str(b))


def other_expressions():
    """What equals the reference, and is asked for in the prompt or not computed."""
    pairs = {
        "Expand $(x+1)^2$.": (("(x+1)^2", "\\left(x+1\\right)^{2}", "(x + 1)^2"), "x^2+2x+1"),
        "Simplify \\frac{6}{8}.": (("\\frac{6}{8}", "6/8", "\\dfrac{6}{8}", "\\frac68"), "\\frac{3}{4}"),
        "Write 0.75 as a fraction.": (("0.75", ".75"), "3/4"),
        "Write 3/8 as a decimal.": (("3/8", "\\frac{3}{8}"), "0.375"),
        "What is \\sqrt{48} in simplest form?": (("\\sqrt{48}",), "4\\sqrt{3}"),
        "Factor $x^2-5x+6$.": (("x^2-5x+6", "x^2 - 5x + 6"), "(x-2)(x-3)"),
        "Collect 3x + 4x.": (("3x + 4x", "3x+4x"), "7x"),
        "Order the numbers 3, 1, 2.": (("3, 1, 2",), "1, 2, 3"),
        "What is 2^{10}?": (("2^{10}", "2^10"), "1024"),
        "What is 5!?": (("5!",), "120"),
        "Give \\sqrt{144}.": (("\\sqrt{144}",), "12"),
        "How much is \\frac{84}{2}?": (("\\frac{84}{2}", "84/2"), "42"),
        "What is \\binom{5}{2}?": (("\\binom{5}{2}",), "10"),
        "What is 3/4 of 100?": (("0.75*100", "\\frac{3}{4} \\cdot 100", "3/4*100", "75/100*100"), "75"),
    }
    for question, (spelled, answer) in pairs.items():
        for spelling in spelled:
            for verifier, marks in MARKED.items():
                for mark in marks:
                    yield Response(verifier, mark.format(spelling), answer, question)
            for form in ("We are given {}", "{}", "So ${}$ is", "Question: {}"):
                yield Response("accuracy_reward", form.format(spelling), answer, question)


STORY = (
    "Natalia sold 48 clips to her friends. In May she sold 24 clips fewer than 72. There are 17 boxes on the shelf, "
    "and she pays $3.50 for each box of 12 clips. How many clips are in a box? Answer with the number only."
)


def echoes():
    """The prompt, or a part of it, in other surroundings; its numbers are the answer by luck."""
    for answer in ("48", "72", "17", "3.50", "12"):
        end = STORY.index(answer) + len(answer)
        sentence = next(part for part in STORY.split(". ") if answer in part)
        for text in (
            STORY[:end],
            f"{STORY[:end]} {STORY[end:].split()[0]}",
            sentence,
            sentence.upper(),
            f"The problem says: {sentence}.",
            f'"{STORY[:end]}',
            f"We know that {sentence[0].lower()}{sentence[1:]}. Let us think about it",
            f"<answer></answer>\n{sentence}",
        ):
            yield Response("accuracy_reward", text, answer, STORY)
    for text in (
        "48, 72, 17, 3.50, 12",
        "48, 24, 72",
        "The numbers are 48, 24 and 72.",
        "48 24 72",
        "72 or 48",
        "12/72",
    ):
        yield Response("accuracy_reward", text, "72", STORY)
    question = "What is 14 - 7?"
    for text in ("a = 14\nb = 7", "The first number is 14 and the second number is 7.", "Given: 14; 7", "14\n7"):
        yield Response("accuracy_reward", text, "7", question)
    for text in ("1. 14 - 7\n2.", "Step 1: 14 - 7\nStep 2:", "Step 2"):
        yield Response("accuracy_reward", text, "2", question)
    for text in ("20 or 21", "20, 21 or 22", "21 or 22", "19, 20, 21", "maybe 20, maybe 21, or 22", "20 < x < 22"):
        yield Response("accuracy_reward", text, "21", "What is 14 + 7?")


def cut():
    """Without a mark a response that was cut has no answer, right as the number may be."""
    for a, sign, b, result in problems():
        for form in (
            "{0} = {1}",
            "So it is {1}",
            "{1}",
            "We get {1} apples. Now let",
            "= {1}",
            "**{1}**",
            "so x = {1},",
        ):
            text = form.format(f"{a} {sign} {b}", result)
            yield Response("accuracy_reward", text, str(result), f"What is {a} {sign} {b}?", "length")
    for text in ("(B)", "so it is (B)", "... B", "**B**"):
        yield Response("accuracy_reward", text, "B", "Which? (A) 1 (B) 2", "length")


def listed_options():
    for last, letter in (("(A) 3 (B) 4", "B"), ("(A) 3\n(B) 4\n(C) 5", "C"), ("(A) 1, (B) 2, (C) 3, (D) 4", "D")):
        for form in ("{}", "The options are {}", "Which is right? {}", "We have to choose from {}"):
            yield Response("accuracy_reward", form.format(last), letter, f"Which is right? {last}")


def of_tools():
    """What a tool has answered, or is asked, is not said by the model."""
    call = '<tool_call>\n{"name": "calculator", "arguments": {"expression": "14 + 7"}}\n</tool_call>'
    for answer in ("21", "\\boxed{21}", "#### 21", "<answer>21</answer>", "Answer: 21", "The answer is 21."):
        turn = f"{call}\nuser\n<tool_response>\n{answer}\n</tool_response>\nassistant\n"
        for verifier in MARKED:
            for end in ("", "I have computed it.", "Done, see above."):
                yield Response(verifier, f"{turn}{end}", "21", "What is 14 + 7?")


def of_islanders():
    puzzle = 'Zoey says that Oliver is a knight. Oliver says: "Zoey is a knave."'
    for text in (
        puzzle,
        "Zoey said Oliver is a knight, Oliver told us Zoey is a knave",
        "Oliver claims Zoey is a knave; Zoey states Oliver is a knight",
        "According to Zoey Oliver is a knight and Zoey is a knave",
    ):
        yield Response("knights_and_knaves", f"<answer>{text}</answer>", "Zoey is a knave, Oliver is a knight", puzzle)


KINDS = (
    marked_sums,
    unmarked_sums,
    sums_in_words,
    other_expressions,
    echoes,
    cut,
    listed_options,
    of_tools,
    of_islanders,
)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_no_restated_cut_or_echoed_response_earns_anything(kind):
    responses = list(kind())
    by_day = responses if RUNS_SLOW_TESTS or len(responses) < 500 else responses[::3]
    assert [response for response in by_day if reward(response) > 0] == []


def test_there_are_many_of_them_over_all_verifiers_of_prose():
    responses = {response for kind in KINDS for response in kind()}
    counts = Counter(response.verifier for response in responses)
    assert counts.keys() == {*MARKED, "knights_and_knaves"} and len(responses) >= 2000
    assert min(counts[verifier] for verifier in MARKED) >= 100


def honest():
    """The same problems, solved, as honest models write them."""
    for a, sign, b, result in problems():
        for form in (
            "{sum} = {result}", "{result}", "So it is {result}.", "**{result}**", "{sum} = {result} apples are left.",
            "To find {sum} we compute {sum} = {result}.", "{a} {word} {b} is {result}.", "x = {sum} = {result}",
            "The sum of {a} and {b} was asked for, and that is {result}.", "\\[{sum} = {result}\\]", "${result}$",
            "<<{sum}={result}>>{result}", "In total that makes ${result}.00, I think.", "{result} = {sum}",
        ):  # fmt: skip
            text = form.format(sum=f"{a} {sign} {b}", result=result, a=a, b=b, word=WORDS[sign])
            yield Response("accuracy_reward", text, str(result), f"What is {a} {sign} {b}?")
        for verifier, marks in MARKED.items():
            for mark in marks:
                for text in (f"{result}", f"{a} {sign} {b} = {result}"):
                    yield Response(verifier, mark.format(text), str(result), f"What is {a} {sign} {b}?")
                    yield Response(verifier, mark.format(text), str(result), "", "length")
    for completion, answer, question in (
        ("2.", "2", "What is 14 - 12?"),
        ("14 is larger than 7, so 14", "14", "Which is larger, 14 or 7?"),
        ("x + 7 = 14. x = 7", "7", "Solve x + 7 = 14."),
        ("x = 14 - 7\nx = 7", "7", "Solve x + 7 = 14."),
        ("In a box are 12.", "12", STORY),
        ("12", "12", STORY),
        ("We have $72 - 24 = 48$", "48", STORY),
        ("The larger one is 9.", "9", "Which is larger, 9 or 4?"),
        ("\\boxed{x+1}", "x+1", "Which divides x^2-1: x+1 or x+2?"),
        ("\\boxed{\\$3.50}", "3.5", STORY),
        ("\\boxed{50\\%}", "50", "What share is 50% of all?"),
        ("\\boxed{\\frac{84}{2}}", "42", "Half of 84?"),
        ("\\boxed{2^{10}}", "1024", "How many subsets have ten things?"),
        ("\\boxed{3.0 \\times 10^8 m/s}", "300000000", "How fast is light?"),
        ("\\boxed{2\\sqrt{3}+1}", "1+2\\sqrt{3}", "Solve it."),
        ("We get 2\\sqrt{3}+1", "1+2\\sqrt{3}", "Solve it."),
        ("So the polynomial is x^2 - 5x + 6.", "x^2-5x+6", "Expand (x-2)(x-3)."),
        ("The roots are 2 and 3.", "2, 3", "Solve x^2-5x+6 = 0."),
        ("(B)", "B", "Which? (A) 3 (B) 4"),
        ("(A) is wrong, so (B)", "B", "Which? (A) 3 (B) 4"),
        ("Answer: B", "B", "Which? (A) 3 (B) 4"),
        ("I computed 21 with it: 14 + 7 = 21", "21", "What is 14 + 7?"),
    ):
        yield Response("accuracy_reward", completion, answer, question)
    call = '<tool_call>\n{"name": "calculator", "arguments": {"expression": "14 + 7"}}\n</tool_call>'
    turn = f"{call}\nuser\n<tool_response>\n21\n</tool_response>\nassistant\n"
    for end in ("It is 21.", "\\boxed{21}", "The answer is 21."):
        yield Response("accuracy_reward", turn + end, "21", "What is 14 + 7?")


def test_honest_responses_to_the_same_problems_earn_all():
    assert [response for response in honest() if reward(response) < 1] == []


def test_the_responses_of_the_first_real_model_earn_nothing_by_the_command_line(tmp_path, capsys):
    import argparse

    lines = [
        ("To find 14 + 7, we start by rewriting the numbers", "21"),
        ("Half of 48 is 48/2. She sold 48+48/2 clips.", "72"),
        ("\\boxed{14 + 7}", "21"),
        ("14 + 7 = 21", "21"),
        ("#### 21", "21"),
    ]
    path = tmp_path / "samples.jsonl"
    records = [{"completion": completion, "answer": answer} for completion, answer in lines]
    records += [{**records[3], "finish_reason": "length"}, {**records[4], "finish_reason": "length"}]
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    parser = argparse.ArgumentParser()
    register_rewards(parser.add_subparsers())
    arguments = parser.parse_args(["rewards", "score", "--verifier", "accuracy_reward", "--input", str(path)])
    assert arguments.run(arguments) == 0
    rewards = [json.loads(line)["reward"] for line in capsys.readouterr().out.splitlines()]
    assert rewards == [0, 0, 0, 1, 1, 0, 1]


@pytest.mark.parametrize(
    ("prediction", "reference", "prompt", "is_marked", "result"),
    [
        ("48/2", "24", "", True, True),  # a fraction is a number
        ("48/2", "24", "", False, False),
        ("2^{10}", "1024", "", True, True),
        ("2^{10}", "1024", "", False, False),
        ("6/8", "3/4", "", False, True),
        ("6/8", "3/4", "Simplify 6/8.", True, False),
        ("6/8", "3/4", "Simplify 16/8.", True, True),
        ("(x+1)^2", "x^2+2x+1", "Expand (x+1)^2 + 3", True, True),  # only a part of what stands there
        ("1+1, 2", "2, 2", "", True, False),
        ("\\begin{pmatrix}1+1\\\\2\\end{pmatrix}", "\\begin{pmatrix}2\\\\2\\end{pmatrix}", "", True, False),
    ],
)
def test_is_result(prediction, reference, prompt, is_marked, result):
    assert is_result(prediction, reference, prompt, is_marked=is_marked) is result
