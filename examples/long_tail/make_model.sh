#!/usr/bin/env bash
# Makes the model and the prompts of the long tail, in runs/long_tail: about eight minutes.
#     bash examples/long_tail/make_model.sh [MEDIAN LARGEST]    of the lengths, 48 and 800; at most 800
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
recipe=examples/long_tail
work=runs/long_tail
median=${1:-48} largest=${2:-800}
if (( largest > 800 )); then
    echo "make_model.sh: LARGEST is $largest; the model has numbers up to 800 only" >&2
    exit 1
fi
longest=$(( largest + 48 )) # with the question and the end
rm -rf "$work"/{data,habit,model,warmup}
mkdir -p "$work/model"
cp "$recipe/model_config.json" "$work/model/config.json"
# The warm-up has to count from any number, so that its lengths are spread wider than those of the task.
.venv/bin/python "$recipe/problems.py" --out "$work/habit" --num-train 16000 --num-test 10 --unsure 0.6 \
    --median $(( median * 5 / 4 )) --sigma 1.2 --largest "$largest"
.venv/bin/python "$recipe/problems.py" --out "$work/data" --seed 1 --median "$median" --largest "$largest"
cp "$work"/data/tokenizer*.json "$work/model"
build() { # FILE OPTIONS
    .venv/bin/mindrlhf data build --input "$1.jsonl" --output "$1.mindrecord" --tokenizer "$work/model" \
        --handler gsm8k --template chat --max-prompt-length 32 "${@:2}"
}
build "$work/habit/train" --task sft --max-length "$longest"
build "$work/data/train"
build "$work/data/test"
.venv/bin/mindrlhf sft examples/quickstart/sft.yaml run.output_dir="$work/warmup" model.path="$work/model" \
    model.random_init=true data.train_file="$work/habit/train.mindrecord" data.tokenizer_dir="$work/model" \
    training.rows_per_step=16 training.micro_batch_size=4 training.sequence_lengths="[$longest]" training.epochs=5
