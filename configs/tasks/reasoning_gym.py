"""One or several tasks of the package reasoning-gym, by name, scored by the package.

`import reasoning_gym` is the package: this module's full name is configs.tasks.reasoning_gym."""

import difflib
import itertools
import re

import reasoning_gym
from reasoning_gym.composite import DatasetSpec
from reasoning_gym.factory import DATASETS

from configs.environments.parsers import XMLParser
from env import Rubric, SingleTurnEnv

# The toy model's task, such as "Calculate 7 - 10 + 2.": about 5,500 questions with answers from -20 to 30.
TASK = "basic_arithmetic"
CONFIG = {"max_terms": 3, "max_digits": 1, "operators": ["+", "-"], "allow_parentheses": False}
SYSTEM = "End with <answer>...</answer>."
NUM_EVAL = 64
TOKENS = ["<answer>", "</answer>"]  # tokens of the toy model; it spells out everything else
WARM_UP_STEPS = 200

CHUNK = 500  # the package's own default size of a dataset; some tasks refuse a larger one, or make it all at once
SEEDS = {"train": 0, "eval": 10**8, "warmup": 2 * 10**8}  # the package seeds item i with seed + i
# Their scorers evaluate the answer as Python code, some through sympy.
RUN_ANSWERS = (
    "binary_matrix",
    "countdown",
    "intermediate_integration",
    "n_queens",
    "polynomial_multiplication",
    "puzzle24",
    "simple_integration",
    "spiral_matrix",
    "string_insertion",
)
# coin_flip's scorer would compute 10 ** 1000000000 for such an answer, and nothing could stop it.
HUGE = re.compile(r"\d\.?[eE][-+]?\d{4,}")


def check(names, configs, allow_code):
    """Raises ValueError unless all tasks and their options can be used."""
    known = sorted(set(DATASETS) - {"composite"})
    for name in names:
        if name not in known:
            near = ", ".join(difflib.get_close_matches(str(name), known, 3, cutoff=0))
            raise ValueError(f"reasoning_gym: no task {name!r}; the nearest are {near}")
        if name in RUN_ANSWERS and not allow_code:
            problem = f"the scorer of {name} runs the policy's answers as Python code, in the orchestrator's process"
            raise ValueError(f"reasoning_gym: {problem}; allow_code = true accepts that")
    if not names or len(set(names)) < len(names):
        raise ValueError(f"reasoning_gym: the tasks must differ, and there must be one: {names}")
    if not set(configs) <= set(names):
        raise ValueError(f"reasoning_gym: config has options for other tasks than {names}: {list(configs)}")
    for name, config in configs.items():
        if not isinstance(config, dict) or {"seed", "size"} & set(config):
            raise ValueError(f"reasoning_gym: config of {name} must be a table without seed and size: {config}")


def entries(names, configs, seed):
    """Yields the package's items without end, from all tasks in equal shares."""
    for start in itertools.count(seed, 2 * CHUNK):
        specs = [DatasetSpec(name, 1.0, configs.get(name, {})) for name in names]
        dataset = reasoning_gym.create_dataset("composite", datasets=specs, size=CHUNK, seed=start)
        yield from (dataset[i] for i in range(CHUNK))


def draw(stream, num, taken, distinct=False):
    """Returns the first `num` items whose questions are not in `taken`; with distinct, no question comes twice."""
    found = []
    seen = set(taken)
    for entry in itertools.islice(stream, 20 * num + CHUNK):
        if entry["question"] not in seen:
            found.append(entry)
            if distinct:
                seen.add(entry["question"])
        if len(found) == num:
            return found
    problem = f"found only {len(found)} of {num} questions that differ from the eval split's"
    raise ValueError(f"reasoning_gym: {problem}; lower num_eval, or widen config")


def questions(found):
    return {entry["question"] for entry in found}


def score_answer(completion, info, parser, scorers):
    """The package's score. A missing answer is wrong, and so is one that breaks the package's scorer."""
    answer = parser.parse_answer(completion)
    if not answer or HUGE.search(answer.replace("_", "")):
        return 0.0
    entry = info["entry"]
    scorer = scorers[entry["metadata"]["source_dataset"]]
    try:
        return float(scorer.score_answer(answer, entry))
    except Exception:  # prime_factorization, boxnet and others raise if they cannot read an answer
        return 0.0


def demonstrations(num):
    """Conversations for the toy model's supervised warm-up: the default task without the default eval split."""
    configs = {TASK: CONFIG}
    held_out = draw(entries([TASK], configs, SEEDS["eval"]), NUM_EVAL, (), distinct=True)
    found = draw(entries([TASK], configs, SEEDS["warmup"]), num, questions(held_out))
    talks = []
    for entry in found:
        talk = [
            {"role": "system", "content": SYSTEM},
            {"role": "user", "content": entry["question"]},
            {"role": "assistant", "content": f"<answer>{entry['answer']}</answer>"},
        ]
        talks.append(talk)
    return talks


def load_environment(
    task=TASK, num_train=2048, num_eval=NUM_EVAL, seed=0, config=None, system_prompt=SYSTEM, allow_code=False
):
    """task: a name, or a list of names. config: the task's options; for a list, {name: options}. No question of the
    eval split is in the train split; raises ValueError if a task has too few questions for that."""
    if config is None:
        config = CONFIG if task == TASK else {}
    names = [task] if isinstance(task, str) else list(task)
    configs = {task: config} if isinstance(task, str) else config
    check(names, configs, allow_code)
    stream = entries(names, configs, seed * 10**4 + SEEDS["eval"])
    held_out = draw(stream, num_eval, (), distinct=True)
    stream = entries(names, configs, seed * 10**4 + SEEDS["train"])
    train = draw(stream, num_train, questions(held_out))
    parser = XMLParser(["answer"])
    scorers = {name: reasoning_gym.create_dataset(name, **configs.get(name, {})) for name in names}
    funcs = [score_answer, parser.get_format_reward_func()]
    rubric = Rubric(funcs, [1.0, 0.1], parser=parser, scorers=scorers)
    return SingleTurnEnv(rows(train), rows(held_out), system_prompt, rubric=rubric, parser=parser)


def rows(found):
    return [row(entry) for entry in found]


def row(entry):
    answer = "" if entry["answer"] is None else str(entry["answer"])
    return {"question": entry["question"], "answer": answer, "info": {"entry": entry}}
