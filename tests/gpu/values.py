"""What only a real GPU can show, in words: python tests/gpu/values.py"""

import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "configs/models")]
import torch
import toy
from transformers import AutoModelForCausalLM

import trainer
from rolemodel.config import load_config

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


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as name:
        path = Path(name)
        toy.make_model(path / "model", toy.make_tokenizer(), layers=2, hidden=256)
        (path / "a.toml").write_text(TOML.format(path / "model"))
        trainer.start_distributed(load_config(path / "a.toml"))
        checks = [check_kernels(path / "a.toml"), check_compiled(path / "a.toml")]
    sys.exit(not all(checks))
