"""Rewards of programs under test."""

import json

from mindrlhf.rewards.registry import resolve


def fenced(source: str, language: str = "python") -> str:
    return f"Here it is:\n```{language}\n{source}\n```\nDone."


def reward(completion: str, answer, **options) -> float:
    texts = {"time_limit_s": "30", **{name: str(value) for name, value in options.items()}}
    answer = answer if isinstance(answer, str) else json.dumps(answer)
    return resolve("code_execution", texts)(completion, answer, {})
