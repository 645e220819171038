"""`mindrlhf doctor --compare-layers`: the layers by which a rollout server and the trainer's cells part.

Each cell is given what the server's layer was given, so that a layer shows its own distance alone, and those behind a
wrong one are near as ever.
"""

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from mindrlhf.doctor.toy import DTYPES, Ground
from mindrlhf.errors import RunFailure, UserError
from mindrlhf.training.preflight.features import model_dims
from mindrlhf.weights.hf import read_hf_config

_NUM_TOKENS = 64
LIMITS = {"cpu": 1e-3, "ascend": 0.05}  # of distances; with bfloat16, where operators run on a host: 0.004
_SERVERS, _CELLS = "server.npz", "cells.npz"


@dataclass(frozen=True)
class Distance:
    """Distance of a layer's outputs, of the median token and of the farthest: one between two experts may be far."""

    name: str
    median: float
    largest: float


def record_server(ground: Ground, model_dir: str) -> None:
    """Have a server of the model in a directory read a random prompt, and write what is behind each layer.

    Raises:
        UserError: the model sees images, or is unknown.
        RunFailure: the server failed.
    """
    from mindrlhf.config.rollout import RolloutSection
    from mindrlhf.rollout.servers import Server
    from mindrlhf.rollout.types import GenerationRequest, SamplingParams
    from mindrlhf.rollout.vllm_options import VllmOptions, devices_of

    if model_dims(model_dir).vision:
        raise UserError(f"the model in {model_dir} sees images: layers are compared of models of text alone")
    own = devices_of(RolloutSection(tensor_parallel=ground.num_devices), 0, os.environ)
    options = VllmOptions(
        ground.python, model_dir, str(Path(ground.directory) / "rollout.log"), device=ground.device,
        dtype=DTYPES[ground.device], load_format="auto", max_model_len=2 * _NUM_TOKENS, max_num_seqs=1,
        kv_cache_gib=0.25, tensor_parallel_size=ground.num_devices, env=own if ground.device == "ascend" else {},
        engine_args={"enforce_eager": True},
    )  # fmt: skip
    with Server.start(options) as server:
        server.record_layers(str(Path(ground.directory) / _SERVERS))
        request = GenerationRequest(0, tuple(_prompt(model_dir).tolist()), 1, seed=0)
        list(server.generate([request], SamplingParams(max_tokens=1)))


def compare_cells(ground: Ground, model_dir: str) -> list[Distance]:
    """Return how far our cells, with the weights of a directory, are from what the server wrote.

    Raises:
        RunFailure: the cells failed.
    """
    from mindrlhf.launch.launch import launch

    directory = Path(ground.directory)
    command = ["-m", "mindrlhf.doctor.rungs", "cells", json.dumps(asdict(ground)), model_dir]
    with open(os.devnull, "w", encoding="utf-8") as nowhere:
        if launch(command, 1, directory / "cells", out=nowhere, joins_alone=ground.device == "ascend"):
            raise RunFailure(f"our cells cannot run {model_dir} ({ground.device}); logs: {directory / 'cells'}")
    return distances(np.load(directory / _SERVERS), np.load(directory / _CELLS))


def distances(server: Mapping[str, np.ndarray], cells: Mapping[str, np.ndarray]) -> list[Distance]:
    """Return how far outputs [tokens, width] are from the server's, by layer in order.

    Of a token: as a share of what the layer has added, and a sixteenth of the sum, whose rounding to bfloat16 is in it.
    """
    found, before = [], 0.0
    for name, own in cells.items():
        theirs = server[name][: len(own)]
        scale = np.linalg.norm(theirs - before, axis=1) + np.linalg.norm(theirs, axis=1) / 16
        apart = np.linalg.norm(own - theirs, axis=1) / scale
        found.append(Distance(name, float(np.median(apart)), float(apart.max())))
        before = theirs
    return found


def run_cells(ground: Ground, model_dir: str) -> None:
    """Write what our cells make of what the server's layers were given; a process of its own."""
    from mindrlhf.config.run import RunSection
    from mindrlhf.training.runtime import start_runtime

    directory, device = Path(ground.directory), ground.device
    rank = start_runtime(RunSection(device=device), directory)
    import mindspore as ms

    from mindrlhf.models.causal_lm import EachLayer, build_model, no_random_weights
    from mindrlhf.shards.sources import open_source
    from mindrlhf.training.checkpoints.models import load
    from mindrlhf.training.engine.model import Whole

    dtypes = {"compute_dtype": DTYPES[device], "param_dtype": DTYPES[device]}
    with no_random_weights():
        network = build_model(read_hf_config(model_dir), seq_length=_NUM_TOKENS, device=device, **dtypes)
    load(Whole(network, rank), open_source(model_dir))
    server = np.load(directory / _SERVERS)
    given = [ms.Tensor(rows[:_NUM_TOKENS]).astype(DTYPES[device]) for rows in list(server.values())[:-1]]
    ids = ms.Tensor(_prompt(model_dir)[None].astype(np.int32))
    made = zip(server, EachLayer(network)(ids, ms.ops.ones_like(ids), *given), strict=True)
    arrays = {name: one.astype(ms.float32).asnumpy().reshape(_NUM_TOKENS, -1) for name, one in made}
    np.savez(directory / _CELLS, **arrays)


def _prompt(model_dir: str) -> np.ndarray:
    return np.random.default_rng(0).integers(0, min(model_dims(model_dir).vocab_size, 1000), _NUM_TOKENS)
