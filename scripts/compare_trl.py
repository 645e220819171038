#!/usr/bin/env python3
"""Losses side by side with Hugging Face TRL's: the same random log-probabilities, values and gradients compared.

Run with the training environment after `bash scripts/setup_benchmark.sh`; TRL's half runs as a child in .venv-bench:

    OMP_NUM_THREADS=1 .venv/bin/python scripts/compare_trl.py
"""

import argparse
import subprocess
import sys
import tempfile
import types
from collections import defaultdict
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
NUM_RESPONSES, MAX_LENGTH = 8, 16
TOLERANCE = 1e-5
TIMEOUT_S = 600

KL = {"beta": 0.04, "kl_estimator": "k3"}
# Name -> TRL's settings; our loss, its options, its aggregation, and what is added to it.
CASES = {
    "GRPO": (
        {"loss_type": "grpo", "epsilon_low": 0.2, "epsilon_high": 0.2},
        ("ppo_clip", {"clip_low": 0.2, "clip_high": 0.2}, "sequence_mean", {}),
    ),
    "GRPO, KL": (
        {"loss_type": "grpo", "epsilon_low": 0.2, "epsilon_high": 0.2, "beta": 0.04},
        ("ppo_clip", {"clip_low": 0.2, "clip_high": 0.2}, "sequence_mean", KL),
    ),
    "GRPO, unbiased KL": (
        {"loss_type": "grpo", "epsilon_low": 0.2, "epsilon_high": 0.2, "beta": 0.04, "use_bias_correction_kl": True},
        ("ppo_clip", {"clip_low": 0.2, "clip_high": 0.2}, "sequence_mean", {**KL, "kl_unbiased": True}),
    ),
    "GRPO, dual clip": (
        {"loss_type": "grpo", "epsilon_low": 0.2, "epsilon_high": 0.2, "delta": 1.5},
        ("dual_clip", {"clip_low": 0.2, "clip_high": 0.2, "dual_clip": 1.5}, "sequence_mean", {}),
    ),
    "Dr. GRPO": (
        {"loss_type": "dr_grpo", "epsilon_low": 0.2, "epsilon_high": 0.2},
        ("ppo_clip", {"clip_low": 0.2, "clip_high": 0.2}, "sequence_sum", {}),
    ),
    "DAPO": (
        {"loss_type": "dapo", "epsilon_low": 0.2, "epsilon_high": 0.28},
        ("ppo_clip", {"clip_low": 0.2, "clip_high": 0.28}, "token_mean", {}),
    ),
    "DAPO, entropy bonus": (
        {"loss_type": "dapo", "epsilon_low": 0.2, "epsilon_high": 0.28, "entropy_coef": 0.01},
        ("ppo_clip", {"clip_low": 0.2, "clip_high": 0.28}, "token_mean", {"entropy_coefficient": 0.01}),
    ),
    "DAPO, token truncation": (
        {"loss_type": "dapo", "epsilon_low": 0.2, "epsilon_high": 0.28, "max_weight": 1.2},
        ("ppo_clip", {"clip_low": 0.2, "clip_high": 0.28}, "token_mean", {"max_weight": 1.2}),
    ),
    "GSPO": (
        {"loss_type": "grpo", "importance_sampling_level": "sequence", "epsilon_low": 0.05, "epsilon_high": 0.07},
        ("gspo", {"clip_low": 0.05, "clip_high": 0.07}, "sequence_mean", {}),
    ),
    "CISPO": (
        {"loss_type": "cispo", "epsilon_low": 1.0, "epsilon_high": 1.5},
        ("cispo", {"clip_low": 1.0, "clip_high": 0.5}, "token_mean", {}),
    ),
    "SAPO": (
        {"loss_type": "sapo", "sapo_temperature_pos": 1.0, "sapo_temperature_neg": 1.05},
        ("sapo", {"sapo_tau_positive": 1.0, "sapo_tau_negative": 1.05}, "sequence_mean", {}),
    ),
    "RLOO": (
        {"trainer": "rloo", "epsilon_low": 0.2, "epsilon_high": 0.2},
        ("sequence_clip", {"clip_low": 0.2, "clip_high": 0.2}, "sequence_mean", {}),
    ),
}

PAIR_BETA = 0.5
# Name -> TRL's losses and their weights; our options. Half of the responses are preferred to the other half.
PAIR_CASES = {
    "DPO, sigmoid": ({"sigmoid": 1.0}, {"loss": "sigmoid"}),
    "DPO, hinge": ({"hinge": 1.0}, {"loss": "hinge"}),
    "DPO, IPO": ({"ipo": 1.0}, {"loss": "ipo"}),
    "DPO, SFT term": ({"sigmoid": 1.0, "sft": 0.7}, {"loss": "sigmoid", "sft_weight": 0.7}),
}


def draw() -> dict[str, np.ndarray]:
    """Return float32 [responses, length] arrays whose ratios stray far enough for every clip to bite."""
    stream = np.random.default_rng(0)
    shape = (NUM_RESPONSES, MAX_LENGTH)
    lengths = stream.integers(1, MAX_LENGTH + 1, NUM_RESPONSES)
    mask = np.arange(MAX_LENGTH) < lengths[:, None]
    logprobs = -stream.exponential(1.0, shape)
    old = logprobs + 0.3 * stream.standard_normal(shape)
    arrays = {
        "mask": mask,
        "logprobs": logprobs,
        "old": old,
        "reference": logprobs + 0.5 * stream.standard_normal(shape),
        "rollout": old + 0.3 * stream.standard_normal(shape),
        "entropy": stream.random(shape),
        "advantages": np.repeat(stream.standard_normal((NUM_RESPONSES, 1)), MAX_LENGTH, axis=1),
    }
    return {name: (array * mask).astype(np.float32) for name, array in arrays.items()}


def trl_side(arrays: dict[str, np.ndarray], settings: dict) -> tuple[float, np.ndarray]:
    """Return TRL's loss and its gradient by the log-probs; its own loss method runs on a stand-in for a trainer."""
    import torch
    from trl import GRPOTrainer, RLOOTrainer

    tensors = {name: torch.tensor(array) for name, array in arrays.items()}
    logprobs = tensors["logprobs"].clone().requires_grad_()
    is_rloo = settings.get("trainer") == "rloo"
    arguments = types.SimpleNamespace(
        use_bias_correction_kl=settings.get("use_bias_correction_kl", False),
        delta=settings.get("delta"),
        sapo_temperature_pos=settings.get("sapo_temperature_pos"),
        sapo_temperature_neg=settings.get("sapo_temperature_neg"),
        steps_per_generation=1,
    )
    trainer = types.SimpleNamespace(
        args=arguments,
        accelerator=types.SimpleNamespace(
            num_processes=1, sync_gradients=True, gather=lambda x: x, reduce=lambda x, reduction: x
        ),
        model=types.SimpleNamespace(training=True),
        loss_type=settings.get("loss_type"),
        importance_sampling_level=settings.get("importance_sampling_level", "token"),
        epsilon_low=settings.get("epsilon_low"),
        epsilon_high=settings.get("epsilon_high"),
        beta=settings.get("beta", 0.0),
        max_completion_length=MAX_LENGTH,
        current_gradient_accumulation_steps=1,
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=None,
        aux_loss_enabled=False,
        use_vllm="max_weight" in settings,
        vllm_importance_sampling_correction=True,
        _entropy_bonus_enabled="entropy_coef" in settings,
        use_adaptive_entropy=False,
        entropy_coef=settings.get("entropy_coef", 0.0),
        _metrics={"train": defaultdict(list)},
        _get_per_token_logps_and_entropies=lambda *_, **__: (logprobs, tensors["entropy"], None),
    )
    mask = tensors["mask"]
    ids = torch.zeros_like(mask, dtype=torch.long)
    inputs = {
        "prompt_ids": ids[:, :1],
        "prompt_mask": torch.ones_like(ids[:, :1]),
        "completion_ids": ids,
        "completion_mask": mask,
        "advantages": tensors["advantages"][:, 0],
        "old_per_token_logps": tensors["old"],
        "old_logps": (tensors["old"] * mask).sum(1),
        "ref_per_token_logps": tensors["reference"],
        "num_items_in_batch": mask.sum(),
    }
    if "max_weight" in settings:
        ratio = torch.exp(tensors["old"] - tensors["rollout"])
        inputs["importance_sampling_ratio"] = torch.clamp(ratio, max=settings["max_weight"])
    loss = (RLOOTrainer if is_rloo else GRPOTrainer)._compute_loss(trainer, None, inputs)
    loss.backward()
    return loss.item(), logprobs.grad.numpy()


def trl_pairs_side(arrays: dict[str, np.ndarray], losses: dict[str, float]) -> tuple[float, np.ndarray]:
    """Return the loss of TRL's DPO trainer and its gradient by the log-probs of the first half against the second."""
    import torch
    from trl import DPOTrainer

    tensors = {name: torch.tensor(array) for name, array in arrays.items()}
    mask = tensors["mask"]
    logprobs = tensors["logprobs"].clone().requires_grad_()

    class Model:
        training = True

        def __call__(self, **_):
            # The fused head of transformers gives 0 where a label is masked.
            return types.SimpleNamespace(log_probs=logprobs * mask, entropy=mask, mean_logits=mask, is_top1=mask.bool())

    trainer = types.SimpleNamespace(
        model=Model(),
        accelerator=types.SimpleNamespace(device="cpu", gather=lambda x: x, gather_for_metrics=lambda x: x),
        aux_loss_enabled=False,
        ld_alpha=None,
        precompute_ref_logps=True,
        f_divergence_type="reverse_kl",
        loss_types=list(losses),
        loss_weights=list(losses.values()),
        beta=PAIR_BETA,
        use_weighting=False,
        _metrics={"train": defaultdict(list)},
        _total_train_tokens=0,
        _tp_size=1,
    )
    completion_mask = torch.cat([torch.zeros_like(mask[:, :1]), mask], dim=1)  # a prompt of one token
    chosen, rejected = (tensors["reference"] * mask).sum(1).chunk(2)
    inputs = {
        "input_ids": torch.zeros_like(completion_mask, dtype=torch.long),
        "attention_mask": torch.ones_like(completion_mask),
        "completion_mask": completion_mask,
        "ref_chosen_logps": chosen,
        "ref_rejected_logps": rejected,
    }
    loss = DPOTrainer._compute_loss(trainer, trainer.model, inputs, return_outputs=False)
    loss.backward()
    return loss.item(), logprobs.grad.numpy()


def our_pairs_side(arrays: dict[str, np.ndarray], options: dict) -> tuple[float, np.ndarray]:
    """Return our loss of the pairs and the derivatives by the log-probs that the graph carries back."""
    from mindrlhf.config.offline import DpoSection
    from mindrlhf.training.offline.pair_objectives import DpoObjective

    objective = DpoObjective(DpoSection(beta=PAIR_BETA, **options))
    order = np.arange(NUM_RESPONSES).reshape(2, -1).T.reshape(-1)  # chosen 0, rejected 0, chosen 1, ...
    lengths = arrays["mask"].sum(axis=1).astype(int)
    logprobs, reference = ([arrays[name][i, : lengths[i]] for i in order] for name in ("logprobs", "reference"))
    result = objective.evaluate(logprobs, objective.summarise(reference))
    gradient = np.zeros_like(arrays["logprobs"])
    for i, coefficients in zip(order, result.coefficients):
        gradient[i, : lengths[i]] = coefficients
    return float(result.losses.mean()), gradient


def our_side(arrays: dict[str, np.ndarray], loss: str, options: dict, mode: str, added: dict):
    """Return our loss and its gradient by the log-probs, over a policy whose log-probs are a parameter."""
    import mindspore as ms
    from mindspore import nn

    from mindrlhf.algorithms import policy_losses
    from mindrlhf.algorithms.aggregation import token_weights
    from mindrlhf.algorithms.corrections import RolloutCorrection
    from mindrlhf.algorithms.losses import PolicyLoss

    class Policy(nn.Cell):
        def __init__(self):
            super().__init__()
            self.logprobs = ms.Parameter(arrays["logprobs"], name="logprobs")
            self.entropy = ms.Tensor(arrays["entropy"])

        def construct(self, input_ids, segment_ids, labels, mask):
            return self.logprobs * mask, self.entropy

    correction = None
    if "max_weight" in added:
        correction = RolloutCorrection(
            weight="token", max_weight=added["max_weight"], mask="none", mask_low=0, mask_high=0, veto=0
        )
    policy = Policy()
    cell = PolicyLoss(
        policy,
        policy_losses.surrogate(loss, **options),
        on_policy=False,
        kl_estimator=added.get("kl_estimator", ""),
        kl_unbiased=added.get("kl_unbiased", False),
        entropy_coefficient=added.get("entropy_coefficient", 0.0),
        correction=correction,
    )
    mask = arrays["mask"]
    lengths = mask.sum(axis=1)
    weights = token_weights(lengths, lengths > 0, mode, MAX_LENGTH).astype(np.float32)[:, None] * mask
    ids, segments = np.zeros(mask.shape, np.int32), np.ones(mask.shape, np.int32)
    tokens = (arrays["advantages"], weights, arrays["old"], arrays["reference"], arrays["rollout"])
    function = ms.value_and_grad(cell, None, ms.ParameterTuple([policy.logprobs]), has_aux=True)
    scalars = (ms.Tensor(added.get("beta", 0.0), ms.float32), ms.Tensor(lengths.sum(), ms.float32))
    outputs, gradients = function(*map(ms.Tensor, (ids, segments, ids, mask, *tokens)), *scalars)
    return float(outputs[0]), gradients[0].asnumpy()


def run_trl(path: Path) -> None:
    """The child: compute TRL's half of every case and write it to ``path``."""
    arrays, results = draw(), {}
    for name, (settings, _) in CASES.items():
        results[f"{name}.loss"], results[f"{name}.gradient"] = trl_side(arrays, settings)
    for name, (losses, _) in PAIR_CASES.items():
        results[f"{name}.loss"], results[f"{name}.gradient"] = trl_pairs_side(arrays, losses)
    np.savez(path, **results)


def main() -> int:
    """Print the table; return 1 when a difference exceeds the tolerance."""
    parser = argparse.ArgumentParser(description="compare the losses with TRL's")
    parser.add_argument("--trl-python", default=str(ROOT / ".venv-bench" / "bin" / "python"))
    parser.add_argument("--write-trl", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.write_trl:
        run_trl(Path(arguments.write_trl))
        return 0
    if not Path(arguments.trl_python).exists():
        print(f"compare_trl: no interpreter at {arguments.trl_python}: run bash scripts/setup_benchmark.sh first")
        return 2
    import mindspore as ms

    ms.set_context(mode=ms.GRAPH_MODE)
    ms.set_device("CPU")
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "trl.npz"
        command = [arguments.trl_python, str(Path(__file__).resolve()), "--write-trl", str(path)]
        subprocess.run(command, check=True, timeout=TIMEOUT_S)
        with np.load(path) as file:
            theirs = {name: file[name] for name in file.files}
    arrays, worst = draw(), 0.0
    print(f"| {'case':22} | loss, TRL  | difference | largest gradient | largest difference |")
    print("|---|---|---|---|---|")
    ours = {name: our_side(arrays, *case) for name, (_, case) in CASES.items()}
    ours |= {name: our_pairs_side(arrays, options) for name, (_, options) in PAIR_CASES.items()}
    for name, (loss, gradient) in ours.items():
        expected, slopes = float(theirs[f"{name}.loss"]), theirs[f"{name}.gradient"]
        scale = np.abs(slopes).max()
        differences = abs(loss - expected), np.abs(gradient - slopes).max()
        worst = max(worst, differences[0] / max(abs(expected), 1e-2), differences[1] / scale)
        print(f"| {name:22} | {expected:10.6f} | {differences[0]:10.1e} | {scale:16.6f} | {differences[1]:18.1e} |")
    print(f"\nlargest relative difference: {worst:.1e} (tolerance {TOLERANCE:.0e})")
    return int(worst > TOLERANCE)


if __name__ == "__main__":
    sys.exit(main())
