"""The algorithms by name: what each sets in the `algorithm` section where the user sets nothing."""

from typing import Any

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
