"""Samples of an engine that plans several tokens at a time, and one; to be run by the rollout interpreter.

usage: python tests/helpers/multi_step_probe.py < JSON of (config of an engine, cases by name)

A case: "prompts", "num_samples", "max_tokens" of each, "sampling", and "interrupt", after how many passes of a step
somebody interrupts it (0: nobody). Prints "probe" and JSON: whether tokens were planned "several" at a time at all, and
computed as of a "dense" model; the first case once more with prompts that are "shared" by their samples and not, with
the tokens that each pass "read"; by case and by "one" or "several" the steps that vLLM planned and the samples, with
digests of what must be equal bit for bit.
"""

import hashlib
import json
import os
import sys

from mindrlhf.cpu.imports import quick_imports

with quick_imports():
    import torch
    from vllm.model_executor.model_loader.dummy_loader import DummyModelLoader

    from mindrlhf.cpu.rollout import shared_prefill
    from mindrlhf.rollout.server.cpu_engine import build_engine


def engine_with_weights(config, build=build_engine):
    """An engine under whose weights samples end early and late, and digests hardly agree by chance."""
    DummyModelLoader.load_weights = _give_weights  # before vLLM packs them for its kernels
    return build(config)


def _give_weights(loader: DummyModelLoader, model: torch.nn.Module, *_) -> None:
    generator = torch.Generator().manual_seed(3)
    for name, parameter in sorted(model.named_parameters()):
        if parameter.ndim > 1:
            parameter.data.copy_(0.15 * torch.randn(parameter.shape, generator=generator))
        else:
            parameter.data.fill_(float("norm" in name))


def run(engine, case, max_tokens) -> dict:
    engine._steps._max_tokens = max_tokens
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
        "sums": [float(sample.logprobs.sum()) for sample in finished],
        "experts": experts.hexdigest(),
        "has experts": finished[0].experts is not None,
    }


def probe(config, cases) -> dict:
    engine = engine_with_weights(config)
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
    shared = {}
    if engine._steps._is_dense:
        shared = {least: read(engine, case, several, least) for least in (0, shared_prefill.LEAST_SAVED)}
    return {"several": several > 1, "dense": engine._steps._is_dense, "cases": results, "shared": list(shared.values())}


def read(engine, case, max_tokens, least_saved) -> dict:
    """Run a case where samples share the reading of prompts if that saves so much; note how many tokens were read."""
    shared_prefill.LEAST_SAVED, lengths, forward = least_saved, [], engine._steps._forward
    engine._steps._forward = lambda **inputs: lengths.append(len(inputs["input_ids"])) or forward(**inputs)
    found = run(engine, case, max_tokens)
    engine._steps._forward = forward
    return {**found, "read": lengths}


if __name__ == "__main__":
    print("probe", json.dumps(probe(*json.load(sys.stdin))), flush=True)
    os._exit(0)
