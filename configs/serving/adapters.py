"""LoRA adapters as PEFT writes them: what vLLM loads beside the running model, and what final/ of a LoRA run is.

In 16 bits LoRA goes to the servers this way: merged into 16-bit weights, early updates would be rounded away. Each
version has an adapter of its own name, so that a rollout may go on with the one it began with."""

import json
import shutil
from pathlib import Path

from safetensors.torch import save_file

from configs import served_name


def write(path, tensors, t, model, old=None):
    """Writes an adapter directory, and removes an old one. t: the [trainer] table as a dict. tensors have the names of
    the checkpoint, by which vLLM finds its modules; it says nothing if it finds none."""
    path = Path(path)
    if old:  # by now vLLM has it in memory, if any request can name it at all
        shutil.rmtree(old, ignore_errors=True)
    path.mkdir(parents=True, exist_ok=True)
    renamed = {f"base_model.model.{name}": tensor.contiguous() for name, tensor in tensors.items()}
    save_file(renamed, path / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": model,
        "bias": "none",
        "r": t["lora_rank"],
        "lora_alpha": t["lora_alpha"],
        "lora_dropout": t["lora_dropout"],
        "target_modules": t["lora_target_modules"],
    }
    (path / "adapter_config.json").write_text(json.dumps(config))


def directory(run_dir, version, cfg):
    return run_dir.absolute() / "adapters" / served_name(cfg, version)


def no_longer_named(run_dir, version, cfg):
    """The directory of the newest adapter that no request can name once this version is live."""
    return directory(run_dir, version - cfg.orchestrator.max_staleness - 2, cfg)


def load(sender, version, cfg):
    """Makes the servers load a version's adapter, and drop the one that no request can name any more."""
    path = directory(sender.run_dir, version, cfg)
    old = no_longer_named(sender.run_dir, version, cfg)
    for url in sender.urls:
        for name in (old.name, path.name):  # a trainer before this one may have loaded the second; 404 if not
            sender.http.post(f"{url}/v1/unload_lora_adapter", json={"lora_name": name})
    # Not "load_inplace", with which vLLM 0.32 reads the file again at each of its steps.
    sender.post_all("/v1/load_lora_adapter", {"lora_name": path.name, "lora_path": str(path)})
