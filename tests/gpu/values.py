"""What only a real GPU can show, in words: python tests/gpu/values.py      (with two GPUs, NCCL as well)"""

import sys
import tempfile
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM

import trainer
from configs import load_config
from configs.models import toy

TOML = """model = "{}"
env.id = "reverse_text"
trainer = {{ use_lora = false, dtype = "bf16", gradient_checkpointing = true }}
"""


def tell(is_right, what, wrong):
    print(f"values: {'PASS' if is_right else 'FAIL'} {what}{'' if is_right else f': {wrong}'}", flush=True)
    return is_right


def rows(policy):
    """A micro-batch of eight lengths, whose second halves are loss tokens."""
    lens = [256 * k // 8 for k in range(8, 0, -1)]
    masks = [torch.arange(num) >= num // 2 for num in lens]
    fields = {"tokens": torch.randint(policy.vocab, [sum(lens)]), "mask": torch.cat(masks)}
    fields["temperature"] = torch.ones(sum(lens))
    tokens = fields["tokens"].to(policy.device).split(lens)
    return trainer.collate(fields, lens, [[row] for row in range(8)], 256, policy.device), tokens


def check_kernels(toml):
    """Attention and head in 16 bits: padded rows in training mode are the model's own, alone and in fp32."""
    policy = trainer.build_policy(load_config(toml))
    micro, tokens = rows(policy)
    model = AutoModelForCausalLM.from_pretrained(policy.model.config._name_or_path, dtype=torch.float32)
    model.to(policy.device)
    wanted = []
    for ids_L in tokens:
        log_p = model(ids_L[None].long()).logits[0, :-1].log_softmax(-1)
        logp = log_p.gather(-1, ids_L[1:, None].long())[:, 0]
        wanted.append(logp[len(ids_L) // 2 - 1 :])
    mean = (policy(micro)[0] - torch.cat(wanted)).abs().mean().item()
    text = "the kernels compute something else: set trainer.attn_implementation"
    return tell(mean < 0.02, f"bf16 differs from fp32 by {mean:.4f} nats on average", text)


def check_compiled(toml):
    norms = []
    for how in ("false", "true"):
        policy = trainer.build_policy(load_config(toml, [f"trainer.compile={how}"]))
        torch.manual_seed(0)
        policy(rows(policy)[0])[0].sum().backward()
        norms.append(trainer.full(torch.nn.utils.clip_grad_norm_(policy.parameters(), 1e9)).item())
    ratio = norms[1] / norms[0]
    what = f"compiled, the gradient's norm is {ratio:.4f} times the plain one"
    return tell(0.98 < ratio < 1.02, what, "do not compile")


def blocks(num, device):
    """Tensors whose every value says which block they belong to, up to 256 MiB."""
    for number in range(num):
        sizes = (4, 1000, 1 << 20, 1 << 27)
        yield {f"{number}.{size}": torch.full([size], number, dtype=torch.bfloat16, device=device) for size in sizes}


def end_of_sync(rank, port, backend, num, found):
    """One end of a sync, as WeightSender and WeightReceiver have it."""
    device = torch.device("cuda", rank) if backend == "nccl" else torch.device("cpu")
    store = dist.TCPStore("127.0.0.1", port, is_master=rank == 0)
    group = trainer.make_process_group(store, rank, {"backend": backend, "timeout_s": 60, "size": 2})
    if rank == 0:
        cfg = SimpleNamespace(sends_adapters=False)
        nothing = {"post_all": lambda path: None, "while_workers_run": lambda *given: nullcontext(), "urls": []}
        end = SimpleNamespace(cfg=cfg, store=store, group=group, device=device, **nothing)
        trainer.WeightSender.send(end, blocks(num, device), 0)
        return store.wait(["done"])  # the store ends with this process
    end = SimpleNamespace(store=store, process_group=group)
    received = trainer.WeightReceiver.receive_blocks(end, device)
    found.put(sum(int((w != int(name.split(".")[0])).any()) for name, w in received))
    store.set("done", "")


def check_sync(backend, num=64):
    """dist._broadcast_coalesced makes the current stream wait for NCCL's: what is read has arrived, and what is sent is
    not overwritten before it is."""
    context = torch.multiprocessing.get_context("spawn")
    found = context.Queue()
    port = trainer.socket.create_server(("127.0.0.1", 0)).getsockname()[1]
    for rank in range(2):
        context.Process(target=end_of_sync, args=(rank, port, backend, num, found), daemon=True).start()
    wrong = found.get(timeout=300)
    text = f"{wrong} tensors differ from what was sent: set trainer.sync_backend = gloo, and report it"
    return tell(wrong == 0, f"{num} blocks arrive over {backend} whole and in order", text)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as name:
        path = Path(name)
        toy.make_model(path / "model", toy.make_tokenizer(), layers=2, hidden=256)
        (path / "a.toml").write_text(TOML.format(path / "model"))
        trainer.start_distributed(load_config(path / "a.toml"))
        checks = [check_kernels(path / "a.toml"), check_compiled(path / "a.toml")]
        if torch.cuda.device_count() > 1:
            checks.append(check_sync("nccl"))
    sys.exit(not all(checks))
