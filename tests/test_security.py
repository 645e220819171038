"""What must not be in the code, and what malicious files and strangers on a socket get."""

import contextlib
import json
import os
import pickle
import re
import socket
import stat
import struct
import subprocess
import sys
import threading
import tracemalloc
import zlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from mindrlhf.config.parse import read_yaml
from mindrlhf.data.handlers import Example, Message, RecordError
from mindrlhf.data.mindrecord import PromptFile
from mindrlhf.data.templates import load_template
from mindrlhf.data.tokenizer_config import read_tokenizer_config
from mindrlhf.data.tokenizers import load_tokenizer
from mindrlhf.errors import RunFailure, UserError
from mindrlhf.images.pixels import ImageError, decode_png
from mindrlhf.system.wire import ProtocolError, receive_message, send_message
from mindrlhf.training import team
from mindrlhf.training.runtime import Rank
from mindrlhf.weights.array_file import ArrayFile
from mindrlhf.weights.hf import read_hf_config
from mindrlhf.weights.open import open_tensors
from mindrlhf.weights.publish.buffer import TensorInfo, WeightBuffer
from mindrlhf.weights.safetensors_file import SafetensorsFile

ROOT = Path(__file__).parents[1]
SOURCES = sorted([*ROOT.glob("mindrlhf/**/*.py"), *ROOT.glob("scripts/*.py"), *ROOT.glob("examples/**/*.py")])

# Keywords and methods that ruff.toml, which bans modules and functions, knows nothing of.
RUNS_CODE = re.compile(r"\b(?:shell|allow_pickle|trust_remote_code)=(?!False\b)|\.extractall\(|\.(?:read|to)_pickle\(")
BANNED = (
    "import pickle",
    "from joblib import load",
    "def f():\n    import dill.source",
    "eval('1')",
    "exec('1')",
    "import os as o\no.system('x')",
    "from os import popen as p\np('x')",
    "import yaml\nyaml.load(text)",
    "import yaml\nyaml.load(text, Loader=yaml.FullLoader)",
    "from yaml import load, Loader\nload(text, Loader=Loader)",
    "import torch\ntorch.load(path)",
    "import mindspore as ms\nms.load_checkpoint(path)",
)


def test_no_code_runs_what_it_reads():
    found = {path.relative_to(ROOT).as_posix(): RUNS_CODE.search(path.read_text(encoding="utf-8")) for path in SOURCES}
    assert {name: match[0] for name, match in found.items() if match} == {}
    for text in ("run('x', shell=flag)", "np.load(path, allow_pickle=True)", "archive.extractall(path)"):
        assert RUNS_CODE.search(text)
    assert not RUNS_CODE.search("subprocess.run(['x'], shell=False)")


def test_ruff_finds_what_runs_code(tmp_path):
    for number, source in enumerate(BANNED):
        (tmp_path / f"{number}.py").write_text(source + "\n")
    command = [sys.executable, "-m", "ruff", "check", "--no-cache", "--config", ROOT / "ruff.toml"]
    command += ["--select", "TID251,S102,S307", "--output-format", "json", tmp_path]
    found = json.loads(subprocess.run(command, capture_output=True, timeout=60).stdout)
    assert {int(Path(one["filename"]).stem) for one in found} == set(range(len(BANNED)))


def test_templates_run_in_a_sandbox_wherever_a_user_gives_them():
    makes = re.compile(r"(?<!Sandboxed)Environment\((?!\)\.lex\()")  # what only cuts into words runs nothing
    plain = [path for path in SOURCES if makes.search(path.read_text(encoding="utf-8"))]
    # The report's template is the package's own, and what it shows is escaped.
    # Their templates are files of this package.
    own = ["mindrlhf/observe/report.py", "mindrlhf/observe/viewer/page.py"]
    assert [path.relative_to(ROOT).as_posix() for path in plain] == own
    assert "autoescape=True" in plain[0].read_text(encoding="utf-8")


class _Bomb:
    """Makes a directory when it is unpickled."""

    def __init__(self, marker: Path):
        self._marker = marker

    def __reduce__(self):
        return os.mkdir, (str(self._marker),)


@pytest.fixture
def marker(tmp_path) -> Iterator[Path]:
    """A path that a bomb makes; nobody may have made it by the end of the test."""
    path = tmp_path / "it-went-off"
    yield path
    assert not path.exists(), "code from a file was run"


def test_a_bomb_goes_off_when_it_is_unpickled(tmp_path):
    pickle.loads(pickle.dumps(_Bomb(tmp_path / "off")))
    assert (tmp_path / "off").is_dir()


@pytest.mark.parametrize("reader", [SafetensorsFile, ArrayFile])
@pytest.mark.parametrize("is_framed", [False, True])
def test_a_pickle_in_place_of_tensors_is_refused(tmp_path, marker, reader, is_framed):
    text = pickle.dumps(_Bomb(marker))
    path = tmp_path / "model.safetensors"
    path.write_bytes(struct.pack("<Q", len(text)) + text if is_framed else text)
    with pytest.raises(UserError):
        reader(path)


def test_a_directory_of_pickled_weights_is_refused(tmp_path, marker):
    (tmp_path / "pytorch_model.bin").write_bytes(pickle.dumps(_Bomb(marker)))
    with pytest.raises(UserError, match="only safetensors are read"):
        open_tensors(tmp_path)


def test_a_pickle_on_the_wire_is_refused(marker):
    left, right = socket.socketpair()
    with left, right:
        left.sendall(pickle.dumps(_Bomb(marker)).ljust(64, b"\0"))
        with pytest.raises(ProtocolError):
            receive_message(right, timeout_s=20)


@pytest.mark.parametrize("tag", ["!!python/object/apply:os.mkdir", "!!python/object/new:os.mkdir"])
def test_a_config_constructs_no_objects(tmp_path, marker, tag):
    path = tmp_path / "config.yaml"
    path.write_text(f"run: {tag} [{json.dumps(str(marker))}]\n")
    with pytest.raises(UserError, match="is not valid YAML"):
        read_yaml(path)


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}{{ messages }}",
        "{{ messages.append.__globals__ }}",
        "{{ cycler.__init__.__globals__.os.mkdir(%r) }}{{ messages }}",
        "{%% include '/etc/passwd' %%}{{ messages }}",
    ],
)
def test_a_chat_template_reaches_nothing(tmp_path, marker, source):
    path = tmp_path / "template.jinja"
    path.write_text(source % str(marker) if "%r" in source else source.replace("%%", "%"))
    tokenizer = load_tokenizer(ROOT / "examples" / "quickstart" / "checkpoint")
    with pytest.raises((UserError, RecordError)):
        load_template(str(path), tokenizer).render(Example((Message("user", "hi"),), "7"))


def _write_safetensors(path: Path) -> None:
    header = json.dumps({"w": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}).encode()
    path.write_bytes(struct.pack("<Q", len(header)) + header + bytes(8))


@pytest.mark.parametrize("name", ["../other.safetensors", "{outside}/other.safetensors", "sub/other.safetensors", ".."])
def test_an_index_names_only_its_neighbours(tmp_path, name):
    model = tmp_path / "model"
    (model / "sub").mkdir(parents=True)
    for directory in (tmp_path, model / "sub"):
        _write_safetensors(directory / "other.safetensors")
    index = {"weight_map": {"w": name.format(outside=tmp_path)}}
    (model / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(UserError):
        open_tensors(model)


def test_the_buffer_is_memory_without_a_name_that_only_its_user_can_open():
    with WeightBuffer.create([TensorInfo("w", "float32", (2,))]) as buffer:
        status = os.stat(buffer.path)
        assert stat.S_IMODE(status.st_mode) == 0o600
        assert status.st_uid == os.getuid()
        assert status.st_nlink == 0  # in no directory
        assert re.fullmatch(rf"/proc/{os.getpid()}/fd/\d+", buffer.path)


def test_nothing_listens_but_ranks_and_between_nodes_node_0():
    """All other channels are socket pairs and pipes, which have no name or port to connect to."""
    calls = r"\.bind\(\(|create_server\(|\.listen\(\d|AF_UNIX|start_unix_server|mkfifo|SharedMemory\(|http_server\("
    pattern = re.compile(rf"(?<=[ =])listen\((?!self)|{calls}|HTTPServer\(\(")
    found = {
        (path.relative_to(ROOT).as_posix(), call)
        for path in SOURCES
        if path.is_relative_to(ROOT / "mindrlhf")
        for call in pattern.findall(path.read_text(encoding="utf-8"))
    }
    assert found == {
        # What the calls of `listen` below do; and a look for a free port of the local machine.
        ("mindrlhf/system/ports.py", "listen("),
        ("mindrlhf/system/ports.py", "create_server("),
        ("mindrlhf/system/ports.py", ".bind(("),
        ("mindrlhf/training/team.py", "listen("),
        # Each rank of more than two, for the rank that passes rows on to it: from other machines, and from its own.
        # With --nodes: the launcher of node 0, and rank 0 while the other nodes' rollout servers are connected.
        ("mindrlhf/launch/nodes/first.py", "create_server("),
        ("mindrlhf/training/nodes.py", "listen("),
        # The first rank of a node, while weights that are cut over nodes cross to its buffer; a node for rollout only.
        ("mindrlhf/weights/publish/tcp.py", "listen("),
        # Rank 0, while a rollout server of another node connects; and torch's store of a server over several nodes,
        # which would listen on all addresses.
        ("mindrlhf/rollout/nodes.py", "listen("),
        ("mindrlhf/rollout/server/multi_node.py", "create_server("),
        # With tools.agent, and `mindrlhf rewards serve`: on 127.0.0.1 alone, for whoever has a key. And for an agent
        # without a network, on the loopback of its own namespace, by which one key is taken.
        ("mindrlhf/rollout/chat_server.py", "create_server("),
        ("mindrlhf/rollout/chat_server.py", "listen("),
        ("mindrlhf/tools/agent_host.py", "create_server("),
        # On 127.0.0.1: metrics for Prometheus.
        ("mindrlhf/observe/trackers/prometheus.py", "http_server("),
        # With --elastic: rank 0, for nodes for rollout only.
        ("mindrlhf/rollout/newcomers.py", "create_server("),
    }


@pytest.fixture
def admission(monkeypatch):
    """Rank 0 of two, waiting for the other: (port, token) of the door, and who came in by it."""
    told, is_told, admitted = [], threading.Event(), []

    def broadcast(words: np.ndarray) -> np.ndarray:
        told.append(words.tolist())
        is_told.set()
        return words

    monkeypatch.setattr(team, "_broadcast", broadcast)
    monkeypatch.setattr(team, "_HELLO_TIMEOUT_S", 0.3)
    monkeypatch.setenv("MS_SCHED_HOST", "127.0.0.1")
    lead = threading.Thread(target=lambda: admitted.extend(team.connect(Rank(0, 2))), daemon=True)
    lead.start()
    assert is_told.wait(30)
    port, *token = told[0]
    yield port, token, admitted
    monkeypatch.setattr(team, "_HELLO_TIMEOUT_S", 30.0)
    with socket.create_connection(("127.0.0.1", port), timeout=30) as rank:
        send_message(rank, {"rank": 1, "token": token})
        lead.join(30)
        assert len(admitted) == 1
        send_message(admitted[0], {"hello": 1})
        assert receive_message(rank, timeout_s=30)[0] == {"hello": 1}
        admitted[0].close()


def _is_hung_up_on(connection: socket.socket) -> bool:
    try:
        return connection.recv(1) == b""
    except ConnectionResetError:  # what it had said was not read to its end
        return True


@pytest.mark.parametrize("change", [lambda t: [0] * len(t), lambda t: t[:-1], lambda t: [*t[:-1], t[-1] ^ 1], str])
def test_a_stranger_without_the_token_is_not_admitted(admission, change):
    port, token, admitted = admission
    with socket.create_connection(("127.0.0.1", port), timeout=30) as stranger:
        send_message(stranger, {"rank": 1, "token": change(token)})
        assert _is_hung_up_on(stranger)
    assert admitted == []


@pytest.mark.parametrize("message", [b"", b"GET / HTTP/1.1\r\n\r\n" * 4, struct.pack("!4sIIQ", b"MRL1", 2, 0, 2**40)])
def test_a_stranger_that_talks_nonsense_or_not_at_all_holds_nobody_up(admission, message):
    port, _, admitted = admission
    with socket.create_connection(("127.0.0.1", port), timeout=30) as stranger:
        stranger.sendall(message)
        assert _is_hung_up_on(stranger)
    assert admitted == []


def test_strangers_without_end_are_not_waited_for_without_end(monkeypatch):
    is_over, num_visits = threading.Event(), []

    def visit(port: int) -> None:
        while not is_over.wait(0.01):
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1) as stranger:
                stranger.sendall(b"GET / HTTP/1.1\r\n\r\n")
                num_visits.append(1)

    def broadcast(words: np.ndarray) -> np.ndarray:
        threading.Thread(target=visit, args=(int(words[0]),), daemon=True).start()
        return words

    monkeypatch.setattr(team, "_broadcast", broadcast)
    monkeypatch.setattr(team, "_HELLO_TIMEOUT_S", 0.05)
    monkeypatch.setattr(team, "_ADMISSION_TIMEOUT_S", 2.0)
    monkeypatch.setenv("MS_SCHED_HOST", "127.0.0.1")
    try:
        with pytest.raises(RunFailure, match="1 ranks did not join within 2 s"):
            team.connect(Rank(0, 2))
    finally:
        is_over.set()
    assert num_visits


def test_tokens_are_long_and_not_repeated(monkeypatch):
    tokens = []
    monkeypatch.setattr(team, "_broadcast", lambda words: tokens.append(words.tolist()[1:]))
    monkeypatch.setattr(team, "_accept", lambda *arguments: (_ for _ in ()).throw(TimeoutError))
    for _ in range(2):
        with pytest.raises(TimeoutError):
            team.connect(Rank(0, 2))
    assert len(set(sum(tokens, []))) == 2 * 4  # of 31 bits each
    assert max(sum(tokens, [])) > 2**24


def test_a_stranger_gets_no_memory_for_what_it_announces_to_rank_0(admission):
    port, _, admitted = admission
    tracemalloc.start()
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=30) as stranger:
            stranger.sendall(struct.pack("!4sIIQ", b"MRL1", 64 << 20, 0, 0) + b"x" * 100)
            assert _is_hung_up_on(stranger)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()
    assert not admitted


def _sparse(path: Path, size_bytes: int, head: bytes = b"") -> Path:
    with path.open("wb") as file:
        file.write(head)
        file.truncate(size_bytes)
    return path


@pytest.mark.parametrize(
    ("name", "read"),
    [
        ("config.json", lambda path: read_hf_config(path.parent)),
        ("tokenizer_config.json", lambda path: read_tokenizer_config(path.parent)),
        ("tokenizer.json", lambda path: load_tokenizer(path.parent)),
        ("tokenizer.model", lambda path: load_tokenizer(path.parent)),
        ("model.safetensors", SafetensorsFile),
        ("prompts.mindrecord", PromptFile.open),
    ],
)
def test_files_that_should_be_small_are_not_read_when_they_are_large(tmp_path, name, read):
    head = struct.pack("<Q", 90_000_000) if name.startswith(("model.", "prompts.")) else b""
    path = _sparse(tmp_path / name, 1 << 32, head)
    tracemalloc.start()
    try:
        with pytest.raises(UserError, match=re.escape(name.partition(".")[0])):
            read(path)
        assert tracemalloc.get_traced_memory()[1] < 600 << 20
    finally:
        tracemalloc.stop()


def test_a_stored_image_of_too_many_pixels_is_not_unpacked():
    ihdr = b"IHDR" + struct.pack("!IIBBBBB", 60_000, 60_000, 8, 2, 0, 0, 0)
    head = b"\x89PNG\r\n\x1a\n" + struct.pack("!I", 13) + ihdr + struct.pack("!I", zlib.crc32(ihdr))
    data = zlib.compress(bytes(1 << 20))
    idat = b"IDAT" + data
    with pytest.raises((ImageError, Image.DecompressionBombError)):
        decode_png(head + struct.pack("!I", len(data)) + idat + struct.pack("!I", zlib.crc32(idat)))
