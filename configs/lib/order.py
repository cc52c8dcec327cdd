"""Which row comes next, and in which environment: a pure order, what may skip in it, and the ledger that resumes it."""

import itertools
import math
import random
from collections import Counter, deque

from configs.lib.runtime import RunError


class Order:
    """HACK HERE: which row of an environment comes next. The base order is a function of (seed, index); a curriculum or
    solve rates may skip an index, nothing else. ledger: {"next": index, "open": those issued but not committed,
    "tasks": {row: [solve rate, flat groups in a row]}}."""

    def __init__(self, rows, cfg, ledger=None):
        self.rows, self.cfg, self.epochs, self.lost, self.surplus = rows, cfg, {}, 0, 0
        self.first = []  # groups of the first batch that the pre-flight looks at
        self.recent = deque(maxlen=200)  # errors of the last rollouts, "" for none
        ledger = ledger or {"next": 0, "open": [], "tasks": {}}
        self.next, self.open, self.tasks = ledger["next"], set(ledger["open"]), ledger["tasks"]
        self.again = sorted(self.open)

    def ledger(self):
        return {"next": self.next, "open": sorted(self.open), "tasks": self.tasks}

    def row(self, index):
        epoch, i = divmod(index, len(self.rows))
        if epoch not in self.epochs:
            rng = random.Random(f"{self.cfg.run.seed}:{epoch}")
            self.epochs[epoch] = rng.sample(range(len(self.rows)), len(self.rows))
        return self.epochs[epoch][i]

    def take(self, step):
        """-> index, row number. Indices that were put back, or that a killed run had open, come first."""
        if self.again:
            return (index := self.again.pop(0)), self.row(index)
        for index in range(self.next, self.next + 2 * len(self.rows) + 1000):
            if self.is_wanted(index, self.row(index), step):
                self.next = index + 1
                self.open.add(index)
                return index, self.row(index)
        raise RunError(4, f"no row is left at step {step}: outside the curriculum, or retired as always flat")

    def is_wanted(self, index, row, step):
        o = self.cfg.orchestrator
        start, end = o.curriculum.get(str(self.rows[row].get("difficulty")), (0, math.inf))
        rate, flat = self.tasks.get(str(row), (0.5, 0))
        rate = rate if o.buffer == "online-difficulty" else 0.5
        chance = random.Random(f"{self.cfg.run.seed}:take:{index}").random()
        return start <= step < end and flat < (o.retire_after or math.inf) and chance < 4 * rate * (1 - rate) + 0.1

    def put_back(self, index):
        self.surplus += 1
        self.again = sorted([*self.again, index])

    def settled(self):
        """-> groups put back since the last batch."""
        surplus, self.surplus = self.surplus, 0
        return surplus

    def count_errors(self, group):
        """Raises RunError 4 where more than max_error_share of the last 200 rollouts (of 50 at least) were lost."""
        self.recent.extend(r.error for r in group.rollouts)
        lost, limit = Counter(filter(None, self.recent)), self.cfg.orchestrator.max_error_share
        if len(self.recent) >= 50 and lost.total() > limit * len(self.recent):
            shares = {name: f"{num / len(self.recent):.0%}" for name, num in lost.most_common()}
            told = f"of the last {len(self.recent)} rollouts of {group.env} too many were lost: {shares}"
            raise RunError(4, f"{told} (orchestrator.max_error_share = {limit}); the first of each kind is in the log")

    def settle(self, group):
        """A group is in a committed batch; its mean reward, within 0..1, moves the row's solve rate half way."""
        self.open.discard(group.index)
        self.count_errors(group)
        rewards = [r.reward for r in group.rollouts if r.reward is not None]
        if rewards and (self.cfg.orchestrator.buffer == "online-difficulty" or self.cfg.orchestrator.retire_after):
            mean = min(max(sum(rewards) / len(rewards), 0.0), 1.0)
            rate, flat = self.tasks.get(str(group.row), (mean, 0))
            self.tasks[str(group.row)] = [(rate + mean) / 2, flat + 1 if group.dropped.startswith("flat") else 0]


def deal(ratios):
    """Environment of slot 0, 1, 2, ...: the one furthest below its share, so that none is ever a slot away from it."""
    given = dict.fromkeys(ratios, 0)
    for slot in itertools.count(1):
        name = max(ratios, key=lambda name: ratios[name] / sum(ratios.values()) * slot - given[name])
        given[name] += 1
        yield name
