#!/usr/bin/env bash
# From a fresh clone to a better model and its report: sets up both environments, makes the problems, trains on two
# ranks. Nothing to edit, nothing to download but packages. Takes about five minutes after the set-up.
#   bash scripts/quickstart.sh [section.key=value ...]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
bash scripts/setup.sh

source scripts/keep_run.sh
keep_run runs/quickstart
bash examples/quickstart/make_data.sh
echo "== training"
.venv/bin/mindrlhf train examples/quickstart/config.yaml --workers 2 "$@"
