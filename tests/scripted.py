"""A policy that says what a test wants, in place of a server."""

import asyncio


def play(env, row, *replies):
    """A rollout of the row in which the policy says these texts or messages. Returns the state, the reward and metrics.

    state["asked"]: the prompts, one for each reply, as the environment gave them to the policy."""
    asked = []
    left = list(replies)

    async def generate(prompt, tools=None, agent="", trainable=True):
        assert tools == env.tools
        asked.append(list(prompt))
        reply = left.pop(0)
        return reply if isinstance(reply, dict) else {"role": "assistant", "content": reply}

    async def go():
        state = env.start(row)
        await env.rollout(state, generate)
        reward, metrics = await env.rubric.score(state)
        return state | {"asked": asked}, reward, metrics

    return asyncio.run(go())
