"""The tutorial's program under plain msrun, on two CPU ranks with a real vLLM server."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from slow_tests import SLOW

from mindrlhf.data.build import build_prompts
from mindrlhf.system import processes
from mindrlhf.system.ports import find_free_port

pytestmark = SLOW

ROOT = Path(__file__).parents[2]
TUTORIAL = ROOT / "examples" / "grpo" / "qwen_grpo_tutorial"
CPU_OVERRIDES = """
run.device=cpu run.max_steps=2 model.random_init=true model.compute_dtype=float32 model.recompute=false
rollout.dtype=float32 rollout.num_replicas=1 rollout.tensor_parallel=1 rollout.max_num_seqs=16
rollout.max_response_length=16 algorithm.num_generations=4 algorithm.beta=0.01
training.chunk_size=4 training.num_rollouts=1 training.micro_batch_size=4 training.sequence_lengths=64
parallel_config.data_parallel=0 parallel_config.model_parallel=1 parallel_config.use_seq_parallel=false
parallel_config.vocab_emb_dp=true parallel_config.enable_parallel_optimizer=false
"""


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    """The sanity recipe's tokenizer, model config and prompts."""
    out = tmp_path_factory.mktemp("inputs")
    subprocess.run(
        [sys.executable, str(ROOT / "examples/sanity/prepare.py"), "--out", str(out)], check=True, timeout=60
    )
    build_prompts(
        [out / "prompts.jsonl"],
        out / "prompts.mindrecord",
        out / "model",
        handler="map_keys",
        key_map={"question": "prompt", "answer": "answer"},
        template="plain",
        max_prompt_length=32,
        num_workers=1,
    )
    return out


@pytest.mark.timeout(400)
def test_the_command_works_as_typed(inputs, tmp_path, rollout_python):
    bin_dir = Path(sys.executable).parent
    model, output_dir = str(inputs / "model"), tmp_path / "run"
    command = [str(bin_dir / "msrun"), "--worker_num=2", "--local_worker_num=2", "--master_addr=127.0.0.1"]
    command += [f"--master_port={find_free_port()}", "--join=True", f"--log_dir={tmp_path / 'logs'}"]
    command += [str(TUTORIAL / "main.py"), "--config", str(TUTORIAL / "grpo_config.yaml")]
    command += ["--dataset_file", str(inputs / "prompts.mindrecord"), "--tokenizer_dir", model]
    command += ["--actor_checkpoint_path", model, "--ref_checkpoint_path", model, "--generate_checkpoint_path", model]
    command += ["--verifier_function", f"{ROOT / 'examples/sanity/lowercase.py'}:lowercase_share,format_reward"]
    command += ["--verifier_weight", "1.0,0.5", "--save_checkpoint_dir", str(tmp_path / "checkpoints")]
    command += [*CPU_OVERRIDES.split(), f"run.output_dir={output_dir}", f"rollout.python={rollout_python}"]
    environment = os.environ | {"PATH": f"{bin_dir}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}
    environment["OMP_WAIT_POLICY"] = "PASSIVE"
    with open(tmp_path / "msrun.out", "wb") as out:
        msrun = subprocess.Popen(command, env=environment, stdout=out, stderr=subprocess.STDOUT, cwd=tmp_path)
    try:
        returncode = msrun.wait(timeout=360)
    finally:
        # msrun gives each worker a session of its own.
        processes.signal_all([status.pid for status in processes.descendants(msrun.pid)], signal.SIGKILL)
        msrun.kill()
        msrun.wait()
    rank_0_log = (tmp_path / "logs" / "worker_0.log").read_text(errors="replace")
    assert returncode == 0, rank_0_log[-3000:]
    steps = [json.loads(line) for line in (output_dir / "metrics.jsonl").read_text().splitlines()]
    assert [step["step"] for step in steps] == [1, 2]
    for step in steps:
        assert step["rollout_diff/max_abs"] < 1e-3
        total = step["reward/lowercase_share/mean"] + 0.5 * step["reward/format_reward/mean"]
        assert step["reward/mean"] == pytest.approx(total, abs=1e-6)
    # The reference is the actor as it was: no divergence before the first update, some after it.
    assert steps[0]["kl"] == pytest.approx(0.0, abs=1e-6)
    assert steps[1]["kl"] > steps[0]["kl"]
