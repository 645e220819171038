"""Strategy files by compilation: one rank of each distinct pipeline stage, extended by name to all stages and layers.

Layers of a kind (dense, with experts, with linear attention) are cut alike, and so are the stages between the first and
the last. So it is enough to compile a few layers in a pipeline of three stages, of as many ranks each (or a few stages
more, where MindSpore does not take the number of ranks); a graph of all stages, layers and micro-batches takes many
times as long.
:func:`compile_strategy` compiles everything when asked to.
"""

import dataclasses
import os
import shutil
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from mindrlhf.config.schema import GrpoConfig
from mindrlhf.dryrun.compile.request import (
    CompileReport,
    CompileRequest,
    compile_ranks,
    compiled_config,
    update_request,
)
from mindrlhf.errors import RunFailure, UserError
from mindrlhf.layout.feasibility import can_compile, check_feasible, check_num_ranks
from mindrlhf.layout.layout import Layout, parameter_layouts
from mindrlhf.layout.parameter import ParameterLayout
from mindrlhf.shards.strategy_files import (
    add_layouts,
    finish_strategy_directory,
    stage_path,
    write_strategy_directory,
)
from mindrlhf.specs import ModelDims, ModelSpec, find_spec, has_linear_attention, with_num_layers
from mindrlhf.specs.lora import SCALE_NAME
from mindrlhf.specs.rules import IMAGE_ROWS_NAME, VISION_PREFIX
from mindrlhf.system.files import sync

ROLLOUT_NAME = "rollout"
ALL_LAYERS = 0
# The first, one that stands for all between, and the last.
NUM_DISTINCT_STAGES = 3
_LAYER_MARK = "decoder.layers."


@dataclasses.dataclass(frozen=True)
class CompiledStrategy:
    """Reports of a compiled strategy.

    Attributes:
        reports: one for each distinct pipeline stage, by the stage of the layout that it stands for.
        extent: how much of the model, the pipeline and the batch was compiled, in words.
    """

    reports: list[CompileReport]
    extent: str


def compile_strategy(
    config: GrpoConfig,
    hf_config: dict,
    layout: Layout,
    directory: Path,
    *,
    layers_per_stage: int,
    on_progress: Callable[[str], None],
) -> CompiledStrategy:
    """Write a strategy directory (see :mod:`mindrlhf.shards.strategy_files`) and one for the rollout layout in it.

    Args:
        layers_per_stage: layers of each stage to compile; ``ALL_LAYERS`` compiles all layers of all stages.
        on_progress: takes a line about what is being done.

    Raises:
        UserError: the config cannot be compiled, or ``directory`` exists.
        RunFailure: a compilation failed.
    """
    spec = find_spec(hf_config)
    dims = spec.dims(hf_config)
    by_stage = _requests(config, compiled_config(hf_config), layout, layers_per_stage)
    rollout = _rollout_layouts(config, spec, dims)
    if directory.exists():
        raise UserError(f"--output {directory} exists: give a directory that does not")
    temporary = _make_temporary(directory)
    try:
        (temporary / "stages").mkdir()
        stages = list(by_stage)
        requests = [
            dataclasses.replace(request, strategy_file=str(stage_path(temporary, stage)))
            for stage, request in by_stage.items()
        ]
        extent = _describe_extent(requests[0], config, dims)
        on_progress(f"compiling {extent}, for one rank of each of these stages")
        # One after the other: each takes up to a few GB.
        reports = [
            dataclasses.replace(report, stage=stage)
            for stage, report in zip(stages, compile_ranks(requests), strict=True)
        ]
        if layers_per_stage != ALL_LAYERS:
            extend_strategies(temporary, spec, dims, layout)
        _add_tower(temporary, parameter_layouts(spec, dims, layout))
        finish_strategy_directory(temporary, dims, layout, {"compiled_layers": reports[0].num_layers})
        write_strategy_directory(temporary / ROLLOUT_NAME, dims, *rollout)
        _publish(temporary, directory)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return CompiledStrategy(reports, extent)


def _requests(config: GrpoConfig, hf_config: dict, layout: Layout, layers_per_stage: int) -> dict[int, CompileRequest]:
    """The compilations by pipeline stage."""
    spec = find_spec(hf_config)
    dims = spec.dims(hf_config)
    batch = check_feasible(config, dims, layout)
    check_num_ranks(layout.world_size)
    num_stages = layout.pipeline_stage
    if layers_per_stage != ALL_LAYERS:
        num_stages = next(
            number
            for number in range(min(num_stages, NUM_DISTINCT_STAGES), num_stages + 1)
            if can_compile(number * layout.stage_size)
        )
    num_layers = layers_per_stage * num_stages or dims.num_layers
    if num_layers < dims.num_layers:
        hf_config = shorten(hf_config, num_layers)
    parallel = dataclasses.asdict(config.parallel_config) | {
        "data_parallel": layout.data_parallel,
        "pipeline_stage": num_stages,
        "micro_batch_num": _num_compiled_micro_batches(config, num_stages, layers_per_stage),
    }
    return {
        # The last of the compiled stages is the last of all.
        stage if stage < num_stages - 1 else layout.pipeline_stage - 1: update_request(
            config, hf_config, batch, parallel, stage * layout.stage_size, min(num_layers, dims.num_layers)
        )
        for stage in range(num_stages)
    }


def _num_compiled_micro_batches(config: GrpoConfig, num_stages: int, layers_per_stage: int) -> int:
    """Micro-batches of the compiled pipeline: no more than fill it, unless everything is compiled.

    They are unrolled in the graph, and change nothing about the layouts.
    """
    number = config.parallel_config.micro_batch_num
    # At least two, where there are two: else nothing would be accumulated.
    return number if layers_per_stage == ALL_LAYERS else min(number, max(num_stages, 2))


def _describe_extent(request: CompileRequest, config: GrpoConfig, dims: ModelDims) -> str:
    parts = (
        (request.num_layers, dims.num_layers, "layers"),
        (request.parallel["pipeline_stage"], config.parallel_config.pipeline_stage, "stages"),
        (request.parallel["micro_batch_num"], config.parallel_config.micro_batch_num, "micro-batches"),
    )
    return ", ".join(f"{number} of {total} {what}" for number, total, what in parts)


def shorten(hf_config: dict, num_layers: int) -> dict:
    """The config.json of the same model with fewer layers, which has a layer of each kind if ``num_layers`` allows."""
    shortened = with_num_layers(hf_config, num_layers)
    if shortened.get("first_k_dense_replace"):
        shortened["first_k_dense_replace"] = 1
    if has_linear_attention(hf_config) and not all(find_spec(hf_config).dims(hf_config).linear.layers):
        shortened |= {"layer_types": None, "full_attention_interval": 2}  # by turns
    return shortened


def extend_strategies(directory: Path, spec: ModelSpec, dims: ModelDims, layout: Layout) -> None:
    """Extend compiled stage files to all layers of all stages, in place.

    Args:
        directory: holds the stage files of the first, the second and the last stage, or of all.

    Raises:
        RunFailure: a stage has a kind of layer that was not compiled.
    """
    from mindspore.train.node_strategy_pb2 import ParallelStrategyMap

    compiled = {}
    for stage in range(layout.pipeline_stage):
        if stage_path(directory, stage).exists():
            message = ParallelStrategyMap()
            message.ParseFromString(stage_path(directory, stage).read_bytes())
            compiled[stage] = message
    stages = layout.layer_stages(dims.num_layers)
    for stage in range(layout.pipeline_stage):
        source = stage if stage in compiled else 1
        extended = ParallelStrategyMap()
        extended.CopyFrom(compiled[source])
        for item in extended.parallel_strategy_item:
            item.parallel_strategys.stage = stage
        layers = [layer for layer, of_stage in enumerate(stages) if of_stage == stage]
        _extend(extended, spec, dims, layers, stage)
        _write(stage_path(directory, stage), extended.SerializeToString())


def _add_tower(directory: Path, layouts: Sequence[ParameterLayout]) -> None:
    """Add a vision tower, which is not in the sharded graph, to the stage files: whole on every rank of its stage."""
    from mindspore.train.node_strategy_pb2 import ParallelStrategyMap

    tower = [layout for layout in layouts if layout.name.startswith(VISION_PREFIX)]
    for stage in sorted({stage for layout in tower for stage in layout.stages}):
        message = ParallelStrategyMap()
        message.ParseFromString(stage_path(directory, stage).read_bytes())
        for item in [item for item in message.parallel_layout_item if item.param_name == IMAGE_ROWS_NAME]:
            message.parallel_layout_item.remove(item)
        add_layouts(message, tower, stage)
        _write(stage_path(directory, stage), message.SerializeToString())


def _extend(message, spec: ModelSpec, dims: ModelDims, layers: Sequence[int], stage: int) -> None:
    """Replace the layers in a strategy message by ``layers``, each laid out like a compiled one of its kind."""
    outside, by_layer = [], {}
    for item in message.parallel_layout_item:
        prefix, mark, rest = item.param_name.partition(_LAYER_MARK)
        if mark:
            layer, _, name = rest.partition(".")
            by_layer.setdefault(int(layer), {})[prefix, name] = item.parallel_layouts
        elif not item.param_name.startswith(SCALE_NAME):
            outside.append((item.param_name, item.parallel_layouts))
    names = _layer_names(spec, dims)
    # MindSpore lists more than the weights: optimiser state, and counters of experts.
    kinds = {kind: items for items in by_layer.values() for kind in names if kind <= {name for _, name in items}}
    del message.parallel_layout_item[:]
    for layer in layers:
        if names[layer] not in kinds:
            raise RunFailure(
                f"stage {stage} has a kind of layer (layer {layer}) that was not compiled: compile more layers "
                "(--layers-per-stage)"
            )
        for (prefix, name), layouts in kinds[names[layer]].items():
            outside.append((f"{prefix}{_LAYER_MARK}{layer}.{name}", layouts))
    for name, layouts in outside:
        item = message.parallel_layout_item.add()
        item.param_name = name
        item.parallel_layouts.CopyFrom(layouts)


def _layer_names(spec: ModelSpec, dims: ModelDims) -> list[frozenset[str]]:
    """The parameters of every decoder layer, by their names within it."""
    names: list[set[str]] = [set() for _ in range(dims.num_layers)]
    for rule in spec.rules(dims):
        _, mark, rest = rule.mf_name.partition(_LAYER_MARK)
        if mark:
            layer, _, name = rest.partition(".")
            names[int(layer)].add(name)
    return [frozenset(parts) for parts in names]


def _rollout_layouts(config: GrpoConfig, spec: ModelSpec, dims: ModelDims):
    """The layout of one rollout server: vLLM's tensor parallelism splits as MindFormers' does."""
    layout = Layout(model_parallel=config.rollout.tensor_parallel)
    try:
        return layout, parameter_layouts(spec, dims, layout)
    except UserError as error:
        raise UserError(f"'rollout.tensor_parallel': {error}") from error


def _make_temporary(directory: Path) -> Path:
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
        # Absolute: the compiling process has a directory of its own.
        return Path(tempfile.mkdtemp(prefix=f".{directory.name}-", dir=directory.parent)).absolute()
    except OSError as error:
        raise UserError(f"--output {directory} cannot be written: {error.strerror}") from error


def _publish(temporary: Path, directory: Path) -> None:
    temporary.chmod(0o755)
    sync(temporary)
    temporary.rename(directory)
    sync(directory.parent)


def _write(path: Path, data: bytes) -> None:
    temporary = path.with_name(f".{path.name}.partial")
    temporary.write_bytes(data)
    sync(temporary)
    os.replace(temporary, path)
