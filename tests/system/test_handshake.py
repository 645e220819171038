"""Connections between processes that share a secret: who is let in, and what is done to messages on their way."""

import contextlib
import errno
import hashlib
import hmac
import json
import queue
import socket
import struct
import threading
import tracemalloc

import numpy as np
import pytest

from mindrlhf.system.handshake import (
    MAX_UNPROVEN,
    SignedConnection,
    UnauthenticatedPeer,
    admit,
    greet_newcomers,
    introduce,
)
from mindrlhf.system.wire import ConnectionClosed, ProtocolError, receive_message, send_message

pytestmark = pytest.mark.timeout(180)
SECRET = b"a secret of some length"


@pytest.fixture
def pair():
    """A connection by TCP: the end that accepted, and the other."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        client = socket.create_connection(listener.getsockname())
        server, _ = listener.accept()
    yield server, client
    server.close()
    client.close()


def meet(pair, server_secret: bytes, client_secret: bytes) -> list:
    """Return what each side got: a connection, or an error."""
    results: list = [None, None]

    def run(side: int, function, secret: bytes) -> None:
        try:
            results[side] = function(pair[side], secret, 30.0)
        except Exception as error:
            results[side] = error

    threads = [
        threading.Thread(target=run, args=(0, admit, server_secret)),
        threading.Thread(target=run, args=(1, introduce, client_secret)),
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def test_who_shares_the_secret_can_talk_both_ways(pair):
    server, client = meet(pair, SECRET, SECRET)
    arrays = {"ids": np.arange(6, dtype=np.int32).reshape(2, 3), "none": np.zeros((0, 4), np.float32)}
    client.send({"kind": "hello", "values": [1, 2.5, None]}, arrays)
    client.send({"kind": "again"})
    header, received = server.receive(30)
    assert header == {"kind": "hello", "values": [1, 2.5, None]}
    assert {name: array.tolist() for name, array in received.items()} == {"ids": [[0, 1, 2], [3, 4, 5]], "none": []}
    assert server.receive(30)[0] == {"kind": "again"}
    server.send({"kind": "answer"})
    assert client.receive(30)[0] == {"kind": "answer"}
    client.close()
    with pytest.raises(ConnectionClosed):
        server.receive(30)


def test_another_secret_is_turned_away_on_both_sides(pair):
    server, client = meet(pair, SECRET, b"another secret of some length")
    assert isinstance(server, UnauthenticatedPeer) and isinstance(client, UnauthenticatedPeer)
    assert "does not know the secret" in str(server)
    assert "the secrets differ" in str(client)


@pytest.mark.parametrize("words", [b"GET / HTTP/1.1\r\n\r\n" + b"x" * 64, b"", b"MRL1" + b"\xff" * 200])
def test_strangers_with_other_words_are_turned_away(pair, words):
    server, client = pair
    client.sendall(words)
    if words:
        client.shutdown(socket.SHUT_WR)
    with pytest.raises(UnauthenticatedPeer, match="does not speak as one of us"):
        admit(server, SECRET, timeout_s=0.5)


def test_the_proof_is_the_hmac_of_both_challenges_and_an_overheard_one_is_worth_nothing(pair):
    server, client = pair
    admitted: list = []

    def run() -> None:
        try:
            admitted.append(admit(server, SECRET, 30.0))
        except UnauthenticatedPeer as error:
            admitted.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    theirs = bytes.fromhex(receive_message(client, 30)[0]["challenge"])
    own = bytes(range(32))
    # As somebody who heard the proof for another challenge would answer.
    old = hmac.new(SECRET, b"client" + bytes(32) + own, hashlib.sha256).hexdigest()
    right = hmac.new(SECRET, b"client" + theirs + own, hashlib.sha256).hexdigest()
    assert old != right
    send_message(client, {"challenge": own.hex(), "proof": old})
    assert receive_message(client, 30)[0] == {"refused": True}
    thread.join()
    assert isinstance(admitted[0], UnauthenticatedPeer)


def test_the_client_does_not_talk_to_a_server_that_only_echoes_its_proof(pair):
    server, client = pair
    results: list = []

    def run() -> None:
        try:
            results.append(introduce(client, SECRET, 30.0))
        except UnauthenticatedPeer as error:
            results.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    send_message(server, {"challenge": bytes(32).hex()})
    header, _ = receive_message(server, 30)
    send_message(server, {"proof": header["proof"]})
    thread.join()
    assert isinstance(results[0], UnauthenticatedPeer)


def spoil_array(header: dict, arrays: dict) -> tuple[dict, dict]:
    return header, {name: array + 1 for name, array in arrays.items()}


def spoil_header(header: dict, arrays: dict) -> tuple[dict, dict]:
    return json.loads(json.dumps(header).replace('"code": 0', '"code": 1')), arrays


@pytest.mark.parametrize("what", ["array", "header", "repeated", "left out", "turned back"])
def test_what_is_changed_on_its_way_ends_the_connection(pair, what):
    key = b"k" * 32
    ours, wire = socket.socketpair()
    sender = SignedConnection(ours, key, is_server=True)
    sender.send({"code": 0}, {"a": np.arange(3)})
    first = receive_message(wire, 30)
    sender.send({"code": 0}, {"a": np.arange(3)})
    second = receive_message(wire, 30)
    receiver = SignedConnection(pair[1], key, is_server=False)
    sent = {
        "array": [spoil_array(*first)],
        "header": [spoil_header(*first)],
        "repeated": [first, first],
        "left out": [second],
        "turned back": [first],
    }[what]
    if what == "turned back":
        receiver = SignedConnection(pair[1], key, is_server=True)
    for header, arrays in sent:
        send_message(pair[0], header, arrays)
    for _ in sent[:-1]:
        assert receiver.receive(30)[0] == {"code": 0}
    with pytest.raises(ProtocolError, match="not signed by the peer"):
        receiver.receive(30)
    ours.close()
    wire.close()


def announce(size_bytes: int) -> bytes:
    """The first bytes of a message of this protocol that says it has so many bytes of text."""
    return struct.pack("!4sIIQ", b"MRL1", size_bytes, 0, 0)


def peak_bytes(action) -> int:
    tracemalloc.start()
    try:
        action()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("side", [admit, introduce])
@pytest.mark.parametrize("size_bytes", [4097, 1 << 20, 64 << 20, (1 << 32) - 1])
def test_a_peer_that_has_proved_nothing_gets_no_memory_for_what_it_announces(pair, side, size_bytes):
    server, client = pair
    client.sendall(announce(size_bytes) + b"x" * 100)

    def meet_it() -> None:
        with pytest.raises((UnauthenticatedPeer, ProtocolError), match="over the limit"):
            side(server, SECRET, 30.0)

    assert peak_bytes(meet_it) < 256 << 10


def test_a_peer_that_sends_byte_by_byte_has_no_longer_than_one_that_is_silent(pair):
    server, client = pair
    is_over = threading.Event()

    def drip() -> None:
        while not is_over.wait(0.05):
            with contextlib.suppress(OSError):
                client.sendall(b"M")

    client.sendall(announce(4096))
    dripping = threading.Thread(target=drip)
    dripping.start()
    try:
        with pytest.raises(UnauthenticatedPeer, match="did not answer in time"):
            admit(server, SECRET, 0.5)
    finally:
        is_over.set()
        dripping.join()


@pytest.fixture
def door():
    """A door that greets: (address, who was welcomed, who was turned away)."""
    welcomed, turned_away = queue.Queue(), queue.Queue()
    with socket.create_server(("127.0.0.1", 0), backlog=256) as listener:
        greet_newcomers(listener, SECRET, welcomed.put, lambda peer, error: turned_away.put(str(error)))
        yield listener.getsockname(), welcomed, turned_away
        with contextlib.suppress(OSError):
            listener.shutdown(socket.SHUT_RDWR)


def test_strangers_without_end_hold_a_bounded_number_of_connections_and_do_not_keep_others_out(door):
    address, welcomed, turned_away = door
    strangers = [socket.create_connection(address) for _ in range(MAX_UNPROVEN + 40)]
    for _ in range(40):  # the first ones are hung up on, long before their 5 s are over
        assert "closed the connection" in turned_away.get(timeout=20)
    signed = introduce(socket.create_connection(address), SECRET)
    welcomed.get(timeout=30).send({"kind": "hello"})
    assert signed.receive(30)[0] == {"kind": "hello"}
    # Who has proved that it knows the secret is not counted any more.
    strangers += [socket.create_connection(address) for _ in range(MAX_UNPROVEN + 1)]
    signed.send({"kind": "still there"})
    for stranger in strangers:
        stranger.close()


def test_a_shortage_of_descriptors_does_not_close_the_door(door, monkeypatch):
    address, welcomed, _ = door
    real, failures = socket.socket.accept, iter([errno.EMFILE, errno.ENFILE, errno.ECONNABORTED])

    def accept(listener):
        for number in failures:
            raise OSError(number, "no more")
        return real(listener)

    monkeypatch.setattr(socket.socket, "accept", accept)
    for _ in range(2):  # the first finds the thread within the true function
        introduce(socket.create_connection(address), SECRET)
        assert welcomed.get(timeout=30)
