"""Training steps at Qwen3's shapes with random weights on one GPU: tokens/s, model FLOPs utilization, peak memory.

    python gpu.py          # without a GPU: "not measured"
    python gpu.py --toy    # the same code at toy size, on any device

bf16, one row per micro-batch. Beside it what prime-rl publishes for one H100, recomputing activations."""

import gc
import itertools
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

from common import config, make_batch, row, tell

SHAPES = {  # layers, hidden, inner, heads, key-value heads, vocabulary
    "0.6B": (28, 1024, 3072, 16, 8, 151936),
    "4B": (36, 2560, 9728, 32, 8, 151936),
    "toy": (2, 64, 128, 2, 1, 512),
}
PUBLISHED = {("0.6B", False, 16384): 11900, ("0.6B", True, 16384): 13300, ("4B", True, 16384): 6200}  # tokens/s
GOAL = {("0.6B", False, 16384): 3, ("4B", True, 16384): 2}


PEAK_FLOPS = {"H100": 989e12, "H200": 989e12, "B200": 2250e12, "A100": 312e12, "L40S": 362e12, "4090": 165e12}  # bf16


def make_policy(cfg, shape, device):
    """build_policy with random weights made on the device, instead of a directory of 8 GB."""
    import torch
    import transformers

    import trainer

    layers, hidden, inner, heads, kv, vocab = SHAPES[shape]
    c = transformers.Qwen3Config(
        num_hidden_layers=layers, hidden_size=hidden, intermediate_size=inner, num_attention_heads=heads,
        num_key_value_heads=kv, head_dim=128, vocab_size=vocab, tie_word_embeddings=True,
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


def utilization(policy, lens, lora, seconds):
    """-> share of the GPU's peak, None where that is not known. Model FLOPs: 6 per parameter and token (4 where most
    are frozen), and causal attention; no recomputation."""
    import torch

    is_cuda = torch.cuda.is_available()
    peak = [flops for name, flops in PEAK_FLOPS.items() if is_cuda and name in torch.cuda.get_device_name()]
    c, num = policy.model.config.get_text_config(), sum(p.numel() for p in policy.parameters())
    if not c.tie_word_embeddings:
        num -= c.vocab_size * c.hidden_size  # a look-up is no arithmetic
    width = c.num_attention_heads * c.head_dim
    flops = (4 if lora else 6) * num * sum(lens) + 6 * c.num_hidden_layers * width * sum(n * n for n in lens)
    return flops / seconds / peak[0] if peak else None


def measure(shape, lora, recompute, tokens, steps=4):
    """-> s of the median training step on one sequence of `tokens`, all but the first trained on, as in prime-rl's
    benchmark; metrics of the last step, with perf/mfu."""
    import torch

    import trainer

    gc.collect()
    torch.cuda.empty_cache()
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    with tempfile.TemporaryDirectory() as place:
        cfg = config(
            Path(place), "random", "trainer.dtype=bf16", f"trainer.use_lora={str(lora).lower()}",
            f"trainer.gradient_checkpointing={str(recompute).lower()}", f"max_seq_len={tokens}",
            "trainer.micro_batch_size=1", "trainer.lora_rank=16",
        )  # fmt: skip
        batch = make_batch(Path(place), [(1, tokens - 1)], SHAPES[shape][-1])
    trainer.start_distributed(cfg)
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    policy = make_policy(cfg, shape, device)
    optimizer = torch.optim.AdamW(trainer.trained(policy).values(), 1e-5, weight_decay=0.0, fused=True)
    found = []
    for step in range(steps):
        if device.type == "cuda":
            torch.cuda.synchronize()
        began = time.perf_counter()
        metrics, _ = trainer.train_step(policy, optimizer, batch, step, cfg)
        if device.type == "cuda":
            torch.cuda.synchronize()
        found.append(metrics | {"seconds": time.perf_counter() - began})
    last = found[-1]
    last["perf/mfu"] = utilization(policy, batch.lens.tolist(), lora, last["time/train_s"])
    torch.distributed.destroy_process_group()
    return statistics.median_low(m["seconds"] for m in found[1:]), last


def main(toy):
    import torch

    if not toy and not torch.cuda.is_available():
        return tell([])
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    cases = itertools.product(
        ["toy"] if toy else ["0.6B", "4B"], [False, True], [True, False], [256] if toy else [16384, 65536]
    )
    rows = []
    for shape, lora, recompute, tokens in cases:
        how = f"{'LoRA' if lora else 'full'}, {'recompute' if recompute else 'no recompute'}"
        about = f"{name}: {shape}, {how}, {tokens:,} tokens"
        try:
            seconds, metrics = measure(shape, lora, recompute, tokens)
        except torch.OutOfMemoryError:
            rows.append(row(f"{about}: out of memory", 0, ""))
            print(rows[-1]["measure"], flush=True)
            torch.distributed.destroy_process_group()
            continue
        rate, published = tokens / seconds, PUBLISHED.get((shape, lora, tokens)) if recompute else None
        rows.append(row(about, rate, "tokens/s"))
        if metrics["perf/mfu"]:
            mfu = metrics["perf/mfu"] * metrics["time/train_s"] / seconds
            rows.append(row("  model FLOPs utilization", 100 * mfu, "%", ">= 45" if shape == "4B" and lora else ""))
        rows.append(row("  peak memory", metrics["perf/peak_gib"], "GiB"))
        if published:
            goal = GOAL.get((shape, lora, tokens))
            rows.append(row("  of prime-rl's on one H100", rate / published, "x", f">= {goal}" if goal else ""))
        mfu = f", MFU {100 * metrics['perf/mfu']:.0f} %" if metrics["perf/mfu"] else ""
        print(f"{about}: {rate:,.0f} tokens/s{mfu}, {metrics['perf/peak_gib']:.1f} GiB", flush=True)
    tell(rows)


if __name__ == "__main__":
    os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    main("--toy" in sys.argv)
