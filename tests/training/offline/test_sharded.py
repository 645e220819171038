"""Training on fixed data with a model that is cut over ranks: the product's trainers over the ranks' workers.

What stands for the graphs of a rank computes with the whole model, so that all numbers must be those of a plain run.
"""

import dataclasses
from types import SimpleNamespace

import numpy as np
import pytest
from engines import accumulate, whole_engine
from fakes import LocalTeam
from offline_cases import PairFile, export_model, write_config
from rewound import Rewound
from slow_tests import SLOW
from test_preference import run

from mindrlhf.config.load import load_config
from mindrlhf.config.run import RunSection
from mindrlhf.config.training import ParallelSection
from mindrlhf.training.preflight import RunInputs

PARALLEL = ParallelSection(data_parallel=1, model_parallel=2)
CONFIG = SimpleNamespace(run=RunSection(device="ascend"), parallel_config=PARALLEL)


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    return export_model(tmp_path_factory)


class WholeGraphs:
    """The graphs of one rank: they take what a sharded graph takes, and compute all of it."""

    def __init__(self, engine):
        import mindspore as ms

        self.engine = engine
        self.learning_rate = ms.Parameter(ms.Tensor(0.0, ms.float32), name="learning_rate")
        self.is_last = ms.Parameter(ms.Tensor([1.0], ms.float32), name="is_last")

    def outputs(self, *inputs):
        import mindspore as ms

        return (ms.Tensor(self.engine.model.logprobs(_rows(inputs))),)

    def update(self, *inputs):
        import mindspore as ms

        values, scalars = [one.asnumpy() for one in inputs[4:-1]], inputs[-1].asnumpy()
        statistics, outputs = accumulate(self.engine, _rows(inputs), values, scalars[0, 1])
        is_last = self.is_last.asnumpy()[0] == 1
        norm = self.engine.apply(float(self.learning_rate.asnumpy())) if is_last else 0.0
        return ms.Tensor(statistics, ms.float32), ms.Tensor([norm], ms.float32), ms.Tensor(outputs[None])


def _rows(inputs):
    from mindrlhf.data.packing import PackedRows

    return PackedRows(*(one.asnumpy() for one in inputs[:4]), tokens={})


class NoGraphs:
    """Those of a rank whose results another one of its replica has too."""

    def outputs(self, *inputs):
        import mindspore as ms

        return (ms.Tensor(np.zeros(inputs[3].shape, np.float32)),)

    def update(self, *inputs):
        import mindspore as ms

        zeros = ms.Tensor(np.zeros((1, *inputs[3].shape), np.float32))
        return ms.Tensor([0.0, 0.0], ms.float32), ms.Tensor([0.0], ms.float32), zeros


def make_sharded(whole, make_trainer, token_inputs, *, after_token=False, reference=None):
    """Return a trainer over two ranks, of which the last, whose results count, computes.

    Args:
        whole: engine of a whole model that stands for the graphs of the last rank; ``reference``, which has a
            ``model``, for its reference's.
    """
    from mindrlhf.training.engine.model import Model
    from mindrlhf.training.engine.offline import OfflineWorker
    from mindrlhf.training.engine.sharded_updates import ShardedEngine, UpdateGraph
    from mindrlhf.training.engine.shards import Shards
    from mindrlhf.training.replica_team import with_replicas

    computing = WholeGraphs(whole)
    workers = []
    for rank, graphs in enumerate((NoGraphs(), computing)):
        shards = Shards(whole.model.network, PARALLEL, rank, {}, after_token=after_token)
        graph = UpdateGraph(graphs.update, computing.learning_rate, computing.is_last, {}, token_inputs)
        frozen = None
        if reference is not None:
            outputs = WholeGraphs(reference).outputs if rank else graphs.outputs
            frozen = Model(Shards(reference.model.network, PARALLEL, rank, {}), outputs)
        engine = ShardedEngine(Model(shards, graphs.outputs), graph)
        workers.append(OfflineWorker(engine, frozen))
    return make_trainer(with_replicas(CONFIG, LocalTeam(workers)))


def as_sharded(config):
    return dataclasses.replace(config, parallel_config=PARALLEL)


def assert_same_runs(plain, sharded, rewind=lambda: None):
    """``rewind`` puts the engine back that both use, one after the other."""
    metrics, summary = run(sharded)
    rewind()
    expected, expected_summary = run(plain)
    unread = ("timing", "memory", "recompiles", "e2e")
    for step, values in expected.items():
        for name, value in values.items():
            if not name.startswith(unread):
                # A graph returns the norm as float32.
                expected_value = float(np.float32(value)) if name == "grad_norm" else value
                assert metrics[step][name] == expected_value, (step, name)
    assert metrics.keys() == expected.keys()
    assert summary == expected_summary


@pytest.fixture(scope="module")
def dpo_worker(model_dir, tmp_path_factory):
    """One with a reference model, compiled once, and what puts it back."""
    from mindrlhf.training.engine.build import build_offline
    from mindrlhf.training.runtime import Rank

    worker = build_offline(dpo_config(model_dir, tmp_path_factory.mktemp("config")), (32,), Rank(0, 1))
    return worker, Rewound(worker)


def dpo_config(model_dir, tmp_path):
    options = {"beta": 0.5, "sft_weight": 0.3}
    overrides = ["run.max_steps=3", f"model.reference_path={model_dir}"]
    return load_config("dpo", write_config(tmp_path / "dpo.yaml", model_dir, dpo=options), overrides)


def test_dpo_is_that_of_one_process(dpo_worker, model_dir, tmp_path):
    from mindrlhf.training.offline.preference import PreferenceTrainer
    from mindrlhf.training.team import Team

    config = dpo_config(model_dir, tmp_path)
    inputs = RunInputs(None, PairFile(60, 0), PairFile(24, 1), tuple(config.training.sequence_lengths), 0)
    worker, rewound = dpo_worker
    rewound.rewind()
    frozen = SimpleNamespace(model=worker.reference)
    plain = PreferenceTrainer(config, inputs, Team(worker, []))
    assert worker.reference is None
    sharded = make_sharded(
        worker.engine,
        lambda team: PreferenceTrainer(as_sharded(config), inputs, team),
        ("coefficients",),
        reference=frozen,
    )
    assert_same_runs(plain, sharded, rewound.rewind)


@SLOW  # each day test_sharded_actor.py moves scores by a token
def test_a_reward_model_is_that_of_one_process(model_dir, tmp_path):
    """Its graphs give scores before each token; they are moved to stand after it."""
    from networks import load_model

    from mindrlhf.algorithms.losses import CoefficientLoss
    from mindrlhf.algorithms.scores import TokenScores
    from mindrlhf.training.engine.build import build_offline
    from mindrlhf.training.offline.preference import PreferenceTrainer
    from mindrlhf.training.runtime import Rank
    from mindrlhf.training.team import Team

    path = write_config(tmp_path / "rm.yaml", model_dir, reward_model={"centering": 0.02})
    config = load_config("reward-model", path, ["run.max_steps=3"])
    inputs = RunInputs(None, PairFile(60, 0), PairFile(24, 1), tuple(config.training.sequence_lengths), 0)

    network = load_model(config.model, config.model.path, config.run, 32, as_scorer=True)
    loss = CoefficientLoss(TokenScores(network, after_token=False))
    plain = PreferenceTrainer(config, inputs, Team(build_offline(config, (32,), Rank(0, 1)), []))
    sharded = make_sharded(
        whole_engine(loss, config.optimizer),
        lambda team: PreferenceTrainer(as_sharded(config), inputs, team),
        ("coefficients",),
        after_token=True,
    )
    assert_same_runs(plain, sharded)


@SLOW  # a run on pairs sees the same
def test_fine_tuning_is_that_of_one_process(model_dir, tmp_path):
    from mindrlhf.training.engine.build import build_offline
    from mindrlhf.training.offline.supervised import SupervisedTrainer
    from mindrlhf.training.runtime import Rank
    from mindrlhf.training.team import Team

    batches = {"rows_per_step": 8, "micro_batch_size": 4, "sequence_lengths": [16, 32]}
    path = write_config(tmp_path / "sft.yaml", model_dir, training=batches)
    config = load_config("sft", path, ["run.max_steps=3"])
    inputs = RunInputs(None, PairFile(60, 0), PairFile(24, 1), (16, 32), 0)

    worker = build_offline(config, (32,), Rank(0, 1))
    plain = SupervisedTrainer(config, inputs, Team(worker, []))
    sharded = make_sharded(worker.engine, lambda team: SupervisedTrainer(as_sharded(config), inputs, team), ())
    assert_same_runs(plain, sharded, Rewound(worker.engine).rewind)
