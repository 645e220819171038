"""Texts at which sampling ends (``rollout.stop``), found in the tokens of a response as they are sampled.

vLLM looks for such texts in what it decodes of a request. Here requests are token ids alone, and a response may be
sampled in several of them, so they are looked for beside the engine: in the text of the tokens from the response's
beginning, whatever it was divided into. Nothing is cut off: the token that completes a text is the last of the
response, as with ``include_stop_str_in_output`` of vLLM.
"""

from collections.abc import Callable, Collection, Sequence

from mindrlhf.rollout.types import Completion

# What tokens become that hold a part of a character only.
_PARTIAL = "\ufffd"
# Characters at the beginning of a decoded run of tokens that may differ from those within a longer one.
_EDGE_CHARS = 4


class StopStrings:
    """Says of each new token whether it completes one of ``texts``.

    Args:
        texts: none is empty.
        decode: text of token ids, special tokens included.
    """

    def __init__(self, texts: Sequence[str], decode: Callable[[Sequence[int]], str]):
        assert texts and all(texts), f"stop strings must be texts, not {texts!r}"
        self._texts = tuple(texts)
        self._decode = decode
        self._longest = max(map(len, texts))
        self._last_chars = {text[-1] for text in texts}
        self._may_end: dict[int, bool] = {}

    def may_end(self, token_id: int) -> bool:
        """Return True if ``token_id`` can complete a stop string: cheap, and False for nearly all."""
        found = self._may_end.get(token_id)
        if found is None:
            text = self._decode([token_id])
            found = not text or _PARTIAL in text or not self._last_chars.isdisjoint(text)
            self._may_end[token_id] = found
        return found

    def is_complete(self, token_ids: Sequence[int]) -> bool:
        """Return True if a stop string is in the response ``token_ids``, of which only the last token is new."""
        needed = len(self._decode(token_ids[-1:])) + self._longest + _EDGE_CHARS
        count = self._longest
        while True:
            tail = self._decode(token_ids[-count:])
            if any(text in tail for text in self._texts):
                return True
            if count >= len(token_ids) or len(tail) >= needed:
                return False
            count *= 2

    def first_end(self, token_ids: Sequence[int], num_new: int) -> int:
        """Return how many of the last ``num_new`` tokens belong to the response: up to the one that completes a text,
        or -1 when none does."""
        first = len(token_ids) - num_new
        for count in range(1, num_new + 1):
            if self.may_end(token_ids[first + count - 1]) and self.is_complete(token_ids[: first + count]):
                return count
        return -1


class StoppingSamples:
    """Stop-string matching for the samples of a batch.

    Attributes:
        stops: of the batch; None where it has none.
    """

    def __init__(self, tokenizer_dir: str):
        self.stops: StopStrings | None = None
        self._tokenizer_dir = tokenizer_dir
        self._known: dict[tuple[str, ...], StopStrings] = {}
        # By name: the response so far, and the log-probabilities of what was sampled of it.
        self._samples: dict[str, tuple[list[int], list[float]]] = {}

    def begin_batch(self, texts: Sequence[str]) -> None:
        """Forget all samples; those to come end at these texts."""
        self._samples.clear()
        self.stops = None
        if texts and tuple(texts) not in self._known:
            from mindrlhf.data.tokenizers import load_tokenizer

            tokenizer = load_tokenizer(self._tokenizer_dir)
            self._known[tuple(texts)] = StopStrings(texts, lambda ids: tokenizer.decode(ids, skip_special_tokens=False))
        if texts:
            self.stops = self._known[tuple(texts)]

    def add(self, name: str, prompt: Sequence[int], num_begun: int) -> None:
        """Add a sample of a prompt, whose last ``num_begun`` tokens are of the response already."""
        self._samples[name] = (list(prompt[len(prompt) - num_begun :]), [])

    def begun(self, name: str) -> list[int]:
        """Return the tokens of a response that the prompt has."""
        return self._samples[name][0] if name in self._samples else []

    def extend(self, name: str, token_ids: list[int], logprobs: list[float]) -> tuple[list[int], list[float], bool]:
        """Add new tokens to a sample; return all that were sampled of it, and whether a stop string ends it."""
        tokens, known = self._samples[name]
        tokens += token_ids
        count = self.stops.first_end(tokens, len(token_ids))
        if count >= 0:
            del tokens[len(tokens) - len(token_ids) + count :]
            logprobs = logprobs[:count]
        known += logprobs
        return tokens[len(tokens) - len(known) :], known, count >= 0


def stop_string_fraction(completions: Sequence[Completion], end_ids: Collection[int]) -> float:
    """Return the share of completions that a stop string has ended, and no end token."""
    ended = [one.finish_reason == "stop" and int(one.token_ids[-1]) not in end_ids for one in completions]
    return sum(ended) / max(1, len(ended))
