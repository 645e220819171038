"""Sharded directories and strategies whose files lead elsewhere."""

import json
import shutil

import pytest
from fuzz_files import make_sharded

from mindrlhf.errors import UserError
from mindrlhf.shards.strategy_files import DESCRIPTION_NAME, check_strategy_directory
from mindrlhf.specs import find_spec
from mindrlhf.weights.hf import read_hf_config
from mindrlhf.weights.sharded import ShardedDirectory


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return make_sharded(tmp_path_factory.mktemp("whole"), "safetensors")


@pytest.fixture
def sharded(whole, tmp_path):
    return shutil.copytree(whole, tmp_path / "sharded")


@pytest.mark.parametrize("name", ["rank_1", "rank_1/manifest.json", "rank_1/checkpoint_1.safetensors"])
def test_shards_behind_a_link_are_refused(sharded, tmp_path, name):
    assert ShardedDirectory(sharded).names()
    (sharded / name).rename(tmp_path / "moved")
    (sharded / name).symlink_to(tmp_path / "moved")
    with pytest.raises(UserError, match="is a symbolic link"):
        ShardedDirectory(sharded)


def _check_strategy(sharded):
    config = read_hf_config(sharded)
    check_strategy_directory(sharded / "strategy", find_spec(config).dims(config))


@pytest.mark.parametrize("name", ["../secret", "/etc/hostname", "stages/../../secret"])
def test_a_strategy_that_names_files_outside_is_refused(sharded, name):
    _check_strategy(sharded)
    path = sharded / "strategy" / DESCRIPTION_NAME
    description = json.loads(path.read_text())
    (known, *_) = description["files"]
    description["files"][name] = description["files"].pop(known)
    path.write_text(json.dumps(description))
    (sharded / "secret").write_text("")
    with pytest.raises(UserError, match="leads elsewhere"):
        _check_strategy(sharded)


def test_a_strategy_behind_a_link_is_refused(sharded, tmp_path):
    merged = sharded / "strategy" / "merged.ckpt"
    merged.rename(tmp_path / "moved.ckpt")
    merged.symlink_to(tmp_path / "moved.ckpt")
    with pytest.raises(UserError, match="leads elsewhere"):
        _check_strategy(sharded)
