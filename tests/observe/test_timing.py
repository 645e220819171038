"""The stage timer on a clock of the test's own, throughput by hand, memory of processes of known size."""

import subprocess
import sys

import pytest

from mindrlhf.observe import timing


@pytest.fixture
def clock(monkeypatch):
    """A clock that a test moves."""

    class Clock:
        now = 100.0

        def pass_time(self, seconds):
            self.now += seconds

    clock = Clock()
    monkeypatch.setattr(timing.time, "perf_counter", lambda: clock.now)
    return clock


def test_stages_add_up_and_steps_start_afresh(clock):
    timer = timing.StageTimer()
    with timer.stage("rollout"):
        clock.pass_time(2.0)
    clock.pass_time(0.5)
    for _ in range(2):
        with timer.stage("update"):
            clock.pass_time(1.0)
    assert timer.finish_step() == {"timing/rollout": 2.0, "timing/update": 2.0, "timing/all": 4.5}
    clock.pass_time(0.25)
    assert timer.finish_step() == {"timing/all": 0.25}


def test_a_stage_that_raises_is_timed_and_closed(clock):
    timer = timing.StageTimer()
    with pytest.raises(KeyError):
        with timer.stage("reward"):
            clock.pass_time(3.0)
            raise KeyError("verifier")
    with timer.stage("update"):
        clock.pass_time(1.0)
    assert timer.finish_step() == {"timing/reward": 3.0, "timing/update": 1.0, "timing/all": 4.0}


def test_stages_do_not_nest():
    timer = timing.StageTimer()
    with timer.stage("update"):
        with pytest.raises(AssertionError, match="'reward' starts inside stage 'update'"):
            with timer.stage("reward"):
                pass
        with pytest.raises(AssertionError, match="inside stage 'update'"):
            timer.finish_step()


def test_throughput_by_hand():
    rates = timing.throughput(
        {"timing/all": 4.0, "timing/update": 2.0, "timing/rollout": 1.0},
        mean_prompt_length=50.0,
        mean_response_length=150.0,
        num_prompts=4,
        num_samples=8,
        world_size=2,
    )
    assert rates == {"e2e_tps": 800.0, "update_tps": 1600.0, "vllm_tps": 3200.0}


def test_throughput_without_a_stage():
    sizes = {"mean_prompt_length": 1, "mean_response_length": 1, "num_prompts": 1, "num_samples": 1, "world_size": 1}
    assert timing.throughput({"timing/all": 2.0, "timing/update": 0.0}, **sizes) == {"e2e_tps": 1.0}


CHILD = """
import resource
from mindrlhf.observe.timing import peak_rss_gb
small = peak_rss_gb()
block = bytearray(200_000_000)
block[::4096] = bytes([1]) * len(block[::4096])
del block
now = int(open("/proc/self/statm").read().split()[1]) * resource.getpagesize() / 1e9
print(small, peak_rss_gb(), now)
"""


def test_the_peak_stays_when_memory_is_freed_and_a_small_child_of_a_large_process_is_small():
    large = bytearray(150_000_000)
    large[::4096] = bytes([1]) * len(large[::4096])
    child = subprocess.run([sys.executable, "-c", CHILD], capture_output=True, text=True, timeout=60, check=True)
    small, peak, now = map(float, child.stdout.split())
    assert 0 < small < 0.15 <= timing.peak_rss_gb()
    assert 0.2 <= peak < 0.35 and now < 0.15
