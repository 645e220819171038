#!/usr/bin/env bash
# Makes the problems, warms the quickstart's model up on both habits, and trains it with the calculator.
#   bash examples/tools/run.sh [section.key=value ...]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
recipe=examples/tools
data=runs/tools
source scripts/keep_run.sh
keep_run "$data"
.venv/bin/python "$recipe/make_data.py" --out "$data"

# build NAME MAPPING OPTIONS...
build() {
    local name=$1 mapping=$2
    shift 2
    .venv/bin/mindrlhf data build --input "$data/$name.jsonl" --output "$data/$name.mindrecord" --handler map_keys \
        --map "$mapping" --template "$recipe/prompt.jinja" --tokenizer examples/quickstart/checkpoint \
        --keep-control-tokens "$@" # make_data.py writes the turns out
}

build sft question=prompt,response=response --task sft --max-prompt-length 160 --max-length 192
build train question=prompt,answer=answer --max-prompt-length 40
build test question=prompt,answer=answer --max-prompt-length 40
.venv/bin/mindrlhf sft "$recipe/sft.yaml"
.venv/bin/mindrlhf train "$recipe/config.yaml" "$@"
