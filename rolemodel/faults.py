"""Decides whose fault a failure is. docs/agents.md has the rules as a table."""

import json
import traceback

from env import Truncated

OK = {"role": "user", "content": "ok"}


class HttpRefused(Exception):
    """The server has answered with status 400, so asking again would not help."""


def describe(error: BaseException) -> str:
    """An error's type and text, even if its own __str__ raises."""
    return f"{type(error).__name__}: {traceback.TracebackException.from_exception(error)}"


async def blame(refused: HttpRefused, ask, said: list) -> Exception:
    """Returns the exception to raise for a refused request. The request is sent again with a harmless "ok" in place of
    all that others wrote. If the server refuses this too, the policy is at fault: Truncated, so that the rollout is
    scored. Otherwise, an ordinary error, so that the rollout is lost.

    ask: orchestrator.sample_turn. said: (request, the policy's answer as JSON) for all requests so far that are trained
    on."""
    print(refused, flush=True)
    messages = [OK]
    for message in [json.loads(text) for _, text in said]:
        calls = [(call["id"], call["function"]["name"]) for call in message.get("tool_calls", ())]
        results = [{"role": "tool", "tool_call_id": id, "name": name, "content": "ok"} for id, name in calls]
        messages += [message, *(results or [OK])]
    try:
        if said:
            await ask(said[-1][0] | {"messages": messages, "max_tokens": 1})
    except HttpRefused:
        return Truncated(str(refused))
    return ValueError(str(refused))
