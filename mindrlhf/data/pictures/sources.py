"""Image files of a record: bytes or base64 in it, or a path."""

import base64
import binascii
import re
import stat
from collections.abc import Mapping
from pathlib import Path

from mindrlhf.data.handlers import IMAGE_KEYS, RecordError

MAX_IMAGE_FILE_BYTES = 64 << 20
_ADDRESS = re.compile(r"[a-z][a-z0-9+.-]*://", re.I)
_DATA_ADDRESS = re.compile(r"data:[^,]{0,100};base64,", re.I)


def read_image_file(source: object, root: Path) -> bytes:
    """Return the image file that ``source`` stands for.

    Args:
        source: bytes; base64 or a ``data:`` address with it; the path of a file below ``root``; or a record with one of
            these under one of ``IMAGE_KEYS``, as Hugging Face's image columns have it.
        root: relative paths start here, and no file elsewhere is read.

    Raises:
        RecordError: it stands for no image file that may be read.
    """
    if isinstance(source, Mapping):
        source = next((source[key] for key in IMAGE_KEYS if source.get(key)), None)
    if isinstance(source, Mapping):  # {"image_url": {"url": ...}}
        source = source.get("url")
    if isinstance(source, bytes):
        return source
    if not isinstance(source, str) or not source:
        raise RecordError(f"an image is given as {type(source).__name__}; expected bytes, base64 or a path")
    if match := _DATA_ADDRESS.match(source):
        return _from_base64(source[match.end() :], "a data: address")
    if _ADDRESS.match(source):
        raise RecordError(f"the image {source[:60]!r} is an address, and nothing is downloaded: give a file")
    path = _file_below(root, source)
    if path is not None:
        return _read(path)
    if len(source) > 64 and not source.endswith((".png", ".jpg", ".jpeg", ".webp")):
        return _from_base64(source, "text that is no file's path")
    raise RecordError(f"no image file {source[:100]!r} in {root}")


def _file_below(root: Path, text: str) -> Path | None:
    """Return the file at ``text``, which must lie below ``root`` once links are followed; None when there is none."""
    if len(text) > 4096 or "\0" in text:
        return None
    try:
        path = (root / text).resolve()
        if not path.exists():
            return None
    except (OSError, RuntimeError):  # a name that is too long, a circle of links
        return None
    if not path.is_relative_to(root.resolve()):
        raise RecordError(f"the image {text[:100]!r} lies outside {root}: move it there, or choose --image-root")
    return path


def _read(path: Path) -> bytes:
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):
            raise RecordError(f"the image {path} is not a file")
        if status.st_size > MAX_IMAGE_FILE_BYTES:
            raise RecordError(f"the image {path} has over {MAX_IMAGE_FILE_BYTES >> 20} MiB")
        return path.read_bytes()
    except OSError as error:
        raise RecordError(f"cannot read the image {path}: {error.strerror}") from error


def _from_base64(text: str, what: str) -> bytes:
    try:
        return base64.b64decode("".join(text.split()), validate=True)
    except (binascii.Error, ValueError) as error:
        raise RecordError(f"an image is given as {what}, and not as base64 ({error})") from error
