"""Rewards of texts without a server, e.g. as the reward function of another trainer:

env = load_environment(...)
score(env, ["2 + 2?"], ["4"])            # -> [1.0]
score(env, prompts, completions, answer=[...], info=[...])   # instead of the columns of the environment's rows"""

import asyncio
import json
import traceback

from env import DataError


def score(env, prompts, completions, **columns):
    """Texts or messages -> [reward, or None where it could not be scored]. Completions of the same prompt are a group,
    for functions that see one. Without columns they are those of the row with this prompt; DataError where none has."""
    return asyncio.run(score_all(env, prompts, completions, columns))


async def score_all(env, prompts, completions, columns):
    rows = {key_of(row.get("prompt") or row["question"]): row for row in env.dataset + (env.eval_dataset or [])}
    groups = {}  # key of the prompt: [(place in the result, state)]
    for i, (prompt, completion) in enumerate(zip(prompts, completions, strict=True)):
        key = key_of(prompt)
        row = rows.get(key, {}) | {name: column[i] for name, column in columns.items()}
        if not row:
            raise DataError(f"prompts[{i}] is in no row of the environment, and no columns were given: {key[:200]}")
        if is_text := isinstance(row.get("prompt"), str):  # for a base model
            state = env.start(row | {"prompt": prompt})
            state["completion"] = [completion] if isinstance(completion, str) else completion
        else:
            head, messages = getattr(env, "head", []), as_messages(prompt)
            state = env.start(row | {"prompt": messages[len(head) :] if messages[: len(head)] == head else messages})
            state["completion"] = as_messages(completion, "assistant")
        state["turn"] = sum(is_text or message["role"] == "assistant" for message in state["completion"])
        groups.setdefault(key, []).append((i, state))
    rewards = [None] * len(prompts)
    for group in groups.values():
        await score_group(env, group, rewards)
    return rewards


async def score_group(env, group, rewards):
    """Fills in the rewards of one prompt's completions; prints one error of each kind."""
    scores = await asyncio.gather(*(env.rubric.score(state) for _, state in group), return_exceptions=True)
    kept = [(i, state, score) for (i, state), score in zip(group, scores) if not isinstance(score, Exception)]
    errors = [score for score in scores if isinstance(score, Exception)]
    try:
        more = await env.rubric.score_group([state for _, state, _ in kept]) or [(0.0, {})] * len(kept)
    except Exception as e:  # of a function that sees all of them: none has a reward then
        errors, kept, more = [*errors, e], [], []
    for error in {type(error): error for error in errors}.values():
        traceback.print_exception(error)
    for (i, _, (reward, _)), (add, _) in zip(kept, more):
        rewards[i] = add + reward


def as_messages(text, role="user"):
    return [{"role": role, "content": text}] if isinstance(text, str) else text


def key_of(prompt):
    """The same for a question, its message, and its message after a system prompt."""
    return json.dumps([message["content"] for message in as_messages(prompt) if message["role"] != "system"])
