"""What is too slow for every day: the tier `nightly`, which ``MINDRLHF_SLOW_TESTS=1`` or ``-m nightly`` runs."""

import argparse
import os
import re
import sys
from collections.abc import Sequence

import pytest

VARIABLE = "MINDRLHF_SLOW_TESTS"


def asks_for_nightly(arguments: Sequence[str]) -> bool:
    """Whether pytest's ``-m`` selects it; read here, since conftest files import helpers before options are parsed."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("-m", default="")
    expression = parser.parse_known_args(arguments)[0].m
    return re.search(r"(?<!not )\bnightly\b", expression) is not None


if asks_for_nightly(sys.argv[1:]):
    os.environ[VARIABLE] = "1"  # for the processes that xdist starts
RUNS_SLOW_TESTS = bool(os.environ.get(VARIABLE))
SLOW = pytest.mark.nightly
