"""An update divided among the ranks of one machine, which exchange gradients and weights through shared memory.

The trained tensors, one after the other, are taken as one long array and cut into chunks; of each chunk rank r owns the
r-th of as many equal parts as there are ranks. The owner sums the gradients of its parts, updates its parts of the
weights, and is the only one that has their moments in its memory (Rajbhandari et al. 2020, arXiv:1910.02054, P_os).
Chunks pass through three buffers in turn, so the ranks wait for each other once for each chunk.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from mindrlhf.training.worker.rank_memory import RankMemory

CHUNK_ELEMENTS = 1 << 21
_NUM_BUFFERS = 3
_ALIGNMENT = 16  # elements: parts of different ranks share no cache line


@dataclass(frozen=True)
class Piece:
    """Elements ``first`` to ``last`` (exclusive) of a tensor, which lie at ``offset`` in a chunk."""

    tensor: int
    first: int
    last: int
    offset: int


class SharedUpdate:
    """This rank's side of the exchange; all ranks call the same methods in the same order.

    Args:
        memory: of at least ``size_bytes``.
        sizes: elements of each trained tensor.

    Attributes:
        owned: the pieces of this rank.
        moments: float32 [2, elements], first and second moments of all tensors; a rank touches those it owns.
    """

    def __init__(self, memory: RankMemory, sizes: Sequence[int]):
        rank, num_ranks, total = memory.rank.index, memory.rank.world_size, sum(sizes)
        self._wait = memory.wait
        self._rank, self._num_ranks = rank, num_ranks
        moments, buffers, square_sums = np.split(
            memory.array[: self.size_bytes(sizes, num_ranks)], np.cumsum(_part_sizes(sizes, num_ranks))[:-1]
        )
        self.moments = moments.view(np.float32)[: 2 * total].reshape(2, total)
        self._buffers = buffers.view(np.float32).reshape(_NUM_BUFFERS, num_ranks, CHUNK_ELEMENTS)
        self._square_sums = square_sums.view(np.float64)[: len(sizes)]
        # By chunk, by rank: the pieces it owns.
        self._parts: list[list[list[Piece]]] = []
        for start in range(0, total, CHUNK_ELEMENTS):
            length = min(CHUNK_ELEMENTS, total - start)
            parts = (_part(length, owner, num_ranks) for owner in range(num_ranks))
            self._parts.append([list(_pieces(sizes, start, first, last)) for first, last in parts])
        self.owned = [piece for chunk in self._parts for piece in chunk[rank]]
        self._measured = _balanced(sizes, num_ranks)[rank]

    @staticmethod
    def size_bytes(sizes: Sequence[int], num_ranks: int) -> int:
        """Return the bytes that the exchange needs."""
        return sum(_part_sizes(sizes, num_ranks))

    def sum_gradients(self, gradients: Sequence[np.ndarray]) -> None:
        """Replace the gradients, float32 [elements] of each tensor, by their sum over the ranks, from rank 0 on."""
        for chunk in range(len(self._parts) + 2):
            if chunk < len(self._parts):  # give the owners their parts
                for owner, pieces in enumerate(self._parts[chunk]):
                    if owner != self._rank:
                        _copy_in(pieces, gradients, self._buffer(chunk)[self._rank])
            if 0 <= chunk - 1 < len(self._parts):
                self._sum_part(chunk - 1, gradients)
            if chunk >= 2:
                for owner, pieces in enumerate(self._parts[chunk - 2]):
                    if owner != self._rank:
                        _copy_out(pieces, self._buffer(chunk - 2)[owner], gradients)
            self._wait()

    def square_sums(self, gradients: Sequence[np.ndarray]) -> list[float]:
        """Return the sum of squares of each gradient; the ranks divide the tensors."""
        for tensor in self._measured:
            self._square_sums[tensor] = np.dot(gradients[tensor], gradients[tensor])
        self._wait()
        return self._square_sums.tolist()

    def spread_weights(self, weights: Sequence[np.ndarray]) -> None:
        """Give the other ranks the weights, float32 [elements] of each tensor, that this rank owns, and take theirs."""
        for chunk in range(len(self._parts) + 1):
            if chunk < len(self._parts):
                _copy_in(self._parts[chunk][self._rank], weights, self._buffer(chunk)[self._rank])
            if chunk >= 1:
                for owner, pieces in enumerate(self._parts[chunk - 1]):
                    if owner != self._rank:
                        _copy_out(pieces, self._buffer(chunk - 1)[owner], weights)
            self._wait()

    def others(self) -> Iterator[Piece]:
        """Yield the pieces that other ranks own."""
        for chunk in self._parts:
            for owner, pieces in enumerate(chunk):
                yield from pieces if owner != self._rank else ()

    def _buffer(self, chunk: int) -> np.ndarray:
        return self._buffers[chunk % _NUM_BUFFERS]

    def _sum_part(self, chunk: int, gradients: Sequence[np.ndarray]) -> None:
        buffer = self._buffer(chunk)
        for piece in self._parts[chunk][self._rank]:
            place = slice(piece.offset, piece.offset + piece.last - piece.first)
            own, target = gradients[piece.tensor][piece.first : piece.last], buffer[self._rank, place]
            terms = [own if one == self._rank else buffer[one, place] for one in range(self._num_ranks)]
            np.add(terms[0], terms[1], out=target)
            for term in terms[2:]:
                np.add(target, term, out=target)
            own[...] = target


def _part_sizes(sizes: Sequence[int], num_ranks: int) -> list[int]:
    """Return the bytes of moments, buffers and sums of squares, each of whole cache lines."""
    elements = (2 * sum(sizes), _NUM_BUFFERS * num_ranks * CHUNK_ELEMENTS, 2 * len(sizes))
    return [4 * -(-count // _ALIGNMENT) * _ALIGNMENT for count in elements]


def _part(length: int, rank: int, num_ranks: int) -> tuple[int, int]:
    """Return the first and last (exclusive) element of a rank's part of a chunk."""
    whole = -(-length // (num_ranks * _ALIGNMENT)) * _ALIGNMENT
    return min(rank * whole, length), min((rank + 1) * whole, length)


def _pieces(sizes: Sequence[int], start: int, first: int, last: int) -> Iterator[Piece]:
    """Yield the pieces of elements ``first`` to ``last`` of the chunk that begins at ``start``."""
    begin = 0
    for tensor, size in enumerate(sizes):
        low, high = max(begin, start + first), min(begin + size, start + last)
        if low < high:
            yield Piece(tensor, low - begin, high - begin, low - start)
        begin += size


def _copy_in(pieces: Sequence[Piece], tensors: Sequence[np.ndarray], buffer: np.ndarray) -> None:
    for piece in pieces:
        buffer[piece.offset : piece.offset + piece.last - piece.first] = tensors[piece.tensor][piece.first : piece.last]


def _copy_out(pieces: Sequence[Piece], buffer: np.ndarray, tensors: Sequence[np.ndarray]) -> None:
    for piece in pieces:
        tensors[piece.tensor][piece.first : piece.last] = buffer[piece.offset : piece.offset + piece.last - piece.first]


def _balanced(sizes: Sequence[int], num_ranks: int) -> list[list[int]]:
    """Divide the tensors among the ranks, the largest first, each to the rank that has least."""
    shares: list[list[int]] = [[] for _ in range(num_ranks)]
    loads = [0] * num_ranks
    for tensor in sorted(range(len(sizes)), key=lambda index: (-sizes[index], index)):
        least = loads.index(min(loads))
        shares[least].append(tensor)
        loads[least] += sizes[tensor]
    return shares
