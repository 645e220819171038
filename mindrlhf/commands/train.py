"""`mindrlhf train` and `mindrlhf sft`: a run on one or more ranks of this machine."""

import argparse


def register(subparsers: argparse._SubParsersAction) -> None:
    """Add the parsers of both commands."""
    train = _add(subparsers, "train", "reinforcement learning against verifiers (GRPO)")
    train.add_argument("--resume", action="store_true", help="continue from the newest checkpoint of the run")
    _add(subparsers, "sft", "supervised fine-tuning on the same cells")


def _add(subparsers: argparse._SubParsersAction, name: str, summary: str) -> argparse.ArgumentParser:
    parser = subparsers.add_parser(name, help=summary)
    parser.add_argument("config", help="YAML file; docs/config.md lists its keys")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value")
    parser.add_argument("--workers", type=int, default=1, help="trainer ranks on this machine (default: 1)")
    parser.set_defaults(run=_run, resume=False)
    return parser


def _run(arguments: argparse.Namespace) -> int:
    from pathlib import Path

    from mindrlhf.config.schema import load_grpo_config, load_sft_config
    from mindrlhf.training.checkpoints import check_output
    from mindrlhf.training.launch import launch
    from mindrlhf.training.preflight import FINAL_NAME, check_free, check_grpo_inputs, check_sft_inputs

    # All checks run here once before any rank starts, so that a mistake costs a second.
    if arguments.command == "sft":
        config = load_sft_config(arguments.config, arguments.overrides, world_size=arguments.workers)
        check_sft_inputs(config)
        check_free(Path(config.run.output_dir) / FINAL_NAME)
    else:
        config = load_grpo_config(arguments.config, arguments.overrides, world_size=arguments.workers)
        check_grpo_inputs(config)
        check_output(config, resume=arguments.resume)
    command = ["-m", "mindrlhf.training.main", arguments.command, arguments.config, *arguments.overrides]
    if arguments.resume:
        command.append("--resume")
    return launch(command, arguments.workers, Path(config.run.output_dir) / "logs")
