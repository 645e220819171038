"""Time the weight buffer against a plain copy of the same bytes: write, verify, and reload by vLLM.

    python scripts/benchmark_weight_transfer.py [--rollout-python PATH] [--num-params 100000000] [--repeats 5]
        [--parallel dp=2,mp=2 ...]

With layouts, also the write of every rank's own shards: the bytes they move against the fewest that could (each
element once), and the time of the slowest rank, which is how long the write takes where every rank has a core.
"""

import argparse
import json
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from mindrlhf.layout.layout import Layout, parameter_layouts
from mindrlhf.rollout.replicas import find_rollout_python
from mindrlhf.rollout.vllm import VllmGenerator
from mindrlhf.rollout.vllm_options import VllmOptions
from mindrlhf.specs import find_spec
from mindrlhf.specs.fuse import fuse
from mindrlhf.weights.publish.buffer import TensorInfo, WeightBuffer
from mindrlhf.weights.publish.shards import plan_publication, write_shards

HEAD_DIM = 64
VOCAB = 32000


def model_config(num_params: int) -> dict:
    """A Qwen2 configuration of about ``num_params`` parameters."""
    hidden = 64 * max(2, round((num_params / 130) ** 0.5 / 64)) if num_params < 20_000_000 else 768
    vocab = VOCAB if num_params >= 20_000_000 else 512
    per_layer = 2 * hidden * hidden + hidden * hidden + 3 * hidden * 4 * hidden
    return {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "vocab_size": vocab,
        "hidden_size": hidden,
        "num_hidden_layers": max(1, round((num_params - vocab * hidden) / per_layer)),
        "num_attention_heads": hidden // HEAD_DIM,
        "num_key_value_heads": max(1, hidden // HEAD_DIM // 2),
        "intermediate_size": 4 * hidden,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,
        "hidden_act": "silu",
        "torch_dtype": "float32",
    }


def tensor_infos(config: dict) -> list[TensorInfo]:
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    kv_size = config["num_key_value_heads"] * HEAD_DIM
    shapes = {"model.embed_tokens.weight": (config["vocab_size"], hidden), "model.norm.weight": (hidden,)}
    for i in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{i}."
        for name, rows in (("q", hidden), ("k", kv_size), ("v", kv_size)):
            shapes[f"{prefix}self_attn.{name}_proj.weight"] = (rows, hidden)
            shapes[f"{prefix}self_attn.{name}_proj.bias"] = (rows,)
        shapes[f"{prefix}self_attn.o_proj.weight"] = (hidden, hidden)
        shapes[f"{prefix}mlp.gate_proj.weight"] = (inner, hidden)
        shapes[f"{prefix}mlp.up_proj.weight"] = (inner, hidden)
        shapes[f"{prefix}mlp.down_proj.weight"] = (hidden, inner)
        shapes[f"{prefix}input_layernorm.weight"] = (hidden,)
        shapes[f"{prefix}post_attention_layernorm.weight"] = (hidden,)
    return [TensorInfo(name, "float32", shape) for name, shape in shapes.items()]


def time_interleaved(actions: dict[str, Callable[[int], None]], repeats: int) -> dict[str, np.ndarray]:
    """Seconds of each action, float64 [repeats], in turns so that a slow moment of the machine hits all alike."""
    times: dict[str, list[float]] = {name: [] for name in actions}
    for repeat in range(repeats + 1):
        for name, action in actions.items():
            start = time.perf_counter()
            action(repeat)
            times[name].append(time.perf_counter() - start)
    return {name: np.array(values[1:]) for name, values in times.items()}  # the first round warms up


def report(times: dict[str, np.ndarray], size_bytes: int) -> None:
    print(f"{'':12s} {'ms median (min..max)':>26s} {'GB/s median':>12s} {'speed / memcpy (min..max)':>28s}")
    for name, values in times.items():
        ratios = times["memcpy"] / values
        milliseconds = f"{np.median(values) * 1e3:.1f} ({values.min() * 1e3:.1f}..{values.max() * 1e3:.1f})"
        spread = f"{np.median(ratios):.2f} ({ratios.min():.2f}..{ratios.max():.2f})"
        print(f"{name:12s} {milliseconds:>26s} {size_bytes / np.median(values) / 1e9:12.2f} {spread:>28s}")


def write_layouts(layouts: Sequence[Layout], config: dict, sources: dict[str, np.ndarray], repeats: int) -> None:
    """Write and commit a buffer from the shards of each layout, rank after rank, and print a line for each."""
    spec = find_spec(config)
    dims = spec.dims(config)
    rules = {rule.mf_name: rule for rule in spec.rules(dims)}
    fused = {name: fuse(rule, dims, [sources[hf_name] for hf_name in rule.hf_names]) for name, rule in rules.items()}
    for layout in layouts:
        placed = parameter_layouts(spec, dims, layout)
        publications = [plan_publication(placed, rules, dims, rank) for rank in range(layout.world_size)]
        places = {entry.name: entry for entry in placed}
        arrays = [
            {name: np.ascontiguousarray(fused[name][places[name].shard_of(rank)]) for name in publication}
            for rank, publication in enumerate(publications)
        ]
        seconds = np.zeros((repeats + 1, layout.world_size))
        with WeightBuffer.create(tensor_infos(config)) as buffer:
            for repeat in range(repeats + 1):
                buffer.begin(repeat)
                written = []
                for rank, publication in enumerate(publications):
                    start = time.perf_counter()
                    written.append(write_shards(buffer, publication, arrays[rank]))
                    seconds[repeat, rank] = time.perf_counter() - start
                buffer.commit()
            bound = buffer.size_bytes
        slowest = np.median(seconds[1:].max(axis=1))  # the first round warms up
        print(
            f"{layout!s:24s} {layout.world_size:3d} ranks: {sum(written):,} bytes moved, {sum(written) / bound:.3f} of "
            f"the fewest; slowest rank {max(written) / bound:.3f} of them in {slowest * 1e3:.1f} ms"
        )


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rollout-python", default=find_rollout_python())
    parser.add_argument("--num-params", type=int, default=100_000_000)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--parallel", nargs="*", type=Layout.parse, default=[], metavar="dp=2,mp=2")
    options = parser.parse_args(arguments)
    config = model_config(options.num_params)
    infos = tensor_infos(config)
    random = np.random.default_rng(0)
    sources = {info.name: random.standard_normal(info.shape, np.float32) * 0.02 for info in infos}
    copies = {name: np.empty_like(source) for name, source in sources.items()}

    write_layouts(options.parallel, config, sources, options.repeats)

    def memcpy(repeat: int) -> None:
        for name, source in sources.items():
            np.copyto(copies[name], source)

    with WeightBuffer.create(infos) as buffer, tempfile.TemporaryDirectory() as directory:

        def write(repeat: int) -> None:
            buffer.begin(repeat)
            for name, source in sources.items():
                buffer.write(name, source)
            buffer.commit()

        actions = {"memcpy": memcpy, "write": write, "verify": buffer.verify}
        num_params = sum(info.num_elements for info in infos)
        print(f"{num_params:,} parameters in {len(infos)} tensors, {options.repeats} repeats")
        (Path(directory) / "config.json").write_text(json.dumps(config))
        server_options = VllmOptions(
            options.rollout_python, directory, f"{directory}/rollout.log", max_model_len=512, kv_cache_gib=0.25
        )
        with VllmGenerator.start(server_options) as generator:
            generator.use_weight_buffer(buffer.path)
            generator.wait_ready()
            actions["reload"] = generator.update_weights
            times = time_interleaved(actions, options.repeats)
        times["all"] = times["write"] + times["reload"]
        report(times, buffer.size_bytes)
        print("reload is the server's verify and load, as the trainer waits for it; all is write and reload")


if __name__ == "__main__":
    main()
