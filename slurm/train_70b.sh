#!/usr/bin/env bash
#SBATCH --job-name=train_70b
#SBATCH --nodes=8
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=96
#SBATCH --mem=0
#SBATCH --exclusive
#SBATCH --time=24:00:00
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=slurm-%x-%j.out
#SBATCH --signal=B:USR1@900
# Llama-3-70B on 8 nodes of 8 GPUs: sbatch slurm/train_70b.sh MODEL DATA [--set key=value ...]; see slurm/README.md.
# The script's own timer uses the plan; --signal is the fallback. B: sends the signal to this script only.
CONFIG="${CONFIG:-slurm/llama3_70b.yaml}"
RANKS_PER_NODE="${RANKS_PER_NODE:-8}"
ALLREDUCE_FLOOR_GBPS="${ALLREDUCE_FLOOR_GBPS:-200}"    # bus bandwidth within a node; NVLink of an H100 reaches about twice this
NETWORK_FLOOR_GBPS="${NETWORK_FLOOR_GBPS:-100}"        # bus bandwidth between two nodes; eight 400 Gb/s ports reach about three times this

# Under sbatch, BASH_SOURCE is a copy in Slurm's spool folder. So the repository is the folder where sbatch was called.
GRPO_MEGA_ROOT="${GRPO_MEGA_ROOT:-${SLURM_SUBMIT_DIR:-$PWD}}"
if [[ ! -f "$GRPO_MEGA_ROOT/slurm/job.sh" ]]; then
    echo "train_70b.sh: error: $GRPO_MEGA_ROOT/slurm/job.sh is not there; call sbatch in the repository, or set GRPO_MEGA_ROOT" >&2
    exit 2
fi
source "$GRPO_MEGA_ROOT/slurm/job.sh"
main "$@"
