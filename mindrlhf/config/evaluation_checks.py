"""Rules of the section `evaluation`."""

from mindrlhf.config.evaluation import ACCURACY, BEST_METRICS, PASS_AT_K, EvaluationSection
from mindrlhf.config.reward import REWARD_MODEL_NAME
from mindrlhf.config.schema import GrpoConfig
from mindrlhf.errors import Mistakes, UserError


def check_evaluation(config: GrpoConfig, given: frozenset[str]) -> None:
    """Check the section; ``given`` are the keys the user set.

    Raises:
        UserError: all broken rules.
    """
    mistakes = Mistakes()
    reward, evaluation = config.reward, config.evaluation
    parts = (*reward.verifier_function, *([REWARD_MODEL_NAME] if reward.model_path else ()))
    if evaluation.verifier and evaluation.verifier not in parts:
        mistakes.add(
            f"'evaluation.verifier' is '{evaluation.verifier}', which is not in reward.verifier_function "
            f"({', '.join(parts)})"
        )
    if evaluation.temperature == 0 and evaluation.num_samples > 1:
        mistakes.add(
            f"'evaluation.num_samples' is {evaluation.num_samples}, but at evaluation.temperature 0 all samples are "
            "alike: set it to 1, or raise the temperature"
        )
    mistakes.check(_check_sets, evaluation, parts)
    mistakes.check(_check_best, config)
    if evaluation.patience and not evaluation.every_steps:
        mistakes.add(
            f"'evaluation.patience' is {evaluation.patience}, but with evaluation.every_steps 0 nothing is evaluated "
            "on the way: set every_steps, or patience to 0"
        )
    if not config.data.eval_file:
        unused = sorted(name for name in given if name.startswith("evaluation."))
        if unused:
            mistakes.add(
                f"'{unused[0]}' is set, but there is no data.eval_file to evaluate on: set it, or remove the key"
            )
    mistakes.raise_if_any()


def _check_sets(evaluation: EvaluationSection, parts: tuple[str, ...]) -> None:
    for name in evaluation.sets:
        if not name.replace("_", "").isalnum():
            raise UserError(f"'evaluation.sets' has the name '{name}', which metrics carry: use letters, digits and _")
    for name, verifier in evaluation.verifiers.items():
        if name not in evaluation.sets:
            known = ", ".join(evaluation.sets) or "none"
            raise UserError(f"'evaluation.verifiers' names the set '{name}', but evaluation.sets has {known}")
        if verifier not in parts:
            raise UserError(
                f"'evaluation.verifiers' has '{verifier}' for {name}, which is not in reward.verifier_function "
                f"({', '.join(parts)})"
            )


def _check_best(config: GrpoConfig) -> None:
    evaluation = config.evaluation
    if evaluation.best_metric not in BEST_METRICS:
        raise UserError(
            f"'evaluation.best_by' is '{evaluation.best_by}': write {' or '.join(BEST_METRICS)}, or with the name of a "
            f"further set SET/{ACCURACY}"
        )
    if "/" in evaluation.best_by and evaluation.best_set not in evaluation.sets:
        known = ", ".join(evaluation.sets) or "none"
        raise UserError(f"'evaluation.best_by' names the set '{evaluation.best_set}', but evaluation.sets has {known}")
    if evaluation.best_metric == PASS_AT_K and evaluation.num_samples == 1:
        raise UserError(
            f"'evaluation.best_by' is '{evaluation.best_by}', but with evaluation.num_samples 1 that is the accuracy: "
            f"raise num_samples, or write {ACCURACY}"
        )
    if evaluation.best_by != ACCURACY and not (evaluation.patience or config.checkpoint.keep_best):
        raise UserError(
            f"'evaluation.best_by' is '{evaluation.best_by}', but nothing asks for the best model: set "
            "checkpoint.keep_best or evaluation.patience, or remove it"
        )
