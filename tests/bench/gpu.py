"""What a training step costs on one GPU, at Qwen3's shapes with random weights: no model, no vLLM, no install.

    python gpu.py                 # the short list: 8 minutes on an H200 are the aim; without a GPU: "not measured"
    python gpu.py --all           # the long one
    python gpu.py 4B compiled     # cases of either whose name has all these words
    python gpu.py --toy           # the same code at toy size, on any device

A line per case as it goes. bf16, one row per micro-batch, all but the first token trained on, as in prime-rl's
benchmark, whose published tokens/s for one H100, recomputing activations, stand beside ours."""

import functools
import gc
import itertools
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

from common import config, make_batch, row, tell

os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
import torch
import transformers

import trainer

SHAPES = {  # layers, hidden, inner, heads, key-value heads, vocabulary, window (Gemma 3's, with every 6th layer whole)
    "0.6B": (28, 1024, 3072, 16, 8, 151936, None),
    "4B": (36, 2560, 9728, 32, 8, 151936, None),
    "window": (26, 1152, 6912, 4, 1, 151936, 1024),
    "toy": (2, 64, 128, 2, 1, 512, None),
    "toy window": (2, 64, 128, 2, 1, 512, 32),
}
PUBLISHED = {("0.6B", False, 16384): 11900, ("0.6B", True, 16384): 13300, ("4B", True, 16384): 6200}  # tokens/s
GOAL = {("0.6B", False, 16384): 25000, ("4B", True, 16384): 9000}  # tokens/s, compiled
PEAK_FLOPS = {"H100": 989e12, "H200": 989e12, "B200": 2250e12, "A100": 312e12, "L40S": 362e12, "4090": 165e12}  # bf16


def cases_of(which):
    """[(name, function)] of "toy", of the "short" list or of "all"."""
    toy = which == "toy"
    steps = [("0.6B", False, True, 65536, True), ("window", False, True, 16384, True)]
    for how in (("0.6B", False, True), ("0.6B", True, True), ("4B", True, True)):
        steps += [(*how, 16384, False), (*how, 16384, True)]
    if toy:
        steps = [("toy", lora, recompute, 256, False) for lora in (False, True) for recompute in (True, False)]
        steps += [("toy window", False, True, 256, False)]
    if which == "all":
        for compiled in (False, True):
            steps += [(*how, False, 16384, compiled) for how in itertools.product(["0.6B", "4B"], [False, True])]
            steps += [("0.6B", False, True, 65536, compiled), ("0.6B", True, True, 65536, compiled)]
            steps += [("4B", False, True, 16384, compiled), ("4B", True, True, 65536, compiled)]
    cases = {name_of(*step): functools.partial(step_rows, *step) for step in steps}
    for head in ("toy",) if toy else ("0.6B", "4B"):
        cases[f"head {head}"] = functools.partial(head_rows, head, 256 if toy else 16384)
    return cases


def name_of(shape, lora, recompute, tokens, compiled):
    how = ["LoRA" if lora else "full", "recompute" if recompute else "no recompute"]
    how += ["compiled"] if compiled else []
    return f"{shape} {', '.join(how)}, {tokens:,} tokens"


# --- models, timing ---------------------------------------------------------------------------------------------------


def here():
    return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")


def wait():
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def timed(function, times):
    """Returns the seconds of the first call, and the median of the others."""
    found = []
    for _ in range(times + 1):
        wait()
        began = time.perf_counter()
        function()
        wait()
        found.append(time.perf_counter() - began)
    return found[0], statistics.median_low(found[1:])


def peak_flops():
    """Of this GPU in bf16; None where it is not known."""
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else ""
    return next((flops for part, flops in PEAK_FLOPS.items() if part in name), None)


def reset():
    gc.collect()
    torch.cuda.empty_cache()
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()


def make_policy(cfg, shape, device):
    """build_policy with random weights made on the device, instead of a directory of 8 GB."""
    layers, hidden, inner, heads, kv, vocab, window = SHAPES[shape]
    kind = transformers.Gemma3TextConfig if window else transformers.Qwen3Config
    c = kind(
        num_hidden_layers=layers, hidden_size=hidden, intermediate_size=inner, num_attention_heads=heads,
        num_key_value_heads=kv, head_dim=256 if shape == "window" else 128, vocab_size=vocab, tie_word_embeddings=True,
        **({"sliding_window": window, "pad_token_id": 0} if window else {}),
    )  # fmt: skip

    def random_model(cfg):
        dtype = trainer.DTYPES[cfg.trainer.dtype] if cfg.trainer.use_lora else torch.float32
        with device:
            return transformers.AutoModelForCausalLM.from_config(c, dtype=dtype)

    kept, trainer.load_model = trainer.load_model, random_model
    try:
        return trainer.build_policy(cfg)
    finally:
        trainer.load_model = kept


def prepare(place, shape, lora, recompute, tokens, *more):
    """Returns cfg, policy, optimizer and a batch of one row."""
    cfg = config(
        Path(place), "random", "trainer.dtype=bf16", f"trainer.use_lora={str(lora).lower()}",
        f"trainer.gradient_checkpointing={str(recompute).lower()}", f"max_seq_len={tokens}",
        "trainer.micro_batch_size=1", "trainer.lora_rank=16", *more,
    )  # fmt: skip
    batch = make_batch(Path(place), [(1, tokens - 1)], SHAPES[shape][5])
    trainer.start_distributed(cfg)
    policy = make_policy(cfg, shape, here())
    return cfg, policy, torch.optim.AdamW(policy.trained().values(), 1e-5, weight_decay=0.0, fused=True), batch


def utilization(policy, tokens, lora, seconds):
    """Returns the share of the GPU's peak, or None if that is not known. Model FLOPs: 6 per parameter and token (4 if
    most are frozen), and causal attention; no recomputation. A window is counted as if there were none."""
    c, num = policy.model.config.get_text_config(), sum(p.numel() for p in policy.parameters())
    if not c.tie_word_embeddings:
        num -= c.vocab_size * c.hidden_size  # a look-up is no arithmetic
    width = c.num_attention_heads * c.head_dim
    flops = (4 if lora else 6) * num * tokens + 6 * c.num_hidden_layers * width * tokens**2
    return flops / seconds / peak_flops() if peak_flops() else None


def measure(shape, lora, recompute, tokens, steps=4, *more):
    """Returns the seconds of the median training step on one sequence, and the last step's metrics with perf/mfu."""
    reset()
    found = []
    with tempfile.TemporaryDirectory() as place:
        cfg, policy, optimizer, batch = prepare(place, shape, lora, recompute, tokens, *more)
        for step in range(steps):
            wait()
            began = time.perf_counter()
            metrics, _ = trainer.train_step(policy, optimizer, batch, step, cfg)
            wait()
            found.append(metrics | {"seconds": time.perf_counter() - began})
    last = found[-1] | {"first_s": found[0]["seconds"]}
    last["perf/mfu"] = utilization(policy, tokens, lora, last["time/train_s"])
    torch.distributed.destroy_process_group()
    return statistics.median_low(m["seconds"] for m in found[1:]), last


# --- cases ------------------------------------------------------------------------------------------------------------


def step_rows(shape, lora, recompute, tokens, compiled):
    steps = 3 if tokens > 20000 else 4
    seconds, metrics = measure(shape, lora, recompute, tokens, steps, f"trainer.compile={str(compiled).lower()}")
    goal, published = GOAL.get((shape, lora, tokens)), PUBLISHED.get((shape, lora, tokens)) if recompute else None
    rows = [row("", tokens / seconds, "tokens/s", f">= {goal}" if goal and recompute and compiled else "")]
    if metrics["perf/mfu"]:
        mfu = 100 * metrics["perf/mfu"] * metrics["time/train_s"] / seconds
        rows.append(row("share of the GPU's peak (MFU)", mfu, "%", ">= 30" if shape == "4B" and compiled else ""))
    if published:
        rows.append(row("of prime-rl's on one H100", tokens / seconds / published, "x"))
    return [*rows, row("peak memory", metrics["perf/peak_gib"], "GiB"), row("first step", metrics["first_s"], "s")]


def head_rows(shape, tokens):
    """Policy.head alone, as a full fine-tuning has it, in chunks of several sizes."""
    rows = []
    for chunk in (trainer.Policy.CHUNK, 4 * trainer.Policy.CHUNK):
        for compiled in (False, True) if here().type == "cuda" else (False,):
            reset()
            with tempfile.TemporaryDirectory() as place:
                _, policy, *_ = prepare(place, shape, False, True, 256, f"trainer.compile={str(compiled).lower()}")
            vocab, hidden = SHAPES[shape][5], SHAPES[shape][1]
            weight_VD = torch.randn(vocab, hidden, device=here(), requires_grad=True)
            hidden_ND = torch.randn(tokens, hidden, device=here(), dtype=torch.bfloat16, requires_grad=True)
            target_N = torch.randint(vocab, [tokens], device=here())
            temperature_N = torch.ones(tokens, device=here())

            def both(policy=policy, chunk=chunk, weight_VD=weight_VD, parts=(hidden_ND, target_N, temperature_N)):
                for part in zip(*(x.split(chunk // len(weight_VD) or 1) for x in parts)):
                    again = torch.utils.checkpoint.checkpoint(
                        policy.head, {"weight": weight_VD}, *part, use_reentrant=False
                    )
                    again.sum().backward()

            _, seconds = timed(both, 3)
            about = f"{chunk >> 20} Mi logits a chunk{', compiled' * compiled}"
            rows.append(row(about, tokens / seconds, "tokens/s"))
            if peak_flops():
                share = 8 * weight_VD.numel() * tokens / seconds / peak_flops()  # forward twice, backward once
                rows.append(row(f"{about}: share of the GPU's peak", 100 * share, "%"))
                rows.append(row(f"{about}: peak memory", torch.cuda.max_memory_allocated() / 2**30, "GiB"))
            torch.distributed.destroy_process_group()
    return rows


def main(args):
    words = [x for x in args if not x.startswith("-")]
    which = "all" if "--all" in args or words else "short"
    if "--toy" in args:
        which = "toy"
    elif not torch.cuda.is_available():
        return tell([])
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    print(gpu, f"torch {torch.__version__}", flush=True)
    rows = []
    for name, case in cases_of(which).items():
        if all(word in name for word in words):
            began = time.perf_counter()
            try:
                found = case()
            except (RuntimeError, torch.OutOfMemoryError) as e:  # too large: the next one
                found = [row(f"{type(e).__name__}: {str(e).splitlines()[0][:80]}", None, "")]
                if torch.distributed.is_initialized():
                    torch.distributed.destroy_process_group()
            rows += [r | {"measure": f"{name}: {r['measure']}".rstrip(": ")} for r in found]
            said = "; ".join(f"{r['measure']} {r['value'] or 0:,.4g} {r['unit']}".strip() for r in found)
            print(f"{name}: {said} [{time.perf_counter() - began:.0f} s]", flush=True)
    tell(rows)


if __name__ == "__main__":
    main(sys.argv[1:])
