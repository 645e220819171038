"""Rules of the section `distillation`, as far as keys alone tell."""

from mindrlhf.algorithms import advantages
from mindrlhf.config.algorithm import OTHERS
from mindrlhf.config.schema import GrpoConfig
from mindrlhf.errors import UserError


def check_teachers(config: GrpoConfig) -> None:
    """Check that there is a teacher where the advantages need one, that it is heard, and that it stays as it is.

    Raises:
        UserError: the first rule that is broken.
    """
    algorithm, teachers = config.algorithm, config.distillation.teachers
    if "teacher" not in advantages.find(algorithm.advantage).NEEDS:
        if teachers:
            raise UserError(
                f"'distillation.teachers' is set, but algorithm.advantage is {algorithm.advantage}, which has no "
                "teacher: set algorithm.name to distill, or remove the teachers"
            )
        return
    if not config.model.reference_path and not teachers:
        raise UserError(
            f"'algorithm.advantage' is {algorithm.advantage}, but there is no teacher: set 'model.reference_path' to "
            "its directory, or 'distillation.teachers' to those of several"
        )
    if algorithm.beta == 0 or algorithm.kl_in != "reward" or algorithm.kl_estimator != "k1":
        raise UserError(
            f"'algorithm.advantage' is {algorithm.advantage}, whose advantage is the KL against the teacher: set "
            "algorithm.beta to 1, kl_in to reward and kl_estimator to k1, or algorithm.name to distill, which does so"
        )
    if algorithm.distill_reward_weight and algorithm.num_generations < 2:
        raise UserError(
            f"'algorithm.num_generations' is {algorithm.num_generations}, but distill_reward_weight compares the "
            "samples of a group: set it to 2 or more"
        )
    if teachers and algorithm.sync_ref_model:
        raise UserError(
            "'algorithm.sync_ref_model' is true, which would copy the student over its teachers: set it to false"
        )
    for source, path in teachers.items():
        if not path:
            raise UserError(f"'distillation.teachers' has no directory for {source}: name one, or remove the source")
        if ":" in source or source == OTHERS:
            raise UserError(
                f"'distillation.teachers' has the source {source!r}: no source has a colon in its name, and {OTHERS} "
                "is what metrics call those without a teacher of their own"
            )
