"""What a starting config chooses, by model, machine and data."""

import dataclasses
from types import SimpleNamespace

import pytest
import yaml

from mindrlhf.config.starting import Choices, Facts, learning_rate, remarks, response_length, starting_config


def choices(task="train", npus=0, lora_rank=0, **facts):
    return Choices(task, "m", "d", "", npus, "", lora_rank, Facts(**facts))


def found(kind="numbers", **changes):
    return SimpleNamespace(**{"verifiers": ("v",), "why": "w", "kind": kind, "by_choice": (), "options": {}, **changes})


@pytest.mark.parametrize(
    ("num_parameters", "lora_rank", "rate"),
    [
        (135_000_000, 0, 2e-5),
        (135_000_000, 16, 1e-3),
        (500_000_000, 0, 1e-5),
        (500_000_000, 16, 1e-3),
        (7_600_000_000, 0, 1e-6),
        (7_600_000_000, 16, 1e-5),
        (None, 0, 1e-6),
    ],
)
def test_the_learning_rate_falls_with_the_size(num_parameters, lora_rank, rate):
    assert learning_rate(choices(num_parameters=num_parameters, lora_rank=lora_rank)) == rate


@pytest.mark.parametrize(
    ("npus", "facts", "length"),
    [
        (0, {}, 256),
        (0, {"usual_question": 5}, 32),
        (0, {"usual_question": 54}, 224),  # GSM8K in Qwen's tokens
        (0, {"usual_question": 500}, 256),
        (0, {"usual_question": 5, "answer_chars": 150}, 112),
        (0, {"usual_question": 54, "longest_prompt": 200, "max_positions": 256}, 56),
        (0, {"usual_question": 54, "verifiers": found("tests")}, 512),
        (8, {"usual_question": 54}, 1024),
        (8, {"verifiers": found("tests")}, 2048),
    ],
)
def test_responses_are_as_long_as_answers_of_the_data_need(npus, facts, length):
    assert response_length(choices(npus=npus, **facts)) == length


@pytest.mark.parametrize(
    ("facts", "packing"),
    [
        ({"longest_prompt": 45, "usual_question": 5}, "shared_prompts"),
        ({"longest_prompt": 45, "usual_question": 5, "sees_images": True}, None),
        ({"longest_prompt": 232, "usual_question": 54}, None),  # 232 + 8 * 224 tokens
        ({}, None),
    ],
)
def test_a_group_is_packed_into_one_sequence_where_that_is_short(facts, packing):
    config = yaml.safe_load(starting_config(choices(**facts), "c.yaml"))
    assert config["training"].get("packing") == packing


def test_verifiers_of_the_data_are_written_with_what_they_need():
    chosen = found(verifiers=("a", "b"), by_choice=("b",), options={"a.url": "http://x"}, why="because")
    config = yaml.safe_load(starting_config(choices(verifiers=chosen), "c.yaml"))
    assert config["reward"] == {"verifier_function": "a,b", "by_choice": ["b"], "options": {"a.url": "http://x"}}
    assert remarks(choices(verifiers=chosen))[0] == "reward.verifier_function is a,b: because"
    named = dataclasses.replace(choices(verifiers=chosen), verifier="mine.py:f")
    assert yaml.safe_load(starting_config(named, "c.yaml"))["reward"] == {"verifier_function": "mine.py:f"}
    assert not any("verifier" in line for line in remarks(named))
