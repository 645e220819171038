"""Lowered kernels and collectives against their definitions in NumPy float64."""

import numpy as np
import pytest
from mindspore.train import mind_ir_pb2 as ir

from graph_on_cpu.lower import use_float32
from graph_on_cpu.lowering_interpreter import FLOAT, INT32, UINT8, lower_for, one_node_program, run
from graph_on_cpu.mindir import LoweringError, Program, attribute, scalar

WORLD = "hccl_world_group"
BATCH, HEADS, KV_HEADS, LENGTH, KEYS, DIM = 2, 4, 2, 5, 7, 3
SCALE = 0.37
OPTIONS = (None, None, None, HEADS, 1.0, SCALE, 2147483647, 0, 0, 1, 0)


def single(program, inputs, directory):
    """Result of a program of one rank; inputs in order."""
    lowered, groups = lower_for(program, 0, directory)
    return run([lowered], [groups], [{f"input{index}": array for index, array in inputs.items()}])[0]


def numeric_gradient(function, x, step=1e-6):
    """Central differences of a scalar function."""
    gradient = np.zeros_like(x)
    for index in np.ndindex(x.shape):
        shifted = [x.copy(), x.copy()]
        shifted[0][index] += step
        shifted[1][index] -= step
        gradient[index] = (function(shifted[0]) - function(shifted[1])) / (2 * step)
    return gradient


def rms_norm(x, weight, epsilon=1e-6):
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + epsilon) * weight


def attention(query, key, value, hidden):
    """Head by head, query by query."""
    output = np.zeros_like(query)
    for b, h, i in np.ndindex(BATCH, HEADS, LENGTH):
        group = h // (HEADS // KV_HEADS)
        scores = SCALE * key[b, group] @ query[b, h, i]
        powers = np.where(hidden[b, 0, i] == 0, np.exp(scores), 0.0)
        output[b, h, i] = powers / powers.sum() @ value[b, group]
    return output


@pytest.fixture
def heads():
    random = np.random.default_rng(1)
    query = random.standard_normal((BATCH, HEADS, LENGTH, DIM))
    key, value = random.standard_normal((2, BATCH, KV_HEADS, KEYS, DIM))
    hidden = (random.random((BATCH, 1, LENGTH, KEYS)) > 0.6).astype(np.uint8)
    hidden[..., 0] = 0
    return query, key, value, hidden


def test_rms_norm(tmp_path):
    random = np.random.default_rng(0)
    x, weight = random.standard_normal((3, 4, 8)), random.standard_normal(8)
    outputs = [((3, 4, 8), FLOAT), ((3, 4, 1), FLOAT)]
    program = one_node_program("RmsNorm", [((3, 4, 8), FLOAT), ((8,), FLOAT), 1e-6], outputs)
    normalised, inverse = single(program, {0: x, 1: weight}, tmp_path)
    np.testing.assert_allclose(normalised, rms_norm(x, weight), rtol=1e-7)
    np.testing.assert_allclose(inverse[..., 0], 1 / np.sqrt((x**2).mean(-1) + 1e-6), rtol=1e-7)


def test_rms_norm_grad(tmp_path):
    random = np.random.default_rng(0)
    dy, x = random.standard_normal((2, 3, 4, 6))
    weight = random.standard_normal(6)
    inverse = 1 / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6)
    shapes = [((3, 4, 6), FLOAT), ((3, 4, 6), FLOAT), ((3, 4, 1), FLOAT), ((6,), FLOAT)]
    program = one_node_program("RmsNormGrad", shapes, [((3, 4, 6), FLOAT), ((6,), FLOAT)])
    dx, dweight = single(program, {0: dy, 1: x, 2: inverse, 3: weight}, tmp_path)
    np.testing.assert_allclose(dx, numeric_gradient(lambda x: (rms_norm(x, weight) * dy).sum(), x), atol=1e-6)
    np.testing.assert_allclose(dweight, numeric_gradient(lambda w: (rms_norm(x, w) * dy).sum(), weight), atol=1e-6)


def rotated(x, angles):
    """Channels i and i + D / 2 are a complex number, multiplied by exp(i angle)."""
    half = x.shape[-1] // 2
    turned = (x[..., :half] + 1j * x[..., half:]) * np.exp(1j * angles)
    return np.concatenate([turned.real, turned.imag], -1)


@pytest.mark.parametrize("rows", [1, 2])  # one table for both rows, and one each
def test_rotation_and_its_gradient(rows, tmp_path):
    random = np.random.default_rng(0)
    x, dy = random.standard_normal((2, 5, 2, 3, 8))
    angles = random.standard_normal((5, rows, 1, 4))
    tables = [np.concatenate([table, table], -1) for table in (np.cos(angles), np.sin(angles))]
    inputs = [(x.shape, FLOAT), *((table.shape, FLOAT) for table in tables)]
    program = one_node_program("RotaryPositionEmbedding", [*inputs, 0], [(x.shape, FLOAT)])
    found = single(program, {0: x, 1: tables[0], 2: tables[1]}, tmp_path)
    np.testing.assert_allclose(found, rotated(x, angles), rtol=1e-12)
    outputs = [(x.shape, FLOAT), inputs[1], inputs[2]]
    program = one_node_program("RotaryPositionEmbeddingGrad", [*inputs, None, 0], outputs)
    slope = single(program, {0: dy, 1: tables[0], 2: tables[1]}, tmp_path)[0]
    np.testing.assert_allclose(slope, numeric_gradient(lambda x: (rotated(x, angles) * dy).sum(), x), atol=1e-6)


def test_a_rotation_of_neighbours_is_refused(tmp_path):
    inputs = [((2, 1, 1, 4), FLOAT)] * 3
    program = one_node_program("RotaryPositionEmbedding", [*inputs, 1], [((2, 1, 1, 4), FLOAT)])
    with pytest.raises(LoweringError, match="neighbouring"):
        lower_for(program, 0, tmp_path)


def test_one_value_added_to_each_row_in_place(tmp_path):
    random = np.random.default_rng(0)
    x, places, values = random.standard_normal((3, 5)), np.array([[4], [0], [4]]), random.standard_normal((3, 1))
    inputs = [((3, 5), FLOAT), 1, ((3, 1), INT32), ((3, 1), FLOAT), None]  # None: a mark of order
    found = single(
        one_node_program("InplaceScatterAdd", inputs, [((3, 5), FLOAT)]), {0: x, 2: places, 3: values}, tmp_path
    )
    expected = x.copy()
    expected[np.arange(3), places[:, 0]] += values[:, 0]
    np.testing.assert_allclose(found, expected, rtol=1e-12)


def forward_program(options=OPTIONS, mask=((BATCH, 1, LENGTH, KEYS), UINT8)):
    query, key = (BATCH, HEADS, LENGTH, DIM), (BATCH, KV_HEADS, KEYS, DIM)
    statistics = ((BATCH, HEADS, LENGTH, 8), FLOAT)
    inputs = [(query, FLOAT), (key, FLOAT), (key, FLOAT), None, None, None, mask, *options]
    return one_node_program("FlashAttentionScore", inputs, [statistics, statistics, ((1,), FLOAT), (query, FLOAT)])


def test_attention(heads, tmp_path):
    *_, output = single(forward_program(), {0: heads[0], 1: heads[1], 2: heads[2], 6: heads[3]}, tmp_path)
    np.testing.assert_allclose(output, attention(*heads), rtol=1e-6, atol=1e-8)


def test_attention_of_rows_before_heads(heads, tmp_path):
    """[B, S, N*D], the form under context parallelism, where a rank has fewer queries than keys."""
    query, key = (BATCH, LENGTH, HEADS * DIM), (BATCH, KEYS, KV_HEADS * DIM)
    statistics, mask = ((BATCH, HEADS, LENGTH, 8), FLOAT), ((BATCH, 1, LENGTH, KEYS), UINT8)
    inputs = [(query, FLOAT), (key, FLOAT), (key, FLOAT), None, None, None, mask, *OPTIONS[:9], 0, 0]
    outputs = [statistics, statistics, ((1,), FLOAT), (query, FLOAT)]
    rows = [array.transpose(0, 2, 1, 3).reshape(shape) for array, shape in zip(heads, (query, key, key))]
    program = one_node_program("FlashAttentionScore", inputs, outputs)
    *_, output = single(program, dict(zip((0, 1, 2, 6), (*rows, heads[3]))), tmp_path)
    expected = attention(*heads).transpose(0, 2, 1, 3).reshape(query)
    np.testing.assert_allclose(output, expected, rtol=1e-6, atol=1e-8)


def test_attention_grad(heads, tmp_path):
    query, key, value, hidden = heads
    doutput = np.random.default_rng(2).standard_normal(query.shape)
    statistics = ((BATCH, HEADS, LENGTH, 8), FLOAT)
    shapes = [(array.shape, FLOAT) for array in (query, key, value, doutput)]
    saved = [statistics, statistics, ((1,), FLOAT), (query.shape, FLOAT)]
    inputs = [*shapes, None, None, None, (hidden.shape, UINT8), *saved, *OPTIONS]
    program = one_node_program("FlashAttentionScoreGrad", inputs, [*shapes[:3], ((1,), FLOAT)])
    results = single(program, {0: query, 1: key, 2: value, 3: doutput, 7: hidden}, tmp_path)
    tensors = [query, key, value]
    for index, result in enumerate(results[:3]):

        def loss(x, index=index):
            return (attention(*[x if i == index else t for i, t in enumerate(tensors)], hidden) * doutput).sum()

        np.testing.assert_allclose(result, numeric_gradient(loss, tensors[index]), atol=1e-6)


@pytest.mark.parametrize(
    ("options", "mask", "message"),
    [
        ((*OPTIONS[:9], 2, 0), ((BATCH, 1, LENGTH, KEYS), UINT8), "BNSD"),
        ((*OPTIONS[:10], 2), ((BATCH, 1, LENGTH, KEYS), UINT8), "sparse_mode"),
        (OPTIONS, None, "without a mask"),
    ],
)
def test_other_kinds_of_attention_are_refused(options, mask, message, tmp_path):
    with pytest.raises(LoweringError, match=message):
        lower_for(forward_program(options, mask), 0, tmp_path)


def test_embedding_and_its_gradient(tmp_path):
    random = np.random.default_rng(0)
    table, ids = random.standard_normal((6, 3)), np.array([5, 0, 5, 2])
    program = one_node_program("Embedding", [((4,), INT32), ((6, 3), FLOAT)], [((4, 3), FLOAT)])
    np.testing.assert_array_equal(single(program, {0: ids, 1: table}, tmp_path), table[ids])
    gradient = random.standard_normal((4, 3))
    program = one_node_program("EmbeddingDenseBackward", [((4, 3), FLOAT), ((4,), INT32)], [((6, 3), FLOAT)])
    result = single(program, {0: gradient, 1: ids}, tmp_path)
    np.testing.assert_allclose(result[5], gradient[0] + gradient[2])
    np.testing.assert_array_equal(result[[1, 3, 4]], 0)


def test_outer_product(tmp_path):
    program = one_node_program("Outer", [((3,), FLOAT), ((2,), FLOAT)], [((3, 2), FLOAT)])
    left, right = np.array([1.0, 2.0, 3.0]), np.array([10.0, 100.0])
    np.testing.assert_array_equal(single(program, {0: left, 1: right}, tmp_path), np.outer(left, right))


def collective(op_type, shape, output_shape, tmp_path, groups, world_size=4, **attributes):
    """Results of a collective by rank, and the inputs: random tensors."""
    random = np.random.default_rng(3)
    inputs = [random.standard_normal(shape) for _ in range(world_size)]
    programs, made = [], []
    for rank in range(world_size):
        name, ranks = next((name, ranks) for name, ranks in groups.items() if rank in ranks)
        attributes["group"] = name
        program = one_node_program(op_type, [(shape, FLOAT)], [(output_shape, FLOAT)], attributes, ranks)
        lowered, rank_groups = lower_for(program, rank, tmp_path)
        programs.append(lowered)
        made.append(rank_groups)
    return run(programs, made, [{"input0": array} for array in inputs]), inputs


GROUPINGS = [{WORLD: (0, 1, 2, 3)}, {"left": (0, 2), "right": (1, 3)}]


def members(groups, rank):
    return next(ranks for ranks in groups.values() if rank in ranks)


@pytest.mark.parametrize("groups", GROUPINGS)
@pytest.mark.parametrize(("op", "function"), [("sum", np.sum), ("max", np.max), ("min", np.min)])
@pytest.mark.parametrize("shape", [(), (4, 3)])
def test_all_reduce(groups, op, function, shape, tmp_path):
    results, inputs = collective("AllReduce", shape, shape, tmp_path, groups, op=op)
    for rank, result in enumerate(results):
        expected = function([inputs[other] for other in members(groups, rank)], axis=0)
        np.testing.assert_allclose(result, expected, rtol=1e-12)


@pytest.mark.parametrize("groups", GROUPINGS)
def test_all_gather_is_exact(groups, tmp_path):
    size = len(members(groups, 0))
    results, inputs = collective("AllGather", (2, 3), (2 * size, 3), tmp_path, groups)
    for rank, result in enumerate(results):
        np.testing.assert_array_equal(result, np.concatenate([inputs[other] for other in members(groups, rank)]))


@pytest.mark.parametrize("groups", GROUPINGS)
def test_reduce_scatter(groups, tmp_path):
    size = len(members(groups, 0))
    results, inputs = collective("ReduceScatter", (4, 3), (4 // size, 3), tmp_path, groups, op="sum")
    for rank, result in enumerate(results):
        ranks = members(groups, rank)
        parts = np.split(sum(inputs[other] for other in ranks), size)
        np.testing.assert_allclose(result, parts[ranks.index(rank)], rtol=1e-12)


@pytest.mark.parametrize("groups", GROUPINGS)
def test_all_to_all(groups, tmp_path):
    size = len(members(groups, 0))
    axes = {"split_dim": 0, "concat_dim": 1, "split_count": size}
    results, inputs = collective("AlltoAll", (4, 3), (4 // size, 3 * size), tmp_path, groups, **axes)
    for rank, result in enumerate(results):
        ranks = members(groups, rank)
        parts = [np.split(inputs[other], size)[ranks.index(rank)] for other in ranks]
        np.testing.assert_array_equal(result, np.concatenate(parts, axis=1))


def test_send_reaches_receive(tmp_path):
    send = one_node_program(
        "Send", [((2, 3), FLOAT)], [((2, 3), FLOAT)], {"group": WORLD, "dest_rank": 1, "sr_tag": 5}, (0, 1)
    )
    receive = one_node_program(
        "Receive", [((1,), FLOAT)], [((2, 3), FLOAT)], {"group": WORLD, "src_rank": 0, "sr_tag": 5}, (0, 1)
    )
    sender, sender_groups = lower_for(send, 0, tmp_path)
    receiver, receiver_groups = lower_for(receive, 1, tmp_path)
    assert sender_groups == receiver_groups
    message = np.arange(6.0).reshape(2, 3)
    results = run([sender, receiver], [sender_groups] * 2, [{"input0": message}, {"input0": np.ones(1)}])
    np.testing.assert_array_equal(results[1], message)


def test_a_group_of_one_communicates_nothing(tmp_path):
    program = one_node_program("AllReduce", [((2,), FLOAT)], [((2,), FLOAT)], {"group": "alone", "op": "sum"}, (0,))
    lowered, _ = lower_for(program, 0, tmp_path)
    assert "AllReduce" not in {lowered.primitive_of(node).op_type for node in lowered.model.graph.node if node.input}


def test_unknown_reduction_is_refused(tmp_path):
    program = one_node_program("AllReduce", [((2,), FLOAT)], [((2,), FLOAT)], {"group": WORLD, "op": "prod"}, (0, 1))
    with pytest.raises(LoweringError, match="prod"):
        lower_for(program, 0, tmp_path)


@pytest.mark.parametrize("content", [b"", b"no protobuf at all"])
def test_damaged_file_is_named(content, tmp_path):
    (tmp_path / "graph.mindir").write_bytes(content)
    with pytest.raises(LoweringError, match=r"graph\.mindir"):
        Program.load(tmp_path / "graph.mindir")


@pytest.mark.parametrize(("type_id", "dtype"), [(42, ir.TensorProto.FLOAT16), (45, ir.TensorProto.BFLOAT16)])
def test_half_precision_becomes_float32(type_id, dtype):
    """Types of tensors and casts; a constant that happens to be the number of a dtype stays what it is."""
    program = one_node_program("Cast", [((2,), FLOAT), type_id], [((2,), dtype)])
    node = program.model.graph.node[-1]
    shared = node.input[1]
    use_float32(program)
    constants = {entry.output[0]: scalar(attribute(entry, "value")) for entry in program.model.graph.node[:-1]}
    node = program.model.graph.node[-1]
    assert constants[node.input[1]] == 43
    assert constants[shared] == type_id
    assert attribute(node, "shape").tensors[0].data_type == FLOAT
