"""The training steps of the actor and of a critic, compiled for Ascend in layouts of up to 64 ranks.

All layouts are compiled once, by one child process; this takes a few minutes of two cores.
"""

import math

import pytest
from layout_matrix import ADAPTERS, HIDDEN, LAYOUTS, SEQ_LENGTH, VOCABULARY, request
from slow_tests import SIMULATES_CANN

from mindrlhf.config.training import ParallelSection
from mindrlhf.dryrun.compile.request import Collective, compile_ranks
from mindrlhf.layout.layout import Layout, parameter_layouts
from mindrlhf.layout.parameter import ParameterLayout
from mindrlhf.specs import find_spec
from mindrlhf.specs.lora import AdaptedRules, LoraOptions

pytestmark = [SIMULATES_CANN, pytest.mark.timeout(1800)]

FLOAT32, BFLOAT16 = 4, 2
# Parameters, moments and summed gradients.
STATES = ("", "adam_m.", "adam_v.", "grad.")


def of_layout(name: str) -> pytest.MarkDecorator:
    """Skip a test whose layout is not among those of today."""
    return pytest.mark.skipif(name not in LAYOUTS, reason="slow")


@pytest.fixture(scope="module")
def reports():
    names = list(LAYOUTS)
    return dict(zip(names, compile_ranks([request(name) for name in names], num_processes=2)))


def layout_of(name: str) -> Layout:
    parallel = ParallelSection(**request(name).parallel)
    size = parallel.data_parallel * parallel.model_parallel * parallel.pipeline_stage * parallel.context_parallel
    return Layout.from_config(parallel, size)


@pytest.mark.parametrize("name", LAYOUTS)
def test_compiled_layouts_are_those_computed(reports, name):
    """Every rank of the stage would hold the same shard of every parameter, and of its optimiser state."""
    layout, config = layout_of(name), request(name).hf_config
    spec = find_spec(config)
    stage = layout.pipeline_stage - 1
    rules, others = spec, {"image_rows"}
    if request(name).lora:
        rules = AdaptedRules(spec, spec.dims(config), LoraOptions(**request(name).lora))
        others = {f"lora_scale.{stage}"}
    in_stage = (one for one in parameter_layouts(rules, spec.dims(config), layout) if stage in one.stages)
    # The ranks run a vision tower by themselves and hand its rows to the graph.
    computed = {one.name: one for one in in_stage if not one.name.startswith("visual.")}
    found = {one.name: one for one in reports[name].parameters if not one.name.startswith("accu_grads.")}
    compiled = {full_name: one for full_name, one in found.items() if full_name not in others}
    trained = {rule.mf_name for rule in rules.rules(spec.dims(config)) if rule.trained}
    states = {parameter: STATES if parameter in trained else STATES[:1] for parameter in computed}
    assert compiled.keys() == {prefix + parameter for parameter in computed for prefix in states[parameter]}
    ranks = range(stage * layout.stage_size, (stage + 1) * layout.stage_size)
    for full_name, one in compiled.items():
        expected = computed[full_name.removeprefix("adam_m.").removeprefix("adam_v.").removeprefix("grad.")]
        unsharded = ParameterLayout(one.name, one.global_shape, (stage,), one.device_matrix, one.tensor_map)
        shard = {0: 1, -1: unsharded.num_repeats}.get(one.optimizer_shard_size, one.optimizer_shard_size)
        found = ParameterLayout(one.name, one.global_shape, (stage,), one.device_matrix, one.tensor_map, shard)
        assert one.global_shape == expected.shape
        assert one.shard_shape == unsharded.shard_shape
        assert [found.shard_of(rank) for rank in ranks] == [expected.shard_of(rank) for rank in ranks], full_name


@pytest.mark.parametrize("name", LAYOUTS)
def test_neither_logits_nor_weights_are_gathered(reports, name):
    """What tokens are worth is exchanged as hidden states or single numbers; weights only along optimiser shards."""
    layout = layout_of(name)
    hidden_bytes = SEQ_LENGTH // layout.context_parallel * HIDDEN * FLOAT32
    logits_bytes = SEQ_LENGTH // layout.context_parallel * VOCABULARY * FLOAT32
    assert hidden_bytes < logits_bytes // layout.model_parallel or layout.model_parallel == 8
    model_group = layout.groups("model")
    for one in reports[name].collectives:
        if one.kind == "AllGather" and (one.group_ranks in model_group or layout.optimizer_shard == 1):
            # Context parallelism gathers keys and values, which are as large as the hidden states.
            whole = SEQ_LENGTH * HIDDEN * FLOAT32
            assert one.output_bytes <= whole, one
        assert one.kind != "AlltoAll", one


def total(collectives, kind: str, group: tuple[int, ...]) -> dict[int, int]:
    """Count by bytes of the larger side."""
    counts: dict[int, int] = {}
    for one in collectives:
        if one.kind == kind and one.group_ranks == group:
            size = max(one.input_bytes, one.output_bytes)
            counts[size] = counts.get(size, 0) + one.count
    return counts


@pytest.mark.parametrize("name", [name for name in LAYOUTS if f"{name}-shared" in LAYOUTS])
def test_shared_prompts_cost_no_communication(reports, name):
    """Mask and rotary angles are computed where they are used."""
    plain, shared = (reports[f"{name}{suffix}"].collectives for suffix in ("", "-shared"))
    assert sorted(map(str, plain)) == sorted(map(str, shared))


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=of_layout(name)) for name in ("sees-dp2-mp2", "critic-sees-dp2-mp2")]
)
def test_each_rank_has_the_image_rows_of_its_replica(reports, name):
    """Half of those of all rows, without a collective: what is exchanged is as in a model of text."""
    (rows,) = (one for one in reports[name].parameters if one.name == "image_rows")
    assert (rows.global_shape, rows.shard_shape) == ((2 * SEQ_LENGTH, HIDDEN), (SEQ_LENGTH, HIDDEN))
    assert {one.kind for one in reports[name].collectives} == {"AllReduce"}
    # As test_model_parallel_by_hand.
    assert total(reports[name].collectives, "AllReduce", (2, 3))[ACTIVATION] == 6


TOKENS = SEQ_LENGTH * FLOAT32
HIDDEN_STATES = SEQ_LENGTH * HIDDEN
ACTIVATION = HIDDEN_STATES * BFLOAT16
NORM = HIDDEN * FLOAT32
SCALAR = FLOAT32


def test_model_parallel_by_hand(reports):
    """One layer on two ranks (as in Megatron-LM, Shoeybi et al. 2019, arXiv:1909.08053, section 3)."""
    assert {one.kind for one in reports["qwen2-mp2"].collectives} == {"AllReduce"}
    assert total(reports["qwen2-mp2"].collectives, "AllReduce", (0, 1)) == {
        # Embedding, attention and MLP, forward and backward.
        ACTIVATION: 6,
        # Of each token: the largest logit, the sum of exponentials, the label's logit, the entropy's sum; and
        # backward the two sums that gradients flow through.
        TOKENS: 6,
        # Gradients of the three norms.
        NORM: 3,
        # The gradient norm.
        SCALAR: 1,
    }


@of_layout("qwen2-mp2-adapted")
def test_adapters_by_hand(reports):
    """What the model costs without gradients of embedding and norms, and those of the factors that are whole."""
    assert {one.kind for one in reports["qwen2-mp2-adapted"].collectives} == {"AllReduce"}
    rank = ADAPTERS["rank"]
    assert total(reports["qwen2-mp2-adapted"].collectives, "AllReduce", (0, 1)) == {
        # As in test_model_parallel_by_hand, but that no gradient is taken back to the embedding.
        ACTIVATION: 5,
        TOKENS: 6,
        # A of a matrix whose rows are split, B of one whose columns are.
        3 * rank * HIDDEN * FLOAT32: 1,
        2 * rank * HIDDEN * FLOAT32: 1,
        rank * HIDDEN * FLOAT32: 2,
        SCALAR: 1,
    }


@of_layout("qwen2-mp2-tiles")
def test_tiles_of_logits_exchange_what_the_plain_head_does(reports):
    """However many tiles there are."""
    tiled, plain = (reports[name].collectives for name in ("qwen2-mp2-tiles", "qwen2-mp2"))
    assert sorted(map(str, tiled)) == sorted(map(str, plain))


@of_layout("critic-mp2")
def test_critic_by_hand(reports):
    """As for the actor, without what the vocabulary costs, and with the gradient of one more vector, the score's."""
    assert {one.kind for one in reports["critic-mp2"].collectives} == {"AllReduce"}
    assert total(reports["critic-mp2"].collectives, "AllReduce", (0, 1)) == {
        ACTIVATION: 6,
        NORM: 4,
        SCALAR: 1,
    }


@of_layout("qwen2-mp2-sp")
def test_sequence_parallel_by_hand(reports):
    """All-reduces of activations become a reduce-scatter and an all-gather each (Korthikanti et al. 2022,
    arXiv:2205.05198, section 4.2.2)."""
    collectives = reports["qwen2-mp2-sp"].collectives
    # Forward: into attention, MLP and head; backward: into the outputs of attention and MLP; and of the embedding.
    assert total(collectives, "AllGather", (0, 1)) == {ACTIVATION: 6}
    # Forward: out of attention and MLP, and the embedding; backward: out of attention, MLP and head.
    assert total(collectives, "ReduceScatter", (0, 1)) == {ACTIVATION: 6}
    assert total(collectives, "AllReduce", (0, 1)) == {TOKENS: 6, NORM: 3, SCALAR: 1}


WEIGHTS = {
    "embedding": (VOCABULARY, HIDDEN),
    "head": (VOCABULARY, HIDDEN),
    "qkv": (3 * HIDDEN, HIDDEN),
    "bias": (3 * HIDDEN,),
    "proj": (HIDDEN, HIDDEN),
    "fc1": (512, HIDDEN),
    "fc2": (HIDDEN, 256),
}


def sizes_of(*names: str, element: int = FLOAT32) -> dict[int, int]:
    counts: dict[int, int] = {}
    for name in names:
        size = math.prod(WEIGHTS[name]) * element
        counts[size] = counts.get(size, 0) + 1
    return counts


@of_layout("qwen2-dp2")
def test_data_parallel_by_hand(reports):
    """Every gradient once, the statistics, and the gradient norm."""
    statistics = 7 * FLOAT32
    assert {one.kind for one in reports["qwen2-dp2"].collectives} == {"AllReduce"}
    assert total(reports["qwen2-dp2"].collectives, "AllReduce", (0, 1)) == sizes_of(*WEIGHTS) | {
        NORM: 3,
        statistics: 1,
        SCALAR: 1,
    }


@of_layout("qwen2-dp2-zero")
def test_optimizer_parallel_by_hand(reports):
    """Matrices are gathered before the update's use and their gradients scattered (ZeRO, Rajbhandari et al. 2020,
    arXiv:1910.02054); vectors stay whole. All is gathered as it is read, in bfloat16."""
    products = ("head", "qkv", "proj", "fc1", "fc2")
    collectives = reports["qwen2-dp2-zero"].collectives
    assert total(collectives, "AllGather", (0, 1)) == sizes_of("embedding", *products, element=BFLOAT16)
    assert total(collectives, "ReduceScatter", (0, 1)) == sizes_of("embedding", *products)
    reduced = total(collectives, "AllReduce", (0, 1))
    assert reduced == sizes_of("bias") | {NORM: 3, 7 * FLOAT32: 1, SCALAR: 1}


@of_layout("qwen2-pp2")
def test_pipeline_by_hand(reports):
    """The last of two stages: hidden states come and their gradients go, once for each of two micro-batches."""
    exchanged = {one for one in reports["qwen2-pp2"].collectives if one.kind in ("Send", "Receive")}
    assert exchanged == {
        Collective("Send", (0, 1), 2, ACTIVATION, ACTIVATION),
        Collective("Receive", (0, 1), 2, ACTIVATION, ACTIVATION),
    }


@of_layout("qwen2-dp2-mp4-whole")
def test_vocabulary_that_stays_whole_needs_no_embedding_collective(reports):
    group = tuple(range(4, 8))
    forward = total(reports["qwen2-dp2-mp4-whole"].collectives, "AllReduce", group)
    assert forward[ACTIVATION] == 4  # attention and MLP
