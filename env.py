"""env.py owns the task: rows, the turns of a rollout, its reward. It needs no torch; copy one of configs/*.py to begin.

    def load_environment(**args):                                      # [env] id = "my_task", args = {...}
        rows = [{"question": "2 + 2?", "answer": "4"}, ...]            # or a .jsonl file, or a Hugging Face dataset
        def correct(completion, answer):                               # a reward names the arguments it wants
            return float(completion[-1]["content"].strip() == answer)
        return SingleTurnEnv(dataset=rows, eval_dataset=rows[:1], rubric=Rubric([correct]))

A rollout is a dict, the state: prompt, completion (messages), answer, info, task, tools, turn, step, and what you add.
What tasks import: configs/environments/tools.py (ToolEnv: the policy calls functions), parsers.py, judge.py, sandbox.py.
"""

import asyncio
import copy
import functools
import importlib
import inspect
import json
import numbers
from pathlib import Path


class Truncated(Exception):
    """generate() raises it where max_seq_len leaves no token for another turn; the rollout ends and is scored."""


class DataError(ValueError):
    code = 4  # the run's exit code


def ensure(is_so, problem):
    """DataError where it is not so."""
    if not is_so:
        raise DataError(problem)


parameters = functools.cache(lambda function: inspect.signature(function).parameters)  # which is slow to read


async def in_thread(function, /, *args, **given):
    """Calls it where slow code delays nobody, and awaits what it returns if that is a coroutine's."""

    def work():  # of a generator StopIteration, which hangs a future, is RuntimeError (PEP 479)
        yield function(*args, **given)

    value = await asyncio.to_thread(next, work())
    return await value if inspect.isawaitable(value) else value


def pick(function, have):
    """-> those of `have` that the function names; DataError where it needs another."""
    wanted = parameters(function)
    needed = {name for name, p in wanted.items() if p.default is p.empty and "VAR" not in p.kind.name}
    if missing := sorted(needed - have.keys()):
        raise DataError(f"{function.__name__}() wants {missing} (groups: configs/environments/rubrics.py); given: {[*have]}")
    takes_all = any(p.kind is p.VAR_KEYWORD for p in wanted.values())
    return {k: v for k, v in have.items() if takes_all or k in wanted}


async def call(function, /, **have):
    """function(**those of `have` that it names), sync or async."""
    return await in_thread(function, **pick(function, have))


# --- rows -------------------------------------------------------------------------------------------------------------


def load_rows(source, name="dataset"):
    """A list of dicts, a JSON Lines file, a Hugging Face dataset, or a function that makes one -> a list of dicts with
    question (text) or prompt (messages; text for base models), and maybe answer, info (a dict, also as JSON text),
    difficulty, task. Raises DataError that names the first bad row or line."""
    source, checked_rows = source() if callable(source) else source, []
    is_file = isinstance(source, str | Path)
    ensure(not is_file or Path(source).is_file(), f"{name}: no file {source}")
    rows = Path(source).read_text(encoding="utf-8", errors="replace").split("\n") if is_file else source
    for i, row in enumerate(rows):
        try:
            if not is_file or row.strip():
                checked_rows.append(check_row(json.loads(row) if is_file else row))
        except ValueError as e:  # JSON's is one, too
            where = f"line {i + 1} of {source}" if is_file else f"{name}[{i}]"
            raise DataError(f"{where}: {e}: {str(row)[:200]}") from None
    ensure(checked_rows, f"{name} is empty")
    return checked_rows


def check_row(row):
    """-> the row, its info as a dict; DataError says what is wrong with it."""
    ensure(isinstance(row, dict), "is no dict")
    prompt, info = row.get("prompt") or row.get("question"), row.get("info") or {}
    has_roles = isinstance(row.get("prompt"), list) and all(isinstance(m, dict) and "role" in m for m in row["prompt"])
    ensure(prompt and (isinstance(prompt, str) or has_roles), "needs a question (text) or a prompt (messages or text)")
    info = json.loads(info) if isinstance(info, str) else info
    ensure(isinstance(info, dict), "has an 'info' that is no dict")
    return row | ({"info": info} if "info" in row else {})


# --- rewards ----------------------------------------------------------------------------------------------------------

# what metrics.jsonl (after "reward/") and eval.jsonl have of their own, where a function's name would hide it
TAKEN = set("mean std p10 p50 p90 tokens truncated errors rows seconds step env n k version_first version_last".split())


def finite(func, value):
    """The value as float; raises on anything else. Above 1e6 gradients overflow."""
    if not isinstance(value, numbers.Real) or not abs(value) <= 1e6:  # nan is not
        raise ValueError(f"reward function {func.__name__} returned {str(value)[:200]}, no finite number within 1e6")
    return float(value)


class Rubric:
    """Reward = sum of weight x function, of `funcs` and of those in `rubrics`, whose own score is not called. A weight
    is a number (0 only logs) or a function of the step. Functions name what they want of the state, of `objects`, or
    state, parser. What raises, or returns no finite number, loses its rollout, and is never 0. configs/environments/rubrics.py:
    rewards of groups, and of turns."""

    def __init__(self, funcs=(), weights=None, parser=None, rubrics=(), **objects):
        weights = [1.0] * len(funcs) if weights is None else weights
        ensure(len(weights) == len(funcs), f"Rubric: {len(weights)} weights for {len(funcs)} functions")
        objects |= {"parser": parser} if parser else {}
        self.parts = [(func, weight, objects) for func, weight in zip(funcs, weights)]
        self.parts += [part for rubric in rubrics for part in rubric.parts]
        names = [func.__name__ for func, *_ in self.parts]
        taken = {name for name in names if name in TAKEN or names.count(name) > 1}
        ensure(not taken, f"Rubric: another function, or a number of the run, is called {sorted(taken)}, too")

    async def score(self, state):
        """HACK HERE -> reward, {function: value}."""
        reward, metrics = 0.0, {}
        for func, weight, objects in self.parts:
            value = metrics[func.__name__] = finite(func, await call(func, **state | objects | {"state": state}))
            reward += value * float(weight(state["step"]) if callable(weight) else weight)
        return reward, metrics

    async def score_group(self, states):
        """HACK HERE, after score, for the rollouts of a row -> [(number to add, {function: value}) for each], or []."""
        return []


# --- environments -----------------------------------------------------------------------------------------------------


class SingleTurnEnv:
    """One prompt, one answer. Rows: load_rows; DataError names the first bad one."""

    def __init__(self, dataset, eval_dataset=None, system_prompt="", few_shot=(), rubric=None, parser=None):
        self.dataset = load_rows(dataset)
        self.eval_dataset = None if eval_dataset is None else load_rows(eval_dataset, "eval_dataset")
        self.rubric, self.parser, self.tools = rubric or Rubric(), parser, None
        self.head = [{"role": "system", "content": system_prompt}] * bool(system_prompt) + list(few_shot)
        is_plain = type(self) is SingleTurnEnv and type(self.rubric) is Rubric  # others may have more to give
        for func, _, objects in self.rubric.parts if is_plain else ():
            pick(func, self.start(self.dataset[0]) | objects | {"state": None})

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

    def add_columns(self, state, samples):
        """HACK HERE, sync or async: columns (lists or arrays of a number per token) beside tokens, mask, old_logp and
        turn of each sample, e.g. sample["teacher_logp"] = [...]; the loss has them as micro["teacher_logp_N"]."""


class MultiTurnEnv(SingleTurnEnv):
    """Turns until is_completed, or max_turns. Any of the three methods may be async."""

    def __init__(self, dataset, max_turns=8, **kwargs):
        super().__init__(dataset, **kwargs)
        self.max_turns = max_turns

    def setup_state(self, state):
        """Before the first turn: changes the state, or returns entries for it."""

    def is_completed(self, messages, state):
        """After each message of the policy; messages: all up to it -> is that the end?"""

    def env_response(self, messages, state):
        """HACK HERE: the environment's answer to the last message -> list of messages, or (list, state)."""
        raise NotImplementedError

    async def rollout(self, state, generate):
        state.update(await call(self.setup_state, state=state) or {})
        while not state.get("final_env_response"):  # with it the environment has the last word
            state["completion"].append(await generate(state["prompt"] + state["completion"], state["tools"]))
            state["turn"] += 1
            have = {"messages": state["prompt"] + state["completion"], "state": state}
            # Asked after every message, also after the last one: it may record how the rollout ended.
            if await call(self.is_completed, **have) or state["turn"] >= self.max_turns:
                return
            reply = await call(self.env_response, **have)
            reply, new = reply if isinstance(reply, tuple) else (reply, {})
            state.update(new, completion=new.get("completion", state["completion"]) + reply)


def load_environment(id, args):
    """load_environment(**args) of the module ("org/my-env": my_env) beside the TOML, importable, or in configs/."""
    env = importlib.import_module(id.rsplit("/", 1)[-1].replace("-", "_")).load_environment(**args)
    return env if isinstance(env, SingleTurnEnv) else importlib.import_module("configs.environments.verifiers_v0").wrap(env)
