#!/usr/bin/env bash
# bash launch.sh config.toml [table.key=value ...] [--check]     --check: the pre-flight alone
# Sets up .venv once, then runs vLLM server(s), orchestrator.py and torchrun trainer.py until all is done or one fails.
# Exit codes: 0 done, 2 configuration, 3 a role died or hung, 4 data or environment, 5 numerics, 6 storage, 130/143.
# Environment: SERVER="python tests/fake_vllm.py" replaces vLLM; PYTHON names the interpreter that makes .venv, KIND=gpu
# (or cpu) what goes into it; MAX_RESTARTS=N reruns where a role died or hung, while each attempt gets further than before;
# TMUX=1 opens a pane per role; NNODES=N MASTER_ADDR=... MASTER_PORT=... the trainer on N machines (README, "Devices").
set -u
ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
if [ $# -lt 1 ] || [ "$1" = -h ] || [ "$1" = --help ]; then sed -n '2,8s/^# //p' "$ROOT/launch.sh"; exit 2; fi
[ -z "${NNODES:-}" ] || : "${MASTER_ADDR:?NNODES needs it: the address of this node}"
CONFIG=$(realpath -m -- "$1"); shift # `bash launch.sh --setup` only installs
cd "$ROOT" || exit 2

. configs/lib/setup.sh # KIND (cpu or gpu), GPUS, PY: an interpreter with what requirements-$KIND.txt pins
[ "$(basename -- "$CONFIG")" = --setup ] && exit 0
GIVEN=("$CONFIG" "$@")

# --- the way out: whatever this attempt starts carries TAG in its environment, so that nothing can be left behind --------
declare -A PID
TAG=$(basename -- "$CONFIG").$(od -An -N8 -tx8 /dev/urandom | tr -d ' ')
place=${TMPDIR:-/tmp}; [ ${#place} -lt 50 ] || place=/tmp # vLLM's sockets go there, with at most 107 characters
SCRATCH=$(mktemp -d "$place/rolemodel.XXXXXX") || { echo "[launch] exit=6 no temporary directory in $place" >&2; exit 6; }
trap 'rm -rf "$SCRATCH"' EXIT
. configs/lib/roles.sh # start, dead, finish, sweep; from here on signals end the run in order
ulimit -c 0 # no core files where stacks are dumped

# --- configuration: checked before anything starts ---------------------------------------------------------------------
export PYTHONPATH=$ROOT${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1
RESOLVED=$("$PY" configs/lib/for_launch.py "$SCRATCH" "$CONFIG" "$@") || exit
eval "$RESOLVED" # RUN_DIR STEPS COMPLETE PATIENCE MODEL PREPARE PREPARE_S DTYPE MAX_LEN SEED TEMPLATE INF_GPUS TRAIN_GPUS TP PORT LORA STALENESS RANK_LORA TRACKER URLS ARGS
[ "$COMPLETE" = 1 ] && { echo "[launch] already complete: $RUN_DIR has its $STEPS steps; set max_steps higher to go on, or run_name for another run"; exit 0; }
LOGS=$RUN_DIR/logs
[ "${TMUX:-}" != 1 ] || . configs/lib/tmux.sh # this command again, in a session with a pane per role
export ROLEMODEL_EXIT_FILE=$RUN_DIR/exit.json
: "${ROLEMODEL_RUN_ID:=$(basename "$RUN_DIR")-$(od -An -N4 -tx4 /dev/urandom | tr -d ' ')}" # servers are called so
export DO_NOT_TRACK=1 VLLM_NO_USAGE_STATS=1 VLLM_SERVER_DEV_MODE=1 VLLM_ALLOW_RUNTIME_LORA_UPDATING=True
export ROLEMODEL_RUN_ID TOKENIZERS_PARALLELISM=false VLLM_LOGGING_LEVEL=${VLLM_LOGGING_LEVEL:-WARNING}
ulimit -n "$(ulimit -Hn)" 2>/dev/null
if [ ${#URLS[@]} -gt 0 ]; then INF_GPUS=0; elif [ -z "${NNODES:-}" ]; then export GLOO_SOCKET_IFNAME=${GLOO_SOCKET_IFNAME:-lo}; fi

# --- one run per directory ---------------------------------------------------------------------------------------------
owner='' old_tag='' old_scratch=''
{ exec 9>>"$RUN_DIR/.lock"; } 2>/dev/null || { echo "[launch] exit=6 $RUN_DIR/.lock cannot be written" >&2; exit 6; }
read -r owner old_tag old_scratch <"$RUN_DIR/.lock"
patience=20 # s, for the janitor of the last attempt
[ "${owner:-$$}" = $$ ] || ! grep -qs launch.sh "/proc/$owner/cmdline" || patience=0
flock -w $patience 9 || { echo "[launch] exit=2 $RUN_DIR belongs to a run under way (process $owner): choose another run_name" >&2; exit 2; }
if [ -n "$old_tag" ]; then sweep KILL "$old_tag" "$old_scratch"; [[ $old_scratch != */rolemodel.?????? ]] || rm -rf "$old_scratch"; fi
echo "$$ $TAG $SCRATCH" >"$RUN_DIR/.lock"
# The janitor, in a session of its own: it reads until this launcher is gone, even by kill -9, then cleans up.
exec 8> >(exec setsid bash -c "$(declare -f sweep)"'
    trap "" INT TERM HUP; cat >/dev/null
    sweep KILL "$1" "$2"; rm -rf "$2" "$3"/{,batches/,checkpoints/}*.tmp "$3"/{adapters,eval_hold,exit.json.reserve}' \
    janitor "$TAG" "$SCRATCH" "$RUN_DIR" 2>/dev/null)
for file in config.toml identity.json; do
    cp "$SCRATCH/$file" "$RUN_DIR/$file.tmp" && mv "$RUN_DIR/$file.tmp" "$RUN_DIR/$file" || full=1
done
rm -rf "$RUN_DIR"/{version,exit.json,eval_hold,adapters,done}
printf '%4096s' '' >"$ROLEMODEL_EXIT_FILE.reserve" && [ -z "${full:-}" ] || finish 6 "[launch] exit=6 $RUN_DIR cannot be written to"

# --- devices -----------------------------------------------------------------------------------------------------------
DEVICES=(${CUDA_VISIBLE_DEVICES:+${CUDA_VISIBLE_DEVICES//,/ }})
[ ${#DEVICES[@]} -gt 0 ] || mapfile -t DEVICES < <(seq 0 $((GPUS - 1)))
CORES=$(nproc) EXTRA=() SERVER_ENV=()
if [ "$GPUS" -eq 0 ]; then
    export VLLM_CPU_KVCACHE_SPACE=${VLLM_CPU_KVCACHE_SPACE:-1}
    threads=${OMP_NUM_THREADS:-$((CORES / 2 / (INF_GPUS > TP ? INF_GPUS / TP : 1)))}
    # Eager, and without the one function that vLLM compiles all the same: a minute of g++ at the first logprobs.
    ARGS+=(--enforce-eager) SERVER_ENV=(OMP_NUM_THREADS=$((threads > 0 ? threads : 1)) TORCH_COMPILE_DISABLE=1)
    # One process less, and no spinning on the queue between the two. vLLM on CPU asks for "mp" to set OpenMP's threads;
    # here the environment does. By its path, since the short name "uni" is turned into "mp".
    [[ "$TP" -gt 1 || " ${ARGS[*]} " =~ " --"(distributed-executor-backend|pipeline-parallel-size)" " ]] ||
        ARGS+=(--distributed-executor-backend vllm.v1.executor.uniproc_executor.UniProcExecutor)
elif [ $((INF_GPUS > TRAIN_GPUS ? INF_GPUS : TRAIN_GPUS)) -gt ${#DEVICES[@]} ]; then
    finish 2 "[launch] exit=2 inference.gpus = $INF_GPUS and trainer.gpus = $TRAIN_GPUS, but there are ${#DEVICES[@]} GPUs"
elif [ $((INF_GPUS + TRAIN_GPUS)) -gt ${#DEVICES[@]} ]; then # shared: NCCL refuses two ranks on one device
    echo "[launch] vLLM and the trainer share ${#DEVICES[@]} GPU(s)"
    EXTRA+=(trainer.sync_backend=gloo)
    [[ " ${ARGS[*]} " == *" --gpu-memory-utilization "* ]] || ARGS+=(--gpu-memory-utilization 0.4)
fi
slice() { local IFS=,; echo "${DEVICES[*]:$1:$2}"; } # first, count

case $MODEL in /* | ./* | ../* | .cache/*) local_model=1 ;; *) [ -d "$MODEL" ] && local_model=1 ;; esac
if [ -n "$PREPARE" ] && [ ! -d "$MODEL" ]; then
    echo "[launch] preparing $MODEL with $PREPARE (log: $LOGS/prepare.log)"
    start prepare env OMP_NUM_THREADS="$CORES" timeout -k 5 "$PREPARE_S" "$PY" "$PREPARE" "$CONFIG" "$@"
    wait "${PID[prepare]}" || dead prepare $?
    unset 'PID[prepare]'
fi
offline=() # not for the orchestrator, whose rows may be there
[ -z "${local_model:-}" ] || offline=(HF_HUB_OFFLINE="${HF_HUB_OFFLINE:-1}")

mapfile -t ports < <(seq "$PORT" $((PORT + INF_GPUS / TP - 1)))
STORE_PORT=$("$PY" configs/lib/for_launch.py --port "${ports[@]}" 2>"$SCRATCH/port") ||
    finish $? "[launch] role=inference $(tail -n 1 "$SCRATCH/port") log=$LOGS"
if [ ${#URLS[@]} -eq 0 ]; then
    for ((i = 0; i < INF_GPUS / TP; i++)); do
        port=$((PORT + i))
        URLS+=("http://127.0.0.1:$port")
        flags=(--model "$MODEL" --host 127.0.0.1 --port "$port" --served-model-name "$ROLEMODEL_RUN_ID" --dtype "$DTYPE"
            --max-model-len "$MAX_LEN" --seed "$SEED" --logprobs-mode processed_logprobs --scheduling-policy priority
            --worker-extension-cls configs.lib.broadcast.WeightReceiver ${TEMPLATE:+--chat-template "$TEMPLATE"} "${ARGS[@]}")
        [ "$LORA" = 1 ] && flags+=(--enable-lora --max-lora-rank "$RANK_LORA" --max-loras $((STALENESS + 2)))
        name=inference; [ "$i" = 0 ] || name+=$i
        start "$name" env CUDA_VISIBLE_DEVICES="$(slice $((i * TP)) "$TP")" "${SERVER_ENV[@]}" "${offline[@]}" \
            ${SERVER:-"$PY" -m vllm.entrypoints.openai.api_server} "${flags[@]}"
    done
fi
quoted=$(printf ',"%s"' "${URLS[@]}")
EXTRA+=("inference.urls=[${quoted:1}]")
start orchestrator env CUDA_VISIBLE_DEVICES= OMP_NUM_THREADS=1 "$PY" orchestrator.py "$CONFIG" "$@" "${EXTRA[@]}"
first=$((INF_GPUS + TRAIN_GPUS > ${#DEVICES[@]} ? 0 : INF_GPUS))
threads=$((CORES / 2 / TRAIN_GPUS)); [ $threads -gt 0 ] || threads=1
rendezvous=(--master-addr 127.0.0.1 --master-port "$STORE_PORT")
[ -z "${NNODES:-}" ] || rendezvous=(--nnodes "$NNODES" --node-rank 0 --master-addr "$MASTER_ADDR" --master-port "${MASTER_PORT:-29500}")
start trainer env CUDA_VISIBLE_DEVICES="$(slice "$first" "$TRAIN_GPUS")" OMP_NUM_THREADS="${TRAINER_THREADS:-$threads}" \
    "${offline[@]}" "$PY" -m torch.distributed.run --nproc-per-node "$TRAIN_GPUS" "${rendezvous[@]}" trainer.py "$CONFIG" "$@" "${EXTRA[@]}"
tracker=''
if [ -n "$TRACKER" ]; then # it follows the files; the run goes on without it
    start tracker "$PY" configs/lib/track.py "$RUN_DIR" "$TRACKER"
    tracker=${PID[tracker]}
    unset 'PID[tracker]'
fi

# --- watch: any end before the run is done is a failure, whatever the exit code -----------------------------------------
clear=''; [ ! -t 1 ] || clear=$'\033[K' # what is left of the progress bar
tail --pid=$$ -q -n 0 -F "$LOGS/trainer.log" "$LOGS/orchestrator.log" 2>/dev/null 8>&- 9>&- |
    sed -unE "s/^(step|eval|batch|rollout|check:|warning:|time:) /$clear&/p" 8>&- 9>&- &
CONSOLE=$!
begun=$SECONDS engines=() waits_since=$SECONDS worked='' since='' evals=0
while :; do
    sleep 0.5
    ended=''
    for name in $(printf '%s\n' "${!PID[@]}" | sort); do # inference first: others fail for want of it
        is_dead "${PID[$name]}" || continue
        wait "${PID[$name]}"; code=$?
        for _ in {1..10}; do # a server whose broadcast broke off ends itself with 3; was the trainer killed, torchrun is about to end
            [[ $name$code = inference*3 ]] && ! grep -qs '"role"' "$ROLEMODEL_EXIT_FILE" || break
            if is_dead "${PID[trainer]}"; then wait "${PID[trainer]}" || { code=$? name=trainer; }; break; fi
            sleep 0.5
        done
        [ $code = 0 ] && [[ $name != inference* ]] && [ "$(reached)" -ge "$STEPS" ] || dead "$name" $code
        ended+=" $name"
    done
    for engine in "${engines[@]}"; do # vLLM's is a process of its own: its server can answer /health, or exit 0, without it
        is_dead "${engine#*:}" || continue
        grep -qs 'failed in a worker' "$ROLEMODEL_EXIT_FILE" && dead "${engine%:*}" 3 # it ended itself after that
        dead "${engine%:*}" 3 "its engine, process ${engine#*:}, died"
    done
    if [ ! -f "$RUN_DIR/version" ]; then # until all have started
        engines=()
        for name in "${!PID[@]}"; do
            [[ $name != inference* ]] || mapfile -t -O ${#engines[@]} engines < <(
                grep -shE "^[0-9]+ \(VLLM::Engine.*\) . ${PID[$name]} " /proc/[0-9]*/stat | sed "s/ .*//; s/^/$name:/")
        done
    fi
    if [ "$ended" = " orchestrator trainer" ]; then
        [ -z "${plot:-}" ] || timeout 120 tail --pid="$plot" -f /dev/null
        [ -f tools/plot.py ] && [ "$STEPS" -gt 0 ] && timeout 120 "$PY" tools/plot.py "$RUN_DIR" >>"$LOGS/plot.log" 2>&1 8>&- 9>&-
        [ -z "$tracker" ] || { kill -TERM "$tracker"; timeout 60 tail --pid="$tracker" -f /dev/null; } # it sends what is left
        sleep 0.5 # the last lines are still on their way to the console
        echo "$STEPS" >"$RUN_DIR/done.tmp" && mv "$RUN_DIR/done.tmp" "$RUN_DIR/done"
        [ "$STEPS" -gt 0 ] || finish 0 "[launch] all checks passed in $((SECONDS - begun)) s"
        finish 0 "[launch] done in $((SECONDS - begun)) s: $RUN_DIR"
    fi
    # one is done, the other has this long to finish; the orchestrator, in its last evaluation, as long as it does anything
    clock=$(cut -d' ' -f14 "/proc/${PID[orchestrator]}/stat" 2>/dev/null)
    if [ -z "$ended" ] || [ "$ended$clock" != "$worked" ]; then waits_since=$SECONDS worked=$ended$clock; fi
    if [ $((SECONDS - waits_since)) -gt "${PATIENCE%.*}" ]; then
        role=trainer; [ "$ended" = " orchestrator" ] || role=orchestrator
        dead $role 3 "did not end in $PATIENCE s after the last version (orchestrator.version_timeout)"
    fi
    if [ -n "$tracker" ] && is_dead "$tracker"; then
        echo "warning: the tracker ended, see $LOGS/tracker.log; later: python configs/lib/track.py $RUN_DIR $TRACKER" >&2
        tracker=''
    fi
    now=$(wc -l 2>/dev/null <"$RUN_DIR/eval.jsonl") # a picture after each evaluation
    if [ "${now:-0}" -gt "$evals" ] && [ -f tools/plot.py ]; then
        start plot nice timeout 120 "$PY" tools/plot.py "$RUN_DIR"
        plot=${PID[plot]}
        unset 'PID[plot]'
    fi
    evals=${now:-0} version=$(reached)
    if [ "$version" -ge 0 ] && [ -z "$since" ]; then
        since=$SECONDS from=$version
        [ -z "${ROLEMODEL_P2P:-}" ] || echo "check: PASS the broadcast over NCCL works with NCCL_P2P_DISABLE=$NCCL_P2P_DISABLE, not with $ROLEMODEL_P2P: export it"
    fi
    if [ -t 1 ] && [ "$version" -gt "${from:-$version}" ]; then
        left=$(((STEPS - version) * (SECONDS - since) / (version - from)))
        bar=$(printf '%*s' $((version * 30 / STEPS)) '' | tr ' ' '#')
        printf '\r[%-30s] %d/%d  %d s, %d:%02d left \r' "$bar" "$version" "$STEPS" $((SECONDS - begun)) $((left / 60)) $((left % 60))
    fi
done
