"""The plan's exact numbers against the graphs that are compiled: one layout of each model family, to the byte."""

import dataclasses
import math
from collections import Counter

import pytest
from layout_matrix import QWEN2, QWEN3, SEQ_LENGTH, hf_config
from slow_tests import SIMULATES_CANN, SLOW

from mindrlhf.config.training import ParallelSection
from mindrlhf.dryrun.compile.request import CompileRequest, compile_ranks
from mindrlhf.dryrun.plan.parameters import stage_states, untrained_names
from mindrlhf.dryrun.plan.plan import accumulates
from mindrlhf.layout.layout import Layout, parameter_layouts
from mindrlhf.specs import find_spec

pytestmark = [SLOW, SIMULATES_CANN, pytest.mark.timeout(1200)]

EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
LATENT = {
    "num_experts_per_tok": 2, "moe_intermediate_size": 64, "first_k_dense_replace": 1, "n_routed_experts": 8,
    "n_shared_experts": 1, "n_group": 2, "topk_group": 1, "q_lora_rank": 32, "kv_lora_rank": 32,
    "qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "v_head_dim": 16,
}  # fmt: skip
ZERO = {"enable_parallel_optimizer": True}
# (config.json, keys of parallel_config beside model_parallel 2 and data_parallel 2)
FAMILIES = {
    "qwen2": (hf_config(QWEN2, 1), {**ZERO}),
    "qwen3": (hf_config(QWEN3, 2), {**ZERO, "pipeline_stage": 2, "micro_batch_num": 2}),
    "qwen3-experts": (
        hf_config("Qwen3MoeForCausalLM", 1, **EXPERTS),
        {**ZERO, "expert_parallel": 2, "use_seq_parallel": True, "micro_batch_num": 2},
    ),
    "deepseek-v3": (
        hf_config("DeepseekV3ForCausalLM", 2, **LATENT),
        {"expert_parallel": 4, "use_seq_parallel": True, "enable_parallel_optimizer": True},
    ),
}
# Prefixes of what a parameter of the graph is, but for those of one element.
KINDS = {"adam_m.": "moments", "adam_v.": "moments", "grad.": "gradient_sums", "accu_grads.": "accumulators"}
FLOAT = 1  # as MindIR numbers dtypes
SMALL_BYTES = 4096


def parallel_of(name):
    return ParallelSection(data_parallel=2, model_parallel=2, vocab_emb_dp=False, **FAMILIES[name][1])


@pytest.fixture(scope="module")
def graphs(tmp_path_factory):
    """The graph of the last rank of each family, in MindIR."""
    from mindspore.train.mind_ir_pb2 import ModelProto

    directory = tmp_path_factory.mktemp("graphs")
    requests = {
        name: CompileRequest(
            hf_config=config,
            parallel=dataclasses.asdict(parallel_of(name)),
            rank=4 * parallel_of(name).pipeline_stage - 1,
            seq_length=SEQ_LENGTH,
            mindir_file=str(directory / f"{name}.mindir"),
        )
        for name, (config, _) in FAMILIES.items()
    }
    compile_ranks(list(requests.values()), num_processes=2)
    found = {}
    for name, request in requests.items():
        found[name] = ModelProto()
        with open(request.mindir_file, "rb") as file:
            found[name].ParseFromString(file.read())
    return found


@pytest.mark.parametrize("name", FAMILIES)
def test_state_is_that_of_the_compiled_graph(graphs, name):
    config, parallel = FAMILIES[name][0], parallel_of(name)
    spec = find_spec(config)
    dims = spec.dims(config)
    layout = Layout.from_config(parallel, 4 * parallel.pipeline_stage)
    layouts = parameter_layouts(spec, dims, layout, 4)
    untrained = untrained_names(spec, dims)
    planned = stage_states(layouts, layout.pipeline_stage, "float32", untrained, accumulates(parallel))[-1]
    names = {one.name for one in layouts}
    compiled = Counter()
    for tensor in graphs[name].graph.parameter:
        full_name = tensor.name.rpartition(":")[2]
        prefix = next((prefix for prefix in KINDS if full_name.startswith(prefix)), "")
        if full_name.removeprefix(prefix) in names:
            assert tensor.data_type == FLOAT
            compiled[KINDS.get(prefix, "parameters")] += 4 * math.prod(tensor.dims)
    sizes = {kind: getattr(planned, kind) for kind in ("parameters", *KINDS.values())}
    assert compiled == {kind: size for kind, size in sizes.items() if size}


@pytest.mark.parametrize("name", FAMILIES)
def test_no_constant_is_as_large_as_a_weight(graphs, name):
    """A tensor of zeros in the shape of a gradient would be data of the graph, and take as much memory."""
    graph = graphs[name]
    sizes = [
        len(tensor.raw_data)
        for function in (graph.graph, *graph.functions)
        for node in function.node
        for attribute in node.attribute
        for tensor in (*attribute.tensors, attribute.t)
    ]
    assert max(sizes, default=0) <= SMALL_BYTES
