"""`mindrlhf models get` and `data get`, against a stand-in for Hugging Face's hub on this machine, and against none."""

import http.server
import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from mindrlhf.cli import main
from mindrlhf.hub import cache
from mindrlhf.hub.cache import MODELS

ROOT = Path(__file__).parents[2]
COMMIT = "0123456789abcdef0123456789abcdef01234567"
FILES = {
    "config.json": b'{"architectures": ["Qwen2ForCausalLM"]}',
    "model.safetensors": b"\x00" * 1000,
    "pytorch_model.bin": b"\x01" * 1000,
    "test.jsonl": b"{}\n",
}


class Hub(http.server.BaseHTTPRequestHandler):
    """The requests that a client makes to fetch a repository, as the hub's API answers them."""

    def do_GET(self):
        self._answer(with_body=True)

    def do_HEAD(self):
        self._answer(with_body=False)

    def _answer(self, with_body):
        self.server.asked.append(self.path)
        name = self.path.rpartition("/")[2]
        if "/resolve/" in self.path and name in FILES:
            body, kind = FILES[name], "application/octet-stream"
        elif self.path.startswith(("/api/models/team/model/", "/api/datasets/team/model/")):
            siblings = [{"rfilename": name} for name in FILES]
            about = {"id": "team/model", "sha": COMMIT, "siblings": siblings, "private": False, "downloads": 0}
            body, kind = json.dumps(about | {"likes": 0, "tags": []}).encode(), "application/json"
        else:
            self.send_response(404)
            self.send_header("X-Error-Code", "RepoNotFound")
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        self.send_response(200)
        for header, value in {
            "Content-Type": kind,
            "Content-Length": str(len(body)),
            "ETag": f'"{name}-1"',
            "X-Repo-Commit": COMMIT,
        }.items():
            self.send_header(header, value)
        self.end_headers()
        if with_body:
            self.wfile.write(body)

    def log_message(self, *_):
        pass


@pytest.fixture
def hub():
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    server.asked = []
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def run(tmp_path, endpoint, *words):
    """Run the command in a process of its own, since the client reads its environment once."""
    environment = {"HOME": str(tmp_path), "PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT)}
    environment |= {"HF_ENDPOINT": endpoint, "HF_HUB_DISABLE_TELEMETRY": "1", "HF_HUB_DISABLE_XET": "1"}
    command = [sys.executable, "-m", "mindrlhf.cli", *words]
    return subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=120)


def test_a_model_comes_into_the_cache_and_is_found_there_by_its_name(tmp_path, hub):
    pytest.importorskip("huggingface_hub", reason="the extra hub is not installed")
    endpoint = f"http://127.0.0.1:{hub.server_port}"
    ended = run(tmp_path, endpoint, "models", "get", "team/model")
    assert ended.returncode == 0, ended.stderr
    directory = tmp_path / ".cache/huggingface/hub/models--team--model/snapshots" / COMMIT
    assert ended.stdout == f"{directory}\n"
    wanted = {name: content for name, content in FILES.items() if not name.endswith(".bin")}
    assert {path.name: path.read_bytes() for path in directory.iterdir()} == wanted
    assert not any(path.endswith(".bin") for path in hub.asked)
    # Without the hub, what is in the cache is enough.
    hub.asked.clear()
    inspected = run(tmp_path, endpoint, "weights", "inspect", "team/model")
    assert "config.json has num_hidden_layers=None" in inspected.stderr and hub.asked == []


def test_a_data_set_comes_whole_and_into_a_directory_if_one_is_named(tmp_path, hub):
    pytest.importorskip("huggingface_hub", reason="the extra hub is not installed")
    endpoint = f"http://127.0.0.1:{hub.server_port}"
    ended = run(tmp_path, endpoint, "data", "get", "team/model", "--output", "here")
    assert ended.returncode == 0, ended.stderr
    files = {path.name: path.read_bytes() for path in (tmp_path / "here").iterdir() if path.is_file()}
    assert files == FILES
    assert any(path.startswith("/api/datasets/") for path in hub.asked)


@pytest.mark.parametrize("name", ["team/missing", "team/model"])
def test_without_the_model_or_the_hub_it_is_one_line(tmp_path, hub, name):
    pytest.importorskip("huggingface_hub", reason="the extra hub is not installed")
    port = hub.server_port if name == "team/missing" else 9  # nobody listens on discard
    ended = run(tmp_path, f"http://127.0.0.1:{port}", "models", "get", name)
    assert ended.returncode == 1 and ended.stdout == ""
    (line,) = [line for line in ended.stderr.splitlines() if "error" in line]
    assert line.startswith(f"mindrlhf models: error: huggingface did not give {name}: ")
    assert line.endswith("; check the name and the network, or try --from modelscope")


def test_wrong_names_and_missing_clients_are_one_line(monkeypatch, capsys):
    assert main(["models", "get", "Qwen2.5-7B"]) == 2
    assert "'Qwen2.5-7B' is no name on a hub: give owner/name" in capsys.readouterr().err
    monkeypatch.setitem(cache.CLIENTS, "modelscope", "no_such_client")
    assert main(["data", "get", "openai/gsm8k", "--from", "modelscope"]) == 2
    assert "fetching from modelscope needs its client: pip install 'mindrlhf[hub]'" in capsys.readouterr().err


def test_modelscopes_client_is_asked_for_the_same(monkeypatch, tmp_path):
    asked = {}
    client = type(sys)("modelscope")
    client.__spec__ = type("Spec", (), {"origin": "here"})
    client.snapshot_download = lambda name, **options: asked.update(options, name=name) or str(tmp_path)
    monkeypatch.setitem(sys.modules, "modelscope", client)
    assert cache.fetch("Qwen/Qwen3-8B", MODELS, "modelscope", revision="v1", output="there") == tmp_path
    assert asked.pop("ignore_patterns") == list(cache.UNREAD)
    assert asked == {"name": "Qwen/Qwen3-8B", "repo_type": "model", "revision": "v1", "local_dir": "there"}
