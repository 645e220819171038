"""Makes problems whose answers have the length that the question asks for, drawn from a log-normal distribution.

    python problems.py --out DIR [--num-train 4000] [--num-test 200] [--seed 0] [--unsure 0.6] [--median 48] [--sigma 1]
        [--largest 800]

A question is a number and a colour. The answer counts from the number down to 1 and then names the colour.
DIR/train.jsonl and DIR/test.jsonl hold them for the `gsm8k` handler; DIR/tokenizer.json has a token for each number and
word. With --unsure that share of the answers ends with "unsure" instead: the habit that reinforcement learning has to
break.
"""

import argparse
import json
import random
import sys
from pathlib import Path

from tokenizers import Tokenizer, models, pre_tokenizers

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "quickstart"))
from make_tokenizer import SPECIAL_TOKENS, save_tokenizer

MARK, UNSURE = "####", "unsure"
COLOURS = ("black", "blue", "green", "grey", "orange", "red", "white")
ROLES = ("system", "user", "assistant")  # of the chat template


def lengths(count: int, median: float, sigma: float, largest: int, random_source: random.Random) -> list[int]:
    """Return numbers of a log-normal distribution, cut to 2 and ``largest``."""
    drawn = (median * random_source.lognormvariate(0, sigma) for _ in range(count))
    return [min(largest, max(2, round(number))) for number in drawn]


def make_tokenizer(largest: int) -> Tokenizer:
    """Return a tokenizer of whole words."""
    words = [*SPECIAL_TOKENS, *ROLES, MARK, UNSURE, *COLOURS, *map(str, range(1, largest + 1))]
    vocabulary = {word: index for index, word in enumerate(words)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=SPECIAL_TOKENS[0]))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(list(SPECIAL_TOKENS))
    return tokenizer


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(description="make problems of log-normal length")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--num-train", type=int, default=4000)
    parser.add_argument("--num-test", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--unsure", type=float, default=0.0, help="share of answers without the colour (default 0)")
    parser.add_argument("--median", type=float, default=48, help="of the lengths (default 48)")
    parser.add_argument("--sigma", type=float, default=1.0, help="of their logarithm (default 1)")
    parser.add_argument("--largest", type=int, default=800, help="length to which longer ones are cut (default 800)")
    arguments = parser.parse_args()
    source = random.Random(arguments.seed)
    save_tokenizer(make_tokenizer(arguments.largest), arguments.out)
    for name, count in (("train", arguments.num_train), ("test", arguments.num_test)):
        with (arguments.out / f"{name}.jsonl").open("w", encoding="utf-8") as file:
            for number in lengths(count, arguments.median, arguments.sigma, arguments.largest, source):
                colour = source.choice(COLOURS)
                word = UNSURE if source.random() < arguments.unsure else colour
                text = " ".join([*map(str, range(number, 0, -1)), MARK, word])
                file.write(json.dumps({"question": f"{number} {colour}", "answer": text}) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
