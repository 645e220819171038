"""A message that hypothesis can think of, and YAML that stands for gigabytes."""

import json
import socket
import struct
import zlib

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from mindrlhf.config.load import load_grpo_config
from mindrlhf.errors import UserError
from mindrlhf.system.wire import ConnectionClosed, ProtocolError, receive_message

QUICK = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=6), inner, max_size=4),
    max_leaves=8,
)
SIZES = st.lists(st.integers(-1, 4) | st.sampled_from([2**31, 2**62, 2**64]), max_size=3)


@QUICK
@given(
    layout=st.lists(st.tuples(st.text(max_size=3), st.sampled_from(["<i4", "<f8", "?", "O"]), SIZES) | JSON, max_size=4)
    | JSON
)
@example(layout=[["a", "<i4", [0, 2**62, 2**62]]])
@example(layout=[["a", "<i4", [1]], ["a", "<i4", [1]]])
@example(layout=[["a", "<i4", [float("inf")]]])
def test_a_message_is_refused_or_has_the_arrays_it_announces(layout):
    text = json.dumps({"header": {}, "arrays": layout}).encode()
    payload = bytes(range(24))
    message = struct.pack("!4sIIQ", b"MRL1", len(text), zlib.crc32(text), len(payload)) + text + payload
    left, right = socket.socketpair()
    with left, right:
        left.sendall(message)
        left.close()
        try:
            _, arrays = receive_message(right, timeout_s=20)
        except (ConnectionClosed, ProtocolError):
            return
    assert b"".join(array.tobytes() for array in arrays.values()) == payload
    assert [list(array.shape) for array in arrays.values()] == [list(map(int, shape)) for _, _, shape in layout]


def test_aliases_that_stand_for_gigabytes_do_not_become_a_message(tmp_path):
    levels = [f"&{chr(98 + level)} [{', '.join([f'*{chr(97 + level)}'] * 10)}]" for level in range(12)]
    path = tmp_path / "config.yaml"
    path.write_text("\n".join(["run:", "  max_steps:", "  - &a x", *(f"  - {level}" for level in levels)]))
    with pytest.raises(UserError) as caught:
        load_grpo_config(path)
    assert len(str(caught.value)) < 2000
