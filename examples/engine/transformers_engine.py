"""A rollout engine of your own: samples with the forward pass of Hugging Face transformers, on a CPU.

Slower than vLLM by far; it serves models that vLLM does not, and to compare with. Its tokens are a function of seed,
prompt and weights, and its log-probabilities are of the distribution sampled from, as a
rollout engine's must. Named in a config as

    rollout: {engine: examples/engine/transformers_engine.py:TransformersEngine}
"""

from dataclasses import dataclass, field

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache

from mindrlhf.rollout.server.streams import stream_key
from mindrlhf.rollout.stop_strings import StoppingSamples
from mindrlhf.rollout.types import Completion
from mindrlhf.weights.publish.buffer import WeightBuffer


@dataclass(eq=False)
class Sequence:
    """A sample on its way: its place in the batch, its prompt, and what was sampled."""

    request_id: int
    sample_index: int
    prompt: list[int]
    max_tokens: int
    random: torch.Generator
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish_reason: str = "length"

    @property
    def name(self) -> str:
        return f"{self.request_id}.{self.sample_index}"


class TransformersEngine:
    """Samples `max_num_seqs` sequences at a time, together from their prompts to the last one's end."""

    sampler = "transformers"

    def __init__(self, config):
        dtype = getattr(torch, config["dtype"])
        if config["load_format"] == "dummy":  # weights come before the first batch
            hf_config = AutoConfig.from_pretrained(config["model_dir"])
            self._model = AutoModelForCausalLM.from_config(hf_config, dtype=dtype)
        else:
            self._model = AutoModelForCausalLM.from_pretrained(config["model_dir"], dtype=dtype)
        self._model.eval()
        self._parameters = self._model.state_dict()
        self._max_num_seqs = config["max_num_seqs"]
        self._stopping = StoppingSamples(config["tokenizer_dir"])
        self._weights_version = 0
        self._waiting, self._group, self._running = [], [], []

    @property
    def num_pending(self):
        return len(self._waiting) + len(self._running)

    def submit(self, prompts, nums_samples, seeds, max_tokens, sampling, images, nums_begun):
        if any(images):
            raise ValueError("this engine samples from text alone")
        self._sampling = sampling
        self._stopping.begin_batch(sampling["stop"])
        for place, prompt in enumerate(prompts):
            for index in range(nums_samples[place]):
                random = torch.Generator().manual_seed(stream_key(seeds[place], index) >> 1)
                sequence = Sequence(place, index, list(prompt), max_tokens[place], random)
                self._waiting.append(sequence)
                if self._stopping.stops is not None:
                    self._stopping.add(sequence.name, prompt, nums_begun[place])

    @torch.inference_mode()
    def step(self, is_interrupted):
        """Sample one token of each sequence that runs."""
        if not self._running:
            self._begin_group()
        logits = self._forward()
        rows = {one: row for row, one in enumerate(self._group)}
        finished = [one for one in self._running if self._extend(one, rows[one], logits[rows[one]])]
        self._running = [one for one in self._running if one not in finished]
        return [self._completion(one) for one in finished]

    def abort(self):
        self._waiting, self._group, self._running = [], [], []

    def update_weights(self, version, buffer_path):
        with WeightBuffer.attach(buffer_path) as buffer:
            buffer.verify(version)
            for name, dtype, array in buffer.tensors(version):
                tensor = torch.from_numpy(np.array(array.view(np.int16) if dtype == "bfloat16" else array))
                self._parameters[name].copy_(tensor.view(torch.bfloat16) if dtype == "bfloat16" else tensor)
        self._weights_version = version

    def sleep(self):
        pass

    wake = close = sleep

    def profile(self, step):
        raise ValueError("this engine has no profiler")

    def _begin_group(self):
        """Take the next sequences; their prompts end in one column."""
        self._group, self._waiting = self._waiting[: self._max_num_seqs], self._waiting[self._max_num_seqs :]
        self._running, self._cache = list(self._group), DynamicCache()
        width = max(len(one.prompt) for one in self._group)
        self._ids = torch.tensor([[0] * (width - len(one.prompt)) + one.prompt for one in self._group])
        self._mask = torch.tensor([[0] * (width - len(one.prompt)) + [1] * len(one.prompt) for one in self._group])

    def _forward(self):
        """Return logits of the next token, float32 [sequences of the group, vocabulary]."""
        positions = (self._mask.cumsum(1) - 1).clamp(min=0)[:, -self._ids.shape[1] :]
        outputs = self._model(
            self._ids, attention_mask=self._mask, position_ids=positions, past_key_values=self._cache, use_cache=True,
            logits_to_keep=1,
        )  # fmt: skip
        self._mask = torch.cat([self._mask, torch.ones(len(self._group), 1, dtype=torch.long)], 1)
        self._ids = torch.zeros(len(self._group), 1, dtype=torch.long)
        return outputs.logits[:, -1].float()

    def _extend(self, sequence, row, logits):
        """Sample a token; return whether it was the last."""
        logprobs = torch.log_softmax(self._limited(logits / self._sampling["temperature"]), -1)
        # The largest of p / Exp(1) is a sample of p.
        token = int((logprobs.exp() / torch.empty_like(logprobs).exponential_(generator=sequence.random)).argmax())
        sequence.token_ids.append(token)
        sequence.logprobs.append(float(logprobs[token]))
        self._ids[row, 0] = token
        has_stopped = token in self._sampling["stop_token_ids"]
        if self._stopping.stops is not None:
            has_stopped |= self._stopping.extend(sequence.name, [token], [sequence.logprobs[-1]])[2]
        sequence.finish_reason = "stop" if has_stopped else "length"
        return has_stopped or len(sequence.token_ids) == sequence.max_tokens

    def _limited(self, logits):
        """Leave the `top_k` largest, and of these the fewest that have the mass `top_p`."""
        if 0 < self._sampling["top_k"] < len(logits):
            logits = logits.masked_fill(logits < logits.topk(self._sampling["top_k"]).values[-1], -torch.inf)
        if self._sampling["top_p"] < 1:
            ordered, places = logits.sort(descending=True)
            mass = ordered.softmax(-1)
            logits = logits.index_fill(0, places[mass.cumsum(-1) - mass >= self._sampling["top_p"]], -torch.inf)
        return logits

    def _completion(self, sequence):
        return Completion(
            request_id=sequence.request_id,
            sample_index=sequence.sample_index,
            token_ids=np.array(sequence.token_ids, np.int32),
            logprobs=np.array(sequence.logprobs, np.float32),
            finish_reason=sequence.finish_reason,
            weights_version=self._weights_version,
        )
