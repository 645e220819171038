"""The rollout server: an engine, vLLM unless told otherwise, behind a socket, in an interpreter of its own.

The trainer starts it (see ``mindrlhf.rollout.vllm``) as ``python -m mindrlhf.rollout.server --socket-fd N --config
JSON``. It serves that one connection and ends with it. Messages (see ``mindrlhf.system.wire``) are headers with a
"kind", and each is answered:

    generate        {sampling} + request_ids, num_samples, seeds, max_tokens, nums_begun, prompt_lengths, prompt_ids,
                    and images
                    -> completions (as they finish, any number of times), then generated
    abort           (during generate) ends it early -> generated
    update_weights  {version, buffer_path} -> done
    sleep, wake     -> done
    profile         {step} starts vLLM's profiler, step 0 ends it -> done
    ping            -> done
    stats           -> done, with counters
    shutdown        -> done, and the process ends

A request that fails is answered by "failed" with a message; the server goes on.

With ``--headless`` in place of the socket it is the part of a server whose engine is on another node: it does what that
engine asks, and ends when one of its workers does (see ``mindrlhf.rollout.multi_node``).
"""

import argparse
import json
import os
import select
import shutil
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Sequence
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from mindrlhf.cpu.imports import quick_imports
from mindrlhf.rollout.sent_images import unpack_images
from mindrlhf.rollout.server.multi_node import prepare
from mindrlhf.rollout.types import Completion, pack_completions
from mindrlhf.sandbox.user_files import load_named
from mindrlhf.system import heartbeat, processes
from mindrlhf.system.wire import ConnectionClosed, receive_message, send_message

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
    try:
        Server(connection, engine).run()
    except ConnectionClosed:
        print("rollout server: the trainer closed the connection", file=sys.stderr)
    engine.close()
    _leave(config["private_dir"], 0)


def _make_engine(config: dict[str, Any]):
    path, _, name = config["engine"].rpartition(":")
    if path:
        return load_named(Path(path), name, "engine")(config)
    with quick_imports():
        from mindrlhf.rollout.server.cpu_engine import build_engine  # takes seconds: vLLM and torch

    return build_engine(config)


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


class Server:
    """Answers the messages of one connection, one after the other."""

    def __init__(self, connection: socket.socket, engine):
        self._connection = connection
        self._engine = engine
        self._stats = {"num_steps": 0, "num_samples": 0, "num_tokens": 0, "generate_s": 0.0, "update_s": 0.0}

    def run(self) -> None:
        """Serve until ``shutdown``. Raises ConnectionClosed when the trainer is gone."""
        self._send("ready", pid=os.getpid(), sampler=self._engine.sampler)
        while True:
            header, arrays = receive_message(self._connection)
            try:
                going_on = self._answer(header, arrays)
            except ConnectionClosed:
                raise
            except Exception as error:  # a failed request must not take the server with it
                traceback.print_exc()
                self._engine.abort()
                self._send("failed", message=f"{type(error).__name__}: {error}")
                continue
            if not going_on:
                return

    def _answer(self, header: dict[str, Any], arrays: dict[str, np.ndarray]) -> bool:
        kind = header["kind"]
        if kind == "generate":
            self._generate(header["sampling"], arrays)
        elif kind == "abort":  # of a generation that had ended when it was sent
            pass
        elif kind == "update_weights":
            start = time.perf_counter()
            self._engine.update_weights(header["version"], header["buffer_path"])
            self._stats["update_s"] += time.perf_counter() - start
            self._send("done")
        elif kind in ("sleep", "wake"):
            getattr(self._engine, kind)()
            self._send("done")
        elif kind == "profile":
            self._engine.profile(header["step"])
            self._send("done")
        elif kind in ("ping", "stats"):
            self._send("done", stats=self._stats)
        elif kind == "shutdown":
            self._send("done")
            return False
        else:
            raise ValueError(f"unknown message '{kind}'")
        return True

    def _generate(self, sampling: dict[str, Any], arrays: dict[str, np.ndarray]) -> None:
        start = time.perf_counter()
        ends = np.cumsum(arrays["prompt_lengths"])[:-1]
        prompts = [prompt.tolist() for prompt in np.split(arrays["prompt_ids"], ends)]
        numbers = (arrays[name].tolist() for name in ("num_samples", "seeds", "max_tokens"))
        self._engine.submit(prompts, *numbers, sampling, unpack_images(arrays), arrays["nums_begun"].tolist())
        while self._engine.num_pending:
            samples = self._engine.step(self._has_message)
            self._stats["num_steps"] += 1
            if samples:
                self._send_completions(samples, arrays["request_ids"])
            if self._is_aborted():
                self._engine.abort()
        self._stats["generate_s"] += time.perf_counter() - start
        self._send("generated")

    def _send_completions(self, samples: Sequence[Completion], request_ids: np.ndarray) -> None:
        self._stats["num_samples"] += len(samples)
        self._stats["num_tokens"] += sum(len(sample.token_ids) for sample in samples)
        arrays = pack_completions(samples)
        arrays["request_ids"] = request_ids[arrays["request_ids"]]
        header = {"kind": "completions", "weights_version": samples[0].weights_version}
        send_message(self._connection, header, arrays)

    def _is_aborted(self) -> bool:
        """Return True if the trainer has sent "abort", the only message that may come during ``generate``."""
        if not self._has_message():
            return False
        header, _ = receive_message(self._connection)
        if header["kind"] != "abort":
            raise ValueError(f"message '{header['kind']}' came while samples were being generated")
        return True

    def _has_message(self) -> bool:
        return bool(select.select([self._connection], [], [], 0)[0])

    def _send(self, kind: str, **fields: Any) -> None:
        send_message(self._connection, {"kind": kind, **fields})


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
