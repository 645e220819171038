#!/usr/bin/env bash
# Compiles the run configs of large models for Ascend, without one: every distinct pipeline stage, one layer of each kind
# per stage. Prints time and memory of each compilation, and at the end of each model wall and processor time. A nightly
# job: some ten minutes of an idle core.
#   bash scripts/compile_large_models.sh [--layers-per-stage K|all]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
out="$(mktemp -d)"
trap 'rm -rf "$out"' EXIT
failed=0
TIMEFORMAT="wall %R s, processor %U s"
while read -r name config world_size overrides; do
    echo "== $name on $world_size NPUs"
    # shellcheck disable=SC2086
    time .venv/bin/mindrlhf strategy "examples/grpo/$config.yaml" $overrides --workers "$world_size" \
        --output "$out/$name" "$@" || failed=1
done <<'RUNS'
Qwen2.5-7B qwen2_5_7b_8npu 8
Qwen2.5-32B qwen2_5_32b_16npu 16
Qwen3-8B qwen2_5_7b_8npu 8 model.path=model_configs/qwen3/qwen3_8b
Qwen3-32B qwen2_5_32b_16npu 16 model.path=model_configs/qwen3/qwen3_32b
Qwen3-30B-A3B qwen3_30b_a3b_32npu 32
Llama-3.1-8B qwen2_5_7b_8npu 8 model.path=model_configs/llama3_1/llama3_1_8b
Llama-3.1-70B llama3_1_70b_64npu 64
GLM-4-9B qwen2_5_7b_8npu 8 model.path=model_configs/glm4/glm4_9b parallel_config.data_parallel=4 parallel_config.model_parallel=2
Gemma-3-1B qwen2_5_7b_8npu 8 model.path=model_configs/gemma3/gemma3_1b parallel_config.data_parallel=8 parallel_config.model_parallel=1 parallel_config.use_seq_parallel=false rollout.num_replicas=8 rollout.tensor_parallel=1
GLM-4.5-Air glm4_5_air_128npu 128
DeepSeek-V3 deepseek_v3_512npu 512
RUNS
exit "$failed"
