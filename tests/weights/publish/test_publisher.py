"""Rank 0's part of publishing: in which order buckets are written and loaded."""

import threading

import numpy as np
import pytest
from fakes import LocalTeam

from mindrlhf.weights.publish.buffer import WeightBuffer
from mindrlhf.weights.publish.publisher import PUBLISH, PublishingWorker, WeightPublisher, open_weight_buffers
from mindrlhf.weights.tensors import TensorInfo

INFOS = [TensorInfo(f"tensor_{place}", "float32", (64,)) for place in range(8)]
VALUES = {info.name: np.full(64, place, np.float32) for place, info in enumerate(INFOS)}
WAIT_S = 20.0


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
        self.says("written", buffer._bucket_in_progress)


class Journal(list):
    """What happened, in order, which threads may wait for."""

    def __init__(self):
        self.changed = threading.Condition()

    def say(self, *event):
        with self.changed:
            self.append(event)
            self.changed.notify_all()

    def wait_for(self, *event):
        with self.changed:
            assert self.changed.wait_for(lambda: event in self, WAIT_S), f"{event} did not come: {list(self)}"


@pytest.fixture
def make(request):
    """Return a function that opens a buffer of so many bytes and what publishes through it, with a journal."""

    def open_one(bucket_bytes):
        journal = Journal()
        worker = PublishingWorker(Model(journal.say))
        team = LocalTeam([worker])
        buffer = open_weight_buffers(team, [[0]], bucket_bytes=bucket_bytes)
        request.addfinalizer(lambda: worker.close_weights(PUBLISH))
        return buffer, WeightPublisher(team, buffer), journal

    return open_one


def check(reader, version, bucket, found):
    reader.turn_to(bucket)
    reader.verify(version)
    for name, _, array in reader.tensors(version):
        np.testing.assert_array_equal(array, VALUES[name])
        found.append(name)


def test_the_next_bucket_is_written_while_one_is_loaded(make):
    buffer, publisher, journal = make(1024)
    assert (buffer.num_buckets, buffer.num_places) == (4, 2)
    found = []

    def load(version, bucket):
        journal.say("load", bucket)
        with WeightBuffer.attach(buffer.path) as reader:
            reader.turn_to(bucket)
            if bucket < 3:  # a server that is not done before that: one after the other would not get on
                journal.wait_for("written", bucket + 1)
            check(reader, version, bucket, found)
        journal.say("loaded", bucket)

    digest = publisher.publish(1, load)
    assert found == list(VALUES), "each once, in order"
    for bucket in range(2, 4):
        assert journal.index(("write", bucket)) > journal.index(("loaded", bucket - 2)), "its place is read no more"
        assert journal.index(("load", bucket)) > journal.index(("loaded", bucket - 1)), "one load at a time"
    whole, in_one, _ = make(0)
    assert whole.num_places == 1 and in_one.publish(1, lambda *_: None) == digest, "the same bits"


@pytest.mark.parametrize("bucket_bytes, requires", [(1024, True), (256, False), (0, False)])
def test_with_one_place_or_a_list_of_slices_each_is_loaded_before_the_next(make, bucket_bytes, requires):
    _, publisher, journal = make(bucket_bytes)
    if requires:
        publisher.require([None])
    else:
        assert _.num_places == 1
    publisher.publish(1, lambda version, bucket: journal.say("loaded", bucket))
    numbers = [number for name, number in journal if name == "written"]
    assert [event for event in journal if event[0] != "write"] == [
        event for number in numbers for event in (("written", number), ("loaded", number))
    ]


@pytest.mark.parametrize("broken", [0, 1, 3])
def test_a_load_that_fails_ends_the_publishing(make, broken):
    _, publisher, journal = make(1024)

    def load(version, bucket):
        if bucket == broken:
            raise OSError("the server is gone")
        journal.say("loaded", bucket)

    with pytest.raises(OSError, match="the server is gone"):
        publisher.publish(1, load)
    assert [number for name, number in journal if name == "loaded"] == list(range(broken))
    assert ("write", broken + 2) not in journal
