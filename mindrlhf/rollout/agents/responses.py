"""Wire format of OpenAI's responses, for texts and calls of functions; see ``protocols``."""

from collections.abc import Iterator, Mapping
from typing import Any

from mindrlhf.rollout.agents import protocols
from mindrlhf.rollout.agents.protocols import Answer, BadQuestion, Call, Protocol

_FIELDS = {"input", "instructions", "tools", "tool_choice", "max_output_tokens", "text", "parallel_tool_calls"}
_ITEM = {"type", "role", "content", "id", "status", "phase"}
_CALL = {"type", "call_id", "name", "arguments", "id", "status", "namespace", "caller"}
_TEXTS = ("input_text", "output_text", "text")


def read_responses(body: Any) -> Call:
    """Read a body of ``/v1/responses``."""
    protocols.only(body, protocols.SAMPLING | protocols.IDLE | _FIELDS)
    chat = {name: body[name] for name in (protocols.SAMPLING | {"parallel_tool_calls"}) & body.keys()}
    items = [{"role": "user", "content": body["input"]}] if isinstance(body.get("input"), str) else body.get("input")
    messages = [{"role": "system", "content": body["instructions"]}] if body.get("instructions") else []
    for item in items if isinstance(items, list) else [None]:
        _add_item(messages, item)
    chat |= {"messages": messages, "max_tokens": body.get("max_output_tokens")}
    functions = []
    for tool in body.get("tools") or ():
        if not isinstance(tool, dict) or tool.get("type") != "function":
            raise BadQuestion("tools of other types than function are not supported here: the agent runs its tools")
        functions.append({"type": "function", "function": {name: tool[name] for name in tool.keys() - {"type"}}})
    chat |= {"tools": functions} if functions else {}
    choice = body.get("tool_choice")
    if isinstance(choice, dict) and choice.get("type") == "function":
        choice = {"type": "function", "function": {"name": choice.get("name")}}
    text = body.get("text") or {}
    protocols.only(text, ("format",), "text: ")
    form = text.get("format")
    if isinstance(form, dict) and form.get("type") == "json_schema":
        form = {"type": "json_schema", "json_schema": {"schema": form.get("schema")}}
    return protocols.read_chat(chat | {"tool_choice": choice, "response_format": form})


def _add_item(messages: list[dict[str, Any]], item: Any) -> None:
    """Add an item of the input to the messages of a chat; the calls of a turn belong to its message."""
    kind = item.get("type", "message") if isinstance(item, dict) else None
    if kind == "message":
        protocols.only(item, _ITEM, "input: ")
        content = item.get("content")
        if isinstance(content, list):
            parts = [part if isinstance(part, dict) else {} for part in content]
            content = [{**part, "type": "text"} if part.get("type") in _TEXTS else part for part in parts]
        messages.append({"role": item.get("role"), "content": content})
    elif kind == "function_call":
        protocols.only(item, _CALL, "input: ")
        if not messages or messages[-1]["role"] != "assistant":
            messages.append({"role": "assistant", "content": None})
        function = {"name": item.get("name"), "arguments": item.get("arguments", "{}")}
        call = {"id": item.get("call_id", ""), "type": "function", "function": function}
        messages[-1].setdefault("tool_calls", []).append(call)
    elif kind == "function_call_output":
        output = item.get("output")
        messages.append({"role": "tool", "tool_call_id": str(item.get("call_id", "")), "content": output})
        if isinstance(output, list):
            texts = [{"type": "text", "text": part.get("text")} for part in output if isinstance(part, dict)]
            messages[-1]["content"] = texts
    elif kind != "reasoning":  # thoughts are known already
        raise BadQuestion("input must be a text or a list of messages, function_call and function_call_output")


def write_responses(name: str, call: Call, answer: Answer) -> dict[str, Any]:
    """Write an answer of ``/v1/responses``."""
    (reply,) = answer.replies
    output: list[dict[str, Any]] = []
    if reply.thought:
        content = [{"type": "reasoning_text", "text": reply.thought}]
        output.append({"id": "rs", "type": "reasoning", "summary": [], "content": content})
    is_cut = reply.finish_reason == "length"
    status = {"status": "incomplete" if is_cut else "completed"}
    if reply.text or not reply.calls:
        content = [{"type": "output_text", "text": reply.text, "annotations": [], "logprobs": []}]
        output.append({"id": "msg", "type": "message", "role": "assistant", "content": content, **status})
    for one in reply.calls:
        function = {"id": f"fc_{one['id']}", "type": "function_call", "call_id": one["id"], **one["function"], **status}
        output.append(function)
    count = len(reply.token_ids)
    usage = {"input_tokens": len(answer.prompt_ids), "input_tokens_details": {"cached_tokens": 0}}
    usage |= {"output_tokens": count, "output_tokens_details": {"reasoning_tokens": 0}}
    usage["total_tokens"] = len(answer.prompt_ids) + count
    head = {"id": "resp", "object": "response", "created_at": 0, "model": name, "output": output, **status}
    head |= {"error": None, "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None}
    told = {"instructions": None, "metadata": {}, "parallel_tool_calls": True, "tool_choice": "auto", "tools": []}
    return head | told | {"usage": usage}


def stream_responses(name: str, call: Call, answer: Answer) -> Iterator[str]:
    """Write the same as events."""
    whole = write_responses(name, call, answer)
    begun = whole | {"output": [], "status": "in_progress", "usage": None}
    number = 0

    def event(kind: str, **more: Any) -> str:
        nonlocal number
        number += 1
        return protocols.event({"type": f"response.{kind}", "sequence_number": number - 1, **more}, f"response.{kind}")

    yield event("created", response=begun)
    for index, item in enumerate(whole["output"]):
        at: Mapping[str, Any] = {"output_index": index, "item_id": item["id"]}
        yield event("output_item.added", output_index=index, item=item | {"status": "in_progress"})
        if item["type"] == "function_call":
            yield event("function_call_arguments.delta", **at, delta=item["arguments"])
            yield event("function_call_arguments.done", **at, name=item["name"], arguments=item["arguments"])
        else:
            (part,) = item["content"]
            kind, at = part["type"], {**at, "content_index": 0}
            yield event("content_part.added", **at, part=part | {"text": ""})
            yield event(f"{kind}.delta", **at, delta=part["text"], logprobs=[])
            yield event(f"{kind}.done", **at, text=part["text"], logprobs=[])
            yield event("content_part.done", **at, part=part)
        yield event("output_item.done", output_index=index, item=item)
    yield event("incomplete" if whole["status"] == "incomplete" else "completed", response=whole)


RESPONSES = Protocol(read_responses, write_responses, stream_responses)
