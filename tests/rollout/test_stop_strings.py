"""Stop strings, token by token, against the place where they are complete in the whole text."""

import numpy as np
import tokenizers as hf
from hypothesis import given
from hypothesis import strategies as st

from mindrlhf.rollout.stop_strings import StoppingSamples, StopStrings, stop_string_fraction
from mindrlhf.rollout.types import (
    Completion,
)


def byte_tokenizer():
    """Bytes, some words of several of them, and a special token."""
    alphabet = sorted(hf.pre_tokenizers.ByteLevel.alphabet())
    merges = [("<", "/"), ("</", "a"), (">", "Ċ"), ("a", "b"), ("ab", "ab"), ("Ġ", "a"), ("Ã", "©"), ("Ġ", "<")]
    vocab = {token: number for number, token in enumerate(alphabet)}
    for pair in merges:
        vocab["".join(pair)] = len(vocab)
    backend = hf.Tokenizer(hf.models.BPE(vocab=vocab, merges=merges))
    backend.decoder = hf.decoders.ByteLevel()
    backend.add_special_tokens(["<|end|>"])
    return backend


def piece_tokenizer():
    """As SentencePiece: a space is a sign, and the first of a text is left out; bytes stand for what is no piece."""
    pieces = [
        "<unk>",
        *(f"<0x{number:02X}>" for number in range(256)),
        "▁",
        "▁a",
        "a",
        "b",
        "▁</",
        "</",
        ">",
        "ab",
        "é",
    ]
    backend = hf.Tokenizer(hf.models.BPE({piece: number for number, piece in enumerate(pieces)}, [], unk_token="<unk>"))
    steps = [
        hf.decoders.Replace("▁", " "),
        hf.decoders.ByteFallback(),
        hf.decoders.Fuse(),
        hf.decoders.Strip(" ", 1, 0),
    ]
    backend.decoder = hf.decoders.Sequence(steps)
    return backend


BACKENDS = {"bytes": byte_tokenizer(), "pieces": piece_tokenizer()}
STOPS = st.lists(
    st.sampled_from(["</a>", "ab", "b", " a", "é", "a\n", "</", "<|end|>", "aba", "\n\n", "日"]), min_size=1, max_size=3
)


def decoder(backend):
    return lambda ids: backend.decode(list(ids), skip_special_tokens=False)


def end_by_text(backend, ids, texts):
    """How many tokens there are when one of the texts first stands in what they say; all and False when none does."""
    for count in range(1, len(ids) + 1):
        if any(text in decoder(backend)(ids[:count]) for text in texts):
            return count, True
    return len(ids), False


@given(data=st.data(), kind=st.sampled_from(sorted(BACKENDS)), texts=STOPS)
def test_a_response_ends_with_the_token_that_completes_a_text(data, kind, texts):
    backend = BACKENDS[kind]
    # Few tokens, so that texts come up: those of the texts themselves and their parts, and any others.
    size = backend.get_vocab_size()
    likely = sorted(
        {one for text in ["</a>\n", "ab ab", "é日", "<|end|>", " a b\n\n"] for one in backend.encode(text).ids}
    )
    likely += [ord_id for byte in "é日".encode() if (ord_id := backend.token_to_id(f"<0x{byte:02X}>")) is not None]
    ids = data.draw(st.lists(st.one_of(st.sampled_from(likely), st.integers(0, size - 1)), min_size=1, max_size=30))
    stops = StopStrings(texts, decoder(backend))
    expected, is_ended = end_by_text(backend, ids, texts)
    found = next(
        (count for count in range(1, len(ids) + 1) if stops.may_end(ids[count - 1]) and stops.is_complete(ids[:count])),
        None,
    )
    if kind == "bytes" or not any(text.startswith(" ") for text in texts):
        assert (found or len(ids), found is not None) == (expected, is_ended)
    # In one go over new tokens behind a border, it is the same place.
    border = data.draw(st.integers(0, len(ids)))
    if found is not None and border < found:
        assert stops.first_end(ids, len(ids) - border) == found - border
    if found is None:
        assert stops.first_end(ids, len(ids) - border) == -1


def test_a_text_begins_in_what_the_response_was_before_and_never_in_the_prompt():
    backend = BACKENDS["bytes"]
    stops = StopStrings(["</a>"], decoder(backend))
    ids = backend.encode("so </a>").ids
    assert stops.first_end(ids, 1) == 1 and stops.first_end(ids[-1:], 1) == -1


def test_tokens_without_text_and_long_ones_do_not_hide_a_text():
    backend = BACKENDS["bytes"]
    unknown = backend.get_vocab_size() + 5  # an embedding row that no token has
    stops = StopStrings(["</a>"], decoder(backend))
    ids = [
        *backend.encode("</").ids,
        *[unknown] * 50,
        *backend.encode("a").ids,
        *[unknown] * 50,
        *backend.encode(">").ids,
    ]
    assert stops.first_end(ids, len(ids)) == len(ids)


def test_most_tokens_are_told_without_decoding_what_was_before():
    calls = []

    def decode(ids):
        calls.append(len(ids))
        return BACKENDS["bytes"].decode(list(ids), skip_special_tokens=False)

    stops = StopStrings(["</a>"], decode)
    ids = BACKENDS["bytes"].encode("xyz" * 100).ids
    assert stops.first_end(ids, len(ids)) == -1
    assert calls == [1, 1, 1]


def test_an_engines_samples_end_at_texts_that_begin_before_a_border_and_in_the_middle_of_a_step(tmp_path):
    backend = byte_tokenizer()
    backend.save(str(tmp_path / "tokenizer.json"))
    stopping = StoppingSamples(str(tmp_path))
    stopping.begin_batch(["</a>"])
    prompt = backend.encode("why </a> so </").ids
    behind = backend.encode("a> and more").ids
    for name, num_begun in (("within", 1), ("prompt", 0)):
        stopping.add(name, prompt, num_begun)
        assert stopping.begun(name) == prompt[len(prompt) - num_begun :]
    logprobs = [-float(place) for place in range(len(behind))]
    first = stopping.extend("within", behind[:1], logprobs[:1])
    assert first == (behind[:1], logprobs[:1], False)
    # A step may bring several tokens: those behind the text are dropped, with their log-probabilities.
    assert stopping.extend("within", behind[1:], logprobs[1:]) == (behind[:2], logprobs[:2], True)
    assert stopping.extend("prompt", behind, logprobs) == (behind, logprobs, False)
    stopping.begin_batch([])
    assert stopping.stops is None and stopping.begun("within") == []


def test_how_many_responses_a_stop_string_ended():
    ends = [("stop", [1, 5]), ("stop", [5, 9]), ("length", [5, 1]), ("stop", [3])]
    completions = [
        Completion(0, number, np.array(ids, np.int32), np.zeros(len(ids), np.float32), reason, 0)
        for number, (reason, ids) in enumerate(ends)
    ]
    assert stop_string_fraction(completions, (9,)) == 0.5
    assert stop_string_fraction([], (9,)) == 0
