"""Brings a model from the Hugging Face hub into its cache, before the servers and the trainer look for it there."""

from pathlib import Path

from huggingface_hub import constants, snapshot_download
from tqdm import tqdm

from configs.runtime.role import heartbeat

FILES = ["*.safetensors", "*.json", "*.jinja", "*.model", "*.txt"]


class Progress(tqdm):
    """Bytes that arrive are progress for the launcher's watchdog."""

    def update(self, num=1):
        heartbeat()
        return super().update(num)


def download(model):
    """Waits until all of its files are there. A directory is left alone, and without a network so is the cache."""
    if not Path(model).is_dir() and not constants.HF_HUB_OFFLINE:
        snapshot_download(model, allow_patterns=FILES, tqdm_class=Progress)
