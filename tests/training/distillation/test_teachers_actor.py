"""Two teachers of other sizes in the actor that a run builds, against their logits on one sample at a time."""


import numpy as np
import pytest
from slow_tests import RUNS_SLOW_TESTS

from mindrlhf.config.algorithm import AlgorithmSection, DistillationSection
from mindrlhf.config.model import ModelSection
from mindrlhf.config.run import DataSection
from mindrlhf.config.schema import GrpoConfig
from mindrlhf.data.packing import TokenSequence
from mindrlhf.training.batch import RowOptions, make_batch
from mindrlhf.weights.convert import export_hf, random_hf_weights

VOCABULARY, LENGTH = 64, 32
SIZES = {"student": (16, 1), "math": (24, 2 if RUNS_SLOW_TESTS else 1), "code": (32, 1)}  # hidden size, layers
SHAPES = [(3, 4, 1), (5, 9, 2), (2, 6, 1), (7, 3, 2), (4, 12, 2)]  # prompt, response, number of the teacher


def model_config(hidden: int, layers: int) -> dict:
    return {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "vocab_size": VOCABULARY,
        "hidden_size": hidden,
        "intermediate_size": 24,
        "num_hidden_layers": layers,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "max_position_embeddings": 64,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,
        "initializer_range": 0.3,
    }


@pytest.fixture(scope="module")
def directories(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    for seed, (name, sizes) in enumerate(SIZES.items()):
        config = model_config(*sizes)
        export_hf(random_hf_weights(config, seed), config, root / name)
    return {name: str(root / name) for name in SIZES}


@pytest.fixture(scope="module")
def actor(directories, tmp_path_factory):
    from mindrlhf.models.context import prepare_mindformers
    from mindrlhf.training.engine.build import build_actor
    from mindrlhf.training.runtime import Rank

    prepare_mindformers("cpu", tmp_path_factory.mktemp("mindformers-log"))
    config = GrpoConfig(
        model=ModelSection(path=directories["student"]),
        data=DataSection(train_file="t", tokenizer_dir="t"),
        algorithm=AlgorithmSection(name="distill", advantage="distill", beta=1.0, kl_in="reward"),
        distillation=DistillationSection({name: directories[name] for name in ("math", "code")}),
    )
    return build_actor(config, (LENGTH,), Rank(0, 1))


def sequences() -> list[TokenSequence]:
    random = np.random.default_rng(3)
    return [
        TokenSequence(*(random.integers(1, VOCABULARY, n).astype(np.int32) for n in sizes), {}, teacher=teacher)
        for *sizes, teacher in SHAPES
    ]


@pytest.fixture(scope="module")
def logprobs_alone(directories):
    """Log-probabilities of a response, float64: a model's logits on this sample alone, and a softmax in NumPy."""
    import mindspore as ms
    from causal_logits import CausalLMLogits

    from mindrlhf.models.causal_lm import build_model
    from mindrlhf.weights.convert import load_hf_weights
    from mindrlhf.weights.hf import read_hf_config

    cells = {}
    for name in ("math", "code"):
        network = build_model(read_hf_config(directories[name]), seq_length=LENGTH)
        load_hf_weights(network, directories[name])
        cells[name] = CausalLMLogits(network)

    def logprobs(name: str, sequence: TokenSequence) -> np.ndarray:
        ids = np.concatenate([sequence.prompt_ids, sequence.response_ids])
        row = np.zeros((1, LENGTH), np.int32)
        row[0, : len(ids)] = ids
        segments = (np.arange(LENGTH) < len(ids)).astype(np.int32)[None]
        logits = cells[name](ms.Tensor(row), ms.Tensor(segments)).asnumpy()[0].astype(np.float64)
        logits -= logits.max(axis=-1, keepdims=True)
        logits -= np.log(np.exp(logits).sum(axis=-1, keepdims=True))
        places = np.arange(len(sequence.prompt_ids), len(ids))
        return logits[places - 1, ids[places]]

    return logprobs


def test_each_sample_has_the_log_probabilities_of_its_own_teacher(actor, logprobs_alone):
    given = sequences()
    batch = make_batch(given, RowOptions((LENGTH,), 2, 1, pack=True))
    assert {teacher for rows in batch.micro_batches for teacher in rows.teachers} == {0, 1, 2}
    actor.receive([batch.part_of(0, 1)])
    found = batch.collect([actor.compute_logprobs("reference_logprobs", 0)])
    for sequence, values in zip(given, found, strict=True):
        own = "math" if sequence.teacher == 1 else "code"
        np.testing.assert_allclose(values, logprobs_alone(own, sequence), atol=2e-5)
    other = logprobs_alone("code", given[0])
    assert np.abs(found[0] - other).max() > 0.1
