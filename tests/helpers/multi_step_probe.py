"""Samples of an engine that plans several tokens at a time, and one; to be run by the rollout interpreter.

usage: python tests/helpers/multi_step_probe.py < JSON of (config of an engine, cases by name)

A case: "prompts", "num_samples", "max_tokens" of each, "sampling", and "interrupt", after how many passes of a step
somebody interrupts it (0: nobody), and "delay", how many passes a sample that has ended waits for the others.
Prints "probe" and JSON: whether tokens were planned "several" at a time at all; whether the "decoder" of dense models
is "used", was "given up" ("break_decoder" in the config makes it differ) or there is "none"; by case and by "one" or
"several" the steps that vLLM planned and the samples, with digests of what must be equal bit for bit. With
"shares_prompts" in the config it is by "apart" and "shared" in place of that, whether prompts are read once for all
their samples, with the log-probabilities and how many tokens each pass read that vLLM planned.
"""

import hashlib
import json
import os
import sys

import torch

from mindrlhf.cpu.rollout import shared_prefill
from mindrlhf.cpu.rollout.linear import forget_copies
from mindrlhf.rollout.server.engine import build_engine


def give_weights(model: torch.nn.Module) -> None:
    """Weights under which samples end early and late, and whose digests hardly agree by chance."""
    generator = torch.Generator().manual_seed(3)
    for name, parameter in sorted(model.named_parameters()):
        if parameter.ndim > 1:
            parameter.data.copy_(0.15 * torch.randn(parameter.shape, generator=generator))
        elif "norm" in name:
            parameter.data.fill_(1.0)  # vLLM's random ones are so small that all tokens are as likely as one another
    forget_copies(model)


def run(engine, case, max_tokens) -> dict:
    engine._steps._max_tokens = max_tokens
    engine._steps._max_delay = case["delay"]
    assert engine._engine.reset_prefix_cache()
    passes = iter(range(1, 10**6))

    def is_interrupted() -> bool:
        return case["interrupt"] > 0 and next(passes) % case["interrupt"] == 0

    num = len(case["prompts"])
    seeds = list(range(num))
    engine.submit(case["prompts"], [case["num_samples"]] * num, seeds, case["max_tokens"], case["sampling"], [[]] * num)
    finished, num_steps = [], 0
    while engine.num_pending:
        finished += engine.step(is_interrupted)
        num_steps += 1
    finished.sort(key=lambda sample: (sample.request_id, sample.sample_index))
    logprobs, experts = hashlib.sha256(), hashlib.sha256()
    for sample in finished:
        logprobs.update(sample.logprobs.tobytes())
        experts.update(b"" if sample.experts is None else sample.experts.tobytes())
    return {
        "steps": num_steps,
        "tokens": [sample.token_ids.tolist() for sample in finished],
        "reasons": [sample.finish_reason for sample in finished],
        "logprobs": logprobs.hexdigest(),
        "experts": experts.hexdigest(),
        "has experts": finished[0].experts is not None,
    }


def run_shared(engine, case, least_saved: int) -> dict:
    shared_prefill.LEAST_SAVED = least_saved
    prefill, num_read, logprobs = engine._steps._prefill, [], {}
    spread, finish = prefill.spread, engine._finish

    def count(hidden, *arguments):
        num_read.append(len(hidden))
        spread(hidden, *arguments)

    def keep(name, *arguments):
        sample = finish(name, *arguments)
        logprobs[sample.request_id, sample.sample_index] = sample.logprobs.tolist()
        return sample

    prefill.spread, engine._finish = count, keep
    found = run(engine, case, engine._steps._max_tokens)
    prefill.spread, engine._finish = spread, finish
    return found | {"read": num_read, "logprobs": [logprobs[key] for key in sorted(logprobs)]}


def probe_shared(config, cases) -> dict:
    engine = build_engine(config)
    give_weights(engine._model_runner().get_model())
    return {name: {"apart": run_shared(engine, case, 1 << 62), "shared": run_shared(engine, case, 0)}
            for name, case in cases.items()}


def probe(config, cases) -> dict:
    if config.pop("shares_prompts", False):
        return probe_shared(config, cases)
    breaks_decoder = config.pop("break_decoder", False)
    engine = build_engine(config)
    has_decoder = engine._steps._decoder is not None
    if breaks_decoder:
        engine._steps._decoder._epsilon *= 10
    model = engine._model_runner().get_model()
    if engine._weights_load_in_place:  # otherwise vLLM has packed them, and its random ones stay
        give_weights(model)
    several = engine._steps._max_tokens
    results = {
        name: {word: run(engine, case, size) for word, size in (("one", 1), ("several", several))}
        for name, case in cases.items()
    }
    # Forgotten samples leave nothing behind, in the middle of a step or between two.
    case = next(iter(cases.values()))
    engine._steps._max_tokens = several
    num = len(case["prompts"])
    engine.submit(case["prompts"], [2] * num, [9] * num, case["max_tokens"], case["sampling"], [[]] * num)
    engine.step()
    engine.step()
    engine.abort()
    results["after an abort"] = {"one": results[next(iter(cases))]["one"], "several": run(engine, case, several)}
    is_used = engine._steps._decoder is not None and engine._steps._decoder_is_checked
    decoder = ("used" if is_used else "given up") if has_decoder else "none"
    return {"several": several > 1, "decoder": decoder, "cases": results}


if __name__ == "__main__":
    print("probe", json.dumps(probe(*json.load(sys.stdin))), flush=True)
    os._exit(0)
