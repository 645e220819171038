"""The scheduler of a run on CPU, at which MindSpore's ranks meet.

msrun starts it as one more process of the ranks' program. It lives in MindSpore's compiled core and needs none of the
Python around that, whose import takes as much processor time as a rank's; nor the config of the run.
"""

import importlib
import os
import sys

from mindrlhf.system.imports import hollow_mindspore
from mindrlhf.system.processes import LEAN_VARIABLE


def schedule_if_lean() -> None:
    """In a scheduler whose launcher wants it lean, bring the ranks together, and end when all have gone."""
    if os.environ.get("MS_ROLE") != "MS_SCHED" or LEAN_VARIABLE not in os.environ or not hollow_mindspore():
        return
    importlib.import_module("mindspore._c_expression").init_cluster()
    # What the core would do at exit expects the Python around it.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
