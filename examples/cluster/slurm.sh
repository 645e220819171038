#!/usr/bin/env bash
# GRPO on two nodes of 8 NPUs under Slurm:
#   sbatch examples/cluster/slurm.sh examples/grpo/qwen2_5_32b_16npu.yaml
# Every node needs this directory and both environments, on shared storage.
#SBATCH --job-name=mindrlhf
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --exclusive
#SBATCH --signal=TERM@120
#SBATCH --requeue
#SBATCH --open-mode=append
set -euo pipefail

config="$1"
shift
code=0
srun --kill-on-bad-exit=0 \
  .venv/bin/mindrlhf train "$config" --workers 8 --nodes auto --max-restarts 3 --resume auto "$@" || code=$?
# 75: saved and ended on SIGTERM, two minutes before its time was up, or preempted: it is queued again and goes on. 143:
# SIGTERM came before the command had begun.
if [[ "$code" == 75 || "$code" == 143 ]]; then
  scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
