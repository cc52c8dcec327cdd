"""env.py owns the task: rows, the turns of a rollout, and its reward. It needs no torch; copy one of configs/*.py.

    def load_environment(**args):                                            # [env] id = "my_task", args = {...}
        rows = [{"question": "2 + 2?", "answer": "4"}, ...]
        def correct(completion, answer):                                     # a reward names the arguments it wants
            return float(completion[-1]["content"].strip() == answer)
        return SingleTurnEnv(dataset=rows, eval_dataset=rows[:1], rubric=Rubric([correct]))

A rollout is a dict, the state: prompt, completion (messages), answer, info, task (the row), turn; environments add to it.
"""

import asyncio
import importlib
import importlib.util
import inspect
import sys
from pathlib import Path


async def call(function, have):
    """function(**those of `have` that it names); a coroutine is awaited, anything else runs in a thread, so that slow
    code delays no other rollout."""
    wanted = inspect.signature(function).parameters
    takes_all = any(p.kind is p.VAR_KEYWORD for p in wanted.values())
    given = {k: v for k, v in have.items() if takes_all or k in wanted}
    if inspect.iscoroutinefunction(function):
        return await function(**given)
    return await asyncio.to_thread(function, **given)


class Rubric:
    """Reward = sum of weight x function. Weight 0 only logs. A function that raises, or returns no finite number, loses
    the rollout: it counts as an error, never as 0."""

    def __init__(self, funcs=(), weights=None):
        self.funcs, self.weights = list(funcs), list(weights or [1.0] * len(funcs))
        if len(self.funcs) != len(self.weights):
            raise ValueError(f"Rubric has {len(self.funcs)} funcs and {len(self.weights)} weights")

    async def score(self, state):
        """HACK HERE -> (reward, {function name: value})."""
        values = {f.__name__: await call(f, state | {"state": state}) for f in self.funcs}
        for name, value in values.items():
            if not isinstance(value, int | float) or not abs(value) < float("inf"):
                raise ValueError(f"reward function {name} returned {value!r}, not a finite number")
        return sum(w * v for w, v in zip(self.weights, values.values())), {k: float(v) for k, v in values.items()}


class SingleTurnEnv:
    """One prompt, one answer. dataset, eval_dataset: lists of rows with question (text) or prompt (messages, or text
    for base models), and optionally answer and info. Raises ValueError naming the first bad row."""

    def __init__(self, dataset, eval_dataset=None, system_prompt=None, rubric=None, parser=None):
        self.rubric, self.parser, self.system_prompt = rubric or Rubric(), parser, system_prompt
        self.dataset, self.eval_dataset = self.check(dataset, "dataset"), eval_dataset
        if eval_dataset is not None:
            self.check(eval_dataset, "eval_dataset")

    def check(self, rows, name):
        if not len(rows):
            raise ValueError(f"{name} is empty")
        for i, row in enumerate(rows):
            if not isinstance(row, dict) or not (row.get("prompt") or isinstance(row.get("question"), str)):
                raise ValueError(f"{name}[{i}] has neither 'prompt' nor 'question': {str(row)[:200]}")
        return rows

    def start(self, row):
        """Row -> the state of a new rollout."""
        prompt = row.get("prompt") or [{"role": "user", "content": row["question"]}]
        if self.system_prompt and not isinstance(prompt, str) and prompt[0]["role"] != "system":
            prompt = [{"role": "system", "content": self.system_prompt}, *prompt]
        about = {"prompt": prompt, "answer": row.get("answer", ""), "info": row.get("info", {}), "task": row}
        return about | {"completion": [], "turn": 0, "parser": self.parser}

    async def rollout(self, state, generate):
        """Fills state["completion"]. generate(messages or text) -> the assistant's message, sampled by the policy."""
        state["completion"].append(await generate(state["prompt"]))
        state["turn"] = 1


class MultiTurnEnv(SingleTurnEnv):
    """Turns until is_completed, or max_turns. Override env_response, and is_completed or setup_state."""

    def __init__(self, dataset, max_turns=8, **kwargs):
        super().__init__(dataset, **kwargs)
        self.max_turns = max_turns

    def setup_state(self, state):
        """Once per rollout, in place."""

    def is_completed(self, messages, state):
        return False

    def env_response(self, messages, state):
        """HACK HERE: what the environment says to the last message -> a list of messages, or (messages, state)."""
        raise NotImplementedError

    async def rollout(self, state, generate):
        await call(self.setup_state, {"state": state})
        while True:
            state["completion"].append(await generate(state["prompt"] + state["completion"]))
            state["turn"] += 1
            have = {"messages": state["prompt"] + state["completion"], "state": state}
            if state["turn"] >= self.max_turns or await call(self.is_completed, have):
                return
            reply = await call(self.env_response, have)
            state["completion"] += reply[0] if isinstance(reply, tuple) else reply


def load_environment(id, args, beside="."):
    """The module `id` beside the TOML, or any importable one ("org/my-env" is my_env) -> its load_environment(**args)."""
    name = id.rsplit("/", 1)[-1].replace("-", "_")
    path = Path(beside) / f"{name}.py"
    if path.is_file():
        spec = importlib.util.spec_from_file_location(name, path)
        module = sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    else:
        module = importlib.import_module(name)
    return module.load_environment(**args)
