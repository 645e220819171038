#!/usr/bin/env bash
# From a published model to a better one and its report: gets SmolLM2-135M-Instruct, makes the sums, trains it on them.
# Two cores, 8 GB, about six minutes after the set-up.
#   bash examples/real_model/run.sh [section.key=value ...]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
bash scripts/setup.sh
data=runs/real_model
source scripts/keep_run.sh
keep_run "$data/grpo"
rm -f "$data"/{train,test}.{jsonl,mindrecord,mindrecord.db}
echo "== model"
bash examples/real_model/get_model.sh "$data/model"
echo "== problems"
.venv/bin/python examples/real_model/sums.py --out "$data"
for split in train test; do
    .venv/bin/mindrlhf data build --input "$data/$split.jsonl" --output "$data/$split.mindrecord" \
        --tokenizer "$data/model" --handler gsm8k --template chat --max-prompt-length 48
done
echo "== training"
.venv/bin/mindrlhf train examples/real_model/config.yaml "$@"
