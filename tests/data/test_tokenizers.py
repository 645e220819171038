"""Tokenizers against transformers and SentencePiece themselves."""

import itertools
import json
import os
import shutil
from pathlib import Path

import pytest
import sentencepiece
import tokenizers as hf

from mindrlhf.data.tokenizers import load_tokenizer
from mindrlhf.errors import UserError

CORPUS = ["the cat sat on the mat", "a dog ate 12 bones, 3 more", "how many cats are left?", "naïve café déjà vu"] * 20


@pytest.fixture
def small_directory(tmp_path):
    """A byte-level BPE tokenizer.json of 300 tokens with a chat end token and an eos."""
    backend = hf.Tokenizer(hf.models.BPE())
    backend.pre_tokenizer = hf.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = hf.decoders.ByteLevel()
    trainer = hf.trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=hf.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(CORPUS, trainer)
    backend.save(str(tmp_path / "tokenizer.json"))
    _write_config(tmp_path, eos_token="<|endoftext|>")
    return tmp_path


def _write_config(directory, **config):
    (directory / "tokenizer_config.json").write_text(json.dumps(config))


@pytest.fixture(scope="module")
def sentencepiece_model(tmp_path_factory):
    """A model as Llama 2's: byte pairs of the text as it is."""
    path = tmp_path_factory.mktemp("sp") / "tokenizer.model"
    options = {"model_type": "bpe", "normalization_rule_name": "identity", "remove_extra_whitespaces": False}
    options |= {"vocab_size": 320, "byte_fallback": True, "minloglevel": 2}
    with path.open("wb") as file:
        sentencepiece.SentencePieceTrainer.train(sentence_iterator=iter(CORPUS), model_writer=file, **options)
    return path


def test_a_vocabulary_with_merges_is_qwen2s_as_transformers_has_it(small_directory, tmp_path):
    from transformers import Qwen2TokenizerFast

    directory = tmp_path / "qwen"
    directory.mkdir()
    hf.Tokenizer.from_file(str(small_directory / "tokenizer.json")).model.save(str(directory))
    vocab, merges = directory / "vocab.json", directory / "merges.txt"
    reference = Qwen2TokenizerFast(str(vocab), str(merges))
    tokenizer = load_tokenizer(vocab, merges)
    for text in (
        "",
        "Hello, world!  It's 1,234.5\r\n\n\tdon't WE'LL<|endoftext|>x",
        "<|im_start|>user\nthe cat<|im_end|>\n<|im_start|>assistant\n",
        "e\u0301 ﬁ Å 漢字 かな 한국어 😀👩‍👩‍👧 العربية \u200b\ufeff",
        "\\frac{1}{2}\\boxed{42}",
    ):
        ids = tokenizer.encode(text)
        assert ids == reference.encode(text)
        for skip in (True, False):
            decoded = reference.decode(ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False)
            assert tokenizer.decode(ids, skip_special_tokens=skip) == decoded
    assert tokenizer.eos_token_ids == (reference.eos_token_id,) and tokenizer.chat_template is None
    reference.backend_tokenizer.save(str(directory / "tokenizer.json"))
    assert load_tokenizer(directory).fingerprint == tokenizer.fingerprint, "it is of the ids, not of the files"


@pytest.mark.skipif(not os.environ.get("MINDRLHF_SHARED"), reason="needs MINDRLHF_SHARED")
def test_the_published_tokenizer_of_qwen2_5():
    from transformers import Qwen2TokenizerFast

    directory = Path(os.environ["MINDRLHF_SHARED"], "data", "qwen2.5_tokenizer")
    qwen, reference = load_tokenizer(directory), Qwen2TokenizerFast.from_pretrained(directory)
    text = "<tool_call>{}</tool_call><|fim_pad|> It's 1,234.5\r\n 漢字<|im_end|>"
    assert qwen.encode(text) == reference.encode(text)
    assert qwen.vocab_size == len(reference) == 151665
    assert qwen.eos_token_ids == (151645, 151643)
    assert qwen.pad_token_id == reference.pad_token_id == 151643
    assert (qwen.bos_token, qwen.eos_token) == (None, "<|endoftext|>")
    assert qwen.chat_template == reference.chat_template
    assert qwen.decode([9707, 151900, 0]) == "Hello!"


def test_tokenizer_json_round_trip_and_end_tokens(small_directory):
    tokenizer = load_tokenizer(small_directory)
    assert tokenizer.vocab_size == 300
    assert tokenizer.eos_token_ids == (2, 0)
    assert tokenizer.pad_token_id == 0
    text = "the cat<|im_end|> sat"
    ids = tokenizer.encode(text)
    assert ids.count(2) == 1
    assert tokenizer.decode(ids, skip_special_tokens=False) == text
    assert tokenizer.decode(ids) == "the cat sat"


def test_saved_truncation_padding_and_bos_are_not_applied(small_directory):
    plain = load_tokenizer(small_directory)
    backend = hf.Tokenizer.from_file(str(small_directory / "tokenizer.json"))
    backend.enable_truncation(max_length=3)
    backend.enable_padding(length=50)
    backend.post_processor = hf.processors.TemplateProcessing("<|endoftext|> $A", special_tokens=[("<|endoftext|>", 0)])
    backend.save(str(small_directory / "tokenizer.json"))
    assert len(hf.Tokenizer.from_file(str(small_directory / "tokenizer.json")).encode("the cat sat on").ids) == 50
    tokenizer = load_tokenizer(small_directory)
    assert tokenizer.encode("the cat sat on") == plain.encode("the cat sat on")
    assert tokenizer.decode(tokenizer.encode("the cat sat on the mat")) == "the cat sat on the mat"
    assert tokenizer.fingerprint == plain.fingerprint


def test_fingerprint_sees_vocabulary_merges_and_added_tokens(small_directory):
    first = load_tokenizer(small_directory).fingerprint
    path = small_directory / "tokenizer.json"
    saved = json.loads(path.read_text())

    merges = saved["model"]["merges"]
    swapped = [merges[1], merges[0], *merges[2:]]
    path.write_text(json.dumps({**saved, "model": {**saved["model"], "merges": swapped}}))
    assert load_tokenizer(small_directory).fingerprint != first

    vocab = dict(saved["model"]["vocab"])
    vocab["!"], vocab['"'] = vocab['"'], vocab["!"]
    path.write_text(json.dumps({**saved, "model": {**saved["model"], "vocab": vocab}}))
    assert load_tokenizer(small_directory).fingerprint != first

    path.write_text(json.dumps(saved, indent=3))
    assert load_tokenizer(small_directory).fingerprint == first
    _write_config(small_directory, added_tokens_decoder={"300": {"content": "<new>", "special": True}})
    assert load_tokenizer(small_directory).fingerprint != first


def test_config_adds_tokens_and_names_special_ones(small_directory):
    _write_config(
        small_directory,
        eos_token={"content": "<|im_end|>"},
        pad_token="<pad>",
        chat_template=[{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"}],
        added_tokens_decoder={"300": {"content": "<pad>", "special": True}},
    )
    tokenizer = load_tokenizer(small_directory)
    assert (tokenizer.vocab_size, tokenizer.pad_token_id, tokenizer.eos_token_ids) == (301, 300, (2,))
    assert tokenizer.chat_template == "D"
    (small_directory / "chat_template.jinja").write_text("J")
    assert load_tokenizer(small_directory).chat_template == "J"


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"eos_token": "</s>"}, "names the token '</s>', which is not in the vocabulary"),
        ({"added_tokens_decoder": {"310": {"content": "<new>"}}}, "gives '<new>' the id 310, but it comes out as 300"),
        ({"added_tokens_decoder": {"x": {"content": "<new>"}}}, "must map ids to objects"),
        ({"added_tokens_decoder": ["<new>"]}, "must map ids to objects"),
    ],
)
def test_config_that_does_not_fit_the_vocabulary(small_directory, config, message):
    _write_config(small_directory, **config)
    with pytest.raises(UserError, match=message):
        load_tokenizer(small_directory)


def test_an_id_far_beyond_the_vocabulary_is_refused_before_it_fills_the_memory(small_directory):
    path = small_directory / "tokenizer.json"
    definition = json.loads(path.read_text())
    token = next(iter(definition["model"]["vocab"]))
    definition["model"]["vocab"][token] = 2**31
    path.write_text(json.dumps(definition))
    with pytest.raises(UserError, match=r"the id 2147483648, though it has only \d+ tokens"):
        load_tokenizer(small_directory)


def test_damaged_files_are_one_line_errors(small_directory, tmp_path_factory):
    (small_directory / "tokenizer_config.json").write_text("{")
    with pytest.raises(UserError, match="tokenizer_config.json cannot be read as JSON"):
        load_tokenizer(small_directory)
    (small_directory / "tokenizer_config.json").unlink()
    (small_directory / "tokenizer.json").write_text("{}")
    with pytest.raises(UserError, match="is not a readable tokenizer"):
        load_tokenizer(small_directory)
    other = tmp_path_factory.mktemp("other")
    _write_config(other, tokenizer_class="LlamaTokenizer")
    (other / "tokenizer.model").write_bytes(b"not a model")
    with pytest.raises(UserError, match="no readable tokenizer of class LlamaTokenizer"):
        load_tokenizer(other)
    _write_config(other, tokenizer_class="Qwen2Tokenizer")
    (other / "vocab.json").write_text("[]")
    (other / "merges.txt").write_text("")
    with pytest.raises(UserError, match="no readable tokenizer of class Qwen2Tokenizer"):
        load_tokenizer(other)


def test_a_pattern_on_which_the_library_panics_is_one_line(small_directory):
    path = small_directory / "tokenizer.json"
    saved = json.loads(path.read_text())
    pattern = {"Regex": "(a|aa)+$"}
    saved["pre_tokenizer"] = {"type": "Split", "pattern": pattern, "behavior": "Isolated", "invert": False}
    path.write_text(json.dumps(saved))
    tokenizer = load_tokenizer(small_directory)
    for encode in (tokenizer.encode, lambda text: tokenizer.encode_batch([text, "b"])):
        with pytest.raises(UserError, match="the tokenizer fails on a text: Onig"):
            encode("a" * 40 + "!")


def _tens(pairs):
    return [hf.normalizers.Replace(old, new * 10) for old, new in pairs]


GROWING = {
    "normalizer": [
        _tens(["aa"] * 9),
        _tens(itertools.pairwise("abcdefghij")),
        [hf.normalizers.Sequence(_tens(["aa"] * 5)), hf.normalizers.Sequence(_tens(["aa"] * 4))],
        [*_tens(["aB"]), hf.normalizers.Lowercase(), *_tens(["bA"]), hf.normalizers.Lowercase()] * 3,
        [hf.normalizers.Replace(hf.Regex("(?=x)"), "x")] * 40,
        [hf.normalizers.Replace(hf.Regex("."), "xy")] * 30,
        [hf.normalizers.Prepend("a" * 999), *_tens(["aa"] * 2)],
    ],
    "decoder": [[hf.decoders.Replace("a", "a" * 10)] * 9],
    "post_processor": [["<|im_end|>"] * 99_999],
}


@pytest.mark.parametrize(
    ("part", "steps"), [(part, steps) for part, all_steps in GROWING.items() for steps in all_steps]
)
def test_a_short_text_that_would_become_endless_is_refused_before_it_is_read(small_directory, part, steps):
    backend = hf.Tokenizer.from_file(str(small_directory / "tokenizer.json"))
    if part == "post_processor":
        backend.post_processor = hf.processors.TemplateProcessing([*steps, "$A"], special_tokens=[("<|im_end|>", 2)])
    else:
        setattr(backend, part, getattr(hf, f"{part}s").Sequence(steps))
    backend.save(str(small_directory / "tokenizer.json"))
    with pytest.raises(UserError, match=f"tokenizer.json is not a readable tokenizer: .* {part} "):
        load_tokenizer(small_directory)


def test_the_steps_of_published_normalisers_are_read(small_directory):
    backend = hf.Tokenizer.from_file(str(small_directory / "tokenizer.json"))
    spaces = [hf.normalizers.Replace(" ", "▁"), hf.normalizers.Replace(hf.Regex(" {2,}"), "▁")]
    quotes = [hf.normalizers.Replace("``", '"'), hf.normalizers.NFKC(), hf.normalizers.StripAccents()]
    backend.normalizer = hf.normalizers.Sequence([hf.normalizers.Prepend("▁"), *spaces, *quotes])
    backend.decoder = hf.decoders.Sequence([hf.decoders.Replace("▁", " "), hf.decoders.ByteFallback()])
    backend.save(str(small_directory / "tokenizer.json"))
    assert load_tokenizer(small_directory).encode("b") == backend.encode("b").ids


def test_files_without_a_class_that_transformers_converts_are_refused(tmp_path, sentencepiece_model):
    shutil.copy(sentencepiece_model, tmp_path)
    with pytest.raises(UserError, match="the tokenizer class 'none' .* save the tokenizer as tokenizer.json"):
        load_tokenizer(tmp_path)
    _write_config(tmp_path, tokenizer_class="SomeTokenizer")
    with pytest.raises(UserError, match="the tokenizer class 'SomeTokenizer'"):
        load_tokenizer(tmp_path)


def test_directory_without_tokenizer_lists_what_was_looked_for(tmp_path):
    with pytest.raises(UserError, match=r"looked for tokenizer.json, vocab.json with merges.txt, and tokenizer.model"):
        load_tokenizer(tmp_path)
    with pytest.raises(UserError, match="no tokenizer at"):
        load_tokenizer(tmp_path / "absent")
    with pytest.raises(UserError, match="no such tokenizer file: .*v.json"):
        load_tokenizer(tmp_path / "v.json", tmp_path / "m.txt")


def test_sentencepiece_ids_equal_the_library(sentencepiece_model, tmp_path):
    reference = sentencepiece.SentencePieceProcessor(model_file=str(sentencepiece_model))
    shutil.copy(sentencepiece_model, tmp_path)
    size = reference.get_piece_size()
    added = {"0": "<unk>", "1": "<s>", "2": "</s>", str(size): "<|im_end|>"}
    decoder = {token_id: {"content": token, "special": True} for token_id, token in added.items()}
    names = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    _write_config(tmp_path, tokenizer_class="LlamaTokenizer", added_tokens_decoder=decoder, **names)
    tokenizer = load_tokenizer(tmp_path)
    for text in ["the cat sat", "how  many 12?", "漢字 😀", " a\n b\t"]:
        ids = reference.encode(text)
        assert tokenizer.encode(text) == ids
        assert tokenizer.decode(ids) == reference.decode(ids)
    ids = tokenizer.encode("<s>the cat<|im_end|>")
    assert (ids[0], ids[-1], tokenizer.vocab_size) == (1, size, size + 1)
    assert tokenizer.decode(ids) == "the cat"
    assert tokenizer.eos_token_ids == (size, 2) and tokenizer.bos_prefix == "<s>"
