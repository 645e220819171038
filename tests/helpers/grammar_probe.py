"""Samples of an engine that keep to a grammar, beside a plain forward pass; to be run by the rollout interpreter.

usage: python tests/helpers/grammar_probe.py < JSON of (config of an engine, {"engine": name of its class, ...})

Prints "probe" and JSON: "samples", of [text, finish reason, tokens, whether each is the policy's, log-probabilities];
of these tokens "policy", log-probabilities in float64 of a pass without a grammar, and "masses", the probability of all
tokens that the pattern, by the package regex, allows; "refused" and "of an old xgrammar", why a form was not followed,
and "plain", whether samples without one are those of before.
"""

import json
import os
import sys

import regex
import torch
from stop_probe import SAMPLING, sample
from tokenizers import Tokenizer
from transformers import AutoConfig, AutoModelForCausalLM
from xgrammar.structural_tag import JSONSchemaFormat

from mindrlhf.rollout.server import cpu_engine as engines
from mindrlhf.rollout.server import grammars

TEMPERATURE, END = 0.8, SAMPLING["stop_token_ids"][0]


@torch.inference_mode()
def probe(config, given) -> dict:
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(config["model_dir"])).save_pretrained(config["model_dir"])
    engine = (engines.VllmEngine if given["engine"] == "VllmEngine" else engines.build_engine)(config)
    assert type(engine).__name__ == given["engine"]
    model = AutoModelForCausalLM.from_pretrained(config["model_dir"], dtype=torch.float64)
    decode = Tokenizer.from_file(f"{config['tokenizer_dir']}/tokenizer.json").decode
    texts = [decode([token]) for token in range(model.config.vocab_size)]
    prompts = [[11, 12, 13, 14], [21, 22]]
    before = sample(engine, prompts, 12)

    def constrained(form):
        grammar = json.dumps({"type": "structural_tag", "format": form})
        sampling = {**SAMPLING, "temperature": TEMPERATURE, "stop": [], "grammar": grammar}
        engine.submit(prompts, [3, 3], [1, 2], [12, 12], sampling, [[], []])
        found = []
        while engine.num_pending:
            found += engine.step()
        return sorted(found, key=lambda one: (one.request_id, one.sample_index))

    samples, policy, masses = [], [], []
    for one in constrained({"type": "regex", "pattern": given["pattern"]}):
        tokens, prompt = one.token_ids.tolist(), prompts[one.request_id]
        kept, logprobs = one.is_generated.tolist(), one.logprobs.tolist()
        samples.append([decode(tokens).removesuffix(texts[END]), one.finish_reason, tokens, kept, logprobs])
        rows = model(torch.tensor([[*prompt, *tokens]])).logits[0, len(prompt) - 1 : -1] / TEMPERATURE
        policy.append([float(row.log_softmax(0)[token]) for row, token in zip(rows, tokens)])
        masses.append([])
        for place, row in enumerate(rows):
            said = "".join(texts[token] for token in tokens[:place])
            allowed = [
                regex.fullmatch(given["pattern"], said + text, partial=True) is not None
                if token != END
                else regex.fullmatch(given["pattern"], said) is not None
                for token, text in enumerate(texts)
            ]
            masses[-1].append(float(row.softmax(0)[torch.tensor(allowed)].sum()))
    refused = constrained({"type": "json_schema", "json_schema": {"$ref": "#/nowhere"}})
    found = {"samples": samples, "policy": policy, "masses": masses, "refused": [one.unscored for one in refused]}
    JSONSchemaFormat.model_fields.pop("max_whitespace_cnt")
    grammars._compiler.cache_clear()
    found["of an old xgrammar"] = [one.unscored for one in constrained({"type": "any_text"})]
    return found | {"plain": sample(engine, prompts, 12) == before}


if __name__ == "__main__":
    print("probe", json.dumps(probe(*json.load(sys.stdin))), flush=True)
    os._exit(0)
