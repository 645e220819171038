"""Samples of an engine with and without stop strings; to be run by the rollout interpreter.

usage: python tests/helpers/stop_probe.py < JSON of (config of an engine, {"engine": name of its class, ...})

Prints "probe" and JSON: "plain", tokens of samples without stop strings; "texts", which are from those; "stopped",
[tokens, log-probabilities, reason] of the same samples with them; and "border", the tokens of a response whose stop
string begins in what the request has of it, and of the same one where that is of the prompt.
"""

import json
import os
import sys

import numpy as np
from multi_step_probe import engine_with_weights
from tokenizers import Tokenizer

from mindrlhf.rollout.server import cpu_engine as engines

SAMPLING = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "stop_token_ids": [7]}


def sample(engine, prompts, max_tokens, stop=(), begun=None):
    num = len(prompts)
    seeds = list(range(num))
    engine.submit(prompts, [3] * num, seeds, [max_tokens] * num, {**SAMPLING, "stop": list(stop)}, [[]] * num, begun)
    found = []
    while engine.num_pending:
        found += engine.step()
    found.sort(key=lambda one: (one.request_id, one.sample_index))
    return [
        [one.token_ids.tolist(), [round(float(value), 4) for value in one.logprobs], one.finish_reason] for one in found
    ]


def two_tokens(decode, tokens):
    """The text of two tokens in the middle of a sample, if any there are whole characters."""
    texts = (decode(tokens[at : at + 2], skip_special_tokens=False) for at in range(3, len(tokens) - 1))
    return [text for text in texts if len(text) >= 2 and "\ufffd" not in text][:1]


def probe(config, given) -> dict:
    build = engines.VllmEngine if given["engine"] == "VllmEngine" else engines.build_engine
    engine = engine_with_weights(config, build)
    assert type(engine).__name__ == given["engine"]
    decode = Tokenizer.from_file(f"{config['tokenizer_dir']}/tokenizer.json").decode
    prompts = np.random.default_rng(0).integers(10, 250, (4, 9)).tolist()
    plain = sample(engine, prompts, 40)
    texts = [text for tokens, _, _ in plain[:4] for text in two_tokens(decode, tokens)][:3]
    stopped = sample(engine, prompts, 40, texts)
    begun = [*prompts[0], *plain[0][0][:5]]
    (first, *_), *_ = sample(engine, [begun], 6, begun=[5])
    text = decode([begun[-1], first[0]], skip_special_tokens=False)
    border = [sample(engine, [begun], 6, [text], [num])[0][0] for num in (5, 0)]
    return {"plain": plain, "texts": texts, "stopped": stopped, "first": first, "border": border}


if __name__ == "__main__":
    print("probe", json.dumps(probe(*json.load(sys.stdin))), flush=True)
    os._exit(0)
