"""Where two dumps part: the first step, stage and tensor that differ."""

import itertools
import json
import math
import tokenize
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mindrlhf.debugging import dump_paths as layout
from mindrlhf.errors import UserError

_STATISTICS = ("Max", "Min", "Mean", "Norm")
_SHOWN = ("dtype", "shape", *_STATISTICS, "value")
_COMPARED = (*_SHOWN, "crc32")
# Parameters first: where they differ, nothing before is to blame. Then what goes into a cell, and what it makes of it.
_PARTS = ("parameters", "input_args", "input_kwargs", "output")
_MAX_DEPTH = 32
_MAX_TEXT = 60

_NUM_PHASES = 3  # of a stage; see _read_phases

Leaf = dict[str, Any]  # what a dump says of a tensor or another value
Leaves = dict[str, Leaf]  # by name
Place = tuple[int, str, int]  # step, stage, rank


@dataclass(frozen=True)
class StageCount:
    """How much of a stage of a step differs."""

    step: int
    stage: str
    num_different: int
    num_compared: int


@dataclass(frozen=True)
class DumpDifference:
    """What :func:`compare_dumps` found.

    Attributes:
        step, stage, rank, name: of the first tensor that differs, in the order in which they were computed; 0, "", 0
            and "" when none does.
        details: how it differs, a line each.
        stages: of all that both dumps have, in order.
        one_sided: what only one dump has, a line each.
    """

    step: int
    stage: str
    rank: int
    name: str
    details: tuple[str, ...]
    stages: tuple[StageCount, ...]
    one_sided: tuple[str, ...] = ()

    @property
    def is_same(self) -> bool:
        """Whether the dumps are the same as far as both go."""
        return not self.name


def is_dump(directory: Path) -> bool:
    return bool(layout.rank_dirs(directory))


def compare_dumps(first: Path, second: Path) -> DumpDifference:
    """Compare two dumps, bit by bit where both have checksums.

    Raises:
        UserError: a directory holds no dump, the two have no stage of a step in common, or a file is damaged.
    """
    one, other = _open(first), _open(second)
    common = [place for place in one if place in other]
    if not common:
        raise UserError(f"the dumps in {first} and {second} have no stage of a step in common to compare")
    found: tuple[int, str, int, str] | None = None
    details: list[str] = []
    counts: dict[tuple[int, str], list[int]] = {}
    for (step, stage, rank), name, pair in _pairs(one, other, common):
        count = counts.setdefault((step, stage), [0, 0])
        count[1] += 1
        if not _is_different(*pair):
            continue
        count[0] += 1
        if found is None:
            found = step, stage, rank, name
            details = list(_explain(pair, (one[step, stage, rank], other[step, stage, rank])))
    one_sided = [f"only {first} has {_place(place)}" for place in one if place not in other]
    one_sided += [f"only {second} has {_place(place)}" for place in other if place not in one]
    stages = tuple(StageCount(*place, *count) for place, count in counts.items())
    return DumpDifference(*(found or (0, "", 0, "")), tuple(details), stages, tuple(one_sided))


def _pairs(
    one: Mapping[Place, Path], other: Mapping[Place, Path], common: Sequence[Place]
) -> Iterator[tuple[Place, str, tuple[Leaf | None, Leaf | None]]]:
    """Yield what both dumps say of each value, in the order in which it was computed."""
    for _, group in itertools.groupby(common, key=lambda place: place[:2]):
        parts = [(place, _read_phases(one[place], place[1]), _read_phases(other[place], place[1])) for place in group]
        # What a stage computes last depends on the cells of all ranks.
        for phase in range(_NUM_PHASES):
            for place, *phases in parts:
                leaves = [by_phase[phase] for by_phase in phases]
                for name in dict.fromkeys((*leaves[0], *leaves[1])):
                    yield place, name, (leaves[0].get(name), leaves[1].get(name))


def _open(directory: Path) -> dict[Place, Path]:
    found = layout.rank_dirs(directory)
    if not found:
        raise UserError(f"{directory} holds no dump: give the msprobe.dump_dir of a run with msprobe.enabled=true")
    return found


def _place(place: Place) -> str:
    return "step {}, {}, rank {}".format(*place)


def _read_phases(directory: Path, stage: str) -> tuple[Leaves, Leaves, Leaves]:
    """Return the values of a rank's part: what was given to its cells, of its cells, and of what came of them."""
    cells: Leaves = {}
    for name, entry in _read_data(directory / layout.CELLS_NAME).items():
        if not isinstance(entry, dict):
            raise UserError(f"{directory / layout.CELLS_NAME} is no dump of msprobe: '{name}' is not an object")
        for part in sorted(entry, key=lambda part: _PARTS.index(part) if part in _PARTS else len(_PARTS)):
            cells.update(_flatten(entry[part], f"{name}.{part.removesuffix('_args')}"))
    given: Leaves = {}
    results: Leaves = {}
    for name, value in _read_data(directory / layout.DEBUG_NAME).items():
        is_given = stage == "update" and name.partition(".")[0] not in layout.UPDATE_RESULTS
        (given if is_given else results).update(_flatten(value, name))
    return given, cells, results


def _read_data(path: Path) -> Mapping[str, Any]:
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} is damaged ({error}): dump the step again") from None
    data = content.get("data") if isinstance(content, dict) else None
    if not isinstance(data, dict):
        raise UserError(f"{path} is no dump of msprobe: it has no object 'data'")
    return data


def _flatten(value: Any, name: str, depth: int = 0) -> Iterator[tuple[str, Leaf]]:
    if depth > _MAX_DEPTH:
        raise UserError(
            f"'{name[:_MAX_TEXT]}' of a dump is nested deeper than {_MAX_DEPTH} levels: dump the step again"
        )
    if isinstance(value, dict) and not isinstance(value.get("type"), str):
        for key, part in value.items():
            yield from _flatten(part, f"{name}.{key}", depth + 1)
    elif isinstance(value, list):
        for index, part in enumerate(value):
            yield from _flatten(part, f"{name}.{index}", depth + 1)
    else:
        yield name, value if isinstance(value, dict) else {"value": value}


def _is_different(one: Leaf | None, other: Leaf | None) -> bool:
    if one is None or other is None:
        return True
    # A dump of msprobe itself has no checksums.
    names = [name for name in _COMPARED if name != "crc32" or (name in one and name in other)]
    return any(not _equal(one.get(name), other.get(name)) for name in names)


def _equal(one: Any, other: Any) -> bool:
    both_nan = isinstance(one, float) and isinstance(other, float) and math.isnan(one) and math.isnan(other)
    return both_nan or one == other


def _explain(pair: tuple[Leaf | None, Leaf | None], dirs: tuple[Path, Path]) -> Iterator[str]:
    if None in pair:
        yield f"only {dirs[0] if pair[1] is None else dirs[1]} has it"
        return
    for name in _SHOWN:
        values = [described.get(name) for described in pair]
        if not _equal(*values):
            yield f"{name}: {_short(values[0])} and {_short(values[1])}"
    arrays = [_read_array(described.get("data_name"), directory) for described, directory in zip(pair, dirs)]
    if all(array is not None for array in arrays) and arrays[0].shape == arrays[1].shape:
        yield _largest_difference(*map(np.atleast_1d, arrays))


def _largest_difference(one: np.ndarray, other: np.ndarray) -> str:
    is_same = (one == other) | (np.isnan(one) & np.isnan(other))
    with np.errstate(invalid="ignore"):
        # A NaN on one side only is larger than any difference.
        distances = np.where(is_same, 0.0, np.nan_to_num(np.abs(one - other), nan=np.inf))
    place = np.unravel_index(int(np.argmax(distances)), distances.shape)
    where = ", ".join(map(str, place))
    return (
        f"{int((~is_same).sum())} of {one.size} elements differ, most at [{where}]: {one[place]:.9g} and "
        f"{other[place]:.9g}"
    )


def _read_array(file_name: Any, directory: Path) -> np.ndarray | None:
    # The name comes from a file: it must not lead out of the dump.
    if not isinstance(file_name, str) or Path(file_name).name != file_name or not file_name.endswith(".npy"):
        return None
    path = directory / layout.TENSORS_NAME / file_name
    try:
        # A map, so that a damaged shape is noticed before memory is taken for it.
        return np.array(np.lib.format.open_memmap(path, mode="r"), np.float64)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, EOFError, TypeError, OverflowError, SyntaxError, tokenize.TokenError) as error:
        raise UserError(f"{path} is damaged ({error}): dump the step again") from None


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _MAX_TEXT else f"{text[:_MAX_TEXT]}..."
