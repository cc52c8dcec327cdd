"""Any task with a teacher beside its rewards: configs/algorithms/distill.py.

    [env]
    id = "distill"
    args = { id = "reverse_text", weight = 1.0, base_url = "http://127.0.0.1:9000" }
    [trainer]
    loss = "losses:distill"

prompt = "module:function" names what the teacher reads in place of the prompt; args = { ... } are the task's."""

import env
from configs import find
from configs.algorithms.distill import taught


def load_environment(id: str, weight: float, args: dict | None = None, prompt="", **how) -> env.SingleTurnEnv:
    return taught(env.load_environment(id, args or {}), weight, prompt=find(prompt) if prompt else None, **how)
