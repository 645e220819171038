#!/bin/bash
# Two updates of 256 samples in a step of 64 prompts; expert choices are replayed.
set -ex
NUM_GPUS=${NUM_GPUS:-16}
source "$(dirname "$0")/models/some.sh"

ROLLOUT_ARGS=(
   --prompt-data data/train.jsonl
   --input-key prompt --label-key answer --apply-chat-template --rollout-shuffle
   --rm-type deepscaler
   --num-rollout 300 --rollout-batch-size 64 --n-samples-per-prompt 8
   --rollout-max-response-len 8192 --rollout-temperature 0.9
   --num-steps-per-rollout 2
   --dynamic-sampling-filter-path slime.filters.check_reward_nonzero_std
   --apply-chat-template-kwargs '{"enable_thinking": false}'
)
PERF_ARGS=(
   --tensor-model-parallel-size 4 --sequence-parallel --pipeline-model-parallel-size 2
   --context-parallel-size 2 --expert-model-parallel-size 8
   --recompute-granularity full --recompute-method uniform --recompute-num-layers 1
   # --micro-batch-size 1
   --use-dynamic-batch-size --max-tokens-per-gpu 9216
)
GRPO_ARGS=(--advantage-estimator grpo --use-kl-loss --kl-loss-coef 0.002 --kl-loss-type low_var_kl
   --entropy-coef 0.001 --eps-clip 0.2 --eps-clip-high 0.28 --use-tis --tis-clip 3.0)
OPTIMIZER_ARGS=(--optimizer adam --lr 1e-6 --lr-decay-style constant --weight-decay 0.1 --adam-beta2 0.98
   --optimizer-cpu-offload --overlap-cpu-optimizer-d2h-h2d)

ray job submit --address="http://127.0.0.1:8265" -- python3 train.py \
   --actor-num-nodes 1 --actor-num-gpus-per-node ${NUM_GPUS} --colocate \
   --hf-checkpoint models/policy --save checkpoints --save-interval 20 \
   --eval-interval 10 --n-samples-per-eval-prompt 16 --eval-prompt-data aime data/aime.jsonl --skip-eval-before-train \
   --rollout-num-gpus-per-engine 4 --sglang-mem-fraction-static 0.7 --use-rollout-routing-replay \
   ${MODEL_ARGS[@]} ${ROLLOUT_ARGS[@]} ${PERF_ARGS[@]} ${GRPO_ARGS[@]} ${OPTIMIZER_ARGS[@]}
