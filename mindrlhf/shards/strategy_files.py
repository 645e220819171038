"""MindSpore's strategy files, written from parameter layouts and read back.

A strategy directory::

    strategy.json                  what it is for: hash, model sizes, layout, checksum of each file
    merged.ckpt                    all stages, for `transform_checkpoints` and `load_distributed_checkpoint`
    stages/strategy_stage_0.ckpt   one per pipeline stage, for `merge_pipeline_strategys`

The stage files lie in a directory of their own because `merge_pipeline_strategys` refuses one with JSON in it. They are
protobuf messages (`mindspore.train.node_strategy_pb2`), so MindSpore is imported when one is read or written.
"""

import dataclasses
import hashlib
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

from mindrlhf.algorithms.optimizers import GRAPH_NAMES, STATE_NAMES
from mindrlhf.errors import UserError
from mindrlhf.layout.layout import Layout
from mindrlhf.layout.parameter import MAX_RANKS, ParameterLayout, check_layout
from mindrlhf.specs.rules import VISION_PREFIX
from mindrlhf.system.files import partial_path, put_in_place, write_file, write_json
from mindrlhf.weights.hf import read_json_object

if TYPE_CHECKING:
    from mindrlhf.specs import ModelDims

DESCRIPTION_NAME = "strategy.json"
MERGED_NAME = "merged.ckpt"
STAGES_NAME = "stages"
FORMAT_VERSION = 1
# MindSpore's own prefixes of optimiser state and gradient accumulators: laid out like the parameters they belong to.
_STATES = dict.fromkeys((*STATE_NAMES, *GRAPH_NAMES.values()))
STATE_PREFIXES = tuple(f"{name}." for name in (*_STATES, "accu_grads", "grad", "moment1", "moment2"))


def strategy_hash(dims: "ModelDims", layout: Layout) -> str:
    """Identify what a strategy was made for: SHA-256 over the model's sizes and the layout, in hex."""
    text = json.dumps({"dims": identifying_dims(dims), "layout": layout.to_dict()}, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def identifying_dims(dims: "ModelDims") -> dict[str, Any]:
    """Return the sizes that tell models apart, as JSON values: all but the draft layers, which no file has."""
    values = json.loads(json.dumps(dataclasses.asdict(dims)))
    del values["num_draft_layers"]
    return values


def stage_path(directory: str | os.PathLike, stage: int) -> Path:
    """Path of a pipeline stage's strategy file in a strategy directory."""
    return Path(directory) / STAGES_NAME / f"strategy_stage_{stage}.ckpt"


def write_strategy_directory(
    directory: str | os.PathLike, dims: "ModelDims", layout: Layout | None, layouts: Sequence[ParameterLayout]
) -> None:
    """Write stage files and their merge from parameter layouts, and the description of the layout they came from.

    Args:
        layout: None when it is not known, because the parameter layouts were read from foreign files; then there is no
            strategy.json.

    Raises:
        UserError: the disk refuses.
    """
    try:
        (Path(directory) / STAGES_NAME).mkdir(parents=True, exist_ok=True)
        for stage in range(1 + max(stage for parameter in layouts for stage in parameter.stages)):
            write_strategy_file(stage_path(directory, stage), layouts, stage)
        if layout is None:
            merge_stages(directory)
        else:
            finish_strategy_directory(directory, dims, layout)
    except OSError as error:
        raise UserError(f"{directory} cannot be written: {error.strerror or error}") from error


def finish_strategy_directory(
    directory: str | os.PathLike, dims: "ModelDims", layout: Layout, extra: Mapping[str, Any] | None = None
) -> None:
    """Merge the stage files that lie in a strategy directory and describe them all in strategy.json.

    Args:
        extra: more entries of the description, JSON-able.
    """
    directory = Path(directory)
    merge_stages(directory)
    files = [directory / MERGED_NAME, *sorted((directory / STAGES_NAME).glob("*.ckpt"))]
    description = {
        "format_version": FORMAT_VERSION,
        "hash": strategy_hash(dims, layout),
        "parallel": str(layout),
        "layout": layout.to_dict(),
        "dims": identifying_dims(dims),
        "files": {path.relative_to(directory).as_posix(): _sha256(path) for path in files},
        **(extra or {}),
    }
    write_json(directory / DESCRIPTION_NAME, description)


def merge_stages(directory: str | os.PathLike) -> None:
    """Write merged.ckpt from the stage files."""
    import mindspore

    directory = Path(directory)
    temporary = partial_path(directory / MERGED_NAME)
    mindspore.merge_pipeline_strategys(str(directory / STAGES_NAME), str(temporary))
    put_in_place(temporary, directory / MERGED_NAME)


def write_strategy_file(path: Path, layouts: Iterable[ParameterLayout], stage: int) -> None:
    """Write the strategy file of one pipeline stage; it appears whole or not at all.

    Raises:
        OSError: the disk refuses.
    """
    from mindspore.train.node_strategy_pb2 import ParallelStrategyMap

    message = ParallelStrategyMap()
    message.current_stage = 1
    # `merge_pipeline_strategys` takes the stage from the first operator's strategy, so one must stand here.
    operator = message.parallel_strategy_item.add()
    operator.node_name = "mindrlhf"
    operator.parallel_strategys.stage = stage
    operator.parallel_strategys.parallel_strategy.add().dim.append(1)
    add_layouts(message, layouts, stage)
    write_file(path, message.SerializeToString())


def add_layouts(message: Any, layouts: Iterable[ParameterLayout], stage: int) -> None:
    """Add those parameters that lie in a pipeline stage to its message."""
    for layout in layouts:
        if stage in layout.stages:
            item = message.parallel_layout_item.add()
            item.param_name = layout.name
            _fill(item.parallel_layouts, layout)


def read_strategy(
    path: str | os.PathLike, dims: "ModelDims", shapes: Mapping[str, tuple[int, ...]]
) -> tuple[list[ParameterLayout], Layout | None]:
    """Read the layouts of a strategy directory, a merged file, or a directory of stage files of any origin.

    Args:
        dims: sizes of the model that is to be sharded.
        shapes: its parameters' whole shapes by MindFormers name.

    Returns:
        The parameter layouts in the order of ``shapes``, and the layout they were made from when strategy.json tells.

    Raises:
        UserError: a file is missing, damaged or no strategy; a stage is missing; it is a strategy of another model; or
            its files are not those of its description.
    """
    path = Path(path)
    layout = None
    if not path.exists():
        raise UserError(f"strategy {path} does not exist: make one with `mindrlhf strategy`, or use --parallel")
    if (path / DESCRIPTION_NAME).is_file():
        layout = check_strategy_directory(path, dims)
    items: dict[tuple[int, str], Any] = {}
    for file in _strategy_paths(path):
        items.update(_read_items(file))
    return _layouts(path, items, shapes), layout


def check_strategy_directory(path: str | os.PathLike, dims: "ModelDims", layout: Layout | None = None) -> Layout:
    """Check that a strategy directory is whole and made for a model, and for ``layout`` when given; return its layout.

    Raises:
        UserError: naming what differs.
    """
    path = Path(path)
    description = read_json_object(path / DESCRIPTION_NAME)
    try:
        described_layout = Layout(**description["layout"])
        described, recorded, files = dict(description["dims"]), description["hash"], description["files"]
        if not isinstance(files, dict):
            raise TypeError(f"files is {files!r}")
    except (KeyError, TypeError, ValueError, ArithmeticError) as error:
        raise UserError(f"{path / DESCRIPTION_NAME} is damaged ({error}): make the strategy again") from error
    expected = identifying_dims(dims)
    for name in sorted(expected.keys() | described.keys()):
        if expected.get(name) != described.get(name):
            raise UserError(
                f"{path} is the strategy of another model ({name} is {described.get(name)}, the model has "
                f"{expected.get(name)}): make one for this model with `mindrlhf strategy`"
            )
    if layout is not None and layout != described_layout:
        raise UserError(
            f"{path} was made for another config ({described_layout}, this one is {layout}): make it again with "
            "`mindrlhf strategy`, or change parallel_config"
        )
    if recorded != strategy_hash(dims, described_layout):
        raise UserError(f"{path / DESCRIPTION_NAME} was changed after it was written: make the strategy again")
    for name, checksum in files.items():
        if ".." in PurePosixPath(name).parts or PurePosixPath(name).is_absolute() or (path / name).is_symlink():
            raise UserError(f"{path / DESCRIPTION_NAME} names {name!r}, which leads elsewhere: make the strategy again")
        if not (path / name).is_file():
            raise UserError(f"{path / name} is missing: make the strategy again")
        if _sha256(path / name) != checksum:
            raise UserError(f"{path / name} is damaged or of another config: make the strategy again")
    return described_layout


def _fill(message: Any, layout: ParameterLayout) -> None:
    message.dev_matrix.add().dim.extend(layout.device_matrix)
    if any(isinstance(entry, tuple) for entry in layout.tensor_map):
        for entry in layout.tensor_map:
            message.tensor_map.add().dim.extend(entry if isinstance(entry, tuple) else (entry,))
    else:
        message.tensor_map.add().dim.extend(layout.tensor_map)
    message.param_split_shape.add()
    message.indices_offset.add()
    message.field = 0
    message.opt_weight_shard_step = layout.optimizer_shard_step
    size = layout.optimizer_shard_size
    message.opt_weight_shard_size = 0 if size == 1 else -1 if size == layout.num_repeats else size


def _strategy_paths(path: Path) -> list[Path]:
    if path.is_file():
        return [path]
    if (path / MERGED_NAME).is_file():
        return [path / MERGED_NAME]
    for directory in (path / STAGES_NAME, path):
        if files := sorted(directory.glob("*.ckpt")):
            return files
    raise UserError(f"{path} has no strategy file (*.ckpt): give a directory made by `mindrlhf strategy`")


def _read_items(path: Path) -> dict[tuple[int, str], Any]:
    """The layout messages of one file by (stage, parameter name); a stage file's own stage, or that in the name."""
    from google.protobuf.message import DecodeError
    from mindspore.train.node_strategy_pb2 import ParallelStrategyMap

    message = ParallelStrategyMap()
    try:
        message.ParseFromString(path.read_bytes())
        if not message.IsInitialized() or not message.parallel_layout_item:
            raise DecodeError("it holds no layouts")
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from error
    except (DecodeError, UnicodeDecodeError, IndexError, ValueError) as error:
        raise UserError(f"{path} is damaged or no strategy file ({error}): make the strategy again") from error
    operators = message.parallel_strategy_item
    own_stage = operators[0].parallel_strategys.stage if operators else 0
    items = {}
    for item in message.parallel_layout_item:
        stage, dash, name = item.param_name.partition("-")
        is_merged = bool(dash) and stage.isascii() and stage.isdigit()
        key = (int(stage), name) if is_merged else (own_stage, item.param_name)
        items[key] = item.parallel_layouts
    if (last := max(stage for stage, _ in items)) >= MAX_RANKS:
        raise UserError(f"{path} is damaged (it has a pipeline stage {last}): make the strategy again")
    return items


def _layouts(
    path: Path, items: Mapping[tuple[int, str], Any], shapes: Mapping[str, tuple[int, ...]]
) -> list[ParameterLayout]:
    stages_of: dict[str, list[int]] = {}
    for stage, name in sorted(items):
        if not name.startswith(STATE_PREFIXES):
            stages_of.setdefault(name, []).append(stage)
    missing = [name for name in shapes if name not in stages_of]
    num_stages = 1 + max(stage for stage, _ in items)
    absent = sorted(set(range(num_stages)) - {stage for stage, _ in items})
    if absent:
        raise UserError(f"{path} lacks pipeline stage {absent[0]}: put the strategy files of all stages there")
    if missing:
        raise UserError(
            f"{path} says nothing about {missing[0]} ({len(missing)} parameters): it is the strategy of another model, "
            "or of some of its stages; make one for this model with `mindrlhf strategy`"
        )
    if strange := sorted(name for name in stages_of if name not in shapes and _is_parameter(name)):
        raise UserError(
            f"{path} has {strange[0]}, which the model does not ({len(strange)} such): it is the strategy of another "
            "model; make one for this model with `mindrlhf strategy`"
        )
    layouts = [
        _layout(path, name, shape, tuple(stages_of[name]), items[stages_of[name][0], name])
        for name, shape in shapes.items()
    ]
    if len({layout.stage_size for layout in layouts}) > 1:
        raise UserError(f"{path} mixes files of different numbers of ranks: make the strategy again")
    return layouts


def _is_parameter(name: str) -> bool:
    return name.startswith(("decoder.", "embedding.", "output_layer.", VISION_PREFIX))


def _layout(path: Path, name: str, shape: tuple[int, ...], stages: tuple[int, ...], message: Any) -> ParameterLayout:
    matrix = tuple(message.dev_matrix[0].dim) if message.dev_matrix else ()
    entries = [tuple(entry.dim) for entry in message.tensor_map]
    if len(entries) > 1:
        tensor_map = tuple(entry if len(entry) > 1 else entry[0] for entry in entries if entry)
    else:
        tensor_map = entries[0] if entries else ()
    try:
        whole = ParameterLayout(name, shape, stages, matrix, tensor_map)
        check_layout(whole)
        size = message.opt_weight_shard_size if message.opt_weight_shard_step else 1
        size = whole.num_repeats if size == -1 else max(size, 1)
        layout = dataclasses.replace(whole, optimizer_shard_size=size)
        check_layout(layout)
    except ValueError as error:
        raise UserError(
            f"{path} shards {name} {list(shape)} by device matrix {list(matrix)} and tensor map {list(tensor_map)}, "
            f"which does not fit ({error}): it is the strategy of another model, or damaged"
        ) from error
    return layout


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
