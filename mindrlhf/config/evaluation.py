"""The section `evaluation`: held-out sets, and the one that tells the best model of a run."""

from dataclasses import dataclass

from mindrlhf.config.keys import RunConfig, key
from mindrlhf.config.reward import REWARD_MODEL_NAME
from mindrlhf.errors import Rules


@dataclass(frozen=True)
class EvaluationSection:
    """Accuracy on held-out prompts during training."""

    every_steps: int = key(50, "steps between evaluations; 0 means only before the first and after the last", minimum=0)
    before_training: bool = key(True, "evaluate the starting model too")
    num_samples: int = key(1, "samples per prompt", minimum=1)
    temperature: float = key(1.0, "sampling temperature; 0 takes the most likely token", minimum=0)
    max_prompts: int = key(0, "use only the first prompts of `data.eval_file`; 0 means all", minimum=0)
    verifier: str = key(
        "", "the verifier whose mean is called accuracy; empty means the first of `reward.verifier_function`"
    )
    sets: dict[str, str] = key({}, "further sets, reported beside `data.eval_file`, as `name: MindRecord file`")
    verifiers: dict[str, str] = key({}, "accuracy in a further set, as `name: verifier`; `verifier` unless given")


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


def _set_rules(evaluation: EvaluationSection, parts: tuple[str, ...]) -> Rules:
    for name in evaluation.sets:
        yield not name.replace("_", "").isalnum(), (
            f"'evaluation.sets' has the name '{name}', which metrics carry: use letters, digits and _"
        )
    for name, verifier in evaluation.verifiers.items():
        yield name not in evaluation.sets, (
            f"'evaluation.verifiers' names the set '{name}', but evaluation.sets has "
            f"{', '.join(evaluation.sets) or 'none'}"
        )
        yield verifier not in parts, (
            f"'evaluation.verifiers' has '{verifier}' for {name}, which is not in reward.verifier_function "
            f"({', '.join(parts)})"
        )
