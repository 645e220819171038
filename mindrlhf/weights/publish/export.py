"""Reading a model that is sharded over ranks, on rank 0, through a weight buffer of its own."""

from collections.abc import Iterator, Sequence

import numpy as np

from mindrlhf.system.workers import Workers
from mindrlhf.weights.publish.publisher import EXPORT, PublishingWorker, Ranks, WeightPublisher, open_weight_buffers

# Of the buffer: its memory comes on top of what the run has.
_EXPORT_BUCKET_BYTES = 4 << 30


def sharded_tensors(
    team: Ranks, ranks: Ranks, nodes: Sequence[Sequence[int]], of: str = ""
) -> Iterator[tuple[str, np.ndarray]]:
    """Yield the Hugging Face tensors of a model that is sharded over ranks, in its own dtype, on rank 0.

    They come by a buffer of a few of them, and have to be used before the next is asked for.
    """
    with open_weight_buffers(ranks, nodes, EXPORT, of, bucket_bytes=_EXPORT_BUCKET_BYTES) as buffer:
        publisher = WeightPublisher(team, buffer, EXPORT)
        for bucket in range(buffer.num_buckets):
            publisher.put(1, bucket)
            buffer.verify(1)
            yield from ((name, array) for name, _, array in buffer.tensors(1))
    workers: PublishingWorker = Workers(ranks.call)
    workers.close_weights(purpose=EXPORT)
