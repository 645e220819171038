"""`peft` itself loads our adapters: the base with the adapter computes what the merged model does."""

import subprocess
from pathlib import Path

import numpy as np
import pytest
from tiny_models import tiny_model

from mindrlhf.specs import find_spec
from mindrlhf.specs.lora import LoraOptions
from mindrlhf.weights.adapters.merge import merge_adapter
from mindrlhf.weights.adapters.peft import adapter_config, adapter_shapes, write_adapter
from mindrlhf.weights.convert import export_hf, random_hf_weights

QWEN2 = tiny_model(num_hidden_layers=2, tie_word_embeddings=True)
QWEN3, LLAMA = tiny_model("qwen3", QWEN2, head_dim=16), tiny_model("llama", QWEN2)
LINEAR = tiny_model("qwen3_5_text", QWEN2, head_dim=16, layer_types=["linear_attention", "full_attention"])
CASES = {
    "all matrices": (QWEN2, LoraOptions(4, 8.0)),
    "llama": (LLAMA, LoraOptions(4, 8.0)),
    "linear attention": (LINEAR, LoraOptions(4, 8.0)),
    "attention, rank-stabilised": (QWEN3, LoraOptions(3, 5.0, ("attention",), rank_stabilised=True)),
}


@pytest.fixture(scope="module")
def has_peft(rollout_python) -> None:
    look = "import importlib.util, sys; sys.exit(importlib.util.find_spec('peft') is None)"
    if subprocess.run([rollout_python, "-c", look], timeout=60).returncode:
        pytest.skip("the rollout interpreter has no peft, which is none of its requirements")


@pytest.mark.usefixtures("has_peft")
@pytest.mark.parametrize("case", CASES)
def test_peft_computes_what_the_merged_model_does(case, run_in_rollout, tmp_path):
    hf_config, options = CASES[case]
    spec = find_spec(hf_config)
    dims = spec.dims(hf_config)
    base, adapter, merged = (tmp_path / name for name in ("base", "adapter", "merged"))
    export_hf(random_hf_weights(hf_config, 1), hf_config, base)
    shapes = adapter_shapes(spec, dims, options)
    stream = np.random.default_rng(2)
    factors = [(name, (0.2 * stream.standard_normal(shape)).astype(np.float32)) for name, shape in shapes.items()]
    write_adapter(factors, shapes, adapter_config(spec, dims, options, str(base)), adapter)
    merge_adapter(base, adapter, merged)
    script = Path(__file__).with_name("peft_logits.py")
    run_in_rollout(script, base, adapter, merged, tmp_path / "logits.npz")
    with np.load(tmp_path / "logits.npz") as logits:
        assert np.abs(logits["adapted"] - logits["base"]).max() > 0.1, "the adapter was not loaded"
        np.testing.assert_allclose(logits["adapted"], logits["merged"], atol=1e-5, rtol=0)
