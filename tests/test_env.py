"""env.py: rows, rollouts by a scripted policy, rewards."""

import asyncio
import json
import math
import threading
from functools import partial

import numpy as np
import pandas as pd
import pytest
from datasets import Dataset
from scripted import play

import env
from env import Rubric, SingleTurnEnv, call, load_environment, load_rows
from rolemodel.role import ConfigError


def score(rubric, state):
    return asyncio.run(rubric.score(state))


def test_one_turn():
    task = SingleTurnEnv([{"question": "a?", "info": {"n": [1]}}], system_prompt="Be brief.")
    state, _, _ = play(task, task.dataset[0], "b")
    assert state["asked"] == [[{"role": "system", "content": "Be brief."}, {"role": "user", "content": "a?"}]]
    assert state["completion"] == [{"role": "assistant", "content": "b"}] and state["turn"] == 1
    state["info"]["n"].append(2)
    state["prompt"].clear()
    assert task.start(task.dataset[0])["info"] == {"n": [1]} and len(task.start(task.dataset[0])["prompt"]) == 2
    assert task.start({"prompt": "b?", "question": "ignored"})["prompt"][1] == {"role": "user", "content": "b?"}
    arrow = {"prompt": [{"role": "user", "content": "x", "tool_calls": None}], "info": None}
    assert task.start(arrow)["prompt"][1] == {"role": "user", "content": "x"} and task.start(arrow)["info"] == {}
    calls = [{"type": "function", "function": {"name": "f", "arguments": {key: 1}}} for key in "ab"]
    prompts = [[{"role": "assistant", "content": "", "tool_calls": [call]}] for call in calls]  # ms-swift #10110
    rows = load_rows(Dataset.from_list([{"prompt": prompt} for prompt in prompts]))
    assert [task.start(row)["prompt"][1:] for row in rows] == prompts


def test_rows_come_from_lists_files_and_datasets(tmp_path):
    rows = [{"question": "ä", "answer": "1"}, {"question": "b", "answer": "2"}]
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(json.dumps(row) for row in rows) + "\n\n")
    assert load_rows(rows) == load_rows(path) == load_rows(str(path)) == load_rows(Dataset.from_list(rows)) == rows


ROW = {"question": "a", "answer": "1"}


@pytest.mark.parametrize("rows", [
    ROW | {"answer": math.nan}, ROW | {"info": {"x": [np.float32("nan")]}}, ROW | {"answer": pd.NaT},
    ROW | {"answer": pd.NA}, [["question", "a"]], "ab",
])  # fmt: skip
def test_a_row_that_only_looks_like_one_is_refused(rows, tmp_path):
    """datasets #1784, #6891: dict() takes pairs for a row; and a missing answer would be the word "nan"."""
    with pytest.raises(ConfigError, match="dataset, line 2: "):
        load_rows([ROW, rows])
    pd.DataFrame([ROW, ROW]).to_json(tmp_path / "rows.json")
    with pytest.raises(ConfigError, match="rows.json, line 1: an example is a dict of its columns, .* not a dict"):
        load_rows(tmp_path / "rows.json")


def test_rows_hold_what_numpy_and_arrow_put_into_them():
    prompt = [{"role": "user", "content": "a"}]
    task = SingleTurnEnv([{"prompt": np.array(prompt), "question": None, "answer": None}], system_prompt="be brief")
    state = task.start(task.dataset[0])
    assert state["prompt"][1:] == prompt and state["answer"] == ""
    assert SingleTurnEnv([ROW | {"answer": np.int64(0)}]).start(ROW | {"answer": np.int64(0)})["answer"] == 0


def test_functions_get_what_they_name_in_threads():
    def both(answer, state, unit="m"):
        return answer, state["x"], unit, threading.current_thread() is threading.main_thread()

    async def everything(**state):
        return state["answer"]

    have = {"answer": 1, "state": {"x": 2}, "more": 3}
    assert asyncio.run(call(both, **have)) == (1, 2, "m", False)
    assert asyncio.run(call(partial(both, unit="km", answer=9), **have))[:3] == (9, 2, "km")
    assert asyncio.run(call(everything, **have)) == 1


def test_rubrics():
    def exact(completion, answer):
        return completion[-1]["content"] == answer

    async def length(completion, scale):
        return len(completion[-1]["content"]) * scale

    rubric = Rubric([exact, length], [1.0, -0.3], scale=2)
    state = {"completion": [{"content": "abc"}], "answer": "abc", "step": 3, "scale": 5}
    assert score(rubric, state) == (pytest.approx(1 - 0.3 * 6), {"exact": 1.0, "length": 6.0})
    assert state["reward_weights"] == {"exact": 1.0, "length": -0.3}
    assert score(Rubric([exact], [0]), state) == (0.0, {"exact": 1.0})

    def mean(completion): ...

    for funcs in ([partial(exact, answer="a"), partial(exact, answer="b")], [mean]):
        with pytest.raises(ConfigError, match=env.name_of(funcs[0])):
            Rubric(funcs)
    with pytest.raises(ValueError):
        Rubric([exact], [1.0, 2.0])


def test_environments_load_by_name(tmp_path, own_modules):
    """A module of the user's hides a shipped task of its name."""
    for name in ("my_task", "alphabet_sort"):
        body = "import env\ndef load_environment(n):\n    return env.SingleTurnEnv([{'question': 'q'}] * n)"
        (tmp_path / f"{name}.py").write_text(body)
    assert len(load_environment("reverse_text", {"num_train": 4}).dataset) == 4
    assert len(load_environment("org/my-task", {"n": 2}).dataset) == 2
    assert len(load_environment("alphabet-sort", {"n": 3}).dataset) == 3
