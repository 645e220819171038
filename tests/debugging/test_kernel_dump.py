"""Which configs of msprobe a run takes; the dump itself is in tests/jobs/test_msprobe_dump.py."""

import importlib.util
import json

import pytest

from mindrlhf.debugging.kernel_dump import check_dump
from mindrlhf.errors import UserError

REFUSED = {
    "another level": ('{"level": "L0", "task": "tensor"}', "cpu", "has level 'L0', .*: set it to L2"),
    "no object": ("[]", "cpu", "holds a list, not a JSON object: 'msprobe.config_path' takes msprobe's config.json"),
    "statistics, CPU": ('{"level": "L2", "task": "statistics"}', "cpu", "has task 'statistics', .*: set it to tensor"),
    "no JSON": ("{", "ascend", "cannot be read as JSON: .*: 'msprobe.config_path' takes"),
}


@pytest.fixture(autouse=True)
def installed(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_dumped_is_refused(tmp_path, case):
    content, device, message = REFUSED[case]
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(UserError, match=message):
        check_dump(str(tmp_path / "config.json"), device)


@pytest.mark.parametrize(("device", "task"), [("cpu", "tensor"), ("ascend", "statistics"), ("ascend", "tensor")])
def test_kernels_are_dumped_on_every_device(tmp_path, device, task):
    (tmp_path / "config.json").write_text(json.dumps({"level": "L2", "task": task}))
    check_dump(str(tmp_path / "config.json"), device)


def test_what_is_missing_is_named(tmp_path, monkeypatch):
    with pytest.raises(UserError, match="nowhere.json cannot be read as JSON: .*No such file"):
        check_dump(str(tmp_path / "nowhere.json"), "ascend")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match="msprobe is not installed: pip install 'mindstudio-probe"):
        check_dump(str(tmp_path / "nowhere.json"), "ascend")
