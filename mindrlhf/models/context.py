"""Prepare MindFormers in this process: its import, its logging and its global switches."""

import contextlib
import importlib
import importlib.util
import logging
import os
import sys
import types
import warnings
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from mindrlhf.cpu.imports import quick_imports
from mindrlhf.errors import UserError

if TYPE_CHECKING:
    from mindspore import nn

DEVICE_TARGETS = {"cpu": "CPU", "ascend": "Ascend"}
INSTALL_MINDFORMERS = "python -m pip install --no-deps mindformers==2.0.0"
# MindFormers' metrics, trackers, tokenizers and readers of data sets import these, MindSpore's metrics SciPy; together
# they take 0.19 GB in every rank, and seconds.
UNUSED_PACKAGES = (
    "datasets", "jieba", "nltk", "pandas", "pyarrow", "rouge_chinese", "scipy", "sentencepiece", "sklearn",
    "tensorboardX", "tiktoken",
)  # fmt: skip


class _Unmet(types.ModuleType):
    """A module that nobody uses, with any class that is imported from it."""

    def __getattr__(self, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


# MindFormers imports this model without asking whether its requirement `hyper-parallel` is there, which no index has.
# Packages with modules that import MindFormers at their beginning import this one before.
sys.modules.setdefault("mindformers.models.deepseek4", _Unmet("mindformers.models.deepseek4"))


def import_mindspore() -> types.ModuleType:
    """Import MindSpore without what no rank uses of it."""
    with quick_imports(UNUSED_PACKAGES):
        return importlib.import_module("mindspore")


def import_mindformers() -> types.ModuleType:
    """Import MindFormers without warnings, and without what no rank uses of it.

    Raises:
        UserError: it is not installed.
    """
    if importlib.util.find_spec("mindformers") is None:
        raise UserError(f"MindFormers is missing in {sys.prefix}: {INSTALL_MINDFORMERS}")
    with warnings.catch_warnings(), quick_imports(UNUSED_PACKAGES):
        warnings.simplefilter("ignore")
        return importlib.import_module("mindformers")


def prepare_mindformers(device: str, log_dir: str | os.PathLike) -> None:
    """Import MindFormers quietly and switch it to its mcore cells in graph mode; call it once, before `build_model`.

    MindFormers opens log files when it is imported (by default below the current directory) and prints its
    log to stdout; both are set here, which only works before its first import. Its `build_context` also puts
    MindSpore's `runtime_num_threads` back to the default: limit threads after this call, not before.

    Args:
        device: `cpu` or `ascend`.
        log_dir: directory for MindFormers' own log files; made when missing.

    Raises:
        UserError: unknown device.
    """
    if device not in DEVICE_TARGETS:
        raise UserError(f"device={device!r}: use one of {', '.join(DEVICE_TARGETS)}")
    os.environ.setdefault("LOG_MF_PATH", os.fspath(log_dir))
    # The logger is named after its directory; a filter set before the import also silences the import.
    logging.getLogger(f"mindformers{os.path.expanduser(os.environ['LOG_MF_PATH'])}").addFilter(_only_errors)
    # The command's script of an editable install sets this, and pkg_resources, which MindFormers' dependencies import,
    # then looks for extras under names that their packages have since spelled differently.
    vars(sys.modules["__main__"]).pop("__requires__", None)
    mindformers = import_mindformers()
    mindformers.build_context(
        {
            "use_legacy": False,
            "run_mode": "train",
            "context": {"mode": 0, "device_target": DEVICE_TARGETS[device]},
            "parallel": {},
        }
    )


def give_back_memory() -> None:
    """Give an Ascend device's memory back that this process holds and does not use; its pool never does so by itself.

    Other processes are to have it: the rollout server, before it wakes or is started again.
    """
    import mindspore as ms

    if ms.get_context("device_target") == DEVICE_TARGETS["ascend"]:
        ms.runtime.empty_cache()


def run_graph(cell: "nn.Cell", *inputs: Any) -> Any:
    """Call a cell in graph mode; on a CPU its graph is that of an earlier start, where there is one."""
    import mindspore as ms

    if ms.get_context("device_target") != DEVICE_TARGETS["cpu"]:
        return cell(*inputs)
    from mindrlhf.cpu.training import graph_cache

    return graph_cache.run_graph(cell, *inputs)


@contextlib.contextmanager
def by_itself() -> Iterator[None]:
    """Have MindSpore compile graphs for this rank alone, also where it shards those of training."""
    import mindspore as ms

    alone = {"parallel_mode": ms.ParallelMode.STAND_ALONE, "full_batch": False, "pipeline_stages": 1}
    alone["enable_parallel_optimizer"] = False
    before = {name: ms.get_auto_parallel_context(name) for name in alone}
    ms.set_auto_parallel_context(**alone)
    try:
        yield
    finally:
        ms.set_auto_parallel_context(**before)


def _only_errors(record: logging.LogRecord) -> bool:
    return record.levelno >= logging.ERROR
