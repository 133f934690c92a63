#!/usr/bin/env bash
#SBATCH --job-name=train_tiny
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --time=30:00
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=slurm-%x-%j.out
#SBATCH --signal=B:USR1@120
# A tiny model on two nodes of two ranks, without GPUs: sbatch slurm/train_tiny.sh MODEL DATA [--set key=value ...].
# Only the numbers differ from train_70b.sh; see slurm/README.md.
CONFIG="${CONFIG:-slurm/tiny.yaml}"
RANKS_PER_NODE="${RANKS_PER_NODE:-2}"
GPUS_PER_NODE="${GPUS_PER_NODE:-0}"
LEAD_SECONDS="${LEAD_SECONDS:-120}"

# Under sbatch, BASH_SOURCE is a copy in Slurm's spool folder. So the repository is the folder where sbatch was called.
GRPO_MEGA_ROOT="${GRPO_MEGA_ROOT:-${SLURM_SUBMIT_DIR:-$PWD}}"
if [[ ! -f "$GRPO_MEGA_ROOT/slurm/job.sh" ]]; then
    echo "train_tiny.sh: error: $GRPO_MEGA_ROOT/slurm/job.sh is not there; call sbatch in the repository, or set GRPO_MEGA_ROOT" >&2
    exit 2
fi
export PYTHONPATH="$GRPO_MEGA_ROOT${PYTHONPATH:+:$PYTHONPATH}" # the reward of tiny.yaml is in tools/
source "$GRPO_MEGA_ROOT/slurm/job.sh"
main "$@"
