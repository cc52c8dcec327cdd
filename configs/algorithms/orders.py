"""Orders of rows beyond the core's plain shuffle: orchestrator.order = "orders:Curriculum", "orders:Difficulty", ...
And `oversample`, which fills a batch if orchestrator.oversampling_factor is above 1.

An order may skip indices of the shuffle, nothing else, so a run that is resumed takes the same rows: write is_wanted
in a subclass of Picky. What it knows of rows goes into self.memory, which every batch carries to the next start."""

import asyncio
import itertools
import json
import math
import random
from pathlib import Path

import numpy as np

from configs.runtime.role import CONFIG, DATA, RunError, require
from orchestrator import Group, Order, Rollout, shuffled


class Picky(Order):
    """The shuffle without the indices that is_wanted refuses and, if a row has a chance below 1, without some others.
    Raises RunError with DATA if is_wanted refuses two epochs of them."""

    def is_wanted(self, index, row, step):
        raise NotImplementedError

    def chance(self, row):
        return 1.0

    def take(self, step):
        if self.requeued:  # wanted before
            return super().take(step)
        unlucky = None
        for _ in range(2 * len(self.rows) + 1000):
            index, row = super().take(step)
            if self.is_wanted(index, row, step):
                if random.Random(f"{self.cfg.run.seed}:take:{index}").random() < self.chance(row):
                    return index, row
                unlucky = unlucky or (index, row)
            self.open.discard(index)
        require(unlucky, DATA, f"no row is left at step {step}: {type(self).__name__} wants none of them")
        self.open.add(unlucky[0])
        return unlucky


class Curriculum(Picky):
    """orchestrator.curriculum = { easy = [0, 100], hard = [50, 500] }: rows of a difficulty are taken from its first
    step on and no longer from its second; a difficulty that it does not name is always taken. A row whose last
    orchestrator.retire_after groups all had zero variance is not taken again."""

    def __init__(self, rows, cfg, state=None, **args):
        super().__init__(rows, cfg, state, **args)
        curriculum = cfg.orchestrator.curriculum
        wrong = {name: steps for name, steps in curriculum.items() if not is_period(steps)}
        must = "must be { difficulty = [first step, step after the last] }"
        require(not wrong, CONFIG, f"orchestrator.curriculum = {wrong}: {must}")
        known = {str(row.get("difficulty")) for row in rows}
        unknown = sorted(set(curriculum) - known)
        if unknown and len(cfg.env) == 1:  # with several environments another one may have them
            what = f"orchestrator.curriculum names {unknown}; the rows' difficulties are {sorted(known)}"
            raise RunError(CONFIG, what)

    def is_wanted(self, index, row, step):
        o = self.cfg.orchestrator
        difficulty = str(self.rows[row].get("difficulty"))
        start, end = o.curriculum.get(difficulty, (0, math.inf))
        _, num_flat = self.known(row)
        is_retired = o.retire_after and num_flat >= o.retire_after
        return start <= step < end and not is_retired

    def known(self, row):
        """Solve rate, and zero-variance groups in a row; 1/2 and 0 before the row's first group."""
        return self.memory.get(str(row), (0.5, 0))

    def commit(self, group):
        """A group is in a committed batch. Its mean reward, cut to 0..1, moves the row's solve rate half way."""
        super().commit(group)
        rewards = [r.reward for r in group.rollouts if r.reward is not None]
        if not rewards:
            return
        mean = min(max(sum(rewards) / len(rewards), 0.0), 1.0)
        rate, num_flat = self.memory.get(str(group.row), (mean, 0))
        self.memory[str(group.row)] = [(rate + mean) / 2, num_flat + 1 if group.dropped == "flat" else 0]


class Difficulty(Curriculum):
    """Takes a row more often the closer its solve rate p is to 1/2, where a group's rewards differ most: with a chance
    of 4 p (1 - p) + 0.1. A row without a group yet is always taken."""

    def chance(self, row):
        rate, _ = self.known(row)
        return 4 * rate * (1 - rate) + 0.1


def is_period(steps):
    if not isinstance(steps, list) or [type(step) for step in steps] != [int, int]:
        return False
    return 0 <= steps[0] < steps[1]


def put_back(order, indices, step):
    """They come next, except those that are no longer wanted at `step`."""
    for index in indices:
        if isinstance(order, Picky) and not order.is_wanted(index, order.row_of(index), step):
            order.open.discard(index)
        else:
            order.requeued = sorted([*order.requeued, index])


class RunningBaseline(Order):
    """The shuffle, and for trainer.advantage = "advantages:running" a running mean of each agent's rewards: a rollout
    moves it by a twentieth. No group is dropped: one whose rewards are equal teaches as well."""

    def keep(self, rollouts):
        return ""

    def commit(self, group):
        super().commit(group)
        for r in group.rollouts:
            for agent in sorted({s["agent"] for s in r.sequences}):
                if r.reward is not None:
                    baseline = self.memory.get(agent, 0.0)
                    r.metrics[f"baseline_{agent}"] = baseline
                    reward = r.agent_rewards.get(agent, r.reward)
                    self.memory[agent] = baseline + 0.05 * (reward - baseline)


class ByParts(Order):
    """The shuffle, for trainer.advantage = "advantages:gdpo" or "advantages:brief", which see more than the reward:
    a group of equal rewards is dropped only if what they see is equal as well. That is the value of each function that
    has a weight, or the number of tokens of a success."""

    def keep(self, rollouts):
        reason = super().keep(rollouts)
        is_brief = self.cfg.trainer.advantage == "advantages:brief"
        seen = set()
        for r in rollouts:
            if r.reward is not None:
                length = r.num_tokens if r.reward > 0 else 0
                parts = tuple(r.metrics.get(name) for name, weight in sorted(r.reward_weights.items()) if weight)
                seen.add(length if is_brief else parts)
        return "" if reason == "flat" and len(seen) > 1 else reason


class Demonstrations(Order):
    """The shuffle, and demonstrations that are imitated beside the rollouts of each batch.

        orchestrator.order_args = { path = "talks.jsonl", share = 0.1, weight = 0.1 }

    A line of the file has `prompt` and `completion`, lists of messages, and maybe `tools`. share: demonstrations per
    rollout of a batch; weight: ce of each of their tokens. They have no reward, and so no part in any baseline."""

    def __init__(self, rows, cfg, state=None, path="", share=0.1, weight=0.1, **args):
        from transformers import AutoTokenizer

        from configs.models.demonstrations import stop_ids, tokenize_conversation

        super().__init__(rows, cfg, state, **args)
        require(Path(path).is_file(), CONFIG, f"orchestrator.order_args: path = {path!r} is no file")
        tokenizer = AutoTokenizer.from_pretrained(cfg.run.model)
        if cfg.run.chat_template:
            tokenizer.chat_template = Path(cfg.run.chat_template).read_text()
        how = {"stops": stop_ids(cfg.run.model, tokenizer), "stop_strings": cfg.sampling.stop}
        how |= cfg.sampling.chat_template_kwargs
        self.talks = []
        for number, line in enumerate(Path(path).read_text(encoding="utf-8").split("\n"), 1):
            if not line.strip():
                continue
            try:
                talk = json.loads(line)
                messages = talk["prompt"] + talk["completion"]
                first = len(talk["prompt"])
                sequences = tokenize_conversation(tokenizer, messages, talk.get("tools"), first, **how)
            except Exception as e:  # what others have written
                raise RunError(CONFIG, f"{path}, line {number}: {e!r}") from e
            for s in sequences:
                num = len(s["tokens"])
                fits = num <= cfg.run.max_seq_len
                require(fits, CONFIG, f"{path}, line {number}: {num} tokens, max_seq_len = {cfg.run.max_seq_len}")
                s |= {"ce": weight * np.array(s["mask"]), "mask": np.zeros(num), "old_logp": np.zeros(num)}
                self.talks.append((talk, s))
        require(self.talks, CONFIG, f"{path} has no demonstration")
        self.num = round(share * cfg.orchestrator.batch_size)
        what = f"orchestrator.order_args: share = {share} of batch_size = {cfg.orchestrator.batch_size} is none"
        require(self.num > 0, CONFIG, what)

    def extra(self, step):
        if self.env not in ("", self.cfg.env[0].name):  # each environment has an order; one of them adds these
            return []
        rollouts = []
        for i in range(step * self.num, (step + 1) * self.num):
            epoch, place = divmod(i, len(self.talks))
            talk, sequence = self.talks[shuffled(len(self.talks), self.cfg.run.seed, epoch)[place]]
            # A rollout without a reward would be left out; a sequence without one has no advantage.
            r = Rollout(talk, [dict(sequence)], [step], reward=0.0, agent_rewards={"": None})
            rollouts.append(r)
        return [Group(self.cfg.env[0].name, -1, -1, rollouts, "")] if rollouts else []


async def oversample(order, num, step, job):
    """orchestrator.fill with orchestrator.oversampling_factor times as many groups under way as are needed, so that
    one that teaches nothing is replaced without a wait. The lowest indices win, whoever finishes first: short rollouts
    get no advantage. What is left over is thrown away, and its rows are taken again, if the order still wants them."""
    jobs = {}
    try:
        while True:
            hopeful = sum(not task.done() or not task.result().dropped for task in jobs.values())
            for _ in range(math.ceil(num * order.cfg.orchestrator.oversampling_factor) - hopeful):
                index, row = order.take(step)
                jobs[index] = asyncio.create_task(job(index, row))
            done = [jobs[i].result() for i in itertools.takewhile(lambda i: jobs[i].done(), sorted(jobs))]
            useful = [i for i, group in enumerate(done) if not group.dropped]
            if len(useful) >= num:
                done = done[: useful[num - 1] + 1]
                surplus = set(jobs) - {group.index for group in done}
                put_back(order, surplus, step + 1 + order.cfg.orchestrator.max_staleness)
                return done
            under_way = [task for task in jobs.values() if not task.done()]
            await asyncio.wait(under_way, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in jobs.values():
            task.cancel()
