"""orchestrator.py owns the rollouts: prompts to vLLM, token ids and logprobs back, rewards, groups, batch files.

    python orchestrator.py config.toml            # beside a server and trainer.py; launch.sh does this

Batch, step and version share one number: step n trains on batch n and turns version n of the policy into n + 1.

    batch n   starts when version n - S is live (S = max_staleness), so no rollout made for it is older than S versions
              (groups that an order adds may be)
    step n    starts when the file of batch n exists
    version n is live once the trainer has written n to the file `version`

A group from which nothing can be learned is replaced by the next row's. The row of an index is a function of (seed,
index); every batch file carries the sampler state: above all the indices that are issued but not committed.
"""

import asyncio
import functools
import gc
import itertools
import json
import os
from collections import Counter, deque, namedtuple
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mode

import aiohttp
import numpy as np
from safetensors import safe_open
from safetensors.numpy import save

import configs
from configs.runtime.directory import cut_lines, identity, refuse_other, report_changes, run_directory, write_config
from configs.runtime.role import CONFIG, DATA, STORAGE, RunError, heartbeat, place_of, report, require, run_role
from env import DataError, Truncated, call, checked_score, ensure, finite, load_environment

# --- vLLM -------------------------------------------------------------------------------------------------------------

FULL = ("maximum context length", "max_tokens must be at least 1")  # what vLLM answers to a prompt that is too long
# The answer to one request. raw: the rest of the reply, with finish_reason, stop_reason and usage. is_cut: it ended at
# a limit of the run's. versions: live when it was asked, and when it had answered.
Reply = namedtuple("Reply", "message prompt_ids ids logps raw is_cut versions")


class ServerError(Exception):
    """What a server answers instead of 200, with its status."""

    def __init__(self, status, text):
        super().__init__(text)
        self.status = status


class Client:
    """vLLM behind its OpenAI endpoint, and the live version. Create it in a running event loop. openai's client would
    take longer for each rollout than everything else here."""

    def __init__(self, cfg):
        self.cfg = cfg
        self.version = -1
        self.file = run_directory(cfg) / "version"
        self.attempt = os.urandom(4).hex()  # a restarted trainer reaches a version again, perhaps with other weights
        self.evaluating = asyncio.Lock()  # evaluations do not overlap
        connector = aiohttp.TCPConnector(limit=0)  # orchestrator.max_concurrent limits the rollouts
        self.session = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(), connector=connector)

    async def until(self, version):
        """Waits until the trainer has declared it live. While anyone waits, self.version is up to date."""
        while self.version < version:
            if self.file.exists():
                self.version = int(self.file.read_text())
            await asyncio.sleep(0.02)

    async def post(self, group, path, body, base_url=""):
        """Returns the reply as a dict. All requests of a group, here its index, go to one server, whose prefix cache
        then has the prompt, or to the one at base_url. A lost connection, 429 and 5xx are tried again three times.
        Raises Truncated if the context is full."""
        urls = self.cfg.inference.urls
        url = (base_url.rstrip("/") or urls[group % len(urls)]) + path
        for pause in (0.5, 1, 2, None):
            try:
                async with self.session.post(url, json=body) as reply:
                    status = reply.status
                    text = await reply.text()
            except aiohttp.ClientError as e:
                status = 503
                text = repr(e)
            if status == 200:
                return json.loads(text)
            if status == 400 and any(words in text for words in FULL):
                raise Truncated
            if not pause or (status != 429 and status < 500):
                raise ServerError(status, f"{url} answered {status}: {text[:500]}")
            await asyncio.sleep(pause)


async def sample(client, group, prompt, tools=None, user="", own=(), **override):
    """Asks for one completion of messages, or of text for base models -> Reply. user: the rollout's number in its
    group, for the server's logs. own: further options, from the environment, e.g. stop; its max_tokens can only lower
    the run's. Raises Truncated if max_seq_len is reached."""
    cfg = client.cfg
    live = client.version
    # HACK HERE: how the policy is sampled. vLLM cuts max_tokens to what max_seq_len leaves.
    body = cfg.sampling._asdict() | override
    most = body["max_tokens"]
    body |= own
    body["max_tokens"] = min(most, body["max_tokens"])
    del body["allow_biased_sampling"]  # ours, not vLLM's
    # A model's generation_config.json may set these penalties.
    body |= {"presence_penalty": 0.0, "frequency_penalty": 0.0, "return_token_ids": True, "user": user}
    body["cache_salt"] = f"{client.attempt}.{live}"  # keys and values of another version are not reused
    body["model"] = configs.served_name(cfg, live)
    if isinstance(prompt, str):
        del body["chat_template_kwargs"]
        body |= {"prompt": prompt, "logprobs": 0}
        reply = await client.post(group, "/v1/completions", body)
        choice = reply["choices"][0]
        choice["text"] += stop_string(choice)
        message = choice["text"]
        prompt_ids = choice.pop("prompt_token_ids")
        logps = choice.pop("logprobs")["token_logprobs"]
    else:
        body |= {"messages": prompt, "tools": tools, "logprobs": True}
        reply = await client.post(group, "/v1/chat/completions", body)
        choice = reply["choices"][0]
        sent = choice["message"]
        if stop_string(choice):
            sent["content"] = (sent["content"] or "") + stop_string(choice)
        # All fields: what vLLM's parsers took out of the content belongs in the next prompt, too.
        message = {key: value for key, value in sent.items() if value}
        message.setdefault("content", "")
        prompt_ids = reply.pop("prompt_token_ids")
        logps = [token["logprob"] for token in choice.pop("logprobs")["content"]]
    ids = choice.pop("token_ids")
    are_logps = all(-1e4 < logp < 1e-3 for logp in logps)
    ensure(are_logps and len(ids) == len(logps), f"the server sent {len(ids)} ids with logprobs {logps}")
    reason = choice["finish_reason"]
    ensure(reason in ("stop", "length", "tool_calls"), f"the server ended its answer for the reason {reason!r}")
    # A tool call that the parser found hides that the answer was cut off after it.
    is_full = len(ids) >= min(most, cfg.run.max_seq_len - len(prompt_ids))
    is_cut = reason == "length" or (reason == "tool_calls" and is_full)
    if len(ids) == body["max_tokens"] < most:
        is_cut = False  # the environment asked for no more
    return Reply(message, prompt_ids, ids, logps, reply, is_cut, [live, client.version])


def stop_string(choice):
    """The string of sampling.stop that ended an answer, or "". It was sampled, but vLLM takes it away: parsers would
    miss a tag, and the next turn would fork. vLLM's flag to keep it keeps stop tokens as well."""
    reason = choice.get("stop_reason")
    return reason if isinstance(reason, str) else ""


# --- rollouts ---------------------------------------------------------------------------------------------------------


@dataclass
class Rollout:
    """One conversation, with its token ids and what it earned."""

    state: dict  # the environment's: prompt, completion, answer, ...
    sequences: list[dict] = field(default_factory=list)  # per-token fields: tokens, mask (1: sampled), old_logp, turn
    versions: list[int] = field(default_factory=list)  # live at start and end of each turn
    num_turns: int = 0  # messages sampled
    num_tokens: int = 0  # sampled
    temperature: float = 1.0  # of sampling
    reward: float | None = None  # None: unscored
    turn_rewards: list[float] | None = None  # if the rubric gives them
    agent_rewards: dict = field(default_factory=dict)  # {agent: reward}; agents that are not in it have `reward`
    metrics: dict = field(default_factory=dict)  # of each reward function
    reward_weights: dict = field(default_factory=dict)  # of each, if the rubric says them
    truncated: bool = False
    error: str = ""  # why it was lost, and where


# The rollouts of one row, which serve as one another's baseline. index: its place in the environment's order; row: its
# number in the dataset. dropped: why nothing is learned from them: "failed", "long" (prompt), "empty" (nothing to train
# on), "flat" (zero variance), or "".
Group = namedtuple("Group", "env index row rollouts dropped")

WRITER = ThreadPoolExecutor(1)  # of batches
LEARN_FROM_EQUAL = ("advantages:gdpo", "advantages:brief")  # they look at more than a rollout's reward
# What a turn that is trained may ask for: it leaves the distribution as it is.
UNBIASED = {"stop", "max_tokens", "parallel_tool_calls", "tool_choice", "chat_template_kwargs"}
TALK = ("prompt", "completion", "answer", "info")  # what rollouts.jsonl has of a state
# Names of a sequence's metadata, which no per-token field may have.
METADATA = {*Rollout.__annotations__, "env", "example", "group", "rollout", "dropped", "agent", "trainable"}
METADATA |= {"staleness", "at", "adv", "lens", "row", "index", "baseline_key"}
WEIGHTS = ("mask", "ce", "teacher")  # of a token in the terms of the loss
DTYPES = {"tokens": np.int32, "mask": np.bool_, "turn": np.int32}  # of fields; all others are float32
DTYPES["routes"] = np.int16


def extend_or_fork(sequences, prompt_ids, ids, logps, turn, agent="", trainable=True):
    """Token ids are the truth: a turn extends the sequence whose ids are the longest beginning of its prompt. If none
    is (a template that drops <think>, text that is tokenized differently, another conversation), the rollout forks: a
    new sequence begins, with the whole prompt. Two agents never share one, nor do trainable and other turns."""
    who = (agent, trainable)
    same = [s for s in sequences if (s["agent"], s["trainable"]) == who]
    fitting = [s for s in same if s["tokens"] == prompt_ids[: len(s["tokens"])]]
    s = max(fitting, key=lambda s: len(s["tokens"]), default=None)
    if s is None:
        s = {name: [] for name in ("tokens", "mask", "old_logp", "turn")}
        s |= {"agent": agent, "trainable": trainable}
        sequences.append(s)
    new = prompt_ids[len(s["tokens"]) :]
    s["tokens"] += new + ids
    s["mask"] += [0] * len(new) + [1] * len(ids)
    s["old_logp"] += [0.0] * len(new) + logps
    s["turn"] += [turn] * len(new + ids)


def check_fields(sequence):
    """Converts a sequence's per-token fields, which may be lists, arrays or tensors, to arrays. Raises DataError for
    one of another length, with a reserved name, or with a weight on the first token, which nothing predicts."""
    num = len(sequence["tokens"])
    is_text = isinstance(sequence["agent"], str) and isinstance(sequence["trainable"], bool)
    ensure(is_text, f"agent = {sequence['agent']!r} must be text, trainable = {sequence['trainable']!r} a bool")
    for name, values in sequence.items():
        if name not in ("agent", "trainable"):
            ensure(name not in METADATA, f"a field may not be called {name!r}, nor any of {sorted(METADATA)}")
            try:
                array = np.asarray(values, DTYPES.get(name, np.float32))
            except Exception as e:  # of numpy, or of the user's object
                raise DataError(f"field {name!r}: {e}") from e
            is_right = array.shape == (num,) or name == "routes"
            ensure(is_right, f"field {name!r} has values of shape {array.shape} for {num} tokens")
            if name in WEIGHTS:
                is_right = np.isfinite(array).all() and not array[:1].any()
                ensure(is_right, f"field {name!r} must be finite, and 0 at a sequence's first token")
            sequence[name] = array


def describe(error, most=400):
    """Type and text of an error, and the line of the user's code where it arose."""
    return f"{type(error).__name__}: {as_text(error, str)[:most]}{place_of(error)}"


async def guard(rollouts, work, timeout_s):
    """The only place where an environment's code and HTTP may fail: the rollouts are lost then, and counted by r.error.
    The work is a task of its own, since user code may cancel the one that it runs in."""

    async def attempt():
        try:
            await work
        except SystemExit as e:  # out of a task it would end the event loop
            return e

    task = asyncio.create_task(attempt())
    try:
        try:
            for _ in range(60):  # a run that is suspended loses a sixtieth of its time, with asyncio.timeout all of it
                await asyncio.wait([task], timeout=timeout_s / 60)
                if task.done():
                    break
        finally:
            is_late = task.cancel()
            await asyncio.wait([task])
        if is_late:
            raise TimeoutError
        error = task.result()
        if error:
            raise error
    except BaseException as e:  # CancelledError as well
        if isinstance(e, RunError | KeyboardInterrupt) or asyncio.current_task().cancelling():
            raise
        for r in rollouts:
            r.reward = None
            r.turn_rewards = None
            r.agent_rewards = {}
            r.metrics = {}  # a lost rollout counts in no mean
            r.error = describe(e)


async def run_rollout(env, row, ask, step, cfg):
    """A rollout from prompt to reward. ask: sample(), bound to a client and a group."""
    r = Rollout({}, temperature=cfg.sampling.temperature)
    is_over = False
    o = cfg.orchestrator

    async def generate(prompt, tools=None, agent="", trainable=True, whole=False, **own):
        """What the environment calls for each turn of the policy. Returns its message or, if whole, the reply."""
        # vLLM forces the form of any other tool_choice, and of a tool with `strict`.
        is_free = own.get("tool_choice", "auto") in ("auto", "none")
        is_free = is_free and not any(tool["function"].get("strict") for tool in tools or ())
        what = f"generate(): {own} or a tool's `strict` may bias what is said: set trainable=False"
        ensure(not trainable or (is_free and own.keys() <= UNBIASED), what)
        reply = await ask(prompt, tools, own=own)
        ensure(not is_over, "generate() was still under way when the environment's rollout() ended")
        turn = r.num_turns
        if turn == 0 and len(reply.prompt_ids) > (o.max_prompt_len or np.inf):  # known only now: the server tokenizes
            raise Truncated
        extend_or_fork(r.sequences, reply.prompt_ids, reply.ids, reply.logps, turn, agent, trainable)
        r.versions += reply.versions
        r.num_turns += 1
        r.num_tokens += len(reply.ids)
        r.truncated |= reply.is_cut  # but the conversation may go on
        r.state["replies"].append(reply.raw)
        return reply.raw if whole else reply.message

    async def play():
        nonlocal is_over
        # 1. The conversation.
        state = env.start(row)
        is_valid = isinstance(state, dict) and "replies" not in state
        ensure(is_valid, f"start returned {str(state)[:200]}, not a dict without 'replies', which come from the server")
        r.state |= state | {"step": step, "replies": []}
        try:
            await env.rollout(r.state, generate)
        except* Truncated:  # also if it comes out of a TaskGroup
            r.truncated = True
        is_over = True
        if r.num_turns == 0:  # usually because the prompt itself is too long
            return
        # 2. Fields of the environment's own, and the reward.
        await call(env.add_fields, state=r.state, sequences=r.sequences)
        if cfg.trainer.replay_routing:
            from configs.algorithms import routing

            routing.add_fields(r)
        for sequence in r.sequences:
            check_fields(sequence)
            if r.truncated and o.mask_truncated_completions:
                sequence["mask"] = np.zeros_like(sequence["mask"])  # of all turns
        await add_rewards(r, env.rubric.score)

    await guard([r], play(), o.generation_timeout)
    if not r.error:  # a lost rollout is no sign of life: with a server that is silent all are lost, one by one
        heartbeat()
    return r


async def add_rewards(r, scoring):
    """What a rubric returns, and what it may put into the state."""
    r.reward, r.metrics = checked_score(scoring, await scoring(r.state))
    if r.state.get("turn_rewards") is not None:
        r.turn_rewards = [finite(scoring, reward) for reward in r.state["turn_rewards"]]
        what = f"turn_rewards has {len(r.turn_rewards)} numbers for {r.num_turns} turns"
        ensure(len(r.turn_rewards) == r.num_turns, what)
    for agent, reward in r.state.get("agent_rewards", {}).items():
        r.agent_rewards[str(agent)] = finite(scoring, reward)
    for name, weight in r.state.get("reward_weights", {}).items():
        r.reward_weights[str(name)] = finite(scoring, weight)


async def run_group(env, row, size, ask, step, cfg, running):
    """`size` rollouts of one row, and the rewards that depend on all of them. running: a semaphore of rollouts."""

    async def one(i):
        ask_as_i = functools.partial(ask, user=str(i))
        async with running:
            return await run_rollout(env, row, ask_as_i, step, cfg)

    o = cfg.orchestrator
    rollouts = await asyncio.gather(*(one(i) for i in range(size)))
    scored = [r for r in rollouts if r.reward is not None]

    async def score_together():
        scoring = env.rubric.score_group
        pairs = await scoring([r.state for r in scored]) or []
        ensure(isinstance(pairs, list), f"score_group returned {str(pairs)[:200]}, not a list")
        added = [checked_score(scoring, pair) for pair in pairs]
        ensure(len(added) in (0, len(scored)), f"{len(added)} scores from score_group for {len(scored)} rollouts")
        for r, (reward, metrics) in zip(scored, added):
            r.reward += reward
            r.metrics |= metrics

    await guard(scored, score_together(), o.generation_timeout)
    for r in scored:
        if o.zero_truncated_completions and r.truncated and r.reward is not None:  # None if score_group failed
            r.reward = 0.0
            r.turn_rewards = None
            r.agent_rewards = {}
    return rollouts


# --- which rows, and what becomes of them -----------------------------------------------------------------------------


@functools.cache
def shuffled(num, seed, epoch):
    """The row numbers of an epoch, in its order."""
    rng = np.random.default_rng((seed, epoch))
    return rng.permutation(num).tolist()


class Order:
    """HACK HERE: which row of an environment comes next, which groups are kept, and which are added. This one takes
    each row once per epoch, as a function of (seed, index). A subclass keeps what must outlive a kill in self.memory,
    as JSON has it.

    state: {"next": index, "open": indices issued but not committed, "extra": memory}. A subclass gets
    orchestrator.order_args as keyword arguments."""

    def __init__(self, rows, cfg, state=None, **args):
        require(not args, CONFIG, f"orchestrator.order_args: {type(self).__name__} knows no {sorted(args)}")
        state = state or {"next": 0, "open": [], "extra": {}}
        self.env = ""  # its environment's name, which run() sets
        self.rows = rows
        self.cfg = cfg
        self.next = state["next"]
        self.open = set(state["open"])
        self.memory = state["extra"]
        self.requeued = sorted(self.open)  # a killed run had these open; they come first
        self.errors = deque(maxlen=200)  # of the last rollouts; "" for each that was not lost
        self.num_useless = 0  # groups in a row

    def state(self):
        return {"next": self.next, "open": sorted(self.open), "extra": self.memory}

    def row_of(self, index):
        """The number of the row that an index stands for."""
        epoch, place = divmod(index, len(self.rows))
        return shuffled(len(self.rows), self.cfg.run.seed, epoch)[place]

    def take(self, step):
        """The next index and the number of its row."""
        if self.requeued:
            index = self.requeued.pop(0)
        else:
            index = self.next
            self.next += 1
        self.open.add(index)
        return index, self.row_of(index)

    def keep(self, rollouts):
        """Dynamic sampling (DAPO, 2503.14476): "" if a group is worth training on, otherwise why not. "flat" if all
        rewards are equal, and with gamma < 1 also how soon they come. Not called if there is nothing to train on."""
        by_turn = self.cfg.trainer.gamma < 1
        scored = [r for r in rollouts if r.reward is not None]
        earned = set()
        for r in scored:
            by_part = (*(r.turn_rewards or ()), *sorted(r.agent_rewards.items()))
            earned.add((r.reward, by_part, r.num_turns if by_turn else 0))
        is_flat = len(earned) == 1 and not has_weight(scored, ("ce", "teacher"))
        return "flat" if is_flat else ""

    def extra(self, step):
        """Groups to train on beside those of this step's batch, e.g. of earlier batches, or demonstrations."""
        return []

    def commit(self, group):
        """A group's batch is about to be committed, with it or, if it was dropped, without it."""
        self.open.discard(group.index)

    def count(self, group):
        """Called when a group ends. Raises RunError with DATA if too many rollouts are lost, or if there is nothing to
        learn from too many groups in a row."""
        o = self.cfg.orchestrator
        self.errors.extend(r.error for r in group.rollouts)
        lost = [error for error in self.errors if error]
        num = len(self.errors)
        if num >= 50 and len(lost) > o.max_error_share * num:
            what = f"{len(lost)} of the last {num} rollouts of {group.env} were lost, mostly by {mode(lost)}"
            raise RunError(DATA, f"{what} (orchestrator.max_error_share = {o.max_error_share})")
        self.num_useless = self.num_useless + 1 if group.dropped else 0
        outcomes = [r.error or r.reward for r in group.rollouts][:4]
        what = f"{self.num_useless} groups of {group.env} in a row taught nothing, the last was {group.dropped}"
        limit = 10 * o.batch_size // o.rollouts_per_example
        require(self.num_useless <= limit, DATA, f"{what}, {outcomes}; launch.sh --check says more")


def has_weight(rollouts, names):
    """Whether any token has one of these weights. The rollouts are scored: those of lost ones may be of any kind."""
    sequences = [s for r in rollouts for s in r.sequences if s["trainable"]]
    return any(np.any(s.get(name, 0)) for s in sequences for name in names)


def unusable(rollouts):
    """Why there is nothing to train on in a group, or ""."""
    scored = [r for r in rollouts if r.reward is not None]
    if len(scored) > 1:
        return "" if has_weight(scored, WEIGHTS) else "empty"
    if any(r.error for r in rollouts):
        return "failed"
    return "long" if any(r.truncated for r in rollouts) else "empty"


def deal(ratios):
    """Environment of slot 0, 1, 2, ... of all batches: the one furthest below its share."""
    total = sum(ratios.values())
    owed = Counter()
    while True:
        for name, ratio in ratios.items():
            owed[name] += ratio
        name = max(owed, key=owed.get)
        owed[name] -= total
        yield name


async def fill(order, num, step, job):
    """Returns `num` groups that teach something, and those that were filtered on the way: each slot goes on to the next
    row until it has one. job(index, row) -> Group."""
    groups = []

    async def slot():
        while True:
            group = await job(*order.take(step))
            groups.append(group)
            if not group.dropped:
                return

    await asyncio.gather(*(slot() for _ in range(num)))
    return sorted(groups, key=lambda group: group.index)


# --- batch files ------------------------------------------------------------------------------------------------------


def save_batch(path, sequences, info):
    """sequences: dicts of per-token fields (lists or arrays: tokens, mask, old_logp, ...) and metadata.

    Writes a safetensors file, which trainer.load_batch reads: each field flat over all sequences, their lens, and as
    metadata JSON `sequences` (what is no field) and JSON `info`. One rename commits it. Raises RunError with DATA for
    what must never be trained on: a field of another length, old_logp that is not finite."""
    lens = [len(s["tokens"]) for s in sequences]
    names = set()
    for s in sequences:
        for name, value in s.items():
            if isinstance(value, list | np.ndarray) and name not in METADATA:
                names.add(name)
    data = {"lens": np.array(lens, np.int32)}
    for name in sorted(names):
        parts = []
        dtype = DTYPES.get(name, np.float32)
        unknown = np.nan if dtype == np.float32 else -1  # in sequences that lack it
        example = next(s[name] for s in sequences if name in s)
        for s, num in zip(sequences, lens):
            values = s.get(name)
            if values is None:
                values = np.full((num, *np.shape(example)[1:]), unknown)
            part = np.array(values, dtype)
            require(len(part) == num, DATA, f"field {name!r} has {len(part)} values for {num} tokens")
            is_trained = name in WEIGHTS and np.nan_to_num(part[:1]).any()
            require(not is_trained, DATA, f"{path}: a first token is a loss token")
            parts.append(part)
        data[name] = np.concatenate(parts)
    logp_T = data["old_logp"]
    if info.get("offline"):  # nan marks tokens that none of our policies sampled
        logp_T = logp_T[~np.isnan(logp_T)]
    require(np.isfinite(logp_T).all(), DATA, f"{path}: old_logp is not finite")
    metadata = []
    for s in sequences:
        metadata.append({key: value for key, value in s.items() if key not in names})
    tmp = path.with_suffix(".tmp")
    texts = {"sequences": json.dumps(metadata), "info": json.dumps(info)}
    tmp.write_bytes(save(data, texts))  # save_file would keep it from other users
    os.replace(tmp, path)


def metadata_of(group, i):
    """The metadata of rollout number i of a group: all but its conversation and its tokens."""
    about = dict(vars(group.rollouts[i]))
    del about["state"], about["sequences"]
    about |= {"env": group.env, "example": group.row, "group": group.index}
    return about | {"rollout": i, "dropped": group.dropped}


def append_rollouts(path, step, groups):
    """Appends a line for each rollout to a JSON Lines file."""
    lines = []
    for group in groups:
        for i, r in enumerate(group.rollouts):
            version = min(r.versions, default=None)
            line = {"step": step, "version": version} | metadata_of(group, i)
            line |= {key: r.state.get(key) for key in TALK}
            lines.append(to_json(line))
    with open(path, "a") as file:
        file.write("".join(lines))


def to_json(line):
    """A line about a rollout for a JSON Lines file. What its state holds becomes text if JSON cannot have it."""
    try:
        return json.dumps(line, default=str) + "\n"
    except Exception:  # a key that is a tuple, a value that contains itself, an object without a text
        texts = {key: as_text(line.get(key)) for key in TALK}
        return json.dumps(line | texts) + "\n"


def as_text(value, form=repr):
    """repr(value), or str(value), which may fail if a user's object is in it."""
    try:
        return form(value)
    except Exception:
        return f"<{type(value).__name__}>"


async def commit_batch(step, groups, extra, orders, run_dir, cfg):
    """Writes rollouts.jsonl, then the file whose rename makes the batch exist. extra: groups of earlier batches, or
    demonstrations, which go into the batch alone."""
    sequences = []
    for group in groups + extra:
        orders[group.env].commit(group)
        for i, r in enumerate(group.rollouts):
            if r.reward is None or group.dropped:
                continue
            about = metadata_of(group, i) | {"staleness": step - min(r.versions)}  # demonstrations have a version, too
            for s in r.sequences:
                reward = r.agent_rewards.get(s["agent"], r.reward)
                sequences.append(about | s | {"reward": reward})
    info = {"run": identity(cfg), "step": step, "max_tokens": cfg.sampling.max_tokens}
    info["metrics"] = rollout_metrics(groups, step)
    state = {name: order.state() for name, order in orders.items()}
    info["sampler"] = json.loads(json.dumps(state))  # a copy: orders go on

    def write():
        append_rollouts(run_dir / "rollouts.jsonl", step, groups)
        save_batch(batch_file(run_dir, step), sequences, info)

    # A large batch takes seconds, which should delay no rollout. The thread is not one of user code's.
    await asyncio.get_running_loop().run_in_executor(WRITER, write)


def batch_file(run_dir, step):
    return run_dir / "batches" / f"step_{step:06d}.safetensors"


def resume(run_dir, cfg):
    """Returns the checkpoint's step, the number of the next batch, and the sampler states by environment, as the newest
    batch has them. Batches since the checkpoint are trained on again."""
    checkpoints = run_dir.glob("checkpoints/step_??????")
    step = max((int(path.name[5:]) for path in checkpoints), default=0)
    next_step = step
    while batch_file(run_dir, next_step).exists():
        next_step += 1
    # 1. The sampler state. After a gap there may be batches that were sampled by versions far behind the checkpoint.
    state = {}
    newest = max(run_dir.glob("batches/step_*.safetensors"), default=None)
    if step or newest:
        path = batch_file(run_dir, next_step - 1)
        what = f"the newest batch is {newest}, not {path}: one is missing. Remove those after it"
        require(newest == path, STORAGE, what)
        try:
            info = json.loads(safe_open(path, "np").metadata()["info"])
            run = info["run"]
            state = info.get("sampler") or info["ledger"]  # its former name
        except Exception as e:  # from safetensors, JSON or the file system
            raise RunError(STORAGE, f"{path} is damaged ({e!r}). Remove it, and start again") from e
        refuse_other(run, cfg, path)
    # 2. With an unchanged configuration the versions after the checkpoint come again bit for bit: keep what is known.
    old = run_dir / "config.toml"
    is_same = old.exists() and old.read_text() == configs.to_toml(cfg)
    last = next_step if is_same else step
    cut_lines(run_dir / "rollouts.jsonl", next_step)
    for name in ("eval.jsonl", "eval_rollouts.jsonl"):
        cut_lines(run_dir / name, last + 1)
    return step, next_step, state


# --- metrics ----------------------------------------------------------------------------------------------------------


def means(rows, prefix=""):
    """[{name: number}, ...] -> {prefix + name: its mean over the rows that have it}."""
    columns = {}
    for row in rows:
        for name, value in row.items():
            columns.setdefault(prefix + name, []).append(value)
    return {name: np.mean(values) for name, values in columns.items()}


def rollout_metrics(groups, step):
    """Metrics of one batch. Rewards are over every scored rollout, also of filtered groups: without the flat ones the
    mean would mislead. tools/watch.py has them for each environment of a mix."""
    rollouts = [r for group in groups for r in group.rollouts]
    rewards = [r.reward for r in rollouts if r.reward is not None]
    trained = [r for group in groups if not group.dropped for r in group.rollouts]
    staleness = [step - min(r.versions) for r in trained if r.reward is not None]  # in versions
    errors = Counter(f"error/{r.error.split(':')[0]}" for r in rollouts if r.error)
    metrics = {f"group/{name}": 0 for name in ("kept", "flat", "failed", "long", "empty")}
    metrics |= Counter(f"group/{group.dropped or 'kept'}" for group in groups)
    metrics |= errors | {"rollout/num": len(rollouts), "rollout/errors": errors.total()}
    metrics |= means([r.metrics for r in rollouts], "reward/")
    metrics |= {"reward/mean": np.mean(rewards), "reward/std": np.std(rewards)}
    sizes = [{"turns": r.num_turns, "tokens": r.num_tokens, "truncated": r.truncated} for r in rollouts]
    metrics |= means(sizes, "rollout/")
    metrics["rollout/forks"] = sum(len(r.sequences[1:]) for r in rollouts)
    return metrics | {"staleness/mean": np.mean(staleness), "staleness/max": max(staleness)}


# --- the loop ---------------------------------------------------------------------------------------------------------


def prepare(cfg):
    """Returns {name: environment}. An error in these, or in the model's files, ends the run before a server starts:
    RunError with CONFIG, or with DATA if a task's own code fails."""
    envs = {}
    for e in cfg.env:
        try:
            envs[e.name] = load_environment(e.id, e.args)
        except Exception as error:
            is_missing = isinstance(error, ModuleNotFoundError) and str(error.name) in e.id.replace("-", "_")
            code = CONFIG if is_missing else getattr(error, "code", DATA)
            raise RunError(code, f"env.id = {e.id!r}: {describe(error, 2000)}") from error
        has_rows = envs[e.name].eval_dataset or not cfg.eval.every
        require(has_rows, CONFIG, f"env.id = {e.id!r}: eval.every is set, but it has no eval_dataset")
    what = f"model = {cfg.run.model!r}, chat_template = {cfg.run.chat_template!r}"
    try:
        from transformers import AutoConfig, AutoTokenizer  # takes seconds

        from configs.serving.download import download

        config = AutoConfig.from_pretrained(cfg.run.model)
        tokenizer = AutoTokenizer.from_pretrained(cfg.run.model, config=config)
        Path(cfg.run.chat_template).stat()  # "", the tokenizer's own, is "." here
        download(cfg.run.model)
    except Exception as error:
        is_foreign = "trust_remote_code" in str(error)
        cause = "it has code of its own, which is not run" if is_foreign else describe(error, 2000)
        raise RunError(CONFIG, f"{what}: {cause}") from error
    if cfg.teacher.weight:
        from configs.algorithms import distill

        distill.check(cfg, tokenizer)
    rows = [env.dataset[0] for env in envs.values()]
    is_text = all(isinstance(row.get("prompt"), str) for row in rows)
    has_template = tokenizer.chat_template or cfg.run.chat_template
    require(has_template or is_text, CONFIG, f"{what}: no chat_template, though the rows are messages")
    return envs


async def run(cfg):
    """Batches after the last committed one, and evaluations. Only RunError or a bug, ours or an order's, ends it."""
    # 1. What can be wrong is found before the launcher starts a server.
    o = cfg.orchestrator
    run_dir = run_directory(cfg)
    envs = prepare(cfg)
    text = configs.to_toml(cfg)
    report_changes(run_dir, text)
    step, start, samplers = resume(run_dir, cfg)
    make_order = configs.find(o.order, {"": Order})
    drops_flat = getattr(make_order, "keep", None) is Order.keep
    what = f"{cfg.trainer.advantage} learns from groups of equal rewards: set orchestrator.order = orders:ByParts"
    require(not drops_flat or cfg.trainer.advantage not in LEARN_FROM_EQUAL, CONFIG, what)
    orders = {}
    for name, env in envs.items():
        known = samplers.get(name)
        orders[name] = make_order(env.dataset, cfg, known, **o.order_args)
        orders[name].env = name
    write_config(run_dir, text)
    report("[orchestrator] ready")  # the launcher now starts the servers
    gc.freeze()  # otherwise collections, which walk all of transformers, take two fifths of the processor's time
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(256))  # for user code
    client = Client(cfg)
    # 2. One task for each batch, S versions ahead of the trainer; evaluations run beside them.
    running = asyncio.Semaphore(o.max_concurrent)
    num_groups = o.batch_size // o.rollouts_per_example
    slots = deal({env.name: env.ratio for env in cfg.env})
    slots = itertools.islice(slots, start * num_groups, None)
    previous = []  # the task of the batch before, which ends with its commit
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(client.until(cfg.run.max_steps))  # keeps client.version up to date
        for n in range(step, cfg.run.max_steps + 1):  # versions whose batch exists may lack their evaluation
            evaluation = None
            every = cfg.eval.every
            if every and (n % every == 0 or n == cfg.run.max_steps):
                from configs.algorithms.evaluation import evaluate

                evaluation = tasks.create_task(evaluate(n, envs, client))
            if start <= n < cfg.run.max_steps:
                await client.until(max(0, n - o.max_staleness))
                shares = Counter(itertools.islice(slots, num_groups))
                work = produce(n, shares, previous, evaluation, envs, orders, client, running, run_dir, cfg)
                previous = [tasks.create_task(work)]
    await client.session.close()


async def produce(n, shares, previous, evaluation, envs, orders, client, running, run_dir, cfg):
    """Generates batch n, with `shares` groups of each environment, and commits it after the previous one."""
    o = cfg.orchestrator

    async def job(name, index, row):
        env = envs[name]
        ask = functools.partial(sample, client, index)
        size = o.rollouts_per_example
        rollouts = await run_group(env, env.dataset[row], size, ask, n, cfg, running)
        if cfg.teacher.weight:
            from configs.algorithms import distill

            await distill.teach(rollouts, index, client)
        dropped = unusable(rollouts) or orders[name].keep(rollouts)
        what = f"orchestrator.order: keep() returned {dropped!r}, not text: why the group is dropped, or ''"
        require(isinstance(dropped, str), DATA, what)
        group = Group(name, index, row, rollouts, dropped)
        orders[name].count(group)
        return group

    fill_with = fill
    if o.oversampling_factor > 1:
        from configs.algorithms.orders import oversample

        fill_with = oversample
    fills = []
    for name, num in shares.items():
        fills.append(fill_with(orders[name], num, n, functools.partial(job, name)))
    groups = sum(await asyncio.gather(*fills), [])
    await asyncio.gather(*previous)  # commits are in order
    if evaluation:  # it is of version n, at which the trainer stays as long as it has no batch n
        await client.until(n)
        await asyncio.wait([evaluation], timeout=cfg.eval.hold_s)
    extra = []
    for order in orders.values():  # only now: what it changes in an order's memory is committed with this batch
        extra += order.extra(n)
    await commit_batch(n, groups, extra, orders, run_dir, cfg)


def main(argv):
    """argv: config.toml [table.key=value ...]. Not asyncio.run, which would wait for user code in threads."""
    cfg = configs.arguments(__doc__, argv)
    asyncio.new_event_loop().run_until_complete(run(cfg))


if __name__ == "__main__":
    run_role("orchestrator")
