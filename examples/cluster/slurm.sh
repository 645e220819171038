#!/usr/bin/env bash
# GRPO on two nodes of 8 NPUs under Slurm:
#   sbatch examples/cluster/slurm.sh examples/grpo/qwen2_5_32b_16npu.yaml
# Not run on a real Slurm. Every node needs this directory and both environments, on shared storage.
#SBATCH --job-name=mindrlhf
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --exclusive
#SBATCH --signal=TERM@120
#SBATCH --requeue
set -euo pipefail

config="$1"
shift
# The run saves and ends two minutes before its time is up; a job that is queued again goes on from there.
resume=()
if [[ "${SLURM_RESTART_COUNT:-0}" -gt 0 ]]; then
  resume=(--resume)
fi
srun --kill-on-bad-exit=0 \
  .venv/bin/mindrlhf train "$config" --workers 8 --nodes auto --max-restarts 3 "${resume[@]}" "$@"
