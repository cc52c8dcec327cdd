"""A policy that says what a test wants, in place of a server."""

import asyncio


def play(env, row, *replies):
    """A rollout of the row in which the policy says these texts or messages. Returns the state, the reward and metrics.

    state["asked"]: the prompts, one for each reply, as the environment gave them to the policy."""
    asked = []
    left = list(replies)

    async def generate(prompt, tools=None, agent="", trainable=True, whole=False):
        assert tools == env.tools
        asked.append(list(prompt))
        reply = left.pop(0)
        message = reply if isinstance(reply, dict) else {"role": "assistant", "content": reply}
        choice = {"index": 0, "finish_reason": "stop", "message": message}
        head = {"id": "", "created": 0, "model": "policy", "object": "chat.completion"}
        return head | {"choices": [choice]} if whole else message

    async def go():
        state = env.start(row)
        await env.rollout(state, generate)
        reward, metrics = await env.rubric.score(state)
        return state | {"asked": asked}, reward, metrics

    return asyncio.run(go())
