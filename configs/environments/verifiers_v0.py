"""Environments of the `verifiers` package, unchanged: their turns, tools and rewards; our token ids and logprobs.

    [env]
    id = "my-env"           # an installed environment: load_environment returns verifiers' object, and env.py wraps it
    args = { ... }

Works with verifiers 0.1.14. What it asks the policy goes through `generate`, so a rollout is trained on the ids that
were sampled, forks included. A reward function that raises is 0 there; here it loses the rollout, as everywhere."""

import contextvars
import functools

import verifiers as vf
from openai.types.chat import ChatCompletion
from verifiers.clients import OpenAIChatCompletionsClient
from verifiers.utils.message_utils import normalize_messages

from env import SingleTurnEnv, Truncated, finite, in_thread

FAILED = contextvars.ContextVar("errors of reward functions in this scoring")


class PolicyClient(OpenAIChatCompletionsClient):
    """verifiers' client whose server is `generate`."""

    async def get_native_response(self, prompt, model, sampling_args, tools=None, **kwargs):
        try:
            message = await self.client([plain(m) for m in prompt], tools or None)
        except Truncated as e:
            raise vf.OverlongPromptError from e
        choice = {"index": 0, "finish_reason": "stop", "message": message}
        head = {"id": "", "created": 0, "model": model, "object": "chat.completion"}
        return ChatCompletion.model_validate(head | {"choices": [choice]})

    async def raise_from_native_response(self, response):
        """An empty answer is an answer: its reward teaches."""


def plain(message):
    """Without the keys that are not set: as the rows have it, and as the server takes it."""
    message = dict(message) if isinstance(message, dict) else message.model_dump()
    return {k: v for k, v in message.items() if v is not None}


def off_loop(function):
    """verifiers calls plain functions in the event loop; in a thread they delay no other rollout."""

    @functools.wraps(function)
    async def wrapper(*args, **kwargs):
        return await in_thread(function, *args, **kwargs)

    return wrapper


def told(function):
    """verifiers takes 0 for a reward function that raises; here the error is kept for score()."""

    @functools.wraps(function)
    async def wrapper(*args, **kwargs):
        try:
            value = await off_loop(function)(*args, **kwargs)
            values = [finite(function, x) for x in (value if isinstance(value, list | tuple) else [value])]
            return values if isinstance(value, list | tuple) else values[0]
        except Exception as e:
            FAILED.get().append(e)
            raise

    return wrapper


def leaves(rubric):
    """The rubrics of a RubricGroup or an EnvGroup, down to those with functions."""
    children = list(getattr(rubric, "rubrics", [])) + [e.rubric for e in getattr(rubric, "env_map", {}).values()]
    return [leaf for child in children for leaf in leaves(child)] if children else [rubric]


class VerifiersRubric:
    """The rubric's own scoring; the protocol is env.Rubric's."""

    def __init__(self, env):
        self.env, self.rubric = env, (rubric := env.rubric)
        for leaf in leaves(rubric):
            leaf.funcs = [told(f) for f in leaf.funcs]
        self.sees_group = any(leaf._is_group_func(f) for leaf in leaves(rubric) for f in leaf.funcs)

    async def score(self, state):
        theirs = state["verifiers"] = state.get("verifiers") or await self.state_of(state)
        if self.sees_group:
            return 0.0, {}  # all of it comes from score_group
        await self.of([theirs], lambda states: self.rubric.score_rollout(states[0]))
        return self.result(theirs)

    async def state_of(self, state):
        """Of text that was not rolled out: for configs/environments/scoring.py."""
        theirs = await self.env.init_state(state["row"], PolicyClient(None), "policy", {})
        theirs["completion"] = normalize_messages(state["completion"], field_name="completion")
        return theirs

    async def score_group(self, states):
        if not self.sees_group or not states:
            return []
        await self.of([state["verifiers"] for state in states], self.rubric.score_group)
        return [self.result(state["verifiers"]) for state in states]

    async def of(self, states, score):
        FAILED.set(errors := [])
        await score(states)
        for state in states:
            await self.rubric.cleanup(state)
        if errors:
            raise errors[0]

    def result(self, state):
        reward, metrics = state["reward"], state["metrics"] or {}
        if not abs(reward) <= 1e6:
            raise ValueError(f"the environment's reward is {reward}, no finite number within 1e6")
        return float(reward), {k: float(v) for k, v in metrics.items()}


class VerifiersEnv(SingleTurnEnv):
    def __init__(self, env):
        if env.message_type != "chat":
            raise ValueError(f"verifiers' message_type = {env.message_type!r} is not supported, only 'chat'")
        rows = [dict(row) for row in env.get_dataset()]
        held_out = (
            [dict(row) for row in env.get_eval_dataset()] if env.eval_dataset or env.eval_dataset_source else None
        )
        super().__init__(rows, eval_dataset=held_out, parser=env.parser)
        self.env, self.rubric = env, VerifiersRubric(env)
        self.tools = [schema_of(tool) for tool in env.tool_defs or []] or None
        for child in [env, *getattr(env, "envs", [])]:
            child.tool_map = {name: off_loop(tool) for name, tool in getattr(child, "tool_map", {}).items()}

    def start(self, row):
        state = super().start({"prompt": [plain(message) for message in row["prompt"]]} | row_fields(row))
        return state | {"row": row | {"prompt": state["prompt"]}}

    async def rollout(self, state, generate):
        theirs = await self.env.rollout(state["row"], PolicyClient(generate), model="policy", sampling_args={})
        state["verifiers"], state["turn"] = theirs, len(theirs["trajectory"])
        state["completion"] = [plain(message) for message in theirs["completion"] or []]
        if theirs.get("error"):
            raise theirs["error"].__cause__ or theirs["error"]
        if theirs.get("prompt_too_long"):
            raise Truncated


def row_fields(row):
    return {k: row[k] for k in ("answer", "info", "task") if row.get(k) is not None}


def schema_of(tool):
    function = {"name": tool.name, "description": tool.description, "parameters": tool.parameters}
    return {"type": "function", "function": function | ({} if tool.strict is None else {"strict": tool.strict})}


def wrap(env):
    if not isinstance(env, vf.Environment):
        raise TypeError(f"load_environment returned {type(env).__name__}, neither our environment nor verifiers'")
    return VerifiersEnv(env)
