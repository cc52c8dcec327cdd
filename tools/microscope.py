"""Puts single steps under the microscope: from several states of a run, it takes a step with each arm, on the same
batch.

    python tools/microscope.py outputs/run --arm trainer.loss=cispo --arm trainer.loss=grpo [--states 20] [key=value]

An arm is one of the variants that are compared: a list of overrides of the keys that make a step (ARM). The first arm
is compared with each of the others. An arm cannot be a branch, as in tools/compare.py, since one process holds the
policy of all arms: give a new loss a name of its own next to the old one.

After each step, the same held-out examples are answered with the same random numbers, and the policy's
log-probabilities of the run's next batch are computed, which no arm has seen. Everything is paired by state. So it
shows differences that the noise between seeds hides in a study of whole runs. One server serves all arms. States are
reached by replaying batches (tools/start_from.py), from a checkpoint or from the start.

    reward        of the held-out examples
    agreement     the rank correlation, over the next batch's answers, between the log-probability that the step added
                  and the advantage
    kl            between the policies before and after the step, on the next batch, in nats per token
    entropy       on the batch of the step
    right, wrong  by how much the tokens of answers with A > 0 and A < 0 became likelier, in nats

states.jsonl has a line for each state and arm."""

import argparse
import asyncio
import json
import os
import re
import sys
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from scipy.stats import spearmanr
from torch.utils._pytree import tree_map

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from env import load_environment
from rolemodel import checkpoints
from rolemodel.by_hand import servers
from rolemodel.config import load_config
from rolemodel.lookup import ROOT, check_names, find_function
from rolemodel.role import ConfigError, run_main, say
from rolemodel.run_directory import run_directory, to_json
from tools.compare import interval, p_value, parse_arms
from tools.show import with_interval
from tools.start_from import reachable, repeat_step

# The keys that make a step. The policy is the run's, so dtype or LoRA's rank would change nothing.
ARM = r"orchestrator\.advantage|trainer\.(loss|loss_args.*|optimizer|learning_rate|lr_scheduler_type|warmup_\w+|beta"
ARM += r"|weight_decay|adam_beta2|max_grad_norm|updates_per_batch|minibatches)"
SHOWN = ("reward", "agreement", "right", "wrong", "kl", "entropy")


def optimizer_at(policy, t, kept: dict):
    """Puts the policy into the state that was kept. Returns an optimizer with these settings, in the same state."""
    import trainer

    optimizer = trainer.make_optimizer(policy, t)
    for name, p in policy.trained().items():
        p.data.copy_(kept["policy"][name])
        if name in kept["optimizer"]:
            optimizer.state[p] = {key: x.clone() for key, x in kept["optimizer"][name].items()}
    policy.extra = {name: x.clone() for name, x in kept["extra"].items()}
    return optimizer


def path_of(run: Path, step: int) -> Path:
    return run / "batches" / f"step_{step:06d}.safetensors"


def advantages_of(path: Path, advantage: Callable) -> torch.Tensor:
    """adv_T of a batch file, computed by a function from what the sequences say about their rollouts: reward,
    truncated, num_turns and num_tokens, but neither metrics nor state. 0 for demonstrations."""
    import orchestrator
    import trainer

    batch = trainer.load_batch(path)
    mask_T = batch.fields["is_sampled"]
    groups = defaultdict(dict)
    sequences = []
    infos = batch.info["sequences"]
    for info, mask_L, turn_L in zip(infos, mask_T.split(batch.lens), batch.fields["turn"].split(batch.lens)):
        s = orchestrator.Sequence(mask=mask_L.numpy(), turn=turn_L.numpy(), agent=info["agent"])
        s.adv = np.zeros(len(mask_L), np.float32)
        sequences.append(s)
        if "slot" in info:
            about = {name: info[name] for name in ("env", "example", "slot", "attempt", "member", "reward")}
            about |= {name: info[name] for name in ("num_turns", "num_tokens", "truncated")}
            new = orchestrator.Rollout(**about)
            r = groups[info["env"], info["slot"], info["attempt"]].setdefault(info["member"], new)
            r.state.setdefault("agent_rewards", {})[s.agent] = info["reward"]
            r.sequences.append(s)
    for group in groups.values():
        orchestrator.add_advantages([*group.values()], advantage)
    return torch.from_numpy(np.concatenate([s.adv for s in sequences]))


def score(policy, batch, cfg) -> torch.Tensor:
    """logp_T of a batch's loss tokens."""
    import trainer

    rows = [row for row, num in enumerate(batch.counts) if num]
    return trainer.score(policy, batch, rows, cfg).cpu()


def moved(batch, before_T: torch.Tensor, after_T: torch.Tensor) -> dict[str, float]:
    """How the log-probabilities of a batch's sampled tokens have changed. The docstring of this file explains the
    numbers."""
    import trainer

    mask_T, adv_T = batch.fields["is_sampled"], batch.fields["adv"]
    step_T = (after_T - before_T) * mask_T
    right, wrong = (step_T[mask_T & is_so_T].mean().item() for is_so_T in (adv_T > 0, adv_T < 0))
    steps_S, advs_S = [], []
    for step_L, adv_L, mask_L in zip(*(x_T.split(batch.lens) for x_T in (step_T, adv_T, mask_T))):
        if mask_L.any():
            steps_S.append(step_L.sum().item())
            advs_S.append(adv_L[mask_L].mean().item())
    found = {"agreement": float(spearmanr(steps_S, advs_S).statistic)}
    return found | {"right": right, "wrong": wrong, "kl": trainer.k3(step_T[mask_T]).mean().item()}


async def evaluate(cfg, envs: dict, version: int) -> float:
    """The mean reward of the held-out examples. It is written to eval.jsonl as well."""
    import orchestrator

    client = orchestrator.Client(cfg)
    client.version = version
    await orchestrator.evaluate(version, envs, client)
    await client.http.close()
    lines = (run_directory(cfg) / "eval.jsonl").read_text().splitlines()[-len(envs) :]
    return float(np.mean([json.loads(line)["reward/mean"] for line in lines]))


def examine(run: Path, cfg, arms: dict, chosen: list[int], starts: dict[int, int], out: Path) -> dict:
    """Returns {arm: {number: its value after a step from each state}}. cfg: the run's, with `out` as its directory;
    arms: {name: cfg}; starts: from tools.start_from.reachable."""
    import orchestrator
    import trainer

    base = load_config(run / "config.toml")
    trainer.start_distributed(cfg)
    policy = trainer.build_policy(base)
    optimizer = trainer.make_optimizer(policy, base.trainer)
    sender = trainer.WeightSender(cfg, out, policy.device)
    envs = {e.name: load_environment(e.id, e.args) for e in cfg.env}
    loop = asyncio.new_event_loop()
    found = {name: {key: [] for key in SHOWN} for name in arms}
    version = -1
    for state in chosen:
        # 1. Go to the state, from a checkpoint and by the run's own steps.
        if version < starts[state]:
            version = starts[state]
            if version:
                checkpoints.load_checkpoint(run / f"checkpoints/step_{version:06d}", policy, optimizer)
        while version < state:
            repeat_step(policy, optimizer, run, version, base)
            version += 1
        kept = tree_map(lambda x: x.detach().clone(), checkpoints.state_of(policy, optimizer))
        later = trainer.load_batch(path_of(run, state + 1))
        before_T = score(policy, later, base)
        # 2. Take a step with each arm, and measure its effects.
        for name, arm in arms.items():
            batch = trainer.load_batch(path_of(run, state))
            if arm.orchestrator.advantage != base.orchestrator.advantage:
                functions = (find_function(c.orchestrator.advantage, orchestrator.ADVANTAGES) for c in (base, arm))
                old_T, new_T = (advantages_of(path_of(run, state), function) for function in functions)
                rest_T = batch.fields["adv"] - old_T  # of tokens that are imitated
                if rest_T[batch.fields["is_sampled"]].abs().max() > 1e-4:  # or a teacher has added to it
                    raise ConfigError(f"a batch lacks what {base.orchestrator.advantage} knew about its rollouts")
                batch.fields["adv"] = rest_T + new_T
            numbers, _ = trainer.train_step(policy, optimizer_at(policy, arm.trainer, kept), batch, state, arm)
            trainer.sync_weights(sender, policy, state + 1, cfg)
            line = {"state": state, "arm": name, "reward": loop.run_until_complete(evaluate(cfg, envs, state + 1))}
            line |= {"entropy": numbers["policy/entropy"]} | moved(later, before_T, score(policy, later, base))
            with open(out / "states.jsonl", "a") as file:
                file.write(to_json(line) + "\n")
            for key in SHOWN:
                found[name][key].append(line[key])
        optimizer = optimizer_at(policy, base.trainer, kept)
        say(f"state {state}: reward " + ", ".join(f"{name} {found[name]['reward'][-1]:.4f}" for name in arms))
    return found


def summary(found: dict) -> str:
    """The means of the arms, and the differences between the first arm and each of the others."""
    text = ""
    for name, numbers in found.items():
        text += f"{name}: " + ", ".join(f"{key} {np.mean(values):.4g}" for key, values in numbers.items()) + "\n"
    first, *others = found
    for other in others:
        for key in ("reward", "agreement"):
            differences = np.subtract(found[first][key], found[other][key])
            shown = with_interval(*interval(differences))
            text += f"{first} - {other}: {key} {shown}, p = {p_value(differences):.2g}\n"
    return text


def main(argv: list[str]):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("overrides", nargs="*", metavar="table.key=value", help="for all arms, e.g. of [eval]")
    parser.add_argument("--arm", action="append", required=True, metavar="KEY=VALUE ...")
    parser.add_argument("--states", type=int, default=20)
    parser.add_argument("--out", type=Path, metavar="DIR", help="default: microscope in the run")
    args = parser.parse_intermixed_args(argv)
    run = args.run.resolve()
    out = (args.out or run / "microscope").resolve()
    if out.exists():
        raise ConfigError(f"{out} is there already: remove it, or choose another --out")
    os.chdir(ROOT)  # as in launch.sh: relative paths to models start there
    starts = {state: start for state, start in reachable(run).items() if path_of(run, state + 1).exists()}
    states = sorted(state for state in starts if path_of(run, state).exists())
    if not states:
        raise ConfigError(f"{run}: no checkpoint or batches from the start lead to a state with two batches")
    chosen = sorted({states[round(i)] for i in np.linspace(0, len(states) - 1, args.states)})
    file = run / "config.toml"
    arms = {}
    for name, own in parse_arms(args.arm).items():
        for word in own:
            if not re.fullmatch(ARM, word.partition("=")[0]):
                raise ConfigError(f"--arm {word}: not one of the keys that make a step, {ARM}")
        arm = arms[name] = load_config(file, [*args.overrides, *own])
        check_names(arm)
    given = [f"output_dir={json.dumps(str(out.parent))}", f"run_name={json.dumps(out.name)}"]
    given += ["trainer.gpus=1", 'prepare=""']
    given += ["inference.urls=[]", *args.overrides]
    cfg = load_config(file, given)
    given.append(f"inference.gpus={cfg.inference.args['tensor_parallel_size']}")
    run_directory(cfg)
    os.environ["ROLEMODEL_RUN_ID"] = out.name
    with servers(load_config(file, given), [], out):
        cfg = load_config(file, given)  # with the server's address
        text = summary(examine(run, cfg, arms, chosen, starts, out))
    (out / "microscope.md").write_text(text, "utf-8")
    say(text)


if __name__ == "__main__":
    run_main("microscope", main)
