"""Inputs that several tests of what happens before and around a run share: a tokenizer, models, prompt files."""

import itertools
import json
from pathlib import Path

import numpy as np
import pytest
from configs import grpo_config
from preflight_cases import NUM_PROMPTS
from prompt_files import header_of, write_with_header
from script_files import load_script

from mindrlhf.config.schema import GrpoConfig
from mindrlhf.data.mindrecord import Prompt
from mindrlhf.data.tokenizers import load_tokenizer
from mindrlhf.weights.convert import export_hf, random_hf_weights

LONGEST = 12


@pytest.fixture(scope="module")
def inputs_dir(tmp_path_factory) -> Path:
    """A tokenizer, a whole model, and prompt files of several kinds."""
    directory = tmp_path_factory.mktemp("inputs")
    prepare = load_script("examples/sanity/prepare.py")
    tokenizer_dir = directory / "tokenizer"
    tokenizer_dir.mkdir()
    prepare.make_tokenizer().save(str(tokenizer_dir / "tokenizer.json"))
    (tokenizer_dir / "tokenizer_config.json").write_text(json.dumps({"eos_token": prepare.END_OF_TEXT}))
    sizes = {"hidden_size": 16, "head_dim": 32, "num_hidden_layers": 1, "intermediate_size": 32}
    model = {**prepare.model_config(512), **sizes}
    export_hf(random_hf_weights(model, 0), model, directory / "model")
    wide = {**model, "hidden_size": 32}
    bare = directory / "bare"
    bare.mkdir()
    (bare / "config.json").write_text(json.dumps(model))
    export_hf(random_hf_weights(wide, 0), wide, directory / "wide")
    small = {**model, "vocab_size": 500}
    export_hf(random_hf_weights(small, 0), small, directory / "small_vocabulary")
    fingerprint = load_tokenizer(str(tokenizer_dir)).fingerprint
    write_prompts(directory / "train.mindrecord", fingerprint, [LONGEST] * NUM_PROMPTS)
    write_prompts(directory / "long.mindrecord", fingerprint, [LONGEST, 40])
    write_prompts(directory / "two_sources.mindrecord", fingerprint, [LONGEST] * 2, sources=("s", "other"))
    write_prompts(directory / "foreign.mindrecord", "0" * 64, [LONGEST])
    write_prompts(directory / "sft.mindrecord", fingerprint, [LONGEST] * 3, response_lengths=[8, 9, 3])
    write_prompts(
        directory / "preference.mindrecord", fingerprint, [LONGEST] * 2, response_lengths=[8, 9], task="preference"
    )
    write_prompts(directory / "sft_long.mindrecord", fingerprint, [LONGEST], response_lengths=[50])
    write_prompts(directory / "kept.mindrecord", fingerprint, [LONGEST] * 2, columns=("level", "board"))
    return directory


def write_prompts(
    path: Path, fingerprint: str, prompt_lengths, response_lengths=None, task="sft", sources=("s",), columns=()
) -> None:
    responses = response_lengths or [0] * len(prompt_lengths)
    records = [
        Prompt(
            np.ones(prompt, np.int32),
            np.ones(response, np.int32),
            "answer",
            f"{source}:{i}",
            extra=dict.fromkeys(columns, i),
        )
        for i, (prompt, response, source) in enumerate(zip(prompt_lengths, responses, itertools.cycle(sources)))
    ]
    header = header_of(
        len(records),
        task=task if response_lengths else "prompts",
        tokenizer_fingerprint=fingerprint,
        longest_prompt=max(prompt_lengths, default=0),
        longest_response=max(responses, default=0),
        columns=columns,
    )
    write_with_header(path, header, [records])


@pytest.fixture
def prompt_writer():
    return write_prompts


@pytest.fixture
def config(inputs_dir) -> GrpoConfig:
    return grpo_config(
        model={"path": str(inputs_dir / "model")},
        data={"train_file": str(inputs_dir / "train.mindrecord"), "tokenizer_dir": str(inputs_dir / "tokenizer")},
        reward={"verifier_function": ("accuracy_reward",)},
        rollout={"max_response_length": 20},
        training={"chunk_size": 2, "epochs": 3},
    )


@pytest.fixture
def contents(inputs_dir, tmp_path) -> dict[str, dict]:
    """A right config of each task, as YAML reads it."""
    common = {"run": {"output_dir": str(tmp_path / "run")}, "model": {"path": str(inputs_dir / "model")}}

    def data(name):
        return {"train_file": str(inputs_dir / name), "tokenizer_dir": str(inputs_dir / "tokenizer")}

    python = tmp_path / "python"  # of a rollout environment: it has what it is asked for
    python.write_text('#!/bin/sh\nshift 2\nfor name; do echo "/packages/$name/__init__.py"; done\n')
    python.chmod(0o755)
    train = {
        "reward": {"verifier_function": "accuracy_reward"},
        "rollout": {"max_response_length": 20, "python": str(python)},
        "training": {"chunk_size": 2, "epochs": 3},
        "data": data("train.mindrecord"),
    }
    return {
        "train": common | train,
        "sft": common | {"data": data("sft.mindrecord"), "training": {"epochs": 1}},
        "dpo": common | {"data": data("preference.mindrecord"), "dpo": {"beta": 0.1}},
    }
