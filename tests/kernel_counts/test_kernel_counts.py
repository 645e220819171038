"""Counts of two graphs whose kernels are written down here: the second has one layer more, which is what is counted."""

import dataclasses

import pytest

from kernel_counts.compile import KernelReport
from kernel_counts.counts import _of_pipeline, count_kernels
from kernel_counts.graph_text import Kernel
from mindrlhf.dryrun.compile.request import CompileRequest
from mindrlhf.dryrun.plan.roofline import DEVICES, of_node

LENGTH, HIDDEN, MLP, VOCABULARY = 48, 256, 512, 200
REQUEST = CompileRequest(
    hf_config={
        "architectures": ["Qwen3ForCausalLM"],
        "hidden_size": HIDDEN,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "head_dim": 64,
        "vocab_size": VOCABULARY,
        "intermediate_size": MLP,
        "tie_word_embeddings": False,
    },
    parallel={"data_parallel": 2, "enable_parallel_optimizer": True},
    seq_length=LENGTH,
)
# Four products of attention, three of the MLP; half of each is here. Norms are of two widths: hidden, and of a head.
ELEMENTS = (4 * HIDDEN * HIDDEN + 3 * HIDDEN * MLP) // 2
NORMS = 2 * HIDDEN + 2 * 64


def tensor(kind, *dims):
    return ((kind, dims),)


def layer(micro_batches=1):
    """Forward: 2 kernels; recomputed: 1; backward: 1; state: 3 of 20 bytes for each element."""
    for _ in range(micro_batches):
        weight = (HIDDEN, HIDDEN)
        yield Kernel("Cast", "forward", 0, -1, tensor("Float32", *weight), tensor("BFloat16", *weight), (), "weights")
        yield Kernel("Less", "forward", 0, -1, (), tensor("Bool", 1, LENGTH, LENGTH))
        yield Kernel("MoveTo", "recompute", 0, -1, (), tensor("Int64", -1))
        yield Kernel("Neg", "backward", 0, -1, tensor("BFloat16", LENGTH, HIDDEN))
    shard = tensor("Float32", ELEMENTS + NORMS)
    for _ in range(2):
        yield Kernel("Add", "state", 0, -1, (*shard, *shard), shard)
    yield Kernel("Mul", "state", 0, -1, shard, shard)
    gathered = tensor("Float32", HIDDEN, HIDDEN)
    yield Kernel("AllGather", "forward", 1, -1, tensor("Float32", HIDDEN // 2, HIDDEN), gathered, (0, 1), "weights")


def head():
    logits, weights = (LENGTH, VOCABULARY), (VOCABULARY, HIDDEN)
    hidden = tensor("BFloat16", LENGTH, HIDDEN)
    yield Kernel("MatMul", "forward", 0, -1, (*hidden, ("BFloat16", weights)), (("BFloat16", logits),))
    yield Kernel("Cast", "forward", 0, -1, (("BFloat16", logits),), (("Float32", logits),))
    yield Kernel("ReduceSum", "forward", 0, -1, (("Float32", logits),), tensor("Float32", LENGTH))
    yield Kernel("Cast", "backward", 0, -1, (("BFloat16", weights),), (("Float32", weights),))
    row = tensor("Float32", LENGTH)
    yield Kernel("AllReduce", "forward", 1, -1, row, row, (0, 1), "activations")


def reports(micro_batches=1):
    parts = (tuple(head()), tuple(layer(micro_batches)))
    return [KernelReport(parts[0] + number * parts[1]) for number in (1, 2)]


def counts(micro_batches=1, num_layers=5):
    request = dataclasses.replace(REQUEST, parallel=REQUEST.parallel | {"micro_batch_num": micro_batches})
    found = reports(micro_batches)
    return count_kernels(request, found, found, num_layers, of_node(DEVICES["A2"], 8))


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_a_layer_is_the_difference_and_a_micro_batch_its_share(micro_batches):
    found = counts(micro_batches)
    assert found.kernels == {"forward": 2, "recompute": 1, "backward": 1, "state": 3}
    assert found.weight_casts == {"forward": 1}
    assert (found.square_nodes, found.host_syncs, found.dynamic_nodes) == (1, 1, 1)
    assert found.state_bytes == 2 * 12 + 8


def test_logits_are_what_is_as_wide_as_the_vocabulary_but_for_the_heads_weights():
    # Read in bfloat16, written in float32, read again.
    assert counts().logit_bytes == 2 + 4 + 4


def test_collectives_of_a_layer_stand_beside_those_elsewhere():
    rows = {(row.op, row.carries): row for row in counts().collectives}
    gather, reduce = rows["AllGather", "weights"], rows["AllReduce", "activations"]
    assert (gather.layer_count, gather.other_count) == (1, 0) and (reduce.layer_count, reduce.other_count) == (0, 1)
    assert gather.dtype == "Float32" and gather.num_ranks == 2


def test_times_are_extended_to_all_layers():
    one, many = counts(num_layers=1), counts(num_layers=5)
    assert one.seconds < many.seconds
    assert many.state_seconds == pytest.approx(5 * one.state_seconds)


def test_a_pipeline_is_filled_and_drained_but_its_state_is_touched_once():
    found = dataclasses.replace(counts(2), seconds=2.0, state_seconds=0.5)
    # Of two micro-batches, 1.5 s without state; four stages with eight take 11 turns.
    assert _of_pipeline(found, 4, 8).seconds == 0.5 + 1.5 * 11 / 2
