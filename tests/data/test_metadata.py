"""What the files of a model's directory say, against transformers' own readings of generated directories."""

import json
import tempfile
from pathlib import Path

import pytest
import tokenizers as hf
from byte_tokenizers import byte_backend
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from slow_tests import RUNS_SLOW_TESTS

from mindrlhf.cli import main
from mindrlhf.data.handlers import Example, Message
from mindrlhf.data.metadata import add_generation, read_metadata
from mindrlhf.data.templates import load_template
from mindrlhf.data.tokenizer_config import end_ids
from mindrlhf.data.tokenizers import load_tokenizer
from mindrlhf.errors import UserError

SPECIAL = ["<s>", "</s>", "<|im_end|>", "<|endoftext|>", "<pad>", "<x>"]
ROWS = 300
MAX_EXAMPLES = 300 if RUNS_SLOW_TESTS else 60
compared = []


def tokenizer_json(adds_bos):
    backend = byte_backend(SPECIAL)
    if adds_bos:
        bos = ("<s>", backend.token_to_id("<s>"))
        backend.post_processor = hf.processors.TemplateProcessing(single="<s> $A", special_tokens=[bos])
    return backend


TOKENS = st.sampled_from([None, *SPECIAL])


@st.composite
def directories(draw):
    """The files of a directory by name, JSON values or texts; "tokenizer.json" says whether it adds bos."""
    files = {"tokenizer.json": draw(st.booleans())}
    kind = draw(st.sampled_from(["PreTrainedTokenizerFast", "LlamaTokenizerFast", "LlamaTokenizer", "Qwen2Tokenizer"]))
    # Classes have tokens of their own, which published files name too.
    config = {"tokenizer_class": kind, "bos_token": draw(TOKENS), "eos_token": draw(TOKENS), "pad_token": draw(TOKENS)}
    config |= {"unk_token": "<x>"}
    for name in ("bos_token", "eos_token"):
        if config[name] and draw(st.booleans()):
            config[name] = {"__type": "AddedToken", "content": config[name], "special": True, "normalized": False}
    if draw(st.booleans()):
        config["add_bos_token"] = draw(st.booleans())
    if draw(st.booleans()):
        ids = range(256, 256 + len(SPECIAL))
        config["added_tokens_decoder"] = {
            str(one): {"content": token, "special": True, "normalized": False, "lstrip": False, "rstrip": False}
            for one, token in zip(ids, SPECIAL)
        }
    named = [{"name": "default", "template": "a"}, {"name": "rag", "template": "b"}]
    template = draw(st.sampled_from([None, "one", named]))
    if template:
        config["chat_template"] = template
    files["tokenizer_config.json"] = config
    if draw(st.booleans()):
        files["special_tokens_map.json"] = {"eos_token": draw(st.sampled_from(SPECIAL))}
    if draw(st.booleans()):
        files["chat_template.jinja"] = "from a file"
        if draw(st.booleans()):
            files["additional_chat_templates/tool_use.jinja"] = "for tools"
    ids = st.none() | st.integers(0, ROWS - 1) | st.lists(st.integers(0, ROWS - 1), min_size=1, max_size=3)
    if draw(st.booleans()):
        files["generation_config.json"] = {"eos_token_id": draw(ids), "temperature": 0.6, "do_sample": True}
    if draw(st.booleans()):
        files["config.json"] = {"model_type": "qwen2", "vocab_size": ROWS, "eos_token_id": draw(ids)}
    return files


def write(directory, files):
    for name, content in files.items():
        path = Path(directory, name)
        path.parent.mkdir(exist_ok=True)
        if name == "tokenizer.json":
            tokenizer_json(content).save(str(path))
        else:
            path.write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")


def as_list(ids):
    return [] if ids is None else ids if isinstance(ids, list) else [ids]


@settings(max_examples=MAX_EXAMPLES)
@given(files=directories())
def test_every_directory_is_read_as_transformers_reads_it(files):
    from transformers import AutoConfig, AutoTokenizer, GenerationConfig

    config = files["tokenizer_config.json"]
    with tempfile.TemporaryDirectory() as directory:
        write(directory, files)
        try:
            reference = AutoTokenizer.from_pretrained(directory)
        except ValueError as error:  # Llama's class wants bos where it is to add it
            assume("add_bos_token = True but bos_token = None" not in str(error))
            raise
        ours = load_tokenizer(directory)
        if reference.eos_token is not None:
            assert ours.eos_token == reference.eos_token
        assert ours.bos_token == reference.bos_token
        if reference.pad_token is not None:
            assert ours.pad_token_id == reference.pad_token_id
        templates = reference.chat_template
        templates = {"default": templates} if isinstance(templates, str) else templates or {}
        assert ours.chat_templates == templates
        ids, (first,) = reference("a").input_ids, reference("a", add_special_tokens=False).input_ids
        assert ours.bos_prefix == reference.decode(ids[: ids.index(first)])
        ends = {reference.eos_token_id} - {None}
        if "generation_config.json" in files:
            ends |= set(as_list(GenerationConfig.from_pretrained(directory).eos_token_id))
        if "config.json" in files:
            ends |= set(as_list(AutoConfig.from_pretrained(directory).eos_token_id))
        named = files.get("special_tokens_map.json", {}).get("eos_token"), config["eos_token"]
        texts = {one["content"] if isinstance(one, dict) else one for one in named} - {None}
        # Beside these the token that a chat model ends a turn with, and an eos that only one of two files names.
        allowed = ends | {reference.convert_tokens_to_ids(one) for one in (*texts, "<|im_end|>")}
        assert ends <= set(ours.eos_token_ids) <= allowed
        compared.append(kind_of(files))


def kind_of(files):
    return files["tokenizer_config.json"]["tokenizer_class"], tuple(sorted(files))


def test_how_many_directories_were_compared():
    print(f"{len(compared)} directories, {len(set(compared))} kinds of them, read as transformers reads them")
    assert len(compared) >= MAX_EXAMPLES and len(set(compared)) > 15


def test_ids_without_a_row_are_left_out_and_others_refused(tmp_path):
    write(tmp_path, {"tokenizer.json": False, "tokenizer_config.json": {"eos_token": "</s>"}})
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": 300, "text_config": {"eos_token_id": [7, 300]}}))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": 9}))
    assert end_ids(tmp_path) == (9, 7)
    assert load_tokenizer(tmp_path).eos_token_ids == (258, 257, 9, 7)
    for wrong in ("2", -1, [1, None], 1.5, True, {"a": 1}):
        (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": wrong}))
        with pytest.raises(UserError, match="generation_config.json has eos_token_id=.*: give the id of a token"):
            load_tokenizer(tmp_path)


def test_an_eos_that_two_files_name_differently_ends_responses_in_both_ways(tmp_path):
    write(tmp_path, {"tokenizer.json": False, "tokenizer_config.json": {"eos_token": "</s>"}})
    (tmp_path / "special_tokens_map.json").write_text(json.dumps({"eos_token": "<x>"}))
    tokenizer = load_tokenizer(tmp_path)
    # Without added_tokens_decoder the older file counts, as in transformers.
    assert (tokenizer.eos_token, set(tokenizer.eos_token_ids)) == ("<x>", {258, 261, 257})


def test_templates_and_special_tokens_count_without_a_tokenizer_config(tmp_path):
    write(tmp_path, {"tokenizer.json": False, "chat_template.jinja": "{{ messages[0].content }}"})
    (tmp_path / "special_tokens_map.json").write_text(json.dumps({"eos_token": "</s>"}))
    tokenizer = load_tokenizer(tmp_path)
    assert (tokenizer.chat_template, tokenizer.eos_token) == ("{{ messages[0].content }}", "</s>")


@pytest.mark.parametrize("adds_bos", [True, False])
@pytest.mark.parametrize("question", ["1+1?", "<s>1+1?"])
@pytest.mark.parametrize("name", ["plain", "r1", "bare.jinja", "begun.jinja"])
def test_plain_prompts_begin_as_the_tokenizer_begins_a_text(tmp_path, name, question, adds_bos, monkeypatch):
    write(tmp_path, {"tokenizer.json": adds_bos, "tokenizer_config.json": {"bos_token": "<s>", "eos_token": "</s>"}})
    (tmp_path / "bare.jinja").write_text("{{ question }} =")
    (tmp_path / "begun.jinja").write_text("{{ bos_token }}{{ question }} =")
    monkeypatch.chdir(tmp_path)
    tokenizer = load_tokenizer(tmp_path)
    text = load_template(name, tokenizer).render(Example((Message("user", question),), "2"))
    if adds_bos:
        assert text.startswith("<s>") and text.count("<s>") == 1 + (name == "r1" and "<s>" in question)
        assert tokenizer.encode(text)[0] == 256
    else:  # what stands there the template or the record has written
        assert text.count("<s>") == (name == "begun.jinja") + ("<s>" in question)


def facts_of(directory):
    return {fact.name: fact for fact in read_metadata(directory)}


MODEL = {
    "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "hidden_size": 64, "intermediate_size": 32,
    "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": ROWS,
    "max_position_embeddings": 64, "eos_token_id": 257, "dtype": "bfloat16",
}  # fmt: skip


def test_each_value_is_shown_with_its_file(tmp_path):
    config = {"bos_token": "<s>", "eos_token": "<|im_end|>", "pad_token": "<pad>"}
    write(tmp_path, {"tokenizer.json": True, "tokenizer_config.json": config, "chat_template.jinja": "{{ messages }}"})
    write(tmp_path, {"config.json": MODEL, "generation_config.json": {"eos_token_id": [258, 259], "temperature": 0.6}})
    facts = facts_of(tmp_path)
    shown = {name: (fact.value, fact.source) for name, fact in facts.items()}
    assert shown["architecture"] == ("Qwen2ForCausalLM", "config.json: architectures")
    assert shown["begin"] == ("'<s>', put before a text: '<s>'", "tokenizer_config.json")
    assert shown["padding"] == ("260 '<pad>'", "tokenizer_config.json")
    assert shown["template"] == ("14 characters", "chat_template.jinja")
    assert facts["end"].value == "258 '<|im_end|>', 259 '<|endoftext|>', 257 '</s>'"
    assert facts["end"].source == "the tokenizer, generation_config.json, config.json, the chat end token"
    named = [note.split("contradiction: ")[1].split("; all of them count")[0] for note in facts["end"].notes]
    assert named == ["generation_config.json does not name 257", "config.json does not name 258, 259"]
    assert [name for name, fact in facts.items() if fact.notes and name != "end"] == []


@pytest.mark.parametrize(
    ("changes", "name", "note"),
    [
        ({"quantization_config": {"quant_method": "gptq"}}, "architecture", "config.json has quantization_config"),
        ({"architectures": ["Other"]}, "architecture", "supported language models are"),
        ({"eos_token_id": 70}, "end", "70 is the ordinary token"),
        ({"eos_token_id": 999}, "end", "config.json names 999, which the model has no row for"),
        ({"vocab_size": 200, "eos_token_id": 7}, "tokenizer", "contradiction: the model has 200 rows"),
    ],
)
def test_contradictions_and_what_is_refused_are_named(tmp_path, changes, name, note):
    config = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
    write(tmp_path, {"tokenizer.json": True, "tokenizer_config.json": config, "config.json": {**MODEL, **changes}})
    assert any(note in one for one in facts_of(tmp_path)[name].notes)


def test_the_command_prints_a_table_or_json(tmp_path, capsys, monkeypatch):
    template = "{% for m in messages %}<|im_start|>{{ m.content }}</s>{% endfor %}<|a|>\n<think>\n{# <arg_key> #}"
    config = {"eos_token": "</s>", "chat_template": template}
    write(tmp_path, {"tokenizer.json": False, "tokenizer_config.json": config, "config.json": MODEL})
    assert main(["models", "inspect", str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert any(line.split()[:2] == ["tokenizer", "262"] for line in lines)
    assert any(line.startswith("generation prompt '<|a|>\\n<think>\\n'") for line in lines)
    assert any(line.split()[:4] == ["calls", "of", "tools", "glm"] for line in lines)
    assert main(["models", "inspect", str(tmp_path), "--json"]) == 0
    found = {one["name"]: one for one in json.loads(capsys.readouterr().out)}
    assert found["architecture"]["value"] == "Qwen2ForCausalLM"
    write(tmp_path, {"tokenizer_config.json": config | {"chat_template": "{{ m"}})
    assert main(["models", "inspect", str(tmp_path)]) == 0
    assert "! refused: template 'chat' cannot be compiled: line 1" in capsys.readouterr().out
    (tmp_path / "empty").mkdir()
    assert [main(["models", "inspect", str(tmp_path / name)]) for name in ("nothing", "empty")] == [2, 2]
    assert all(words in said for said, words in zip(capsys.readouterr().err.splitlines(), ("does not exist", "no tok")))
    broken = "raise ImportError from KeyboardInterrupt()"  # Ctrl-C while an extension in C is imported
    monkeypatch.setattr("mindrlhf.data.metadata.read_metadata", lambda _: exec(broken))
    assert main(["models", "inspect", "."]) == 130 and "models: interrupted" in capsys.readouterr().err


def test_an_exported_model_keeps_the_generation_config_of_the_model_it_was(tmp_path):
    final, model = tmp_path / "final", tmp_path / "model"
    final.mkdir(), model.mkdir()
    base = {"eos_token_id": [7, 8], "temperature": 0.6, "pad_token_id": 1}
    add_generation(final, model)  # neither has one
    write(model, {"generation_config.json": base})
    add_generation(final, model)  # a model that gives scores has none
    assert list(final.iterdir()) == []
    write(final, {"generation_config.json": {"eos_token_id": [9, 7], "pad_token_id": 3}})
    add_generation(final, model)
    found = json.loads((final / "generation_config.json").read_text())
    assert found == {"eos_token_id": [9, 7, 8], "temperature": 0.6, "pad_token_id": 3}
    before = (final / "generation_config.json").stat().st_mtime_ns
    add_generation(final, final)
    assert (final / "generation_config.json").stat().st_mtime_ns == before


ODD = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 2**70) | st.floats(allow_nan=False) | st.text(max_size=3),
    lambda inner: (
        st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from(["a", "content", "name"]), inner, max_size=2)
    ),
    max_leaves=3,
)
ROPE = ["rope_scaling", "rope_parameters", "rope_theta"]
KEYS = {
    "config.json": [*MODEL, *ROPE, "torch_dtype", "sliding_window", "use_sliding_window", "text_config",
                    "quantization_config", "bos_token_id", "pad_token_id", "tie_word_embeddings"],
    "generation_config.json": ["eos_token_id", "pad_token_id", "bos_token_id", "temperature", "top_k"],
    "tokenizer_config.json": ["eos_token", "bos_token", "pad_token", "chat_template", "tokenizer_class", "padding_side",
                              "add_bos_token", "added_tokens_decoder", "additional_special_tokens"],
}  # fmt: skip


@given(data=st.data(), name=st.sampled_from(sorted(KEYS)), value=ODD)
def test_whatever_stands_in_a_file_is_shown_or_refused_in_one_line(data, name, value):
    files = {
        "config.json": MODEL,
        "generation_config.json": {"eos_token_id": 257},
        "tokenizer_config.json": {"eos_token": "</s>", "bos_token": "<s>", "pad_token": "<pad>"},
    }
    files[name] = files[name] | {data.draw(st.sampled_from(KEYS[name])): value}
    with tempfile.TemporaryDirectory() as directory:
        write(directory, {"tokenizer.json": True, **files})
        try:
            facts = read_metadata(directory)
        except UserError as error:
            assert "\n" not in str(error)
        else:
            assert {"architecture", "tokenizer"} <= {fact.name for fact in facts}
            assert all(isinstance(fact.value, str) and "\n" not in "".join(fact.notes) for fact in facts)
