"""`mindrlhf plan --async`: schedules against hand calculations and a token-by-token decoder."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mindrlhf.cli import main
from mindrlhf.dryrun.plan.schedule import simulate
from mindrlhf.dryrun.plan.schedule.lengths import ResponseLengths, read_lengths
from mindrlhf.dryrun.plan.schedule.rates import Rates
from mindrlhf.dryrun.plan.schedule.report import choose
from mindrlhf.errors import UserError
from mindrlhf.layout.layout import Layout

REPOSITORY = Path(__file__).parents[3]
SAME = ResponseLengths(median=100.0, sigma=0.0, limit=1000, source="")
LONG_TAIL = ResponseLengths(median=200.0, sigma=1.0, limit=1600, source="")


def rates(**changes) -> Rates:
    values = {
        "layout": Layout(data_parallel=8, model_parallel=1, pipeline_stage=1),
        "tensor_parallel": 1,
        "slots": 16,
        "decode_s": 1.0,
        "sequence_s": 0.0625,
        "prefill_s": 0.0,
        "train_s": 1000.0,
        "num_prompts": 32,
        "num_generations": 8,
    }
    return Rates(**{**values, **changes})


def decoded_token_by_token(lengths: list[int], slots: int, decode_s: float, sequence_s: float) -> float:
    waiting, running, seconds = list(lengths), [], 0.0
    while waiting or running:
        while waiting and len(running) < slots:
            running.append(waiting.pop(0))
        seconds += decode_s + sequence_s * len(running)
        running = [left - 1 for left in running if left > 1]
    return seconds


@given(st.lists(st.integers(1, 30), min_size=1, max_size=40), st.integers(1, 8))
def test_a_server_takes_as_long_as_one_that_decodes_token_by_token(lengths, slots):
    seconds = simulate._server_s(rates(slots=slots), [float(length) for length in lengths])
    assert seconds == pytest.approx(decoded_token_by_token(lengths, slots, 1.0, 0.0625))


def test_steps_of_equal_responses_are_the_sum_of_their_parts():
    """256 responses on 8 servers are 32 each, 2 rounds of 16 slots: 200 decoding steps of 1 + 16 / 16 s."""
    in_step, *_ = simulate.simulate(rates(), SAME)
    switch_s = 0.02 * 400
    assert in_step.seconds == pytest.approx(400 + 1000 + 2 * switch_s)
    assert in_step.idle == pytest.approx(1 - 1400 / (1400 + 2 * switch_s))


def test_ahead_takes_what_the_slower_side_takes():
    """With 2 of 8 replicas generating, 1600 s of rollout stand against 1333 s of training: 3 of 8 are balanced best."""
    outcomes = {one.name: one for one in simulate.simulate(rates(), SAME)}
    # 6 servers: a server has 6 groups of 8, 48 responses, 3 rounds of 100 steps; 5: 7 groups, 56, 4 rounds, the last
    # of 8 at 1.5 s a step; training on 3 replicas takes 8/3 of 1000 s, on 5 of them 1600, on 6 1333.
    two = 100 * 2 * 8  # 16 groups each: 128 responses, 8 rounds
    three = 100 * (2 * 5 + 1.5)  # 11 groups, 88 responses
    best = min(max(two, 1000 * 8 / 6 + 8), max(three, 1000 * 8 / 5 + 8))
    found = outcomes["off-policy by 1"]
    assert found.seconds == pytest.approx(best, rel=0.02)
    assert found.keys["parallel_config.data_parallel"] + found.num_rollout_devices == 8


@pytest.mark.parametrize("ahead, pair_s", [(1, 50.0), (2, 40.0)])
def test_weights_of_the_stated_age_are_waited_for(ahead, pair_s):
    """Samples that take 30 s and 10 s in turns, training 20 s.

    One ahead, the samples of step i begin when update i - 2 has ended: slow ones at 50 and 100 s, quick ones after
    them at 80 and 130, updates end at 50, 70, 100, 120, 150, 170 s: two steps take 50. Two ahead the server never
    waits, and two steps take 40.
    """
    assert 2 * simulate._ahead([30.0, 10.0] * 4, 20.0, 0.0, ahead) == pytest.approx(pair_s)


def test_a_long_tail_leaves_devices_idle_and_partial_rollout_fills_them():
    outcomes = {one.name: one for one in simulate.simulate(rates(train_s=100.0), LONG_TAIL)}
    in_step, partial = outcomes["in step"], outcomes["partial rollout, 2 in flight"]
    assert in_step.idle > 0.3
    assert partial.seconds < 0.8 * in_step.seconds
    # Prefixes that are computed again cost what they are said to.
    again = {one.name: one for one in simulate.simulate(rates(train_s=100.0, prefill_s=1.0), LONG_TAIL)}
    assert again["in step"].seconds == in_step.seconds
    assert again["partial rollout, 2 in flight"].seconds > partial.seconds


def test_a_schedule_must_gain_to_be_recommended():
    def outcome(seconds):
        return simulate.Outcome(str(seconds), {}, 0, seconds, 0.0)

    assert choose([outcome(100.0), outcome(96.0), outcome(80.0), outcome(77.0)]).name == "80.0"
    assert choose([outcome(100.0), outcome(96.0)]).name == "100.0"


@pytest.mark.parametrize("sigma, limit", [(0.5, 100_000), (1.0, 100_000), (1.2, 800)])
def test_lengths_of_a_run_are_found_again(tmp_path, sigma, limit):
    """40 steps of 64 responses, log-normal of median 200; with a limit of 800 an eighth of them is cut."""
    random = np.random.default_rng(0)
    config = (REPOSITORY / "examples/quickstart/config.yaml").read_text()
    (tmp_path / "config.yaml").write_text(config.replace("chunk_size: 16", "chunk_size: 8"))
    with (tmp_path / "metrics.jsonl").open("w") as file:
        for step in range(1, 41):
            lengths = np.minimum(random.lognormal(math.log(200), sigma, 64), limit)
            values = {"mean": lengths.mean(), "max": lengths.max(), "cut_fraction": (lengths == limit).mean()}
            metrics = {f"response_length/{name}": value for name, value in values.items()}
            file.write(json.dumps({"step": step, **metrics}) + "\n")
        file.write('{"step": 41, "response_le')  # what a run that is killed leaves
    found = read_lengths(str(tmp_path), limit)
    assert found.sigma == pytest.approx(sigma, rel=0.15)
    assert found.median == pytest.approx(200, rel=0.15)


def test_no_lengths_are_a_long_tail_below_the_limit():
    lengths = read_lengths(None, 2048)
    assert (lengths.median, lengths.sigma) == (256.0, 1.0)
    # The mean of min(X, limit) for a log-normal X, in closed form.
    cut = math.log(8)
    expected = 256 * math.exp(0.5) * _normal(cut - 1) + 2048 * (1 - _normal(cut))
    assert lengths.mean == pytest.approx(expected, rel=1e-3)


def _normal(value: float) -> float:
    return 0.5 * (1 + math.erf(value / math.sqrt(2)))


@pytest.mark.parametrize("text", ["lognormal:", "lognormal:500", "lognormal:0,1", "lognormal:5000,1", "lognormal:9,7"])
def test_other_lengths_are_refused(text):
    with pytest.raises(UserError, match="--lengths is .*give lognormal:MEDIAN,SIGMA with a median of 1 to "):
        read_lengths(text, 2048)


def test_a_directory_without_metrics_is_refused(tmp_path):
    with pytest.raises(UserError, match="there is no metrics.jsonl with response lengths"):
        read_lengths(str(tmp_path), 2048)


def test_the_command_prints_and_writes_the_schedules(capsys):
    config = str(REPOSITORY / "examples/grpo/qwen2_5_7b_8npu.yaml")
    cluster = ["--workers", "16", "--async", "--lengths", "lognormal:400,1", "rollout.num_replicas=16"]
    overrides = ["rollout.tensor_parallel=1", "training.chunk_size=128", "parallel_config.data_parallel=0"]
    assert main(["plan", config, *cluster, *overrides]) == 0
    text = capsys.readouterr().out
    assert "Recommended: rollout.segment_tokens=400 rollout.in_flight=" in text
    assert main(["plan", config, *cluster, *overrides, "--json"]) == 0
    values = json.loads(capsys.readouterr().out)["schedules"]
    names = [one["name"] for one in values["schedules"]]
    assert names[0] == "in step" and values["recommended"] in names
    assert all(0 <= one["idle"] < 1 for one in values["schedules"])
    assert main(["plan", config, "--workers", "8", "--lengths", "lognormal:400,0"]) == 0
    assert "responses of 400 tokens on average (given)" in " ".join(capsys.readouterr().out.split())
