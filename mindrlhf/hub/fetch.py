"""Fetching from Hugging Face and ModelScope through their own clients, into their caches or a directory."""

import contextlib
import importlib.util
from collections.abc import Sequence
from pathlib import Path

from mindrlhf.errors import RunFailure, UserError
from mindrlhf.hub.cache import DATASETS, is_name

# What each hub's client is imported as.
CLIENTS = {"huggingface": "huggingface_hub", "modelscope": "modelscope"}
# Copies of the weights in formats that nothing here reads.
UNREAD = ("*.bin", "*.pt", "*.pth", "*.gguf", "*.h5", "*.msgpack", "*.onnx", "*.ot", "original/*", "onnx/*")


def fetch(name: str, kind: str, hub: str, *, revision: str = "", output: str = "") -> Path:
    """Fetch a model or a data set, as far as it is not in the cache, and return its directory.

    Args:
        name: ``owner/name``.
        kind: ``MODELS`` or ``DATASETS``.
        hub: one of ``CLIENTS``.
        revision: branch, tag or commit; empty for the hub's default.
        output: directory to put the files in; empty for the client's cache, where the name alone finds them.

    Raises:
        UserError: the name is none, or the client is not installed.
        RunFailure: the hub does not answer, or does not give it.
    """
    if not is_name(name):
        raise UserError(f"'{name}' is no name on a hub: give owner/name, such as Qwen/Qwen2.5-7B-Instruct")
    if importlib.util.find_spec(CLIENTS[hub]) is None:
        raise UserError(f"fetching from {hub} needs its client: pip install 'mindrlhf[hub]'")
    options = {"revision": revision or None, "local_dir": output or None}
    ignored: Sequence[str] = () if kind == DATASETS else UNREAD
    try:
        return Path(_fetch(hub, name, kind.removesuffix("s"), list(ignored), options))
    except Exception as failure:  # of two clients and what they are built of
        reason = " ".join(f"{type(failure).__name__}: {failure}".split())[:300]
        other = next(one for one in CLIENTS if one != hub)
        raise RunFailure(
            f"{hub} did not give {name}: {reason}; check the name and the network, or try --from {other}"
        ) from failure


def _fetch(hub: str, name: str, repo_type: str, ignored: list[str], options: dict) -> str:
    if hub == "huggingface":
        import huggingface_hub

        return huggingface_hub.snapshot_download(name, repo_type=repo_type, ignore_patterns=ignored, **options)
    from modelscope import snapshot_download

    return snapshot_download(repo_id=name, repo_type=repo_type, ignore_patterns=ignored, **options)


def size_bytes(directory: Path) -> int:
    """Return the size of all files below a directory, links followed."""
    total = 0
    for path in directory.rglob("*"):
        with contextlib.suppress(OSError):
            total += path.stat().st_size if path.is_file() else 0
    return total
