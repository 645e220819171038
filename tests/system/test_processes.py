"""What a dead worker left behind is found by the environment it inherited."""

import os
import subprocess

import pytest

from mindrlhf.system.processes import kill_marked


@pytest.fixture
def program(tmp_path):
    """A program that replaces itself by itself for ever, so that it is often between two programs."""
    path = tmp_path / "again"
    path.write_text('#!/bin/sh\nexec "$0"\n')
    path.chmod(0o755)
    return path


def test_a_process_between_two_programs_is_found(program):
    for i in range(25):
        process = subprocess.Popen([program], env={**os.environ, "MINDRLHF_TEST_LEFT": str(i)})
        try:
            kill_marked("MINDRLHF_TEST_LEFT", str(i))
            assert process.wait(timeout=30) == -9, f"process {i} was not killed"
        finally:
            process.kill()
            process.wait()


def test_a_process_without_an_environment_is_left_alone():
    with subprocess.Popen(["sleep", "60"], env={}) as process:
        kill_marked("MINDRLHF_TEST_LEFT", "")
        assert process.poll() is None
        process.kill()
