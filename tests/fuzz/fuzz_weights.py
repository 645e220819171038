"""Model directories: config.json, safetensors, and shards with their strategy."""

import json
import random
import struct
from pathlib import Path
from typing import Any

import corruption
import numpy as np
from fuzz_files import make_model, make_safetensors, make_sharded, model_config
from fuzz_target import Case


def hf_config(directory: Path) -> Case:
    from mindrlhf.specs import find_spec
    from mindrlhf.weights.hf import read_hf_config

    names = ("deepseek_v3/deepseek_v3_671b", "qwen3/qwen3_30b_a3b", "qwen2_5/qwen2_5_7b", "llama3_1/llama3_1_8b")
    # Few layers and experts, because each has rules that a case goes through.
    few = {"num_hidden_layers": 4, "n_routed_experts": 16, "num_experts": 16, "n_group": 2, "topk_group": 1}
    configs = [{key: few.get(key, value) for key, value in model_config(name).items()} for name in names]

    def case(rng: random.Random) -> None:
        (directory / "config.json").write_bytes(corruption.corrupt_json(rng, rng.choice(configs)))
        config = read_hf_config(directory)
        spec = find_spec(config)
        dims = spec.dims(config)
        for rule in spec.rules(dims):
            rule.shape(dims)
            rule.mf_shape(dims)

    return case


def safetensors_file(directory: Path) -> Case:
    from mindrlhf.weights.safetensors_file import SafetensorsFile

    path = make_safetensors(directory)
    whole = path.read_bytes()

    def case(rng: random.Random) -> None:
        path.write_bytes(corruption.corrupt_safetensors(rng, whole))
        file = SafetensorsFile(path)
        for name in file.names():
            file.info(name)
            file.read(name).sum(dtype=np.float64)
            file.release(name)

    return case


def gguf_file(directory: Path) -> Case:
    from mindrlhf.weights.gguf_file import GgufFile

    path = directory / "case.gguf"

    def text(content: bytes) -> bytes:
        return struct.pack("<Q", len(content)) + content

    # A number, a text, and arrays of both; two tensors, one quantised, and their data.
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
    whole = head + bytes(-len(head) % 32) + struct.pack("<8f", *range(8)) + rows

    def case(rng: random.Random) -> None:
        path.write_bytes(corruption.corrupt_bytes(rng, whole))
        file = GgufFile(path)
        for name in file.tensors:
            file.read(name).sum(dtype=np.float64)
            file.release(name)

    return case


def safetensors_index(directory: Path) -> Case:
    from mindrlhf.weights.hf import INDEX_NAME, SafetensorsDirectory

    model = make_model(directory, max_shard_bytes=4096)
    path = model / INDEX_NAME
    index = json.loads(path.read_bytes())

    def case(rng: random.Random) -> None:
        path.write_bytes(corruption.corrupt_json(rng, index))
        source = SafetensorsDirectory(model)
        for name in source.names():
            source.read(name)

    return case


def sharded_json(directory: Path) -> Case:
    from mindrlhf.weights.hf import SHARDED_NAME
    from mindrlhf.weights.sharded import ShardedDirectory

    sharded = make_sharded(directory, "safetensors")
    paths = [sharded / SHARDED_NAME, sharded / "rank_0" / "manifest.json", sharded / "rank_1" / "manifest.json"]
    trees = [json.loads(path.read_bytes()) for path in paths]
    texts = [path.read_bytes() for path in paths]

    def case(rng: random.Random) -> None:
        chosen = rng.choice((0, 0, 1, 2))
        paths[chosen].write_bytes(corruption.corrupt_json(rng, trees[chosen]))
        try:
            source = ShardedDirectory(sharded)
            for name in source.names():
                source.info(name)
                source.read(name)
        finally:
            paths[chosen].write_bytes(texts[chosen])

    return case


def shard_ckpt(directory: Path) -> Case:
    from mindrlhf.weights.shard_files import open_shard

    path = next(make_sharded(directory, "ckpt").glob("rank_0/*.ckpt"))
    whole = path.read_bytes()

    def case(rng: random.Random) -> None:
        path.write_bytes(corruption.corrupt_bytes(rng, whole))
        file = open_shard(path, "ckpt")
        for name in file.names():
            file.info(name)
            file.read(name)
            file.release(name)

    return case


def strategy_file(directory: Path) -> Case:
    from mindspore.train.node_strategy_pb2 import ParallelStrategyMap

    from mindrlhf.shards.strategy_files import read_strategy
    from mindrlhf.specs import find_spec

    path = make_sharded(directory, "safetensors") / "strategy" / "merged.ckpt"
    config = json.loads((path.parents[1] / "config.json").read_bytes())
    spec = find_spec(config)
    dims = spec.dims(config)
    shapes = {rule.mf_name: rule.mf_shape(dims) for rule in spec.rules(dims)}
    whole = path.read_bytes()
    target = directory / "strategy.ckpt"
    names = ("", "0-", "²-x", "99999999999-decoder.x", "-1-x", "7-", "0-accu_grads.x")
    sizes = (0, 1, 2, 3, 2**31 - 1)
    axes = (-(2**31), -2, -1, *sizes)

    def change(rng: random.Random, message: Any) -> None:
        item = rng.choice(message.parallel_layout_item)
        layout = item.parallel_layouts
        kind = rng.randrange(6)
        if kind == 0:
            item.param_name = rng.choice(names) + rng.choice(("", item.param_name.partition("-")[2]))
        elif kind == 1:
            layout.opt_weight_shard_step, layout.opt_weight_shard_size = rng.choice(axes), rng.choice(axes)
        elif kind == 2 and message.parallel_strategy_item:
            message.parallel_strategy_item[0].parallel_strategys.stage = rng.choice((0, 1, 7, 2**31, 2**32 - 1))
            item.param_name = item.param_name.partition("-")[2]
        else:
            entries = layout.dev_matrix if kind == 3 else layout.tensor_map
            dims_of = rng.choice(entries).dim if entries else []
            if dims_of and rng.randrange(4):
                dims_of[rng.randrange(len(dims_of))] = rng.choice(sizes if kind == 3 else axes)
            elif entries:
                del entries[0]

    def case(rng: random.Random) -> None:
        if rng.randrange(2):
            target.write_bytes(corruption.corrupt_bytes(rng, whole))
        else:
            message = ParallelStrategyMap()
            message.ParseFromString(whole)
            for _ in range(rng.randint(1, 3)):
                change(rng, message)
            target.write_bytes(message.SerializeToString())
        layouts, _ = read_strategy(target, dims, shapes)
        for layout in layouts:
            assert layout.shard_shape and layout.writers() and layout.optimizer_shard_step >= 0, "a layout of no use"

    return case


def strategy_description(directory: Path) -> Case:
    from mindrlhf.shards.strategy_files import DESCRIPTION_NAME, check_strategy_directory
    from mindrlhf.specs import find_spec

    sharded = make_sharded(directory, "safetensors")
    config = json.loads((sharded / "config.json").read_bytes())
    dims = find_spec(config).dims(config)
    path = sharded / "strategy" / DESCRIPTION_NAME
    description = json.loads(path.read_bytes())

    def case(rng: random.Random) -> None:
        path.write_bytes(corruption.corrupt_json(rng, description))
        check_strategy_directory(path.parent, dims)

    return case
