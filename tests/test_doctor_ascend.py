"""What the doctor finds on machines with NPUs, from texts in the form of Huawei's documentation; none is at hand."""

from pathlib import Path

import pytest

from mindrlhf.doctor import ascend
from mindrlhf.doctor.diagnosis import _probe_server
from mindrlhf.doctor.npu_smi import Chip, DeviceProcess, parse_npu_info

# The layout of Huawei's npu-smi command reference, "Querying basic information", with the column of training boards.
HEAD = """\
+------------------------------------------------------------------------------------------------+
| npu-smi 25.2.0                   Version: 25.2.0                                               |
+---------------------------+---------------+----------------------------------------------------+
| NPU   Name                | Health        | Power(W)    Temp(C)           Hugepages-Usage(page)|
| Chip                      | Bus-Id        | AICore(%)   Memory-Usage(MB)  HBM-Usage(MB)        |
+===========================+===============+====================================================+
"""
DEVICES = """\
| 0     910B3               | OK            | 91.0        36                0    / 0             |
| 0                         | 0000:C1:00.0  | 0           0    / 0          3401 / 65536         |
+===========================+===============+====================================================+
| 1     910B3               | {health:<13} | 95.4        37                0    / 0             |
| 0                         | 0000:C2:00.0  | 0           0    / 0          {used} / 65536         |
+===========================+===============+====================================================+
"""
PROCESSES = """\
+---------------------------+---------------+----------------------------------------------------+
| NPU     Chip              | Process id    | Process name             | Process memory(MB)      |
+===========================+===============+====================================================+
| No running processes found in NPU 0                                                            |
+===========================+===============+====================================================+
"""
IDLE = "| No running processes found in NPU 1" + " " * 60 + "|\n"
BUSY = """\
| 1       0                 | 1333928       | python3                  | 37709                   |
| 1       0                 | 1333929       |                          | 132                     |
"""


def npu_info(health="OK", used=3400, processes=IDLE):
    return parse_npu_info(HEAD + DEVICES.format(health=health, used=used) + PROCESSES + processes)


def statuses(checks):
    return {check.name: check.status for check in checks}


def test_the_table_of_devices_and_processes_is_read():
    info = npu_info(used=41000, processes=BUSY)
    assert info.chips == (Chip(0, 0, "910B3", "OK", 3401, 65536), Chip(1, 0, "910B3", "OK", 41000, 65536))
    assert info.processes == (DeviceProcess(1, 0, 1333928, 37709), DeviceProcess(1, 0, 1333929, 132))


def test_npus_of_two_chips_and_boards_without_the_column_are_read():
    two = """\
| 0     Ascend910           | OK            | 170.0       36                0    / 0             |
| 0     0                   | 0000:9D:00.0  | 0           0    / 0          2800 / 65536         |
| 1     1                   | 0000:9F:00.0  | 0           0    / 0          2801 / 65536         |
"""
    assert [(one.npu, one.chip, one.used_mb) for one in parse_npu_info(two).chips] == [(0, 0, 2800), (0, 1, 2801)]
    edge = """\
| 0       310B1                 | OK              | 10.4          66                15    / 15           |
| 0       0                     | NA              | 0            957   / 10810                           |
"""
    assert parse_npu_info(edge).chips == (Chip(0, 0, "310B1", "OK", 957, 10810),)
    assert parse_npu_info("no such device\n").chips == ()


def test_devices_that_are_free_busy_held_and_ill():
    (free,) = ascend.check_devices(npu_info())
    assert (free.status, free.finding) == ("ok", "2 of 910B3, 121 of 128 GiB free")
    busy = ascend.check_devices(npu_info(used=41000, processes=BUSY))
    assert statuses(busy) == {"devices": "ok", "on the devices": "warning"}
    assert "1333928 (NPU 1, 37709 MB), 1333929 (NPU 1, 132 MB)" in busy[1].finding
    held = ascend.check_devices(npu_info(used=41000))
    assert statuses(held) == {"devices": "ok", "device memory": "warning"}
    assert "NPU 1 41000 of 65536 MB" in held[1].finding
    (ill,) = ascend.check_devices(npu_info(health="Critical"))
    assert ill.status == "error" and "NPU 1 is Critical" in ill.finding
    assert ascend.check_devices("npu-smi is not on PATH")[0].status == "warning"
    assert ascend.check_devices(parse_npu_info(""))[0].status == "error"


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
    ("value", "status"),
    [("", "ok"), ("expandable_segments:False", "ok"), ("page_size:1g,expandable_segments:True", "error")],
)
def test_expandable_segments(value, status):
    check = ascend.check_allocator({"PYTORCH_NPU_ALLOC_CONF": value})
    assert check.status == status


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


def test_all_of_it_on_a_machine_whatever_it_has(monkeypatch, tmp_path):
    program = write(tmp_path / "npu-smi", "#!/bin/sh\n[ $1 = info ] && cat table\n")
    program.chmod(0o755)
    write(tmp_path / "table", HEAD + DEVICES.format(health="OK", used=3400) + PROCESSES + IDLE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    checks = ascend.ascend_checks({})
    assert statuses(checks)["devices"] == "ok"
    assert len(checks) == 6 and all(check.fix for check in checks if check.status != "ok")


SOUND = {"failures": {}, "built_for": "A2", "soc": 223}


@pytest.mark.parametrize(
    ("probe", "statuses", "words"),
    [
        (SOUND, ["ok", "ok", "ok"], ""),
        (SOUND | {"failures": {"acl": "ModuleNotFoundError: acl"}}, ["error", "ok", "ok"], "PYTHONPATH"),
        (SOUND | {"failures": {"libatb.so": "OSError: not found"}}, ["ok", "error", "ok"], "nnal/atb/set_env.sh"),
        (SOUND | {"soc": 253}, ["ok", "ok", "ok", "error"], "--no-binary vllm-ascend"),
        (SOUND | {"built_for": "A3", "soc": 253}, ["ok", "ok", "ok"], ""),
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
