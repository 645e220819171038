"""Control tokens that are written out in the texts of a data set, where they could end a turn and forge another.

Tokenizers turn ``<|im_end|>`` into its id wherever it stands, so a question may close the user's turn and speak as the
assistant. Only the template may write such tokens: in data, and in what tools answer, they get a space behind their
first character.
"""

import re
from dataclasses import replace
from typing import Any

from mindrlhf.data.handlers import Example

# What the published families of models write turns, calls and thoughts with, for texts of which nobody knows yet what
# model will read them: Qwen, Llama 2 and 3, DeepSeek, Mistral, Gemma, GLM, Phi, Kimi, gpt-oss.
COMMON_CONTROL_TOKENS = re.compile(
    r"<\|[^|<>\s]{1,64}\|>|<｜[^｜<>\s]{1,64}｜>|</?s>|<</?SYS>>|\[gMASK\]|<sop>|<(?:bos|eos|pad|unk|mask)>"
    r"|</?(?:start|end)_of_(?:turn|image)>|\[/?(?:INST|THINK|ARGS|CALL_ID|[A-Z]+_(?:PROMPT|TOOLS|CALLS|RESULTS|CONTENT))\]"
    r"|</?(?:think|tools|tool_call|tool_calls|tool_response|function|parameter|arg_key|arg_value)[=>]"
)


def control_token_pattern(tokens: frozenset[str]) -> re.Pattern[str] | None:
    """Return a pattern of any of ``tokens``, the longest first; None when there are none."""
    # A token of one character could not be written apart, and none controls anything.
    longest_first = sorted((token for token in tokens if len(token) > 1), key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first))) if longest_first else None


def holds_control_token(example: Example, pattern: re.Pattern[str]) -> bool:
    """Return True if a text that becomes ids, of any turn or response, holds a control token."""
    return neutralised(example, pattern) != example


def written_apart(text: str, pattern: re.Pattern[str]) -> str:
    """``text`` without control tokens: each has a space behind its first character."""
    while pattern.search(text) is not None:
        text = pattern.sub(lambda match: f"{match.group()[0]} {match.group()[1:]}", text)
    return text


def neutralised(example: Example, pattern: re.Pattern[str]) -> Example:
    """``example`` with every control token in its messages and responses written apart: ``< |im_end|>``."""

    def apart(text: str | None) -> str | None:
        return None if text is None else written_apart(text, pattern)

    messages = tuple(
        replace(
            message,
            role=apart(message.role),
            content=apart(message.content),
            more=neutralised_value(message.more, pattern),
        )
        for message in example.messages
    )
    return replace(example, messages=messages, response=apart(example.response), rejected=apart(example.rejected))


def neutralised_value(value: Any, pattern: re.Pattern[str]) -> Any:
    """A JSON value with every control token in its texts and names written apart."""
    if isinstance(value, str):
        return written_apart(value, pattern)
    if isinstance(value, list):
        return [neutralised_value(item, pattern) for item in value]
    if isinstance(value, dict):
        return {written_apart(name, pattern): neutralised_value(item, pattern) for name, item in value.items()}
    return value
