#!/usr/bin/env bash
# bash launch.sh config.toml [table.key=value ...]
# Sets up .venv once, then runs vLLM server(s), orchestrator.py and torchrun trainer.py until all is done or one fails.
# Exit codes: 0 done, 2 configuration, 3 a role died or hung, 4 data or environment, 5 numerics, 6 storage, 130/143.
# Environment: SERVER="python tests/fake_vllm.py" replaces vLLM; PYTHON names the interpreter that makes .venv;
# MAX_RESTARTS=N reruns up to N times where a role died or hung, while each attempt gets further than those before.
set -u
ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
if [ $# -lt 1 ] || [ "$1" = -h ] || [ "$1" = --help ]; then sed -n '2,7s/^# //p' "$ROOT/launch.sh"; exit 2; fi
CONFIG=$(realpath -m -- "$1"); shift # `bash launch.sh --setup` only installs
cd "$ROOT" || exit 2

. configs/lib/setup.sh # KIND (cpu or gpu), GPUS, PY: an interpreter with what requirements-$KIND.txt pins
[ "$(basename -- "$CONFIG")" = --setup ] && exit 0
GIVEN=("$CONFIG" "$@")

# --- configuration: checked before anything starts ---------------------------------------------------------------------
export PYTHONPATH=$ROOT${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1
RESOLVED=$("$PY" configs/lib/for_launch.py "$CONFIG" "$@") || exit
eval "$RESOLVED" # RUN_DIR STEPS COMPLETE PATIENCE MODEL PREPARE RUN_DIR DTYPE MAX_LEN SEED TEMPLATE INF_GPUS TRAIN_GPUS TP PORT LORA STALENESS RANK_LORA URLS ARGS
[ "$COMPLETE" = 1 ] && { echo "[launch] already complete: $RUN_DIR has its $STEPS steps; set max_steps higher to go on"; exit 0; }
LOGS=$RUN_DIR/logs
export ROLEMODEL_EXIT_FILE=$RUN_DIR/exit.json
: "${ROLEMODEL_RUN_ID:=$(basename "$RUN_DIR")-$(od -An -N4 -tx4 /dev/urandom | tr -d ' ')}" # servers are called so
export DO_NOT_TRACK=1 VLLM_NO_USAGE_STATS=1 VLLM_SERVER_DEV_MODE=1 VLLM_ALLOW_RUNTIME_LORA_UPDATING=True
export ROLEMODEL_RUN_ID TOKENIZERS_PARALLELISM=false VLLM_LOGGING_LEVEL=${VLLM_LOGGING_LEVEL:-WARNING}
ulimit -n "$(ulimit -Hn)" 2>/dev/null
if [ ${#URLS[@]} -eq 0 ]; then export GLOO_SOCKET_IFNAME=${GLOO_SOCKET_IFNAME:-lo}; else INF_GPUS=0; fi
# --- the run is ours, and whatever it starts carries TAG in its environment, so that nothing can be left behind ----------
TAG=$ROLEMODEL_RUN_ID.$(od -An -N4 -tx4 /dev/urandom | tr -d ' ')
sweep() { # signal, tag
    local pids
    for _ in 1 2 3 4 5; do
        mapfile -t pids < <(grep -lszxF "ROLEMODEL_TAG=$2" /proc/[0-9]*/environ | cut -d/ -f3)
        [ ${#pids[@]} -eq 0 ] && return
        kill -"$1" "${pids[@]}" 2>/dev/null
        [ "$1" = KILL ] || return 0
        sleep 0.1
    done
}
exec 9>>"$RUN_DIR/.lock"
read -r owner old_tag <"$RUN_DIR/.lock"
patience=20 # s, for the janitor of the last attempt
[ "${owner:-$$}" = $$ ] || ! grep -qs launch.sh "/proc/$owner/cmdline" || patience=0
flock -w $patience 9 || { echo "[launch] exit=2 $RUN_DIR belongs to a run under way (process $owner): choose another run_name" >&2; exit 2; }
[ -z "${old_tag:-}" ] || sweep KILL "$old_tag"
echo "$$ $TAG" >"$RUN_DIR/.lock"
place=${TMPDIR:-/tmp}; [ ${#place} -lt 50 ] || place=/tmp # vLLM's sockets go there, with at most 107 characters
SCRATCH=$(mktemp -d "$place/rolemodel.XXXXXX") || { echo "[launch] exit=6 no temporary directory in $place" >&2; exit 6; }
# The janitor, in a session of its own: it reads until this launcher is gone, even by kill -9, then cleans up.
exec 8> >(exec setsid bash -c "$(declare -f sweep)"'
    trap "" INT TERM HUP; cat >/dev/null
    sweep KILL "$1"; rm -rf "$2" "$3"/{,batches/,checkpoints/}*.tmp "$3"/{adapters,eval_hold,exit.json.reserve}' \
    janitor "$TAG" "$SCRATCH" "$RUN_DIR" 2>/dev/null)
for file in config.toml identity.json; do mv "$RUN_DIR/$file.new" "$RUN_DIR/$file"; done
rm -rf "$RUN_DIR"/{version,exit.json,eval_hold,adapters,done}
printf '%4096s' '' >"$ROLEMODEL_EXIT_FILE.reserve" || { echo "[launch] exit=6 $RUN_DIR cannot be written to" >&2; exit 6; }

# --- devices -----------------------------------------------------------------------------------------------------------
DEVICES=(${CUDA_VISIBLE_DEVICES:+${CUDA_VISIBLE_DEVICES//,/ }})
[ ${#DEVICES[@]} -gt 0 ] || mapfile -t DEVICES < <(seq 0 $((GPUS - 1)))
CORES=$(nproc) EXTRA=()
if [ "$GPUS" -eq 0 ]; then
    export VLLM_CPU_KVCACHE_SPACE=${VLLM_CPU_KVCACHE_SPACE:-1}
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
    setsid env ROLEMODEL_TAG="$TAG" TMPDIR="$SCRATCH" PYTHONFAULTHANDLER=1 "$@" >>"$log" 2>&1 8>&- 9>&- &
    PID[$name]=$!
}
reached() { cat "$RUN_DIR/version" 2>/dev/null || echo -1; }
is_dead() { # pid; also where its parent has not noticed
    local stat
    ! { read -r stat <"/proc/$1/stat"; } 2>/dev/null || [[ ${stat##*) } = [ZX]* ]]
}
finish() { # code, last line
    local code=$1 version
    [ -z "${CONSOLE:-}" ] || kill "$CONSOLE" 2>/dev/null
    trap 'sweep KILL "$TAG"; exit $code' INT TERM HUP # the second Ctrl-C
    if [ "$code" = 3 ]; then sweep ABRT "$TAG"; sweep CONT "$TAG" # stacks of all threads into the logs
    else for name in "${!PID[@]}"; do kill -TERM -- "-${PID[$name]}" 2>/dev/null; done; fi
    for _ in $(seq 50); do
        alive=0
        for name in "${!PID[@]}"; do kill -0 -- "-${PID[$name]}" 2>/dev/null && alive=1; done
        [ $alive = 1 ] || break
        sleep 0.1
    done
    sweep KILL "$TAG"
    [ "$code" = 0 ] && echo "$2" || echo "$2" >&2
    version=$(reached)
    if [ "$code" = 3 ] && [ "${MAX_RESTARTS:-0}" -gt 0 ] && [ "$version" -gt "${ROLEMODEL_REACHED:--1}" ]; then
        echo "[launch] restart after version $version, $((MAX_RESTARTS - 1)) left" >&2
        ROLEMODEL_REACHED=$version MAX_RESTARTS=$((MAX_RESTARTS - 1)) exec bash "$ROOT/launch.sh" "${GIVEN[@]}" 8>&- 9>&-
    fi
    exit "$code"
}
trap 'finish 130 "[launch] exit=130 interrupted"' INT
trap 'finish 143 "[launch] exit=143 terminated"' TERM
trap 'finish 129 "[launch] exit=129 hung up"' HUP
dead() { # name, code, log: the cause that the role itself told, else how it ended
    local name=$1 code=$2 log=$3 pid=${PID[$1]} cause='' killed
    if grep -qs '"role"' "$ROLEMODEL_EXIT_FILE" && [[ $name != inference* || $code -lt 128 ]]; then
        eval "$("$PY" configs/lib/for_launch.py --exit "$ROLEMODEL_EXIT_FILE")" # the role that failed first
    elif [ "$code" -gt 128 ] && [ "$code" -lt 165 ]; then cause="killed by SIG$(kill -l $((code - 128)))" code=3
    elif [[ $name = inference* && $code = 2 ]]; then cause="refused its arguments, see [inference.args]"
    else cause="ended with status $code before the run was done" code=3; fi
    log=$LOGS/$name.log
    killed=$(tail -n 60 "$log" | grep -m 1 -oE 'exitcode *: -[0-9]+ \(pid: [0-9]+\)') && cause="a rank was killed, $killed; $cause" # torchrun's report
    echo >&2
    tail -n 30 "$log" >&2
    finish "$code" "[launch] role=$name pid=$pid exit=$code $cause log=$log"
}

case $MODEL in /* | ./* | ../* | .cache/*) local_model=1 ;; *) [ -d "$MODEL" ] && local_model=1 ;; esac
if [ -n "$PREPARE" ] && [ ! -d "$MODEL" ]; then
    echo "[launch] preparing $MODEL with $PREPARE (log: $LOGS/prepare.log)"
    start prepare "$LOGS/prepare.log" env OMP_NUM_THREADS="$CORES" "$PY" "$PREPARE" "$CONFIG" "$@"
    wait "${PID[prepare]}" || finish 3 "[launch] role=prepare pid=${PID[prepare]} exit=3 $(tail -n 1 "$LOGS/prepare.log") log=$LOGS/prepare.log"
    unset 'PID[prepare]'
fi
[ -n "${local_model:-}" ] && export HF_HUB_OFFLINE=1

mapfile -t ports < <(seq "$PORT" $((PORT + INF_GPUS / TP - 1)))
STORE_PORT=$("$PY" configs/lib/for_launch.py --port "${ports[@]}") || finish 2 "[launch] role=inference exit=2 a port is in use"
if [ ${#URLS[@]} -eq 0 ]; then
    for ((i = 0; i < INF_GPUS / TP; i++)); do
        port=$((PORT + i))
        URLS+=("http://127.0.0.1:$port")
        flags=(--model "$MODEL" --host 127.0.0.1 --port "$port" --served-model-name "$ROLEMODEL_RUN_ID" --dtype "$DTYPE"
            --max-model-len "$MAX_LEN" --seed "$SEED" --logprobs-mode processed_logprobs --scheduling-policy priority
            --worker-extension-cls configs.lib.broadcast.WeightReceiver ${TEMPLATE:+--chat-template "$TEMPLATE"} "${ARGS[@]}")
        [ "$LORA" = 1 ] && flags+=(--enable-lora --max-lora-rank "$RANK_LORA" --max-loras $((STALENESS + 2)))
        name=inference; [ "$i" = 0 ] || name+=$i
        start "$name" "$LOGS/$name.log" env CUDA_VISIBLE_DEVICES="$(slice $((i * TP)) "$TP")" \
            ${SERVER:-"$PY" -m vllm.entrypoints.openai.api_server} "${flags[@]}"
    done
fi
quoted=$(printf ',"%s"' "${URLS[@]}")
EXTRA+=("inference.urls=[${quoted:1}]")
start orchestrator "$LOGS/orchestrator.log" env CUDA_VISIBLE_DEVICES= OMP_NUM_THREADS=1 "$PY" orchestrator.py "$CONFIG" "$@" "${EXTRA[@]}"
first=$((INF_GPUS + TRAIN_GPUS > ${#DEVICES[@]} ? 0 : INF_GPUS))
threads=$((CORES / 2 / TRAIN_GPUS)); [ $threads -gt 0 ] || threads=1
start trainer "$LOGS/trainer.log" env CUDA_VISIBLE_DEVICES="$(slice "$first" "$TRAIN_GPUS")" OMP_NUM_THREADS="${TRAINER_THREADS:-$threads}" "$PY" -m torch.distributed.run \
    --nproc-per-node "$TRAIN_GPUS" --master-addr 127.0.0.1 --master-port "$STORE_PORT" \
    trainer.py "$CONFIG" "$@" "${EXTRA[@]}"

# --- watch: any end before the run is done is a failure, whatever the exit code -----------------------------------------
tail --pid=$$ -q -n 0 -F "$LOGS/trainer.log" "$LOGS/orchestrator.log" 2>/dev/null 8>&- 9>&- |
    grep --line-buffered -E '^(step|eval|batch) ' 8>&- 9>&- &
CONSOLE=$!
begun=$SECONDS engines=() waits_since=''
while :; do
    sleep 0.5
    # vLLM's engine is a process of its own: its server can answer /health, or exit 0, without it
    for pid in "${engines[@]}"; do
        is_dead "$pid" && finish 3 "[launch] role=inference pid=$pid exit=3 vLLM's engine process died log=$LOGS/inference.log"
    done
    if [ ! -f "$RUN_DIR/version" ]; then # until all have started
        groups=$(for name in "${!PID[@]}"; do [[ $name != inference* ]] || printf '%s|' "${PID[$name]}"; done)
        mapfile -t engines < <(grep -shE "^[0-9]+ \(VLLM::.*\) . [0-9]+ (${groups}none) " /proc/[0-9]*/stat | cut -d' ' -f1)
    fi
    ended=0
    for name in $(printf '%s\n' "${!PID[@]}" | sort); do # inference first: others fail for want of it
        is_dead "${PID[$name]}" || continue
        wait "${PID[$name]}"; code=$?
        if [ $code = 0 ] && [[ $name != inference* ]] && [ "$(reached)" -ge "$STEPS" ]; then ended=$((ended + 1)); continue; fi
        dead "$name" $code "$LOGS/$name.log"
    done
    if [ $ended = 2 ]; then
        [ -f tools/plot.py ] && "$PY" tools/plot.py "$RUN_DIR" >>"$LOGS/plot.log" 2>&1 8>&- 9>&-
        sleep 0.5 # the last lines are still on their way to the console
        echo "$STEPS" >"$RUN_DIR/done"
        finish 0 "[launch] done in $((SECONDS - begun)) s: $RUN_DIR"
    fi
    [ $ended = 1 ] && waits_since=${waits_since:-$SECONDS} # one is done, the other has this long to finish
    if [ -n "$waits_since" ] && [ $((SECONDS - waits_since)) -gt "${PATIENCE%.*}" ]; then
        finish 3 "[launch] exit=3 trainer and orchestrator: only one was done after $PATIENCE s (orchestrator.version_timeout) log=$LOGS"
    fi
    if [ -t 1 ] && [ -f "$RUN_DIR/version" ]; then
        version=$(reached) width=30
        bar=$(printf '%*s' $((version * width / STEPS)) '' | tr ' ' '#')
        printf '\r[%-*s] %d/%d  %d s\r' $width "$bar" "$version" "$STEPS" $((SECONDS - begun))
    fi
done
