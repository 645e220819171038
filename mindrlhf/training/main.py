"""The program that every rank starts: ``python -m mindrlhf.training.main TASK CONFIG [section.key=value ...]``."""

import argparse
import contextlib
import errno
import os
import signal
import sys
from collections.abc import Callable

from mindrlhf.config.keys import TASKS
from mindrlhf.errors import STOPPED, RunFailure, UserError, messages_of
from mindrlhf.system import heartbeat
from mindrlhf.system.processes import die_with_launcher, has_launcher, prepare_children
from mindrlhf.system.terminal import visible


def main(argv: list[str] | None = None) -> int:
    """Run this rank to the end and return the exit code."""
    parser = argparse.ArgumentParser(prog="mindrlhf")
    parser.add_argument("task", choices=TASKS)
    parser.add_argument("config")
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("--resume", action="store_true")
    arguments = parser.parse_args(argv)
    return guarded(f"mindrlhf {arguments.task}", lambda: _run(arguments))


def guarded(program: str, run: Callable[[], None]) -> int:
    """Run a rank's work; print expected failures as one line and return the exit code."""
    die_with_launcher()
    prepare_children()
    # Each must unwind the stack, so that the rollout server, sockets and files are closed in order. The launcher
    # sends SIGHUP to have a rank end at once; to SIGTERM rank 0 may later give another meaning.
    ended: list[int] = []

    def end(number: int, _: object) -> None:
        ended.append(STOPPED if number == signal.SIGTERM else 128 + number)
        sys.exit(ended[0])

    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM):
        signal.signal(number, end)
    if has_launcher():
        # To all processes of a job: the launcher hears it too, and ends this one. Not ignored, which children would
        # inherit.
        signal.signal(signal.SIGTERM, lambda *_: None)
    if has_launcher() and os.environ.get("MS_ROLE") == "MS_SCHED":
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})  # MindSpore puts a handler of its own in its way
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # a request for a checkpoint before there is anything to save
    heartbeat.start()
    try:
        run()
    except (UserError, RunFailure) as failure:
        with contextlib.suppress(OSError):  # the disk of the log may be full
            for line in messages_of(failure):
                print(f"{program}: error: {visible(line)}", file=sys.stderr, flush=True)
        return failure.exit_code
    except Exception as failure:
        if isinstance(failure, OSError) and failure.errno == errno.ENOSPC:
            return RunFailure.exit_code  # the launcher names the disk
        if not ended:  # an import in C that is broken off may raise anything
            raise
    finally:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)  # there is nothing left to clean up
    return ended[0] if ended else 0


def _run(arguments: argparse.Namespace) -> None:
    from mindrlhf.config.load import CONFIG_LOADERS
    from mindrlhf.training.runtime import num_ranks_from_environment

    load_config = CONFIG_LOADERS[arguments.task]
    config = load_config(arguments.config, arguments.overrides, world_size=num_ranks_from_environment())
    from mindrlhf.training.train import train

    train(config, _task(arguments.task, config), resume=arguments.resume)


def _task(name: str, config):
    if name == "train":
        from mindrlhf.training.reinforcement import ReinforcementTask

        return ReinforcementTask(config)
    from mindrlhf.training.offline.run import OfflineTask

    if name == "sft":
        from mindrlhf.training.offline.supervised import SupervisedTrainer as OfflineTrainer
    else:
        from mindrlhf.training.offline.preference import PreferenceTrainer as OfflineTrainer
    return OfflineTask(config, OfflineTrainer)


if __name__ == "__main__":
    sys.exit(main())
