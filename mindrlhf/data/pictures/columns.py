"""Images in a prompt file: PNG files one after the other, and in its header their common properties."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields

import numpy as np

from mindrlhf.images.geometry import PixelLimits, VisionGeometry

# The files of a record one after the other; where each begins and the last ends, int32 [images + 1].
FILES, OFFSETS = "images", "image_offsets"
SCHEMA = {FILES: {"type": "bytes"}, OFFSETS: {"type": "int32", "shape": [-1]}}


@dataclass(frozen=True)
class ImageHeader:
    """The images of a prompt file."""

    num_images: int
    num_records: int  # that have images
    most_images: int  # of one record
    most_tokens: int  # of one image
    image_token: int  # id that a prompt has for each cell of an image
    limits: PixelLimits
    geometry: VisionGeometry


def image_columns(files: Sequence[bytes]) -> dict[str, object]:
    """Return the values of the two columns for a record with these images."""
    return {FILES: b"".join(files), OFFSETS: np.cumsum([0, *map(len, files)], dtype=np.int32)}


def image_files(row: Mapping[str, np.ndarray]) -> tuple[bytes, ...]:
    """Return the image files of a row as MindDataset gives it; none if it has no such columns."""
    if FILES not in row:
        return ()
    data, offsets = row[FILES].tobytes(), row[OFFSETS].tolist()
    return tuple(data[start:end] for start, end in zip(offsets, offsets[1:]))


def parse_image_header(value: object) -> ImageHeader:
    """Return the record that ``asdict`` made JSON of.

    Raises:
        ValueError: it is not of that form.
    """
    values = _members(value, ImageHeader)
    limits, geometry = _members(values["limits"], PixelLimits), _members(values["geometry"], VisionGeometry)
    for name in ("mean", "std"):
        geometry[name] = tuple(geometry[name]) if isinstance(geometry[name], list) else None
    counts = [found for name, found in (values | limits).items() if name not in ("limits", "geometry")]
    if not all(type(count) is int and count > 0 for count in [*counts, geometry["patch"], geometry["merge"]]):
        raise ValueError("a count is none")
    return ImageHeader(**values | {"limits": PixelLimits(**limits), "geometry": VisionGeometry(**geometry)})


def _members(value: object, kind: type) -> dict:
    if not isinstance(value, Mapping) or value.keys() != {field.name for field in fields(kind)}:
        raise ValueError(f"not the fields of {kind.__name__}")
    return dict(value)
