"""Environments whose policy calls Python functions:

def square(number: float) -> float:
    '''Multiplies a number by itself.

    Args:
        number: what to square
    '''
    return number * number

env = ToolEnv(rows, tools=[square], rubric=rubric)
"""

import functools
import inspect
import json

import pydantic
from transformers.utils import get_json_schema

from env import MultiTurnEnv, call, ensure, parameters


class ToolEnv(MultiTurnEnv):
    """The policy calls Python functions. Results go back to it as text, and so does whatever goes wrong with a call.

    Each has type hints, and a docstring that tells what its arguments are (see configs/tasks/wiki_search.py); one that names
    `state` gets the rollout's, which the policy does not see. vLLM parses the calls, with inference.args =
    { enable_auto_tool_choice = true, tool_call_parser = "hermes" } for Qwen."""

    def __init__(self, dataset, tools, max_turns=8, max_output=8192, call_tag="<tool_call>", **kwargs):
        super().__init__(dataset, max_turns, **kwargs)
        self.max_output, self.call_tag = max_output, call_tag
        self.functions = {f.__name__: f for f in tools}
        self.checks = {f.__name__: seen_by_policy(f) for f in tools}
        self.tools = [get_json_schema(seen) for seen in self.checks.values()]

    def is_completed(self, messages, state):
        return not messages[-1].get("tool_calls") and self.call_tag not in messages[-1]["content"]

    async def env_response(self, messages, state):
        if not messages[-1].get("tool_calls"):  # the server's parser could not read it, and left it in the content
            return [{"role": "user", "content": "error: the tool call is no valid JSON with a name and arguments"}]
        return [await self.run_tool(request, state) for request in messages[-1]["tool_calls"]]

    async def run_tool(self, request, state):
        """request: the policy's call, as vLLM parsed it -> the tool's message. What goes wrong becomes its text."""
        try:
            name, given = request["function"]["name"], json.loads(request["function"]["arguments"] or "{}")
            ensure(name in self.functions, f"there is no tool {name!r}, only {', '.join(self.functions)}")
            text = str(await call(self.functions[name], **self.checks[name](**given), state=state))
        except pydantic.ValidationError as e:
            text = "error: " + "; ".join(f"{'.'.join(map(str, x['loc']))}: {x['msg']}" for x in e.errors())
        except (Exception, SystemExit) as e:
            text = f"error: {type(e).__name__}: {e}"
        text = text.encode("utf-8", "replace").decode()  # a lone surrogate cannot be sent
        rest = f"\n[cut at {self.max_output} characters]" if len(text) > self.max_output else ""
        return {"role": "tool", "tool_call_id": request.get("id", ""), "content": text[: self.max_output] + rest}


def seen_by_policy(function):
    """A tool as the policy sees it: a function of its arguments but `state`, which checks them and returns a dict."""
    seen = functools.wraps(function)(lambda **given: given)
    seen.__signature__ = inspect.Signature([p for p in parameters(function).values() if p.name != "state"])
    seen.__annotations__ = {k: v for k, v in function.__annotations__.items() if k not in ("state", "return")}
    return pydantic.validate_call(seen)
