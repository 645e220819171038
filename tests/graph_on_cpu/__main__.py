"""Start a rank: python -m graph_on_cpu DIRECTORY."""

import sys
from pathlib import Path

from mindrlhf.models.context import import_mindformers
from mindrlhf.system.processes import die_with_launcher

if __name__ == "__main__":
    die_with_launcher()
    import_mindformers()  # first, without what no rank uses of it: a third of the time
    from graph_on_cpu.rank import run

    run(Path(sys.argv[1]))
