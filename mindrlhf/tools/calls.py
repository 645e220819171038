"""Tool calls in the dialects of model families: calls out of a turn's text, answers and descriptions into text.

============ ==================================================================================================
auto         what stands between ``<tool_call>`` and ``</tool_call>``, whichever of the next three it is
hermes       JSON there, ``{"name": ..., "arguments": {...}}``: Qwen2.5, Qwen3, Hermes (chat template of Qwen2.5)
qwen3_coder  XML there, ``<function=NAME>`` and ``<parameter=NAME>``: Qwen3-Coder, Qwen3.5
glm          the name there, then ``<arg_key>`` and ``<arg_value>`` in turn: GLM-4.5 and later
deepseek     between DeepSeek's own marks, V3 and R1 with the arguments in a block of JSON, V3.1 without
mistral      behind ``[TOOL_CALLS]`` a list of JSON, or a name and arguments (tokenizers from version 11)
llama3       JSON on its own, ``{"name": ..., "parameters": {...}}``, with ``;`` between several, or what stands behind
             ``<|python_tag|>``: JSON, ``NAME.call(...)`` of built-in tools, or a program for the tool ``python``
============ ==================================================================================================

A call within a thought is none. What looks like a call and cannot be read is the answer that the model gets for it.
"""

import ast
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from mindrlhf.config.reward import AUTO_DIALECT
from mindrlhf.rewards.answers.extraction import behind_thoughts, response_text

CALL_START, CALL_END = "<tool_call>", "</tool_call>"
ANSWER_START, ANSWER_END = "<tool_response>", "</tool_response>"
TURN_START, TURN_END = "<|im_start|>", "<|im_end|>"

# What a tool returns is text, never structure: these and all names of special tokens in it are broken up.
_MARKUP = re.compile(
    r"<(?=[|\uff5c][^|\uff5c<>\s]{1,64}[|\uff5c]>|/?tool_(?:call|response)>)|\[(?=/?(?:TOOL_(?:CALLS|RESULTS)|INST)\])"
)


@dataclass(frozen=True)
class ToolCall:
    """A call of the tool ``name``."""

    name: str
    arguments: Mapping[str, Any]
    extra: Mapping[str, Any] = field(default_factory=dict)  # kept columns of the prompt; no argument of the model's
    is_text: bool = False  # arguments are texts, whose types the tool's parameters say


@dataclass(frozen=True)
class ToolAnswer:
    """Answer of a tool, or the reason that there is none."""

    text: str
    is_failure: bool = False


class Found(NamedTuple):
    """Calls in a text: where they begin and end."""

    start: int
    end: int
    calls: tuple[ToolCall | ToolAnswer, ...]


@dataclass(frozen=True)
class Dialect:
    """Form in which the models of a family write calls.

    Attributes:
        signs: any of these in a chat template says that it is of the family.
        find: returns the calls in a text, in their order.
    """

    signs: tuple[str, ...]
    find: Callable[[str], list[Found]]


def parse_calls(text: str, dialect: str = AUTO_DIALECT, prompt: str = "") -> list[ToolCall | ToolAnswer]:
    """Return the calls of an assistant's turn in their order; a malformed one is the answer that the model gets.

    Args:
        text: the turn, special tokens included.
        dialect: a key of ``DIALECTS``. Where it finds nothing, calls between ``<tool_call>`` and ``</tool_call>`` count
            all the same: a system prompt may have asked for them.
        prompt: the end of what the turn follows: a template may have opened a thought there.
    """
    return [call for one in _found_calls(response_text(text, prompt), dialect) for call in one.calls]


def called(text: str, dialect: str, prompt: str = "") -> tuple[str, list[ToolCall]]:
    """Return what a turn says before its calls, and the calls, as clients of an endpoint are told them; see
    ``parse_calls``. Where one cannot be read, none is: the turn is all text."""
    whole = response_text(text, prompt)
    found = _found_calls(whole, dialect)
    calls = [call for one in found for call in one.calls]
    if not calls or not all(isinstance(call, ToolCall) for call in calls):
        return text, []
    return whole[len(whole) - len(text) : found[0].start], calls


def _found_calls(text: str, dialect: str) -> list[Found]:
    """Return the calls in a turn that are in no thought."""
    found = DIALECTS[dialect].find(text) or DIALECTS[AUTO_DIALECT].find(text)
    if not found:
        return []
    # What a call says is no thought and ends none: a sign stands for each.
    starts, masked, position = [], "", 0
    for one in found:
        masked += text[position : one.start]
        starts.append(len(masked))
        masked, position = masked + "\0", one.end
    masked += text[position:]
    first = len(masked) - len(behind_thoughts(masked))
    return [one for start, one in zip(starts, found) if start >= first]


def dialect_of(template: str) -> str:
    """Return the dialect that a chat template, in Jinja, teaches its model: a key of ``DIALECTS``."""
    return next((name for name, one in DIALECTS.items() if any(sign in template for sign in one.signs)), AUTO_DIALECT)


def _failure(reason: str) -> ToolAnswer:
    return ToolAnswer(f"Error: {reason}", is_failure=True)


def _decode_json(text: str, position: int) -> tuple[Any, int]:
    """Return the JSON value that begins at a place of a text, and where it ends; models break lines within strings.

    Raises:
        ValueError: there is none.
    """
    while position < len(text) and text[position].isspace():
        position += 1
    try:
        return _DECODER.raw_decode(text, position)
    except RecursionError:  # deep nesting is no JSON that a tool needs, and Python's parser gives up on it
        raise ValueError("it is nested too deeply") from None


_DECODER = json.JSONDecoder(strict=False)


def _not_json(error: ValueError) -> ToolAnswer:
    return _failure(f"the call is not valid JSON ({error})")


def _read_json(content: str) -> ToolCall | ToolAnswer:
    try:
        value, end = _decode_json(content, 0)
        if content[end:].strip():
            raise ValueError(f"more stands behind it, from character {end} on")
    except ValueError as error:
        return _not_json(error)
    return _call_of(value)


def _call_of(value: Any) -> ToolCall | ToolAnswer:
    if isinstance(value, dict) and isinstance(value.get("function"), dict):
        value = value["function"]
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return _failure('a call is a JSON object with a "name" and "arguments"')
    return _with_arguments(value["name"], value.get("arguments", value.get("parameters")))


def _with_arguments(name: str, arguments: Any) -> ToolCall | ToolAnswer:
    """Return a call with arguments that are an object, or the JSON of one as text."""
    if isinstance(arguments, str) and arguments.strip():
        try:
            arguments, end = _decode_json(text := arguments, 0)
            arguments = text if text[end:].strip() else arguments
        except ValueError:
            pass
    elif not arguments and not isinstance(arguments, list):
        arguments = {}
    return ToolCall(name, arguments) if isinstance(arguments, dict) else _failure('"arguments" must be a JSON object')


def _read_xml(content: str) -> ToolCall | ToolAnswer:
    function = _FUNCTION.fullmatch(content)
    if function is None:
        return _failure("a call is <function=NAME>, a <parameter=NAME>...</parameter> for each argument, </function>")
    name, inside = function[1].strip(), function[2]
    if _PARAMETER.sub("", inside).strip():
        return _failure("within <function=NAME> each argument stands in <parameter=NAME>...</parameter>")
    # The template puts a value on lines of its own.
    pairs = [(one[1].strip(), one[2].removeprefix("\n").removesuffix("\n")) for one in _PARAMETER.finditer(inside)]
    return _with_texts(name, pairs)


_FUNCTION = re.compile(r"\s*<function=([^<>\n]+)>(.*)</function>\s*", re.DOTALL)
_PARAMETER = re.compile(r"<parameter=([^<>\n]+)>(.*?)(?:</parameter>|(?=<parameter=))", re.DOTALL)


def _read_pairs(content: str) -> ToolCall | ToolAnswer:
    name, mark, rest = content.partition("<arg_key>")
    if not _NAME.fullmatch(name.strip()) or _PAIR.sub("", mark + rest).strip():
        return _failure(
            "a call is the tool's name, then <arg_key>NAME</arg_key> and <arg_value>VALUE</arg_value> for each argument"
        )
    return _with_texts(name.strip(), [(pair[1].strip(), pair[2]) for pair in _PAIR.finditer(mark + rest)])


_NAME = re.compile(r"[\w.:/-]+")
_PAIR = re.compile(r"<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>", re.DOTALL)


def _with_texts(name: str, pairs: Sequence[tuple[str, str]]) -> ToolCall | ToolAnswer:
    arguments = dict(pairs)
    if len(arguments) < len(pairs):
        return _failure("an argument is given twice")
    return ToolCall(name, arguments, is_text=True)


def _read_any(content: str) -> ToolCall | ToolAnswer:
    if content.lstrip().startswith("<function="):
        return _read_xml(content)
    return _read_pairs(content) if "<arg_key>" in content or _NAME.fullmatch(content.strip()) else _read_json(content)


def _find_tagged(text: str, read: Callable[[str], ToolCall | ToolAnswer]) -> list[Found]:
    """Find what stands between ``<tool_call>`` and ``</tool_call>``."""
    found, position = [], 0
    while (start := text.find(CALL_START, position)) >= 0:
        inside = start + len(CALL_START)
        close = _end_of_json(text, inside) if read is not _read_xml else -1
        if close < 0:
            following = text.find(CALL_START, inside)
            close = text.find(CALL_END, inside, following if following >= 0 else len(text))
        call = read(text[inside:close]) if close >= 0 else _failure(f"the call has no {CALL_END}")
        position = close + len(CALL_END) if close >= 0 else inside
        found.append(Found(start, position, (call,)))
    return found


def _end_of_json(text: str, position: int) -> int:
    """Return where ``</tool_call>`` stands behind the JSON that begins at a place, -1 where there is no such."""
    try:
        end = _decode_json(text, position)[1]
    except ValueError:
        return -1
    close = text.find(CALL_END, end)
    return close if close >= 0 and not text[end:close].strip() else -1


def _find_xml(text: str) -> list[Found]:
    """Find calls of Qwen3-Coder, which leaves ``<tool_call>`` out at times."""
    found, position = [], 0
    end = _XML_END.search(text)
    while (mark := _XML_START.search(text, position)) is not None:
        if end is not None and end.start() < mark.end():
            end = _XML_END.search(text, mark.end())
        following = _XML_START.search(text, mark.end())
        if end is None or (following is not None and following.start() < end.start()):
            missing = CALL_END if mark.group().startswith(CALL_START) else "</function>"
            call, position = _failure(f"the call has no {missing}"), mark.end()
        else:
            inside = mark.start(1) if mark[1] else mark.end()
            call, position = _read_xml(text[inside : end.end(1) if end[1] else end.start()]), end.end()
        found.append(Found(mark.start(), position, (call,)))
    return found


_XML_START = re.compile(r"(?:<tool_call>\s*)?(<function=)|<tool_call>")
_XML_END = re.compile(r"(</function>)(?:\s*</tool_call>)?|</tool_call>")


def _find_deepseek(text: str) -> list[Found]:
    found = []
    for mark in _DEEPSEEK_CALL.finditer(text):
        content = mark[1] if mark[1] is not None else ""
        call = _read_deepseek(content) if mark[1] is not None else _failure(f"the call has no {_DEEPSEEK_END}")
        found.append(Found(mark.start(), mark.end(), (call,)))
    begin = text.find(_DEEPSEEK_CALLS)
    if begin >= 0 and not found:
        empty = _failure(f"nothing stands behind {_DEEPSEEK_CALLS}")
        found.append(Found(begin, begin + len(_DEEPSEEK_CALLS), (empty,)))
    return found


_DEEPSEEK_CALLS = "<\uff5ctool\u2581calls\u2581begin\uff5c>"
_DEEPSEEK_BEGIN, _DEEPSEEK_SEPARATOR = "<\uff5ctool\u2581call\u2581begin\uff5c>", "<\uff5ctool\u2581sep\uff5c>"
_DEEPSEEK_END = "<\uff5ctool\u2581call\u2581end\uff5c>"
_DEEPSEEK_CALL = re.compile(f"{_DEEPSEEK_BEGIN}(?:((?:(?!{_DEEPSEEK_BEGIN}).)*?){_DEEPSEEK_END})?", re.DOTALL)
_JSON_BLOCK = re.compile(r"\s*([^\n`]*?)\s*```(?:json)?\s*(.*?)\s*```\s*", re.DOTALL)


def _read_deepseek(content: str) -> ToolCall | ToolAnswer:
    kind, separator, rest = content.partition(_DEEPSEEK_SEPARATOR)
    block = _JSON_BLOCK.fullmatch(rest)
    name, body = (block[1], block[2]) if block is not None else (kind.strip(), rest)
    if not separator or not name:
        return _failure(f"a call is a kind or name, {_DEEPSEEK_SEPARATOR}, and the arguments as JSON")
    try:
        arguments, end = _decode_json(body, 0)
        if body[end:].strip():
            raise ValueError(f"more stands behind it, from character {end} on")
    except ValueError as error:
        return _not_json(error)
    return _with_arguments(name, arguments)


def _find_mistral(text: str) -> list[Found]:
    found, position = [], 0
    while (start := text.find(_MISTRAL_CALLS, position)) >= 0:
        position = start + len(_MISTRAL_CALLS)
        named = _MISTRAL_NAME.match(text, position)
        try:
            value, position = _decode_json(text, position if named is None else named.end())
        except ValueError as error:
            calls = (_not_json(error),)
        else:
            values = value if isinstance(value, list) and named is None else [value]
            calls = tuple(_call_of(one) if named is None else _with_arguments(named[1], one) for one in values)
        found.append(Found(start, position, calls or (_failure(f"nothing stands behind {_MISTRAL_CALLS}"),)))
    return found


_MISTRAL_CALLS = "[TOOL_CALLS]"
_MISTRAL_NAME = re.compile(r"\s*([\w.:/-]+)\s*(?:\[CALL_ID\]\s*[\w-]+\s*)?(?:\[ARGS\])?\s*(?=\{)")


def _find_llama(text: str) -> list[Found]:
    found, position = [], 0
    while (mark := _LLAMA_START.search(text, position)) is not None:
        is_tagged, position = mark.group().startswith(_PYTHON_TAG), mark.end()
        call = None
        if is_tagged and not text.startswith("{", position):
            end = _LLAMA_END.search(text, position)
            code, position = text[position : end.start()], end.start()
            call = _read_program(code)
        else:
            begin = position
            try:
                value, position = _decode_json(text, position)
                if is_tagged or (isinstance(value, dict) and value.keys() & {"parameters", "arguments", "function"}):
                    call = _call_of(value)
            except ValueError as error:
                # An answer may be JSON, too, and no call.
                call = _not_json(error) if is_tagged or _LLAMA_ARGUMENTS.search(text, begin, begin + 2000) else None
                position += 1
        if call is not None:
            found.append(Found(mark.start(), position, (call,)))
    return found


_PYTHON_TAG = "<|python_tag|>"
_LLAMA_START = re.compile(
    r"<\|python_tag\|>\s*|(?:^|;)[ \t]*(?=\{\s*\"(?:name|type|function|parameters|arguments)\")", re.MULTILINE
)
_LLAMA_END = re.compile(r"<\|(?:eom_id|eot_id|end_of_text|python_tag)\|>|$(?![\s\S])")
_LLAMA_ARGUMENTS = re.compile(r'"(?:parameters|arguments)"\s*:')


def _read_program(code: str) -> ToolCall | ToolAnswer:
    """Return the call of a built-in tool, ``brave_search.call(query="...")``, or of ``python`` with a program."""
    try:
        call = ast.parse(code.strip(), mode="eval").body
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and call.func.attr == "call":
            arguments = {one.arg: ast.literal_eval(one.value) for one in call.keywords if one.arg}
            return ToolCall(ast.unparse(call.func.value), arguments)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        pass
    if not code.strip():
        return _failure(f"nothing stands behind {_PYTHON_TAG}")
    return ToolCall("python", {"code": code.strip()})


DIALECTS: dict[str, Dialect] = {
    "qwen3_coder": Dialect(("<function=",), _find_xml),
    "glm": Dialect(("<arg_key>",), lambda text: _find_tagged(text, _read_pairs)),
    "deepseek": Dialect((_DEEPSEEK_BEGIN,), _find_deepseek),
    "mistral": Dialect((_MISTRAL_CALLS,), _find_mistral),
    "llama3": Dialect((_PYTHON_TAG, "Environment: ipython", '{"name": function name, "parameters":'), _find_llama),
    "hermes": Dialect((CALL_START,), lambda text: _find_tagged(text, _read_json)),
    AUTO_DIALECT: Dialect((), lambda text: _find_tagged(text, _read_any)),
}


def without_markup(text: str) -> str:
    """Return what a tool has answered as text that is no markup of a turn, whatever the tokenizer."""
    return _MARKUP.sub("< ", text)


def answers_text(texts: Iterable[str]) -> str:
    """Return the content of a user's turn that gives the answers to the calls of a turn, in their order."""
    return "\n".join(f"{ANSWER_START}\n{without_markup(text)}\n{ANSWER_END}" for text in texts)


def call_messages(
    names: Sequence[str], texts: Sequence[str], mark: str, *, has_text: bool, as_json_text: bool, num_calls: int
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return a turn with calls, and the messages that answer them, as ``apply_chat_template`` takes them.

    Args:
        names: of the called tools, one for each answer.
        texts: what they have answered.
        mark: the arguments of each call.
        has_text: whether the turn has a text, an empty one, or none.
        as_json_text: whether arguments are JSON as text, or objects.
        num_calls: that the turn has: some templates take one alone.
    """
    arguments: Any = json.dumps({"x": mark}) if as_json_text else {"x": mark}
    # Mistral's templates want ids of nine characters.
    ids = [f"call{number:05d}" for number in range(len(names))]
    calls = [
        {"id": one, "type": "function", "function": {"name": name, "arguments": arguments}}
        for one, name in zip(ids[:num_calls], names)
    ]
    answers = [
        {"role": "tool", "name": name, "tool_call_id": one, "content": without_markup(text)}
        for one, name, text in zip(ids, names, texts, strict=True)
    ]
    return {"role": "assistant", "content": "" if has_text else None, "tool_calls": calls}, answers


def answer_turn(texts: Iterable[str], *, is_chat: bool, is_open: bool = False) -> str:
    """Return the text between a turn with calls and the next turn, where no chat template says it.

    Args:
        texts: answers, in the order of the calls.
        is_chat: the tokenizer has Qwen's turn markers; without them the answers stand on lines of their own.
        is_open: the turn has no end token, since a stop string has ended it.
    """
    return _between_turns(answers_text(texts), is_chat, is_open)


def observation_turn(text: str, *, is_chat: bool, is_open: bool = False) -> str:
    """Return the text between two turns of a model that acts in an environment; see ``answer_turn``."""
    return _between_turns(without_markup(text), is_chat, is_open)


def _between_turns(content: str, is_chat: bool, is_open: bool) -> str:
    if not is_chat:
        return f"\n{content}\n"
    return f"{TURN_END * is_open}\n{TURN_START}user\n{content}{TURN_END}\n{TURN_START}assistant\n"


def system_prompt(descriptions: Sequence[Mapping[str, Any]], instructions: str = "You are a helpful assistant.") -> str:
    """Return the content of the system turn that Qwen2.5's chat template makes of these tools."""
    listed = "".join(f"\n{json.dumps(description, ensure_ascii=False)}" for description in descriptions)
    return (
        f"{instructions}\n\n# Tools\n\nYou may call one or more functions to assist with the user query.\n\n"
        f"You are provided with function signatures within <tools></tools> XML tags:\n<tools>{listed}\n</tools>\n\n"
        "For each function call, return a json object with function name and arguments within "
        f"{CALL_START}{CALL_END} XML tags:\n{CALL_START}\n"
        f'{{"name": <function-name>, "arguments": <args-json-object>}}\n{CALL_END}'
    )
