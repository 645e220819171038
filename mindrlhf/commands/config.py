"""`mindrlhf config`: check a config file, begin one, or print the reference of all keys."""

import argparse
import dataclasses
import sys
from pathlib import Path
from typing import Any

from mindrlhf.commands.vocabulary import add_overrides, add_ranks, allow_json, write_text
from mindrlhf.config.keys import TASKS

STACK_NAMES = ("mindspeed-rl", "mindrlhf", "verl", "trl")


def register(subparsers: argparse._SubParsersAction) -> None:
    parser = subparsers.add_parser("config", help="check a config file, begin one, or print the reference of all keys")
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    check = actions.add_parser("check", help="every check that a run begins with, without touching a device")
    check.add_argument("config", help="YAML file; config.yaml of an output directory will do")
    add_overrides(check)
    check.add_argument("--kind", choices=TASKS, help="command the config is for (default: told from its sections)")
    add_ranks(check)
    check.add_argument("--elastic", action="store_true", help="nodes for rollout only may join the run")
    allow_json(check)
    check.set_defaults(run=_check)
    new = actions.add_parser("new", help="print a commented starting config after a few choices")
    new.add_argument("--kind", choices=TASKS, default="train", help="what kind of run (default: train)")
    new.add_argument("--model", required=True, metavar="DIR", help="Hugging Face directory, with its tokenizer")
    new.add_argument("--npus", type=int, default=0, metavar="N", help="NPUs it will run on (default: 0, the CPU)")
    new.add_argument("--data", default="train.mindrecord", metavar="FILE", help="made by `mindrlhf data build`")
    new.add_argument("--eval-data", default="", metavar="FILE", help="held-out prompts or records")
    new.add_argument("--device-memory", default="64GB", metavar="SIZE", help="of one NPU (default: 64GB)")
    new.add_argument("--verifier", default="", help="for train (default: what fits the answers of the data)")
    new.add_argument("--lora", type=int, default=0, metavar="RANK", help="train adapters (default: 0, all weights)")
    new.add_argument("--output", default="-", metavar="FILE", help="where to write it (default: -, standard output)")
    new.set_defaults(run=_new)

    taken = actions.add_parser("import", help="write another stack's config as one of ours")
    taken.add_argument("--from", dest="stack", required=True, choices=STACK_NAMES)
    taken.add_argument(
        "source",
        nargs="+",
        metavar="FILE | KEY=VALUE",
        help="its resolved YAML or JSON, or the shell script that starts it; further keys as on its command line",
    )
    taken.add_argument("--output", default="-", metavar="FILE", help="where to write it (default: -, standard output)")
    taken.add_argument(
        "--world-size",
        type=int,
        default=0,
        metavar="N",
        help="ranks it ran on (default: the script's); for TRL's batches",
    )
    taken.set_defaults(run=_import)

    docs = actions.add_parser("docs", help="print the reference page (docs/config.md)")
    docs.set_defaults(run=_docs)


def _check(arguments: argparse.Namespace) -> int:
    import json

    from mindrlhf.config.load import tasks_of
    from mindrlhf.config.parse import read_yaml
    from mindrlhf.training.preflight.run import check_run

    path, num_nodes = arguments.config, arguments.nodes
    num_ranks = arguments.workers * num_nodes
    given = {name.partition("=")[0].partition(".")[0]: None for name in arguments.overrides} | read_yaml(path)
    task = arguments.kind or next(iter(tasks_of(given)), "train")
    sizes = {"num_ranks": num_ranks, "num_nodes": num_nodes}
    checked = check_run(task, path, arguments.overrides, **sizes, is_elastic=arguments.elastic, tries_rewards=True)
    mistakes = checked.mistakes.messages
    obstacles = [one for one in checked.obstacles.messages if one not in mistakes]
    if arguments.json:
        found = {"command": task, "workers": num_ranks, "mistakes": mistakes, "obstacles": obstacles}
        if checked.memory is not None:
            found["memory_bytes"] = vars(checked.memory)
        print(json.dumps(found, indent=1))
        return 2 if mistakes else 0
    for obstacle in obstacles:
        print(f"mindrlhf config: warning: it would not start on this machine: {obstacle}", file=sys.stderr)
    checked.mistakes.raise_if_any()
    command = "" if task == "train" else f"mindrlhf {task}, "
    on_nodes = f", {num_ranks // num_nodes} on each of {num_nodes} machines" if num_nodes > 1 else ""
    print(f"{path}: ok for {command}{num_ranks} rank{'s' if num_ranks > 1 else ''}{on_nodes}")
    print(*checked.outlook, *([checked.memory] if checked.memory else []), sep="\n")
    return 0


def _held_out(train_file: str) -> str:
    """Return the file beside the training data that has the name of held-out data; "" where there is none."""
    names = ("test", "eval", "validation", "val", "held_out", "dev")
    beside = [Path(train_file).with_name(f"{name}.mindrecord") for name in names]
    return next((str(path) for path in beside if path.is_file() and path != Path(train_file)), "")


def _new(arguments: argparse.Namespace) -> int:
    from mindrlhf.config.starting import Choices, remarks, starting_config
    from mindrlhf.errors import UserError
    from mindrlhf.hub.cache import no_directory
    from mindrlhf.training.preflight.facts import read_facts

    if not Path(arguments.model).is_dir():
        raise UserError(no_directory(arguments.model))
    eval_data = arguments.eval_data or _held_out(arguments.data)
    facts = read_facts(arguments.kind, arguments.model, arguments.data, eval_data)
    choices = Choices(
        arguments.kind,
        arguments.model,
        arguments.data,
        eval_data,
        arguments.npus,
        arguments.verifier,
        arguments.lora,
        facts,
    )
    name = "config.yaml" if arguments.output == "-" else arguments.output
    layout = _fitting_layout(starting_config(choices, name), choices, arguments.device_memory)
    choices = dataclasses.replace(choices, layout=layout or {})
    write_text(arguments.output, starting_config(choices, name), overwrite=False)
    if layout is None:
        print(
            f"mindrlhf config: warning: no layout over {arguments.npus} NPUs of {arguments.device_memory} holds the "
            "model: give more --npus, or --lora",
            file=sys.stderr,
        )
    for remark in remarks(choices):
        print(f"mindrlhf config: {remark}", file=sys.stderr)
    return 0


def _fitting_layout(text: str, choices: Any, device_memory: str) -> dict | None:
    """Return the keys with which a `train` run fits its NPUs; {} where none is planned, None where nothing does."""
    import yaml

    from mindrlhf.config.load import read_content
    from mindrlhf.config.starting import NODE_SIZE
    from mindrlhf.dryrun.plan.plan import Machine, read_model
    from mindrlhf.dryrun.plan.search import starting_layout
    from mindrlhf.system.sizes import parse_size

    if choices.task != "train" or not choices.num_npus or choices.facts.num_parameters is None:
        return {}
    config = read_content("train", yaml.safe_load(text), world_size=None).config
    machine = Machine(choices.num_npus, parse_size(device_memory, "--device-memory"), NODE_SIZE)
    return starting_layout(config, read_model(choices.model_dir), machine)


def _import(arguments: argparse.Namespace) -> int:
    from mindrlhf.commands.launch_script import commands_of
    from mindrlhf.config.imports.convert import convert

    first, *others = arguments.source
    path, words = (None, arguments.source) if "=" in first and not Path(first).exists() else (Path(first), others)
    text, result = convert(arguments.stack, path, words, run_script=commands_of, num_processes=arguments.world_size)
    write_text(arguments.output, text)
    for name, advice in result.for_user.items():
        print(f"mindrlhf config: {name}: {advice}", file=sys.stderr)
    return 0


def _docs(arguments: argparse.Namespace) -> int:
    from mindrlhf.config.reference import render

    print(render(), end="")
    return 0
