"""env.py owns the task: rows, the turns of a rollout, its reward. It needs no torch; copy one of configs/*.py to begin.

    def load_environment(**args):                                      # [env] id = "my_task", args = {...}
        rows = [{"question": "2 + 2?", "answer": "4"}, ...]
        def correct(completion, answer):                               # a reward names the arguments it wants
            return float(completion[-1]["content"].strip() == answer)
        return SingleTurnEnv(dataset=rows, eval_dataset=rows[:1], rubric=Rubric([correct]))

A rollout is a dict, the state: prompt, completion (messages), answer, info, task (the row), turn, and what you add.
"""

import asyncio
import copy
import importlib
import importlib.util
import inspect
import sys
from pathlib import Path


async def call(function, **have):
    """function(**those of `have` that it names). What is no coroutine runs in a thread: slow code delays nobody."""
    wanted = inspect.signature(function).parameters
    takes_all = any(p.kind is p.VAR_KEYWORD for p in wanted.values())
    given = {k: v for k, v in have.items() if takes_all or k in wanted}
    is_async = inspect.iscoroutinefunction(function)
    return await (function(**given) if is_async else asyncio.to_thread(function, **given))


class Rubric:
    """Reward = sum of weight x function; weight 0 only logs. A function that raises or returns no finite number loses
    the rollout: it counts as an error, never as 0."""

    def __init__(self, funcs=(), weights=None):
        self.funcs, self.weights = list(funcs), list(weights or [1.0] * len(funcs))
        names = [f.__name__ for f in self.funcs]
        if len(set(names)) != len(self.weights):
            raise ValueError(f"Rubric: {len(self.weights)} weights for {len(set(names))} distinct functions: {names}")

    async def score(self, state):
        """HACK HERE -> reward, {function name: value}."""
        values = {f.__name__: await call(f, **state, state=state) for f in self.funcs}
        for name, value in values.items():
            if not isinstance(value, int | float) or not abs(value) < float("inf"):
                raise ValueError(f"reward function {name} returned {value!r}, no finite number")
        reward = sum(w * v for w, v in zip(self.weights, values.values()))
        return float(reward), {k: float(v) for k, v in values.items()}


class SingleTurnEnv:
    """One prompt, one answer. Rows are dicts with question (text) or prompt (messages; text for base models), and maybe
    answer and info. Raises ValueError naming the first bad row."""

    def __init__(self, dataset, eval_dataset=None, system_prompt="", rubric=None, parser=None):
        self.dataset, self.eval_dataset, self.rubric = dataset, eval_dataset, rubric or Rubric()
        self.system_prompt, self.parser = system_prompt, parser
        for name, rows in {"dataset": dataset, "eval_dataset": eval_dataset or dataset}.items():
            for i, row in enumerate(rows or [None]):
                if not isinstance(row, dict) or not (row.get("prompt") or row.get("question")):
                    raise ValueError(f"{name}[{i}] has neither 'prompt' nor 'question': {str(row)[:200]}")

    def start(self, row):
        """-> the state of a new rollout."""
        prompt = row.get("prompt") or [{"role": "user", "content": row["question"]}]
        if self.system_prompt and not isinstance(prompt, str):
            prompt = [{"role": "system", "content": self.system_prompt}, *prompt]
        prompt = copy.deepcopy(prompt)  # a rollout may change its own
        about = {"prompt": prompt, "answer": row.get("answer", ""), "info": row.get("info", {}), "task": row}
        return about | {"completion": [], "turn": 0, "parser": self.parser}

    async def rollout(self, state, generate):
        """Fills state["completion"]; generate(messages or text) -> the policy's message."""
        state["completion"].append(await generate(state["prompt"]))
        state["turn"] += 1


class MultiTurnEnv(SingleTurnEnv):
    """Turns until is_completed, or max_turns. Any of the three methods may be async."""

    def __init__(self, dataset, max_turns=8, **kwargs):
        super().__init__(dataset, **kwargs)
        self.max_turns = max_turns

    def setup_state(self, state): ...

    def is_completed(self, messages, state):
        return False

    def env_response(self, messages, state):
        """HACK HERE: the environment's answer to the last message -> list of messages, or (list, state)."""
        raise NotImplementedError

    async def rollout(self, state, generate):
        await call(self.setup_state, state=state)
        while True:
            state["completion"].append(await generate(state["prompt"] + state["completion"]))
            state["turn"] += 1
            have = {"messages": state["prompt"] + state["completion"], "state": state}
            if state["turn"] >= self.max_turns or await call(self.is_completed, **have):
                return
            reply = await call(self.env_response, **have)
            state["completion"] += reply[0] if isinstance(reply, tuple) else reply


def load_environment(id, args, beside):
    """load_environment(**args) of the module `id` beside the TOML, else of an importable one ("org/my-env": my_env)."""
    name = id.rsplit("/", 1)[-1].replace("-", "_")
    if (path := Path(beside) / f"{name}.py").is_file() and name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, path)
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return importlib.import_module(name).load_environment(**args)
