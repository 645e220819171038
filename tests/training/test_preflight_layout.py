"""Layouts of a run on NPUs that are checked before it starts: each mistake by one line with its fix."""

import pytest
from preflight_cases import changed
from tiny_models import WIDE, tiny_model
from tiny_vl import TinyVl, write_tiny_vl

from mindrlhf.config.model import ModelSection
from mindrlhf.config.run import DataSection, RunSection
from mindrlhf.config.schema import SftConfig
from mindrlhf.errors import UserError
from mindrlhf.shards.shard import shard_directory
from mindrlhf.specs import scorer_config
from mindrlhf.training.preflight import check_grpo_inputs, check_offline_inputs
from mindrlhf.training.preflight.layout import check_layout
from mindrlhf.weights.convert import export_hf, random_hf_weights

MODEL = tiny_model(base=WIDE, vocab_size=512, intermediate_size=64)


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    directory = tmp_path_factory.mktemp("untied") / "model"
    export_hf(random_hf_weights(MODEL, 0), MODEL, directory)
    return directory


@pytest.fixture
def npu_config(config, model_dir):
    config = changed(config, "run", device="ascend")
    return changed(config, "model", path=str(model_dir))


@pytest.fixture
def npu_sft_config(inputs_dir, model_dir):
    data = DataSection(train_file=str(inputs_dir / "sft.mindrecord"), tokenizer_dir=str(inputs_dir / "tokenizer"))
    return SftConfig(model=ModelSection(path=str(model_dir)), data=data, run=RunSection(device="ascend"))


def refused(config, world_size):
    with pytest.raises(UserError) as caught:
        check_grpo_inputs(config, world_size)
    assert "\n" not in str(caught.value)
    return str(caught.value)


FITTING = [
    (4, {"model_parallel": 2}),
    (4, {"pipeline_stage": 2, "micro_batch_num": 2}),
    (2, {"enable_parallel_optimizer": True}),
    (2, {"context_parallel": 2}),
    # Data parallelism alone, and one device: on an NPU both are sharded graphs.
    (2, {}),
    (1, {}),
]


@pytest.mark.parametrize("lora", [None, 4])
@pytest.mark.parametrize(("world_size", "parallel"), FITTING)
def test_layouts_that_fit_are_taken_whatever_the_row_length_with_adapters_too(
    npu_config, npu_sft_config, world_size, parallel, lora
):
    """The row length comes from the data here: a plan could not know it."""
    config = changed(changed(npu_config, "lora", rank=lora), "parallel_config", **parallel)
    assert check_grpo_inputs(config, world_size).row_lengths == (32,)
    sft = changed(changed(npu_sft_config, "parallel_config", **parallel), "training", micro_batch_size=4)
    assert check_offline_inputs(changed(sft, "lora", rank=lora), world_size).row_lengths == (32,)


@pytest.mark.parametrize(
    ("world_size", "parallel", "words"),
    [
        (3, {"model_parallel": 2}, ["3 ranks do not divide", "= 2", "start 4 workers"]),
        (4, {"model_parallel": 4}, ["model_parallel is 4", "2 key/value heads", "set it to one of 1, 2"]),
        (4, {"model_parallel": 2, "data_parallel": 4}, ["makes 8 ranks", "4 were started", "set data_parallel to 2"]),
        (4, {"pipeline_stage": 4, "micro_batch_num": 4}, ["pipeline_stage is 4", "2 layers", "set it to 2"]),
        (
            2,
            {"model_parallel": 2, "micro_batch_num": 3},
            ["'training.micro_batch_size' is 4", "3 equal pipeline micro-batches", "set it to 6"],
        ),
        (2, {"expert_parallel": 2}, ["expert_parallel is 2", "no experts"]),
    ],
)
def test_layouts_that_do_not_fit(npu_config, world_size, parallel, words):
    message = refused(changed(npu_config, "parallel_config", **parallel), world_size)
    for word in words:
        assert word in message


def test_a_tied_model_has_no_pipeline(npu_config, tmp_path):
    tied = {**MODEL, "tie_word_embeddings": True}
    export_hf(random_hf_weights(tied, 0), tied, tmp_path / "tied")
    config = changed(npu_config, "model", path=str(tmp_path / "tied"))
    assert check_grpo_inputs(changed(config, "parallel_config", model_parallel=2), 2)
    message = refused(changed(config, "parallel_config", pipeline_stage=2, micro_batch_num=2), 2)
    assert "tie_word_embeddings" in message and "set it to 1" in message


def test_actor_reference_critic_and_reward_model_are_cut(npu_config, model_dir, tmp_path):
    split = changed(npu_config, "parallel_config", model_parallel=2)
    ppo = changed(split, "algorithm", name="ppo", advantage="gae")
    assert check_grpo_inputs(changed(ppo, "critic", path=str(model_dir)), 2)
    for heads in (4, 1):
        scorer = {**scorer_config(MODEL), "num_attention_heads": heads, "num_key_value_heads": heads}
        export_hf(random_hf_weights(scorer, 0), scorer, tmp_path / f"scorer_{heads}")
    assert check_grpo_inputs(changed(split, "reward", model_path=str(tmp_path / "scorer_4")), 2)
    message = "the model has 1 query heads"
    assert message in refused(changed(split, "reward", model_path=str(tmp_path / "scorer_1")), 2)
    assert message in refused(changed(ppo, "critic", path=str(tmp_path / "scorer_1")), 2)
    assert check_grpo_inputs(changed(split, "algorithm", beta=0.1), 2)


def test_a_critic_that_sees_is_cut(npu_config, tmp_path):
    paths = {
        heads: str(write_tiny_vl(tmp_path / f"sees_{heads}", TinyVl(is_tied=False, heads=heads, kv_heads=heads)))
        for heads in (4, 1)
    }
    config = changed(changed(npu_config, "model", path=paths[4]), "parallel_config", model_parallel=2)
    ppo = changed(config, "algorithm", name="ppo", advantage="gae")
    check_layout(changed(ppo, "critic", path=paths[4]), (32,), 2)
    with pytest.raises(UserError, match="the model has 1 query heads"):
        check_layout(changed(ppo, "critic", path=paths[1]), (32,), 2)


def test_shards_of_another_layout_are_refused_by_the_hash_of_their_strategy(npu_config, model_dir, tmp_path):
    shard_directory(model_dir, tmp_path / "mp2", parallel="dp=1,mp=2,vocab_emb_dp=1")
    config = changed(npu_config, "model", path=str(tmp_path / "mp2"))
    config = changed(config, "parallel_config", model_parallel=2)
    assert check_grpo_inputs(config, 2)
    message = refused(config, 4)
    assert "was made for another config" in message and "dp=2,mp=2" in message
    assert "was made for another config" in refused(changed(config, "parallel_config", vocab_emb_dp=False), 2)
    (tmp_path / "mp2" / "strategy" / "merged.ckpt").write_bytes(b"another")
    assert "damaged or of another config" in refused(config, 2)


def test_the_cpu_trains_in_data_parallel_only(npu_config, npu_sft_config):
    config = changed(npu_config, "run", device="cpu")
    message = "'parallel_config.model_parallel' is 2, but run.device=cpu trains in data parallel only: set it to 1"
    assert message in refused(changed(config, "parallel_config", model_parallel=2), 2)
    assert "enable_parallel_optimizer" in refused(changed(config, "parallel_config", enable_parallel_optimizer=True), 2)
    sft = changed(changed(npu_sft_config, "run", device="cpu"), "parallel_config", model_parallel=2)
    with pytest.raises(UserError, match=message):
        check_offline_inputs(sft, 2)


@pytest.mark.parametrize(
    ("parallel", "training", "words"),
    [
        ({"model_parallel": 4}, {}, "the model has 2 key/value heads: set it to one of"),
        (
            {"pipeline_stage": 2, "micro_batch_num": 2},
            {"micro_batch_size": 3},
            "'training.micro_batch_size' is 3, which .* into parallel_config.micro_batch_num = 2 .* set it to 4",
        ),
        (
            {"context_parallel": 4},
            {"sequence_lengths": (42,)},
            "'training.sequence_lengths' has 42, which does not divide over 4 ranks .* set it to 44",
        ),
        ({"model_parallel": 3}, {}, "4 ranks do not divide by"),
    ],
)
def test_fine_tuning_refuses_layouts_that_do_not_fit_in_one_line(npu_sft_config, parallel, training, words):
    config = changed(changed(npu_sft_config, "parallel_config", **parallel), "training", **training)
    with pytest.raises(UserError, match=words) as caught:
        check_offline_inputs(config, 4)
    assert "\n" not in str(caught.value)
