"""Ranks of a simulated Ascend, a process each, one after the other."""

import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

from mindrlhf.dryrun.compile import ascend_stubs as simulation


def run_ranks(directory: Path, world_size: int, work: Callable[[int], None]) -> int:
    """Do the work of every rank, whose output goes to ``log_R``; return 1 if one has failed."""
    simulation.activate(0, 1, simulation.LEVEL_COMPILE)
    from mindrlhf.models.context import import_mindformers

    import_mindformers()  # seconds, and once for all ranks
    failed = False
    for rank in range(world_size):
        if not os.fork():
            log = os.open(directory / f"log_{rank}", os.O_WRONLY | os.O_CREAT, 0o600)
            os.dup2(log, 1)
            os.dup2(log, 2)
            try:
                work(rank)
            except BaseException:  # the process ends here: whatever it was must get into the log
                traceback.print_exc()
                sys.stderr.flush()
                os._exit(1)
            os._exit(0)
        failed |= os.wait()[1] != 0
    return int(failed)
