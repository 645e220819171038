"""What stops a dump before the run begins, and a disk that refuses."""

import dataclasses
import importlib.util

import numpy as np
import pytest

from mindrlhf.config.observe import MsprobeSection
from mindrlhf.config.parse import build
from mindrlhf.config.run import RunSection
from mindrlhf.config.schema import GrpoConfig
from mindrlhf.debugging import dump_files
from mindrlhf.errors import RunFailure, UserError

needs_msprobe = pytest.mark.skipif(importlib.util.find_spec("msprobe") is None, reason="the debug extra is missing")


def test_a_missing_package_is_one_line_with_the_command(tmp_path, monkeypatch):
    monkeypatch.setattr(dump_files.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match="msprobe is not installed: pip install 'mindstudio-probe"):
        dump_files.check_dump(tmp_path)


@needs_msprobe
def test_paths_that_msprobe_refuses_are_refused_first(tmp_path):
    dump_files.check_dump(tmp_path / "fine-1.2_x")
    with pytest.raises(UserError, match="msprobe.dump_dir"):
        dump_files.check_dump(tmp_path / "with space")


def test_where_the_dump_goes():
    run = RunSection(output_dir="runs/x")
    assert str(dump_files.dump_dir(MsprobeSection(), run)) == "runs/x/dump"
    assert str(dump_files.dump_dir(MsprobeSection(dump_dir="elsewhere"), run)) == "elsewhere"


@needs_msprobe
def test_files_appear_whole_and_numbered(tmp_path):
    dump = dump_files.StageDump(tmp_path / "d", "debug", "tensor")
    dump.add_values("loss", np.array(1.5))
    dump.write()
    before = (tmp_path / "d" / "debug.json").read_text()
    dump.add_values("loss", np.array(2.5))
    assert (tmp_path / "d" / "debug.json").read_text() == before
    dump.write()
    names = {path.name for path in (tmp_path / "d").rglob("*") if path.is_file()}
    assert names == {"debug.json", "loss.0.debug.npy", "loss.1.debug.npy"}
    assert np.load(tmp_path / "d" / "dump_tensor_data" / "loss.1.debug.npy") == 2.5


@needs_msprobe
def test_a_disk_that_refuses_is_a_failure_of_the_run(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    with pytest.raises(RunFailure, match="cannot be written"):
        dump_files.StageDump(tmp_path / "file" / "d", "debug", "statistics")
    dump = dump_files.StageDump(tmp_path / "d", "debug", "tensor")

    def refuse(*arguments, **options):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(np, "save", refuse)
    with pytest.raises(RunFailure, match="No space left on device"):
        dump.add_values("loss", np.array(1.5))


VALUES = {
    "model": {"path": "model"},
    "data": {"train_file": "train", "tokenizer_dir": "tokenizer"},
    "reward": {"verifier_function": ["accuracy_reward"]},
}


@pytest.mark.parametrize(
    "section, message",
    [
        ({"first_step": 3}, "'msprobe.last_step' is 1, before msprobe.first_step = 3"),
        ({"stages": []}, "'msprobe.stages' is empty"),
        ({"stages": ["rolout"]}, "did you mean 'rollout'"),
        ({"level": "L1"}, "'msprobe.level' is 'L1'"),
    ],
)
def test_mistakes_in_the_section(section, message):
    from mindrlhf.config.load import check_config

    with pytest.raises(UserError, match=message):
        config = build(GrpoConfig, {**VALUES, "msprobe": {"enabled": True, **section}})
        check_config(config, frozenset({"msprobe.enabled"}), 1)


def test_keys_without_the_switch_are_pointed_out():
    from mindrlhf.config.load import check_config

    config = build(GrpoConfig, {**VALUES, "msprobe": {"last_step": 3}})
    with pytest.raises(UserError, match="'msprobe.last_step' is set, but msprobe.enabled is not"):
        check_config(config, frozenset({"msprobe.last_step"}), 1)
    disabled = dataclasses.replace(config, msprobe=MsprobeSection(enabled=False, last_step=3))
    check_config(disabled, frozenset({"msprobe.last_step", "msprobe.enabled"}), 1)
