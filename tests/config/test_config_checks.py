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


# The overrides that break a rule; words of the message; overrides that mend it; number of ranks.
RULES = {
    "bfloat16 parameters on CPU": (
        ["model.param_dtype=bfloat16"],
        ["'model.param_dtype' is bfloat16", "set float32"],
        ["model.param_dtype=float32"],
        1,
    ),
    "bfloat16 compute on CPU": (
        ["model.compute_dtype=bfloat16"],
        ["'model.compute_dtype' is bfloat16", "set float32"],
        ["model.compute_dtype=float32"],
        1,
    ),
    "guessed tokens in bfloat16": (
        ["rollout.draft_tokens=4", "rollout.dtype=bfloat16"],
        ["'rollout.draft_tokens' is 4", "rollout.dtype=bfloat16", "set it to 0"],
        ["rollout.draft_tokens=4", "rollout.dtype=float32"],
        1,
    ),
    "model parallel on CPU": (
        ["parallel_config.model_parallel=2"],
        ["'parallel_config.model_parallel' is 2", "set it to 1"],
        ["parallel_config.model_parallel=1"],
        2,
    ),
    "parallel optimizer on CPU": (
        ["parallel_config.enable_parallel_optimizer=true"],
        ["'parallel_config.enable_parallel_optimizer' needs run.device=ascend", "set it to false"],
        ["parallel_config.enable_parallel_optimizer=false"],
        1,
    ),
    "sequence parallel without model parallel": (
        [*ASCEND, "parallel_config.use_seq_parallel=true"],
        ["'parallel_config.use_seq_parallel'", "model_parallel ranks, which is 1", "set it to false"],
        ["parallel_config.use_seq_parallel=false"],
        1,
    ),
    "a pipeline with too few micro-batches": (
        [*ASCEND, "parallel_config.pipeline_stage=4", "parallel_config.micro_batch_num=2"],
        ["'parallel_config.micro_batch_num' is 2", "needs at least 4"],
        ["parallel_config.micro_batch_num=4"],
        4,
    ),
    "ranks that do not divide": (
        [*ASCEND, "parallel_config.model_parallel=4"],
        ["6 ranks do not divide", "= 4", "start 8 workers"],
        ["parallel_config.model_parallel=3"],
        6,
    ),
    "a layout of another size": (
        ["parallel_config.data_parallel=4"],
        ["'parallel_config.data_parallel' is 4", "2 were started", "set data_parallel to 2", "start 4 workers"],
        ["parallel_config.data_parallel=2"],
        2,
    ),
    "a group of one": (
        ["algorithm.num_generations=1"],
        ["'algorithm.num_generations' is 1", "set it to 2 or more"],
        ["algorithm.num_generations=2"],
        1,
    ),
    "syncing no reference": (
        ["algorithm.sync_ref_model=true"],
        ["'algorithm.sync_ref_model' is true", "set beta above 0"],
        ["algorithm.beta=0.01"],
        1,
    ),
    "sync steps without syncing": (
        ["algorithm.ref_model_sync_steps=10", "algorithm.beta=0.01"],
        ["'algorithm.ref_model_sync_steps' is set, but not used", "'algorithm.sync_ref_model' to true"],
        ["algorithm.sync_ref_model=true"],
        1,
    ),
    "a reference without beta": (
        ["model.reference_path=r"],
        ["'model.reference_path' is set", "raise beta"],
        ["algorithm.beta=0.01"],
        1,
    ),
    "minibatches that do not divide": (
        ["training.num_minibatches=5", "training.chunk_size=4"],
        ["'training.num_minibatches' is 5", "does not divide the 32 samples"],
        ["training.num_minibatches=4"],
        1,
    ),
    "rows without room for a prompt": (
        ["training.sequence_lengths=[512]", "rollout.max_response_length=512"],
        ["'training.sequence_lengths' ends at 512", "rollout.max_response_length = 512"],
        ["rollout.max_response_length=256"],
        1,
    ),
    "packing of rows that hold one sample": (
        ["training.pack=false", "training.packing=best_fit"],
        ["'training.packing' is best_fit, but training.pack=false", "set pack to true, or packing to first_fit"],
        ["training.pack=true"],
        1,
    ),
    "a decay to nowhere": (
        ["optimizer.lr_schedule=cosine"],
        ["'optimizer.end_lr' is needed with lr_schedule=cosine"],
        ["optimizer.end_lr=0"],
        1,
    ),
    "an end that is never reached": (
        ["optimizer.end_lr=1e-7"],
        ["'optimizer.end_lr' is 1e-07", "set lr_schedule to linear or cosine"],
        ["optimizer.lr_schedule=linear"],
        1,
    ),
    "a momentum that nothing reads": (
        ["optimizer.momentum=0.9"],
        ["'optimizer.momentum' is 0.9, which type=adamw does not read", "set type to muon"],
        ["optimizer.type=muon"],
        1,
    ),
    "no verifier": (
        ["reward.verifier_function=[]"],
        ["'reward.verifier_function' is empty"],
        ["reward.verifier_function=format_reward"],
        1,
    ),
    "neither verifier nor reward model": (
        ["reward.verifier_function=[]"],
        ["'reward.verifier_function' is empty", "set reward.model_path"],
        ["reward.model_path=r"],
        1,
    ),
    "samples of the starting weights only": (
        ["rollout.off_policy_steps=2", "run.max_steps=2"],
        ["'rollout.off_policy_steps' is 2", "run.max_steps = 2", "set it below 2"],
        ["run.max_steps=3"],
        1,
    ),
    "steps ahead below 0": (
        ["rollout.off_policy_steps=-1"],
        ["'rollout.off_policy_steps' is -1", "at least 0"],
        ["rollout.off_policy_steps=0"],
        1,
    ),
    "spans longer than responses": (
        ["rollout.segment_tokens=512"],
        ["'rollout.segment_tokens' is 512", "rollout.max_response_length = 512", "set it lower"],
        ["rollout.segment_tokens=128"],
        1,
    ),
    "guesses that vLLM would judge": (
        ["rollout.draft_tokens=4", "rollout.tensor_parallel=2"],
        ["'rollout.draft_tokens' is 4", "rollout.tensor_parallel=2", "set it to 0"],
        ["rollout.tensor_parallel=1"],
        1,
    ),
    "weights by a network that CPUs do not have": (
        ["rollout.weights_transport=collectives"],
        ["'rollout.weights_transport' is collectives", "run.device=cpu", "set tcp"],
        ["rollout.weights_transport=tcp"],
        1,
    ),
    "an agent and tools": (
        ["tools.names=calculator", "tools.agent=sh a.sh"],
        ["'tools.agent' and tools.names are both set"],
        ["tools.agent=''"],
        1,
    ),
    "an agent's limit without an agent": (
        ["tools.agent_timeout_s=5"],
        ["'tools.agent_timeout_s' is set, but tools.agent is empty"],
        ["tools.agent=sh a.sh"],
        1,
    ),
    "tools and an environment": (
        ["tools.names=calculator", "tools.environment=gymnasium"],
        ["'tools.environment' and tools.names are both set"],
        ["tools.environment=''"],
        1,
    ),
    "bounds of no spans": (
        ["rollout.max_segments=3"],
        ["'rollout.max_segments' is set", "rollout.segment_tokens above 0"],
        ["rollout.segment_tokens=128"],
        1,
    ),
    "asynchronous sampling in step": (
        ["rollout.asynchronous=true", "rollout.segment_tokens=64"],
        ["'rollout.asynchronous' is true, which needs rollout.off_policy_steps", "2 is usual"],
        ["rollout.off_policy_steps=2"],
        1,
    ),
    "asynchronous sampling of whole responses": (
        ["rollout.asynchronous=true", "rollout.off_policy_steps=2"],
        ["needs rollout.segment_tokens, and that is 0", "64 is usual"],
        ["rollout.segment_tokens=64"],
        1,
    ),
    "in flight by the bound": (
        ["rollout.asynchronous=true", "rollout.off_policy_steps=2", "rollout.segment_tokens=64", "rollout.in_flight=2"],
        ["'rollout.in_flight' is set", "without rollout.asynchronous"],
        ["rollout.in_flight=1.5"],
        1,
    ),
    "an order that nothing reads": (
        ["rollout.replay_order=runs/other"],
        ["'rollout.replay_order' is ", "repeats asynchronous runs only"],
        ['rollout.replay_order=""'],
        1,
    ),
    "a reward model that is busy when groups are chosen": (
        ["rollout.off_policy_steps=1", "reward.model_path=r", "algorithm.dynamic_sampling=true"],
        ["'algorithm.dynamic_sampling' = true does not go with 'reward.model_path' = r and", "score with verifiers"],
        ["rollout.off_policy_steps=0"],
        1,
    ),
    "devices that are busy": (
        ["rollout.off_policy_steps=1", "run.device=ascend"],
        ["'rollout.off_policy_steps' is 1", "devices of its own", "ASCEND_RT_VISIBLE_DEVICES"],
        ["rollout.env={ASCEND_RT_VISIBLE_DEVICES: 8}"],
        1,
    ),
    "a rollout in int8": (
        ["rollout.dtype=int8"],
        ["'rollout.dtype' is int8", "weight_scale and weight_offset", "correction.weight", "set it to bfloat16"],
        ["rollout.dtype=bfloat16"],
        1,
    ),
    "the weight of no reward model": (
        ["reward.model_weight=0.5"],
        ["'reward.model_weight' is set", "no reward.model_path"],
        ["reward.model_path=r"],
        1,
    ),
    "accuracy by a reward model that is not there": (
        ["data.eval_file=e", "evaluation.verifier=reward_model"],
        ["'evaluation.verifier' is 'reward_model'", "(accuracy_reward)"],
        ["reward.model_path=r"],
        1,
    ),
    "weights that do not match": (
        ["reward.verifier_weight=1.0,0.5"],
        ["'reward.verifier_weight' has 2 values for 1 verifiers"],
        ["reward.verifier_weight=1.0"],
        1,
    ),
    "accuracy of another verifier": (
        ["data.eval_file=e", "evaluation.verifier=format_reward"],
        ["'evaluation.verifier' is 'format_reward'", "(accuracy_reward)"],
        ["evaluation.verifier=accuracy_reward"],
        1,
    ),
    "a verifier of no set": (
        ["data.eval_file=e", "evaluation.sets={hard: h}", "evaluation.verifiers={easy: accuracy_reward}"],
        ["'evaluation.verifiers' names the set 'easy'", "evaluation.sets has hard"],
        ["evaluation.verifiers={hard: accuracy_reward}"],
        1,
    ),
    "a set's unknown verifier": (
        ["data.eval_file=e", "evaluation.sets={hard: h}", "evaluation.verifiers={hard: format_reward}"],
        ["'evaluation.verifiers' has 'format_reward' for hard", "(accuracy_reward)"],
        ["evaluation.verifiers={hard: accuracy_reward}"],
        1,
    ),
    "a best model by nothing that is measured": (
        ["data.eval_file=e", "evaluation.patience=2", "evaluation.best_by=f1"],
        ["'evaluation.best_by' is 'f1'", "accuracy or pass@k"],
        ["evaluation.best_by=accuracy"],
        1,
    ),
    "a best model by a set that is not there": (
        ["data.eval_file=e", "evaluation.patience=2", "evaluation.best_by=hard/accuracy"],
        ["'evaluation.best_by' names the set 'hard'", "evaluation.sets has none"],
        ["evaluation.sets={hard: h}"],
        1,
    ),
    "a best model by pass@1": (
        ["data.eval_file=e", "checkpoint.keep_best=true", "evaluation.best_by=pass@k"],
        ["'evaluation.best_by' is 'pass@k'", "evaluation.num_samples 1"],
        ["evaluation.num_samples=4"],
        1,
    ),
    "a best model that nobody asks for": (
        ["data.eval_file=e", "evaluation.best_by=pass@k", "evaluation.num_samples=2"],
        ["'evaluation.best_by' is 'pass@k'", "checkpoint.keep_best or evaluation.patience"],
        ["checkpoint.keep_best=true"],
        1,
    ),
    "patience without evaluations": (
        ["data.eval_file=e", "evaluation.every_steps=0", "evaluation.patience=3"],
        ["'evaluation.patience' is 3", "nothing is evaluated on the way"],
        ["evaluation.every_steps=5"],
        1,
    ),
    "evaluation of nothing": (
        ["evaluation.every_steps=5"],
        ["'evaluation.every_steps' is set", "no data.eval_file"],
        ["data.eval_file=e"],
        1,
    ),
}


@pytest.mark.parametrize("rule", RULES)
def test_a_broken_rule_names_the_key_and_the_fix_that_mends_it(empty, rule):
    broken, words, mend, world_size = RULES[rule]
    with pytest.raises(UserError) as failure:
        load_grpo_config(empty, [*BASE, *broken], world_size=world_size)
    message = str(failure.value)
    assert "\n" not in message
    for word in words:
        assert word in message
    load_grpo_config(empty, [*BASE, *broken, *mend], world_size=world_size)


def test_data_parallel_is_what_the_world_size_leaves(empty):
    layout = ["run.device=ascend", "parallel_config.model_parallel=2", "parallel_config.pipeline_stage=2"]
    layout += ["parallel_config.micro_batch_num=2"]
    load_grpo_config(empty, [*BASE, *layout, "parallel_config.data_parallel=3"], world_size=12)
    with pytest.raises(UserError, match="set data_parallel to 2, or start 12 workers"):
        load_grpo_config(empty, [*BASE, *layout, "parallel_config.data_parallel=3"], world_size=8)


def test_supervised_rows_divide_among_ranks_and_micro_batches(empty):
    base = BASE[:3]
    load_sft_config(empty, [*base, "supervised.rows_per_step=32", "supervised.micro_batch_size=8"], world_size=4)
    with pytest.raises(UserError, match=r"'supervised.rows_per_step' is 36, .* = 32: set it to 64"):
        load_sft_config(empty, [*base, "supervised.rows_per_step=36", "supervised.micro_batch_size=8"], world_size=4)


def test_supervised_training_has_no_reference(empty):
    with pytest.raises(UserError, match="'model.reference_path' is set, but supervised"):
        load_sft_config(empty, [*BASE[:3], "model.reference_path=r"])
