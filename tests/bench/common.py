"""What the parts of run.py share: models and rollouts made on the spot, configurations, memory, rows."""

import json
import math
import random
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "tests" / "bench")]
PATHS = ":".join(sys.path[:3])  # for processes of the parts

SHAPES = {"0.8M": (4, 128, 102), "58M": (8, 512, 32000)}  # layers, hidden, vocabulary


def row(measure, value, unit, target=""):
    """A line of the table; value None: not reached; target: "", or a comparison such as ">= 5" with the value."""
    sign, _, limit = target.partition(" ")
    met = None
    if target:
        met = value is not None and (value >= float(limit) if sign == ">=" else value <= float(limit))
    return {"measure": measure, "value": value, "unit": unit, "target": target, "met": met}


def tell(rows):
    """What run.py reads: the last line."""
    print("\n" + json.dumps(rows), flush=True)


def make_model(path, shape):
    from configs.models import toy

    layers, hidden, vocab = SHAPES[shape]
    toy.make_model(path, toy.make_tokenizer(), layers, hidden, vocab=vocab)
    return path


def config(path, model, *overrides):
    """A checked configuration of full fine-tuning in fp32. The parts change what they measure."""
    from configs import load_config

    (path / "bench.toml").write_text(f'model = "{model}"\n[env]\nid = "bench_env"\n')
    plain = ("trainer.dtype=fp32", "trainer.use_lora=false", "trainer.gradient_checkpointing=false", "max_seq_len=512")
    plain += ("orchestrator.sampling.max_tokens=16",)
    return load_config(path / "bench.toml", [f"output_dir={path}", *plain, "trainer.loss=grpo", *overrides])


def rollouts(num, seed=0):
    """[(prompt length, completion length)]: 20, and log-normal with sigma 0.9, mean 40, at most 256 tokens."""
    rng = random.Random(seed)
    return [(20, max(1, min(256, round(rng.lognormvariate(math.log(40) - 0.405, 0.9))))) for _ in range(num)]


def make_batch(path, lens, vocab, seed=0):
    """The Batch of a file with sequences of such lengths, with random tokens and rewards, in groups of 8."""
    from orchestrator import save_batch
    from trainer import load_batch

    rng = random.Random(seed)
    sequences = [{
        "tokens": [rng.randrange(8, min(vocab, 32000)) for _ in range(p + c)], "mask": [0] * p + [1] * c,
        "old_logp": [0.0] * p + [-math.log(vocab)] * c, "turn": [0] * (p + c), "temperature": 1.0, "staleness": 0,
        "env": "bench", "group": i // 8, "rollout": i % 8, "reward": rng.random(), "num_turns": 1,
    } for i, (p, c) in enumerate(lens)]  # fmt: skip
    file = path / f"{len(lens)}_{vocab}.safetensors"
    save_batch(file, sequences, {"max_tokens": 256})
    return load_batch(file)


def resident(peak=False):
    """MiB of this process."""
    key = "VmHWM:" if peak else "VmRSS:"
    return int(Path("/proc/self/status").read_text().split(key)[1].split()[0]) / 1024


def reset_peak():
    Path("/proc/self/clear_refs").write_text("5")
