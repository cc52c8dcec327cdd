"""configs/ and the toys of configs/models/: rows, rewards and tools with a scripted policy; the warm-up."""

import asyncio
import importlib
import os
import re
import subprocess
import sys
from collections import Counter
from types import SimpleNamespace

import calculator
import gsm8k
import math_python
import numpy as np
import pytest
import reverse_distill
import toy
import transformers
import wiki_search
import wordle
from conftest import ROOT
from datasets import Dataset
from scripted import play

from env import load_environment
from rolemodel.config import load_config
from rolemodel.demonstrations import tokenize_conversation
from rolemodel.role import ConfigError

TOYS = "alphabet_sort gsm8k math_python reverse_text wiki_search".split()


def test_every_configuration_loads():
    """If the policy is to think, the server takes thoughts out of the content, even one that was cut off."""
    for path in {*(ROOT / "configs").glob("*.toml")} - {ROOT / "configs/defaults.toml"}:
        flat = load_config(path).flat
        thinks = flat["orchestrator.sampling.chat_template_kwargs"].get("enable_thinking")
        assert not thinks or flat["inference.args"].get("reasoning_parser"), path.name


@pytest.mark.parametrize("name", TOYS)
def test_toys_fit_their_configuration(name):
    """Splits share no row; demonstrations are what the policy would say, in tokens that it has, and fit."""
    more = ["env.args.allow_unsandboxed_python=true"] if name == "math_python" else []
    cfg = load_config(ROOT / "configs" / f"{name}.toml", more)
    env = load_environment(cfg.env[0].id, cfg.env[0].args)
    train, held_out = ({str(row) for row in rows} for rows in (env.dataset, env.eval_dataset))
    assert train and held_out and not train & held_out
    task = importlib.import_module(name)
    tokenizer = toy.make_tokenizer(getattr(task, "TOKENS", ()))
    talks = task.demonstrations(256)
    assert len(talks) == 256 and talks == task.demonstrations(256)
    asked = {message["content"] for talk in talks for message in talk}
    assert not asked & {row["question"] for row in env.eval_dataset}
    for talk in talks:
        (s,) = tokenize_conversation(tokenizer, talk)  # one: what was said is part of each later prompt
        assert len(s.tokens) < cfg.run.max_seq_len and tokenizer.unk_token_id not in s.tokens
        assert max(Counter(np.array(s.turn)[s.mask]).values()) <= cfg.sampling.max_tokens


# --- rewards ----------------------------------------------------------------------------------------------------------


def texts(completion, role):
    return [message["content"] for message in completion if message["role"] == role]


def test_reverse_text(tmp_path):
    env = load_environment("reverse_text", {"num_train": 1})
    (row,) = env.dataset
    assert play(env, row, row["question"][::-1])[1:] == (1.0, {"similarity": 1.0, "exact": 1.0})
    assert 0 < play(env, row, row["question"][:0:-1])[1] < 0.5 and play(env, row, "")[1] == 0
    taught = reverse_distill.hint({"prompt": [{"role": "user", "content": "ab"}], "answer": "ba"})
    assert [message["content"] for message in taught] == ["ba", "ab"]
    named = {"prompt": "reverse_distill:hint", "args": {"num_train": 4}}
    assert len(load_environment("with_teacher", {"id": "reverse_text", "weight": 1.0} | named).dataset) == 4
    (tmp_path / "rows.jsonl").write_text('{"prompt": "abcd"}\n{"prompt": "xyz"}')
    env = load_environment("reverse_text_qwen3", {"path": str(tmp_path / "rows.jsonl"), "num_eval": 1})
    said = ["<reversed_text>\nzyx\n</reversed_text>", "<reversed_text>zy</reversed_text>", "zyx"]
    assert [play(env, env.dataset[0], text)[1] for text in said] == [1.0, 0.8, 0.0]  # of 5 characters 4 are shared


DRAFTS = [  # a task, what stands in its thought, the answer to the first row
    ("gsm8k", {"path": str(gsm8k.SAMPLE)}, "<answer>{}</answer>"), ("reverse_text", {}, "{}"), ("lune", {}, "{}"),
    ("calculator", {}, "<answer>{}.0</answer>"), ("math_python", {"allow_unsandboxed_python": True}, r"\boxed{{{}}}"),
    ("higher_lower", {"max_turns": 1}, "{}"), ("wiki_search", {}, "{}"), ("alphabet_sort", {"turns": 1}, "{}"),
    ("wordle", {"use_think": False, "turns": 1}, "<guess>{}</guess>"),
]  # fmt: skip


@pytest.mark.parametrize("name, args, form", DRAFTS)
def test_no_task_grades_a_thought(name, args, form):
    env = load_environment(name, args)
    row = env.dataset[0]
    answer = row.get("answer") or row["info"]["answers"][0]
    if name == "lune":
        answer = f"a b c.\nd e f g h\ni j {answer}."
    right, draft = form.format(answer), form.format("9" * 5000)
    values = [
        next(iter(play(env, row, text)[2].values()))
        for text in (right, f"<think>{draft}</think>\n{right}", f"{draft}</think>{right}", f"<think>{right} or")
    ]
    assert values == [1, 1, 1, 0]


def test_alphabet_sort_asks_again_and_rewards_each_turn():
    env = load_environment("alphabet_sort", {"words": "names", "first": 3, "more": 2, "turns": 3})
    row = env.dataset[0]
    first, second, third = row["info"]["answers"]
    state, reward, metrics = play(env, row, first, second, third.upper())
    assert state["turn_rewards"] == pytest.approx([1 / 3] * 3) and metrics["exact"] == 1 and reward == pytest.approx(1)
    asked = " ".join(texts(state["prompt"] + state["completion"], "user")).replace("Sort:", "").replace("Add:", "")
    assert sorted(asked.split()) == third.split()
    state, _, metrics = play(env, row, first, " ".join(reversed(second.split())), third)
    assert state["turn_rewards"][::2] == pytest.approx([1 / 3] * 2) and 0 < state["turn_rewards"][1] < 1 / 15


def test_gsm8k():
    numbers = {"$1,200.50": 1200.5, "-7.": -7, "\u22125": -5, "1{,}200": 1200, ".5": 0.5, "1,23": None, "1/2": None}
    numbers |= {"8 9": None, "1e5": None, "seven": None, "": None, None: None}
    assert {text: gsm8k.number(text) for text in numbers} == numbers
    env = load_environment("gsm8k", {"path": str(gsm8k.SAMPLE), "num_train": 3})
    assert len(env.dataset) == 3 and len(env.eval_dataset) == 8 and "<reasoning>" in env.head[0]["content"]
    row = env.dataset[0]
    right = f"<reasoning>\nso\n</reasoning>\n<answer>\n${row['answer']}.0\n</answer>"
    assert play(env, row, right)[1] == pytest.approx(1.2)
    assert play(env, row, row["answer"])[1] == 0 and play(env, row, right.replace(row["answer"], "8e9"))[1] == 0.2


POEMS = {
    "Snow-white winter roofs\n\nquiet under all the stars,\nI'm alone again.": (1, 1),
    "Winter nights\nwinter stars over cold roofs!": ((4 / 9 + 1) / 3 * 6 / 7, 1),
    "Snow falls on white roofs.": (9 / 25 / 3, 0),
    "a b c\nd e f g h\ni j k\nl.": (3 / 4, 0),
    "...": (0, 0),
}


def test_lune():
    """Lines without words are none; what is missing, too much, or said twice costs."""
    env = load_environment("lune", {})
    row = next(row for row in env.dataset + env.eval_dataset if row["answer"] == "winter")
    for text, (form, has_topic) in POEMS.items():
        scores = {"form": pytest.approx(form), "topic": has_topic, "lune": form == has_topic == 1}
        assert play(env, row, text)[2] == scores


ANSWERS = [  # the text, the answer, whether it is right
    ("so 12*7+5 = 89.", "89", 1), ("it is -5", "-5", 1), ("12-7", "5", 1), ("12 - 7", "-7", 0), ("8 9", "89", 0),
    (r"\boxed{89} of 3", "89", 1), (r"\boxed{3} then \boxed{ 1,089 }", "1089", 1), (r"\boxed{} 89", "89", 0),
    ("1,089.0", "1089", 1), ("", "0", 0), ("none", "1", 0), (r"\boxed{x^{2}}", "x^{2}", 1), ("9" * 5000, "1", 0),
    ("x = \u22125", "-5", 1), ("1/2", "2", 0), ("so 1/2.", "1/2", 1), ("1e5", "5", 0), ("10^3", "3", 0), ("89", 89, 1),
    (r"\boxed{42\%}", "42", 1), (r"\boxed{\text{42}}", "42", 1), (r"\boxed{42 \text{ cm}}", "42", 1),
    (r"\boxed{x=42}", "42", 1), (r"\boxed{1\,234}", "1234", 1), (r"\boxed{\frac{1}{2}}", "0.5", 1),
    ("2**10", "10", 0), ("10!", "10", 0), (r"\frac{1}{2}", "2", 0), (r"$\frac{1}{2}$", "1/2", 1), ("3.0", "3", 1),
]  # fmt: skip


def test_math_python(tmp_path):
    for text, answer, is_right in ANSWERS:
        said = [{"role": "assistant", "content": text}]
        assert asyncio.run(math_python.correct(said, answer)) == is_right, text
    huge = {"role": "assistant", "content": r"\boxed{9^{9^{9^9}}}"}
    task = load_environment("math_python", {"allow_unsandboxed_python": True})
    assert asyncio.run(task.rubric.score({"completion": [huge], "answer": "1"}))[1] == {"correct": 0, "tool_calls": 0}
    for row in math_python.rows("train", 500):
        assert str(eval(row["question"][:-1])) == row["answer"]  # our own expression
    (tmp_path / "rows.jsonl").write_text("".join(f'{{"question": "{i}+1?", "answer": {i + 1}}}\n' for i in range(9)))
    args = {"path": str(tmp_path / "rows.jsonl"), "num_eval_examples": 3, "num_train_examples": 4}
    env = load_environment("math_python", args | {"allow_unsandboxed_python": True})
    assert [row["question"][0] for row in env.dataset + env.eval_dataset] == list("0123678")
    call = wiki_search.call("python", {"code": "print(2 + 1)"})
    state, reward, metrics = play(env, env.dataset[2], call, "It is 3.")
    assert texts(state["completion"], "tool") == ["3"] and (reward, metrics["tool_calls"]) == (1, 1)
    state, reward, _ = play(env, env.dataset[2], *[call] * 4)
    assert reward == 0 and state["turn"] == 4  # what a tool printed is not an answer


def test_math_python_reads_what_verifiers_names(monkeypatch):
    splits = {split: Dataset.from_list([{"problem": f"{i}+1?", "solution": rf"\boxed{{{i + 1}}}"} for i in range(num)])
              for split, num in (("train", 12), ("test", 11))}  # fmt: skip
    monkeypatch.setattr("datasets.load_dataset", {"chiayewken/competition_math": splits}.get)
    args = {"dataset_name": "math", "num_train_examples": 10, "eval_split": "test", "allow_unsandboxed_python": True}
    env = load_environment("math-python", args)
    assert [row["answer"] for row in env.dataset] == [str(i + 1) for i in range(10)] and len(env.eval_dataset) == 11


def test_calculator():
    env, off = (load_environment("calculator", {"error": error}) for error in (0, 1))
    row = env.eval_dataset[2]
    call = row["solution"][0]["content"]
    a, b = map(int, re.fullmatch(r"<calc>(\d+) \* (\d+)</calc>", call).groups())
    assert set(re.findall(r"\d+", row["prompt"][-1]["content"])) == {str(a), str(b)} and row["answer"] == str(a * b)
    _, reward, metrics = play(env, row, call, f"<answer>{row['answer']}</answer>")
    assert reward == 1 and metrics == {"correct": 1, "called": 1, "repeated": 1}
    _, reward, metrics = play(off, row, call, f"<answer>{int(row['answer']) + 1}</answer>")
    assert reward == 0 and metrics["repeated"] == 1
    state, reward, _ = play(env, row, "<calc>2 plus 2</calc>", "<answer>4</answer>")
    assert reward == 0 and texts(state["completion"], "user") == ["error"]
    assert play(env, row, f"<answer>{row['answer']}</answer>")[1] == 1
    calls = load_environment("calculator", {"tool": "function"})
    called = wiki_search.call("calculate", {"expression": f"{a} * {b}"})
    state, reward, metrics = play(calls, row, called, f"<answer>{row['answer']}</answer>")
    assert texts(state["completion"], "tool") == [row["answer"]] and (reward, metrics["repeated"]) == (1, 1)
    dev = load_environment("calculator", {"split": "dev"})
    asked = [{re.sub(r"\d+", "", row["prompt"][-1]["content"]) for row in rows}
             for rows in (env.dataset, dev.eval_dataset, env.eval_dataset)]  # fmt: skip
    assert len(set.union(*asked)) == sum(map(len, asked))  # no wording is in two splits


def test_hard_wordings_come_more_often():
    """Two replacements keep a slot's operation. A wording that is always solved becomes rare."""
    rows = load_environment("calculator", {}).dataset
    order = calculator.HardWordings("calculator", rows, load_config(ROOT / "configs/calculator.toml"), {})
    for slot in range(6):
        assert {order.pick(0, slot, attempt) % 3 for attempt in range(3)} == {slot % 3}
    assert {order.pick(0, 0, attempt) % 3 for attempt in range(3, 30)} == {0, 1, 2}
    solved = rows[order.pick(1, 7, 0)]["wording"]
    group = [SimpleNamespace(env="calculator", example=order.pick(1, 7, 0), reward=1.0)] * 8
    for _ in range(6):
        order.commit(1, [group, [SimpleNamespace(env="other", example=4095, reward=1.0)]])  # it has no such example
    picked = Counter(rows[order.pick(2, slot, 0)]["wording"] for slot in range(1, 3000, 3))
    assert len(picked) == 20 and picked[solved] <= 5  # of 1,000; about 50 before


def test_wordle():
    for guess, answer, found in [("speed", "abide", "XXYXY"), ("erase", "speed", "YXXYY"), ("geese", "elder", "XYYXX")]:
        assert wordle.marks(guess, answer) == found
    env = load_environment("wordle", {"use_think": True, "num_train_examples": 2000})
    row = env.eval_dataset[0] | {"answer": "abide"}
    says = "<think>\nhm\n</think>\n<guess>\n{}\n</guess>".format
    state, reward, metrics = play(env, row, says("[SPEED]"), says("apple"), "abide", says("abide"))
    assert texts(state["completion"], "user")[0] == "S P E E D\nX X Y X Y\nYou have 5 guesses left."
    assert metrics["solved"] == metrics["near"] == 1 and metrics["quick"] == 0.5 and len(env.dataset) == 2000
    state, reward, metrics = play(env, row, *[says("crane")] * 6)
    assert state["turn"] == 6 and reward == pytest.approx(0.2 * 0.3 + 0.1)


def test_wiki_search():
    env = load_environment("wiki_search", {"max_turns": 4})
    row = env.eval_dataset[7]
    search = wiki_search.call("search_pages", {"query": row["info"]["title"]})
    page_id, _, name = texts(play(env, row, search, "x")[0]["completion"], "tool")[0].partition(": ")
    view = wiki_search.call("view_page", {"page_id": page_id})
    state, reward, metrics = play(env, row, search, view, row["answer"].upper() + ".")
    assert metrics == {"correct": 1.0, "progress": 2.0} and state["turn_rewards"] == pytest.approx([0.2, 0.2, 0.6])
    assert texts(state["completion"], "tool")[1] == f"{name} lives in {row['answer']}."
    state, _, _ = play(env, row, search, search, view, f"it is {row['answer']} or not")
    assert state["turn_rewards"] == pytest.approx([0.2, 0, 0.2, 0])  # the same search again earns nothing
    wrong = [wiki_search.call("view_page", {"page_id": row["answer"]}), wiki_search.call("search_pages", {name: ""})]
    state, reward, _ = play(env, row, *wrong, "x")  # nor does an error that repeats the words of the call
    assert "no page" in texts(state["completion"], "tool")[0] and reward == 0


# --- the toys' warm-up ------------------------------------------------------------------------------------------------

QUICK = """
import reverse_text
from env import SingleTurnEnv
WARM_UP_STEPS = 2
demonstrations = reverse_text.demonstrations
def load_environment():
    return SingleTurnEnv(reverse_text.rows("train", 8))
"""


@pytest.fixture
def quick(tmp_path):
    """A task's file, its TOML, and the directory of its model. The warm-up uses no setting of the RL."""
    more = 'loss = "grpo"\nloss_args = { epsilon = 0.1 }\nbeta = 0.3\nminibatches = 2\nmicro_batch_size = 1\n'
    more += 'script = "mine.py"\n'
    (tmp_path / "quick.toml").write_text(f'model = "{tmp_path}/models/quick"\nenv.id = "quick"\n[trainer]\n{more}')
    (tmp_path / "mine.py").touch()  # a copy of trainer.py, which the warm-up does not want
    (tmp_path / "quick.py").write_text(QUICK)
    return tmp_path / "quick.py", str(tmp_path / "quick.toml"), tmp_path / "models" / "quick"


def test_a_model_is_made_again_if_its_task_has_changed(quick, monkeypatch):
    file, toml, model = quick
    made = []

    def warm_up(config, work, tokenizer, demonstrations, more):
        made.append(len(demonstrations))
        (work / "final").mkdir()

    monkeypatch.setattr(toy, "warm_up", warm_up)
    (model.parent / "quick.work").mkdir(parents=True)  # a user's
    for text in (QUICK, QUICK + "\n"):
        monkeypatch.delitem(sys.modules, "quick", raising=False)
        file.write_text(text)
        toy.main([toml])
        toy.main([toml])
    assert made == [128, 128] and sorted(os.listdir(model.parent)) == ["quick", "quick.work"]
    (model / "made_from").unlink()  # a model of the user's
    with pytest.raises(ConfigError, match="exists and has no file made_from"):
        toy.main([toml])


@pytest.mark.long
@pytest.mark.parametrize("script, size", [("toy", 103), ("shaped", 1000)])
def test_a_model_is_warmed_up(script, size, quick):
    _, toml, model = quick
    small = "{'layers': 2, 'hidden': 64, 'vocab': 1000}"
    code = f"import {script}; {script}.QWEN3 = {small}; {script}.main([{toml!r}])"
    env = os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT}/configs/models"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, env=env)
    assert done.returncode == 0 and (model / "made_from").exists(), done.stdout + done.stderr
    assert len(transformers.AutoTokenizer.from_pretrained(model)) == size
    assert transformers.AutoModelForCausalLM.from_pretrained(model).config.vocab_size == size
