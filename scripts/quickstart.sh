#!/usr/bin/env bash
# From a fresh clone to a better model and its report: sets up both environments, makes the problems, trains on two
# ranks. Nothing to edit, nothing to download but packages. Takes about five minutes after the set-up.
#   bash scripts/quickstart.sh [section.key=value ...]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
bash scripts/setup.sh

recipe=examples/quickstart
data=runs/quickstart
problems="--tokenizer $recipe/checkpoint --handler gsm8k --template qwen --max-prompt-length 96"

rm -rf "$data"
.venv/bin/python "$recipe/problems.py" --out "$data" --num-train 4000 --num-test 300 --seed 1 --levels 1 2
for split in train test; do
    echo "== $split prompts"
    # shellcheck disable=SC2086  # the options are words
    .venv/bin/mindrlhf data build --input "$data/$split.jsonl" --output "$data/$split.mindrecord" $problems
done
echo "== training"
.venv/bin/mindrlhf train "$recipe/config.yaml" --workers 2 "$@"
