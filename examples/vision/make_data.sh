#!/usr/bin/env bash
# Makes the prompts of the vision example in runs/vision: a few seconds. Options go to pictures.py: --shuffle-images makes
# the control.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
recipe=examples/vision
data=runs/vision

rm -f "$data"/{train,test}.{parquet,mindrecord,mindrecord.db}
.venv/bin/python "$recipe/pictures.py" --out "$data" --num-train 4000 --num-test 300 --seed 0 "$@"
for split in train test; do
    echo "== $split prompts"
    .venv/bin/mindrlhf data build --input "$data/$split.parquet" --output "$data/$split.mindrecord" \
        --tokenizer "$recipe/checkpoint" --handler geo3k --template plain --max-prompt-length 64 --min-pixels 784
done
