"""The pool over scripted servers: what a death costs, and what a restart brings back."""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
from tiny_models import tiny_model

from mindrlhf.config.rollout import RolloutSection
from mindrlhf.errors import RunFailure, UserError
from mindrlhf.rollout import pool as pool_module
from mindrlhf.rollout.nodes import OwnNode
from mindrlhf.rollout.pool import ServerPool, find_rollout_python, own_servers, server_options
from mindrlhf.rollout.types import Completion, GenerationRequest, SamplingParams
from mindrlhf.rollout.vllm_options import cpu_cache_gib, reserved_bytes

QWEN_7B = Path(__file__).parents[2] / "model_configs" / "qwen2_5" / "qwen2_5_7b"
SAMPLING = SamplingParams(max_tokens=4)


class Server:
    """A generator whose samples depend on the request's seed and the sample's number, and which can die."""

    def __init__(self, dies_after: int | None = None):
        self.node = OwnNode(None)
        self.nodes = [self.node]
        self.dies_after = dies_after  # completions
        self.is_alive = True
        self.num_starts = 1
        self.version = 0
        self.has_weights = True
        self.asked: list[list[int]] = []
        self.log: list[str] = []

    def wait_ready(self):
        self.log.append("wait_ready")

    def generate(self, requests, sampling):
        self.asked.append([request.request_id for request in requests])
        return self._completions(requests)

    def _completions(self, requests):
        # Sample by sample over all requests, so that a death leaves several of them half done.
        pairs = [(r, i) for i in range(max(r.num_samples for r in requests)) for r in requests if i < r.num_samples]
        for request, index in pairs:
            self._check()
            if self.dies_after is not None:
                if self.dies_after == 0:
                    self.is_alive, self.dies_after = False, None
                    self._check()
                self.dies_after -= 1
            tokens = np.array([request.seed, index, self.version], np.int32)
            yield Completion(request.request_id, index, tokens, np.zeros(3, np.float32), "stop", self.version)

    def update_weights(self, version):
        self._check()
        self.version = version

    def sleep(self):
        self._check()

    def wake(self):
        self._check()

    @property
    def is_running(self):
        return self.is_alive

    def restart(self):
        self.is_alive = True
        self.num_starts += 1

    def close(self):
        self.log.append("close")

    def _check(self):
        if not self.is_alive:
            raise RunFailure("the rollout server was killed by signal 9; log x ends: ...")


REQUESTS = [GenerationRequest(i, (1, 2), num_samples, seed=100 + i) for i, num_samples in enumerate((3, 1, 4, 2))]
EXPECTED = {(r.request_id, i): [r.seed, i, 7] for r in REQUESTS for i in range(r.num_samples)}


def collect(pool: ServerPool) -> dict[tuple[int, int], list[int]]:
    completions = list(pool.generate(REQUESTS, SAMPLING))
    samples = {(c.request_id, c.sample_index): c.token_ids.tolist() for c in completions}
    assert len(samples) == len(completions), "a sample came twice"
    return samples


@pytest.mark.parametrize("num_servers", [1, 2, 3, 6])
def test_every_sample_comes_once_from_any_number_of_servers(num_servers):
    servers = [Server() for _ in range(num_servers)]
    pool = ServerPool(servers, num_restarts=0)
    pool.update_weights(7)
    assert collect(pool) == EXPECTED
    assert sorted(name for server in servers for asked in server.asked for name in asked) == [0, 1, 2, 3]


@pytest.mark.parametrize("num_servers", [1, 2])
@pytest.mark.parametrize("dies_after", range(6))
def test_a_death_in_the_middle_is_made_good_by_a_restart(num_servers, dies_after, capsys):
    servers = [Server(dies_after), *(Server() for _ in range(num_servers - 1))]
    pool = ServerPool(servers, num_restarts=1)
    pool.update_weights(7)
    if num_servers == 2 and dies_after == 5:
        servers[0].dies_after = 4  # its share is five samples
    assert collect(pool) == EXPECTED
    assert [server.num_starts for server in servers] == [2, *[1] * (num_servers - 1)]
    message = capsys.readouterr().err
    assert "killed by signal 9" in message and "0 restarts left" in message


def test_all_requests_are_asked_again_as_last_bits_depend_on_the_batch():
    server = Server(dies_after=6)  # 0,1,2,3 and 0,2: request 1 is complete
    pool = ServerPool([server], num_restarts=1)
    pool.update_weights(7)
    assert collect(pool) == EXPECTED
    assert server.asked == [[0, 1, 2, 3], [0, 1, 2, 3]]


def test_a_death_is_raised_when_the_weights_have_been_replaced():
    server = Server(dies_after=2)
    server.restart = lambda: setattr(server, "has_weights", False)
    pool = ServerPool([server], num_restarts=5)
    pool.update_weights(7)
    with pytest.raises(RunFailure, match="killed by signal 9.*weights it sampled with have been replaced: resume"):
        collect(pool)


def test_a_death_between_two_rollouts_is_made_good_too():
    """The server may die while the trainer updates: the next thing it is asked is to wake and take new weights."""
    server = Server()
    pool = ServerPool([server], num_restarts=1)
    pool.update_weights(6)
    server.is_alive = False
    pool.wake()
    pool.update_weights(7)
    assert server.num_starts == 2
    assert collect(pool) == EXPECTED


def test_only_the_server_that_failed_is_asked_again():
    servers = [Server(dies_after=2), Server()]
    pool = ServerPool(servers, num_restarts=1)
    pool.update_weights(7)
    assert collect(pool) == EXPECTED
    assert [server.asked for server in servers] == [[[0, 2], [0, 2]], [[1, 3]]]


def test_servers_that_die_at_once_share_the_restarts():
    servers = [Server(), Server()]
    pool = ServerPool(servers, num_restarts=1)
    for server in servers:
        server.is_alive = False
    with pytest.raises(RunFailure, match="killed by signal 9"):
        pool.sleep()
    assert sorted(server.num_starts for server in servers) == [1, 2]


def test_a_users_mistake_starts_nothing_again():
    class Refusing(Server):
        def generate(self, requests, sampling):
            raise UserError("a prompt is too long")

    server = Refusing()
    with pytest.raises(UserError, match="too long"):
        collect(ServerPool([server], num_restarts=1))
    assert server.num_starts == 1


def test_all_servers_hear_everything():
    servers = [Server(), Server()]
    pool = ServerPool(servers, num_restarts=0)
    pool.wait_ready()
    pool.update_weights(3)
    pool.close()
    for server in servers:
        assert server.log == ["wait_ready", "close"]
        assert server.version == 3


def test_the_interpreter_is_looked_for_in_order(monkeypatch, tmp_path):
    monkeypatch.setenv(pool_module.PYTHON_VARIABLE, "/from/environment")
    assert find_rollout_python("/configured") == "/configured"
    assert find_rollout_python() == "/from/environment"
    monkeypatch.delenv(pool_module.PYTHON_VARIABLE)
    package = tmp_path / "repository" / "mindrlhf"
    package.mkdir(parents=True)
    monkeypatch.setattr(pool_module.mindrlhf, "__file__", str(package / "__init__.py"))
    assert find_rollout_python() == pool_module.sys.executable
    beside = package.parent / ".venv-rollout" / "bin" / "python"
    beside.parent.mkdir(parents=True)
    beside.touch()
    assert find_rollout_python() == str(beside)


MODEL = tiny_model(hidden_size=128, intermediate_size=64, num_hidden_layers=2, max_position_embeddings=1024)


def options_of(rollout: RolloutSection, directory: Path, **options):
    (directory / "model").mkdir(exist_ok=True)
    (directory / "model" / "config.json").write_text(json.dumps(MODEL))
    fixed = {"model_dir": str(directory / "model"), "max_model_len": 96, "seed": 5, "device": "cpu"}
    settings = {**fixed, "load_weights": False, "log_dir": directory, **options}
    return [server_options(rollout, index, **settings) for index in range(rollout.num_replicas)]


def test_the_config_reaches_every_server(tmp_path):
    rollout = RolloutSection(python="/p", num_replicas=2, max_num_seqs=9, num_threads=3, env={"A": "b"})
    options = [dataclasses.asdict(entry) for entry in options_of(rollout, tmp_path)]
    assert [entry.pop("log_path") for entry in options] == [str(tmp_path / f"rollout_{i}.log") for i in (0, 1)]
    assert options[0] == options[1]
    wanted = {"python": "/p", "max_model_len": 96, "max_num_seqs": 9, "num_threads": 3, "seed": 5, "env": {"A": "b"}}
    assert options[0].items() >= {**wanted, "load_format": "dummy", "enable_sleep": False}.items()
    (loaded,) = options_of(RolloutSection(), tmp_path, load_weights=True, device="ascend")
    assert (loaded.load_format, loaded.enable_sleep, loaded.kv_cache_gib) == ("auto", True, None)


@pytest.mark.parametrize(
    "max_num_seqs, max_model_len, gib",
    [
        # Keys and values of 2 layers, 2 heads and 32 channels in float32: 1 KiB a token. 4 batches of sequences, each
        # with room for 128 tokens more.
        (9, 96, 4 * 9 * 224 / 2**20),
        (256, 896, 1.0),
        (257, 896, 1.0),  # more would be 1.004
        (250, 896, 4 * 250 * 1024 / 2**20),
    ],
)
def test_the_cache_of_a_small_model_is_no_larger_than_it_can_use(tmp_path, max_num_seqs, max_model_len, gib):
    (tmp_path / "config.json").write_text(json.dumps(MODEL))
    rollout = RolloutSection(max_num_seqs=max_num_seqs)
    assert cpu_cache_gib(rollout, str(tmp_path), max_model_len) == pytest.approx(gib, rel=1e-12)


def test_servers_on_ascend_share_no_device(monkeypatch, tmp_path):
    rollout = RolloutSection(num_replicas=4, tensor_parallel=2, env={"A": "b"})
    monkeypatch.delenv("ASCEND_RT_VISIBLE_DEVICES", raising=False)
    devices = ["0,1", "2,3", "4,5", "6,7"]
    expected = [{"A": "b", "ASCEND_RT_VISIBLE_DEVICES": own} for own in devices]
    assert [options.env for options in options_of(rollout, tmp_path, device="ascend")] == expected


def test_a_server_that_cannot_start_stops_those_before_it(monkeypatch, tmp_path):
    running = []

    class Process:
        def __init__(self, *_):
            if len(running) == 2:
                raise RunFailure("no memory")
            running.append(self)
            self.pid = 0

        def end(self):
            running.remove(self)

    monkeypatch.setattr("mindrlhf.rollout.processes.node.ServerProcess", Process)
    options = options_of(RolloutSection(python=pool_module.sys.executable, num_replicas=3), tmp_path)
    monkeypatch.setattr(pool_module, "server_options", lambda rollout, index: options[index])
    with pytest.raises(RunFailure, match="no memory"):
        own_servers(RolloutSection(num_replicas=3))
    assert running == []


def test_the_cache_of_an_npu_is_what_weights_and_workspace_leave_of_the_share():
    norms = (2 * 28 + 1) * 3584  # whole on each device; all else is halved
    weights = (7_615_616_512 - norms) // 2 + norms
    rollout = RolloutSection(tensor_parallel=2, max_num_seqs=64, dtype="bfloat16")
    assert reserved_bytes(rollout, str(QWEN_7B)) == 2 * weights + 1_500_000_000 + 64 * 152_064 * 4
