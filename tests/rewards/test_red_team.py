"""What a policy may try on every verifier of answers and formats: drafts, hedges, denials. None of it earns anything.

``docs/evidence.md#rewards`` quotes the table that ``attempts_by_verifier`` counts.
"""

from typing import NamedTuple

import pytest

from mindrlhf.rewards.registry import built_in

PROMPT = "<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\n"
THINKING = PROMPT + "<think>\n"
RIGHT, WRONG = "42", "41"

# Thoughts as models of the wild mark them: DeepSeek-R1 and Qwen3, others by XML, OpenThoughts, Magistral, Kimi,
# Command A, Apertus, gpt-oss.
THOUGHTS = [
    *[(f"<{tag}>", f"</{tag}>") for tag in ("think", "thinking", "reasoning", "thought", "Thought", "seed:think")],
    *[(f"<{tag}>", f"</{tag}>") for tag in ("longcat_think", "reflection", "scratchpad", "think_fast", "analysis")],
    ("<|begin_of_thought|>", "<|end_of_thought|>"),
    ("[THINK]", "[/THINK]"),
    ("\u25c1think\u25b7", "\u25c1/think\u25b7"),
    ("<|START_THINKING|>", "<|END_THINKING|>"),
    ("<|inner_prefix|>", "<|inner_suffix|>"),
    ("<|channel|>analysis<|message|>", "<|end|><|start|>assistant<|channel|>final<|message|>"),
]
MARKS = {
    "accuracy_reward": ["#### {}", "<answer>{}</answer>", "\\boxed{{{}}}", "The answer is {}."],
    "qwen_accuracy_reward": ["\\boxed{{{}}}"],
    "math_17k_acc": ["\\boxed{{{}}}", "Answer: {}"],
    "acc_for_dapo": ["Answer: {}"],
}
# Behind a right answer: what takes it back, and what does not.
TAKEN_BACK = r"""
\nWait, that is wrong. It should be 41.|\nActually no, the answer is 41.| or maybe 41|, or 41.
\nThe final answer is 41.|\nFinal answer: 41|\n**Final Answer: 41**|\nHmm, on second thought it is 41.| (or 41)
\nAlternatively, 41.|\nCorrection: 41|\nSo the correct answer should be 41.|\nSorry, 41.
\nThe answer is 41, not 42.|, or perhaps 41| or else 41| / 41|\nNo, 41.|\nOops: 41| but it could be 41
\nI made a mistake: it is 41.|\nLet me correct that: 41|\nHold on, 41| or 41 or 40| or x = 41
"""
KEPT = r"""
\nThe final answer is 42.|\nI hope this is correct.|\nThis matches the condition 6*7 = 42.|.</s>|\nDone.
\nWait, let me check: 6*7 = 42. Yes.|\nWe may check our answer: 6*7 = 42.|\n\nThank you!
\nThe answer is 42.
"""
BOXES = r"""
\boxed{41} or \boxed{42}|\boxed{42} or \boxed{41}|\boxed{41}, \boxed{42}|\boxed{41} and \boxed{42}
\boxed{41} / \boxed{42}|$\boxed{41}$ or $\boxed{42}$|x = \boxed{41} or x = \boxed{42}
\boxed{41}\text{ or }\boxed{42}|\boxed{41 \text{ or } 42}|\boxed{41, 42}|\boxed{42?}|\boxed{42 \pm 1}
\boxed{42}?|not \boxed{42}|The answer is not \boxed{42}|41 or \boxed{42}|\boxed{42} is incorrect.
\boxed{42} is not the answer.|\boxed{42}. But it could be 41.|\boxed{\{41,42\}}|\boxed{41=42}|\boxed{42=41}
\boxed{x=42 or x=41}|\boxed{\text{not }42}|\boxed{42 \text{ or so}}|\boxed{42=42}|\boxed{42}\boxed{41}
\boxed{41.9 \approx 42 \approx 40}|\boxed{\text{either 42 or 41}}|\boxed{42/41}|\boxed{42;41}|\boxed{42\ 41}
\boxed{42 41}|\boxed{41\to 42}|\boxed{41-42}|\boxed{42} (rejected)|\boxed{42}, which is wrong
\boxed{42} maybe \boxed{41}|\boxed{42|\boxed{42 \text{ (rejected)}}|\boxed{\ge 42}|\boxed{42+}
\boxed{\text{about }42\text{ or }43}|\boxed{41,42,43}|\boxed{42} does not work.|\boxed{42} cannot be right.
\boxed{\text{anything but }42}|\boxed{\text{less than } 42}|\boxed{42 \approx 41}|\boxed{41 \approx 42}
\boxed{42.4 = 42 = 41.6}|\boxed{[41, 42]}|\boxed{(41, 42)}|\boxed{41 < x < 43}
"""
REJECTED = """
x = 5. The other root, 17, is rejected.|The roots are 5 and 17; 17 is rejected.|Reject x = 17.
x = 17 is extraneous.|x=5 (17 is rejected)|We discard 17.|17 does not work.|17 is not valid
x = 5, since 17 is not a solution.|Ignore 17.|The value 17 cannot be.|So x=17 is impossible.|17 is wrong.
It is definitely not 17.|Either 5 or 17.|5 or 17|17 or 5|17? No, 5.|It may be 17, or it may be 5.
17 is too large.|17 was the wrong one.|x = 5 or x = 17|Check: 17 = 17
The other solution is 17, but it is negative.|x = 5; x = 17 is inadmissible.|We exclude 17.
17 fails to satisfy it.
"""
CHOICES = r"""
The answer is A or B.|The answer is (A) or (B).|(B) or (C)|A and B|not B|The answer is not B.
B is wrong. The answer is C.|The answer is B. No, C.|\boxed{B} or \boxed{C}|\boxed{B, C}|\boxed{BC}
<think>B</think>C|<think>The answer is B|Answer: B\nAnswer: C|B? C?|The answer could be B or D.|Either B or C.
The answer is B or C|The answer is B/C|The answer is B, or maybe C|I think B, but C is also possible.
Not (B) but (C)|The answer is C, not B.|(B) is incorrect|B\n\nWait, C.
"""
KNAVES = "Zoey is a knave, Oliver is a knight"
BOTH_KNIGHTS = "Zoey is a knight, Oliver is a knight"


class Attempt(NamedTuple):
    verifier: str
    completion: str
    prompt: str = PROMPT
    reference: str = RIGHT


def texts(block: str) -> list[str]:
    return [text.replace("\\n", "\n") for line in block.strip().splitlines() for text in line.split("|")]


def drafts(verifier: str, mark: str):
    """A right answer in the thoughts, or a later one that is wrong."""
    right, wrong = mark.format(RIGHT), mark.format(WRONG)
    for opening, closing in THOUGHTS:
        yield Attempt(verifier, f"{opening}so {right}{closing}\n{wrong}")
        yield Attempt(verifier, f"{opening}so {right}{closing}\nI do not know.")
        yield Attempt(verifier, f"{opening}so {right}")
        yield Attempt(verifier, f"so {right}", PROMPT + opening + "\n")
        yield Attempt(verifier, f"so {right}{closing}\n{wrong}", PROMPT + opening + "\n")
        yield Attempt(verifier, f"so {right}{closing}\n{wrong}", "")
        yield Attempt(verifier, f"{opening}a{closing}{opening}{right}")
        yield Attempt(verifier, f"{right}{opening}hm")
    yield Attempt(verifier, f"{right}\n{wrong}")
    yield Attempt(verifier, f"{right} is wrong.")
    for behind in texts(TAKEN_BACK):
        yield Attempt(verifier, f"{right}{behind}")


def attempts() -> list[Attempt]:
    found = [attempt for verifier, marks in MARKS.items() for mark in marks for attempt in drafts(verifier, mark)]
    boxed = ("accuracy_reward", "qwen_accuracy_reward", "math_17k_acc")
    found += [Attempt(verifier, text) for verifier in boxed for text in texts(BOXES)]
    found += [Attempt("base_acc", f"<think>a</think><answer>{text}</answer>") for text in texts(BOXES)]
    found += [Attempt("accuracy_reward", text, reference="17") for text in texts(REJECTED)]
    found += [Attempt("accuracy_reward", text, reference="B") for text in texts(CHOICES)]
    found += [Attempt(*attempt) for attempt in malformed()]
    found += [Attempt("knights_and_knaves", *rest, reference=KNAVES) for rest in knaves()]
    return list(dict.fromkeys(found))


def malformed():
    box = "<answer>\\boxed{42}</answer>"
    shaped = f"<think>a</think>{box}"
    for verifier in ("format_reward", "strict_format", "loose_format", "base_acc"):
        for completion in (box, f"a {box}", "a</think><answer>\\boxed{42}", ""):
            yield verifier, completion, THINKING
        for completion in (
            box,
            f"a</think>{box}",
            f"{box}<think>a</think>",
            f"<think>a{box}</think>",
            "\\boxed{42}",
            "",
        ):
            yield verifier, completion, PROMPT
        yield verifier, f"a</think>{box}", "Use <think> </think> <answer> </answer>"
        yield verifier, f"a</think>{box}", ""
        if verifier != "loose_format":
            yield verifier, shaped, THINKING
            for completion in (f"{shaped} so", f"so {shaped}", shaped + shaped, f"<think>a</think>so{box}"):
                yield verifier, completion, PROMPT
    yield "base_acc", "<think>\\boxed{42}</think><answer>\\boxed{41}</answer>", PROMPT


def knaves():
    for completion in (
        f"<think><answer>{KNAVES}</answer></think><answer>{BOTH_KNIGHTS}</answer>",
        f"<think><answer>{KNAVES}</answer>",
        f"<reasoning><answer>{KNAVES}</answer></reasoning>",
        f"<answer>{KNAVES}</answer><answer>{BOTH_KNIGHTS}</answer>",
        f"<answer>{KNAVES}</answer> Wait: <answer>{BOTH_KNIGHTS}",
        f"<answer>{KNAVES}, or {BOTH_KNIGHTS}</answer>",
        f"<answer>{KNAVES}</answer> is wrong",
        f"<answer>If {KNAVES}, then</answer>",
        "<answer>It is false that Zoey is a knave and Oliver is a knight</answer>",
        "<answer>Zoey is a knave or Oliver is a knight</answer>",
        "<answer>Either Zoey is a knave or a knight; Oliver is a knight</answer>",
        "<answer>Zoey is not a knave, Oliver is a knight</answer>",
        KNAVES,
    ):
        yield completion, PROMPT
    yield f"<answer>{KNAVES}</answer>", THINKING


def honest() -> list[Attempt]:
    found = []
    for verifier, marks in MARKS.items():
        for mark in marks:
            right, wrong = mark.format(RIGHT), mark.format(WRONG)
            for opening, closing in THOUGHTS:
                found.append(Attempt(verifier, f"{opening}so {wrong}{closing}\n{right}"))
                found.append(Attempt(verifier, f"so {wrong}{closing}\n{right}", PROMPT + opening + "\n"))
            found.append(Attempt(verifier, f"so {right}", PROMPT + "<think>\n\n</think>\n\n"))
            found += [Attempt(verifier, f"{wrong}\n{right}"), Attempt(verifier, f"It is not 41. {right}")]
            found += [Attempt(verifier, f"{right}{behind}") for behind in texts(KEPT)]
    shaped = "<think>a</think><answer>\\boxed{42}</answer>"
    for verifier in ("format_reward", "strict_format", "loose_format", "base_acc"):
        found += [Attempt(verifier, shaped), Attempt(verifier, shaped.removeprefix("<think>"), THINKING)]
        found.append(Attempt(verifier, "<answer>\\boxed{42}</answer>", PROMPT + "<think>\n\n</think>\n\n"))
        found.append(Attempt(verifier, shaped.removeprefix("<think>"), PROMPT + "Let me solve this.\n<think>"))
        found.append(Attempt(verifier, shaped.removeprefix("<think>"), "User: q\nAssistant: <think>"))
    rejecting = ("x = 5. The other root, 17, is rejected.", "x=5 (17 is rejected)", "x = 5. We discard 17.")
    found += [Attempt("accuracy_reward", text, reference="5") for text in rejecting]
    stated = ("The answer is (B).", "\\boxed{B}", "The answer is B, not C.", "**B**", "Option B")
    found += [Attempt("accuracy_reward", text, reference="B") for text in stated]
    found.append(Attempt("knights_and_knaves", f"x</think><answer>{KNAVES}</answer>", THINKING, KNAVES))
    found.append(
        Attempt("knights_and_knaves", f"<answer>{BOTH_KNIGHTS}</answer><answer>{KNAVES}</answer>", PROMPT, KNAVES)
    )
    return found


def reward(attempt: Attempt) -> float:
    return built_in(attempt.verifier)(attempt.completion, attempt.reference, prompt=attempt.prompt)


@pytest.mark.parametrize("verifier", sorted({attempt.verifier for attempt in attempts()}))
def test_no_attempt_earns_anything(verifier):
    assert [attempt for attempt in attempts() if attempt.verifier == verifier and reward(attempt) > 0] == []


@pytest.mark.parametrize("verifier", sorted({attempt.verifier for attempt in honest()}))
def test_honest_responses_of_the_same_forms_earn_all(verifier):
    assert [attempt for attempt in honest() if attempt.verifier == verifier and reward(attempt) < 1] == []


def test_the_attempts_are_many():
    assert len(attempts()) >= 300
