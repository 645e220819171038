"""Responses that are given so many tokens at a time, by an engine that is disturbed; to be run by the rollout
interpreter.

usage: python tests/helpers/spans_probe.py < JSON of (config of an engine, cases by name)

A case: "prefixes" that go on, "round", the first, and "num_rounds", "segment", tokens that each gets in a round,
"sampling", and "disturbances", seeds. With each of these all rounds are made once more: `step` is interrupted at random
passes, and a batch that nobody reads is begun before and broken off at a random step. Seed 0 disturbs nothing.
Products are rounded by their number of rows (``row_rounding.py``), and prompts are read once for their samples, however
small the model. Prints "probe" and JSON, for each case: by
disturbance and round a digest of tokens and log-probabilities, and the prefixes that it began with; and the rounds once
more from each but the first, in an engine of another process, as after a restart.
"""

import hashlib
import json
import os
import random
import sys
import tempfile
import traceback

from multi_step_probe import engine_with_weights


def generate(engine, prefixes, number, case, disturber) -> list:
    """The completions of a round, in the order of their requests."""
    seeds = [1000 * number + index for index in range(len(prefixes))]
    lengths = [case["segment"]] * len(prefixes)
    engine.submit(prefixes, [1] * len(prefixes), seeds, lengths, case["sampling"], [[]] * len(prefixes))
    found = []
    while engine.num_pending:
        found += engine.step(disturber or (lambda: False))
    return sorted(found, key=lambda sample: sample.request_id)


def break_off(engine, prefixes, case, source) -> None:
    """Begin a batch like the one to come, and forget it after some steps."""
    begun = source.sample(prefixes, source.randint(1, len(prefixes)))
    count = len(begun)
    engine.submit(begun, [1] * count, [7] * count, [case["segment"]] * count, case["sampling"], [[]] * count)
    for _ in range(source.randint(1, 3)):
        if engine.num_pending:
            engine.step()
    engine.abort()


def run(engine, case, seed) -> list[dict]:
    source = random.Random(seed)
    share = source.choice((0.02, 0.2, 0.7))
    prefixes, rounds = [list(prefix) for prefix in case["prefixes"]], []
    for number in range(case["round"], case["round"] + case["num_rounds"]):
        if seed and source.random() < 0.3:
            break_off(engine, prefixes, case, source)
        disturber = (lambda: source.random() < share) if seed else None
        completions = generate(engine, prefixes, number, case, disturber)
        digest = hashlib.sha256()
        for one in completions:
            digest.update(one.token_ids.tobytes() + one.logprobs.tobytes() + one.finish_reason.encode())
        rounds.append({"digest": digest.hexdigest(), "prefixes": prefixes})
        prefixes = [
            [*prefix, *one.token_ids.tolist()]
            for prefix, one in zip(prefixes, completions, strict=True)
            if one.finish_reason == "length"
        ]
    return rounds


def in_new_engine(config, work):
    """Return ``work(engine)`` of a process that was forked for it: vLLM is imported once."""
    with tempfile.TemporaryFile("w+", encoding="utf-8") as file:
        if not (pid := os.fork()):
            try:
                json.dump(work(engine_with_weights(config)), file)
                file.flush()
                os._exit(0)
            except BaseException:
                traceback.print_exc()
                os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0, "the forked process failed"
        file.seek(0)
        return json.load(file)


def probe(config, cases) -> dict:
    import row_rounding
    from vllm.model_executor.layers import utils

    from mindrlhf.cpu.rollout import shared_prefill

    row_rounding.round_by_rows(utils)
    shared_prefill.LEAST_SAVED = 0

    def all_runs(engine):
        return {name: {seed: run(engine, case, seed) for seed in case["disturbances"]} for name, case in cases.items()}

    runs = in_new_engine(config, all_runs)

    def later_runs(engine):
        again = {name: {} for name in cases}
        for name, case in reversed(cases.items()):
            for number in reversed(range(1, case["num_rounds"])):
                begun = {"prefixes": runs[name]["0"][number]["prefixes"], "round": number}
                left = {**case, **begun, "num_rounds": case["num_rounds"] - number}
                again[name][number] = run(engine, left, 0)
        return again

    again = in_new_engine(config, later_runs)
    return {name: {"runs": runs[name], "restarted": again[name]} for name in cases}


if __name__ == "__main__":
    print("probe", json.dumps(probe(*json.load(sys.stdin))), flush=True)
    os._exit(0)
