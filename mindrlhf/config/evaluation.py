"""The section `evaluation`: held-out sets, and the one that tells the best model of a run."""

from dataclasses import dataclass

from mindrlhf.config.keys import RunConfig, key
from mindrlhf.config.reward import REWARD_MODEL_NAME
from mindrlhf.errors import Rules

ACCURACY, PASS_AT_K = BEST_METRICS = ("accuracy", "pass@k")


@dataclass(frozen=True)
class EvaluationSection:
    """Accuracy on held-out prompts during training."""

    every_steps: int = key(50, "steps between evaluations; 0 means only before the first and after the last", minimum=0)
    before_training: bool = key(True, "evaluate the starting model too")
    patience: int = key(
        0, "end the run after this many evaluations in a row that are no better than the best; 0 means never", minimum=0
    )
    num_samples: int = key(1, "samples per prompt", minimum=1)
    temperature: float = key(1.0, "sampling temperature; 0 takes the most likely token", minimum=0)
    max_prompts: int = key(0, "use only the first prompts of `data.eval_file`; 0 means all", minimum=0)
    verifier: str = key(
        "", "the verifier whose mean is called accuracy; empty means the first of `reward.verifier_function`"
    )
    sets: dict[str, str] = key({}, "further sets, reported beside `data.eval_file`, as `name: MindRecord file`")
    verifiers: dict[str, str] = key({}, "accuracy in a further set, as `name: verifier`; `verifier` unless given")
    best_by: str = key(
        ACCURACY,
        "what `checkpoint.keep_best` and `patience` go by: accuracy or pass@k, or those of a further set, as "
        "`name/accuracy`",
    )

    @property
    def best_set(self) -> str:
        """The further set of ``best_by``; empty for `data.eval_file`."""
        return self.best_by.rpartition("/")[0]

    @property
    def best_metric(self) -> str:
        """The metric of ``best_by``."""
        return self.best_by.rpartition("/")[2]


def evaluation_rules(config: RunConfig) -> Rules:
    reward, evaluation = config.reward, config.evaluation
    parts = (*reward.verifier_function, *([REWARD_MODEL_NAME] if reward.model_path else ()))
    yield evaluation.verifier and evaluation.verifier not in parts, (
        f"'evaluation.verifier' is '{evaluation.verifier}', which is not in reward.verifier_function "
        f"({', '.join(parts)})"
    )
    yield evaluation.temperature == 0 and evaluation.num_samples > 1, (
        f"'evaluation.num_samples' is {evaluation.num_samples}, but at evaluation.temperature 0 all samples are alike: "
        "set it to 1, or raise the temperature"
    )
    yield from _set_rules(evaluation, parts)
    yield from _best_rules(evaluation, config.checkpoint.keep_best)
    yield evaluation.patience and not evaluation.every_steps, (
        f"'evaluation.patience' is {evaluation.patience}, but with evaluation.every_steps 0 nothing is evaluated on "
        "the way: set every_steps, or patience to 0"
    )


def _set_rules(evaluation: EvaluationSection, parts: tuple[str, ...]) -> Rules:
    for name in evaluation.sets:
        yield not name.replace("_", "").isalnum(), (
            f"'evaluation.sets' has the name '{name}', which metrics carry: use letters, digits and _"
        )
    for name, verifier in evaluation.verifiers.items():
        yield name not in evaluation.sets, (
            f"'evaluation.verifiers' names the set '{name}', but evaluation.sets has {_known(evaluation)}"
        )
        yield verifier not in parts, (
            f"'evaluation.verifiers' has '{verifier}' for {name}, which is not in reward.verifier_function "
            f"({', '.join(parts)})"
        )


def _best_rules(evaluation: EvaluationSection, keeps_best: bool) -> Rules:
    is_what = f"'evaluation.best_by' is '{evaluation.best_by[:60]}'"
    yield evaluation.best_metric not in BEST_METRICS, (
        f"{is_what}: write {' or '.join(BEST_METRICS)}, or with the name of a further set SET/{ACCURACY}"
    )
    yield "/" in evaluation.best_by and evaluation.best_set not in evaluation.sets, (
        f"'evaluation.best_by' names the set '{evaluation.best_set}', but evaluation.sets has {_known(evaluation)}"
    )
    yield evaluation.best_metric == PASS_AT_K and evaluation.num_samples == 1, (
        f"{is_what}, but with evaluation.num_samples 1 that is the accuracy: raise num_samples, or write {ACCURACY}"
    )
    yield evaluation.best_by != ACCURACY and not (evaluation.patience or keeps_best), (
        f"{is_what}, but nothing asks for the best model: set checkpoint.keep_best or evaluation.patience, or remove it"
    )


def _known(evaluation: EvaluationSection) -> str:
    return ", ".join(evaluation.sets) or "none"
