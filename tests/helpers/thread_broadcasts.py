"""Broadcasts between threads, each of which stands for a rank, in the place of those between devices."""

import threading
from collections import Counter

from mindrlhf.weights.publish.collective import WORD


class Network:
    """What connects the ranks.

    Attributes:
        num_broadcasts: that were sent, by root.
    """

    def __init__(self):
        self._lock = threading.Lock()
        self._meetings: dict[tuple, tuple[threading.Barrier, dict]] = {}
        self.num_broadcasts: Counter[int] = Counter()

    def open(self, ranks, root, num_words):
        """See :data:`mindrlhf.weights.publish.collective.OpenBroadcast`."""
        with self._lock:
            meeting = self._meetings.setdefault(
                (ranks, root, num_words), (threading.Barrier(len(ranks), timeout=60), {})
            )
        barrier, sent = meeting

        def broadcast(words):
            if words is not None:
                assert words.dtype == WORD and words.shape == (num_words,)
                sent["words"] = words
                self.num_broadcasts[root] += 1
            barrier.wait()
            received = None if words is not None else sent["words"].copy()
            barrier.wait()  # nobody sends again before all have it
            return received

        return broadcast
