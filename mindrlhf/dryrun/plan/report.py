"""Carrying out `mindrlhf plan`: read, plan, write."""

import dataclasses
import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from mindrlhf.config.load import load_layout_config
from mindrlhf.dryrun.plan.compiled import compile_plan
from mindrlhf.dryrun.plan.devices import DEVICES
from mindrlhf.dryrun.plan.json_values import plan_json
from mindrlhf.dryrun.plan.kernels import compile_kernels, kernel_lines
from mindrlhf.dryrun.plan.picture import render_picture
from mindrlhf.dryrun.plan.plan import Machine, make_plan, read_model
from mindrlhf.dryrun.plan.schedule.lengths import read_lengths
from mindrlhf.dryrun.plan.schedule.report import compare_schedules, schedule_json, schedule_notes, schedule_rows
from mindrlhf.dryrun.plan.search import search
from mindrlhf.dryrun.plan.text import columns, planned_lines, render_text, search_lines, section, wrap
from mindrlhf.dryrun.plan.times import plan_times, time_notes, time_rows, times_json
from mindrlhf.dryrun.plan.verdict import give_verdict
from mindrlhf.errors import UserError
from mindrlhf.system.files import write_file
from mindrlhf.system.sizes import parse_size

STANDARD_OUTPUT = "-"


@dataclass(frozen=True)
class PlanOptions:
    """What the command line asks for; the paths are None when no file is wanted."""

    world_size: int
    device_memory: str = "64GB"
    node_size: int = 8
    link_speed: str = "25GB"
    json_path: str | None = None
    picture_path: str | None = None
    compiles: bool = False
    kernels: bool = False
    device: str = "A2"
    searches: bool = False
    schedules: bool = False
    lengths: str | None = None


def report_plan(config_path: str | Path, overrides: Iterable[str], options: PlanOptions) -> tuple[str, bool]:
    """Plan a run, write the files asked for, and return the text and whether the run fits.

    Raises:
        UserError: an option, the config or the model does not make a plan; names the fix.
        RunFailure: a compilation failed.
    """
    machine = _machine(options)
    for path, option in ((options.json_path, "--json"), (options.picture_path, "--picture")):
        _check_target(path, option)
    config = load_layout_config(config_path, overrides)
    model = read_model(config.model.path)
    plan = make_plan(config, model, machine)
    verdict = give_verdict(plan)
    parts = [render_text(plan, verdict)]
    lengths = read_lengths(options.lengths, config.rollout.max_response_length)
    times = plan_times(plan, lengths) if config.run.device != "cpu" else None
    if times is not None:
        notes = [line for note in time_notes(times, machine.device.words) for line in wrap(note)]
        parts.append(section("Time of a step", [*columns(time_rows(times), "<>><"), "", *notes]))
    result = search(config, model, machine) if options.searches else None
    if result is not None:
        parts.append(section("Search", search_lines(result, plan)))
    counts = compile_kernels(plan) if options.kernels else []
    if counts:
        parts.append(section("Kernels", kernel_lines(counts, machine.device)))
    planned = compile_plan(plan) if options.compiles and not options.kernels else []
    if planned:
        parts.append(section("MindSpore's memory planner", planned_lines(planned)))
    schedules = compare_schedules(plan, lengths) if options.schedules else None
    if schedules is not None:
        notes = [line for note in schedule_notes(schedules) for line in wrap(note)]
        parts.append(section("Schedules", [*columns(schedule_rows(schedules), "<>>>><"), "", *notes]))
    # What goes to standard output stands there alone.
    printed = "\n\n".join(parts)
    if options.json_path:
        values = plan_json(plan, verdict, result, planned)
        if counts:
            values["kernels"] = [dataclasses.asdict(one) for one in counts]
        if times is not None:
            values["times"] = times_json(times)
        if schedules is not None:
            values["schedules"] = schedule_json(schedules)
        text = json.dumps(values, indent=1)
        if options.json_path == STANDARD_OUTPUT:
            printed = text
        else:
            _write(options.json_path, f"{text}\n")
    if options.picture_path == STANDARD_OUTPUT:
        printed = render_picture(plan)
    elif options.picture_path:
        _write(options.picture_path, render_picture(plan))
    return printed, verdict.fits


def _machine(options: PlanOptions) -> Machine:
    for value, option in ((options.world_size, "--workers"), (options.node_size, "--node-size")):
        if value < 1:
            raise UserError(f"{option} is {value}: give a number of devices, 1 or more")
    device_bytes = parse_size(options.device_memory, "--device-memory")
    link_bytes_per_s = parse_size(options.link_speed, "--link-speed")
    return Machine(options.world_size, device_bytes, options.node_size, link_bytes_per_s, DEVICES[options.device])


def _check_target(path: str | None, option: str) -> None:
    """Refuse a file that cannot be written before time is spent on its content."""
    if path not in (None, STANDARD_OUTPUT) and (Path(path).is_dir() or not Path(path).resolve().parent.is_dir()):
        raise UserError(f"{option} {path} cannot be written: give a file in a directory that exists")


def _write(path: str, text: str) -> None:
    try:
        write_file(Path(path), text)
    except OSError as error:
        raise UserError(f"{path} cannot be written: {error.strerror}") from error
