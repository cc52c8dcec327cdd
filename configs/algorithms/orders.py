"""Orders of rows beyond the core's plain shuffle: orchestrator.order = "orders:Curriculum" or "orders:Difficulty"; and
`ahead`, which orchestrator.oversampling_factor > 1 takes to fill a batch.

An order may skip an index of the shuffle, nothing else, so a run that is resumed takes the same rows: write is_wanted
in a subclass of Picky. What it knows of rows goes into self.extra, which every batch carries to the next start."""

import asyncio
import itertools
import math
import random

from configs import RunError, require
from orchestrator import Order


class Picky(Order):
    """The shuffle without the indices that is_wanted refuses, and where a row has a chance below 1 without some others.
    RunError 4 where is_wanted refuses two epochs of them."""

    def is_wanted(self, index, row, step):
        raise NotImplementedError

    def chance(self, row):
        return 1.0

    def take(self, step):
        if self.again:  # of a killed run, or of `ahead`, and wanted
            return super().take(step)
        unlucky = None
        for _ in range(2 * len(self.rows) + 1000):
            index, row = super().take(step)
            if self.is_wanted(index, row, step):
                if random.Random(f"{self.cfg.run.seed}:take:{index}").random() < self.chance(row):
                    return index, row
                unlucky = unlucky or (index, row)
            self.open.discard(index)
        require(unlucky, 4, f"no row is left at step {step}: {type(self).__name__} wants none of them")
        self.open.add(unlucky[0])
        return unlucky


class Curriculum(Picky):
    """orchestrator.curriculum = { easy = [0, 100], hard = [50, 500] }: rows of a difficulty are taken from its first
    step on and no longer from its second; a difficulty that it does not name is always taken. A row whose last
    orchestrator.retire_after groups were all flat is not taken again."""

    def __init__(self, rows, cfg, ledger=None):
        super().__init__(rows, cfg, ledger)
        curriculum = cfg.orchestrator.curriculum
        wrong = {name: steps for name, steps in curriculum.items() if not is_period(steps)}
        if wrong:
            raise RunError(
                2, f"orchestrator.curriculum = {wrong}: must be {{ difficulty = [first step, step after the last] }}"
            )
        known = {str(row.get("difficulty")) for row in rows}
        unknown = set(curriculum) - known
        if unknown and len(cfg.env) == 1:  # of several, another one may have them
            raise RunError(
                2, f"orchestrator.curriculum names {sorted(unknown)}; the rows' difficulties are {sorted(known)}"
            )

    def is_wanted(self, index, row, step):
        o = self.cfg.orchestrator
        difficulty = str(self.rows[row].get("difficulty"))
        start, end = o.curriculum.get(difficulty, (0, math.inf))
        _, flat_groups = self.known(row)
        is_retired = o.retire_after and flat_groups >= o.retire_after
        return start <= step < end and not is_retired

    def known(self, row):
        """-> solve rate, flat groups in a row; of a row that no group was of: 1/2, 0."""
        return self.extra.get(str(row), (0.5, 0))

    def settle(self, group):
        """A group is in a committed batch. Its mean reward, cut to 0..1, moves the row's solve rate half way."""
        super().settle(group)
        rewards = [r.reward for r in group.rollouts if r.reward is not None]
        if not rewards:
            return
        mean = min(max(sum(rewards) / len(rewards), 0.0), 1.0)
        rate, flat_groups = self.extra.get(str(group.row), (mean, 0))
        is_flat = group.dropped.startswith("flat")
        self.extra[str(group.row)] = [(rate + mean) / 2, flat_groups + 1 if is_flat else 0]


class Difficulty(Curriculum):
    """Takes a row more often the closer its solve rate p is to 1/2, where a group's rewards differ most: with a chance
    of 4 p (1 - p) + 0.1. What nothing is known of is always taken."""

    def chance(self, row):
        rate, _ = self.known(row)
        return 4 * rate * (1 - rate) + 0.1


def is_period(steps):
    if not isinstance(steps, list) or [type(step) for step in steps] != [int, int]:
        return False
    return 0 <= steps[0] < steps[1]


def put_back(order, indices, step):
    """They come next, but for those that are not wanted any more at `step`."""
    for index in indices:
        row = order.epoch(index // len(order.rows))[index % len(order.rows)]
        # by its method: an order imported as configs.algorithms.orders is of another class
        if hasattr(order, "is_wanted") and not order.is_wanted(index, row, step):
            order.open.discard(index)
        else:
            order.again = sorted([*order.again, index])


async def ahead(order, num, n, job, cfg):
    """orchestrator.fill with orchestrator.oversampling_factor times as many groups under way as are needed, so one that
    teaches nothing is replaced without a wait. The lowest indices win, whoever finishes first: short rollouts get no
    advantage. What is left over is thrown away, and its rows are taken again."""
    jobs = {}
    try:
        while True:
            hopeful = sum(not task.done() or not task.result().dropped for task in jobs.values())
            for _ in range(math.ceil(num * cfg.orchestrator.oversampling_factor) - hopeful):
                index, row = order.take(n)
                jobs[index] = asyncio.create_task(job(index, row))
            done = [jobs[i].result() for i in itertools.takewhile(lambda i: jobs[i].done(), sorted(jobs))]
            useful = [i for i, group in enumerate(done) if not group.dropped]
            if len(useful) >= num:
                done = done[: useful[num - 1] + 1]
                put_back(order, set(jobs) - {group.index for group in done}, n + 1 + cfg.orchestrator.max_staleness)
                return done
            under_way = [task for task in jobs.values() if not task.done()]
            await asyncio.wait(under_way, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in jobs.values():
            task.cancel()
