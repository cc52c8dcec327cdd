"""env.py owns the task: rows, the turns of a rollout, its reward. It needs no torch. To begin, copy one of
configs/tasks/.

    def load_environment(**args):                                      # [env] id = "my_task", args = {...}
        rows = [{"question": "2 + 2?", "answer": "4"}, ...]            # or a .jsonl file, or a Hugging Face dataset
        def correct(completion, answer):                               # a reward names the arguments it wants
            return float(completion[-1]["content"].strip() == answer)
        return SingleTurnEnv(dataset=rows, eval_dataset=rows[:1], rubric=Rubric([correct]))

A rollout is a dict, the state: prompt, completion (messages), answer, info, task, tools, turn, step, and what you add.
Tasks import from configs/environments/: tools.py (ToolEnv: the policy calls functions), parsers.py, judge.py,
sandbox.py."""

import asyncio
import copy
import functools
import importlib
import inspect
import json
import math
import signal
import threading
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path


class Truncated(Exception):
    """generate() raises it if max_seq_len leaves no token for another turn; the rollout ends and is scored."""


class DataError(ValueError):
    code = 4  # the run's exit code, DATA


def ensure(condition, problem):
    """Raises DataError unless the condition holds."""
    if not condition:
        raise DataError(problem)


def parameters(function):
    """{name: parameter}"""
    return inspect.signature(function).parameters


def name_of(function):
    """Its name in metrics and messages: a partial without one has the inner function's, an object its class's."""
    while isinstance(function, functools.partial) and not hasattr(function, "__name__"):
        function = function.func
    return getattr(function, "__name__", type(function).__name__)


def pick(function, have):
    """Those of `have` that the function names. Raises DataError if it needs another."""
    wanted = parameters(function)
    takes_all = any(p.kind is p.VAR_KEYWORD for p in wanted.values())
    needed = {name for name, p in wanted.items() if p.default is p.empty and "VAR" not in p.kind.name}
    missing = sorted(needed - have.keys())
    what = f"{name_of(function)}() wants {missing} (groups: configs/environments/rubrics.py)"
    ensure(not missing, f"{what}; given: {list(have)}")
    bound = getattr(function, "keywords", {})  # by a partial
    return {key: value for key, value in have.items() if key not in bound and (takes_all or key in wanted)}


class NeedsMainThread(DataError):
    """A function sets a signal handler, e.g. for a time limit by signal.alarm. That works in the main thread alone."""


THREAD = threading.local()
SET_HANDLER = signal.signal


def set_handler(signalnum, handler):
    """In the place of signal.signal: in_thread raises what it notices, since code that sets a handler often hides the
    error and returns 0."""
    if threading.current_thread() is not threading.main_thread():
        THREAD.sets_handler = True
    return SET_HANDLER(signalnum, handler)


async def in_thread(function, /, *args, **given):
    """Calls it in a thread, where slow code delays nobody, and awaits what it returns if that is awaitable. Raises
    NeedsMainThread if it sets a signal handler."""
    signal.signal = set_handler

    def work():
        THREAD.sets_handler = False
        try:
            value = function(*args, **given)
        except (StopIteration, GeneratorExit) as e:  # asyncio would take them for its own
            raise RuntimeError(f"{name_of(function)} raised {e!r}").with_traceback(e.__traceback__) from e
        finally:  # whether it let the error out or hid it
            if THREAD.sets_handler:
                what = f"{name_of(function)} sets a signal handler (for signal.alarm?) in a thread, where it cannot"
                raise NeedsMainThread(f"{what}: see configs/README")
        return value

    value = await asyncio.to_thread(work)
    return await value if inspect.isawaitable(value) else value


async def call(function, /, **have):
    """function(**those of `have` that it names), sync or async."""
    return await in_thread(function, **pick(function, have))


# --- rows -------------------------------------------------------------------------------------------------------------


def load_rows(source, name="dataset"):
    """A list of dicts, a JSON Lines file, a Hugging Face dataset, or a function that makes one -> a list of dicts with
    question (text) or prompt (messages; text for base models), and maybe answer, info (a dict, also as JSON text),
    difficulty, task. Raises DataError that names the first bad row or line."""
    source = source() if callable(source) else source
    is_file = isinstance(source, str | Path)
    kind = type(source).__name__
    ensure(is_file or hasattr(source, "__len__"), f"{name}: a {kind} has no length and may be endless: pass a list")
    rows = source
    if is_file:
        ensure(Path(source).is_file(), f"{name}: no file {source}")
        rows = Path(source).read_text(encoding="utf-8", errors="replace").split("\n")
    checked = []
    for i, row in enumerate(rows):
        try:
            if not is_file:
                checked.append(check_row(row))
            elif row.strip():
                checked.append(check_row(json.loads(row)))
        except ValueError as e:  # JSON's errors are ValueErrors, too
            where = f"line {i + 1} of {source}" if is_file else f"{name}[{i}]"
            raise DataError(f"{where}: {e}: {str(row)[:200]}") from None
    ensure(checked, f"{name} is empty")
    return checked


def check_row(row):
    """The row, its info as a dict. DataError says what is wrong with it."""
    ensure(isinstance(row, dict), "is no dict")
    if isinstance(row.get("prompt"), list):
        row = row | {"prompt": without_none(row["prompt"])}
    prompt = row.get("prompt") or row.get("question")
    is_text = isinstance(prompt, str) and prompt
    is_talk = prompt and are_messages(row.get("prompt"))
    ensure(is_text or is_talk, "needs a question (text) or a prompt (messages or text)")
    if "info" not in row:
        return row
    info = row["info"] or {}
    info = json.loads(info) if isinstance(info, str) else info
    ensure(isinstance(info, dict), "has an 'info' that is no dict")
    return row | {"info": info}


def copied(x):
    """A deep copy, or a shallow one of what holds a lock, a client, ..."""
    try:
        return copy.deepcopy(x)
    except Exception:
        return copy.copy(x)


def without_none(x):
    """Messages without the keys that are None: Arrow gives each message every key that another one has."""
    if isinstance(x, dict):
        return {key: without_none(value) for key, value in x.items() if value is not None}
    return [without_none(item) for item in x] if isinstance(x, list) else x


def are_messages(x):
    return isinstance(x, list) and all(isinstance(m, dict) and "role" in m for m in x)


# --- rewards ----------------------------------------------------------------------------------------------------------

# Names in metrics.jsonl (after "reward/") and eval.jsonl that a function's name would hide.
TAKEN = set("mean std tokens truncated errors rows seconds step env n k version_first version_last".split())


def finite(function, value):
    """What a function returned, as a float: any number of Python, numpy or torch. Raises ValueError for anything
    else, and above 1e6, where gradients overflow."""
    number = math.nan
    if not isinstance(value, str | bytes):
        with suppress(TypeError, ValueError, OverflowError, RuntimeError):  # no number, or a tensor of several
            number = float(value)
    if not abs(number) <= 1e6:  # nan is not
        kind = "" if isinstance(value, float) else f", but {type(value)}"
        what = f"reward function {name_of(function)} returned {str(value)[:200]}, no finite number within 1e6"
        raise ValueError(what + kind)
    return number


def is_true(function, value):
    """What a function returned, as a bool. Raises DataError if it has no truth value, as arrays have none."""
    try:
        return bool(value)
    except Exception as e:
        raise DataError(f"{name_of(function)} returned {type(value)}: {e}") from e


def checked_score(function, result):
    """(reward, {name: value}) of a rubric as floats. Raises DataError if it is anything else."""
    is_pair = isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], dict)
    ensure(is_pair, f"{name_of(function)} returned {str(result)[:200]}, not (reward, {{name: value}})")
    reward, metrics = result
    numbers = {str(name): finite(function, value) for name, value in metrics.items()}
    return finite(function, reward), numbers


def weight_at(weight, step):
    """A weight's value at a step; it may be a number or a function."""
    return finite(weight, weight(step) if callable(weight) else weight)


class Rubric:
    """Reward = sum of weight x function, over `funcs` and over those in `rubrics`, whose own score is not called.

    A weight is a number (0 only logs) or a function of the step. Functions name what they want of the state, of
    `objects`, or state, parser. If one raises or returns something that is not a finite number, the rollout is
    discarded; it never counts as 0. configs/environments/rubrics.py has rewards of groups and of turns."""

    def __init__(self, funcs=(), weights=None, parser=None, rubrics=(), **objects):
        weights = [1.0] * len(funcs) if weights is None else weights
        ensure(len(weights) == len(funcs), f"Rubric: {len(weights)} weights for {len(funcs)} functions")
        if parser:
            objects["parser"] = parser
        self.parts = [(func, weight, objects) for func, weight in zip(funcs, weights)]
        for rubric in rubrics:
            self.parts += rubric.parts
        names = [name_of(func) for func, *_ in self.parts]
        taken = {name for name in names if name in TAKEN or names.count(name) > 1}
        ensure(not taken, f"Rubric: another function, or a number of the run, is called {sorted(taken)} as well")

    async def score(self, state):
        """HACK HERE: the reward, and {function: value}."""
        reward = 0.0
        metrics = {}
        weights = {}
        for func, weight, objects in self.parts:
            name = name_of(func)
            metrics[name] = finite(func, await call(func, **state | objects | {"state": state}))
            weights[name] = weight_at(weight, state["step"])
            reward += metrics[name] * weights[name]
        state["reward_weights"] = weights
        return reward, metrics

    async def score_group(self, states):
        """HACK HERE, after score, for the rollouts of a row: [(number to add, {function: value}) for each], or []."""
        return []


# --- environments -----------------------------------------------------------------------------------------------------


class SingleTurnEnv:
    """One prompt, one answer. Rows: see load_rows; DataError names the first bad one."""

    def __init__(self, dataset, eval_dataset=None, system_prompt="", few_shot=(), rubric=None, parser=None):
        self.dataset = load_rows(dataset)
        self.eval_dataset = None if eval_dataset is None else load_rows(eval_dataset, "eval_dataset")
        self.rubric = rubric or Rubric()
        self.parser = parser
        self.tools = None
        self.head = list(few_shot)
        if system_prompt:
            self.head.insert(0, {"role": "system", "content": system_prompt})
        self.has_text = any(isinstance(row.get("prompt"), str) for row in self.dataset)
        ensure(not self.has_text or not self.head, "a prompt that is text takes no system_prompt and no few_shot")
        # Check now that there is what each reward function asks for. Subclasses may have more to give.
        if type(self) is SingleTurnEnv and type(self.rubric) is Rubric:
            state = self.start(self.dataset[0]) | {"state": None, "replies": []}
            for func, _, objects in self.rubric.parts:
                pick(func, state | objects)

    def start(self, row):
        """The state of a new rollout."""
        prompt = row.get("prompt") or [{"role": "user", "content": row["question"]}]
        if not isinstance(prompt, str):
            prompt = self.head + prompt
        state = {"prompt": prompt, "answer": row.get("answer", ""), "info": row.get("info") or {}}
        state |= {"tools": self.tools, "completion": [], "turn": 0, "step": 0}
        state = copy.deepcopy(state)  # a rollout may change its own
        return state | {"task": copied(row.get("task", row)), "parser": self.parser}

    async def rollout(self, state, generate):
        """Fills state["completion"]; generate(messages or text, tools) -> the policy's message. May raise Truncated."""
        state["completion"].append(await generate(state["prompt"]))
        state["turn"] += 1

    def add_fields(self, state, sequences):
        """HACK HERE, sync or async: per-token fields (lists, arrays or tensors) beside tokens, mask, old_logp and turn
        of each sequence, e.g. sequence["teacher_logp"] = [...]; the loss has them as micro["teacher_logp_N"]."""


class MultiTurnEnv(SingleTurnEnv):
    """Turns until is_completed, or max_turns. Any of the three methods may be async."""

    def __init__(self, dataset, max_turns=8, **kwargs):
        super().__init__(dataset, **kwargs)
        self.max_turns = max_turns
        ensure(not self.has_text, f"{type(self).__name__}: a prompt for several turns must be messages, not text")

    def setup_state(self, state):
        """Before the first turn: changes the state, or returns entries for it."""

    def is_completed(self, messages, state):
        """After each message of the policy, the last one included: is that the end? messages: all up to it."""

    def env_response(self, messages, state):
        """HACK HERE: the environment's answer to the last message, a list of messages, or (list, state)."""
        raise NotImplementedError(f"{type(self).__name__} has no env_response")

    async def rollout(self, state, generate):
        changes = await call(self.setup_state, state=state)
        ensure(changes is None or isinstance(changes, dict), f"setup_state returned {str(changes)[:200]}, not a dict")
        state.update(changes or {})
        while not state.get("final_env_response"):  # with it the environment has the last word
            messages = state["prompt"] + state["completion"]
            state["completion"].append(await generate(messages, state["tools"]))
            state["turn"] += 1
            messages = state["prompt"] + state["completion"]
            is_completed = await call(self.is_completed, messages=messages, state=state)
            if is_true(self.is_completed, is_completed) or state["turn"] >= self.max_turns:
                return
            reply = await call(self.env_response, messages=messages, state=state)
            if isinstance(reply, tuple):
                reply, new = reply
                state.update(new)
            ensure(are_messages(reply), f"env_response returned {str(reply)[:200]!r}, not a list of messages")
            state["completion"] += reply


OURS = ("env", "orchestrator", "trainer", "launch", "configs", "tools", "tests")  # names of modules


def load_environment(id, args):
    """load_environment(**args) of the user's module ("org/my-env": my_env), or of configs/tasks/ if there is none. An
    environment of the package verifiers is wrapped."""
    name = id.rsplit("/", 1)[-1].replace("-", "_")
    ensure(name not in OURS, f"{name} is a module of this project: give yours another name")
    ours = f"configs.tasks.{name}"
    signal.signal = set_handler  # before the module may take it: from signal import signal
    has_ours = Path(__file__).with_name("configs").joinpath("tasks", f"{name}.py").exists()
    is_ours = has_ours and not find_spec(name)
    module = importlib.import_module(ours if is_ours else name)
    if not hasattr(module, "load_environment") and has_ours:
        module = importlib.import_module(ours)  # e.g. the package reasoning_gym has no such function
    env = module.load_environment(**args)
    if isinstance(env, SingleTurnEnv):
        return env
    from configs.environments import verifiers_v0

    return verifiers_v0.wrap(env)
