"""A kind of worker is one file: here a translator, on two nodes, of which each word costs itself alone."""

import queue
from contextlib import ExitStack

import pytest

from mindrlhf.errors import UserError
from mindrlhf.launch.nodes.helper import NodeHelper
from mindrlhf.sandbox.pool import WorkerPool
from mindrlhf.system.handshake import accept_nodes
from mindrlhf.system.ports import listen

pytestmark = pytest.mark.timeout(180)
TRANSLATOR = """
import os, time
from mindrlhf.errors import UserError


def setup(words):
    if not words:
        raise UserError("the translator knows no words")

    def handle(step, text):  # step 0 is a translation, step 1 says who has made it
        if text == "exit":
            os._exit(7)
        while text == "both" and len(os.listdir(words["directory"])) < 2:
            open(os.path.join(words["directory"], str(os.getppid())), "w").close()
            time.sleep(0.01)
        return words.get(text, "?") if step == 0 else os.getppid()

    return sorted(words), handle
"""


@pytest.fixture
def arguments(tmp_path, monkeypatch):
    (tmp_path / "modules").mkdir()
    (tmp_path / "modules" / "translator.py").write_text(TRANSLATOR)
    (tmp_path / "asked").mkdir()
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "modules"), prepend=":")
    words = {"Haus": "house", "Katze": "cat", "directory": str(tmp_path / "asked")}
    limits = {"num_workers": 1, "timeout_s": 60.0, "memory_limit_bytes": 0}
    return {"name": "translators", "setup": "translator:setup", "settings": words, **limits}


def test_a_new_kind_of_worker_on_two_nodes(arguments, capfd):
    results: queue.SimpleQueue = queue.SimpleQueue()
    with ExitStack() as stack:
        node = NodeHelper("mindrlhf.sandbox.pool_node", arguments)
        stack.callback(node.close)
        pool = WorkerPool(deliver=results.put, **arguments)
        stack.callback(pool.close)
        assert pool.ready == ["Haus", "Katze", "directory"]
        with listen("127.0.0.1") as listener:
            node.connect("127.0.0.1", listener.getsockname()[1], "a token", 1)
            ((_, connection),) = accept_nodes(listener, b"a token", [1]).items()
            pool.admit(connection, "node 1")
        first = translate(pool, results, ["Haus", "Katze", *["both"] * 20, "Hund"])
        second = translate(pool, results, ["Haus", "exit", "Katze"])
    assert {text: done[0] for text, done in first} == {"Haus": "house", "Katze": "cat", "Hund": "?", "both": "?"}
    assert len({done[1] for _, done in first}) == 2, "each node has translated"
    assert second[1][1] == [{"died": "worker died: exit code 7"}] * 2
    assert (second[0][1][0], second[2][1][0]) == ("house", "cat")
    assert "a process of translators has ended (exit code 7), and another takes its place" in capfd.readouterr().err


def translate(pool, results, texts):
    pool.submit(((number, [0, 1], text, len(text)) for number, text in enumerate(texts)), "translate")
    outcomes = {}
    while len(outcomes) < len(texts):
        outcomes |= dict(results.get())
    return [(text, outcomes[number]) for number, text in enumerate(texts)]


def test_what_cannot_start_says_why(arguments):
    with pytest.raises(UserError, match="the translator knows no words"):
        WorkerPool(deliver=print, **{**arguments, "settings": {}})
    for limit, words in (({"num_workers": 0}, "0 processes"), ({"timeout_s": 0.0}, "time limit of translators is 0.0")):
        with pytest.raises(UserError, match=words):
            WorkerPool(deliver=print, **{**arguments, **limit})
