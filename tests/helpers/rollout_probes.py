"""Starts scripts of this folder in the rollout interpreter, as the trainer starts servers there."""

import json
import subprocess
from pathlib import Path
from typing import Any

from mindrlhf.rollout.vllm_options import PACKAGES_NAME, TEMPORARY_NAME, VllmOptions, server_environment, write_plugin

HELPERS = Path(__file__).resolve().parent
CONFIG = {
    "device": "cpu",
    "dtype": "float32",
    "load_format": "dummy",
    "max_model_len": 64,
    "max_num_seqs": 16,
    "seed": 0,
    "tensor_parallel_size": 1,
    "gpu_memory_utilization": 0.2,
    "kv_cache_gib": 0.1,
    "engine_args": {},
    "enable_sleep": False,
    "profile_dir": "",
    "record_routing": False,
    "tokenizer_dir": "",
    "span": None,
}


def ask_probe(script: str, python: str, directory: Path, given: Any, **config: Any) -> Any:
    """Give a script (the config of an engine for the model in ``directory / "model"``, ``given``) as JSON.

    Returns:
        What it printed after "probe", as JSON.
    """
    for private in (PACKAGES_NAME, TEMPORARY_NAME):
        (directory / private).mkdir()
    write_plugin(directory / PACKAGES_NAME, "vision")
    config = CONFIG | {"model_dir": str(directory / "model")} | config
    options = VllmOptions(python, config["model_dir"], "", tensor_parallel_size=config["tensor_parallel_size"])
    environment = server_environment(options, str(directory))
    environment["PYTHONPATH"] = f"{HELPERS.parents[1]}:{HELPERS}:{environment['PYTHONPATH']}"
    ended = subprocess.run(
        [python, str(HELPERS / script)],
        input=json.dumps([config, given]),
        env=environment, capture_output=True, text=True, timeout=400,
    )  # fmt: skip
    answers = [line.split(" ", 1)[1] for line in ended.stdout.splitlines() if line.startswith("probe ")]
    assert answers, ended.stdout + ended.stderr
    return json.loads(answers[0])
