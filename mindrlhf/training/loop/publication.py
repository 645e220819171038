"""How the weights of all ranks get onto the boards of all nodes, as rank 0 sees it."""

import secrets
from collections.abc import Sequence

from mindrlhf.errors import RunFailure
from mindrlhf.observe.fingerprint import digest_weights
from mindrlhf.training.records import Contribution, LeaderAddress, Published, Received, add_by_node, add_contributions
from mindrlhf.training.team import Team
from mindrlhf.weights.board import WeightBoard
from mindrlhf.weights.exchange.plan import Piece, check_received, completed, plan_exchange, regions_of, to_box


class Publication:
    """Versions of the weights, each on the boards of all nodes.

    Every rank writes what it holds to the board of its node; where the model is cut over nodes, their first ranks then
    exchange what the boards lack. A board is sealed when its elements were each written, or came, exactly once.

    Args:
        team: the ranks.
        board: of rank 0's node.
    """

    def __init__(self, team: Team, board: WeightBoard):
        self._team = team
        self._board = board
        self._pieces: list[Piece] = []

    def publish(self, version: int) -> str:
        """Put the weights on the boards; return their digest.

        Raises:
            RunFailure: the boards of two nodes differ, or one lacks something.
        """
        self._board.begin(version)
        results: list[Published] = self._team.call("publish", version=version)
        contributions = [result.contribution for result in results]
        elsewhere = add_by_node([result.elsewhere for result in results])
        if not elsewhere:
            self._board.seal(contributions)
            return digest_weights(contributions)
        nodes = sorted(elsewhere, key=int)
        written = [add_contributions(contributions), *(elsewhere[node] for node in nodes)]
        self._exchange(version, written)
        # What came has the sums of the ranks that wrote it: whoever reads a board compares its memory with them.
        whole = [completed(own, written) for own in written]
        self._board.seal([whole[0]])
        digest = digest_weights([whole[0]])
        for node, one in zip(nodes, whole[1:]):
            if (other := digest_weights([one])) != digest:
                raise RunFailure(f"the weights of node {node} ({other}) are not those of node 0 ({digest})")
        self._team.call("seal_board", contributions=dict(zip(nodes, whole[1:])))
        return digest

    def _exchange(self, version: int, written: Sequence[Contribution]) -> None:
        """Have every node's board get what its ranks did not write, and check it."""
        pieces = plan_exchange(written, self._board.infos)
        if pieces != self._pieces:
            self._connect(pieces)
        if not pieces:
            return
        results: list[Received] = self._team.call("exchange", version=version)
        expected = {key: checksum for contribution in written for key, checksum in regions_of(contribution).items()}
        for result in results:
            for node, regions in result.regions.items():
                found = {(name, to_box(region)): checksum for name, region, checksum in regions}
                check_received(found, expected, self._board.infos, int(node))

    def _connect(self, pieces: list[Piece]) -> None:
        self._pieces = pieces
        addresses: dict[str, list] = {}
        found: list[LeaderAddress] = self._team.call("open_carrier")
        for result in found:
            addresses |= result.places
        planned = [[piece.name, piece.region, piece.box, piece.nodes] for piece in pieces]
        self._team.call("connect_carrier", pieces=planned, addresses=addresses, token=secrets.token_hex(16))
