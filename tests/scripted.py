"""A policy that says what a test wants, in place of a server."""

import asyncio
from types import SimpleNamespace


class Policy:
    """generate() as an environment gets it. It says these texts or messages, one after the other, raises errors, and
    hangs for None."""

    cfg = None  # of the run

    def __init__(self, *said, **choice):
        self.left = list(said)
        self.choice = {"index": 0, "finish_reason": "stop"} | choice  # of each reply
        self.asked = []
        self.num_ended = 0  # requests that hung

    async def __call__(self, messages, tools=None, agent="", trainable=True, **settings):
        asked = {"messages": list(messages), "tools": tools, "agent": agent, "trainable": trainable}
        self.asked.append(SimpleNamespace(**asked, settings=settings))
        said = self.left.pop(0)
        if said is None:
            try:
                await asyncio.Event().wait()
            finally:
                self.num_ended += 1
        if isinstance(said, Exception):
            raise said
        message = Policy.message(said)
        reply = {"id": "1", "created": 0, "object": "chat.completion", "model": "run"}
        reply["usage"] = {"prompt_tokens": 3, "completion_tokens": 4, "total_tokens": 7}
        self.state["replies"].append(reply | {"choices": [self.choice | {"message": message}]})
        return message

    def message(said):
        return {"role": "assistant", "content": ""} | (said if isinstance(said, dict) else {"content": said})

    async def rollout(self, env, row):
        """Plays a row. Returns the state."""
        self.state = env.start(row) | {"step": 0, "replies": [], "cfg": self.cfg}
        await env.rollout(self.state, self)
        return self.state


def play(env, row, *said):
    """A rollout of the row in which the policy says this. Returns the state, the reward and metrics.

    state["asked"]: the prompts, one for each answer, as the environment gave them to the policy."""

    async def go():
        policy = Policy(*said)
        state = await policy.rollout(env, row)
        reward, metrics = await env.rubric.score(state)
        return state | {"asked": [asked.messages for asked in policy.asked]}, reward, metrics

    return asyncio.run(go())
