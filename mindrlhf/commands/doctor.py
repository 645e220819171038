"""`mindrlhf doctor`: what is installed, what is missing, which device is usable, and how to mend it."""

import argparse


def register(subparsers: argparse._SubParsersAction) -> None:
    """Add the parser of this command."""
    parser = subparsers.add_parser("doctor", help="check the environments and the devices, and say how to mend them")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> int:
    from mindrlhf.doctor.diagnosis import diagnose

    diagnosis = diagnose()
    print(diagnosis.to_json() if arguments.json else diagnosis.to_text())
    return 0 if diagnosis.usable_devices else 1
