"""orchestrator.py owns the rollouts: prompts to vLLM, token ids and logprobs back, rewards, advantages, batch files.

    python orchestrator.py config.toml            # beside a server and trainer.py; launch.sh does this
    python orchestrator.py config.toml --eval     # any OpenAI endpoint on the environments; --generate, --offline too

A slot of batch n is admitted once version n - S is live (S = max_staleness), so at version n, where the trainer uses
it, no rollout is older than S. A group with nothing to learn from is refilled in the same slot. The order of rows is a
function of (seed, index); every batch file carries the ledger of indices that are issued but not committed.
"""

import asyncio
import functools
import gc
import itertools
import json
import math
import os
import traceback
from collections import Counter
from dataclasses import dataclass, field

from configs.lib.batch import resume, save_batch
from configs.lib.client import Client
from configs.lib.evaluate import check_environments, evaluate_when_due
from configs.lib.metrics import rollout_metrics, show_rollout
from configs.lib.order import Order, deal
from configs.lib.preflight import check_task, check_template, watch_first
from configs.lib.process import UserThreads, fault, run_role
from configs.lib.runtime import RunError, arguments, identity, run_directory
from env import Truncated, load_environment
from trainer import compute_advantages

# --- rollouts ---------------------------------------------------------------------------------------------------------


@dataclass
class Rollout:
    """One conversation, with its token ids and what it earned."""

    state: dict  # the environment's: prompt, completion, answer, ...
    samples: list[dict] = field(default_factory=list)  # tokens, mask (1: sampled), logp, turns; a fork begins another
    versions: list[int] = field(default_factory=list)  # live at the start and at the end of each turn
    num_turns: int = 0  # messages sampled
    reward: float | None = None  # None: unscored
    turn_rewards: list[float] | None = None  # where the environment gives one per turn; reward is their sum
    metrics: dict = field(default_factory=dict)  # of each reward function
    truncated: bool = False
    trainable: bool = False  # has sampled tokens that are not masked
    forks: int = 0
    error: str = ""


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
        samples.append({"tokens": [], "mask": [], "logp": [], "turns": []})
    last = samples[-1]
    new = prompt_ids[len(last["tokens"]) :]
    last["tokens"] += new + ids
    last["mask"] += [0] * len(new) + [1] * len(ids)
    last["logp"] += [0.0] * len(new) + logps
    last["turns"] += [turn] * (len(new) + len(ids))
    return is_fork


async def sample(client, server, prompt, n, tools=None, version=None, **override):
    """n completions of messages, or of text for base models -> [(message, prompt_ids, ids, logps, finish_reason,
    versions)]. version: the one to use where adapters can serve it. Raises Truncated where max_seq_len ends."""
    cfg, is_text = client.cfg, isinstance(prompt, str)
    mine = client.tokenize(prompt, tools)
    room = cfg.run.max_seq_len - len(mine)
    if room <= 0:
        raise Truncated
    s, live = cfg.sampling._asdict() | override, client.version
    # HACK HERE: how the policy is sampled
    body = {k: s[k] for k in ("temperature", "top_p", "min_p", "repetition_penalty", "stop")}
    body |= {"presence_penalty": 0.0, "frequency_penalty": 0.0}  # a model's generation_config.json may have others
    body |= {"n": n, "max_tokens": min(s["max_tokens"], room), "top_k": s["top_k"] or -1, "return_token_ids": True}
    body["cache_salt"] = f"{client.attempt}.{live}"  # keys and values of other weights are never reused
    body["model"] = f"{client.run_id}-v{live if version is None else version}" if cfg.sends_adapters else client.run_id
    chat = {"messages": prompt, "logprobs": True, "chat_template_kwargs": s["chat_template_kwargs"]}
    body |= {"prompt": prompt, "logprobs": 0} if is_text else chat | ({"tools": tools} if tools else {})
    fault("gen", live)
    reply, choices = await client.post(server, "/completions" if is_text else "/chat/completions", body), []
    for c in sorted(reply["choices"], key=lambda c: c["index"]):
        logps = c["logprobs"]["token_logprobs"] if is_text else [x["logprob"] for x in c["logprobs"]["content"]]
        message = c["text"] if is_text else {"role": "assistant", "content": c["message"]["content"] or ""}
        if not is_text:  # what vLLM's parsers took out of the content belongs to the message, and to the next prompt
            message |= {k: v for k in ("tool_calls", "reasoning") if (v := c["message"].get(k))}
        prompt_ids = (c if is_text else reply)["prompt_token_ids"]
        if n > 1 and prompt_ids != mine:  # a group's prompt, so nothing sampled is in it
            client.refuse_tokens(mine, prompt_ids)
        choices.append((message, prompt_ids, c["token_ids"], logps, c["finish_reason"], [live, client.version]))
    return choices


async def guard(rollouts, work, timeout_s):
    """User code and HTTP may fail here and nowhere else: their rollouts are lost, and counted by the error's name."""
    try:
        async with asyncio.timeout(timeout_s):
            return await work
    except RunError:
        raise
    except Exception as e:
        print_once(type(e).__name__)
        for r in rollouts:
            r.reward, r.turn_rewards, r.error = None, None, type(e).__name__


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
        reward, r.metrics = await env.rubric.score(state)
        r.turn_rewards = reward if isinstance(reward, list) else None
        if r.turn_rewards and len(reward) != r.num_turns:
            raise ValueError(f"{len(reward)} turn rewards for {r.num_turns} turns")
        r.reward = sum(reward) if r.turn_rewards else reward

    await guard([r], play(), cfg.orchestrator.generation_timeout)
    r.trainable = any(any(s["mask"]) for s in r.samples)
    r.trainable &= not (r.truncated and cfg.orchestrator.mask_truncated_completions)
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


# --- batches ----------------------------------------------------------------------------------------------------------


async def fill(name, env, order, num, n, client, slots, cfg):
    """`num` groups of an environment for batch n, and those dropped on the way. With oversampling more are under way;
    the lowest indices win, whoever finishes first: short rollouts get no advantage."""
    o, jobs = cfg.orchestrator, {}
    limit = min(o.max_prompt_len or math.inf, cfg.run.max_seq_len - 1)
    most_lost = 10 * o.batch_size // o.rollouts_per_example

    async def job(index, row):
        start, rollouts, dropped = env.start(env.dataset[row]), [], "long prompt"
        if len(client.tokenize(start["prompt"], start["tools"])) <= limit:
            async with slots:
                ask = functools.partial(sample, client, index)
                rollouts = await run_group(env, env.dataset[row], o.rollouts_per_example, ask, n, cfg)
            dropped = why_drop(rollouts, cfg.trainer.gamma)
            if cfg.run.preflight and n == 0:
                watch_first(name, order.first, rollouts, num)
        order.lost = order.lost + 1 if dropped else 0
        if order.lost > most_lost:
            what = f"{order.lost} groups of {name} in a row had nothing to learn from, the last: {dropped}"
            raise RunError(4, f"{what}; bash launch.sh {cfg.path} --check says more")
        return Group(name, index, row, rollouts, dropped)

    try:
        while True:
            hopeful = sum(not task.done() or not task.result().dropped for task in jobs.values())
            for _ in range(math.ceil(num * o.oversampling_factor) - hopeful):
                index, row = order.take(n)
                jobs[index] = asyncio.create_task(job(index, row))
            done = [jobs[i].result() for i in itertools.takewhile(lambda i: jobs[i].done(), sorted(jobs))]
            useful = [i for i, group in enumerate(done) if not group.dropped]
            if len(useful) >= num:
                done = done[: useful[num - 1] + 1]
                for index in set(jobs) - {group.index for group in done}:
                    order.put_back(index)
                return done
            open_jobs = [task for task in jobs.values() if not task.done()]
            ended, _ = await asyncio.wait(open_jobs, timeout=30, return_when=asyncio.FIRST_COMPLETED)
            if not ended:
                have = f"{len(useful)} of {num} groups of {name}, {len(open_jobs)} under way"
                print(f"batch {n} waits: {have}", flush=True)
    finally:
        for task in jobs.values():
            task.cancel()


def why_drop(rollouts, gamma):
    """Why a group has nothing to teach, or "". With gamma < 1 it is also how soon a reward comes."""
    scored = [r for r in rollouts if r.reward is not None]
    if len(scored) < 2:
        return "failed: " + ", ".join(sorted({r.error for r in rollouts}))
    if len({(r.reward, *(r.turn_rewards or ()), r.num_turns * (gamma < 1)) for r in scored}) == 1:
        return f"flat at reward {scored[0].reward:.3g}"
    return "" if any(r.trainable for r in scored) else "empty or masked"


def commit_batch(n, groups, orders, run_dir, cfg):
    """Advantages and metadata; rollouts.jsonl first, then the file whose rename makes batch n exist."""
    t, samples, lines = cfg.trainer, [], []
    kept = [[r for r in g.rollouts if r.reward is not None] for g in groups if not g.dropped]
    table = compute_advantages([[vars(r) for r in rollouts] for rollouts in kept], t.advantage, t.gamma)
    advantage = {id(r): a for rollouts, row in zip(kept, table) for r, a in zip(rollouts, row)}
    for g in groups:
        orders[g.env].settle(g)
        for i, r in enumerate(g.rollouts):
            about = {"env": g.env, "example": g.row, "group": g.index, "rollout": i, "advantage": advantage.get(id(r))}
            about |= {k: getattr(r, k) for k in "versions reward turn_rewards num_turns metrics truncated".split()}
            talk = {k: r.state[k] for k in ("prompt", "completion", "answer")}
            lines.append({"step": n, "version": min(r.versions, default=None)} | about | talk)
            lines[-1] |= {"error": r.error, "dropped": g.dropped}
            for s in r.samples if id(r) in advantage else ():
                more = {"age": n - min(r.versions), "temperature": cfg.sampling.temperature, "turn": s["turns"][0]}
                samples.append(about | more | s | ({} if r.trainable else {"mask": [0] * len(s["mask"])}))
    with open(run_dir / "rollouts.jsonl", "a") as f:
        f.writelines(json.dumps(line, default=str) + "\n" for line in lines)
    if cfg.run.show_every and n % cfg.run.show_every == 0:
        show_rollout(n, lines)
    info = {"run": identity(cfg), "step": n, "max_staleness": cfg.orchestrator.max_staleness}
    info |= {"rollouts": len(advantage), "max_tokens": cfg.sampling.max_tokens}
    metrics = rollout_metrics(groups, samples) | {"group/surplus": sum(o.settled() for o in orders.values())}
    info |= {"advantage": t.advantage, "gamma": t.gamma, "metrics": metrics}
    info |= {"dropped": {f"{g.env}:{g.index}": g.dropped for g in groups if g.dropped}}
    info |= {"ledger": {name: order.ledger() for name, order in orders.items()}}
    save_batch(run_dir / "batches" / f"step_{n:06d}.safetensors", samples, info)


# --- the loop ---------------------------------------------------------------------------------------------------------


async def run(cfg):
    """Batches from the last committed one to max_steps, and evaluations. RunError, or an error of ours, ends it."""
    o, run_dir = cfg.orchestrator, run_directory(cfg)
    os.environ["ROLEMODEL_POLICY_URL"] = f"{cfg.inference.urls[0]}/v1"  # for a judge that is the policy itself
    envs = {e.name: load_environment(e.id, e.args, cfg.path.parent) for e in cfg.env}
    check_environments(envs, cfg)
    asyncio.get_running_loop().set_default_executor(UserThreads(256))
    start, ledger = resume(run_dir, cfg)
    client, num_groups = Client(cfg), o.batch_size // o.rollouts_per_example
    orders = {name: Order(env.dataset, cfg, ledger.get(name)) for name, env in envs.items()}
    slots = asyncio.Semaphore(o.max_concurrent // o.rollouts_per_example)
    if cfg.run.preflight and not start and cfg.run.max_steps:
        check_template(client, envs)
    gc.freeze()  # what is there now stays; without, the collector goes through it every few rollouts
    dealt = itertools.islice(deal({e.name: e.ratio for e in cfg.env}), start * num_groups, None)

    async def produce(n, shares, previous):
        work = [fill(name, envs[name], orders[name], num, n, client, slots, cfg) for name, num in shares.items()]
        groups = sum(await asyncio.gather(*work), [])
        if previous:
            await previous  # batches are committed in order
        commit_batch(n, groups, orders, run_dir, cfg)

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(client.follow(run_dir / "version", o.version_timeout))
        tasks.create_task(evaluate_when_due(run_group, sample, envs, client, run_dir, cfg))
        batch = None
        if not cfg.run.max_steps:  # --check
            await check_task(run_group, sample, envs, client, cfg)
        for n in range(start, cfg.run.max_steps):
            await client.until(max(0, n - o.max_staleness))
            batch = tasks.create_task(produce(n, Counter(itertools.islice(dealt, num_groups)), batch))
    await client.close()


def main(argv):
    """argv: config.toml [table.key=value ...], with --eval, --generate or --offline for tools/evaluate.py."""
    if {"--eval", "--generate", "--offline"} & set(argv):
        from tools.evaluate import main as tool

        return tool(argv)
    asyncio.run(run(arguments(__doc__, argv)[0]))


if __name__ == "__main__":
    run_role("orchestrator", main)
