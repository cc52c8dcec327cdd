#!/usr/bin/env bash
# bash tests/nullgpu/run.sh [word ...]     rehearses runs on null GPUs; only cases whose name has one of the words
# On first use it sets up .nullgpu/ (16 GB, a quarter of an hour). README.md says what it shows, and what it cannot.
set -euo pipefail
cd "$(dirname "$0")/../.."
tree=$PWD/.nullgpu/tree libraries=$PWD/.nullgpu/libraries
mkdir -p "$tree" "$libraries"

# A copy of the working tree with a .venv of its own: the environment is spoiled for a real GPU.
git ls-files -co --exclude-standard | grep -v '^\.nullgpu' | tar cf - --ignore-failed-read -T - 2>/dev/null | tar xf - -C "$tree"
KIND=gpu bash "$tree/launch.sh" --setup
python=$tree/.venv/bin/python
site=$("$python" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')
if ! grep -q '^cuda.*= .[0-9]' "$site/torch/version.py"; then # an index with builds for CPUs came first
    "$python" -m pip install -q "torch===$(grep -oP '^torch==\K\S+' requirements-gpu.txt)"
fi

# The libraries, in the place of NVIDIA's: torch's own search path comes before LD_LIBRARY_PATH.
if [ ! -e "$libraries/libcuda.so" ] || [ -n "$(find tests/nullgpu/libraries tests/nullgpu/build.py -newer "$libraries/libcuda.so")" ]; then
    "$python" tests/nullgpu/build.py "$site" "$libraries"
fi
for file in "$site"/nvidia/cu13/lib/lib{cudart,cublas,cublasLt}.so.13 "$site"/nvidia/nccl/lib/libnccl.so.2 \
    "$site"/nvidia/cudnn/lib/libcudnn.so.9 "$site"/torchvision.libs/libcudart.*.so.13; do
    name=${file##*/}
    [ "${name#libcudart.}" = "$name" ] || name=libcudart.so.13
    ln -sfn "$libraries/$name" "$file"
done
exec "$python" "$tree/tests/nullgpu/rehearse.py" "$PWD/.nullgpu" "$@"
