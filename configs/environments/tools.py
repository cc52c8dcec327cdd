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

from env import DataError, MultiTurnEnv, NeedsMainThread, ensure, in_thread, name_of, parameters

UNREADABLE = "error: the tool call is not valid JSON with a name and arguments"


class ToolEnv(MultiTurnEnv):
    """The policy calls Python functions. Results go back to it as text, and so does whatever goes wrong with a call.

    Each function needs type hints and a docstring that describes its arguments (see configs/tasks/wiki_search.py). An
    argument named `state` gets the rollout's state, and the policy does not see it. A tool may also be a
    functools.partial, which has its function's name and hides the arguments it sets, or an object with __call__, which
    has its class's name. vLLM parses the calls; for Qwen it needs
    inference.args = { enable_auto_tool_choice = true, tool_call_parser = "hermes" }.

    Raises DataError for a tool without what its schema needs, and for two tools of one name."""

    def __init__(self, dataset, tools, max_turns=8, max_output=8192, call_tag="<tool_call>", **kwargs):
        super().__init__(dataset, max_turns, **kwargs)
        self.max_output = max_output
        self.call_tag = call_tag
        self.functions = {}
        self.checks = {}
        self.tools = []
        for tool in tools:
            name = name_of(tool)
            ensure(name not in self.functions, f"two tools are called {name!r}: give one a function of its own")
            self.functions[name] = tool
            self.checks[name] = seen_by_policy(tool)
            self.tools.append(schema_of(name, self.checks[name]))

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
        except NeedsMainThread:  # no fault of the policy's
            raise
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
        tool = self.functions[name]
        if "state" in parameters(tool).keys() - getattr(tool, "keywords", {}).keys():
            arguments["state"] = state
        return str(await in_thread(tool, **arguments))


def inner(tool):
    """What a functools.partial calls in the end; any other tool itself."""
    while isinstance(tool, functools.partial):
        tool = tool.func
    return tool


def seen_by_policy(tool):
    """A tool as the policy sees it, without `state` and what a partial sets: this function checks its arguments and
    returns them as a dict."""
    function = inner(tool)
    doc = function.__doc__
    if not hasattr(function, "__name__"):  # an object: its class may describe the arguments in place of __call__
        function = function.__call__
        doc = function.__doc__ or doc

    @functools.wraps(function)
    def seen(**given):
        return given

    hidden = {"state", *getattr(tool, "keywords", {})}
    visible = [parameter for name, parameter in parameters(tool).items() if name not in hidden]
    hints = function.__annotations__
    seen.__annotations__ = {p.name: hints[p.name] for p in visible if p.name in hints}
    seen.__signature__ = inspect.Signature(visible)
    seen.__name__ = name_of(tool)
    seen.__doc__ = doc
    return pydantic.validate_call(seen)


def schema_of(name, seen):
    """The JSON schema that goes to the server. Raises DataError if type hints or parts of the docstring are missing."""
    try:
        return get_json_schema(seen)
    except Exception as e:  # Transformers has a type for each kind
        needs = "a tool needs type hints, and a docstring with a line for each argument under Args:"
        raise DataError(f"tool {name!r}: {e}; {needs}") from e
