"""One rank is a process of the launcher, but where it joins by msrun, as an NPU's communication asks for it."""

import sys

import pytest

from mindrlhf.launch import launch
from mindrlhf.launch.peers import ALONE


@pytest.mark.parametrize("joins_alone", [False, True])
def test_one_rank_is_started_by_msrun_where_it_has_to_join(monkeypatch, tmp_path, joins_alone):
    started = []
    monkeypatch.setattr(launch, "Child", lambda argv, **options: started.append((argv, options["environment"])))
    monkeypatch.setattr(launch, "msrun_argv", lambda command, num_workers, *_, **options: ["msrun", num_workers])
    launch._start(["program.py"], 1, tmp_path, {}, 12345, ALONE, joins_alone)
    ((argv, environment),) = started
    assert argv == (["msrun", 1] if joins_alone else [sys.executable, "program.py"])
    assert ("RANK_ID" in environment) == (not joins_alone), "msrun gives its ranks their numbers itself"
