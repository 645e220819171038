#!/usr/bin/env bash
# Makes the problems and the two models that examples/experts starts from, in runs/experts: by supervised fine-tuning of
# random models on answers half of which are wrong.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
problems=examples/quickstart/problems.py
work=runs/experts
build="--tokenizer examples/quickstart/checkpoint --handler gsm8k --template qwen --max-prompt-length 96"
mkdir -p "$work"

.venv/bin/python "$problems" --out "$work/sft" --num-train 16000 --num-test 10 --seed 0 --noise 0.5 --levels 1
.venv/bin/python "$problems" --out "$work/prompts" --num-train 4000 --num-test 300 --seed 1 --levels 1
# shellcheck disable=SC2086  # the options are words
.venv/bin/mindrlhf data build --input "$work/sft/train.jsonl" --output "$work/sft/train.mindrecord" $build \
    --task sft --max-length 160
for split in train test; do
    # shellcheck disable=SC2086
    .venv/bin/mindrlhf data build --input "$work/prompts/$split.jsonl" --output "$work/prompts/$split.mindrecord" $build
done
for model in qwen3_moe deepseek_v3; do
    .venv/bin/mindrlhf sft examples/quickstart/sft.yaml run.output_dir="$work/warm_$model" \
        model.path="examples/experts/$model" model.random_init=true data.train_file="$work/sft/train.mindrecord" \
        data.tokenizer_dir=examples/quickstart/checkpoint supervised.epochs=3
done
