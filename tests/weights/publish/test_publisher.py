"""Rank 0's part of publishing: in which order buckets are written and loaded."""

import numpy as np
import pytest
from fakes import LocalTeam

from mindrlhf.weights.publish.buffer import WeightBuffer
from mindrlhf.weights.publish.publisher import PUBLISH, PublishingWorker, WeightPublisher, open_weight_buffers
from mindrlhf.weights.tensors import TensorInfo

INFOS = [TensorInfo(f"tensor_{place}", "float32", (64,)) for place in range(8)]
VALUES = {info.name: np.full(64, place, np.float32) for place, info in enumerate(INFOS)}


class Model:
    """Writes its tensors, and says so."""

    def __init__(self, says):
        self.says = says

    def create_weight_buffer(self, dtype, bucket_bytes):
        return WeightBuffer.create(INFOS, bucket_bytes)

    def write_to(self, buffer, ranks):
        self.says("write", buffer._bucket_in_progress)
        for name in filter(buffer.wants, VALUES):
            buffer.write(name, VALUES[name])


@pytest.fixture
def make(request):
    """Return a function that opens a buffer of so many bytes and what publishes through it, with a list of events."""

    def open_buffer(bucket_bytes):
        events = []
        worker = PublishingWorker(Model(lambda *event: events.append(event)))
        team = LocalTeam([worker])
        buffer = open_weight_buffers(team, [[0]], bucket_bytes=bucket_bytes)
        request.addfinalizer(lambda: worker.close_weights(PUBLISH))
        return buffer, WeightPublisher(team, buffer), events

    return open_buffer


def test_each_bucket_is_loaded_before_the_next_is_written(make):
    digests = []
    for bucket_bytes, num_buckets in ((0, 1), (1024, 2), (256, 8)):
        buffer, publisher, events = make(bucket_bytes)
        found = []

        def load(version, bucket, buffer=buffer, events=events, found=found):
            events.append(("loaded", bucket))
            with WeightBuffer.attach(buffer.path) as reader:
                reader.verify(version)
                for name, _, array in reader.tensors(version):
                    np.testing.assert_array_equal(array, VALUES[name])
                    found.append(name)

        digests.append(publisher.publish(1, load))
        assert events == [(what, bucket) for bucket in range(num_buckets) for what in ("write", "loaded")]
        assert found == list(VALUES), "each once, in order"
    assert len(set(digests)) == 1, "the same bits"


@pytest.mark.parametrize("broken", [0, 1, 3])
def test_a_load_that_fails_ends_the_publishing(make, broken):
    _, publisher, events = make(512)

    def load(version, bucket):
        if bucket == broken:
            raise OSError("the server is gone")
        events.append(("loaded", bucket))

    with pytest.raises(OSError, match="the server is gone"):
        publisher.publish(1, load)
    assert [number for name, number in events if name == "loaded"] == list(range(broken))
    assert ("write", broken + 1) not in events
