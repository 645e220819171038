"""The manifest of a directory: every file with its size and checksum, so that damage is found before it is loaded.

The checksum is XXH3 of 64 bits (Y. Collet, the xxHash specification): as fast as memory is read, so that it takes next
to nothing from the training beside it, and it misses damage once in 2**64. It guards against failing disks and
half-written files. Writers of large files take the checksum from the bytes in memory, so that damage on the way to
the disk is found too; other files are read back. It does not guard against an attacker.
"""

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import xxhash

from mindrlhf.errors import UserError
from mindrlhf.system.files import write_file
from mindrlhf.system.sizes import read_json_object

MANIFEST_NAME = "manifest.json"
FORMAT_VERSION = 2
_BLOCK_BYTES = 1 << 20


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
            name: {"size_bytes": path.stat().st_size, "xxh3_64": checksums.get(name) or _checksum(path)}
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
        unlisted: relative paths of files that may lie there beside what is listed; their readers check them.

    Raises:
        DamagedDirectory: the manifest is missing or damaged; a file is missing, not listed, of another size or
            content; a symbolic link lies in the directory.
    """
    try:
        files = list_files(directory)
        if MANIFEST_NAME not in files:
            raise DamagedDirectory(f"{directory / MANIFEST_NAME} is missing: the directory was not finished")
        listed = _listed_files(files.pop(MANIFEST_NAME))
        for name in sorted(listed.keys() - files.keys()):
            raise DamagedDirectory(f"{directory / name} is missing")
        for name in sorted(files.keys() - listed.keys()):
            # An extra file is not harmless: an index of shards, for one, decides which files are read.
            if not (unlisted and unlisted.fullmatch(name)):
                raise DamagedDirectory(f"{directory / name} is not listed in {MANIFEST_NAME}")
        for name, entry in listed.items():
            if (size_bytes := files[name].stat().st_size) != entry["size_bytes"]:
                raise DamagedDirectory(f"{files[name]} has {size_bytes} bytes, not {entry['size_bytes']}")
            if _checksum(files[name]) != entry["xxh3_64"]:
                raise DamagedDirectory(f"{files[name]} is damaged: its checksum differs")
    except OSError as error:
        raise DamagedDirectory(f"{error.filename or directory} cannot be read: {error.strerror}") from error


def _listed_files(path: Path) -> dict[str, dict[str, Any]]:
    manifest = read_json_object(path, kind=DamagedDirectory)
    version, entries = manifest.get("format_version"), manifest.get("files")
    if version != FORMAT_VERSION:
        raise DamagedDirectory(f"{path} has format version {version!r}, this release reads {FORMAT_VERSION}")
    if not isinstance(entries, dict):
        raise DamagedDirectory(f"{path} is damaged: it lists no files")
    for name, entry in entries.items():
        if not (isinstance(entry, dict) and {"size_bytes", "xxh3_64"} <= entry.keys()):
            raise DamagedDirectory(f"{path} is damaged at {name!r}")
    return entries


def _checksum(path: Path) -> str:
    digest = xxhash.xxh3_64()
    with open(path, "rb", buffering=0) as file:
        while block := file.read(_BLOCK_BYTES):
            digest.update(block)
    return digest.hexdigest()
