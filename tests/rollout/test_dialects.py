"""Calls as families' templates write them: read back, answered, and gone on with, against transformers' rendering."""

import json

import pytest
from byte_tokenizers import write_byte_tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st
from test_turn_texts import Doubler, Turns
from transformers.utils.chat_template_utils import render_jinja_template

from mindrlhf.data.templates import load_template
from mindrlhf.data.tokenizers import load_tokenizer
from mindrlhf.rollout.conversations import ConversationLimits, Conversations
from mindrlhf.rollout.turn_texts import TurnTexts
from mindrlhf.rollout.types import GenerationRequest, SamplingParams
from mindrlhf.tools.calls import ToolCall, dialect_of, parse_calls

_CHATML = "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
_CHATML_ANSWER = (
    "{% if loop.previtem.role != 'tool' %}<|im_start|>user{% endif %}\n<tool_response>\n{{ m.content }}\n"
    "</tool_response>{% if loop.last or loop.nextitem.role != 'tool' %}<|im_end|>\n{% endif %}"
)
_CHATML_PROMPT = "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"


def _loop(calls: str, answer: str, other: str, prompt: str, head: str = "") -> str:
    return (
        f"{head}{{% if tools %}}[tools]{{% endif %}}{{% for m in messages %}}{{% if m.tool_calls %}}{calls}"
        f"{{% elif m.role == 'tool' %}}{answer}{{% else %}}{other}{{% endif %}}{{% endfor %}}{prompt}"
    )


HERMES = _loop(
    "<|im_start|>assistant{% for c in m.tool_calls %}{{ '\n' }}<tool_call>\n"
    '{{ {"name": c.function.name, "arguments": c.function.arguments} | tojson }}\n</tool_call>{% endfor %}<|im_end|>\n',
    _CHATML_ANSWER, _CHATML, _CHATML_PROMPT,
)  # fmt: skip
QWEN3_CODER = _loop(
    "<|im_start|>assistant\n{% for c in m.tool_calls %}<tool_call>\n<function={{ c.function.name }}>\n"
    "{% for k, v in c.function.arguments | items %}<parameter={{ k }}>\n"
    "{{ v if v is string else v | tojson }}\n</parameter>\n{% endfor %}</function>\n</tool_call>{% endfor %}"
    "<|im_end|>\n",
    _CHATML_ANSWER, _CHATML, _CHATML_PROMPT,
)  # fmt: skip
# No token closes a turn: the next one opens.
GLM = _loop(
    "<|assistant|>\n<think></think>{% for c in m.tool_calls %}\n<tool_call>{{ c.function.name }}\n"
    "{% for k, v in c.function.arguments | items %}<arg_key>{{ k }}</arg_key>\n"
    "<arg_value>{{ v if v is string else v | tojson }}</arg_value>\n{% endfor %}</tool_call>{% endfor %}",
    "{% if loop.previtem.role != 'tool' %}<|observation|>{% endif %}"
    "{{ '\n' }}<tool_response>\n{{ m.content }}\n</tool_response>",
    "<|{{ m.role }}|>\n{{ m.content }}",
    "{% if add_generation_prompt %}<|assistant|>\n<think>{% endif %}", "[gMASK]<sop>",
)  # fmt: skip
# Arguments are text here, and a turn with calls has none beside them.
DEEPSEEK_R1 = _loop(
    "{% for c in m.tool_calls %}{% if loop.first %}<｜Assistant｜><｜tool▁calls▁begin｜>{% else %}\n{% endif %}"
    "<｜tool▁call▁begin｜>{{ c.type + '<｜tool▁sep｜>' + c.function.name + '\n```json\n' + c.function.arguments }}\n"
    "```<｜tool▁call▁end｜>{% endfor %}<｜tool▁calls▁end｜><｜end▁of▁sentence｜>"
    "{% if m.content is not none %}<｜Assistant｜>{{ m.content }}<｜end▁of▁sentence｜>{% endif %}",
    "{{ '<｜tool▁outputs▁begin｜>' if loop.previtem.role != 'tool' else '\n' }}<｜tool▁output▁begin｜>{{ m.content }}"
    "<｜tool▁output▁end｜>{% if loop.last %}<｜tool▁outputs▁end｜>{% endif %}",
    "{{ '<｜User｜>' + m.content if m.role == 'user' else '<｜Assistant｜>' + m.content + '<｜end▁of▁sentence｜>' }}",
    "{% if add_generation_prompt and messages[-1].role != 'tool' %}<｜Assistant｜><think>\n{% endif %}",
)  # fmt: skip
DEEPSEEK_V31 = _loop(
    "<｜Assistant｜></think>{{ m.content or '' }}<｜tool▁calls▁begin｜>{% for c in m.tool_calls %}<｜tool▁call▁begin｜>"
    "{{ c.function.name + '<｜tool▁sep｜>' + c.function.arguments }}<｜tool▁call▁end｜>{% endfor %}"
    "<｜tool▁calls▁end｜><｜end▁of▁sentence｜>",
    "<｜tool▁output▁begin｜>{{ m.content }}<｜tool▁output▁end｜>",
    "{{ '<｜User｜>' + m.content if m.role == 'user' "
    "else '<｜Assistant｜></think>' + m.content + '<｜end▁of▁sentence｜>' }}",
    "{% if add_generation_prompt and messages[-1].role == 'user' %}<｜Assistant｜></think>{% endif %}",
)  # fmt: skip
MISTRAL = _loop(
    "[TOOL_CALLS] [{% for c in m.tool_calls %}{{ (c.function | tojson)[:-1] }}, \"id\": \"{{ c.id }}\"}"
    "{% if not loop.last %}, {% endif %}{% endfor %}]{{ eos_token }}",
    "{% if m.tool_call_id | length != 9 %}{{ raise_exception('ids have nine characters') }}{% endif %}"
    "[TOOL_RESULTS] {\"content\": {{ m.content }}, \"call_id\": \"{{ m.tool_call_id }}\"}[/TOOL_RESULTS]",
    "{{ '[INST] ' + m.content + ' [/INST]' if m.role == 'user' else m.content + eos_token }}", "", "{{ bos_token }}",
)  # fmt: skip
MISTRAL_V11 = _loop(
    "{% for c in m.tool_calls %}[TOOL_CALLS]{{ c.function.name }}[CALL_ID]{{ c.id }}[ARGS]"
    "{{ c.function.arguments | tojson }}{% endfor %}{{ eos_token }}",
    "[TOOL_RESULTS]{{ m.tool_call_id }}[TOOL_CONTENT]{{ m.content }}[/TOOL_RESULTS]",
    "{{ '[INST]' + m.content + '[/INST]' if m.role == 'user' else m.content + eos_token }}", "", "{{ bos_token }}",
)  # fmt: skip
_LLAMA = "<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n{{ m.content | trim }}<|eot_id|>"
LLAMA3 = _loop(
    "{% if m.tool_calls | length != 1 %}{{ raise_exception('only single tool-calls at once!') }}{% endif %}"
    "{% set c = m.tool_calls[0].function %}<|start_header_id|>assistant<|end_header_id|>\n\n"
    '{"name": "{{ c.name }}", "parameters": {{ c.arguments | tojson }}}<|eot_id|>{# Environment: ipython #}',
    "<|start_header_id|>ipython<|end_header_id|>\n\n{{ m.content | tojson }}<|eot_id|>", _LLAMA,
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}", "{{ bos_token }}",
)  # fmt: skip

# By family: the dialect, the tokens that end a turn, eos first, and whether arguments come as texts.
FAMILIES = {
    "hermes": (HERMES, "hermes", ("<|im_end|>", "<|endoftext|>"), False),
    "qwen3_coder": (QWEN3_CODER, "qwen3_coder", ("<|im_end|>", "<|endoftext|>"), True),
    "glm": (GLM, "glm", ("<|endoftext|>", "<|user|>", "<|observation|>"), True),
    "deepseek_r1": (DEEPSEEK_R1, "deepseek", ("<｜end▁of▁sentence｜>",), False),
    "deepseek_v31": (DEEPSEEK_V31, "deepseek", ("<｜end▁of▁sentence｜>",), False),
    "mistral": (MISTRAL, "mistral", ("</s>",), False),
    "mistral_v11": (MISTRAL_V11, "mistral", ("</s>",), False),
    "llama3": (LLAMA3, "llama3", ("<|eot_id|>", "<|eom_id|>"), False),
}


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory):
    """A tokenizer of bytes for each family, with its template and end tokens where published models have them."""
    found = {}
    for family, (source, _, ends, _) in FAMILIES.items():
        config = {"bos_token": "<s>", "eos_token": ends[0], "chat_template": source}
        path = write_byte_tokenizer(tmp_path_factory.mktemp(family), ["<s>", *ends, "<|im_start|>"], **config)
        ids = list(range(257, 257 + len(ends)))
        (path / "generation_config.json").write_text(json.dumps({"eos_token_id": ids}))
        found[family] = load_tokenizer(path)
    return found


def written(family, calls, answers=None):
    """What the template makes of calls, and of answers behind them, rendered by transformers' own code."""
    source, _, _, _ = FAMILIES[family]
    as_text = family.startswith("deepseek")
    made = [
        {
            "id": f"call{number:05d}",
            "type": "function",
            "function": {"name": name, "arguments": json.dumps(arguments) if as_text else arguments},
        }
        for number, (name, arguments) in enumerate(calls)
    ]
    chat = [{"role": "user", "content": "?"}, {"role": "assistant", "content": None, "tool_calls": made}]
    variables = {"bos_token": "<s>", "eos_token": FAMILIES[family][2][0]}
    if answers is None:
        chats = [(chat[:1], variables), (chat, {**variables, "add_generation_prompt": False})]
    else:
        chat += [
            {"role": "tool", "tool_call_id": f"call{number:05d}", "name": name, "content": text}
            for number, ((name, _), text) in enumerate(zip(calls, answers))
        ]
        chats = [(chat, variables)]
    return [
        render_jinja_template([chat], chat_template=source, **{"add_generation_prompt": True, **more})[0][0]
        for chat, more in chats
    ]


# Marks of the dialects themselves in a value cannot be told from the dialect's own where it is no JSON.
TEXTS = st.text(st.characters(codec="utf-8", exclude_categories=["Cs", "Cc"]), max_size=12) | st.sampled_from(
    ["a\nb", 'say "no"', "x < y", "</tool>", "[1]", "{", "\\n", " spaces ", "ü日本", "<think>", "print('</think>')"]
)
VALUES = TEXTS | st.integers(-99, 99) | st.booleans() | st.none() | st.lists(st.integers(0, 9), max_size=3)
NAMES = st.from_regex(r"[a-z][a-z0-9_]{0,8}", fullmatch=True)
CALLS = st.lists(st.tuples(NAMES, st.dictionaries(NAMES, VALUES, max_size=3)), min_size=1, max_size=3)


def read_back(calls, is_text):
    """As (name, arguments); of dialects of texts each value is its text."""
    return [(one.name, dict(one.arguments)) if isinstance(one, ToolCall) else one for one in calls]


def as_texts(arguments):
    # A template puts a line break around values; those of their own stay.
    return {name: value if isinstance(value, str) else json.dumps(value) for name, value in arguments.items()}


@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=60)
@given(data=st.data())
def test_what_a_template_writes_is_read_and_answered_as_it_would(tokenizers, family, data):
    source, dialect, ends, is_text = FAMILIES[family]
    calls = data.draw(CALLS)[: 1 if family == "llama3" else 3]
    prompt, turn = written(family, calls)
    assert dialect_of(source) == dialect
    # The model sees the prompt, and says the rest up to the token that ends the turn.
    prefix = prompt if turn.startswith(prompt) else turn[: turn.rindex("<think></think>") if family == "glm" else len(
        written(family, [("only", {})])[0].removesuffix("<think>\n")
    )]  # fmt: skip
    said = turn[len(prefix) :].removesuffix("\n" if "im_end" in ends[0] else "")
    expected = [(name, as_texts(arguments) if is_text else arguments) for name, arguments in calls]
    found = parse_calls(said, dialect, prefix)
    assert read_back(found, is_text) == expected
    assert all(one.is_text == is_text for one in found)
    answers = [f"answer {number}" for number in range(len(calls))]
    (whole,) = written(family, calls, answers)
    end = next((one for one in ends if said.endswith(one)), "")
    sampled = said if end else said + "<|observation|>"
    template = load_template("chat", tokenizers[family])
    turns = TurnTexts(tokenizers[family], template)
    names = [name for name, _ in calls]
    inserted = turns.answers(answers, {}, names, end or "<|observation|>")
    assert prefix + sampled + inserted == whole
    # Where a stop string ended the turn, its end token is inserted too.
    assert turns.answers(answers, {}, names, "") == sampled[len(said.removesuffix(end)) :] + inserted


def test_several_calls_of_a_family_that_has_one_at_a_time_are_answered_all_the_same(tokenizers):
    said = '{"name": "a", "parameters": {"x": 1}}; {"name": "b", "parameters": {"y": "z"}}<|eot_id|>'
    assert parse_calls(said, "llama3") == [ToolCall("a", {"x": 1}), ToolCall("b", {"y": "z"})]
    turns = TurnTexts(tokenizers["llama3"], load_template("chat", tokenizers["llama3"]))
    header = "<|start_header_id|>{}<|end_header_id|>\n\n"
    ipython, assistant = header.format("ipython"), header.format("assistant")
    expected = f'{ipython}"1"<|eot_id|>{ipython}"2"<|eot_id|>{assistant}'
    assert turns.answers(["1", "2"], {}, ["a", "b"], "<|eot_id|>") == expected


@pytest.mark.parametrize("family", FAMILIES)
def test_a_conversation_in_each_dialect_keeps_every_token_and_opens_thoughts_again(tokenizers, family):
    tokenizer = tokenizers[family]
    _, dialect, ends, _ = FAMILIES[family]
    prompt, turn = written(family, [("double", {"x": 4})])
    (whole,) = written(family, [("double", {"x": 4})], ["8"])
    begin = prompt if turn.startswith(prompt) else prompt.removesuffix("<think>\n").removesuffix("<think>")
    said = turn[len(begin) :].removesuffix("\n" if "im_end" in ends[0] else "") + "<|observation|>" * (family == "glm")
    generator = Turns(tokenizer, [said, f"8{ends[0]}"])
    conversations = Conversations(
        generator, Doubler(), tokenizer, ConversationLimits(4, 4, 50), load_template("chat", tokenizer)
    )
    request = GenerationRequest(0, tuple(tokenizer.encode(begin)), 1, seed=1)
    (completion,) = conversations.generate([request], SamplingParams(900))
    assert (completion.num_tool_calls, completion.num_tool_failures, completion.num_turns) == (1, 0, 2)
    first, second = generator.requests
    assert second[: len(first)] == first
    assert list(second[len(first) :][: len(tokenizer.encode(said))]) == tokenizer.encode(said)
    assert tokenizer.decode(second, skip_special_tokens=False) == whole


@pytest.mark.parametrize("family", FAMILIES)
def test_calls_in_thoughts_are_none(family):
    _, dialect, _, _ = FAMILIES[family]
    _, turn = written(family, [("double", {"x": 4})])
    _, bare = written(family, [("double", {"x": 5})])
    starts = {"llama3": '{"name"', "mistral": "[TOOL_CALLS]", "deepseek": "<｜tool▁calls▁begin｜>"}
    call, other = (text[text.index(starts.get(dialect, "<tool_call>")) :] for text in (turn, bare))
    assert parse_calls(f"<think>perhaps\n{call}\n</think>so", dialect) == []
    assert parse_calls(f"<think>never closed\n{call}", dialect) == []
    assert parse_calls(
        f"perhaps\n{call}\n</think>\n{other}", dialect, "<|im_start|>assistant\n<think>\n"
    ) == parse_calls(other, dialect)
    assert parse_calls(f"perhaps\n{call}", dialect, "<|im_start|>assistant\n<think>\n") == []
    assert len(parse_calls(other, dialect)) == 1
