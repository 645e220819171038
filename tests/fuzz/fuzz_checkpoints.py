"""Checkpoints of a run."""

import json
import random
from pathlib import Path

import corruption
import numpy as np
from fuzz_files import make_checkpoint
from fuzz_target import Case


def checkpoint_manifest(directory: Path) -> Case:
    from mindrlhf.checkpoint.manifest import MANIFEST_NAME, verify

    checkpoint = make_checkpoint(directory)
    path = checkpoint / MANIFEST_NAME
    manifest = json.loads(path.read_bytes())

    def case(rng: random.Random) -> None:
        path.write_bytes(corruption.corrupt_json(rng, manifest))
        verify(checkpoint)

    return case


def checkpoint_state(directory: Path) -> Case:
    from mindrlhf.checkpoint.resume import check_resumable
    from mindrlhf.checkpoint.state import STATE_NAME, read_progress, read_state
    from mindrlhf.data.stream import PromptStream

    checkpoint = make_checkpoint(directory)
    path = checkpoint / STATE_NAME
    state = json.loads(path.read_bytes())
    config = dict(state["state"]["$record"][1]["config"])

    def case(rng: random.Random) -> None:
        path.write_bytes(corruption.corrupt_json(rng, state))
        found = read_state(checkpoint)
        check_resumable(found.config, config)
        PromptStream(100, found.seed).restore(found.prompt_stream)
        read_progress(checkpoint)

    return case


def checkpoint_arrays(directory: Path) -> Case:
    from mindrlhf.checkpoint.state import ARRAYS_NAME
    from mindrlhf.weights.array_file import load_arrays

    path = make_checkpoint(directory) / ARRAYS_NAME
    whole = path.read_bytes()

    def case(rng: random.Random) -> None:
        path.write_bytes(corruption.corrupt_safetensors(rng, whole))
        arrays = load_arrays(path)
        for name in arrays:
            arrays.shape(name)
            arrays[name].sum(dtype=np.float64)

    return case
