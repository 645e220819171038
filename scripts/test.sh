#!/usr/bin/env bash
# Set-up, the style check and all tests: those marked `unit` first, then `jobs`, which start real msrun jobs and vLLM; four
# files at a time, since many wait. MINDRLHF_SLOW_TESTS=1 adds `nightly`, what is too slow for every day.
# Arguments go to pytest instead: bash scripts/test.sh tests/data -k readers, or bash scripts/test.sh -m nightly
set -euo pipefail
ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)"
cd "$ROOT"
bash scripts/setup.sh
.venv/bin/ruff check .
# Every test and every process of its jobs would compile the same sources again.
unset PYTHONDONTWRITEBYTECODE
# More threads than cores make every test slower; those that measure set their own.
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" OMP_WAIT_POLICY="${OMP_WAIT_POLICY:-PASSIVE}"
if (($#)); then
    exec .venv/bin/python -m pytest "$@"
fi
status=0
.venv/bin/python -m pytest -m unit --numprocesses 4 --dist loadfile --no-loadscope-reorder || status=$?
# Also after a failure: whoever reads the log of a machine wants all of it.
.venv/bin/python -m pytest -m jobs --numprocesses 4 --dist loadfile --no-loadscope-reorder || status=$?
exit "$status"
