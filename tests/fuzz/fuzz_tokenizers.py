"""Tokenizers and chat templates."""

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import corruption
from fuzz_files import make_sentencepiece, make_tokenizer
from fuzz_target import Case


def _use_tokenizer(tokenizer: Any) -> None:
    ids = tokenizer.encode("What is 3 + 4? <|im_end|> ü\ud7ff")
    tokenizer.decode(ids)
    assert tokenizer.fingerprint and tokenizer.vocab_size >= 0, "a tokenizer of no use"


def tokenizer_file(name: str) -> Callable[[Path], Case]:
    def prepare(directory: Path) -> Case:
        from mindrlhf.data.tokenizers import load_tokenizer

        model = make_tokenizer(directory)
        path = model / name
        whole = path.read_bytes()
        tree = json.loads(whole)

        def case(rng: random.Random) -> None:
            if rng.randrange(3) == 0:
                path.write_bytes(corruption.corrupt_bytes(rng, whole))
            else:
                path.write_bytes(corruption.corrupt_json(rng, tree))
            _use_tokenizer(load_tokenizer(model))

        return case

    return prepare


def sentencepiece(directory: Path) -> Case:
    from mindrlhf.data.tokenizers import load_tokenizer

    path = make_sentencepiece(directory)
    whole = path.read_bytes()

    def case(rng: random.Random) -> None:
        path.write_bytes(corruption.corrupt_bytes(rng, whole))
        _use_tokenizer(load_tokenizer(path.parent))

    return case


def chat_template(directory: Path) -> Case:
    from mindrlhf.data.handlers import Example, Message
    from mindrlhf.data.templates import load_template
    from mindrlhf.data.tokenizers import load_tokenizer

    tokenizer = load_tokenizer(make_tokenizer(directory))
    source = (
        b"{% for message in messages %}{% if loop.first and message['role'] != 'system' %}{{ bos_token }}{% endif %}\n"
        b"{{ '<|im_start|>' + message.role | capitalize + '\\n' + message.content | trim + eos_token }}{% endfor %}\n"
        b"{% if add_generation_prompt %}{{ 'x' * 3 }}{{ {'a': [1, 2.5, none]} | tojson(indent=2) }}{% endif %}"
    )
    path = directory / "template.jinja"
    pieces = (b"{{", b"%}", b"|", b"[0]", b".__class__", b" if ", b" is ", b"(", b"9" * 5000, b"{{(" * 400)
    example = Example((Message("system", "s"), Message("user", "What is 3 + 4?")), "7")

    def case(rng: random.Random) -> None:
        text = source
        if rng.randrange(2):
            position = rng.randrange(len(text))
            text = text[:position] + rng.choice(pieces) + text[position:]
        path.write_bytes(corruption.corrupt_bytes(rng, text, max_edits=2))
        load_template(str(path), tokenizer).render(example)

    return case
