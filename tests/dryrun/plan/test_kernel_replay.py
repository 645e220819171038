"""The replay of streams and events, against times worked out by hand on a device of round rates."""

import dataclasses

import pytest

from mindrlhf.dryrun.compile.request import Kernel
from mindrlhf.dryrun.plan.devices import DEVICES, Device
from mindrlhf.dryrun.plan.replay import kernel_seconds, product_operations, replay

# A float32 of memory takes 4 s, a floating-point operation 1 s, a byte over a link 1 s.
SLOW = Device(
    *("slow", 1.0, 1.0, 1.0, 7, 0.5, 1.0, 1.0),
    node_size=8, launch_s=0.0, collective_s=0.0, reached=(1.0, 1.0, 1.0),
)


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


def test_a_collective_is_hidden_by_what_runs_before_its_wait():
    # 20 floats to gather by two ranks: 80 bytes, of which 40 are sent. 3 floats of work take 12 s meanwhile.
    order = [
        *(event("StreamSend", 0, 1), event("StreamRecv", 1, 1), gather(20), event("StreamSend", 1, 2), vector(3)),
        *(event("StreamRecv", 0, 2), vector(1)),
    ]
    found = replay(order, SLOW)
    assert found.seconds == 40 + 4
    assert found.busy["weights AllGather"] == 40 and found.hidden["weights AllGather"] == 12


def test_a_collective_waits_for_the_main_stream():
    order = [vector(2), event("StreamSend", 0, 1), event("StreamRecv", 1, 1), gather(20)]
    assert replay(order, SLOW).seconds == 8 + 40


def test_launches_that_take_longer_than_kernels_are_what_counts():
    device = dataclasses.replace(SLOW, launch_s=10.0)
    assert replay([vector(1)] * 3, device).seconds == 34
    assert replay([vector(1)] * 3, device.promised).seconds == 12


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
    assert kernel_seconds(gather(2, ranks, op=op), SLOW) == (seconds, 0.0)


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
    assert kernel_seconds(large, SLOW)[0] == 2 * 64**3
    thin = Kernel("MatMul", "forward", 0, inputs=bf16((64, 1), (1, 64)), outputs=bf16((64, 64)))
    assert kernel_seconds(thin, SLOW)[0] == 2 * (64 + 64 + 64 * 64)


def test_what_is_reached_is_less_than_what_is_promised():
    order = [vector(1000), gather(1000, (0, 1, 2))]
    for device in DEVICES.values():
        assert replay(order, device.promised).seconds < replay(order, device).seconds
