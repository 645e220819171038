"""What the rest of the program does where the speed-ups of a CPU are taken away: the same, in the plain way."""

from pathlib import Path

import numpy as np
import pytest
from engines import whole_engine

from mindrlhf.data.packing import TokenSequence
from mindrlhf.launch.launch import worker_environment
from mindrlhf.launch.machine import msrun_argv
from mindrlhf.launch.peers import ALONE
from mindrlhf.system import speed_ups

LENGTH, VOCABULARY = 24, 96
MODEL = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,
}


@pytest.fixture
def take_away(monkeypatch, tmp_path):
    def without_package():
        monkeypatch.setattr(speed_ups, "_FOLDER", tmp_path)

    return without_package


def test_lookups_find_nothing_and_imports_go_on(take_away):
    looked_up = (speed_ups.of_rank("cpu"), speed_ups.of_server("cpu"), speed_ups.of_launcher())
    assert [module.__name__.removeprefix("mindrlhf.cpu.") for module in looked_up] == [
        "training.hooks",
        "rollout.hooks",
        "launcher",
    ]
    assert (speed_ups.of_rank("ascend"), speed_ups.of_server("ascend")) == (None, None)
    take_away()
    assert (speed_ups.of_rank("cpu"), speed_ups.of_server("cpu"), speed_ups.of_launcher()) == (None, None, None)
    with speed_ups.quick_imports(["wave"]):
        import wave
    assert wave.Wave_read, "imported whole"


def test_msrun_is_started_as_it_comes_and_openblas_chooses(take_away, monkeypatch):
    monkeypatch.delenv("OPENBLAS_CORETYPE", raising=False)
    arguments = (["-m", "program"], 2, Path("logs"), 10_000, ALONE)
    lean, plain = (msrun_argv(*arguments, is_lean=is_lean) for is_lean in (True, False))
    assert lean == [plain[0], "-m", "mindrlhf.cpu.launcher", *plain[1:]]
    take_away()
    assert msrun_argv(*arguments, is_lean=True) == plain
    assert "OPENBLAS_CORETYPE" not in worker_environment(1, {})


def learn(is_tied: bool, log_dir: Path):
    """Return the engine, log-probabilities before two updates, the norms of these, and the weights after them."""
    from mindrlhf.algorithms.logprobs import PolicyLogProbs
    from mindrlhf.algorithms.losses import SupervisedLoss
    from mindrlhf.config.training import OptimizerSection
    from mindrlhf.models.causal_lm import build_model
    from mindrlhf.models.context import prepare_mindformers
    from mindrlhf.training.batch import RowOptions, make_batch
    from mindrlhf.weights.convert import load_random_weights

    prepare_mindformers("cpu", log_dir)
    network = build_model(MODEL | {"tie_word_embeddings": is_tied}, seq_length=LENGTH)
    load_random_weights(network, seed=5)
    options = OptimizerSection(start_lr=0.01, epsilon=1e-3, max_grad_norm=1.0)
    engine = whole_engine(SupervisedLoss(PolicyLogProbs(network, 0.8, "cpu")), options)
    stream = np.random.default_rng(2)
    drawn = [stream.integers(1, VOCABULARY, size).astype(np.int32) for size in (8, 14, 20)]
    batch = make_batch([TokenSequence(ids[:4], ids[4:], {}) for ids in drawn], RowOptions((LENGTH,), 2, 1, False))
    logprobs, norms = [engine.model.logprobs(rows) for rows in batch.micro_batches], []
    for _ in range(2):
        for rows in batch.micro_batches:
            engine.updater.add(rows, 30)
        norms.append(engine.updater.apply(0.01))
    weights = {parameter.name: parameter.asnumpy().copy() for parameter in network.get_parameters()}
    return engine, np.concatenate(logprobs), norms, weights


@pytest.mark.parametrize("is_tied", [False, True], ids=["untied", "tied"])
def test_log_probabilities_and_updates_are_the_same(take_away, is_tied, tmp_path):
    from mindrlhf.algorithms.logprobs import GraphTokenLogProbs
    from mindrlhf.training.engine.cells import OptimizerStep

    fast, *found = learn(is_tied, tmp_path)
    take_away()
    slow, *expected = learn(is_tied, tmp_path)
    assert type(slow.model.graph.token_logprobs) is GraphTokenLogProbs is not type(fast.model.graph.token_logprobs)
    assert type(slow.updater._step) is OptimizerStep is not type(fast.updater._step)
    np.testing.assert_allclose(found[0], expected[0], rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(found[1], expected[1], rtol=1e-4)
    assert found[2].keys() == expected[2].keys()
    for name, weight in expected[2].items():
        np.testing.assert_allclose(found[2][name], weight, rtol=1e-4, atol=1e-5, err_msg=name)
