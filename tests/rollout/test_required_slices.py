"""What vLLM's workers read of each tensor, as seen by watching their loaders, is all that they need."""

import json
import subprocess
import tempfile
from pathlib import Path

import numpy as np
import pytest
from rollout_probes import ask_probe
from slow_tests import SLOW
from tiny_vl import TinyVl, weights_of, write_tiny_vl

from mindrlhf.specs import find_spec
from mindrlhf.weights.convert import hf_shapes
from mindrlhf.weights.publish.slices import TensorSlice, to_slice, whole_slice

ROOT = Path(__file__).resolve().parents[2]
QWEN = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "vocab_size": 300,
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "rope_theta": 10000.0,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
    "hidden_act": "silu",
    "torch_dtype": "float32",
}
MODELS = {
    "qwen2": QWEN,
    # Two workers share the only head of keys and values.
    "qwen2 untied": {**QWEN, "tie_word_embeddings": False, "vocab_size": 500, "num_key_value_heads": 1},
    "qwen3_moe": {
        **QWEN,
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "tie_word_embeddings": False,
        "head_dim": 32,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 64,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    },
    # The sizes of latent and rotated part are the only ones that vLLM's CPU kernel takes.
    "deepseek_v3": {
        **QWEN,
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        "tie_word_embeddings": False,
        "num_key_value_heads": 4,
        "q_lora_rank": 48,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 32,
        "qk_rope_head_dim": 64,
        "v_head_dim": 32,
        "first_k_dense_replace": 1,
        "n_routed_experts": 8,
        "num_experts_per_tok": 4,
        "n_group": 4,
        "topk_group": 2,
        "n_shared_experts": 1,
        "moe_intermediate_size": 64,
        "routed_scaling_factor": 2.5,
        "norm_topk_prob": True,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "num_nextn_predict_layers": 0,
    },
}


VL = TinyVl()
VOCABULARY_MULTIPLE = 64  # to which vLLM pads it
BY_ROWS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "q_b_proj", "kv_b_proj", "mlp.0")
BY_COLUMNS = ("o_proj", "down_proj", "attn.proj", "mlp.2")


TRACED = """
import json, resource
import numpy as np, torch
from mindrlhf.rollout.server.required_slices import slices_of_view, trace_reads
from mindrlhf.weights.tensors import TensorInfo

target = torch.empty(4, 6, device="meta")
live, kept = torch.ones(4, 6), []

def load(tensors):
    for name, tensor in tensors:
        if name == "narrowed":
            target[:, :3].copy_(tensor.narrow(0, 4, 4)[:, 3:])
        elif name == "chunks":
            for chunk in tensor.chunk(4)[1::2]:
                target[:2].copy_(chunk)
        elif name == "heads":
            target[:, :2].copy_(tensor.view(8, 3, 2).transpose(0, 1).reshape(3, 16)[:2, :8].reshape(8, 2)[:4])
        elif name == "converted":
            target.copy_(tensor[2:6].to(torch.float32).t().contiguous().t() + 1)
        elif name == "selected":
            target[0].copy_(tensor.flatten()[6:12])
        elif name == "computed":
            target.copy_(tensor[:4] + 1)
        elif name == "compared":
            (tensor[:1] == 0)
        elif name == "overwritten":
            target.copy_(tensor.mul_(2)[:4])
        elif name == "other bits":
            target.copy_(tensor[:4].view(torch.float16))
        elif name == "scattered":
            target.copy_(tensor[torch.tensor([0, 1, 2, 3])])
        elif name == "kept":
            kept.append(tensor[:1])
    return {"weight"}

names = "narrowed chunks heads converted selected computed compared overwritten scattered kept skipped".split()
infos = [TensorInfo(name, "float32", (8, 6)) for name in names] + [TensorInfo("other bits", "bfloat16", (8, 6))]
found = {"read": trace_reads(load, infos, {"weight": target, "bias": live})}
found["unseen"] = trace_reads(load, infos, {"weight": torch.empty(2, device="meta")})
found["needs values"] = trace_reads(lambda tensors: [tensor.sum().item() for _, tensor in tensors], infos, {})
found["live"] = trace_reads(lambda tensors: [live.copy_(tensor[:4]) for _, tensor in tensors], infos, {})
found["live stays"] = bool((live == 1).all())

before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
large = [TensorInfo(str(number), "bfloat16", (1 << 20, 1 << 10)) for number in range(1000)]
slot = torch.empty(1 << 20, 1 << 9, device="meta")
found["large"] = trace_reads(lambda tensors: [slot.copy_(tensor[:, :512]) for _, tensor in tensors], large, {})
found["KiB"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before

random, found["views"] = np.random.default_rng(0), [0, 0]
for _ in range(4000):
    shape = random.integers(1, 7, random.integers(0, 4)).tolist()
    view = full = torch.arange(int(np.prod(shape))).reshape(shape)
    for _ in range(random.integers(0, 5)):
        axis = int(random.integers(view.dim())) if view.dim() else None
        kind = random.integers(7)
        if kind == 0:
            view = view.reshape(-1) if view.is_contiguous() else view.unsqueeze(0)
        elif axis is None or not view.numel():
            continue
        elif kind == 1:
            start, stop = sorted(random.integers(0, view.shape[axis] + 1, 2).tolist())
            view = view.narrow(axis, start, stop - start)
        elif kind == 2:
            view = view.transpose(axis, int(random.integers(view.dim())))
        elif kind == 3:
            factors = [factor for factor in range(1, view.shape[axis] + 1) if view.shape[axis] % factor == 0]
            view = view.unflatten(axis, (int(random.choice(factors)), -1))
        elif kind == 4:
            view = view[:: int(random.integers(1, 4))]
        elif kind == 5:
            view = view.select(axis, int(random.integers(view.shape[axis])))
        else:
            view = view.unsqueeze(axis).expand(*view.shape[:axis], 2, *view.shape[axis:])
    boxes = slices_of_view(shape, view.storage_offset(), view.shape, view.stride())
    found["views"][boxes is None] += 1
    if boxes is not None:
        counts = torch.zeros(shape, dtype=torch.int64)
        for box in boxes:
            counts[tuple(slice(*span) for span in box)] += 1
        expected = torch.zeros(full.numel(), dtype=torch.int64)
        expected[view.reshape(-1)] = 1
        assert torch.equal(counts.reshape(-1), expected), (shape, view.storage_offset(), view.shape, view.stride())
print("found", json.dumps(found))
"""


def test_what_is_read_of_views_and_what_counts_as_whole(rollout_python):
    environment = {"PATH": "/usr/bin:/bin", "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [rollout_python, "-c", TRACED]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0, ended.stderr
    found = json.loads(next(line for line in ended.stdout.splitlines() if line.startswith("found"))[6:])
    read = {name: boxes and [to_slice(box) for box in boxes] for name, boxes in found["read"].items()}
    assert read == {
        "narrowed": [((4, 8), (3, 6))],
        "chunks": [((2, 4), (0, 6)), ((6, 8), (0, 6))],
        "heads": [whole_slice((8, 6))],  # reshaping copies all of it
        "converted": [((2, 6), (0, 6))],
        "selected": [((1, 2), (0, 6))],
        "skipped": [],
        **dict.fromkeys(["computed", "compared", "overwritten", "other bits", "scattered", "kept"]),
    }
    everything = dict.fromkeys(read)
    assert found["unseen"] == found["needs values"] == found["live"] == everything
    assert found["live stays"]
    assert found["large"] == {str(number): [[[0, 1 << 20], [0, 512]]] for number in range(1000)}  # of 2 GiB each
    assert found["KiB"] < 1 << 17
    assert found["views"][0] > 3800 and found["views"][1] > 0


def write_model(directory: Path, name: str) -> dict[str, tuple[int, ...]]:
    """Write a model without weights, and return the shapes of its tensors by name."""
    if name == "qwen2_5_vl":
        write_tiny_vl(directory, VL)
        return {tensor: array.shape for tensor, array in weights_of(VL).items()}
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(MODELS[name]))
    spec = find_spec(MODELS[name])
    return hf_shapes(spec, spec.dims(MODELS[name]))


@pytest.fixture
def directory():
    """A directory with a short name: sockets of vLLM lie in it, whose names have a limit."""
    with tempfile.TemporaryDirectory(prefix="needs-") as name:
        yield Path(name)


def probe(python: str, directory: Path, name: str, num_workers: int) -> tuple[dict, dict]:
    """Run tests/helpers/required_slices_probe.py; return the shapes of a model's tensors and what it says."""
    shapes = write_model(directory / "model", name)
    tensors = [[name, "float32", shape] for name, shape in shapes.items()]
    return shapes, ask_probe("required_slices_probe.py", python, directory, tensors, tensor_parallel_size=num_workers)


def expected_read(name: str, shape: tuple[int, ...], rank: int, kv_heads: int) -> list[TensorSlice]:
    """What one of two tensor-parallel workers reads of a tensor."""

    def half(axis: int, size: int) -> tuple[int, int]:
        return rank * size // 2, min((rank + 1) * size // 2, shape[axis])

    whole, module = whole_slice(shape), name.rpartition(".")[0]
    if module.endswith(("embed_tokens", "lm_head")):
        return [(half(0, -(-shape[0] // VOCABULARY_MULTIPLE) * VOCABULARY_MULTIPLE), *whole[1:])]
    if module.endswith("attn.qkv"):  # of a vision tower: queries, keys and values in one tensor
        third = shape[0] // 3
        start, stop = half(0, third)
        return [((part * third + start, part * third + stop), *whole[1:]) for part in range(3)]
    if module.endswith(("k_proj", "v_proj")) and kv_heads < 2:
        return [whole]
    if module.endswith(BY_ROWS):
        return [(half(0, shape[0]), *whole[1:])]
    if module.endswith(BY_COLUMNS) and len(shape) == 2:
        return [(whole[0], half(1, shape[1]))]
    return [whole]


def check_probe(shapes, result, expected) -> None:
    """Compare with the expected boxes, by worker and tensor, and what was loaded from them alone with the rest."""
    assert result["required"][0] == result["required"][1], "what was loaded changes what is read"
    assert result["stayed"]
    assert all(
        why is None for step in result["errors"] if step != "parts of the other" for why in result["errors"][step]
    )
    for worker, required in enumerate(result["required"][0]):
        read = {name: [to_slice(box) for box in boxes] for name, boxes in required.items()}
        assert read == {name: expected(name, shape, worker) for name, shape in shapes.items()}
        step = {name: held[worker] for name, held in result["steps"].items()}
        assert step["after tracing"].items() <= step["first"].items()
        assert step["second, needed parts alone"] == step["second"]
        changed = {name for name in step["second"] if step["second"][name] != step["first again"][name]}
        assert len(changed) >= len(step["second"]) / 2, "a worker that loads nothing would agree with anything"
    together = {name: [to_slice(box) for box in boxes] for name, boxes in result["together"].items()}
    assert together == {name: [whole_slice(shape)] for name, shape in shapes.items()}
    check_samples(*result["samples"])


def check_samples(wanted, found) -> None:
    """Requests come to workers in batches as they happen to, and kernels may round differently for each number of rows,
    which rarely moves a token over a boundary."""
    assert len(wanted) == len(found) == 6
    same = [(one[3], other[3]) for one, other in zip(wanted, found) if one[:3] == other[:3]]
    assert len(same) >= 5
    for logprobs, others in same:
        np.testing.assert_allclose(logprobs, others, rtol=0, atol=1e-5)


@pytest.mark.timeout(480)
@pytest.mark.parametrize("name", ["qwen2", *(pytest.param(name, marks=SLOW) for name in [*MODELS, "qwen2_5_vl"][1:])])
def test_two_workers_load_bit_for_bit_from_what_they_read_alone(rollout_python, directory, name):
    shapes, result = probe(rollout_python, directory, name, num_workers=2)
    kv_heads = VL.kv_heads if name == "qwen2_5_vl" else MODELS[name]["num_key_value_heads"]
    check_probe(shapes, result, lambda *tensor: expected_read(*tensor, kv_heads))
    # The buffer of the other worker lacks what this one reads.
    assert all("the weight buffer lacks some of" in why for why in result["errors"]["parts of the other"])


@SLOW
@pytest.mark.timeout(480)
def test_a_worker_that_loads_in_place_reads_everything_and_keeps_its_weights(rollout_python, directory):
    shapes, result = probe(rollout_python, directory, "qwen2", num_workers=1)
    check_probe(shapes, result, lambda name, shape, worker: [whole_slice(shape)])
