#!/usr/bin/env bash
# bash tests/run.sh            sets up .venv, as launch.sh does, and runs every test but the long ones: 5 minutes on 2 cores
# bash tests/run.sh --fast     without the real vLLM and without whole runs
# bash tests/run.sh --all      with learning runs, the whole kill matrix and all model families, one at a time: hours
# Further words go to pytest: bash tests/run.sh -k trainer
set -eu
CDPATH= cd -- "$(dirname -- "$0")/.."
bash launch.sh --setup
PY=.venv/bin/python
[ -x "$PY" ] || PY=python3
export OMP_NUM_THREADS=1
if [ "${1:-}" = --fast ]; then
    shift
    set -- -m "not real and not slow" "$@"
fi
case " $* " in *" --all "*) together=0 ;; *) together=2 ;; esac
exec "$PY" -m pytest -q tests -n $together --dist loadfile --no-loadscope-reorder "$@"
