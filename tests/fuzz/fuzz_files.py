"""Small valid files of every kind that the package reads, for fuzzing to damage."""

import json
import shutil
import struct
from pathlib import Path

import numpy as np
from prompt_files import header_of, write_with_header
from tiny_models import tiny_model

REPOSITORY = Path(__file__).parents[2]
HF_CONFIG = tiny_model(hidden_size=8, intermediate_size=12, num_hidden_layers=2, vocab_size=16)
RECORDS = [
    {"question": "What is 3 + 4?", "answer": "3 + 4 = 7\n#### 7"},
    {"problem": "x", "answer": 12, "nested": {"a": [1, 2.5, None, {"b": "ü"}]}},
    {"prompt": [{"role": "user", "content": "hi"}], "reward_model": {"ground_truth": "1"}},
    {"chosen": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}], "rejected": []},
    {"question": "q", "chosen": "a", "rejected": "b", "system": ""},
]

STEPS = [
    {"step": step, "reward/mean": 0.1 * step, "timing/all": 2.0, "timing/rollout": 1.5, "eval/accuracy": None}
    for step in range(1, 4)
]
SAMPLES = [
    {"step": 1, "prompt": "1 + 1?", "completion": "2", "answer": "2", "reward": 1.0, "rewards": {"accuracy": 1.0}}
] * 3
SUMMARY = {
    "num_prompts": 4,
    **dict.fromkeys(("before", "after", "difference"), {"low": -0.1, "high": 0.9, "accuracy": 0.5, "mean": 0.5}),
    **dict.fromkeys(("samples_before", "samples_after"), [{"prompt": "q", "completion": "c", "reward": 1.0}]),
}
TEMPLATE = (
    b"{% for message in messages %}{% if loop.first and message['role'] != 'system' %}{{ bos_token }}{% endif %}\n"
    b"{{ '<|im_start|>' + message.role | capitalize + '\\n' + message.content | trim + eos_token }}{% endfor %}\n"
    b"{% if add_generation_prompt %}{{ 'x' * 3 }}{{ {'a': [1, 2.5, none]} | tojson(indent=2) }}{% endif %}"
)


def gguf_bytes() -> bytes:
    """Return a GGUF file: a number, a text, arrays of both; two tensors, one quantised, and their data."""

    def text(content: bytes) -> bytes:
        return struct.pack("<Q", len(content)) + content

    values = [
        text(b"llama.block_count") + struct.pack("<II", 4, 2),
        text(b"general.architecture") + struct.pack("<I", 8) + text(b"llama"),
        text(b"tokenizer.ggml.tokens") + struct.pack("<IIQ", 9, 8, 3) + text(b"a") + text(b"b") + text(b"ab"),
        text(b"tokenizer.ggml.scores") + struct.pack("<IIQ3f", 9, 6, 3, 1.0, 2.0, 3.0),
    ]
    tensors = [
        text(b"norm") + struct.pack("<IQIQ", 1, 8, 0, 0),
        text(b"matrix") + struct.pack("<IQQIQ", 2, 32, 2, 8, 32),
    ]
    head = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(values)) + b"".join(values + tensors)
    rows = b"".join(struct.pack("<e32b", 0.5, *range(32)) for _ in range(2))
    return head + bytes(-len(head) % 32) + struct.pack("<8f", *range(8)) + rows


def make_prompt_file(directory: Path) -> Path:
    """Write a MindRecord prompt file of the smallest pages that MindRecord takes, so that a case copies little."""
    from unittest import mock

    from mindrlhf.data import mindrecord

    records = [
        mindrecord.Prompt(np.arange(5, dtype=np.int32), mindrecord.no_ids(), f"{index}", f"train.jsonl:{index}")
        for index in range(6)
    ]
    path = directory / "train.mindrecord"
    with mock.patch.multiple(mindrecord, HEADER_SIZE_BYTES=16 << 10, PAGE_SIZE_BYTES=32 << 10):
        write_with_header(path, header_of(6, longest_prompt=5), [records])
    return path


def make_safetensors(directory: Path) -> Path:
    """Write one safetensors file of several dtypes and shapes, a scalar and an empty tensor among them."""
    from mindrlhf.weights.array_file import save_arrays
    from mindrlhf.weights.tensors import array_infos

    arrays = {
        "model.embed.weight": np.arange(24, dtype=np.float32).reshape(4, 6),
        "model.norm.weight": np.ones(3, np.float16),
        "model.scale": np.float32(2).reshape(()),
        "model.empty": np.zeros((0, 4), np.float16),
    }
    path = directory / "model.safetensors"
    save_arrays(path, arrays.items(), array_infos(arrays))
    return path


def make_model(directory: Path, max_shard_bytes: int = 1 << 30) -> Path:
    """Write a Hugging Face directory of random weights."""
    from mindrlhf.specs import find_spec
    from mindrlhf.weights.convert import hf_shapes
    from mindrlhf.weights.tensors import array_infos
    from mindrlhf.weights.writer import write_model_directory

    spec = find_spec(HF_CONFIG)
    shapes = hf_shapes(spec, spec.dims(HF_CONFIG))
    generator = np.random.default_rng(0)
    tensors = {name: generator.standard_normal(shape, np.float32) for name, shape in shapes.items()}
    model = directory / "model"
    options = {"file_format": "pt", "max_shard_bytes": max_shard_bytes}
    write_model_directory(tensors.items(), array_infos(tensors), HF_CONFIG, model, **options)
    return model


def make_sharded(directory: Path, file_format: str) -> Path:
    """Write a directory of shards of two ranks, strategy files included; MindSpore merges those."""
    from mindrlhf.shards.shard import shard_directory

    sharded = directory / "sharded"
    shard_directory(make_model(directory), sharded, parallel="dp=1,mp=2", file_format=file_format)
    return sharded


def make_checkpoint(directory: Path) -> Path:
    """Write a checkpoint with a state, leftover arrays and a manifest."""
    from mindrlhf.checkpoint.algorithm_state import AlgorithmState, GuardsState, KlState
    from mindrlhf.checkpoint.state import RunState, pack_state, write_state
    from mindrlhf.checkpoint.store import CheckpointStore
    from mindrlhf.data.stream import PromptStream

    arrays = {"ids": np.arange(7, dtype=np.int32), "logprobs": np.zeros(7, np.float32)}
    state = RunState(
        step=4,
        weights_version=4,
        seed=1,
        prompt_stream=PromptStream(100, 1).state(),
        config={"run": {"max_steps": 10}, "optimizer": {"start_lr": 1e-6, "lr_schedule": "constant"}},
        algorithm=AlgorithmState(kl=KlState(0.1), guards=GuardsState(norms=[0.5])),
    )
    store = CheckpointStore(directory / "checkpoints", keep_last=2)
    with store.writing(4, 1000) as temporary:
        write_state(temporary, pack_state(state, {"evaluations": [{"step": 0}], "leftover": [arrays]}))
    return store.path(4)


def make_tokenizer(directory: Path) -> Path:
    """Copy the quickstart's tokenizer, with fewer merges so that a case is quick."""
    target = directory / "tokenizer"
    target.mkdir()
    source = REPOSITORY / "examples" / "quickstart" / "checkpoint"
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(source / name, target / name)
    return target


def make_sentencepiece(directory: Path) -> Path:
    """Train a SentencePiece model of a few dozen pieces."""
    import sentencepiece

    texts = [f"what is {left} plus {right}" for left in range(20) for right in range(5)]
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(texts), model_prefix=str(directory / "tokenizer"), vocab_size=40, model_type="bpe",
        character_coverage=1.0, num_threads=1, minloglevel=2,
    )  # fmt: skip
    names = {"tokenizer_class": "LlamaTokenizer", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    (directory / "tokenizer_config.json").write_text(json.dumps(names), encoding="utf-8")
    return directory / "tokenizer.model"


def model_config(name: str) -> dict:
    """Return the config.json of a published model's size."""
    return json.loads((REPOSITORY / "model_configs" / name / "config.json").read_text(encoding="utf-8"))
