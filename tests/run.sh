#!/usr/bin/env bash
# bash tests/run.sh            sets up .venv, like launch.sh, and runs all but the long tests: 5 minutes on 2 cores
# bash tests/run.sh --fast     skips the tests that need the real vLLM or start whole runs
# bash tests/run.sh --all      also runs the long ones, one at a time, for hours: learning runs, all model families, and
#                              kills of each process at each point of a run
# All other arguments go to pytest: bash tests/run.sh -k trainer
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
