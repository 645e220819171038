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
SLOT = struct.Struct("<8s16s16s")
_MAGIC = b"MRLXXH3\x01"
_BLOCK_BYTES = 4 << 20


def checksums(path: Path, index: Path, header_size_bytes: int) -> bytes:
    """Return the bytes that stand at the end of the header page of a whole file; reads both files once."""
    return SLOT.pack(_MAGIC, _checksum(path, header_size_bytes), _checksum(index))


def verify_checksums(path: Path, index: Path, header_size_bytes: int) -> None:
    """Compare a file and its index with the checksums.

    Raises:
        UserError: either is damaged, or they are not of one build.
    """
    try:
        with path.open("rb") as file:
            file.seek(header_size_bytes - SLOT.size)
            saved = file.read(SLOT.size)
        now = checksums(path, index, header_size_bytes)
    except OSError as error:
        raise UserError(f"cannot read {error.filename or path}: {error.strerror}") from error
    if saved[:24] != now[:24]:
        raise UserError(f"{path} is damaged: copy it again, or build it again")
    if saved != now:
        raise UserError(f"the index {index} is damaged or of another build: copy both again, or build again")


def _checksum(path: Path, header_size_bytes: int = 0) -> bytes:
    """XXH3-128 of a file, without the slot where it has a header page."""
    digest = xxhash.xxh3_128()
    with path.open("rb") as file:
        if header_size_bytes:
            digest.update(file.read(header_size_bytes - SLOT.size))
            file.seek(header_size_bytes)
        while block := file.read(_BLOCK_BYTES):
            digest.update(block)
    return digest.digest()
