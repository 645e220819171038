"""Hooks of a launcher: kernels of matrix products for its ranks, and msrun and its scheduler in less time.

MindSpore's own ``msrun`` without the rest of MindSpore: ``python -m mindrlhf.cpu.launcher MSRUN COMMAND ...``.

msrun starts processes and waits for them. Its command imports all of MindSpore for that, which takes a second of
processor time before any rank begins. Here its modules are loaded into packages that hold nothing else. Where they are
not those that this was tried with, MSRUN, the script of the command, runs as it comes.

Its scheduler, at which the ranks meet, is one more process of the ranks' program. It lives in MindSpore's compiled core
and needs nothing else of it, nor the config of the run.

For ranks on CPU only: on Ascend, MindSpore's import sets variables that msrun hands on to the ranks.
"""

import importlib
import os
import runpy
import sys

from mindrlhf.cpu.imports import hollow_mindspore
from mindrlhf.cpu.processor import openblas_environment
from mindrlhf.system.hollow import hollow_module, hollow_packages
from mindrlhf.system.processes import LEAN_VARIABLE

__all__ = ["msrun", "openblas_environment", "schedule_if_lean"]

# Set for the rank managers of clusters, to which msrun talks through more of MindSpore.
_MANAGER_VARIABLES = ("MS_ENABLE_TFT", "MS_ENABLE_THM")


class _NoManager:
    """Takes the place of msrun's connection to a rank manager: says that there is none."""

    def check_enable(self) -> bool:
        return False


def msrun() -> list[str]:
    """Return what comes between the interpreter and the script of msrun, in a command line, to run it lean."""
    return ["-m", __spec__.name]


def schedule_if_lean() -> None:
    """In a scheduler whose launcher wants it lean, bring the ranks together, and end when all have gone."""
    if os.environ.get("MS_ROLE") != "MS_SCHED" or LEAN_VARIABLE not in os.environ or not hollow_mindspore():
        return
    importlib.import_module("mindspore._c_expression").init_cluster()
    # What the core would do at exit expects the Python around it.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def main() -> None:
    """Be the command whose script is the first argument."""
    sys.argv = sys.argv[1:]
    if any(os.environ.get(name) for name in _MANAGER_VARIABLES) or not hollow_mindspore():
        runpy.run_path(sys.argv[0], run_name="__main__")
        return
    # What msrun's modules import at their top for options that the launcher does not use.
    hollow_packages("mindspore.parallel", "mindspore.runtime")
    hollow_module("mindspore.context")
    hollow_module("mindspore.communication", get_local_rank_size=None)
    hollow_module("mindspore.utils", RSCPluginHandle=_NoManager)
    # MindSpore's import does it too, and the ranks inherit it.
    os.environ.setdefault("PROTOCOL_BUFFERS_PYTHON_IMPLEMENTATION", "python")
    importlib.import_module("mindspore.parallel.cluster.run").main()


if __name__ == "__main__":
    main()
