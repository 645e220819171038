"""Muon against float64, written from Jordan et al. 2024 and Liu et al. (arXiv:2502.16982, eq. 1 and 4), on the matrices
of Hugging Face checkpoints: what is fused must be updated as if it were not."""

import functools

import numpy as np
import pytest
from slow_tests import SLOW
from tiny_models import tiny_model

from mindrlhf.config.training import OptimizerSection
from mindrlhf.layout.layout import Layout, parameter_layouts
from mindrlhf.layout.parameter import gathered_ranks
from mindrlhf.specs import find_spec
from mindrlhf.specs.fuse import fuse, split
from mindrlhf.specs.lora import AdaptedRules, LoraOptions

pytestmark = pytest.mark.usefixtures("mindformers")

OPTIONS = OptimizerSection(type="muon", weight_decay=0.1)
RATES = (1e-2, 3e-3, 2e-2)
SIZES = {"hidden_size": 24, "intermediate_size": 40, "num_attention_heads": 6, "initializer_range": 0.02}
QWEN = tiny_model(vocab_size=40, **SIZES)
MODELS = {
    "qwen2": QWEN,
    "experts": tiny_model("qwen3_moe", QWEN, head_dim=8, moe_intermediate_size=16, num_experts=3),
    "latent": tiny_model(
        "deepseek_v3", QWEN, num_key_value_heads=6, q_lora_rank=12, kv_lora_rank=10, qk_nope_head_dim=8,
        qk_rope_head_dim=4, v_head_dim=8, n_routed_experts=2, num_experts_per_tok=1, moe_intermediate_size=16,
        n_group=1, topk_group=1, first_k_dense_replace=0,
    ),
    "scorer": {**QWEN, "architectures": ["Qwen2ForSequenceClassification"], "num_labels": 1},
    "lora": QWEN,
    "experts lora": {},
}  # fmt: skip
MODELS["experts lora"] = MODELS["experts"]


def orthogonal(matrix: np.ndarray) -> np.ndarray:
    """Five steps of X <- a X + b (X X^T) X + c (X X^T)^2 X."""
    a, b, c = 3.4445, -4.7750, 2.0315
    x = matrix / (np.linalg.norm(matrix) + 1e-7)
    for _ in range(5):
        gram = x @ x.T
        x = a * x + b * gram @ x + c * gram @ gram @ x
    return x


class Float64Muon:
    """One Hugging Face tensor."""

    def __init__(self, name: str, array: np.ndarray):
        is_other = any(part in name for part in ("embed_tokens", "lm_head", "score")) or array.ndim == 1
        self.weights, self.is_matrix, self.num_steps = array.astype(np.float64), not is_other, 0
        self.mean = self.square = np.zeros(array.shape)

    def step(self, gradient: np.ndarray, lr: float) -> None:
        gradient = gradient.astype(np.float64)
        decay = OPTIONS.weight_decay if gradient.ndim > 1 else 0.0
        self.num_steps += 1
        if self.is_matrix:
            self.mean = 0.95 * self.mean + gradient
            update = 0.2 * max(gradient.shape) ** 0.5 * orthogonal(gradient + 0.95 * self.mean)
        else:
            self.mean = OPTIONS.beta1 * self.mean + (1 - OPTIONS.beta1) * gradient
            self.square = OPTIONS.beta2 * self.square + (1 - OPTIONS.beta2) * gradient**2
            square = self.square / (1 - OPTIONS.beta2**self.num_steps)
            update = self.mean / (1 - OPTIONS.beta1**self.num_steps) / (np.sqrt(square) + OPTIONS.epsilon)
        self.weights = self.weights - lr * (update + decay * self.weights)


def rules_of(name: str):
    spec = find_spec(MODELS[name])
    dims = spec.dims(MODELS[name])
    if "lora" in name:
        return [*AdaptedRules(spec, dims, LoraOptions(4, 8.0)).trained()], dims
    return [rule for rule in spec.rules(dims) if rule.trained], dims


@functools.cache
def build(name: str):
    """Return rules, sizes, the cell of a step, its optimiser and gradients, and what all parameters begin with."""
    import mindspore as ms

    from mindrlhf.training.engine.cells import OptimizerStep, make_accumulators
    from mindrlhf.training.optimizers import make_optimizer

    (rules, dims), random = rules_of(name), np.random.default_rng(0)
    tensors = {
        hf_name: random.standard_normal(shape).astype(np.float32)
        for rule in rules
        for hf_name, shape in zip(rule.hf_names, rule.shape(dims))
    }
    parameters = [
        ms.Parameter(ms.Tensor(np.array(fuse(rule, dims, [tensors[one] for one in rule.hf_names]))), name=rule.mf_name)
        for rule in rules
    ]
    accumulators = make_accumulators(parameters)
    optimizer = make_optimizer(parameters, OPTIONS, {rule.mf_name: rule.matrices(dims) for rule in rules})
    step = OptimizerStep(optimizer, accumulators, 0.0, 1)
    return rules, dims, tensors, parameters, accumulators, optimizer, step


def draw(rules, dims, seed: int) -> dict[str, np.ndarray]:
    random = np.random.default_rng(seed)
    return {
        hf_name: (0.1 * random.standard_normal(shape)).astype(np.float32)
        for rule in rules
        for hf_name, shape in zip(rule.hf_names, rule.shape(dims))
    }


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[SLOW] if name in ("scorer", "lora") else []) for name in MODELS]
)
def test_updates_are_those_of_float64_matrix_by_matrix(name):
    import mindspore as ms

    rules, dims, tensors, parameters, accumulators, optimizer, step = build(name)
    expected = {hf_name: Float64Muon(hf_name, array) for hf_name, array in tensors.items()}
    for number, lr in enumerate(RATES):
        gradients = draw(rules, dims, number + 1)
        for rule, accumulator in zip(rules, accumulators):
            accumulator.set_data(ms.Tensor(np.array(fuse(rule, dims, [gradients[one] for one in rule.hf_names]))))
        optimizer.learning_rate.set_data(ms.Tensor(lr, ms.float32))
        step()
        for hf_name, one in expected.items():
            one.step(gradients[hf_name], lr)
        for rule, parameter in zip(rules, parameters):
            for hf_name, found in zip(rule.hf_names, split(rule, dims, parameter.asnumpy())):
                np.testing.assert_allclose(found, expected[hf_name].weights, rtol=0, atol=3e-6, err_msg=hf_name)
    for rule in rules:
        kinds = {kind for kind, _, of in (key.partition(".") for key in optimizer.state) if of == rule.mf_name}
        matrices = {expected[one].is_matrix for one in rule.hf_names}
        assert matrices in ({True}, {False})
        assert kinds == ({"momentum_buffer"} if matrices == {True} else {"exp_avg", "exp_avg_sq"})


def test_a_restored_optimizer_continues_bit_for_bit_and_a_withheld_update_changes_no_bit():
    import mindspore as ms

    from mindrlhf.training.optimizers import optimizer_state

    rules, dims, _, parameters, accumulators, optimizer, step = build("qwen2")

    def run(seeds, spoiled=()):
        for seed in seeds:
            gradients = draw(rules, dims, seed)
            for rule, accumulator in zip(rules, accumulators):
                array = np.array(fuse(rule, dims, [gradients[one] for one in rule.hf_names]))
                accumulator.set_data(ms.Tensor(np.full_like(array, np.nan) if seed in spoiled else array))
            optimizer.learning_rate.set_data(ms.Tensor(1e-2, ms.float32))
            step()

    def held():
        return {one.name: one.asnumpy().copy() for one in parameters} | {
            name: parameter.asnumpy().copy() for name, parameter in optimizer_state(optimizer).items()
        }

    run([11, 12])
    middle = held()
    run([13, 14])
    final = held()
    for seeds, spoiled in (([13, 14], ()), ([13, 15, 14], [15])):
        run([16])
        for one in parameters:
            one.set_data(ms.Tensor(middle[one.name].copy()))
        for name, parameter in optimizer_state(optimizer).items():
            parameter.set_data(ms.Tensor(middle[name].copy()))
        run(seeds, spoiled)
        for name, array in held().items():
            np.testing.assert_array_equal(array, final[name], err_msg=name)


LAYOUTS = (
    "dp=4,opt=1",
    "dp=2,mp=2,opt=1",
    "dp=4,mp=2,opt=2",
    "mp=4",
    "dp=4,mp=2,opt=1,pp=2",
    "dp=2,cp=2,opt=1",
    "dp=4,ep=2,opt=1",
    "dp=4,ep=4",
)


@pytest.mark.parametrize("text", LAYOUTS)
@pytest.mark.parametrize("name", ["qwen2", "experts"])
def test_ranks_gather_whole_blocks_and_keep_their_shards(name, text):
    model = {**MODELS[name], "num_hidden_layers": 2, "hidden_size": 256, "num_attention_heads": 8, "head_dim": 32}
    model |= {"num_key_value_heads": 4, "intermediate_size": 512, "vocab_size": 512}
    if name == "experts":
        model |= {"num_experts": 4, "moe_intermediate_size": 64}
    elif "ep=" in text:
        pytest.skip("no experts")
    spec = find_spec(model)
    dims = spec.dims(model)
    layouts = {one.name: one for one in parameter_layouts(spec, dims, Layout.parse(text), 4)}
    num_gathered = 0
    for rule in spec.rules(dims):
        matrices, layout = rule.matrices(dims), layouts[rule.mf_name]
        if matrices is None:
            continue
        whole = np.arange(np.prod(layout.shape)).reshape(layout.shape)
        first = layout.stages[0] * layout.stage_size
        for rank in range(layout.stage_size):
            ranks, columns = gathered_ranks(layout, rank, matrices.block_rows)
            stacked = np.concatenate([whole[layout.shard_of(first + one)] for one in ranks])
            gathered = np.concatenate(np.split(stacked, columns), axis=1)
            assert gathered.shape[1] == layout.shape[1] and len(gathered) % matrices.block_rows == 0
            top = gathered[0, 0] // layout.shape[1]
            np.testing.assert_array_equal(gathered, whole[top : top + len(gathered)])
            assert top % matrices.block_rows == 0
            assert all(gathered_ranks(layout, one, matrices.block_rows)[0] == ranks for one in ranks)
            column, row = divmod(ranks.index(rank), len(ranks) // columns)
            own = np.split(np.split(gathered, columns, axis=1)[column], len(ranks) // columns)[row]
            np.testing.assert_array_equal(own, whole[layout.shard_of(first + rank)])
            num_gathered += len(ranks) > 1
    assert num_gathered or "ep=4" in text


@pytest.mark.parametrize("text", ["dp=2,mp=2,opt=1", "dp=4,mp=2,opt=2", "dp=2,cp=2,mp=2,opt=1", "mp=4"])
def test_a_step_has_whole_matrices_though_a_group_gathers_in_the_order_of_its_ranks(text, monkeypatch):
    import mindspore as ms

    from mindrlhf.training.optimizers import muon

    model = {**QWEN, "hidden_size": 256, "num_attention_heads": 8, "head_dim": 32, "num_key_value_heads": 4}
    spec = find_spec(model | {"intermediate_size": 512})
    dims, groups = spec.dims(model | {"intermediate_size": 512}), []
    layouts = {one.name: one for one in parameter_layouts(spec, dims, Layout.parse(text), 4)}
    monkeypatch.setattr(muon, "_group", lambda ranks: groups.append(ranks) or "group")
    num_unordered = 0
    for rule in spec.rules(dims):
        matrices, layout = rule.matrices(dims), layouts[rule.mf_name]
        if matrices is None:
            continue
        whole = np.arange(np.prod(layout.shape), dtype=np.float32).reshape(layout.shape)
        for rank in range(layout.stage_size):
            monkeypatch.setattr(muon, "get_rank", lambda rank=rank: rank)
            groups.clear()
            shares = muon.Shares(layout, matrices.block_rows)
            shard = whole[layout.shard_of(rank)]
            if groups:
                stacked = np.concatenate([whole[layout.shard_of(one)] for one in sorted(groups[0])])
                shares.all_gather = lambda shard, stacked=stacked: ms.Tensor(stacked)
                num_unordered += gathered_ranks(layout, rank, matrices.block_rows)[0] != sorted(groups[0])
            gathered = shares.gather(ms.Tensor(np.ascontiguousarray(shard)))
            np.testing.assert_array_equal(gathered.asnumpy(), whole)
            np.testing.assert_array_equal(shares.own(gathered).asnumpy(), shard)
    assert num_unordered or text == "mp=4"


@pytest.mark.parametrize("rank", [pytest.param(None, id="all weights", marks=SLOW), pytest.param(4, id="adapters")])
def test_a_learner_steps_by_its_own_gradients(rank, tmp_path):
    """The CPU has no step of its own for Muon: its graph follows the gradients of the CPU's head."""
    from engines import whole_engine
    from networks import attach_lora, load_random_weights

    from mindrlhf.algorithms.logprobs import PolicyLogProbs
    from mindrlhf.algorithms.losses import SupervisedLoss
    from mindrlhf.data.packing import TokenSequence
    from mindrlhf.models.causal_lm import build_model
    from mindrlhf.training.batch import RowOptions, make_batch

    network = build_model(QWEN, seq_length=16)
    load_random_weights(network, seed=5)
    if rank:
        attach_lora(network, LoraOptions(rank, 8.0), 3, "base")
    options = OptimizerSection(**{**vars(OPTIONS), "max_grad_norm": 0.01})
    engine = whole_engine(SupervisedLoss(PolicyLogProbs(network, 1.0, "cpu")), options)
    rules = {rule.mf_name: rule for rule in rules_of("lora" if rank else "qwen2")[0]}
    dims = network.dims
    random = np.random.default_rng(1)
    sequences = [TokenSequence(*np.split(random.integers(1, 40, 14).astype(np.int32), [4]), {}) for _ in range(2)]
    batch = make_batch(sequences, RowOptions((16,), 2, 1, False))
    parameters = {one.name: one for one in network.trainable_params()}
    assert parameters.keys() == rules.keys()
    expected = {
        hf_name: Float64Muon(hf_name, tensor)
        for name, rule in rules.items()
        for hf_name, tensor in zip(rule.hf_names, split(rule, dims, parameters[name].asnumpy()))
    }
    for lr in RATES:
        for rows in batch.micro_batches:
            engine.add(rows, batch.num_tokens)
        gradients = {name: array.astype(np.float64) for name, array in engine.gradients()}
        norm = np.sqrt(sum((array**2).sum() for array in gradients.values()))
        assert norm > 0.02, "it is clipped"
        np.testing.assert_allclose(engine.apply(lr), norm, rtol=1e-5)
        for name, rule in rules.items():
            clipped = split(rule, dims, gradients[name] * 0.01 / norm)
            for hf_name, gradient, found in zip(rule.hf_names, clipped, split(rule, dims, parameters[name].asnumpy())):
                expected[hf_name].step(gradient, lr)
                np.testing.assert_allclose(found, expected[hf_name].weights, rtol=0, atol=2e-5, err_msg=hf_name)
