"""One rank's part of a stage of a step, in the files that msprobe writes, through msprobe's own writer."""

import importlib.util
import os
import re
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from mindrlhf.config.observe import CELL_LEVEL, MsprobeSection
from mindrlhf.config.run import RunSection
from mindrlhf.debugging import dump_paths as layout
from mindrlhf.debugging.statistics import describe
from mindrlhf.errors import RunFailure, UserError
from mindrlhf.system.files import put_in_place

INSTALL = "pip install 'mindstudio-probe>=26.2,<27' 'numpy<2'"
# msprobe refuses to write to other paths.
_ALLOWED_PATH = re.compile(r"[a-zA-Z0-9_.:/-]+")
_WARNING = 2  # level of msprobe's log


def dump_dir(section: MsprobeSection, run: RunSection) -> Path:
    """Return where a run's dump goes."""
    return Path(section.dump_dir or Path(run.output_dir) / layout.DEFAULT_NAME)


def check_dump(directory: Path) -> None:
    """Check that a dump can be written.

    Raises:
        UserError: msprobe is not installed, or it would refuse the path.
    """
    if importlib.util.find_spec("msprobe") is None:
        raise UserError(f"'msprobe.enabled' is true, but msprobe is not installed: {INSTALL}")
    path = os.path.realpath(directory)
    if not _ALLOWED_PATH.fullmatch(path):
        raise UserError(
            f"'msprobe.dump_dir' is {path}, but msprobe takes letters, digits and _ . : - in a path only: set another"
        )


class StageDump:
    """Collects what one rank computed in a stage of a step.

    Args:
        directory: see :func:`mindrlhf.debugging.dump_paths.rank_dir`; it is made.
        level: "debug" for inputs and results, "L0" for cells.
        task: "statistics", or "tensor" to write the arrays as well.
    """

    def __init__(self, directory: Path, level: str, task: str):
        # First, since MindSpore cannot be loaded after the libraries that msprobe loads: they fix how protobuf works.
        import mindspore  # noqa: F401
        from msprobe.core.common.log import logger
        from msprobe.core.dump.data_dump.json_writer import DataWriter

        logger.level = max(logger.level, _WARNING)
        self._directory = directory
        self._names = [layout.DEBUG_NAME]
        if level == CELL_LEVEL:
            self._names = [layout.STACK_NAME, layout.CONSTRUCT_NAME, layout.CELLS_NAME]
        self._counts: Counter[str] = Counter()
        self._writer = DataWriter()
        tensors_dir = directory / layout.TENSORS_NAME if task == "tensor" else None
        self._save = self._save_array if tensors_dir else None
        with self._failures():
            (tensors_dir or directory).mkdir(parents=True, exist_ok=True)
            # The writer begins with empty files.
            self._writer.dump_tensor_data_dir = str(tensors_dir.resolve()) if tensors_dir else None
            with self._files():
                self._writer.initialize_json_file(task=task, level=level, framework="mindspore")

    def count(self, name: str) -> int:
        """Return how often this was called for ``name`` before."""
        self._counts[name] += 1
        return self._counts[name] - 1

    def add_values(self, name: str, value: Any) -> None:
        """Add a value, see :func:`describe`; the same name may come again."""
        full = f"{name}.{self.count(name)}.debug"
        with self._failures():
            self._writer.update_debug({full: describe(value, full, self._save)})

    def add_cell(self, name: str, parts: dict[str, Any], parent: str | None = None) -> None:
        """Add what a cell computed.

        Args:
            name: "Cell.<name>.<class>.forward.<count>" or "Cell.<name>.<class>.parameters_grad.<count>".
            parts: "input_args", "parameters" and "output" -> their values.
            parent: the cell that called it, None for the outermost one and for gradients.
        """
        with self._failures():
            described = {
                key: describe(value, f"{name}.{key.removesuffix('_args')}", self._save) for key, value in parts.items()
            }
            self._writer.update_data({name: described})
            if "input_args" in parts:
                self._writer.update_construct({name: parent})

    def write(self) -> None:
        """Write all that was added so far; each file is replaced as a whole.

        Raises:
            RunFailure: the disk refuses.
        """
        with self._failures(), self._files():
            self._writer.write_json()

    @contextmanager
    def _files(self) -> Iterator[None]:
        """Have the writer write below a temporary name, and then put its files in place."""
        from msprobe.core.common.utils import DumpPathAggregation

        with tempfile.TemporaryDirectory(dir=self._directory, prefix="writing-") as name:
            new = Path(name)
            paths = DumpPathAggregation()
            paths.dump_file_path = str(new / layout.CELLS_NAME)
            paths.stack_file_path = str(new / layout.STACK_NAME)
            paths.construct_file_path = str(new / layout.CONSTRUCT_NAME)
            paths.debug_file_path = str(new / layout.DEBUG_NAME)
            paths.dump_error_info_path = str(new / "dump_error_info.log")
            paths.dump_tensor_data_dir = self._writer.dump_tensor_data_dir
            self._writer.update_dump_paths(paths)
            yield
            for name in self._names:
                if (new / name).is_file():
                    put_in_place(new / name, self._directory / name)

    def _save_array(self, name: str, array: np.ndarray) -> str:
        file_name = f"{name}.npy"
        np.save(self._directory / layout.TENSORS_NAME / file_name, array, allow_pickle=False)
        return file_name

    @contextmanager
    def _failures(self) -> Iterator[None]:
        from msprobe.core.common.exceptions import CodedException

        try:
            yield
        except (OSError, RuntimeError, CodedException) as error:
            cause = error.__cause__ if isinstance(error.__cause__, OSError) else error
            reason = getattr(cause, "strerror", None) or str(cause)
            raise RunFailure(f"the dump in {self._directory} cannot be written: {reason}") from error
