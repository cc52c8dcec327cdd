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

import trainer


def shapes(layers, hidden, inner, heads, kv, vocab):
    """Names and shapes of a Qwen3 with tied embeddings."""
    yield "model.embed_tokens.weight", (vocab, hidden)
    for i in range(layers):
        for name, shape in {
            "self_attn.q_proj": (heads * 128, hidden), "self_attn.k_proj": (kv * 128, hidden),
            "self_attn.v_proj": (kv * 128, hidden), "self_attn.o_proj": (hidden, heads * 128),
            "self_attn.q_norm": (128,), "self_attn.k_norm": (128,), "mlp.gate_proj": (inner, hidden),
            "mlp.up_proj": (inner, hidden), "mlp.down_proj": (hidden, inner), "input_layernorm": (hidden,),
            "post_attention_layernorm": (hidden,),
        }.items():  # fmt: skip
            yield f"model.layers.{i}.{name}.weight", shape
    yield "model.norm.weight", (hidden,)


ADAPTERS = ("LoRA",)


def adapters(rank=16):
    """A and B of every linear layer of the 4B shape, under names of that kind."""
    for name, shape in shapes(36, 2560, 9728, 32, 8, 1):
        if "proj" in name:
            yield f"{name}.lora_A", (rank, shape[1])
            yield f"{name}.lora_B", (shape[0], rank)


def make_groups(*shape):
    """bf16 tensors in groups of a layer, as trainer.stream_weights yields them; 8 GB for a 4B model."""
    groups = {}
    for name, size in adapters() if shape == ADAPTERS else shapes(*shape):
        tensor = torch.ones(size, dtype=torch.bfloat16)
        groups.setdefault(name.split("layers.")[-1].partition(".")[0], {})[name] = tensor
    return list(groups.values())


def copy(rank, port, size):
    """A plain broadcast of `size` bytes in 256 MiB parts, into memory touched before, between two processes -> s."""
    store = dist.TCPStore("127.0.0.1", port, 2, rank == 0, timedelta(seconds=60))
    group = trainer.make_group(store, rank, {"backend": "gloo", "size": 2, "timeout_s": 60})
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
    large = (8, 1024, 3072, 16, 8, 32000) if quick else (36, 2560, 9728, 32, 8, 151936)
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
            for shape in ((4, 128, 384, 1, 1, 102), ADAPTERS, large):
                syncs, copies, paused = [], [], []
                note_pauses(sender, paused)
                for version in range(7):
                    groups = make_groups(*shape)  # just written, as in a run
                    size = sum(tensor.nbytes for group in groups for tensor in group.values())
                    copies.append(plain(size))
                    trainer.stream_weights = lambda *_, groups=groups: iter(groups)
                    began = time.perf_counter()
                    trainer.send_weights(sender, SimpleNamespace(model=None), version, cfg)
                    syncs.append(time.perf_counter() - began)
                sync, copied = statistics.median(syncs), statistics.median(copies)
                what = "a LoRA adapter of rank 16 for 4B" if shape == ADAPTERS else f"{size / 2e9:.1g}B parameters"
                rows.append(row(f"broadcast, {what}", sync, "s"))
                if shape == large:
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
