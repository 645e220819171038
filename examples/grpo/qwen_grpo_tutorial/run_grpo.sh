#!/usr/bin/env bash
# GRPO on GSM8K by plain msrun. Edit the variables, or set them: MODEL_DIR=... bash run_grpo.sh
# Arguments go to main.py: bash run_grpo.sh run.max_steps=10 algorithm.beta=0.001
set -euo pipefail
HERE="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd -P)"

MODEL_DIR="${MODEL_DIR:-Qwen2.5-7B-Instruct}"            # Hugging Face directory
DATASET_FILE="${DATASET_FILE:-gsm8k_train.mindrecord}"   # made by rlhf_data.py or mindrlhf data build
OUTPUT_DIR="${OUTPUT_DIR:-runs/qwen_grpo_tutorial}"
NUM_WORKERS="${NUM_WORKERS:-8}"
MASTER_PORT="${MASTER_PORT:-8118}"
VERIFIERS="${VERIFIERS:-qwen_accuracy_reward,format_reward}"
WEIGHTS="${WEIGHTS:-1.0,1.0}"

# Ranks wait for each other while the generators start and the graphs compile; the defaults are shorter than that.
export MS_NODE_TIMEOUT="${MS_NODE_TIMEOUT:-1800}" HCCL_CONNECT_TIMEOUT="${HCCL_CONNECT_TIMEOUT:-1800}"
export PYTHONUNBUFFERED=1

exec msrun --worker_num="$NUM_WORKERS" --local_worker_num="$NUM_WORKERS" \
  --master_addr=127.0.0.1 --master_port="$MASTER_PORT" --join=True --log_dir="$OUTPUT_DIR/logs" \
  "$HERE/main.py" \
  --config "$HERE/grpo_config.yaml" \
  --dataset_file "$DATASET_FILE" \
  --tokenizer_dir "$MODEL_DIR" \
  --actor_checkpoint_path "$MODEL_DIR" \
  --ref_checkpoint_path "$MODEL_DIR" \
  --generate_checkpoint_path "$MODEL_DIR" \
  --verifier_function "$VERIFIERS" \
  --verifier_weight "$WEIGHTS" \
  --save_checkpoint_dir "$OUTPUT_DIR/checkpoints" \
  "$@" \
  run.output_dir="$OUTPUT_DIR"
