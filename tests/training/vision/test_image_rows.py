"""Rows with images: numbers of image rows, positions, and which rank is sent which image; all worked out by hand."""

import numpy as np
import pytest

from mindrlhf.data.packing import TokenSequence
from mindrlhf.images.geometry import VisionGeometry
from mindrlhf.images.pixels import image_digest
from mindrlhf.training.batch import RowOptions, make_batch, parts_of_step
from mindrlhf.training.vision.image_rows import ImageTokens

IMAGE, VOCABULARY = 9, 100
WIDE = np.full((28, 56, 3), 1, np.uint8)  # 1 x 2 tokens
TALL = np.full((84, 28, 3), 2, np.uint8)  # 3 x 1 tokens
OPTIONS = {"pack": True, "image_tokens": ImageTokens(VOCABULARY, IMAGE, VisionGeometry())}


def sequence(prompt, response, *images) -> TokenSequence:
    ids = np.array(prompt, np.int32), np.array(response, np.int32)
    return TokenSequence(*ids, {"weights": np.ones(len(response), np.float32)}, images=images)


FIRST = sequence([1, IMAGE, IMAGE, 2, IMAGE, IMAGE, IMAGE], [3, IMAGE], WIDE, TALL)  # 9 tokens
SECOND = sequence([4, IMAGE, IMAGE, IMAGE], [5, 6], TALL.copy())  # 6 tokens
PLAIN = sequence([7, 8], [7])


@pytest.fixture(scope="module")
def rows():
    batch = make_batch([FIRST, SECOND, PLAIN], RowOptions((20,), 2, 1, **OPTIONS))
    (rows,) = batch.micro_batches
    assert set(batch.images) == {image_digest(WIDE), image_digest(TALL)}
    return rows


def test_image_tokens_are_numbers_of_rows_that_samples_share(rows):
    assert rows.images == (image_digest(WIDE), image_digest(TALL))
    wide, tall = [100, 101], [102, 103, 104]
    # The response's own image token is a token like others.
    assert rows.input_ids[0, :9, 0].tolist() == [1, *wide, 2, *tall, 3, IMAGE]
    assert rows.input_ids[0, 9:15, 0].tolist() == [4, *tall, 5, 6]
    assert rows.input_ids[0, 15:, 0].tolist() == [7, 8, 7, 0, 0]
    assert rows.labels[0, :8].tolist() == [IMAGE, IMAGE, 2, IMAGE, IMAGE, IMAGE, 3, IMAGE]
    assert not rows.input_ids[1].any()


def test_positions_start_anew_with_each_sequence(rows):
    time, row, column = rows.input_ids[0, :, 1:].T
    # After an image of 1 x 2 tokens text goes on 2 further, after one of 3 x 1 tokens 3.
    assert time[:9].tolist() == [0, 1, 1, 3, 4, 4, 4, 7, 8]
    assert row[:9].tolist() == [0, 1, 1, 3, 4, 5, 6, 7, 8]
    assert column[:9].tolist() == [0, 1, 2, 3, 4, 4, 4, 7, 8]
    assert row[9:15].tolist() == [0, 1, 2, 3, 4, 5] and column[9:15].tolist() == [0, 1, 1, 1, 4, 5]
    assert time[15:].tolist() == row[15:].tolist() == [0, 1, 2, 0, 0]


def test_a_rank_is_sent_each_image_of_its_rows_once():
    batches = [make_batch([FIRST, SECOND, PLAIN], RowOptions((9,), 1, 2, **OPTIONS)) for _ in range(2)]
    assert [rows.images for rows in batches[0].micro_batches] == [
        (image_digest(WIDE), image_digest(TALL)),
        (image_digest(TALL),),
    ]
    first, second = ([part.images for part in own["batches"]] for own in parts_of_step(batches, 2))
    assert [image.shape for images in first for image in images.values()] == [WIDE.shape, TALL.shape]
    assert [image.shape for images in second for image in images.values()] == [TALL.shape]


def test_padding_is_as_wide_as_other_rows():
    batch = make_batch([SECOND], RowOptions((16,), 2, 2, **OPTIONS))
    assert [rows.input_ids.shape for rows in batch.micro_batches] == [(2, 16, 4)] * 2
    assert batch.micro_batches[1].images == ()


def test_models_of_text_see_no_difference():
    batch = make_batch([PLAIN], RowOptions((16,), 1, 1, True))
    assert batch.micro_batches[0].input_ids.shape == (1, 16) and batch.images == {}
