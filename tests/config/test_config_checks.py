"""Each rule between keys: what it refuses, what its message says to do, and that doing so satisfies it."""

import pytest

from mindrlhf.config.load import load_grpo_config, load_sft_config
from mindrlhf.errors import UserError

BASE = ["model.path=m", "data.train_file=p", "data.tokenizer_dir=t", "reward.verifier_function=accuracy_reward"]
ASCEND = ["run.device=ascend"]


@pytest.fixture
def empty(tmp_path):
    path = tmp_path / "empty.yaml"
    path.write_text("")
    return path


def test_data_parallel_is_what_the_world_size_leaves(empty):
    layout = ["run.device=ascend", "parallel_config.model_parallel=2", "parallel_config.pipeline_stage=2"]
    layout += ["parallel_config.micro_batch_num=2"]
    load_grpo_config(empty, [*BASE, *layout, "parallel_config.data_parallel=3"], world_size=12)
    with pytest.raises(UserError, match="set data_parallel to 2, or start 12 workers"):
        load_grpo_config(empty, [*BASE, *layout, "parallel_config.data_parallel=3"], world_size=8)


def test_supervised_rows_divide_among_ranks_and_micro_batches(empty):
    base = BASE[:3]
    load_sft_config(empty, [*base, "training.rows_per_step=32", "training.micro_batch_size=8"], world_size=4)
    with pytest.raises(UserError, match=r"'training.rows_per_step' is 36, .* = 32: set it to 64"):
        load_sft_config(empty, [*base, "training.rows_per_step=36", "training.micro_batch_size=8"], world_size=4)


def test_supervised_training_has_no_reference(empty):
    with pytest.raises(UserError, match="'model.reference_path' is set, but supervised"):
        load_sft_config(empty, [*BASE[:3], "model.reference_path=r"])
