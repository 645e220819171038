"""The directories that a run writes to: whether they are free, and what an earlier run left there."""

import contextlib
import itertools
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import yaml

from mindrlhf.checkpoint.state import CRITIC_NAME
from mindrlhf.checkpoint.store import CheckpointStore
from mindrlhf.config.derived import needs_critic
from mindrlhf.config.schema import AnyConfig, GrpoConfig
from mindrlhf.errors import UserError
from mindrlhf.system.run_lock import holding
from mindrlhf.weights.adapters.peft import exported_adapter

FINAL_NAME = "final"  # the exported model, in the run's output directory
CONFIG_NAME = "config.yaml"  # of the run as it was started last, there too
NEWEST, AUTO = "newest", "auto"  # `--resume`: there must be a checkpoint; `--resume auto`: without one begin


def save_dir(config: AnyConfig) -> Path:
    """Return the directory of a run's checkpoints."""
    return Path(config.checkpoint.save_dir or Path(config.run.output_dir) / "checkpoints")


@contextlib.contextmanager
def holding_directories(config: AnyConfig, purpose: str) -> Iterator[None]:
    """Keep other runs out of this one's directories while the body runs; see :mod:`mindrlhf.system.run_lock`.

    Raises:
        UserError: another run that is going on has one of them.
    """
    with contextlib.ExitStack() as stack:
        # Also the one within the other: a third run may be told to save there.
        for directory in dict.fromkeys((Path(config.run.output_dir).resolve(), save_dir(config).resolve())):
            stack.enter_context(holding(directory, purpose))
        yield


def resumes(config: AnyConfig, wanted: str) -> bool:
    """Return whether a run continues a checkpoint; ``wanted`` is NEWEST, AUTO, or empty for a new run."""
    return wanted == NEWEST or (wanted == AUTO and newest_checkpoint(config) is not None)


def is_finished(config: AnyConfig) -> bool:
    """Return whether a run has exported its model and is not asked for more or fewer steps since."""
    return _is_taken(Path(config.run.output_dir) / FINAL_NAME) and not _has_another_length(config)


def _has_another_length(config: AnyConfig) -> bool:
    try:
        before = yaml.safe_load((Path(config.run.output_dir) / CONFIG_NAME).read_text(encoding="utf-8"))
        was = {key: before[key.partition(".")[0]][key.partition(".")[2]] for key in _lengths(config)}
    except (OSError, ValueError, TypeError, KeyError, yaml.YAMLError):
        return False
    return was != _lengths(config)


def _lengths(config: AnyConfig) -> dict[str, int]:
    """Return the keys that say how long a run is."""
    section = next(name for name in ("training", "supervised", "preference") if hasattr(config, name))
    return {"run.max_steps": config.run.max_steps, f"{section}.epochs": getattr(config, section).epochs}


def too_short(config: AnyConfig, num_steps: int) -> str:
    """Return a line where a run of ``num_steps`` ends before ``run.max_steps``, empty where it does not."""
    max_steps = config.run.max_steps
    if not 0 < num_steps < max_steps:
        return ""
    key, epochs = list(_lengths(config).items())[1]
    return (
        f"run.max_steps is {max_steps}, but with {key}={epochs} the data are used up after step {num_steps}: raise "
        f"{key} to about {-(-max_steps * epochs // num_steps)} to train for as long"
    )


def check_output(config: AnyConfig, *, resume: bool) -> None:
    """Refuse to write over an earlier run, before the time is spent; remove an export that a killed run left half done.

    The model of a run that is to train longer is moved to `final_1` and so on.

    Raises:
        UserError: the run's directories hold a trained model, checkpoints that ``resume`` does not continue, or none
            that it could continue.
    """
    refuse_taken(config, resume=resume)
    output_dir = Path(config.run.output_dir)
    if _is_taken(final := output_dir / FINAL_NAME):
        final.rename(next(path for n in itertools.count(1) if not (path := output_dir / f"{FINAL_NAME}_{n}").exists()))
    for name in (FINAL_NAME, CRITIC_NAME):
        for pattern in (f".{name}.partial-*", f".{exported_adapter(output_dir / name).name}.*.partial"):
            for unfinished in output_dir.glob(pattern):
                shutil.rmtree(unfinished, ignore_errors=True)


def refuse_taken(config: AnyConfig, *, resume: bool) -> None:
    """Refuse to write over an earlier run, or where nothing can be written; changes nothing.

    Raises:
        UserError: as ``check_output``; or something on the way to the output directory is no directory.
    """
    output_dir, directory = Path(config.run.output_dir), save_dir(config)
    _check_writable("run.output_dir", output_dir)
    _check_writable("checkpoint.save_dir", directory)
    newest = newest_checkpoint(config)
    if not (resume and newest and _has_another_length(config)):
        check_free(output_dir / FINAL_NAME)
    has_critic = isinstance(config, GrpoConfig) and needs_critic(config)
    if has_critic and not resume:  # a resumed run may have been killed after it exported the critic
        check_free(output_dir / CRITIC_NAME)
    for name in (FINAL_NAME, CRITIC_NAME):
        if config.lora.rank is not None and not resume:
            check_free(exported_adapter(output_dir / name))
    if newest is not None and not resume:
        raise UserError(
            f"{newest} is a checkpoint of an earlier run: continue it with --resume, or set another run.output_dir or "
            "checkpoint.save_dir"
        )
    if resume and newest is None:
        raise nothing_to_resume(directory)


def check_no_file(key: str, directory: Path) -> None:
    """Check that no file stands where a key names a directory, or on the way to it."""
    first = next((parent for parent in (directory, *directory.parents) if parent.exists()), Path())
    if not first.is_dir():
        raise UserError(f"'{key}' is {directory}, but {first} is a file: choose another directory")


def _check_writable(key: str, directory: Path) -> None:
    """Check that the directory that a key names is one that can be written, or that it can be made."""
    check_no_file(key, directory)
    for parent in (directory, *directory.parents):
        if parent.exists():
            if not os.access(parent, os.W_OK | os.X_OK):
                raise UserError(f"'{key}' is {directory}, but {parent} cannot be written: choose another")
            return


def newest_checkpoint(config: AnyConfig) -> Path | None:
    """Return the newest checkpoint of a run, not verified, None when there is none; nothing is made."""
    if not save_dir(config).is_dir():
        return None
    store = CheckpointStore(save_dir(config), config.checkpoint.keep_last, only_reads=True)
    steps = store.steps()
    return store.path(steps[-1]) if steps else None


def check_free(directory: Path) -> None:
    """Refuse to train towards an export directory that is taken, before the time is spent."""
    if _is_taken(directory):
        ways = "--resume run.max_steps=N trains it longer; else move it away, or set another run.output_dir"
        raise UserError(f"{directory} holds the model of an earlier run: {ways}")


def _is_taken(directory: Path) -> bool:
    return directory.exists() and any(directory.iterdir())


def nothing_to_resume(directory: Path) -> UserError:
    """The error of a run that has no checkpoint to continue."""
    return UserError(
        f"there is no whole checkpoint to resume from in {directory}: leave out --resume, or give --resume auto, which "
        "begins where there is none"
    )
