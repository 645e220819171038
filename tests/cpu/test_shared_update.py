"""The divided update against sums in NumPy and against the undivided step, with threads for ranks."""

import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from test_host_optimizer import OPTIONS, SHAPES, draw_gradients, draw_weights

from mindrlhf.training.runtime import Rank

SIZES = [100, 1, 7, 333, 64, 1000, 5]


@pytest.fixture(scope="module", autouse=True)
def mindformers(tmp_path_factory):
    from mindrlhf.models.context import prepare_mindformers

    prepare_mindformers("cpu", tmp_path_factory.mktemp("mindformers-log"))


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    """So small that tensors lie in several chunks, and chunks hold several tensors."""
    from mindrlhf.cpu.training import shared_update

    monkeypatch.setattr(shared_update, "CHUNK_ELEMENTS", 96)
    monkeypatch.setattr(shared_update, "BLOCK_ELEMENTS", 16)


def on_ranks(num_ranks, sizes, run):
    """Return what ``run(shared, rank)`` returns on each rank."""
    from mindrlhf.cpu.training.rank_memory import RankMemory
    from mindrlhf.cpu.training.shared_update import SharedUpdate

    array = np.zeros(SharedUpdate.size_bytes(sizes, num_ranks), np.uint8)
    barrier = threading.Barrier(num_ranks, timeout=60)

    def one(rank: int):
        return run(SharedUpdate(RankMemory(array, barrier.wait, Rank(rank, num_ranks)), sizes), rank)

    with ThreadPoolExecutor(num_ranks) as pool:
        return [future.result() for future in [pool.submit(one, rank) for rank in range(num_ranks)]]


def draw(rank: int, step: int = 0) -> list[np.ndarray]:
    stream = np.random.default_rng([rank, step])
    return [stream.standard_normal(size).astype(np.float32) for size in SIZES]


@pytest.mark.parametrize("num_ranks", [2, 3, 5])
def test_owners_have_the_sum_from_rank_0_on_and_all_ranks_its_norm(num_ranks):
    def run(shared, rank):
        sums = []
        for step in range(3):
            gradients = draw(rank, step)
            square_sums = shared.sum_gradients(gradients)
            sums.append((gradients, square_sums, shared.owned))
        return sums

    results = on_ranks(num_ranks, SIZES, run)
    for step in range(3):
        expected = draw(0, step)
        for other in range(1, num_ranks):
            expected = [total + term for total, term in zip(expected, draw(other, step))]
        for gradients, square_sums, owned in (by_step[step] for by_step in results):
            own = [np.zeros(size, np.float32) for size in SIZES]
            for piece in owned:
                place = slice(piece.first, piece.last)
                own[piece.tensor][place] = expected[piece.tensor][place]
            for found, wanted in zip(gradients, own, strict=True):
                np.testing.assert_array_equal(found, wanted)
            np.testing.assert_allclose(
                sum(square_sums), sum((total.astype(np.float64) ** 2).sum() for total in expected), rtol=1e-6
            )
            assert square_sums == results[0][step][1]
            if num_ranks == 2:  # the bits do not depend on the number of ranks
                from mindrlhf.cpu.training import shared_update

                assert square_sums == shared_update.square_sums(expected, shared_update.blocks_of(SIZES))


@pytest.mark.parametrize("num_ranks", [2, 3, 5])
def test_every_element_has_one_owner_whose_weights_all_ranks_get(num_ranks):
    def run(shared, rank):
        weights = [np.full(size, -1.0, np.float32) for size in SIZES]
        for piece in shared.owned:
            place = slice(piece.first, piece.last)
            assert (weights[piece.tensor][place] == -1.0).all(), "owned twice by one rank"
            weights[piece.tensor][place] = rank
        own = [weight.copy() for weight in weights]
        shared.spread_weights(weights)
        return own, weights

    results = on_ranks(num_ranks, SIZES, run)
    counts = [sum((own[tensor] >= 0).astype(int) for own, _ in results) for tensor in range(len(SIZES))]
    assert all((count == 1).all() for count in counts)
    owned = [sum(int((weight == rank).sum()) for weight in results[0][1]) for rank in range(num_ranks)]
    assert sum(owned) == sum(SIZES), "a weight that nobody has set"
    # Parts are whole blocks; the last rank's may be shorter.
    assert max(owned) <= sum(SIZES) / num_ranks + 16 * -(-sum(SIZES) // 96)
    for _, weights in results[1:]:
        for found, expected in zip(weights, results[0][1], strict=True):
            np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_the_divided_step_has_the_bits_of_the_undivided_one(num_ranks):
    """Over steps with clipping and without, one of which is skipped; moments too."""
    import mindspore as ms

    from mindrlhf.checkpoint.optimizer import optimizer_arrays
    from mindrlhf.cpu.training.host_optimizer import HostOptimizerStep, SharedAdamW
    from mindrlhf.training.engine.cells import make_accumulators
    from mindrlhf.training.optimizers import make_optimizer

    sizes = [int(np.prod(shape)) for shape in SHAPES.values()]
    shares = [[*draw_gradients(2, 0.1), *draw_gradients(1, 1e-4)] for _ in range(num_ranks)]
    for rank, steps in enumerate(shares):
        for gradients in steps:
            for array in gradients.values():
                array *= np.float32(rank + 1)
    broken = {name: array.copy() for name, array in shares[0][0].items()}
    broken["square"][0, 0] = np.nan

    def steps_of(step, parameters, accumulators, gradients_of_steps):
        norms = []
        for gradients in gradients_of_steps:
            for accumulator, name in zip(accumulators, SHAPES):
                accumulator.set_data(ms.Tensor(gradients[name]))
            norms.append(step())
            assert not any(accumulator.asnumpy().any() for accumulator in accumulators)
        state = {name: array.copy() for name, array in optimizer_arrays(step.optimizer)}
        return norms, [parameter.asnumpy().copy() for parameter in parameters], state

    def build():
        weights = draw_weights()
        parameters = [ms.Parameter(ms.Tensor(weights[name]), name=name) for name in SHAPES]
        return parameters, make_accumulators(parameters)

    sums = [dict(gradients) for gradients in shares[0]]
    for other in shares[1:]:
        sums = [{name: total[name] + term[name] for name in SHAPES} for total, term in zip(sums, other)]
    parameters, accumulators = build()
    whole = HostOptimizerStep(make_optimizer(parameters, OPTIONS, {}), accumulators, OPTIONS.max_grad_norm, 1)
    expected = steps_of(whole, parameters, accumulators, [sums[0], broken, *sums[1:]])
    assert not np.isfinite(expected[0][1]) and np.isfinite(expected[0][0])

    built = [build() for _ in range(num_ranks)]

    def run(shared, rank):
        optimizer = SharedAdamW(built[rank][0], OPTIONS, shared.moments)
        step = HostOptimizerStep(optimizer, built[rank][1], OPTIONS.max_grad_norm, num_ranks, shared)
        return steps_of(step, *built[rank], [shares[rank][0], broken, *shares[rank][1:]])

    for norms, weights, state in on_ranks(num_ranks, sizes, run):
        np.testing.assert_array_equal(norms, expected[0])
        for found, other in zip(weights, expected[1], strict=True):
            np.testing.assert_array_equal(found, other)
        assert state.keys() == expected[2].keys()
        for name, array in expected[2].items():
            np.testing.assert_array_equal(state[name], array, err_msg=name)
