"""Where rollout servers lie: on whole nodes, each at most once, or on all alike; or a refusal that says what to do."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mindrlhf.config.rollout import RolloutSection
from mindrlhf.errors import UserError
from mindrlhf.layout.servers import place_servers

SIZES = st.integers(1, 24)


def section(count: int, width: int) -> RolloutSection:
    return RolloutSection(num_replicas=count, tensor_parallel=width)


@given(count=SIZES, width=SIZES, num_nodes=st.integers(2, 9), node_size=st.integers(1, 9))
def test_servers_share_no_node_or_fill_all_alike(count, width, num_nodes, node_size):
    try:
        places = place_servers(section(count, width), num_nodes, node_size)
    except UserError:
        # Nobody else could place them either: no whole nodes, more than there are, or more on one node than on another.
        if width > node_size:
            assert width % node_size or count * width > num_nodes * node_size
        else:
            assert count > num_nodes and count % num_nodes
        return
    assert places[0][0] == 0, "rank 0 owns the first server"
    if width > node_size:
        assert len(places) == count
        assert all(len(place) * node_size == width for place in places)
        used = [node for place in places for node in place]
        assert used == list(range(len(used))), "each node once, in order"
        assert len(used) <= num_nodes
    else:
        assert all(len(place) == 1 for place in places)
        per_node = [places.count((node,)) for node in range(num_nodes)]
        assert set(per_node) == {max(1, count // num_nodes)} and sum(per_node) == len(places)
        assert len(places) == max(count, num_nodes)


@given(count=SIZES, width=SIZES, node_size=st.integers(1, 9))
def test_on_one_machine_every_server_is_there(count, width, node_size):
    assert place_servers(section(count, width), 1, node_size) == [(0,)] * count


def test_deepseek_v3_on_64_nodes_of_8():
    places = place_servers(section(4, 128), 64, 8)
    assert places == [tuple(range(first, first + 16)) for first in (0, 16, 32, 48)]


@pytest.mark.parametrize(
    ("count", "width", "num_nodes", "node_size", "message"),
    [
        (1, 12, 2, 8, "'rollout.tensor_parallel' is 12, more than the 8 devices of a node but no number of whole "
         "nodes: set it to 8"),
        (3, 16, 4, 8, "'rollout.num_replicas' 3 x 'rollout.tensor_parallel' 16 takes 6 nodes of 8 devices, and the run "
         "has 4: set num_replicas to 2"),
        (1, 32, 2, 8, "takes 4 nodes of 8 devices, and the run has 2: set tensor_parallel to 8"),
        (3, 4, 2, 8, "'rollout.num_replicas' is 3, which does not divide over 2 nodes: set it to 2"),
    ],
)  # fmt: skip
def test_a_refusal_names_the_value_and_the_fix_which_holds(count, width, num_nodes, node_size, message):
    with pytest.raises(UserError, match=re.escape(message)) as refused:
        place_servers(section(count, width), num_nodes, node_size)
    key, value = re.search(r"set (it|num_replicas|tensor_parallel) to (\d+)$", str(refused.value)).groups()
    changes_count = key == "num_replicas" or (key == "it" and "num_replicas' is" in str(refused.value))
    mended = section(int(value), width) if changes_count else section(count, int(value))
    place_servers(mended, num_nodes, node_size)
