"""Models and data sets of Hugging Face and ModelScope, by the clients of both and from their caches."""

import contextlib
import importlib
import importlib.util
import re
from pathlib import Path

from mindrlhf.errors import RunFailure, UserError

MODELS, DATASETS = KINDS = ("models", "datasets")
# What each hub's client is imported as.
CLIENTS = {"huggingface": "huggingface_hub", "modelscope": "modelscope"}
# Copies of the weights in formats that nothing here reads.
UNREAD = ("*.bin", "*.pt", "*.pth", "*.gguf", "*.h5", "*.msgpack", "*.onnx", "*.ot", "original/*", "onnx/*")
_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", re.ASCII)


def local_directory(text: str) -> str:
    """Return the directory of a model: ``text`` itself, or the snapshot of ``owner/name`` in a cache."""
    if not _NAME.fullmatch(text) or Path(text).exists():
        return text
    for client in CLIENTS.values():
        # Clients differ in what they raise where the cache has nothing, and one of them may not be installed.
        with contextlib.suppress(Exception):
            return importlib.import_module(client).snapshot_download(text, local_files_only=True)
    return text


def advice(text: str) -> str:
    """Return the end of a message about a model directory that does not exist; empty unless it is a name on a hub."""
    return f", or fetch it first: mindrlhf models get {text}" if _NAME.fullmatch(text) else ""


def no_directory(name: str) -> str:
    """Return the message that a path is no model directory: nothing is there, or a file."""
    what = "is a file" if Path(name).is_file() else "does not exist"
    return f"model directory {name!r} {what}: give a Hugging Face model directory{advice(name)}"


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
    if not _NAME.fullmatch(name):
        raise UserError(f"'{name}' is no name on a hub: give owner/name, such as Qwen/Qwen2.5-7B-Instruct")
    if importlib.util.find_spec(CLIENTS[hub]) is None:
        raise UserError(f"fetching from {hub} needs its client: pip install 'mindrlhf[hub]'")
    options = {"repo_type": kind.removesuffix("s"), "revision": revision or None, "local_dir": output or None}
    if kind == MODELS:
        options["ignore_patterns"] = list(UNREAD)
    try:
        return Path(importlib.import_module(CLIENTS[hub]).snapshot_download(name, **options))
    except Exception as failure:  # of two clients and what they are built of
        reason = " ".join(f"{type(failure).__name__}: {failure}".split())[:300]
        (other,) = CLIENTS.keys() - {hub}
        raise RunFailure(
            f"{hub} did not give {name}: {reason}; check the name and the network, or try --from {other}"
        ) from failure
