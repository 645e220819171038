"""The section `distillation`: several teachers, each for samples of its own source."""

from dataclasses import dataclass

from mindrlhf.config.keys import key

OTHERS = "others"  # what metrics call all sources without a teacher of their own


@dataclass(frozen=True)
class DistillationSection:
    """Several teachers, each for prompts of its own; see docs/algorithms.md."""

    teachers: dict[str, str] = key(
        {},
        "Hugging Face directories of teachers, as `source: directory`; prompts of other sources have "
        "`model.reference_path`, or are refused where that is empty",
        is_model=True,
    )
