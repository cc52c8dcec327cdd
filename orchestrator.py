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
import time
import traceback
from collections import Counter, deque, namedtuple
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp
import numpy as np
from safetensors import safe_open
from safetensors.numpy import save_file

import configs
from configs import RunError, beat, named, refuse_other, require, served_name
from env import Truncated, call, ensure, load_environment

# --- vLLM -------------------------------------------------------------------------------------------------------------


class ServerError(Exception):
    """What a server answers instead of 200."""


class Client:
    """vLLM behind its OpenAI endpoint, and the live version; made in an event loop. aiohttp, since openai's client
    takes longer than all else that the orchestrator does for a rollout."""

    def __init__(self, cfg):
        self.cfg, self.version, self.file = cfg, -1, configs.run_directory(cfg) / "version"
        self.attempt = os.urandom(4).hex()  # a restarted trainer reaches a version again, with other weights
        self.session = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(), connector=aiohttp.TCPConnector(limit=0))

    async def until(self, version):
        """Waits until the trainer has declared it live. While anyone waits, self.version is up to date."""
        while self.version < version:
            self.version = int(self.file.read_text()) if self.file.exists() else -1
            await asyncio.sleep(0.02)

    async def post(self, server, path, body):
        """-> the reply as a dict. A group keeps its number `server`, so it stays on one server and its prefix cache.
        A lost connection, 429 and 5xx are tried again after 0.5, 1 and 2 s."""
        url = self.cfg.inference.urls[server % len(self.cfg.inference.urls)] + path
        for pause in (0.5, 1, 2, None):
            try:
                async with self.session.post(url, json=body) as reply:
                    status, text = reply.status, await reply.text()
            except (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError) as e:  # a time-out is no such error
                status, text = 503, repr(e)
            if status == 200:
                return json.loads(text)
            if status == 400 and ("maximum context length" in text or "max_tokens must be at least 1" in text):
                raise Truncated
            if not pause or (status != 429 and status < 500):
                raise ServerError(f"{url} answered {status}: {text[:500]}")
            await asyncio.sleep(pause)


# --- rollouts ---------------------------------------------------------------------------------------------------------


@dataclass
class Rollout:
    """One conversation, with its token ids and what it earned."""

    state: dict  # the environment's: prompt, completion, answer, ...
    samples: list[dict] = field(default_factory=list)  # columns: tokens, mask (1: sampled), old_logp, turn
    versions: list[int] = field(default_factory=list)  # live at start and end of each turn
    num_turns: int = 0  # messages sampled
    num_tokens: int = 0  # sampled
    reward: float | None = None  # None: unscored
    turn_rewards: list[float] | None = None  # where the rubric gives them
    metrics: dict = field(default_factory=dict)  # of each reward function
    truncated: bool = False
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
        # all of it that is there: what vLLM's parsers took out of the content belongs to the next prompt, too
        message = c["text"] if is_text else {"content": ""} | {k: v for k, v in c["message"].items() if v}
        prompt_ids = (c if is_text else reply)["prompt_token_ids"]
        choices.append((message, prompt_ids, c["token_ids"], logps, c["finish_reason"], [live, client.version]))
    return choices


def culprit(error, most=200):
    """-> type and text of an error, and the line of the user's code where it arose."""
    ours = ("/lib/python", "/env.py", "/tool_env.py", "/rubrics.py", "/orchestrator.py", "/configs/__", "<frozen")
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not any(part in f.filename for part in ours)]
    where = f" in {frames[-1].name}, {Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else ""
    return f"{type(error).__name__}: {str(error)[:most]}{where}"


async def guard(rollouts, work, timeout_s):
    """User code and HTTP may fail here and nowhere else: their rollouts are lost, and counted by the error."""
    try:
        async with asyncio.timeout(timeout_s):
            return await work
    except (Exception, asyncio.CancelledError, SystemExit) as e:  # user code may raise these, too
        if isinstance(e, RunError) or asyncio.current_task().cancelling():
            raise
        for r in rollouts:
            r.reward, r.turn_rewards, r.error = None, None, culprit(e)


async def run_rollout(env, state, ask, first, start, i, cfg):
    """A rollout from prompt to reward. What it asks of the start's prompt first is choice i of the group's request."""
    r, o, unused = Rollout(state), cfg.orchestrator, [i]

    async def generate(prompt, tools=None):
        # popped before any wait: of two calls at once only one is the first
        place = unused.pop() if unused and (prompt, tools) == (start["prompt"], start["tools"]) else None
        choices = await (ask(prompt, 1, tools) if place is None else asyncio.shield(first()))
        message, prompt_ids, ids, logps, finish_reason, versions = choices[place or 0]
        if not r.num_turns and len(prompt_ids) > (o.max_prompt_len or np.inf):
            raise Truncated
        is_right = len(ids) == len(logps) and all(-1e4 < x < 1e-3 for x in logps)
        ensure(is_right, f"server sent {len(ids)} ids and {len(logps)} logprobs, lowest {min(logps, default=0)}")
        beat()
        extend_or_fork(r.samples, prompt_ids, ids, logps, r.num_turns)
        r.versions, r.num_turns, r.num_tokens = r.versions + versions, r.num_turns + 1, r.num_tokens + len(ids)
        r.truncated |= finish_reason == "length"  # a turn cut at max_tokens; the conversation goes on
        return message

    async def play():
        try:
            await env.rollout(state, generate)
        except Truncated:
            r.truncated = True
        if r.num_turns:  # else the prompt itself is too long
            await call(env.add_columns, state=state, samples=r.samples)
            r.reward, r.metrics = await env.rubric.score(state)
            r.turn_rewards = state.get("turn_rewards")

    await guard([r], play(), o.generation_timeout)
    if r.truncated and o.mask_truncated_completions:
        r.samples = [s | {"mask": [0] * len(s["mask"])} for s in r.samples]
    return r


async def run_group(env, row, n, ask, step, cfg, slots):
    """n rollouts of one row. Their first turn is one request: one prompt, one cache fill. ask is sample, bound; slots,
    a semaphore, says how many groups may be under way."""
    start, o = env.start(row), cfg.orchestrator
    # not before some rollout asks it: an environment may make a prompt of its own
    first = functools.cache(lambda: asyncio.ensure_future(ask(start["prompt"], n, start["tools"])))
    try:
        async with slots:
            jobs = [run_rollout(env, env.start(row) | {"step": step}, ask, first, start, i, cfg) for i in range(n)]
            rollouts = await asyncio.gather(*jobs)
    finally:
        first().cancel()  # nobody is left to read it; unasked, it never begins
    scored = [r for r in rollouts if r.reward is not None]
    more = await guard(scored, env.rubric.score_group([r.state for r in scored]), o.generation_timeout)
    for r, (add, metrics) in zip(scored, more or []):
        r.reward, r.metrics = r.reward + add, r.metrics | metrics
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
        # what a killed run had open; how the last rollouts were lost, "" if not; useless groups in a row
        self.again, self.recent, self.useless = sorted(self.open), deque(maxlen=200), 0

    def ledger(self):
        return {"next": self.next, "open": sorted(self.open), "extra": self.extra}

    @functools.cache  # noqa: B019  an order lives as long as the run
    def epoch(self, number):
        return np.random.default_rng((self.cfg.run.seed, number)).permutation(len(self.rows)).tolist()

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
        what = f"{self.useless} groups of {group.env} in a row had nothing to learn from, last: {group.dropped}"
        require(self.useless <= 10 * o.batch_size // o.rollouts_per_example, 4, f"{what}; launch.sh --check says more")


def why_drop(rollouts, cfg):
    """Why a group has nothing to teach, or "". With gamma < 1 it is also how soon a reward comes."""
    scored, by_turn = [r for r in rollouts if r.reward is not None], cfg.trainer.gamma < 1
    if len(scored) < 2:
        return next((f"failed: {r.error}" for r in rollouts if r.error), "long prompt")
    if len({(r.reward, *(r.turn_rewards or ()), r.num_turns * by_turn) for r in scored}) == 1:
        return f"flat at reward {scored[0].reward:.3g}"
    return "" if any(any(s["mask"]) for r in scored for s in r.samples) else "empty or masked"


def deal(ratios):
    """Environment of slot 0, 1, 2, ...: the one furthest below its share."""
    given = dict.fromkeys(ratios, 0)
    for slot in itertools.count(1):
        yield (name := max(ratios, key=lambda name: ratios[name] / sum(ratios.values()) * slot - given[name]))
        given[name] += 1


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
    require(is_right, 4, f"{path}: old_logp is not finite, or a first token is a loss token")
    about = {"samples": json.dumps([{k: v for k, v in s.items() if k not in names} for s in samples])}
    save_file(data, tmp := path.with_suffix(".tmp"), about | {"info": json.dumps(info)})
    os.replace(tmp, path)


def commit_batch(n, groups, orders, run_dir, cfg):
    """Metadata, metrics and the ledger; rollouts.jsonl first, then the file whose rename makes batch n exist."""
    samples, lines = [], []
    for g in groups:
        orders[g.env].settle(g)
        for i, r in enumerate(g.rollouts):
            about = vars(r) | {"env": g.env, "example": g.row, "group": g.index, "rollout": i, "dropped": g.dropped}
            del about["state"], about["samples"]
            talk = {k: r.state[k] for k in ("prompt", "completion", "answer")}
            lines.append(json.dumps({"step": n, "version": min(r.versions, default=None)} | about | talk, default=str))
            if r.reward is not None and not g.dropped:
                about |= {"age": n - min(r.versions), "temperature": cfg.sampling.temperature}
                samples += [about | s for s in r.samples]
    with open(run_dir / "rollouts.jsonl", "a") as f:
        f.writelines(line + "\n" for line in lines)
    info = {"run": configs.identity(cfg), "step": n, "max_tokens": cfg.sampling.max_tokens}
    info["rollouts"] = len({(s["env"], s["group"], s["rollout"]) for s in samples})
    info |= {"metrics": rollout_metrics(groups, samples), "ledger": {name: o.ledger() for name, o in orders.items()}}
    save_batch(run_dir / "batches" / f"step_{n:06d}.safetensors", samples, info)


def resume(run_dir, cfg):
    """-> the checkpoint's step, number of the next batch, ledgers by environment. Batches between are trained again."""
    step = max((int(path.name[5:]) for path in run_dir.glob("checkpoints/step_??????")), default=0)
    files = [p for p in sorted(run_dir.glob("batches/step_*.safetensors")) if p.stem >= f"step_{step:06d}"]
    n, ledger = step + len(files), {}
    state = [run_dir / f"checkpoints/step_{step:06d}/state.json"] * bool(step)
    for path in state + files[-1:]:  # the last one's ledger holds
        missing = f"a batch before {path} is missing. Remove the rest"
        require(path in state or path.stem[5:] == f"{n - 1:06d}", 6, missing)
        try:
            info = json.loads(path.read_text() if path in state else safe_open(path, "np").metadata()["info"])
            run, ledger = info["run"], info["ledger"]
        except Exception as e:  # of safetensors, JSON, or the file system
            raise RunError(6, f"{path} is damaged ({e!r}). Remove it, or its checkpoint, and start again") from e
        refuse_other(run, cfg, path)
    # With the same configuration the versions after the checkpoint come again, bit for bit, else others do.
    is_same = configs.to_toml(cfg) in [old.read_text() for old in run_dir.glob("config.toml")]
    configs.cut_lines(run_dir / "rollouts.jsonl", lambda line: line["step"] < n)
    configs.cut_lines(run_dir / "eval.jsonl", lambda line: line["step"] <= (n if is_same else step))
    return step, n, ledger


# --- metrics and evaluation -------------------------------------------------------------------------------------------


def means(rows):
    """[{name: number}, ...] -> {name: its mean over those that have it}."""
    names = dict.fromkeys(name for row in rows for name in row)
    return {name: np.mean([row[name] for row in rows if name in row]) for name in names}


def rollout_metrics(groups, samples):
    """Of one batch. Rewards are over every scored rollout, also of dropped groups: without the flat ones the mean would
    mislead. tools/watch.py has them for each environment of a mix."""
    rollouts, ages = [r for g in groups for r in g.rollouts], [s["age"] for s in samples]  # in versions
    rewards = [r.reward for r in rollouts if r.reward is not None]
    reasons = [f"group/{(g.dropped or 'kept').split()[0].rstrip(':')}" for g in groups]
    errors = [f"error/{r.error.split(':')[0]}" for r in rollouts if r.error]
    metrics = {f"group/{name}": 0 for name in ("kept", "flat", "failed", "long", "empty")} | Counter(reasons + errors)
    metrics |= {"reward/mean": np.mean(rewards), "reward/std": np.std(rewards)}
    metrics |= {f"reward/p{q}": np.percentile(rewards, q) for q in (10, 50, 90)}
    metrics |= means([{f"reward/{name}": value for name, value in r.metrics.items()} for r in rollouts])
    metrics |= means([{"rollout/turns": r.num_turns, "rollout/tokens": r.num_tokens} for r in rollouts])
    metrics |= {"rollout/num": len(rollouts), "rollout/truncated": np.mean([r.truncated for r in rollouts])}
    distinct = [len({str([s["tokens"] for s in r.samples]) for r in g.rollouts}) for g in groups]
    metrics["rollout/distinct"] = sum(distinct) / len(rollouts)  # 1 / G is collapse
    metrics |= {"rollout/errors": len(errors), "rollout/forks": sum(len(r.samples[1:]) for r in rollouts)}
    return metrics | {"staleness/mean": np.mean(ages), "staleness/max": max(ages)}


def eval_metrics(groups):
    """Of one evaluation; groups: rollouts per row. A reward of 1 or more passes. rows: their mean rewards, None of a
    lost one; tools/watch.py compares them with those at version 0."""
    rollouts, one = sum(groups, []), 1 - 1e-6  # of floats, 0.7 + 0.2 + 0.1 is below 1
    rewards = [np.array([r.reward for r in group if r.reward is not None]) for group in groups]
    rows = [{"reward/mean": x.mean(), "pass@1": (x > one).mean(), "pass@k": (x > one).max()} for x in rewards if len(x)]
    metrics = means(rows) | means([r.metrics | {"tokens": r.num_tokens, "truncated": r.truncated} for r in rollouts])
    metrics |= {"n": len(rows), "errors": sum(bool(r.error) for r in rollouts), "k": max(map(len, groups))}
    return metrics | {"rows": [x.mean() if len(x) else None for x in rewards]}


async def evaluate(due, name, env, lock, client, run_dir, cfg):
    """The first eval.num_examples rows of an environment at version `due` -> a line of eval.jsonl.

    Batch `due` is not committed meanwhile, for at most eval.hold_s; where that is too short the weights change on the
    way, which version_last tells. Adapters serve the first version while it is loaded, S more."""
    async with lock:  # after one that took longer than eval.every, at the version then live
        await client.until(due)
        e, version, began, path = cfg.eval, client.version, time.time(), run_dir / "eval.jsonl"
        if any(x["env"] == name and x["step"] in (due, version) for x in map(json.loads, path.open())):
            return
        k, most = e.rollouts_per_example, e.max_tokens or cfg.sampling.max_tokens
        ask = functools.partial(sample, client, version=version, temperature=e.temperature, max_tokens=most)
        rows = env.eval_dataset[: e.num_examples or None]
        slots = asyncio.Semaphore(max(1, cfg.orchestrator.max_concurrent // k))
        jobs = [run_group(env, row, k, functools.partial(ask, i), version, cfg, slots) for i, row in enumerate(rows)]
        groups = await asyncio.gather(*jobs)
        metrics = eval_metrics(groups) | {"seconds": time.time() - began}
        require(metrics["n"], 4, f"evaluation of {name} at version {version}, all is lost: {why_drop(groups[0], cfg)}")
        last = client.version - cfg.orchestrator.max_staleness * cfg.sends_adapters
        line = {"step": version, "version_first": version, "version_last": max(version, last), "env": name} | metrics
        with open(path, "a") as f:
            f.write(json.dumps(line) + "\n")
        print(f"eval {version} | {name}:", *(f"{k} {v:.4g}" for k, v in metrics.items() if k != "rows"), flush=True)


# --- the loop ---------------------------------------------------------------------------------------------------------


def prepare(cfg):
    """-> {name: environment}. What is wrong with these, or with the model's files, is told before a server starts."""
    envs = {}
    try:
        for e in cfg.env:
            what, code, module = f"env.id = {e.id!r}", 4, e.id.rsplit("/", 1)[-1].replace("-", "_")
            envs[e.name] = load_environment(e.id, e.args)
            require(envs[e.name].eval_dataset or not cfg.eval.every, 2, "eval.every is set, but it has no eval_dataset")
        from transformers import AutoConfig, AutoTokenizer  # takes seconds

        what, code = f"model = {cfg.run.model!r}, chat_template = {cfg.run.chat_template!r}", 2
        tokenizer = AutoTokenizer.from_pretrained(cfg.run.model, config=AutoConfig.from_pretrained(cfg.run.model))
        Path(cfg.run.chat_template).stat()  # "", the tokenizer's own, is "." here
        is_text = all(isinstance(env.start(env.dataset[0])["prompt"], str) for env in envs.values())
        require(tokenizer.chat_template or cfg.run.chat_template or is_text, 2, "none, though the rows are messages")
    except Exception as error:
        code = 2 if getattr(error, "name", "") == module or getattr(error, "code", code) == 2 else code
        raise RunError(code, f"{what}: {culprit(error, 2000)}") from error
    return envs


async def run(cfg):
    """Batches from the last committed one to max_steps, and evaluations. RunError, or an error of ours, ends it."""
    # 1. What can be wrong is found before a server starts, which launch.sh does once it is told.
    o, e, run_dir, last = cfg.orchestrator, cfg.eval, configs.run_directory(cfg), cfg.run.max_steps
    envs, (step, start, ledger) = prepare(cfg), resume(run_dir, cfg)
    make_order, extra_groups = named(o.order, {"": Order}), named(o.extra_groups, {"": lambda n: []})
    keep, fill_with = named(o.keep, {"": why_drop}), named("orders:ahead" * (o.oversampling_factor > 1), {"": fill})
    orders = {name: make_order(env.dataset, cfg, ledger.get(name)) for name, env in envs.items()}
    (run_dir / "config.toml").write_text(configs.to_toml(cfg))
    configs.tell_launcher("[orchestrator] ready")
    gc.freeze()  # or collections, which walk all of transformers, take two fifths of the time
    # 2. One task a batch, each S versions ahead of the trainer; evaluations beside them.
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(256))  # for user code
    client, num_groups, lock = Client(cfg), o.batch_size // o.rollouts_per_example, asyncio.Lock()
    slots, batch = asyncio.Semaphore(o.max_concurrent // o.rollouts_per_example), []
    dealt = itertools.islice(deal({env.name: env.ratio for env in cfg.env}), start * num_groups, None)

    async def job(name, n, index, row):
        ask, env = functools.partial(sample, client, index), envs[name]
        rollouts = await run_group(env, env.dataset[row], o.rollouts_per_example, ask, n, cfg, slots)
        judge = keep if any(any(s["mask"]) for r in rollouts if r.reward is not None for s in r.samples) else why_drop
        orders[name].count(group := Group(name, index, row, rollouts, judge(rollouts, cfg)))
        return group

    async def produce(n, shares, previous, evaluations):
        work = [fill_with(orders[k], num, n, functools.partial(job, k, n), cfg) for k, num in shares.items()]
        groups = sum(await asyncio.gather(*work), []) + extra_groups(n)
        await asyncio.gather(*previous)  # commits are in order
        if evaluations:  # without batch n there is no version after n
            await client.until(n)
            await asyncio.wait(evaluations, timeout=e.hold_s)
        commit_batch(n, groups, orders, run_dir, cfg)

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(client.until(last))
        for n in range(step, last + 1):  # a batch may be there, its evaluation missing
            due = envs if e.every and (n % e.every == 0 or n == last) else ()
            evaluations = [tasks.create_task(evaluate(n, k, envs[k], lock, client, run_dir, cfg)) for k in due]
            if start <= n < last:
                await client.until(max(0, n - o.max_staleness))
                shares = Counter(itertools.islice(dealt, num_groups))
                batch = [tasks.create_task(produce(n, shares, batch, evaluations))]
    await client.session.close()


def main(argv):
    """argv: config.toml [table.key=value ...]. The loop is never closed: that would wait for user code in threads."""
    asyncio.new_event_loop().run_until_complete(run(configs.arguments(__doc__, argv)))


if __name__ == "__main__":
    configs.run_role("orchestrator", main)
