"""Multiplication problems for examples/tools: turns to warm up on, and prompts for reinforcement learning.

The warm-up teaches both habits: a guess, which is wrong, and a call of the calculator with its answer. Which of them
pays is left to the reward.
"""

import argparse
import json
import random
from pathlib import Path

from calculator import calculator

from mindrlhf.tools.calls import answer_turn

PROMPT = "<|im_start|>user\nWhat is {a} times {b}?<|im_end|>\n<|im_start|>assistant\n"
CALL = '<tool_call>{{"name": "calculator", "arguments": {{"expression": "{a}*{b}"}}}}</tool_call>'


def problems(count: int, seed: int) -> list[tuple[int, int]]:
    """Return pairs of two-digit numbers; those whose sum divides by five are held out and left out here."""
    draw = random.Random(seed)
    pairs = [(a, b) for a in range(11, 100) for b in range(11, 100) if (a + b) % 5]
    return draw.choices(pairs, k=count)


def held_out(count: int) -> list[tuple[int, int]]:
    """Return pairs that ``problems`` never gives."""
    return random.Random(0).sample([(a, b) for a in range(11, 100) for b in range(11, 100) if not (a + b) % 5], count)


def turns(a: int, b: int, draw: random.Random, call_share: float) -> list[dict[str, str]]:
    """Return the records that teach one conversation, a turn each."""
    prompt, result = PROMPT.format(a=a, b=b), calculator(f"{a}*{b}")
    if draw.random() >= call_share:
        return [{"prompt": prompt, "response": f"#### {result + draw.choice((-100, -10, 10, 100))}"}]
    call = CALL.format(a=a, b=b)
    second = f"{prompt}{call}<|im_end|>{answer_turn([str(result)], is_chat=True)}"
    return [{"prompt": prompt, "response": call}, {"prompt": second, "response": f"#### {result}"}]


def main() -> None:
    """Write sft.jsonl, train.jsonl and test.jsonl."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--num-sft", type=int, default=3000)
    parser.add_argument("--num-train", type=int, default=2000)
    parser.add_argument("--num-test", type=int, default=100)
    parser.add_argument("--call-share", type=float, default=0.3, help="share of warm-up conversations with a call")
    arguments = parser.parse_args()
    draw = random.Random(1)
    warm_up = [record for pair in problems(arguments.num_sft, 2) for record in turns(*pair, draw, arguments.call_share)]
    sets = {"sft": warm_up}
    for name, pairs in (("train", problems(arguments.num_train, 3)), ("test", held_out(arguments.num_test))):
        sets[name] = [{"prompt": PROMPT.format(a=a, b=b), "answer": str(a * b)} for a, b in pairs]
    arguments.out.mkdir(parents=True, exist_ok=True)
    for name, records in sets.items():
        lines = "".join(json.dumps(record) + "\n" for record in records)
        (arguments.out / f"{name}.jsonl").write_text(lines, encoding="utf-8")


if __name__ == "__main__":
    main()
