"""The numbers of each token in a run's batches, for tools/page.py and notebooks."""

import math
import sys
from pathlib import Path

import torch
import transformers
from safetensors import safe_open
from safetensors.torch import load_file

from rolemodel.config import load_config
from rolemodel.lookup import ROOT


def rollout_key(about: dict) -> tuple:
    """A key that a line of rollouts.jsonl and its sequences in a batch file have in common."""
    return about.get("env"), about.get("slot"), about.get("attempt"), about.get("member")


def read_batch(run: Path, step: int) -> dict[tuple, list[dict]]:
    """Returns {rollout_key: its training sequences}, or {} if there is no such batch. A sequence has all that the batch
    file says about it, with a tensor for each per-token field. It also has `logp`, the trainer's; `diff`, which is logp
    - old_logp; and what token_effects returns. Values are nan where a token is not trained on, or not yet."""
    path = run / "batches" / f"step_{step:06d}.safetensors"
    if not path.exists():
        return {}
    cfg = load_config(run / "config.toml")  # it also finds the modules next to the TOML of the run
    import trainer  # the file that the run was trained with

    batch = trainer.load_batch(path)
    with safe_open(path, "pt") as file:
        table = {name: batch.fields[name] for name in file.keys() if name != "lens"}
    logp_T = torch.full([sum(batch.lens)], math.nan)
    logp_path = path.with_name(f"logp_{step:06d}.safetensors")
    if logp_path.exists():
        logp_T = torch.where(table["mask"], load_file(logp_path)["logp"], math.nan)
    table |= {"logp": logp_T, "diff": logp_T - table["old_logp"]} | token_effects(cfg, batch, logp_T)
    parts = {name: x_T.split(batch.lens) for name, x_T in table.items()}
    rollouts = {}
    for i, s in enumerate(batch.info["sequences"]):
        s |= {name: part[i] for name, part in parts.items()}
        rollouts.setdefault(rollout_key(s), []).append(s)
    return rollouts


def token_effects(cfg, batch, logp_T) -> dict:
    """{name: x_T}: `push`, minus the derivative of the run's loss with respect to logp, so that a token with a push
    above 0 becomes likelier; and what the loss logs, such as policy/clip_frac. The loss is called on the saved
    log-probabilities, with the whole batch as one micro-batch. Entropies are not saved. Nor is the reference of
    trainer.beta, so its term is left out."""
    import trainer

    sequences = [s for s, num in enumerate(batch.counts) if num]
    micro = trainer.collate(batch.fields, batch.lens, [[s] for s in sequences], max(batch.lens), "cpu")
    micro |= {"num_tokens": sum(batch.counts), "max_tokens": batch.info["max_tokens"]}
    micro["num_sequences"] = sum(batch.shares[s] for s in sequences)
    logp_N = logp_T[micro["at_N"]].requires_grad_()
    unknown_N = torch.full_like(logp_N, math.nan)
    effects = {"push": unknown_N}
    try:
        loss_N, logs = trainer.compute_loss(micro, logp_N, unknown_N, cfg.trainer._replace(beta=0.0))
        effects["push"] = -torch.autograd.grad(loss_N.sum(), logp_N)[0]
        effects |= {name: x_N for name, x_N in logs.items() if name not in ("policy/logp", "policy/entropy")}
    except Exception as error:  # a loss may ask for what exists only during a step, such as prox_logp_N
        print(f"the gradients of tokens are unknown: trainer.loss raised {error!r}", file=sys.stderr)
    table = {}
    for name, x_N in effects.items():
        table[name] = torch.full_like(logp_T, math.nan)
        table[name][micro["at_N"]] = x_N.detach().float()
    return table


def load_tokenizer(run: Path):
    """The Transformers tokenizer of the model that a run began with."""
    model = load_config(run / "config.toml").run.model
    local = ROOT / model  # launch.sh runs in ROOT, so a relative path begins there
    return transformers.AutoTokenizer.from_pretrained(local if local.is_dir() else model)
