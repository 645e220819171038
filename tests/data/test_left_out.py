"""Nothing of a record is dropped without a word: what a template has no place for, and columns that nothing reads."""

import json
from collections import Counter

import pyarrow
import pyarrow.parquet
import pytest
from byte_tokenizers import write_byte_tokenizer
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mindrlhf.data.build import build_prompts
from mindrlhf.data.handlers import Message, RecordError, Row, load_handler
from mindrlhf.data.mindrecord import PromptFile
from mindrlhf.data.templates import load_template
from mindrlhf.data.tokenizers import load_tokenizer

# Renders all that apply_chat_template gives a template.
WHOLE = (
    "{% if tools %}[{{ tools | tojson }}]{% endif %}{% for d in documents or [] %}<{{ d.text }}>{% endfor %}"
    "{% for m in messages %}{{ m.role }}:{{ m.content or '' }}{{ m.reasoning_content or '' }}{{ m.name or '' }}"
    "{{ m.tool_call_id or '' }}{% for c in m.tool_calls or [] %}"
    "({{ c.function.name }} {{ c.function.arguments | tojson }} {{ c.id }} {{ c.type }}){% endfor %}<|im_end|>"
    "{% endfor %}"
)
# Knows the three roles of a chat, and of a message its content.
NARROW = (
    "{% for m in messages %}{% if m.role in ['system', 'user', 'assistant'] %}{{ m.content.split('</think>')[-1] }}"
    "<|im_end|>{% endif %}{% endfor %}"
)
AS_TEXT = (
    "{% for m in messages %}{{ m.content }}{% for c in m.tool_calls or [] %}{{ '(' + c.function.arguments + ')' }}"
    "{% endfor %}<|im_end|>{% endfor %}"
)
CALL = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": {"city": "Rome"}}}
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}


@pytest.fixture(scope="module")
def make_tokenizer(tmp_path_factory):
    def make(template):
        config = {"eos_token": "<|endoftext|>", "chat_template": template}
        return write_byte_tokenizer(tmp_path_factory.mktemp("tokenizer"), ["<|endoftext|>", "<|im_end|>"], **config)

    return make


@pytest.fixture(scope="module")
def tokenizers(make_tokenizer):
    return {"whole": make_tokenizer(WHOLE), "narrow": make_tokenizer(NARROW), "text": make_tokenizer(AS_TEXT)}


@pytest.fixture
def build(tokenizers, tmp_path):
    def build_rows(rows, tokenizer="whole", **options):
        path = tmp_path / "a.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        directory = tokenizers[tokenizer]
        options = {"handler": "verl", "max_prompt_length": 4000, "num_workers": 1} | options
        report = build_prompts([path], tmp_path / "o.mindrecord", directory, **options)
        prompts = PromptFile.open(tmp_path / "o.mindrecord")
        assert prompts.header.look == json.loads(json.dumps(report.header.look))
        decode = load_tokenizer(directory).decode
        return [decode(one.prompt_ids, False) for one in prompts.read(range(len(prompts)))], report.header.look

    return build_rows


def row(messages, **columns):
    return {"prompt": messages, "reward_model": {"ground_truth": "1"}, **columns}


def history(content, **more):
    return [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": content, "tool_calls": [CALL], **more},
        {"role": "tool", "content": "18", "tool_call_id": "c1"},
        {"role": "user", "content": "b"},
    ]


@pytest.mark.parametrize("content", ["Let me look.", "", None])
def test_calls_and_tools_reach_the_template_whole(build, content):
    (prompt,), look = build([row(history(content), tools=[TOOL], documents=[{"text": "d"}])])
    said = (content or "") + '(weather {"city": "Rome"} c1 function)'
    turns = ["user:a", f"assistant:{said}", "tool:18c1", "user:b"]
    assert prompt == f"[{json.dumps([TOOL])}]<d>" + "".join(f"{turn}<|im_end|>" for turn in turns)
    assert "template" not in look and "unread" not in look


def test_arguments_may_be_text_on_either_side(build):
    as_text = {**CALL, "function": {"name": "weather", "arguments": '{"city": "Rome"}'}}
    messages = history(None)
    messages[1]["tool_calls"] = [as_text]
    (prompt,), _ = build([row(messages)])
    assert '(weather {"city": "Rome"} c1 function)' in prompt
    for calls in ([as_text], [CALL]):
        messages[1]["tool_calls"] = calls
        (prompt,), _ = build([row(messages)], "text")
        assert prompt == 'a<|im_end|>({"city": "Rome"})<|im_end|>18<|im_end|>b<|im_end|>'


CALLS = "{% for m in messages %}BODY{% for c in m.tool_calls or [] %}ARGUMENTS{% endfor %}|{% endfor %}"


@pytest.mark.parametrize(
    ("body", "arguments", "prompt"),
    [
        # Null stays null where a template asks for it, whatever form the arguments have.
        ("{{ 'N' if m.content is none else m.content }}", "{{ c.function.arguments.city }}", "a|NRome|18|b|"),
        (
            "{{ 'N' if m.content is none else m.content }}",
            "{{ '+' + c.function.arguments }}",
            'a|N+{"city": "Rome"}|18|b|',
        ),
        # It is empty where the template fails on it, or writes it out.
        ("{{ m.content.strip() }}", "{{ c.function.arguments.city + '!' }}", "a|Rome!|18|b|"),
        ("{{ m.content.strip() }}", "{{ '+' + c.function.arguments }}", 'a|+{"city": "Rome"}|18|b|'),
        ("{{ m.content }}", "{{ c.function.arguments.city }}", "a|Rome|18|b|"),
        # Templates that know parts alone.
        (
            "{% for p in m.content %}{{ p.text }}{% endfor %}",
            "{{ c.function.arguments.city }}",
            "a|Rome|18|b|",
        ),
    ],
)
def test_null_and_arguments_come_in_the_form_that_the_template_takes(make_tokenizer, body, arguments, prompt):
    tokenizer = load_tokenizer(make_tokenizer(CALLS.replace("BODY", body).replace("ARGUMENTS", arguments)))
    example = load_handler("verl")(row(history(None)))
    assert load_template("chat", tokenizer).render(example) == prompt


def test_a_template_that_refuses_calls_says_why_with_its_own_words(make_tokenizer):
    tokenizer = load_tokenizer(
        make_tokenizer("{{ messages[1].content.strip() }}{{ raise_exception('no tools here') }}")
    )
    with pytest.raises(RecordError, match="no tools here"):
        load_template("chat", tokenizer).render(load_handler("verl")(row(history(None))))


def test_what_a_template_leaves_out_is_named_with_counts(build):
    thoughts = [
        {"role": "developer", "content": "Be brief and exact."},
        {"role": "user", "content": "a"},
        {
            "role": "assistant",
            "content": "<think>\na long thought</think>\nyes, it is so\nindeed",
            "reasoning_content": "why it is so",
            "name": "al",
        },
        {"role": "user", "content": "b"},
    ]
    called = history("look")
    called[1]["tool_calls"] = [{**CALL, "function": {"name": "weather_of_a_city", "arguments": {"city": "Rome"}}}]
    called[2]["content"] = "18 degrees, wind"
    plain = [{"role": "system", "content": "s"}, {"role": "user", "content": "b"}]
    rows = [row(called), row(called, tools=[TOOL]), row(thoughts, documents=[{"text": "d"}]), row(plain)]
    prompts, look = build(rows, "narrow")
    assert prompts[2] == "a<|im_end|>\nyes, it is so\nindeed<|im_end|>b<|im_end|>"
    assert look["template"] == {
        "'tool_calls' of messages": 2,
        "messages from 'tool'": 2,
        "thoughts in earlier turns": 1,
        "messages from 'developer'": 1,
        "'reasoning_content' of messages": 1,
    }
    assert look["unread"] == {"tools": 1, "documents": 1}
    _, look = build([row(called, tools=[TOOL]), row(thoughts, documents=[{"text": "a document of 1 é"}])])
    assert "template" not in look


def test_the_commands_system_prompt_takes_the_place_of_the_records_and_says_so(build):
    plain = [{"role": "system", "content": "a long system prompt"}, {"role": "user", "content": "b"}]
    (prompt,), look = build([row(plain)], system="other")
    assert prompt == "system:other<|im_end|>user:b<|im_end|>"
    assert look["template"] == {"messages from 'system'": 1}


def test_unknown_roles_and_variables_that_no_template_reads_are_counted(build):
    messages = [{"role": "critic", "content": "hm"}, {"role": "user", "content": "b"}]
    (prompt,), look = build([row(messages, chat_template_kwargs={"enable_thinking": False})])
    assert prompt == "critic:hm<|im_end|>user:b<|im_end|>"
    assert look["notes"] == {"messages from 'critic', which is no usual role": 1}
    assert look["template"] == {"chat_template_kwargs.enable_thinking": 1}


def test_control_tokens_are_written_apart_in_all_that_a_template_gets(build):
    messages = history("look", reasoning_content="<|im_end|>", name="<|im_end|>")
    messages[1]["tool_calls"] = [
        {**CALL, "function": {"name": "<|im_end|>", "arguments": {"<|im_end|>": "<|im_end|>"}}}
    ]
    (prompt,), _ = build([row(messages, tools=[{"function": {"name": "<|im_end|>"}}])])
    assert prompt.count("<|im_end|>") == 4 and prompt.count("< |im_end|>") == 6


def test_nulls_of_a_table_are_no_fields(tokenizers, tmp_path):
    messages = history(None)
    for message in messages:
        message.setdefault("tool_calls", None)
        message.setdefault("name", None)
    table = pyarrow.Table.from_pylist([row(messages), row([{"role": "user", "content": "b"}])])
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    options = {"handler": "verl", "max_prompt_length": 400, "num_workers": 1}
    report = build_prompts([tmp_path / "a.parquet"], tmp_path / "o.mindrecord", tokenizers["whole"], **options)
    assert report.header.num_kept == 2 and "template" not in report.header.look


def test_a_response_of_calls_is_refused_and_a_tool_may_speak_last():
    chat = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "c", "tool_calls": [CALL]}]
    with pytest.raises(ValueError, match="has 'tool_calls': a response is its text alone"):
        load_handler("ultrafeedback")({"chosen": chat, "rejected": chat})
    example = load_handler("verl")(row(history("look")[:-1]))
    assert example.messages[-1] == Message("tool", "18", more={"tool_call_id": "c1"})


def test_a_row_knows_what_was_read_of_it():
    fields = {"q": "x", "meta": {"answer": "1", "level": 3, "none": None}, "empty": "", "null": None, "other": [1]}
    found = Row(fields)
    load_handler("map_keys", {"question": "q", "answer": "meta.answer"})(found)
    assert found.unread() == ["meta.level", "other"]


NAMES = st.sampled_from(
    ["data_source", "ability", "level", "tools", "documents", "extra_info", "id", "messages", "chat_template_kwargs"]
)
VALUES = st.one_of(
    st.none(),
    st.integers(),
    st.text("ab", max_size=3),
    st.lists(st.integers(), max_size=2),
    st.dictionaries(st.sampled_from(["split", "index"]), st.integers() | st.none(), max_size=2),
    st.lists(
        st.fixed_dictionaries({"text": st.sampled_from(["some long text of a document", "d"])}), min_size=1, max_size=2
    ),
)
ROWS = st.lists(st.dictionaries(NAMES, VALUES, max_size=5), min_size=1, max_size=12)
@settings(max_examples=25, suppress_health_check=list(HealthCheck))
@given(
    rows=ROWS,
    kept=st.sets(st.sampled_from(["level", "id", "extra_info.split"]), max_size=2),
    tokenizer=st.sampled_from(["whole", "narrow"]),
)
def test_every_column_of_any_row_is_accounted_for(tokenizers, tmp_path_factory, rows, kept, tokenizer):
    """A column with a value goes into the prompt, into the kept columns, or into a count."""
    tmp_path = tmp_path_factory.mktemp("rows")
    for one in rows:
        if not isinstance(one.get("chat_template_kwargs"), dict):
            one.pop("chat_template_kwargs", None)
    rows = [row([{"role": "user", "content": f"q{i}"}]) | one for i, one in enumerate(rows)]
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps(one) + "\n" for one in rows))
    columns = {name.rpartition(".")[2]: name for name in kept}
    columns = {name: key for name, key in columns.items() if any(_value(one, key) is not None for one in rows)}
    options = {"handler": "verl", "max_prompt_length": 4000, "num_workers": 1, "columns": columns}
    report = build_prompts([path], tmp_path / "o.mindrecord", tokenizers[tokenizer], **options)
    records = PromptFile.open(report.path).read(range(len(rows)))
    decode = load_tokenizer(tokenizers[tokenizer]).decode
    wanted, unrendered = Counter(), Counter()
    for one, record in zip(rows, records, strict=True):
        prompt = decode(record.prompt_ids, False)
        assert record.extra == {name: _value(one, key) for name, key in columns.items()}
        for name, value in one.items():
            if name in ("prompt", "reward_model") or name in columns.values() or value in (None, "", [], {}):
                continue
            is_list = isinstance(value, list) and all(isinstance(item, dict) for item in value)
            if name in ("tools", "documents") and is_list and tokenizer == "whole":
                assert (json.dumps(value) if name == "tools" else f"<{value[0]['text']}>") in prompt
            elif name == "chat_template_kwargs":
                unrendered.update(f"{name}.{key}" for key, set_to in value.items() if set_to is not None)
            elif name == "extra_info" and "extra_info.split" in columns.values() and isinstance(value, dict):
                wanted.update(f"{name}.index" for _ in range(value.get("index") is not None))
            else:
                wanted[name] += 1
    assert report.header.look.get("unread", {}) == wanted
    assert report.header.look.get("template", {}) == unrendered


def _value(fields, key):
    for part in key.split("."):
        fields = fields.get(part) if isinstance(fields, dict) else None
    return fields
