"""The manifest of a directory: every file with its size and checksum, so that damage is found before it is loaded.

The checksum is XXH3 of 64 bits (Y. Collet, the xxHash specification): as fast as memory is read, so that it takes next
to nothing from the training beside it, and it misses damage once in 2**64. It guards against failing disks and
half-written files. Who writes a large file takes its checksum from the bytes in memory, so that damage on the way to
the disk is found too; other files are read back. It does not guard against an attacker, and neither would a
cryptographic hash that lies, unsigned, beside the files.
"""

import contextlib
import fcntl
import json
import mmap
import os
import re
import stat
from collections.abc import Mapping
from pathlib import Path, PurePosixPath

import xxhash

from mindrlhf.errors import UserError
from mindrlhf.system.files import write_file

MANIFEST_NAME = "manifest.json"
# Checkpoints share this file, and later ones append to it: an entry describes how it began.
EVALUATIONS_NAME = "evaluations.jsonl"
FORMAT_VERSION = 2
_BLOCK_BYTES = 1 << 20
_CHECKSUM = re.compile(r"[0-9a-f]{16}")


class DamagedDirectory(UserError):
    """A directory differs from its manifest; the message names the file."""


def list_files(directory: Path) -> dict[str, Path]:
    """Return every file below ``directory`` by its relative path with forward slashes, sorted.

    Raises:
        DamagedDirectory: something is neither a regular file nor a directory: symbolic links lead outside.
    """
    if directory.is_symlink() or not directory.is_dir():
        raise DamagedDirectory(f"{directory} is not a directory")
    files = {}
    pending = [directory]
    while pending:
        with os.scandir(pending.pop()) as entries:
            for entry in entries:
                path = Path(entry.path)
                if entry.is_dir(follow_symlinks=False):
                    pending.append(path)
                elif entry.is_file(follow_symlinks=False):
                    files[path.relative_to(directory).as_posix()] = path
                else:
                    kind = "symbolic link" if entry.is_symlink() else "special file"
                    raise DamagedDirectory(f"{path} is a {kind}: only files and directories belong here")
    return dict(sorted(files.items()))


def write_manifest(directory: Path, checksums: Mapping[str, str] | None = None) -> None:
    """Describe every file of ``directory`` in ``manifest.json``; call it when all of them are written.

    Args:
        checksums: those that are known, XXH3-64 in hex by relative path; other files are read.

    Raises:
        DamagedDirectory: a symbolic link or a special file lies in the directory.
    """
    checksums = checksums or {}
    files = {name: path for name, path in list_files(directory).items() if name != MANIFEST_NAME}
    manifest = {
        "format_version": FORMAT_VERSION,
        "files": {
            name: _entry(path.stat().st_size, checksums[name]) if name in checksums else _describe(path)
            for name, path in files.items()
        },
    }
    write_file(directory / MANIFEST_NAME, json.dumps(manifest, indent=1))


def below(name: str, checksums: Mapping[str, str]) -> dict[str, str]:
    """Return the checksums of a directory's files by their paths in the directory that holds it as ``name``."""
    return {f"{name}/{path}": checksum for path, checksum in checksums.items()}


def verify(directory: Path, unlisted: re.Pattern[str] | None = None) -> None:
    """Compare ``directory`` with its manifest, reading every file once.

    Args:
        unlisted: relative paths of files that may lie there beside what is listed; who reads them checks them.

    Raises:
        DamagedDirectory: the manifest is missing or damaged; a file is missing, not listed, of another size or
            content; a symbolic link lies in the directory; a listed path leads outside.
    """
    try:
        files = list_files(directory)
        if MANIFEST_NAME not in files:
            raise DamagedDirectory(f"{directory / MANIFEST_NAME} is missing: the directory was not finished")
        listed = _listed_files(directory / MANIFEST_NAME)
        del files[MANIFEST_NAME]
        for name in listed:
            if name not in files:
                raise DamagedDirectory(f"{directory / name} is missing")
        for name in files:
            # An extra file is not harmless: an index of shards, for one, decides which files are read.
            if name not in listed and not (unlisted and unlisted.fullmatch(name)):
                raise DamagedDirectory(f"{directory / name} is not listed in {MANIFEST_NAME}")
        for name, entry in listed.items():
            _check_file(files[name], entry, grows=name == EVALUATIONS_NAME)
    except OSError as error:
        raise DamagedDirectory(f"{error.filename or directory} cannot be read: {error.strerror}") from error


def read_json_object(path: Path) -> dict:
    """Read one JSON object.

    Raises:
        DamagedDirectory: the file cannot be read, or holds anything else.
    """
    try:
        with open(_open_regular(path), encoding="utf-8") as file:
            value = json.load(file)
    except OSError as error:
        raise DamagedDirectory(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise DamagedDirectory(f"{path} is damaged: it is not valid JSON") from error
    if not isinstance(value, dict):
        raise DamagedDirectory(f"{path} is damaged: it holds a {type(value).__name__}, not an object")
    return value


def _listed_files(path: Path) -> dict[str, dict]:
    """Return the checked entries of a manifest by file name."""
    manifest = read_json_object(path)
    version = manifest.get("format_version")
    if version != FORMAT_VERSION:
        raise DamagedDirectory(f"{path} has format version {version!r}, this release reads {FORMAT_VERSION}")
    entries = manifest.get("files")
    if not isinstance(entries, dict):
        raise DamagedDirectory(f"{path} is damaged: it lists no files")
    for name, entry in entries.items():
        parts = PurePosixPath(name).parts
        if not parts or parts[0] == "/" or ".." in parts or "\0" in name or "/".join(parts) != name:
            raise DamagedDirectory(f"{path} lists {name!r}, which is no path inside the directory")
        if not isinstance(entry, dict) or not _is_entry(entry):
            raise DamagedDirectory(f"{path} is damaged at {name!r}")
    return entries


def _is_entry(entry: dict) -> bool:
    size_bytes, checksum = entry.get("size_bytes"), entry.get("xxh3_64")
    is_size = isinstance(size_bytes, int) and not isinstance(size_bytes, bool)
    return is_size and isinstance(checksum, str) and _CHECKSUM.fullmatch(checksum) is not None


def _check_file(path: Path, entry: dict, *, grows: bool) -> None:
    size_bytes, listed = path.stat().st_size, entry["size_bytes"]
    if size_bytes < listed or (size_bytes > listed and not grows):
        raise DamagedDirectory(f"{path} has {size_bytes} bytes, not {listed}")
    if _describe(path, listed) != _entry(entry["size_bytes"], entry["xxh3_64"]):
        raise DamagedDirectory(f"{path} is damaged: its checksum differs")


def _describe(path: Path, max_bytes: int | None = None) -> dict[str, int | str]:
    """Return the entry of a file, or of its first bytes."""
    size_bytes, digest = 0, xxhash.xxh3_64()
    with open(_open_regular(path), "rb", buffering=0) as file, mmap.mmap(-1, _BLOCK_BYTES) as aligned:
        end = os.fstat(file.fileno()).st_size
        end = end if max_bytes is None else min(end, max_bytes)
        if end > _BLOCK_BYTES:
            # Past the page cache, as it was written: half the processor time, and nothing else is driven out.
            with contextlib.suppress(OSError):  # some file systems have no direct reading
                fcntl.fcntl(file, fcntl.F_SETFL, fcntl.fcntl(file, fcntl.F_GETFL) | os.O_DIRECT)
        with memoryview(aligned) as block:
            while size_bytes < end and (count := file.readinto(block)):
                count = min(count, end - size_bytes)
                size_bytes += count
                with block[:count] as piece:
                    digest.update(piece)
    return _entry(size_bytes, digest.hexdigest())


def _entry(size_bytes: int, checksum: str) -> dict[str, int | str]:
    return {"size_bytes": size_bytes, "xxh3_64": checksum}


def _open_regular(path: Path) -> int:
    """Open for reading what is a regular file itself, and does not merely lead to one."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise DamagedDirectory(f"{path} is not a regular file")
    return descriptor
