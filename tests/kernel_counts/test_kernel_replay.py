"""The replay of streams and events, against times worked out by hand on a device of round rates."""

import pytest

from kernel_counts.graph_text import Kernel
from kernel_counts.replay import kernel_seconds, product_operations, replay
from mindrlhf.dryrun.plan.roofline import Device

# A float32 of memory takes 4 s, a floating-point operation 1 s, a byte over a link 1 s.
SLOW = Device(products=1.0, memory=1.0, link=1.0, num_links=7, network=0.5, node_size=8)


def vector(number, stream=0, part="forward"):
    """Reads ``number`` floats and writes none."""
    return Kernel("Neg", part, stream, inputs=(("Float32", (number,)),))


def gather(number, ranks=(0, 1), stream=1, op="AllGather"):
    return Kernel(op, "forward", stream, outputs=(("Float32", (number,)),), ranks=ranks, role="weights")


def event(op, stream, number):
    return Kernel(op, "", stream, number)


def test_kernels_of_a_stream_follow_each_other_and_streams_do_not():
    assert replay([vector(1), vector(2)], SLOW).seconds == 12
    assert replay([vector(1), vector(2, stream=1)], SLOW).seconds == 8


def test_work_goes_on_until_a_stream_waits_for_a_collective():
    # 20 floats to gather by two ranks: 80 bytes, of which 40 are sent. 3 floats of work take 12 s meanwhile.
    order = [
        *(event("StreamSend", 0, 1), event("StreamRecv", 1, 1), gather(20), event("StreamSend", 1, 2), vector(3)),
        *(event("StreamRecv", 0, 2), vector(1)),
    ]
    found = replay(order, SLOW)
    assert found.seconds == 40 + 4
    assert found.waits == {"weights AllGather": 28} and found.state == 0


def test_a_collective_waits_for_the_main_stream():
    order = [vector(2), event("StreamSend", 0, 1), event("StreamRecv", 1, 1), gather(20)]
    found = replay(order, SLOW)
    assert found.seconds == 8 + 40 and not found.waits
    assert found.begins == {(-1, "Neg"): 0, (-1, "weights AllGather"): 8}


@pytest.mark.parametrize(
    ("op", "ranks", "seconds"),
    [
        ("AllGather", (0, 1), 8 / 2),  # one link
        ("AllGather", (0, 1, 2, 3), 8 * 3 / 4 / 3),  # three links
        ("AllReduce", (0, 1, 2, 3), 2 * 8 * 3 / 4 / 3),
        ("Send", (0, 1), 8),
        ("AllGather", (0, 8), 8 / 2 / 0.5),  # another node
        ("AllGather", (0,), 0),
    ],
)
def test_a_group_uses_the_links_between_its_ranks(op, ranks, seconds):
    assert kernel_seconds(gather(2, ranks, op=op), SLOW) == seconds


def bf16(*shapes):
    return tuple(("BFloat16", shape) for shape in shapes)


@pytest.mark.parametrize(
    ("op", "inputs", "outputs", "operations"),
    [
        ("MatMul", bf16((3, 5), (5, 7)), bf16((3, 7)), 2 * 3 * 5 * 7),
        ("MatMul", bf16((5, 3), (5, 7)), bf16((3, 7)), 2 * 3 * 5 * 7),
        ("BatchMatMul", bf16((2, 4, 3, 5), (2, 4, 5, 7)), bf16((2, 4, 3, 7)), 8 * 2 * 3 * 5 * 7),
        ("GroupedMatmul", bf16((6, 5), (4, 5, 7)), bf16((6, 7)), 2 * 6 * 5 * 7),
        # Two products of half of the scores each.
        ("FlashAttentionScore", bf16((2, 4, 16, 8), (2, 2, 16, 8), (2, 2, 16, 8)), (), 2 * 2 * 4 * 16 * 16 * 8 * 2 / 2),
        # Packed into one row.
        ("FlashAttentionScore", bf16((16, 4, 8), (16, 2, 8), (16, 2, 8)), (), 2 * 4 * 16 * 16 * 8 * 2 / 2),
        ("FlashAttentionScoreGrad", bf16((1, 4, 16, 8), (1, 2, 16, 8), (1, 2, 16, 8)), (), 5 * 4 * 16 * 16 * 8),
        ("Mul", bf16((3, 5), (3, 5)), bf16((3, 5)), 0),
    ],
)
def test_operations_of_products(op, inputs, outputs, operations):
    kernel = Kernel(op, "forward", 0, inputs=inputs, outputs=outputs)
    assert product_operations(kernel) == pytest.approx(operations)


def test_a_product_takes_what_its_operations_or_its_memory_need():
    large = Kernel("MatMul", "forward", 0, inputs=bf16((64, 64), (64, 64)), outputs=bf16((64, 64)))
    assert kernel_seconds(large, SLOW) == 2 * 64**3
    thin = Kernel("MatMul", "forward", 0, inputs=bf16((64, 1), (1, 64)), outputs=bf16((64, 64)))
    assert kernel_seconds(thin, SLOW) == 2 * (64 + 64 + 64 * 64)
