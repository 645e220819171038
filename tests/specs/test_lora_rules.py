"""Which matrices have adapters, and how their factors lie in MindFormers' parameters."""

import dataclasses

import numpy as np
import pytest
from tiny_models import tiny_model

from mindrlhf.errors import UserError
from mindrlhf.specs import find_spec, scorer_config
from mindrlhf.specs.fuse import fuse, split
from mindrlhf.specs.lora import LoraOptions, adapters

SIZES = {"vocab_size": 96, "num_hidden_layers": 2}
QWEN2 = tiny_model(**SIZES)
EXPERTS = tiny_model("qwen3_moe", **SIZES, head_dim=8, num_experts=3, moe_intermediate_size=20, mlp_only_layers=[1])
OPTIONS = LoraOptions(rank=3, alpha=6.0)


def of(hf_config, **changes):
    spec = find_spec(hf_config)
    dims = spec.dims(hf_config)
    return adapters(spec, dims, dataclasses.replace(OPTIONS, **changes)), dims


def targets(hf_config, *roles):
    return {one.base.mf_name.removeprefix("decoder.layers.") for one in of(hf_config, targets=roles)[0]}


def test_roles_choose_matrices_of_layers():
    attention = {f"{layer}.self_attention.linear_{part}.weight" for layer in (0, 1) for part in ("qkv", "proj")}
    mlp = {f"{layer}.mlp.linear_{part}.weight" for layer in (0, 1) for part in ("fc1", "fc2")}
    assert targets(QWEN2, "attention") == attention
    assert targets(QWEN2, "mlp") == mlp
    assert targets(QWEN2) == targets(scorer_config(QWEN2)) == attention | mlp
    # The other layer has routed experts, which have no adapters.
    assert targets(EXPERTS) == attention | {name for name in mlp if name.startswith("1.")}


def test_a_role_that_the_model_lacks_is_refused():
    only_experts = {**EXPERTS, "mlp_only_layers": []}
    with pytest.raises(UserError, match="'lora.targets' names mlp, .*Qwen3MoeForCausalLM .*it has attention"):
        targets(only_experts, "attention", "mlp")


@pytest.mark.parametrize("hf_config", [QWEN2, EXPERTS], ids=["dense", "experts"])
def test_the_product_of_fused_factors_is_the_fused_product(hf_config):
    """Fusing B A, matrix by matrix, is the product of B and A as they are fused: row by row, the part of A that is its
    matrix's. Factors come back apart as they were."""
    found, dims = of(hf_config)
    stream = np.random.default_rng(0)
    for one in found:
        downs = [stream.standard_normal(shape) for shape in one.down.shape(dims)]
        ups = [stream.standard_normal(shape) for shape in one.up.shape(dims)]
        down, up = fuse(one.down, dims, downs), fuse(one.up, dims, ups)
        assert down.shape == one.down.mf_shape(dims) and up.shape == one.up.mf_shape(dims)
        for rule, parts, fused in ((one.down, downs, down), (one.up, ups, up)):
            for part, again in zip(parts, split(rule, dims, fused), strict=True):
                np.testing.assert_array_equal(again, part)
        marks = [np.full((len(part), 1), index) for index, part in enumerate(ups)]
        owner = fuse(one.up, dims, marks)[:, 0]
        product = np.stack([row @ down[3 * part : 3 * part + 3] for row, part in zip(up, owner)])
        expected = fuse(one.base, dims, [b @ a for b, a in zip(ups, downs)])
        np.testing.assert_allclose(product, expected, rtol=0, atol=1e-12)


def test_factors_are_sharded_as_the_side_of_the_matrix_that_they_keep():
    for one in of(QWEN2)[0]:
        axes = (one.base.shard_axis, one.down.shard_axis, one.up.shard_axis)
        assert axes in ((0, None, 0), (1, 1, None)), one.base.mf_name
