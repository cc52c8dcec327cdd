"""Environments in which the policy calls Python functions:

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

UNREADABLE = "error: the tool call is not valid JSON with a name and arguments"


class ToolEnv(MultiTurnEnv):
    """The policy calls Python functions. Results go back to it as text, and so does whatever goes wrong with a call.

    Each function needs type hints and a docstring that describes its arguments (see configs/tasks/wiki_search.py). An
    argument named `state` gets the rollout's state, and the policy does not see it. vLLM parses the calls; for Qwen it
    needs inference.args = { enable_auto_tool_choice = true, tool_call_parser = "hermes" }."""

    def __init__(self, dataset, tools, max_turns=8, max_output=8192, call_tag="<tool_call>", **kwargs):
        super().__init__(dataset, max_turns, **kwargs)
        self.max_output = max_output
        self.call_tag = call_tag
        self.functions = {function.__name__: function for function in tools}
        self.checks = {function.__name__: seen_by_policy(function) for function in tools}
        self.tools = [get_json_schema(seen) for seen in self.checks.values()]

    def is_completed(self, messages, state):
        last = messages[-1]
        return not last.get("tool_calls") and self.call_tag not in last["content"]

    async def env_response(self, messages, state):
        requests = messages[-1].get("tool_calls")
        if not requests:  # the server's parser could not read the call and left it in the content
            return [{"role": "user", "content": UNREADABLE}]
        return [await self.run_tool(request, state) for request in requests]

    async def run_tool(self, request, state):
        """Runs a call, as vLLM parsed it, and returns the tool's message, which says so if anything goes wrong."""
        try:
            text = await self.call_tool(request["function"], state)
        except pydantic.ValidationError as e:
            problems = [".".join(map(str, error["loc"])) + ": " + error["msg"] for error in e.errors()]
            text = "error: " + "; ".join(problems)
        except (Exception, SystemExit) as e:
            text = f"error: {type(e).__name__}: {e}"
        text = text.encode("utf-8", "replace").decode()  # a lone surrogate cannot be sent
        if len(text) > self.max_output:
            text = text[: self.max_output] + f"\n[cut at {self.max_output} characters]"
        return {"role": "tool", "tool_call_id": request.get("id", ""), "content": text}

    async def call_tool(self, function, state):
        """Returns the result as text; raises what the checks of the arguments or the function raise."""
        name = function["name"]
        given = json.loads(function["arguments"] or "{}")
        ensure(name in self.functions, f"there is no tool {name!r}, only {', '.join(self.functions)}")
        arguments = self.checks[name](**given)
        return str(await call(self.functions[name], **arguments, state=state))


def seen_by_policy(function):
    """A tool as the policy sees it, without `state`: this function checks its arguments and returns them as a dict."""

    @functools.wraps(function)
    def seen(**given):
        return given

    hints = function.__annotations__
    seen.__annotations__ = {name: hint for name, hint in hints.items() if name not in ("state", "return")}
    visible = [parameter for name, parameter in parameters(function).items() if name != "state"]
    seen.__signature__ = inspect.Signature(visible)
    return pydantic.validate_call(seen)
