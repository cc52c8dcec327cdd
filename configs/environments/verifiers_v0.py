"""Runs environments of the `verifiers` package unchanged: their turns, tools and rewards, our token ids and logprobs.

    [env]
    id = "my-env"           # an installed environment: load_environment returns verifiers' object, and env.py wraps it
    args = { ... }

Works with verifiers 0.1.14. Whatever it asks of the policy goes through `generate`, so that a rollout is trained on the
ids that were sampled, forks included. Of an environment's sampling_args stop and max_tokens count; the rest is the
run's. In verifiers, a reward function that raises counts as 0; here the rollout is discarded, as in every environment.
A rubric's cleanup is called, but nobody calls the hooks for the end of a run (teardown)."""

import contextvars
import functools

import verifiers as vf
from openai.types.chat import ChatCompletion
from verifiers.clients import OpenAIChatCompletionsClient
from verifiers.utils.async_utils import maybe_await
from verifiers.utils.message_utils import normalize_messages

from env import TAKEN, NeedsMainThread, SingleTurnEnv, Truncated, finite, in_thread

FAILED = contextvars.ContextVar("errors of reward functions in this scoring")


class PolicyClient(OpenAIChatCompletionsClient):
    """verifiers' client, with `generate` as its server."""

    async def get_native_response(self, prompt, model, sampling_args, tools=None, **kwargs):
        own = {key: sampling_args[key] for key in ("stop", "max_tokens") if sampling_args.get(key)}
        try:
            reply = await self.client([plain(message) for message in prompt], tools or None, whole=True, **own)
        except Truncated as e:
            raise vf.OverlongPromptError from e
        return ChatCompletion.model_validate(reply)

    async def raise_from_native_response(self, response):
        """Accepts an empty answer, which verifiers would refuse: its reward teaches the policy."""


def plain(message):
    """A message without the keys that are not set, as the rows have it and as the server accepts it."""
    message = dict(message) if isinstance(message, dict) else message.model_dump()
    return {key: value for key, value in message.items() if value is not None}


def as_openai(message):
    """A plain message; verifiers has a form of its own for tool calls."""
    message = plain(message)
    calls = []
    for tool_call in message.get("tool_calls", []):
        call = plain(tool_call)
        if "function" not in call:
            function = {"name": call["name"], "arguments": call["arguments"]}
            call = {"id": call["id"], "type": "function", "function": function}
        calls.append(call)
    return message | {"tool_calls": calls} if calls else message


IN_MAIN_THREAD = set()  # functions that set signal handlers


async def call_theirs(function, *args, **kwargs):
    """verifiers calls plain functions in the event loop. In a thread they delay no other rollout, but a time limit by
    signal.alarm works in the main thread alone: a function that sets one is called there."""
    if function not in IN_MAIN_THREAD:
        try:
            return await in_thread(function, *args, **kwargs)
        except NeedsMainThread:
            IN_MAIN_THREAD.add(function)
    return await maybe_await(function, *args, **kwargs)


def off_loop(function):
    """The same function, off the event loop if it can be."""

    @functools.wraps(function)
    async def wrapper(*args, **kwargs):
        return await call_theirs(function, *args, **kwargs)

    return wrapper


def reporting(function, sees_group):
    """verifiers counts 0 for a reward function that raises; this wrapper also keeps the error for score()."""

    @functools.wraps(function)
    async def wrapper(*args, **kwargs):
        try:
            value = await call_theirs(function, *args, **kwargs)
            if sees_group:
                return [finite(function, item) for item in value]
            return finite(function, value)
        except Exception as e:
            FAILED.get().append(e)
            raise

    return wrapper


def leaves(rubric, name=None):
    """The rubrics in a RubricGroup or an EnvGroup, down to those that have functions. With the name of one of its
    environments, those of that one."""
    children = list(getattr(rubric, "rubrics", []))
    envs = getattr(rubric, "env_map", {})
    children += [env.rubric for key, env in envs.items() if name not in envs or key == name]
    if not children:
        return [rubric]
    found = []
    for child in children:
        found += leaves(child, name)
    return found


def weights_of(rubric, info):
    """{function: weight} of the rubrics that score a row with this info; {} if two functions of a name differ in it."""
    route = (info or {}).get("env_id")  # an EnvGroup's: a name, or a path of names
    weights = {}
    for leaf in leaves(rubric, route[0] if isinstance(route, list) else route):
        for name, weight in zip(leaf._get_reward_func_names(), leaf.weights):
            if weights.setdefault(name_in_metrics(name), weight) != weight:
                return {}
    return weights


def name_in_metrics(name):
    """A reward function's name, unless it is that of a number of the run."""
    return f"reward_{name}" if name in TAKEN else name


class VerifiersRubric:
    """The environment's own scoring behind env.Rubric's protocol."""

    def __init__(self, env):
        self.env = env
        self.rubric = env.rubric
        self.sees_group = False
        num = 0
        for leaf in leaves(env.rubric):
            are_group = list(map(leaf._is_group_func, leaf.funcs))
            leaf.funcs = list(map(reporting, leaf.funcs, are_group))
            self.sees_group = self.sees_group or any(are_group)
            num += len(leaf.funcs)
        if not num:
            raise ValueError("no reward functions: environments that score in their own rollout are not supported")

    async def score(self, state):
        if not state.get("verifiers"):
            state["verifiers"] = await self.state_of(state)
        theirs = state["verifiers"]
        state["reward_weights"] = weights_of(self.rubric, theirs.get("info"))
        if self.sees_group:
            return 0.0, {}  # score_group returns all of the reward
        await self.run([theirs], self.rubric.score_rollout(theirs))
        return self.result(theirs)

    async def state_of(self, state):
        """verifiers' state for text that was not rolled out here: configs/environments/scoring.py needs it."""
        theirs = await self.env.init_state(state["row"], PolicyClient(None), "policy", {})
        theirs["completion"] = normalize_messages(state["completion"], field_name="completion")
        return theirs

    async def score_group(self, states):
        if not self.sees_group or not states:
            return []
        theirs = [state["verifiers"] for state in states]
        await self.run(theirs, self.rubric.score_group(theirs))
        return [self.result(state) for state in theirs]

    async def run(self, states, scoring):
        """Awaits a scoring of these states, and raises the first error of a reward function."""
        errors = []
        FAILED.set(errors)
        await scoring
        for state in states:
            await self.rubric.cleanup(state)
        if errors:
            raise errors[0]

    def result(self, state):
        """Returns the reward and {function: value}."""
        reward = state["reward"]
        metrics = state["metrics"] or {}
        if not abs(reward) <= 1e6:
            raise ValueError(f"the environment's reward is {reward}, not a finite number within 1e6")
        return float(reward), {name_in_metrics(name): float(value) for name, value in metrics.items()}


class VerifiersEnv(SingleTurnEnv):
    def __init__(self, env):
        if env.message_type != "chat":
            raise ValueError(f"verifiers' message_type = {env.message_type!r} is not supported, only 'chat'")
        rows = [dict(row) for row in env.get_dataset()]
        held_out = None
        if env.eval_dataset or env.eval_dataset_source:
            held_out = [dict(row) for row in env.get_eval_dataset()]
        super().__init__(rows, eval_dataset=held_out, parser=env.parser)
        self.env = env
        self.rubric = VerifiersRubric(env)
        self.tools = [schema_of(tool) for tool in env.tool_defs or []] or None
        for child in [env, *getattr(env, "envs", [])]:
            tools = getattr(child, "tool_map", {})
            child.tool_map = {name: off_loop(tool) for name, tool in tools.items()}

    def start(self, row):
        given = {key: row[key] for key in ("answer", "info", "task") if row.get(key) is not None}
        state = super().start({"prompt": [plain(message) for message in row["prompt"]]} | given)
        return state | {"row": row | {"prompt": state["prompt"]}}

    async def rollout(self, state, generate):
        sampling = getattr(self.env, "sampling_args", None) or {}
        theirs = await self.env.rollout(state["row"], PolicyClient(generate), model="policy", sampling_args=sampling)
        state["verifiers"] = theirs
        state["turn"] = len(theirs["trajectory"])
        state["completion"] = [{"content": ""} | as_openai(message) for message in theirs["completion"] or []]
        if theirs.get("error") or not state["turn"]:  # nobody will score it
            await self.rubric.rubric.cleanup(theirs)
        if theirs.get("error"):
            raise theirs["error"].__cause__ or theirs["error"]
        if theirs.get("prompt_too_long"):
            raise Truncated


def schema_of(tool):
    """Without `strict`, for which vLLM would constrain what is sampled."""
    function = {"name": tool.name, "description": tool.description, "parameters": tool.parameters}
    return {"type": "function", "function": function}


def wrap(env):
    if not isinstance(env, vf.Environment):
        raise TypeError(f"load_environment returned {type(env).__name__}, neither our environment nor verifiers'")
    return VerifiersEnv(env)
