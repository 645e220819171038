"""msprobe's dump of the kernels of compiled graphs (its level L2), step by step; see docs/debugging.md."""

import importlib.util
from pathlib import Path

from mindrlhf.errors import UserError
from mindrlhf.system.sizes import read_json_object

INSTALL = "pip install 'mindstudio-probe>=26.2,<27' 'numpy<2'"
LEVEL = "L2"  # as msprobe calls kernels


def check_dump(config_path: str, device: str) -> None:
    """Check that msprobe is there and that its config asks for what compiled graphs can dump.

    Raises:
        UserError: it is not installed; or the config is no JSON object, has another level, or on a CPU another task
            than tensor.
    """
    if importlib.util.find_spec("msprobe") is None:
        raise UserError(f"'msprobe.config_path' is {config_path}, but msprobe is not installed: {INSTALL}")
    config = read_json_object(Path(config_path), "'msprobe.config_path' takes msprobe's config.json")
    level, task = config.get("level"), config.get("task")
    if level != LEVEL:
        raise UserError(f"{config_path} has level {level!r}, but compiled graphs have kernels only: set it to {LEVEL}")
    if device == "cpu" and task != "tensor":
        raise UserError(f"{config_path} has task {task!r}, but on a CPU MindSpore dumps values only: set it to tensor")


class KernelDump:
    """The dump of one rank; to be made before its first graph is compiled.

    Args:
        config_path: config.json of msprobe; its ``step`` counts the steps of this start of the run, from 0.
        dump_dir: in the place of its ``dump_path``.
    """

    def __init__(self, config_path: str, dump_dir: Path):
        from msprobe.mindspore import PrecisionDebugger

        self._debugger = PrecisionDebugger
        self._has_begun = False
        PrecisionDebugger(config_path=config_path, dump_path=str(dump_dir))
        # Sets what MindSpore reads as it compiles; nothing is dumped until a step begins.
        PrecisionDebugger.start()
        PrecisionDebugger.stop()

    def begin_step(self) -> None:
        """End the dump of the step before, if any, and begin that of the next."""
        if self._has_begun:
            self._debugger.stop()
            self._debugger.step()
        self._has_begun = True
        self._debugger.start()
