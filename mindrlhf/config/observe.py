"""The sections `guard`, `observe`, `msprobe`, `profiler` and `checkpoint`: what watches a run and keeps its state."""

from dataclasses import dataclass

from mindrlhf.config.keys import key
from mindrlhf.errors import Rules

SINKS = ("tensorboard", "wandb", "swanlab", "mlflow", "prometheus")
_TRACKED = f"observe.sinks={'|'.join(SINKS[1:])}"


@dataclass(frozen=True)
class GuardSection:
    """Limits of a run's numbers, beyond which it warns or stops."""

    max_rollout_diff: float = key(
        1.0,
        "stop when rollout_diff/mean_abs, in nats, exceeds this, and warn above a tenth of it; 0 means never",
        minimum=0,
    )
    max_unscored: float = key(
        0.5,
        "stop before a step of whose samples a larger share could not be scored: a judge out of reach, a sandbox that "
        "does not start; a smaller share is left out",
        minimum=0,
        maximum=1,
    )


@dataclass(frozen=True)
class ObserveSection:
    """Metrics, samples and trackers."""

    performance_stats: bool = key(True, "report the timing of every stage and the throughput")
    groups_per_step: int = key(
        1, "prompts of which all samples are written to samples.jsonl at each step: whole groups", minimum=0
    )
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
    project: str = key(
        "mindrlhf",
        "project in trackers among `sinks`; the run's name is the last folder of `run.output_dir`",
        read_with=_TRACKED,
    )

    def num_samples(self, num_generations: int) -> int:
        """Return how many samples of a step are written."""
        return self.groups_per_step * num_generations


@dataclass(frozen=True)
class MsprobeSection:
    """Precision debugging; see docs/debugging.md."""

    config_path: str = key(
        "",
        "config.json of msprobe, of level L2: the kernels of the steps that it names are dumped into `dump` in "
        "`run.output_dir`; empty: nothing is dumped",
    )


@dataclass(frozen=True)
class ProfilerSection:
    """Timelines of chosen steps; see docs/debugging.md#timeline."""

    steps: tuple[int, ...] = key(
        (),
        "steps whose timeline is recorded, for Perfetto, into `timeline.json` of the run; empty: nothing is recorded",
        minimum=1,
    )
    tools: tuple[str, ...] = key(
        (), "profilers that run in these steps too: MindSpore's on all ranks, vLLM's on all rollout servers",
        choices=("mindspore", "vllm"),
    )


@dataclass(frozen=True)
class CheckpointSection:
    """Run state on disk."""

    every_steps: int = key(100, "steps between checkpoints; 0 means only the final export", minimum=0)
    keep_last: int = key(2, "newest checkpoints kept", minimum=1)
    keep_best: bool = key(
        False, "save a checkpoint at each evaluation whose accuracy is the best so far, and keep the best one"
    )
    save_dir: str = key("", "where checkpoints go; empty means `checkpoints` in `run.output_dir`")
    node_local: bool = key(
        False, "`checkpoint.save_dir` is a disk of each node's own, where it keeps what its ranks hold; see cluster.md"
    )


def checkpoint_rules(checkpoint: CheckpointSection, *, knows_best: bool) -> Rules:
    """Yield (is broken, message); ``knows_best``: the command evaluates what it trains as a whole."""
    yield checkpoint.keep_best and not knows_best, (
        "'checkpoint.keep_best' is true, but only `mindrlhf train` looks for the best checkpoint: remove it"
    )
    yield checkpoint.node_local and not checkpoint.save_dir, (
        "'checkpoint.node_local' is true, but checkpoint.save_dir is empty: name a directory on each node's disk"
    )
    yield checkpoint.node_local and checkpoint.keep_last < 2, (
        f"'checkpoint.keep_last' is {checkpoint.keep_last}, but with checkpoint.node_local a node that dies while "
        "others finish a checkpoint has only the one before: give at least 2"
    )


def profiler_rules(profiler: ProfilerSection, num_steps: int, no_servers: str = "") -> Rules:
    """Yield (is broken, message).

    Args:
        num_steps: of the run; 0 when the data say how many there are.
        no_servers: why vLLM's profiler cannot run, empty when it can.
    """
    last_step = max(profiler.steps, default=0)
    yield num_steps and last_step > num_steps, (
        f"'profiler.steps' has {last_step}, but the run ends after run.max_steps = {num_steps}: name earlier steps"
    )
    yield "vllm" in profiler.tools and no_servers, f"'profiler.tools' has vllm, but {no_servers}: remove it"
