"""Samples of the example's own engine beside a plain forward pass of the same weights; for the rollout interpreter.

usage: python tests/helpers/engine_probe.py < JSON of (config of an engine, {"path": of the example})

Prints "probe" and JSON: by setting a list of [prompt length, tokens, log-probabilities, those of a whole pass in
float64, whether each token was allowed, finish reason]; and "again", whether other batches gave the same tokens.
"""

import json
import os
import sys
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from mindrlhf.sandbox.user_files import load_named

PLAIN = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "stop_token_ids": [7], "stop": []}
SETTINGS = {"plain": {}, "warm": {"temperature": 0.7}, "few": {"top_k": 3}, "most": {"top_p": 0.6}}
PROMPTS = [[11, 12, 13, 14, 15], [21, 22], [31, 32, 33]]


def sample(engine, prompts, seeds, sampling):
    engine.submit(prompts, [2] * len(prompts), seeds, [12] * len(prompts), sampling, [[]] * len(prompts), [0] * 3)
    found = []
    while engine.num_pending:
        found += engine.step(lambda: False)
    return sorted(found, key=lambda one: (one.request_id, one.sample_index))


def expected(model, prompt, tokens, sampling):
    """Log-probabilities in float64 of one pass over prompt and response, and which tokens the limits allow."""
    logits = model(torch.tensor([[*prompt, *tokens]])).logits[0, len(prompt) - 1 : -1].double()
    logprobs, allowed = [], []
    for row, token in zip(logits / sampling["temperature"], tokens):
        probabilities = row.softmax(0)
        if sampling["top_k"]:
            probabilities[probabilities.argsort(descending=True)[sampling["top_k"] :]] = 0
        order = probabilities.argsort(descending=True).tolist()
        kept, mass = [], 0.0
        for one in order:
            if mass >= sampling["top_p"] * float(probabilities.sum()):
                break
            kept.append(one)
            mass += float(probabilities[one])
        allowed.append(token in kept)
        logprobs.append(float((probabilities[token] / probabilities[kept].sum()).log()))
    return logprobs, allowed


@torch.inference_mode()
def probe(config, given):
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(config["model_dir"])).save_pretrained(config["model_dir"])
    path, _, name = given["path"].rpartition(":")
    engine = load_named(Path(path), name, "engine")(config)
    model = AutoModelForCausalLM.from_pretrained(config["model_dir"], dtype=torch.float64)
    found = {}
    for name, changes in SETTINGS.items():
        sampling = PLAIN | changes
        own = found[name] = []
        for one in sample(engine, PROMPTS, [1, 2, 3], sampling):
            prompt, tokens = PROMPTS[one.request_id], one.token_ids.tolist()
            own.append([len(prompt), tokens, one.logprobs.tolist(), *expected(model, prompt, tokens, sampling)])
            own[-1].append(one.finish_reason)
    alone = sample(engine, PROMPTS[1:2], [2], PLAIN)
    found["again"] = [one.token_ids.tolist() for one in alone] == [own[1] for own in found["plain"] if own[0] == 2]
    return found


if __name__ == "__main__":
    print("probe", json.dumps(probe(*json.load(sys.stdin))), flush=True)
    os._exit(0)
