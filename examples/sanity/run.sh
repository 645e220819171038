#!/usr/bin/env bash
# The sanity recipe from nothing to a report: bash examples/sanity/run.sh [SEED]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
seed="${1:-0}"
inputs=runs/sanity_inputs
.venv/bin/python examples/sanity/prepare.py --out "$inputs"
.venv/bin/mindrlhf data build --input "$inputs/prompts.jsonl" --output "$inputs/prompts.mindrecord" \
    --tokenizer "$inputs/model" --handler map_keys --map question=prompt,answer=answer \
    --template plain --max-prompt-length 16
.venv/bin/mindrlhf train examples/sanity/config.yaml run.seed="$seed" run.output_dir="runs/sanity_seed$seed"
