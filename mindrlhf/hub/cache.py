"""Caches of the clients of Hugging Face and ModelScope; no network, standard library only."""

import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

MODELS, DATASETS = KINDS = ("models", "datasets")
_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", re.ASCII)


def is_name(text: str) -> bool:
    """Return True for a text that can be a name on a hub, ``owner/name``."""
    return _NAME.fullmatch(text) is not None


def local_directory(text: str) -> str:
    """Return the directory that is meant by what a user gave where a model directory is expected.

    What is there wins over every hub. A name on a hub becomes the directory of the snapshot in the cache; when it is in
    none, or the text is no such name, the text is returned as it is.
    """
    if is_name(text) and not Path(text).exists():
        return str(find(text) or text)
    return text


def advice(text: str) -> str:
    """Return the end of a message about a model directory that does not exist; empty unless it is a name on a hub."""
    return f", or fetch it first: mindrlhf models get {text}" if is_name(text) else ""


def find(name: str, kind: str = MODELS, environment: Mapping[str, str] = os.environ) -> Path | None:
    """Return the directory of a model or a data set in the caches, Hugging Face's first; None when it is in neither.

    Args:
        name: ``owner/name``.
        kind: ``MODELS`` or ``DATASETS``.
        environment: tells where the caches are.
    """
    for directory in _candidates(name, kind, environment):
        if directory.is_dir() and any(directory.iterdir()):
            return directory
    return None


def _candidates(name: str, kind: str, environment: Mapping[str, str]) -> Iterator[Path]:
    owner, short = name.split("/")
    repository = _hugging_face_cache(environment) / f"{kind}--{owner}--{short}"
    yield from _snapshots(repository / "snapshots", _read_reference(repository / "refs" / "main"))
    root = Path(environment.get("MODELSCOPE_CACHE") or _home(environment) / ".cache" / "modelscope").expanduser()
    yield from _snapshots(root / kind / f"{owner}--{short}" / "snapshots", "master")
    # Of releases before 1.38, which write a dot of the name as ___.
    for base in (root / kind, root / "hub" / kind, root, root / "hub"):
        for folder in (short.replace(".", "___"), short):
            yield base / owner / folder


def _snapshots(directory: Path, preferred: str) -> Iterator[Path]:
    """Yield the snapshot of a revision, or the only one there is."""
    if preferred:
        yield directory / preferred
    snapshots = sorted(directory.iterdir()) if directory.is_dir() else []
    if len(snapshots) == 1:
        yield snapshots[0]


def _read_reference(path: Path) -> str:
    try:
        commit = path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError):
        return ""
    return commit if re.fullmatch(r"[0-9a-f]{40}", commit) else ""


def no_directory(name: str) -> str:
    """Return the message that a path is no model directory: nothing is there, or a file."""
    what = "is a file" if Path(name).is_file() else "does not exist"
    return f"model directory {name!r} {what}: give a Hugging Face model directory{advice(name)}"


def _hugging_face_cache(environment: Mapping[str, str]) -> Path:
    if path := environment.get("HF_HUB_CACHE") or environment.get("HUGGINGFACE_HUB_CACHE"):
        return Path(path).expanduser()
    if home := environment.get("HF_HOME"):
        return Path(home).expanduser() / "hub"
    cache = environment.get("XDG_CACHE_HOME") or _home(environment) / ".cache"
    return Path(cache).expanduser() / "huggingface" / "hub"


def _home(environment: Mapping[str, str]) -> Path:
    return Path(environment.get("HOME") or "~").expanduser()
