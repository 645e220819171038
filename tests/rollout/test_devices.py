"""Servers on the devices of a node."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mindrlhf.config.rollout import RolloutSection
from mindrlhf.errors import UserError
from mindrlhf.rollout.vllm_options import devices_of


@given(st.integers(1, 8), st.integers(1, 8))
def test_servers_of_a_node_share_no_device_and_leave_none(num_servers, size):
    rollout = RolloutSection(num_replicas=num_servers, tensor_parallel=size)
    lists = [devices_of(rollout, server, {})["ASCEND_RT_VISIBLE_DEVICES"] for server in range(num_servers)]
    assert [len(devices.split(",")) for devices in lists] == [size] * num_servers
    assert ",".join(lists) == ",".join(map(str, range(num_servers * size)))


def test_servers_take_the_devices_that_are_named():
    """Those of the config before those of the process, which are the ranks'."""
    rollout = RolloutSection(num_replicas=2, tensor_parallel=2, env={"ASCEND_RT_VISIBLE_DEVICES": "4, 5,6,7"})
    found = [devices_of(rollout, server, {"ASCEND_RT_VISIBLE_DEVICES": "0,1"}) for server in (0, 1)]
    assert found == [{"ASCEND_RT_VISIBLE_DEVICES": "4,5"}, {"ASCEND_RT_VISIBLE_DEVICES": "6,7"}]
    inherited = devices_of(RolloutSection(tensor_parallel=2), 0, {"ASCEND_RT_VISIBLE_DEVICES": "3,1,2"})
    assert inherited == {"ASCEND_RT_VISIBLE_DEVICES": "3,1"}
    with pytest.raises(UserError, match="is 4, 5,6,7, 4 devices, but server 2 of this node needs 2 after those"):
        devices_of(rollout, 2, {})


def test_a_server_over_several_nodes_has_its_part_of_each():
    rollout = RolloutSection(tensor_parallel=32)
    assert devices_of(rollout, 0, {}, num_nodes=4) == {"ASCEND_RT_VISIBLE_DEVICES": "0,1,2,3,4,5,6,7"}
