"""Which tests run: those that are too slow for every day with MINDRLHF_SLOW_TESTS=1 only."""

import os

import pytest

RUNS_SLOW_TESTS = bool(os.environ.get("MINDRLHF_SLOW_TESTS"))
SLOW = pytest.mark.skipif(not RUNS_SLOW_TESTS, reason="slow")
