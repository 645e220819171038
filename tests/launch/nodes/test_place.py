"""Where a launcher stands among several: from options, and from what Slurm, Kubernetes and Ascend's operator set."""

import pytest

from mindrlhf.errors import UserError
from mindrlhf.launch.nodes.place import Place, find_place


def test_one_node_needs_nothing():
    assert find_place(None, None, None, {"SLURM_NODEID": "1", "SLURM_NNODES": "4"}) is None
    assert find_place("1", None, None, {}) is None


def test_the_options_say_it_all():
    assert find_place("3", 2, "10.0.0.1:9000", {}) == Place(2, 3, "10.0.0.1", 9000)
    assert find_place("3", 0, "master-0", {}) == Place(0, 3, "master-0", 8118)
    assert find_place("2", 1, "[fd00::1]:9000", {}) == Place(1, 2, "fd00::1", 9000)
    assert find_place("2", 1, "fd00::1", {}) == Place(1, 2, "fd00::1", 8118)


SLURM = {
    "SLURM_NODEID": "3",
    "SLURM_NNODES": "4",
    "SLURM_JOB_NODELIST": "npu[07-09,12],login1",
    "SLURM_JOB_ID": "1234567",
    "SLURM_STEP_TASKS_PER_NODE": "1(x4)",
}


def test_auto_reads_the_environment():
    assert find_place("auto", None, None, SLURM) == Place(3, 4, "npu07", 20_000 + 1234567 % 10_000)


def test_options_win_over_the_environment_and_fill_its_gaps():
    assert find_place("auto", None, "10.0.0.9:1", SLURM) == Place(3, 4, "10.0.0.9", 1)
    assert find_place("auto", None, None, SLURM, 2) == Place(3, 2, "npu07", 24_567, 2)
    assert find_place("2", None, "job-0.svc:8118", {"JOB_COMPLETION_INDEX": "1"}) == Place(1, 2, "job-0.svc", 8118)


@pytest.mark.parametrize(
    "arguments, message",
    [
        (("auto", None, None, {}), "no variable of Slurm or of Ascend's operator says how many"),
        (("auto", None, None, {"JOB_COMPLETION_INDEX": "0"}), "says how many"),
        (("two", 0, "a", {}), "--nodes is two: give a number"),
        (("0", 0, "a", {}), "--nodes is 0: give a number"),
        (("\u00b2", 0, "a", {}), "--nodes is \u00b2: give a number"),
        (("9" * 5000, 0, "a", {}), "give a number"),
        (("2", 0, "a:\u00b2", {}), "its port is no number"),
        (("2", None, "a", {}), "--node-rank is missing"),
        (("2", 2, "a", {}), "--node-rank is 2, but the 2 nodes are numbered from 0 to 1"),
        (("2", -1, "a", {}), "--node-rank is -1"),
        (("2", 0, None, {}), "--master is missing"),
        (("2", 0, "a:b", {}), "its port is no number"),
        (("2", 0, "a:70000", {}), "its port is no number"),
        (("2", 3, "a", {}, 1), "--node-rank is 3, but the 3 nodes are numbered from 0 to 2"),
        (("2", 0, "a", {}, -1), "--spares is -1"),
        (("1", 0, "a", {}, 1), "--spares is 1, but 1 nodes train: a spare needs 2 at least"),
        (("auto", None, None, SLURM, 4), "--spares is 4, but 0 nodes train"),
        ((None, None, None, {}, 1), "--spares is 1, but --nodes is missing"),
        ((None, 1, None, {}), "--node-rank is 1, but --nodes is missing"),
        ((None, None, "a:1", {}), "--master is a:1, but --nodes is missing"),
        (("auto", None, None, {**SLURM, "SLURM_STEP_TASKS_PER_NODE": "8(x4)"}), "start one, srun --ntasks-per-node=1"),
        # With --elastic, and with --role rollout.
        ((None, None, None, {}, 0, True), "--elastic is given, but --master is missing"),
        ((None, 1, "a", {}, 0, True), "--node-rank is 1, but the 1 nodes are numbered from 0 to 0"),
        (("2", None, "a", {}, 0, True), "--node-rank is missing"),
        (("2", 1, "a", {}, 0, True, True), "have no number: leave it out"),
        (("2", None, "a", {}, 0, False, True), "--role is rollout, but --elastic is missing"),
    ],
)
def test_what_is_missing_or_senseless_is_named(arguments, message):
    options = dict(zip(("is_elastic", "is_for_rollout"), arguments[5:]))
    with pytest.raises(UserError, match=message):
        find_place(*arguments[:5], **options)


def test_nodes_for_rollout_only_have_no_number_of_their_own():
    elastic = {"is_elastic": True}
    assert find_place(None, None, "a:1", {}, **elastic) == Place(0, 1, "a", 1, is_elastic=True)
    assert find_place("2", 1, "a:1", {}, **elastic) == Place(1, 2, "a", 1, is_elastic=True)
    rollout = {**elastic, "is_for_rollout": True}
    assert find_place(None, None, "a:1", {}, **rollout) == Place(1, 1, "a", 1, **rollout)
    assert find_place("2", None, "a:1", {}, 1, **rollout) == Place(3, 2, "a", 1, 1, **rollout)
