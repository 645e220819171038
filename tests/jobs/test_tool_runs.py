"""GRPO with tools: a random model whose vocabulary has whole calls in it, so that it makes some by chance."""

import json
import math
import re
import shlex
import sys
from pathlib import Path

import pytest
import sanity_inputs
from example_tools import CALCULATOR
from slow_tests import SLOW
from tiny_models import WIDE, tiny_model
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

pytestmark = pytest.mark.timeout(500)

# Right, a division by zero, and one that is not JSON.
CALLS = [
    '<tool_call>{"name":"calculator","arguments":{"expression":"6*7"}}</tool_call>',
    '<tool_call>{"name":"calculator","arguments":{"expression":"1/0"}}</tool_call>',
    "<tool_call>{</tool_call>",
]
MAX_LENGTH = 256


def make(directory):
    """Write model and prompts: a token for each character of an answer, three calls, and an end token."""
    model_dir = directory / "bare"
    model_dir.mkdir(parents=True)
    symbols = sorted({*"Ċ<tool_response>/Errdivsnbyza:Ġ0123456789", *CALLS})
    tokenizer = Tokenizer(models.BPE(vocab={symbol: index for index, symbol in enumerate(symbols)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|endoftext|>"])
    tokenizer.save(str(model_dir / "tokenizer.json"))
    (model_dir / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|endoftext|>"}))
    base = WIDE | sanity_inputs.SMALLER
    config = tiny_model(base=base, vocab_size=48, max_position_embeddings=512)
    (model_dir / "config.json").write_text(json.dumps(config))
    (directory / "prompts.jsonl").write_text(
        "".join(json.dumps({"prompt": f"{number:03d}", "answer": "42"}) + "\n" for number in range(16))
    )
    weights = ("--config", model_dir / "config.json", "--tokenizer", model_dir, "--output", directory / "model")
    build = ("--input", directory / "prompts.jsonl", "--output", directory / "prompts.mindrecord")
    names = ("--tokenizer", model_dir, "--handler", "map_keys", "--map", "question=prompt,answer=answer")
    for arguments in (
        ("weights", "random", *weights),
        ("data", "build", *build, *names, "--template", "plain", "--max-prompt-length", 8, "--processes", 1),
    ):
        sanity_inputs.run(*arguments, timeout_s=120)


SERVER = shlex.join([sys.executable, str(Path(__file__).parents[2] / "examples" / "tools" / "mcp_server.py")])
TOOLS = [CALCULATOR, pytest.param(f"mcp:{SERVER}", marks=SLOW)]


@pytest.mark.parametrize("tools", TOOLS, ids=["ours", "of an MCP server"])
def test_training_reads_what_tools_wrote_and_learns_from_what_the_model_wrote(tools, tmp_path, rollout_python):
    make(tmp_path)
    sanity_inputs.train(
        tmp_path,
        tmp_path / "run",
        timeout_s=400,
        run__max_steps=2,
        tools__names=tools,
        tools__max_response_tokens=64,
        rollout__max_response_length=MAX_LENGTH,
        observe__groups_per_step=16,
    )
    metrics = sanity_inputs.read_lines(tmp_path / "run" / "metrics.jsonl")
    assert [line["step"] for line in metrics] == [1, 2]
    for line in metrics:
        assert line["tools/calls"] > line["tools/failures"] > 0
        assert line["tools/tokens"] > 0 and line["turns/mean"] > 1
        assert line["response_length/max"] <= MAX_LENGTH
        # The generator went on after the very tokens that the trainer read.
        assert line["rollout_diff/max_abs"] < 1e-4
        assert line["rollout_ratio/effective"] == pytest.approx(1.0, abs=1e-6)
        assert math.isfinite(line["loss"]) and line["grad_norm"] > 0
    samples = sanity_inputs.read_lines(tmp_path / "run" / "samples.jsonl")
    texts = [sample["completion"] for sample in samples]
    assert any("<tool_response>\n42\n</tool_response>\n" in text for text in texts)
    assert any("<tool_response>\nError: division by zero\n</tool_response>\n" in text for text in texts)


# Earns the share of digits in what the model wrote, and is over once that holds a 7.
ENVIRONMENT = """
class Digits:
    def reset(self, answer):
        self.count = int(answer) * 0

    def step(self, action):
        self.count += 1
        share = sum(letter.isdigit() for letter in action) / max(1, len(action))
        return f"seen {self.count}", share, "7" in action
"""


@SLOW
def test_training_in_an_environment_learns_from_its_rewards_and_from_what_the_model_wrote(tmp_path, rollout_python):
    make(tmp_path)
    (tmp_path / "digits.py").write_text(ENVIRONMENT)
    sanity_inputs.train(
        tmp_path,
        tmp_path / "run",
        timeout_s=400,
        run__max_steps=2,
        tools__environment=f"{tmp_path / 'digits.py'}:Digits",
        tools__max_response_tokens=32,
        reward__verifier_function="environment_reward",
        rollout__max_response_length=MAX_LENGTH,
        observe__groups_per_step=16,
    )
    for line in sanity_inputs.read_lines(tmp_path / "run" / "metrics.jsonl"):
        assert line["turns/mean"] > 1 and line["tools/failures"] == line["reward/failures"] == 0
        assert 0 < line["reward/environment_reward/mean"] <= 4
        assert line["rollout_diff/max_abs"] < 1e-4, "the generator went on after the very tokens that were trained"
        assert math.isfinite(line["loss"]) and line["grad_norm"] > 0
    for sample in sanity_inputs.read_lines(tmp_path / "run" / "samples.jsonl"):
        turns = re.split(r"\nseen \d\n", sample["completion"])
        earned = sum(sum(letter.isdigit() for letter in turn) / max(1, len(turn)) for turn in turns)
        if sample["finish_reason"] == "stop":  # a turn that is cut off earns nothing
            assert sample["rewards"]["environment_reward"] == pytest.approx(earned)
