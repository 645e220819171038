#!/usr/bin/env bash
# Compiles the run configs of large models for Ascend, without one: every distinct pipeline stage of 7B on 8, 32B on 16,
# 30B-A3B on 32 and 671B on 512 NPUs, one layer of each kind per stage. Prints compile time and memory; a nightly job,
# since it takes some ten minutes.
#   bash scripts/compile_large_models.sh [--layers-per-stage K|all]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
out="$(mktemp -d)"
trap 'rm -rf "$out"' EXIT
failed=0
while read -r name world_size; do
    echo "== $name on $world_size NPUs"
    .venv/bin/mindrlhf strategy "examples/grpo/$name.yaml" --world-size "$world_size" --out "$out/$name" "$@" || failed=1
done <<'RUNS'
qwen2_5_7b_8npu 8
qwen2_5_32b_16npu 16
qwen3_30b_a3b_32npu 32
deepseek_v3_512npu 512
RUNS
exit "$failed"
