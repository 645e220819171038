"""Positions of image tokens against a plain count, and against transformers in the rollout interpreter."""

import json

import numpy as np
import pytest

from mindrlhf.images.positions import image_starts, multimodal_positions

IMAGE = 9
# Tokens of text between images of so many rows and columns.
PROMPTS = [
    [3, (2, 3), 4],
    [1, (1, 1), 1, (5, 2), 7],
    [2, (4, 4), 2, (1, 6), 2, (3, 1), 1],
    [6],
    [1, (2, 2)],
]

TRANSFORMERS = """
import json, sys
import torch
from types import SimpleNamespace
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VLModel as Model
vision = SimpleNamespace(spatial_merge_size=2, tokens_per_second=2)
model = SimpleNamespace(config=SimpleNamespace(vision_config=vision))
model.get_vision_position_ids = Model.get_vision_position_ids.__get__(model)
found = []
for tokens, grids in json.load(sys.stdin):
    ids = torch.tensor([tokens])
    grids = torch.tensor([[1, 2 * rows, 2 * columns] for rows, columns in grids]) if grids else None
    positions, _ = Model.get_rope_index(model, ids, (ids == 9).int(), image_grid_thw=grids)
    found.append(positions[:, 0].tolist())
print(json.dumps(found))
"""


def tokens_of(prompt):
    """Return the tokens and the grids of a prompt given as lengths of text and grids."""
    tokens, grids = [], []
    for part in prompt:
        if isinstance(part, tuple):
            tokens += [IMAGE] * (part[0] * part[1])
            grids.append(part)
        else:
            tokens += [1] * part
    return np.array(tokens), grids


@pytest.mark.parametrize("prompt", PROMPTS)
def test_positions_are_those_of_a_plain_count(prompt):
    want, following = [], 0
    for part in prompt:
        if isinstance(part, tuple):
            want += [
                (following, following + row, following + column) for row in range(part[0]) for column in range(part[1])
            ]
            following += max(part)
        else:
            want += [(following + step,) * 3 for step in range(part)]
            following += part
    tokens, grids = tokens_of(prompt)
    positions = multimodal_positions(tokens, grids, IMAGE)
    assert positions.dtype == np.int32 and positions.T.tolist() == [list(one) for one in want]
    assert positions.max() + 1 == following


def test_positions_are_those_of_transformers(run_in_rollout):
    cases = [tokens_of(prompt) for prompt in PROMPTS]
    text = json.dumps([(tokens.tolist(), grids) for tokens, grids in cases])
    wanted = json.loads(run_in_rollout("-c", TRANSFORMERS, given=text))
    for (tokens, grids), want in zip(cases, wanted, strict=True):
        assert multimodal_positions(tokens, grids, IMAGE).tolist() == want


def test_images_are_found_one_after_the_other_also_without_text_between():
    tokens, grids = tokens_of([2, (2, 2), (1, 3), 1])
    assert image_starts(tokens, grids, IMAGE) == [2, 6]


@pytest.mark.parametrize(
    "tokens, grids, words",
    [
        ([1, 9, 9, 1], [(1, 3)], "image 1 of 1 x 3 tokens"),
        ([9, 1, 9], [(1, 2)], "image 1 of 1 x 2 tokens"),
        ([9, 9, 9], [(1, 2)], "3 image tokens, its 1 images have 2"),
        ([1, 9], [], "1 image tokens, its 0 images have 0"),
    ],
)
def test_image_tokens_that_are_not_those_of_the_images_are_refused(tokens, grids, words):
    with pytest.raises(ValueError, match=words):
        multimodal_positions(np.array(tokens), grids, IMAGE)
