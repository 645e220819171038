"""Wire formats: OpenAI's chat completions and completions, and Anthropic's messages; ``responses`` has OpenAI's others.

Each becomes a ``Call`` in OpenAI's terms, and replies are written in the client's. A stream is written when the reply
is complete.
"""

import itertools
import json
import math
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

MAX_SEED = (1 << 63) - 1
MAX_SAMPLES = 64  # of one call
MAX_STOPS = 16
ROLES = ("system", "developer", "user", "assistant", "tool", "function")
CONSTRAINED = "tokens would be sampled from another distribution than the one that is trained"
# Fields that are followed, and those that say nothing of a reply, of every body; see ``Protocol``.
SAMPLING = {"model", "max_tokens", "temperature", "top_p", "top_k", "seed", "stream", "return_token_ids"}
_OPENAI = SAMPLING | {"n", "stop", "logprobs", "stream_options"}
IDLE = {"user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention"}
_CHAT = {"messages", "tools", "tool_choice", "response_format", "max_completion_tokens", "chat_template_kwargs"}
_CHAT |= {"continue_final_message", "add_generation_prompt", "parallel_tool_calls"} | _OPENAI | IDLE
_COMPLETION = {"prompt"} | _OPENAI | IDLE
# Of other fields, the values that ask for nothing beside null, and why no other is taken.
_REFUSED = {
    "logit_bias": ({}, CONSTRAINED),
    "frequency_penalty": (0, CONSTRAINED),
    "presence_penalty": (0, CONSTRAINED),
    "repetition_penalty": (1, CONSTRAINED),
    "length_penalty": (1, CONSTRAINED),
    "min_p": (0, CONSTRAINED),
    "min_tokens": (0, CONSTRAINED),
    "ignore_eos": (False, CONSTRAINED),
    "use_beam_search": (False, CONSTRAINED),
    **dict.fromkeys(("structured_outputs", "guided_json", "guided_regex", "guided_choice"), (None, CONSTRAINED)),
    **dict.fromkeys(("guided_grammar", "grammar", "json_schema", "allowed_token_ids"), (None, CONSTRAINED)),
    "skip_special_tokens": (True, "texts have no special tokens: ask for return_token_ids"),
    "stop_token_ids": ([], "use stop"),
    "truncation": ("disabled", "a prompt that is too long is refused"),
    "top_logprobs": (0, "only the log-probability of the sampled token is kept"),
    "best_of": (1, "all samples are returned: use n"),
    "echo": (False, "the client has the prompt"),
    "suffix": (None, "the model completes from the left"),
    "functions": ([], "use tools"),
    "function_call": (None, "use tools, and tool_choice"),
    "modalities": (["text"], "the model writes text"),
    "thinking": ({"type": "disabled"}, "thoughts are the chat template's: use chat_template_kwargs"),
}


class BadQuestion(ValueError):
    """A request that cannot be answered; the message says why."""


@dataclass(frozen=True)
class Call:
    """One request. Either ``messages`` or ``prompt`` is given."""

    messages: tuple[Mapping[str, Any], ...] = ()
    model: str = ""  # as the client calls it: an agent's role
    prompt: str | tuple[int, ...] | None = None
    options: Mapping[str, Any] = field(default_factory=dict)  # of the chat template, tools among them
    max_tokens: int = 0  # 0: as many as there is room for
    num_samples: int = 1
    stop: tuple[str, ...] = ()
    seed: int = 0
    sampling: Mapping[str, float] = field(default_factory=dict)  # temperature, top_p, top_k where the client says them
    reads_calls: bool = False  # of tools, in the reply
    # What the reply has to be: {"schema": of JSON}, or {"functions": [...]}, one of which it calls, or may call where
    # "is_optional"; empty: as it comes.
    form: Mapping[str, Any] = field(default_factory=dict)
    logprobs: bool = False
    token_ids: bool = False  # are to be returned
    stream: bool = False
    usage_in_stream: bool = False
    is_continued: bool = False  # the last message is a turn of the model that goes on
    is_retry: bool = False  # the client had no use of the last reply to the same


@dataclass(frozen=True)
class Reply:
    """One sample for a client."""

    text: str
    thought: str  # in front of it
    calls: tuple[Mapping[str, Any], ...]  # OpenAI's tool_calls
    finish_reason: str  # "stop", "length" or "tool_calls"
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    tokens: tuple[str, ...] = ()  # texts of the tokens, where log-probabilities were asked for
    stop: str = ""  # the client's text that ended it

    @property
    def whole(self) -> str:
        return f"<think>\n{self.thought}\n</think>\n\n{self.text}" if self.thought else self.text


@dataclass(frozen=True)
class Answer:
    """All samples for one call."""

    replies: tuple[Reply, ...]
    prompt_ids: tuple[int, ...]
    unread: Callable[[], None] | None = None  # called when the client has gone and has not read it


@dataclass(frozen=True)
class Protocol:
    """One protocol: parsing a request, the answer's body, and its events as a stream."""

    read: Callable[[Any], Call]
    write: Callable[[str, Call, Answer], dict[str, Any]]
    stream: Callable[[str, Call, Answer], Iterator[str]]


def error_body(message: str) -> dict[str, Any]:
    """Return what a client gets in place of an answer, as OpenAI and Anthropic write it."""
    error = {"message": message, "type": "invalid_request_error", "param": None, "code": None}
    return {"type": "error", "error": error}


def without_thought(text: str) -> str:
    """Return what a turn says behind its thought, or the end of one."""
    rest = text.rpartition("</think>")[2].strip()
    return "" if rest.startswith("<think>") else rest


def only(value: Any, known: Collection[str], where: str = "") -> None:
    """Check that a mapping asks for nothing that is not followed."""
    if not isinstance(value, dict):
        raise BadQuestion(f"{where or 'the body '}is no JSON object")
    for name in sorted(value.keys() - known):
        nothing, reason = _REFUSED.get(name, (None, "nothing here follows it"))
        asks = value[name] not in (None, nothing) if name in _REFUSED else value[name]
        if asks:
            raise BadQuestion(f"{where}{name} is not supported here: {reason}")


def _number(body: Mapping[str, Any], name: str, default: Any, kinds: Any, low: float, high: float) -> Any:
    value = body.get(name)
    if value is None:
        return default
    if type(value) not in kinds or not low <= value <= high or not math.isfinite(value):
        kind = "an integer" if float not in kinds else "a number"
        top = f" to {high}" if math.isfinite(high) else " on"
        raise BadQuestion(f"{name} is {repr(value)[:40]}: it must be {kind} from {low}{top}")
    return value


def _common(body: Any, known: Collection[str]) -> Call:
    only(body, known)
    stop = body.get("stop") or ()
    stop = (stop,) if isinstance(stop, str) else stop
    if not isinstance(stop, (list, tuple)) or len(stop) > MAX_STOPS or not all(isinstance(s, str) and s for s in stop):
        raise BadQuestion(f"stop must be a text or a list of at most {MAX_STOPS} texts, none of them empty")
    sampling = {
        "temperature": _number(body, "temperature", None, (int, float), 0, math.inf),
        "top_p": _number(body, "top_p", None, (int, float), 0, 1),
        "top_k": _number(body, "top_k", None, (int,), -1, MAX_SEED),
    }
    options = body.get("stream_options") or {}
    only(options, ("include_usage",), "stream_options: ")
    limits = [_number(body, name, 0, (int,), 1, MAX_SEED) for name in ("max_completion_tokens", "max_tokens")]
    return Call(
        model=name if isinstance(name := body.get("model"), str) else "",
        max_tokens=limits[0] or limits[1],
        num_samples=_number(body, "n", 1, (int,), 1, MAX_SAMPLES),
        stop=tuple(stop),
        seed=_number(body, "seed", 0, (int,), 0, MAX_SEED),
        sampling={name: value for name, value in sampling.items() if value is not None},
        token_ids=body.get("return_token_ids") is True,
        stream=body.get("stream") is True,
        usage_in_stream=options.get("include_usage") is True,
    )


def read_chat(body: Any) -> Call:
    call = _common(body, _CHAT)
    messages = _messages(body.get("messages"))
    tools, choice = _tools(body.get("tools")), body.get("tool_choice")
    form = _forced_call(choice, tools) or _response_format(body.get("response_format"))
    if tools and choice in (None, "auto") and body.get("parallel_tool_calls") is False and not form:
        form = {"functions": [tool["function"] for tool in tools], "is_optional": True}
    options = body.get("chat_template_kwargs") or {}
    if not isinstance(options, dict):
        raise BadQuestion("field 'chat_template_kwargs' must hold an object of template variables")
    if tools and choice != "none":
        options = {**options, "tools": tools}
    reads_calls = bool(tools) and choice != "none"
    logprobs = body.get("logprobs") is True
    if logprobs and form:
        raise BadQuestion("logprobs are not supported here with a form: not all tokens are the model's own")
    continues = body.get("continue_final_message") is True
    if continues and (messages[-1]["role"] != "assistant" or messages[-1].get("tool_calls")):
        raise BadQuestion("continue_final_message needs a last message of the assistant, with text and no calls")
    if (body.get("add_generation_prompt") is False) != continues:
        raise BadQuestion("add_generation_prompt must be false with continue_final_message, and true without")
    more = {"reads_calls": reads_calls, "logprobs": logprobs, "is_continued": continues, "form": form}
    return replace(call, messages=messages, options=options, **more)


def _forced_call(choice: Any, tools: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the form of a reply that has to call a function; empty where none is demanded."""
    if choice in (None, "auto", "none"):
        return {}
    functions, named = [tool["function"] for tool in tools], choice
    if isinstance(choice, dict) and choice.get("type") == "function" and isinstance(choice.get("function"), dict):
        named = choice["function"].get("name")
        functions = [function for function in functions if function["name"] == named]
    elif choice != "required":
        raise BadQuestion("tool_choice must be auto, none, required, or name a function")
    if not functions:
        raise BadQuestion(f"tool_choice is {repr(named)[:80]}, and tools has no such function")
    return {"functions": functions}


def _response_format(form: Any) -> dict[str, Any]:
    """Return the form of a reply that has to be JSON; empty for text."""
    kind = form.get("type") if isinstance(form, dict) else form
    if kind in (None, "text"):
        return {}
    inner = form.get("json_schema") if kind == "json_schema" else {"schema": {"type": "object"}}
    schema = inner.get("schema") if isinstance(inner, dict) else None
    if kind not in ("json_schema", "json_object") or not isinstance(schema, dict):
        raise BadQuestion("response_format must be of type text, json_object, or json_schema with a schema")
    return {"schema": schema}


# Of a message; thoughts are known already, or are not the model's.
_THOUGHTS = {"reasoning_content", "reasoning", "thinking_blocks", "provider_specific_fields"}
_MESSAGE = {"role", "content", "name", "tool_calls", "tool_call_id", "id", "refusal"} | _THOUGHTS


def _messages(messages: Any) -> tuple[dict[str, Any], ...]:
    expected = f"messages must be a list of objects with role ({', '.join(ROLES)}) and text content"
    if not isinstance(messages, list) or not messages:
        raise BadQuestion(expected)
    found = []
    for one in messages:
        if not isinstance(one, dict) or one.get("role") not in ROLES:
            raise BadQuestion(expected)
        only(one, _MESSAGE, "messages: ")
        message = {"role": one["role"], "content": _text(one.get("content"), expected)}
        if one["role"] == "assistant" and one.get("tool_calls"):
            message["tool_calls"] = _given_calls(one["tool_calls"])
        elif message["content"] is None:
            raise BadQuestion(expected)
        for name in ("tool_call_id", "name"):
            if isinstance(one.get(name), str):
                message[name] = one[name]
        found.append(message)
    return tuple(found)


def _text(content: Any, expected: str) -> str | None:
    if content is None or isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise BadQuestion(expected)
    texts = []
    for part in content:
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise BadQuestion("content must be text: pictures and other parts are not taken here")
        texts.append(part["text"])
    return "".join(texts)


def _given_calls(calls: Any) -> list[dict[str, Any]]:
    wrong = BadQuestion("tool_calls must be a list of calls of functions, each with a name and arguments as JSON")
    if not isinstance(calls, list):
        raise wrong
    found = []
    for call in calls:
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise wrong
        arguments = function.get("arguments", "{}")
        if not isinstance(arguments, (str, dict)):
            raise wrong
        arguments = arguments if isinstance(arguments, str) else json.dumps(arguments)
        inner = {"name": function["name"], "arguments": arguments or "{}"}
        found.append({"id": str(call.get("id", "")), "type": "function", "function": inner})
    return found


def _tools(tools: Any) -> list[dict[str, Any]]:
    if tools is None:
        return []
    for tool in tools if isinstance(tools, list) else [None]:
        function = tool.get("function") if isinstance(tool, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise BadQuestion("tools must be a list of functions, each with a name")
        only(function, ("name", "description", "parameters", "strict"), "tools: ")
    return tools


def read_completion(body: Any) -> Call:
    """Read a body of ``/v1/completions``: the prompt is text or token ids."""
    call, prompt = _common(body, _COMPLETION), body.get("prompt")
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], (str, list)):
        prompt = prompt[0]
    if isinstance(prompt, list):
        if not prompt or not all(type(token) is int for token in prompt):
            raise BadQuestion("prompt must be a text or one list of token ids")
        prompt = tuple(prompt)
    elif not isinstance(prompt, str) or not prompt:
        raise BadQuestion("prompt must be a text or one list of token ids")
    logprobs = _number(body, "logprobs", 0, (int, bool), 0, 1)
    limit = call.max_tokens or 16  # as OpenAI's
    return replace(call, prompt=prompt, max_tokens=limit, logprobs=bool(logprobs))


_ANTHROPIC = {"messages", "system", "tools", "tool_choice", "stop_sequences", "output_config"}


def read_anthropic(body: Any) -> Call:
    only(body, SAMPLING | IDLE | _ANTHROPIC)
    choice = body.get("tool_choice") or {}
    only(choice, ("type", "name", "disable_parallel_tool_use"), "tool_choice: ")
    output = body.get("output_config") or {}
    only(output, ("format",), "output_config: ")
    tools = body.get("tools") or []
    for tool in tools if isinstance(tools, list) else [None]:
        only(tool, ("type", "name", "description", "input_schema", "strict", "cache_control"), "tools: ")
        if tool.get("type") not in (None, "custom"):
            raise BadQuestion(f"tools: {tool['type']} is not supported here: the agent runs its tools itself")
    messages = []
    if body.get("system"):
        messages.append({"role": "system", "content": body["system"]})
    if not isinstance(body.get("messages"), list):
        raise BadQuestion("messages must be a list of objects with role (user, assistant) and content")
    for message in body["messages"]:
        messages += _from_anthropic(message)
    chat = {name: body[name] for name in SAMPLING & body.keys()}
    kind, form = choice.get("type"), output.get("format")
    chat |= {"messages": messages, "stop": body.get("stop_sequences"), "tool_choice": kind}
    chat["parallel_tool_calls"] = not choice.get("disable_parallel_tool_use")
    if kind == "any":
        chat["tool_choice"] = "required"
    elif kind == "tool":
        chat["tool_choice"] = {"type": "function", "function": {"name": choice.get("name")}}
    if form is not None:
        chat["response_format"] = {**form, "json_schema": form} if isinstance(form, dict) else form
    if messages and messages[-1]["role"] == "assistant":  # which the reply goes on with
        chat |= {"continue_final_message": True, "add_generation_prompt": False}
    if tools:
        chat["tools"] = [
            {
                "type": "function",
                "function": {
                    "name": tool.get("name"),
                    "description": tool.get("description", ""),
                    "parameters": tool.get("input_schema", {}),
                },
            }
            for tool in tools
        ]
    return read_chat(chat)


def _from_anthropic(message: Any) -> list[dict[str, Any]]:
    if not isinstance(message, dict) or message.get("role") not in ("user", "assistant"):
        raise BadQuestion("messages must be a list of objects with role (user, assistant) and content")
    content, role = message.get("content"), message["role"]
    if not isinstance(content, list):
        return [{"role": role, "content": content}]
    texts, calls, answers = [], [], []
    for block in content:
        kind = block.get("type") if isinstance(block, dict) else None
        if kind == "tool_use" and role == "assistant":
            function = {"name": block.get("name"), "arguments": json.dumps(block.get("input") or {})}
            calls.append({"id": block.get("id", ""), "type": "function", "function": function})
        elif kind == "tool_result" and role == "user":
            told = block.get("content") or ""
            answers.append({"role": "tool", "tool_call_id": str(block.get("tool_use_id", "")), "content": told})
        elif kind in ("thinking", "redacted_thinking"):
            continue
        else:
            texts.append(block)
    own = {"role": role, "content": texts or None} | ({"tool_calls": calls} if calls else {})
    return answers + ([own] if texts or calls else [])


def _usage(answer: Answer) -> dict[str, int]:
    count = sum(len(reply.token_ids) for reply in answer.replies)
    return {
        "prompt_tokens": len(answer.prompt_ids),
        "completion_tokens": count,
        "total_tokens": len(answer.prompt_ids) + count,
    }


def _chat_logprobs(reply: Reply) -> dict[str, Any]:
    return {
        "content": [
            {"token": token, "logprob": logprob, "bytes": list(token.encode()), "top_logprobs": []}
            for token, logprob in zip(reply.tokens, reply.logprobs)
        ]
    }


def _chat_message(reply: Reply) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": reply.text or (None if reply.calls else "")}
    message |= {"reasoning_content": reply.thought} if reply.thought else {}
    return message | ({"tool_calls": list(reply.calls)} if reply.calls else {})


def write_chat(name: str, call: Call, answer: Answer) -> dict[str, Any]:
    """Write an answer of ``/v1/chat/completions``; the ids of tokens as vLLM's server does."""
    choices = []
    for index, reply in enumerate(answer.replies):
        choice = {"index": index, "message": _chat_message(reply), "finish_reason": reply.finish_reason}
        choice["logprobs"] = _chat_logprobs(reply) if call.logprobs else None
        choices.append(choice | ({"token_ids": list(reply.token_ids)} if call.token_ids else {}))
    body = {"id": "chatcmpl", "object": "chat.completion", "created": 0, "model": name, "choices": choices}
    ids = {"prompt_token_ids": list(answer.prompt_ids)} if call.token_ids else {}
    return body | {"usage": _usage(answer)} | ids


def event(data: Mapping[str, Any], kind: str = "") -> str:
    return (f"event: {kind}\n" if kind else "") + f"data: {json.dumps(data)}\n\n"


def stream_chat(name: str, call: Call, answer: Answer) -> Iterator[str]:
    """Write the same as events."""
    head = {"id": "chatcmpl", "object": "chat.completion.chunk", "created": 0, "model": name}

    def chunk(index: int, delta: Mapping[str, Any], reason: str | None = None, **more: Any) -> str:
        return event(head | {"choices": [{"index": index, "delta": delta, "finish_reason": reason, **more}]})

    for index, reply in enumerate(answer.replies):
        more: dict[str, Any] = {"logprobs": _chat_logprobs(reply)} if call.logprobs else {}
        more |= {"token_ids": list(reply.token_ids)} if call.token_ids else {}
        thought = {"reasoning_content": reply.thought} if reply.thought else {}
        yield chunk(index, {"role": "assistant", "content": reply.text or "", **thought}, **more)
        for number, one in enumerate(reply.calls):
            yield chunk(index, {"tool_calls": [{"index": number, **one}]})
        yield chunk(index, {}, reply.finish_reason)
    if call.usage_in_stream:
        yield event(head | {"choices": [], "usage": _usage(answer)})
    yield "data: [DONE]\n\n"


def write_completion(name: str, call: Call, answer: Answer) -> dict[str, Any]:
    choices = []
    for index, reply in enumerate(answer.replies):
        choice: dict[str, Any] = {"index": index, "text": reply.text, "finish_reason": reply.finish_reason}
        choice["logprobs"] = None
        if call.logprobs:
            starts = [0, *itertools.accumulate(map(len, reply.tokens))][:-1]
            numbers = {"tokens": list(reply.tokens), "token_logprobs": list(reply.logprobs)}
            choice["logprobs"] = numbers | {"top_logprobs": None, "text_offset": starts}
        if call.token_ids:
            choice |= {"token_ids": list(reply.token_ids), "prompt_token_ids": list(answer.prompt_ids)}
        choices.append(choice)
    head = {"id": "cmpl", "object": "text_completion", "created": 0, "model": name}
    return head | {"choices": choices, "usage": _usage(answer)}


def stream_completion(name: str, call: Call, answer: Answer) -> Iterator[str]:
    """Write the same as events."""
    body = write_completion(name, call, answer)
    usage = body.pop("usage")
    for choice in body.pop("choices"):
        yield event(body | {"choices": [choice]})
    if call.usage_in_stream:
        yield event(body | {"choices": [], "usage": usage})
    yield "data: [DONE]\n\n"


_STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


def write_anthropic(name: str, call: Call, answer: Answer) -> dict[str, Any]:
    (reply,) = answer.replies
    blocks = [{"type": "thinking", "thinking": reply.thought, "signature": ""}] if reply.thought else []
    blocks += [{"type": "text", "text": reply.text}] if reply.text or not reply.calls else []
    for one in reply.calls:
        function = one["function"]
        arguments = json.loads(function["arguments"])
        blocks.append({"type": "tool_use", "id": one["id"], "name": function["name"], "input": arguments})
    head = {"id": "msg", "type": "message", "role": "assistant", "model": name, "content": blocks}
    usage = {"input_tokens": len(answer.prompt_ids), "output_tokens": len(reply.token_ids)}
    reason = {"stop_reason": _STOP_REASONS[reply.finish_reason], "stop_sequence": None}
    if reply.stop:
        reason = {"stop_reason": "stop_sequence", "stop_sequence": reply.stop}
    return head | reason | {"usage": usage}


def stream_anthropic(name: str, call: Call, answer: Answer) -> Iterator[str]:
    """Write the same as events."""
    body = write_anthropic(name, call, answer)
    blocks, usage = body["content"], body["usage"]
    reason = {key: body[key] for key in ("stop_reason", "stop_sequence")}
    begun = body | {"content": [], "stop_reason": None, "usage": usage | {"output_tokens": 0}}
    yield event({"type": "message_start", "message": begun}, "message_start")
    for index, block in enumerate(blocks):
        if (kind := block["type"]) != "tool_use":
            empty, delta = block | {kind: ""}, {"type": f"{kind}_delta", kind: block[kind]}
        else:
            empty = block | {"input": {}}
            delta = {"type": "input_json_delta", "partial_json": json.dumps(block["input"])}
        at = {"index": index}
        yield event({"type": "content_block_start", **at, "content_block": empty}, "content_block_start")
        yield event({"type": "content_block_delta", **at, "delta": delta}, "content_block_delta")
        yield event({"type": "content_block_stop", **at}, "content_block_stop")
    yield event({"type": "message_delta", "delta": reason, "usage": usage}, "message_delta")
    yield event({"type": "message_stop"}, "message_stop")


CHAT = Protocol(read_chat, write_chat, stream_chat)
COMPLETION = Protocol(read_completion, write_completion, stream_completion)
ANTHROPIC = Protocol(read_anthropic, write_anthropic, stream_anthropic)
