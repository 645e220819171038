"""What processes and models say: messages of the socket, tool calls."""

import json
import random
import socket
import struct
from pathlib import Path

import corruption
import numpy as np
from fuzz_target import Case


def wire(directory: Path) -> Case:
    import zlib

    from mindrlhf.system.wire import receive_message, send_message

    arrays = {"ids": np.arange(24, dtype=np.int32).reshape(4, 6), "flags": np.ones(3, bool), "none": np.zeros((0, 5))}
    left, right = socket.socketpair()
    with left, right:
        send_message(left, {"method": "generate", "values": {"seed": 1}}, arrays)
        whole = right.recv(1 << 16)
    prefix = struct.Struct("!4sIIQ")
    magic, text_size, _, _ = prefix.unpack_from(whole)
    tree, payload = json.loads(whole[prefix.size : prefix.size + text_size]), whole[prefix.size + text_size :]

    def case(rng: random.Random) -> None:
        if rng.randrange(3) == 0:
            message = corruption.corrupt_bytes(rng, whole)
        else:
            text = corruption.corrupt_json(rng, tree)
            size = rng.choice((len(payload), len(payload), 0, 2**62))
            message = prefix.pack(magic, len(text), zlib.crc32(text), size) + text + payload
        left, right = socket.socketpair()
        with left, right:
            left.sendall(message)
            left.close()
            receive_message(right, timeout_s=20, max_payload_bytes=1 << 24)

    return case


def tool_call(directory: Path) -> Case:
    from mindrlhf.tools.calls import CALL_END, CALL_START, ToolCall, answer_turn, parse_calls
    from mindrlhf.tools.worker import answer_call

    def add(left: float, right: float = 1) -> float:
        return left + right

    calls = [{"name": "add", "arguments": {"left": 3, "right": 4}}, {"name": "add", "arguments": {"left": [1]}}]
    pieces = (CALL_START, CALL_END, "<tool_response>", "<|im_end|>", "{" * 3000, "1" * 5000, '"\\ud800"')

    def case(rng: random.Random) -> None:
        texts = [corruption.corrupt_json(rng, call).decode(errors="surrogateescape") for call in calls]
        turn = "".join(f"so {CALL_START}\n{text}\n{CALL_END}" for text in texts)
        for _ in range(rng.randrange(3)):
            position = rng.randrange(len(turn))
            turn = turn[:position] + rng.choice(pieces) + turn[position:]
        answers = []
        for call in parse_calls(turn):
            is_call = isinstance(call, ToolCall)
            # The worker gets the call, and the pool the answer, as JSON.
            asked = json.loads(json.dumps([call.name, call.arguments])) if is_call else None
            text = json.loads(json.dumps(answer_call({"add": add}, *asked)))[0] if is_call else call.text
            answers.append(text)
        assert answer_turn(answers, is_chat=True).count("</tool_response>") == len(answers), "an answer broke its frame"

    return case


def judge_reply(directory: Path) -> Case:
    from mindrlhf.rewards.judges import chat_client

    reply = {"id": "x", "choices": [{"index": 0, "message": {"role": "assistant", "content": "Good.\nScore: 7"}}]}

    def case(rng: random.Random) -> None:
        chat_client._content("http://judge", corruption.corrupt_json(rng, reply)).splitlines()

    return case
