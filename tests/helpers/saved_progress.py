"""Progress of a run through the files of a checkpoint."""

import json
from pathlib import Path
from typing import Any

from mindrlhf.checkpoint.state import RunState, pack_state, read_progress, read_state, write_state
from mindrlhf.system.records import decode, encode
from mindrlhf.training.checkpoints.run import Progress


def save_progress(directory: Path, progress: Progress) -> None:
    """Write what a checkpoint keeps of algorithm and samples into a new directory."""
    directory.mkdir()
    state = RunState(progress.step, progress.step, 0, {}, {}, progress.algorithm)
    write_state(directory, pack_state(state, {"leftover": progress.leftover}))


def load_progress(directory: Path, progress: Progress) -> None:
    """Take up what was written."""
    progress.algorithm = read_state(directory).algorithm
    progress.leftover = read_progress(directory)["leftover"]


def stored(records: list, directory: Path) -> list:
    """Return records as a checkpoint brings them back."""
    save_progress(directory, Progress(leftover=records))
    progress = Progress()
    load_progress(directory, progress)
    return progress.leftover


def through_json(record: Any) -> Any:
    """Return a record as its JSON text and arrays bring it back."""
    values, arrays = encode({"record": record})
    return decode(json.loads(json.dumps(values)), arrays)["record"]
