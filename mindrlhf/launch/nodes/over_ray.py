"""The same command on the nodes of a Ray cluster: Ray says where, starts and ends; the launchers do the rest.

One agent, an actor of Ray's, holds each node's share of a placement group and has the launcher there as its child. The
launcher's standard input is its lifeline (``over_ssh``): it ends with the agent, and the agent with this process. The
secret does not go through Ray: it is in run.output_dir, or in MINDRLHF_SECRET of whoever starts this.
"""

import codecs
import contextlib
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from typing import Any

from mindrlhf.errors import RunFailure, UserError
from mindrlhf.launch.failure_report import exit_code, say
from mindrlhf.launch.nodes.over_ssh import LIFELINE_VARIABLE, passing_signals
from mindrlhf.launch.nodes.place import DEFAULT_PORT

# What a launcher gets of the environment in which Ray was started on its node: not OMP_NUM_THREADS and
# PYTHONBREAKPOINT, which are Ray's own, and not its token, with which ranks and verifiers could run code anywhere.
KEPT = ("PATH", "HOME", "USER", "LOGNAME", "SHELL", "LANG", "TZ", "TMPDIR", "LD_LIBRARY_PATH")
KEPT += ("VIRTUAL_ENV",)
KEPT_PREFIXES = ("TOOLCHAIN_", "LC_", "ASCEND_", "HCCL_", "MS_", "HF_", "WANDB_", "SWANLAB_", "MLFLOW_", "MINDRLHF_")
KEPT_SUFFIXES = ("_API_KEY", "_proxy", "_PROXY")
_OF_DRIVER = ("PYTHONPATH", "OMP_NUM_THREADS")
_NPU, _HEAD = "NPU", "node:__internal_head__"
_PLACE_LIMIT_S, _AGENT_LIMIT_S, _END_LIMIT_S = 60.0, 120.0, 30.0


def run_over_ray(
    words: Sequence[str],
    address: str,
    nodes: str | None,
    num_workers: int,
    *,
    num_spares: int = 0,
    master: str | None = None,
    max_restarts: int = 0,
    may_lack_token: bool = False,
) -> int:
    """Run ``python -m mindrlhf.cli WORDS`` on nodes of a cluster, in this directory, and return node 0's exit code.

    Args:
        address: "auto" for the cluster of this machine, or HOST:PORT of its head.
        nodes: how many train; None or "auto" for all that have room, but for the spares.
        num_workers: NPUs, or CPUs where no node has any, that each must have free.
        master: where node 0 listens; None for its address in the cluster and the default port.
        max_restarts: how often another node's agent or launcher that was killed is started again.
        may_lack_token: also where whoever reaches the cluster's ports may run code.

    Raises:
        UserError: Ray is not installed, there is no such cluster, or no room, or it has no token.
    """
    ray = _connect(address)
    try:
        run = _RayRun(ray, words, num_workers, max_restarts)
        run.place(nodes, num_spares, master)
        run.check_tokens(may_lack_token)
        with passing_signals(run.tell):
            return run.follow_all()
    finally:
        ray.shutdown()


def child_environment(theirs: dict[str, str], ours: dict[str, str]) -> dict[str, str]:
    """Return a launcher's environment, from that of its agent and that of the process that started all."""
    kept = {
        name: value
        for name, value in theirs.items()
        if name in KEPT or name.startswith(KEPT_PREFIXES) or name.endswith(KEPT_SUFFIXES)
    }
    given = {name: value for name, value in ours.items() if name in _OF_DRIVER or name.startswith("MINDRLHF_")}
    return kept | given | {LIFELINE_VARIABLE: "ray"}


def choose_nodes(offers: Sequence[dict[str, Any]], num_workers: int, nodes: str | None, num_spares: int) -> list[dict]:
    """Return the bundles of a placement group, node 0's first: it is pinned to the head, if that has room.

    Args:
        offers: ``ray.nodes()``.

    Raises:
        UserError: too few nodes have room.
    """
    alive = [node for node in offers if node["Alive"]]
    kind = _NPU if any(node["Resources"].get(_NPU) for node in alive) else "CPU"
    fitting = [node for node in alive if node["Resources"].get(kind, 0) >= num_workers]
    fitting.sort(key=lambda node: (_HEAD not in node["Resources"], node["NodeManagerAddress"]))
    if nodes not in (None, "auto") and not (nodes.isascii() and nodes.isdigit() and int(nodes)):
        raise UserError(f"--nodes is {nodes}: give a number from 1 on, or auto")
    total = len(fitting) if nodes in (None, "auto") else int(nodes) + num_spares
    if not 0 <= num_spares < total or total > len(fitting):
        shown = ", ".join(f"{one['NodeManagerAddress']} {one['Resources'].get(kind, 0):g}" for one in alive)
        spares = f" --spares {num_spares}" if num_spares else ""
        raise UserError(
            f"--nodes {nodes or 'auto'}{spares} needs {max(total, num_spares + 1)} nodes with {num_workers} {kind}s, "
            f"but the Ray cluster has {len(fitting)} ({kind}s by node: {shown or 'none'}): "
            "give fewer --nodes or --workers"
        )
    first = _HEAD if _HEAD in fitting[0]["Resources"] else f"node:{fitting[0]['NodeManagerAddress']}"
    return [{kind: num_workers, **({first: 0.001} if node == 0 else {})} for node in range(total)]


class NodeAgent:
    """The actor that runs one launcher. Ray is sent it by value: a node's Ray need not find this package."""

    def place(self) -> dict[str, Any]:
        """Return where it is, and whether Ray lets in only those that have a token."""
        import ray

        has_token = os.environ.get("RAY_AUTH_MODE", "").lower() == "token"
        return {"address": ray.util.get_node_ip_address(), "host": socket.gethostname(), "has_token": has_token}

    def start(self, words: list[str], directory: str, ours: dict[str, str]) -> str:
        """Start the launcher; return why it does not start, empty where it does."""
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        environment = child_environment(dict(os.environ), ours)
        try:
            self.process = subprocess.Popen(words, cwd=directory, env=environment, start_new_session=True, **pipes)
        except OSError as error:
            return f"{words[0]} does not start in {directory} ({error}): it must be at the same place on all nodes"
        with contextlib.suppress(OSError):  # Ray's workers are nicer than Ray itself; not everybody may undo that
            os.setpriority(os.PRIO_PROCESS, self.process.pid, os.getpriority(os.PRIO_PROCESS, os.getppid()))
        return ""

    def output(self) -> Iterator[str]:
        """Yield what it says, to its end."""
        decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        while chunk := os.read(self.process.stdout.fileno(), 1 << 16):
            yield decoder.decode(chunk)

    def wait(self) -> int:
        return self.process.wait()

    def tell(self, number: int) -> None:
        """Pass on a signal."""
        with contextlib.suppress(OSError, ValueError):
            self.process.stdin.write(b"%d\n" % number)
            self.process.stdin.flush()


class _RayRun:
    def __init__(self, ray: Any, words: Sequence[str], num_workers: int, max_restarts: int):
        self._ray = ray
        self._words = [sys.executable, "-P", "-m", "mindrlhf.cli", *words]
        self._num_workers = num_workers
        self._max_restarts = max_restarts
        self._agent_class = ray.remote(num_cpus=0, max_restarts=0, max_concurrency=4)(NodeAgent)
        self._agents: list[Any] = []
        self._codes: dict[int, int] = {}
        self._is_over = False

    def place(self, nodes: str | None, num_spares: int, master: str | None) -> None:
        bundles = choose_nodes(self._ray.nodes(), self._num_workers, nodes, num_spares)
        self._bundles = bundles
        self._group = self._ray.util.placement_group(bundles, strategy="STRICT_SPREAD")
        if not self._group.wait(_PLACE_LIMIT_S):
            free = self._ray.available_resources()
            raise UserError(
                f"the Ray cluster gave no room for {len(bundles)} nodes of {bundles[-1]} within {_PLACE_LIMIT_S:g} s; "
                f"free are {free}: wait for what runs there, or give fewer --nodes"
            )
        self._agents = [self._new_agent(node) for node in range(len(bundles))]
        self._places = self._ray.get([agent.place.remote() for agent in self._agents], timeout=_AGENT_LIMIT_S)
        master = master or f"{self._places[0]['address']}:{DEFAULT_PORT}"
        num_nodes = len(bundles) - num_spares
        shape = ["--nodes", str(num_nodes), *(["--spares", str(num_spares)] if num_spares else []), "--master", master]
        self._words += shape if num_nodes > 1 else []
        for node, place in enumerate(self._places):
            say(f"node {node} is {place['host']} ({place['address']})")

    def check_tokens(self, may_lack_token: bool) -> None:
        """Refuse a cluster that lets everybody in."""
        open_nodes = [place["address"] for place in self._places if not place["has_token"]]
        if open_nodes and not may_lack_token:
            raise UserError(
                f"the Ray cluster has no token on {', '.join(open_nodes)}: whoever reaches its ports may run code; "
                "start Ray with RAY_AUTH_MODE=token on all nodes, or give --ray-without-token on a network of your own"
            )

    def tell(self, number: int) -> None:
        """Pass a signal on to node 0, which sees to the others."""
        self._agents[0].tell.remote(number)

    def follow_all(self) -> int:
        """Start the launchers, show what they say, and return the exit code of the run."""
        nodes = range(len(self._agents))
        threads = [threading.Thread(target=self._follow, args=(node,), daemon=True) for node in nodes]
        for thread in threads:
            thread.start()
        threads[0].join()  # node 0 decides when the run is over
        self._is_over = True
        for thread in threads[1:]:
            thread.join(_END_LIMIT_S)
        return self._codes[0] or max(self._codes.values())

    def _follow(self, node: int) -> None:
        for attempt in range(self._max_restarts + 1):
            self._codes[node] = RunFailure.exit_code
            if attempt:
                say(f"node {node} is started again")
            try:
                code = self._start_and_show(node)
                # A launcher that was killed says nothing; all other ends are for node 0 to judge.
                self._codes[node] = exit_code(code)
                if code >= 0:
                    return
                how = f"its launcher was killed by signal {-code}"
            except self._ray.exceptions.RayError as error:
                how = f"its agent is lost ({type(error).__name__})"
            if node == 0 or self._is_over:
                say(f"node {node}: {how}")
                return
            say(f"node {node}: {how}")
            if attempt < self._max_restarts:
                self._ray.kill(self._agents[node])
                self._agents[node] = self._new_agent(node)  # where Ray has a place for it now

    def _start_and_show(self, node: int) -> int:
        agent, prefix, rest = self._agents[node], f"[node {node}] " if node else "", ""
        own = ["--node-rank", str(node)] if "--nodes" in self._words else []
        failure = self._ray.get(agent.start.remote([*self._words, *own], os.getcwd(), _ours()))
        if failure:
            say(f"node {node}: {failure}")
            return RunFailure.exit_code
        for reference in agent.output.options(num_returns="streaming").remote():
            *lines, rest = (rest + self._ray.get(reference)).split("\n")
            _show(lines, prefix)
        _show([rest] if rest else [], prefix)
        return self._ray.get(agent.wait.remote())

    def _new_agent(self, node: int) -> Any:
        where = self._ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy(
            self._group, placement_group_bundle_index=node
        )
        # All NPUs of its bundle: one that asks for none would see none, and nor would its ranks.
        npus = {_NPU: self._num_workers} if _NPU in self._bundles[node] else {}
        return self._agent_class.options(resources=npus, scheduling_strategy=where).remote()


def _ours() -> dict[str, str]:
    return {name: value for name, value in child_environment({}, dict(os.environ)).items() if name != LIFELINE_VARIABLE}


def _show(lines: Sequence[str], prefix: str) -> None:
    with contextlib.suppress(OSError, ValueError):
        for line in lines:
            sys.stdout.write(f"{prefix}{line}\n")
        sys.stdout.flush()


def _connect(address: str) -> Any:
    try:
        import ray
        import ray.util.scheduling_strategies  # noqa: F401 -- by its full name below
        from ray import cloudpickle
    except ImportError:
        raise UserError("--ray needs the package ray: pip install 'mindrlhf[ray]'") from None
    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    try:
        ray.init(address=address, log_to_driver=False, logging_level="error")
    except Exception as error:  # of Ray's own, of gRPC, or of sockets
        reason = " ".join(str(error).split())[:300] or type(error).__name__
        raise UserError(
            f"--ray is {address}, but no cluster answers there ({reason}): ray start --head on one node, "
            "ray start --address HOST:PORT on the others"
        ) from None
    return ray
