"""The three protocols, field by field, against bodies that their references show, and clients' own parsers."""

import json
import urllib.request
from dataclasses import replace

import numpy as np
import pytest
from agent_fakes import TOOL, Engine, prompt, run, spelled, user

from mindrlhf.rollout.agents.protocols import BadQuestion, read_anthropic, read_chat, read_completion

pytestmark = pytest.mark.timeout(180)
CALL = 'hm<tool_call>{"name": "double", "arguments": {"x": 4}}</tool_call>'


def ask(body, path="/chat/completions", reply="yes", headers=None):
    """Return what an agent gets that asks one thing."""
    got = []

    def agent(record, client):
        got.append(client.post(body, path))
        return 1.0

    (completion,) = run(Engine(lambda text: reply), agent, [prompt()])
    return got[0], completion


def events(text):
    """Return the data of a stream's events, in order."""
    return [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]


def test_a_chat_with_a_call():
    (status, answer), _ = ask({"messages": [user("a")], "tools": [TOOL]}, reply=CALL)
    (choice,) = answer["choices"]
    assert status == 200 and answer["object"] == "chat.completion" and choice["finish_reason"] == "tool_calls"
    message = choice["message"]
    (call,) = message["tool_calls"]
    assert message["content"] == "hm" and call["type"] == "function" and call["function"]["name"] == "double"
    assert json.loads(call["function"]["arguments"]) == {"x": 4}
    assert answer["usage"]["completion_tokens"] == len(spelled(CALL)) + 1


@pytest.mark.parametrize("more", [{}, {"tools": [TOOL], "tool_choice": "none"}], ids=["no tools", "tool_choice none"])
def test_without_tools_a_call_is_text(more):
    (_, answer), _ = ask({"messages": [user("a")], **more}, reply=CALL)
    assert answer["choices"][0]["message"] == {"role": "assistant", "content": CALL}
    assert answer["choices"][0]["finish_reason"] == "stop"


def test_a_call_that_cannot_be_read_is_text():
    broken = "<tool_call>{oops}</tool_call>"
    (_, answer), _ = ask({"messages": [user("a")], "tools": [TOOL]}, reply=broken)
    assert answer["choices"][0]["message"]["content"] == broken


def test_a_stream_of_a_chat_puts_together_to_the_same_message():
    body = {"messages": [user("a")], "tools": [TOOL], "stream": True, "stream_options": {"include_usage": True}}
    (_, text), completion = ask(body, reply=CALL)
    *chunks, done = events(text)
    assert done == "[DONE]"
    chunks = [json.loads(chunk) for chunk in chunks]
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks if chunk["choices"]]
    assert "".join(delta.get("content") or "" for delta in deltas) == "hm"
    ((call,),) = [delta["tool_calls"] for delta in deltas if "tool_calls" in delta]
    assert (call["index"], json.loads(call["function"]["arguments"])) == (0, {"x": 4})
    assert chunks[-2]["choices"][0]["finish_reason"] == "tool_calls"
    assert chunks[-1]["usage"]["completion_tokens"] == len(completion.token_ids)


def test_messages_of_anthropic_and_their_stream():
    tool = {"name": "double", "description": "d", "input_schema": {"type": "object", "properties": {}}}
    body = {"model": "m", "max_tokens": 99, "system": "be brief", "messages": [user("a")], "tools": [tool]}
    (status, answer), _ = ask(body, "/messages", reply=CALL)
    assert status == 200 and answer["stop_reason"] == "tool_use" and answer["role"] == "assistant"
    text, use = answer["content"]
    assert text == {"type": "text", "text": "hm"} and use["type"] == "tool_use" and use["input"] == {"x": 4}
    assert answer["usage"]["output_tokens"] == len(spelled(CALL)) + 1
    (_, text), _ = ask({**body, "stream": True}, "/messages", reply=CALL)
    kinds = [json.loads(event)["type"] for event in events(text)]
    block = ["content_block_start", "content_block_delta", "content_block_stop"]
    assert kinds == ["message_start", *block, *block, "message_delta", "message_stop"]
    delta = json.loads(events(text)[5])["delta"]
    assert json.loads(delta["partial_json"]) == {"x": 4}


def test_a_conversation_of_anthropic_is_one_sequence():
    def agent(record, client):
        tool = {"name": "double", "input_schema": {"type": "object", "properties": {}}}
        body = {"max_tokens": 99, "tools": [tool], "messages": [user("start")]}
        _, first = client.post(body, "/messages")
        use = next(block for block in first["content"] if block["type"] == "tool_use")
        result = {"type": "tool_result", "tool_use_id": use["id"], "content": [{"type": "text", "text": "8"}]}
        told = [{"role": "assistant", "content": first["content"]}, {"role": "user", "content": [result]}]
        _, second = client.post({**body, "messages": [user("start"), *told]}, "/messages")
        return second["content"][0]["text"]

    (completion,) = run(Engine(lambda text: "8!" if "tool_response" in text else CALL), agent)
    assert len(completion.agent.sequences) == 1 and completion.agent.text == "8!"


def test_completions_with_log_probabilities_and_a_stream():
    body = {"prompt": "hello", "max_tokens": 2, "logprobs": 1}
    (_, answer), completion = ask(body, "/completions", reply="yes")
    (choice,) = answer["choices"]
    assert choice["finish_reason"] == "length" and choice["text"] == "ye"
    assert choice["logprobs"]["token_logprobs"] == completion.logprobs.tolist()
    assert choice["logprobs"]["tokens"] == ["y", "e"] and choice["logprobs"]["text_offset"] == [0, 1]
    (_, text), _ = ask({**body, "stream": True}, "/completions", reply="yes")
    first, done = events(text)
    assert json.loads(first)["choices"][0]["text"] == "ye" and done == "[DONE]"


CHAT = {"messages": [user("a")]}


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ([], "no JSON object"),
        ({}, "messages must be"),
        ({"messages": [{"role": "owner", "content": "a"}]}, "messages must be"),
        ({"messages": [user([{"type": "image_url", "image_url": {"url": "x"}}])]}, "content must be text"),
        ({"messages": [{"role": "assistant", "tool_calls": [{"function": {}}]}]}, "tool_calls must be"),
        ({**CHAT, "tool_choice": "required"}, "tool_choice is 'required', and tools has no such"),
        ({**CHAT, "tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "f"}}}, "is .f., and"),
        ({**CHAT, "tools": [TOOL], "tool_choice": "any"}, "tool_choice must be"),
        ({**CHAT, "response_format": {"type": "json_schema"}}, "json_schema with a schema"),
        ({**CHAT, "response_format": "json"}, "response_format must be"),
        ({**CHAT, "response_format": {"type": "json_object"}, "logprobs": True}, "logprobs are not supported"),
        ({**CHAT, "n": 65}, "n is 65"),
        ({**CHAT, "n": True}, "n is True"),
        ({**CHAT, "max_tokens": 1.5}, "max_tokens is 1.5"),
        ({**CHAT, "max_completion_tokens": 0}, "max_completion_tokens is 0"),
        ({**CHAT, "temperature": float("nan")}, "temperature is nan"),
        ({**CHAT, "top_logprobs": 5}, "top_logprobs is not supported"),
        ({**CHAT, "frequency_penalty": 0.5}, "frequency_penalty is not supported"),
        ({**CHAT, "stop": [""]}, "stop must be"),
        ({**CHAT, "stop": ["a"] * 17}, "stop must be"),
        ({**CHAT, "chat_template_kwargs": "x"}, "'chat_template_kwargs' must hold"),
    ],
)
def test_what_a_chat_may_not_ask(body, message):
    with pytest.raises(BadQuestion, match=message):
        read_chat(body)


@pytest.mark.parametrize("value", [None, [], "", [1.5], [[1], [2]], {"a": 1}, [True]])
def test_prompts_that_are_none(value):
    with pytest.raises(BadQuestion, match="prompt must be"):
        read_completion({"prompt": value})


@pytest.mark.parametrize(
    "body", [{"messages": [{"role": "system", "content": "a"}]}, {"messages": "a"}, {**CHAT, "tools": ["x"]}, []]
)
def test_messages_of_anthropic_that_are_none(body):
    with pytest.raises(BadQuestion):
        read_anthropic(body)


FUNCTION = {"name": "f", "parameters": {}}
REFUSED = {  # path: fields that would change the reply, beside what it needs
    "/chat/completions": {
        "functions": [FUNCTION], "function_call": {"name": "f"}, "allowed_token_ids": [1], "min_tokens": 5,
        "stop_token_ids": [13], "use_beam_search": True, "length_penalty": 2.0, "grammar": "x", "json_schema": {"a": 1},
        "typical_p": 0.5, "modalities": ["text", "audio"], "skip_special_tokens": False, "logit_bias": {"1": 5},
        "min_p": 0.1, "ignore_eos": True, "guided_regex": "a", "structured_outputs": {"json": {}}, "bad_words": ["a"],
        "reasoning_effort": "high", "verbosity": "low", "prediction": {"type": "content", "content": "a"},
        "web_search_options": {"a": 1}, "audio": {"voice": "a"}, "mirostat": 2, "add_generation_prompt": False,
        "continue_final_message": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        "messages": [{**user("a"), "function_call": {"name": "f"}}], "tools": [{"function": {**FUNCTION, "more": 1}}],
    },
    "/completions": {
        "echo": True, "suffix": "b", "best_of": 4, "tools": [{"function": FUNCTION}], "prompt_logprobs": 1,
        "messages": [user("a")],
    },
    "/messages": {
        "output_config": {"effort": "low"}, "thinking": {"type": "enabled", "budget_tokens": 1024},
        "tools": [{"type": "bash_20250124", "name": "bash"}], "container": "a",
        "tool_choice": {"type": "auto", "more": 1},
        "mcp_servers": [{"name": "a"}], "context_management": {"edits": [1]}, "n": 2, "stop": ["a"],
    },
    "/responses": {
        "previous_response_id": "resp", "background": True, "truncation": "auto", "max_tool_calls": 1, "n": 2,
        "reasoning": {"effort": "low"}, "include": ["message.output_text.logprobs"], "conversation": "a",
        "tools": [{"type": "web_search"}], "text": {"verbosity": "low"}, "input": [{"type": "computer_call"}],
    },
}  # fmt: skip
REFUSED_CASES = [(path, name) for path, fields in REFUSED.items() for name in fields]


def test_fields_that_nothing_here_follows_are_refused_by_name_in_the_clients_form():
    answers = {}

    def agent(record, client):
        for path, name in REFUSED_CASES:
            needed = {"/completions": {"prompt": "a"}, "/responses": {"input": "a"}}.get(path)
            needed = needed or {"messages": [user("a")], "max_tokens": 9}
            body = {**needed, name: REFUSED[path][name]}
            if name == "tool_choice":
                body["tools"] = [{"name": "f", "input_schema": {}}]
            answers[path, name] = client.post(body, path)
        return 1.0

    (completion,) = run(Engine(lambda text: "no"), agent)
    for (path, name), (status, answer) in answers.items():
        assert status == 400 and answer["type"] == "error" and answer["error"]["type"] == "invalid_request_error", name
        said = answer["error"]["message"]
        assert "not supported" in said or "must be" in said or "needs" in said, (path, name, said)
        assert name.rstrip("s") in said or name in ("messages", "tools", "stream_options", "tool_choice"), said
    assert completion.num_turns == 0 and completion.agent.num_refused == len(REFUSED_CASES)


def test_fields_that_ask_for_nothing_are_taken():
    nothing = {
        "logit_bias": {}, "min_p": 0, "min_tokens": 0, "top_logprobs": None, "parallel_tool_calls": True, "user": "me",
        "metadata": {"a": "b"}, "store": False, "service_tier": "auto", "stop_token_ids": [], "modalities": ["text"],
        "response_format": {"type": "text"}, "skip_special_tokens": True, "functions": [], "extra_thing": None,
    }  # fmt: skip
    read_chat({**CHAT, **nothing})
    block = {"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}
    more = {"metadata": {"user_id": "a"}, "thinking": {"type": "disabled"}, "tool_choice": {"type": "auto"}}
    assert read_anthropic({"max_tokens": 5, "system": [block], "messages": [user([block])], **more}).max_tokens == 5


def thinking(text):
    return "<think>\nhm\n</think>\n\nfour" if "and one" not in text else "<think>again</think>five"


@pytest.mark.parametrize("path", ["/chat/completions", "/messages"])
@pytest.mark.parametrize("keeps", ["nothing", "the field", "the text"])
def test_thoughts_are_a_field_and_a_client_that_drops_them_goes_on_with_its_turn(path, keeps):
    told = []

    def agent(record, client):
        body = {"max_tokens": 99, "messages": [user("sum")]}
        _, first = client.post(body, path)
        if path == "/messages":
            thought, text = first["content"]
            told.append((thought["thinking"], text["text"]))
            content = first["content"] if keeps == "the field" else told[0][1]
            turn = {"role": "assistant", "content": content}
        else:
            turn = first["choices"][0]["message"]
            told.append((turn["reasoning_content"], turn["content"]))
            turn = turn if keeps == "the field" else {"role": "assistant", "content": turn["content"]}
        if keeps == "the text":
            turn["content"] = f"<think>{told[0][0]}</think>{told[0][1]}"
        _, text = client.post({**body, "messages": [user("sum"), turn, user("and one")], "stream": True}, path)
        assert '"again"' in text and '"five"' in text and "<think>" not in text
        return 1.0

    (completion,) = run(Engine(thinking), agent)
    assert told == [("hm", "four")] and len(completion.agent.sequences) == 1 and completion.agent.num_rewritten == 0
    assert completion.agent.text == "<think>\nagain\n</think>\n\nfive"


def test_responses_with_a_call_are_one_sequence_streamed_or_not():
    told = []

    def agent(record, client):
        body = {"instructions": "be brief", "tools": [{"type": "function", **TOOL["function"]}]}
        _, first = client.post({**body, "input": "start"}, "/responses")
        call = {"type": "function_call_output", "call_id": first["output"][-1]["call_id"], "output": "8"}
        # As clients tell what was said: without thoughts, with arguments written anew.
        again = [{**one, "arguments": '{"x":4.0}'} if "arguments" in one else one for one in first["output"]]
        asked = [{"role": "user", "content": [{"type": "input_text", "text": "start"}]}, *again[1:], call]
        _, text = client.post({**body, "input": asked, "stream": True}, "/responses")
        told.extend([first, [json.loads(one) for one in events(text)]])
        return 1.0

    think = f"<think>hm</think>{CALL}"
    (completion,) = run(Engine(lambda text: "8!" if "tool_response" in text else think), agent)
    first, streamed = told
    thought, message, call = first["output"]
    assert thought["content"][0]["text"] == "hm" and message["content"][0]["text"] == "hm"
    assert (call["name"], json.loads(call["arguments"])) == ("double", {"x": 4})
    assert first["status"] == "completed" and first["usage"]["output_tokens"] == len(spelled(think)) + 1
    assert [one["sequence_number"] for one in streamed] == [*range(len(streamed))]
    assert streamed[0]["type"] == "response.created" and streamed[-1]["type"] == "response.completed"
    assert streamed[-1]["response"]["output"][0]["content"][0]["text"] == "8!"
    assert "".join(one["delta"] for one in streamed if one["type"].endswith("text.delta")) == "8!"
    assert len(completion.agent.sequences) == 1 and completion.agent.num_rewritten == 0 and completion.num_turns == 2


SCHEMA = {"type": "object", "properties": {"x": {"type": "integer"}}}
OPENAI_FORM = {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}
ANTHROPIC_TOOL = {"name": "double", "input_schema": SCHEMA}
RESPONSES_TOOL = {"type": "function", "name": "double", "parameters": SCHEMA}
OPENAI_TOOL = {"type": "function", "function": {"name": "double", "parameters": SCHEMA}}
NAMED, ANY, AUTO = {"type": "function", "name": "double"}, {"type": "any"}, {"type": "auto"}
FORMS = [
    ("/chat/completions", {"response_format": OPENAI_FORM, "parallel_tool_calls": False}, "schema"),
    ("/messages", {"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}}, "schema"),
    ("/responses", {"text": {"format": {"type": "json_schema", "name": "a", "schema": SCHEMA}}}, "schema"),
    ("/chat/completions", {"tools": [OPENAI_TOOL, TOOL], "tool_choice": {**NAMED, "function": NAMED}}, "call"),
    ("/chat/completions", {"tools": [OPENAI_TOOL], "tool_choice": "required", "parallel_tool_calls": False}, "call"),
    ("/messages", {"tools": [ANTHROPIC_TOOL], "tool_choice": {**ANY, "disable_parallel_tool_use": True}}, "call"),
    ("/messages", {"tools": [ANTHROPIC_TOOL], "tool_choice": {"type": "tool", "name": "double"}}, "call"),
    ("/responses", {"tools": [RESPONSES_TOOL], "tool_choice": NAMED}, "call"),
    ("/chat/completions", {"tools": [OPENAI_TOOL], "parallel_tool_calls": False}, "one call at most"),
    ("/messages", {"tools": [ANTHROPIC_TOOL], "tool_choice": {**AUTO, "disable_parallel_tool_use": True}}, "one"),
]  # fmt: skip


class Masked(Engine):
    """Says of the first tokens of a reply that a grammar has chosen them."""

    def generate(self, requests, sampling):
        for one in super().generate(requests, sampling):
            mask = np.arange(len(one.token_ids)) >= 3 if sampling.grammar else None
            yield one if mask is None else replace(one, is_generated=mask, logprobs=one.logprobs[mask])


@pytest.mark.parametrize(("path", "more", "kind"), FORMS)
def test_forms_reach_the_generator_and_what_a_grammar_has_written_is_not_trained(path, more, kind):
    def agent(record, client):
        body = {"input": "a"} if path == "/responses" else {"messages": [user("a")], "max_tokens": 99}
        status, answer = client.post({**body, **more}, path)
        assert status == 200, answer
        return 1.0

    engine = Masked(lambda text: '{"x": 4}' if kind == "schema" else CALL)
    (completion,) = run(engine, agent)
    ((_, sampling),) = engine.batches
    form = json.loads(sampling.grammar)["format"]
    if kind != "schema":
        assert form["type"] == ("or" if kind == "call" else "triggered_tags")
        (tag, *_) = form.get("elements") or form["tags"]
        assert tag["begin"] == '<tool_call>\n{"name": "double", "arguments": '
        form = tag["content"]
    assert form == {"type": "json_schema", "json_schema": SCHEMA, "max_whitespace_cnt": 2} or more["tools"][-1] is TOOL
    (own,) = completion.agent.sequences  # which begins with the first token that is the model's
    said = spelled(engine.reply(""))
    assert own.prompt_ids[-3:].tolist() == said[:3] and own.token_ids[:-1].tolist() == said[3:]
    assert own.is_generated.all() and len(completion.logprobs) == len(own.token_ids) and completion.num_turns == 1


def test_an_episode_that_a_grammar_wrote_alone_trains_nothing():
    class Forced(Engine):
        def generate(self, requests, sampling):
            for one in super().generate(requests, sampling):
                mask = np.zeros(len(one.token_ids), bool)
                yield replace(one, is_generated=mask, logprobs=one.logprobs[mask]) if sampling.grammar else one

    def agent(record, client):
        client.chat([user("a")], response_format=OPENAI_FORM)
        if record["question"] == "two":
            client.chat([user("b")])

    forced, mixed = run(Forced(lambda text: "{}"), agent, [prompt("one"), prompt("two", 1)])
    assert forced.agent.text == "{}" and forced.num_turns == 1
    assert [len(one.prompt_ids) for one in forced.agent.sequences] == [len(prompt("one").prompt_ids)]  # a placeholder
    (own,) = mixed.agent.sequences
    assert own.token_ids[:-1].tolist() == spelled("{}") and mixed.num_turns == 2


@pytest.mark.parametrize("reason", ["no such thing", ""], ids=["a schema", "an engine of one's own"])
def test_forms_that_cannot_be_followed_are_refused_and_leave_nothing(reason):
    class Refusing(Engine):
        def generate(self, requests, sampling):
            for one in super().generate(requests, sampling):
                yield replace(one, unscored=reason) if sampling.grammar else one

    said = []

    def agent(record, client):
        for _ in range(2):
            said.append(client.post({**CHAT, "response_format": OPENAI_FORM}))
        client.chat([user("a")])
        return 1.0

    (completion,) = run(Refusing(lambda text: "ok"), agent, max_turns=1)
    assert [status for status, _ in said] == [400, 400]
    assert (reason or "this rollout engine") in said[0][1]["error"]["message"]
    assert completion.num_turns == 1 and completion.unscored == ""


def test_a_stop_string_is_named_as_anthropics():
    body = {"max_tokens": 9, "messages": [user("a")], "stop_sequences": ["x", "s"]}
    (_, answer), _ = ask(body, "/messages", "yes")
    assert (answer["stop_reason"], answer["stop_sequence"]) == ("stop_sequence", "s")
    assert answer["content"] == [{"type": "text", "text": "ye"}]


def test_clients_that_list_models_find_one():
    got = []

    def agent(record, client):
        request = urllib.request.Request(f"{client.url}/models", headers={"x-api-key": client.key})
        with urllib.request.urlopen(request, timeout=60) as response:
            got.append(json.load(response))
        return 1.0

    run(Engine(lambda text: "ok"), agent)
    assert [one["id"] for one in got[0]["data"]] == ["policy"]
