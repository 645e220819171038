#!/usr/bin/env bash
# Makes the problems, warms the quickstart's model up as examples/tools does, and trains it by way of an agent.
#   bash examples/agents/run.sh [section.key=value ...]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
recipe=examples/agents
data=runs/agents
source scripts/keep_run.sh
keep_run "$data"
.venv/bin/python "$recipe/make_data.py" --out "$data"

# build NAME OPTIONS...
build() {
    local name=$1
    shift
    .venv/bin/mindrlhf data build --input "$data/$name.jsonl" --output "$data/$name.mindrecord" --handler map_keys \
        --tokenizer examples/quickstart/checkpoint "$@"
}

build sft --map question=prompt,response=response --template examples/tools/prompt.jinja --task sft \
    --max-prompt-length 160 --max-length 192 --keep-control-tokens
for name in train test; do
    build "$name" --map question=question,answer=answer --keep question --template "$recipe/chat.jinja" \
        --max-prompt-length 40
done
.venv/bin/mindrlhf sft examples/tools/sft.yaml run.output_dir="$data/warm_up" data.train_file="$data/sft.mindrecord"
.venv/bin/mindrlhf train "$recipe/config.yaml" "$@"
