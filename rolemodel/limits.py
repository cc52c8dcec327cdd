"""Decides when a run cannot go on, because too many rollouts are lost, or no group has a gradient any more."""

from collections import defaultdict, deque
from statistics import mode

from rolemodel.evaluation import is_solved, tells_success
from rolemodel.role import DataError


class Solved(Exception):
    """All rollouts of a task are successes, so no group has a gradient, and nothing is left to learn."""


class Limits:
    """Looks at every group of a run. num_groups: how many a batch has."""

    def __init__(self, max_error_share: float, num_groups: int):
        self.max_error_share = max_error_share
        self.most = max(200, 10 * num_groups)  # groups in a row without a gradient
        # For each environment:
        self.errors = defaultdict(lambda: deque(maxlen=200))  # of its last rollouts; "" if one was not lost
        self.other_scale = set()  # environments whose first function has given values outside of 0 to 1
        self.useless = defaultdict(list)  # for groups in a row without a gradient: are all rollouts successes?

    def see(self, name: str, group: list):
        """Takes in a group of rollouts of the environment `name`. Raises DataError or Solved if a limit is reached.

        There is a limit on lost rollouts because leaving them out is a selection: a policy could learn to fail where
        its reward would be low."""
        errors = self.errors[name]
        errors.extend(r.error for r in group)
        lost = [error for error in errors if error]
        if len(errors) >= 50 and len(lost) > self.max_error_share * len(errors):
            raise DataError(f"{name}: {len(lost)} of the last {len(errors)} rollouts were lost, mostly: {mode(lost)}")
        useless = self.useless[name]
        if not tells_success(r for r in group if r.reward is not None):
            self.other_scale.add(name)
        if not group[0].dropped:
            return useless.clear()
        useless.append(all(r.reward and is_solved(r) for r in group))  # a right answer may be cut off and get 0
        if len(useless) > self.most:
            text = f"{name}: {len(useless)} groups in a row had no gradient"
            if all(useless) and name not in self.other_scale:
                raise Solved(f"{text}, since all their rollouts were successes: the task is solved, and the run ends")
            raise DataError(f"{text} (now: {group[0].dropped})")
