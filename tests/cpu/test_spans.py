"""Responses that go on from their prefixes are the same bit for bit, whatever disturbs the engine, and in a new one."""

import json
from pathlib import Path

import numpy as np
import pytest
from rollout_probes import ask_probe
from slow_tests import RUNS_SLOW_TESTS, SLOW
from test_multi_step import QWEN, VOCABULARY

NUM_DISTURBANCES = 6 if RUNS_SLOW_TESTS else 1  # at a time
NUM_ROUNDS, BLOCK = 4 if RUNS_SLOW_TESTS else 3, 32


def prompts(count: int, lengths: tuple[int, ...], seed: int) -> list[list[int]]:
    """The last two are one prompt, as of a group."""
    source = np.random.default_rng(seed)
    found = [source.integers(10, VOCABULARY, lengths[i % len(lengths)]).tolist() for i in range(count - 1)]
    return [*found, found[-1]]


def case(count: int, lengths: tuple[int, ...], segment: int, num_stops: int = 3, **sampling) -> dict:
    sampling = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "stop_token_ids": list(range(num_stops)), **sampling}
    first = {"prefixes": prompts(count, lengths, segment), "round": 0, "num_rounds": NUM_ROUNDS}
    return {**first, "segment": segment, "sampling": sampling}


# Blocks of the cache that fill within a segment, on its edge, and never; more responses than places.
CASES = {
    "within blocks": case(8, (5, 20, 31), 13),
    "over blocks": case(10, (30, 32, 33), 40, num_stops=1),
    "few tokens": case(6, (3, 28), 4, temperature=0.7, top_p=0.9),
    "more than places": case(20, (5, 32, 40), 24),
}
if not RUNS_SLOW_TESTS:
    CASES = {"more than places": CASES["more than places"]}


def ask(python: str, directory: Path, cases: dict, **config) -> dict:
    (directory / "model").mkdir()
    (directory / "model" / "config.json").write_text(json.dumps(QWEN))
    return ask_probe("spans_probe.py", python, directory, cases, **{"max_model_len": 224, "max_num_seqs": 12, **config})


def short_cache(num_blocks: int) -> dict:
    return {"kv_cache_gib": num_blocks * 2 * 2 * BLOCK * 2 * 32 * 4 / 2**30}


@pytest.mark.parametrize("first", [1, *(pytest.param(7 + NUM_DISTURBANCES * i, marks=SLOW) for i in range(3))])
@pytest.mark.parametrize("config", [pytest.param({}, marks=SLOW), short_cache(22)], ids=["plain", "short cache"])
def test_nothing_that_disturbs_an_engine_changes_a_bit(rollout_python, tmp_path, config, first):
    seeds = [0, *range(first, first + NUM_DISTURBANCES)]
    cases = {name: {**one, "disturbances": seeds} for name, one in CASES.items()}
    for name, found in ask(rollout_python, tmp_path, cases, **config).items():
        runs, rounds = found["runs"], found["runs"]["0"]
        assert len({one["digest"] for one in rounds}) == NUM_ROUNDS and len(rounds[-1]["prefixes"]) > 1, name
        different = [seed for seed, others in runs.items() if others != rounds]
        assert not different, f"{name}: {len(different)} of {len(runs)} differ"
        # A server that was started anew before a round.
        assert found["restarted"] == {str(number): rounds[number:] for number in range(1, NUM_ROUNDS)}, name
