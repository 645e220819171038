"""Graphs from the disk compute what compiled ones do, in any order; what was changed or damaged is compiled again."""

import contextlib
import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from slow_tests import SLOW

from mindrlhf.cpu.training import graph_cache

# Each graph is a name, a constant and a number of rows; MindSpore's numbering of graphs is one of the whole process.
PROGRAM = """
import gc, json, os, sys
import beside
import mindspore as ms
import numpy as np
from mindspore import nn
from mindrlhf.cpu.training import graph_cache
from mindrlhf.cpu.training.heads import TiledTokenLogProbs


class Scaled(nn.Cell):
    def __init__(self, constant):
        super().__init__()
        self.constant = constant
        self.kernel = TiledTokenLogProbs(ms.Parameter(ms.Tensor(np.eye(3, 2, dtype=np.float32) * constant), "weight"))

    def construct(self, hidden, labels, mask):
        return self.kernel(hidden * self.constant, labels, mask)[0]


class Sum(nn.Cell):
    def construct(self, pair):
        return pair[0] + pair[1]


def sums(pairs):
    ms.set_context(mode=ms.GRAPH_MODE)
    graph_cache.open_graph_cache(["facts"])
    cell = Sum()
    for one, other, is_mutable in pairs:
        pair = (ms.Tensor(one, ms.float32), ms.Tensor(other, ms.float32))
        before = graph_cache._cache.num_found
        answer = graph_cache.run_graph(cell, ms.mutable(pair) if is_mutable else pair).asnumpy()
        yield answer.tobytes().hex(), graph_cache._cache.num_found - before


def answers(graphs, is_made_again):
    ms.set_context(mode=ms.GRAPH_MODE)
    graph_cache.open_graph_cache(["facts"])
    cells = {}
    for constant, rows in graphs:
        if is_made_again:
            cells.clear()
            gc.collect()
        if constant not in cells:
            cells[constant] = Scaled(constant)
        cell = cells[constant]
        hidden = np.arange(2 * rows, dtype=np.float32).reshape(rows, 2) / 8
        labels, mask = np.arange(rows, dtype=np.int32) % 3, np.ones(rows, np.float32)
        before = graph_cache._cache.num_found
        for _ in range(2):
            answer = graph_cache.run_graph(cell, *map(ms.Tensor, (hidden, labels, mask))).asnumpy()
        yield answer.tobytes().hex(), graph_cache._cache.num_found - before


# Processes forked of one that has imported MindSpore, and nothing more: the import is what takes longest.
for line in sys.stdin:
    work = json.loads(line)
    if not (process := os.fork()):
        for descriptor in (1, 2):
            os.dup2(os.open(work["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND), descriptor)
        os.environ["MINDRLHF_GRAPH_CACHE"] = work["directory"]
        found = list(sums(work["graphs"]) if work["are_pairs"] else answers(work["graphs"], work["is_made_again"]))
        with open(work["out"], "w") as file:
            json.dump(found, file)
        sys.exit()
    print(os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]), flush=True)
"""


@pytest.fixture(scope="module")
def servers(tmp_path_factory):
    """Two that fork a process of PROGRAM for each line that they are sent, in turn: their sets have other orders."""
    program = tmp_path_factory.mktemp("program") / "program.py"
    program.write_text(PROGRAM)
    program.with_name("beside.py").write_text("# MindSpore's mark of a program is of its own modules as well\n")
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL, "text": True}
    with contextlib.ExitStack() as stack:
        started = []
        for seed in ("1", "2"):
            environment = {**os.environ, "PYTHONHASHSEED": seed}
            started.append(stack.enter_context(subprocess.Popen([sys.executable, program], env=environment, **pipes)))
        yield itertools.cycle(started)
        for server in started:
            server.stdin.close()


@pytest.fixture
def run(servers, tmp_path):
    def run(graphs: list[tuple], directory: Path, is_made_again=False, num_compiled=None, are_pairs=False):
        """Return the bytes of each graph's answer, and whether the graph was found, of a process of its own."""
        out, log = tmp_path / "answers.json", tmp_path / "log"
        log.write_text("")
        server = next(servers)
        work = {"graphs": graphs, "directory": str(directory), "is_made_again": is_made_again, "are_pairs": are_pairs}
        server.stdin.write(json.dumps(work | {"out": str(out), "log": str(log)}) + "\n")
        server.stdin.flush()
        assert server.stdout.readline() == "0\n", log.read_text()
        if num_compiled is not None:
            assert log.read_text().count("Execute all the compilation actions") == num_compiled
        answers = [tuple(answer) for answer in json.loads(out.read_text())]
        out.unlink()
        return answers

    return run


def expected(constant: float, rows: int) -> np.ndarray:
    hidden = np.arange(2 * rows).reshape(rows, 2) / 8 * constant
    logits = hidden @ (np.eye(3, 2) * constant).T
    return (logits - np.log(np.exp(logits).sum(-1, keepdims=True)))[np.arange(rows), np.arange(rows) % 3]


def test_graphs_are_found_in_any_order_and_what_differs_is_compiled(run, tmp_path):
    directory = tmp_path / "graphs"
    compiled = run([(1.0, 4), (2.0, 4)], directory)
    assert [found for _, found in compiled] == [0, 0]
    for (answer, _), constant in zip(compiled, (1.0, 2.0)):
        np.testing.assert_allclose(np.frombuffer(bytes.fromhex(answer), np.float32), expected(constant, 4), atol=1e-6)
    # The kernels are numbered in the order in which models are built: it is part of what a graph is.
    again = run([(1.0, 4), (1.0, 5), (2.0, 4), (3.0, 4)], directory)
    assert [found for _, found in again] == [1, 0, 1, 0]
    assert [again[0][0], again[2][0]] == [answer for answer, _ in compiled]
    for (answer, _), graph in zip(again, [(1.0, 4), (1.0, 5), (2.0, 4), (3.0, 4)]):
        np.testing.assert_allclose(np.frombuffer(bytes.fromhex(answer), np.float32), expected(*graph), atol=1e-6)

    kept = sorted(directory.glob("*/graph.mindir"))
    assert len(kept) == 4
    for path in kept:
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 1
        path.chmod(0o600)
        path.write_bytes(content)
    mended = run([(1.0, 4), (2.0, 4)], directory)
    assert mended == compiled
    assert {path.name for path in directory.iterdir() if path.name.startswith(".new-")} == set()


@SLOW
def test_tensors_of_a_tuple_are_constants_of_the_graph_unless_it_is_mutable(run, tmp_path):
    """MindSpore writes the values of such a tuple into the graph: one that was kept is wrong for others."""
    directory = tmp_path / "graphs"

    def found(*pairs):
        answers = run(list(pairs), directory, are_pairs=True)
        for (answer, _), (one, other, _) in zip(answers, pairs, strict=True):
            assert np.frombuffer(bytes.fromhex(answer), np.float32) == one + other
        return [is_found for _, is_found in answers]

    assert found((1, 2, False), (1, 3, True)) == [0, 0]
    assert found((1, 4, False), (5, 6, True), (7, 8, True)) == [0, 1, 0]


@SLOW
def test_a_model_that_is_made_again_in_one_process_is_compiled(run, tmp_path):
    graphs = [(1.0, 4), (2.0, 4), (1.0, 4), (2.0, 4)]
    cold = run(graphs, tmp_path / "graphs", is_made_again=True, num_compiled=2)
    assert [found for _, found in cold] == [0, 0, 0, 0]
    # Both are read, or MindSpore would say that it compiles them; then both are compiled without a look.
    warm = run(graphs, tmp_path / "graphs", is_made_again=True, num_compiled=0)
    assert [found for _, found in warm] == [1, 1, 0, 0]
    assert [answer for answer, _ in warm] == [answer for answer, _ in cold]
    assert warm[0][0] == warm[2][0] != warm[1][0] == warm[3][0]


def test_a_place_that_others_can_write_is_not_used(tmp_path, monkeypatch, capsys):
    directory = tmp_path / "graphs"
    directory.mkdir()
    directory.chmod(0o777)
    monkeypatch.setenv("MINDRLHF_GRAPH_CACHE", str(directory))
    monkeypatch.setattr(graph_cache, "_cache", None)
    graph_cache.open_graph_cache([])
    assert graph_cache._cache is None
    assert capsys.readouterr().out == f"mindrlhf: compiled graphs are not kept: {directory} can be written by others\n"


@pytest.mark.parametrize(
    "variables, place",
    [
        ({"MINDRLHF_GRAPH_CACHE": "/a/b", "HOME": "/h"}, "/a/b"),
        ({"MINDRLHF_GRAPH_CACHE": "off", "HOME": "/h"}, None),
        ({"XDG_CACHE_HOME": "/x", "HOME": "/h"}, "/x/mindrlhf/graphs"),
        ({"HOME": "/h"}, "/h/.cache/mindrlhf/graphs"),
        ({}, None),
    ],
)
def test_where_graphs_are_kept(variables, place, monkeypatch):
    for name in ("MINDRLHF_GRAPH_CACHE", "XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert graph_cache.cache_dir() == (place and Path(place))


def test_what_was_not_used_for_longest_goes_first(tmp_path, monkeypatch):
    monkeypatch.setattr(graph_cache, "MAX_BYTES", 250)
    for number, name in enumerate("abcd"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "graph.mindir").write_bytes(b"x" * 100)
        os.utime(tmp_path / name, (number, number))
    graph_cache._make_room(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["c", "d"]
