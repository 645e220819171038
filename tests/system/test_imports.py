"""What is imported for good is left alone by the garbage collector, and the collector works as before afterwards."""

import gc
import weakref

import pytest

from mindrlhf.system.imports import lasting_objects


class Knot:
    """Can be reached from itself, so that only the collector removes it."""

    def __init__(self):
        self.itself = self


@pytest.fixture(autouse=True)
def thawed():
    yield
    gc.unfreeze()
    gc.enable()


def test_the_collector_rests_in_the_body_and_passes_over_its_objects_afterwards():
    with lasting_objects():
        assert not gc.isenabled()
        lasting = weakref.ref(Knot())
    assert gc.isenabled()
    passing = weakref.ref(Knot())
    gc.collect()
    assert lasting() is not None and passing() is None


def test_a_failed_import_leaves_the_collector_on():
    with pytest.raises(ImportError), lasting_objects():
        raise ImportError
    assert gc.isenabled()


def test_a_collector_that_was_off_stays_off():
    gc.disable()
    with lasting_objects():
        pass
    assert not gc.isenabled()
