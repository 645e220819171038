"""Connections between processes that share a secret: who is let in, and what is done to messages on their way."""

import hashlib
import hmac
import json
import socket
import threading

import numpy as np
import pytest

from mindrlhf.system.handshake import SignedConnection, UnauthenticatedPeer, admit, introduce
from mindrlhf.system.wire import ConnectionClosed, ProtocolError, receive_message, send_message

pytestmark = pytest.mark.timeout(60)
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
            results[side] = function(pair[side], secret, 5.0)
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
    header, received = server.receive(5)
    assert header == {"kind": "hello", "values": [1, 2.5, None]}
    assert {name: array.tolist() for name, array in received.items()} == {"ids": [[0, 1, 2], [3, 4, 5]], "none": []}
    assert server.receive(5)[0] == {"kind": "again"}
    server.send({"kind": "answer"})
    assert client.receive(5)[0] == {"kind": "answer"}
    client.close()
    with pytest.raises(ConnectionClosed):
        server.receive(5)


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
            admitted.append(admit(server, SECRET, 5.0))
        except UnauthenticatedPeer as error:
            admitted.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    theirs = bytes.fromhex(receive_message(client, 5)[0]["challenge"])
    own = bytes(range(32))
    # As somebody who heard the proof for another challenge would answer.
    old = hmac.new(SECRET, b"client" + bytes(32) + own, hashlib.sha256).hexdigest()
    right = hmac.new(SECRET, b"client" + theirs + own, hashlib.sha256).hexdigest()
    assert old != right
    send_message(client, {"challenge": own.hex(), "proof": old})
    assert receive_message(client, 5)[0] == {"refused": True}
    thread.join()
    assert isinstance(admitted[0], UnauthenticatedPeer)


def test_the_client_does_not_talk_to_a_server_that_only_echoes_its_proof(pair):
    server, client = pair
    results: list = []

    def run() -> None:
        try:
            results.append(introduce(client, SECRET, 5.0))
        except UnauthenticatedPeer as error:
            results.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    send_message(server, {"challenge": bytes(32).hex()})
    header, _ = receive_message(server, 5)
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
    first = receive_message(wire, 5)
    sender.send({"code": 0}, {"a": np.arange(3)})
    second = receive_message(wire, 5)
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
        assert receiver.receive(5)[0] == {"code": 0}
    with pytest.raises(ProtocolError, match="not signed by the peer"):
        receiver.receive(5)
    ours.close()
    wire.close()
