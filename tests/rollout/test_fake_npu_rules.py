"""The rules of the fake NPU's operators, against calls that CANN's pages allow and others."""

from types import SimpleNamespace

import pytest
from fake_npu.rules import RULES, check, checked


class Tensor(SimpleNamespace):
    def __len__(self):
        return self.shape[0]


def tensor(dtype, *shape):
    return Tensor(dtype=f"torch.{dtype}", shape=shape)


def attention(dtype="bfloat16", key="bfloat16", block_size=128, sparse_mode=3, input_layout="TND", table="int32"):
    cache = tensor(key, 9, block_size, 256)
    return {
        "query": Tensor(dtype=f"torch.{dtype}", shape=(5, 4, 128)), "key": cache, "value": cache, "query_rope": None,
        "key_rope": None, "block_table": tensor(table, 2, 4), "input_layout": input_layout, "block_size": block_size,
        "actual_seq_lengths": [2, 5], "num_heads": 4, "num_key_value_heads": 2, "sparse_mode": sparse_mode,
    }  # fmt: skip


def norm(x, weight, width=64):
    return {"x": tensor(x, 3, 64), "weight": tensor(weight, width), "epsilon": 1e-6}


def experts(kind="int64", rows="bfloat16", weight="bfloat16"):
    return {"x": [tensor(rows, 6, 64)], "weight": [tensor(weight, 4, 64, 32)], "group_list": tensor(kind, 4),
            "group_list_type": 1}  # fmt: skip


def mrope(sections=(16, 24, 24), head_size=128, angles="bfloat16"):
    query = tensor("bfloat16", 3, 256)
    return {"positions": tensor("int64", 3, 3), "query": query, "key": query, "head_size": head_size,
            "cos_sin_cache": tensor(angles, 99, 128), "mrope_section": list(sections)}  # fmt: skip


@pytest.mark.parametrize(
    "name, allowed, refused",
    [
        ("npu_fused_infer_attention_score", [attention(), attention(block_size=16), attention("float16", "float16")],
         [attention("float32", "float32"), attention(key="float16"), attention(block_size=24), attention(table="int64"),
          attention(sparse_mode=2), attention(input_layout="SBH")]),
        ("npu_rms_norm", [norm("bfloat16", "float32"), norm("float32", "float32"), norm("float16", "float16")],
         [norm("bfloat16", "float16"), norm("float32", "bfloat16"), norm("bfloat16", "bfloat16", 32)]),
        ("npu_grouped_matmul", [experts(), experts(rows="float32", weight="float32")],
         [experts("int32"), experts(weight="float32"), experts(rows="float64", weight="float64")]),
        ("npu_mrope", [mrope(), mrope((24, 20, 20))],
         [mrope((16, 16, 32)), mrope(head_size=80), mrope(angles="float32")]),
        ("npu_swiglu", [{"x": tensor("float32", 3, 64), "dim": -1}], [{"x": tensor("float32", 3, 63), "dim": -1}]),
        ("npu_top_k_top_p",
         [{"logits": tensor("float32", 3, 9), "p": tensor("float32", 3), "k": None}],
         [{"logits": tensor("float32", 3, 9), "p": None, "k": tensor("int64", 3)}]),
    ],
)  # fmt: skip
def test_a_call_outside_the_rules_ends_with_an_error_of_the_device(name, allowed, refused):
    for arguments in allowed:
        check(name, arguments)
    for arguments in refused:
        with pytest.raises(RuntimeError, match=f"call {RULES[name].page} failed, 161002"):
            check(name, arguments)


def test_a_host_version_checks_its_arguments_by_name():
    def npu_swiglu(x, dim=-1):
        return x.shape[dim]

    assert checked(npu_swiglu)(tensor("bfloat16", 3, 8)) == 8
    with pytest.raises(RuntimeError, match="npu_swiglu is for"):
        checked(npu_swiglu)(tensor("bfloat16", 3, 8), dim=0)
