"""`mindrlhf config`: check a config file, begin one, or print the reference of all keys."""

import argparse
import sys
from pathlib import Path

from mindrlhf.commands.vocabulary import add_overrides, add_workers, allow_json, write_text

TASKS = ("train", "sft", "dpo", "reward-model")


def register(subparsers: argparse._SubParsersAction) -> None:
    """Add the parser of this command."""
    parser = subparsers.add_parser("config", help="check a config file, begin one, or print the reference of all keys")
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    check = actions.add_parser("check", help="every check that a run begins with, without touching a device")
    check.add_argument("config", help="YAML file; config.yaml of an output directory will do")
    add_overrides(check)
    check.add_argument("--kind", choices=TASKS, help="command the config is for (default: told from its sections)")
    add_workers(check, "ranks it is to run on (default: 1)")
    check.add_argument("--nodes", type=int, default=1, metavar="N", help="machines that they are on (default: 1)")
    check.add_argument("--elastic", action="store_true", help="nodes for rollout only may join the run")
    allow_json(check)
    check.set_defaults(run=_check)
    new = actions.add_parser("new", help="print a commented starting config after a few choices")
    new.add_argument("--task", choices=TASKS, default="train", help="what kind of run (default: train)")
    new.add_argument("--model", required=True, metavar="DIR", help="Hugging Face directory, with its tokenizer")
    new.add_argument("--npus", type=int, default=0, metavar="N", help="NPUs it will run on (default: 0, the CPU)")
    new.add_argument("--data", default="train.mindrecord", metavar="FILE", help="made by `mindrlhf data build`")
    new.add_argument("--eval-data", default="", metavar="FILE", help="held-out prompts or records")
    new.add_argument("--verifier", default="accuracy_reward", help="for train (default: accuracy_reward)")
    new.add_argument("--output", default="-", metavar="FILE", help="where to write it (default: -, standard output)")
    new.set_defaults(run=_new)

    taken = actions.add_parser("import", help="write another stack's config as one of ours")
    taken.add_argument("--from", dest="stack", required=True, choices=("mindspeed-rl", "mindrlhf", "verl", "trl"))
    taken.add_argument("file", type=Path, help="its YAML file, or a shell script with section.key=value words")
    taken.add_argument("--output", default="-", metavar="FILE", help="where to write it (default: -, standard output)")
    add_workers(taken, "ranks it ran on; TRL counts batches by them (default: 1)")
    taken.set_defaults(run=_import)

    docs = actions.add_parser("docs", help="print the reference page (docs/config.md)")
    docs.set_defaults(run=_docs)


def _check(arguments: argparse.Namespace) -> int:
    import json

    from mindrlhf.config.load import tasks_of
    from mindrlhf.config.parse import read_yaml
    from mindrlhf.errors import UserError
    from mindrlhf.training.preflight.run import check_run

    path, num_ranks, num_nodes = arguments.config, arguments.workers, arguments.nodes
    if num_nodes < 1 or num_ranks % num_nodes:
        raise UserError(f"--nodes is {num_nodes}: give a number that divides the {num_ranks} of --workers")
    task = arguments.kind or next(iter(tasks_of(read_yaml(path))), "train")
    sizes = {"num_ranks": num_ranks, "num_nodes": num_nodes}
    checked = check_run(task, path, arguments.overrides, **sizes, is_elastic=arguments.elastic)
    if checked.renaming:
        print(f"mindrlhf config: {checked.renaming}", file=sys.stderr)
    mistakes, obstacles = checked.mistakes.messages, checked.obstacles.messages
    if arguments.json:
        found = {"command": task, "workers": num_ranks, "mistakes": mistakes, "obstacles": obstacles}
        print(json.dumps(found, indent=1))
        return 2 if mistakes else 0
    for obstacle in obstacles:
        print(f"mindrlhf config: here it would not start: {obstacle}", file=sys.stderr)
    checked.mistakes.raise_if_any()
    command = "" if task == "train" else f"mindrlhf {task}, "
    print(f"{path}: ok for {command}{num_ranks} rank{'s' if num_ranks > 1 else ''}")
    return 0


def _new(arguments: argparse.Namespace) -> int:
    from mindrlhf.config.starting import Choices, starting_config
    from mindrlhf.errors import UserError
    from mindrlhf.specs import find_spec
    from mindrlhf.weights.hf import read_hf_config

    if arguments.npus < 0:
        raise UserError(f"--npus is {arguments.npus}: give 0 for the CPU, or the number of NPUs")
    if (Path(arguments.model) / "config.json").is_file():
        hf_config = read_hf_config(arguments.model)
        find_spec(hf_config).dims(hf_config)  # refuses what no run could train
    choices = Choices(
        arguments.task, arguments.model, arguments.data, arguments.eval_data, arguments.npus, arguments.verifier
    )
    name = "config.yaml" if arguments.output == "-" else arguments.output
    write_text(arguments.output, starting_config(choices, name), overwrite=False)
    return 0


def _import(arguments: argparse.Namespace) -> int:
    from mindrlhf.config.imports.convert import convert

    text, result = convert(arguments.stack, arguments.file, arguments.workers)
    write_text(arguments.output, text)
    for name, advice in result.for_user.items():
        print(f"mindrlhf config: {name}: {advice}", file=sys.stderr)
    for name in result.unknown:
        print(f"mindrlhf config: {name}: unknown, left out", file=sys.stderr)
    return 0


def _docs(arguments: argparse.Namespace) -> int:
    from mindrlhf.config.reference import render

    print(render(), end="")
    return 0
