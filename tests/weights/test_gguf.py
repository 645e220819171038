"""GGUF files, written with the package `gguf`, against numbers by hand, SentencePiece, tokenizers and transformers."""

import json
import os
import struct
import subprocess
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file
from slow_tests import SLOW
from tiny_models import tiny_model

from mindrlhf.cli import main
from mindrlhf.data.tokenizers import QWEN2_SPLIT, load_tokenizer
from mindrlhf.errors import UserError
from mindrlhf.specs import find_spec
from mindrlhf.weights.convert import random_hf_weights
from mindrlhf.weights.gguf_file import GgufFile
from mindrlhf.weights.gguf_model import convert_gguf

gguf = pytest.importorskip("gguf", reason="the package gguf is not there")

CONFIG = tiny_model(
    "llama", hidden_size=64, intermediate_size=96,
    num_hidden_layers=2, head_dim=16, vocab_size=320, max_position_embeddings=128, rms_norm_eps=1e-05,
    rope_theta=500000.0, tie_word_embeddings=True, initializer_range=0.3,
)  # fmt: skip
QWEN3 = {**CONFIG, "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "tie_word_embeddings": False}
QWEN2 = tiny_model(base=CONFIG)
GEMMA3 = tiny_model(
    "gemma3_text", CONFIG, head_dim=16, sliding_window=24, sliding_window_pattern=6, query_pre_attn_scalar=16
)
del GEMMA3["rope_local_base_freq"]  # which a GGUF file has no name for
PARTS = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
TEXT = "Anna has 14 marbles and finds 7 more. How many has she? 14 + 7 = 21.\nShe says: 'they're mine' 1234567 times.  "
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


def ggml_name(name: str, architecture: str = "llama") -> str:
    if not name.startswith("model.layers."):
        return {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight"}.get(
            name, "output.weight"
        )
    layer, part = name.removeprefix("model.layers.").split(".", 1)
    part, _, kind = part.rpartition(".")
    if architecture == "gemma3":
        renamed = {"post_attention_layernorm": "post_attention_norm", "pre_feedforward_layernorm": "ffn_norm"}
        part_of = {**PARTS, **renamed, "post_feedforward_layernorm": "post_ffw_norm"}
        return f"blk.{layer}.{part_of[part]}.{kind}"
    return f"blk.{layer}.{PARTS[part]}.{kind}"


def weights(config: dict) -> dict[str, np.ndarray]:
    return dict(random_hf_weights(config, 3))


def turned(array: np.ndarray, num_heads: int) -> np.ndarray:
    """llama.cpp's order of the rows of one head: channel 0, channel half, channel 1, ..."""
    size = len(array) // num_heads
    order = [
        head * size + channel + half * size // 2
        for head in range(num_heads)
        for channel in range(size // 2)
        for half in (0, 1)
    ]
    return array[order]


def byte_level(pre: str) -> tokenizers.Tokenizer:
    """A small tokenizer, trained on a few words with the pre-tokenizer of that name."""
    splits = {"qwen2": QWEN2_SPLIT, "llama-bpe": QWEN2_SPLIT.replace(r"|\p{N}|", r"|\p{N}{1,3}|")}
    made = tokenizers.Tokenizer(tokenizers.models.BPE(ignore_merges=pre == "llama-bpe"))
    parts = [tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pre not in splits)]
    if pre in splits:
        parts.insert(0, tokenizers.pre_tokenizers.Split(tokenizers.Regex(splits[pre]), behavior="isolated"))
    if pre == "smollm":
        parts.insert(0, tokenizers.pre_tokenizers.Digits(individual_digits=True))
    if pre == "qwen2":
        made.normalizer = tokenizers.normalizers.NFC()
    made.pre_tokenizer = tokenizers.pre_tokenizers.Sequence(parts)
    made.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=CONFIG["vocab_size"], special_tokens=SPECIAL, initial_alphabet=sorted(alphabet), show_progress=False
    )
    made.train_from_iterator([TEXT * 3, " 123  4567 the there then"], trainer)
    return made


def put_byte_level(writer, made: tokenizers.Tokenizer, pre: str) -> None:
    model = json.loads(made.to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].get)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types([3 if token in SPECIAL else 1 for token in tokens])
    writer.add_token_merges([" ".join(merge) for merge in model["merges"]])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(0)
    writer.add_add_bos_token(False)
    writer.add_chat_template(TEMPLATE)


def write_gguf(
    path, config=CONFIG, kinds=lambda name: "F32", pre="smollm", change=lambda writer: None, tensors=None, **metadata
):
    """Write a model as llama.cpp's converter does, and return its tensors by Hugging Face name."""
    architecture = config["model_type"].removesuffix("_text")
    writer = gguf.GGUFWriter(str(path), architecture)
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_rope_dimension_count(config["head_dim"])
    if architecture == "gemma3":
        writer.add_sliding_window(config["sliding_window"])
    for name, value in metadata.items():
        getattr(writer, name)(value)
    if isinstance(pre, str):
        put_byte_level(writer, byte_level(pre), pre)
    else:
        pre(writer)
    change(writer)
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    made = weights(config) if tensors is None else tensors
    for name, array in made.items():
        target = ggml_name(name, architecture)
        if architecture == "gemma3" and name.endswith("norm.weight"):
            array = array + np.float32(1)
        part = target.split(".")[2] if target.startswith("blk.") else ""
        if architecture == "llama" and part in heads:
            array = turned(array, heads[part])
        kind = gguf.GGMLQuantizationType[kinds(target) if array.ndim > 1 else "F32"]
        writer.add_tensor(target, gguf.quantize(array, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return made


def read_directory(directory) -> dict[str, np.ndarray]:
    return load_file(Path(directory) / "model.safetensors")


@pytest.mark.parametrize("config", [CONFIG, QWEN2, QWEN3, GEMMA3], ids=["llama", "qwen2", "qwen3", "gemma3"])
def test_numbers_that_are_stored_come_back_under_their_names_in_their_order(tmp_path, config, capsys):
    expected = write_gguf(tmp_path / "model.gguf", config, pre="qwen2")
    assert main(["weights", "convert", str(tmp_path / "model.gguf"), "--output", str(tmp_path / "hf")]) == 0
    assert capsys.readouterr().out == f"wrote {tmp_path / 'hf'}\n"
    found = read_directory(tmp_path / "hf")
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        if config is GEMMA3 and name.endswith("norm.weight"):  # 1 + weight is what the file holds
            np.testing.assert_allclose(found[name], array, rtol=0, atol=1e-7, err_msg=name)
        else:
            np.testing.assert_array_equal(found[name], array, err_msg=name)
    written = json.loads((tmp_path / "hf" / "config.json").read_text())
    keys = set(config) - {"initializer_range"}
    assert {key: written[key] for key in keys} == {key: config[key] for key in keys}
    assert (written["bos_token_id"], written["eos_token_id"], written["torch_dtype"]) == (1, 2, "float32")
    assert main(["weights", "inspect", str(tmp_path / "hf")]) == 0


def blocks_by_hand(kind: str, array: np.ndarray) -> np.ndarray:
    """What the bytes of a quantised matrix mean: block after block of 32 numbers, in float64."""
    raw = gguf.quantize(array, gguf.GGMLQuantizationType[kind]).tobytes()
    numbers = []
    if kind == "Q8_0":  # a half, 32 signed bytes
        for start in range(0, len(raw), 34):
            (scale,) = struct.unpack_from("<e", raw, start)
            numbers += [scale * one for one in struct.unpack_from("<32b", raw, start + 2)]
    elif kind == "Q4_0":  # a half, the low and then the high halves of 16 bytes
        for start in range(0, len(raw), 18):
            (scale,) = struct.unpack_from("<e", raw, start)
            codes = raw[start + 2 : start + 18]
            numbers += [scale * ((one & 15) - 8) for one in codes] + [scale * ((one >> 4) - 8) for one in codes]
    else:  # Q4_1: two halves
        for start in range(0, len(raw), 20):
            scale, least = struct.unpack_from("<2e", raw, start)
            codes = raw[start + 4 : start + 20]
            numbers += [scale * (one & 15) + least for one in codes] + [scale * (one >> 4) + least for one in codes]
    return np.array(numbers).reshape(array.shape)


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "Q4_1"])
def test_quantised_numbers_are_those_of_their_blocks(tmp_path, kind):
    original = write_gguf(tmp_path / "model.gguf", kinds=lambda name: kind)
    convert_gguf(tmp_path / "model.gguf", tmp_path / "hf")
    found = read_directory(tmp_path / "hf")
    for name, array in original.items():
        assert found[name].dtype == np.float32
        if array.ndim > 1:
            # Rows are quantised each for itself, so their order does not matter to their numbers.
            np.testing.assert_allclose(found[name], blocks_by_hand(kind, array), rtol=1e-6, atol=1e-7, err_msg=name)
            assert 0 < np.abs(found[name] - array).max() < 0.3, name
        else:
            np.testing.assert_array_equal(found[name], array)


@pytest.mark.parametrize("kind, dtype", [("F16", "float16"), ("BF16", "bfloat16")])
def test_halves_stay_halves_and_dtype_makes_others(tmp_path, kind, dtype):
    original = write_gguf(tmp_path / "model.gguf", kinds=lambda name: kind)
    convert_gguf(tmp_path / "model.gguf", tmp_path / "hf")
    assert json.loads((tmp_path / "hf" / "config.json").read_text())["torch_dtype"] == dtype
    convert_gguf(tmp_path / "model.gguf", tmp_path / "wide", dtype="float32")
    for name, array in read_directory(tmp_path / "wide").items():
        np.testing.assert_allclose(array, original[name], rtol=2.0**-8 if kind == "BF16" else 2.0**-10, atol=1e-7)


TEXTS = st.text(st.sampled_from("ab eht 0123456789\n'+=.é漢<|>_▁\t") | st.characters(codec="utf-8"), max_size=40)


@pytest.mark.parametrize("pre", ["smollm", "llama-bpe", "qwen2", "gpt-2"])
def test_the_tokenizer_is_the_original_one(tmp_path_factory, pre):
    directory = tmp_path_factory.mktemp("tokenizer")
    original = byte_level(pre)
    write_gguf(directory / "model.gguf", pre=pre)
    convert_gguf(directory / "model.gguf", directory / "hf")
    found = load_tokenizer(directory / "hf")
    assert (found.bos_token, found.eos_token, found.pad_token_id) == ("<|im_start|>", "<|im_end|>", 0)
    assert found.chat_template == TEMPLATE and found.control_tokens == set(SPECIAL)
    assert json.loads((directory / "hf" / "generation_config.json").read_text())["eos_token_id"] == [2]

    @given(TEXTS)
    def check(text):
        assert found.encode(text) == original.encode(text, add_special_tokens=False).ids
        assert pre == "qwen2" or found.decode(found.encode(text)) == text

    check()
    assert found.encode("a<|im_end|>7") == original.encode("a<|im_end|>7").ids


def test_sentence_pieces_are_merged_as_sentencepiece_merges_them(tmp_path_factory):
    sentencepiece = pytest.importorskip("sentencepiece")
    directory = tmp_path_factory.mktemp("pieces")
    (directory / "text.txt").write_text("\n".join(TEXT.replace("21", str(i)) for i in range(40)))
    sentencepiece.SentencePieceTrainer.train(
        input=str(directory / "text.txt"), model_prefix=str(directory / "spm"), vocab_size=320, model_type="bpe",
        byte_fallback=True, normalization_rule_name="identity", remove_extra_whitespaces=False, minloglevel=2,
        allow_whitespace_only_pieces=True,
    )  # fmt: skip
    original = sentencepiece.SentencePieceProcessor(model_file=str(directory / "spm.model"))

    def put(writer):
        size = original.get_piece_size()
        kinds = [
            3 if original.is_control(i) else 2 if original.is_unknown(i) else 6 if original.is_byte(i) else 1
            for i in range(size)
        ]
        writer.add_tokenizer_model("llama")
        writer.add_token_list([original.id_to_piece(i) for i in range(size)])
        writer.add_token_scores([original.get_score(i) for i in range(size)])
        writer.add_token_types(kinds)
        writer.add_bos_token_id(original.bos_id())
        writer.add_eos_token_id(original.eos_id())
        writer.add_unk_token_id(original.unk_id())

    write_gguf(directory / "model.gguf", pre=put)
    convert_gguf(directory / "model.gguf", directory / "hf")
    found = load_tokenizer(directory / "hf")
    assert len(found.encode(TEXT)) < 0.7 * len(TEXT)
    # transformers puts the bos token before a text, as Llama 2's own files have it do.
    plain = tokenizers.Tokenizer.from_file(str(directory / "hf" / "tokenizer.json"))
    assert plain.encode("a").ids[0] == original.bos_id()

    @given(TEXTS.filter(lambda text: text and "<" not in text and "\0" not in text))
    def check(text):
        assert found.encode(text) == original.encode(text)
        assert found.decode(found.encode(text)) == text.replace("▁", " ")

    check()


def divisors(theta=5e5, size=16, factor=32.0, low=1.0, high=4.0, length=8192) -> np.ndarray:
    """llama.cpp's rope_freqs of Llama 3.1: by wavelength, channel after channel."""
    found = []
    for channel in range(0, size, 2):
        wavelength = 2 * np.pi * theta ** (channel / size)
        if wavelength < length / high:
            found.append(1.0)
        elif wavelength > length / low:
            found.append(factor)
        else:
            smooth = (length / wavelength - low) / (high - low)
            found.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(found, np.float32)


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_llama_3_s_extension_is_told_by_its_divisors(tmp_path, factor):
    found = divisors(factor=factor)
    assert 1.0 in found and factor in found and len(set(found.tolist())) > 2
    write_gguf(tmp_path / "model.gguf", change=lambda writer: writer.add_tensor("rope_freqs.weight", found))
    convert_gguf(tmp_path / "model.gguf", tmp_path / "hf")
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    assert config["rope_scaling"] == {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }


def test_divisors_of_one_are_no_extension(tmp_path):
    write_gguf(
        tmp_path / "model.gguf", change=lambda writer: writer.add_tensor("rope_freqs.weight", np.ones(8, np.float32))
    )
    convert_gguf(tmp_path / "model.gguf", tmp_path / "hf")
    assert "rope_scaling" not in json.loads((tmp_path / "hf" / "config.json").read_text())


def test_a_window_makes_it_mistral(tmp_path):
    write_gguf(tmp_path / "model.gguf", add_sliding_window=64)
    convert_gguf(tmp_path / "model.gguf", tmp_path / "hf")
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    assert config["architectures"] == ["MistralForCausalLM"] and config["sliding_window"] == 64
    assert find_spec(config).dims(config).window == 64


def bias(writer):
    writer.add_tensor("blk.0.attn_q.bias", np.zeros(64, np.float32))


REFUSED = {
    "a part": ({"change": lambda writer: writer.add_uint16("split.count", 3)}, "one of 3 parts"),
    "experts": ({"add_expert_count": 8}, "mixture of experts"),
    "heads by layer": ({"add_head_count_kv": [2, 1]}, "one positive number for all layers"),
    "partial rotation": ({"add_rope_dimension_count": 8}, "rope.dimension_count = 8"),
    "linear rope": ({"add_rope_scaling_type": gguf.RopeScalingType.LINEAR}, "rope_type='linear'"),
    "bias": ({"change": bias}, "the model does not know: blk.0.attn_q.bias"),
    "other divisors": (
        {"change": lambda writer: writer.add_tensor("rope_freqs.weight", divisors(low=2.0))},
        "another kind than Llama 3.1's",
    ),
    "architecture": ({"config": {**CONFIG, "model_type": "phi3"}}, "general.architecture 'phi3'"),
    "capped logits": (
        {"config": GEMMA3, "change": lambda writer: writer.add_final_logit_softcapping(30.0)},
        "caps scores or logits",
    ),
    "pre-tokenizer": ({"pre": lambda writer: put_byte_level(writer, byte_level("smollm"), "poro-chat")}, "'poro-chat'"),
    "no tokenizer": ({"pre": lambda writer: None}, "no tokenizer.ggml.tokens"),
    "missing tensor": ({"tensors": dict(list(weights(CONFIG).items())[:-1])}, "lacks 1 tensor"),
    "not a number": (
        {"tensors": {**weights(CONFIG), "model.norm.weight": np.full(64, np.inf, np.float32)}},
        "no numbers",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_not_supported_is_refused_in_one_line(tmp_path, case, capsys):
    options, message = REFUSED[case]
    metadata = dict(options)
    config = metadata.pop("config", CONFIG)
    if "add_head_count_kv" in metadata or "add_rope_dimension_count" in metadata:
        # The writer takes no second value: put it in the place of the first.
        key = {"add_head_count_kv": "num_key_value_heads", "add_rope_dimension_count": "head_dim"}
        ((name, value),) = metadata.items()
        made = weights(CONFIG)
        if name == "add_head_count_kv":
            put = {**CONFIG, "num_key_value_heads": value}
            made = {one: array for one, array in made.items() if ".k_proj" not in one}
            write_gguf(tmp_path / "model.gguf", put, tensors=made)
        else:
            write_gguf(tmp_path / "model.gguf", {**CONFIG, key[name]: value})
    else:
        write_gguf(tmp_path / "model.gguf", config, **metadata)
    assert main(["weights", "convert", str(tmp_path / "model.gguf"), "--output", str(tmp_path / "hf")]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model.gguf"], "nothing is left behind"


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> bytes:
    path = tmp_path_factory.mktemp("whole") / "model.gguf"
    write_gguf(path, {**CONFIG, "num_hidden_layers": 1}, kinds=lambda name: "Q8_0")
    return path.read_bytes()


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_file_that_ends_early_is_refused_in_one_line(whole, tmp_path, data):
    end = data.draw(st.integers(0, 2000) | st.integers(0, len(whole) - 1))
    (tmp_path / "model.gguf").write_bytes(whole[:end])
    with pytest.raises(UserError) as refused:
        convert_gguf(tmp_path / "model.gguf", tmp_path / "hf")
    assert "\n" not in str(refused.value) and not (tmp_path / "hf").exists()


def header(num_tensors: int, num_values: int, rest: bytes) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", 3, num_tensors, num_values) + rest


def text(content: bytes, size: int | None = None) -> bytes:
    return struct.pack("<Q", len(content) if size is None else size) + content


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"GGML" + bytes(60),
        b"GGUF" + struct.pack(">I", 3) + bytes(60),
        # A reader that follows the count alone would never end.
        header(0, 2**63, b""),
        header(2**63, 0, b""),
        header(0, 1, text(b"a", 2**64 - 1)),
        header(0, 1, text(b"a") + struct.pack("<IIQ", 9, 0, 2**62)),
        header(0, 1, text(b"a") + struct.pack("<IIQ", 9, 8, 2**62)),
        header(0, 1, text(b"a") + struct.pack("<IIQ", 9, 9, 1)),
        header(0, 1, text(b"a") + struct.pack("<I", 77)),
        header(0, 1, text(b"\xff") + struct.pack("<II", 4, 1)),
        header(0, 2, (text(b"a") + struct.pack("<II", 4, 1)) * 2),
        header(1, 0, text(b"t") + struct.pack("<I", 2**31)),
        header(1, 0, text(b"t") + struct.pack("<IQQIQ", 2, 2**62, 2**62, 0, 0)),
        header(1, 0, text(b"t") + struct.pack("<IQIQ", 1, 33, 2, 0)),
        header(1, 0, text(b"t") + struct.pack("<IQIQ", 1, 32, 999, 0)),
        header(1, 0, text(b"t") + struct.pack("<IQIQ", 1, 8, 0, 2**60)),
        header(2, 0, (text(b"t") + struct.pack("<IQIQ", 1, 8, 0, 0)) * 2 + bytes(99)),
        header(0, 1, text(b"general.alignment") + struct.pack("<II", 4, 0)),
    ],
)  # fmt: skip
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # sizes that overflow
def test_damage_is_refused_in_one_line(tmp_path, data):
    (tmp_path / "model.gguf").write_bytes(data)
    with pytest.raises(UserError, match="cannot be read as GGUF") as refused:
        GgufFile(tmp_path / "model.gguf")
    assert "\n" not in str(refused.value)


def test_a_model_path_that_is_a_file_is_told_how_to_become_a_directory(tmp_path, capsys):
    write_gguf(tmp_path / "model.gguf")
    assert main(["weights", "inspect", str(tmp_path / "model.gguf")]) == 2
    error = capsys.readouterr().err
    assert f"mindrlhf weights convert {tmp_path / 'model.gguf'} --output DIR" in error and error.count("\n") == 1
    # The name of a file does not matter to what it holds.
    (tmp_path / "model.gguf").rename(tmp_path / "model.bin")
    assert main(["weights", "convert", str(tmp_path / "model.bin"), "--output", str(tmp_path / "hf")]) == 0


READ_BY_TRANSFORMERS = """
import json, sys
import numpy as np, torch, transformers
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint
path, out, texts = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
folder, _, name = path.rpartition("/")
config = transformers.AutoConfig.from_pretrained(folder, gguf_file=name)
model = transformers.AutoModelForCausalLM.from_config(config)  # for its names; from_pretrained would want accelerate
read = load_gguf_checkpoint(path, return_tensors=True, model_to_load=model)["tensors"]
np.savez(out, **{key: value.float().numpy() for key, value in read.items()})
tokenizer = transformers.AutoTokenizer.from_pretrained(folder, gguf_file=name)
ids = [tokenizer.encode(text, add_special_tokens=False) for text in texts]
print(json.dumps(ids))
"""


def read_by_transformers(python: str, path: Path, directory: Path, texts: list[str]):
    """Tensors by name, and the ids of texts; the rollout interpreter is lent `gguf`, which it does not need itself."""
    lent = directory / "lent"
    lent.mkdir()
    package = Path(gguf.__file__).parent
    for one in (package, *package.parent.glob("gguf-*.dist-info")):
        (lent / one.name).symlink_to(one)
    finished = subprocess.run(
        [python, "-c", READ_BY_TRANSFORMERS, str(path), str(directory / "read.npz"), json.dumps(texts)],
        capture_output=True, text=True, timeout=400, env={**os.environ, "PYTHONPATH": str(lent), "HF_HUB_OFFLINE": "1"},
    )  # fmt: skip
    assert finished.returncode == 0, finished.stderr[-2000:]
    with np.load(directory / "read.npz") as arrays:
        return dict(arrays), json.loads(finished.stdout.splitlines()[-1])


def check_against_transformers(python: str, path: Path, directory: Path, texts: list[str]) -> None:
    convert_gguf(path, directory / "hf", dtype="float32")
    tensors, ids = read_by_transformers(python, path, directory, texts)
    mine = read_directory(directory / "hf")
    assert mine.keys() == tensors.keys() - {"lm_head.weight"} or mine.keys() == tensors.keys()
    for name, array in mine.items():
        np.testing.assert_array_equal(array, tensors[name], err_msg=name)
    tokenizer = load_tokenizer(directory / "hf")
    assert [tokenizer.encode(one) for one in texts] == ids


@pytest.mark.timeout(500)
@SLOW
def test_transformers_reads_the_same_tensors_and_tokens(tmp_path, rollout_python):
    kinds = iter(["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "F16", "BF16"] * 4)
    write_gguf(tmp_path / "model.gguf", kinds=lambda name: next(kinds), pre="llama-bpe")
    check_against_transformers(rollout_python, tmp_path / "model.gguf", tmp_path, [TEXT, "a  b", "<|im_end|>x"])
