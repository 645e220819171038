"""Which of the optimiser's state is on the device in each call of an update, and which calls an update has."""

from types import SimpleNamespace

import mindspore as ms
import numpy as np
import pytest

from mindrlhf.config.memory import MemorySection
from mindrlhf.config.training import ParallelSection
from mindrlhf.data.packing import PackedRows
from mindrlhf.layout.layout import Layout
from mindrlhf.training.batch import Batch
from mindrlhf.training.engine.offload import OptimizerPlaces
from mindrlhf.training.engine.sharded_updates import ShardedEngine, UpdateGraph

LENGTH = 640


class Moved:
    """Stands for a parameter that knows where it is."""

    def __init__(self):
        self.on_device = True

    def _offload(self):
        assert self.on_device, "it is sent twice"
        self.on_device = False

    def _load(self):
        assert not self.on_device, "it is fetched twice"
        self.on_device = True


class Calls:
    """The graphs of an update of two weights, of which this rank holds the first."""

    def __init__(self, memory: MemorySection, monkeypatch):
        monkeypatch.setattr(ms.runtime, "empty_cache", lambda: None)
        self.means, self.squares, self.totals = ([Moved(), Moved()] for _ in range(3))
        kinds = {"exp_avg": self.means, "exp_avg_sq": self.squares}
        state = {f"{kind}.{of}": one for kind, both in kinds.items() for of, one in zip(("held", "elsewhere"), both)}
        optimizer = SimpleNamespace(state=state)
        weights = [SimpleNamespace(name="held"), SimpleNamespace(name="elsewhere")]
        update = SimpleNamespace(optimizer=optimizer, weights=weights, totals=self.totals)
        places = OptimizerPlaces(update, {"held"}, memory)
        parallel = ParallelSection(data_parallel=1, model_parallel=2, use_seq_parallel=True)
        placement = SimpleNamespace(
            layout=Layout.from_config(parallel, 2),
            num_update_micro_batches=1,
            rank=0,
            is_in_last_stage=True,
            per_token=lambda values: values,
            row_inputs=lambda rows, _: [rows.input_ids, rows.segment_ids, rows.labels, rows.mask],
            inputs=lambda values, _: list(values),
            own_outputs=lambda outputs, rows: np.concatenate([one.asnumpy() for one in outputs]),
        )
        self.rate = ms.Parameter(ms.Tensor(0.0, ms.float32), name="rate")
        self.is_last = ms.Parameter(ms.Tensor([1.0], ms.float32), name="last")
        graph = UpdateGraph(self._step, self.rate, self.is_last, {}, (), self._gradients, memory.swap_moments)
        self.engine = ShardedEngine(SimpleNamespace(placement=placement), graph, places)
        self.seen = []

    def where(self) -> tuple[bool, bool]:
        """Whether moments, and sums, are on the device."""
        assert self.means[0].on_device == self.squares[0].on_device
        assert all(one[1].on_device for one in (self.means, self.squares, self.totals)), "there is nothing to move"
        return self.means[0].on_device, self.totals[0].on_device

    def _gradients(self, *inputs):
        self.seen.append(("gradients", *self.where(), inputs[0].shape[1], float(inputs[3].sum())))
        return ms.Tensor([float(inputs[3].sum())]), ms.Tensor([0.0]), ms.Tensor(inputs[3])

    def _step(self, *inputs):
        kind = "step" if self.is_last.asnumpy()[0] else "call"
        self.seen.append((kind, *self.where(), inputs[0].shape[1], float(inputs[3].sum())))
        return ms.Tensor([float(inputs[3].sum())]), ms.Tensor([7.0]), ms.Tensor(inputs[3])


def rows() -> PackedRows:
    ones = np.ones((2, LENGTH), np.int32)
    return PackedRows(ones, ones, ones, ones.astype(np.float32), {})


@pytest.mark.parametrize("offload", [False, True])
def test_moments_that_are_swapped_are_on_the_device_for_the_step_alone(monkeypatch, offload):
    calls = Calls(MemorySection(swap_moments=True, offload_optimizer=offload), monkeypatch)
    calls.engine.warm_up(rows())
    done = calls.engine.update(Batch((rows(), rows()), 5), 0.1, 0.0)
    weight = 2.0 * LENGTH
    # Rows of weight 0, of 128 tokens for each of the two ranks that share a row.
    assert calls.seen == [
        ("gradients", False, True, LENGTH, weight),
        ("call", True, True, 256, 0.0),
        ("gradients", False, True, LENGTH, weight),
        ("gradients", False, True, LENGTH, weight),
        ("step", True, True, 256, 0.0),
    ]
    assert done.grad_norm == 7.0 and done.statistics.tolist() == [2 * weight]
    calls.engine.make_room()
    assert calls.where() == (False, not offload)


def test_state_that_is_offloaded_is_on_the_device_in_every_call(monkeypatch):
    calls = Calls(MemorySection(offload_optimizer=True), monkeypatch)
    calls.engine.make_room()
    assert calls.where() == (False, False)
    calls.engine.update(Batch((rows(), rows()), 5), 0.1, 0.0)
    assert [one[:3] for one in calls.seen] == [("gradients", True, True), ("step", True, True)]
    calls.engine.make_room()
    calls.engine.make_room()
    assert calls.where() == (False, False)


def test_by_default_nothing_moves(monkeypatch):
    calls = Calls(MemorySection(), monkeypatch)
    calls.engine.make_room()
    calls.engine.update(Batch((rows(),), 5), 0.1, 0.0)
    assert calls.where() == (True, True) and [one[0] for one in calls.seen] == ["step"]


def test_short_rows_stay_short(monkeypatch):
    calls = Calls(MemorySection(swap_moments=True), monkeypatch)
    ones = np.ones((2, 64), np.int32)
    calls.engine.update(Batch((PackedRows(ones, ones, ones, ones.astype(np.float32), {}),), 5), 0.1, 0.0)
    assert calls.seen[-1][0] == "step" and calls.seen[-1][3] == 64
