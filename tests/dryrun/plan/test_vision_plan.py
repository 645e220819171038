"""The plan of vision-language models: the tower's share of the state by hand, its work, what the text says."""

from pathlib import Path

from mindrlhf.config.load import load_grpo_config
from mindrlhf.dryrun.plan.plan import Machine, make_plan, read_model
from mindrlhf.dryrun.plan.text import render_text
from mindrlhf.dryrun.plan.verdict import give_verdict

FOLDER = Path(__file__).parents[3] / "model_configs" / "qwen2_5_vl"
KEYS = ("data.train_file=x", "data.tokenizer_dir=x", "reward.verifier_function=accuracy_reward")
# By hand: a block has 4 x 1280 x 1280 + 5120 for attention, 3 x 1280 x 3420 + 8120 for the MLP, two norms.
BLOCK = 4 * 1280**2 + 5120 + 3 * 1280 * 3420 + 2 * 3420 + 1280 + 2 * 1280
TOWER_3B = 1280 * 1176 + 32 * BLOCK + 1280 + 5120 * 5120 + 5120 + 5120 * 2048 + 2048


def plan_of(name: str, world_size: int, *changes: str):
    model = FOLDER / f"qwen2_5_vl_{name}"
    path = FOLDER / f"grpo_{model.name}_{world_size}npu.yaml"
    config = load_grpo_config(path, [*KEYS, f"model.path={model}", *changes], world_size=world_size)
    return make_plan(config, read_model(str(model)), Machine(world_size, 64 * 10**9, node_size=8))


def test_the_tower_is_in_the_first_stage_without_moments():
    plan = plan_of("3b", 8)
    assert plan.tower.num_parameters == TOWER_3B == 668_684_288
    without = [one for one in plan.rows if one.name.startswith("visual.")]
    assert sum(one.state_bytes * one.num_tensors for one in without) == 4 * TOWER_3B
    (state,) = plan.states
    assert state.moments % 8 == 0 and state.num_elements - state.moments // 8 == TOWER_3B
    first, last = plan_of("32b", 16).states
    assert first.num_elements - first.moments // 8 == 688_841_984 and last.num_elements == last.moments // 8


def test_the_memory_of_the_tower_by_hand():
    # An image of 1,024 tokens has 4 patches a token; of each, the MLP has three arrays beside its input, in bfloat16.
    assert plan_of("3b", 8).tower.run_bytes == 4 * 1024 * (1280 + 3 * 3420) * 2


def test_the_text_shows_the_tower():
    plan = plan_of("7b", 8)
    text = render_text(plan, give_verdict(plan))
    assert "676,550,144" in text and "Vision tower" in text and "+ vision + embedding" in text
    assert max(map(len, text.splitlines())) <= 110
