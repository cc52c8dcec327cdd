"""Measures how fast a step is and what share of the GPUs' peak it reaches, and writes the profile of a step."""

import contextlib
import math
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

# Tflop/s of dense bf16 with sums in fp32, by a part of the name that torch.cuda.get_device_name gives; the first match
# counts. A longer name than "RTX 4090" means another card, such as "RTX 4090 D" or "RTX 4090 Laptop GPU".
PEAKS = {"B200": 2250, "H200 NVL": 835, "H200": 989, "H100 NVL": 835, "H100 PCIe": 756, "H100": 989, "A100": 312}
PEAKS |= {"L40S": 362, "RTX 6000 Ada": 364.2, "RTX A6000": 154.8}
PEAKS |= {"RTX 5090 ": math.nan, "RTX 5090": 209.5, "RTX 4090 ": math.nan, "RTX 4090": 165.2}


def step_flops(policy, batch, num_tokens: int, num_computed: int) -> float:
    """The arithmetic that the model needs for a step. num_tokens: of all epochs; num_computed: what sequences share
    counted once.

    For each token, a parameter takes 2 flops forward, 2 for the gradient of its input and, if it is trained, 2 for its
    own gradient. The head only sees loss tokens, and a token only goes through some of the experts. Attention takes
    twice as much backward as forward, and in each layer, a token looks back over half of its sequence on average. Not
    counted: what is recomputed in backward, and log-probabilities that are computed before the first update."""
    config = policy.model.config.get_text_config()
    num_experts = getattr(config, "num_experts_per_tok", None)  # for each token

    def per_token(module):
        total = 0.0
        for p in module.parameters():
            share = num_experts / len(p) if num_experts and p.ndim == 3 else 1.0
            total += (6 if p.requires_grad else 4) * p.numel() * share
        return total

    lens_S = np.array([size for size, num in zip(batch.lens, batch.counts) if num])
    heads = getattr(config, "num_attention_heads", 0)
    width = heads * (getattr(config, "head_dim", None) or config.hidden_size / max(1, heads))
    attention = 3 * 4 * config.num_hidden_layers * width * (lens_S**2).sum() / (2 * lens_S.sum())
    body = per_token(policy.model.get_decoder()) - per_token(policy.model.get_input_embeddings())
    head = per_token(policy.model.get_output_embeddings())
    return num_computed * (body + attention) + num_tokens / lens_S.sum() * sum(batch.counts) * head


def rates(policy, batch, num_tokens: int, num_computed: int, seconds: float) -> dict[str, float]:
    """Metrics of a step: perf/mfu is step_flops per second, divided by the peak of all GPUs. It is nan if PEAKS does
    not have this GPU."""
    name = torch.cuda.get_device_name() if policy.device.type == "cuda" else ""
    peak = next((1e12 * peak for part, peak in PEAKS.items() if part in name and "MIG" not in name), math.nan)
    flops = step_flops(policy, batch, num_tokens, num_computed)
    metrics = {"perf/tokens_per_s": num_tokens / seconds, "perf/shared": 1 - num_computed / num_tokens}
    metrics["perf/mfu"] = flops / seconds / (peak * dist.get_world_size())
    return metrics | {"perf/peak_gib": torch.cuda.max_memory_allocated() / 2**30}  # 0 without CUDA


def profiled(run_dir: Path, step: int, t) -> contextlib.AbstractContextManager:
    """For use around train_step: at trainer.profile_step, rank 0 writes a trace of it, which ui.perfetto.dev can
    open."""
    if not step or step != t.profile_step or dist.get_rank() > 0:
        return contextlib.nullcontext()
    path = str(run_dir / f"profile_{step:06d}.json.gz")
    return torch.profiler.profile(on_trace_ready=lambda profile: profile.export_chrome_trace(path))
