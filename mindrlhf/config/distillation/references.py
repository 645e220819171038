"""Which frozen models the log-probabilities of a run are compared with: its reference model, or its teachers."""

from mindrlhf.config.schema import GrpoConfig


def reference_paths(config: GrpoConfig) -> tuple[str, ...]:
    """Return the directories of the reference model or of all teachers, each once; () when the run has neither.

    The teacher of sources without one of their own, ``model.reference_path``, comes first.
    """
    if config.algorithm.beta == 0:
        return ()
    model, teachers = config.model, config.distillation.teachers
    if not teachers:
        return (model.reference_path or model.path,)
    return tuple(dict.fromkeys(filter(None, (model.reference_path, *teachers.values()))))


def is_base(config: GrpoConfig, path: str) -> bool:
    """Return whether the model in ``path`` is the trained one without its adapters, so that it takes no memory."""
    return config.lora.rank is not None and path == config.model.path


def path_keys(config: GrpoConfig) -> dict[str, str]:
    """Return the key that names each directory of ``reference_paths`` that the user has named."""
    keys = {path: f"distillation.teachers.{source}" for source, path in config.distillation.teachers.items()}
    if config.model.reference_path:
        keys[config.model.reference_path] = "model.reference_path"
    return {path: keys[path] for path in reference_paths(config) if path in keys}
