#!/usr/bin/env bash
# make_checkpoint.sh [MODEL_CONFIG CHECKPOINT [ROUNDS]]
# Makes examples/quickstart/checkpoint, the warm-up model that the quickstart starts from, by supervised fine-tuning
# of a random model in three stages. About 20 minutes on two cores. With arguments, one of another shape elsewhere, which
# goes through stage 2 as often as ROUNDS says, each time with new problems.
#   1  all levels, 40 % wrong answers   learns to read and to calculate
#   2  levels 1 and 2, 40 % wrong       learns these levels well
#   3  levels 1 and 2, 60 % wrong       makes the wrong way the habit that reinforcement learning has to break
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
recipe=examples/quickstart
config=${1:-$recipe/model_config.json}
checkpoint=${2:-$recipe/checkpoint}
rounds=${3:-1}
work=${2:-runs/quickstart}_warmup
rm -rf "$work"
mkdir -p "$work/model"
cp "$config" "$work/model/config.json"

# stage NUMBER MODEL PROBLEM-OPTIONS -- OVERRIDES
stage() {
    local number=$1 model=$2 problems=() data="$work/data$1"
    shift 2
    while [ "$1" != "--" ]; do
        problems+=("$1")
        shift
    done
    shift
    .venv/bin/python "$recipe/problems.py" --out "$data" --num-test 10 "${problems[@]}"
    [ -f "$work/model/tokenizer.json" ] ||
        .venv/bin/python "$recipe/make_tokenizer.py" --data "$data/train.jsonl" --out "$work/model"
    .venv/bin/mindrlhf data build --input "$data/train.jsonl" --output "$data/train.mindrecord" \
        --tokenizer "$work/model" --handler gsm8k --template chat --max-prompt-length 96 --task sft --max-length 160
    .venv/bin/mindrlhf sft "$recipe/sft.yaml" run.output_dir="$work/stage$number" model.path="$model" \
        data.train_file="$data/train.mindrecord" data.tokenizer_dir="$work/model" "$@"
}

stage 1 "$work/model" --num-train 20000 --seed 0 --noise 0.4 -- model.random_init=true
before="$work/stage1/final"
for round in $(seq "$rounds"); do
    # Seed 0 in the first round, then 11, 12, and so on: stage 3 has seed 2.
    stage "2.$round" "$before" --num-train 28000 --seed $((round == 1 ? 0 : round + 9)) --noise 0.4 --levels 1 2 -- \
        optimizer.start_lr=2e-3 optimizer.end_lr=1e-4
    before="$work/stage2.$round/final"
done
stage 3 "$before" --num-train 8000 --seed 2 --noise 0.6 --levels 1 2 -- training.epochs=1 \
    optimizer.start_lr=5e-4 optimizer.end_lr=5e-4 optimizer.lr_schedule=constant optimizer.warmup_steps=5
rm -rf "$checkpoint"
cp -r "$work/stage3/final" "$checkpoint"
