"""Rules between the keys of the objective: which parts compose, and which keys the chosen parts read."""

import dataclasses
from collections.abc import Iterable

from mindrlhf.algorithms import advantages, policy_losses
from mindrlhf.algorithms.kl_control import UNBIASED_ESTIMATORS
from mindrlhf.config.algorithm import CORRECTIONS, PRESETS, AlgorithmSection
from mindrlhf.config.derived import correction_weight, has_older_samples, is_corrected
from mindrlhf.config.distillation_checks import check_teachers
from mindrlhf.config.schema import GrpoConfig
from mindrlhf.errors import Mistakes, UserError


def check_algorithm(config: GrpoConfig, given: frozenset[str]) -> None:
    """Check the sections `algorithm` and `correction`; ``given`` are the keys the user set."""
    mistakes = Mistakes()
    check = mistakes.check
    check(_check_estimator, config.algorithm)
    check(check_teachers, config)
    check(_check_kl, config.algorithm)
    check(_check_reference, config.algorithm, given)
    check(_check_levels, config.algorithm)
    check(_check_overlong, config)
    check(_check_dynamic_sampling, config.algorithm)
    check(_check_correction, config)
    check(_check_unread, config, given)
    mistakes.raise_if_any()


def _check_estimator(algorithm: AlgorithmSection) -> None:
    needs = advantages.find(algorithm.advantage).NEEDS
    if "group" in needs and algorithm.num_generations < 2:
        raise UserError(
            f"'algorithm.num_generations' is {algorithm.num_generations}, but the advantages of {algorithm.advantage} "
            "compare the samples of a group with each other: set it to 2 or more (8 is usual)"
        )
    if algorithm.advantage == "pass_at_k" and algorithm.pass_k >= algorithm.num_generations:
        raise UserError(
            f"'algorithm.pass_k' is {algorithm.pass_k}, but the best of {algorithm.pass_k} can only differ within "
            f"groups of more samples: set 'algorithm.num_generations' above {algorithm.pass_k} (it is "
            f"{algorithm.num_generations}), or lower pass_k"
        )


def _check_kl(algorithm: AlgorithmSection) -> None:
    if algorithm.beta == 0 and algorithm.kl_target is not None:
        raise UserError(
            "'algorithm.kl_target' is set, but algorithm.beta is 0, so there is no reference model to measure the KL "
            "against: set beta above 0, which is where it starts, or remove kl_target"
        )
    if not algorithm.kl_unbiased:
        return
    if algorithm.beta == 0:
        raise UserError(
            "'algorithm.kl_unbiased' is true, but algorithm.beta is 0, so there is no KL term and no reference model: "
            "set beta above 0"
        )
    if algorithm.kl_in == "reward":
        raise UserError(
            "'algorithm.kl_unbiased' is true, but kl_in=reward has no gradient of its own: set kl_in to loss, or "
            "kl_unbiased to false"
        )
    if algorithm.kl_estimator not in UNBIASED_ESTIMATORS:
        raise UserError(
            f"'algorithm.kl_unbiased' is true, but the value of {algorithm.kl_estimator} is itself biased: set "
            f"kl_estimator to {' or '.join(UNBIASED_ESTIMATORS)}"
        )


def _check_reference(algorithm: AlgorithmSection, given: frozenset[str]) -> None:
    if algorithm.sync_ref_model and algorithm.beta == 0:
        raise UserError(
            "'algorithm.sync_ref_model' is true, but beta is 0, so there is no reference model: set beta above 0"
        )
    if "algorithm.ref_model_sync_steps" in given and not algorithm.sync_ref_model:
        raise UserError("'algorithm.ref_model_sync_steps' is set, but not used: set 'algorithm.sync_ref_model' to true")


def _check_levels(algorithm: AlgorithmSection) -> None:
    """Refuse advantages that vary within a response under a loss that has one ratio for all of it."""
    if algorithm.loss not in ("gspo", "sequence_clip"):
        return
    per_token = advantages.find(algorithm.advantage).PER_TOKEN
    penalised = algorithm.kl_in == "reward" and algorithm.beta > 0 and not algorithm.distill_top_k
    if per_token == "always" or (per_token == "penalised" and penalised):
        why = " with KL in the reward" if per_token == "penalised" else ""
        raise UserError(
            f"'algorithm.loss' is {algorithm.loss}, which treats a response as one action, but the advantages of "
            f"{algorithm.advantage}{why} differ from token to token: set it to gspo_token or ppo_clip"
        )


def _check_dynamic_sampling(algorithm: AlgorithmSection) -> None:
    if not algorithm.dynamic_sampling:
        return
    if "group" not in advantages.find(algorithm.advantage).NEEDS:
        raise UserError(
            f"'algorithm.dynamic_sampling' drops groups whose samples all earned the same, but the advantages of "
            f"{algorithm.advantage} learn from those too: set it to false, or advantage to grpo"
        )
    if policy_losses.traits(algorithm.loss).ratio == "none":
        raise UserError(
            f"'algorithm.dynamic_sampling' leaves samples over for the next step, but the loss {algorithm.loss} has no "
            "ratio that would account for the update in between: set it to false, or loss to ppo_clip"
        )


def _check_correction(config: GrpoConfig) -> None:
    algorithm, correction = config.algorithm, config.correction
    ratio = policy_losses.traits(algorithm.loss).ratio
    weight = correction_weight(config)
    if ratio == "sequence" and weight == "token":
        raise UserError(
            f"'correction.weight' is token, but the loss {algorithm.loss} has one ratio for a whole response: set it "
            "to sequence, or to auto"
        )
    if correction.bypass and ratio == "none":
        raise UserError(
            f"'correction.bypass' is true, but the loss {algorithm.loss} has no ratio to old log-probabilities: set it "
            "to false"
        )
    if correction.bypass and (weight != "none" or correction.mask != "none" or correction.veto):
        raise UserError(
            "'correction.bypass' is true, so that the generator's log-probabilities are the old ones and there is "
            "nothing to correct: set 'correction.weight' and 'correction.mask' to none and 'correction.veto' to 0"
        )
    if has_older_samples(config) and not (correction.bypass or is_corrected(config)):
        key = "ahead" if config.rollout.ahead else "span_tokens"
        raise UserError(
            f"'correction.weight' is none, but with rollout.{key} nothing would then account for the updates since the "
            "samples were generated: set it to auto, or 'correction.bypass' to true"
        )
    if correction.mask != "none" and correction.mask_low >= correction.mask_high:
        raise UserError(
            f"'correction.mask_low' is {correction.mask_low:g}, not below mask_high = {correction.mask_high:g}: lower "
            "it"
        )


def _check_overlong(config: GrpoConfig) -> None:
    buffer = config.algorithm.overlong_buffer
    if buffer and "overlong_penalty" in config.reward.verifier_function:
        raise UserError(
            f"'algorithm.overlong_buffer' is {buffer:g}, which takes reward from long responses, and "
            "reward.verifier_function has overlong_penalty, which does so once more: remove it there, or set "
            "overlong_buffer to 0"
        )


def _check_unread(config: GrpoConfig, given: frozenset[str]) -> None:
    """Refuse keys that were changed, but that none of the chosen parts reads."""
    algorithm, correction = config.algorithm, config.correction
    losses = {name: policy_losses.traits(name).options for name in policy_losses.names()}
    estimators = {name: advantages.find(name).OPTIONS for name in advantages.names()}
    unread: dict[str, str] = {}
    for kind, chosen, options in (("loss", algorithm.loss, losses), ("advantage", algorithm.advantage, estimators)):
        for name in {key for keys in options.values() for key in keys} - set(options[chosen]):
            readers = [part for part, keys in options.items() if name in keys]
            unread[f"algorithm.{name}"] = f"algorithm.{kind} {_listed(readers)}, not {chosen}"
    if "teacher" not in advantages.find(algorithm.advantage).NEEDS:
        unread["algorithm.distill_top_k"] = f"algorithm.advantage distill, not {algorithm.advantage}"
    if algorithm.beta == 0:
        unread |= {f"algorithm.{name}": "algorithm.beta above 0, not 0" for name in ("kl_in", "kl_estimator")}
    if algorithm.kl_target is None:
        unread["algorithm.kl_gain"] = "an algorithm.kl_target, and there is none"
    if not algorithm.dynamic_sampling:
        unread["algorithm.max_oversampling"] = "algorithm.dynamic_sampling true, not false"
    if algorithm.overlong_buffer == 0:
        unread["algorithm.overlong_penalty"] = "an algorithm.overlong_buffer above 0, not 0"
    if not config.rollout.span_tokens or config.rollout.asynchronous:
        why = "rollout.span_tokens above 0 and without rollout.asynchronous"
        unread |= {"rollout.max_spans": why, "rollout.in_flight": why}
    if correction_weight(config) == "none":
        unread["correction.max_weight"] = "correction.weight token or sequence, not none"
    if correction.mask == "none":
        why = "correction.mask token, sequence or geometric, not none"
        unread |= {"correction.mask_low": why, "correction.mask_high": why}
    presets = {"algorithm": PRESETS[algorithm.name], "correction": CORRECTIONS[correction.preset]}
    mistakes = Mistakes()
    for name in sorted(unread.keys() & given):
        section, _, key = name.partition(".")
        part = getattr(config, section)
        default = next(field.default for field in dataclasses.fields(part) if field.name == key)
        # What a run wrote to its config.yaml holds every key, and must load again.
        if getattr(part, key) not in (default, presets.get(section, {}).get(key, default)):
            mistakes.add(f"'{name}' is set, but read only with {unread[name]}: remove it, or change the other")
    mistakes.raise_if_any()


def _listed(names: Iterable[str]) -> str:
    *first, last = names
    return f"{', '.join(first)} or {last}" if first else last
