"""Images of a record to PNG files of the size that the model sees, and to the tokens that stand for them."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from mindrlhf.data.handlers import RecordError
from mindrlhf.data.pictures.processor import FILE_NAME, IMAGE_TOKEN, ImageProcessor, read_image_processor
from mindrlhf.data.pictures.sources import read_image_file
from mindrlhf.data.tokenizers import Tokenizer
from mindrlhf.errors import UserError
from mindrlhf.images.pixels import ImageError, decode_image, encode_png

# MindRecord keeps a record within one page, which has 8 MiB.
MAX_RECORD_IMAGE_BYTES = 7 << 20


@dataclass(frozen=True)
class Picture:
    """One image: a PNG file, and the rows and columns of its tokens."""

    file: bytes
    grid: tuple[int, int]

    @property
    def num_tokens(self) -> int:
        return self.grid[0] * self.grid[1]


class PictureReader:
    """Reads the images of records for one model.

    Args:
        tokenizer_path: directory of the tokenizer, where the image processor's config lies too.
        tokenizer: of that directory.
        min_pixels, max_pixels: in place of that config's.
        root: where image files lie; None means the folder of the data file.

    Raises:
        UserError: a config that cannot be used, or limits for a model without vision.
    """

    def __init__(
        self,
        tokenizer_path: str,
        tokenizer: Tokenizer,
        min_pixels: int | None,
        max_pixels: int | None,
        root: str | None,
    ):
        self._tokenizer_path = tokenizer_path
        self._root = None if root is None else Path(root)
        if self._root is not None and not self._root.is_dir():
            raise UserError(f"no such directory for images: {root}")
        self.processor: ImageProcessor | None = read_image_processor(tokenizer_path, min_pixels, max_pixels)
        self.token_id: int | None = None
        if self.processor is not None:
            self.token_id = tokenizer.token_to_id(IMAGE_TOKEN)
            if self.token_id is None:
                raise UserError(f"the tokenizer in {tokenizer_path} has no {IMAGE_TOKEN}, which images need")
        elif min_pixels is not None or max_pixels is not None:
            raise UserError(
                f"limits of pixels are given, but {tokenizer_path} has no {FILE_NAME}: its model sees no images"
            )

    def read(self, sources: Sequence[object], data_file: Path) -> list[Picture]:
        """Return the pictures of a record's image sources, in order.

        Raises:
            RecordError: a model without eyes, an image that cannot be read, or too large ones.
        """
        if not sources:
            return []
        if self.processor is None:
            raise RecordError(f"it has images, but {self._tokenizer_path} has no {FILE_NAME}: its model sees none")
        pictures = []
        for number, source in enumerate(sources, 1):
            try:
                pixels = decode_image(read_image_file(source, self._root or data_file.parent), self.processor.limits)
            except (ImageError, RecordError) as error:
                raise RecordError(f"image {number} of {len(sources)}: {error}") from error
            pictures.append(Picture(encode_png(pixels), self.processor.geometry.token_grid(*pixels.shape[:2])))
        size_bytes = sum(len(picture.file) for picture in pictures)
        if size_bytes > MAX_RECORD_IMAGE_BYTES:
            raise RecordError(
                f"its images take {size_bytes / 2**20:.1f} MiB as PNG, a record holds {MAX_RECORD_IMAGE_BYTES >> 20}: "
                "choose a lower --max-pixels"
            )
        return pictures

    def check_prompt(self, prompt: str, num_images: int) -> None:
        """Check that the text of a prompt has a place for each image.

        Raises:
            RecordError: it has not, as when the template leaves images out.
        """
        if self.processor is None:
            return
        num_places = prompt.count(IMAGE_TOKEN)
        if num_places != num_images:
            raise RecordError(f"the prompt has {num_places} {IMAGE_TOKEN}, the record has {num_images} images")

    def expand(self, token_ids: list[int], pictures: Sequence[Picture]) -> list[int]:
        """Return ids with as many image tokens for each picture as it takes, in place of one."""
        if not pictures:
            return token_ids
        expanded, remaining = [], iter(pictures)
        for token_id in token_ids:
            expanded += [token_id] * (next(remaining).num_tokens if token_id == self.token_id else 1)
        return expanded


def shown_ids(prompt_ids: np.ndarray, tokenizer: Tokenizer) -> np.ndarray:
    """Return the ids of a prompt as people and verifiers read it: one image token for each image."""
    token_id = tokenizer.token_to_id(IMAGE_TOKEN)
    is_image = prompt_ids == token_id
    return prompt_ids[~(is_image & np.concatenate([[False], is_image[:-1]]))]
