"""The text between two turns: that of the chat template, with the values its variables had for the prompt."""

import json
from concurrent.futures import Future

import numpy as np
import pytest
from byte_tokenizers import byte_backend

from mindrlhf.config.reward import ToolSection
from mindrlhf.data.build import build_prompts
from mindrlhf.data.handlers import Message
from mindrlhf.data.mindrecord import PromptFile
from mindrlhf.data.templates import load_template, template_of
from mindrlhf.data.tokenizers import load_tokenizer
from mindrlhf.errors import RunFailure, UserError
from mindrlhf.rollout.conversations import ConversationLimits, Conversations, conversation_template
from mindrlhf.rollout.turn_texts import TurnTexts, next_turn
from mindrlhf.rollout.types import Completion, GenerationRequest, SamplingParams
from mindrlhf.tools.calls import ToolAnswer, answer_turn, observation_turn

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# As in Qwen3: an empty thought stands before an answer that is to have none.
WITH_THOUGHT = CHATML + (
    "{% if add_generation_prompt and enable_thinking is defined and enable_thinking is false %}"
    "<think>\n\n</think>\n\n{% endif %}"
)
# As in Qwen3.5: the generation prompt begins the thought too.
OPEN_THOUGHT = CHATML + (
    "{% if add_generation_prompt %}{% if enable_thinking is defined and enable_thinking is false %}"
    "<think>\n\n</think>\n\n{% else %}<think>\n{% endif %}{% endif %}"
)
# As in Qwen2.5: answers of tools that follow each other share a turn of the user.
WITH_TOOLS = (
    "{% if tools %}<|im_start|>system\n{{ tools | tojson }}<|im_end|>\n{% endif %}"
    "{% for m in messages %}{% if m.role == 'tool' %}"
    "{% if loop.previtem is undefined or loop.previtem.role != 'tool' %}<|im_start|>user{% endif %}"
    "{{ '\n<tool_response>\n' + m.content + '\n</tool_response>' }}"
    "{% if loop.last or loop.nextitem.role != 'tool' %}<|im_end|>\n{% endif %}"
    "{% else %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# As in Llama 2: no role of tools, spaces around contents, and </s> as the end of a turn.
BRACKETS = (
    "{% for m in messages %}{% if m.role == 'user' %}{{ bos_token }}[INST] {{ m.content | trim }} [/INST]"
    "{% elif m.role == 'assistant' %} {{ m.content | trim }} {{ eos_token }}"
    "{% else %}{{ raise_exception('no role ' + m.role) }}{% endif %}{% endfor %}"
)


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    path = tmp_path_factory.mktemp("tokenizer")
    byte_backend(["<s>", "</s>", "<|im_start|>", "<|im_end|>"]).save(str(path / "tokenizer.json"))
    return path


@pytest.fixture
def tokenizer_with(directory):
    def load(template):
        config = {"bos_token": "<s>", "eos_token": "</s>", "chat_template": template}
        (directory / "tokenizer_config.json").write_text(json.dumps(config))
        return load_tokenizer(directory)

    return load


@pytest.fixture
def turns(tokenizer_with):
    def make(source, **options):
        tokenizer = tokenizer_with(source)
        return TurnTexts(tokenizer, load_template("chat", tokenizer, options=options))

    return make


@pytest.mark.parametrize("source", [CHATML, WITH_TOOLS, WITH_THOUGHT])
@pytest.mark.parametrize("texts", [["4"], ["4\n", "<|im_end|> </tool_response> 5"]])
def test_with_qwens_markers_the_template_writes_what_stands_there_without_it(turns, source, texts):
    assert turns(source).answers(texts, {}) == answer_turn(texts, is_chat=True)
    assert turns(source).observation(texts[0], {}) == observation_turn(texts[0], is_chat=True)


def test_the_options_of_the_prompt_hold_for_later_turns(turns):
    thought, plain = "<think>\n\n</think>\n\n", answer_turn(["4"], is_chat=True)
    assert turns(WITH_THOUGHT, enable_thinking=False).answers(["4"], {}) == plain + thought
    assert turns(OPEN_THOUGHT, enable_thinking=False).answers(["4"], {}) == plain + thought
    assert turns(OPEN_THOUGHT).answers(["4"], {}) == plain + "<think>\n"
    assert turns(WITH_THOUGHT).answers(["4"], {"enable_thinking": False}) == plain + thought
    assert turns(WITH_THOUGHT, enable_thinking=False).observation("x", {"enable_thinking": True}) == observation_turn(
        "x", is_chat=True
    )


def test_another_familys_markers_stand_around_the_answers(turns):
    expected = "<s>[INST] <tool_response>\n4\n</tool_response>\n<tool_response>\n5\n</tool_response> [/INST]"
    assert turns(BRACKETS).answers(["4", "5"], {}) == expected
    assert turns(BRACKETS).observation(" up ", {}) == "<s>[INST] up [/INST]"


def test_a_template_that_knows_parts_alone_gets_parts(turns):
    parts = (
        "{% for m in messages %}{{ m.role }}:"
        "{% for p in m.content if p.type == 'text' %}{{ p.text }};{% endfor %}{% endfor %}"
    )
    assert turns(parts).observation("x", {}) == ";user:x;"


def test_a_template_that_leaves_turns_out_is_a_failure_with_its_name(turns):
    last_only = turns("{{ messages[-1].content }}")
    with pytest.raises(RunFailure, match="'chat' leaves the turns of the assistant out"):
        last_only.observation("x", {})


def _build(directory, path, template, **options):
    rows = path.with_suffix(".jsonl")
    rows.write_text(json.dumps({"question": "1+1?", "answer": "#### 2"}) + "\n")
    build_prompts([rows], path, directory, template=template, max_prompt_length=500, template_options=options)
    return PromptFile.open(path)


def test_the_file_of_prompts_says_which_template_and_options(directory, tokenizer_with, tmp_path):
    tokenizer = tokenizer_with(WITH_THOUGHT)
    own = _build(directory, tmp_path / "own.mindrecord", "chat", enable_thinking=False)
    assert (own.header.template_options, own.header.template_source) == ({"enable_thinking": False}, "")
    assert template_of(own.header, tokenizer).source == WITH_THOUGHT
    (tmp_path / "mine.jinja").write_text(BRACKETS)
    custom = _build(directory, tmp_path / "custom.mindrecord", str(tmp_path / "mine.jinja"))
    (tmp_path / "mine.jinja").unlink()
    assert next_turn(template_of(custom.header, tokenizer), [Message("user", "x")]) == "<s>[INST] x [/INST]"
    plain = _build(directory, tmp_path / "plain.mindrecord", "plain")
    assert template_of(plain.header, tokenizer) is None
    section = ToolSection(names=["python"])
    assert conversation_template(section, [own, own], tokenizer).options == {"enable_thinking": False}
    assert conversation_template(ToolSection(), [own, custom], tokenizer) is None
    with pytest.raises(UserError, match=r"own.mindrecord with 'chat' \{'enable_thinking': False\} and .*'mine.jinja'"):
        conversation_template(section, [own, custom], tokenizer)


class Doubler:
    """Tools that double, by whatever dialect the number came."""

    def submit(self, call):
        future = Future()
        future.set_result(ToolAnswer(str(2 * int(call.arguments["x"]))))
        return future


class Turns:
    """A generator of given turns, that keeps what it was asked to go on with."""

    def __init__(self, tokenizer, texts):
        self.tokenizer, self.texts, self.requests = tokenizer, list(texts), []

    def generate(self, requests, sampling):
        for request in requests:
            self.requests.append(request.prompt_ids)
            ids = np.array(self.tokenizer.encode(self.texts.pop(0)), np.int32)
            yield Completion(request.request_id, 0, ids, np.zeros(len(ids), np.float32), "stop", 0)


def test_a_conversation_goes_on_as_the_template_would_have_written_it(tokenizer_with):
    tokenizer = tokenizer_with(WITH_THOUGHT)
    template = load_template("chat", tokenizer)
    call = '<tool_call>\n{"name": "double", "arguments": {"x": 4}}\n</tool_call>'
    generator = Turns(tokenizer, [f"{call}<|im_end|>", "8<|im_end|>"])
    extra = {"chat_template_kwargs": {"enable_thinking": False}}
    request = GenerationRequest(0, tuple(tokenizer.encode("<prompt>")), 1, seed=1, extra=extra)
    conversations = Conversations(generator, Doubler(), tokenizer, ConversationLimits(4, 4, 50), template)
    (completion,) = conversations.generate([request], SamplingParams(500))
    answers = "\n<|im_start|>user\n<tool_response>\n8\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    prompts = [tokenizer.decode(one, skip_special_tokens=False) for one in generator.requests]
    assert prompts == ["<prompt>", f"<prompt>{call}<|im_end|>{answers}<think>\n\n</think>\n\n"]
    assert completion.num_turns == 2 and not completion.is_generated.all()
