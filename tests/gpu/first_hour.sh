#!/usr/bin/env bash
# bash tests/gpu/first_hour.sh [--model-dir DIR]     what can be known in an hour with one GPU of 48 GB or more
# Every step goes on when another fails. The report is outputs/first_hour.md: please send it, whatever it says.
# --model-dir: a directory with Qwen3-0.6B and Qwen3-0.6B-Reverse-Text-SFT, for machines without the Hugging Face hub
set -eu
CDPATH= cd -- "$(dirname -- "$0")/../.."
bash launch.sh --setup
PY=.venv/bin/python
[ -x "$PY" ] || PY=python3
exec "$PY" tests/gpu/first_hour.py "$@"
