"""Makes the inputs of the sanity recipe: a 512-token tokenizer, 64 prompts, and the config of a random model.

    python examples/sanity/prepare.py --out runs/sanity_inputs [--vocab-size 512] [--model-config FILE] [--endless]

Everything is a function of the arguments. With a larger --vocab-size the tokenizer stays as it is and the
model's vocabulary is padded; --model-config is a JSON file of keys of config.json that shall be others; with --endless
there is no end token, so that every response has the full length. The benchmark uses all three.
"""

import argparse
import json
import random
import string
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

NUM_TOKENS = 512
END_OF_TEXT = "<|endoftext|>"
NUM_PROMPTS = 64
PROMPT_TOKENS = 8


def make_tokenizer() -> Tokenizer:
    """Return a byte-level BPE: 256 bytes, then two-letter tokens, a third each of lower case, upper case and digits."""
    vocabulary = {symbol: index for index, symbol in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    stream = random.Random(0)
    merges: list[tuple[str, str]] = []
    alphabets = (string.ascii_lowercase, string.ascii_uppercase, string.digits)
    while len(vocabulary) < NUM_TOKENS - 1:
        alphabet = alphabets[len(vocabulary) % 3]
        pair = (stream.choice(alphabet), stream.choice(alphabet))
        if "".join(pair) not in vocabulary:
            vocabulary["".join(pair)] = len(vocabulary)
            merges.append(pair)
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([END_OF_TEXT])
    return tokenizer


def model_config(vocab_size: int) -> dict:
    """Return the config.json of a Qwen2 of about 1M parameters beside its vocabulary."""
    return {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "hidden_size": 128,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 512,
        "vocab_size": vocab_size,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,
        "hidden_act": "silu",
        "initializer_range": 0.02,
        "torch_dtype": "float32",
    }


def main() -> None:
    """Write the files."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--vocab-size", type=int, default=NUM_TOKENS)
    parser.add_argument("--model-config", type=Path)
    parser.add_argument("--endless", action="store_true")
    arguments = parser.parse_args()
    model_dir = arguments.out / "model"
    model_dir.mkdir(parents=True, exist_ok=True)
    tokenizer = make_tokenizer()
    tokenizer.save(str(model_dir / "tokenizer.json"))
    special_tokens = {} if arguments.endless else {"eos_token": END_OF_TEXT, "pad_token": END_OF_TEXT}
    (model_dir / "tokenizer_config.json").write_text(json.dumps(special_tokens), encoding="utf-8")
    changes = json.loads(arguments.model_config.read_text(encoding="utf-8")) if arguments.model_config else {}
    config = json.dumps(model_config(arguments.vocab_size) | changes, indent=2)
    (model_dir / "config.json").write_text(config, encoding="utf-8")
    stream = random.Random(1)
    with (arguments.out / "prompts.jsonl").open("w", encoding="utf-8") as file:
        for _ in range(NUM_PROMPTS):
            # Punctuation marks are never merged, so each is one token.
            text = "".join(stream.choice("!#$%&*+-./:;=?@^_") for _ in range(PROMPT_TOKENS - 1))
            file.write(json.dumps({"prompt": text, "answer": "none"}) + "\n")


if __name__ == "__main__":
    main()
