#!/usr/bin/env bash
#SBATCH --job-name=rolemodel
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --exclusive
#SBATCH --mem=0
#SBATCH --output=%x-%j.log
# sbatch tools/slurm.sh config.toml [table.key=value ...], from the repository, which all nodes must see.
# The first node gives inference.gpus of its GPUs to vLLM; every node gives trainer.gpus of them to the trainer.
set -eu
config=$1
shift
export NNODES=$SLURM_JOB_NUM_NODES
export MASTER_PORT=$((20000 + SLURM_JOB_ID % 10000))
export ROLEMODEL_RUN_ID=slurm-$SLURM_JOB_ID
export PYTHONFAULTHANDLER=1
nodes=$(scontrol show hostnames "$SLURM_JOB_NODELIST")
export MASTER_ADDR=${nodes%%$'\n'*}
bash launch.sh --setup
PY=.venv/bin/python
[ -x "$PY" ] || PY=python3
resolve='
import sys
from rolemodel.config import load_config
from rolemodel.run_directory import run_directory
cfg = load_config(sys.argv[1], sys.argv[2:])
print(cfg.trainer.gpus, cfg.run.max_steps, cfg.trainer.script, run_directory(cfg))'
resolved=$(PYTHONPATH=$PWD "$PY" -c "$resolve" "$config" "$@")
read -r gpus max_steps script run_dir <<<"$resolved"
steps=$(cat "$run_dir/done" 2>/dev/null || echo -1)
if [ "$steps" -ge "$max_steps" ]; then
    exec bash launch.sh "$config" "$@" # reports that the run is complete; the other nodes would wait for it in vain
fi
more=("$@")
export PY GPUS=$gpus SCRIPT=$script
# shellcheck disable=SC2016  each node expands these variables itself
srun --kill-on-bad-exit=1 --cpu-bind=none --cpus-per-task="$SLURM_CPUS_ON_NODE" bash -c '
    # gloo would use the interface that the host name resolves to; this finds the one that reaches the first node.
    first=$(getent ahostsv4 "$MASTER_ADDR" | sed -n "1s/ .*//p")
    own=$(ip route get "$first" | sed -nE "s/.* src ([0-9.]+).*/\1/p")
    name=$(ip -o addr show to "$own" | sed -nE "s/^[0-9]+: ([^ ]+).*/\1/p")
    if [ -n "$name" ]; then
        export GLOO_SOCKET_IFNAME=${GLOO_SOCKET_IFNAME:-$name}
        export NCCL_SOCKET_IFNAME=${NCCL_SOCKET_IFNAME:-$name}
    fi
    if [ "$SLURM_NODEID" = 0 ]; then exec bash launch.sh "$@"; fi
    config=$1
    shift
    exec "$PY" -m torch.distributed.run --nnodes "$NNODES" --node-rank "$SLURM_NODEID" --nproc-per-node "$GPUS" \
        --master-addr "$MASTER_ADDR" --master-port "$MASTER_PORT" "$SCRIPT" "$config" "$@"' node "$config" "${more[@]}"
