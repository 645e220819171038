"""Actor and critic of one rank on a real small model: values, gradients, checkpoints, turns on the device."""

import json

import numpy as np
import pytest
import xxhash
from engines import export
from rewound import Rewound
from tiny_models import tiny_model

from mindrlhf.config.load import load_grpo_config
from mindrlhf.data.packing import TokenSequence
from mindrlhf.training.batch import Batch, RowOptions, make_batch

VOCABULARY = 64
SIZES = {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2, "num_key_value_heads": 1}
MODEL = tiny_model(vocab_size=VOCABULARY, **SIZES)
LENGTHS = ((3, 4), (6, 1), (2, 9), (5, 5), (4, 7), (1, 2))  # prompt, response
PACKED = RowOptions((32,), 4, 1, True)


@pytest.fixture(scope="module")
def model_dirs(mindformers, tmp_path_factory):
    """A language model, and a reward model with other weights."""
    import mindspore as ms

    from mindrlhf.specs import scorer_config
    from mindrlhf.weights.convert import export_hf, random_hf_weights

    ms.set_context(runtime_num_threads=1)
    directory = tmp_path_factory.mktemp("critic")
    export_hf(random_hf_weights(MODEL, 3), MODEL, directory / "policy")
    scorer = scorer_config(MODEL)
    export_hf(random_hf_weights(scorer, 4), scorer, directory / "reward")
    return directory


def build_worker(directory, **sections):
    """Return the worker of a rank as a run builds it; its policy is in the directory."""
    from mindrlhf.training.engine.build import build_actor
    from mindrlhf.training.runtime import Rank

    path = directory / "config.yaml"
    content = {
        "model": {"path": str(directory / "policy")},
        "data": {"train_file": "unread", "tokenizer_dir": "unread"},
        "reward": {"verifier_function": "accuracy_reward"},
        "optimizer": {"start_lr": 0.001, "max_grad_norm": 0},
        **sections,
    }
    path.write_text(json.dumps(content))
    return build_actor(load_grpo_config(path), (32,), Rank(0, 1))


@pytest.fixture(scope="module")
def built(model_dirs):
    """A worker with a critic, and what puts it back to how it was built."""
    critic = {"path": str(model_dirs / "reward"), "start_lr": 0.01}
    worker = build_worker(model_dirs, algorithm={"name": "ppo"}, critic=critic)
    return worker, Rewound(worker.engine, worker.critic)


@pytest.fixture(scope="module")
def worker(built):
    """One for most tests, since each graph takes seconds to compile: none relies on its weights."""
    return built[0]


def make_sequences(seed=0):
    stream = np.random.default_rng(seed)
    sequences = []
    for prompt, response in LENGTHS:
        ids = stream.integers(1, VOCABULARY, prompt + response).astype(np.int32)
        names = ("weights", "advantages", "returns")
        values = {name: stream.standard_normal(response).astype(np.float32) for name in names}
        values["weights"] = np.ones(response, np.float32)
        sequences.append(TokenSequence(ids[:prompt], ids[prompt:], values))
    return sequences


def send(worker, batch, rank=0, num_ranks=1):
    worker.receive([batch.part_of(rank, num_ranks)])
    return worker.compute_values(0)


def test_values_do_not_see_the_token_they_are_for(worker):
    """The value before token t is the score of the text up to t - 1, computed on that text alone."""
    from mindrlhf.training.engine.model import row_tensors

    batch = make_batch(make_sequences(), PACKED)
    values = batch.collect([send(worker, batch)])
    network = worker.critic.model.network
    for sequence, found in zip(make_sequences(), values, strict=True):
        ids = np.concatenate([sequence.prompt_ids, sequence.response_ids])
        for position in (0, len(found) - 1):
            alone = TokenSequence(ids[: len(sequence.prompt_ids) + position], np.array([7], np.int32), {})
            rows = make_batch([alone], RowOptions((32,), 1, 1, False)).micro_batches[0]
            hidden = network(*row_tensors(rows)[:2]).asnumpy()[0, len(alone.prompt_ids) - 1]
            expected = hidden.astype(np.float64) @ network.score_weight.asnumpy()[0].astype(np.float64)
            assert found[position] == pytest.approx(expected, rel=1e-4, abs=1e-5)
    assert np.concatenate(values).std() > 0.1


def update_critic(worker, batch):
    send(worker, batch)
    result = worker.update_critic(0, 0.01)
    return *result.statistics, result.grad_norm


def weights_of(engine):
    return {parameter.name: parameter.asnumpy().copy() for parameter in engine.model.network.get_parameters()}


def assert_equal_weights(left, right):
    assert left.keys() == right.keys()
    for name in left:
        np.testing.assert_array_equal(left[name], right[name], err_msg=name)


def test_a_restored_critic_goes_on_with_the_same_bits(built, tmp_path):
    """The actor's part is tested with the checkpoints."""
    worker, rewound = built
    first, second = (make_batch(make_sequences(seed), PACKED) for seed in (1, 2))
    begun = weights_of(worker.critic)
    update_critic(worker, first)
    assert any((begun[name] != array).any() for name, array in weights_of(worker.critic).items())
    saved, captured = tmp_path / "saved", tmp_path / "captured"
    saved.mkdir(), captured.mkdir()
    worker.begin_saving(str(saved), copies=False)
    checksums = worker.end_saving().checksums
    worker.begin_saving(str(captured), copies=True)
    expected = update_critic(worker, second)  # the copy does not see it
    captured_checksums = worker.end_saving().checksums
    assert {path.name for path in saved.iterdir()} == {"model", "critic"}
    files = [path.relative_to(saved) for path in saved.rglob("*.safetensors")]
    for path in files:
        assert (saved / path).read_bytes() == (captured / path).read_bytes(), path
    # None has to be read again.
    expected_checksums = {str(path): xxhash.xxh3_64_hexdigest((saved / path).read_bytes()) for path in files}
    assert checksums == captured_checksums == expected_checksums
    size_bytes = sum((saved / path).stat().st_size for path in files)
    assert worker.state_size_bytes() == pytest.approx(size_bytes, rel=0.1)
    weights = weights_of(worker.critic), weights_of(worker.engine)
    rewound.rewind()
    worker.restore(str(captured))
    assert update_critic(worker, second) == expected
    assert_equal_weights(weights[0], weights_of(worker.critic))
    assert_equal_weights(weights[1], weights_of(worker.engine))


def test_a_loss_that_is_not_finite_skips_the_update_though_the_gradients_are(worker):
    engine, before = worker.engine, weights_of(worker.engine)
    moments = (*engine.optimizer.exp_avg, *engine.optimizer.exp_avg_sq, *engine.optimizer.global_step)
    state = [one.asnumpy().copy() for one in moments]
    send(worker, make_batch(make_sequences(), PACKED))
    assert np.isnan(engine.apply(1.0, loss=float("inf")))
    assert_equal_weights(weights_of(worker.engine), before)
    for one, other in zip(moments, state, strict=True):
        np.testing.assert_array_equal(one.asnumpy(), other)
    assert engine.apply(0.0) == 0.0, "nothing of it is left in the accumulators"


def test_all_graphs_are_compiled_before_the_first_step_and_both_models_learn_apart(built):
    worker, rewound = built
    rewound.rewind()  # as if it had seen no rows
    rows = PACKED
    num_before = worker.process_statistics().recompiles
    actor, critic = weights_of(worker.engine), weights_of(worker.critic)
    worker.warm_up(rows.shapes(), ["old_logprobs"])
    assert_equal_weights(weights_of(worker.engine), actor)
    assert_equal_weights(weights_of(worker.critic), critic)
    num_compiled = worker.process_statistics().recompiles
    assert num_compiled == num_before + 4  # values, critic, log-probabilities and actor
    update_critic(worker, make_batch(make_sequences(), rows))
    assert_equal_weights(weights_of(worker.engine), actor)
    after = weights_of(worker.critic)
    assert all((after[name] != critic[name]).any() for name in critic if "bias" not in name)
    worker.update(0, 0.001, 0.0)
    assert_equal_weights(weights_of(worker.critic), after)
    assert any((array != actor[name]).any() for name, array in weights_of(worker.engine).items())
    assert worker.process_statistics().recompiles == num_compiled


def test_the_exported_critic_replaces_what_a_killed_run_left(worker, tmp_path):
    from mindrlhf.weights.hf import read_hf_config
    from mindrlhf.weights.open import open_tensors

    (tmp_path / "critic").mkdir()
    (tmp_path / "critic" / "left_by_a_killed_run").write_text("")
    export(worker, tmp_path / "critic", "critic")
    assert not (tmp_path / "critic" / "left_by_a_killed_run").exists()
    assert read_hf_config(tmp_path / "critic")["architectures"] == ["Qwen2ForSequenceClassification"]
    score = open_tensors(tmp_path / "critic").read("score.weight")
    np.testing.assert_array_equal(score, worker.critic.model.network.score_weight.asnumpy())
    export(worker, tmp_path / "final")
    assert "lm_head.weight" in open_tensors(tmp_path / "final").names()


class Parameter:
    def __init__(self, journal, name):
        self._journal, self._name = journal, name

    def _offload(self):
        self._journal.append(f"- {self._name}")

    def _load(self):
        self._journal.append(f"+ {self._name}")


@pytest.mark.parametrize("device", ["ascend", "cpu"])
def test_a_model_comes_to_the_device_when_the_other_has_left(device):
    from mindrlhf.training.engine.critic import Turns

    journal = []
    models = {"actor": [Parameter(journal, "a"), Parameter(journal, "b")], "critic": [Parameter(journal, "c")]}
    turns = Turns(device, models)
    for name in ("critic", "actor", "actor", "critic"):
        turns.take(name)
        journal.append(name)
    moves = ["- a", "- b", "critic", "- c", "+ a", "+ b", "actor", "actor", "- a", "- b", "+ c", "critic"]
    assert journal == (moves if device == "ascend" else ["critic", "actor", "actor", "critic"])


def test_the_state_of_a_model_is_all_that_training_holds(worker):
    names = [parameter.name for parameter in worker.critic.state_parameters()]
    assert len(names) == len(set(names))
    trained = [parameter.name for parameter in worker.critic.model.network.trainable_params()]
    assert {*trained, *(f"grad.{name}" for name in trained)} <= set(names)
    size_bytes = sum(parameter.nbytes for parameter in worker.critic.state_parameters())
    weights = sum(parameter.nbytes for parameter in worker.critic.model.network.get_parameters())
    assert size_bytes == pytest.approx(4 * weights, rel=0.01)  # weights, gradients, two moments


def test_a_rank_whose_share_has_no_rows_takes_part(worker):
    """With fitted rows there may be fewer rows than ranks; what it adds to the sums over the ranks is 0."""
    worker.receive([Batch((), 5)])
    for computes_first in (False, True):
        if computes_first:
            assert worker.compute_values(0) == worker.compute_logprobs("old_logprobs", 0) == []
        done = worker.update(0, 0.0, 0.0)
        assert done.grad_norm == 0.0 and done.logprobs == () and not done.statistics.any()
    done = worker.update_critic(0, 0.0)
    assert done.grad_norm == 0.0 and not done.statistics.any()
