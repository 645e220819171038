"""Calls whose client has gone: none is trained, and what is, is that of an agent that never made them."""

import json
import socket
import threading

import pytest
from agent_fakes import Engine, run, user

pytestmark = pytest.mark.timeout(120)
LONG = "a long reply. " * 20


def begin(client, text, header="", **more):
    """Send a question and return the connection."""
    body = json.dumps({"messages": [user(text)], **more}).encode()
    connection = socket.create_connection(("127.0.0.1", int(client.url.split(":")[2].split("/")[0])), timeout=60)
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {client.key}\r\n{header}"
    connection.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
    return connection


class Clients:
    """Ways to hang up; each question is one more that nobody has read."""

    def __init__(self):
        self.is_asked, self.is_gone = threading.Event(), threading.Event()

    def reply(self, text):
        if "while it is answered" in text:
            self.is_asked.set()
            assert self.is_gone.wait(60)
        return LONG if "gone" in text else f"ok {len(text)}"

    def while_it_is_answered(self, client):
        connection = begin(client, "gone while it is answered")
        assert self.is_asked.wait(60)
        connection.close()
        self.is_gone.set()

    def after(self, num_tokens, **more):
        """A token is a letter here."""

        def hang_up(client):
            connection, got = begin(client, f"gone after {num_tokens}", **more), b""
            while b"a long" not in got:
                got += connection.recv(1)
            for _ in range(num_tokens - len("a long")):
                connection.recv(1)
            connection.close()

        return hang_up

    def in_silence(self, client):
        """Hang up on a reply of which nothing was read."""
        connection = begin(client, "gone in silence")
        connection.recv(1, socket.MSG_PEEK)
        connection.close()



WAYS = {
    "while it is answered": Clients.while_it_is_answered,
    "after 1 token": lambda self, client: self.after(1)(client),
    "after 10 tokens": lambda self, client: self.after(10)(client),
    "after 100 tokens": lambda self, client: self.after(100)(client),
    "of a stream after 10 tokens": lambda self, client: self.after(10, stream=True)(client),
    "in silence": Clients.in_silence,
}


def trained(completion):
    sequences = [(one.prompt_ids.tolist(), one.token_ids.tolist()) for one in completion.agent.sequences]
    return sequences, completion.num_turns, completion.agent.text, completion.episode_return


@pytest.mark.parametrize("name", WAYS)
def test_a_call_whose_client_hangs_up_is_left_out_and_counted(name):
    def episode(hang_up):
        clients = Clients()

        def agent(record, client):
            messages = [user("one")]
            messages.append(client.chat(messages))
            for _ in range(2 if hang_up else 0):
                clients.is_asked.clear(), clients.is_gone.clear()
                WAYS[name](clients, client)
            client.chat([*messages, user("two")])
            return 1.0

        (completion,) = run(Engine(clients.reply), agent, max_tokens=2000)
        return completion

    disturbed, plain = episode(True), episode(False)
    assert trained(disturbed) == trained(plain)
    assert (disturbed.agent.num_unread, plain.agent.num_unread) == (2, 0)


@pytest.mark.parametrize(("header", "num_trained"), [("", 2), ("X-Stainless-Retry-Count: 1\r\n", 1)])
def test_of_a_call_and_its_clients_retry_the_second_is_trained(header, num_trained):
    """The headers are those of OpenAI's and Anthropic's clients; of two askings on purpose both are trained."""

    def agent(record, client):
        for lines in ("Connection: close\r\n", f"{header}Connection: close\r\n"):
            with begin(client, "gone", header=lines) as connection, connection.makefile() as file:
                assert "a long reply" in file.read()
        return 1.0

    (completion,) = run(Engine(Clients().reply), agent, max_tokens=2000)
    assert completion.num_turns == num_trained and completion.agent.num_unread == 2 - num_trained


def test_what_was_gone_on_with_was_read_whatever_the_connection_did():
    def agent(record, client):
        connection = begin(client, "gone")
        connection.recv(1, socket.MSG_PEEK)
        connection.close()
        client.chat([user("gone"), {"role": "assistant", "content": LONG}, user("two")])
        return 1.0

    (completion,) = run(Engine(Clients().reply), agent, max_tokens=2000)
    assert completion.num_turns == 2 and len(completion.agent.sequences) == 1 and completion.agent.num_unread == 0


def test_an_episode_of_which_nothing_was_read_trains_on_nothing():
    def agent(record, client):
        Clients().in_silence(client)
        return 1.0

    (completion,) = run(Engine(Clients().reply), agent, max_tokens=2000)
    assert completion.num_turns == 0 and completion.agent.num_unread == 1 and len(completion.token_ids) == 1
