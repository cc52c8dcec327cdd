"""When a run cannot go on: too many rollouts are lost, or no group has a gradient any more."""

from collections import defaultdict, deque
from statistics import mode

from rolemodel.evaluation import is_solved, tells_success
from rolemodel.role import DataError


class Solved(Exception):
    """All rollouts of a task are successes: no group has a gradient, and nothing is left to learn."""


class Limits:
    """Sees every group of a run. num_groups: of a batch."""

    def __init__(self, max_error_share: float, num_groups: int):
        self.max_error_share = max_error_share
        self.most = max(200, 10 * num_groups)  # groups in a row without a gradient
        # By environment:
        self.errors = defaultdict(lambda: deque(maxlen=200))  # of the last rollouts; "" for each that was not lost
        self.other_scale = set()  # whose first function has given numbers outside of 0 to 1
        self.useless = defaultdict(list)  # groups in a row without a gradient: whether each has successes alone

    def see(self, name: str, group: list):
        """A group of rollouts of the environment `name`. Raises DataError or Solved at a limit.

        Dropping failures is a selection: a policy could learn to fail where its reward would be low."""
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
        useless.append(all(r.reward is not None and is_solved(r) for r in group))
        if len(useless) > self.most:
            text = f"{name}: {len(useless)} groups in a row had no gradient"
            if all(useless) and name not in self.other_scale:
                raise Solved(f"{text}, since all their rollouts were successes: the task is solved, and the run ends")
            raise DataError(f"{text} (now: {group[0].dropped})")
