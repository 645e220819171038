"""Top-k tokens of teachers, and the KL of an update against them, in the actor that a run builds; against logits."""

import json
import subprocess
from pathlib import Path

import numpy as np
import pytest
from engines import whole_model
from test_teachers_actor import LENGTH, VOCABULARY, sequences
from test_teachers_actor import directories as directories  # a fixture

from mindrlhf.config.algorithm import AlgorithmSection, DistillationSection
from mindrlhf.config.model import LoraSection, ModelSection
from mindrlhf.config.rollout import RolloutSection
from mindrlhf.config.run import DataSection
from mindrlhf.config.schema import GrpoConfig
from mindrlhf.data.packing import TokenSequence
from mindrlhf.training.batch import RowOptions, make_batch
from mindrlhf.weights.convert import export_hf, random_hf_weights

K, TEMPERATURE = 4, 0.8
ROWS = RowOptions((LENGTH,), 2, 1, pack=True)
REFERENCE = Path(__file__).parents[2] / "models" / "transformers_reference.py"


def build(model: dict, teachers: dict, log_dir, **options):
    from mindrlhf.models.context import prepare_mindformers
    from mindrlhf.training.engine.build import build_actor
    from mindrlhf.training.runtime import Rank

    prepare_mindformers("cpu", log_dir)
    algorithm = {"name": "distill", "advantage": "distill", "beta": 1.0, "kl_in": "reward", "distill_top_k": K}
    config = GrpoConfig(
        model=ModelSection(**model),
        data=DataSection(train_file="t", tokenizer_dir="t"),
        algorithm=AlgorithmSection(**algorithm),
        rollout=RolloutSection(temperature=TEMPERATURE),
        distillation=DistillationSection(teachers),
        **options,
    )
    return build_actor(config, (LENGTH,), Rank(0, 1))


@pytest.fixture(scope="module")
def actor(directories, tmp_path_factory):
    teachers = {name: directories[name] for name in ("math", "code")}
    return build({"path": directories["student"]}, teachers, tmp_path_factory.mktemp("log"))


@pytest.fixture(scope="module")
def logprobs_alone(directories):
    """Log-probabilities of all tokens at the positions of a response, float64: a model's logits on this alone."""
    import mindspore as ms
    from causal_logits import CausalLMLogits

    from mindrlhf.models.causal_lm import build_model
    from mindrlhf.weights.convert import load_hf_weights
    from mindrlhf.weights.hf import read_hf_config

    cells = {}
    for name, directory in directories.items():
        network = build_model(read_hf_config(directory), seq_length=LENGTH)
        load_hf_weights(network, directory)
        cells[name] = CausalLMLogits(network)

    def logprobs(name: str, sequence: TokenSequence) -> np.ndarray:
        ids = np.concatenate([sequence.prompt_ids, sequence.response_ids])
        row = np.zeros((1, LENGTH), np.int32)
        row[0, : len(ids)] = ids
        segments = (np.arange(LENGTH) < len(ids)).astype(np.int32)[None]
        logits = cells[name](ms.Tensor(row), ms.Tensor(segments)).asnumpy()[0].astype(np.float64) / TEMPERATURE
        return log_softmax(logits[len(sequence.prompt_ids) - 1 : len(ids) - 1])

    return logprobs


def log_softmax(logits):
    logits = logits - logits.max(axis=-1, keepdims=True)
    return logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))


def with_rest(full, token_ids):
    chosen = np.zeros(full.shape, bool)
    np.put_along_axis(chosen, token_ids.astype(np.int64), True, axis=-1)
    rest = np.log(np.where(chosen, 0.0, np.exp(full)).sum(axis=-1, keepdims=True))
    return np.concatenate([np.take_along_axis(full, token_ids.astype(np.int64), -1), rest], axis=-1)


def given() -> list[TokenSequence]:
    weighted = []
    for number, one in enumerate(sequences(), start=1):
        values = {"weights": np.full(len(one.response_ids), number / 2, np.float32)}
        weighted.append(TokenSequence(one.prompt_ids, one.response_ids, values, teacher=one.teacher))
    return weighted


def ask(actor, sequences):
    """Return the batch, the rows that the actor holds, and what it found for each sequence by name."""
    batch = make_batch(sequences, ROWS)
    actor.receive([batch.part_of(0, 1)])
    asked = batch.collect([actor.compute_logprobs("reference_logprobs", 0)])
    rows = actor.held_rows(0)
    found = {name: batch.responses([one.tokens[name] for one in rows]) for name in rows[0].tokens}
    for ours, theirs in zip(asked, found["reference_logprobs"], strict=True):
        np.testing.assert_array_equal(ours, theirs)
    return batch, rows, found


def test_each_sample_has_the_tokens_of_its_own_teacher(actor, logprobs_alone):
    samples = given()
    batch, rows, found = ask(actor, samples)
    assert {teacher for one in rows for teacher in one.teachers} == {0, 1, 2}
    for number, sample in enumerate(samples):
        full = logprobs_alone("math" if sample.teacher == 1 else "code", sample)
        token_ids = np.argsort(-full, axis=-1, kind="stable")[:, :K]
        np.testing.assert_array_equal(found["teacher_tokens"][number], token_ids)
        np.testing.assert_allclose(found["teacher_logprobs"][number], with_rest(full, token_ids), atol=3e-5)
        own = full[np.arange(len(token_ids)), sample.response_ids]
        np.testing.assert_allclose(found["reference_logprobs"][number], own, atol=2e-5)
    for one in rows:
        outside = one.mask == 0
        assert not any(one.tokens[name][outside].any() for name in ("teacher_tokens", "teacher_logprobs"))


def test_an_update_learns_the_kl_against_them(actor, logprobs_alone):
    samples = given()
    batch, _, found = ask(actor, samples)
    actor.receive_tokens("advantages", [[np.zeros_like(one.mask) for one in batch.micro_batches]])
    result = actor.update(0, 0.0, 0.5)
    loss, kl_sum = 0.0, 0.0
    for sample, token_ids, of_teacher in zip(samples, found["teacher_tokens"], found["teacher_logprobs"], strict=True):
        student = with_rest(logprobs_alone("student", sample), token_ids)
        kl = (np.exp(student) * (student - of_teacher)).sum(axis=-1)
        loss, kl_sum = loss + 0.5 * kl @ sample.values["weights"], kl_sum + kl.sum()
    assert kl_sum / batch.num_tokens > 0.05
    named = dict(zip(actor.engine.updater.loss.statistics, result.statistics, strict=True))
    assert named["loss"] == pytest.approx(loss / batch.num_tokens, rel=1e-4)
    assert named["topk_kl"] == pytest.approx(kl_sum, rel=1e-4)
    assert result.grad_norm > 1e-3


def test_rows_of_all_shapes_are_compiled_ahead(actor):
    actor.warm_up(ROWS.shapes(), ["reference_logprobs"])
    before = actor.process_statistics().recompiles
    batch, _, _ = ask(actor, given())
    actor.receive_tokens("advantages", [[np.zeros_like(one.mask) for one in batch.micro_batches]])
    actor.update(0, 0.0, 1.0)
    assert actor.process_statistics().recompiles == before


def test_the_base_of_adapters_stays_the_teacher(directories, tmp_path):
    path = directories["student"]
    actor = build({"path": path, "reference_path": path}, {}, tmp_path, lora=LoraSection(rank=4))
    samples = [TokenSequence(one.prompt_ids, one.response_ids, one.values) for one in given()]
    batch, rows, before = ask(actor, samples)
    ones = [[one.mask for one in rows]]
    for _ in range(2):  # the gradient of the adapters' first factor is 0 while the second is
        actor.receive_tokens("advantages", ones)
        first = actor.update(0, 0.1, 1.0)
        batch, rows, after = ask(actor, samples)
    for name, arrays in before.items():
        for ours, theirs in zip(after[name], arrays, strict=True):
            np.testing.assert_array_equal(ours, theirs, err_msg=name)
    actor.receive_tokens("advantages", ones)
    names = actor.engine.updater.loss.statistics
    kl = [dict(zip(names, one.statistics))["topk_kl"] for one in (first, actor.update(0, 0.1, 1))]
    assert kl[1] > 1e-3


def test_a_teacher_of_more_tokens_than_the_student_chooses_among_the_students(directories, tmp_path):
    config = json.loads((Path(directories["math"]) / "config.json").read_text())
    wide = {**config, "vocab_size": VOCABULARY + 32}
    export_hf(random_hf_weights(wide, 7), wide, tmp_path / "wide")
    model = {"path": directories["student"], "reference_path": str(tmp_path / "wide")}
    actor = build(model, {}, tmp_path)
    samples = [TokenSequence(one.prompt_ids, one.response_ids, one.values) for one in given()]
    _, _, found = ask(actor, samples)
    token_ids, logprobs = (np.concatenate(found[name]) for name in ("teacher_tokens", "teacher_logprobs"))
    assert token_ids.max() < VOCABULARY
    # Some of the mass is on tokens that the student lacks; it is among all others.
    np.testing.assert_allclose(np.exp(logprobs.astype(np.float64)).sum(axis=-1), 1.0, atol=1e-5)
    assert np.exp(logprobs[:, -1]).max() > 0.2


def test_tokens_are_those_of_transformers_logits(rollout_python, tmp_path):
    import mindspore as ms  # noqa: F401

    from mindrlhf.algorithms.logprobs import PolicyLogProbs
    from mindrlhf.algorithms.top_k.cells import TopTokens
    from mindrlhf.data.packing import PackedRows
    from mindrlhf.models.causal_lm import build_model
    from mindrlhf.weights.convert import load_hf_weights
    from mindrlhf.weights.hf import read_hf_config

    sizes = {"vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
    cases = {"tiny": {"model_type": "qwen2", "tie_word_embeddings": True, **sizes, **heads}}
    command = [rollout_python, REFERENCE, tmp_path, json.dumps(cases)]
    subprocess.run(list(map(str, command)), check=True, timeout=200)
    reference = np.load(tmp_path / "tiny" / "logits.npz")
    input_ids, full = reference["input_ids"], log_softmax(reference["logits"].astype(np.float64) / TEMPERATURE)
    network = build_model(read_hf_config(tmp_path / "tiny"), seq_length=input_ids.shape[1])
    load_hf_weights(network, tmp_path / "tiny")
    policy = PolicyLogProbs(network, TEMPERATURE, "cpu")
    model = whole_model(policy, TopTokens(policy, 9, 96))
    mask = np.ones(input_ids.shape, np.float32)
    rows = PackedRows(input_ids, np.ones_like(input_ids), np.roll(input_ids, -1, 1), mask, {})
    found = model.top_tokens(rows)
    token_ids = np.argsort(-full, axis=-1, kind="stable")[..., :9]
    np.testing.assert_array_equal(found["teacher_tokens"], token_ids)
    np.testing.assert_allclose(found["teacher_logprobs"], with_rest(full, token_ids), atol=1e-4)
