"""What only a real GPU can show, in words: each check says what it rests on, and what is wrong if it fails.

    python tests/gpu/values.py            # one GPU; with two or more NCCL is checked as well

A null GPU (tests/nullgpu/) shows that these lines run; nothing is computed there, so each check says SKIP."""

import json
import os
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
from configs import load_config
from configs.models import toy
from configs.runtime.machine import choose_ports
from trainer import (
    apply_gradients,
    build_policy,
    check_policy,
    collate,
    make_process_group,
    receive_blocks,
    send_block,
    start_distributed,
)

IS_NULL = bool(os.environ.get("NULLGPU_COUNT"))
CONFIG = """model = "{model}"
max_seq_len = 256
[env]
id = "reverse_text"
[orchestrator]
batch_size = 16
rollouts_per_example = 8
[orchestrator.sampling]
max_tokens = 64
[trainer]
gradient_checkpointing = true
lora_target_modules = ["q_proj", "o_proj", "down_proj"]
"""


def tell(is_right, what, wrong=""):
    """Prints a line, and returns whether it is right."""
    if IS_NULL:
        print(f"values: SKIP {what}: this GPU computes nothing", flush=True)
        return True
    print(f"values: {'PASS' if is_right else 'FAIL'} {what}{'' if is_right else f': {wrong}'}", flush=True)
    return is_right


# --- NCCL -------------------------------------------------------------------------------------------------------------


def join(rank, port, device):
    """One end of a sync's process group, as WeightSender and WeightReceiver make it."""
    store = dist.TCPStore("127.0.0.1", port, is_master=rank == 0)
    spec = {"backend": "nccl", "timeout_s": 60, "size": 2}
    return SimpleNamespace(store=store, process_group=make_process_group(store, rank, spec), device=device)


def blocks(num, device):
    """Tensors whose every value says which block they belong to, from 8 bytes to 256 MiB."""
    for number in range(num):
        sizes = (4, 1000, 1 << 20, 1 << 27)
        yield {
            f"{number}.{size}": torch.full([size], number % 100, dtype=torch.bfloat16, device=device) for size in sizes
        }


def nccl_worker(rank, port, num, found):
    torch.cuda.set_device(rank)
    end = join(rank, port, torch.device("cuda", rank))
    if rank == 0:
        for number, tensors in enumerate(blocks(num, end.device)):
            send_block(end, number, tensors)
            tensors.clear()  # the next block may take their memory while NCCL still reads it, if the order is wrong
        send_block(end, num, {})
        torch.cuda.synchronize()
        end.store.wait(["done"])  # the store ends with this process
        return
    wrong = 0
    target = torch.empty(1 << 27, dtype=torch.bfloat16, device=end.device)
    for name, tensor in receive_blocks(end, end.device):
        number = int(name.split(".")[0])
        part = target[: len(tensor)]
        part.copy_(tensor)  # what reload_weights does: on the current stream, at once
        wrong += (part != number % 100).any()
    found.put(int(wrong))
    end.store.set("done", "")


def check_nccl(num=64):
    """The order of streams. Rests on: dist._broadcast_coalesced waits for its own works, which makes the current stream
    wait for NCCL's (ProcessGroupNCCL.cpp, WorkNCCL::synchronize), and keeps what it sends alive; vLLM runs
    /collective_rpc on the worker's main thread and current stream (v1/executor/uniproc_executor.py, collective_rpc),
    where reload_weights then copies (model_loader/reload/layerwise.py, _copy_and_restore_kernel_tensors)."""
    what = f"NCCL: {num} blocks arrive whole and in order, and are read after they have arrived"
    if torch.cuda.device_count() < 2:
        print(f"values: SKIP {what}: one GPU", flush=True)
        return True
    context = torch.multiprocessing.get_context("spawn")
    found = context.Queue()
    (port,) = choose_ports(SimpleNamespace(urls=[], gpus=1, args={"tensor_parallel_size": 1}, port=0))
    workers = []
    for rank in range(2):  # daemons: one that hangs ends with this process
        workers.append(context.Process(target=nccl_worker, args=(rank, port, num, found), daemon=True))
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(300)
    codes = [worker.exitcode for worker in workers]
    wrong = found.get() if codes == [0, 0] else f"exit codes {codes}, of"
    text = (
        f"{wrong} tensors differ from what was sent: a sync is read before it has arrived, or overwritten before it is"
    )
    return tell(wrong == 0, what, f"{text} sent. Set trainer.sync_backend = gloo, and report it")


# --- the policy -------------------------------------------------------------------------------------------------------


def check_kernels(place):
    """Attention and head on this GPU. Rests on: SDPA's kernels for bf16 (FlashAttention, cuDNN's on sm90) give a row
    the same values in a padded micro-batch as alone (trainer.py, check_policy: a mean below 0.2 nats in 16 bits)."""
    is_right = True
    for dtype in ("fp32", "bf16", "fp16"):
        cfg = load_config(place / "a.toml", [f"trainer.dtype={dtype}", f"output_dir={place}"])
        policy = build_policy(cfg)
        wrong = ""
        try:
            check_policy(policy, cfg)
        except Exception as e:
            wrong = str(e)
        what = f"{dtype}: padded rows in training mode are the model's own forward"
        is_right = tell(not wrong, what, wrong) and is_right
    return is_right


def check_compiled(place):
    """torch.compile: the same gradient norm as without it, to 2 %."""
    norms = {}
    for compiled in ("false", "true"):
        cfg = load_config(
            place / "a.toml", ["trainer.dtype=bf16", f"trainer.compile={compiled}", f"output_dir={place}"]
        )
        policy = build_policy(cfg)
        tokens = torch.arange(8, 72) % policy.vocab
        row = {"tokens": tokens, "mask": torch.arange(64) > 8, "ce": torch.zeros(64)}
        row |= {"teacher": torch.zeros(64), "temperature": 1.0}
        logp_N, _ = policy(collate([row] * 4, policy.device))
        logp_N.sum().backward()
        norms[compiled] = apply_gradients(policy, torch.optim.SGD(policy.trained().values(), 0.0), 1.0, 1e9)
    ratio = norms["true"] / norms["false"] if norms["false"] else float("nan")
    what = f"torch.compile: the gradient's norm is {ratio:.4f} times that without it"
    return tell(0.98 < ratio < 1.02, what, "compiled kernels compute something else: set trainer.compile = false")


def main():
    if not torch.cuda.is_available():
        sys.exit("values: no GPU")
    with tempfile.TemporaryDirectory() as name:
        place = Path(name)
        toy.make_model(place / "model", toy.make_tokenizer(), layers=2, hidden=256)
        (place / "a.toml").write_text(CONFIG.format(model=place / "model"))
        start_distributed(load_config(place / "a.toml"))
        checks = [check_kernels(place), check_compiled(place), check_nccl()]
        dist.destroy_process_group()
    print(json.dumps({"passed": all(checks)}))
    sys.exit(0 if all(checks) else 1)


if __name__ == "__main__":
    main()
