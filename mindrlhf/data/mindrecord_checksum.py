"""Checksums of a MindRecord file and its index, so that damage is found before MindSpore reads it.

MindSpore trusts both files: wrong bytes in a page, or a wrong offset in the index, end the process with a
segmentation fault. The checksums (XXH3-128, xxhash.com) lie in the last bytes of the header page, which MindRecord
leaves empty. They find damage and mistakes, not an attacker.
"""

import struct
from pathlib import Path

import xxhash

from mindrlhf.errors import UserError

# Magic, checksum of the data file without these bytes, checksum of the index.
_SLOT = struct.Struct("<8s16s16s")
_MAGIC = b"MRLXXH3\x01"
_BLOCK_BYTES = 4 << 20


def write_checksums(path: Path, index: Path, header_size_bytes: int) -> None:
    """Put the checksums into a finished file.

    Args:
        header_size_bytes: where the first page of data starts.

    Raises:
        UserError: the header leaves no room.
    """
    position = header_size_bytes - _SLOT.size
    with path.open("r+b") as file:
        file.seek(position)
        if file.read(_SLOT.size) != bytes(_SLOT.size):
            raise UserError(f"{path.name} has too many pages for its header: build several files")
        slot = _SLOT.pack(_MAGIC, _data_checksum(path, position), _checksum(index))
        file.seek(position)
        file.write(slot)


def verify_checksums(path: Path, index: Path, header_size_bytes: int) -> None:
    """Compare a file and its index with the checksums; reads both once, some GB/s from the page cache.

    Raises:
        UserError: either is damaged, or they are not of one build.
    """
    position = header_size_bytes - _SLOT.size
    try:
        with path.open("rb") as file:
            file.seek(position)
            magic, data_checksum, index_checksum = _SLOT.unpack(file.read(_SLOT.size))
        if magic != _MAGIC or _data_checksum(path, position) != data_checksum:
            raise UserError(f"{path} is damaged: copy it again, or build it again")
        if _checksum(index) != index_checksum:
            raise UserError(f"the index {index} is damaged or of another build: copy both again, or build again")
    except OSError as error:
        raise UserError(f"cannot read {error.filename or path}: {error.strerror}") from error
    except (struct.error, ValueError) as error:
        if isinstance(error, UserError):
            raise
        raise UserError(f"{path} is damaged: copy it again, or build it again") from error


def read_checksum(path: Path, header_size_bytes: int) -> str:
    """Return what the file says its own checksum is, in hex; ``verify_checksums`` says whether that is true.

    Raises:
        UserError: it cannot be read.
    """
    try:
        with path.open("rb") as file:
            file.seek(header_size_bytes - _SLOT.size)
            return _SLOT.unpack(file.read(_SLOT.size))[1].hex()
    except (OSError, ValueError, struct.error) as error:
        raise UserError(f"{path} is damaged ({error}): copy it again, or build it again") from error


def _data_checksum(path: Path, slot_position: int) -> bytes:
    return _checksum(path, slot_position, slot_position + _SLOT.size)


def _checksum(path: Path, gap_start: int = 0, gap_end: int = 0) -> bytes:
    """XXH3-128 of a file without the bytes from ``gap_start`` to ``gap_end``."""
    digest = xxhash.xxh3_128()
    block = memoryview(bytearray(_BLOCK_BYTES))
    with path.open("rb", buffering=0) as file:
        while gap_start > file.tell():
            size_bytes = file.readinto(block[: min(_BLOCK_BYTES, gap_start - file.tell())])
            if not size_bytes:
                break
            digest.update(block[:size_bytes])
        file.seek(gap_end)
        while size_bytes := file.readinto(block):
            digest.update(block[:size_bytes])
    return digest.digest()
