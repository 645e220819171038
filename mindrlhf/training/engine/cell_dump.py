"""What the cells of a model compute, and the gradients, of chosen steps: a rank's part of a dump at level L0.

A compiled graph shows none of its cells on a CPU: MindSpore has no kernel there for the operator with which msprobe
looks into one. And a hook on a cell, in this process, changes the key of every compiled graph, which then are compiled
anew. So the forward pass is run once more, operator by operator, with each cell's `construct` watched meanwhile.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from mindspore import Parameter, nn

from mindrlhf.algorithms.logprobs import PolicyLogProbs
from mindrlhf.config.observe import CELL_LEVEL, MsprobeSection
from mindrlhf.data.packing import PackedRows
from mindrlhf.debugging.dump_files import StageDump
from mindrlhf.debugging.dump_paths import rank_dir
from mindrlhf.images.pixels import image_digest
from mindrlhf.system import speed_ups
from mindrlhf.training.engine.model import model_tensors
from mindrlhf.training.runtime import run_eagerly


class CellDump:
    """Writes the cells of one rank.

    Args:
        section: what to dump.
        dump_dir: of the run.
        rank: index of this rank.
    """

    def __init__(self, section: MsprobeSection, dump_dir: Path, rank: int):
        self._section = section
        self._dump_dir = dump_dir
        self._rank = rank
        self._step = 0
        self._stages: dict[str, StageDump] = {}
        self._images: dict[str, np.ndarray] = {}

    def begin(self, step: int) -> None:
        """Dump what follows as that of a step, from 1."""
        self._step, self._stages = step, {}

    def end(self) -> None:
        """Dump nothing until the next ``begin``."""
        self._step, self._images = 0, {}

    def show(self, images: Sequence[np.ndarray]) -> None:
        """Take the images of a step, uint8 [height, width, 3] each; a frozen tower runs apart from the decoder."""
        if self._step:
            self._images = {image_digest(pixels): pixels for pixels in images}

    def forward(self, stage: str, policy: PolicyLogProbs, micro_batches: Sequence[PackedRows]) -> None:
        """Run a model on micro-batches, and write the inputs, parameters and outputs of its cells.

        Each parameter appears once, at the innermost cell that has it, with the first micro-batch. A frozen vision
        tower runs on the images of each micro-batch, before the decoder.
        """
        dump = self._dump_of(stage)
        if dump is None:
            return
        seen: set[int] = set()
        fast = speed_ups.of_rank(policy.device)
        for rows in micro_batches:
            if fast:
                fast.bind(policy)
            with _watched(policy, dump, seen), run_eagerly():
                if policy.model.images is not None:
                    policy.model.images.look([self._images[digest] for digest in rows.images])
                policy(*model_tensors(policy.model, rows))
        dump.write()

    def gradients(self, policy: PolicyLogProbs, gradients: Iterable[tuple[str, np.ndarray]]) -> None:
        """Write what the compiled graphs summed up for an update, at the cell that has the parameter.

        Args:
            policy: the trained model.
            gradients: name of a parameter -> its gradient over all micro-batches of this rank.
        """
        dump = self._dump_of("update")
        if dump is None:
            return
        by_cell: dict[str, dict[str, list[np.ndarray]]] = {}
        owners = _owners(policy)
        for name, gradient in gradients:
            cell, attribute = owners[name]
            by_cell.setdefault(cell, {})[attribute] = [gradient]
        for cell, parts in by_cell.items():
            prefix = f"{cell}.parameters_grad"
            dump.add_cell(f"{prefix}.{dump.count(prefix)}", parts)
        dump.write()

    def _dump_of(self, stage: str) -> StageDump | None:
        if not self._step or stage not in self._section.stages:
            return None
        if stage not in self._stages:
            directory = rank_dir(self._dump_dir, stage, self._step, self._rank)
            self._stages[stage] = StageDump(directory, CELL_LEVEL, self._section.task)
        return self._stages[stage]


@contextmanager
def _watched(root: nn.Cell, dump: StageDump, seen: set[int]) -> Iterator[None]:
    """Have every cell below ``root`` report its calls; ``seen`` holds the parameters that were written before."""
    cells = [(name, cell) for name, cell in root.cells_and_names() if cell is not root]
    callers: list[str] = []
    for name, cell in cells:
        # An attribute of the object hides the method of its class; Cell's own assignment would take it for a setting.
        cell.__dict__["construct"] = _watch(cell, _title(name, cell), dump, callers, seen)
    try:
        yield
    finally:
        for _, cell in cells:
            del cell.__dict__["construct"]


def _watch(cell: nn.Cell, title: str, dump: StageDump, callers: list[str], seen: set[int]):
    construct = cell.construct

    def watched(*arguments: Any, **named: Any) -> Any:
        parent = callers[-1] if callers else None
        prefix = f"{title}.forward"
        full_name = f"{prefix}.{dump.count(prefix)}"
        callers.append(full_name)
        try:
            output = construct(*arguments, **named)
        finally:
            callers.pop()
        parts = {"input_args": list(arguments), "input_kwargs": named}
        given = [value for value in arguments if isinstance(value, Parameter)]
        if own := [value for value in (*given, *cell.get_parameters()) if id(value) not in seen]:
            seen.update(map(id, own))
            parts["parameters"] = {value.name: value for value in own}
        outputs = output if isinstance(output, (tuple, list)) else [output]
        dump.add_cell(full_name, {**parts, "output": list(outputs)}, parent)
        return output

    return watched


def _title(name: str, cell: nn.Cell) -> str:
    return f"Cell.{name}.{type(cell).__name__}"


def _owners(root: nn.Cell) -> dict[str, tuple[str, str]]:
    """Return, by name of a parameter, the title of the cell that has it and its name there."""
    owners: dict[str, tuple[str, str]] = {}
    for name, cell in root.cells_and_names():
        for attribute, parameter in cell.parameters_and_names(expand=False):
            owners.setdefault(parameter.name, (_title(name, cell), attribute.rpartition(".")[2]))
    return owners
