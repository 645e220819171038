"""Templates: text equal to transformers' own, and what is refused."""

import sys

import pytest

from mindrlhf.data.handlers import Example, Message, RecordError
from mindrlhf.data.templates import R1_SYSTEM, PromptTemplate, load_template, response_end_id
from mindrlhf.errors import UserError

CHAT_SOURCE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


class StubTokenizer:
    """The part of a tokenizer that templates look at."""

    def __init__(self, chat_template=None, chat_end_token="<|im_end|>", eos_token_ids=(7, 1)):
        self.chat_templates = {} if chat_template is None else {"default": chat_template}
        self.chat_end_token = chat_end_token
        self.turn_end_id, self.eos_token_id = eos_token_ids or (None, None)
        self.eos_token_ids = (*eos_token_ids, 5) if eos_token_ids else ()
        self.special_tokens = {"bos_token": "<s>"}
        self.bos_prefix = ""
        self.eos_token = None


def _question(text="What is 1+1?", system=None):
    messages = [Message("system", system)] if system else []
    return Example((*messages, Message("user", text)), "2")


@pytest.fixture
def jinja_file(tmp_path):
    def write(source):
        path = tmp_path / "mine.jinja"
        path.write_text(source)
        return str(path)

    return write


def test_system_prompt_takes_the_place_of_the_records_own():
    template = load_template("chat", StubTokenizer(CHAT_SOURCE), system="mine")
    expected = "<|im_start|>system\nmine<|im_end|>\n<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\n"
    # Jinja takes away the source's last line break only.
    assert template.render(_question("q", system="theirs")) == expected


def test_plain_is_the_question_and_a_line_break():
    template = load_template("plain", StubTokenizer(CHAT_SOURCE))
    assert template.render(_question(" {{ 1+1 }} <&> ")) == " {{ 1+1 }} <&> \n"
    assert not template.ends_turns


def test_plain_refuses_what_it_would_leave_out():
    with pytest.raises(RecordError, match="takes one question, the record has 2 messages"):
        load_template("plain", StubTokenizer()).render(_question(system="s"))
    with pytest.raises(UserError, match="no place for a system prompt"):
        load_template("plain", StubTokenizer(), system="s")


def test_r1_asks_for_the_tags_in_chat_and_in_plain_text():
    chat = load_template("r1", StubTokenizer(CHAT_SOURCE)).render(_question("q"))
    assert chat.startswith(f"<|im_start|>system\n{R1_SYSTEM}<|im_end|>\n<|im_start|>user\nq<|im_end|>")
    plain = load_template("r1", StubTokenizer()).render(_question("q"))
    assert plain == f"{R1_SYSTEM}\n\nUser: q\n\nAssistant:\n"
    assert all(tag in R1_SYSTEM for tag in ("<think>", "</think>", "<answer>", "</answer>"))
    own_words = load_template("r1", StubTokenizer(), system="Think.").render(_question("q"))
    assert own_words == "Think.\n\nUser: q\n\nAssistant:\n"


def test_custom_file_has_its_variables(jinja_file):
    source = "{{ bos_token }}[{{ eos_token }}]{{ messages|length }}{{ question }}{{ add_generation_prompt }}\n"
    template = load_template(jinja_file(source), StubTokenizer())
    assert template.render(_question("q?")) == "<s>[]1q?True"
    assert template.name == "mine.jinja"


def test_hash_depends_on_source_and_system(jinja_file):
    hashes = {
        load_template("plain", StubTokenizer()).sha256,
        load_template("r1", StubTokenizer()).sha256,
        load_template("r1", StubTokenizer(), system="x").sha256,
        load_template("chat", StubTokenizer(CHAT_SOURCE)).sha256,
        load_template(jinja_file("{{ question }}"), StubTokenizer()).sha256,
    }
    assert len(hashes) == 5
    assert load_template(jinja_file("{{ question }}"), StubTokenizer()).sha256 in hashes


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{% if %}", "line 1: "),
        ("{{ questoin }}{{ question }}", "unknown variable 'questoin'"),
        ("Hello", "uses neither 'messages' nor 'question'"),
    ],
)
def test_faulty_custom_file(jinja_file, source, message):
    with pytest.raises(UserError, match=message):
        load_template(jinja_file(source), StubTokenizer())


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{{ question.__class__.__mro__ }}", "SecurityError"),
        ("{{ messages.append(1) }}", "SecurityError"),
        ("{% for i in range(1000000) %}{{ question }}{% endfor %}", "OverflowError"),
        ("{{ raise_exception('only ' + question) }}", "TemplateError: only q"),
        ("{{ question / 2 }}", "TypeError"),
        ("{{ question if false }}", "gives an empty prompt"),
    ],
)
def test_template_that_fails_makes_a_bad_record(jinja_file, source, message):
    with pytest.raises(RecordError, match=message):
        load_template(jinja_file(source), StubTokenizer()).render(_question("q"))


def test_unknown_names(tmp_path):
    with pytest.raises(UserError, match="no template 'qwen3': choose from chat, plain, r1"):
        load_template("qwen3", StubTokenizer())
    with pytest.raises(UserError, match="needs the chat template of the tokenizer"):
        load_template("chat", StubTokenizer())
    with pytest.raises(UserError, match="cannot read template"):
        (tmp_path / "bad.jinja").write_bytes(b"\xff\xfe\x00")
        load_template(str(tmp_path / "bad.jinja"), StubTokenizer())


def test_response_end():
    chat = load_template("chat", StubTokenizer(CHAT_SOURCE))
    plain = load_template("plain", StubTokenizer())
    assert response_end_id(chat, StubTokenizer()) == 7
    assert response_end_id(plain, StubTokenizer()) == 1
    with pytest.raises(UserError, match="has no end token"):
        response_end_id(plain, StubTokenizer(eos_token_ids=()))


def test_a_template_without_end_is_ended(monkeypatch):
    monkeypatch.setattr("mindrlhf.data.templates._MAX_RENDER_S", 0.1)
    loops = "".join(f"{{% for a{number} in range(99999) %}}" for number in range(4)) + "{% endfor %}" * 4
    template = PromptTemplate("x", "{{ question }}" + loops, None, StubTokenizer())
    tracer = sys.gettrace()
    with pytest.raises(RecordError, match="takes longer than 0 s"):
        template.render(_question())
    assert sys.gettrace() is tracer


@pytest.mark.parametrize("source", ["{{ question * 10 ** 12 }}", "{{ 9**9**9 }}{{ question }}"])
def test_powers_which_may_take_hours_are_refused(source):
    with pytest.raises(UserError, match="cannot be compiled: ValueError: powers"):
        PromptTemplate("x", source, None, StubTokenizer())
