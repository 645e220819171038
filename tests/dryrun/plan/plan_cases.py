"""Configs and plans that the tests of the plan share."""

from functools import cache
from pathlib import Path

from mindrlhf.config.load import load_grpo_config
from mindrlhf.dryrun.plan.plan import Machine, Plan, make_plan, read_model

ROOT = Path(__file__).parents[3]
DEVICE_BYTES = 64 * 10**9
EXAMPLES = {
    "qwen2_5_7b_8npu": 8,
    "qwen2_5_7b_16npu_32k": 16,
    "qwen2_5_7b_16npu_128k": 16,
    "qwen2_5_32b_16npu": 16,
    "qwen3_30b_a3b_32npu": 32,
    "deepseek_v3_512npu": 512,
}
# Layouts that have every kind of split, in place of those that are shipped.
_TENSOR = ("parallel_config.use_seq_parallel=true", "parallel_config.vocab_emb_dp=false")
LAYOUTS = {
    "qwen2_5_7b_8npu": (
        *("parallel_config.data_parallel=2", "parallel_config.model_parallel=4", *_TENSOR),
        "training.micro_batch_size=2",
    ),
    "qwen2_5_7b_16npu_32k": (
        *("parallel_config.data_parallel=2", "parallel_config.pipeline_stage=1", "parallel_config.micro_batch_num=1"),
        *("training.micro_batch_size=1", "model.recompute=true"),
    ),
    "qwen3_30b_a3b_32npu": (
        *("parallel_config.model_parallel=2", "parallel_config.pipeline_stage=2", *_TENSOR),
        *("parallel_config.micro_batch_num=8", "training.micro_batch_size=8"),
    ),
}


def example(name: str) -> Path:
    return ROOT / "examples" / "grpo" / f"{name}.yaml"


@cache
def plan_of(name: str, *overrides: str, world_size: int | None = None, device_bytes: int = DEVICE_BYTES) -> Plan:
    """Plan an example with some keys changed."""
    world_size = world_size or EXAMPLES[name]
    config = load_grpo_config(example(name), [*LAYOUTS.get(name, ()), *overrides], world_size=world_size)
    return make_plan(config, read_model(str(ROOT / config.model.path)), Machine(world_size, device_bytes, 8))
