"""Rules between keys. Each message says which value to change, and to what."""

from mindrlhf.algorithms import advantages
from mindrlhf.config.algorithm_checks import check_algorithm
from mindrlhf.config.critic_checks import check_critic
from mindrlhf.config.evaluation_checks import check_evaluation
from mindrlhf.config.memory import check_memory
from mindrlhf.config.model import ModelSection, check_lora
from mindrlhf.config.observe import SINKS, GuardSection, ObserveSection, check_checkpoint, check_profiler
from mindrlhf.config.offline import DpoSection
from mindrlhf.config.reward import RewardSection
from mindrlhf.config.rollout import TCP
from mindrlhf.config.run import RunSection
from mindrlhf.config.schema import DpoConfig, GrpoConfig, RewardModelConfig, SftConfig
from mindrlhf.config.training import FIRST_FIT, OptimizerSection, ParallelSection, resolve_data_parallel
from mindrlhf.errors import Mistakes, UserError

_SPLITTING = tuple(f"parallel_config.{name}" for name in ("model_parallel", "pipeline_stage", "context_parallel"))


def check_grpo(config: GrpoConfig, given: frozenset[str], world_size: int | None) -> None:
    """Check a `mindrlhf train` config; ``given`` are the keys the user changed, ``world_size`` counts ranks if known.

    Raises:
        UserError: all broken rules.
    """
    mistakes = Mistakes()
    check = mistakes.check
    check(_check_parallel, config.parallel_config)
    check(_check_device, config.run, config.model, config.parallel_config)
    check(check_lora, config.lora, given)
    check(_check_adapters_reference, config)
    check(check_memory, config.memory, config.model.recompute, config.run.device, True, not config.rollout.ahead)
    check(check_algorithm, config, given)
    check(check_critic, config, given)
    check(_check_minibatches, config)
    check(_check_packing, config)
    check(_check_row_lengths, config)
    check(_check_ahead, config)
    check(_check_asynchronous, config)
    check(_check_spans, config)
    check(_check_reference, config)
    check(_check_schedule, config.optimizer, given)
    check(_check_rewards, config.reward, given)
    check(check_evaluation, config, given)
    check(_check_drafts, config)
    check(_check_carrier, config)
    check(_check_guard, config.guard)
    check(check_checkpoint, config.checkpoint, True)
    check(_check_trackers, config.observe, given)
    check(_check_tools, config, given)
    check(_check_msprobe, config, given)
    waits = "with rollout.ahead servers work on several steps at once" if config.rollout.ahead else ""
    check(check_profiler, config.profiler, given, config.run.max_steps, world_size, waits)
    if world_size is not None:
        check(resolve_data_parallel, config.parallel_config, world_size, needs=_SPLITTING)
    mistakes.raise_if_any()


def check_sft(config: SftConfig, given: frozenset[str], world_size: int) -> None:
    """Check a `mindrlhf sft` config; arguments and errors as for the other."""
    mistakes = _check_common(config, given, world_size)
    for name, what in (("model.reference_path", "reference model"), ("observe.samples_per_step", "samples")):
        if name in given:
            mistakes.add(f"'{name}' is set, but supervised fine-tuning has no {what}: remove it")
    mistakes.check(_check_supervised_rows, config, world_size, needs=_SPLITTING)
    mistakes.raise_if_any()


def check_dpo(config: DpoConfig, given: frozenset[str], world_size: int) -> None:
    """Check a `mindrlhf dpo` config; arguments and errors as for the others."""
    mistakes = _check_preference(config, given, world_size)
    mistakes.check(_check_dpo_loss, config.dpo)
    mistakes.raise_if_any()


def check_reward_model(config: RewardModelConfig, given: frozenset[str], world_size: int) -> None:
    """Check a `mindrlhf reward-model` config; arguments and errors as for the others."""
    mistakes = _check_preference(config, given, world_size)
    if "model.reference_path" in given:
        mistakes.add("'model.reference_path' is set, but a reward model is trained without reference: remove it")
    mistakes.raise_if_any()


def _check_common(
    config: SftConfig | DpoConfig | RewardModelConfig, given: frozenset[str], world_size: int
) -> Mistakes:
    mistakes = Mistakes()
    mistakes.check(_check_parallel, config.parallel_config)
    mistakes.check(_check_device, config.run, config.model, config.parallel_config)
    mistakes.check(check_lora, config.lora, given)
    has_head = not isinstance(config, RewardModelConfig)
    mistakes.check(check_memory, config.memory, config.model.recompute, config.run.device, has_head, False)
    mistakes.check(_check_schedule, config.optimizer, given)
    mistakes.check(check_checkpoint, config.checkpoint)
    no_servers = "this run samples nothing, so it has no rollout server"
    mistakes.check(check_profiler, config.profiler, given, config.run.max_steps, world_size, no_servers)
    mistakes.check(_check_trackers, config.observe, given)
    return mistakes


def _check_preference(config: DpoConfig | RewardModelConfig, given: frozenset[str], world_size: int) -> Mistakes:
    mistakes = _check_common(config, given, world_size)
    if "observe.samples_per_step" in given:
        mistakes.add("'observe.samples_per_step' is set, but preference learning samples nothing: remove it")
    if config.preference.eval_every_steps and not config.data.eval_file:
        mistakes.add("'preference.eval_every_steps' is set, but there is no data.eval_file to evaluate on: set it")
    mistakes.check(resolve_data_parallel, config.parallel_config, world_size, needs=_SPLITTING)
    return mistakes


def _check_supervised_rows(config: SftConfig, world_size: int) -> None:
    data_parallel = resolve_data_parallel(config.parallel_config, world_size)
    unit = config.supervised.batch_size * data_parallel
    if config.supervised.rows_per_step % unit:
        raise UserError(
            f"'supervised.rows_per_step' is {config.supervised.rows_per_step}, not a multiple of batch_size * ranks "
            f"= {unit}: set it to {-(-config.supervised.rows_per_step // unit) * unit}"
        )


def _check_dpo_loss(dpo: DpoSection) -> None:
    if dpo.loss != "sigmoid" and dpo.label_smoothing:
        raise UserError(
            f"'dpo.label_smoothing' is {dpo.label_smoothing:g}, which loss={dpo.loss} does not have: set it to 0, or "
            "loss to sigmoid"
        )


def _check_adapters_reference(config: GrpoConfig) -> None:
    if config.lora.rank is not None and config.algorithm.sync_ref_model:
        raise UserError(
            "'algorithm.sync_ref_model' is true, but with lora.rank the reference model is the policy without its "
            "adapters: set it to false"
        )


def _check_parallel(parallel: ParallelSection) -> None:
    if parallel.use_seq_parallel and parallel.model_parallel == 1:
        raise UserError(
            "'parallel_config.use_seq_parallel' splits over model_parallel ranks, which is 1: set it to false"
        )
    if parallel.pipeline_stage > 1 and parallel.micro_batch_num < parallel.pipeline_stage:
        raise UserError(
            f"'parallel_config.micro_batch_num' is {parallel.micro_batch_num}, but a pipeline of "
            f"{parallel.pipeline_stage} "
            f"stages needs at least {parallel.pipeline_stage}"
        )


def _check_device(run: RunSection, model: ModelSection, parallel: ParallelSection) -> None:
    if run.device != "cpu":
        return
    mistakes = Mistakes()
    for name in ("param_dtype", "compute_dtype"):
        if getattr(model, name) != "float32":
            mistakes.add(
                f"'model.{name}' is {getattr(model, name)}, but run.device=cpu has float32 kernels only: set float32"
            )
    names = ("model_parallel", "pipeline_stage", "context_parallel", "expert_parallel", "micro_batch_interleave_num")
    for name in names:
        if getattr(parallel, name) != 1:
            mistakes.add(
                f"'parallel_config.{name}' is {getattr(parallel, name)}, but run.device=cpu trains in data parallel "
                "only: set it to 1"
            )
    if parallel.enable_parallel_optimizer:
        mistakes.add("'parallel_config.enable_parallel_optimizer' needs run.device=ascend: set it to false")
    mistakes.raise_if_any()


def _check_minibatches(config: GrpoConfig) -> None:
    training, algorithm = config.training, config.algorithm
    num_samples = training.chunk_size * training.num_rollouts * algorithm.num_generations
    if num_samples % training.num_minibatches:
        raise UserError(
            f"'training.num_minibatches' is {training.num_minibatches}, which does not divide the {num_samples} "
            "samples of a "
            "step (chunk_size * num_rollouts * num_generations)"
        )


def _check_packing(config: GrpoConfig) -> None:
    training = config.training
    if training.packing != FIRST_FIT and not training.pack:
        raise UserError(
            f"'training.packing' is {training.packing}, but training.pack=false puts each sample into its own row: "
            "set pack to true, or packing to first_fit"
        )


def _check_row_lengths(config: GrpoConfig) -> None:
    longest = max(config.training.row_lengths, default=0)
    if longest and longest <= config.rollout.max_response_length:
        raise UserError(
            f"'training.row_lengths' ends at {longest}, which leaves no room for a prompt beside "
            f"rollout.max_response_length = {config.rollout.max_response_length}: raise the one or lower the other"
        )


def _check_reference(config: GrpoConfig) -> None:
    if config.model.reference_path and config.algorithm.beta == 0:
        raise UserError(
            "'model.reference_path' is set, but algorithm.beta is 0, so no reference model is loaded: remove it or "
            "raise beta"
        )


def _check_ahead(config: GrpoConfig) -> None:
    ahead, num_steps = config.rollout.ahead, config.run.max_steps
    if not ahead:
        return
    if config.rollout.board_gib:
        raise UserError(
            f"'rollout.board_gib' is {config.rollout.board_gib:g}, but with rollout.ahead = {ahead} new weights wait "
            "until the servers are done, so that they need room for all of them: set it to 0"
        )
    if 0 < num_steps <= ahead:
        raise UserError(
            f"'rollout.ahead' is {ahead}, but the run ends after run.max_steps = {num_steps} steps, so that all "
            f"samples would be of the starting weights: set it below {num_steps} (1 is usual)"
        )
    if config.reward.model_path:
        raise UserError(
            f"'rollout.ahead' is {ahead}, but the reward model of reward.model_path scores on the training ranks, "
            "which are busy meanwhile: set it to 0, or score with verifiers"
        )
    if config.run.device == "ascend" and "ASCEND_RT_VISIBLE_DEVICES" not in config.rollout.env:
        raise UserError(
            f"'rollout.ahead' is {ahead}, so that the server generates while the ranks train, and needs devices of its "
            "own: name them in rollout.env as ASCEND_RT_VISIBLE_DEVICES, or set it to 0"
        )


def _check_asynchronous(config: GrpoConfig) -> None:
    rollout = config.rollout
    if not rollout.asynchronous:
        if rollout.replay_order:
            raise UserError(
                f"'rollout.replay_order' is {rollout.replay_order}, which repeats asynchronous runs only: set "
                "rollout.asynchronous to true, or remove it"
            )
        return
    for name, usual in (("ahead", 2), ("span_tokens", max(1, rollout.max_response_length // 8))):
        if not getattr(rollout, name):
            raise UserError(
                f"'rollout.asynchronous' is true, which needs rollout.{name}, and that is 0: set it ({usual} is usual)"
            )


def _check_spans(config: GrpoConfig) -> None:
    span = config.rollout.span_tokens
    if not span:
        return
    if span >= config.rollout.max_response_length:
        raise UserError(
            f"'rollout.span_tokens' is {span}, but no response is longer than rollout.max_response_length = "
            f"{config.rollout.max_response_length}: set it lower, or to 0"
        )
    others = {
        "rollout.ahead (without rollout.asynchronous)": config.rollout.ahead > 0 and not config.rollout.asynchronous,
        "algorithm.dynamic_sampling": config.algorithm.dynamic_sampling,
        "tools.names": bool(config.tools.names),
        "tools.environment": bool(config.tools.environment),
        "algorithm.advantage: remax": "baselines" in advantages.find(config.algorithm.advantage).NEEDS,
    }
    for name, is_set in others.items():
        if is_set:
            raise UserError(f"'rollout.span_tokens' is {span}, which does not work with {name}: leave one of them out")


def _check_schedule(optimizer: OptimizerSection, given: frozenset[str]) -> None:
    decays = optimizer.lr_schedule != "constant"
    if decays and optimizer.end_lr is None:
        raise UserError(f"'optimizer.end_lr' is needed with lr_schedule={optimizer.lr_schedule}: set it (0 is usual)")
    if not decays and optimizer.end_lr is not None and optimizer.end_lr != optimizer.start_lr:
        raise UserError(
            f"'optimizer.end_lr' is {optimizer.end_lr:g}, but lr_schedule=constant never reaches it: set "
            "lr_schedule to linear or cosine"
        )


def _check_drafts(config: GrpoConfig) -> None:
    rollout, count = config.rollout, config.rollout.draft_tokens
    judged = "vLLM itself would judge the guesses, and its log-probabilities were found wrong then"
    rounded = "tokens that are checked together would be rounded otherwise than one by one"
    reasons = {
        f"run.device={config.run.device}": (config.run.device != "cpu", judged),
        f"rollout.tensor_parallel={rollout.tensor_parallel}": (rollout.tensor_parallel > 1, judged),
        f"rollout.dtype={rollout.dtype}": (rollout.dtype != "float32", rounded),
    }
    for name, (is_set, reason) in reasons.items():
        if count and is_set:
            raise UserError(f"'rollout.draft_tokens' is {count}, but with {name} {reason}: set it to 0")


def _check_carrier(config: GrpoConfig) -> None:
    if config.rollout.weights_carrier != TCP and config.run.device == "cpu":
        raise UserError(
            f"'rollout.weights_carrier' is {config.rollout.weights_carrier}, but on run.device=cpu every node has the "
            "whole model, and ranks have no network of their own: set tcp"
        )


def _check_rewards(reward: RewardSection, given: frozenset[str]) -> None:
    mistakes = Mistakes()
    count, weights = len(reward.verifier_function), len(reward.verifier_weight)
    if not count and not reward.model_path:
        mistakes.add(
            "'reward.verifier_function' is empty: name at least one verifier, such as accuracy_reward, or set "
            "reward.model_path to a reward model"
        )
    if "reward.model_weight" in given and not reward.model_path and reward.model_weight != 1:
        mistakes.add("'reward.model_weight' is set, but there is no reward.model_path: set it, or remove the weight")
    if weights and weights != count:
        mistakes.add(f"'reward.verifier_weight' has {weights} values for {count} verifiers: give one weight for each")
    mistakes.raise_if_any()


def _check_guard(guard: GuardSection) -> None:
    mistakes = Mistakes()
    if 0 < guard.max_rollout_diff < guard.warn_rollout_diff:
        mistakes.add(
            f"'guard.warn_rollout_diff' is {guard.warn_rollout_diff:g}, above guard.max_rollout_diff = "
            f"{guard.max_rollout_diff:g}, where the run stops: lower the first, or raise the second"
        )
    if 0 < guard.grad_spike_factor <= 1:
        mistakes.add(
            f"'guard.grad_spike_factor' is {guard.grad_spike_factor:g}, which every other update exceeds: raise it "
            "above 1, or set it to 0"
        )
    mistakes.raise_if_any()


def _check_tools(config: GrpoConfig, given: frozenset[str]) -> None:
    tools, longest = config.tools, config.rollout.max_response_length
    unused = sorted(name for name in given - {"tools.names", "tools.environment"} if name.startswith("tools."))
    if tools.names and tools.environment:
        raise UserError("'tools.environment' and tools.names are both set: leave one of them out")
    if unused and not (tools.names or tools.environment):
        raise UserError(f"'{unused[0]}' is set, but tools.names is empty: name the tools, or remove the key")
    if (tools.names or tools.environment) and tools.max_response_tokens >= longest:
        raise UserError(
            f"'tools.max_response_tokens' is {tools.max_response_tokens}, but rollout.max_response_length = {longest} "
            "holds all turns and answers of a response: lower the one or raise the other"
        )


def _check_trackers(observe: ObserveSection, given: frozenset[str]) -> None:
    trackers = [sink for sink in SINKS if sink != "tensorboard"]
    if not set(trackers) & set(observe.sinks):
        for name in ("observe.project", "observe.run_name"):
            if name in given:
                raise UserError(
                    f"'{name}' is set, but no tracker has a use for it: add one of {', '.join(trackers)} to "
                    "observe.sinks, or remove it"
                )


def _check_msprobe(config: GrpoConfig, given: frozenset[str]) -> None:
    section = config.msprobe
    unused = sorted(name for name in given if name.startswith("msprobe.") and name != "msprobe.enabled")
    if unused and not section.enabled and "msprobe.enabled" not in given:
        raise UserError(f"'{unused[0]}' is set, but msprobe.enabled is not: set it to true, or remove the key")
    if section.last_step < section.first_step:
        raise UserError(
            f"'msprobe.last_step' is {section.last_step}, before msprobe.first_step = {section.first_step}: raise the "
            "one or lower the other"
        )
    if not section.stages:
        raise UserError("'msprobe.stages' is empty: name at least one, or set msprobe.enabled to false")
