"""ECHO (2605.24517): beside what it earns, the policy learns to foresee what the environment will answer.

    return echo(ToolEnv(...), weight=0.005)

On the toy of wiki_search, whose pages cannot be foreseen, it did harm (configs/README.md)."""

import numpy as np

from env import call


def echo(env, weight):
    """Returns the environment. The tokens after the policy's first turn that others said get ce = weight."""
    own = env.add_fields

    async def add_fields(state, sequences):
        await call(own, state=state, sequences=sequences)
        for sequence in sequences:
            mask = np.array(sequence["mask"], bool)
            has_spoken = mask.cumsum() > 0
            sequence["ce"] = weight * (has_spoken & ~mask)

    env.add_fields = add_fields
    return env
