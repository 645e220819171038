"""`mindrlhf train`: reinforcement learning, on one or more ranks of this machine."""

import argparse


def register(subparsers: argparse._SubParsersAction) -> None:
    """Add the parser of this command."""
    parser = subparsers.add_parser("train", help="reinforcement learning against verifiers (GRPO)")
    parser.add_argument("config", help="YAML file; docs/config.md lists its keys")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value")
    parser.add_argument("--workers", type=int, default=1, help="trainer ranks on this machine (default: 1)")
    parser.add_argument("--resume", action="store_true", help="continue from the newest checkpoint of the run")
    parser.set_defaults(run=_train)


def _train(arguments: argparse.Namespace) -> int:
    from pathlib import Path

    from mindrlhf.config.schema import load_grpo_config
    from mindrlhf.training.launch import launch
    from mindrlhf.training.preflight import check_grpo_inputs

    config = load_grpo_config(arguments.config, arguments.overrides, world_size=arguments.workers)
    check_grpo_inputs(config)
    command = ["-m", "mindrlhf.training.main", arguments.config, *arguments.overrides]
    if arguments.resume:
        command.append("--resume")
    return launch(command, arguments.workers, Path(config.run.output_dir) / "logs")
