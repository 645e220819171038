"""Properties of the parsers over everything that hypothesis can think of."""

import json
import math
import socket
import struct
import zlib

import numpy as np
import pytest
from fuzz_files import make_checkpoint, make_prompt_file
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from mindrlhf.checkpoint.manifest import MANIFEST_NAME, DamagedDirectory, verify
from mindrlhf.config.load import load_grpo_config
from mindrlhf.config.parse import dotted_keys
from mindrlhf.config.schema import GrpoConfig
from mindrlhf.data.mindrecord import PromptFile, index_path
from mindrlhf.errors import UserError
from mindrlhf.system.wire import ConnectionClosed, ProtocolError, receive_message
from mindrlhf.weights.safetensors_file import SafetensorsFile

QUICK = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=6), inner, max_size=4),
    max_leaves=8,
)
SIZES = st.lists(st.integers(-1, 4) | st.sampled_from([2**31, 2**62, 2**64]), max_size=3)
ENTRY = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from(["F32", "F16", "BF16"]),
        "shape": SIZES,
        "data_offsets": SIZES | st.tuples(*[st.integers(0, 64)] * 2),
    }
)
_F32_PAIR = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
KEYS = [dotted for dotted, _, _ in dotted_keys(GrpoConfig)]


@QUICK
@given(header=st.dictionaries(st.text(max_size=6), ENTRY | JSON, max_size=4) | JSON)
@example(header={"a": {"dtype": "F32", "shape": [2**31, 2**31, 4], "data_offsets": [0, 0]}})  # 2**64 wraps to 0
@example(header={"a": {"dtype": "F32", "shape": [0, 2**62], "data_offsets": [0, 0]}})
@example(header={"a": {"dtype": "BF16", "shape": [3], "data_offsets": [8, 14]}, "b": _F32_PAIR})
@example(header={"a": {"dtype": "BF16", "shape": [3], "data_offsets": [6, 12]}, "b": _F32_PAIR})  # an overlap
@example(header={"a": {"dtype": "BF16", "shape": [3], "data_offsets": [9, 15]}, "b": _F32_PAIR})  # a gap
def test_a_safetensors_file_is_refused_or_its_tensors_fill_their_places_apart(tmp_path, header):
    text = json.dumps(header).encode()
    path = tmp_path / "x.safetensors"
    path.write_bytes(struct.pack("<Q", len(text)) + text + bytes(_last_end(header)))
    try:
        file = SafetensorsFile(path)
    except UserError:
        return
    places = []
    for name in file.names():
        start, end = header[name]["data_offsets"]
        assert file.read(name).nbytes == end - start
        assert math.prod(file.info(name).shape) == file.read(name).size
        places.append(range(start, end))
    used = [position for place in places for position in place]
    assert sorted(used) == list(range(_last_end(header)))


def _last_end(header):
    """Where the data of a header's tensors ends, at most 64."""
    entries = header.values() if isinstance(header, dict) else []
    places = [entry.get("data_offsets") for entry in entries if isinstance(entry, dict)]
    ends = [place[1] for place in places if isinstance(place, (list, tuple)) and len(place) == 2]
    return max([end for end in ends if type(end) is int and 0 <= end <= 64], default=0)


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


@QUICK
@given(key=st.sampled_from(KEYS), value=st.text(max_size=30) | JSON.map(json.dumps))
@example(key="rollout.env", value="{a: &x [*x]}")
@example(key="run.max_steps", value="!!int ''")
@example(key="optimizer.start_lr", value="0x" + "f" * 5000)
@example(key="run.max_steps", value="!!timestamp x")
def test_an_override_is_refused_or_taken(tmp_path, key, value):
    path = tmp_path / "config.yaml"
    path.write_text("{}")
    try:
        load_grpo_config(path, [f"{key}={value}"])
    except UserError as error:
        assert len(str(error)) < 5000


def test_aliases_that_stand_for_gigabytes_do_not_become_a_message(tmp_path):
    levels = [f"&{chr(98 + level)} [{', '.join([f'*{chr(97 + level)}'] * 10)}]" for level in range(12)]
    path = tmp_path / "config.yaml"
    path.write_text("\n".join(["run:", "  max_steps:", "  - &a x", *(f"  - {level}" for level in levels)]))
    with pytest.raises(UserError) as caught:
        load_grpo_config(path)
    assert len(str(caught.value)) < 2000


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("checkpoint"))


@pytest.fixture(scope="module")
def prompt_path(tmp_path_factory):
    return make_prompt_file(tmp_path_factory.mktemp("prompts"))


@QUICK
@given(data=st.data())
def test_no_single_wrong_bit_in_a_prompt_file_or_its_index_goes_unnoticed(prompt_path, data):
    path = data.draw(st.sampled_from([prompt_path, index_path(prompt_path)]))
    whole = path.read_bytes()
    position = data.draw(st.integers(0, len(whole) - 1))
    changed = bytearray(whole)
    changed[position] ^= 1 << data.draw(st.integers(0, 7))
    path.write_bytes(changed)
    try:
        with pytest.raises(UserError):
            PromptFile.open(prompt_path)
    finally:
        path.write_bytes(whole)
    assert len(PromptFile.open(prompt_path)) == 6


@QUICK
@given(
    name=st.text(min_size=1, max_size=12) | st.sampled_from(["../x", "/etc/passwd", "a/../../x", "./x", "a//b", "x\0"])
)
def test_a_manifest_that_lists_anything_else_is_refused(checkpoint, name):
    manifest = json.loads((checkpoint / MANIFEST_NAME).read_bytes())
    manifest["files"][name] = {"size_bytes": 0, "xxh3_64": "0" * 16}
    text = (checkpoint / MANIFEST_NAME).read_bytes()
    (checkpoint / MANIFEST_NAME).write_text(json.dumps(manifest))
    try:
        with pytest.raises(DamagedDirectory):
            verify(checkpoint)
    finally:
        (checkpoint / MANIFEST_NAME).write_bytes(text)
    verify(checkpoint)


def test_a_record_is_read_as_it_was_before_its_file_was_checked(prompt_path):
    records = PromptFile.open(prompt_path).read(range(6))
    assert [record.answer for record in records] == [str(index) for index in range(6)]
    assert all(np.array_equal(record.prompt_ids, np.arange(5)) for record in records)
