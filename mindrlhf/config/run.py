"""The sections `run` and `data`."""

from dataclasses import dataclass

from mindrlhf.config.keys import REQUIRED, key
from mindrlhf.errors import Rules, UserError
from mindrlhf.system.ports import parse_ports


@dataclass(frozen=True)
class RunSection:
    """Output directory, device, seed and limits of a run."""

    output_dir: str = key(
        "runs/default",
        "directory for metrics, checkpoints, samples, logs and the report",
    )
    seed: int = key(0, "seed of data order, sampling and random initialisation", minimum=0, maximum=2**31 - 1)
    device: str = key("cpu", "what the trainer ranks and the generator run on", choices=("cpu", "ascend"))
    deterministic: bool = key(
        True, "two runs of this config compute the same bits; free on a CPU, what it costs NPUs is doctor's rung 9"
    )
    max_steps: int = key(0, "stop after this many steps; 0 means when `training.epochs` are used up", minimum=0)
    start_timeout_s: float = key(
        600.0, "longest wait, in seconds, until all ranks have found each other; 0 means any time", minimum=0
    )
    ports: str = key(
        "",
        "TCP ports on which launcher, ranks and rollout servers of a node listen, as in 20000-20100; empty: any",
    )
    hang_timeout_s: float = key(
        1800.0, "a run that makes no progress at all for this long, in seconds, is stopped; 0 means never", minimum=0
    )


def run_rules(run: RunSection) -> Rules:
    if run.ports:
        try:
            parse_ports(run.ports)
        except UserError as error:
            yield True, str(error)


@dataclass(frozen=True)
class DataSection:
    """The prompts, and the tokenizer they were built with."""

    train_file: str = key(REQUIRED, "MindRecord file by `mindrlhf data build`, of one file or several: --input A B")
    tokenizer_dir: str = key(
        REQUIRED, "Hugging Face tokenizer directory", is_model=True
    )
    eval_file: str = key("", "MindRecord file of held-out prompts; empty means no evaluation")
    shuffle: bool = key(True, "shuffle the prompts anew in each epoch")
