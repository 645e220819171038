"""What is too slow for every day: the tier `nightly`."""

import os

import pytest

RUNS_SLOW_TESTS = bool(os.environ.get("MINDRLHF_SLOW_TESTS"))  # also with -m nightly
SLOW = pytest.mark.nightly
