"""A server as rank 0 sees it: the real process, with an engine that needs no model."""

import errno
import json
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import distributions
from pathlib import Path

import numpy as np
import pytest

from mindrlhf.errors import RunFailure, UserError
from mindrlhf.rollout.pool import ServerPool
from mindrlhf.rollout.servers import Server
from mindrlhf.rollout.types import Cancelled, GenerationRequest, SamplingParams
from mindrlhf.rollout.vllm_options import PACKAGES_NAME, VllmOptions
from mindrlhf.weights.publish.buffer import TensorInfo, WeightBuffer

ENGINE = f"{Path(__file__).parents[1] / 'helpers' / 'stub_engine.py'}:StubEngine"
pytestmark = pytest.mark.timeout(180)


@pytest.fixture
def options(tmp_path):
    model_dir = tmp_path / "model"
    model_dir.mkdir()
    (model_dir / "config.json").write_text(json.dumps({"max_position_embeddings": 64}))
    log_path = str(tmp_path / "logs" / "rollout.log")
    given = {"engine": ENGINE, "load_format": "auto", "max_model_len": 50}
    return VllmOptions(sys.executable, str(model_dir), log_path, **given)


@pytest.fixture
def buffer():
    with WeightBuffer.create((TensorInfo("w", "float32", (3,)),)) as buffer:
        buffer.begin(2)
        buffer.write("w", np.arange(3, dtype=np.float32))
        buffer.commit()
        yield buffer


def change(options, **changes):
    return VllmOptions(**{**options.__dict__, **changes})


def test_requests_and_completions_pass_unchanged(options):
    requests = [GenerationRequest(5, (1, 2, 3), 2, seed=0), GenerationRequest(9, (4,), 1, seed=1)]
    with Server.start(options) as generator:
        got = list(generator.generate(requests, SamplingParams(max_tokens=8)))
    assert [(c.request_id, c.sample_index, c.token_ids.tolist()) for c in got] == [
        (5, 0, [1, 2, 3]),
        (5, 1, [1, 2, 3, 1, 2, 3]),
        (9, 0, [4]),
    ]
    assert {(c.finish_reason, c.weights_version) for c in got} == {("length", 4)}


def test_images_go_to_models_that_see_only(options):
    request = GenerationRequest(0, (1, 2), 1, seed=0, images=(np.zeros((28, 28, 3), np.uint8),))
    with Server.start(options) as generator:
        with pytest.raises(UserError, match="prompts have images, and the model in .*model sees none"):
            generator.generate([request], SamplingParams(max_tokens=8))


def notes_of(options, tmp_path, **changes):
    """Return what a server knows of itself, and its private directory, once it was there."""
    (tmp_path / "notes").mkdir(exist_ok=True)
    env = {"NOTES": str(tmp_path / "notes"), **options.env}
    with Server.start(change(options, env=env, **changes)) as generator:
        generator.wait_ready()
        told = json.loads(max((tmp_path / "notes").glob("*.json")).read_text())
        (packages,) = (entry for entry in told["path"] if os.path.basename(entry) == PACKAGES_NAME)
        found = [one for installed in distributions(path=[packages]) for one in installed.entry_points]
        plugins = [(one.group, one.value) for one in found]
        return told["environment"], os.path.dirname(packages), os.listdir(packages), plugins


def test_a_server_of_a_model_that_sees_has_a_plugin_for_all_its_processes(options, tmp_path):
    assert notes_of(options, tmp_path)[3] == []
    (tmp_path / "model" / "config.json").write_text('{"vision_config": {}, "text_config": {}}')
    assert notes_of(options, tmp_path)[3] == [("vllm.general_plugins", "mindrlhf.rollout.server.vision:register")]


def test_relative_paths_are_those_of_the_trainer(options, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with Server.start(change(options, python=sys.executable, model_dir="model", log_path="here.log")) as generator:
        generator.wait_ready()
    assert "stub up" in (tmp_path / "here.log").read_text()


def test_the_server_gets_a_clean_environment(options, tmp_path, monkeypatch):
    for name in ("RANK_ID", "RANK_SIZE", "DEVICE_ID", "MS_WORKER_NUM", "OMPI_COMM_WORLD_RANK", "VIRTUAL_ENV"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("KEPT", "yes")
    environment, private_dir, packages, _ = notes_of(change(options, env={"EXTRA": "more"}), tmp_path, num_threads=3)
    assert packages == ["mindrlhf"]
    assert not {name for name in environment if name.startswith(("RANK", "DEVICE", "MS_", "OMPI_", "VIRTUAL"))}
    assert (environment["KEPT"], environment["EXTRA"], environment["OMP_NUM_THREADS"]) == ("yes", "more", "3")
    assert environment["PYTHONPATH"] == os.path.join(private_dir, "packages")
    assert environment["TMPDIR"] == os.path.join(private_dir, "tmp")
    assert not os.path.exists(private_dir)


def test_a_server_that_cannot_start_is_reported_with_its_log(options):
    with Server.start(change(options, seed=99)) as generator:
        with pytest.raises(RunFailure, match=r"ended with exit code 1; log .*rollout.log ends: .*no such device"):
            generator.wait_ready()


def test_an_interpreter_that_cannot_run_leaves_nothing(options, tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    python = tmp_path / "python"
    python.write_text("#!/nowhere/interpreter\n")
    python.chmod(0o755)
    with pytest.raises(RunFailure, match="could not be started"):
        Server.start(change(options, python=str(python)))
    assert os.listdir(tmp_path / "temporary") == []


def test_a_server_without_room_for_temporary_files_is_one_line(options, tmp_path, monkeypatch):
    (tmp_path / "full").touch()  # nothing can be made below a file
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "full"))
    with pytest.raises(RunFailure, match="full for its temporary files: Not a directory; make room, or set TMPDIR"):
        Server.start(options)


def test_a_disk_that_is_full_before_all_temporary_files_are_made_leaves_none(options, tmp_path, monkeypatch):
    def refuse(*_args, **_options):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr("os.symlink", refuse)
    with pytest.raises(RunFailure, match="temporary for its temporary files: No space left on device; make room"):
        Server.start(options)
    assert os.listdir(tmp_path / "temporary") == []


def test_a_server_that_does_not_come_up_is_stopped(options):
    generator = Server.start(change(options, seed=98, start_timeout_s=0.3))
    (pid,) = generator._pids
    with pytest.raises(RunFailure, match="was not ready within 0.3 s"):
        generator.wait_ready()
    assert not os.path.exists(f"/proc/{pid}")


def test_another_thread_breaks_off_a_generation(options):
    with Server.start(options) as generator, ThreadPoolExecutor(1) as thread:
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
        generator.stats()  # the two sides are in step


def test_a_death_while_generating_is_reported_and_restart_mends_it(options, buffer):
    with Server.start(options, buffer.path) as generator:
        generator.update_weights(2)
        with pytest.raises(RunFailure, match=r"killed by signal 9 \(SIGKILL\); log .* ends: .*hit by a bus"):
            list(generator.generate([GenerationRequest(0, (666,), 1, seed=0)], SamplingParams(max_tokens=1)))
        with pytest.raises(RunFailure, match="the rollout server is closed"):
            generator.stats()
        generator.restart()
        (sample,) = generator.generate([GenerationRequest(0, (1,), 1, seed=0)], SamplingParams(max_tokens=1))
        assert sample.weights_version == 2


def test_a_new_server_does_not_sample_with_weights_that_have_gone(options, buffer):
    with Server.start(change(options, load_format="dummy"), buffer.path) as generator:
        generator.update_weights(2)
        buffer.begin(3)
        generator.restart()
        assert not generator.has_weights


def test_a_failed_request_leaves_the_server_usable(options):
    with Server.start(options) as generator:
        with pytest.raises(RunFailure, match="could not carry out a request: ValueError: unlucky"):
            list(generator.generate([GenerationRequest(0, (13,), 1, seed=0)], SamplingParams(max_tokens=1)))
        generator.stats()


def test_closing_the_stream_early_keeps_the_conversation_in_step(options):
    requests = [GenerationRequest(i, (1,), 2, seed=0) for i in range(3)]
    with Server.start(options) as generator:
        stream = generator.generate(requests, SamplingParams(max_tokens=4))
        next(stream)
        stream.close()
        generator.stats()
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
    with Server.start(options) as generator, pytest.raises(UserError, match=message):
        generator.generate(requests, SamplingParams(max_tokens=5))


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"python": "/nowhere/python"}, "'/nowhere/python' is no executable"),
        ({"model_dir": "/nowhere"}, "model directory '/nowhere' does not exist"),
        ({"max_model_len": 65}, "may have 65 tokens"),
    ],
)
def test_bad_options_are_the_users_error_before_anything_starts(options, changes, message):
    with pytest.raises(UserError, match=message):
        Server.start(change(options, **changes))


def test_a_server_without_weights_does_not_generate(options):
    with Server.start(change(options, load_format="dummy")) as generator:
        with pytest.raises(RunFailure, match="has no weights yet"):
            generator.generate([GenerationRequest(0, (1,), 1, 0)], SamplingParams(max_tokens=1))


def test_a_pool_deals_requests_out_and_gathers_every_sample(options):
    pool = ServerPool([Server.start(options) for _ in range(2)], num_restarts=0)
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
