"""Grammars of replies that have to be JSON or a call: structural tags of xgrammar."""

import json
from collections.abc import Mapping
from typing import Any

from mindrlhf.rollout.agents.protocols import BadQuestion

THOUGHT = "<think>"
_HERMES = ('<tool_call>\n{"name": "NAME", "arguments": ', "}\n</tool_call>", "json_schema")
WHITESPACE = {"max_whitespace_cnt": 2}  # a model that is free to would write spaces to its last token
# Of dialects, in what the arguments of a call stand, and the kind of their structural tag.
CALLS = {
    "hermes": _HERMES,
    "auto": _HERMES,
    "llama3": ('{"name": "NAME", "parameters": ', "}", "json_schema"),
    "qwen3_coder": ("<tool_call>\n<function=NAME>\n", "\n</function>\n</tool_call>", "qwen_xml_parameter"),
}


def grammar_of(form: Mapping[str, Any], dialect: str, *, thinks: bool, may_think: bool) -> str:
    """Return the grammar of a form, as JSON; "" for an empty one.

    Args:
        form: of :class:`mindrlhf.rollout.agents.protocols.Call`.
        dialect: in which the model writes calls.
        thinks: the prompt has begun a thought.
        may_think: the reply may begin with one.

    Raises:
        BadQuestion: no grammar of the dialect is known.
    """
    if not form:
        return ""
    found = {"type": "json_schema", "json_schema": form.get("schema"), **WHITESPACE}
    if functions := form.get("functions"):
        if dialect not in CALLS:
            raise BadQuestion(f"a form of calls is not supported here: no grammar of {dialect} calls is known")
        calls = [_called(function, *CALLS[dialect]) for function in functions]
        found = {"type": "or", "elements": calls}
        if form.get("is_optional"):
            begin = CALLS[dialect][0].partition("NAME")[0]
            found = {"type": "triggered_tags", "triggers": [begin], "tags": calls, "stop_after_first": True}
    thought = {"type": "tag", "begin": "" if thinks else THOUGHT, "content": {"type": "any_text"}, "end": "</think>"}
    behind = {"type": "sequence", "elements": [thought, {"type": "regex", "pattern": r"\s*"}, found]}
    if thinks:
        found = behind
    elif may_think:
        found = {"type": "or", "elements": [found, behind]}
    return json.dumps({"type": "structural_tag", "format": found})


def _called(function: Mapping[str, Any], begin: str, end: str, kind: str) -> dict[str, Any]:
    content = {"type": kind, "json_schema": function.get("parameters") or {"type": "object"}, **WHITESPACE}
    return {"type": "tag", "begin": begin.replace("NAME", function["name"]), "content": content, "end": end}
