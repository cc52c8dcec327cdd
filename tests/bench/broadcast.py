"""The weight broadcast of trainer.py over gloo on the loopback, to a server that discards what it gets.

python broadcast.py [--quick]"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

from common import config, make_model, row, tell

os.environ |= {"OMP_NUM_THREADS": "1", "FAKE": json.dumps({"discard": True}), "ROLEMODEL_RUN_ID": "real"}
# as in launch.sh
os.environ |= {"THP_MEM_ALLOC_ENABLE": "1", "MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": "4000000000"}

import conftest  # starts and stops servers
import torch
import torch.distributed as dist
from transformers import Qwen3Config, Qwen3ForCausalLM

import trainer


def make_groups(size, lora=False):
    """bf16 tensors of a Qwen3 in groups of a layer, as trainer.stream_weights yields them; 8 GB for a 4B model."""
    layers, hidden, inner, heads, kv, vocab = size
    with torch.device("meta"):
        model = Qwen3ForCausalLM(Qwen3Config(
            num_hidden_layers=layers, hidden_size=hidden, intermediate_size=inner, num_attention_heads=heads,
            num_key_value_heads=kv, head_dim=128, vocab_size=vocab, tie_word_embeddings=True,
        ))  # fmt: skip
    groups = {}
    for name, w in model.named_parameters():
        group = groups.setdefault(name.split("layers.")[-1].partition(".")[0], {})
        if not lora:
            group[name] = torch.ones(w.shape, dtype=torch.bfloat16)
        elif "proj" in name:
            group[f"{name}.lora_A"] = torch.ones(16, w.shape[1], dtype=torch.bfloat16)
            group[f"{name}.lora_B"] = torch.ones(w.shape[0], 16, dtype=torch.bfloat16)
    return [group for group in groups.values() if group]


def copy(rank, port, size):
    """A plain broadcast of `size` bytes in 256 MiB parts, into memory touched before, between two processes -> s."""
    store = dist.TCPStore("127.0.0.1", port, 2, rank == 0, timedelta(seconds=60))
    group = trainer.make_process_group(store, rank, {"backend": "gloo", "size": 2, "timeout_s": 60})
    part = torch.ones(min(256 << 20, size), dtype=torch.uint8)
    group.broadcast(part, 0).wait()
    began = time.perf_counter()
    for sent in range(0, size, len(part)):
        group.broadcast(part[: size - sent], 0).wait()
    return time.perf_counter() - began


def plain(size):
    port = conftest.free_port()
    other = subprocess.Popen([sys.executable, __file__, "copy", str(port), str(size)])
    seconds = copy(0, port, size)
    assert other.wait(60) == 0
    return seconds


def note_pauses(sender, paused):
    """Puts into `paused` the seconds from a pause's reply to the call that resumes."""
    honest = sender.post_all

    def post_all(path, body=None):
        if path == "/resume":
            paused.append(time.perf_counter() - paused.pop())
        reply = honest(path, body)
        if path.startswith("/pause"):
            paused.append(time.perf_counter())
        return reply

    sender.post_all = post_all


def main(quick):
    torch.set_num_threads(1)
    dist.init_process_group(store=dist.HashStore(), rank=0, world_size=1)
    rows = []
    small, whole = (4, 128, 384, 1, 1, 102), (36, 2560, 9728, 32, 8, 151936)
    large = (8, 1024, 3072, 16, 8, 32000) if quick else whole
    cases = [("0.001B parameters", small, False), ("a LoRA adapter of rank 16 for 4B", whole, True)]
    cases.append(("0.2B parameters" if quick else "4B parameters", large, False))
    with tempfile.TemporaryDirectory() as place:
        place = Path(place)
        model = make_model(place / "model", "0.8M")
        log, port = place / "server.log", conftest.free_port()
        command = [sys.executable, "tests/fake_vllm.py", "--model", model, "--port", port]
        command += ["--served-model-name", "real", "--dtype", "bfloat16", "--max-model-len", "512"]
        server = conftest.start([str(x) for x in command], log)
        try:
            conftest.wait_for(f"http://127.0.0.1:{port}", server, log)
            url = f'inference.urls=["http://127.0.0.1:{port}"]'
            cfg = config(place, model, url, "trainer.dtype=bf16", "trainer.max_sync_dlogp=1e9")
            (place / "bench").mkdir()
            sender = trainer.WeightSender(cfg, place / "bench", torch.device("cpu"))
            sender.connect()
            for what, shape, lora in cases:
                syncs, copies, paused = [], [], []
                note_pauses(sender, paused)
                for version in range(7):
                    groups = make_groups(shape, lora)  # just written, as in a run
                    size = sum(tensor.nbytes for group in groups for tensor in group.values())
                    copies.append(plain(size))
                    trainer.stream_weights = lambda *_, groups=groups: iter(groups)
                    began = time.perf_counter()
                    trainer.send_weights(sender, SimpleNamespace(model=None), version, cfg)
                    syncs.append(time.perf_counter() - began)
                sync, copied = statistics.median(syncs), statistics.median(copies)
                rows.append(row(f"broadcast, {what}", sync, "s"))
                if (shape, lora) == (large, False):
                    rows.append(row(f"broadcast, {what}: times a plain copy over gloo", sync / copied, "x", "<= 1.5"))
                    rows.append(row(f"broadcast, {what}: rate", size / sync / 1e9, "GB/s"))
                    paused_s = statistics.median(paused)
                    rows.append(row(f"broadcast, {what}: s in which the server is paused", paused_s, "s"))
        finally:
            conftest.stop(server)
    tell(rows)


if __name__ == "__main__":
    if sys.argv[1:2] == ["copy"]:
        copy(1, int(sys.argv[2]), int(sys.argv[3]))
    else:
        main("--quick" in sys.argv)
