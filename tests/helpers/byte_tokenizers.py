"""Tokenizers of one token for each byte, so that lengths can be counted by hand."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tokenizers as hf


def byte_backend(special: Sequence[str] = ()) -> hf.Tokenizer:
    """Return the library's tokenizer; special tokens have the ids from 256 on."""
    alphabet = sorted(hf.pre_tokenizers.ByteLevel.alphabet())
    backend = hf.Tokenizer(hf.models.BPE(vocab={token: i for i, token in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = hf.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = hf.decoders.ByteLevel()
    backend.add_special_tokens([hf.AddedToken(token, special=True, normalized=False) for token in special])
    return backend


def write_byte_tokenizer(directory: Path, special: Sequence[str] = (), **config: Any) -> Path:
    """Write tokenizer.json and a tokenizer_config.json of these keys into a directory, and return that."""
    byte_backend(special).save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    return directory
