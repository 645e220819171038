"""Trains the quickstart's tokenizer on its problems: byte-level BPE of Qwen2's kind, with few entries.

    python make_tokenizer.py --data DIR/train.jsonl --out MODEL_DIR [--vocab-size 512]

writes MODEL_DIR/tokenizer.json and MODEL_DIR/tokenizer_config.json. With 512 entries most words of the problems are
one token, a question takes about 33 and an answer about 19. Digits are never merged, because a small model can
then learn arithmetic digit by digit. The same data gives the same files, byte for byte.
"""

import argparse
import json
import os
import sys
from collections.abc import Iterable
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from mindrlhf.data.tokenizers import QWEN2_SPLIT
from mindrlhf.errors import UserError

END_OF_TEXT, TURN_START, TURN_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
SPECIAL_TOKENS = (END_OF_TEXT, TURN_START, TURN_END)

# Two tokens around a question instead of ChatML's eight: roles go without saying, since turns alternate.
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] != 'assistant' %}<|im_start|>{% endif %}{{ message['content'] }}<|im_end|>"
    "{% endfor %}"
)
CONFIG = {
    # transformers 5 uses this class for every Qwen2 model, so its way of cutting text must be ours.
    "tokenizer_class": "Qwen2Tokenizer",
    "bos_token": None,
    "eos_token": TURN_END,
    "pad_token": END_OF_TEXT,
    "additional_special_tokens": [TURN_START],
    "add_prefix_space": False,
    "clean_up_tokenization_spaces": False,
    "model_max_length": 1024,
    "chat_template": CHAT_TEMPLATE,
}


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Return the tokenizer of ``texts`` with at most ``vocab_size`` entries: special tokens, bytes, merges.

    Raises:
        UserError: the bytes and special tokens alone are more than ``vocab_size``.
    """
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    smallest = len(SPECIAL_TOKENS) + len(alphabet)
    if vocab_size < smallest:
        raise UserError(f"vocabulary size {vocab_size} is below the {smallest} bytes and special tokens")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(QWEN2_SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        initial_alphabet=sorted(alphabet),
        special_tokens=list(SPECIAL_TOKENS),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def read_texts(paths: Iterable[Path]) -> list[str]:
    """Return questions and answers of JSONL files.

    Raises:
        UserError: a file cannot be read, a line is no problem, or there is no problem at all.
    """
    paths = list(paths)
    texts: list[str] = []
    for path in paths:
        try:
            lines = path.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"cannot read {path}: {error}") from error
        for number, line in enumerate(lines, start=1):
            try:
                record = json.loads(line)
                texts += [record["question"] + "", record["answer"] + ""]
            except (ValueError, TypeError, KeyError) as error:
                raise UserError(f"{path}, line {number}: not a JSON object with question and answer") from error
    if not texts:
        raise UserError(f"no problems in {', '.join(map(str, paths))}; make them with problems.py")
    return texts


def save_tokenizer(tokenizer: Tokenizer, directory: Path) -> None:
    """Write both files. Each appears whole or not at all."""
    directory.mkdir(parents=True, exist_ok=True)
    _write(directory / "tokenizer.json", tokenizer.to_str(pretty=True))
    _write(directory / "tokenizer_config.json", json.dumps(CONFIG, indent=2) + "\n")


def _write(path: Path, text: str) -> None:
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        with partial.open("w", encoding="utf-8", newline="\n") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def main(argv: list[str] | None = None) -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(description="Train the quickstart's tokenizer on its problems.")
    parser.add_argument("--data", type=Path, nargs="+", required=True, help="JSONL files with question and answer")
    parser.add_argument("--out", type=Path, required=True, help="folder for the two files of the tokenizer")
    parser.add_argument("--vocab-size", type=int, default=512, help="entries, special tokens included (default 512)")
    arguments = parser.parse_args(argv)
    try:
        tokenizer = train_tokenizer(read_texts(arguments.data), arguments.vocab_size)
        save_tokenizer(tokenizer, arguments.out)
    except (UserError, OSError) as error:
        print(f"make_tokenizer.py: error: {error}", file=sys.stderr)
        return UserError.exit_code
    print(f"{arguments.out}: tokenizer with {tokenizer.get_vocab_size()} entries")
    return 0


if __name__ == "__main__":
    sys.exit(main())
