"""The section of precision debugging; the others are in :mod:`mindrlhf.config.sections`."""

from dataclasses import dataclass

from mindrlhf.config.keys import key

# In the order in which a step runs them: the first that differs between two dumps is where they parted.
STAGES = ("rollout", "old_log_prob", "reference", "update")
KEY_DATA_LEVEL, CELL_LEVEL = "debug", "L0"  # as msprobe calls them


@dataclass(frozen=True)
class MsprobeSection:
    """Precision debugging: what chosen steps computed, in msprobe's files; see docs/debugging.md."""

    enabled: bool = key(False, "dump the steps below; needs the package mindstudio-probe")
    dump_dir: str = key("", "where the dump goes; empty means `dump` in `run.output_dir`", is_path=True)
    stages: tuple[str, ...] = key(STAGES, "stages of a step that are dumped", choices=STAGES)
    first_step: int = key(1, "first step that is dumped", minimum=1)
    last_step: int = key(1, "last step that is dumped", minimum=1)
    level: str = key(
        KEY_DATA_LEVEL,
        "debug: samples, log-probabilities, advantages, loss; L0: the cells of the model and the gradients as well",
        choices=(KEY_DATA_LEVEL, CELL_LEVEL),
    )
    task: str = key(
        "statistics",
        "statistics: type, shape, extremes, mean, norm and checksum of each tensor; tensor: its values as well",
        choices=("statistics", "tensor"),
    )
