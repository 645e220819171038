"""`mindrlhf plan`: batches and memory of a run on every rank, without a device."""

import argparse

from mindrlhf.commands.vocabulary import add_cluster, add_overrides


def register(subparsers: argparse._SubParsersAction) -> None:
    parser = subparsers.add_parser("plan", help="batches and memory of a run on a cluster, worked out here")
    parser.add_argument("config", help="YAML file of `mindrlhf train`; of the model only config.json is read")
    add_overrides(parser)
    add_cluster(parser)
    parser.add_argument("--device-memory", default="64GB", metavar="SIZE", help="of one device (default: 64GB)")
    parser.add_argument("--node-size", type=int, default=8, metavar="N", help="devices of a node (default: 8)")
    parser.add_argument(
        "--json", nargs="?", const="-", metavar="FILE", help="print the plan as JSON, or write it to FILE too"
    )
    parser.add_argument("--compile", action="store_true", help="ask MindSpore's memory planner too (minutes)")
    parser.add_argument(
        "--device", choices=("A2", "A3"), default="A2", help="whose rates give times (default: A2; A3: one die)"
    )
    parser.add_argument("--search", action="store_true", help="propose parallel_configs that fit")
    parser.set_defaults(run=_run, says="planning")


def _run(arguments: argparse.Namespace) -> int:
    from mindrlhf.dryrun.plan.plan import Machine
    from mindrlhf.dryrun.plan.report import report_plan
    from mindrlhf.dryrun.plan.roofline import DEVICES
    from mindrlhf.system.sizes import parse_size

    device_bytes = parse_size(arguments.device_memory, "--device-memory")
    text, fits = report_plan(
        arguments.config,
        arguments.overrides,
        Machine(arguments.workers, device_bytes, arguments.node_size, DEVICES[arguments.device]),
        json_path=arguments.json,
        searches=arguments.search,
        compiles=arguments.compile,
    )
    print(text)
    return 0 if fits else 1
