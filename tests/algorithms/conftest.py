"""MindSpore's context, set once for the graph cells of these tests."""

import pytest


@pytest.fixture(scope="session", autouse=True)
def graph_mode():
    import mindspore as ms

    ms.set_context(mode=ms.GRAPH_MODE)
    ms.set_device("CPU")
    ms.set_context(runtime_num_threads=1)
