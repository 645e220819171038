"""Facts that the nodes of a run compare before it starts: software, config, options, models, data, devices."""

import dataclasses
import hashlib
import importlib.metadata
import os
import platform
import shlex
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import mindrlhf
from mindrlhf.config.schema import AnyConfig, GrpoConfig
from mindrlhf.data.fingerprint import data_fingerprint
from mindrlhf.launch.nodes.facts import MISSING, Fact
from mindrlhf.rewards.pool import reason_to_stay
from mindrlhf.rollout.pool import find_rollout_python
from mindrlhf.tools.agents import is_function
from mindrlhf.training.checkpoints.run import check_continues

_PACKAGES = ("mindspore", "mindformers", "numpy", "safetensors", "tokenizers", "transformers")
_ROLLOUT_PACKAGES = ("vllm", "vllm-ascend", "torch", "torch-npu")
_ROLLOUT_PROBE = """
import importlib.metadata as packages, sys
for name in sys.argv[1:]:
    try:
        print(name, packages.version(name))
    except packages.PackageNotFoundError:
        pass
"""
_PROBE_TIMEOUT_S = 60
_EDGE_BYTES = 1 << 16
_DIGEST_CHARS = 16
_MODEL_KEYS = ("model.path", "model.reference_path", "critic.path", "reward.model_path")
# What a run does around its graphs; a temperature is a constant of their cells.
_NOT_OF_GRAPHS = ("run.", "data.", "reward.", "tools.", "sandbox.", "rollout.", "optimizer.", "evaluation.")
_NOT_OF_GRAPHS += ("checkpoint.", "guard.", "observe.", "profiler.")
_GRAPH_RUN_KEYS = ("run.seed", "run.device", "run.deterministic")
_SAME_SOFTWARE = "install the same on all nodes, or use one installation that they share"
_SAME_FILES = "copy the files of one node to the others, or use a directory that they share"


def run_facts(command: str, config: AnyConfig, options: Mapping[str, Any]) -> list[Fact]:
    """Return what has to be the same on all nodes.

    Raises:
        UserError: a file of the data is missing or damaged.
    """
    values = _flatten(dataclasses.asdict(config))
    return [
        *_software(values),
        Fact("command", command, "start all nodes with the same command"),
        *(Fact(name, value, f"give all nodes the same {name}") for name, value in options.items()),
        *_devices(config.run.device),
        *(
            Fact(f"'{name}'", value, "start all nodes with the same config file and overrides")
            for name, value in values.items()
        ),
        *_models(values),
        *verifier_facts(config),
        *agent_facts(config),
        *(
            Fact(f"what data.{key} holds", value, _SAME_FILES)
            for key, value in data_fingerprint(vars(config.data)).items()
        ),
    ]


def graph_facts(config: AnyConfig) -> list[str]:
    """Return what compiled graphs may depend on, beside their cells: settings, and the models' own configs."""
    values = _flatten(dataclasses.asdict(config))
    models = _model_paths(values)
    facts = [
        f"{name}={value}"
        for name, value in values.items()
        if name in _GRAPH_RUN_KEYS or not name.startswith(_NOT_OF_GRAPHS) and name not in {*_MODEL_KEYS, *models}
    ]
    paths = [Path(path, "config.json") for path in models.values()]
    return [*facts, *(path.read_text(encoding="utf-8") for path in paths if path.is_file())]


def check_resumes(config: AnyConfig) -> None:
    """Refuse to continue a checkpoint with another config or other data, before anything starts.

    Raises:
        UserError: they differ; or a file of the data is missing or damaged.
    """
    check_continues(config, data_fingerprint(vars(config.data)))


def _flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, Mapping) and value:
            flat |= _flatten(value, f"{prefix}{name}.")
        else:
            flat[f"{prefix}{name}"] = value
    return flat


def _software(values: Mapping[str, Any]) -> Iterator[Fact]:
    yield Fact("mindrlhf", mindrlhf.__version__, _SAME_SOFTWARE)
    yield Fact("the code of mindrlhf", tree_digest(Path(mindrlhf.__file__).parent, "*.py"), _SAME_SOFTWARE)
    yield Fact("Python", platform.python_version(), _SAME_SOFTWARE)
    for name in _PACKAGES:
        try:
            version = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            version = MISSING
        yield Fact(name, version, _SAME_SOFTWARE)
    if "rollout.python" in values:
        yield Fact("the rollout environment", _rollout_versions(values["rollout.python"]), _SAME_SOFTWARE)


def _rollout_versions(configured: str) -> str:
    argv = [find_rollout_python(configured), "-c", _ROLLOUT_PROBE, *_ROLLOUT_PACKAGES]
    try:
        ended = subprocess.run(argv, capture_output=True, text=True, timeout=_PROBE_TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired):
        return MISSING
    return " ".join(ended.stdout.split()) or MISSING


def _devices(device: str) -> Iterator[Fact]:
    if device != "ascend":
        return
    num_devices = len([name for name in os.listdir("/dev") if name.removeprefix("davinci").isdigit()])
    yield Fact("the number of NPUs", num_devices, "use nodes of one kind")
    home = os.environ.get("ASCEND_HOME_PATH") or os.environ.get("ASCEND_TOOLKIT_HOME") or ""
    driver = Path("/usr/local/Ascend/driver/version.info")
    for name, path in (("CANN", Path(home) / "version.cfg"), ("the NPU driver", driver)):
        yield Fact(name, _file_digest(path) if path.is_file() else MISSING, "install the same release on all nodes")


def verifier_facts(config: AnyConfig) -> Iterator[Fact]:
    """Yield what verifiers need on each node: their files, and the keys of judges."""
    reward = config.reward if isinstance(config, GrpoConfig) else None
    if reward is None or reason_to_stay(reward):
        return
    for path in sorted({name.rpartition(":")[0] for name in reward.verifier_function if ":" in name}):
        yield Fact(f"what {path} holds", _file_digest(Path(path)) if Path(path).is_file() else MISSING, _SAME_FILES)
    names = {text for option, text in reward.options.items() if option.endswith(".api_key_variable")}
    names |= {"OPENAI_API_KEY"} if any(option.endswith(".url") for option in reward.options) else set()
    for name in sorted(names):
        fix = "set it on all nodes"
        yield Fact(f"whether {name} is set", bool(os.environ.get(name)), fix)


def agent_facts(config: AnyConfig) -> Iterator[Fact]:
    """Yield what agents need on each node: the files that their command line names."""
    tools = config.tools if isinstance(config, GrpoConfig) else None
    if tools is None or not tools.agent:
        return
    is_one = is_function(tools.agent)
    for word in [tools.agent.rpartition(":")[0]] if is_one else [one for one in shlex.split(tools.agent) if "/" in one]:
        held = _file_digest(Path(word)) if Path(word).is_file() else MISSING
        yield Fact(f"what {word} holds", held, _SAME_FILES)


def _models(values: Mapping[str, Any]) -> Iterator[Fact]:
    for key, path in _model_paths(values).items():
        yield Fact(f"what {key} holds", tree_digest(Path(path), "*"), _SAME_FILES)


def _model_paths(values: Mapping[str, Any]) -> dict[str, str]:
    """Return the directories of models by the keys that name them."""
    return {key: values[key] for key in _MODEL_KEYS if values.get(key)}


def tree_digest(directory: Path, pattern: str) -> str:
    """Return hexadecimal digits of the names, sizes, beginnings and ends of the files below a directory.

    Of a file of up to 128 KiB everything counts; of a larger one, such as one of weights, not what lies between.
    """
    state = hashlib.sha256()
    for path in sorted(path for path in directory.rglob(pattern) if path.is_file()):
        state.update(f"{path.relative_to(directory)} {_file_digest(path)}\n".encode(errors="surrogateescape"))
    return state.hexdigest()[:_DIGEST_CHARS]


def _file_digest(path: Path) -> str:
    size = path.stat().st_size
    with path.open("rb") as file:
        state = hashlib.sha256(f"{size} ".encode() + file.read(_EDGE_BYTES))
        file.seek(max(_EDGE_BYTES, size - _EDGE_BYTES))
        state.update(file.read(_EDGE_BYTES))
    return state.hexdigest()[:_DIGEST_CHARS]
