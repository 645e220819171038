#!/usr/bin/env bash
# Makes the preference pairs of examples/dpo and examples/reward_model in runs/dpo: a few seconds, nothing to download.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
for noise in 0 1; do
    .venv/bin/python examples/quickstart/problems.py --out "runs/dpo/noise_$noise" --num-train 6000 --num-test 10 \
        --seed 7 --noise "$noise"
done
.venv/bin/python examples/dpo/make_pairs.py runs/dpo/noise_0/train.jsonl runs/dpo/noise_1/train.jsonl --out runs/dpo
for split in train test; do
    .venv/bin/mindrlhf data build --task preference --handler orca_pairs --tokenizer examples/quickstart/checkpoint \
        --max-prompt-length 88 --max-length 128 --input "runs/dpo/$split.jsonl" --output "runs/dpo/$split.mindrecord"
done
