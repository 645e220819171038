"""Run compiled parallel graphs on CPU ranks: one rank's side, the program that ``msrun`` starts.

    python -m cpu_execution.rank DIRECTORY

The directory is one that :func:`cpu_execution.run.execute` has prepared.
"""

import json
import signal
import sys
import time
from collections.abc import Iterable
from pathlib import Path

import mindspore as ms
import numpy as np
from mindspore import nn
from mindspore.communication import create_group, get_rank, init
from safetensors import safe_open
from safetensors.numpy import save_file

from cpu_execution.lower import LoweredGraph, lower_graph
from cpu_execution.mindir import LOWERED_PREFIX, LoweringError
from cpu_execution.run import (
    BATCHES_NAME,
    LOGPROBS_NAME,
    PUBLICATIONS,
    RESULT_NAME,
    SLICES_NAME,
    SPEC_NAME,
    WEIGHTS_NAME,
)
from mindrlhf.layout.layout import Layout, parameter_layouts
from mindrlhf.layout.parameter import ParameterLayout
from mindrlhf.layout.rows import block_of, own_rows, place_rows
from mindrlhf.specs import ModelDims, find_spec
from mindrlhf.system.processes import die_with_launcher
from mindrlhf.weights.board import WeightBoard
from mindrlhf.weights.publishing import plan_publication, write_slices

# State that starts at zero: AdamW's moments and step count, gradients, their defect, and what the lowering has added.
_ZERO_PREFIXES = ("adam_m.", "adam_v.", "accu_grads", "grad.", "global_step", "defect", LOWERED_PREFIX)
_LEARNING_RATE, _IS_LAST = "learning_rate", "is_last"  # what the host sets


def main(directory: Path) -> None:
    spec = json.loads((directory / SPEC_NAME).read_text())
    # Nobody else would end a rank that waits for a message that never comes.
    signal.setitimer(signal.ITIMER_REAL, spec["timeout_s"])
    ms.set_context(mode=ms.GRAPH_MODE)
    ms.set_device("CPU")
    init()
    ms.set_context(runtime_num_threads=1)
    groups: dict[str, tuple[int, ...]] = {}
    for job in spec["jobs"]:
        print(f"executing {job['name']}", flush=True)
        _Execution(spec, job, directory, get_rank()).run(groups)


class _Execution:
    """One job on one rank."""

    def __init__(self, spec: dict, job: dict, directory: Path, rank: int):
        self.spec = spec
        self.job = job
        self.directory = directory
        self.rank = rank
        model = find_spec(spec["hf_config"])
        self.dims: ModelDims = model.dims(spec["hf_config"])
        self.rules = {rule.mf_name: rule for rule in model.rules(self.dims)}
        self.layout = Layout(**job["layout"])
        self.layouts = {one.name: one for one in parameter_layouts(model, self.dims, self.layout)}

    def run(self, groups: dict[str, tuple[int, ...]]) -> None:
        """Execute all steps and write the report and the final slices; ``groups`` are those made so far."""
        own_directory = self.directory / self.job["name"]
        logprobs = self._logprobs(own_directory, groups) if self.job["logprob_graphs"] else []
        cell, parameters, lowered = self._load("graphs", own_directory, groups)
        published = {PUBLICATIONS[0]: self._publish(parameters, PUBLICATIONS[0])}
        losses = []
        for call, is_last in enumerate(self.spec["is_last"]):
            parameters[_IS_LAST].set_data(ms.Tensor([float(is_last)], ms.float32))
            inputs = self._own_inputs(call)
            if logprobs:
                inputs[self.job["logprob_input"]] = logprobs[call]
            losses.append(self._call(cell, inputs))
        published[PUBLICATIONS[1]] = self._publish(parameters, PUBLICATIONS[1])
        # Contiguous, or safetensors would write the wrong bytes.
        slices = {name: np.ascontiguousarray(parameters[name].asnumpy()) for name in self._own_names(parameters)}
        save_file(slices, own_directory / SLICES_NAME.format(rank=self.rank))
        report = {"losses": losses, "published": published, "lowered": lowered.replaced}
        (own_directory / RESULT_NAME.format(rank=self.rank)).write_text(json.dumps(report))

    def _load(
        self, kind: str, directory: Path, groups: dict[str, tuple[int, ...]]
    ) -> tuple[nn.Cell, dict[str, ms.Parameter], LoweredGraph]:
        """Lower and load this rank's graph, and give its parameters their first values."""
        lowered = lower_graph(self.job[kind][self.rank], self.rank, directory / f"lowered_{kind}_{self.rank}.mindir")
        make_groups(lowered, groups)
        cell = nn.GraphCell(ms.load(lowered.path))
        parameters = {parameter.name: parameter for parameter in cell.get_parameters()}
        self._fill(parameters.values())
        return cell, parameters, lowered

    def _own_names(self, parameters: dict[str, ms.Parameter]) -> list[str]:
        """Names of the model's parameters that this rank holds."""
        return [name for name, layout in self.layouts.items() if self.rank in layout.ranks and name in parameters]

    def _fill(self, parameters: Iterable[ms.Parameter]) -> None:
        """Give every parameter its slice, every state its start.

        Raises:
            LoweringError: the graph lacks a parameter of this rank, or has one of another shape, or an unknown one.
        """
        missing = {name for name, layout in self.layouts.items() if self.rank in layout.ranks}
        with safe_open(self.directory / WEIGHTS_NAME, framework="np") as weights:
            for parameter in parameters:
                if parameter.name in self.layouts:
                    missing.discard(parameter.name)
                    value = self._slice(weights.get_tensor(parameter.name), self.layouts[parameter.name])
                    if value.shape != tuple(parameter.shape):
                        raise LoweringError(
                            f"{self.job['name']}: {parameter.name} is {tuple(parameter.shape)} in the graph of rank "
                            f"{self.rank}, but its layout gives {value.shape}"
                        )
                    parameter.set_data(ms.Tensor(value))
                elif parameter.name.startswith(_ZERO_PREFIXES):
                    parameter.set_data(ms.ops.zeros(parameter.shape, parameter.dtype))
                elif parameter.name == _IS_LAST:
                    parameter.set_data(ms.Tensor([1.0], ms.float32))
                elif parameter.name == _LEARNING_RATE:
                    parameter.set_data(ms.Tensor(self.spec["learning_rate"], ms.float32))
                else:
                    raise LoweringError(f"{self.job['name']}: the graph has an unknown parameter {parameter.name}")
        if missing:
            raise LoweringError(f"{self.job['name']}: the graph of rank {self.rank} lacks {sorted(missing)[0]}")

    def _slice(self, whole: np.ndarray, layout: ParameterLayout) -> np.ndarray:
        return np.ascontiguousarray(whole[layout.slice_of(self.rank)])

    def _own_inputs(self, call: int) -> list[np.ndarray]:
        """This rank's rows of the inputs of a call."""
        with safe_open(self.directory / BATCHES_NAME, framework="np") as batches:
            arrays = [batches.get_tensor(f"{call}.{index}") for index in range(self.spec["num_inputs"])]
        return [array[block_of(self.layout, self.rank, len(array))] for array in arrays]

    def _tensors(self, arrays: Iterable[np.ndarray], num_pieces: int) -> list[ms.Tensor]:
        return [ms.Tensor(place_rows(array, self.layout, self.rank, num_pieces)) for array in arrays]

    def _logprobs(self, directory: Path, groups: dict[str, tuple[int, ...]]) -> list[np.ndarray]:
        """Run the graph of the log-probabilities on the rows of every call; return and save this rank's."""
        cell, _, _ = self._load("logprob_graphs", directory, groups)
        logprobs = []
        for call in range(len(self.spec["is_last"])):
            outputs = cell(*self._tensors(self._own_inputs(call)[:4], self.job["num_logprob_pieces"]))
            pieces = outputs if isinstance(outputs, (tuple, list)) else [outputs]
            is_in_last = self.layout.stage_of(self.rank) == self.layout.pipeline_stage - 1
            rows = self._own_inputs(call)[self.job["logprob_input"]]
            own = own_rows([piece.asnumpy() for piece in pieces], self.layout, self.rank) if is_in_last else rows * 0
            logprobs.append(np.ascontiguousarray(own))
        save_file(
            {str(call): array for call, array in enumerate(logprobs)}, directory / LOGPROBS_NAME.format(rank=self.rank)
        )
        return logprobs

    def _call(self, cell: nn.Cell, inputs: Iterable[np.ndarray]) -> float:
        """Run the update; return the first number of its first output, the loss."""
        outputs = cell(*self._tensors(inputs, self.job["num_pieces"]))
        first = outputs[0] if isinstance(outputs, (tuple, list)) else outputs
        return float(first.asnumpy().reshape(-1)[0])

    def _publish(self, parameters: dict[str, ms.Parameter], moment: str) -> dict:
        """Write this rank's share to a board; return what the lead needs to seal it."""
        publication = plan_publication(list(self.layouts.values()), self.rules, self.dims, self.rank)
        with WeightBoard.attach(self.job["boards"][moment], writable=True) as board:
            arrays = {name: parameters[name].asnumpy() for name in publication}
            board.begin(0)
            start_s = time.perf_counter()
            written_bytes = write_slices(board, publication, arrays)
            seconds = time.perf_counter() - start_s
            return {"contribution": board.contribution(), "written_bytes": written_bytes, "seconds": seconds}


def make_groups(lowered: LoweredGraph, made: dict[str, tuple[int, ...]]) -> None:
    """Create the groups of a graph that have not been made yet, in an order that all ranks share."""
    for name, ranks in sorted(lowered.groups.items()):
        assert made.get(name, ranks) == ranks, f"group {name} is both {made[name]} and {ranks}"
        if name not in made:
            create_group(name, list(ranks))
            made[name] = ranks


if __name__ == "__main__":
    die_with_launcher()
    main(Path(sys.argv[1]))
