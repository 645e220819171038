"""The sections `guard`, `observe`, `msprobe`, `profiler` and `checkpoint`: what watches a run and keeps its state."""

from dataclasses import dataclass

from mindrlhf.config.keys import key
from mindrlhf.errors import Mistakes

# In the order in which a step runs them: the first that differs between two dumps is where they parted.
STAGES = ("rollout", "old_log_prob", "reference", "update")
SINKS = ("tensorboard", "wandb", "swanlab", "mlflow")
KEY_DATA_LEVEL, CELL_LEVEL = "debug", "L0"  # as msprobe calls them


@dataclass(frozen=True)
class GuardSection:
    """What the numbers of a run may do before it warns or stops."""

    max_skipped_updates: int = key(
        3,
        "stop after this many updates in a row were skipped because loss or gradients were not finite",
        minimum=1,
    )
    warn_rollout_diff: float = key(
        0.1, "warn when rollout_diff/mean_abs, in nats, exceeds this; 0 means never", minimum=0
    )
    max_rollout_diff: float = key(
        1.0, "stop when rollout_diff/mean_abs, in nats, exceeds this; 0 means never", minimum=0
    )
    grad_spike_factor: float = key(
        5.0, "report an update whose gradient norm exceeds the running median this many times; 0 means never", minimum=0
    )
    max_failed_steps: int = key(
        5,
        "stop after this many steps in a row in which a verifier failed on every sample it was asked for; 0 means "
        "never",
        minimum=0,
    )


@dataclass(frozen=True)
class ObserveSection:
    """What is reported."""

    performance_stats: bool = key(True, "report the timing of every stage and the throughput")
    tensorboard: bool = key(True, "write TensorBoard event files; false takes tensorboard out of `sinks`")
    samples_per_step: int = key(2, "samples written to samples.jsonl at each step", minimum=0)
    sample_tokens: bool = key(
        False,
        "write the tokens of these samples too, each with its advantage and the log-probabilities of generator and "
        "trainer, which `mindrlhf view` shades",
    )
    sinks: tuple[str, ...] = key(
        ("tensorboard",),
        "where metrics, config, samples and report go, beside the files of `run.output_dir`; all but tensorboard are "
        "optional extras; see docs/metrics.md",
        choices=SINKS,
    )
    project: str = key("mindrlhf", "what trackers among `sinks` file the run under")
    run_name: str = key("", "what they call the run; empty means the last folder of `run.output_dir`")


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


@dataclass(frozen=True)
class ProfilerSection:
    """Where the time of chosen steps goes; see docs/timeline.md."""

    steps: tuple[int, ...] = key(
        (),
        "steps whose timeline is recorded, for Perfetto, into `timeline.json` of the run; empty: nothing is recorded",
        minimum=1,
    )
    ranks: tuple[int, ...] = key((), "ranks that are recorded, beside rank 0; empty: all of them", minimum=0)
    mindspore: bool = key(False, "run MindSpore's profiler too, on the ranks and in the steps above")
    vllm: bool = key(False, "run vLLM's profiler too, on all rollout servers in the steps above")


@dataclass(frozen=True)
class CheckpointSection:
    """Run state on disk."""

    every_steps: int = key(100, "steps between checkpoints; 0 means only the final export", minimum=0)
    keep_last: int = key(2, "newest checkpoints kept", minimum=1)
    keep_best: bool = key(
        False, "save a checkpoint at each evaluation whose accuracy is the best so far, and keep the best one"
    )
    asynchronous: bool = key(
        True, "write in the background, from a copy of weights and optimiser in memory; false stops the run meanwhile"
    )
    save_dir: str = key("", "where checkpoints go; empty means `checkpoints` in `run.output_dir`", is_path=True)
    node_local: bool = key(
        False, "`checkpoint.save_dir` is a disk of each node's own, where it keeps what its ranks hold; see cluster.md"
    )


def check_checkpoint(checkpoint: CheckpointSection, knows_best: bool = False) -> None:
    """Check where and when state is saved.

    Args:
        knows_best: the command evaluates what it trains as a whole.

    Raises:
        UserError: all broken rules.
    """
    mistakes = Mistakes()
    if checkpoint.keep_best and not knows_best:
        mistakes.add(
            "'checkpoint.keep_best' is true, but only `mindrlhf train` looks for the best checkpoint: remove it"
        )
    if checkpoint.node_local and not checkpoint.save_dir:
        mistakes.add(
            "'checkpoint.node_local' is true, but checkpoint.save_dir is empty: name a directory on each node's disk"
        )
    if checkpoint.node_local and checkpoint.keep_last < 2:
        mistakes.add(
            f"'checkpoint.keep_last' is {checkpoint.keep_last}, but with checkpoint.node_local a node that dies while "
            "others finish a checkpoint has only the one before: give at least 2"
        )
    mistakes.raise_if_any()


def check_profiler(
    profiler: ProfilerSection, given: frozenset[str], num_steps: int, world_size: int | None, no_servers: str
) -> None:
    """Check what is to be recorded.

    Args:
        given: keys that the user changed.
        num_steps: of the run; 0 when the data say how many there are.
        world_size: ranks of the run; None when unknown.
        no_servers: why vLLM's profiler cannot run, empty when it can.

    Raises:
        UserError: all broken rules.
    """
    mistakes = Mistakes()
    unused = sorted(name for name in given if name.startswith("profiler.") and name != "profiler.steps")
    if unused and not profiler.steps:
        mistakes.add(f"'{unused[0]}' is set, but profiler.steps is empty: name the steps, or remove the key")
    if num_steps and max(profiler.steps, default=0) > num_steps:
        mistakes.add(
            f"'profiler.steps' has {max(profiler.steps)}, but the run ends after run.max_steps = {num_steps}: name "
            "earlier steps"
        )
    if world_size is not None and max(profiler.ranks, default=0) >= world_size:
        mistakes.add(
            f"'profiler.ranks' has {max(profiler.ranks)}, but the last of {world_size} ranks is {world_size - 1}: name "
            "others"
        )
    if profiler.vllm and no_servers:
        mistakes.add(f"'profiler.vllm' is true, but {no_servers}: set it to false")
    mistakes.raise_if_any()
