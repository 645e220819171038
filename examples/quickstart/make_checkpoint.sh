#!/usr/bin/env bash
# Makes examples/quickstart/checkpoint, the warm-up model that the quickstart starts from: problems of which 40 % have
# a wrong answer, a tokenizer trained on them, and supervised fine-tuning of a random model. About ten minutes.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
recipe=examples/quickstart
work=runs/quickstart_warmup
rm -rf "$work"
mkdir -p "$work/model"
.venv/bin/python "$recipe/problems.py" --out "$work" --num-train 20000 --num-test 500 --seed 0 --noise 0.4
.venv/bin/python "$recipe/make_tokenizer.py" --data "$work/train.jsonl" --out "$work/model"
cp "$recipe/model_config.json" "$work/model/config.json"
.venv/bin/mindrlhf data build --input "$work/train.jsonl" --output "$work/train.mindrecord" --tokenizer "$work/model" \
    --handler gsm8k --template qwen --max-prompt-length 96 --task sft --max-length 160
.venv/bin/mindrlhf sft "$recipe/sft.yaml"
rm -rf "$recipe/checkpoint"
cp -r "$work/sft/final" "$recipe/checkpoint"
