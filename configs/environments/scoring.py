"""Scores texts with an environment's rewards, without a server: for example as another trainer's reward function.

env = load_environment(...)
score(env, ["2 + 2?"], ["4"])                                # returns [1.0]
score(env, prompts, completions, answer=[...], info=[...])   # these columns replace those of the environment's rows"""

import asyncio
import json
import traceback

from env import ensure, finite


def score(env, prompts, completions, **columns):
    """Returns a reward for each text or conversation, or None if it could not be scored.

    Completions of the same prompt form a group, for functions that see groups. A prompt is looked up in the
    environment's rows, and columns replace what its row has. Raises DataError if no row has the prompt and there are no
    columns, or if several have it and the columns do not say which is meant."""
    return asyncio.run(score_all(env, prompts, completions, columns))


async def score_all(env, prompts, completions, columns):
    rows = {}  # {key of the prompt: its rows}
    for row in [*env.dataset, *(env.eval_dataset or [])]:
        rows.setdefault(key_of(row.get("prompt") or row["question"]), []).append(row)
    groups = {}  # {(key of the prompt, its row as text): [(position in the result, state)]}
    for i, (prompt, completion) in enumerate(zip(prompts, completions, strict=True)):
        key = key_of(prompt)
        given = {name: column[i] for name, column in columns.items()}
        found = rows.get(key, [])
        same = [row for row in found if row.get("prompt") == prompt]  # with the same system prompt
        row = choose(same or found, given, f"prompts[{i}]", key[:200])
        state = state_of(env, row | given, prompt, completion)
        groups.setdefault((key, text_of(row)), []).append((i, state))
    rewards = [None] * len(prompts)
    for group in groups.values():
        await score_group(env, group, rewards)
    return rewards


def choose(rows, given, where, prompt):
    """Returns which of a prompt's rows is meant: the one that agrees with the given columns, or any if they replace all
    that differs. Without rows it is {}."""
    ensure(rows or given, f"{where} is in no row of the environment, and no columns were given: {prompt}")
    if not rows:
        return {}
    agreeing = [row for row in rows if text_of(row) == text_of(row | given)]
    first, *others = agreeing or rows
    names = set()
    for other in others:
        differing = [name for name in first | other if text_of(first.get(name)) != text_of(other.get(name))]
        names.update(differing)
    names = sorted(names - given.keys())
    ensure(
        not names, f"{where} is in several rows, which differ in {', '.join(names)}: give that as a column: {prompt}"
    )
    return first


def text_of(value):
    """The same text for equal values, also for those that JSON cannot hold."""
    try:
        return json.dumps(value, sort_keys=True, default=str)
    except TypeError:  # a key that is a tuple
        return repr(value)


def state_of(env, row, prompt, completion):
    """The state of a rollout that ended with this completion."""
    if isinstance(row.get("prompt"), str):  # text for a base model: each completion is a turn
        state = env.start(row | {"prompt": prompt})
        state["completion"] = [completion] if isinstance(completion, str) else completion
        state["turn"] = len(state["completion"])
        return state
    messages = as_messages(prompt)
    head = getattr(env, "head", [])
    if messages[: len(head)] == head:
        messages = messages[len(head) :]  # start() adds it again
    state = env.start(row | {"prompt": messages})
    state["completion"] = as_messages(completion, "assistant")
    state["turn"] = sum(message["role"] == "assistant" for message in state["completion"])
    return state


async def score_group(env, group, rewards):
    """Fills in the rewards of one prompt's completions, and prints one error of each kind."""
    scoring = [env.rubric.score(state) for _, state in group]
    scores = await asyncio.gather(*scoring, return_exceptions=True)
    kept = []
    errors = {}
    for (i, state), result in zip(group, scores):
        if isinstance(result, Exception):
            errors.setdefault(type(result), result)
        else:
            kept.append((i, state, finite(env.rubric.score, result[0])))
    try:
        more = await env.rubric.score_group([state for _, state, _ in kept])
        more = more or [(0.0, {}) for _ in kept]
    except Exception as e:  # from a function that sees the whole group: none of it has a reward then
        errors.setdefault(type(e), e)
        kept = []
        more = []
    for error in errors.values():
        traceback.print_exception(error)
    for (i, _, reward), (added, _) in zip(kept, more):
        rewards[i] = reward + finite(env.rubric.score_group, added)


def as_messages(text, role="user"):
    return [{"role": role, "content": text}] if isinstance(text, str) else text


def key_of(prompt):
    """The same key for a question, for its message, and for its message after a system prompt."""
    return json.dumps([message.get("content") for message in as_messages(prompt) if message["role"] != "system"])
