import json
import socket
import struct
import threading
import zlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from mindrlhf.system.wire import ConnectionClosed, ProtocolError, receive_message, send_message

DTYPES = st.sampled_from(["?", "<i4", "<i8", "<u2", "<u8", "<f2", "<f4", "<f8"])
SHAPES = hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=5)
ARRAYS = DTYPES.flatmap(lambda dtype: hnp.arrays(dtype, SHAPES))
NAMES = st.text(max_size=8)
JSON_VALUES = st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.text(max_size=20)


@pytest.fixture
def pair():
    left, right = socket.socketpair()
    with left, right:
        yield left, right


def frame(header: dict, arrays: dict) -> bytes:
    """The bytes of one message, as they appear on the stream."""
    left, right = socket.socketpair()
    with left, right:
        send_message(left, header, arrays)
        left.close()
        return b"".join(iter(lambda: right.recv(65536), b""))


@settings(max_examples=50)
@given(st.dictionaries(NAMES, JSON_VALUES, max_size=4), st.dictionaries(NAMES, ARRAYS, max_size=4))
def test_a_message_arrives_as_it_was_sent(header, arrays):
    left, right = socket.socketpair()
    with left, right:
        send_message(left, header, arrays)
        got_header, got_arrays = receive_message(right)
    assert got_header == header
    assert list(got_arrays) == list(arrays)
    for name, array in arrays.items():
        assert got_arrays[name].dtype == array.dtype
        assert got_arrays[name].shape == array.shape
        assert got_arrays[name].tobytes() == array.tobytes()


def test_slices_and_transposes_keep_their_logical_order(pair):
    table = np.arange(24, dtype=np.int32).reshape(4, 6)
    send_message(pair[0], {}, {"columns": table[:, 1:3], "transposed": table.T})
    _, arrays = receive_message(pair[1])
    np.testing.assert_array_equal(arrays["columns"], table[:, 1:3])
    np.testing.assert_array_equal(arrays["transposed"], table.T)


@pytest.mark.parametrize("timeout_s", [None, 30.0])
def test_a_message_larger_than_the_socket_buffer_and_with_many_arrays(pair, timeout_s):
    random = np.random.default_rng(0)
    arrays = {f"a{i}": random.integers(0, 255, 20_000, dtype=np.uint8) for i in range(1500)}
    sender = threading.Thread(target=send_message, args=(pair[0], {"n": 1500}, arrays, timeout_s))
    sender.start()
    header, got = receive_message(pair[1], timeout_s)
    sender.join()
    assert header == {"n": 1500}
    assert all(np.array_equal(got[name], array) for name, array in arrays.items())


def test_messages_follow_each_other_on_one_stream(pair):
    for i in range(3):
        send_message(pair[0], {"i": i}, {"x": np.full(i, i)})
    assert [receive_message(pair[1])[0]["i"] for _ in range(3)] == [0, 1, 2]


def test_object_arrays_are_refused(pair):
    with pytest.raises(ProtocolError, match="'x' has dtype object"):
        send_message(pair[0], {}, {"x": np.array([{}], dtype=object)})


@settings(max_examples=30)
@given(st.data())
def test_a_truncated_message_is_a_closed_connection(data):
    whole = frame({"kind": "test"}, {"x": np.arange(10.0)})
    length = data.draw(st.integers(0, len(whole) - 1))
    left, right = socket.socketpair()
    with right:
        with left:
            left.sendall(whole[:length])
        with pytest.raises(ConnectionClosed, match="middle of a message" if length else "closed the connection$"):
            receive_message(right)


@settings(max_examples=60)
@given(st.data())
def test_a_flipped_bit_before_the_payload_is_noticed(data):
    array = np.arange(4.0)
    whole = bytearray(frame({"kind": "test"}, {"x": array}))
    position = data.draw(st.integers(0, len(whole) - array.nbytes - 1))
    whole[position] ^= 1 << data.draw(st.integers(0, 7))
    left, right = socket.socketpair()
    with right:
        with left:
            left.sendall(whole)
        with pytest.raises((ProtocolError, ConnectionClosed)):
            receive_message(right)


@pytest.mark.parametrize(
    "text, payload",
    [
        (b"not json", b""),
        (b'{"header": {}}', b""),
        (b'{"header": [], "arrays": []}', b""),
        (b'{"header": {}, "arrays": [["x", "|O", [1]]]}', bytes(8)),
        (b'{"header": {}, "arrays": [["x", "<f4", [-1, -1]]]}', bytes(4)),
        (b'{"header": {}, "arrays": [["x", "<f4", [2]]]}', bytes(4)),
    ],
)
def test_well_framed_nonsense_is_refused(pair, text, payload):
    pair[0].sendall(struct.pack("!4sIIQ", b"MRL1", len(text), zlib.crc32(text), len(payload)) + text + payload)
    with pytest.raises(ProtocolError, match="corrupt stream"):
        receive_message(pair[1])


def test_a_message_over_the_limit_is_refused_before_memory_is_taken(pair):
    text = json.dumps({"header": {}, "arrays": [["x", "|u1", [1 << 50]]]}).encode()
    pair[0].sendall(struct.pack("!4sIIQ", b"MRL1", len(text), zlib.crc32(text), 1 << 50) + text)
    with pytest.raises(ProtocolError, match="over the limits"):
        receive_message(pair[1])


def test_waiting_for_a_silent_peer_ends_and_the_connection_survives(pair):
    with pytest.raises(TimeoutError):
        receive_message(pair[1], timeout_s=0.05)
    send_message(pair[0], {"late": True})
    assert receive_message(pair[1], timeout_s=5)[0] == {"late": True}


def test_sending_to_a_peer_that_never_reads_ends(pair):
    with pytest.raises(TimeoutError):
        send_message(pair[0], {}, {"x": np.zeros(1 << 24, np.uint8)}, timeout_s=0.1)


def test_sending_to_a_closed_peer(pair):
    pair[1].close()
    with pytest.raises(ConnectionClosed):
        send_message(pair[0], {}, {"x": np.zeros(1 << 20)})
