"""The client of the rollout server, against a stand-in server that speaks the protocol and no vLLM."""

import errno
import json
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import distributions

import numpy as np
import pytest

from mindrlhf.errors import RunFailure, UserError
from mindrlhf.rollout.replicas import GeneratorPool
from mindrlhf.rollout.types import Cancelled, GenerationRequest, SamplingParams
from mindrlhf.rollout.vllm import VllmGenerator
from mindrlhf.rollout.vllm_options import PACKAGES_NAME, VllmOptions

# Sample i of a request "generates" the prompt, i times. Prompts that begin with 666 kill the server, with 13 fail,
# with 5050 sleep, with 4711 work for seconds.
STAND_IN = '''
import json, os, sys, socket, time
import numpy as np
from mindrlhf.system.wire import receive_message, send_message

fd = int(sys.argv[sys.argv.index("--socket-fd") + 1])
config = json.loads(sys.argv[sys.argv.index("--config") + 1])
print("stand-in up")
if config["seed"] == 99:
    sys.exit("no such device")
connection = socket.socket(fileno=fd)
send_message(connection, {"kind": "ready"})
while True:
    header, arrays = receive_message(connection)
    if header["kind"] == "stats":
        send_message(connection, {"kind": "done", "stats": {"path": sys.path, "environment": dict(os.environ)}})
    elif header["kind"] == "generate":
        prompts = np.split(arrays["prompt_ids"], np.cumsum(arrays["prompt_lengths"])[:-1])
        for request_id, prompt, num_samples in zip(arrays["request_ids"], prompts, arrays["num_samples"]):
            if prompt[0] == 666:
                print("stand-in hit by a bus", flush=True)
                os.kill(os.getpid(), 9)
            if prompt[0] == 5050:
                time.sleep(600)
            if prompt[0] == 4711:
                end = time.monotonic() + 4
                while time.monotonic() < end:
                    pass
            if prompt[0] == 13:
                send_message(connection, {"kind": "failed", "message": "unlucky"})
                break
            lengths = np.array([len(prompt) * i for i in range(1, num_samples + 1)], np.int32)
            send_message(connection, {"kind": "completions", "weights_version": 4}, {
                "request_ids": np.full(num_samples, request_id),
                "sample_indices": np.arange(num_samples, dtype=np.int32),
                "lengths": lengths, "finish_reasons": np.ones(num_samples, np.uint8),
                "token_ids": np.concatenate([np.tile(prompt, i) for i in range(1, num_samples + 1)]),
                "logprobs": np.zeros(lengths.sum(), np.float32)})
        else:
            send_message(connection, {"kind": "generated"})
    elif header["kind"] != "abort":
        send_message(connection, {"kind": "done"})
    if header["kind"] == "shutdown":
        break
'''  # fmt: skip


@pytest.fixture
def options(tmp_path):
    (tmp_path / "server.py").write_text(STAND_IN)
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} {tmp_path}/server.py "$@"\n')
    python.chmod(0o755)
    model_dir = tmp_path / "model"
    model_dir.mkdir()
    (model_dir / "config.json").write_text(json.dumps({"max_position_embeddings": 64}))
    log_path = str(tmp_path / "logs" / "rollout.log")
    return VllmOptions(str(python), str(model_dir), log_path, load_format="auto", max_model_len=50)


def change(options, **changes):
    return VllmOptions(**{**options.__dict__, **changes})


def test_requests_and_completions_pass_unchanged(options):
    requests = [GenerationRequest(5, (1, 2, 3), 2, seed=0), GenerationRequest(9, (4,), 1, seed=1)]
    with VllmGenerator.start(options) as generator:
        got = list(generator.generate(requests, SamplingParams(max_tokens=8)))
    assert [(c.request_id, c.sample_index, c.token_ids.tolist()) for c in got] == [
        (5, 0, [1, 2, 3]),
        (5, 1, [1, 2, 3, 1, 2, 3]),
        (9, 0, [4]),
    ]
    assert {(c.finish_reason, c.weights_version) for c in got} == {("length", 4)}


def test_images_go_to_models_that_see_only(options):
    request = GenerationRequest(0, (1, 2), 1, seed=0, images=(np.zeros((28, 28, 3), np.uint8),))
    with VllmGenerator.start(options) as generator:
        with pytest.raises(UserError, match="prompts have images, and the model in .*model sees none"):
            generator.generate([request], SamplingParams(max_tokens=8))


def test_a_server_of_a_model_that_sees_has_a_plugin_for_all_its_processes(options, tmp_path):
    def plugins(generator):
        path = generator.stats()["path"]
        (packages,) = (entry for entry in path if os.path.basename(entry) == PACKAGES_NAME)
        found = [one for installed in distributions(path=[packages]) for one in installed.entry_points]
        return [(one.group, one.value) for one in found]

    with VllmGenerator.start(options) as generator:
        assert plugins(generator) == []
    (tmp_path / "model" / "config.json").write_text('{"vision_config": {}, "text_config": {}}')
    with VllmGenerator.start(options) as generator:
        assert plugins(generator) == [("vllm.general_plugins", "mindrlhf.rollout.server.vision:register")]


def test_relative_paths_are_those_of_the_trainer(options, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with VllmGenerator.start(change(options, python="./python", model_dir="model", log_path="here.log")) as generator:
        generator.ping()
    assert "stand-in up" in (tmp_path / "here.log").read_text()


def test_the_server_gets_a_clean_environment(options, monkeypatch):
    for name in ("RANK_ID", "RANK_SIZE", "DEVICE_ID", "MS_WORKER_NUM", "OMPI_COMM_WORLD_RANK", "VIRTUAL_ENV"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("KEPT", "yes")
    with VllmGenerator.start(change(options, num_threads=3, env={"EXTRA": "more"})) as generator:
        seen = generator.stats()
        private_dir = generator._process.private_dir
        assert os.listdir(os.path.join(private_dir, "packages")) == ["mindrlhf"]
    environment = seen["environment"]
    assert not {name for name in environment if name.startswith(("RANK", "DEVICE", "MS_", "OMPI_", "VIRTUAL"))}
    assert (environment["KEPT"], environment["EXTRA"], environment["OMP_NUM_THREADS"]) == ("yes", "more", "3")
    assert environment["PYTHONPATH"] == os.path.join(private_dir, "packages")
    assert environment["TMPDIR"] == os.path.join(private_dir, "tmp")
    assert not os.path.exists(private_dir)


def test_a_server_that_cannot_start_is_reported_with_its_log(options):
    with VllmGenerator.start(change(options, seed=99)) as generator:
        with pytest.raises(RunFailure, match=r"ended with exit code 1; log .*rollout.log ends: .*no such device"):
            generator.wait_ready()


def test_an_interpreter_that_cannot_run_leaves_nothing(options, tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    (tmp_path / "python").write_text("#!/nowhere/interpreter\n")
    with pytest.raises(RunFailure, match="could not be started"):
        VllmGenerator.start(options)
    assert os.listdir(tmp_path / "temporary") == []


def test_a_server_without_room_for_temporary_files_is_one_line(options, tmp_path, monkeypatch):
    (tmp_path / "full").touch()  # nothing can be made below a file
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "full"))
    with pytest.raises(RunFailure, match="full for its temporary files: Not a directory; make room, or set TMPDIR"):
        VllmGenerator.start(options)


def test_a_disk_that_is_full_before_all_temporary_files_are_made_leaves_none(options, tmp_path, monkeypatch):
    def refuse(*_args, **_options):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr("os.symlink", refuse)
    with pytest.raises(RunFailure, match="temporary for its temporary files: No space left on device; make room"):
        VllmGenerator.start(options)
    assert os.listdir(tmp_path / "temporary") == []


def test_a_server_that_does_not_come_up_is_stopped(options, tmp_path):
    (tmp_path / "server.py").write_text("import time; time.sleep(60)")
    generator = VllmGenerator.start(change(options, start_timeout_s=0.3))
    pid = generator._process.pid
    with pytest.raises(RunFailure, match="was not ready within 0.3 s"):
        generator.wait_ready()
    assert not os.path.exists(f"/proc/{pid}")


def test_another_thread_breaks_off_a_generation(options):
    with VllmGenerator.start(options) as generator, ThreadPoolExecutor(1) as thread:
        generator.wait_ready()
        # The server works for four seconds on the second request before it says so much as a word.
        requests = [GenerationRequest(0, (1, 2), 1, seed=0), GenerationRequest(1, (4711,), 1, seed=0)]
        completions = generator.generate(requests, SamplingParams(max_tokens=4))
        assert next(completions).token_ids.tolist() == [1, 2]
        rest = thread.submit(list, completions)
        generator.cancel()
        with pytest.raises(Cancelled):
            rest.result()
        with pytest.raises(Cancelled):
            list(generator.generate(requests[:1], SamplingParams(max_tokens=4)))
        generator.ping()  # the two sides are in step


def test_a_death_while_generating_is_reported_and_restart_mends_it(options):
    with VllmGenerator.start(options) as generator:
        generator.use_weight_buffer("/proc/1/fd/3")
        generator.update_weights(2)
        with pytest.raises(RunFailure, match=r"killed by signal 9 \(SIGKILL\); log .* ends: .*hit by a bus"):
            list(generator.generate([GenerationRequest(0, (666,), 1, seed=0)], SamplingParams(max_tokens=1)))
        with pytest.raises(RunFailure, match="the rollout server is closed"):
            generator.ping()
        generator.restart()
        generator.ping()


def test_a_server_that_sleeps_on_its_work_is_given_up_and_one_that_works_is_not(options):
    with VllmGenerator.start(change(options, stall_timeout_s=2.0)) as generator:
        list(generator.generate([GenerationRequest(0, (4711,), 1, seed=0)], SamplingParams(max_tokens=8)))
        assert generator.is_running
        with pytest.raises(RunFailure, match=r"has been stuck for 2 s in 'generate'; log .* ends: stand-in up"):
            list(generator.generate([GenerationRequest(0, (5050,), 1, seed=0)], SamplingParams(max_tokens=8)))
        assert not generator.is_running
        generator.restart()
        generator.ping()


def test_a_failed_request_leaves_the_server_usable(options):
    with VllmGenerator.start(options) as generator:
        with pytest.raises(RunFailure, match="could not carry out a request: unlucky"):
            list(generator.generate([GenerationRequest(0, (13,), 1, seed=0)], SamplingParams(max_tokens=1)))
        generator.ping()


def test_closing_the_stream_early_keeps_the_conversation_in_step(options):
    requests = [GenerationRequest(i, (1,), 2, seed=0) for i in range(3)]
    with VllmGenerator.start(options) as generator:
        stream = generator.generate(requests, SamplingParams(max_tokens=4))
        next(stream)
        stream.close()
        assert "path" in generator.stats()
        assert len(list(generator.generate(requests, SamplingParams(max_tokens=4)))) == 6


@pytest.mark.parametrize(
    "requests, message",
    [
        ([GenerationRequest(0, (), 1, 0)], "request 0 has 0 tokens"),
        ([GenerationRequest(0, (1,) * 46, 1, 0)], "max_model_len 50 less max_tokens 5 leaves 1 to 45"),
        ([GenerationRequest(0, (1,), 1, 0)] * 2, "same request_id"),
    ],
)
def test_bad_requests_are_the_users_error(options, requests, message):
    with VllmGenerator.start(options) as generator, pytest.raises(UserError, match=message):
        generator.generate(requests, SamplingParams(max_tokens=5))


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"python": "/nowhere/python"}, "'/nowhere/python' is no executable"),
        ({"model_dir": "/nowhere"}, "model directory '/nowhere' does not exist"),
        ({"device": "tpu"}, "device is 'tpu'"),
        ({"max_num_seqs": 0}, "max_num_seqs is 0"),
        ({"max_model_len": 65}, "may have 65 tokens"),
    ],
)
def test_bad_options_are_the_users_error_before_anything_starts(options, changes, message):
    with pytest.raises(UserError, match=message):
        VllmGenerator.start(change(options, **changes))


def test_a_server_without_weights_does_not_generate(options):
    with VllmGenerator.start(change(options, load_format="dummy")) as generator:
        with pytest.raises(RunFailure, match="has no weights yet"):
            generator.generate([GenerationRequest(0, (1,), 1, 0)], SamplingParams(max_tokens=1))


def test_a_pool_deals_requests_out_and_gathers_every_sample(options):
    pool = GeneratorPool([VllmGenerator.start(options) for _ in range(2)])
    try:
        requests = [GenerationRequest(i, (i + 1,), 3, seed=0) for i in range(5)]
        completions = pool.generate(requests, SamplingParams(max_tokens=5))
        got = {(c.request_id, c.sample_index): c.token_ids for c in completions}
        assert set(got) == {(i, j) for i in range(5) for j in range(3)}
        np.testing.assert_array_equal(got[3, 1], [4, 4])
        bad = [*requests, GenerationRequest(7, (666,), 1, seed=0)]
        with pytest.raises(RunFailure, match="killed by signal 9"):
            list(pool.generate(bad, SamplingParams(max_tokens=5)))
    finally:
        pool.close()
