"""Whole runs of `mindrlhf train`: one fingerprint on any ranks, a model that transformers loads."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import sanity_inputs
from machine_jobs import PROFILER, RECIPE, SHARED
from slow_tests import SLOW
from trace_events import read_trace, spans

pytestmark = pytest.mark.timeout(1000)

NUM_STEPS = RECIPE["run__max_steps"]
PROFILED = 2
# By night one row has all samples of a step, so that all ranks but one have none.
ONE_ROW = {
    "training__packing": "shared_prompts",
    "training__sequence_lengths": "[416]",
    "training__micro_batch_size": 1,
}


@pytest.fixture(scope="module")
def runs(one_machine) -> Callable[[int], Path]:
    """Return the output directory of the same run on a number of ranks."""
    # That on one rank has a graph that no other run has left to it.
    changes = {1: {"training__micro_batch_size": 1}, PROFILED: SHARED | PROFILER, 4: ONE_ROW}
    return lambda world_size: one_machine(world_size, **changes.get(world_size, {}))


def trained_lines(output_dir: Path) -> list[dict]:
    """Return the metrics of the steps, without the evaluation before the first."""
    return sanity_inputs.read_lines(output_dir / "metrics.jsonl")[1:]


@pytest.mark.parametrize("world_size", [2, pytest.param(4, marks=SLOW)])
def test_the_fingerprint_does_not_depend_on_the_number_of_ranks(runs, world_size):
    samples = {size: (runs(size) / "samples.jsonl").read_text() for size in (1, world_size)}
    assert samples[1] == samples[world_size], "the runs did not train on the same samples"
    alone, together = (trained_lines(runs(size)) for size in (1, world_size))
    assert [line["step"] for line in alone] == [line["step"] for line in together] == list(range(1, NUM_STEPS + 1))
    for first, second in zip(alone, together):
        assert second["loss"] == pytest.approx(first["loss"], abs=1e-5)
        assert second["entropy"] == pytest.approx(first["entropy"], rel=1e-5)
        assert second["grad_norm"] == pytest.approx(first["grad_norm"], rel=1e-4)
        for name in ("reward/mean", "reward/std", "response_length/mean", "lr"):
            assert second[name] == first[name]


def test_a_run_says_what_it_does_from_the_first_line_to_the_last(runs):
    printed = (runs(1).parent / "stdout").read_text().splitlines()
    lines = [line for line in printed if not line.startswith("warning: ")]  # that its accuracy has fallen
    # Of the stages only one that takes seconds: the launcher may not see shorter ones.
    said = ("checking examples/sanity/config.yaml", "starting 1 rank", "compiling the update for sequences of")
    said += ("  step ", f"  1/{NUM_STEPS}", f"  {NUM_STEPS}/{NUM_STEPS}", "report: ")
    places = [next(place for place, line in enumerate(lines) if words in line) for words in said]
    assert places == sorted(places) and places[0] == 0
    # Rank 0 says it by itself, in the same moment as the launcher says what it is at.
    assert any("starting vLLM" in line for line in lines)
    assert "report: " in lines[-1] or "stopping the servers and the ranks (for " in lines[-1]


def test_the_timeline_shows_where_the_time_of_chosen_steps_goes(runs):
    trace = read_trace(runs(PROFILED) / "timeline.json")
    found = {(process, name) for process, _, name, *_ in spans(trace)}
    stages = {"rollout", "pack", "update", "reshard_to_infer", "step 2", "waiting for the other ranks"}
    expected = {("rank 0", name) for name in stages} | {("rank 1", name) for name in ("update", "waiting for rank 0")}
    expected |= {("vLLM rollout_0", name) for name in ("generate", "update_weights")} | {("verifiers", "score")}
    assert expected <= found and ("rank 0", "step 1") not in found
    times = {name: (start, end) for process, _, name, start, end in spans(trace) if process == "rank 0"}
    for line in trained_lines(runs(PROFILED))[1:]:
        start_us, end_us = times[f"step {line['step']}"]
        # Not "timing/all", which has what the profilers wrote after the step before.
        stages_s = line["timing/rollout"] + line["timing/update"] + line["timing/reshard_to_infer"]
        assert stages_s <= (end_us - start_us) / 1e6
        rollouts = [end - start for _, _, name, start, end in spans(trace) if name == "rollout"]
        assert any(rollout / 1e6 == pytest.approx(line["timing/rollout"], abs=0.01) for rollout in rollouts)
    assert not (runs(1) / "timeline.json").exists() and not (runs(1) / "profile").exists()


def test_the_profilers_of_mindspore_and_vllm_leave_traces_of_chosen_steps(runs):
    directory = runs(PROFILED) / "profile"
    for rank in range(PROFILED):
        (trace,) = directory.glob(f"step_2/mindspore/rank_{rank}/*/ASCEND_PROFILER_OUTPUT/trace_view.json")
        assert json.loads(trace.read_text())
    assert list(directory.glob("vllm/rollout_0/step_2_*.pt.trace.json.gz"))


def test_the_run_learns_from_its_own_samples(runs):
    metrics = trained_lines(runs(1))
    for line in metrics:
        assert line["rollout_diff/max_abs"] < 1e-4
        assert line["grad_norm"] > 0
        assert line["clip_fraction/low"] == line["clip_fraction/high"] == 0
        assert "kl" not in line  # no reference model: nothing was measured
    # Advantages of a group add up to 0, and so does a step's loss where all its responses are of one length.
    assert any(line["loss"] != 0 for line in metrics)
    samples = sanity_inputs.read_lines(runs(1) / "samples.jsonl")
    for step in range(1, NUM_STEPS + 1):
        rewards = [sample["reward"] for sample in samples if sample["step"] == step]
        assert len(rewards) == 16
        assert metrics[step - 1]["reward/mean"] == pytest.approx(np.mean(rewards))
    for sample in samples:
        text = sample["completion"]
        letters = sum("a" <= character <= "z" for character in text)
        assert sample["reward"] == pytest.approx(letters / len(text) if text else 0.0)


LOAD = """
import sys, json, torch, transformers
transformers.logging.set_verbosity_error()
model, report = transformers.AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype="auto", output_loading_info=True)
assert not any(report.values()), report
tokenizer = transformers.AutoTokenizer.from_pretrained(sys.argv[1])
ids = torch.arange(40).reshape(2, 20)
with torch.no_grad():
    logits = model(ids).logits
sums = {name: value.double().sum().item() for name, value in model.named_parameters()}
print(json.dumps({"sums": sums, "logits": logits[:, -1, :8].double().tolist(), "text": tokenizer.decode([64, 65, 66])}))
"""


def test_the_final_model_loads_in_transformers_with_the_trained_weights(runs, sanity_dir, run_in_rollout, tmp_path):
    import mindspore as ms
    from causal_logits import CausalLMLogits
    from networks import load_hf_weights

    from mindrlhf.models.causal_lm import build_model
    from mindrlhf.models.context import prepare_mindformers
    from mindrlhf.weights.hf import SafetensorsDirectory, read_hf_config

    final = runs(PROFILED) / "final"
    loaded = json.loads(run_in_rollout("-c", LOAD, final))
    trained, start = SafetensorsDirectory(final), SafetensorsDirectory(sanity_dir / "model")
    assert set(loaded["sums"]) == set(trained.names()) == set(start.names())
    for name, total in loaded["sums"].items():
        assert total == pytest.approx(trained.read(name).astype(np.float64).sum(), rel=1e-9, abs=1e-9), name
        # AdamW at 1e-3 moves nearly every weight by about 1e-3 in each step.
        difference = np.abs(trained.read(name) - start.read(name))
        assert 1e-4 < difference.max() < 4e-3, name
    prepare_mindformers("cpu", tmp_path)
    network = build_model(read_hf_config(final), seq_length=20)
    load_hf_weights(network, final)
    ids = np.arange(40, dtype=np.int32).reshape(2, 20)
    logits = CausalLMLogits(network)(ms.Tensor(ids), ms.Tensor(np.ones_like(ids))).asnumpy()
    np.testing.assert_allclose(logits[:, -1, :8], loaded["logits"], atol=1e-4)


def check_minibatches(off_policy: Path) -> None:
    lines = sanity_inputs.read_lines(off_policy / "metrics.jsonl")
    before, first, second = lines[:3]
    assert before["step"] == 0 and "loss" not in before
    for line in (first, second):
        # The first pass starts at ratio 1; the updates after it move away.
        assert line["rollout_diff/max_abs"] < 1e-4
        assert 0 <= line["clip_fraction/low"] + line["clip_fraction/high"] < 1
        assert line["timing/old_log_p"] > 0 and line["timing/reference_model"] > 0
        # Policy and reference start as one model and part with the first update.
        assert 0 < line["kl"] < 1
    assert second["eval/accuracy_low"] <= second["eval/accuracy"] <= second["eval/accuracy_high"]
    summary = json.loads((off_policy / "summary.json").read_text())
    assert summary["num_prompts"] == 8
    assert summary["after"]["accuracy"] == lines[-1]["eval/accuracy"]
    assert summary["before"]["accuracy"] == before["eval/accuracy"]


def test_a_run_with_reference_and_minibatches(undisturbed_run):
    check_minibatches(undisturbed_run(1))
