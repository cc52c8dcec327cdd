"""orchestrator.py owns the rollouts: prompts to vLLM, token ids and logprobs back, rewards, advantages, batch files.

    python orchestrator.py config.toml            # beside a server and trainer.py; launch.sh does this

A slot of batch n is admitted once version n - S is live (S = max_staleness), so at version n, where the trainer uses
it, no rollout is older than S. A group with nothing to learn from is refilled in the same slot. The order of rows is a
function of (seed, index); every batch file carries the ledger of indices that are issued but not committed.
"""

import asyncio
import json
import math
import random
import traceback
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from configs.lib.batch import resume, save_batch
from configs.lib.checkpoint import identity
from configs.lib.client import Client
from configs.lib.evaluate import evaluate_when_due
from configs.lib.metrics import rollout_metrics
from configs.lib.runtime import RunError, arguments, run_directory, run_role
from env import load_environment
from trainer import compute_advantages

# --- rollouts ---------------------------------------------------------------------------------------------------------


@dataclass
class Rollout:
    state: dict  # the environment's: prompt, completion, answer, ...
    samples: list[dict] = field(
        default_factory=list
    )  # tokens, mask (1: sampled), logp, turn; more than one after a fork
    versions: list[int] = field(default_factory=list)  # live at the start and at the end of each turn
    reward: float | None = None  # None: unscored
    metrics: dict = field(default_factory=dict)  # of each reward function
    truncated: bool = False
    trainable: bool = False  # has sampled tokens that are not masked
    forks: int = 0
    error: str = ""


class Truncated(Exception): ...  # no token is left for another turn


def extend_or_fork(samples, prompt_ids, ids, logps, turn):
    """Token ids are the truth: a turn extends the last sample if its prompt begins with the ids held there. If it does
    not (a template that drops <think>, text that tokenises otherwise), a new sample begins -> True for such a fork."""
    is_fork = bool(samples) and samples[-1]["tokens"] != prompt_ids[: len(samples[-1]["tokens"])]
    if is_fork or not samples:
        samples.append({"tokens": [], "mask": [], "logp": [], "turn": turn})
    last = samples[-1]
    new = prompt_ids[len(last["tokens"]) :]
    last["tokens"] += new + ids
    last["mask"] += [0] * len(new) + [1] * len(ids)
    last["logp"] += [0.0] * len(new) + logps
    return is_fork


async def sample(client, prompt, n, server, version=None, **override):
    """n completions of messages, or of text for base models -> [(message, prompt_ids, ids, logps, finish_reason,
    versions)]. version: the one to use where adapters can serve it. Raises Truncated where max_seq_len ends."""
    cfg, is_text = client.cfg, isinstance(prompt, str)
    room = cfg.run.max_seq_len - len(client.tokenize(prompt))
    if room <= 0:
        raise Truncated
    s, live = cfg.sampling._asdict() | override, client.version
    # HACK HERE: how the policy is sampled
    body = {k: s[k] for k in ("temperature", "top_p", "min_p", "repetition_penalty", "stop")}
    body |= {"n": n, "max_tokens": min(s["max_tokens"], room), "top_k": s["top_k"] or -1, "return_token_ids": True}
    body["cache_salt"] = f"{client.attempt}.{live}"  # keys and values of other weights are never reused
    body["model"] = f"{client.run_id}-v{live if version is None else version}" if cfg.sends_adapters else client.run_id
    chat = {"messages": prompt, "logprobs": True, "chat_template_kwargs": s["chat_template_kwargs"]}
    body |= {"prompt": prompt, "logprobs": 0} if is_text else chat
    reply, choices = await client.post(server, "/completions" if is_text else "/chat/completions", body), []
    for c in sorted(reply["choices"], key=lambda c: c["index"]):
        logps = c["logprobs"]["token_logprobs"] if is_text else [x["logprob"] for x in c["logprobs"]["content"]]
        message = c["text"] if is_text else {"role": "assistant", "content": c["message"]["content"] or ""}
        prompt_ids = (c if is_text else reply)["prompt_token_ids"]
        choices.append((message, prompt_ids, c["token_ids"], logps, c["finish_reason"], [live, client.version]))
    return choices


async def run_rollout(env, row, client, first, prompt_G, i, server, cfg, **sampling):
    """A rollout from prompt to reward; its first turn is choice i of the group's request `first`, if it asks prompt_G.
    User code and HTTP may fail here and nowhere else: the rollout is then lost, and counted by the error's name."""
    r = Rollout(env.start(row))

    async def generate(prompt):
        shared = not r.versions and prompt == prompt_G
        choice = (
            (await asyncio.shield(first))[i] if shared else (await sample(client, prompt, 1, server, **sampling))[0]
        )
        message, prompt_ids, ids, logps, finish_reason, versions = choice
        if len(ids) != len(logps) or not all(-1e4 < x < 1e-3 for x in logps):
            raise ValueError(f"server sent {len(ids)} ids and {len(logps)} logprobs, lowest {min(logps, default=0)}")
        r.forks += extend_or_fork(r.samples, prompt_ids, ids, logps, r.state["turn"])
        r.versions += versions
        r.truncated |= finish_reason == "length"  # a turn cut at max_tokens; the conversation goes on
        return message

    try:
        async with asyncio.timeout(cfg.orchestrator.generation_timeout):
            try:
                await env.rollout(r.state, generate)
            except Truncated:
                r.truncated = True
            r.reward, r.metrics = await env.rubric.score(r.state)
    except RunError:
        raise
    except Exception as e:
        r.error = type(e).__name__
        if r.error not in client.seen:  # each kind is printed once, then only counted
            traceback.print_exc()
        client.seen.add(r.error)
    r.trainable = any(any(s["mask"]) for s in r.samples)
    r.trainable &= not (r.truncated and cfg.orchestrator.mask_truncated_completions)
    if r.truncated and r.reward is not None and cfg.orchestrator.zero_truncated_completions:
        r.reward = 0.0
    return r


async def run_group(env, row, client, n, server, cfg, **sampling):
    """n rollouts of one row. Their first turn is one request: one prompt, one cache fill."""
    prompt_G = env.start(row)["prompt"]
    first = asyncio.ensure_future(sample(client, prompt_G, n, server, **sampling))
    jobs = [run_rollout(env, row, client, first, prompt_G, i, server, cfg, **sampling) for i in range(n)]
    try:
        return await asyncio.gather(*jobs)
    finally:
        first.cancel()  # nobody is left to read it


# --- batches ----------------------------------------------------------------------------------------------------------


class Order:
    """HACK HERE: which row comes next, a function of (seed, index). ledger: {"next": int, "open": uncommitted}."""

    def __init__(self, rows, seed, ledger):
        self.rows, self.seed, self.epochs, self.lost = rows, seed, {}, 0
        self.next, self.open, self.again = ledger["next"], set(ledger["open"]), sorted(ledger["open"])

    def take(self):
        """-> index, row number, row. Indices that a killed run had open come first."""
        if not self.again:
            self.open.add(self.next)
            self.again, self.next = [self.next], self.next + 1
        index = self.again.pop(0)
        epoch, i = divmod(index, len(self.rows))
        if epoch not in self.epochs:
            self.epochs[epoch] = random.Random(f"{self.seed}:{epoch}").sample(range(len(self.rows)), len(self.rows))
        return index, self.epochs[epoch][i], self.rows[self.epochs[epoch][i]]


async def make_batch(n, env, client, order, slots, cfg):
    """-> [(index, row number, rollouts, reason)] by index; reason: why the group fell out and was replaced, or ""."""
    o, groups = cfg.orchestrator, []
    limit, num_groups = (
        min(o.max_prompt_len or math.inf, cfg.run.max_seq_len - 1),
        o.batch_size // o.rollouts_per_example,
    )

    async def fill():
        reason = "none yet"
        while reason:
            index, number, row = order.take()
            rollouts, reason = [], "long prompt"
            if len(client.tokenize(env.start(row)["prompt"])) <= limit:
                async with slots:
                    rollouts = await run_group(env, row, client, o.rollouts_per_example, index, cfg)
                reason = judge(rollouts)
            groups.append((index, number, rollouts, reason))
            order.lost = order.lost + 1 if reason else 0
            if order.lost > 10 * num_groups:
                seen = Counter(reason for *_, reason in groups)
                raise RunError(4, f"{order.lost} groups in a row had nothing to learn from; in batch {n}: {dict(seen)}")

    async with asyncio.TaskGroup() as tasks:
        for _ in range(num_groups):
            tasks.create_task(fill())
    return sorted(groups, key=lambda group: group[0])


def judge(rollouts):
    """Why a group has nothing to teach, or ""."""
    rewards = [r.reward for r in rollouts if r.reward is not None]
    if len(rewards) < 2:
        return "failed: " + ", ".join(sorted({r.error for r in rollouts}))
    if len(set(rewards)) == 1:
        return f"flat at reward {rewards[0]:.3g}"
    return "" if any(r.trainable for r in rollouts if r.reward is not None) else "empty or masked"


def commit_batch(n, groups, order, run_dir, cfg):
    """Advantages and metadata; rollouts.jsonl first, then the file whose rename makes batch n exist."""
    o, samples, lines = cfg.orchestrator, [], []
    kept = [[r for r in rollouts if r.reward is not None] for _, _, rollouts, reason in groups if not reason]
    table = compute_advantages([[vars(r) for r in rollouts] for rollouts in kept], cfg.trainer.advantage)
    advantage = {id(r): a for rollouts, row in zip(kept, table) for r, a in zip(rollouts, row)}
    for index, number, rollouts, reason in groups:
        for i, r in enumerate(rollouts):
            about = {"env": cfg.env.id, "example": number, "group": index, "rollout": i, "versions": r.versions}
            about |= {
                "reward": r.reward,
                "metrics": r.metrics,
                "truncated": r.truncated,
                "advantage": advantage.get(id(r)),
            }
            talk = {k: r.state[k] for k in ("prompt", "completion", "answer")} | {"error": r.error, "dropped": reason}
            lines.append({"step": n, "version": min(r.versions, default=None)} | about | talk)
            for s in r.samples if id(r) in advantage else ():
                more = {"age": n - min(r.versions), "temperature": cfg.sampling.temperature}
                samples.append(about | more | s | ({} if r.trainable else {"mask": [0] * len(s["mask"])}))
    with open(run_dir / "rollouts.jsonl", "a") as f:
        f.writelines(json.dumps(line, default=str) + "\n" for line in lines)
    order.open -= {index for index, *_ in groups}
    info = {"run": identity(cfg), "step": n, "max_staleness": o.max_staleness, "rollouts": len(advantage)}
    info |= {"max_tokens": cfg.sampling.max_tokens, "advantage": cfg.trainer.advantage}
    info |= {"dropped": {index: reason for index, _, _, reason in groups if reason}}
    info |= {"ledger": {"next": order.next, "open": sorted(order.open)}, "metrics": rollout_metrics(groups, samples)}
    save_batch(run_dir / "batches" / f"step_{n:06d}.safetensors", samples, info)


# --- the loop ---------------------------------------------------------------------------------------------------------


async def run(cfg):
    o, run_dir = cfg.orchestrator, run_directory(cfg)
    env = load_environment(cfg.env.id, cfg.env.args, cfg.path.parent)
    if cfg.eval.every and not env.eval_dataset:
        raise RunError(2, f"eval.every = {cfg.eval.every}, but the environment {cfg.env.id!r} has no eval_dataset")
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(64))  # for blocking reward functions
    start, ledger = resume(run_dir, cfg)
    client, order = Client(cfg), Order(env.dataset, cfg.run.seed, ledger)
    slots = asyncio.Semaphore(o.max_concurrent // o.rollouts_per_example)

    async def produce(n, previous):
        groups = await make_batch(n, env, client, order, slots, cfg)
        if previous:
            await previous  # batches are committed in order
        commit_batch(n, groups, order, run_dir, cfg)

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(client.follow(run_dir / "version", o.version_timeout))
        tasks.create_task(evaluate_when_due(run_group, env, client, run_dir, cfg))
        batch = None
        for n in range(start, cfg.run.max_steps):
            await client.until(max(0, n - o.max_staleness))
            batch = tasks.create_task(produce(n, batch))


if __name__ == "__main__":
    run_role("orchestrator", lambda argv: asyncio.run(run(arguments(__doc__, argv)[0])))
