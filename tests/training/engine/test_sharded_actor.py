"""The actor over sharded models whose cells are given to it: functions here, so that what goes in and out is seen.

Two data-parallel ranks, each with the optimiser's shard of the parameters (where one is large enough to be cut).
"""

import dataclasses
import threading
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
from fakes import LocalTeam, ThreadedTeam
from thread_broadcasts import Network
from tiny_models import tiny_model

from mindrlhf.algorithms.losses import POLICY_INPUTS, POLICY_STATISTICS
from mindrlhf.config.run import RunSection
from mindrlhf.config.training import ParallelSection
from mindrlhf.data.packing import TokenSequence
from mindrlhf.training.batch import RowOptions, make_batch

SIZES = {"intermediate_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1, "initializer_range": 0.02}
MODEL = tiny_model(vocab_size=1024, **SIZES)
PARALLEL = ParallelSection(data_parallel=2, enable_parallel_optimizer=True)
CONFIG = SimpleNamespace(run=RunSection(device="ascend"), parallel_config=PARALLEL)
NUM_RANKS, LENGTH = 2, 16


class Cells:
    """What stands for the graphs of one rank: it notes its inputs, and its outputs can be worked out by hand."""

    def __init__(self, learning_rate, is_last, rank):
        self.learning_rate, self.is_last, self.rank = learning_rate, is_last, rank
        self.num_logprobs = 0
        self.updates = []  # (learning rate, is_last, inputs) of each call
        self.reads = []  # how many calls there had been when a result was read

    def logprobs(self, input_ids, segment_ids, labels, mask):
        import mindspore as ms

        self.num_logprobs += 1
        return (ms.Tensor(-labels.asnumpy() * mask.asnumpy() / 7),)

    def update(self, *inputs):
        import mindspore as ms

        arrays = [one.asnumpy() for one in inputs]
        self.updates.append((float(self.learning_rate.asnumpy()), self.is_last.asnumpy().tolist(), arrays))
        statistics = np.arange(len(POLICY_STATISTICS), dtype=np.float32) + len(self.updates)
        own = np.split(-arrays[2] * arrays[3] / 7 * len(self.updates), NUM_RANKS)[self.rank]
        norm = np.array([0.5 * len(self.updates)], np.float32)
        return tuple(Result(ms.Tensor(one.astype(np.float32)), self) for one in (statistics, norm, own[None]))


class Result:
    """A tensor that notes when it is read."""

    def __init__(self, tensor, cells):
        self.tensor, self.cells = tensor, cells

    def asnumpy(self):
        self.cells.reads.append(len(self.cells.updates))
        return self.tensor.asnumpy()


@pytest.fixture(scope="module")
def model_dir(mindformers, tmp_path_factory):
    from mindrlhf.weights.convert import export_hf, random_hf_weights

    directory = tmp_path_factory.mktemp("model")
    export_hf(random_hf_weights(MODEL, 0), MODEL, directory)
    return directory


@pytest.fixture
def make_ranks(model_dir):
    """Return a function that builds the actors of all ranks, with their cells."""
    import mindspore as ms

    from mindrlhf.models.causal_lm import build_model
    from mindrlhf.shards.sources import open_source
    from mindrlhf.training.checkpoints.models import load
    from mindrlhf.training.engine.actor import Actor
    from mindrlhf.training.engine.model import Model
    from mindrlhf.training.engine.sharded_updates import ShardedEngine, UpdateGraph
    from mindrlhf.training.engine.shards import Shards

    network = build_model(MODEL, seq_length=LENGTH)

    def shard(cell, rank, prefix=""):
        layouts = Shards(network, PARALLEL, rank).held
        parameters = {
            name: ms.Parameter(ms.ops.zeros(one.shard_shape, ms.float32), name=prefix + name)
            for name, one in layouts.items()
        }
        shards = Shards(network, PARALLEL, rank, parameters)
        load(shards, open_source(model_dir))
        return Model(shards, cell), parameters

    def make(rank):
        lr, is_last = (ms.Parameter(ms.Tensor(value, ms.float32), name="x") for value in (0.0, [1.0]))
        cells = Cells(lr, is_last, rank)
        model, parameters = shard(cells.logprobs, rank)
        state = {
            f"{kind}.{name}": ms.Parameter(ms.ops.ones(parameter.shape, ms.float32) * (rank + 1), name=f"{kind}.{name}")
            for name, parameter in parameters.items()
            for kind in ("exp_avg", "exp_avg_sq")
        }
        state["global_step"] = ms.Parameter(ms.Tensor([3], ms.int32), name="global_step")
        engine = ShardedEngine(model, UpdateGraph(cells.update, lr, is_last, state))
        reference, _ = shard(cells.logprobs, rank, "reference.")
        return Actor(engine, reference, saves_reference=True), cells, parameters

    return lambda: [make(rank) for rank in range(NUM_RANKS)]


def make_two_batches():
    random = np.random.default_rng(0)
    batches = []
    for _ in range(2):
        sequences = [
            TokenSequence(
                random.integers(1, 1000, 4).astype(np.int32),
                random.integers(1, 1000, 5).astype(np.int32),
                {"advantages": random.standard_normal(5).astype(np.float32)},
            )
            for _ in range(8)
        ]
        batches.append(make_batch(sequences, RowOptions((LENGTH,), 2, NUM_RANKS, False)))
    return batches


def test_updates_read_the_own_rows_and_the_last_call_makes_them(make_ranks):
    ranks, (first, second) = make_ranks(), make_two_batches()
    results = []
    for rank, (actor, _, _) in enumerate(ranks):
        actor.receive([first.part_of(rank, NUM_RANKS), second.part_of(rank, NUM_RANKS)])
        old = actor.compute_logprobs("old_logprobs", 0)
        results.append([actor.update(batch, 0.25 * (batch + 1), 0.75) for batch in (0, 1, 0)])
        for computed, rows in zip(old, first.part_of(rank, NUM_RANKS).micro_batches, strict=True):
            np.testing.assert_allclose(computed, -rows.labels * rows.mask / 7)
    for rank, (_, cells, _) in enumerate(ranks):
        # Of the first batch alone they were asked for; no update asks for them.
        assert cells.num_logprobs == 2
        # What calls return is read after the last of an update: the device does not wait for the host between them.
        assert set(cells.reads) == {2, 4, 6}
        assert [(lr, is_last) for lr, is_last, _ in cells.updates] == [
            (lr, [is_last]) for lr in (0.25, 0.5, 0.25) for is_last in (0.0, 1.0)
        ]
        own = first.part_of(rank, NUM_RANKS).micro_batches
        for rows, (_, _, inputs) in zip(own, cells.updates):
            mine, others = slice(2 * rank, 2 * rank + 2), slice(2 - 2 * rank, 4 - 2 * rank)
            for array, sent in zip((rows.input_ids, rows.segment_ids, rows.labels, rows.mask), inputs, strict=False):
                np.testing.assert_array_equal(sent[mine], array)
                assert not sent[others].any()
            tokens = dict(zip(POLICY_INPUTS, inputs[4:-1], strict=True))
            np.testing.assert_array_equal(tokens["advantages"][mine], rows.tokens["advantages"])
            np.testing.assert_allclose(tokens["old_logprobs"][mine], -rows.labels * rows.mask / 7)
            np.testing.assert_array_equal(inputs[-1], np.tile([0.75, first.num_tokens], (4, 1)).astype(np.float32))
    # The graph's sums are of all rows already: they are told once.
    sums = np.arange(len(POLICY_STATISTICS))
    np.testing.assert_array_equal(results[0][0].statistics, 2 * sums + 1 + 2)
    np.testing.assert_array_equal(results[0][2].statistics, 2 * sums + 5 + 6)
    assert not any(result.statistics.any() for result in results[1])
    assert [result.grad_norm for result in results[1]] == [1.0, 2.0, 3.0]
    for rank, own_results in enumerate(results):
        # Calls 5 and 6, of two micro-batches: what each call said itself, of the rank's own rows.
        own = first.part_of(rank, NUM_RANKS).micro_batches
        for call, (found, rows) in enumerate(zip(own_results[2].logprobs, own, strict=True), 5):
            np.testing.assert_allclose(found, -rows.labels * rows.mask / 7 * call, rtol=1e-6)


def test_updates_that_return_no_outputs_have_a_pass_of_their_own_once_a_step(make_ranks):
    (actor, cells, _), _ = make_ranks()
    actor.engine.returns_outputs = False
    own = make_two_batches()[0].part_of(0, NUM_RANKS)
    for step in (1, 2):
        actor.receive([own])
        for _ in range(2):
            result = actor.update(0, 0.1, 0.0)
            for found, rows in zip(result.logprobs, own.micro_batches, strict=True):
                np.testing.assert_allclose(found, -rows.labels * rows.mask / 7)
        assert cells.num_logprobs == step * len(own.micro_batches)


def test_calls_before_the_last_of_an_update_leave_the_optimiser_alone(make_ranks):
    """They go to the graph of the gradients; a batch of one micro-batch needs none."""
    (actor, cells, _), _ = make_ranks()
    engine, gradients = actor.engine, []

    def add(*inputs):
        gradients.append([one.asnumpy() for one in inputs])
        return cells.update(*inputs)

    engine.graph = dataclasses.replace(engine.graph, gradients=add)
    own = make_two_batches()[0].part_of(0, NUM_RANKS)
    actor.receive([own, dataclasses.replace(own, micro_batches=own.micro_batches[:1])])
    results = [actor.update(batch, 0.1, 0.0) for batch in (0, 1)]
    assert len(gradients) == 1 and len(cells.updates) == 3
    assert [is_last for _, is_last, _ in cells.updates[1:]] == [[1.0], [1.0]]
    np.testing.assert_array_equal(gradients[0][0][:2], own.micro_batches[0].input_ids)
    sums = np.arange(len(POLICY_STATISTICS))
    np.testing.assert_array_equal(results[0].statistics, 2 * sums + 1 + 2)
    assert [result.grad_norm for result in results] == [1.0, 1.5]


def test_a_warm_up_makes_no_update(make_ranks):
    (actor, cells, _), _ = make_ranks()
    shapes = RowOptions((8, LENGTH), 2, 1, True).shapes()
    actor.warm_up(shapes, ["old_logprobs", "reference_logprobs"])
    assert cells.num_logprobs == 4
    assert [(is_last, inputs[0].shape) for _, is_last, inputs in cells.updates] == [([0.0], (4, 8)), ([0.0], (4, 16))]
    assert not any(inputs[3].any() for _, _, inputs in cells.updates), "its rows weigh nothing"


@pytest.mark.parametrize("machines", ["xx", "xy"], ids=["one machine", "two machines"])
def test_all_ranks_publish_the_model_and_rank_0_exports_it(make_ranks, model_dir, tmp_path, monkeypatch, machines):
    from mindrlhf.training.nodes import find_nodes
    from mindrlhf.training.replica_team import with_replicas
    from mindrlhf.weights.open import open_tensors
    from mindrlhf.weights.publish import export

    ranks = make_ranks()
    assert any(ranks[0][2][one.name].shape != one.shape for one in ranks[0][0].model.placement.held.values()), (
        "nothing is sharded, and the test is about shards"
    )
    actors = [actor for actor, _, _ in ranks]
    team = LocalRanks(actors, machines)
    monkeypatch.setattr(export, "_EXPORT_BUCKET_BYTES", 1 << 16)
    tensors = export.sharded_tensors(with_replicas(CONFIG, team), team, find_nodes(team))
    actors[0].export(tmp_path / "final", None, tensors)
    assert [actor._buffers for actor in actors] == [{}, {}]
    expected, found = open_tensors(model_dir), open_tensors(tmp_path / "final")
    assert sorted(found.names()) == sorted(expected.names())
    for name in expected.names():
        np.testing.assert_array_equal(found.read(name), expected.read(name), err_msg=name)


def test_what_all_ranks_save_comes_back_with_the_synced_reference(make_ranks, tmp_path):
    import mindspore as ms

    ranks, others = make_ranks(), make_ranks()
    for other, _, _ in others:
        for one in other.engine.graph.state.values():
            one.set_data(ms.Tensor(one.asnumpy() * 0))
    for rank, (actor, _, parameters) in enumerate(ranks):
        for parameter in parameters.values():
            parameter.set_data(ms.Tensor(parameter.asnumpy() + 1 if parameter.ndim > 1 else parameter.asnumpy()))
        actor.sync_reference()
        actor.begin_saving(str(tmp_path), copies=rank == 0)
        assert actor.end_saving().checksums
    for (actor, _, _), (other, _, _) in zip(ranks, others):
        other.restore(str(tmp_path))
        for name in ("model", "reference"):
            for (mine, array), (theirs, restored) in zip(
                getattr(actor, name).placement.shards(), getattr(other, name).placement.shards(), strict=True
            ):
                assert mine == theirs
                np.testing.assert_array_equal(array, restored, err_msg=mine)
        sharded = [one.name for one in actor.model.placement.held.values() if one.shard_shape != one.shape]
        for name in (*(f"{kind}.{name}" for name in sharded for kind in ("exp_avg", "exp_avg_sq")), "global_step"):
            saved, restored = (one.engine.graph.state[name].asnumpy() for one in (actor, other))
            np.testing.assert_array_equal(saved, restored, err_msg=name)
    size_bytes = sum(path.stat().st_size for path in tmp_path.rglob("*.safetensors"))
    assert 0.9 * size_bytes < ranks[0][0].state_size_bytes() <= size_bytes


def test_scores_of_a_reward_model_stand_after_the_token_that_they_are_of(make_ranks):
    """Its graph gives the score before each token: rows move by one position on their way in, and scores back."""
    import mindspore as ms

    from mindrlhf.training.engine.shards import Shards

    (actor, *_), _ = make_ranks()
    shards = Shards(actor.model.network, PARALLEL, 0, {}, after_token=True)
    rows = make_two_batches()[0].part_of(0, NUM_RANKS).micro_batches[0]
    given = []

    def graph(*inputs):
        given.extend(one.asnumpy() for one in inputs)
        return (ms.Tensor(given[2] * given[3]),)

    found, own = shards.outputs(graph, rows), shards.own_outputs((ms.Tensor(rows.labels[None]),), rows)
    np.testing.assert_array_equal(given[3][: len(rows.mask), 1:], rows.mask[:, :-1])
    np.testing.assert_array_equal(found[:, :-1], rows.labels[:, 1:] * rows.mask[:, :-1])
    np.testing.assert_array_equal(own[:, :-1], rows.labels[:, 1:])
    np.testing.assert_array_equal(shards.per_token(rows.mask)[:, 1:], rows.mask[:, :-1])
    assert not found[:, -1].any() and not given[3][:, 0].any()


def test_an_engine_takes_a_graph_of_other_inputs(make_ranks):
    (actor, cells, _), _ = make_ranks()
    from mindrlhf.training.engine.sharded_updates import ShardedEngine

    graph = dataclasses.replace(actor.engine.graph, token_inputs=("values", "returns"))
    rows = make_two_batches()[0].part_of(0, NUM_RANKS)
    rows.micro_batches[0].tokens["returns"] = rows.micro_batches[0].mask * 3
    ShardedEngine(actor.model, graph).update(rows, 0.1, 0.0)
    inputs = cells.updates[0][2]
    assert len(inputs) == 4 + 2 + 1 and not inputs[4].any()
    np.testing.assert_array_equal(inputs[5][:2], rows.micro_batches[0].mask * 3)


def _look(ranks, expected, found, version, bucket):
    """Compare the bucket that the buffers of all ranks have, and note its tensors."""
    for own in {rank.weight_buffer().path: rank.weight_buffer() for rank in ranks}.values():
        own.verify(version)
        for name, _, array in own.tensors(version):
            np.testing.assert_array_equal(array, expected[name], err_msg=name)
            found.append(name)


class LocalRanks(ThreadedTeam):
    """Ranks that work at the same time, each on a machine of a name."""

    def __init__(self, actors, machines):
        from mindrlhf.training.results import Machine

        super().__init__(actors)
        one_by_one = threading.Lock()  # MindSpore runs operators of one thread at a time
        for actor, machine in zip(actors, machines, strict=True):
            actor.machine = lambda name=machine: Machine(name)
            placement = actor.model.placement
            placement.write_to = partial(_locked, one_by_one, placement.write_to)


def _locked(lock, function, *arguments):
    with lock:
        function(*arguments)


@pytest.mark.parametrize("between_devices", [False, True], ids=["hosts", "devices"])
@pytest.mark.parametrize(
    "form", [{}, {"dtype": "bfloat16", "bucket_bytes": 1 << 16}], ids=["whole", "in buckets of bfloat16"]
)
def test_ranks_on_two_machines_complete_the_buffers_of_both(make_ranks, model_dir, form, between_devices, monkeypatch):
    """Each machine has half of the large parameters; the weights, and their digest, are those of one machine."""
    from mindrlhf.training import broadcast
    from mindrlhf.training.nodes import find_nodes
    from mindrlhf.training.replica_team import with_replicas
    from mindrlhf.weights.open import open_tensors
    from mindrlhf.weights.publish.publisher import PUBLISH, WeightPublisher, open_weight_buffers
    from mindrlhf.weights.tensors import convert_dtype

    network = Network()
    monkeypatch.setattr(broadcast, "open_broadcast", network.open)
    digests, source = [], open_tensors(model_dir)
    dtype = form.get("dtype", "float32")
    expected = {name: convert_dtype(source.read(name), "float32", dtype) for name in source.names()}
    for machines in ("xx", "xy"):
        actors = [actor for actor, _, _ in make_ranks()]
        ranks, found = LocalRanks(actors, machines), []
        look = partial(_look, actors, expected, found)
        with open_weight_buffers(ranks, find_nodes(ranks), between_devices=between_devices, **form) as buffer:
            digests.append(WeightPublisher(with_replicas(CONFIG, ranks), buffer).publish(1, look))
            assert sorted(found) == sorted([*expected] * len(set(machines))), "every buffer had every tensor"
            assert bool(form) == (buffer.num_buckets > 2)
        for actor in actors:
            actor.close_weights(PUBLISH)
    assert digests[0] == digests[1]
    assert set(network.num_broadcasts) == ({0, 1} if between_devices else set()), "both have what one lacks"


@pytest.mark.parametrize("bucket_bytes", [0, 1 << 15, 1 << 12])
def test_what_leaves_the_device_has_the_rollouts_width_once(make_ranks, model_dir, bucket_bytes, monkeypatch):
    """Of float32 parameters and a server in bfloat16, 2 bytes an element come to the host, in buckets too."""
    import mindspore as ms

    from mindrlhf.weights.open import open_tensors
    from mindrlhf.weights.publish.buffer import WeightBuffer
    from mindrlhf.weights.tensors import convert_dtype

    actors = [actor for actor, _, _ in make_ranks()]
    with actors[0].model.placement.create_weight_buffer("bfloat16", bucket_bytes) as buffer:
        buffers = [buffer, *(WeightBuffer.attach(buffer.path, writable=True) for _ in actors[1:])]
        copied, to_host = [], ms.Tensor.asnumpy
        monkeypatch.setattr(ms.Tensor, "asnumpy", lambda tensor: copied.append(to_host(tensor)) or copied[-1])
        found = {}
        for bucket in range(buffer.num_buckets):
            written = []
            for actor, own in zip(actors, buffers, strict=True):
                own.begin(1, bucket)
                actor.model.placement.write_to(own)
                written += own.written()
            buffer.commit(written)
            found |= {name: array.copy() for name, _, array in buffer.tensors(1)}
        assert (buffer.num_buckets > 1) == bool(bucket_bytes)
        assert sum(array.nbytes for array in copied) == 2 * sum(info.num_elements for info in buffer.infos)
    source = open_tensors(model_dir)
    assert found.keys() == set(source.names())
    for name, array in found.items():
        np.testing.assert_array_equal(array, convert_dtype(source.read(name), "float32", "bfloat16"), err_msg=name)


def test_ranks_give_memory_back_before_a_server_loads_or_is_started_again(make_ranks, monkeypatch):
    from mindrlhf.training.engine import actor as actors
    from mindrlhf.weights.publish.publisher import PUBLISH, WeightPublisher, open_weight_buffers

    actor, _, _ = make_ranks()[0]
    events, write = [], actor.model.placement.write_to
    actor.model.placement.write_to = lambda *given: (events.append("write"), write(*given))
    monkeypatch.setattr(actor.engine, "make_room", lambda: events.append("make room"))
    monkeypatch.setattr(actors, "give_back_memory", lambda: events.append("give back"))
    team = LocalTeam([actor])
    with open_weight_buffers(team, [[0]]) as buffer:
        monkeypatch.setattr(buffer, "commit", lambda written: None)  # another rank has the other half
        WeightPublisher(team, buffer).publish(1, lambda *_: events.append("load"))
    assert events == ["write", "make room", "give back", "load"]
    actor.close_weights(PUBLISH)


def test_parts_are_cut_out_of_a_parameter_alike_on_device_and_host():
    """Rows in a run, evenly spaced, and scattered; all columns or some, turned; rounded on the way or kept."""
    import mindspore as ms

    from mindrlhf.training.engine.shards import Shards
    from mindrlhf.weights.publish.buffer import WeightBuffer
    from mindrlhf.weights.publish.shards import PublishedShard
    from mindrlhf.weights.tensors import TensorInfo, convert_dtype

    values = np.random.default_rng(3).standard_normal((12, 6)).astype(np.float32)
    bits = convert_dtype(values, "float32", "bfloat16")
    for dtype in ("float32", "bfloat16"):
        parameter = ms.Parameter(ms.Tensor(values).astype(getattr(ms, dtype)), name="x")
        for rows in (slice(2, 7), slice(1, 12, 3), np.array([0, 1, 4, 5, 9])):
            for columns in (None, slice(1, 4)):
                expected = bits[rows] if columns is None else bits[rows, columns].T
                part = PublishedShard("x", rows, tuple(slice(0, size) for size in expected.shape), columns)
                with WeightBuffer.create([TensorInfo("x", "bfloat16", expected.shape)]) as buffer:
                    buffer.begin(1)
                    Shards._write_rounded(SimpleNamespace(parameters={"x": parameter}), buffer, "x", [part])
                    buffer.commit()
                    ((_, _, found),) = buffer.tensors(1)
                    np.testing.assert_array_equal(found, expected)
