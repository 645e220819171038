"""What the keys of the section `memory` do to a plan, counted by hand."""

import pytest
from plan_cases import plan_of

from mindrlhf.dryrun.plan.memory import OLD_LOGPROBS, UPDATE
from mindrlhf.dryrun.plan.verdict import give_verdict
from mindrlhf.errors import UserError

NAME = "qwen2_5_7b_8npu"
# Two rows of 4,096 positions, tensor parallelism with sequence parallelism over 4, 28 layers of a hidden size of 3,584.
POSITIONS, SPLIT, LAYERS, HIDDEN, WORDS, MLP = 8192, 4, 28, 3584, 152_064, 18_944


def items(*overrides: str, phase: str = UPDATE) -> dict[str, int]:
    several = ("training.num_iterations=2",) * (phase == OLD_LOGPROBS)  # of a single update they come with it
    plan = plan_of(NAME, *overrides, *several)
    (memory,) = (one for one in plan.memory if one.phase == phase)
    return {item.name.partition(" (")[0]: item.size_bytes for item in memory.items}


def test_tiles_of_positions_bound_the_logits_and_add_the_heads_gradient_up():
    whole, tiled = items(), items("memory.logit_tile=512")
    assert whole["logits"] == POSITIONS * WORDS // SPLIT * 18 and "head's gradient" not in whole
    assert tiled["logits"] == 512 * WORDS // SPLIT * 18
    # The sum in float32; of a tile the product in bfloat16 and float32, and the new sum.
    assert tiled["head's gradient"] == HIDDEN * WORDS // SPLIT * (4 + 2 + 4 + 4)
    assert items("memory.logit_tile=512", phase=OLD_LOGPROBS)["logits"] == tiled["logits"]
    assert items("memory.logit_tile=1000000") == whole


def test_layers_that_are_recomputed_keep_their_input():
    without, some = (
        items("model.recompute=false", *more)["activations"] for more in ([], ["memory.recompute_layers=0-9,27"])
    )
    # bfloat16, split by sequence parallelism.
    kept = POSITIONS * HIDDEN * 2 // SPLIT
    assert some == without // LAYERS * 17 + 11 * kept
    assert items("model.recompute=false", "memory.recompute_layers=0-27") == items()


@pytest.mark.parametrize(
    "operator, per_token",
    [
        ("attention", (HIDDEN * 2 + 28 * 64) // SPLIT),
        # Inputs of two norms as float32 instead of bfloat16. Their outputs are kept where they are gathered.
        ("norms", 2 * HIDDEN * 2 // SPLIT),
        ("activation", 2 * MLP * 2 // SPLIT),
        ("mlp", 4 * MLP * 2 // SPLIT),
    ],
)
def test_operators_that_are_recomputed_keep_no_output(operator, per_token):
    without, some = (
        items("model.recompute=false", *more)["activations"]
        for more in ([], [f"memory.recompute_operators=[{operator}]"])
    )
    assert without - some == LAYERS * POSITIONS * per_token


def test_norms_that_gather_nothing_keep_no_output_either():
    whole = ["model.recompute=false", "parallel_config.use_seq_parallel=false"]
    without, some = (items(*whole, *more)["activations"] for more in ([], ["memory.recompute_operators=[norms]"]))
    assert without - some == LAYERS * POSITIONS * 2 * HIDDEN * (2 + 2)


def test_offloaded_state_leaves_room_for_the_generator():
    """7.6 billion parameters on 8 ranks: 12 bytes of each are moments and sums."""
    for phase in ("rollout", OLD_LOGPROBS):
        here, away = (items(*more, phase=phase) for more in ([], ["memory.offload_optimizer=true"]))
        moved = {name: size for name, size in here.items() if name not in away}
        assert moved.keys() == {"AdamW moments", "gradient sums"}
        assert sum(moved.values()) == pytest.approx(7_615_616_512 * 12 / 8, rel=1e-3)  # vectors are whole
        assert {name: here[name] for name in away} == away
    assert items() == items("memory.offload_optimizer=true")
    larger = plan_of(NAME, "memory.offload_optimizer=true", "rollout.gpu_memory_utilization=0.8")
    assert larger.fits and not plan_of(NAME, "rollout.gpu_memory_utilization=0.8").fits
    assert any("in host memory between updates" in note for note in give_verdict(larger).notes)


def test_swapped_moments_are_there_for_the_step_alone():
    """7.6 billion parameters on 8 ranks: 8 bytes of each are moments."""
    for phase in ("rollout", OLD_LOGPROBS, "update", "transfer"):
        here, swapped = (items(*more, phase=phase) for more in ([], ["memory.swap_moments=true"]))
        assert here.keys() - swapped.keys() == {"AdamW moments"}
        assert here["AdamW moments"] == pytest.approx(7_615_616_512 * 8 / 8, rel=1e-3)  # vectors are whole
        assert {name: here[name] for name in swapped} == swapped
    assert items(phase="optimizer step") == items("memory.swap_moments=true", phase="optimizer step")
    both = items("memory.swap_moments=true", "memory.offload_optimizer=true", phase="rollout")
    assert both == items("memory.offload_optimizer=true", phase="rollout")
    notes = give_verdict(plan_of(NAME, "memory.swap_moments=true")).notes
    assert any("7.62 GB of AdamW's moments in host memory" in note for note in notes)


def test_a_layer_that_the_model_lacks_is_refused():
    with pytest.raises(UserError, match="names layer 28, but the model has 28"):
        plan_of(NAME, "model.recompute=false", "memory.recompute_layers=20-28")


@pytest.mark.parametrize("name, logits", [("qwen2_5_7b_16npu_32k", 16_384), ("qwen2_5_7b_16npu_128k", 32_768)])
def test_long_rows_fit_with_tiles(name, logits):
    """The recipes: without tiles the logits alone would take that many positions of 38,016 tokens."""
    assert plan_of(name).fits
    (whole,) = (one for one in plan_of(name, "memory.logit_tile=0").memory if one.phase == UPDATE)
    assert {item.name: item.size_bytes for item in whole.items}["logits"] == logits * WORDS // 4 * 18


def test_muon_has_half_the_moments_of_matrices_and_gathers_them_for_its_step():
    adamw, muon = (items(*more, phase="optimizer step") for more in ([], ["optimizer.type=muon"]))
    layer = 36 * 128 * HIDDEN + 28 * 128 * HIDDEN + 3 * HIDDEN * MLP
    saved = LAYERS * layer * 4 / 8
    assert adamw["AdamW moments"] - muon["Muon moments"] == saved
    # Gates and ups of a layer are the largest of the matrices, which are whole here; an eighth of the others.
    largest = 2 * HIDDEN * MLP
    gathered = (largest + (LAYERS * layer - largest) // 8) * 4
    assert muon["optimizer's work"] - adamw["optimizer's work"] == gathered
    swapped = items("optimizer.type=muon", "memory.swap_moments=true")
    assert items("optimizer.type=muon").keys() - swapped.keys() == {"Muon moments"}
