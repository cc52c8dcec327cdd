# Sourced by launch.sh: how a role is started, how all of them are ended, and what is said about it.
# Uses its PID, TAG, SCRATCH, CONSOLE, RUN_DIR, LOGS, PY, GIVEN.

# Signals whatever carries the tag in its environment, and, in the sessions of the roles, what has overwritten the start
# of its own (vLLM's engine does, by the title that it gives itself).
sweep() { # signal, tag, scratch
    local pids pid session
    for _ in 1 2 3 4 5; do
        mapfile -t pids < <(grep -lszxF "ROLEMODEL_TAG=$2" /proc/[0-9]*/environ | cut -d/ -f3
            [ ! -f "$3/sessions" ] || while read -r session began; do # began: pids come round again
                [ ! -d "/proc/$session" ] || [ "$(cut -d' ' -f22 "/proc/$session/stat")" = "$began" ] || continue
                grep -lsE "^[0-9]+ \(.*\) [^Z] [0-9]+ [0-9]+ $session " /proc/[0-9]*/stat | cut -d/ -f3 | while read -r pid; do
                    [ -n "$(head -c 1 "/proc/$pid/environ" 2>/dev/null | tr -d '\0')" ] || echo "$pid"
                done
            done <"$3/sessions")
        [ ${#pids[@]} -eq 0 ] && return
        kill -"$1" "${pids[@]}" 2>/dev/null
        [ "$1" = KILL ] || return 0
        sleep 0.1
    done
}
start() { # role, command... in a process group of its own
    local role=$1; shift
    echo "=== $(date -Is) $*" | sed -E 's/((key|token|secret|password)[= ])[^ ]+/\1REDACTED/gI' >>"$LOGS/$role.log"
    setsid env ROLEMODEL_TAG="$TAG" TMPDIR="$SCRATCH" PYTHONFAULTHANDLER=1 "$@" >>"$LOGS/$role.log" 2>&1 8>&- 9>&- &
    PID[$role]=$!
    echo "$! $(cut -d' ' -f22 "/proc/$!/stat")" >>"$SCRATCH/sessions"
}
reached() { cat "$RUN_DIR/version" 2>/dev/null || echo -1; }
is_dead() { # pid; also where its parent has not noticed
    local stat
    ! { read -r stat <"/proc/$1/stat"; } 2>/dev/null || [[ ${stat##*) } = [ZX]* ]]
}
finish() { # code, last line
    local code=$1 last=$2 version name alive
    trap 'echo "$last" >&2; sweep KILL "$TAG" "$SCRATCH"; exit $code' INT TERM HUP # the second Ctrl-C
    [ -z "${CONSOLE:-}" ] || kill "$CONSOLE" 2>/dev/null
    [ -z "${tracker:-}" ] || ! kill -TERM "$tracker" 2>/dev/null || timeout 8 tail --pid="$tracker" -f /dev/null # sends what it has
    if [ "$code" = 3 ]; then sweep ABRT "$TAG" "$SCRATCH"; sweep CONT "$TAG" "$SCRATCH" # stacks of all threads into the logs
    else for name in "${!PID[@]}"; do kill -TERM -- "-${PID[$name]}" 2>/dev/null; done; fi
    { for _ in $(seq 50); do
        alive=0
        for name in "${!PID[@]}"; do kill -0 -- "-${PID[$name]}" && alive=1; done
        [ $alive = 1 ] || break
        sleep 0.1
    done
    sweep KILL "$TAG" "$SCRATCH"; sleep 0.1; } 2>/dev/null # bash tells of each that it was killed
    [ "$code" = 0 ] && echo "${clear:-}$last" || echo "${clear:-}$last" >&2
    [ -z "${p2p:-}" ] || NCCL_P2P_DISABLE=$p2p exec bash "$ROOT/launch.sh" "${GIVEN[@]}" 8>&- 9>&-
    if [ "$code" = 3 ] && [ "${MAX_RESTARTS:-0}" -gt 0 ] && version=$(reached) && [ "$version" -gt "${ROLEMODEL_REACHED:--1}" ]; then
        echo "[launch] restart after version $version, $((MAX_RESTARTS - 1)) left" >&2
        ROLEMODEL_REACHED=$version MAX_RESTARTS=$((MAX_RESTARTS - 1)) exec bash "$ROOT/launch.sh" "${GIVEN[@]}" 8>&- 9>&-
    fi
    exit "$code"
}
attempt() { tac "$LOGS/$1.log" | sed '/^=== /q' | tac; } # a role's log since it was started last
dead() { # role, exit status [, cause]: what the role that failed first told, else how this one ended
    local role=$1 code=$2 cause=${3:-} pid=${PID[$1]} name killed
    if [ -n "$cause" ]; then code=3
    elif grep -qs '"role"' "$ROLEMODEL_EXIT_FILE" && [[ $role != inference* || $code -lt 128 ]]; then
        eval "$("$PY" configs/lib/for_launch.py --exit "$ROLEMODEL_EXIT_FILE")"
        [ "$role" = prepare ] || role=$name
    elif [ "$code" -gt 128 ] && [ "$code" -lt 165 ]; then cause="killed by SIG$(kill -l $((code - 128)))" code=3
    elif [[ $role = inference* && $code = 2 ]]; then cause="refused its arguments, see [inference.args]"
    else cause="ended with status $code before the run was done" code=3; fi
    killed=$(attempt "$role" | grep -m 1 -oE 'exitcode *: -[0-9]+ \(pid: [0-9]+\)') && cause="a rank was killed, $killed; $cause" # torchrun tells
    echo >&2
    attempt "$role" | tail -n 30 >&2
    [[ ${cause,,} != *"first broadcast over "*nccl* ]] || other_p2p
    finish "$code" "[launch] role=$role pid=$pid exit=$code $cause log=$LOGS/$role.log"
}
other_p2p() { # sets p2p, for finish: NCCL reads NCCL_P2P_DISABLE once per process, so the other value needs new ones
    local now=${NCCL_P2P_DISABLE:-0}
    if [ -n "${NNODES:-}" ] || [ "$INF_GPUS" = 0 ]; then # there is more to start again than what this started
        echo "check: FAIL the first broadcast over NCCL; export NCCL_P2P_DISABLE=1 (it is $now) everywhere, or set trainer.sync_backend" >&2
    elif [ -n "${ROLEMODEL_P2P:-}" ]; then
        echo "check: FAIL NCCL works neither with NCCL_P2P_DISABLE=0 nor 1: trainer.sync_backend = \"gloo\" goes through host memory" >&2
    else
        export ROLEMODEL_P2P=$now
        p2p=1; [ "$now" = 0 ] || p2p=0
        echo "[launch] again, with NCCL_P2P_DISABLE=$p2p" >&2
    fi
}
trap 'finish 130 "[launch] exit=130 interrupted"' INT
trap 'finish 143 "[launch] exit=143 terminated"' TERM
trap 'finish 129 "[launch] exit=129 hung up"' HUP
