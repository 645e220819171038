"""What the doctor finds on machines with NPUs, from texts in the form of Huawei's documentation; none is at hand."""

from pathlib import Path

import pytest

from mindrlhf.doctor import ascend
from mindrlhf.doctor.diagnosis import _probe_server


def test_memory_that_is_free_and_held():
    gib = 2**30
    assert ascend.check_memory([(61 * gib, 64 * gib)] * 2).status == "ok"
    held = ascend.check_memory([(61 * gib, 64 * gib), (20 * gib, 64 * gib)])
    assert (held.status, held.finding) == ("warning", "2 NPUs, 81 of 128 GiB free; 20 of NPU 1")


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path


def test_driver_and_firmware(tmp_path):
    write(tmp_path / "driver" / "version.info", "Version=25.2.0\nascendhal_version=7.35.23\n")
    missing = ascend.check_driver(tmp_path)
    assert (missing.status, missing.finding) == ("warning", "driver 25.2.0, firmware unknown")
    write(tmp_path / "firmware" / "version.info", "Version=7.7.0.6.236\n")
    old = ascend.check_driver(tmp_path)
    assert (old.status, old.finding) == ("warning", "driver 25.2.0, firmware 7.7.0.6.236") and "25.5.1" in old.fix
    for version, status in (("24.1.rc3", "warning"), ("25.5.0", "warning"), ("25.5.1", "ok"), ("26.1.0", "ok")):
        write(tmp_path / "driver" / "version.info", f"Version={version}\n")
        assert ascend.check_driver(tmp_path).status == status, version


def test_the_cann_of_both_environments(tmp_path):
    nine = tmp_path / "ascend-toolkit" / "9.0.0"
    write(nine / "x86_64-linux" / "ascend_toolkit_install.info", "package_name=Ascend-cann-toolkit\nversion=9.0.0\n")
    older = ascend.check_cann({"ASCEND_HOME_PATH": str(nine)}, tmp_path)
    assert older.status == "warning"
    assert older.finding == "9.0.0 is loaded, installed are 9.0.0; both environments ask for 9.1"
    assert older.fix == "install CANN 9.1 and load its set_env.sh"
    right = tmp_path / "cann-9.1.0"
    write(right / "version.cfg", "runtime_running_version=[9.1.0:9.1.0]\n")
    unloaded = ascend.check_cann({}, tmp_path)
    assert unloaded.finding.startswith("none is loaded, installed are 9.0.0, 9.1.0")
    assert unloaded.fix == f"load it: source {right}/set_env.sh"
    loaded = ascend.check_cann({"ASCEND_HOME_PATH": str(right)}, tmp_path)
    assert (loaded.status, loaded.finding) == ("ok", f"9.1.0, loaded from {right}")


@pytest.mark.parametrize(
    ("value", "status"), [(None, "ok"), ("auto", "ok"), ("", "warning"), ("60000-60050", "warning")]
)
def test_the_ports_by_which_ranks_meet(value, status):
    environment = {} if value is None else {"HCCL_HOST_SOCKET_PORT_RANGE": value}
    assert ascend.check_hccl_ports(environment).status == status


@pytest.mark.parametrize(
    ("wanted", "interfaces", "status"),
    [
        ("", ["lo", "eth0", "docker0"], "ok"),
        ("", ["lo", "eth0", "ib0"], "warning"),
        ("eth", ["lo", "eth0", "ib0"], "ok"),
        ("=eth", ["lo", "eth0"], "error"),
        ("=eth0,ib0", ["lo", "eth0"], "ok"),
        ("^docker", ["lo", "eth0"], "ok"),
        ("enp1", ["lo", "eth0"], "error"),
    ],
)
def test_the_interface_by_which_machines_meet(wanted, interfaces, status):
    environment = {"HCCL_SOCKET_IFNAME": wanted} if wanted else {}
    assert ascend.check_interfaces(environment, interfaces).status == status


def test_all_of_it_on_a_machine_whatever_it_has():
    checks = ascend.ascend_checks({})
    assert len(checks) == 4 and all(check.fix for check in checks if check.status != "ok")


SOUND = {"failures": {}, "built_for": "A2", "soc": 223}


@pytest.mark.parametrize(
    ("probe", "statuses", "words"),
    [
        (SOUND, ["ok", "ok", "ok"], ""),
        (SOUND | {"failures": {"acl": "ModuleNotFoundError: acl"}}, ["error", "ok", "ok"], "PYTHONPATH"),
        (SOUND | {"failures": {"libatb.so": "OSError: not found"}}, ["ok", "error", "ok"], "nnal/atb/set_env.sh"),
        (SOUND | {"soc": 253}, ["ok", "ok", "ok", "error"], "--no-binary vllm-ascend"),
        (SOUND | {"built_for": "A3", "soc": 253}, ["ok", "ok", "ok"], ""),
        (SOUND | {"memory": [[60 << 30, 64 << 30]]}, ["ok"] * 4, ""),
        ("did not answer within 120 s", ["error"], "docs/install.md"),
    ],
)
def test_what_a_server_loads_on_an_npu(probe, statuses, words):
    checks = ascend.check_server(probe)
    assert [check.status for check in checks] == statuses
    assert words in "".join(check.fix for check in checks)


def test_a_server_s_interpreter_is_asked_as_the_server_is_started(rollout_python):
    """Here it has no CANN, and says so of each part by itself."""
    probe = _probe_server(rollout_python)
    assert set(probe["failures"]) >= {"acl", "libatb.so", "vllm_ascend.worker.worker"}
    assert "No module named 'acl'" in probe["failures"]["acl"] and probe["soc"] is None
