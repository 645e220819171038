"""The cells and gradients of a real actor, dumped: the numbers, the files, and that training does not notice."""

import json
from importlib.util import find_spec

import numpy as np
import pytest
from engines import whole_engine
from slow_tests import RUNS_SLOW_TESTS
from tiny_models import tiny_model

from mindrlhf.config.model import ModelSection
from mindrlhf.config.observe import MsprobeSection
from mindrlhf.config.reward import RewardSection
from mindrlhf.config.run import DataSection, RunSection
from mindrlhf.data.packing import TokenSequence
from mindrlhf.debugging.dump_diff import compare_dumps
from mindrlhf.debugging.dump_paths import rank_dir
from mindrlhf.training.batch import RowOptions, make_batch

# Looked for, not imported: see StageDump.
pytestmark = pytest.mark.skipif(find_spec("msprobe") is None, reason="the debug extra is not installed")

NUM_LAYERS = 2 if RUNS_SLOW_TESTS else 1
LAST = f"layers.{NUM_LAYERS - 1}"
MODEL = tiny_model(num_hidden_layers=NUM_LAYERS)
ROW_LENGTH = 16


def make_sequences():
    draw = np.random.default_rng(5)
    sequences = []
    for _ in range(5):
        prompt, response = (draw.integers(1, 64, size).astype(np.int32) for size in (3, 5))
        values = {name: draw.normal(size=5).astype(np.float32) for name in ("advantages", "old_logprobs")}
        values |= {"weights": np.ones(5, np.float32)}
        sequences.append(TokenSequence(prompt, response, values))
    return sequences


@pytest.fixture(scope="module")
def actor(tmp_path_factory):
    from mindrlhf.algorithms.logprobs import PolicyLogProbs
    from mindrlhf.config.schema import GrpoConfig
    from mindrlhf.models.load import load_model
    from mindrlhf.training.engine.actor import Actor
    from mindrlhf.training.engine.policy_loss import build_policy_loss
    from mindrlhf.training.runtime import start_runtime

    directory = tmp_path_factory.mktemp("model")
    (directory / "config.json").write_text(json.dumps(MODEL))
    config = GrpoConfig(
        model=ModelSection(path=str(directory), random_init=True),
        data=DataSection(train_file="train", tokenizer_dir="tokenizer"),
        reward=RewardSection(verifier_function=("length",)),
        # MindSpore can be made deterministic once in a process, and another test module does so.
        run=RunSection(seed=3, deterministic=False),
    )
    start_runtime(config.run, tmp_path_factory.mktemp("log"))
    network = load_model(config.model, config.model.path, config.run, ROW_LENGTH)
    loss = build_policy_loss(config, PolicyLogProbs(network, 0.7, "cpu"))
    actor = Actor(whole_engine(loss, config.optimizer))
    batch = make_batch(make_sequences(), RowOptions((ROW_LENGTH,), 1, 1, True))
    assert len(batch.micro_batches) == 3
    actor.receive([batch.part_of(0, 1)])
    return actor


@pytest.fixture(scope="module")
def step(actor, tmp_path_factory):
    """Does a step on one batch with a learning rate of 0, dumped or not; returns its directory and results."""
    from mindrlhf.training.engine.cell_dump import CellDump

    def run(task="tensor", is_dumped=True, stages=("old_log_prob", "update")):
        directory = tmp_path_factory.mktemp("dump")
        section = MsprobeSection(enabled=True, stages=stages, level="L0", task=task)
        actor.use_cell_dump(CellDump(section, directory, 0))
        if is_dumped:
            actor.begin_dump(4)
        old = actor.compute_logprobs("old_logprobs", 0)
        results = actor.update(0, 0.0, 0.0)
        actor.end_dump()
        return directory, old, results

    return run


def read(directory, stage, name="dump.json"):
    return json.loads((rank_dir(directory, stage, 4, 0) / name).read_text())


@pytest.fixture(scope="module")
def dumped(step):
    return step()


def tensor(directory, stage, leaf):
    return np.load(rank_dir(directory, stage, 4, 0) / "dump_tensor_data" / leaf["data_name"], allow_pickle=False)


def test_cells_are_those_of_the_compiled_graph_and_of_numpy(dumped):
    directory, old, _ = dumped
    for stage in ("old_log_prob", "update"):
        data = read(directory, stage)["data"]
        for index in range(3):
            last = data[f"Cell.token_logprobs.TiledTokenLogProbs.forward.{index}"]["output"][0]
            compiled = old[index]
            np.testing.assert_allclose(tensor(directory, stage, last), compiled, rtol=1e-6, atol=1e-6)
            norm = data[f"Cell.model.model.decoder.final_layernorm.RmsNorm.forward.{index}"]
            hidden = tensor(directory, stage, norm["input_args"][0]).astype(np.float64)
            scale = np.sqrt((hidden**2).mean(-1, keepdims=True) + 1e-6)  # the weights of a new norm are 1
            expected = hidden / scale
            np.testing.assert_allclose(tensor(directory, stage, norm["output"][0]), expected, rtol=1e-5, atol=1e-6)
            described = norm["output"][0]
            assert described["Norm"] == pytest.approx(np.sqrt((expected**2).sum()), rel=1e-5)
            assert (described["Max"], described["Min"]) == pytest.approx((expected.max(), expected.min()), rel=1e-5)
            assert described["Mean"] == pytest.approx(expected.mean(), abs=1e-6)


def test_each_parameter_is_there_once_and_each_cell_knows_its_caller(dumped, actor):
    data = read(dumped[0], "old_log_prob")["data"]
    found = [(name, leaf) for entry in data.values() for name, leaf in entry.get("parameters", {}).items()]
    weights = {parameter.name: parameter.asnumpy() for parameter in actor.model.network.get_parameters()}
    assert sorted(name for name, _ in found) == sorted(weights)
    for name, leaf in found:
        np.testing.assert_array_equal(tensor(dumped[0], "old_log_prob", leaf), weights[name])
    callers = read(dumped[0], "old_log_prob", "construct.json")
    assert callers.keys() == data.keys()
    norm = f"Cell.model.model.decoder.{LAST}.input_layernorm.RmsNorm.forward.2"
    path = [f"{LAST}.TransformerLayer", "TransformerBlock"]
    for expected in (*(f"Cell.model.model.decoder.{part}.forward.2" for part in path), "Cell.model.CausalLM.forward.2"):
        norm = callers[norm]
        assert norm == expected
    assert callers[norm] is None


def test_gradients_add_up_to_the_norm_of_the_update(dumped, actor):
    directory, _, results = dumped
    data = read(directory, "update")["data"]
    leaves = [leaf for name, entry in data.items() if ".parameters_grad.0" in name for (leaf,) in entry.values()]
    assert len(leaves) == len(actor.model.network.trainable_params())
    total = sum(float((tensor(directory, "update", leaf).astype(np.float64) ** 2).sum()) for leaf in leaves)
    assert total**0.5 == pytest.approx(results.grad_norm, rel=1e-5)
    assert sum(leaf["Norm"] ** 2 for leaf in leaves) == pytest.approx(total)


def test_training_does_not_notice(dumped, step, actor):
    cells = actor.model.graph, actor.engine.updater._gradients
    graphs = [set(cell.compile_cache) for cell in cells]
    _, old, results = step(is_dumped=False)
    before = dumped[2]
    np.testing.assert_array_equal(results.statistics, before.statistics)
    assert (results.grad_norm, results.process.recompiles) == (before.grad_norm, before.process.recompiles)
    pairs = [*zip(old, dumped[1], strict=True), *zip(results.logprobs, before.logprobs, strict=True)]
    for one, other in pairs:
        np.testing.assert_array_equal(one, other)
    assert [set(cell.compile_cache) for cell in cells] == graphs, "nothing is compiled anew"


def test_what_is_not_asked_for_is_not_dumped(step):
    assert list(step(is_dumped=False)[0].iterdir()) == []
    directory, *_ = step(task="statistics", stages=("old_log_prob",))
    assert [path.name for path in directory.iterdir()] == ["old_log_prob"]
    names = {path.name for path in rank_dir(directory, "old_log_prob", 4, 0).iterdir()}
    assert names == {"dump.json", "stack.json", "construct.json"}
    assert "data_name" not in json.dumps(read(directory, "old_log_prob"))


def test_the_same_step_again_is_the_same_and_a_perturbed_weight_is_named(dumped, step, actor):
    import mindspore as ms

    again = compare_dumps(dumped[0], step()[0])
    assert again.is_same and [count.num_different for count in again.stages] == [0, 0]
    name = f"decoder.{LAST}.mlp.linear_fc2.weight"
    parameter = next(parameter for parameter in actor.model.network.get_parameters() if parameter.name.endswith(name))
    array = parameter.asnumpy().copy()
    changed = array.copy()
    changed[3, 7] += 0.01
    parameter.set_data(ms.Tensor(changed))
    try:
        found = compare_dumps(dumped[0], step()[0])
    finally:
        parameter.set_data(ms.Tensor(array))
    assert (found.step, found.stage, found.rank) == (4, "old_log_prob", 0)
    assert found.name.startswith(f"Cell.model.model.decoder.{LAST}.mlp.")
    assert found.name.endswith(f".forward.0.parameters.{parameter.name}")
    assert found.details[-1].startswith("1 of 1536 elements differ, most at [3, 7]: ")
    assert all(count.num_different for count in found.stages)
