"""Tool calls in the Hermes format of Qwen: calls out of a turn's text, answers and descriptions into text.

An assistant's turn calls with ``<tool_call>\\n{"name": ..., "arguments": {...}}\\n</tool_call>``, any number of times.
The answers come back in one user turn, each as ``<tool_response>\\n...\\n</tool_response>``. Source: the chat template
of Qwen2.5 (tokenizer_config.json), which follows https://github.com/NousResearch/Hermes-Function-Calling.
"""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

CALL_START, CALL_END = "<tool_call>", "</tool_call>"
ANSWER_START, ANSWER_END = "<tool_response>", "</tool_response>"
TURN_START, TURN_END = "<|im_start|>", "<|im_end|>"

# What a tool returns is text, never structure: these and all names of special tokens in it are broken up.
_MARKUP = re.compile(r"<(?=\|[^|<>\s]{1,64}\|>|/?tool_(?:call|response)>)")


@dataclass(frozen=True)
class ToolCall:
    """A call of the tool ``name``."""

    name: str
    arguments: Mapping[str, Any]
    extra: Mapping[str, Any] = field(default_factory=dict)  # kept columns of the prompt; no argument of the model's


@dataclass(frozen=True)
class ToolAnswer:
    """What a tool answered, or why it did not."""

    text: str
    is_failure: bool = False


def parse_calls(text: str) -> list[ToolCall | ToolAnswer]:
    """Return the calls of an assistant's turn in their order; a malformed one is the answer that the model gets."""
    calls: list[ToolCall | ToolAnswer] = []
    for piece in text.split(CALL_START)[1:]:
        content, end, _ = piece.partition(CALL_END)
        calls.append(_parse_call(content) if end else _failure(f"the call has no {CALL_END}"))
    return calls


def _parse_call(content: str) -> ToolCall | ToolAnswer:
    try:
        call = json.loads(content)
    except (ValueError, RecursionError) as error:
        # Deep nesting is no JSON that a tool needs, and Python's parser gives up on it.
        return _failure(f"the call is not valid JSON ({error})")
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        return _failure('a call is a JSON object with a "name" and "arguments"')
    arguments = call.get("arguments", {})
    if not isinstance(arguments, dict):
        return _failure('"arguments" must be a JSON object')
    return ToolCall(call["name"], arguments)


def _failure(reason: str) -> ToolAnswer:
    return ToolAnswer(f"Error: {reason}", is_failure=True)


def without_markup(text: str) -> str:
    """Return what a tool has answered as text that is no markup of a turn, whatever the tokenizer."""
    return _MARKUP.sub("< ", text)


def answers_text(texts: Iterable[str]) -> str:
    """Return the content of a user's turn that gives the answers to the calls of a turn, in their order."""
    return "\n".join(f"{ANSWER_START}\n{without_markup(text)}\n{ANSWER_END}" for text in texts)


def answer_turn(texts: Iterable[str], *, is_chat: bool) -> str:
    """Return the text between a turn with calls and the next turn, where no chat template says it.

    Args:
        texts: answers, in the order of the calls.
        is_chat: the tokenizer has Qwen's turn markers; without them the answers stand on lines of their own.
    """
    return _between_turns(answers_text(texts), is_chat)


def observation_turn(text: str, *, is_chat: bool) -> str:
    """Return the text between two turns of a model that acts in an environment; see ``answer_turn``."""
    return _between_turns(without_markup(text), is_chat)


def _between_turns(content: str, is_chat: bool) -> str:
    if not is_chat:
        return f"\n{content}\n"
    return f"\n{TURN_START}user\n{content}{TURN_END}\n{TURN_START}assistant\n"


def system_prompt(descriptions: Sequence[Mapping[str, Any]], instructions: str = "You are a helpful assistant.") -> str:
    """Return the content of the system turn that Qwen2.5's chat template makes of these tools.

    Args:
        descriptions: JSON schema of each function, see :func:`mindrlhf.tools.registry.describe`.
        instructions: what the system turn says first.
    """
    listed = "".join(f"\n{json.dumps(description, ensure_ascii=False)}" for description in descriptions)
    return (
        f"{instructions}\n\n# Tools\n\nYou may call one or more functions to assist with the user query.\n\n"
        f"You are provided with function signatures within <tools></tools> XML tags:\n<tools>{listed}\n</tools>\n\n"
        "For each function call, return a json object with function name and arguments within "
        f"{CALL_START}{CALL_END} XML tags:\n{CALL_START}\n"
        f'{{"name": <function-name>, "arguments": <args-json-object>}}\n{CALL_END}'
    )
