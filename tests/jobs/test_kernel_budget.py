"""What a layer launches on a device, counted in compiled graphs: no number of the table below may rise.

``python tests/jobs/test_kernel_budget.py [LAYOUT ...]`` compiles and prints the table, to be put here in place of it.
"""

import dataclasses
import sys

import pytest

if __name__ == "__main__":
    sys.path[:0] = [".", "tests", "tests/helpers"]

from kernel_counts.compile import compile_kernels
from kernel_counts.counts import KernelCounts, count_kernels, two_depths
from kernel_counts.replay import replay
from layout_matrix import QWEN2, hf_config
from slow_tests import SIMULATES_CANN, SLOW
from tiny_models import LINEAR_ATTENTION

from mindrlhf.dryrun.compile.request import GRADIENTS, LOGPROBS, UPDATE, CompileRequest
from mindrlhf.dryrun.plan.roofline import DEVICES, of_node

pytestmark = [SLOW, SIMULATES_CANN, pytest.mark.timeout(900)]
# Wide enough that no two widths are the same: logits, gates and hidden states are told apart by them.
SHAPE = {"vocab_size": 1536, "intermediate_size": 320}
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
LINEAR = {**LINEAR_ATTENTION, "linear_key_head_dim": 16, "linear_value_head_dim": 16}
LINEAR |= {"layer_types": ["linear_attention"] * 2, "partial_rotary_factor": 0.5}
ZERO = {"enable_parallel_optimizer": True, "vocab_emb_dp": False}
LAYOUTS = {
    "dp8": (QWEN2, {}, {"data_parallel": 8, **ZERO}),
    "mp4dp2": (QWEN2, {}, {"data_parallel": 2, "model_parallel": 4, "use_seq_parallel": True, **ZERO}),
    "mp2pp2dp2": (
        QWEN2,
        {},
        {
            "data_parallel": 2,
            "model_parallel": 2,
            "pipeline_stage": 2,
            "micro_batch_num": 2,
            "use_seq_parallel": True,
            **ZERO,
        },
    ),
    "experts": (
        "Qwen3MoeForCausalLM",
        EXPERTS,
        {"data_parallel": 2, "model_parallel": 2, "expert_parallel": 4, "use_seq_parallel": True, **ZERO},
    ),
}
# The calls of an update before its last.
LAYOUTS["dp8 gradients"] = LAYOUTS["dp8"]
LAYOUTS["linear attention"] = ("Qwen3_5ForCausalLM", LINEAR, {"data_parallel": 8, **ZERO})
LAYOUTS["experts replayed"] = LAYOUTS["experts"]  # with the routing that the server returned
BUDGETED = ("dp8", "mp2pp2dp2", "experts", "dp8 gradients", "linear attention")
ROWS: dict[str, tuple[float, ...]] = {  # a number for each of these
    "forward": (29.0, 26.5, 73.0, 29.0, 276.0),
    "recompute": (21.0, 21.0, 38.0, 21.0, 156.0),
    "backward": (33.0, 28.0, 62.0, 33.0, 85.0),
    "state": (207.0, 252.0, 301.0, 7.0, 352.0),
    "weight casts, forward": (5.0, 2.5, 4.0, 5.0, 6.0),
    "weight gathers": (4, 4, 2, 4, 3),
    "float32 weight gathers": (0, 0, 0, 0, 0),
    "gradient reductions": (7, 7, 7, 7, 12),
    "bytes of state": (260.2, 177.8, 272.1, 12.0, 260.1),
    "bytes of a logit": (30.0, 30.0, 30.0, 30.0, 30.0),
    "square nodes": (3.0, 3.0, 3.0, 3.0, 0.0),
    "host waits": (0.0, 0.0, 2.0, 0.0, 0.0),
    "dynamic nodes": (0.0, 0.0, 30.0, 0.0, 0.0),
}
BUDGET = {name: dict(zip(ROWS, numbers)) for name, numbers in zip(BUDGETED, zip(*ROWS.values()))}
BUDGET["mp4dp2"] = BUDGET["dp8"]
BUDGET["experts replayed"] = BUDGET["experts"] | {"forward": 79.0, "recompute": 42.0, "backward": 64.0}


def request(name: str) -> CompileRequest:
    architecture, changes, parallel = LAYOUTS[name]
    stage_size = parallel.get("data_parallel", 1) * parallel.get("model_parallel", 1)
    return CompileRequest(
        hf_config=hf_config(architecture, 2, **SHAPE, **changes),
        parallel=parallel,
        rank=(parallel.get("pipeline_stage", 1) - 1) * stage_size,
        seq_length=48,
        micro_batch_size=2,
        recompute=True,
        beta=0.0,
        cell=GRADIENTS if name.endswith(GRADIENTS) else UPDATE,
        replays_routing=name.endswith("replayed"),
    )


def measure(name: str) -> dict[str, float]:
    requests = two_depths(request(name))
    return table(count_kernels(requests[0], compile_kernels(requests)))


def table(counts: KernelCounts) -> dict[str, float]:
    gathers = [row for row in counts.collectives if (row.op, row.carries) == ("AllGather", "weights")]
    reductions = [row for row in counts.collectives if row.carries == "gradients"]
    numbers = {
        **counts.kernels,
        **{f"weight casts, {part}": number for part, number in counts.weight_casts.items()},
        "weight gathers": sum(row.layer_count for row in gathers),
        # The embedding's and the head's too.
        "float32 weight gathers": sum(row.layer_count + row.other_count for row in gathers if row.dtype == "Float32"),
        "gradient reductions": sum(row.layer_count for row in reductions),
        "bytes of state": counts.state_bytes / counts.num_micro_batches,
        "bytes of a logit": counts.logit_bytes,
        "square nodes": counts.square_nodes,
        "host waits": counts.host_syncs,
        "dynamic nodes": counts.dynamic_nodes,
    }
    return {key: round(number, 1) for key, number in numbers.items()}


@pytest.mark.parametrize("name", LAYOUTS)
def test_no_number_rises(name):
    found, allowed = measure(name), BUDGET[name]
    risen = {key: (number, allowed.get(key, 0)) for key, number in found.items() if number > allowed.get(key, 0)}
    assert not risen, f"{name}: (now, budget) of {risen}; regenerate the table if it must be"
    assert found["forward"] > 0 and found["backward"] > 0 and found["state"] > 0


WIDE = {  # Qwen2.5-7B
    "hidden_size": 3584, "intermediate_size": 18944, "num_attention_heads": 28, "num_key_value_heads": 4,
    "vocab_size": 152064, "max_position_embeddings": 4096,
}  # fmt: skip


@pytest.mark.parametrize("cell", [GRADIENTS, LOGPROBS])
@pytest.mark.parametrize("name", ["dp8", "mp4dp2"])
def test_no_layer_waits_for_weights_but_the_first(name, cell):
    """Of four layers of real widths, replayed: a layer whose weights are waited for too early adds 2 ms and more."""
    shallow = request(name)
    wide = hf_config(QWEN2, 4, **WIDE)
    wanted = dataclasses.replace(shallow, hf_config=wide, num_layers=4, seq_length=4096, cell=cell, plan_memory=True)
    (report,) = compile_kernels([wanted])
    found = replay(report.kernels, of_node(DEVICES["A2"], 8))
    assert 0 < found.waits["weights AllGather"] < 5e-3, found.waits
    for layer in range(1, 4):
        assert found.begins[layer, "Transpose"] > found.begins[layer - 1, "RmsNorm"], "weights are put in order early"


if __name__ == "__main__":
    columns = [measure(layout) for layout in sys.argv[1:] or BUDGETED]
    for key in columns[0]:
        print(f'    "{key}": {tuple(column[key] for column in columns)},')
