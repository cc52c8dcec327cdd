#!/usr/bin/env bash
#SBATCH --job-name=rolemodel
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --exclusive
#SBATCH --mem=0
#SBATCH --output=%x-%j.log
# sbatch configs/slurm.sh config.toml [table.key=value ...], from the repository, which all nodes must see.
# The first node gives inference.gpus of its GPUs to vLLM; every node gives the same number, trainer.gpus, to the trainer.
set -eu
config=$1; shift
export NNODES=$SLURM_JOB_NUM_NODES MASTER_PORT=$((20000 + SLURM_JOB_ID % 10000)) ROLEMODEL_RUN_ID=slurm-$SLURM_JOB_ID
nodes=$(scontrol show hostnames "$SLURM_JOB_NODELIST")
export PYTHONFAULTHANDLER=1 MASTER_ADDR=${nodes%%$'\n'*}
bash launch.sh --setup
PY=.venv/bin/python; [ -x "$PY" ] || PY=python3
resolved=$(PYTHONPATH=$PWD "$PY" configs/__init__.py "$config" "$@")
eval "$(grep -E '^(run_dir|run_max_steps|trainer_gpus)=' <<<"$resolved")"
steps=$(cat "$run_dir/done" 2>/dev/null || echo -1)
[ "$steps" -lt "$run_max_steps" ] || exec bash launch.sh "$config" "$@" # it says so; other nodes would wait for a rendezvous
more=("trainer.replicas=$NNODES" "$@")
# shellcheck disable=SC2016  the variables are each node's own
PY=$PY GPUS=$trainer_gpus srun --kill-on-bad-exit=1 --cpu-bind=none --cpus-per-task="$SLURM_CPUS_ON_NODE" bash -c '
    # gloo would take the interface to which the host name resolves; this is the one that reaches the first node
    own=$(ip route get "$(getent ahostsv4 "$MASTER_ADDR" | sed -n "1s/ .*//p")" | sed -nE "s/.* src ([0-9.]+).*/\1/p")
    name=$(ip -o addr show to "$own" | sed -nE "s/^[0-9]+: ([^ ]+).*/\1/p")
    [ -z "$name" ] || export GLOO_SOCKET_IFNAME=${GLOO_SOCKET_IFNAME:-$name} \
        NCCL_SOCKET_IFNAME=${NCCL_SOCKET_IFNAME:-$name}
    if [ "$SLURM_NODEID" = 0 ]; then exec bash launch.sh "$@"; fi
    config=$1; shift
    exec "$PY" -m torch.distributed.run --nnodes "$NNODES" --node-rank "$SLURM_NODEID" --nproc-per-node "$GPUS" \
        --master-addr "$MASTER_ADDR" --master-port "$MASTER_PORT" trainer.py "$config" "$@"' node "$config" "${more[@]}"
