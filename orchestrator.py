"""orchestrator.py owns the rollouts: prompts to vLLM, token ids and logprobs back, rewards, advantages, batch files.

    python orchestrator.py config.toml            # beside a server and trainer.py; launch.sh does this

Batch n takes groups_per_step groups; each is admitted once version n - S is live (S = max_staleness), so no rollout in
batch n is older than S when the trainer, at version n, uses it. A flat or failed group is refilled in the same batch.
The order of examples is a function of (seed, index); each batch carries the indices that are still open after it.
"""

import argparse
import asyncio
import json
import math
import os
import random
import time
import traceback
import uuid
from collections import Counter, deque
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from configs.runtime import RunError, cut_lines, latest_checkpoint, load_config, run_directory, run_role
from env import load_environment
from trainer import compute_advantages, load_batch, save_batch, sends_adapters

# --- rollouts ---------------------------------------------------------------------------------------------------------


@dataclass
class Sample:
    """A run of tokens to train on: what the server saw (mask 0) and what the policy sampled (mask 1, with its logp)."""

    tokens: list[int]
    mask: list[int]
    logp: list[float]
    turn: int  # of its first sampled token


@dataclass
class Rollout:
    state: dict
    samples: list[Sample] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)  # live at the start and end of each turn
    reward: float | None = None  # None: unscored
    metrics: dict = field(default_factory=dict)
    truncated: bool = False
    forks: int = 0
    error: str = ""


class Truncated(Exception):
    """No token is left for another turn."""


def extend_or_fork(samples, prompt_ids, token_ids, logps, turn):
    """Token ids are the truth: the turn extends the last sample if its prompt begins with the ids held there; where the
    chat template rewrote history (dropped <think>, another tokenisation), a new sample begins. -> True for a fork."""
    held = samples[-1].tokens if samples else []
    is_fork = held != prompt_ids[: len(held)]
    if is_fork or not samples:
        samples.append(Sample([], [], [], turn))
        held = []
    new, last = prompt_ids[len(held) :], samples[-1]
    last.tokens += new + token_ids
    last.mask += [0] * len(new) + [1] * len(token_ids)
    last.logp += [0.0] * len(new) + logps
    return is_fork


class Sampler:
    """vLLM behind its OpenAI endpoint, and the live version. Retries (connection, 408, 409, 429, 5xx) are openai's."""

    def __init__(self, cfg):
        import openai
        import transformers

        self.cfg, self.version = cfg, -1
        how = {"api_key": "none", "max_retries": 3, "timeout": cfg.orchestrator.generation_timeout}
        self.clients = [openai.AsyncOpenAI(base_url=f"{url}/v1", **how) for url in cfg.inference.urls]
        self.tokenizer = transformers.AutoTokenizer.from_pretrained(cfg.run.model)
        if cfg.run.chat_template:
            self.tokenizer.chat_template = Path(cfg.run.chat_template).read_text()
        self.run_id = os.environ.get("ROLEMODEL_RUN_ID", cfg.run.run_name)
        self.attempt = uuid.uuid4().hex[:8]  # a restarted trainer reaches a version again, with other weights

    async def follow(self, path, timeout_s):
        """Keeps self.version at what the trainer declared live."""
        since = time.monotonic()
        while True:
            version = int(path.read_text()) if path.exists() else -1
            if version != self.version:
                self.version, since = version, time.monotonic()
            elif time.monotonic() - since > timeout_s:
                raise RunError(3, f"no new version since {version} in {timeout_s:.0f} s (orchestrator.version_timeout)")
            await asyncio.sleep(0.02)

    async def until(self, version):
        while self.version < version:
            await asyncio.sleep(0.02)

    def tokenize(self, prompt):
        if isinstance(prompt, str):
            return self.tokenizer.encode(prompt)
        if not self.tokenizer.chat_template:
            raise RunError(
                2, f"{self.cfg.run.model} has no chat template: set chat_template, or give rows a text prompt"
            )
        more = self.cfg.sampling.chat_template_kwargs
        return self.tokenizer.apply_chat_template(prompt, add_generation_prompt=True, return_dict=False, **more)

    async def generate(self, prompt, n, server, pin=None, **override):
        """n completions of messages (or of text, for base models) -> [(message, prompt_ids, ids, logps, finish,
        versions)]. `pin`: a version, where adapters can serve it. Raises Truncated when max_seq_len leaves no room."""
        room = self.cfg.run.max_seq_len - len(self.tokenize(prompt))
        if room <= 0:
            raise Truncated
        s, first, is_text = self.cfg.sampling._asdict() | override, self.version, isinstance(prompt, str)
        # HACK HERE: how the policy is sampled
        body = {k: s[k] for k in ("temperature", "top_p", "min_p", "repetition_penalty", "stop")}
        body |= {"n": n, "max_tokens": min(s["max_tokens"], room), "top_k": s["top_k"] or -1, "return_token_ids": True}
        body["cache_salt"] = f"{self.attempt}.{first}"  # no prefix cache across versions
        adapters = sends_adapters(self.cfg.trainer)
        body["model"] = f"{self.run_id}-v{first if pin is None else pin}" if adapters else self.run_id
        more = {"messages": prompt, "logprobs": True, "chat_template_kwargs": s["chat_template_kwargs"]}
        body |= {"prompt": prompt, "logprobs": 0} if is_text else more
        client, path = self.clients[server % len(self.clients)], "/completions" if is_text else "/chat/completions"
        reply, choices = await client.post(path, cast_to=object, body=body), []
        for c in sorted(reply["choices"], key=lambda c: c["index"]):
            logps = c["logprobs"]["token_logprobs"] if is_text else [x["logprob"] for x in c["logprobs"]["content"]]
            message = c["text"] if is_text else {"role": "assistant", "content": c["message"]["content"] or ""}
            prompt_ids = c["prompt_token_ids"] if is_text else reply["prompt_token_ids"]
            choices.append((message, prompt_ids, c["token_ids"], logps, c["finish_reason"], [first, self.version]))
        return choices


async def run_rollout(env, row, sampler, first, i, server, cfg, **sampling):
    """One rollout from prompt to reward. Its first turn is choice i of the group's request `first`. The one place where
    user code and HTTP may fail: the rollout is then lost and counted by the error's name."""
    r = Rollout(env.start(row))

    async def generate(prompt):
        if r.truncated:
            raise Truncated
        is_first = not r.versions and prompt == r.state["prompt"]
        choice = (await first)[i] if is_first else (await sampler.generate(prompt, 1, server, **sampling))[0]
        message, prompt_ids, ids, logps, finish, versions = choice
        if len(ids) != len(logps) or not all(-1e4 < x <= 1e-4 for x in logps):
            raise ValueError(
                f"server sent {len(ids)} token ids with {len(logps)} logprobs, lowest {min(logps, default=0)}"
            )
        r.forks += extend_or_fork(r.samples, prompt_ids, ids, logps, r.state["turn"])
        r.versions += versions
        r.truncated = finish == "length"
        return message

    try:
        async with asyncio.timeout(cfg.orchestrator.generation_timeout):
            try:
                await env.rollout(r.state, generate)
            except Truncated:
                r.truncated = True
            r.reward, r.metrics = await env.rubric.score(r.state)
            if r.truncated and cfg.orchestrator.zero_truncated_completions:
                r.reward = 0.0
    except RunError:
        raise
    except Exception as e:
        r.error = type(e).__name__
        if r.error not in SEEN_ERRORS:
            SEEN_ERRORS.add(r.error)
            traceback.print_exc()
    return r


SEEN_ERRORS = set()  # each kind of error is printed once, then only counted


async def run_group(env, row, sampler, n, server, cfg, **sampling):
    """n rollouts of one row. Their first turn is one request, so that the prompt is computed once."""
    first = asyncio.ensure_future(sampler.generate(env.start(row)["prompt"], n, server, **sampling))
    return await asyncio.gather(*(run_rollout(env, row, sampler, first, i, server, cfg, **sampling) for i in range(n)))


# --- batches ----------------------------------------------------------------------------------------------------------


class Order:
    """HACK HERE: which row comes next, a function of (seed, index). `open`: indices issued, in no committed batch yet."""

    def __init__(self, rows, seed, ledger):
        self.rows, self.seed, self.next, self.open = rows, seed, ledger["next"], set(ledger["open"])
        self.again, self.epochs, self.lost = deque(sorted(self.open)), {}, 0

    def take(self):
        if self.again:
            return self.again.popleft()
        self.open.add(self.next)
        self.next += 1
        return self.next - 1

    def row(self, index):
        epoch, i = divmod(index, len(self.rows))
        if epoch not in self.epochs:
            self.epochs[epoch] = random.Random(f"{self.seed}:{epoch}").sample(range(len(self.rows)), len(self.rows))
        return self.epochs[epoch][i], self.rows[self.epochs[epoch][i]]


async def make_batch(n, env, sampler, order, slots, cfg):
    """-> [(index, row number, rollouts, reason)]: groups to train on (reason "") and those that fell out on the way."""
    o, groups = cfg.orchestrator, []

    async def fill():
        index, reason = None, "new"
        while reason:  # the same slot of the same batch, until a group has something to learn from
            index = order.take()
            number, row = order.row(index)
            async with slots:
                prompt_len = len(sampler.tokenize(env.start(row)["prompt"]))
                limit = min(o.max_prompt_len or math.inf, cfg.run.max_seq_len - 1)
                fits = prompt_len <= limit
                rollouts = await run_group(env, row, sampler, o.rollouts_per_example, index, cfg) if fits else []
            reason = judge(rollouts, cfg) if fits else "prompt too long"
            groups.append((index, number, rollouts, reason))
            order.lost = order.lost + 1 if reason else 0
            if order.lost > 10 * o.batch_size // o.rollouts_per_example:
                seen = Counter(reason for *_, reason in groups)
                raise RunError(4, f"{order.lost} groups in a row had nothing to learn from; in batch {n}: {dict(seen)}")

    async with asyncio.TaskGroup() as tasks:
        for _ in range(o.batch_size // o.rollouts_per_example):
            tasks.create_task(fill())
    return sorted(groups, key=lambda g: g[0])


def judge(rollouts, cfg):
    """Sets r.advantage -> why the group is dropped, or ""."""
    scored = [r for r in rollouts if r.reward is not None]
    if len(scored) < 2:
        return "failed: " + ", ".join(sorted({r.error for r in rollouts}))
    if len({r.reward for r in scored}) == 1:
        return f"flat at reward {scored[0].reward:.3g}"
    if not any(has_loss_tokens(r, cfg) for r in scored):
        return "no token to train on"
    return ""


def has_loss_tokens(r, cfg):
    return any(any(s.mask) for s in r.samples) and not (r.truncated and cfg.orchestrator.mask_truncated_completions)


def commit_batch(n, groups, order, run_dir, cfg):
    """Advantages, metadata and metrics; rollouts.jsonl first, then the file whose rename makes the batch exist."""
    o, samples, lines = cfg.orchestrator, [], []
    kept = [
        (index, [r for r in rollouts if r.reward is not None]) for index, _, rollouts, reason in groups if not reason
    ]
    table = compute_advantages([[vars(r) for r in rollouts] for _, rollouts in kept], cfg.trainer.advantage)
    advantage = {id(r): a for (_, rollouts), row in zip(kept, table) for r, a in zip(rollouts, row)}
    for index, number, rollouts, reason in groups:
        for i, r in enumerate(rollouts):
            about = {
                "env": cfg.env.id,
                "example": number,
                "index": index,
                "group": index,
                "rollout": i,
                "reward": r.reward,
            }
            about |= {"metrics": r.metrics, "truncated": r.truncated, "versions": r.versions}
            about |= {"advantage": advantage.get(id(r)), "temperature": cfg.sampling.temperature}
            talk = {"prompt": r.state["prompt"], "completion": r.state["completion"], "answer": r.state["answer"]}
            lines.append(
                {"step": n, "version": min(r.versions, default=None)}
                | about
                | talk
                | {"error": r.error, "dropped": reason}
            )
            for s in r.samples if id(r) in advantage else ():
                mask = s.mask if has_loss_tokens(r, cfg) else [0] * len(s.mask)
                age = n - min(r.versions)
                samples.append(about | {"turn": s.turn, "age": age, "tokens": s.tokens, "mask": mask, "logp": s.logp})
    with open(run_dir / "rollouts.jsonl", "a", errors="replace") as f:
        f.writelines(json.dumps(line, default=str) + "\n" for line in lines)
    order.open -= {index for index, *_ in groups}
    info = {"run": cfg.run.run_name, "step": n, "max_staleness": o.max_staleness, "rollouts": len(advantage)}
    info |= {"max_tokens": cfg.sampling.max_tokens, "advantage": cfg.trainer.advantage}
    info |= {"dropped": {index: reason for index, *_, reason in groups if reason}}
    info |= {"ledger": {"next": order.next, "open": sorted(order.open)}, "metrics": batch_metrics(groups, samples)}
    save_batch(run_dir / "batches" / f"step_{n:06d}.safetensors", samples, info)


def batch_metrics(groups, samples):
    """Rewards over every scored rollout, also of dropped groups: without the flat ones the mean would lie."""
    rollouts = [r for _, _, members, _ in groups for r in members]
    rewards = np.array([r.reward for r in rollouts if r.reward is not None])
    ages, lens = [s["age"] for s in samples], [sum(sum(s.mask) for s in r.samples) for r in rollouts]
    parts = {name for r in rollouts for name in r.metrics}
    metrics = {f"reward/{k}": float(np.mean([r.metrics[k] for r in rollouts if k in r.metrics])) for k in sorted(parts)}
    metrics |= {"reward/mean": float(rewards.mean()), "reward/std": float(rewards.std())}
    metrics |= {f"reward/p{q}": float(np.percentile(rewards, q)) for q in (10, 50, 90)}
    metrics |= {
        "rollout/tokens": float(np.mean(lens)),
        "rollout/truncated": float(np.mean([r.truncated for r in rollouts])),
    }
    metrics |= {"rollout/errors": sum(bool(r.error) for r in rollouts), "rollout/forks": sum(r.forks for r in rollouts)}
    reasons = Counter(reason.split()[0].rstrip(":") if reason else "kept" for *_, reason in groups)
    metrics |= {"group/kept": reasons["kept"], "group/flat": reasons["flat"], "group/failed": reasons["failed"]}
    metrics |= {"group/too_long": reasons["prompt"], "staleness/mean": float(np.mean(ages)), "staleness/max": max(ages)}
    return metrics


def resume(run_dir, cfg):
    """-> (number of the next batch, ledger). Committed batches are trained as they are; files written past them are cut."""
    found, ledger = latest_checkpoint(run_dir), {"next": 0, "open": []}
    start = step = int(found.name[5:]) if found else 0
    if found:
        ledger = json.loads((found / "state.json").read_text())["orchestrator"]["ledger"]
    while (path := run_dir / "batches" / f"step_{start:06d}.safetensors").exists():
        ledger, start = load_batch(path.read_bytes(), path).info["ledger"], start + 1
    cut_lines(run_dir / "rollouts.jsonl", lambda line: line["step"] < start)
    cut_lines(run_dir / "eval.jsonl", lambda line: line["step"] <= step)
    return start, ledger


# --- evaluation -------------------------------------------------------------------------------------------------------


async def evaluate(env, sampler, run_dir, cfg):
    """The first eval.num_examples rows of the eval split at the live version -> one line of eval.jsonl."""
    e, started, version, rows = (
        cfg.eval,
        time.time(),
        sampler.version,
        env.eval_dataset[: cfg.eval.num_examples or None],
    )
    sampling = {"temperature": e.temperature, "max_tokens": e.max_tokens or cfg.sampling.max_tokens, "pin": version}
    (run_dir / "eval_hold").write_text(str(started + e.hold_s))
    slots = asyncio.Semaphore(max(1, cfg.orchestrator.max_concurrent // e.rollouts_per_example))

    async def one(i, row):
        async with slots:
            return await run_group(env, row, sampler, e.rollouts_per_example, i, cfg, **sampling)

    groups = await asyncio.gather(*(one(i, row) for i, row in enumerate(rows)))
    (run_dir / "eval_hold").unlink()
    rollouts = [r for group in groups for r in group]
    scored = [[r.reward for r in group if r.reward is not None] for group in groups]
    means = np.array([np.mean(rewards) for rewards in scored if rewards])
    if not len(means):
        raise RunError(
            4, f"evaluation at version {version}: no rollout was scored; {Counter(r.error for r in rollouts)}"
        )
    line = {"step": version, "version_first": version, "version_last": sampler.version, "env": cfg.env.id}
    line |= {"reward/mean": float(means.mean()), "ci95": float(1.96 * means.std() / math.sqrt(len(means)))}
    line |= {"pass@1": float(np.mean([np.mean([x >= 1 for x in rewards]) for rewards in scored if rewards]))}
    line |= {
        "pass@k": float(np.mean([max(rewards) >= 1 for rewards in scored if rewards])),
        "k": e.rollouts_per_example,
    }
    line |= {"n": len(means), "tokens": float(np.mean([sum(sum(s.mask) for s in r.samples) for r in rollouts]))}
    line |= {
        "truncated": float(np.mean([r.truncated for r in rollouts])),
        "errors": sum(bool(r.error) for r in rollouts),
    }
    line |= {name: float(np.mean([r.metrics[name] for r in rollouts if r.metrics])) for name in rollouts[0].metrics}
    with open(run_dir / "eval.jsonl", "a") as f:
        f.write(json.dumps(line | {"seconds": time.time() - started}) + "\n")
    print(
        f"eval at version {version}: " + ", ".join(f"{k} {v:.3f}" for k, v in line.items() if type(v) is float),
        flush=True,
    )


async def evaluate_when_due(env, sampler, run_dir, cfg):
    """At version 0, every eval.every versions, and at the last one; each once, also over restarts."""
    path = run_dir / "eval.jsonl"
    done = {json.loads(line)["step"] for line in path.read_text().splitlines()}
    while cfg.eval.every:
        version = sampler.version
        is_last = version == cfg.run.max_steps
        if version >= 0 and version not in done and (is_last or version % cfg.eval.every == 0):
            await evaluate(env, sampler, run_dir, cfg)
            done.add(version)
        if is_last:
            return
        await asyncio.sleep(0.02)


# --- the loop ---------------------------------------------------------------------------------------------------------


async def run(cfg):
    o, run_dir = cfg.orchestrator, run_directory(cfg)
    try:
        env = load_environment(cfg.env.id, cfg.env.args, cfg.path.parent)
    except Exception as e:  # the task's module is user code
        traceback.print_exc()
        raise RunError(2, f"env.id = {cfg.env.id!r}: {type(e).__name__}: {e}") from e
    if cfg.eval.every and not env.eval_dataset:
        raise RunError(2, f"eval.every = {cfg.eval.every}, but environment {cfg.env.id!r} has no eval_dataset")
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(64))  # for reward functions
    start, ledger = resume(run_dir, cfg)
    sampler, order = Sampler(cfg), Order(env.dataset, cfg.run.seed, ledger)
    slots = asyncio.Semaphore(o.max_concurrent // o.rollouts_per_example)

    async def produce(n, previous):
        groups = await make_batch(n, env, sampler, order, slots, cfg)
        if previous:
            await previous  # batches are committed in order
        commit_batch(n, groups, order, run_dir, cfg)

    async with asyncio.TaskGroup() as tasks:
        follow = tasks.create_task(sampler.follow(run_dir / "version", o.version_timeout))
        evaluations = tasks.create_task(evaluate_when_due(env, sampler, run_dir, cfg))
        batch = None
        for n in range(start, cfg.run.max_steps):
            await sampler.until(max(0, n - o.max_staleness))
            batch = tasks.create_task(produce(n, batch))
        await sampler.until(cfg.run.max_steps)
        await evaluations
        follow.cancel()


def main(argv):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config")
    parser.add_argument("overrides", nargs="*", metavar="table.key=value")
    args = parser.parse_args(argv)
    asyncio.run(run(load_config(args.config, args.overrides)))


if __name__ == "__main__":
    run_role("orchestrator", main)
