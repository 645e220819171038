"""Whether teachers and prompts go together, and teachers and what they are asked."""

from mindrlhf.config.derived import reference_paths
from mindrlhf.config.schema import GrpoConfig
from mindrlhf.data.mindrecord import PromptFile
from mindrlhf.errors import UserError
from mindrlhf.specs import find_spec
from mindrlhf.weights.hf import read_hf_config

_MOST_LISTED = 5


def check_sources(config: GrpoConfig, file: PromptFile) -> None:
    """Check that every prompt of the training file has a teacher, and every teacher prompts.

    Raises:
        UserError: naming the source and the fix.
    """
    teachers = config.distillation.teachers
    if not teachers:
        return
    sources = file.sources()
    has = f"{file.path} has {_listed(sources)}"
    if unused := sorted(teachers.keys() - sources):
        raise UserError(
            f"'distillation.teachers' names the source {unused[0]!r}, but {has}: write it as it is there, or remove it"
        )
    alone = [source for source in sources if source not in teachers]
    if alone and not config.model.reference_path:
        raise UserError(
            f"'distillation.teachers' has no teacher for {_listed(alone)} of {file.path}: add one, or set "
            "model.reference_path to a teacher for all other sources"
        )


def check_num_words(config: GrpoConfig) -> None:
    """Check that student and teachers have words beyond those of `algorithm.distill_top_k`.

    Raises:
        UserError: one has not.
    """
    k = config.algorithm.distill_top_k
    for path in (config.model.path, *reference_paths(config)) if k else ():
        hf_config = read_hf_config(path)
        vocab_size = find_spec(hf_config).dims(hf_config).vocab_size
        if k >= vocab_size:
            raise UserError(
                f"'algorithm.distill_top_k' is {k}, but the model in {path} has {vocab_size} words, of which at least "
                f"one must be left that is not among the likeliest: set it to {vocab_size - 1} or less (64 is plenty)"
            )


def _listed(sources: list[str]) -> str:
    shown = ", ".join(repr(source) for source in sources[:_MOST_LISTED])
    rest = len(sources) - _MOST_LISTED
    return f"the sources {shown}" + (f" and {rest} more" if rest > 0 else "")
