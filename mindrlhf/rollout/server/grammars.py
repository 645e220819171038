"""Samples that keep to a grammar: xgrammar says which tokens may follow, as in vLLM's structured outputs.

Those would give the log-probability of a token among the allowed ones, and not the policy's, which is trained. So the
mask is laid here, by a logits processor of vLLM's, which also notes how likely the policy would have kept to it: the
logarithm of the probability of all allowed tokens together. The policy's log-probability of a token is the sum of the
two. Where the allowed tokens had less than half, the token is the grammar's and not the policy's.
"""

import functools
import math
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xgrammar
from transformers import PreTrainedTokenizerFast
from vllm import SamplingParams
from vllm.v1.sample.logits_processor.builtin import process_dict_updates
from vllm.v1.sample.logits_processor.interface import BatchUpdate, LogitsProcessor
from xgrammar.structural_tag import JSONSchemaFormat

PROCESSOR = f"{__name__}:GrammarProcessor"
MIN_ALLOWED = math.log(0.5)


@dataclass
class Allowed:
    """Logarithms of the probability of all allowed tokens, by position in a sample; or why there is no grammar."""

    masses: dict[int, float] = field(default_factory=dict)
    failure: str = ""


_ALLOWED: dict[str, Allowed] = {}  # in the process that samples, by the name of the sample


def take_allowed(name: str) -> tuple[str, list[float]]:
    """Return of a sample why it has no grammar, and the logarithms for each of its tokens; forget it."""
    found = _ALLOWED.pop(name, Allowed(failure="a server with draft tokens follows no grammar"))
    return found.failure, [found.masses[place] for place in sorted(found.masses)]


@functools.cache
def _compiler(tokenizer_dir: str, vocab_size: int) -> xgrammar.GrammarCompiler:
    if "max_whitespace_cnt" not in JSONSchemaFormat.model_fields:  # it would be passed over without a word
        raise ValueError("this xgrammar sets no limit to spaces: install xgrammar 0.2.4 or newer for rollout")
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(Path(tokenizer_dir) / "tokenizer.json"))
    return xgrammar.GrammarCompiler(xgrammar.TokenizerInfo.from_huggingface(tokenizer, vocab_size=vocab_size))


class _Sample:
    """A sample in the making; ``token_ids`` is vLLM's own list of its tokens, which grows."""

    def __init__(self, params: SamplingParams, token_ids: list[int], vocab_size: int):
        told = params.extra_args
        self._token_ids, self._num_accepted, self._end_ids = token_ids, 0, params.stop_token_ids
        self._allowed = _ALLOWED.setdefault(told["name"], Allowed())
        self._temperature = params.temperature or 1.0
        self._bits = xgrammar.allocate_token_bitmask(1, vocab_size)
        try:
            grammar = _compiler(told["tokenizer_dir"], vocab_size).compile_structural_tag(told["grammar"])
            self._matcher = xgrammar.GrammarMatcher(grammar, override_stop_tokens=list(self._end_ids))
        except (RuntimeError, ValueError) as error:  # a schema that xgrammar does not know; the sample ends at once
            text = re.sub(r"^\[[\d:]+\] \S+ ", "", " ".join(str(error).split()))  # where it stands in its source
            self._matcher, self._allowed.failure = None, text[:300] or "unknown"

    def mask(self, logits: torch.Tensor) -> None:
        """Lay the mask on the logits [vocab] of the next token."""
        before = torch.logsumexp(logits.float() / self._temperature, dim=-1)
        allowed = self._may_follow(len(logits))
        logits.masked_fill_(~torch.from_numpy(allowed).to(logits.device), -math.inf)
        after = torch.logsumexp(logits.float() / self._temperature, dim=-1)
        self._allowed.masses[len(self._token_ids)] = min(0.0, float(after - before))

    def _may_follow(self, size: int) -> np.ndarray:
        allowed = np.zeros(size, bool)
        for token in self._token_ids[self._num_accepted :] if self._matcher else ():
            self._matcher.accept_token(token)
        self._num_accepted = len(self._token_ids)
        if self._matcher is not None and not self._matcher.is_terminated():
            self._matcher.fill_next_token_bitmask(self._bits)
            bits = np.unpackbits(self._bits.numpy().view(np.uint8), bitorder="little").astype(bool)[:size]
            allowed[: len(bits)] = bits
        if not allowed.any():
            allowed[list(self._end_ids)] = True
        return allowed


class GrammarProcessor(LogitsProcessor):
    """Masks of the samples of a batch, see :class:`vllm.v1.sample.logits_processor.interface.LogitsProcessor`."""

    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool):
        self._vocab_size = vllm_config.model_config.get_vocab_size()
        self._samples: dict[int, _Sample] = {}

    def is_argmax_invariant(self) -> bool:
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        process_dict_updates(self._samples, batch_update, self._begin)

    def _begin(self, params: SamplingParams, prompt_ids: Any, token_ids: list[int]) -> _Sample | None:
        follows = "grammar" in (params.extra_args or {})
        return _Sample(params, token_ids, self._vocab_size) if follows else None

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        for row, sample in self._samples.items():
            sample.mask(logits[row])
        return logits
