"""Encode chunks in worker processes, in order and with few chunks in flight."""

import multiprocessing
import multiprocessing.connection
import os
import signal
import threading
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool

from mindrlhf.data.encoding import EncodedChunk, EncoderSettings, RecordEncoder
from mindrlhf.data.readers import BadRecord, RawRecord
from mindrlhf.errors import RunFailure

# Enough to keep every worker busy while the oldest chunk is waited for; it bounds the memory too.
CHUNKS_IN_FLIGHT_PER_WORKER = 3

# A worker takes a second or two to start, in which this process encodes about as much.
WORTHWHILE_BYTES_PER_WORKER = 4 << 20

Chunk = Sequence[RawRecord | BadRecord]

_encoder: RecordEncoder | None = None  # of this worker process


def default_num_workers(input_size_bytes: int) -> int:
    """Return one worker for each core this process may use, but no more than the input is worth."""
    num_cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(num_cores, input_size_bytes // WORTHWHILE_BYTES_PER_WORKER))


def encode_in_order(
    encoder: RecordEncoder, settings: EncoderSettings, chunks: Iterable[Chunk], num_workers: int
) -> Iterator[EncodedChunk]:
    """Yield the encoded form of each chunk, in order.

    Raises:
        RunFailure: a worker process died.
    """
    if num_workers == 1:
        yield from map(encoder.encode, chunks)
        return
    pool = ProcessPoolExecutor(
        num_workers, multiprocessing.get_context("spawn"), initializer=_start_worker, initargs=(settings,)
    )
    pending: deque[Future] = deque()
    try:
        for chunk in chunks:
            pending.append(pool.submit(_encode, chunk))
            if len(pending) >= num_workers * CHUNKS_IN_FLIGHT_PER_WORKER:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
    except BrokenProcessPool as error:
        raise RunFailure(
            "a data worker process died, most likely for want of memory: use fewer --workers, or --workers 1"
        ) from error
    finally:
        pool.shutdown(cancel_futures=True)


def _start_worker(settings: EncoderSettings) -> None:
    global _encoder
    # Ctrl-C reaches the whole process group; the parent alone decides what happens then.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_follow_parent, daemon=True).start()
    # One worker per core already: the library's own threads would fight over the cores.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    _encoder = RecordEncoder(settings)


def _follow_parent() -> None:
    """End this worker when its parent is gone: a killed parent cannot shut its pool down."""
    multiprocessing.connection.wait([multiprocessing.parent_process().sentinel])
    os._exit(1)


def _encode(chunk: Chunk) -> EncodedChunk:
    return _encoder.encode(chunk)
