"""How the weights of all ranks get onto the boards of all nodes, as rank 0 sees it."""

import secrets
from collections import Counter
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from mindrlhf.errors import RunFailure
from mindrlhf.observe.fingerprint import digest_weights
from mindrlhf.training.nodes import attach_boards, find_nodes
from mindrlhf.training.records import (
    Contribution,
    LeaderAddress,
    Published,
    Received,
    add_by_node,
    add_contributions,
    join,
)
from mindrlhf.training.team import Team
from mindrlhf.weights.publish.buffer import WeightBoard
from mindrlhf.weights.publish.slices import Box, to_box
from mindrlhf.weights.publish.sync import (
    Needs,
    Piece,
    check_received,
    completed,
    plan_exchange,
    regions_of,
    with_received,
)
from mindrlhf.weights.tensors import TensorInfo

# Of a board through which a model is exported: its memory comes on top of what the run has.
_EXPORT_BUCKET_BYTES = 4 << 30


class Publication:
    """Versions of the weights, each on the boards of all nodes, one bucket of tensors after the other.

    Every rank writes what it holds to the board of its node; where the model is cut over nodes, their first ranks then
    exchange what the boards lack. A board is sealed when its elements were each written, or came, exactly once.

    Args:
        team: the ranks.
        board: of rank 0's node.
    """

    def __init__(self, team: Team, board: WeightBoard):
        self._team = team
        self._board = board
        self._written: dict[int, list[list[tuple[str, Box]]]] = {}  # by bucket and node, when it was planned
        self._pieces: dict[int, list[Piece]] = {}  # by bucket
        self._needed: Sequence[Needs | None] | None = None

    def publish(self, version: int, load: Callable[[int, int], None] | None = None) -> str:
        """Put the weights on the boards; return their digest.

        Args:
            load: called with the version and a bucket, from 0, as soon as that is there; the next takes its place when
                it has returned.

        Raises:
            RunFailure: the boards of two nodes differ, or one lacks something.
        """
        contributions: list[Contribution] = []
        for bucket in range(self._board.num_buckets):
            contributions += self.put(version, bucket)
            if load is not None:
                load(version, bucket)
        return digest_weights(contributions)

    def put(self, version: int, bucket: int) -> list[Contribution]:
        """Put a bucket of the weights on the boards; return what the ranks together have written."""
        self._board.begin(version, bucket)
        results: list[Published] = self._team.call("publish", version=version, bucket=bucket)
        contributions = [result.contribution for result in results]
        elsewhere = add_by_node([result.elsewhere for result in results])
        if not elsewhere:
            self._board.seal(contributions)
            return contributions
        nodes = sorted(elsewhere, key=int)
        written = [add_contributions(contributions), *(elsewhere[node] for node in nodes)]
        _check_alike(written, self._board.infos)
        received = self._exchange(version, bucket, written)
        # What came has the sums of the ranks that wrote it: whoever reads a board compares its memory with them.
        whole = completed({}, written)
        own = [whole] * len(written)
        if self._needed is not None:
            own = [with_received(one, received.get(node, {})) for node, one in enumerate(written)]
        self._board.seal([own[0]], self._needed and self._needed[0])
        self._team.call("seal_board", contributions=dict(zip(nodes, own[1:])))
        return [whole]

    def use_needs(self, needed: Sequence[Needs | None]) -> None:
        """Have the boards get what is needed of the tensors alone, by node; None for everything."""
        self._needed = needed
        self._written = {}

    def _exchange(
        self, version: int, bucket: int, written: Sequence[Contribution]
    ) -> dict[int, dict[tuple[str, Box], int]]:
        """Have every node's board get what its ranks did not write, check it, and return its sums by node."""
        infos, pieces = self._board.infos, self._plan(bucket, written)
        if not pieces:
            return {}
        by_node = None if self._needed is None else {str(node): one for node, one in enumerate(written)}
        results: list[Received] = self._team.call("exchange", version=version, bucket=bucket, written=by_node)
        expected = {key: checksum for contribution in written for key, checksum in regions_of(contribution).items()}
        for result in results:
            for regions in result.sent.values():
                expected |= _sums(regions)
        came = join([result.regions for result in results])
        received = {int(node): _sums(regions) for node, regions in came.items()}
        for node, found in received.items():
            check_received(found, expected, infos, node)
        return received

    def _plan(self, bucket: int, written: Sequence[Contribution]) -> list[Piece]:
        """Return what has to travel of a bucket; the nodes are connected for it."""
        regions = [list(regions_of(contribution)) for contribution in written]
        if self._written.get(bucket) != regions:  # as a rule what it was: a large model's plan takes seconds
            needed, infos = None, self._board.infos
            if self._needed is not None:
                everything: Needs = {info.name: None for info in infos}
                needed = [everything if one is None else one for one in self._needed]
            pieces = plan_exchange(written, infos, needed)
            if pieces != self._pieces.get(bucket, []):
                self._connect(bucket, pieces)
            self._written[bucket], self._pieces[bucket] = regions, pieces
        return self._pieces[bucket]

    def _connect(self, bucket: int, pieces: list[Piece]) -> None:
        addresses: dict[str, list] = {}
        found: list[LeaderAddress] = self._team.call("open_carrier")
        for result in found:
            addresses |= result.places
        planned = [[piece.name, piece.region, piece.box, piece.nodes] for piece in pieces]
        token = secrets.token_hex(16)
        self._team.call("connect_carrier", bucket=bucket, pieces=planned, addresses=addresses, token=token)


def sharded_tensors(team: Team, ranks: Team, worker, of: str = "") -> Iterator[tuple[str, np.ndarray]]:
    """Yield the Hugging Face tensors of a model that is sharded over ranks, in its own dtype, on rank 0.

    They come by a board of a few of them, and have to be used before the next is asked for.

    Args:
        team: the replicas of the model.
        ranks: all of them.
        worker: rank 0's, a :class:`mindrlhf.training.worker.node_board.NodeBoard`.
        of: which model, where a rank has several.
    """
    team.call("begin_export", of=of)
    with worker.create_board(bucket_bytes=_EXPORT_BUCKET_BYTES) as board:
        nodes = find_nodes(ranks)
        attach_boards(ranks, nodes, board.path, bucket_bytes=_EXPORT_BUCKET_BYTES)
        publication = Publication(team, board)
        publication.use_needs([None, *({} for _ in nodes[1:])])
        for bucket in range(board.num_buckets):
            publication.put(1, bucket)
            yield from ((name, array) for name, _, array in board.tensors(1))
        team.call("end_export")


def _check_alike(written: Sequence[Contribution], infos: Sequence[TensorInfo]) -> None:
    """Check that nodes that wrote the same region wrote the same into it.

    Raises:
        RunFailure: they did not; two replicas of the model have parted.
    """
    modulus = {info.name: 1 << (8 * info.numpy_dtype.itemsize) for info in infos}
    first: dict[tuple[str, Box], tuple[int, int]] = {}
    for node, contribution in enumerate(written):
        for (name, region), checksum in regions_of(contribution).items():
            other, expected = first.setdefault((name, region), (node, checksum))
            if (checksum - expected) % modulus[name]:
                raise RunFailure(f"the weights of node {node} are not those of node {other}: tensor '{name}', {region}")


def _sums(regions: Sequence[Sequence]) -> dict[tuple[str, Box], int]:
    sums: Counter[tuple[str, Box]] = Counter()
    for name, region, checksum in regions:
        sums[name, to_box(region)] += checksum  # of parts that came to several ranks
    return dict(sums)
