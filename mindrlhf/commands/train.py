"""`mindrlhf train`, `sft`, `dpo` and `reward-model`: a run on one or more ranks of one or more machines."""

import argparse
import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mindrlhf.launch.nodes.place import Place
    from mindrlhf.training.preflight.run import CheckedRun

from mindrlhf.commands.vocabulary import WORKERS_HELP, add_overrides


def register(subparsers: argparse._SubParsersAction) -> None:
    """Add the parsers of all four commands."""
    _add(subparsers, "train", "reinforcement learning against verifiers (GRPO and relatives)")
    _add(subparsers, "sft", "supervised fine-tuning on the same cells")
    _add(subparsers, "dpo", "direct preference optimisation on pairs of responses")
    _add(subparsers, "reward-model", "train a model that scores responses on pairs of them")


def _add(subparsers: argparse._SubParsersAction, name: str, summary: str) -> None:
    parser = subparsers.add_parser(name, help=summary)
    parser.add_argument("config", help="YAML file; docs/config.md lists its keys")
    add_overrides(parser)
    parser.add_argument("--workers", type=int, default=1, metavar="N", help=f"{WORKERS_HELP} (default: 1)")
    _add_nodes(parser)
    parser.add_argument(
        "--oversubscribe", action="store_true", help="start the ranks even where they are many more than the cores"
    )
    parser.add_argument(
        "--resume",
        nargs="?",
        const="newest",
        metavar="auto",
        help="continue from the newest whole checkpoint of the run; auto: where there is none, begin",
    )
    parser.add_argument(
        "--max-restarts",
        type=int,
        default=0,
        metavar="N",
        help="start a failed run again up to N times, from its newest checkpoint (default: 0)",
    )
    if name == "train":
        parser.add_argument(
            "--replay-order", metavar="RUN", help="repeat the asynchronous run of this output directory exactly"
        )
        parser.add_argument(
            "--elastic",
            action="store_true",
            help="machines with --role rollout may join and leave while the run goes on",
        )
        parser.add_argument(
            "--role",
            choices=("train", "rollout"),
            default="train",
            help="rollout: this machine runs rollout servers only",
        )
    else:
        parser.set_defaults(elastic=False, role="train")
    parser.set_defaults(run=_run)


def _add_nodes(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--nodes",
        metavar="N|auto",
        help="machines that run this command; auto: as Slurm or Kubernetes says (default: 1)",
    )
    parser.add_argument("--node-rank", type=int, metavar="K", help="number of this machine among them, from 0 on")
    parser.add_argument(
        "--master", metavar="ADDRESS:PORT", help="where the machine with --node-rank 0 listens for the others"
    )
    parser.add_argument(
        "--spares",
        type=int,
        default=0,
        metavar="N",
        help="machines beside those of --nodes that wait to take a lost one's place at a restart (default: 0)",
    )
    parser.add_argument("--hostfile", metavar="FILE", help="run this command on all hosts of a file, through ssh")
    parser.add_argument(
        "--ray",
        nargs="?",
        const="auto",
        metavar="auto|HOST:PORT",
        help="run this command on --nodes N nodes of a Ray cluster (default: all that fit, of this machine's)",
    )
    parser.add_argument(
        "--ray-without-token", action="store_true", help="also on a Ray cluster where everybody may run code"
    )


def _run(arguments: argparse.Namespace) -> int:
    # Before the imports below, which take a while on a slow disk.
    print(f"mindrlhf: checking {arguments.config}", flush=True)
    says = _signs_of_checking(arguments.config)
    with says():
        from mindrlhf.launch.nodes.over_ssh import hold_on_to_lifeline
        from mindrlhf.training.preflight.output import FINAL_NAME, is_finished
        from mindrlhf.training.preflight.run import check_run

    command, (overrides, wanted) = arguments.command, _resumption(arguments)
    if arguments.hostfile or arguments.ray:
        return _run_elsewhere(arguments, overrides, wanted)
    starter = hold_on_to_lifeline()
    place = _place_of(arguments)
    num_nodes = place.num_nodes if place else 1
    # All checks run here once before any rank starts, so that a mistake costs a second.
    sizes = {"num_ranks": arguments.workers * num_nodes, "num_nodes": num_nodes}
    options = {"resume": wanted, "oversubscribe": arguments.oversubscribe, "is_elastic": arguments.elastic}
    with says():
        checked = check_run(command, arguments.config, overrides, node=place.node if place else 0, **sizes, **options)
    if wanted and is_finished(checked.config):
        checked.mistakes.raise_if_any()
        final = f"{checked.config.run.output_dir}/{FINAL_NAME}"
        print(f"mindrlhf: {final} is there: the run is complete; to train longer: --resume run.max_steps=N", flush=True)
        return 0
    _check_spare_disks(arguments, checked.config)
    return _start_checked(arguments, checked, place, overrides, wanted, starter)


def _start_checked(
    arguments: argparse.Namespace,
    checked: "CheckedRun",
    place: "Place | None",
    overrides: list[str],
    wanted: str,
    starter: str,
) -> int:
    """Start this machine's part of a run; ``starter`` is "ray" where Ray started this launcher."""
    import signal

    from mindrlhf.launch.launch import launch
    from mindrlhf.launch.nodes.first import telling_others
    from mindrlhf.launch.nodes.place import is_in_kubernetes
    from mindrlhf.system.ports import use_ports
    from mindrlhf.system.processes import COMMAND_VARIABLE, NUM_NODES_VARIABLE
    from mindrlhf.training.facts import check_resumes
    from mindrlhf.training.preflight.output import resumes

    command, config, is_resumed = arguments.command, checked.config, resumes(checked.config, wanted)
    num_nodes = place.num_nodes if place else 1
    use_ports(config.run.ports)
    log_dir = Path(config.run.output_dir, "logs", *([f"node_{place.node}"] if place and place.node else []))
    advisers = _advisers(config, again := _again(arguments, overrides, place))

    def start(resume: bool, **peers: Any) -> int:
        ranks = f"{arguments.workers:,} rank{'s' if arguments.workers != 1 else ''}"
        print(f"mindrlhf: starting {ranks}; logs: {log_dir}", flush=True)
        return launch(
            ["-P", "-m", "mindrlhf.training.main", command, arguments.config, *overrides, *["--resume"] * resume],
            arguments.workers,
            log_dir,
            hang_timeout_s=config.run.hang_timeout_s,
            start_timeout_s=config.run.start_timeout_s,
            computes_on_cpu=config.run.device == "cpu",
            joins_alone=config.run.device != "cpu",
            rank_0_signals=(signal.SIGTERM, signal.SIGUSR1),
            **advisers,
            env={**_terminal_width(), NUM_NODES_VARIABLE: str(num_nodes), COMMAND_VARIABLE: again},
            says_stages=True,
            **peers,
        )

    comes_back = is_in_kubernetes() or starter == "ray"
    advice = None if comes_back else advisers["advice"]
    run = _Run(command, config, log_dir, is_resumed, arguments.max_restarts, start, advice)
    facts = _facts_of(arguments, config, place) if place else None
    if place and place.is_for_rollout:
        return run.on_rollout_node(place, checked.raise_if_any, facts, arguments.workers * num_nodes)
    if place and place.node:
        return run.on_other_node(place, checked.raise_if_any, facts)
    with telling_others(place, Path(config.run.output_dir)) if place else contextlib.nullcontext():
        checked.raise_if_any()
        if is_resumed:
            check_resumes(config)
    for remark in checked.remarks:
        print(f"mindrlhf: {remark}", flush=True)
    return run.on_first_node(place, facts) if place else run.on_one_machine()


def _place_of(arguments: argparse.Namespace) -> "Place | None":
    """Return where this machine stands among those of the run."""
    import os

    from mindrlhf.launch.nodes.place import find_place, is_in_kubernetes

    _check_spares(arguments)
    place = find_place(
        arguments.nodes,
        arguments.node_rank,
        arguments.master,
        os.environ,
        arguments.spares,
        is_elastic=arguments.elastic,
        is_for_rollout=arguments.role == "rollout",
    )
    if place and not (place.node and is_in_kubernetes()):  # where a pod's name is known only once it runs
        place.check_address()
    return place


def _signs_of_checking(config: str) -> Callable[[], contextlib.AbstractContextManager[None]]:
    """Return contexts around loading and checking, each of which is silent for half as long as both may be."""
    import sys

    from mindrlhf.launch.stages import SILENCE_LIMIT_S, signs_of_life

    return partial(signs_of_life, f"checking {config}", sys.stdout, SILENCE_LIMIT_S / 2)


def _again(arguments: argparse.Namespace, overrides: list[str], place: "Place | None") -> str:
    """Return the command line that starts this run, with the program as it was typed where no path leads to it."""
    import shlex
    import shutil
    import sys

    program = sys.argv[0] if sys.argv[0].endswith("/mindrlhf") and not shutil.which("mindrlhf") else "mindrlhf"
    options = [] if arguments.workers == 1 else ["--workers", str(arguments.workers)]
    options += ["--max-restarts", str(arguments.max_restarts)] if arguments.max_restarts else []
    options += ["--oversubscribe"] * arguments.oversubscribe + ["--elastic"] * arguments.elastic
    if place:
        spares = ["--spares", str(place.num_spares)] if place.num_spares else []
        options += ["--nodes", str(place.num_nodes), *spares, "--node-rank", str(place.node)]
        options += ["--master", arguments.master or f"{place.master}:{place.port}"]
    return shlex.join([program, arguments.command, arguments.config, *overrides, *options])


def _check_spares(arguments: argparse.Namespace) -> None:
    from mindrlhf.errors import UserError

    if arguments.spares and not arguments.max_restarts:
        raise UserError(
            f"--spares is {arguments.spares}, but --max-restarts is 0: a spare takes a lost node's place when the run "
            "starts again; give --max-restarts N"
        )


def _check_spare_disks(arguments: argparse.Namespace, config: Any) -> None:
    from mindrlhf.errors import UserError

    if arguments.spares and config.checkpoint.node_local:
        raise UserError(
            f"--spares is {arguments.spares}, but with checkpoint.node_local a spare has no checkpoint on its disk: "
            "leave out --spares, or give checkpoint.save_dir a directory that all nodes share"
        )


@dataclass(frozen=True)
class _Run:
    """A run that is ready to start.

    Attributes:
        start: starts the ranks of this machine, resuming if told so.
        advice: what to do where a node is lost that nothing starts again; None where something does.
    """

    command: str
    config: Any
    log_dir: Path
    is_resumed: bool
    max_restarts: int
    start: Callable[..., int]
    advice: Callable[[], str] | None

    def on_one_machine(self) -> int:
        """Run it to the end and return the exit code."""
        from mindrlhf.training.preflight.output import check_output, holding_directories

        with holding_directories(self.config, f"mindrlhf {self.command}"):
            check_output(self.config, resume=self.is_resumed)
            return self._with_restarts(self.start)

    def on_first_node(self, place: "Place", find_facts: Callable[[], list]) -> int:
        """The same on several nodes, of which this is number 0, which says what all do."""
        from mindrlhf.launch.nodes.first import FirstNode
        from mindrlhf.launch.nodes.secret import make_secret, remove_secret
        from mindrlhf.launch.nodes.shared import probes
        from mindrlhf.training.preflight.output import check_output, holding_directories

        output_dir, limit_s = Path(self.config.run.output_dir), self.config.run.start_timeout_s
        with holding_directories(self.config, f"mindrlhf {self.command}"):
            check_output(self.config, resume=self.is_resumed)
            facts = [*find_facts(), *self._disk_facts(None)]
            with probes({key: directory for part in self._directories() for key, directory in part.items()}) as numbers:
                with FirstNode(place, make_secret(output_dir), facts, numbers, limit_s, self.advice) as nodes:
                    start = partial(self.start, peers=nodes)
                    code = self._with_restarts(lambda resume: nodes.attempt(resume, start))
                    nodes.close(code)
            remove_secret(output_dir)
            return code

    def on_other_node(self, place: "Place", check: Callable[[], None], find_facts: Callable[[], list]) -> int:
        """The same on another node."""
        from mindrlhf.errors import RunFailure, UserError
        from mindrlhf.launch.nodes.first import TELL_LIMIT_S
        from mindrlhf.launch.nodes.other import OtherNode
        from mindrlhf.launch.nodes.secret import wait_for_secret

        limit_s, mistake = self.config.run.start_timeout_s, None
        try:
            check()
        except UserError as error:
            limit_s, mistake = TELL_LIMIT_S, error
        try:
            secret = wait_for_secret(Path(self.config.run.output_dir), limit_s, f"node 0 ({place.master})")
        except UserError as error:
            raise mistake or error from None
        node = OtherNode(
            place,
            secret,
            lambda numbers: [*find_facts(), *self._disk_facts(numbers)],
            self.log_dir,
            limit_s=limit_s,
            rejoins=self.max_restarts > 0 and (self.advice is None or place.num_spares > 0),
        )
        if mistake is not None:
            with contextlib.suppress(RunFailure):  # node 0 does not answer
                node.tell_problem(str(mistake))
            raise mistake
        return node.serve(partial(self.start, peers=node))

    def on_rollout_node(
        self, place: "Place", check: Callable[[], None], find_facts: Callable[[], list], num_ranks: int
    ) -> int:
        """The same on a node for rollout only, of a run of ``num_ranks`` on others: its servers are in this process."""
        import socket

        from mindrlhf.launch.nodes.rollout_node import RolloutNode
        from mindrlhf.launch.nodes.secret import wait_for_secret
        from mindrlhf.rollout.rollout_only import serve
        from mindrlhf.training.reinforcement import start_servers

        check()
        output_dir, limit_s = Path(self.config.run.output_dir), self.config.run.start_timeout_s
        log_dir = output_dir / "logs" / f"rollout_{socket.gethostname()}"
        secret = wait_for_secret(output_dir, limit_s, f"node 0 ({place.master})")
        rejoins = self.max_restarts > 0
        node = RolloutNode(place, secret, lambda _: find_facts(), log_dir, limit_s=limit_s, rejoins=rejoins)

        def start(address) -> None:
            print(f"mindrlhf: starting vLLM; log: {log_dir / 'rollout_0.log'}", flush=True)
            with contextlib.ExitStack() as stack:
                serve(start_servers(self.config, num_ranks, place.num_nodes, stack, log_dir), address, node.ending)

        return node.serve_rollout(start)

    def _directories(self) -> tuple[dict[str, Path], dict[str, Path]]:
        """Return, by config key, the directories that all nodes share, and those that each has for itself."""
        from mindrlhf.training.preflight.output import save_dir

        shared = {"run.output_dir": Path(self.config.run.output_dir)}
        saved = {"checkpoint.save_dir": save_dir(self.config)}
        return (shared, saved) if self.config.checkpoint.node_local else (shared | saved, {})

    def _disk_facts(self, numbers: Mapping[str, str] | None) -> list:
        from mindrlhf.launch.nodes.shared import own_facts, shared_facts

        shared, own = self._directories()
        return [*shared_facts(shared, numbers), *own_facts(own, numbers)]

    def _with_restarts(self, start: Callable[[bool], int]) -> int:
        from mindrlhf.errors import STOPPED
        from mindrlhf.launch.restarts import run_with_restarts
        from mindrlhf.training.preflight.output import FINAL_NAME, newest_checkpoint

        final = Path(self.config.run.output_dir) / FINAL_NAME
        code = run_with_restarts(
            start,
            lambda: newest_checkpoint(self.config) is not None,
            self.max_restarts,
            self.log_dir,
            resume=self.is_resumed,
            # Exported last, whole or not at all; an earlier run's would have been refused.
            is_complete=final.exists,
        )
        is_complete = final.exists()
        if code or not is_complete:
            _report_of(Path(self.config.run.output_dir))
        return code or (0 if is_complete else STOPPED)


def _report_of(output_dir: Path) -> None:
    """Write the report of a run that did not come to its end, as far as it got, and say where it is."""
    import sys

    from mindrlhf.observe.viewer.page import write_pages

    metrics = output_dir / "metrics.jsonl"
    if metrics.is_file() and metrics.stat().st_size and (report := write_pages(output_dir)):
        print(f"mindrlhf: report: {report}", file=sys.stderr, flush=True)


def _run_elsewhere(arguments: argparse.Namespace, overrides: list[str], wanted: str) -> int:
    """Run it on the hosts of a file, or the nodes of a Ray cluster."""
    from mindrlhf.errors import UserError
    from mindrlhf.launch.nodes.over_ray import run_over_ray
    from mindrlhf.launch.nodes.over_ssh import read_hosts, run_over_ssh

    option = "--hostfile" if arguments.hostfile else "--ray"
    if arguments.hostfile and arguments.ray:
        raise UserError("--hostfile and --ray are both given: leave out one of them")
    if arguments.role == "rollout":
        raise UserError(f"--role is rollout, but {option} starts the nodes that train: leave out one of them")
    if arguments.nodes is not None and arguments.hostfile or arguments.node_rank is not None:
        both = "--nodes and --node-rank" if arguments.hostfile else "--node-rank"
        raise UserError(f"{option} numbers the nodes itself: leave out {both}")
    words = [arguments.command, arguments.config, *overrides, "--workers", str(arguments.workers)]
    resumption = {"": [], "newest": ["--resume"]}.get(wanted, ["--resume", wanted])
    words += ["--max-restarts", str(arguments.max_restarts), *resumption]
    words += ["--oversubscribe"] * arguments.oversubscribe + ["--elastic"] * arguments.elastic
    _check_spares(arguments)
    if arguments.ray:
        return run_over_ray(
            words,
            arguments.ray,
            arguments.nodes,
            arguments.workers,
            num_spares=arguments.spares,
            master=arguments.master,
            max_restarts=arguments.max_restarts,
            may_lack_token=arguments.ray_without_token,
        )
    return run_over_ssh(words, read_hosts(arguments.hostfile), arguments.master, arguments.spares)


def _facts_of(arguments: argparse.Namespace, config: Any, place: "Place") -> Callable[[], list]:
    """Return what finds what has to be the same on all nodes; whether the run is resumed is for node 0 to say."""
    from mindrlhf.training.facts import run_facts

    options = {
        "--workers": arguments.workers,
        "--nodes": place.num_nodes,
        "--spares": place.num_spares,
        "--max-restarts": arguments.max_restarts,
        "--elastic": arguments.elastic,
    }
    return partial(run_facts, arguments.command, config, options)


def _terminal_width() -> dict[str, str]:
    """Return how wide the lines of the ranks may be: they write to logs, which this terminal shows."""
    import shutil
    import sys

    return {"COLUMNS": str(shutil.get_terminal_size().columns)} if sys.stdout.isatty() else {}


def _resumption(arguments: argparse.Namespace) -> tuple[list[str], str]:
    """Return the overrides and what to resume; ``--resume`` alone may stand before an override."""
    from mindrlhf.errors import UserError

    overrides = arguments.overrides
    if arguments.command == "train" and arguments.replay_order:
        overrides = [*overrides, f"rollout.replay_order={arguments.replay_order}"]
    if arguments.ray and "=" in arguments.ray:  # so may `--ray` alone
        arguments.ray, overrides = "auto", [arguments.ray, *overrides]
    if arguments.resume is not None and "=" in arguments.resume:
        return [arguments.resume, *overrides], "newest"
    if arguments.resume not in (None, "newest", "auto"):
        raise UserError(f"--resume {arguments.resume}: give nothing, or auto to begin where there is no checkpoint")
    return overrides, arguments.resume or ""


def _advisers(config: Any, again: str) -> dict[str, Callable[[], str]]:
    from mindrlhf.training.preflight.output import newest_checkpoint

    begun_with = newest_checkpoint(config)
    return {
        "advice": lambda: _advice(newest_checkpoint(config), again),
        "advice_after_mistake": lambda: _advice(
            newest_checkpoint(config), again, is_mistake=True, begun_with=begun_with
        ),
    }


def _advice(checkpoint: Path | None, again: str, *, is_mistake: bool = False, begun_with: Path | None = None) -> str:
    """Return how a run that has ended goes on.

    Args:
        checkpoint: the newest.
        again: the command line that started the run; that of a mistake is no advice before the mistake is mended.
        is_mistake: the run ended for what the user can mend.
        begun_with: the checkpoint that was the newest when it started.
    """
    if is_mistake and checkpoint == begun_with:
        what = "nothing is saved yet" if checkpoint is None else f"{checkpoint} is as it was"
        return f"{what}: fix the error above, then start the run again"
    if checkpoint is None:
        return (
            "there is no checkpoint to resume from (kill -TERM saves one before the run ends; see "
            f"checkpoint.every_steps); to start again: {again}"
        )
    first = "fix the error above; then, " if is_mistake else ""
    number = checkpoint.name.rpartition("_")[2].lstrip("0") or "0"
    return f"step {number} is saved; {first}to resume from {checkpoint}: {again} --resume"
