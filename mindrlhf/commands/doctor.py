"""`mindrlhf doctor`: what is installed, what is missing, which device is usable, and how to mend it."""

import argparse


def register(subparsers: argparse._SubParsersAction) -> None:
    parser = subparsers.add_parser("doctor", help="check the environments and the devices, and say how to mend them")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument(
        "--device",
        nargs="?",
        const="ascend",
        choices=("ascend", "cpu"),
        help="try the devices, from one graph to two steps of GRPO, up to what breaks first (default: ascend)",
    )
    parser.add_argument("--npus", type=int, default=0, metavar="N", help="devices to try (default: all; on a CPU 2)")
    parser.add_argument(
        "--rungs", default="", metavar="1,4-6", help="what to try of it, by number or name (default: all)"
    )
    parser.add_argument("--output", default="doctor", metavar="DIR", help="for logs and report (default: doctor)")
    parser.add_argument(
        "--compare-layers",
        metavar="MODEL",
        help="of this model directory, name the first layer by which vLLM and the trainer's cells part",
    )
    parser.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> int:
    if arguments.device or arguments.compare_layers:
        return _try(arguments)
    from mindrlhf.doctor.diagnosis import diagnose

    diagnosis = diagnose()
    print(diagnosis.to_json() if arguments.json else diagnosis.to_text())
    return 0 if diagnosis.usable_devices else 1


def _try(arguments: argparse.Namespace) -> int:
    from pathlib import Path

    from mindrlhf.doctor.ladder import choose_rungs, climb, count_devices
    from mindrlhf.doctor.rungs import Ground
    from mindrlhf.errors import UserError
    from mindrlhf.rollout.pool import find_rollout_python

    device = arguments.device or "ascend"
    directory, names = Path(arguments.output).absolute(), choose_rungs(arguments.rungs)
    python = find_rollout_python()
    num_devices = count_devices(device, arguments.npus)
    if directory.exists():
        raise UserError(f"--output {arguments.output} is there already: remove it, or give another directory")
    directory.mkdir(parents=True)
    if arguments.compare_layers:
        return _compare(Ground(str(directory), device, arguments.npus or 1, python), arguments.compare_layers)
    say = (lambda text: None) if arguments.json else (lambda text: print(text, flush=True))
    say(f"trying {num_devices} device{'s' if num_devices > 1 else ''} ({device}); logs: {directory}")
    climbed = climb(Ground(str(directory), device, num_devices, python), names, say)
    if arguments.json:
        print((directory / "doctor.json").read_text(encoding="utf-8"))
    is_sound = climbed[-1].status != "failed"
    outcome = "All that was tried holds." if is_sound else "It breaks there."
    say(f"{outcome} Report to send: {directory / 'doctor.json'}")
    return 0 if is_sound else 1


def _compare(ground, model_dir: str) -> int:
    from mindrlhf.doctor.layers import LIMITS, compare_cells, record_server

    record_server(ground, model_dir)
    found = compare_cells(ground, model_dir)
    apart = [one.name for one in found if one.median > LIMITS[ground.device]]
    print("distance of each layer's output, both given the same:")
    for one in found:
        mark = "  <- they part" if one.name in apart else ""
        print(f"  {one.name:<10} {one.median:8.1e}, at most {one.largest:8.1e}{mark}")
    print(f"They part first by {apart[0]}." if apart else "No layer is far.", f"Files: {ground.directory}")
    return 1 if apart else 0
