#!/bin/bash
# An array of islands, each of one node or more, started again when it fails, is preempted or reaches its time limit:
#   FTOPT_COORDINATOR=http://head:29410 sbatch --array=0-3 slurm.sh examples/islands.py
#SBATCH --job-name=ftopt
#SBATCH --array=0-1
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --time=24:00:00
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --signal=B:TERM@120

script=${1:?the script that each rank runs, such as examples/islands.py}
: "${FTOPT_COORDINATOR:?the address that ftopt coordinator prints}"
export FTOPT_REPLICA="r$SLURM_ARRAY_TASK_ID"
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
life=${SLURM_RESTART_COUNT:-0}
head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)

srun --kill-on-bad-exit=1 torchrun \
    --nnodes="$SLURM_JOB_NUM_NODES" --nproc-per-node="${SLURM_GPUS_ON_NODE:-2}" \
    --rdzv-backend=c10d --rdzv-id="$SLURM_JOB_ID-$life" --rdzv-endpoint="$head:$((20000 + SLURM_JOB_ID % 10000))" \
    --max-restarts=3 "$script" "$FTOPT_COORDINATOR" &
island=$!

trap 'kill -TERM "$island"' TERM   # srun passes it on to torchrun, and torchrun to the ranks, which leave
while wait "$island"; status=$?; kill -0 "$island" 2> /dev/null; do :; done

if ((status != 0 && life < 20)); then   # torchrun ends with an error when it got a signal, however the ranks left
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$status"
