"""Messages between a pool and its workers, over pipes that user code in the worker may damage.

A message is laid out as::

    prefix   12 bytes, big endian: magic, length of the text, its CRC-32
    text     JSON, in ASCII

so that anything else on the pipe is noticed, and none is longer than the reader agreed to.
"""

import importlib.util
import json
import struct
import sys
from types import ModuleType
from typing import Any
from zlib import crc32

_MAGIC = b"MRW1"
_PREFIX = struct.Struct("!4sII")
MAX_REQUEST_BYTES = 1 << 30  # completions are as long as they are
MAX_RESPONSE_BYTES = 32 << 20


class BrokenPipeMessage(Exception):
    """The bytes on the pipe are no message."""


def _load_json() -> ModuleType:
    """Load the json package once more, for messages alone: user code that patches the public one garbles none."""
    name = "mindrlhf_private_json"
    specification = importlib.util.spec_from_file_location(name, json.__file__)
    module = sys.modules[name] = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


private_json = _load_json()
_encode, _decode = private_json.JSONEncoder().encode, private_json.JSONDecoder().decode


def pack_message(message: Any) -> bytes:
    """Return the bytes of a message, anything JSON can hold."""
    text = _encode(message).encode("ascii")
    return _PREFIX.pack(_MAGIC, len(text), crc32(text)) + text


class MessageReader:
    """Puts messages together from what a pipe delivers at a time."""

    def __init__(self, max_bytes: int):
        self._max_bytes = max_bytes
        self._received = bytearray()

    def feed(self, chunk: bytes) -> list[Any]:
        """Take what has arrived and return the messages that are complete.

        Raises:
            BrokenPipeMessage: it is no message; what follows on the pipe cannot be read either.
        """
        self._received += chunk
        received, messages, start = self._received, [], 0
        while len(received) - start >= _PREFIX.size:
            magic, length, checksum = _PREFIX.unpack_from(received, start)
            if magic != _MAGIC or length > self._max_bytes:
                raise BrokenPipeMessage(f"no message begins with {bytes(received[start : start + 8])!r}")
            end = start + _PREFIX.size + length
            if len(received) < end:
                break
            text = received[start + _PREFIX.size : end]
            if crc32(text) != checksum:
                raise BrokenPipeMessage("the checksum of a message is wrong")
            try:
                messages.append(_decode(text.decode("ascii")))
            except ValueError as error:
                raise BrokenPipeMessage(f"a message is no JSON: {error}") from error
            start = end
        del received[:start]
        return messages
