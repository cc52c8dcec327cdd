#!/usr/bin/env bash
# bash tests/run.sh          sets up (.venv, like launch.sh) and runs every test but the learning runs
# bash tests/run.sh --fast   without the real vLLM: at most 90 s on 2 cores
# bash tests/run.sh --all    the learning runs, the whole kill matrix and the soak too, one at a time: 90 minutes more
set -eu
cd "$(dirname "$0")/.."
bash launch.sh --setup
PY=.venv/bin/python
[ -x "$PY" ] || PY=python3
export OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE=1
if [ "${1:-}" = --fast ]; then
    shift
    exec "$PY" -m pytest -q tests -m "not real and not slow" "$@"
fi
case " $* " in *" --all "*) together=0 ;; *) together=2 ;; esac
exec "$PY" -m pytest -q tests -n $together --dist loadfile --no-loadscope-reorder "$@"
