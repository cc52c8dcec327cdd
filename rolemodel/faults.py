"""Whose fault a failure is. docs/agents.md has the rule as a table."""

import json
import traceback

from env import Truncated

OK = {"role": "user", "content": "ok"}


class HttpRefused(Exception):
    """The server's 400: asking again would not help."""


def describe(error: BaseException) -> str:
    """An error's type and text, also of one whose own __str__ raises."""
    return f"{type(error).__name__}: {traceback.TracebackException.from_exception(error)}"


async def blame(refused: HttpRefused, ask, said: list) -> Exception:
    """What to raise for a refused request: Truncated, which is scored, if the server also refuses what the policy said
    where all that others wrote is a harmless "ok"; otherwise an error, which loses the rollout.

    ask: orchestrator.sample_turn. said: the trained requests so far, each with the policy's message as JSON."""
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
