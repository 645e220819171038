"""Qwen2.5-VL: config.json in both nestings, the published sizes, names and shapes, where its tensors lie."""

import copy
import math

import pytest
from tiny_vl import TinyVl, config_of, weights_of

from mindrlhf.errors import UserError
from mindrlhf.layout.layout import Layout, parameter_layouts
from mindrlhf.specs import QWEN2_5_VL, find_spec
from mindrlhf.weights.convert import hf_shapes


@pytest.mark.parametrize("is_tied", [True, False])
def test_both_nestings_say_the_same(is_tied):
    nested, flat = (config_of(TinyVl(is_flat=is_flat, is_tied=is_tied)) for is_flat in (False, True))
    dims = find_spec(nested).dims(nested)
    assert dims == find_spec(flat).dims(flat)
    assert (dims.tied, dims.rope_theta, dims.vocab_size) == (is_tied, 1e6, 288)
    assert (dims.vision.mrope_sections, dims.vision.image_token, dims.vision.window_side) == ((4, 6, 6), 261, 4)
    # transformers 4.5x nests the decoder and keeps the older names of rotary options.
    between = copy.deepcopy(nested)
    rope = between["text_config"].pop("rope_parameters")
    options = {"type": "default", "rope_type": "default", "mrope_section": rope["mrope_section"]}
    between["text_config"] |= {"rope_theta": rope["rope_theta"], "rope_scaling": options}
    assert find_spec(between).dims(between) == dims


@pytest.mark.parametrize("model", [TinyVl(), TinyVl(is_tied=False, vision_depth=3, layers=1)])
def test_names_and_shapes_are_those_of_a_checkpoint(model):
    config = config_of(model)
    spec = find_spec(config)
    shapes = hf_shapes(spec, spec.dims(config))
    assert shapes == {name: array.shape for name, array in weights_of(model).items()}


def test_the_tower_is_whole_in_the_first_stage():
    config = config_of(TinyVl(layers=4))
    dims = QWEN2_5_VL.dims(config)
    layouts = parameter_layouts(QWEN2_5_VL, dims, Layout(data_parallel=2, model_parallel=2, pipeline_stage=2))
    tower = [layout for layout in layouts if layout.name.startswith("visual.")]
    assert len(tower) == 1 + 2 * 12 + 5
    assert all(layout.stages == (0,) and layout.shard_shape == layout.shape for layout in tower)
    assert sum(math.prod(layout.shape) for layout in tower) == sum(
        array.size for name, array in weights_of(TinyVl()).items() if name.startswith("visual.")
    )


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("vision_config",), None, "vision_config=None"),
        (("text_config", "rope_parameters", "mrope_section"), [4, 4, 4], "add up to 16"),
        (("text_config", "rope_parameters"), None, "mrope_section"),
        (("text_config", "rope_parameters", "rope_type"), "yarn", "yarn"),
        (("vision_config", "depth"), 0, "depth=0"),
        (("vision_config", "out_hidden_size"), 64, "out_hidden_size=64"),
        (("vision_config", "hidden_act"), "gelu", "silu"),
        (("vision_config", "window_size"), 100, "multiple of patch_size"),
        (("vision_config", "num_heads"), 5, "multiple of 4"),
        (("image_token_id",), 288, "not in the vocabulary"),
        (("image_token_id",), None, "image_token_id=None"),
        (("text_config",), 3, "text_config=3"),
    ],
)
def test_configs_that_cannot_be_served_are_refused(path, value, message):
    config = config_of(TinyVl())
    inner = config
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    with pytest.raises(UserError, match=message):
        find_spec(config).dims(config)
