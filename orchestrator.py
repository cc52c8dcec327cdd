"""orchestrator.py owns the rollouts: prompts to vLLM, token ids and logprobs back, rewards, groups, batch files.

    python orchestrator.py config.toml            # beside a server and trainer.py; launch.sh does this

A slot of batch n is admitted once version n - S is live (S = max_staleness), so at version n, where the trainer uses
it, no rollout is older than S. A group with nothing to learn from is refilled in the same slot. The order of rows is a
function of (seed, index); every batch file carries the ledger of indices that are issued but not committed.
"""

import asyncio
import functools
import gc
import itertools
import json
import os
import random
import time
import traceback
from collections import Counter, deque, namedtuple
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp
import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

import configs
from configs import RunError, beat, named, refuse_other, require, served_name
from env import Truncated, call, load_environment

# --- vLLM -------------------------------------------------------------------------------------------------------------


class ServerError(Exception):
    """What a server answers instead of 200."""


class Client:
    """vLLM behind its OpenAI endpoint, and the live version; made in an event loop. aiohttp, since openai's client
    takes longer than all else that the orchestrator does for a rollout."""

    def __init__(self, cfg):
        self.cfg, self.urls, self.version = cfg, list(cfg.inference.urls), -1
        self.attempt = os.urandom(4).hex()  # a restarted trainer reaches a version again, with other weights
        self.session = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(), connector=aiohttp.TCPConnector(limit=0))

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
            if status == 400 and ("maximum context length" in text or "max_tokens must be at least 1" in text):
                raise Truncated
            if not pause or (status != 429 and status < 500):
                raise ServerError(f"{url} answered {status}: {text[:500]}")
            await asyncio.sleep(min(int(after), 60) if after.isdecimal() else pause)


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
    error: str = ""  # by which it was lost, and where


# The rollouts of one row, which are each other's baseline. index: in the environment's order; dropped: why nothing is
# learned from them, or "".
Group = namedtuple("Group", "env index row rollouts dropped")


def extend_or_fork(samples, prompt_ids, ids, logps, turn):
    """Token ids are the truth: a turn extends the last sample if its prompt begins with the ids held there. If it does
    not (a template that drops <think>, text that tokenizes otherwise), the rollout forks: a new sample begins."""
    if not samples or samples[-1]["tokens"] != prompt_ids[: len(samples[-1]["tokens"])]:
        samples.append({"tokens": [], "mask": [], "old_logp": [], "turn": []})
    last, new = samples[-1], prompt_ids[len(samples[-1]["tokens"]) :]
    last["tokens"] += new + ids
    last["mask"] += [0] * len(new) + [1] * len(ids)
    last["old_logp"] += [0.0] * len(new) + logps
    last["turn"] += [turn] * (len(new) + len(ids))


async def sample(client, server, prompt, n, tools=None, version=None, **override):
    """n completions of messages, or of text for base models -> [(message, prompt_ids, ids, logps, finish_reason,
    versions)]. version: the one to use where adapters can serve it. Raises Truncated where max_seq_len ends."""
    cfg, is_text, live = client.cfg, isinstance(prompt, str), client.version
    s = cfg.sampling._asdict() | override
    # HACK HERE: how the policy is sampled. The server cuts max_tokens to what max_seq_len leaves.
    body = {k: s[k] for k in ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "stop", "max_tokens")}
    # a model's generation_config.json may have other penalties; keys and values of another version are not reused
    body |= {"presence_penalty": 0.0, "frequency_penalty": 0.0, "cache_salt": f"{client.attempt}.{live}"}
    served = live if version is None else max(version, live - cfg.orchestrator.max_staleness)  # older ones are unloaded
    body |= {"model": served_name(cfg, served), "n": n, "return_token_ids": True}
    chat = {"messages": prompt, "logprobs": True, "chat_template_kwargs": s["chat_template_kwargs"]}
    body |= {"prompt": prompt, "logprobs": 0} if is_text else chat | ({"tools": tools} if tools else {})
    reply, choices = await client.post(server, f"/v1/{'' if is_text else 'chat/'}completions", body), []
    for c in reply["choices"]:
        logps = c["logprobs"]["token_logprobs"] if is_text else [x["logprob"] for x in c["logprobs"]["content"]]
        # what vLLM's parsers took out of the content belongs to the message, and to the next prompt
        parsed = {k: c["message"][k] for k in ("tool_calls", "reasoning") if not is_text and c["message"].get(k)}
        message = c["text"] if is_text else {"role": "assistant", "content": c["message"]["content"] or ""} | parsed
        prompt_ids = (c if is_text else reply)["prompt_token_ids"]
        choices.append((message, prompt_ids, c["token_ids"], logps, c["finish_reason"], [live, client.version]))
    return choices


def culprit(error, most=200):
    """-> type and text of an error, and the line of the user's code where it arose."""
    ours = ("/lib/python", "/env.py", "/tool_env.py", "/orchestrator.py", "<frozen")
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not any(part in f.filename for part in ours)]
    where = f" in {frames[-1].name}, {Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else ""
    return f"{type(error).__name__}: {str(error)[:most]}{where}"


async def guard(rollouts, work, timeout_s):
    """User code and HTTP may fail here and nowhere else: their rollouts are lost, and counted by the error."""
    try:
        async with asyncio.timeout(timeout_s):
            return await work
    except (Exception, asyncio.CancelledError, SystemExit) as e:  # user code may raise the last two, too
        if isinstance(e, RunError) or asyncio.current_task().cancelling():
            raise
        for r in rollouts:
            r.reward, r.turn_rewards, r.error = None, None, culprit(e)


async def run_rollout(env, state, ask, first, start, i, cfg):
    """A rollout from prompt to reward; its first turn is choice i of the group's request first() if it asks so."""
    r, o, asked = Rollout(state), cfg.orchestrator, []

    async def generate(prompt, tools=None):
        is_first = not asked and (prompt, tools) == (start["prompt"], start["tools"])
        asked.append(prompt)  # before any wait: of two calls at once only one is the first
        choice = (await asyncio.shield(first()))[i] if is_first else (await ask(prompt, 1, tools))[0]
        message, prompt_ids, ids, logps, finish_reason, versions = choice
        if not r.num_turns and len(prompt_ids) > (o.max_prompt_len or np.inf):
            raise Truncated
        if len(ids) != len(logps) or not all(-1e4 < x < 1e-3 for x in logps):
            raise ValueError(f"server sent {len(ids)} ids and {len(logps)} logprobs, lowest {min(logps, default=0)}")
        beat()
        extend_or_fork(r.samples, prompt_ids, ids, logps, r.num_turns)
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
        turns = reward if isinstance(reward, list) else None
        if turns and len(turns) != r.num_turns:
            raise ValueError(f"{len(turns)} turn rewards for {r.num_turns} turns")
        r.reward, r.turn_rewards = sum(turns) if turns else reward, turns

    await guard([r], play(), o.generation_timeout)
    r.trainable = not (r.truncated and o.mask_truncated_completions) and any(any(s["mask"]) for s in r.samples)
    return r


async def run_group(env, row, n, ask, step, cfg):
    """n rollouts of one row. Their first turn is one request: one prompt, one cache fill. ask is sample, bound."""
    start, o = env.start(row), cfg.orchestrator
    # not before some rollout asks it: an environment may make a prompt of its own
    first = functools.cache(lambda: asyncio.ensure_future(ask(start["prompt"], n, start["tools"])))
    jobs = [run_rollout(env, env.start(row) | {"step": step}, ask, first, start, i, cfg) for i in range(n)]
    try:
        rollouts = await asyncio.gather(*jobs)
    finally:
        first().cancel()  # nobody is left to read it; what nobody asked never begins
    scored = [r for r in rollouts if r.reward is not None]
    more = await guard(scored, env.rubric.score_group([r.state for r in scored]), o.generation_timeout)
    for r, (add, metrics) in zip(scored, more or []):
        r.reward, r.metrics = r.reward + add, r.metrics | metrics
        r.turn_rewards = r.turn_rewards and [*r.turn_rewards[:-1], r.turn_rewards[-1] + add]
    for r in [r for r in scored if o.zero_truncated_completions and r.truncated and r.reward is not None]:
        r.reward, r.turn_rewards = 0.0, None
    return rollouts


# --- which rows, and what becomes of them -----------------------------------------------------------------------------


class Order:
    """HACK HERE: which row of an environment comes next. The base order is a function of (seed, index): every row once
    per epoch. ledger: {"next": index, "open": issued but not committed, "extra": {}}."""

    def __init__(self, rows, cfg, ledger=None):
        self.rows, self.cfg, ledger = rows, cfg, ledger or {"next": 0, "open": [], "extra": {}}
        self.next, self.open, self.extra = ledger["next"], set(ledger["open"]), ledger["extra"]  # extra: a subclass's
        self.again = sorted(self.open)
        self.recent, self.useless = deque(maxlen=200), 0  # how the last rollouts were lost, "" if not; groups in a row

    def ledger(self):
        return {"next": self.next, "open": sorted(self.open), "extra": self.extra}

    @functools.cache  # noqa: B019  an order lives as long as the run
    def epoch(self, number):
        return random.Random(f"{self.cfg.run.seed}:{number}").sample(range(len(self.rows)), len(self.rows))

    def take(self, step):
        """-> index, row number. Indices that a killed run had open come first."""
        index = self.again.pop(0) if self.again else self.next
        self.next = max(self.next, index + 1)
        self.open.add(index)
        return index, self.epoch(index // len(self.rows))[index % len(self.rows)]

    def settle(self, group):
        """A group is in a committed batch."""
        self.open.discard(group.index)

    def count(self, group):
        """As soon as a group ends. RunError 4 where too many rollouts are lost, or nothing is there to learn."""
        o, self.useless = self.cfg.orchestrator, self.useless + 1 if group.dropped else 0
        self.recent.extend(r.error for r in group.rollouts)
        lost, num = Counter(filter(None, self.recent)), len(self.recent)
        if num >= 50 and lost.total() > o.max_error_share * num:
            what = f"{lost.total()} of the last {num} rollouts of {group.env} were lost, mostly by "
            raise RunError(4, f"{what}{max(lost, key=lost.get)} (orchestrator.max_error_share = {o.max_error_share})")
        what = f"{self.useless} groups of {group.env} in a row had nothing to learn from, the last: {group.dropped}"
        require(self.useless <= 10 * o.batch_size // o.rollouts_per_example, 4, f"{what}; launch.sh --check says more")


def why_drop(rollouts, cfg):
    """Why a group has nothing to teach, or "". With gamma < 1 it is also how soon a reward comes."""
    scored, by_turn = [r for r in rollouts if r.reward is not None], cfg.trainer.gamma < 1
    if not any(r.num_turns or r.error for r in rollouts):
        return "long prompt"
    if len(scored) < 2:
        return "failed: " + ", ".join(sorted({r.error.split(":")[0] for r in rollouts}))
    if len({(r.reward, *(r.turn_rewards or ()), r.num_turns * by_turn) for r in scored}) == 1:
        return f"flat at reward {scored[0].reward:.3g}"
    return "" if any(r.trainable for r in scored) else "empty or masked"


def deal(ratios):
    """Environment of slot 0, 1, 2, ...: the one furthest below its share."""
    given = dict.fromkeys(ratios, 0)
    for slot in itertools.count(1):
        name = max(ratios, key=lambda name: ratios[name] / sum(ratios.values()) * slot - given[name])
        given[name] += 1
        yield name


async def fill(order, num, n, job, cfg):
    """`num` groups for batch n that teach something, and those that were dropped on the way: each slot goes on to the
    next row until it has one. job(index, row) -> Group."""
    groups = []

    async def slot():
        while (group := await job(*order.take(n))).dropped:
            groups.append(group)
        groups.append(group)

    await asyncio.gather(*(slot() for _ in range(num)))
    return sorted(groups, key=lambda group: group.index)


# --- batch files ------------------------------------------------------------------------------------------------------

KINDS = {"tokens": np.int32, "mask": np.bool_, "turn": np.int32}  # of columns; all others are float32


def save_batch(path, samples, info):
    """samples: dicts of columns (lists or arrays of a number per token: tokens, mask, old_logp, ...) and metadata.

    A safetensors file: each column flat over all samples, lens of the samples, and in its metadata JSON `samples` (what
    is no column) and JSON `info`. trainer.load_batch reads it. One rename commits it. Raises RunError 4 for what must
    never be trained on: columns of another length, old_logp that is not finite."""
    names = {k for s in samples for k in s if isinstance(s[k], list | np.ndarray)} - {"versions", "turn_rewards"}
    data = {"lens": np.array([len(s["tokens"]) for s in samples], np.int32)}
    for name in names:
        parts = [s[name] if name in s else [np.nan] * len(s["tokens"]) for s in samples]
        if wrong := [(len(part), num) for part, num in zip(parts, data["lens"]) if len(part) != num]:
            raise RunError(4, f"column {name!r} has {wrong[0][0]} values for {wrong[0][1]} tokens")
        data[name] = np.fromiter(itertools.chain.from_iterable(parts), KINDS.get(name, np.float32))
    # nan, where the text is one that no policy of ours has said
    is_known = np.isfinite(data["old_logp"]) | (np.isnan(data["old_logp"]) & bool(info.get("offline")))
    is_right = is_known.all() and not any(s["mask"][0] for s in samples)
    require(is_right, 4, f"{path}: old_logp is not finite, or a sample's first token is a loss token")
    about = {"samples": json.dumps([{k: v for k, v in s.items() if k not in names} for s in samples])}
    save_file(data, tmp := path.with_suffix(".tmp"), about | {"info": json.dumps(info)})
    os.replace(tmp, path)


def commit_batch(n, groups, orders, run_dir, cfg):
    """Metadata, metrics and the ledger; rollouts.jsonl first, then the file whose rename makes batch n exist."""
    samples, lines = [], []
    for g, (i, r) in [(group, pair) for group in groups for pair in enumerate(group.rollouts)]:
        about = {"env": g.env, "example": g.row, "group": g.index, "rollout": i}
        about |= {k: getattr(r, k) for k in "versions reward turn_rewards num_turns metrics truncated".split()}
        talk = {k: r.state[k] for k in ("prompt", "completion", "answer")} | {"error": r.error, "dropped": g.dropped}
        lines.append(json.dumps({"step": n, "version": min(r.versions, default=None)} | about | talk, default=str))
        for s in r.samples if r.reward is not None and not g.dropped else ():
            about |= {"age": n - min(r.versions), "temperature": cfg.sampling.temperature}
            samples.append(about | s | ({} if r.trainable else {"mask": [0] * len(s["mask"])}))
    for g in groups:
        orders[g.env].settle(g)
    with open(run_dir / "rollouts.jsonl", "a") as f:
        f.writelines(line + "\n" for line in lines)
    info = {"run": configs.identity(cfg), "step": n, "max_tokens": cfg.sampling.max_tokens}
    info["rollouts"] = len({(s["env"], s["group"], s["rollout"]) for s in samples})
    info["dropped"] = {f"{g.env}:{g.index}": g.dropped for g in groups if g.dropped}
    info |= {"metrics": rollout_metrics(groups, samples), "ledger": {name: o.ledger() for name, o in orders.items()}}
    save_batch(run_dir / "batches" / f"step_{n:06d}.safetensors", samples, info)


def resume(run_dir, cfg):
    """-> the checkpoint's step, number of the next batch, ledgers by environment. Batches between are trained again."""
    found, path, ledger, n = max((run_dir / "checkpoints").glob("step_??????"), default=None), None, {}, 0
    try:
        if found:
            state = json.loads((path := found / "state.json").read_text())
            refuse_other(state["run"], cfg, found)
            ledger, n = state["ledger"], state["step"]
        step = n
        while (path := run_dir / "batches" / f"step_{n:06d}.safetensors").exists():
            info = json.loads(safe_open(path, "np").metadata()["info"])
            refuse_other(info["run"], cfg, path)
            ledger, n = info["ledger"], n + 1
    except (OSError, ValueError, TypeError, KeyError, SafetensorError) as e:
        what = found if path.name == "state.json" else f"{path} and the batches after it"
        raise RunError(6, f"{path} is damaged ({type(e).__name__}: {e}). Remove {what}, and start again") from e
    if late := [p for p in (run_dir / "batches").glob("step_*.safetensors") if p.stem > f"step_{n:06d}"]:
        raise RunError(6, f"{min(late)} is there, but no batch {n}. Remove all that come after, and start again")
    # With the same configuration the versions after the checkpoint come again, bit for bit, else others do.
    old = run_dir / "config.toml"
    is_same = old.exists() and old.read_text() == configs.to_toml(cfg)
    configs.cut_lines(run_dir / "rollouts.jsonl", lambda line: line["step"] < n)
    configs.cut_lines(run_dir / "eval.jsonl", lambda line: line["step"] <= (n if is_same else step))
    return step, n, ledger


# --- metrics and evaluation -------------------------------------------------------------------------------------------


def mean(values):
    """None of nothing."""
    return float(np.mean(values)) if (values := list(values)) else None


def sampled(rollout):
    return sum(sum(s["mask"]) for s in rollout.samples)


def function_means(rollouts):
    names = sorted({name for r in rollouts for name in r.metrics})
    return {name: mean(r.metrics[name] for r in rollouts if name in r.metrics) for name in names}


def rollout_metrics(groups, samples=()):
    """Of one batch: everything, and where several environments are mixed, env/<name>/ and the same for each. Rewards
    are over every scored rollout, also of dropped groups: without the flat ones the mean would mislead."""
    rollouts, names = [r for g in groups for r in g.rollouts], sorted({g.env for g in groups})
    rewards, ages = np.array([r.reward for r in rollouts if r.reward is not None]), [s["age"] for s in samples]
    answers = [[tuple(tuple(s["tokens"]) for s in r.samples) for r in g.rollouts if r.samples] for g in groups]
    reasons = Counter(g.dropped.split()[0].rstrip(":") if g.dropped else "kept" for g in groups)
    errors = Counter(r.error.split(":")[0] for r in rollouts if r.error)
    metrics = {"reward/mean": mean(rewards), "reward/std": float(rewards.std()), "rollout/num": len(rollouts)}
    metrics |= {f"reward/p{q}": float(np.percentile(rewards, q)) for q in (10, 50, 90)}
    metrics |= {f"reward/{name}": value for name, value in function_means(rollouts).items()}
    metrics["rollout/distinct"] = mean(len(set(a)) / len(a) for a in answers if a)  # share; 1 / G is collapse
    metrics |= {"rollout/truncated": mean(r.truncated for r in rollouts), "rollout/errors": errors.total()}
    metrics |= {"rollout/turns": mean(r.num_turns for r in rollouts), "rollout/tokens": mean(map(sampled, rollouts))}
    metrics["rollout/forks"] = sum(max(len(r.samples) - 1, 0) for r in rollouts)
    metrics |= {f"error/{name}": num for name, num in errors.items()}
    metrics |= {f"group/{name}": reasons[name] for name in ("kept", "flat", "failed", "long", "empty")}
    metrics |= {"staleness/mean": mean(ages), "staleness/max": max(ages)} if ages else {}  # in versions
    own = {name: rollout_metrics([g for g in groups if g.env == name]) for name in names if len(names) > 1}
    return metrics | {f"env/{name}/{k}": v for name in own for k, v in own[name].items()}


def eval_metrics(groups):
    """Of one evaluation; groups: rollouts per row. A reward of 1 or more passes. rows: their mean rewards, which
    tools/watch.py compares with those at version 0."""
    rows, rollouts = [[r.reward for r in group if r.reward is not None] for group in groups], sum(groups, [])
    scored, one = [rewards for rewards in rows if rewards], 1 - 1e-6  # of floats, 0.7 + 0.2 + 0.1 is below 1
    metrics = {"reward/mean": mean(map(mean, scored)), "pass@1": mean(mean(x > one for x in row) for row in scored)}
    metrics |= {"pass@k": mean(max(row) > one for row in scored), "k": max(map(len, groups)), "n": len(scored)}
    metrics |= {"tokens": mean(map(sampled, rollouts)), "truncated": mean(r.truncated for r in rollouts)}
    metrics |= {"errors": sum(bool(r.error) for r in rollouts)} | function_means(rollouts)
    return metrics | {"rows": [mean(rewards) for rewards in rows]}


async def evaluate(due, lock, envs, client, run_dir, cfg):
    """The first eval.num_examples rows of each environment at version `due` -> a line of eval.jsonl for each.

    Batch `due` is not committed meanwhile, for at most eval.hold_s; where that is too short the weights change on the
    way, which version_last tells. Adapters serve the first version while it is loaded, S more."""
    await client.until(due)
    async with lock:  # after one that took longer than eval.every, at the version then live
        e, version, began, text, path = cfg.eval, client.version, time.time(), "", run_dir / "eval.jsonl"
        if any(json.loads(line)["step"] in (due, version) for line in path.read_text().splitlines()):
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
            last = client.version - cfg.orchestrator.max_staleness * cfg.sends_adapters
            line = {"step": version, "version_first": version, "version_last": max(version, last), "env": name}
            line |= eval_metrics(groups) | {"seconds": time.time() - began}
            cause = groups[0][0].error or "prompts that are too long"
            require(line["n"], 4, f"evaluation of {name} at version {version}: all is lost, by {cause}")
            text += json.dumps(line) + "\n"
            shown = [f"{k} {line[k]:.3f}" for k in ("reward/mean", *function_means(sum(groups, [])))]
            print(f"eval {version} | {name}:", *shown, f"n {line['n']} errors {line['errors']}", flush=True)
        with open(path, "a") as f:  # at once: a version's lines are there, or none
            f.write(text)


# --- the loop ---------------------------------------------------------------------------------------------------------


def prepare(cfg):
    """-> {name: environment}. Every mistake in these, or in the model's files, is told before a server starts."""
    envs, model, template = {}, cfg.run.model, cfg.run.chat_template
    for e in cfg.env:
        try:
            env = envs[e.name] = load_environment(e.id, e.args)
        except Exception as error:
            is_unknown = getattr(error, "name", "") == e.id.split("/")[-1].replace("-", "_")  # no such module
            code = 2 if is_unknown or getattr(error, "code", 4) == 2 else 4
            raise RunError(code, f"env.id = {e.id!r}: {culprit(error, 2000)}") from error
        has_rows, parses = not cfg.eval.every or env.eval_dataset, cfg.inference.args.get("enable_auto_tool_choice")
        require(has_rows, 2, f"eval.every = {cfg.eval.every}, but the environment {e.name!r} has no eval_dataset")
        wanted = 'enable_auto_tool_choice = true and tool_call_parser, e.g. "hermes" for Qwen'
        require(parses or not env.tools, 2, f"the environment {e.name!r} has tools: inference.args needs {wanted}")
    is_path = model.startswith(("/", ".", "~")) or model.count("/") > 1
    require(Path(model).is_dir() or not is_path, 2, f"model = {model!r}: there is no such directory")
    from transformers import AutoConfig, AutoTokenizer  # takes seconds

    try:
        AutoConfig.from_pretrained(model)
        template = Path(template).read_text() if template else AutoTokenizer.from_pretrained(model).chat_template
    except (OSError, ValueError) as e:
        raise RunError(2, f"model = {model!r}, chat_template: {str(e).splitlines()[0]}") from e
    is_text = all(isinstance(env.start(env.dataset[0])["prompt"], str) for env in envs.values())
    require(template or is_text, 2, f"{model} has no chat template: set chat_template, or give rows a text")
    return envs


async def run(cfg):
    """Batches from the last committed one to max_steps, and evaluations. RunError, or an error of ours, ends it."""
    # 1. What can be wrong is found before a server starts, which launch.sh does once it is told.
    o, e, run_dir, last = cfg.orchestrator, cfg.eval, configs.run_directory(cfg), cfg.run.max_steps
    envs, (step, start, ledger) = prepare(cfg), resume(run_dir, cfg)
    make_order, keep = named(o.order, {"": Order}), named(o.keep, {"": why_drop})
    extra_groups = named(o.extra_groups, {"": lambda n: []})
    fill_with = named("orders:ahead" if o.oversampling_factor > 1 else "", {"": fill})
    orders = {name: make_order(env.dataset, cfg, ledger.get(name)) for name, env in envs.items()}
    (run_dir / "config.toml").write_text(configs.to_toml(cfg))
    configs.tell_launcher("[orchestrator] ready")
    gc.freeze()  # or each collection walks all that transformers has imported, a tenth of this process's time
    # 2. One task a batch, each S versions ahead of the trainer; evaluations beside them.
    os.environ["ROLEMODEL_POLICY_URL"] = f"{next(iter(cfg.inference.urls), '')}/v1"  # for a judge that is the policy
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(256))  # for blocking user code
    client, num_groups, lock = Client(cfg), o.batch_size // o.rollouts_per_example, asyncio.Lock()
    slots, batch = asyncio.Semaphore(o.max_concurrent // o.rollouts_per_example), None
    dealt = itertools.islice(deal({env.name: env.ratio for env in cfg.env}), start * num_groups, None)

    async def job(name, n, index, row):
        async with slots:
            ask = functools.partial(sample, client, index)
            rollouts = await run_group(envs[name], envs[name].dataset[row], o.rollouts_per_example, ask, n, cfg)
        judge = keep if any(r.trainable and r.reward is not None for r in rollouts) else why_drop
        orders[name].count(group := Group(name, index, row, rollouts, judge(rollouts, cfg)))
        return group

    async def produce(n, shares, previous, evaluation):
        work = [fill_with(orders[k], num, n, functools.partial(job, k, n), cfg) for k, num in shares.items()]
        groups = sum(await asyncio.gather(*work), []) + extra_groups(n)
        if previous:
            await previous  # batches are committed in order
        if evaluation:  # without batch n there is no version after n
            await client.until(n)
            await asyncio.wait([evaluation], timeout=e.hold_s)
        commit_batch(n, groups, orders, run_dir, cfg)

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(client.follow(run_dir / "version"))
        for n in range(step, last + 1):  # an evaluation may be missing, though its batch is there
            is_due = e.every and (n % e.every == 0 or n == last)
            evaluation = tasks.create_task(evaluate(n, lock, envs, client, run_dir, cfg)) if is_due else None
            if start <= n < last:
                await client.until(max(0, n - o.max_staleness))
                shares = Counter(itertools.islice(dealt, num_groups))
                batch = tasks.create_task(produce(n, shares, batch, evaluation))
    await client.session.close()


def main(argv):
    """argv: config.toml [table.key=value ...]. The loop is never closed: that would wait for user code in threads."""
    asyncio.new_event_loop().run_until_complete(run(configs.arguments(__doc__, argv)))


if __name__ == "__main__":
    configs.run_role("orchestrator", main)
