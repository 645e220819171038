"""Every parser of files and messages from outside, each with valid input to damage and the errors it may raise.

A target's ``prepare`` makes valid input in a directory and returns a function that damages a copy of it with the
random generator it is given, parses the result, and uses what came out as the package does.
"""

import json
import random
import socket
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from corruption import corrupt_bytes, corrupt_json
from fuzz_files import (
    RECORDS,
    make_checkpoint,
    make_model,
    make_prompt_file,
    make_safetensors,
    make_sentencepiece,
    make_sharded,
    make_tokenizer,
    model_config,
)

from mindrlhf.errors import RunFailure, UserError

Case = Callable[[random.Random], object]
REPOSITORY = Path(__file__).parents[2]


@dataclass(frozen=True)
class Target:
    """A parser under test."""

    prepare: Callable[[Path], Case]
    refusals: tuple[type[Exception], ...] = (UserError, RunFailure)


def _config_file(directory: Path) -> Case:
    import yaml

    from mindrlhf.config.schema import load_grpo_config

    text = (REPOSITORY / "examples" / "quickstart" / "config.yaml").read_bytes()
    path, tree = directory / "config.yaml", yaml.safe_load(text)
    tricks = (
        b"&a [*a]",
        b"!!int ''",
        b"!!timestamp x",
        b"!!bool x",
        b"? [a, b]\n: c\n",
        b"<<: *a",
        b"0x" + b"f" * 5000,
    )

    def case(rng: random.Random) -> None:
        kind = rng.randrange(4)
        if kind == 0:
            path.write_bytes(corrupt_bytes(rng, text))
        elif kind == 1:
            lines = text.splitlines()
            index = rng.randrange(len(lines))
            lines[index] = lines[index].partition(b":")[0] + b": " + rng.choice(tricks)
            path.write_bytes(b"\n".join(lines))
        else:
            path.write_bytes(corrupt_json(rng, tree))
        load_grpo_config(path)

    return case


def _config_override(directory: Path) -> Case:
    from mindrlhf.config.loader import dotted_keys
    from mindrlhf.config.schema import GrpoConfig, load_grpo_config

    path = REPOSITORY / "examples" / "quickstart" / "config.yaml"
    keys = [dotted for dotted, _, _ in dotted_keys(GrpoConfig)]
    values = (
        "3",
        "-1",
        "1e999",
        "[1, 2]",
        "null",
        "a,b",
        "{a: 1}",
        "!!int ''",
        "[" * 600,
        "0x" + "f" * 5000,
        "1_0:2",
        "=",
    )

    def case(rng: random.Random) -> None:
        override = f"{rng.choice(keys)}={rng.choice(values)}"
        if rng.randrange(2):
            override = corrupt_bytes(rng, override.encode(), max_edits=2).decode("utf-8", errors="surrogateescape")
        load_grpo_config(path, [override])

    return case


def _records(name: str, text: bytes) -> Callable[[Path], Case]:
    def prepare(directory: Path) -> Case:
        from mindrlhf.data.handlers import HANDLERS, RecordError
        from mindrlhf.data.readers import RawRecord, read_records

        path = directory / name

        def case(rng: random.Random) -> None:
            kind = rng.randrange(3)
            if kind == 0:
                path.write_bytes(corrupt_bytes(rng, text))
            elif name.endswith("l"):
                path.write_bytes(b"\n".join(corrupt_json(rng, record) for record in RECORDS))
            else:
                path.write_bytes(corrupt_json(rng, RECORDS))
            for record in read_records(path):
                if isinstance(record, RawRecord):
                    for handler in HANDLERS.values():
                        try:
                            handler(record.fields)
                        except RecordError:
                            continue

        return case

    return prepare


def _parquet(directory: Path) -> Case:
    import pyarrow
    import pyarrow.parquet

    from mindrlhf.data.readers import read_records

    path = directory / "case.parquet"
    rows = [{"question": f"{index} + 1?", "answer": index, "tags": ["a", None], "score": 0.5} for index in range(40)]
    texts = []
    for compression in ("none", "snappy", "zstd"):
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path, compression=compression)
        texts.append(path.read_bytes())

    def case(rng: random.Random) -> None:
        path.write_bytes(corrupt_bytes(rng, rng.choice(texts)))
        for _ in read_records(path):
            pass

    return case


def _mindrecord_header(directory: Path) -> Case:
    from mindrlhf.data.mindrecord import PromptFile, index_path

    path = make_prompt_file(directory)
    whole = path.read_bytes()
    (length,) = struct.unpack("<Q", whole[:8])
    layout, rest = json.loads(whole[8 : 8 + length]), whole[8 + length :]
    assert index_path(path).is_file()

    def case(rng: random.Random) -> None:
        kind = rng.randrange(4)
        if kind == 0:
            path.write_bytes(corrupt_bytes(rng, whole))
        elif kind == 1:
            path.write_bytes(corrupt_bytes(rng, whole[: 8 + length]) + rest)
        else:
            changed = layout
            if rng.randrange(2):
                description = json.loads(layout["schema"][0]["desc"])
                changed = json.loads(json.dumps(layout))
                changed["schema"][0]["desc"] = corrupt_json(rng, description).decode("utf-8", errors="replace")
            text = json.dumps(changed).encode() if changed is not layout else corrupt_json(rng, layout)
            path.write_bytes(struct.pack("<Q", len(text)) + text + rest[len(text) - length :])
        PromptFile.open(path)

    return case


def _mindrecord_index(directory: Path) -> Case:
    from mindrlhf.data.mindrecord import PromptFile, index_path

    path = make_prompt_file(directory)
    whole = index_path(path).read_bytes()

    def case(rng: random.Random) -> None:
        index_path(path).write_bytes(corrupt_bytes(rng, whole))
        PromptFile.open(path)

    return case


def _mindrecord_pages(directory: Path) -> Case:
    from mindrlhf.data.mindrecord import PromptFile

    path = make_prompt_file(directory)
    whole = path.read_bytes()

    def case(rng: random.Random) -> None:
        changed = bytearray(whole)
        for _ in range(rng.randint(1, 8)):
            changed[rng.randrange(len(changed) // 4, len(changed))] = rng.randrange(256)
        path.write_bytes(changed)
        prompts = PromptFile.open(path)
        assert bytes(changed) == whole, "a damaged page was not noticed"
        assert len(prompts) > 0, "no records"

    return case


def _safetensors_file(directory: Path) -> Case:
    from mindrlhf.weights.hf import SafetensorsFile

    path = make_safetensors(directory)
    whole = path.read_bytes()
    (length,) = struct.unpack("<Q", whole[:8])
    header, data = json.loads(whole[8 : 8 + length]), whole[8 + length :]

    def case(rng: random.Random) -> None:
        if rng.randrange(3) == 0:
            path.write_bytes(corrupt_bytes(rng, whole))
        else:
            text = corrupt_json(rng, header)
            path.write_bytes(struct.pack("<Q", len(text)) + text + data)
        file = SafetensorsFile(path)
        for name in file.names():
            file.info(name)
            file.read(name).sum(dtype=np.float64)
            file.release(name)

    return case


def _safetensors_index(directory: Path) -> Case:
    from mindrlhf.weights.hf import INDEX_NAME, SafetensorsDirectory

    model = make_model(directory, max_shard_bytes=4096)
    path = model / INDEX_NAME
    index = json.loads(path.read_bytes())

    def case(rng: random.Random) -> None:
        path.write_bytes(corrupt_json(rng, index))
        source = SafetensorsDirectory(model)
        for name in source.names():
            source.read(name)

    return case


def _model_config(directory: Path) -> Case:
    from mindrlhf.models.spec import find_spec
    from mindrlhf.weights.hf import read_hf_config

    names = ("deepseek_v3/deepseek_v3_671b", "qwen3/qwen3_30b_a3b", "qwen2_5/qwen2_5_7b")
    configs = [model_config(name) for name in names]

    def case(rng: random.Random) -> None:
        (directory / "config.json").write_bytes(corrupt_json(rng, rng.choice(configs)))
        config = read_hf_config(directory)
        spec = find_spec(config)
        dims = spec.dims(config)
        for rule in spec.rules(dims):
            rule.shape(dims)
            rule.mf_shape(dims)

    return case


def _checkpoint_manifest(directory: Path) -> Case:
    from mindrlhf.checkpoint.manifest import MANIFEST_NAME, verify

    checkpoint = make_checkpoint(directory)
    path = checkpoint / MANIFEST_NAME
    manifest = json.loads(path.read_bytes())

    def case(rng: random.Random) -> None:
        path.write_bytes(corrupt_json(rng, manifest))
        verify(checkpoint)

    return case


def _checkpoint_state(directory: Path) -> Case:
    from mindrlhf.checkpoint.carried import load_carried
    from mindrlhf.checkpoint.resume import check_resumable
    from mindrlhf.checkpoint.state import STATE_NAME, read_state
    from mindrlhf.data.stream import PromptStream

    checkpoint = make_checkpoint(directory)
    path = checkpoint / STATE_NAME
    state = json.loads(path.read_bytes())
    config = dict(state["config"])

    def case(rng: random.Random) -> None:
        path.write_bytes(corrupt_json(rng, state))
        found = read_state(checkpoint)
        check_resumable(found.config, config)
        PromptStream(100, found.seed).restore(found.prompt_stream)
        load_carried(checkpoint, found.carried)

    return case


def _checkpoint_arrays(directory: Path) -> Case:
    from mindrlhf.checkpoint.arrays import load_arrays
    from mindrlhf.checkpoint.carried import CARRIED_NAME

    path = make_checkpoint(directory) / CARRIED_NAME
    whole = path.read_bytes()
    (length,) = struct.unpack("<Q", whole[:8])
    header, data = json.loads(whole[8 : 8 + length]), whole[8 + length :]

    def case(rng: random.Random) -> None:
        if rng.randrange(3) == 0:
            path.write_bytes(corrupt_bytes(rng, whole))
        else:
            text = corrupt_json(rng, header)
            path.write_bytes(struct.pack("<Q", len(text)) + text + data)
        arrays = load_arrays(path)
        for name in arrays:
            arrays.shape(name)
            arrays[name].sum(dtype=np.float64)

    return case


def _sharded_json(directory: Path) -> Case:
    from mindrlhf.parallel.sharded_directory import ShardedDirectory
    from mindrlhf.weights.hf import SHARDED_NAME

    sharded = make_sharded(directory, "safetensors")
    paths = [sharded / SHARDED_NAME, sharded / "rank_0" / "manifest.json", sharded / "rank_1" / "manifest.json"]
    trees = [json.loads(path.read_bytes()) for path in paths]
    texts = [path.read_bytes() for path in paths]

    def case(rng: random.Random) -> None:
        chosen = rng.choice((0, 0, 1, 2))
        paths[chosen].write_bytes(corrupt_json(rng, trees[chosen]))
        try:
            source = ShardedDirectory(sharded)
            for name in source.names():
                source.info(name)
                source.read(name)
        finally:
            paths[chosen].write_bytes(texts[chosen])

    return case


def _shard_ckpt(directory: Path) -> Case:
    from mindrlhf.parallel.shard_files import open_shard

    path = next(make_sharded(directory, "ckpt").glob("rank_0/*.ckpt"))
    whole = path.read_bytes()

    def case(rng: random.Random) -> None:
        path.write_bytes(corrupt_bytes(rng, whole))
        file = open_shard(path, "ckpt")
        for name in file.names():
            file.info(name)
            file.read(name)
            file.release(name)

    return case


def _strategy_file(directory: Path) -> Case:
    from mindspore.train.node_strategy_pb2 import ParallelStrategyMap

    from mindrlhf.models.spec import find_spec
    from mindrlhf.parallel.strategy_files import read_strategy

    path = make_sharded(directory, "safetensors") / "strategy" / "merged.ckpt"
    config = json.loads((path.parents[1] / "config.json").read_bytes())
    spec = find_spec(config)
    dims = spec.dims(config)
    shapes = {rule.mf_name: rule.mf_shape(dims) for rule in spec.rules(dims)}
    whole = path.read_bytes()
    target = directory / "strategy.ckpt"
    names = ("", "0-", "²-x", "99999999999-decoder.x", "-1-x", "7-", "0-accu_grads.x")
    sizes = (-(2**31), -2, -1, 0, 1, 2, 3, 2**31 - 1)

    def change(rng: random.Random, message: Any) -> None:
        item = rng.choice(message.parallel_layout_item)
        layout = item.parallel_layouts
        kind = rng.randrange(6)
        if kind == 0:
            item.param_name = rng.choice(names) + rng.choice(("", item.param_name.partition("-")[2]))
        elif kind == 1:
            layout.opt_weight_shard_step, layout.opt_weight_shard_size = rng.choice(sizes), rng.choice(sizes)
        elif kind == 2 and message.parallel_strategy_item:
            message.parallel_strategy_item[0].parallel_strategys.stage = rng.choice((0, 1, 7, 2**31, 2**32 - 1))
            item.param_name = item.param_name.partition("-")[2]
        else:
            entries = layout.dev_matrix if kind == 3 else layout.tensor_map
            dims_of = rng.choice(entries).dim if entries else []
            if dims_of and rng.randrange(4):
                dims_of[rng.randrange(len(dims_of))] = rng.choice(sizes)
            elif entries:
                del entries[0]

    def case(rng: random.Random) -> None:
        if rng.randrange(2):
            target.write_bytes(corrupt_bytes(rng, whole))
        else:
            message = ParallelStrategyMap()
            message.ParseFromString(whole)
            for _ in range(rng.randint(1, 3)):
                change(rng, message)
            target.write_bytes(message.SerializeToString())
        layouts, _ = read_strategy(target, dims, shapes)
        for layout in layouts:
            assert layout.slice_shape and layout.writers() and layout.optimizer_shard_step >= 0, "a layout of no use"

    return case


def _strategy_description(directory: Path) -> Case:
    from mindrlhf.models.spec import find_spec
    from mindrlhf.parallel.strategy_files import DESCRIPTION_NAME, check_strategy_directory

    sharded = make_sharded(directory, "safetensors")
    config = json.loads((sharded / "config.json").read_bytes())
    dims = find_spec(config).dims(config)
    path = sharded / "strategy" / DESCRIPTION_NAME
    description = json.loads(path.read_bytes())

    def case(rng: random.Random) -> None:
        path.write_bytes(corrupt_json(rng, description))
        check_strategy_directory(path.parent, dims)

    return case


def _wire(directory: Path) -> Case:
    import zlib

    from mindrlhf.wire import receive_message, send_message

    arrays = {"ids": np.arange(24, dtype=np.int32).reshape(4, 6), "flags": np.ones(3, bool), "none": np.zeros((0, 5))}
    left, right = socket.socketpair()
    with left, right:
        send_message(left, {"method": "generate", "values": {"seed": 1}}, arrays)
        whole = right.recv(1 << 16)
    prefix = struct.Struct("!4sIIQ")
    magic, text_size, _, _ = prefix.unpack_from(whole)
    tree, payload = json.loads(whole[prefix.size : prefix.size + text_size]), whole[prefix.size + text_size :]

    def case(rng: random.Random) -> None:
        if rng.randrange(3) == 0:
            message = corrupt_bytes(rng, whole)
        else:
            text = corrupt_json(rng, tree)
            size = rng.choice((len(payload), len(payload), 0, 2**62))
            message = prefix.pack(magic, len(text), zlib.crc32(text), size) + text + payload
        left, right = socket.socketpair()
        with left, right:
            left.sendall(message)
            left.close()
            receive_message(right, timeout_s=20, max_payload_bytes=1 << 24)

    return case


def _use_tokenizer(tokenizer: Any) -> None:
    ids = tokenizer.encode("What is 3 + 4? <|im_end|> ü\ud7ff")
    tokenizer.decode(ids)
    assert tokenizer.fingerprint and tokenizer.vocab_size >= 0, "a tokenizer of no use"


def _tokenizer_file(name: str) -> Callable[[Path], Case]:
    def prepare(directory: Path) -> Case:
        from mindrlhf.data.tokenizers import load_tokenizer

        model = make_tokenizer(directory)
        path = model / name
        whole = path.read_bytes()
        tree = json.loads(whole)

        def case(rng: random.Random) -> None:
            path.write_bytes(corrupt_bytes(rng, whole) if rng.randrange(3) == 0 else corrupt_json(rng, tree))
            _use_tokenizer(load_tokenizer(model))

        return case

    return prepare


def _sentencepiece(directory: Path) -> Case:
    from mindrlhf.data.tokenizers import load_tokenizer

    path = make_sentencepiece(directory)
    whole = path.read_bytes()

    def case(rng: random.Random) -> None:
        path.write_bytes(corrupt_bytes(rng, whole))
        _use_tokenizer(load_tokenizer(path))

    return case


def _chat_template(directory: Path) -> Case:
    from mindrlhf.data.handlers import Example, Message
    from mindrlhf.data.templates import load_template
    from mindrlhf.data.tokenizers import load_tokenizer

    tokenizer = load_tokenizer(make_tokenizer(directory))
    source = (
        b"{% for message in messages %}{% if loop.first and message['role'] != 'system' %}{{ bos_token }}{% endif %}\n"
        b"{{ '<|im_start|>' + message.role | capitalize + '\\n' + message.content | trim + eos_token }}{% endfor %}\n"
        b"{% if add_generation_prompt %}{{ 'x' * 3 }}{{ {'a': [1, 2.5, none]} | tojson(indent=2) }}{% endif %}"
    )
    path = directory / "template.jinja"
    pieces = (b"{{", b"%}", b"|", b"[0]", b".__class__", b" if ", b" is ", b"(", b"9" * 5000, b"{{(" * 400)
    example = Example((Message("system", "s"), Message("user", "What is 3 + 4?")), "7")

    def case(rng: random.Random) -> None:
        text = source
        if rng.randrange(2):
            position = rng.randrange(len(text))
            text = text[:position] + rng.choice(pieces) + text[position:]
        path.write_bytes(corrupt_bytes(rng, text, max_edits=2))
        load_template(str(path), tokenizer).render(example)

    return case


def _targets() -> dict[str, Target]:
    from mindrlhf.data.handlers import RecordError
    from mindrlhf.wire import ConnectionClosed, ProtocolError

    lines = b"\n".join(json.dumps(record).encode() for record in RECORDS) + b"\n"
    return {
        "config file": Target(_config_file),
        "config override": Target(_config_override),
        "JSONL records": Target(_records("case.jsonl", lines)),
        "JSON records": Target(_records("case.json", json.dumps(RECORDS).encode())),
        "Parquet records": Target(_parquet),
        "MindRecord header": Target(_mindrecord_header),
        "MindRecord index": Target(_mindrecord_index),
        "MindRecord pages": Target(_mindrecord_pages),
        "safetensors file": Target(_safetensors_file),
        "safetensors index": Target(_safetensors_index),
        "model config.json": Target(_model_config),
        "checkpoint manifest": Target(_checkpoint_manifest),
        "checkpoint state": Target(_checkpoint_state),
        "checkpoint arrays": Target(_checkpoint_arrays),
        "sharded manifests": Target(_sharded_json),
        "sharded ckpt file": Target(_shard_ckpt),
        "strategy file": Target(_strategy_file),
        "strategy description": Target(_strategy_description),
        "rollout message": Target(_wire, (ConnectionClosed, ProtocolError)),
        "tokenizer.json": Target(_tokenizer_file("tokenizer.json")),
        "tokenizer_config.json": Target(_tokenizer_file("tokenizer_config.json")),
        "SentencePiece model": Target(_sentencepiece),
        "chat template": Target(_chat_template, (UserError, RecordError)),
    }


TARGETS = _targets()
