"""Tasks of the package reasoning-gym by name, one or several, scored by the package.

Not called reasoning_gym: an environment's module goes by its file's name and would stand in for the package."""

import difflib
import itertools
import re

import reasoning_gym
from reasoning_gym.composite import DatasetSpec
from reasoning_gym.factory import DATASETS

from configs.environments.parsers import XMLParser
from env import Rubric, SingleTurnEnv

# The toy's: "Calculate 7 - 10 + 2." About 5,500 questions, answers from -20 to 30.
TASK = "basic_arithmetic"
CONFIG = {"max_terms": 3, "max_digits": 1, "operators": ["+", "-"], "allow_parentheses": False}
SYSTEM = "End with <answer>...</answer>."
NUM_EVAL = 64
TOKENS = ["<answer>", "</answer>"]  # of the toy model's vocabulary; the rest is spelled out
WARM_UP_STEPS = 200

CHUNK = 500  # the package's own size of a dataset; some tasks refuse more, or make them all at once
SEEDS = {"train": 0, "eval": 10**8, "warmup": 2 * 10**8}  # the package seeds item i with seed + i
# Their scorers hand the answer to Python's evaluation, or to sympy's, which is the same.
RUN_ANSWERS = ("binary_matrix", "countdown", "intermediate_integration", "n_queens", "polynomial_multiplication",
               "puzzle24", "simple_integration", "spiral_matrix", "string_insertion")  # fmt: skip
# coin_flip's scorer would compute 10 ** 1000000000, and nothing could end that
HUGE = re.compile(r"\d\.?[eE][-+]?\d{4,}")


def check(names, configs, allow_code):
    known = sorted(set(DATASETS) - {"composite"})
    for name in names:
        if name not in known:
            near = ", ".join(difflib.get_close_matches(str(name), known, 3, cutoff=0))
            raise ValueError(f"reasoning_gym_env: no task {name!r}; the nearest are {near}")
        if name in RUN_ANSWERS and not allow_code:
            raise ValueError(f"reasoning_gym_env: the scorer of {name} runs what the policy answers as Python code, in "
                             "the orchestrator's process; allow_code = true accepts that")  # fmt: skip
    if not names or len(set(names)) < len(names) or not set(configs) <= set(names):
        raise ValueError(f"reasoning_gym_env: tasks {names} must differ, and config name no others: {list(configs)}")
    for name, config in configs.items():
        if not isinstance(config, dict) or {"seed", "size"} & set(config):
            raise ValueError(f"reasoning_gym_env: config of {name} must be a table without seed and size: {config}")


def entries(names, configs, seed):
    """The package's items, without end, from all the tasks in equal shares."""
    for start in itertools.count(seed, 2 * CHUNK):
        specs = [DatasetSpec(name, 1.0, configs.get(name, {})) for name in names]
        dataset = reasoning_gym.create_dataset("composite", datasets=specs, size=CHUNK, seed=start)
        yield from (dataset[i] for i in range(CHUNK))


def draw(stream, num, taken, distinct=False):
    """The first `num` items whose questions are not in `taken`; distinct: nor twice."""
    found, seen = [], set(taken)
    for entry in itertools.islice(stream, 20 * num + CHUNK):
        if entry["question"] not in seen:
            found.append(entry)
            seen |= {entry["question"]} if distinct else set()
        if len(found) == num:
            return found
    raise ValueError(f"reasoning_gym_env: only {len(found)} of {num} questions that are distinct from the eval split's "
                     "in so many draws; lower num_eval, or widen config")  # fmt: skip


def questions(found):
    return {entry["question"] for entry in found}


def score_answer(completion, info, parser, scorers):
    """The package's score. An answer that is missing, or that breaks the package's scorer, is a wrong one."""
    answer, entry = parser.parse_answer(completion), info["entry"]
    scorer = scorers[entry["metadata"]["source_dataset"]]
    if HUGE.search((answer or "").replace("_", "")):
        return 0.0
    try:
        return float(scorer.score_answer(answer, entry)) if answer else 0.0
    except Exception:  # prime_factorization, boxnet and others raise on what they cannot read
        return 0.0


def demonstrations(num):
    """For the supervised warm-up of the toy model: the default task without the default eval split."""
    configs = {TASK: CONFIG}
    held_out = draw(entries([TASK], configs, SEEDS["eval"]), NUM_EVAL, (), distinct=True)
    found = draw(entries([TASK], configs, SEEDS["warmup"]), num, questions(held_out))
    return [
        [
            {"role": "system", "content": SYSTEM},
            {"role": "user", "content": entry["question"]},
            {"role": "assistant", "content": f"<answer>{entry['answer']}</answer>"},
        ]
        for entry in found
    ]


def load_environment(
    task=TASK, num_train=2048, num_eval=NUM_EVAL, seed=0, config=None, system_prompt=SYSTEM, allow_code=False
):
    """task: a name, or a list of names. config: the task's options; for a list, {name: options}. No question of the
    eval split is in the train split; ValueError where a task has too few for that."""
    names = [task] if isinstance(task, str) else list(task)
    config = (CONFIG if task == TASK else {}) if config is None else config
    configs = {task: config} if isinstance(task, str) else config
    check(names, configs, allow_code)
    held_out = draw(entries(names, configs, seed * 10**4 + SEEDS["eval"]), num_eval, (), distinct=True)
    train = draw(entries(names, configs, seed * 10**4 + SEEDS["train"]), num_train, questions(held_out))
    parser = XMLParser(["answer"])
    scorers = {name: reasoning_gym.create_dataset(name, **configs.get(name, {})) for name in names}
    funcs = [score_answer, parser.get_format_reward_func()]
    rubric = Rubric(funcs, [1.0, 0.1], parser=parser, scorers=scorers)
    return SingleTurnEnv(rows(train), rows(held_out), system_prompt, rubric=rubric, parser=parser)


def rows(found):
    return [{"question": e["question"], "answer": str(e["answer"] or ""), "info": {"entry": e}} for e in found]
