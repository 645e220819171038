"""Stop strings in the engines: samples are those without them, up to the token that completes one."""

import json
import tempfile
from pathlib import Path

import pytest
import tokenizers as hf
from rollout_probes import ask_probe
from test_multi_step import QWEN, VOCABULARY


@pytest.fixture(scope="module")
def tokenizer_dir(tmp_path_factory):
    """A token for each printable byte, and pairs of letters."""
    directory = tmp_path_factory.mktemp("tokenizer")
    alphabet = sorted(hf.pre_tokenizers.ByteLevel.alphabet())
    pairs = [(one, other) for one in "abcdefgh" for other in "stuvwx"][: VOCABULARY - 256]
    vocab = {token: number for number, token in enumerate([*alphabet, *map("".join, pairs)])}
    backend = hf.Tokenizer(hf.models.BPE(vocab=vocab, merges=pairs))
    backend.decoder = hf.decoders.ByteLevel()
    backend.save(str(directory / "tokenizer.json"))
    return directory


@pytest.mark.parametrize("engine", ["CpuEngine", "VllmEngine"])
def test_samples_end_with_the_token_that_completes_a_text(rollout_python, tokenizer_dir, engine):
    with tempfile.TemporaryDirectory(prefix="stop-") as name:
        (Path(name) / "model").mkdir()
        (Path(name) / "model" / "config.json").write_text(json.dumps(QWEN))
        config = {"max_model_len": 96, "max_num_seqs": 12, "tokenizer_dir": str(tokenizer_dir)}
        found = ask_probe("stop_probe.py", rollout_python, Path(name), {"engine": engine}, **config)
    decode = hf.Tokenizer.from_file(str(tokenizer_dir / "tokenizer.json")).decode
    ended = 0
    for (tokens, logprobs, reason), (short, short_logprobs, short_reason) in zip(found["plain"], found["stopped"]):
        texts = [decode(tokens[:count], skip_special_tokens=False) for count in range(1, len(tokens) + 1)]
        count = next((n for n, text in enumerate(texts, 1) if any(stop in text for stop in found["texts"])), None)
        assert short == tokens[:count]
        assert short_logprobs == pytest.approx(logprobs[:count], abs=2e-3)
        assert short_reason == ("stop" if count else reason)
        ended += count is not None
    assert ended >= 2 and len(found["texts"]) >= 2
    assert found["border"] == [found["first"][:1], found["first"]]
