#!/usr/bin/env bash
# bash tests/run.sh            sets up (.venv, like launch.sh) and runs every test but the learning runs
# bash tests/run.sh --fast     without the real vLLM: at most 90 s on 2 cores
# bash tests/run.sh --all      the learning runs, the whole kill matrix and the soak too, one at a time: 90 minutes more
# bash tests/run.sh --newest   what needs the real vLLM, in .newest/ with the newest versions that go together
set -eu
cd "$(dirname "$0")/.."
if [ "${1:-}" = --newest ]; then
    shift
    mkdir -p .newest
    git ls-files -co --exclude-standard | tar cf - -T - | tar xf - -C .newest
    cd .newest
    python3 -m venv .venv
    sed '/^verifiers/!s/==[^ ]*//' requirements-cpu.txt >unpinned.txt # the adapter is for verifiers 0.1
    .venv/bin/python -m pip install -q -U -r unpinned.txt
    .venv/bin/python -m pip uninstall -q -y torchvision torchaudio torchcodec # they need CUDA
    .venv/bin/python -m pip freeze >frozen.txt
    diff <(grep -oE '^[a-z0-9_-]+==[^ ]+' requirements-cpu.txt | sort) \
        <(sed 's/+.*//; s/_/-/g' frozen.txt | grep -xiE "($(grep -oE '^[a-z0-9_-]+' unpinned.txt | paste -sd '|'))==.*" | sort) ||
        echo "[newest] < pinned, > newest"
    cp requirements-cpu.txt .venv/requirements.txt # launch.sh takes it for what is pinned
    set -- -m real "$@"
fi
bash launch.sh --setup
PY=.venv/bin/python
[ -x "$PY" ] || PY=python3
export OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE=1
if [ "${1:-}" = --fast ]; then
    shift
    exec "$PY" -m pytest -q tests -m "not real and not slow" "$@"
fi
case " $* " in *" --all "*) together=0 ;; *) together=3 ;; esac # on 2 cores: a fifth of the time is spent waiting
exec "$PY" -m pytest -q tests -n $together --dist loadfile --no-loadscope-reorder "$@"
