"""env.py owns the task: rows, the turns of a rollout, its reward. It needs no torch; copy one of configs/*.py to begin.

    def load_environment(**args):                                      # [env] id = "my_task", args = {...}
        rows = [{"question": "2 + 2?", "answer": "4"}, ...]            # or a .jsonl file, or a Hugging Face dataset
        def correct(completion, answer):                               # a reward names the arguments it wants
            return float(completion[-1]["content"].strip() == answer)
        return SingleTurnEnv(dataset=rows, eval_dataset=rows[:1], rubric=Rubric([correct]))

A rollout is a dict, the state: prompt, completion (messages), answer, info, task, tools, turn, step, and what you add.
"""

import asyncio
import copy
import functools
import importlib
import importlib.util
import inspect
import sys

from configs.lib.data import finite, load_rows, run_tool, score_texts, tool_schema
from configs.lib.judge import Judge
from configs.lib.parsers import Parser, ThinkParser, XMLParser, extract_boxed_answer  # noqa: F401  for tasks to import
from configs.lib.runtime import find_module


class Truncated(Exception):
    """generate() raises it where max_seq_len leaves no token for another turn; the rollout ends and is scored."""


@functools.cache
def parameters(function):
    """Of its signature, which is slow to read."""
    return inspect.signature(function).parameters


async def call(function, **have):
    """function(**those of `have` that it names). What is no coroutine runs in a thread: slow code delays nobody."""
    wanted = parameters(function)
    takes_all = any(p.kind is p.VAR_KEYWORD for p in wanted.values())
    given = {k: v for k, v in have.items() if takes_all or k in wanted}
    is_async = inspect.iscoroutinefunction(function)
    value = function(**given) if is_async else await asyncio.to_thread(function, **given)
    return await value if inspect.isawaitable(value) else value


# --- rewards ----------------------------------------------------------------------------------------------------------

PLURALS = {"prompts", "completions", "answers", "infos", "tasks", "states"}


class Rubric:
    """Reward = sum of weight x function. A weight is a number (0 only logs) or a function of the step.

    Functions name what they want of the state, of `objects`, or state, parser. One that names a plural (completions,
    states, ...) sees a whole group and returns a number for each rollout. A list is a reward per turn, for credit by
    turn. What raises, or returns no finite number, loses its rollouts: they count as errors, never as 0."""

    def __init__(self, funcs=(), weights=None, parser=None, **objects):
        weights = [1.0] * len(funcs) if weights is None else weights
        if len(weights) != len(funcs):
            raise ValueError(f"Rubric: {len(weights)} weights for {len(funcs)} functions")
        self.parts, self.objects = [], objects | ({"parser": parser} if parser else {})
        for func, weight in zip(funcs, weights):
            self.add_reward_func(func, weight)

    def add_reward_func(self, func, weight=1.0, objects=None):
        """ValueError where another function has its name."""
        if func.__name__ in [f.__name__ for f, *_ in self.parts]:
            raise ValueError(f"Rubric: two functions are called {func.__name__!r}; their metrics would collide")
        self.parts.append((func, weight, self.objects if objects is None else objects))

    def __add__(self, other):
        both = Rubric()
        for part in self.parts + other.parts:
            both.add_reward_func(*part)
        return both

    async def score(self, state):
        """HACK HERE -> reward (a number, or a list with one per turn), {function: value}. Functions of one rollout."""
        whole, turns, metrics = 0.0, None, {}
        for func, weight, objects in self.parts:
            if PLURALS & set(parameters(func)):
                continue
            value = finite(func, await call(func, **state | objects | {"state": state}), state["turn"])
            w = weight(state["step"]) if callable(weight) else weight
            if isinstance(value, list):
                turns = [a + w * b for a, b in zip(turns or [0.0] * len(value), value)]
            else:
                whole += w * value
            metrics[func.__name__] = sum(value) if isinstance(value, list) else value
        return whole if turns is None else [*turns[:-1], turns[-1] + whole], metrics

    async def score_group(self, states):
        """-> [(number to add to the reward, {function: value}) per state], or [] without functions of a group."""
        parts = [part for part in self.parts if states and PLURALS & set(parameters(part[0]))]
        scores = [[0.0, {}] for _ in states if parts]
        for func, weight, objects in parts:
            have = {plural: [state.get(plural[:-1]) for state in states] for plural in PLURALS} | {"states": states}
            values = await call(func, **states[0] | objects | have)
            w = weight(states[0]["step"]) if callable(weight) else weight
            for score, value in zip(scores, finite(func, list(values), len(states))):
                score[0] += w * value
                score[1][func.__name__] = value
        return scores


def RubricGroup(rubrics):
    """One rubric with the functions of several."""
    return functools.reduce(Rubric.__add__, rubrics, Rubric())


def JudgeRubric(weight=1.0, name="judge", **kwargs):
    """A rubric of one function, the judge's mean score; kwargs are Judge's (configs/lib/judge.py)."""
    judge = functools.partial(Judge(**kwargs).judge)
    judge.__name__ = name  # in metrics; two judges need two
    return Rubric([judge], [weight])


# --- environments -----------------------------------------------------------------------------------------------------


class SingleTurnEnv:
    """One prompt, one answer. Rows: configs/lib/data.py; ValueError names the first bad one."""

    def __init__(self, dataset, eval_dataset=None, system_prompt="", few_shot=(), rubric=None, parser=None):
        self.dataset = load_rows(dataset)
        self.eval_dataset = None if eval_dataset is None else load_rows(eval_dataset, "eval_dataset")
        self.rubric, self.parser, self.tools = rubric or Rubric(), parser or Parser(), None
        self.head = [{"role": "system", "content": system_prompt}] * bool(system_prompt) + list(few_shot)

    def start(self, row):
        """-> the state of a new rollout."""
        prompt = row.get("prompt") or [{"role": "user", "content": row["question"]}]
        prompt = prompt if isinstance(prompt, str) else self.head + prompt
        about = {"prompt": prompt, "answer": row.get("answer", ""), "info": row.get("info") or {}, "tools": self.tools}
        about = copy.deepcopy(about | {"completion": [], "turn": 0, "step": 0})  # a rollout may change its own
        return about | {"task": row.get("task", row), "parser": self.parser}

    async def rollout(self, state, generate):
        """Fills state["completion"]; generate(messages or text, tools) -> the policy's message. May raise Truncated."""
        state["completion"].append(await generate(state["prompt"]))
        state["turn"] += 1

    def score(self, prompts, completions, **columns):
        """Rewards without a server, e.g. as a reward function of another trainer: texts or messages -> [float, or None
        where unscored]. columns: answer=[...], info=[...]; without, those of the row with this prompt."""
        return asyncio.run(score_texts(self, prompts, completions, columns))


class MultiTurnEnv(SingleTurnEnv):
    """Turns until is_completed, or max_turns. Any of the three methods may be async."""

    def __init__(self, dataset, max_turns=8, **kwargs):
        super().__init__(dataset, **kwargs)
        self.max_turns = max_turns

    def setup_state(self, state):
        """Before the first turn: changes the state, or returns entries for it."""

    def is_completed(self, messages, state):
        """After each message of the policy; messages: all up to it."""
        return False

    def env_response(self, messages, state):
        """HACK HERE: the environment's answer to the last message -> list of messages, or (list, state)."""
        raise NotImplementedError

    async def rollout(self, state, generate):
        state.update(await call(self.setup_state, state=state) or {})
        while True:
            state["completion"].append(await generate(state["prompt"] + state["completion"], state["tools"]))
            state["turn"] += 1
            have = {"messages": state["prompt"] + state["completion"], "state": state}
            if state["turn"] >= self.max_turns or await call(self.is_completed, **have):
                return
            reply = await call(self.env_response, **have)
            reply, new = reply if isinstance(reply, tuple) else (reply, {})
            state.update(new)
            state["completion"] += reply
            if state.get("final_env_response"):  # the environment had the last word
                return


class ToolEnv(MultiTurnEnv):
    """The policy calls Python functions. Results go back to it as text, and so does whatever goes wrong with a call.

    vLLM parses the calls: inference.args.enable_auto_tool_choice = true, tool_call_parser = "hermes" for Qwen. A
    function that names `state` gets the rollout's; the policy does not see that argument."""

    def __init__(self, dataset, tools, max_turns=8, max_output=8192, call_tag="<tool_call>", **kwargs):
        super().__init__(dataset, max_turns, **kwargs)
        self.tools, self.max_output, self.call_tag = [tool_schema(f) for f in tools], max_output, call_tag
        self.functions = {f.__name__: f for f in tools}

    def is_completed(self, messages, state):
        return not messages[-1].get("tool_calls") and self.call_tag not in messages[-1]["content"]

    async def env_response(self, messages, state):
        if not messages[-1].get("tool_calls"):  # the server's parser could not read it, and left it in the content
            return [{"role": "user", "content": "error: the tool call is no valid JSON with a name and arguments"}]
        return [await run_tool(self.functions, c, state, self.max_output) for c in messages[-1]["tool_calls"]]


def load_environment(id, args, beside):
    """load_environment(**args) of the module ("org/my-env": my_env) beside the TOML, importable, or in configs/."""
    name, file, _ = find_module(id, beside)
    if file and name not in sys.modules:
        sys.path.append(str(file.parent))  # a task may import its neighbours
        spec = importlib.util.spec_from_file_location(name, file)
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    env = importlib.import_module(name).load_environment(**args)
    return env if isinstance(env, SingleTurnEnv) else importlib.import_module("configs.verifiers_env").wrap(env)
