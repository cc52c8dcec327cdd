"""What goes in and out of an environment: rows, tools, texts to score."""

import asyncio
import inspect
import json
import math
import numbers
import re
import traceback
import typing
from pathlib import Path


class DataError(ValueError):
    code = 4  # the run's exit code


def load_rows(source, name="dataset"):
    """A list of dicts, a JSON Lines file, a Hugging Face dataset, or a function that makes one.

    -> list of dicts with question (text) or prompt (messages; text for base models), and maybe answer, info (a dict,
    also as JSON text), difficulty, task. Raises ValueError naming the first bad row by its index."""
    if callable(source):
        source = source()
    if isinstance(source, str | Path):
        source = read_json_lines(Path(source), name)
    rows = list(source)  # a Hugging Face dataset yields dicts
    if not rows:
        raise DataError(f"{name} is empty")
    for i, row in enumerate(rows):
        problem = bad_row(row)
        if problem:
            raise DataError(f"{name}[{i}] {problem}: {str(row)[:200]}")
    return [row | {"info": json.loads(row["info"])} if isinstance(row.get("info"), str) else row for row in rows]


def read_json_lines(path, name):
    if not path.is_file():
        raise DataError(f"{name}: no file {path}")
    rows = []
    for i, line in enumerate(path.read_text(encoding="utf-8", errors="replace").split("\n")):
        if line.strip():
            try:
                rows.append(json.loads(line))
            except json.JSONDecodeError as e:
                raise DataError(f"{name}: line {i + 1} of {path} is no JSON: {e}") from None
    return rows


def bad_row(row):
    """What is wrong with it, or None."""
    if not isinstance(row, dict):
        return "is no dict"
    prompt, info = row.get("prompt"), row.get("info")
    if not prompt and not row.get("question"):
        return "has neither 'prompt' nor 'question'"
    if not prompt and not isinstance(row["question"], str):
        return "has a 'question' that is no text"
    if prompt and not isinstance(prompt, str):
        if not isinstance(prompt, list) or not all(isinstance(m, dict) and "role" in m for m in prompt):
            return "has a 'prompt' that is neither text nor a list of messages with roles"
    if isinstance(info, str):
        try:
            info = json.loads(info)
        except json.JSONDecodeError:
            return "has an 'info' that is text but no JSON"
    if info is not None and not isinstance(info, dict):
        return "has an 'info' that is no dict"
    return None


# --- tools ------------------------------------------------------------------------------------------------------------


def arguments_of(function):
    """The function's arguments as a pydantic model, without `state`, which the rollout supplies."""
    import pydantic

    hints = typing.get_type_hints(function)
    fields = {
        p.name: (hints.get(p.name, str), ... if p.default is p.empty else p.default)
        for p in inspect.signature(function).parameters.values()
        if p.name != "state"
    }
    return pydantic.create_model(function.__name__, __config__=pydantic.ConfigDict(extra="forbid"), **fields)


def tool_schema(function):
    """OpenAI's schema of a function, from its signature and docstring ("name: text" or "name (type): text" lines)."""
    doc = inspect.getdoc(function) or ""
    schema = arguments_of(function).model_json_schema()
    for name, field in schema.get("properties", {}).items():
        field.pop("title", None)
        if about := re.search(rf"^\s*{name}(?: \([^)]*\))?: *(.+)$", doc, re.MULTILINE):
            field["description"] = about[1]
    parameters = {k: schema[k] for k in ("type", "properties", "required", "$defs") if k in schema}
    about = re.split(r"\n\s*Args:", doc)[0].strip()
    return {"type": "function", "function": {"name": function.__name__, "description": about, "parameters": parameters}}


async def run_tool(functions, request, state, max_output):
    """request: the policy's call, as vLLM parsed it -> the tool's message. Whatever goes wrong becomes its text."""
    try:
        name = request["function"]["name"]
        if name not in functions:
            raise ValueError(f"there is no tool {name!r}, only {', '.join(functions)}")
        text = str(await call_tool(functions[name], request["function"]["arguments"], state))
    except Exception as e:
        text = f"error: {type(e).__name__}: {e}"
    text = text.encode("utf-8", "replace").decode()  # a lone surrogate cannot be sent
    text = text if len(text) <= max_output else f"{text[:max_output]}\n[cut at {max_output} characters]"
    return {"role": "tool", "tool_call_id": request.get("id", ""), "content": text}


async def call_tool(function, arguments, state):
    """arguments: JSON text as the policy wrote it. Raises ValueError that tells the policy what is wrong with it."""
    import pydantic

    try:
        given = dict(arguments_of(function).model_validate_json(arguments or "{}"))
    except pydantic.ValidationError as e:
        problems = "; ".join(f"{'.'.join(map(str, x['loc'])) or 'arguments'}: {x['msg']}" for x in e.errors())
        raise ValueError(f"{function.__name__}: {problems}") from None
    if "state" in inspect.signature(function).parameters:
        given["state"] = state
    result = function(**given) if inspect.iscoroutinefunction(function) else asyncio.to_thread(function, **given)
    return await result


# --- rewards ----------------------------------------------------------------------------------------------------------


def finite(func, value, num):
    """The value as float or list of `num` floats; raises on anything else. Above 1e6 gradients overflow: scale it."""
    values = value if isinstance(value, list) else [value]
    if not all(isinstance(v, numbers.Real) and math.isfinite(v) and abs(v) <= 1e6 for v in values):
        raise ValueError(f"reward function {func.__name__} returned {str(value)[:200]!r}, no finite number within 1e6")
    if isinstance(value, list) and num is not None and len(value) != num:
        raise ValueError(f"reward function {func.__name__} returned {len(value)} numbers for {num}")
    return [float(v) for v in value] if isinstance(value, list) else float(value)


# --- scoring without a server -----------------------------------------------------------------------------------------


async def score_texts(env, prompts, completions, columns):
    """SingleTurnEnv.score. Completions of the same prompt are a group, for functions that see one."""
    rows = {prompt_key(row.get("prompt") or row["question"]): row for row in env.dataset + (env.eval_dataset or [])}
    rewards, groups = [None] * len(prompts), {}
    for i, (prompt, completion) in enumerate(zip(prompts, completions, strict=True)):
        key = prompt_key(prompt)
        row = rows.get(key, {}) | {name: column[i] for name, column in columns.items()}
        if not row:
            raise DataError(f"prompts[{i}] is in no row of the environment, and no columns were given: {key[:200]}")
        state = env.start(row | {"prompt": as_messages(prompt)})
        state["completion"] = as_messages(completion, "assistant")
        state["turn"] = sum(m["role"] == "assistant" for m in state["completion"])
        groups.setdefault(key, []).append((i, state))
    for group in groups.values():
        scores = await asyncio.gather(*(env.rubric.score(state) for _, state in group), return_exceptions=True)
        for error in {type(s): s for s in scores if isinstance(s, Exception)}.values():
            traceback.print_exception(error)
        kept = [(i, state, s) for (i, state), s in zip(group, scores) if not isinstance(s, Exception)]
        more = await env.rubric.score_group([state for _, state, _ in kept]) or [(0.0, {})] * len(kept)
        for (i, _, (reward, _)), (add, _) in zip(kept, more):
            rewards[i] = add + (sum(reward) if isinstance(reward, list) else reward)
    return rewards


def as_messages(text, role="user"):
    return [{"role": role, "content": text}] if isinstance(text, str) else text


def prompt_key(prompt):
    """The same for a question, its message, and its message after a system prompt."""
    return json.dumps([m["content"] for m in as_messages(prompt) if m["role"] != "system"])
