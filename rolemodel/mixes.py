"""Several tasks in one run."""

from collections import Counter
from itertools import count


def divide_slots(ratios):
    """Yields (environment, its own slot) for slots 0, 1, ... of the run. Each goes to the environment that is furthest
    below its share."""
    slots = Counter()
    total = sum(ratios.values())
    for num in count(1):
        name = max(ratios, key=lambda name: num * ratios[name] / total - slots[name])
        yield name, slots[name]
        slots[name] += 1
