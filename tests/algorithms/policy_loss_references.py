"""The losses in float64 NumPy as the papers write them, response by response; shares nothing with the package.

Each function takes the log-probs that vary, the same at the point of evaluation (what stop-gradient sees), the old ones
and the advantages of one response, float64 [n] each, and the options; and returns the loss of each token.
"""

import numpy as np


def ppo_clip(logp, frozen, old, advantages, clip_low, clip_high):
    losses = []
    for new, before, advantage in zip(logp, old, advantages):
        ratio = np.exp(new - before)
        clipped = min(max(ratio, 1 - clip_low), 1 + clip_high)
        losses.append(-min(ratio * advantage, clipped * advantage))
    return np.array(losses)


def dual_clip(logp, frozen, old, advantages, clip_low, clip_high, dual_clip):
    losses = []
    for new, before, advantage in zip(logp, old, advantages):
        ratio = np.exp(new - before)
        clipped = min(max(ratio, 1 - clip_low), 1 + clip_high)
        objective = min(ratio * advantage, clipped * advantage)
        if advantage < 0:
            objective = max(objective, dual_clip * advantage)
        losses.append(-objective)
    return np.array(losses)


def gspo(logp, frozen, old, advantages, clip_low, clip_high):
    # s_i = (pi(y) / pi_old(y))^(1 / |y|)
    ratio = (np.exp(logp.sum()) / np.exp(old.sum())) ** (1 / len(logp))
    advantage = advantages[0]
    loss = -min(ratio * advantage, np.clip(ratio, 1 - clip_low, 1 + clip_high) * advantage)
    return np.full(len(logp), loss)


def gspo_token(logp, frozen, old, advantages, clip_low, clip_high):
    sequence_ratio = (np.exp(frozen.sum()) / np.exp(old.sum())) ** (1 / len(logp))
    losses = []
    for new, here, advantage in zip(logp, frozen, advantages):
        ratio = sequence_ratio * np.exp(new) / np.exp(here)
        losses.append(-min(ratio * advantage, np.clip(ratio, 1 - clip_low, 1 + clip_high) * advantage))
    return np.array(losses)


def sequence_clip(logp, frozen, old, advantages, clip_low, clip_high):
    ratio = np.prod(np.exp(logp) / np.exp(old))
    advantage = advantages[0]
    loss = -min(ratio * advantage, np.clip(ratio, 1 - clip_low, 1 + clip_high) * advantage)
    return np.full(len(logp), loss)


def cispo(logp, frozen, old, advantages, clip_low, clip_high):
    weights = np.clip(np.exp(frozen) / np.exp(old), 1 - clip_low, 1 + clip_high)
    return np.array([-weight * advantage * new for weight, advantage, new in zip(weights, advantages, logp)])


def sapo(logp, frozen, old, advantages, sapo_tau_positive, sapo_tau_negative):
    losses = []
    for new, before, advantage in zip(logp, old, advantages):
        tau = sapo_tau_positive if advantage > 0 else sapo_tau_negative
        gate = 4 / tau / (1 + np.exp(-tau * (np.exp(new - before) - 1)))
        losses.append(-gate * advantage)
    return np.array(losses)


def reinforce(logp, frozen, old, advantages):
    return -advantages * logp


def kimi(logp, frozen, old, advantages, mirror_tau):
    losses = -advantages * logp
    losses[-1] += mirror_tau / 2 * (logp.sum() - old.sum()) ** 2  # once per response
    return losses


def dppo_tv(logp, frozen, old, advantages, clip_low, clip_high):
    losses = []
    for new, here, before, advantage in zip(logp, frozen, old, advantages):
        distance = abs(np.exp(here) - np.exp(before))
        leaves = (advantage > 0 and here > before and distance > clip_high) or (
            advantage < 0 and here < before and distance > clip_low
        )
        losses.append(0.0 if leaves else -np.exp(new - before) * advantage)
    return np.array(losses)


def dppo_kl(logp, frozen, old, advantages, clip_low, clip_high):
    losses = []
    for new, here, before, advantage in zip(logp, frozen, old, advantages):
        mu, pi = np.array([np.exp(before), 1 - np.exp(before)]), np.array([np.exp(here), 1 - np.exp(here)])
        divergence = (mu * np.log(mu / pi)).sum()  # KL of two Bernoulli distributions
        leaves = divergence > (clip_high if advantage > 0 else clip_low)
        leaves &= (here > before) == (advantage > 0) and here != before
        losses.append(0.0 if leaves else -np.exp(new - before) * advantage)
    return np.array(losses)


def gmpo(logp, frozen, old, advantages, clip_low, clip_high):
    # As the paper writes it, with powers of the sign s of A: (prod_t min(w^s, clip(w^s))^s)^(1/n) A
    advantage, product = advantages[0], 1.0
    sign = 1 if advantage > 0 else -1
    bound = np.exp(clip_high if sign > 0 else clip_low)
    for new, before in zip(logp, old):
        powered = (np.exp(new) / np.exp(before)) ** sign
        product *= min(powered, np.clip(powered, 1 / bound, bound)) ** sign
    return np.full(len(logp), -(product ** (1 / len(logp))) * advantage)


def vespo(
    logp, frozen, old, advantages, vespo_k_positive, vespo_lambda_positive, vespo_k_negative, vespo_lambda_negative
):
    ratio = np.prod(np.exp(frozen) / np.exp(old))
    is_good = advantages[0] >= 0
    k = vespo_k_positive if is_good else vespo_k_negative
    decay = vespo_lambda_positive if is_good else vespo_lambda_negative
    return -(ratio**k) * np.exp(decay * (1 - ratio)) * advantages * logp


def luspo(logp, old, advantages, clip_low, clip_high):
    """The loss of one response as arXiv:2602.05261 writes it: GSPO's, times its length."""
    ratio = np.exp((logp - old).mean())
    advantage = advantages[0]
    return -len(logp) * min(ratio * advantage, np.clip(ratio, 1 - clip_low, 1 + clip_high) * advantage)


def kl(estimator, logp, reference):
    log_quotient = logp - reference  # log(pi / pi_ref)
    quotient = np.exp(reference) / np.exp(logp)  # pi_ref / pi
    return {
        "k1": log_quotient,
        "k2": log_quotient**2 / 2,
        "k3": quotient - 1 - np.log(quotient),
        "abs": np.abs(log_quotient),
    }[estimator]


def aggregate(losses, mode, max_length):
    """The mean of token losses over responses, from the definitions."""
    if mode == "token_mean":
        return sum(part.sum() for part in losses) / sum(len(part) for part in losses)
    if mode == "sequence_mean":
        return np.mean([part.mean() for part in losses])
    return np.mean([part.sum() / max_length for part in losses])


def correction(
    item, old, weight="none", max_weight=2.0, mask="none", mask_low=0.5, mask_high=2.0, veto=0.0, drift=0.0
):
    """The weight of each token of a response under the old log-probs ``old``, written with probabilities."""
    rollout, here, advantages = item.rollout, item.logprobs, item.advantages
    ratio = np.exp(old) / np.exp(rollout)
    product, mean = np.prod(ratio), np.prod(ratio) ** (1 / len(ratio))
    weights = {"none": np.ones_like(ratio), "token": ratio, "sequence": np.full_like(ratio, product)}[weight]
    weights = np.array([min(each, max_weight) for each in weights])
    measure = {"none": 1.0, "token": ratio, "sequence": product, "geometric": mean}[mask]
    if mask != "none":
        weights = np.where((measure >= mask_low) & (measure <= mask_high), weights, 0.0)
    if veto and (ratio < veto).any():
        weights = np.zeros_like(weights)
    if drift:
        # M of arXiv:2512.02556: the mean log-quotient of the response, and the sign of each token's advantage
        divergence = sum(before - now for before, now in zip(rollout, here)) / len(here)
        weights = np.where((advantages < 0) & (divergence > drift), 0.0, weights)
    return weights
