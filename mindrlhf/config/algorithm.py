"""The sections of the objective: `algorithm`, `correction` and `critic`, and their presets."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mindrlhf.algorithms import advantages, clip_cov, policy_losses
from mindrlhf.algorithms.aggregation import MODES as AGGREGATIONS
from mindrlhf.algorithms.kl_control import ESTIMATORS as KL_ESTIMATORS
from mindrlhf.algorithms.kl_control import UNBIASED_ESTIMATORS
from mindrlhf.algorithms.options import Option, chosen, mistake
from mindrlhf.config.derived import correction_weight, has_older_samples, is_corrected, needs_critic
from mindrlhf.config.keys import RunConfig, key
from mindrlhf.errors import Rules

# Preset -> keys of `algorithm` that differ from the defaults of the section, which are GRPO's.
PRESETS: dict[str, dict[str, Any]] = {
    "grpo": {},
    # Schulman et al. 2017 (arXiv:1707.06347), with the KL of Ziegler et al. 2019 (arXiv:1909.08593), section 2.1
    "ppo": {"advantage": "gae", "clip_high": 0.2, "kl_in": "reward", "kl_estimator": "k1"},
    # Liu et al. 2025 (arXiv:2503.20783)
    "dr_grpo": {"advantage": "dr_grpo", "aggregation": "sequence_sum", "clip_high": 0.2},
    # Yu et al. 2025 (arXiv:2503.14476), section 4.1
    "dapo": {
        "clip_low": 0.2,
        "clip_high": 0.28,
        "dynamic_sampling": True,
        "overlong_buffer": 0.2,
        "overlong_filter": True,
    },
    # Zheng et al. 2025 (arXiv:2507.18071), section 5.1
    "gspo": {"loss": "gspo", "aggregation": "sequence_mean", "clip_low": 3e-4, "clip_high": 4e-4},
    # MiniMax-M1 (arXiv:2506.13585), section 3.1
    "cispo": {"loss": "cispo", "clip_low": 1.0, "clip_high": 4.0},
    # Gao et al. 2025 (arXiv:2511.20347)
    "sapo": {"loss": "sapo", "aggregation": "sequence_mean"},
    # Liu et al. 2026 (arXiv:2602.05261), section 5.1: GSPO whose responses count by their lengths; the constant length
    # that `sequence_sum` divides by is a factor of the learning rate
    "luspo": {"loss": "gspo", "aggregation": "sequence_sum", "clip_low": 2e-3, "clip_high": 2.5e-3},
    # Zhao et al. 2025 (arXiv:2507.20673)
    "gmpo": {"loss": "gmpo", "aggregation": "sequence_mean", "clip_low": 0.4, "clip_high": 0.4},
    # Qi et al. 2026 (arXiv:2602.04879)
    "dppo": {"loss": "dppo_tv", "clip_low": 0.15, "clip_high": 0.15},
    # Shen et al. 2026 (arXiv:2602.10693)
    "vespo": {"loss": "vespo"},
    # Ahmadian et al. 2024 (arXiv:2402.14740)
    "rloo": {
        "advantage": "rloo",
        "loss": "sequence_clip",
        "aggregation": "sequence_mean",
        "clip_high": 0.2,
        "kl_in": "reward",
        "kl_estimator": "k1",
    },
    # Hu et al. 2025 (arXiv:2501.03262)
    "reinforce_pp": {"advantage": "reinforce_pp", "clip_high": 0.2, "kl_in": "reward", "kl_estimator": "k1"},
    "reinforce_pp_baseline": {"advantage": "reinforce_pp_baseline", "clip_high": 0.2, "kl_estimator": "k2"},
    # Li et al. 2023 (arXiv:2310.10505)
    "remax": {
        "advantage": "remax",
        "loss": "reinforce",
        "aggregation": "sequence_sum",
        "kl_in": "reward",
        "kl_estimator": "k1",
    },
    # Kimi k1.5 (arXiv:2501.12599)
    "kimi": {"advantage": "dr_grpo", "loss": "kimi", "aggregation": "sequence_sum"},
    # Chen et al. 2025 (arXiv:2508.10751)
    "pass_at_k": {"advantage": "pass_at_k"},
    # Process supervision of Shao et al. 2024 (arXiv:2402.03300), section 4.1.3
    "turn_grpo": {"advantage": "turn_grpo"},
    # Tajwar et al. 2026 (arXiv:2602.02710)
    "maxrl": {"advantage": "maxrl", "clip_high": 0.2},
    # Liu et al. 2026 (arXiv:2601.05242)
    "gdpo": {"advantage": "gdpo", "clip_high": 0.2},
    # Liu et al. 2025 (arXiv:2508.08221): vanilla PPO's loss, a mean over tokens
    "lite_ppo": {"advantage": "lite_ppo", "clip_high": 0.2},
    # Cui et al. 2025 (arXiv:2505.22617), section 4.2
    "clip_cov": {"clip_high": 0.2, "options": {"clip_cov_ratio": 2e-4}},
    # On-policy distillation with reverse KL, Agarwal et al. 2024 (arXiv:2306.13649); the teacher is the reference model
    "distill": {"advantage": "distill", "clip_high": 0.2, "beta": 1.0, "kl_in": "reward", "kl_estimator": "k1"},
}

# Preset of `correction` -> keys of the section that differ from its defaults; the names are verl's but for the last.
CORRECTIONS: dict[str, dict[str, Any]] = {
    "default": {},
    # Decoupled PPO, Hilton et al. 2021 (arXiv:2110.00641), as in AReaL, Fu et al. 2025 (arXiv:2505.24298): the ratio
    # is to the trainer's policy before the update, and a truncated weight corrects for the generator's.
    "decoupled_token_is": {"weight": "token"},
    "decoupled_seq_is": {"weight": "sequence"},
    # PPO with the generator's log-probabilities as the old ones: one ratio for staleness and update together
    "bypass_ppo_clip": {"weight": "none", "bypass": True},
    # Ling Team 2025 (arXiv:2510.18855)
    "icepop": {"weight": "token", "max_weight": 5.0, "mask": "token", "mask_bounds": (0.5, 5.0)},
}

_CLIPPED = "algorithm.loss=" + "|".join(name for name in policy_losses.names() if policy_losses.traits(name).keys)


@dataclass(frozen=True)
class AlgorithmSection:
    """The objective. `name` sets the keys that are not given as its paper does; see docs/algorithms.md."""

    name: str = key(
        "grpo",
        "a whole algorithm: it sets the other keys of `algorithm` that are left out; docs/config.md has grpo's",
        choices=tuple(PRESETS),
    )
    num_generations: int = key(8, "samples per prompt: the group that advantages compare", minimum=1)
    advantage: str = key("grpo", "advantage estimator", choices=advantages.names())
    loss: str = key("ppo_clip", "policy loss", choices=policy_losses.names())
    aggregation: str = key("token_mean", "how token losses become one number", choices=AGGREGATIONS)
    clip_low: float = key(
        0.2,
        "the probability ratio is clipped below at 1 - clip_low; gmpo bounds its logarithm, dppo_tv and dppo_kl the "
        "divergence of a token",
        minimum=0,
        maximum=1,
        read_with=_CLIPPED,
    )
    clip_high: float = key(0.28, "the same above, at 1 + clip_high", minimum=0, read_with=_CLIPPED)
    options: dict[str, float] = key(
        {}, "options of one estimator or loss, in the table below, as `algorithm.options.gamma`"
    )
    beta: float = key(0.0, "weight of the KL term against the reference model; 0 loads no reference model", minimum=0)
    kl_in: str = key("loss", "where the KL term is added", choices=("loss", "reward"), read_with="algorithm.beta")
    kl_estimator: str = key(
        "k3",
        "estimate of the KL divergence per token; k1+ and k3+ are weighed by the probability ratio in the loss, which "
        "makes their gradient unbiased",
        choices=(*KL_ESTIMATORS, *UNBIASED_ESTIMATORS),
        read_with="algorithm.beta",
    )
    kl_target: float | None = key(
        None,
        "steer beta so that the KL per token, in nats, comes here; null keeps it",
        minimum=0,
        exclusive_minimum=True,
        read_with="algorithm.beta",
    )
    entropy_coefficient: float = key(0.0, "weight of the entropy bonus", minimum=0)
    dynamic_sampling: bool = key(
        False,
        "sample prompts until each group of a step has rewards that differ; the rest is carried over to the next step",
    )
    max_oversampling: int = key(
        10, "a step with `dynamic_sampling` samples at most this many times its number of prompts",
        minimum=1,
        read_with="algorithm.dynamic_sampling",
    )
    overlong_buffer: float = key(
        0.0,
        "last share of `rollout.max_response_length` in which longer responses lose reward, 1 at the limit; "
        "0 leaves it out",
        minimum=0,
        maximum=1,
    )
    overlong_filter: bool = key(False, "leave responses that were truncated at the limit out of the loss")
    sync_ref_model: bool = key(
        False, "copy the actor into the reference model every `ref_model_sync_steps` steps", read_with="algorithm.beta"
    )
    ref_model_sync_steps: int = key(64, "steps between two copies", minimum=1, read_with="algorithm.sync_ref_model")


@dataclass(frozen=True)
class CorrectionSection:
    """Off-policy correction: the generator's kernels, types and, with `rollout.off_policy_steps`, weights differ."""

    preset: str = key(
        "default",
        "sets the keys below that are not given as other stacks do under this name; see docs/algorithms.md",
        choices=tuple(CORRECTIONS),
    )
    weight: str = key(
        "auto",
        "truncated importance weights; auto is none where both compute alike (CPU, and no `rollout.off_policy_steps`), "
        "else sequence for a loss with a ratio of whole responses and token for others",
        choices=("auto", "none", "token", "sequence"),
    )
    max_weight: float = key(
        2.0,
        "where the weights are truncated",
        minimum=0,
        exclusive_minimum=True,
        read_with="correction.weight!=none",
    )
    mask: str = key(
        "none",
        "what is left out of the loss when its ratio is outside the bounds: tokens (IcePop), or responses by the "
        "product or the geometric mean of their ratios",
        choices=("none", "token", "sequence", "geometric"),
    )
    mask_bounds: tuple[float, ...] = key(
        (0.5, 5.0), "smallest and largest ratio that the mask keeps", minimum=0, read_with="correction.mask!=none"
    )
    veto: float = key(0.0, "leave out responses with a token whose ratio is smaller; 0 leaves none out", minimum=0)
    off_policy_mask: float = key(
        0.0,
        "leave out responses of negative advantage that became less likely than when they were generated by more than "
        "this, in nats per token; 0 leaves none out",
        minimum=0,
    )
    bypass: bool = key(False, "take the generator's log-probabilities for the old ones, instead of computing those")


@dataclass(frozen=True)
class CriticSection:
    """The critic of `algorithm.advantage: gae`; for batches and further options it has those of the actor."""

    path: str = key(
        "",
        "Hugging Face directory that the critic starts from: a reward model, or a language model such as `model.path`, "
        "whose values begin at 0",
        is_model=True,
    )
    start_lr: float = key(1e-5, "learning rate of the critic, in the place of `optimizer.start_lr`", minimum=0)
    clip_range: float = key(
        0.2,
        "values that moved further than this within a step are held, in units of the reward; 0 holds none",
        minimum=0,
    )
    warmup_steps: int = key(0, "steps at the start in which only the critic is trained", minimum=0)


def algorithm_rules(config: RunConfig) -> Rules:
    algorithm = config.algorithm
    yield from _estimator_rules(algorithm)
    yield from _shape_rules(algorithm)
    yield from _teacher_rules(config)
    yield from _kl_rules(algorithm)
    yield from _level_rules(config)
    yield from _option_rules(algorithm)
    buffer = algorithm.overlong_buffer
    yield buffer and "overlong_penalty" in config.reward.verifier_function, (
        f"'algorithm.overlong_buffer' is {buffer:g}, which takes reward from long responses, and "
        "reward.verifier_function has overlong_penalty, which does so once more: remove it there, or set "
        "overlong_buffer to 0"
    )
    yield algorithm.dynamic_sampling and "group" not in advantages.find(algorithm.advantage).NEEDS, (
        f"'algorithm.dynamic_sampling' drops groups whose samples all earned the same, but the advantages of "
        f"{algorithm.advantage} learn from those too: set it to false, or advantage to grpo"
    )
    yield algorithm.dynamic_sampling and policy_losses.traits(algorithm.loss).ratio == "none", (
        f"'algorithm.dynamic_sampling' leaves samples over for the next step, but the loss {algorithm.loss} has no "
        "ratio that would account for the update in between: set it to false, or loss to ppo_clip"
    )
    yield from _correction_rules(config)


def _estimator_rules(algorithm: AlgorithmSection) -> Rules:
    count, k = algorithm.num_generations, algorithm.options.get("pass_k", 4)
    is_alone = "group" in advantages.find(algorithm.advantage).NEEDS and count < 2
    yield is_alone, (
        f"'algorithm.num_generations' is {count}, but the advantages of {algorithm.advantage} compare the samples of a "
        "group with each other: set it to 2 or more (8 is usual)"
    )
    yield not is_alone and algorithm.advantage == "pass_at_k" and k >= count, (
        f"'algorithm.options' has pass_k {k}, but the best of {k} can only differ within groups of more samples: set "
        f"'algorithm.num_generations' above {k} (it is {count}), or lower pass_k"
    )


def _shape_rules(algorithm: AlgorithmSection) -> Rules:
    """Nothing is taken off the rewards of an estimator that reads more in them than their differences."""
    name, takes_kl = algorithm.advantage, algorithm.kl_in == "reward" and algorithm.beta > 0
    yield name in ("maxrl", "gdpo") and takes_kl, (
        f"'algorithm.kl_in' is reward, but the advantages of {name} read the rewards of verifiers as they are: set it "
        "to loss"
    )
    yield name == "maxrl" and algorithm.overlong_buffer > 0, (
        f"'algorithm.overlong_buffer' is {algorithm.overlong_buffer:g}, but the advantages of maxrl divide by the mean "
        "of successes, from which nothing may be taken: set it to 0"
    )


def _teacher_rules(config: RunConfig) -> Rules:
    """Teachers: one where the advantages need it, with a weight, and not synchronised."""
    algorithm = config.algorithm
    name = algorithm.advantage
    if "teacher" not in advantages.find(name).NEEDS:
        return
    yield not config.model.reference_path, (
        f"'algorithm.advantage' is {name}, but there is no teacher: set 'model.reference_path' to its directory"
    )
    yield algorithm.beta == 0 or algorithm.kl_in != "reward" or algorithm.kl_estimator != "k1", (
        f"'algorithm.advantage' is {name}, whose advantage is the KL against the teacher: set algorithm.beta to 1, "
        "kl_in to reward and kl_estimator to k1, or algorithm.name to distill, which does so"
    )
    yield algorithm.options.get("distill_reward_weight") and algorithm.num_generations < 2, (
        f"'algorithm.num_generations' is {algorithm.num_generations}, but distill_reward_weight compares the samples "
        "of a group: set it to 2 or more"
    )
    yield algorithm.sync_ref_model, (
        "'algorithm.sync_ref_model' is true, which would copy the student over its teacher: set it to false"
    )


def _kl_rules(algorithm: AlgorithmSection) -> Rules:
    name = algorithm.kl_estimator
    yield name in UNBIASED_ESTIMATORS and algorithm.kl_in == "reward", (
        f"'algorithm.kl_estimator' is {name}, but kl_in=reward has no gradient of its own: set kl_in to loss, or "
        f"kl_estimator to {name.removesuffix('+')}"
    )


def _level_rules(config: RunConfig) -> Rules:
    """No advantages that vary within a response under a loss that has one ratio for all of it."""
    algorithm = config.algorithm
    by_turn = bool(config.tools.environment) and algorithm.advantage != "distill"
    per_token = advantages.find(algorithm.advantage).PER_TOKEN
    penalised = algorithm.kl_in == "reward" and algorithm.beta > 0
    varies = per_token == "always" or (per_token == "penalised" and (penalised or by_turn))
    leaves_out = algorithm.options.get("clip_cov_ratio")
    varies |= bool(leaves_out)
    why = (" with KL in the reward" if penalised else " of an environment") if per_token == "penalised" else ""
    why = " with clip_cov_ratio" if leaves_out else why
    yield varies and policy_losses.traits(algorithm.loss).constant_advantage, (
        f"'algorithm.loss' is {algorithm.loss}, which treats a response as one action, but the advantages of "
        f"{algorithm.advantage}{why} differ from token to token: set it to gspo_token or ppo_clip"
    )


def _correction_rules(config: RunConfig) -> Rules:
    correction, loss = config.correction, config.algorithm.loss
    ratio, weight = policy_losses.traits(loss).ratio, correction_weight(config)
    yield ratio == "sequence" and weight == "token", (
        f"'correction.weight' is token, but the loss {loss} has one ratio for a whole response: set it to sequence, or "
        "to auto"
    )
    yield correction.bypass and ratio == "none", (
        f"'correction.bypass' is true, but the loss {loss} has no ratio to old log-probabilities: set it to false"
    )
    yield correction.bypass and (weight != "none" or correction.mask != "none" or correction.veto), (
        "'correction.bypass' is true, so that the generator's log-probabilities are the old ones and there is nothing "
        "to correct: set 'correction.weight' and 'correction.mask' to none and 'correction.veto' to 0"
    )
    older = "off_policy_steps" if config.rollout.off_policy_steps else "segment_tokens"
    yield has_older_samples(config) and not (correction.bypass or is_corrected(config)), (
        f"'correction.weight' is none, but with rollout.{older} nothing would then account for the updates since the "
        "samples were generated: set it to auto, or 'correction.bypass' to true"
    )
    bounds = correction.mask_bounds
    yield correction.mask != "none" and not (len(bounds) == 2 and bounds[0] < bounds[1]), (
        f"'correction.mask_bounds' is {list(bounds)}, but must be two numbers, the smaller first: write [0.5, 5]"
    )


def _option_rules(algorithm: AlgorithmSection) -> Rules:
    """Each option is one of the estimator, of the loss or of Clip-Cov, and within its bounds."""
    loss, file = policy_losses.traits(algorithm.loss), f"algorithms/policy_losses/{algorithm.loss}.py"
    unknown = [name for name in loss.keys if not hasattr(algorithm, name)]
    yield unknown, f"{file}: KEYS has {', '.join(unknown)}, no key of the section algorithm: declare it in OPTIONS"
    if not isinstance(loss.options, Mapping):
        yield True, f"{file}: OPTIONS must be {{name: (default, minimum, maximum, meaning)}}, None where no bound is"
        return
    read = declared_options(algorithm)
    for name, value in algorithm.options.items():
        if name in read:
            why = mistake(name, value, read[name])
            yield why, f"'algorithm.options' has {name} {value}, which {why}"
            continue
        losses = [loss for loss in policy_losses.names() if name in policy_losses.traits(loss).options]
        estimators = [each for each in advantages.names() if name in advantages.find(each).OPTIONS]
        readers = [f"algorithm.loss {loss}" for loss in losses] + [f"algorithm.advantage {each}" for each in estimators]
        instead = f"only {' or '.join(readers)} reads it" if readers else f"options here are {', '.join(sorted(read))}"
        yield True, (
            f"'algorithm.options' has {name}, which neither the loss {algorithm.loss} nor the advantages of "
            f"{algorithm.advantage} read: {instead}; remove it, or change the other"
        )
    bounds = chosen(clip_cov.OPTIONS, algorithm.options)
    yield bounds["clip_cov_low"] > bounds["clip_cov_high"], (
        f"'algorithm.options' has clip_cov_low {bounds['clip_cov_low']:g}, above clip_cov_high = "
        f"{bounds['clip_cov_high']:g}: lower the one or raise the other"
    )


def declared_options(algorithm: AlgorithmSection) -> dict[str, Option]:
    """Return the options that the parts chosen read, by name."""
    estimator, loss = advantages.find(algorithm.advantage), policy_losses.traits(algorithm.loss)
    return {**estimator.OPTIONS, **loss.options, **clip_cov.OPTIONS}


def adapters_reference_rules(config: RunConfig) -> Rules:
    """Rules of a reference model that is the policy without its adapters."""
    yield config.lora.rank is not None and config.algorithm.sync_ref_model, (
        "'algorithm.sync_ref_model' is true, but with lora.rank the reference model is the policy without its "
        "adapters: set it to false"
    )


def critic_rules(config: RunConfig) -> Rules:
    critic, advantage = config.critic, config.algorithm.advantage
    if not needs_critic(config):
        return
    yield not critic.path, (
        f"'critic.path' is empty, but the advantages of {advantage} need a critic: set it to a reward model, or to "
        f"model.path ({config.model.path}) to begin with the actor's layers, or set 'algorithm.advantage' to an "
        "estimator without a critic, such as grpo or reinforce_pp"
    )
