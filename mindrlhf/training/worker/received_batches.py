"""What a rank was given of the updates of a step."""

from mindrlhf.training.records import Share, TokenArrays


class ReceivedBatches:
    """The part of a worker that holds batches; its methods are called through the team."""

    def __init__(self) -> None:
        self._batches: list[Share] = []

    def receive_batch(self, share: Share, is_first: bool) -> None:
        """Take this rank's share of one optimiser update; ``is_first`` starts a new step."""
        if is_first:
            self._batches = []
        self._batches.append(share)

    def receive_tokens(self, batch: int, name: str, tokens: TokenArrays) -> None:
        """Take further token arrays, called ``name``, of received batch number ``batch``."""
        for rows, array in zip(self._batches[batch].micro_batches, tokens.arrays, strict=True):
            rows.tokens[name] = array

    def held_batch(self, batch: int) -> Share:
        """Return this rank's share of received batch number ``batch``, with all that it was given since."""
        return self._batches[batch]
