"""Environments of job schedulers as they are found: odd forms, leftovers, contradictions; generated as well."""

import re
import string

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mindrlhf.errors import UserError
from mindrlhf.launch import machine
from mindrlhf.launch.machine import check_ranks
from mindrlhf.launch.nodes.place import Place, find_place, first_host

SLURM = {
    "SLURM_NODEID": "1",
    "SLURM_STEP_NUM_NODES": "4",
    "SLURM_NNODES": "8",
    "SLURM_STEP_NODELIST": "a[1-2]b[01-02]",
    "SLURM_JOB_NODELIST": "a[1-4]b[01-02]",
    "SLURM_STEP_TASKS_PER_NODE": "1(x4)",
    "SLURM_JOB_ID": "7",
}
ASCEND = {"MS_WORKER_NUM": "16", "MS_LOCAL_WORKER": "8", "MS_NODE_RANK": "1", "MS_SCHED_HOST": "h"}


def place(environment, nodes="auto", node_rank=None, master=None, **more):
    return find_place(nodes, node_rank, master, environment, **more)


@pytest.mark.parametrize(
    "environment, message",
    [
        (SLURM | {"SLURM_NODEID": "x"}, "SLURM_NODEID is x, which is no number: give --nodes N --node-rank K --master"),
        (SLURM | {"SLURM_NODEID": "4"}, "--node-rank is 4, but the 4 nodes are numbered from 0 to 3"),
        (SLURM | {"SLURM_STEP_TASKS_PER_NODE": "1,2(x3)"}, "SLURM_STEP_TASKS_PER_NODE is 1,2(x3): Slurm starts"),
        (SLURM | {"SLURM_STEP_TASKS_PER_NODE": "2,1"}, "SLURM_STEP_TASKS_PER_NODE is 2,1: "),
        (SLURM | {"SLURM_STEP_NODELIST": "a[1-"}, "SLURM_STEP_NODELIST is a[1-, which is no list of nodes"),
        (SLURM | {"SLURM_STEP_NODELIST": "a[b-c]"}, "SLURM_STEP_NODELIST is a[b-c], which is no list of nodes"),
        (ASCEND | {"MS_LOCAL_WORKER": "5"}, "MS_WORKER_NUM is 16, but MS_LOCAL_WORKER is 5, which does not divide it"),
        (ASCEND | {"MS_LOCAL_WORKER": "0"}, "MS_WORKER_NUM is 16, but MS_LOCAL_WORKER is 0"),
        (ASCEND | {"MS_NODE_RANK": "-1"}, "MS_NODE_RANK is -1, which is no number"),
        (ASCEND | {"MS_NODE_RANK": "3"}, "--node-rank is 3, but the 2 nodes are numbered from 0 to 1"),
        (ASCEND | {"MS_SCHED_PORT": "70000"}, "MS_SCHED_PORT is 70000, but ports go from 1 to 65535"),
    ],
)
def test_what_makes_no_sense_is_one_line(environment, message):
    with pytest.raises(UserError, match=re.escape(message)) as refused:
        place(environment)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    "environment, expected",
    [
        (SLURM, Place(1, 4, "a1b01", 20_007)),
        (SLURM | {"SLURM_STEP_TASKS_PER_NODE": "1,1(x3)"}, Place(1, 4, "a1b01", 20_007)),
        (ASCEND, Place(1, 2, "h", 8118)),
        (ASCEND | {"MS_SCHED_PORT": "2222"}, Place(1, 2, "h", 2222)),
        (SLURM | ASCEND, Place(1, 2, "h", 8118)),  # pods of a cluster that Slurm has started
    ],
)
def test_what_is_said_is_read(environment, expected):
    assert place(environment) == expected


def test_options_settle_everything():
    wild = SLURM | ASCEND | {"MS_LOCAL_WORKER": "5", "MS_NODE_RANK": "y"}
    assert place(wild, "3", 2, "m:9") == Place(2, 3, "m", 9)


VALUES = st.one_of(
    st.integers(-1, 9).map(str),
    st.sampled_from(["", " 1 ", "x", "1:4", "2,1", "1(x4)", "1,2(x3)", "a[1-2]b[01-02]", "a[", "٣", "9" * 5000, "0x1"]),
    st.text(string.printable, max_size=8),
)
NAMES = sorted({*SLURM, *ASCEND, "MS_SCHED_PORT", "JOB_COMPLETION_INDEX"})


@given(
    base=st.sampled_from([{}, SLURM, ASCEND]),
    changes=st.dictionaries(st.sampled_from(NAMES), VALUES, max_size=4),
    nodes=st.sampled_from(["auto", "auto", "2"]),
)
def test_any_environment_gives_a_place_or_a_line(base, changes, nodes):
    try:
        found = place(base | changes, nodes)
    except UserError as error:
        assert str(error).isprintable() and len(str(error)) < 400
        return
    assert found is None or (0 <= found.node < found.num_nodes and found.master and 0 < found.port < 65_536)


# A list of hosts as Slurm compresses them, and the first that it stands for, made side by side.
@st.composite
def host_lists(draw):
    written, first = "", ""
    for _ in range(draw(st.integers(1, 3))):
        text, number = draw(st.text("abz-.", min_size=1, max_size=3)), draw(st.sampled_from(["7", "07", "100"]))
        written += f"{text}[{number}{draw(st.sampled_from(['', '-200', ',250', '-110,300-301']))}]"
        first += text + number
    suffix = draw(st.sampled_from(["", "-ib"]))
    return written + suffix + draw(st.sampled_from(["", ",c", ",c[1-2]"])), first + suffix


@given(host_lists())
def test_the_first_host_is_that_of_slurm(pair):
    written, first = pair
    assert first_host(written) == first


@given(st.text("a1[]-,0 9x", max_size=30))
def test_any_list_of_hosts_gives_a_host_or_none(text):
    assert re.fullmatch(r"[A-Za-z0-9._:-]*", first_host(text))


@pytest.mark.parametrize(
    "visible, num_ranks, message",
    [
        ("0,1", 4, "--workers is 4, but ASCEND_RT_VISIBLE_DEVICES is 0,1, 2 NPUs"),
        ("0,0", 1, "ASCEND_RT_VISIBLE_DEVICES is 0,0: give numbers of NPUs, each once"),
        ("0,a", 1, "ASCEND_RT_VISIBLE_DEVICES is 0,a: "),
        ("", 1, "ASCEND_RT_VISIBLE_DEVICES is : "),
    ],
)
def test_devices_that_are_hidden_from_the_run_are_named(monkeypatch, visible, num_ranks, message):
    monkeypatch.setattr(machine, "_npu_paths", lambda: list(range(8)))
    monkeypatch.setenv("ASCEND_RT_VISIBLE_DEVICES", visible)
    with pytest.raises(UserError, match=f"^{re.escape(message)}"):
        check_ranks("ascend", num_ranks)
    monkeypatch.setenv("ASCEND_RT_VISIBLE_DEVICES", "4,5,6,7")
    assert check_ranks("ascend", 4) == ""
