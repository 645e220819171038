#!/usr/bin/env bash
# Makes the prompts of the quickstart and of the recipes that share them, in runs/quickstart: a few seconds.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
recipe=examples/quickstart
data=runs/quickstart
problems="--tokenizer $recipe/checkpoint --handler gsm8k --template chat --max-prompt-length 96"

rm -f "$data"/{train,test}.{jsonl,mindrecord,mindrecord.db}
.venv/bin/python "$recipe/problems.py" --out "$data" --num-train 4000 --num-test 300 --seed 1 --levels 1 2
for split in train test; do
    echo "== $split prompts"
    # shellcheck disable=SC2086  # the options are words
    .venv/bin/mindrlhf data build --input "$data/$split.jsonl" --output "$data/$split.mindrecord" $problems
done
