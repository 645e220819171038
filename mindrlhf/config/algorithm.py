"""The sections of the objective: `algorithm`, `distillation`, `correction` and `critic`, and their presets."""

from dataclasses import dataclass
from typing import Any

from mindrlhf.algorithms import advantages, policy_losses
from mindrlhf.algorithms.aggregation import MODES as AGGREGATIONS
from mindrlhf.algorithms.kl_control import ESTIMATORS as KL_ESTIMATORS
from mindrlhf.config.keys import key

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
    "icepop": {"weight": "token", "max_weight": 5.0, "mask": "token", "mask_low": 0.5, "mask_high": 5.0},
}

OTHERS = "others"  # what metrics call all sources without a teacher of their own


@dataclass(frozen=True)
class AlgorithmSection:
    """The objective. `name` sets the keys that are not given as its paper does; see docs/algorithms.md."""

    name: str = key("grpo", "a whole algorithm; the defaults below are those of grpo", choices=tuple(PRESETS))
    num_generations: int = key(8, "samples per prompt: the group that advantages compare", minimum=1)
    advantage: str = key("grpo", "advantage estimator", choices=advantages.names())
    scale_rewards: bool = key(
        True, "divide advantages by the group's standard deviation (GRPO); false leaves the mean-only form (Dr. GRPO)"
    )
    pass_k: int = key(4, "the k of the estimator pass_at_k", minimum=1)
    gamma: float = key(1.0, "discount of the estimator gae, per token", minimum=0, maximum=1)
    gae_lambda: float = key(0.95, "lambda of the estimator gae", minimum=0, maximum=1)
    whiten_advantages: bool = key(True, "give the advantages of the estimator gae mean 0 and standard deviation 1")
    distill_reward_weight: float = key(
        0.0, "weight of rewards beside the teacher's verdict in the estimator distill; 0 leaves them out", minimum=0
    )
    distill_top_k: int = key(
        0,
        "words that a teacher finds likeliest, whose probabilities the student learns at each position; 0 learns "
        "from the sampled word alone; see docs/algorithms.md",
        minimum=0,
    )
    loss: str = key("ppo_clip", "policy loss", choices=policy_losses.names())
    aggregation: str = key("token_mean", "how token losses become one number", choices=AGGREGATIONS)
    clip_low: float = key(0.2, "the probability ratio is clipped below at 1 - clip_low", minimum=0, maximum=1)
    clip_high: float = key(0.28, "the probability ratio is clipped above at 1 + clip_high", minimum=0)
    dual_clip: float = key(3.0, "the loss dual_clip bounds the ratio of bad tokens here", minimum=1)
    sapo_tau_positive: float = key(
        1.0, "temperature of the loss sapo where the advantage is positive", minimum=0, exclusive_minimum=True
    )
    sapo_tau_negative: float = key(1.05, "temperature of the loss sapo elsewhere", minimum=0, exclusive_minimum=True)
    mirror_tau: float = key(0.1, "weight of the square that the loss kimi holds a response with", minimum=0)
    beta: float = key(0.0, "weight of the KL term against the reference model; 0 loads no reference model", minimum=0)
    kl_in: str = key("loss", "where the KL term is added", choices=("loss", "reward"))
    kl_estimator: str = key("k3", "estimate of the KL divergence per token", choices=KL_ESTIMATORS)
    kl_unbiased: bool = key(
        False, "weigh the KL estimate in the loss by the probability ratio, which makes its gradient unbiased"
    )
    kl_target: float | None = key(
        None,
        "steer beta so that the KL per token, in nats, comes here; null keeps it",
        minimum=0,
        exclusive_minimum=True,
    )
    kl_gain: float = key(0.1, "how fast beta follows `kl_target`", minimum=0, maximum=1)
    entropy_coefficient: float = key(0.0, "weight of the entropy bonus", minimum=0)
    dynamic_sampling: bool = key(
        False,
        "sample prompts until each group of a step has rewards that differ; what is left over is used in the next step",
    )
    max_oversampling: int = key(
        10, "a step with `dynamic_sampling` samples at most this many times its number of prompts", minimum=1
    )
    overlong_buffer: float = key(
        0.0,
        "last share of `rollout.max_response_length` in which longer responses lose reward, up to `overlong_penalty`; "
        "0 leaves it out",
        minimum=0,
        maximum=1,
    )
    overlong_penalty: float = key(1.0, "what a response at the limit loses", minimum=0)
    overlong_filter: bool = key(False, "leave responses that the limit cut off out of the loss")
    sync_ref_model: bool = key(False, "copy the actor into the reference model every `ref_model_sync_steps` steps")
    ref_model_sync_steps: int = key(64, "steps between two copies", minimum=1)


@dataclass(frozen=True)
class DistillationSection:
    """Several teachers, each for prompts of its own; see docs/algorithms.md."""

    teachers: dict[str, str] = key(
        {},
        "Hugging Face directories of teachers, as `source: directory`; prompts of other sources have "
        "`model.reference_path`, or are refused where that is empty",
        is_model=True,
    )


@dataclass(frozen=True)
class CorrectionSection:
    """Off-policy correction: the generator's kernels, types and with `rollout.ahead` weights are not the trainer's."""

    preset: str = key(
        "default",
        "sets the keys below that are not given as other stacks do under this name; see docs/async.md",
        choices=tuple(CORRECTIONS),
    )
    weight: str = key(
        "auto",
        "truncated importance weights; auto is none where both compute alike (CPU, and no `rollout.ahead`), else "
        "sequence for a loss with a ratio of whole responses and token for others",
        choices=("auto", "none", "token", "sequence"),
    )
    max_weight: float = key(2.0, "where the weights are truncated", minimum=0, exclusive_minimum=True)
    mask: str = key(
        "none",
        "what is left out of the loss when its ratio is outside the bounds: tokens (IcePop), or responses by the "
        "product or the geometric mean of their ratios",
        choices=("none", "token", "sequence", "geometric"),
    )
    mask_low: float = key(0.5, "smallest ratio that the mask keeps", minimum=0)
    mask_high: float = key(5.0, "largest ratio that the mask keeps", minimum=0)
    veto: float = key(0.0, "leave out responses with a token whose ratio is smaller; 0 leaves none out", minimum=0)
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
    end_lr: float | None = key(
        None,
        "learning rate of the critic at the last step, for a schedule that decays; null keeps its `start_lr`",
        minimum=0,
    )
    clip_range: float = key(
        0.2,
        "values that moved further than this within a step are held, in units of the reward; 0 holds none",
        minimum=0,
    )
    warmup_steps: int = key(0, "steps at the start in which only the critic is trained", minimum=0)
