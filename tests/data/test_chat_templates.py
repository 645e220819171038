"""Chat templates against transformers' ``apply_chat_template``: each feature that templates of published models use."""

import datetime
import json

import pytest
from byte_tokenizers import byte_backend
from hypothesis import given, settings
from hypothesis import strategies as st

from mindrlhf.commands.vocabulary import template_option
from mindrlhf.data.build import build_prompts
from mindrlhf.data.handlers import Example, Message, RecordError
from mindrlhf.data.mindrecord import PromptFile
from mindrlhf.data.templates import DATE, load_template, record_options
from mindrlhf.data.tokenizers import load_tokenizer
from mindrlhf.errors import UserError

SPECIAL = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", "additional_special_tokens": ["<a>", "<b>"]}
LOOP = "{% for message in messages %}"
TOOLS = [
    {"type": "function", "function": {"name": "add", "description": '<x> & "y" é', "parameters": {"b": 1, "a": []}}}
]
FEATURES = {
    "generation tag": LOOP
    + "{{ message.role }}{% if message.role == 'assistant' %}{% generation %}{{ message.content }}{% endgeneration %}"
    "{% else %}{{ message.content }}{% endif %}{% endfor %}",
    "loop controls": LOOP + "{% if loop.index0 == 1 %}{% continue %}{% endif %}{{ message.content }}"
    "{% if loop.index0 == 2 %}{% break %}{% endif %}{% endfor %}",
    "namespace": "{% set ns = namespace(last=-1) %}" + LOOP + "{% if message.role == 'user' %}"
    "{% set ns.last = loop.index0 %}{% endif %}{% endfor %}{{ ns.last }}{{ messages[ns.last].content }}",
    "macro": "{% macro turn(role, text='none') -%}<{{ role }}>{{ text | trim }}{%- endmacro %}"
    + LOOP
    + "{{ turn(message.role, message.content) }}{% endfor %}{{ turn('assistant') }}",
    "tools": "{% if tools is not none %}{{ tools | tojson }}{{ tools | tojson(indent=2) }}{% for tool in tools %}"
    "{{ tool.function.parameters | tojson(separators=(',', ':'), sort_keys=true) }}{% endfor %}{% endif %}"
    + LOOP
    + "{{ message.content | tojson(ensure_ascii=true) }}{% endfor %}",
    "special tokens": "{{ bos_token + additional_special_tokens | join('|') + pad_token }}{{ unk_token is defined }}"
    "{{ messages[0]['content'] + eos_token }}",
    "date": "{{ strftime_now('%d %b %Y') }}{{ messages[0].content }}",
    "set in one branch": "{% if messages[0].role == 'system' %}{% set system = messages[0].content %}{% endif %}"
    "{{ system }}|{{ messages[-1].content }}",
    "option": "{{ messages[-1].content }}{% if enable_thinking is defined and enable_thinking is false %}<>{% endif %}",
    "strings": LOOP
    + "{{ (message.content.split('</think>') | last).strip('\\n').upper() }}{{ message.content[:3] ~ loop.length }}"
    "{{ message.content is string and message.content is not mapping }}{{ message.name | default('no name', true) }}"
    "{{ message.content.startswith('a') }}{{ message.items() | list | length }}{% endfor %}",
    "white space": "\n  {%- for message in messages %}  \n    {{- message.content }}\n  {% endfor -%}  \n\n",
    "parts": LOOP + "{% if message.content is string %}{{ message.content }}{% else %}{% for part in message.content %}"
    "{% if part.type == 'image' %}<img>{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}{% endfor %}",
    "random choice": "{{ messages[0].content }}{{ 1 if [1, 2, 3] | random in [1, 2, 3] }}",
    "refusal": LOOP + "{% if message.role == 'system' %}{{ raise_exception('no system here') }}{% endif %}"
    "{{ message.content }}{% endfor %}",
    "generation prompt": LOOP + "{{ message.content }}{% endfor %}{{ '>' if add_generation_prompt else '' }}",
}
DIALOGUES = [
    [("user", "What is <1> & 1?")],
    [("system", "Be\nbrief. é"), ("user", " a\n"), ("assistant", "<think>hm</think>\nb"), ("user", "c")],
]


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    path = tmp_path_factory.mktemp("tokenizer")
    byte_backend(["<s>", "</s>", "<pad>", "<a>", "<b>", "<|im_end|>"]).save(str(path / "tokenizer.json"))
    return path


@pytest.fixture
def configure(directory):
    """Write tokenizer_config.json; files of templates that a test puts beside it are taken away again."""

    def write(**more):
        config = {"tokenizer_class": "PreTrainedTokenizerFast", **SPECIAL, **more}
        (directory / "tokenizer_config.json").write_text(json.dumps(config))
        return directory

    yield write
    for path in [*directory.glob("chat_template*"), *directory.glob("*/*.jinja"), *directory.glob("preprocessor*")]:
        path.unlink()


@pytest.fixture
def oracle(monkeypatch):
    """Return transformers' rendering, or the exception that it raises, at the date that ours has."""
    transformers = pytest.importorskip("transformers")

    class Fixed(datetime.datetime):
        @classmethod
        def now(cls, tz=None):
            return cls.fromisoformat(DATE)

    monkeypatch.setattr(transformers.utils.chat_template_utils, "datetime", Fixed)

    def render(directory, chat, **options):
        theirs = transformers.PreTrainedTokenizerFast.from_pretrained(directory)
        try:
            return theirs.apply_chat_template(chat, tokenize=False, add_generation_prompt=True, **options)
        except Exception as error:
            return error

    return render


def _chat(pairs):
    return [{"role": role, "content": content} for role, content in pairs]


def _example(pairs):
    return Example(tuple(Message(*pair) for pair in pairs), "")


@pytest.mark.parametrize("dialogue", DIALOGUES, ids=["plain", "turns"])
@pytest.mark.parametrize("feature", FEATURES)
def test_a_template_gives_the_text_that_transformers_gives(configure, oracle, tmp_path, feature, dialogue):
    source = FEATURES[feature]
    options = {"tools": {"tools": TOOLS}, "option": {"enable_thinking": False}}.get(feature, {})
    directory = configure(chat_template=source)
    expected = oracle(directory, _chat(dialogue), **options)
    (tmp_path / "mine.jinja").write_text(source)
    tokenizer = load_tokenizer(directory)
    for name in ("chat", str(tmp_path / "mine.jinja")):
        template = load_template(name, tokenizer, options=options)
        if isinstance(expected, Exception):
            with pytest.raises(RecordError, match="failed: TemplateError: no system here"):
                template.render(_example(dialogue))
        else:
            assert template.render(_example(dialogue)) == expected


@settings(max_examples=30)
@given(st.lists(st.text(min_size=1), min_size=1, max_size=4), st.dictionaries(st.text(max_size=5), st.text(max_size=5)))
def test_any_text_and_any_option_come_out_as_in_transformers(directory, texts, option):
    transformers = pytest.importorskip("transformers")
    (directory / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", **SPECIAL})
    )
    source = "{{ option | tojson }}" + LOOP + "{{ message.content }}{{ message | tojson }}{% endfor %}"
    path = directory / "any.jinja"
    path.write_text(source)
    pairs = [("user", text) for text in texts]
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(directory)
    expected = theirs.apply_chat_template(
        _chat(pairs), chat_template=source, tokenize=False, add_generation_prompt=True, option=option
    )
    template = load_template(str(path), load_tokenizer(directory), options={"option": option})
    assert template.render(_example(pairs)) == expected


@pytest.mark.parametrize(
    ("files", "entry"),
    [
        ({}, "C{{ messages }}"),
        ({}, [{"name": "default", "template": "D{{ messages }}"}, {"name": "tool_use", "template": "T{{ messages }}"}]),
        ({"chat_template.jinja": "J{{ messages }}"}, "C{{ messages }}"),
        (
            {"chat_template.jinja": "J{{ messages }}", "additional_chat_templates/tool_use.jinja": "A{{ messages }}"},
            None,
        ),
        ({"additional_chat_templates/default.jinja": "A{{ messages }}"}, "C{{ messages }}"),
    ],
    ids=["config", "list of named", "file first", "files of named", "files take the place of the config"],
)
def test_a_template_is_found_where_transformers_finds_it(configure, oracle, files, entry):
    directory = configure(**({} if entry is None else {"chat_template": entry}))
    for name, source in files.items():
        (directory / name).parent.mkdir(exist_ok=True)
        (directory / name).write_text(source.replace("}}", "}}{{ tools }}"))
    chat = DIALOGUES[0]
    for options in ({}, {"tools": TOOLS}) if files else ({},):
        expected = oracle(directory, _chat(chat), **options)
        assert load_template("chat", load_tokenizer(directory), options=options).render(_example(chat)) == expected


def test_named_templates_are_chosen_by_name_and_none_is_guessed(configure):
    directory = configure(chat_template=[{"name": "rag", "template": "R{{ messages }}"}])
    tokenizer = load_tokenizer(directory)
    assert load_template("rag", tokenizer).render(_example(DIALOGUES[0])).startswith("R")
    with pytest.raises(UserError, match="several chat templates and no default: choose template rag"):
        load_template("chat", tokenizer)
    with pytest.raises(UserError, match="no template 'rga': choose from chat, plain, r1, rag, or name"):
        load_template("rga", tokenizer)


def test_a_processors_template_is_used_where_there_is_a_processor(configure):
    directory = configure(chat_template="C{{ messages }}")
    (directory / "chat_template.json").write_text(json.dumps({"chat_template": "P{{ messages }}"}))
    assert load_template("chat", load_tokenizer(directory)).source == "C{{ messages }}"
    (directory / "preprocessor_config.json").write_text("{}")
    assert load_template("chat", load_tokenizer(directory)).source == "P{{ messages }}"


def test_a_date_is_the_same_every_day_unless_it_is_given(configure):
    tokenizer = load_tokenizer(configure(chat_template="{{ strftime_now('%Y-%m-%d %H') }}{{ messages }}"))
    assert load_template("chat", tokenizer).render(_example(DIALOGUES[0])).startswith("2024-07-26 00")
    other = load_template("chat", tokenizer, options={"strftime_now": "2031-02-03T04:05"})
    assert other.render(_example(DIALOGUES[0])).startswith("2031-02-03 04")
    with pytest.raises(UserError, match="strftime_now is 'today': give a date such as 2024-07-26"):
        load_template("chat", tokenizer, options={"strftime_now": "today"})


def test_an_option_that_the_template_does_not_read_is_refused(configure):
    tokenizer = load_tokenizer(configure(chat_template="{{ messages }}{{ enable_thinking }}"))
    with pytest.raises(UserError, match="reads no variable 'enable_thinkin'; it reads enable_thinking"):
        load_template("chat", tokenizer, options={"enable_thinkin": False})
    with pytest.raises(UserError, match="'messages' is no option of a template"):
        load_template("chat", tokenizer, options={"messages": []})


def test_options_are_part_of_the_hash_and_of_the_header(configure, tmp_path):
    directory = configure(chat_template="{{ messages[0].content }}{{ mode }}")
    rows = tmp_path / "rows.jsonl"
    own = [None, {"mode": "own"}, '{"mode": "<|im_end|>"}', {"unread": 1}]
    rows.write_text("".join(json.dumps(_row(number, value)) + "\n" for number, value in enumerate(own)))
    built = {}
    for mode in ("", "slow"):
        options = {"mode": mode} if mode else {}
        path = tmp_path / f"{mode or 'none'}.mindrecord"
        report = build_prompts([rows], path, directory, max_prompt_length=99, template_options=options)
        file = PromptFile.open(path)
        texts = [load_tokenizer(directory).decode(one.prompt_ids, False) for one in file.read(range(4))]
        built[mode] = (file.header.template_options, file.header.template_sha256, texts)
        assert report.num_with_control_tokens == 1
    assert built[""][0] == {} and built["slow"][0] == {"mode": "slow"}
    assert built[""][1] == load_template("chat", load_tokenizer(directory)).sha256 != built["slow"][1]
    assert built[""][2] == ["q0", "q1own", "q2< |im_end|>", "q3"]
    assert built["slow"][2] == ["q0slow", "q1own", "q2< |im_end|>", "q3slow"]


def _row(number, options):
    return {"question": f"q{number}", "answer": f"#### {number}", "chat_template_kwargs": options}


@pytest.mark.parametrize(
    ("value", "expected"),
    [(None, {}), ({}, {}), ({"a": 1, "b": None}, {"a": 1}), ('{"a": [true]}', {"a": [True]}), ("null", {})],
)
def test_what_a_record_sets(value, expected):
    assert record_options({"chat_template_kwargs": value}) == expected


@pytest.mark.parametrize("value", ["{", "[1]", 3, {"messages": []}, {"strftime_now": "x"}, "[" * 100_000])
def test_what_a_record_cannot_set(value):
    with pytest.raises(RecordError, match="field 'chat_template_kwargs' must hold an object of template variables"):
        record_options({"chat_template_kwargs": value})


def test_the_command_takes_json_and_nothing_that_looks_like_it():
    assert template_option("enable_thinking=false") == ("enable_thinking", False)
    assert template_option('effort="a=b"') == ("effort", "a=b")
    for text in ("enable_thinking=False", "effort=high", "=1", "a b=1", "a"):
        with pytest.raises(Exception, match="is not JSON|expected NAME=JSON"):
            template_option(text)


def test_a_template_without_chat_may_read_what_is_given(directory, tmp_path):
    (tmp_path / "mine.jinja").write_text("{{ question }}{{ hint }}")
    tokenizer = load_tokenizer(directory)
    path = str(tmp_path / "mine.jinja")
    assert load_template(path, tokenizer, options={"hint": "!"}).render(_example(DIALOGUES[0])).endswith("1?!")
    with pytest.raises(UserError, match="unknown variable 'hint'"):
        load_template(path, tokenizer)
