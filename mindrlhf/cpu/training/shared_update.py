"""An update divided among the ranks of one machine, which exchange gradients and weights through shared memory.

The trained tensors, one after the other, are taken as one long array and cut into chunks; of each chunk rank r owns the
r-th of as many parts, about equal, as there are ranks. The owner sums the gradients of its parts, updates its parts of
the weights, and is the only one that has their sums and their moments in its memory (Rajbhandari et al. 2020,
arXiv:1910.02054, P_os+g). Chunks pass through two buffers in turn, so the ranks wait once for each chunk.

Of the sums all ranks need the norm. It is added up from blocks of the long array which do not depend on the number of
ranks, so that its bits do not either.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from mindrlhf.cpu.training.rank_memory import RankMemory

CHUNK_ELEMENTS = 1 << 21  # of whole blocks
BLOCK_ELEMENTS = 1 << 14  # parts are whole blocks; a block stays in the cache between its sum and its norm
_NUM_BUFFERS = 2
_ALIGNMENT = 16  # elements: what lies side by side in the memory shares no cache line


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
        moments, buffers, sums = np.split(
            memory.array[: self.size_bytes(sizes, num_ranks)], np.cumsum(_part_sizes(sizes, num_ranks))[:-1]
        )
        self.moments = moments.view(np.float32)[: 2 * total].reshape(2, total)
        self._buffers = buffers.view(np.float32).reshape(_NUM_BUFFERS, num_ranks, CHUNK_ELEMENTS)
        self._square_sums = sums.view(np.float64)[: len(blocks_of(sizes))]
        # By chunk, by rank: the pieces it owns.
        self._parts: list[list[list[Piece]]] = []
        # By chunk: the blocks that this rank owns, with their places in the sums of squares.
        self._blocks: list[list[tuple[int, Piece]]] = [[] for _ in range(0, total, CHUNK_ELEMENTS)]
        own = []
        for start in range(0, total, CHUNK_ELEMENTS):
            length = min(CHUNK_ELEMENTS, total - start)
            parts = [_part(length, owner, num_ranks) for owner in range(num_ranks)]
            self._parts.append([list(_pieces(sizes, start, first, last)) for first, last in parts])
            own.append(range(*parts[rank]))
        self.owned = [piece for chunk in self._parts for piece in chunk[rank]]
        begins = np.cumsum([0, *sizes])
        for place, piece in enumerate(blocks_of(sizes)):
            chunk = int(begins[piece.tensor] + piece.first) // CHUNK_ELEMENTS
            if piece.offset in own[chunk]:
                self._blocks[chunk].append((place, piece))

    @staticmethod
    def size_bytes(sizes: Sequence[int], num_ranks: int) -> int:
        """Return the bytes that the exchange needs."""
        return sum(_part_sizes(sizes, num_ranks))

    def sum_gradients(self, gradients: Sequence[np.ndarray]) -> list[float]:
        """Replace what this rank owns of the gradients, float32 [elements] of each tensor, by the sum over the ranks.

        The sum is taken from rank 0 on. What others own becomes zero.

        Returns:
            The sums of squares of all blocks (see :func:`blocks_of`), on every rank.
        """
        for chunk in range(len(self._parts) + 1):
            if chunk < len(self._parts):  # give the owners their parts
                for owner, pieces in enumerate(self._parts[chunk]):
                    if owner != self._rank:
                        _copy_in(pieces, gradients, self._buffer(chunk)[self._rank])
                        for piece in pieces:
                            gradients[piece.tensor][piece.first : piece.last] = 0.0
            if chunk >= 1:
                self._sum_blocks(chunk - 1, gradients)
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

    def _buffer(self, chunk: int) -> np.ndarray:
        return self._buffers[chunk % _NUM_BUFFERS]

    def _sum_blocks(self, chunk: int, gradients: Sequence[np.ndarray]) -> None:
        buffer, scratch = self._buffer(chunk), np.empty(BLOCK_ELEMENTS, np.float32)
        for place, piece in self._blocks[chunk]:
            length = piece.last - piece.first
            own, total = gradients[piece.tensor][piece.first : piece.last], scratch[:length]
            given = slice(piece.offset, piece.offset + length)
            first, *middle, last = (own if one == self._rank else row[given] for one, row in enumerate(buffer))
            for term in middle:
                first = np.add(first, term, out=total)
            np.add(first, last, out=own)
            self._square_sums[place] = np.dot(own, own)


def blocks_of(sizes: Sequence[int]) -> list[Piece]:
    """Return the blocks of all tensors as one long array, cut where a tensor ends."""
    blocks, begin = [], 0
    for tensor, size in enumerate(sizes):
        first = 0
        while first < size:
            last = min(size, first + BLOCK_ELEMENTS - (begin + first) % BLOCK_ELEMENTS)
            blocks.append(Piece(tensor, first, last, (begin + first) % CHUNK_ELEMENTS))
            first = last
        begin += size
    return blocks


def square_sums(gradients: Sequence[np.ndarray], blocks: Sequence[Piece]) -> list[float]:
    """Return the sum of squares of each block, as ranks that divide the update have them."""
    parts = (gradients[block.tensor][block.first : block.last] for block in blocks)
    return [float(np.dot(part, part)) for part in parts]


def _part_sizes(sizes: Sequence[int], num_ranks: int) -> list[int]:
    """Return the bytes of moments, buffers and sums of squares, each of whole cache lines."""
    elements = (2 * sum(sizes), _NUM_BUFFERS * num_ranks * CHUNK_ELEMENTS, 2 * len(blocks_of(sizes)))
    return [4 * -(-count // _ALIGNMENT) * _ALIGNMENT for count in elements]


def _part(length: int, rank: int, num_ranks: int) -> tuple[int, int]:
    """Return the first and last (exclusive) element of a rank's part of a chunk."""
    whole = -(-length // (num_ranks * BLOCK_ELEMENTS)) * BLOCK_ELEMENTS
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
