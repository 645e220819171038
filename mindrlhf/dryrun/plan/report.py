"""`mindrlhf plan`: read, plan, write."""

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mindrlhf.config.load import load_layout_config
from mindrlhf.config.schema import GrpoConfig
from mindrlhf.dryrun.plan.compiled import PlannedStage, compile_plan
from mindrlhf.dryrun.plan.plan import Machine, Plan, make_plan, read_model
from mindrlhf.dryrun.plan.search import SearchResult, search
from mindrlhf.dryrun.plan.text import planned_lines, render_text, search_lines, section
from mindrlhf.dryrun.plan.verdict import Verdict, give_verdict, with_keys
from mindrlhf.errors import UserError
from mindrlhf.system.files import write_file

STANDARD_OUTPUT = "-"


def report_plan(
    config_path: str | Path,
    overrides: Sequence[str],
    machine: Machine,
    *,
    json_path: str | None = None,
    searches: bool = False,
    compiles: bool = False,
) -> tuple[str, bool]:
    """Plan a run, write the JSON if it is asked for, and return the text and whether the run fits.

    Args:
        json_path: None when no JSON is wanted, ``STANDARD_OUTPUT`` for JSON in place of the text.
        searches, compiles: look for better layouts; ask MindSpore's memory planner too.

    Raises:
        UserError: the config or the model does not make a plan, or the file cannot be written; names the fix.
        RunFailure: a compilation failed.
    """
    _check_target(json_path)
    config, followed = _follow(load_layout_config(config_path, overrides), overrides, machine.world_size)
    model = read_model(config.model.path)
    plan = make_plan(config, model, machine)
    verdict = give_verdict(plan)
    parts = [*followed, render_text(plan, verdict)]
    result = search(config, model, machine) if searches else None
    if result is not None:
        parts.append(section("Search", search_lines(result)))
    planned = compile_plan(plan) if compiles else []
    if planned:
        parts.append(section("MindSpore's memory planner", planned_lines(planned)))
    if json_path:
        text = json.dumps(plan_json(plan, verdict, result, planned), indent=1)
        if json_path == STANDARD_OUTPUT:
            return text, verdict.fits
        _write(json_path, f"{text}\n")
    return "\n\n".join(parts), verdict.fits


def _follow(config: GrpoConfig, overrides: Sequence[str], num_devices: int) -> tuple[GrpoConfig, list[str]]:
    """Let data axis and servers of a file follow the number of devices, and say it; what was typed stays."""
    parallel, rollout = config.parallel_config, config.rollout
    width = parallel.model_parallel * parallel.pipeline_stage * parallel.context_parallel
    axes = {
        "parallel_config.data_parallel": (parallel.data_parallel, width),
        "rollout.num_replicas": (rollout.num_replicas, rollout.tensor_parallel),
    }
    typed = {text.partition("=")[0] for text in overrides}
    keys = {
        key: num_devices // width
        for key, (count, width) in axes.items()
        if key not in typed and count * width not in (0, num_devices) and num_devices % width == 0
    }
    if not keys or config.run.device == "cpu":
        return config, []
    given = " ".join(f"{key}={value}" for key, value in keys.items())
    return with_keys(config, keys), [
        f"Another number of devices than the file's; planned with these, which train needs too:\n  {given}"
    ]


def plan_json(
    plan: Plan, verdict: Verdict, result: SearchResult | None, planned: Sequence[PlannedStage]
) -> dict[str, Any]:
    """Return the numbers of the text as JSON values; sizes are bytes."""
    model = {"name": plan.model.name, "num_parameters": plan.num_parameters}
    values = {
        "model": model | {"num_adapter_parameters": plan.num_adapter_parameters},
        "machine": dataclasses.asdict(plan.machine),
        "layout": plan.layout.to_dict(),
        "layer_stages": list(plan.layer_stages),
        "parameters": [dataclasses.asdict(row) for row in plan.rows],
        "memory": [dataclasses.asdict(phase) | {"total": phase.total} for phase in plan.memory],
        "buffer_bytes": plan.buffer_bytes,
    }
    for name in ("batch", "rollout", "seconds"):
        values[name] = dataclasses.asdict(getattr(plan, name))
    values["seconds"]["tokens_per_s"] = plan.seconds.tokens_per_s
    values["states"] = [dataclasses.asdict(state) for state in plan.states]
    values["tower"] = plan.tower and dataclasses.asdict(plan.tower)
    values["verdict"] = dataclasses.asdict(verdict)
    values["search"] = result and dataclasses.asdict(result)
    values["planned_memory"] = [dataclasses.asdict(stage) for stage in planned]
    return values


def _check_target(path: str | None) -> None:
    """Refuse a file that cannot be written before time is spent on its content."""
    if path not in (None, STANDARD_OUTPUT) and (Path(path).is_dir() or not Path(path).resolve().parent.is_dir()):
        raise UserError(f"--json {path} cannot be written: give a file in a directory that exists")


def _write(path: str, text: str) -> None:
    try:
        write_file(Path(path), text)
    except OSError as error:
        raise UserError(f"{path} cannot be written: {error.strerror}") from error
