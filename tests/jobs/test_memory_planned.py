"""What the keys of the section `memory` save, by MindSpore's own plan of an update in simulation."""

import dataclasses

import pytest
from layout_matrix import QWEN2, hf_config
from slow_tests import SIMULATES_CANN, SLOW

from mindrlhf.config.training import ParallelSection
from mindrlhf.dryrun.compile.request import CompileRequest, compile_ranks
from mindrlhf.dryrun.plan.activations import checkpoint_bytes, layer_bytes, logit_bytes, model_widths
from mindrlhf.layout.layout import Layout
from mindrlhf.specs import find_spec

pytestmark = [SIMULATES_CANN, pytest.mark.timeout(1800), SLOW]

LENGTH = 4096
PARALLEL = {"data_parallel": 1, "model_parallel": 2, "use_seq_parallel": True, "vocab_emb_dp": False}
# One model whose logits are most of its memory, and one whose activations are.
WIDE = hf_config(QWEN2, 1, vocab_size=32_768)
DEEP = hf_config(QWEN2, 4, hidden_size=1024, intermediate_size=4096, head_dim=128)
CASES = {
    "logits": (WIDE, {}),
    "tiles": (WIDE, {"logit_tile": 256}),
    "activations": (DEEP, {}),
    "layers": (DEEP, {"recompute_layers": "0-2"}),
    "operators": (DEEP, {"recompute_operators": ("activation",)}),
}


@pytest.fixture(scope="module")
def planned():
    """Bytes of each case."""
    requests = [
        CompileRequest(
            config,
            dataclasses.asdict(ParallelSection(**PARALLEL)),
            seq_length=LENGTH,
            beta=0.0,
            memory=memory,
            plan_memory=True,
        )
        for config, memory in CASES.values()
    ]
    return dict(zip(CASES, (one.planned_memory_bytes for one in compile_ranks(requests, num_processes=2))))


def _estimates(config: dict):
    """Dimensions, layout, and what a layer keeps without and with recomputation."""
    spec = find_spec(config)
    dims, layout = spec.dims(config), Layout.from_config(ParallelSection(**PARALLEL), 2)
    arguments = (model_widths(spec, dims)[0], layout, LENGTH, 2)
    activation = layer_bytes(*arguments) - layer_bytes(*arguments, ["activation"])
    return dims, layout, layer_bytes(*arguments) - checkpoint_bytes(*arguments), activation


def test_tiles_save_most_of_the_logits(planned):
    dims, layout, _, _ = _estimates(WIDE)
    whole = logit_bytes(dims, layout, LENGTH, 2)
    assert planned["logits"] > whole / 2, "the logits are most of it"
    assert planned["logits"] - planned["tiles"] > whole / 2  # the estimate counts passes that the head makes no more


def test_recomputed_layers_keep_little(planned):
    *_, layer, _ = _estimates(DEEP)
    # One of the three is at work while it is computed again.
    assert planned["activations"] - planned["layers"] > 1.5 * layer


def test_recomputed_operators_keep_no_output(planned):
    *_, activation = _estimates(DEEP)
    assert planned["activations"] - planned["operators"] > 2 * activation
