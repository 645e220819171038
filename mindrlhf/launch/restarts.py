"""Starting a failed run again."""

from collections.abc import Callable
from pathlib import Path

from mindrlhf.launch.failure_report import is_worth_a_restart, say
from mindrlhf.launch.launch import keep_logs


def run_with_restarts(
    start: Callable[[bool], int],
    can_resume: Callable[[], bool],
    max_restarts: int,
    log_dir: Path,
    *,
    resume: bool,
    is_complete: Callable[[], bool] = lambda: False,
) -> int:
    """Start a run, and start it again when it fails, from its newest checkpoint or, without one, from the beginning.

    Args:
        start: starts the run, resuming if told so, and returns its exit code when it has ended.
        can_resume: whether there is a checkpoint; asked before each restart.
        max_restarts: how often to start again; mistakes of the user and interrupts are final.
        log_dir: the logs of a failed attempt are kept in ``attempt_1`` and so on below it.
        resume: whether the first start resumes.
        is_complete: whether the run has left all that it was to leave; one that dies after that is not started again.

    Returns:
        The exit code of the last attempt.
    """
    for restart in range(1, max_restarts + 1):
        code = start(resume)
        if not is_worth_a_restart(code):
            return code
        if is_complete():
            say("the run was complete when it failed: it is not started again")
            return 0
        kept = keep_logs(log_dir)
        resume = can_resume()
        where = "from the newest checkpoint" if resume else "from the beginning: there is no checkpoint yet"
        say(f"restart {restart} of {max_restarts}, {where}; logs of the failed attempt: {kept}")
    return start(resume)
