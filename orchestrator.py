"""orchestrator.py owns the rollouts: prompts to vLLM, token ids and logprobs back, rewards, groups, batch files.

    python orchestrator.py config.toml            # beside a server and trainer.py; launch.sh does this

A slot of batch n is admitted once version n - S is live (S = max_staleness), so at version n, where the trainer uses
it, no rollout is older than S. A group with nothing to learn from is refilled in the same slot. The order of rows is a
function of (seed, index); every batch file carries the ledger of indices that are issued but not committed.
"""

import asyncio
import functools
import itertools
import json
import math
import os
import random
import time
import traceback
import uuid
import zlib
from collections import Counter, deque
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp
import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

import configs
from configs import RunError, beat, fault, named, refuse_other
from env import Truncated, call, load_environment

# --- vLLM -------------------------------------------------------------------------------------------------------------


class ServerError(Exception):
    """What a server answers instead of 200."""


class Client:
    """vLLM behind its OpenAI endpoint, and the live version. aiohttp, since openai's client takes longer than all else
    that the orchestrator does for a rollout."""

    def __init__(self, cfg):
        self.cfg, self.urls, self.version = cfg, list(cfg.inference.urls), -1
        self.run_id = os.environ.get("ROLEMODEL_RUN_ID", cfg.run.run_name)  # the name under which the servers serve
        self.attempt = uuid.uuid4().hex[:8]  # a restarted trainer reaches a version again, with other weights

    @functools.cached_property
    def session(self):  # belongs to the event loop
        limit = aiohttp.ClientTimeout(self.cfg.orchestrator.generation_timeout)
        return aiohttp.ClientSession(timeout=limit, connector=aiohttp.TCPConnector(limit=0))

    async def follow(self, path):
        """Keeps self.version at what the trainer declared live."""
        while self.version < self.cfg.run.max_steps:
            self.version = int(path.read_text()) if path.exists() else -1
            await asyncio.sleep(0.02)

    async def until(self, version):
        while self.version < version:
            await asyncio.sleep(0.02)

    async def post(self, server, path, body):
        """-> the reply as a dict. A group keeps its number `server`, so it stays on one server and its prefix cache.
        A lost connection, 429 and 5xx are tried again after 0.5, 1 and 2 s, or what Retry-After says."""
        url = self.urls[server % len(self.urls)] + path
        for pause in (0.5, 1, 2, None):
            try:
                async with self.session.post(url, json=body) as reply:
                    status, text, after = reply.status, await reply.text(), reply.headers.get("Retry-After", "")
            except (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError) as e:  # a time-out is no such error
                status, text, after = 503, repr(e), ""
            if status == 200:
                return json.loads(text)
            if status == 400 and "maximum context length" in text:
                raise Truncated
            if not pause or (status != 429 and status < 500):
                raise ServerError(f"{url} answered {status}: {text[:500]}")
            await asyncio.sleep(min(int(after), 60) if after.isdecimal() else pause)


OTHERS = ("/lib/python", "/env.py", "/orchestrator.py")  # a traceback's frame that is in none of these is the task's

# --- rollouts ---------------------------------------------------------------------------------------------------------


@dataclass
class Rollout:
    """One conversation, with its token ids and what it earned."""

    state: dict  # the environment's: prompt, completion, answer, ...
    samples: list[dict] = field(default_factory=list)  # columns: tokens, mask (1: sampled), old_logp, turn
    versions: list[int] = field(default_factory=list)  # live at the start and at the end of each turn
    num_turns: int = 0  # messages sampled
    reward: float | None = None  # None: unscored
    turn_rewards: list[float] | None = None  # where the environment gives one per turn; reward is their sum
    metrics: dict = field(default_factory=dict)  # of each reward function
    truncated: bool = False
    trainable: bool = False  # has sampled tokens that are not masked
    forks: int = 0
    error: str = ""  # by which it was lost, and where
    where: str = ""


@dataclass
class Group:
    """The rollouts of one row, which are each other's baseline."""

    env: str
    index: int  # in the environment's order
    row: int
    rollouts: list[Rollout]
    dropped: str = ""  # why nothing is learned from it


def extend_or_fork(samples, prompt_ids, ids, logps, turn):
    """Token ids are the truth: a turn extends the last sample if its prompt begins with the ids held there. If it does
    not (a template that drops <think>, text that tokenises otherwise), a new sample begins -> True for such a fork."""
    is_fork = bool(samples) and samples[-1]["tokens"] != prompt_ids[: len(samples[-1]["tokens"])]
    if is_fork or not samples:
        samples.append({"tokens": [], "mask": [], "old_logp": [], "turn": []})
    last = samples[-1]
    new = prompt_ids[len(last["tokens"]) :]
    last["tokens"] += new + ids
    last["mask"] += [0] * len(new) + [1] * len(ids)
    last["old_logp"] += [0.0] * len(new) + logps
    last["turn"] += [turn] * (len(new) + len(ids))
    return is_fork


async def sample(client, server, prompt, n, tools=None, version=None, **override):
    """n completions of messages, or of text for base models -> [(message, prompt_ids, ids, logps, finish_reason,
    versions)]. version: the one to use where adapters can serve it. Raises Truncated where max_seq_len ends."""
    cfg, is_text, live = client.cfg, isinstance(prompt, str), client.version
    s = cfg.sampling._asdict() | override
    # HACK HERE: how the policy is sampled. The server cuts max_tokens to what max_seq_len leaves.
    body = {k: s[k] for k in ("temperature", "top_p", "min_p", "repetition_penalty", "stop", "max_tokens")}
    body |= {"presence_penalty": 0.0, "frequency_penalty": 0.0}  # a model's generation_config.json may have others
    body |= {"n": n, "top_k": s["top_k"] or -1, "return_token_ids": True}
    body["cache_salt"] = f"{client.attempt}.{live}"  # keys and values of other weights are never reused
    served = live if version is None else max(version, live - cfg.orchestrator.max_staleness)  # older ones are unloaded
    body["model"] = f"{client.run_id}-v{served}" if cfg.sends_adapters else client.run_id
    chat = {"messages": prompt, "logprobs": True, "chat_template_kwargs": s["chat_template_kwargs"]}
    body |= {"prompt": prompt, "logprobs": 0} if is_text else chat | ({"tools": tools} if tools else {})
    fault("gen", live)
    reply, choices = await client.post(server, f"/v1/{'' if is_text else 'chat/'}completions", body), []
    for c in sorted(reply["choices"], key=lambda c: c["index"]):
        logps = c["logprobs"]["token_logprobs"] if is_text else [x["logprob"] for x in c["logprobs"]["content"]]
        message = c["text"] if is_text else {"role": "assistant", "content": c["message"]["content"] or ""}
        if not is_text:  # what vLLM's parsers took out of the content belongs to the message, and to the next prompt
            message |= {k: v for k in ("tool_calls", "reasoning") if (v := c["message"].get(k))}
        prompt_ids = (c if is_text else reply)["prompt_token_ids"]
        choices.append((message, prompt_ids, c["token_ids"], logps, c["finish_reason"], [live, client.version]))
    return choices


async def guard(rollouts, work, timeout_s):
    """User code and HTTP may fail here and nowhere else: their rollouts are lost, and counted by the error."""
    try:
        async with asyncio.timeout(timeout_s):
            return await work
    except RunError:
        raise
    except Exception as e:
        frames = [f for f in traceback.extract_tb(e.__traceback__) if not any(part in f.filename for part in OTHERS)]
        where = f" in {frames[-1].name}, {Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else ""
        print_once(type(e).__name__)
        for r in rollouts:
            r.reward, r.turn_rewards, r.error = None, None, type(e).__name__
            r.where = f"{r.error}: {str(e)[:200]}{where}"


@functools.cache
def print_once(name):
    traceback.print_exc()


async def run_rollout(env, state, ask, first, asked_G, i, cfg):
    """A rollout from prompt to reward; its first turn is choice i of the group's request first() if it asks so."""
    r = Rollout(state)

    async def generate(prompt, tools=None):
        is_first = not r.num_turns and (prompt, tools) == asked_G
        choice = (await asyncio.shield(first()))[i] if is_first else (await ask(prompt, 1, tools))[0]
        message, prompt_ids, ids, logps, finish_reason, versions = choice
        if not r.num_turns and len(prompt_ids) > (cfg.orchestrator.max_prompt_len or math.inf):
            raise Truncated
        if len(ids) != len(logps) or not all(-1e4 < x < 1e-3 for x in logps):
            raise ValueError(f"server sent {len(ids)} ids and {len(logps)} logprobs, lowest {min(logps, default=0)}")
        r.forks += extend_or_fork(r.samples, prompt_ids, ids, logps, r.num_turns)
        r.versions, r.num_turns = r.versions + versions, r.num_turns + 1
        r.truncated |= finish_reason == "length"  # a turn cut at max_tokens; the conversation goes on
        return message

    async def play():
        try:
            await env.rollout(state, generate)
        except Truncated:
            r.truncated = True
            if not r.num_turns:  # the prompt itself is too long
                return
        await call(env.add_columns, state=state, samples=r.samples)
        reward, r.metrics = await env.rubric.score(state)
        r.turn_rewards = reward if isinstance(reward, list) else None
        if r.turn_rewards and len(reward) != r.num_turns:
            raise ValueError(f"{len(reward)} turn rewards for {r.num_turns} turns")
        r.reward = sum(reward) if r.turn_rewards else reward
        beat()

    await guard([r], play(), cfg.orchestrator.generation_timeout)
    is_masked = r.truncated and cfg.orchestrator.mask_truncated_completions
    r.trainable = not is_masked and any(any(s["mask"]) for s in r.samples)
    return r


async def run_group(env, row, n, ask, step, cfg):
    """n rollouts of one row. Their first turn is one request: one prompt, one cache fill. ask is sample, bound."""
    start = env.start(row)
    asked_G = (start["prompt"], start["tools"])

    @functools.cache
    def first():  # not before some rollout asks it: an environment may make a prompt of its own
        return asyncio.ensure_future(ask(start["prompt"], n, start["tools"]))

    states = [env.start(row) | {"step": step} for _ in range(n)]
    jobs = [run_rollout(env, s, ask, first, asked_G, i, cfg) for i, s in enumerate(states)]
    try:
        rollouts = await asyncio.gather(*jobs)
    finally:
        if first.cache_info().currsize:
            first().cancel()  # nobody is left to read it
    scored = [r for r in rollouts if r.reward is not None]
    work = env.rubric.score_group([r.state for r in scored])
    more = await guard(scored, work, cfg.orchestrator.generation_timeout)
    for r, (add, metrics) in zip(scored, [] if more is None else more or [(0.0, {})] * len(scored)):
        r.reward, r.metrics = r.reward + add, r.metrics | metrics
        r.turn_rewards = r.turn_rewards and [*r.turn_rewards[:-1], r.turn_rewards[-1] + add]
        if r.truncated and cfg.orchestrator.zero_truncated_completions:
            r.reward, r.turn_rewards = 0.0, None
    return rollouts


# --- which rows, and what becomes of them -----------------------------------------------------------------------------


class Order:
    """HACK HERE: which row of an environment comes next. The base order is a function of (seed, index): every row once
    per epoch; is_wanted may skip an index. ledger: {"next": index, "open": issued but not committed, "extra": {}}."""

    def __init__(self, rows, cfg, ledger=None):
        self.rows, self.cfg, ledger = rows, cfg, ledger or {"next": 0, "open": [], "extra": {}}
        self.next, self.open, self.extra = ledger["next"], set(ledger["open"]), ledger["extra"]  # extra: a subclass's
        self.again, self.epochs, self.surplus = sorted(self.open), {}, 0
        self.recent, self.useless = deque(maxlen=200), 0  # how the last rollouts were lost, "" if not; groups in a row

    def ledger(self):
        return {"next": self.next, "open": sorted(self.open), "extra": self.extra}

    def row(self, index):
        epoch, i = divmod(index, len(self.rows))
        if epoch not in self.epochs:
            rng = random.Random(f"{self.cfg.run.seed}:{epoch}")
            self.epochs[epoch] = rng.sample(range(len(self.rows)), len(self.rows))
        return self.epochs[epoch][i]

    def is_wanted(self, index, row, step):
        return True

    def take(self, step):
        """-> index, row number. Indices that were put back, or that a killed run had open, come first."""
        if self.again:
            return (index := self.again.pop(0)), self.row(index)
        for index in range(self.next, self.next + 2 * len(self.rows) + 1000):
            if self.is_wanted(index, self.row(index), step):
                self.next = index + 1
                self.open.add(index)
                return index, self.row(index)
        raise RunError(4, f"no row is left at step {step}: {type(self).__name__} wants none of them")

    def put_back(self, index):
        self.surplus += 1
        self.again = sorted([*self.again, index])

    def settle(self, group):
        """A group is in a committed batch."""
        self.open.discard(group.index)

    def count(self, group):
        """As soon as a group ends. RunError 4 where too many rollouts are lost, or nothing is there to learn."""
        o, self.useless = self.cfg.orchestrator, self.useless + 1 if group.dropped else 0
        self.recent.extend(r.where for r in group.rollouts)
        lost = Counter(filter(None, self.recent))
        if len(self.recent) >= 50 and lost.total() > o.max_error_share * len(self.recent):
            what = f"{lost.total()} of the last {len(self.recent)} rollouts of {group.env} were lost, mostly by"
            limit = f"orchestrator.max_error_share = {o.max_error_share}"
            raise RunError(4, f"{what} {lost.most_common(1)[0][0]} ({limit})")
        if self.useless > 10 * o.batch_size // o.rollouts_per_example:
            what = f"{self.useless} groups of {group.env} in a row had nothing to learn from, the last: {group.dropped}"
            raise RunError(4, f"{what}; bash launch.sh {self.cfg.path} --check says more")


def why_drop(rollouts, cfg):
    """Why a group has nothing to teach, or "". With gamma < 1 it is also how soon a reward comes."""
    scored, by_turn = [r for r in rollouts if r.reward is not None], cfg.trainer.gamma < 1
    if not any(r.num_turns or r.error for r in rollouts):
        return "long prompt"
    if len(scored) < 2:
        return "failed: " + ", ".join(sorted({r.error for r in rollouts}))
    if len({(r.reward, *(r.turn_rewards or ()), r.num_turns * by_turn) for r in scored}) == 1:
        return f"flat at reward {scored[0].reward:.3g}"
    return "" if any(r.trainable for r in scored) else "empty or masked"


def deal(ratios):
    """Environment of slot 0, 1, 2, ...: the one furthest below its share, so that none is ever a slot away from it."""
    given = dict.fromkeys(ratios, 0)
    for slot in itertools.count(1):
        name = max(ratios, key=lambda name: ratios[name] / sum(ratios.values()) * slot - given[name])
        given[name] += 1
        yield name


async def fill(name, env, order, num, n, client, slots, cfg):
    """`num` groups of an environment for batch n, and those dropped on the way. With oversampling more are under way;
    the lowest indices win, whoever finishes first: short rollouts get no advantage."""
    o, jobs, keep = cfg.orchestrator, {}, named(cfg.orchestrator.keep, {"": why_drop})

    async def job(index, row):
        async with slots:
            ask = functools.partial(sample, client, index)
            rollouts = await run_group(env, env.dataset[row], o.rollouts_per_example, ask, n, cfg)
        group = Group(name, index, row, rollouts, keep(rollouts, cfg))
        order.count(group)
        return group

    try:
        while True:
            # 1. As many groups under way as may be needed; one that teaches nothing is replaced.
            hopeful = sum(not task.done() or not task.result().dropped for task in jobs.values())
            for _ in range(math.ceil(num * o.oversampling_factor) - hopeful):
                index, row = order.take(n)
                jobs[index] = asyncio.create_task(job(index, row))
            # 2. Enough, in the order of their indices: what is left over comes again.
            done = [jobs[i].result() for i in itertools.takewhile(lambda i: jobs[i].done(), sorted(jobs))]
            useful = [i for i, group in enumerate(done) if not group.dropped]
            if len(useful) >= num:
                done = done[: useful[num - 1] + 1]
                for index in set(jobs) - {group.index for group in done}:
                    order.put_back(index)
                return done
            under_way = [task for task in jobs.values() if not task.done()]
            ended, _ = await asyncio.wait(under_way, timeout=30, return_when=asyncio.FIRST_COMPLETED)
            if not ended:
                have = f"{len(useful)} of {num} groups of {name}, {len(under_way)} under way"
                print(f"batch {n} waits: {have}", flush=True)
    finally:
        for task in jobs.values():
            task.cancel()


# --- batch files ------------------------------------------------------------------------------------------------------

KINDS = {"tokens": np.int32, "mask": np.bool_, "turn": np.int32}  # of columns; all others are float32


def save_batch(path, samples, info):
    """samples: dicts of columns (lists of numbers, one per token: tokens, mask, old_logp, turn, ...) and metadata.

    A safetensors file: each column flat over all samples, lens of the samples, and in its metadata JSON `samples` (what
    is no column), JSON `info` and `crc32` of all. trainer.load_batch reads it. One rename commits it."""
    names = {k for s in samples for k in s if type(s[k]) is list} - {"versions", "turn_rewards"}
    for s in samples:
        if wrong := [k for k in names if len(s.get(k, s["tokens"])) != len(s["tokens"])]:
            raise RunError(4, f"column {wrong[0]!r} has {len(s[wrong[0]])} values for {len(s['tokens'])} tokens")

    def column(name):
        parts = (s.get(name) or [math.nan] * len(s["tokens"]) for s in samples)
        return np.fromiter(itertools.chain.from_iterable(parts), KINDS.get(name, np.float32))

    data = {name: column(name) for name in names} | {"lens": np.array([len(s["tokens"]) for s in samples], np.int32)}
    about = {"samples": json.dumps([{k: v for k, v in s.items() if k not in names} for s in samples])}
    about, crc = about | {"info": json.dumps(info)}, 0
    for part in (about["samples"].encode(), about["info"].encode(), *(data[name] for name in sorted(data))):
        crc = zlib.crc32(part, crc)
    save_file(data, tmp := path.with_suffix(".tmp"), about | {"crc32": str(crc)})
    fault("batch_write", info.get("step", 0))
    os.replace(tmp, path)


def commit_batch(n, groups, orders, run_dir, cfg):
    """Metadata, metrics and the ledger; rollouts.jsonl first, then the file whose rename makes batch n exist."""
    samples, lines = [], []
    for g, (i, r) in [(group, pair) for group in groups for pair in enumerate(group.rollouts)]:
        about = {"env": g.env, "example": g.row, "group": g.index, "rollout": i}
        about |= {k: getattr(r, k) for k in "versions reward turn_rewards num_turns metrics truncated".split()}
        talk = {k: r.state[k] for k in ("prompt", "completion", "answer")} | {"error": r.where, "dropped": g.dropped}
        lines.append(json.dumps({"step": n, "version": min(r.versions, default=None)} | about | talk, default=str))
        for s in r.samples if r.reward is not None and not g.dropped else ():
            about |= {"age": n - min(r.versions), "temperature": cfg.sampling.temperature}
            samples.append(about | s | ({} if r.trainable else {"mask": [0] * len(s["mask"])}))
    for g in groups:
        orders[g.env].settle(g)
    with open(run_dir / "rollouts.jsonl", "a") as f:
        f.writelines(line + "\n" for line in lines)
    info = {"run": configs.identity(cfg), "step": n, "max_tokens": cfg.sampling.max_tokens}
    info["max_staleness"] = max([cfg.orchestrator.max_staleness, *(s["age"] for s in samples)])
    info["rollouts"] = len({(s["env"], s["group"], s["rollout"]) for s in samples})
    info["metrics"] = rollout_metrics(groups, samples) | {"group/surplus": sum(o.surplus for o in orders.values())}
    info["dropped"] = {f"{g.env}:{g.index}": g.dropped for g in groups if g.dropped}
    info["ledger"] = {name: order.ledger() for name, order in orders.items()}
    save_batch(run_dir / "batches" / f"step_{n:06d}.safetensors", samples, info)


def resume(run_dir, cfg):
    """-> number of the next batch, ledgers by environment. Batches since the checkpoint are trained again."""
    found = max((run_dir / "checkpoints").glob("step_??????"), default=None)
    path, ledger, n = found and found / "state.json", {}, 0
    try:
        if found:
            state = json.loads(path.read_text())
            refuse_other(state["run"], cfg, found)
            ledger, n = state["ledger"], state["step"]
        while (path := run_dir / "batches" / f"step_{n:06d}.safetensors").exists():
            info = json.loads(safe_open(path, "np").metadata()["info"])
            refuse_other(info["run"], cfg, path)
            ledger, n = info["ledger"], n + 1
    except (OSError, ValueError, TypeError, KeyError, SafetensorError) as e:
        raise RunError(
            6, f"{path} is damaged ({type(e).__name__}: {e}). Remove {found or path}, and start again"
        ) from e
    configs.cut_lines(run_dir / "rollouts.jsonl", lambda line: line["step"] < n)
    configs.cut_lines(run_dir / "eval.jsonl", lambda line: line["step"] <= n)
    return n, ledger


# --- metrics and evaluation -------------------------------------------------------------------------------------------


def mean(values):
    """None of nothing."""
    values = list(values)
    return float(np.mean(values)) if values else None


def rollout_metrics(groups, samples=()):
    """Of one batch: everything, and where several environments are mixed, env/<name>/ and the same for each. Rewards
    are over every scored rollout, also of dropped groups: without the flat ones the mean would mislead."""
    rollouts, names = [r for g in groups for r in g.rollouts], sorted({g.env for g in groups})
    rewards = np.array([r.reward for r in rollouts if r.reward is not None])
    answers = [[tuple(tuple(s["tokens"]) for s in r.samples) for r in g.rollouts if r.samples] for g in groups]
    reasons = Counter(g.dropped.split()[0].rstrip(":") if g.dropped else "kept" for g in groups)
    errors = Counter(r.error for r in rollouts if r.error)
    metrics = {"reward/mean": mean(rewards), "reward/std": float(rewards.std()), "rollout/num": len(rollouts)}
    metrics |= {f"reward/p{q}": float(np.percentile(rewards, q)) for q in (10, 50, 90)}
    metrics |= {f"reward/{name}": value for name, value in function_means(rollouts).items()}
    metrics |= {
        "rollout/tokens": mean(map(num_sampled, rollouts)),
        "rollout/turns": mean(r.num_turns for r in rollouts),
    }
    metrics["rollout/distinct"] = mean(len(set(a)) / len(a) for a in answers if a)  # share; 1 / G is collapse
    metrics["rollout/truncated"] = mean(r.truncated for r in rollouts)  # share
    metrics |= {"rollout/errors": errors.total(), "rollout/forks": sum(r.forks for r in rollouts)}
    metrics |= {f"error/{name}": num for name, num in errors.items()}
    metrics |= {f"group/{name}": reasons[name] for name in ("kept", "flat", "failed", "long", "empty")}
    if samples:  # in versions
        ages = [s["age"] for s in samples]
        metrics |= {"staleness/mean": mean(ages), "staleness/max": max(ages)}
    for name in names if len(names) > 1 else ():
        own = rollout_metrics([g for g in groups if g.env == name])
        metrics |= {f"env/{name}/{k}": v for k, v in own.items()}
    return metrics


def num_sampled(rollout):
    return sum(sum(s["mask"]) for s in rollout.samples)


def function_means(rollouts):
    names = sorted({name for r in rollouts for name in r.metrics})
    return {name: mean(r.metrics[name] for r in rollouts if name in r.metrics) for name in names}


def eval_metrics(groups, first=None):
    """Of one evaluation; groups: rollouts per row. A reward of 1 or more passes. ci95: half width, over rows. gain: of
    the rows' means over `first`, those at version 0; paired, as rows differ from each other far more than versions."""
    rollouts = [r for group in groups for r in group]
    rows = [[r.reward for r in group if r.reward is not None] for group in groups]
    scored, means = [rewards for rewards in rows if rewards], [mean(rewards) for rewards in rows]
    half = lambda values, ddof: float(1.96 * np.std(values, ddof=ddof) / math.sqrt(len(values)))  # noqa: E731
    metrics = {"reward/mean": mean(map(mean, scored)), "ci95": half([m for m in means if m is not None], 0)}
    metrics["pass@1"] = mean(mean(x >= 1 for x in rewards) for rewards in scored)
    metrics |= {"pass@k": mean(max(rewards) >= 1 for rewards in scored), "k": max(map(len, groups)), "n": len(scored)}
    metrics |= {"tokens": mean(map(num_sampled, rollouts)), "truncated": mean(r.truncated for r in rollouts)}
    metrics |= {"errors": sum(bool(r.error) for r in rollouts)} | function_means(rollouts)
    diffs = [b - a for a, b in zip(first or means, means) if None not in (a, b)]
    is_enough = len(diffs) > 1
    gains = {"gain": mean(diffs) if is_enough else None, "gain_ci95": half(diffs, 1) if is_enough else None}
    return metrics | gains | {"rows": means}


async def evaluate(due, lock, envs, client, run_dir, cfg):
    """The first eval.num_examples rows of each environment at version `due` -> a line of eval.jsonl for each.

    Batch `due` is not committed meanwhile, for at most eval.hold_s; where that is too short the weights change on the
    way, which version_last tells. Adapters serve the first version while it is loaded, S more."""
    await client.until(due)
    async with lock:  # after one that took longer than eval.every, at the version then live
        e, version, began, text = cfg.eval, client.version, time.time(), ""
        before = [json.loads(line) for line in (run_dir / "eval.jsonl").read_text().splitlines()]
        if any(line["step"] == version for line in before):
            return
        override = {"temperature": e.temperature, "max_tokens": e.max_tokens or cfg.sampling.max_tokens}
        slots = asyncio.Semaphore(max(1, cfg.orchestrator.max_concurrent // e.rollouts_per_example))

        async def one(env, i, row):
            async with slots:
                ask = functools.partial(sample, client, i, version=version, **override)
                return await run_group(env, row, e.rollouts_per_example, ask, version, cfg)

        for name, env in envs.items():
            rows = env.eval_dataset[: e.num_examples or None]
            groups = await asyncio.gather(*(one(env, i, row) for i, row in enumerate(rows)))
            if not any(r.reward is not None for group in groups for r in group):
                raise RunError(4, f"evaluation of {name} at version {version}: all is lost, by {groups[0][0].where}")
            first = next((line["rows"] for line in before if (line["step"], line["env"]) == (0, name)), None)
            last = client.version - cfg.orchestrator.max_staleness * cfg.sends_adapters
            line = {"step": version, "version_first": version, "version_last": max(version, last), "env": name}
            line |= eval_metrics(groups, first) | {"seconds": time.time() - began}
            text += json.dumps(line) + "\n"
            shown = [f"{k} {v:.3f}" for k, v in line.items() if type(v) is float] + [f"n {line['n']}"]
            print(f"eval {version} | {name}: {', '.join(shown)}, errors {line['errors']}", flush=True)
        with open(run_dir / "eval.jsonl", "a") as f:  # at once: a version's lines are there, or none
            f.write(text)


# --- the loop ---------------------------------------------------------------------------------------------------------


def prepare(cfg):
    """-> {name: environment}. Every mistake in these, or in the model's files, is told before a server starts."""
    envs, template = {}, cfg.run.chat_template
    for e in cfg.env:
        try:
            env = envs[e.name] = load_environment(e.id, e.args, cfg.path.parent)
        except Exception as error:
            frames = traceback.extract_tb(error.__traceback__)
            own = [f for f in frames if not any(part in f.filename for part in OTHERS + ("<frozen",))]
            where = f" ({Path(own[-1].filename).name}, line {own[-1].lineno})" if own else ""
            code = (
                2 if getattr(error, "name", "") == e.id.split("/")[-1].replace("-", "_") else getattr(error, "code", 4)
            )
            raise RunError(code, f"env.id = {e.id!r}: {type(error).__name__}: {error}{where}") from error
        if cfg.eval.every and not env.eval_dataset:
            raise RunError(2, f"eval.every = {cfg.eval.every}, but the environment {e.name!r} has no eval_dataset")
        if env.tools and not cfg.inference.args.get("enable_auto_tool_choice"):
            wanted = 'enable_auto_tool_choice = true and tool_call_parser, e.g. "hermes" for Qwen'
            raise RunError(2, f"the environment {e.name!r} has tools: inference.args needs {wanted}")
    if template and not Path(template).is_file():
        raise RunError(2, f"chat_template: no file {template!r}")
    from transformers import AutoConfig, AutoTokenizer  # takes seconds

    try:
        AutoConfig.from_pretrained(cfg.run.model)
        template = template or AutoTokenizer.from_pretrained(cfg.run.model).chat_template
    except (OSError, ValueError) as e:
        raise RunError(2, f"model = {cfg.run.model!r}: {str(e).splitlines()[0]}") from e
    if not template and any(isinstance(env.start(env.dataset[0])["prompt"], list) for env in envs.values()):
        raise RunError(2, f"{cfg.run.model} has no chat template: set chat_template, or give rows a text prompt")
    return envs


async def run(cfg):
    """Batches from the last committed one to max_steps, and evaluations. RunError, or an error of ours, ends it."""
    # 1. What can be wrong is found before a server starts, which launch.sh does once it is told.
    o, e, run_dir, last = cfg.orchestrator, cfg.eval, configs.run_directory(cfg), cfg.run.max_steps
    envs, (start, ledger) = prepare(cfg), resume(run_dir, cfg)
    make_order, extra_groups = named(o.order, {"": Order}), named(o.extra_groups, {"": lambda n: []})
    orders = {name: make_order(env.dataset, cfg, ledger.get(name)) for name, env in envs.items()}
    (run_dir / "config.toml").write_text(configs.to_toml(cfg))
    configs.tell_launcher("[orchestrator] ready")
    # 2. One task a batch, each S versions ahead of the trainer; evaluations beside them.
    os.environ["ROLEMODEL_POLICY_URL"] = f"{next(iter(cfg.inference.urls), '')}/v1"  # for a judge that is the policy
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(256))  # for blocking user code
    client, num_groups, lock = Client(cfg), o.batch_size // o.rollouts_per_example, asyncio.Lock()
    slots, batch = asyncio.Semaphore(o.max_concurrent // o.rollouts_per_example), None
    dealt = itertools.islice(deal({env.name: env.ratio for env in cfg.env}), start * num_groups, None)

    async def produce(n, shares, previous, evaluation):
        work = [fill(name, envs[name], orders[name], num, n, client, slots, cfg) for name, num in shares.items()]
        groups = sum(await asyncio.gather(*work), []) + extra_groups(n)
        if previous:
            await previous  # batches are committed in order
        if evaluation:  # without batch n there is no version after n
            await client.until(n)
            await asyncio.wait([evaluation], timeout=e.hold_s)
        commit_batch(n, groups, orders, run_dir, cfg)

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(client.follow(run_dir / "version"))
        for n in range(start, last + 1):
            is_due = e.every and (n % e.every == 0 or n == last)
            evaluation = tasks.create_task(evaluate(n, lock, envs, client, run_dir, cfg)) if is_due else None
            if n < last:
                await client.until(max(0, n - o.max_staleness))
                shares = Counter(itertools.islice(dealt, num_groups))
                batch = tasks.create_task(produce(n, shares, batch, evaluation))
    await client.session.close()


def main(argv):
    """argv: config.toml [table.key=value ...]. The loop is never closed: that would wait for user code in threads."""
    asyncio.new_event_loop().run_until_complete(run(configs.arguments(__doc__, argv)[0]))


if __name__ == "__main__":
    configs.run_role("orchestrator", main)
