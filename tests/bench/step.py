"""A training step on stored ragged rollouts: trainer.py, a bare loop by hand, and TRL; and the head's memory.

    python step.py [--quick]

Two threads, fp32, full fine-tuning. trainer.py and the bare loop take turns in one process; TRL has one for itself."""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from common import PATHS, ROOT, SHAPES, config, make_batch, make_model, reset_peak, resident, rollouts, row, tell


def train(model, num, steps, dtype="fp32"):
    """Returns the seconds of trainer.train_step and of the bare loop, one of each per step without the first."""
    import torch

    import trainer

    place, bare = Path(model).parent, dtype == "fp32"
    cfg = config(place, model, f"trainer.dtype={dtype}", "trainer.micro_batch_size=4")  # 2,048 tokens at a time
    trainer.start_distributed(cfg)
    policy = trainer.build_policy(cfg)
    optimizer = torch.optim.AdamW(policy.parameters(), 1e-4, weight_decay=0.0, fused=True)
    batch = make_batch(place, rollouts(num), policy.model.config.vocab_size)
    trainer.add_advantages(batch.sequences, cfg.trainer)
    lens = [len(s["tokens"]) for s in batch.sequences]
    num_tokens = sum(int(s["mask"].sum()) for s in batch.sequences)
    rival = trainer.build_policy(cfg).model if bare else None
    plain = torch.optim.AdamW(rival.parameters(), 1e-4, weight_decay=0.0, fused=True) if bare else None

    def by_hand():
        for part in trainer.partition_by_length(lens, 2048, 1, *trainer.PADDING["cpu"]):
            m = trainer.collate([batch.sequences[i] for i in part], torch.device("cpu"))
            hidden_BWD = rival.model(input_ids=m["ids_BW"], use_cache=False).last_hidden_state
            log_p_NV = rival.lm_head(hidden_BWD.flatten(0, 1)[m["index_N"]]).log_softmax(-1)
            r_N = (log_p_NV.gather(-1, m["tokens_N"].long()[:, None])[:, 0] - m["old_logp_N"]).exp()
            loss_N = -torch.minimum(r_N * m["adv_N"], r_N.clamp(0.8, 1.28) * m["adv_N"])
            (loss_N.sum() / num_tokens).backward()
        torch.nn.utils.clip_grad_norm_(rival.parameters(), 1.0)
        plain.step()
        plain.zero_grad()

    ours_s, bare_s = [], []
    for step in range(steps + 1):
        began = time.perf_counter()
        trainer.train_step(policy, optimizer, batch, step, cfg)
        ours_s.append(time.perf_counter() - began)
        if bare:
            by_hand()
            bare_s.append(time.perf_counter() - began - ours_s[-1])
    return ours_s[1:], bare_s[1:]


def head(tokens, vocab=151936, chunk=0):
    """Returns the MiB that forward and backward with a large vocabulary need beyond weights and gradients."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    from trainer import Policy, collate

    shape = Qwen3Config(vocab_size=vocab, hidden_size=64, intermediate_size=64, num_hidden_layers=1,
                        num_attention_heads=2, num_key_value_heads=1, head_dim=32)  # fmt: skip
    policy = Policy(Qwen3ForCausalLM(shape), torch.device("cpu"))
    policy.CHUNK = chunk or policy.CHUNK
    with tempfile.TemporaryDirectory() as place:
        small, large = (make_batch(Path(place), [(1, 1023)] * (n // 1024), vocab) for n in (1024, tokens))
    for batch in (small, large):  # the first makes gradients and buffers
        reset_peak()
        before = resident()
        logp_N, _ = policy(collate(batch.sequences, torch.device("cpu")))
        logp_N.sum().backward()
    return resident(peak=True) - before


def peer(model, lens, vocab, steps, trim):
    import random

    rng, file = random.Random(0), Path(model).parent / "rollouts.json"
    draw = lambda n: [rng.randrange(8, min(vocab, 102)) for _ in range(n)]  # noqa: E731
    file.write_text(json.dumps([{"prompt": draw(p), "completion": draw(c)} for p, c in lens]))
    command = [sys.executable, "trl_peer.py", "step", str(model), str(file), str(steps + 1), *(["trim"] * trim)]
    env = os.environ | {"PYTHONPATH": f"{ROOT / '.cache' / 'peers'}:{PATHS}"}
    done = subprocess.run(command, cwd=ROOT / "tests" / "bench", env=env, stdout=subprocess.PIPE, check=True)
    return json.loads(done.stdout.splitlines()[-1])["train_s"][1:]


def child(name, *args):
    command = [sys.executable, __file__, name, *map(str, args)]
    return json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout.splitlines()[-1])


def main(quick):
    rows = []
    for shape, num, steps in (("0.8M", 64, 3),) if quick else (("0.8M", 256, 5), ("58M", 40, 2)):
        with tempfile.TemporaryDirectory() as place:
            model, lens = make_model(Path(place) / "model", shape), rollouts(num)
            tokens, medians = sum(map(sum, lens)), {}
            ours_s, bare_s = child("train", model, num, steps)
            medians["TRL"] = statistics.median(peer(model, lens, SHAPES[shape][2], 1 if shape == "58M" else 3, False))
            trimmed = peer(model, lens, SHAPES[shape][2], 1 if shape == "58M" else 3, True)
            medians["TRL, padded per micro-batch"] = statistics.median(trimmed)
            ours_s += child("train", model, num, 1)[0]  # the machine may have changed meanwhile
            ours = statistics.median(ours_s)
            bf16 = statistics.median(child("train", model, num, 1, "bf16")[0])
        rows.append(row(f"train {shape}, {tokens:,} real tokens, fp32", tokens / ours, "tokens/s"))
        for name, target in {"TRL": ">= 5", "TRL, padded per micro-batch": ">= 3"}.items():
            rows.append(row(f"train {shape}: {name}", tokens / medians[name], "tokens/s"))
            rows.append(row(f"train {shape}: ours / {name}", medians[name] / ours, "x", target))
        ratio = statistics.median(b / a for a, b in zip(ours_s, bare_s))
        rows.append(row(f"train {shape}: ours / bare loop by hand", ratio, "x", ">= 0.95"))
        rows.append(row(f"train {shape}, bf16 on CPU", tokens / bf16, "tokens/s"))
    tokens = 4096 if quick else 16384
    rows.append(
        row(f"head, vocabulary 151,936, {tokens:,} tokens: extra memory", child("head", tokens) / 1024, "GiB", "<= 1.5")
    )
    rows.append(row("  the full logits in fp32 would be", tokens * 151936 * 4 / 2**30, "GiB"))
    tell(rows)


if __name__ == "__main__":
    os.environ["OMP_NUM_THREADS"] = str(os.cpu_count())
    if sys.argv[1:2] == ["train"]:
        tell(train(sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), *sys.argv[5:6]))
    elif sys.argv[1:2] == ["head"]:
        tell(head(*map(int, sys.argv[2:])))
    else:
        main("--quick" in sys.argv)
