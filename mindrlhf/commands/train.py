"""`mindrlhf train`, `sft`, `dpo` and `reward-model`: a run on one or more ranks of this machine."""

import argparse
from typing import Any

from mindrlhf.commands.vocabulary import add_overrides, add_workers


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
    add_workers(parser, "trainer ranks on this machine (default: 1)")
    parser.add_argument(
        "--oversubscribe", action="store_true", help="start the ranks even where they are many more than the cores"
    )
    parser.add_argument(
        "--resume",
        nargs="?",
        const="auto",
        metavar="auto",
        help="continue from the newest whole checkpoint of the run",
    )
    parser.add_argument(
        "--max-restarts",
        type=int,
        default=0,
        metavar="N",
        help="start a failed run again up to N times, from its newest checkpoint (default: 0)",
    )
    parser.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> int:
    import shlex
    import signal
    from pathlib import Path

    # Before the imports below, which take a while on a slow disk.
    print(f"mindrlhf: checking {arguments.config}", flush=True)

    from mindrlhf.launch.launch import launch
    from mindrlhf.launch.restarts import run_with_restarts
    from mindrlhf.training.checkpoints.run import check_output, holding_directories, newest_checkpoint
    from mindrlhf.training.preflight import FINAL_NAME

    command = arguments.command
    overrides, is_resumed = _resumption(arguments)
    config = _checked_config(arguments, overrides, is_resumed)
    log_dir = Path(config.run.output_dir) / "logs"
    options = [] if arguments.workers == 1 else ["--workers", str(arguments.workers)]
    options += ["--oversubscribe"] * arguments.oversubscribe
    again = shlex.join(["mindrlhf", command, arguments.config, *overrides, *options])

    ranks = f"{arguments.workers} rank{'s' if arguments.workers > 1 else ''}"

    def start(resume: bool) -> int:
        print(f"mindrlhf: starting {ranks}; logs: {log_dir}", flush=True)
        return launch(
            ["-m", "mindrlhf.training.main", command, arguments.config, *overrides, *["--resume"] * resume],
            arguments.workers,
            log_dir,
            hang_timeout_s=config.run.hang_timeout_s,
            start_timeout_s=config.run.start_timeout_s,
            computes_on_cpu=config.run.device == "cpu",
            rank_0_signals=(signal.SIGTERM, signal.SIGUSR1),
            advice=lambda: _advice(newest_checkpoint(config), again),
            env=_terminal_width(),
            says_stages=True,
        )

    with holding_directories(config, f"mindrlhf {command}"):
        check_output(config, resume=is_resumed)
        return run_with_restarts(
            start,
            lambda: newest_checkpoint(config) is not None,
            arguments.max_restarts,
            log_dir,
            resume=is_resumed,
            # Exported last, whole or not at all; an earlier run's would have been refused.
            is_complete=lambda: (Path(config.run.output_dir) / FINAL_NAME).exists(),
        )


def _terminal_width() -> dict[str, str]:
    """Return how wide the lines of the ranks may be: they write to logs, which this terminal shows."""
    import shutil
    import sys

    return {"COLUMNS": str(shutil.get_terminal_size().columns)} if sys.stdout.isatty() else {}


def _checked_config(arguments: argparse.Namespace, overrides: list[str], is_resumed: bool) -> Any:
    """Return the config after all checks, which run here once before any rank starts: a mistake costs a second."""
    from mindrlhf.training.checking import check_run

    checked = check_run(
        arguments.command,
        arguments.config,
        overrides,
        num_ranks=arguments.workers,
        resume=is_resumed,
        oversubscribe=arguments.oversubscribe,
    )
    checked.raise_if_any()
    for remark in checked.remarks:
        print(f"mindrlhf: {remark}", flush=True)
    return checked.config


def _resumption(arguments: argparse.Namespace) -> tuple[list[str], bool]:
    """Return the overrides and whether to resume; ``--resume`` alone may stand before an override."""
    from mindrlhf.errors import UserError

    if arguments.max_restarts < 0:
        raise UserError(f"--max-restarts is {arguments.max_restarts}: give 0 or more")
    if arguments.resume is not None and "=" in arguments.resume:
        return [arguments.resume, *arguments.overrides], True
    if arguments.resume not in (None, "auto"):
        raise UserError(f"--resume {arguments.resume}: give 'auto', or nothing, to continue from the newest checkpoint")
    return arguments.overrides, arguments.resume is not None


def _advice(checkpoint: object, again: str) -> str:
    if checkpoint is None:
        return f"there is no checkpoint to resume from; to start again: {again}"
    return f"to resume from {checkpoint}: {again} --resume"
