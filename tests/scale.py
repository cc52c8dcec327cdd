"""How the parts that no GPU makes faster grow: python tests/scale.py orchestrator|batch|sync [number ...]

    orchestrator 64 128 256   rollouts of 8,000 tokens, against a server that answers at once
    batch 1024 4096           sequences of 8,000 tokens: written, read, cut into trees, put into micro-batches
    sync 1 2 4                billions of parameters in bf16, over gloo to one receiver that drops them

A line for each number: seconds of one core or of the clock, and the peak memory of the process. A maintainer's program:
no test depends on it, and docs/speed.md has its table."""

import asyncio
import json
import multiprocessing
import os
import resource
import sys
import tempfile
import time
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

sys.path[:0] = [str(Path(__file__).resolve().parent), str(Path(__file__).resolve().parent.parent)]

TOKENS = 8000  # of a sequence; the first 500 are its group's
GROUP = 16
PROMPT = 500


def forked(work, *args):
    """Calls work in a process of its own. Returns its result with core_s and peak_mb, of that process alone."""

    def run(pipe):
        began = time.perf_counter()
        found = work(*args) or {}
        used = resource.getrusage(resource.RUSAGE_SELF)
        found |= {"s": time.perf_counter() - began, "core_s": used.ru_utime + used.ru_stime}
        pipe.send(found | {"peak_mb": used.ru_maxrss / 1024})

    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("fork").Process(target=run, args=(theirs,))
    process.start()
    theirs.close()
    found = ours.recv()
    process.join()
    return found


# --- the orchestrator alone -------------------------------------------------------------------------------------------


def serve(pipe):
    """A server that answers every chat completion with the same tokens."""
    from aiohttp import web

    token = {"token": " hello", "logprob": -1.2345678, "bytes": [*b" hello"], "top_logprobs": []}
    choice = {"message": {"role": "assistant", "content": " hello" * TOKENS}, "finish_reason": "stop"}
    choice |= {"logprobs": {"content": [token] * TOKENS}, "token_ids": [*range(TOKENS)], "stop_reason": None}
    body = json.dumps({"prompt_token_ids": [*range(PROMPT)], "choices": [choice]}).encode()

    async def answer(request):
        await request.read()
        return web.Response(body=body, content_type="application/json")

    async def start():
        app = web.Application()
        app.router.add_post("/v1/chat/completions", answer)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        pipe.send(site._server.sockets[0].getsockname()[1])
        await asyncio.Event().wait()

    asyncio.run(start())


def sample(num, port):
    import orchestrator
    from rolemodel.config import load_config
    from rolemodel.run_directory import run_directory

    with tempfile.TemporaryDirectory() as tmp:
        config = Path(tmp, "scale.toml")
        config.write_text(
            f'model = "none"\noutput_dir = "{tmp}"\n[env]\nid = "think_env"\nargs = {{ kind = "noise" }}\n'
        )
        words = ["max_steps=2", f"orchestrator.batch_size={num}", "orchestrator.max_concurrent=64", "max_seq_len=16384"]
        words += [f'inference.urls=["http://127.0.0.1:{port}"]', "orchestrator.sampling.max_tokens=8192"]
        cfg = load_config(str(config), words)
        (run_directory(cfg) / "version").write_text("2")
        asyncio.new_event_loop().run_until_complete(orchestrator.run(cfg))


def measure_orchestrator(num):
    ours, theirs = multiprocessing.Pipe()
    server = multiprocessing.get_context("fork").Process(target=serve, args=(theirs,), daemon=True)
    server.start()
    found = forked(sample, num, ours.recv())
    server.kill()
    return found | {"sampled tokens per core-second": 2 * num * TOKENS / found["core_s"]}


# --- a batch ----------------------------------------------------------------------------------------------------------


def make(path, num):
    """Writes a batch. Returns the seconds that save_batch took."""
    import numpy as np

    import orchestrator

    draw = np.random.default_rng(0)
    prompts = draw.integers(0, 32000, (num // GROUP, PROMPT))
    names = ("temperature", "reward", "slot", "member", "example", "attempt", "version", "staleness", "share")
    info = dict.fromkeys(names, 1.0)
    sequences = []
    for i in range(num):
        tokens = np.concatenate((prompts[i // GROUP], draw.integers(0, 32000, TOKENS - PROMPT)))
        mask = np.arange(TOKENS) >= PROMPT
        values = np.full(TOKENS, -1.0)
        s = orchestrator.Sequence(tokens, mask, values, np.zeros(TOKENS), values, info=info)
        sequences.append(orchestrator.to_arrays(s))
    began = time.perf_counter()
    orchestrator.save_batch(path, sequences, {"max_tokens": TOKENS, "metrics": {}})
    return {"save_s": time.perf_counter() - began}


def read(path):
    """What the trainer does with a batch before its first forward, as one of eight ranks."""
    import torch
    import torch.distributed as dist

    import trainer
    from rolemodel import trees

    seconds = {}
    began = time.perf_counter()

    def passed(name):
        nonlocal began
        seconds[name] = time.perf_counter() - began
        began = time.perf_counter()

    batch = trainer.load_batch(path)
    passed("load_s")
    costs = trees.Costs(0.0, 0.0, 0.0, 1e9)
    trees.cut_into_trees(batch.fields["tokens"].split(batch.lens), [*range(len(batch.lens))], 1 << 17, costs)
    passed("trees_s")
    dist.get_rank, dist.get_world_size = (lambda: 0), (lambda: 8)

    policy = SimpleNamespace(tree_costs=costs, device=torch.device("cpu"))
    run, t = SimpleNamespace(max_seq_len=16384), SimpleNamespace(micro_batch_size=8)
    micros = trainer.make_micros(batch, [*range(len(batch.lens))], SimpleNamespace(run=run, trainer=t), policy)
    passed("micros_s")
    return seconds | {"micros": len(micros)}


def measure_batch(num):
    with tempfile.TemporaryDirectory() as tmp:
        path = Path(tmp, "batches", "step_000000.safetensors")
        path.parent.mkdir()
        saved = forked(make, path, num)
        found = forked(read, path)
        return {
            "file_mb": path.stat().st_size / 2**20,
            "save_s": saved["save_s"],
            "save_peak_mb": saved["peak_mb"],
        } | found


# --- a sync -----------------------------------------------------------------------------------------------------------


def receive(host, port):
    import trainer

    class Receiver(trainer.WeightReceiver):
        rank = 0

        def reload_weights(self, weights_iterator):
            self.num_bytes = sum(w.numel() * w.element_size() for _, w in weights_iterator)

    receiver = Receiver()
    spec = {
        "backend": "gloo",
        "timeout_s": 300,
        "size": 2,
        "adapter": None,
        "host": host,
        "port": port,
        "first_rank": 1,
    }
    receiver.join_weight_group(spec)
    receiver.receive_weights(spec)
    return {"num_bytes": receiver.num_bytes}


def send(billions, pipe):
    import torch
    import torch.distributed as dist
    import transformers

    import trainer

    hidden = 2560
    per_layer = hidden * hidden * 4 + 3 * hidden * 9728
    num_layers = round(billions * 1e9 / per_layer)
    config = transformers.Qwen3Config(hidden_size=hidden, intermediate_size=9728, num_attention_heads=20, head_dim=128,
                                      num_hidden_layers=num_layers, num_key_value_heads=20,
                                      vocab_size=1024)  # fmt: skip
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model = model.to_empty(device="cpu")
    for p in model.parameters():
        p.detach().fill_(0.01)

    class Sender(trainer.WeightSender):
        def __init__(self):
            self.store = dist.TCPStore("127.0.0.1", 0, is_master=True)
            self.device = torch.device("cpu")
            self.urls = ["none"]
            self.cfg = SimpleNamespace(sends_adapters=False)

        def post_all(self, path, body=None):
            pass

        def while_workers_run(self, method, specs):
            return nullcontext()

    sender = Sender()
    pipe.send(sender.store.port)
    sender.group = trainer.make_process_group(sender.store, 0, {"backend": "gloo", "timeout_s": 300, "size": 2})
    began = time.perf_counter()
    sender.send(trainer.stream_weights(model, torch.bfloat16, False), 1)
    seconds = time.perf_counter() - began
    num = sum(p.numel() for p in model.parameters())
    return {"sync_s": seconds, "gb_per_s": 2 * num / 1e9 / seconds, "weights_mb": 2 * num / 2**20}


def measure_sync(billions):
    from threading import Thread

    ours, theirs = multiprocessing.Pipe()
    found = {}
    sender = Thread(target=lambda: found.update(forked(send, billions, theirs)))
    sender.start()
    received = forked(receive, "127.0.0.1", ours.recv())
    sender.join()
    return found | {"receiver_peak_mb": received["peak_mb"]}


def main(argv):
    os.environ.setdefault("ROLEMODEL_RUN_ID", "scale")
    what, *numbers = argv
    measure = {"orchestrator": measure_orchestrator, "batch": measure_batch, "sync": measure_sync}[what]
    default = {"orchestrator": [64, 128, 256], "batch": [1024, 2048, 4096], "sync": [1, 2, 4]}[what]
    for number in map(int, numbers or default):
        found = {name: float(f"{value:.3g}") for name, value in measure(number).items()}
        print(json.dumps({what: number} | found), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
