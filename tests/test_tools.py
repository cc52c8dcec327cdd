"""tools/evaluate.py: a plain OpenAI-compatible server, data from it, and training on that data without a server. Also
tmux.sh."""

import asyncio
import functools
import json
import math
import os
import re
import subprocess
import sys
from collections import Counter
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import openai
import pytest
from conftest import ROOT, all_batches, free_port, lines, run_trainer, write_run
from plain_server import PlainServer
from scripted import play

from configs import load_config
from configs.environments.judge import Judge
from configs.environments.parsers import ThinkParser
from configs.environments.rubrics import GroupRubric
from configs.environments.scoring import score
from configs.environments.tools import ToolEnv
from configs.models import toy
from configs.runtime.role import CONFIG, DATA, RunError
from env import DataError, Rubric, SingleTurnEnv
from orchestrator import Rollout
from tools import evaluate
from tools.evaluate import pass_at, wilson


def counting():
    """Every third answer is longer."""
    count = iter(range(10**6))
    return lambda body: {"content": "abc" if next(count) % 3 else "abcdef"}


def counting_by_prompt():
    """Of each prompt the third answer is longer, in whatever order requests arrive: each group of four has both."""
    asked = Counter()

    def answer(body):
        prompt = json.dumps(body["messages"])
        asked[prompt] += 1
        return {"content": "abcdef" if asked[prompt] == 3 else "abc"}

    return answer


def texts_with(weight, batch):
    """The tokens of each sequence that have a weight in one term of the loss, as text."""
    tokenizer = toy.make_tokenizer()
    return [tokenizer.decode(s["tokens"][s[weight] != 0].tolist()) for s in batch.sequences]


def num_rollouts(batches):
    return sum(len({(s["group"], s["rollout"]) for s in batch.sequences}) for batch in batches)


def say(text):
    return [{"role": "assistant", "content": text}]


@pytest.fixture
def toml(tmp_path, models):
    return write_run(tmp_path, models["untied"], 1, '{ kind = "letter" }')


def test_eval_on_a_plain_server(tmp_path, toml):
    """The command line as a user gives it, in a process of its own."""
    with PlainServer(counting()) as server:
        command = [sys.executable, "tools/evaluate.py", str(toml), "--eval", "--base-url", server.url, "--n", "5"]
        command += ["--rollouts-per-example", "4", "--out", str(tmp_path / "eval.jsonl")]
        env = {"PATH": "/usr/bin:/bin", "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}", "OPENAI_API_KEY": "secret"}
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=ROOT, env=env)
    assert done.returncode == 0, done.stderr
    assert "think_env: 5 examples x 4 rollouts, plain at " + server.url in done.stdout
    written = lines(tmp_path / "eval.jsonl")
    mean = sum(line["reward"] for line in written) / 20
    assert len(written) == 20 and f"avg@4 {mean:.3f} +- " in done.stdout
    assert "pass@1 " in done.stdout and "pass@2 " in done.stdout and "pass@4 " in done.stdout and "(95 %" in done.stdout
    assert "of the examples have rewards that differ" in done.stdout and "long_answer 0.3" in done.stdout
    assert {body["authorization"] for body in server.bodies} == {"Bearer secret"} and "secret" not in done.stdout
    assert {body["top_p"] for body in server.bodies} == {1.0}  # without it vLLM takes generation_config.json's
    assert len(server.bodies) == 20 and not list(tmp_path.glob("run/batches/*"))


def test_rules_of_thumb(tmp_path, models, capsys):
    toml = write_run(tmp_path, models["untied"], 1, '{ kind = "zero" }')
    with PlainServer(counting()) as server:
        args = ["--base-url", server.url, "--model", "m", "--n", "3", "--rollouts-per-example", "4"]
        evaluate.main([str(toml), "--eval", *args])
    out = capsys.readouterr().out
    assert "too hard: no reward in 12 attempts" in out and {body["model"] for body in server.bodies} == {"m"}


def test_a_report_says_what_the_mean_is_with_lost_rollouts_as_0(tmp_path, models, capsys):
    """Right answers alone have a reward, here every other: a mean over what was scored is 1."""
    toml = write_run(tmp_path, models["untied"], 1, '{ kind = "none_if_wrong" }')
    count = iter(range(99))
    with PlainServer(lambda body: "ad"[next(count) % 2]) as server:
        args = ["--base-url", server.url, "--model", "m", "--n", "3", "--rollouts-per-example", "4"]
        evaluate.main([str(toml), "--eval", *args])
    out = capsys.readouterr().out
    assert "avg@4 1.000 " in out and "avg@4 0.500 with 6 lost rollouts as 0 (over 3 examples)" in out
    assert "warning: think_env: 50 % of the rollouts were lost" in out and "mean 1.000, but 0.500 with lost" in out


@pytest.mark.parametrize("text, is_lost", [("This model's maximum context length is 64 tokens", False), ("no", True)])
def test_a_full_context_is_scored_as_in_training(text, is_lost, tmp_path, models, capsys):
    """The second turn has no room. Anything else that a server refuses loses the rollout."""
    toml = write_run(tmp_path, models["untied"], 1, '{ kind = "turns" }')
    with PlainServer(lambda body: (400, {}, text) if len(body["messages"]) > 1 else "a") as server:
        args = ["--base-url", server.url, "--model", "m", "--n", "3", "--rollouts-per-example", "1"]
        with pytest.raises(RunError) if is_lost else nullcontext():
            evaluate.main([str(toml), "--eval", *args])
    assert is_lost or "truncated 1.000, lost to errors 0" in capsys.readouterr().out


@pytest.mark.parametrize("groups, advice", [
    ([[0.0, 0.05]] * 6, "too hard: the best of 12 rewards is 0.05, and those of an example hardly differ. Begin"),
    ([[0.1, 0.4]] * 6, "too hard, if a reward of 1 can be reached: none in 12 attempts, the best is 0.4"),
    ([[0.0, 1.0], [0.5, 0.5]] * 3, "50% of the examples have rewards that differ"),
    ([[5.0, 1.0], [2.0, 2.0]] * 3, "50% of the examples have rewards that differ"),  # of 5
    ([[1.0, 1.0], [1.0, 0.5]] * 3, "too easy"),
])  # fmt: skip
def test_what_rewards_say_about_a_task(groups, advice):
    solved = [float(max(group) >= 1) for group in groups]
    assert advice in evaluate.advise(groups, {"pass@k": sum(solved) / 6, "reward/mean": 0.25}, 2)


def test_eval_with_tools_turns_and_text(tmp_path, models, capsys):
    def answer(body):
        if "prompt" in body:
            return {"content": body["prompt"][::-1]}
        if len(body["messages"]) == 2:
            function = {"name": "double", "arguments": '{"a": 4}'}
            return {"content": None, "tool_calls": [{"id": "x", "type": "function", "function": function}]}
        return {"content": body["messages"][-1]["content"]}

    mix = '[[env]]\nid = "vf_envs"\nargs = { kind = "our tool" }\n[[env]]\nid = "vf_envs"\nname = "theirs"\n'
    mix += 'args = { kind = "tool" }\n[[env]]\nid = "think_env"\nargs = { kind = "text" }'
    toml = write_run(tmp_path, models["untied"], 1, mix)
    with PlainServer(answer) as server:
        evaluate.main([str(toml), "--eval", "--base-url", server.url, "--out", str(tmp_path / "eval.jsonl")])
    by_env = {}
    for line in lines(tmp_path / "eval.jsonl"):
        by_env.setdefault(line["env"], []).append(line)
    assert {name: len(group) for name, group in by_env.items()} == {"vf_envs": 2, "theirs": 2, "think_env": 3}
    for name in ("vf_envs", "theirs"):
        assert all(line["completion"][-1]["content"] == "8" and line["num_turns"] == 2 for line in by_env[name])
    assert by_env["think_env"][0]["completion"] == [by_env["think_env"][0]["prompt"][::-1]]
    assert capsys.readouterr().out.count("avg@1") == 3


def test_a_server_that_fails_or_is_not_there_and_a_count_that_is_none(toml, capsys):
    with PlainServer(lambda body: 1 / 0) as server, pytest.raises(RunError, match="every rollout failed") as e:
        evaluate.main([str(toml), "--eval", "--base-url", server.url, "--n", "1", "orchestrator.generation_timeout=2"])
    assert e.value.code == DATA
    url = f"http://127.0.0.1:{free_port()}/v1"
    with pytest.raises(RunError, match=f"{url} does not list a model") as e:
        evaluate.main([str(toml), "--eval", "--base-url", url])
    assert e.value.code == CONFIG
    for count in ("x", "0", "-3"):
        with pytest.raises(SystemExit) as e:
            evaluate.main([str(toml), "--generate", count, "out.jsonl"])
        assert e.value.code == 2 and f"must be a number above 0, not '{count}'" in capsys.readouterr().err


def test_the_readmes_commands(tmp_path, toml):
    """Those of tools/README.md, as they stand there but for the placeholders, by a shell."""
    text = (ROOT / "tools" / "README.md").read_text()
    out = tmp_path / "out.jsonl"
    commands = re.findall(r"^python tools/evaluate.py .*", text, re.MULTILINE)
    with PlainServer(counting()) as server:
        given = {"config.toml": toml, "out.jsonl": out, "https://.../v1": server.url, "NAME": "mine", " 1000 ": " 80 "}
        for command in commands:
            for placeholder, value in given.items():
                command = command.replace(placeholder, str(value))
            env = os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
            subprocess.run(command, shell=True, cwd=ROOT, env=env, check=True, capture_output=True, timeout=120)
    assert len(commands) == 4 and {body["model"] for body in server.bodies} == {"mine"}
    assert len(lines(out)) == 80 and len(server.bodies) > 80
    assert all(list((tmp_path / f"run-{kind}" / "batches").iterdir()) for kind in ("offline", "demonstrations"))


def test_generate_then_train_offline(tmp_path, toml, capsys):
    """Rollouts of a plain server -> JSON Lines -> batches -> trainer.py, for their rewards and as demonstrations."""
    data = tmp_path / "data.jsonl"
    with PlainServer(counting_by_prompt()) as server:
        more = ["--base-url", server.url, "--rollouts-per-example", "4"]
        evaluate.main([str(toml), "--generate", "40", str(data), *more])
    written = lines(data)
    assert len(written) == 40 and {line["example"] for line in written} == set(range(10))
    # 1. Rewards.
    evaluate.main([str(toml), "--offline", str(data)])
    batches = all_batches(tmp_path / "run-offline")
    assert num_rollouts(batches) == 40 and batches[0].info["offline"]
    for batch in batches:
        for s, text in zip(batch.sequences, texts_with("mask", batch)):
            assert text in ("abc<|end|>", "abcdef<|end|>") and (s["reward"] == 1) == (text == "abcdef<|end|>")
            assert len({x["reward"] for x in batch.sequences if x["group"] == s["group"]}) == 2
            assert s["old_logp"][s["mask"]].isnan().all() and not s["ce"].any()  # nobody knows it
    with pytest.raises(RunError, match="holds batches: choose another run_name"):
        evaluate.main([str(toml), "--offline", str(data)])
    replay = tmp_path / "run-offline" / "batches"
    assert f"python trainer.py {toml} --replay {replay}" in capsys.readouterr().out
    run_trainer(toml, "--replay", replay, "max_steps=9")
    metrics = lines(tmp_path / "run-replay-cispo" / "metrics.jsonl")
    assert len(metrics) == len(batches) and metrics[0]["policy/kl_sampler"] == pytest.approx(0, abs=1e-6)
    again = run_trainer(toml, "--replay", replay, "max_steps=9", "trainer.learning_rate=1e-9", check=False)
    assert again.returncode == CONFIG and "choose another run_name" in again.stderr
    # 2. Imitation of the 10 best, one of each prompt.
    more = ["run_name=best"]
    evaluate.main([str(toml), "--demonstrations", str(data), "--min-reward", "1", *more])
    batches = all_batches(tmp_path / "best-demonstrations")
    texts = sum([texts_with("ce", batch) for batch in batches], [])
    assert texts == ["abcdef<|end|>"] * 10 and set(sum([texts_with("mask", batch) for batch in batches], [])) == {""}
    replay = tmp_path / "best-demonstrations" / "batches"
    run_trainer(toml, "--replay", replay, *more, "trainer.learning_rate=1e-2", "max_steps=9")
    metrics = lines(tmp_path / "best-replay-cispo" / "metrics.jsonl")
    assert len(metrics) == len(batches) > 0 and metrics[0]["optim/grad_norm"] > 0
    assert (tmp_path / "best-replay-cispo" / "final" / "model.safetensors").is_file()


ASK = [{"role": "user", "content": "b"}]
BAD_LINES = {
    '{"prompt": "a"}': "line 1 has no completion",
    '{"question": "a", "completion": "b"}': "line 1 has no prompt",
    json.dumps({"prompt": ASK, "completion": "a", "reward": 1}): "line 1: its completion must be messages.*'a'",
    json.dumps({"prompt": "a", "completion": say("a"), "reward": 1}): "line 1: its completion must be text",
    json.dumps({"prompt": ASK, "completion": [{"content": "a"}], "reward": 1}): "line 1: .* be messages",
    json.dumps({"prompt": ASK, "completion": say("a"), "reward": "x"}): "reward = 'x' must be a finite number",
    json.dumps({"prompt": ASK, "completion": say("a"), "reward": math.nan}): "line 1: reward = nan must be",
    "{": "line 1 of .*: Expecting",
    json.dumps({"prompt": ASK, "completion": say("a")}): "nothing to learn from.*'unscored': 1",
    json.dumps({"prompt": ASK, "completion": say("a"), "reward": 1}): "nothing to learn from.*'flat': 1",
    json.dumps({"prompt": ASK, "completion": say("a" * 99), "reward": 1}): "longer than max_seq_len",
    json.dumps({"prompt": ASK, "completion": [], "error": "TimeoutError"}): "'failed': 1",
}


def test_bad_lines_of_offline_files_are_named(tmp_path, toml):
    data = tmp_path / "data.jsonl"
    for text, problem in BAD_LINES.items():
        data.write_text(text + "\n")
        with pytest.raises((RunError, ValueError), match=problem) as e:
            evaluate.main([str(toml), "--offline", str(data)])
        assert e.value.code == DATA
    line = {"prompt": ASK, "completion": say("a"), "truncated": True}  # rewards by turn go with the whole one
    rows = [json.dumps(line | {"reward": x, "turn_rewards": [x]}) + "\n" for x in (1.0, 2.0)]
    data.write_text("".join(rows))
    with pytest.raises(RunError, match="nothing to learn from.*'flat': 2"):
        evaluate.main([str(toml), "--offline", str(data), "orchestrator.zero_truncated_completions=true"])
    with pytest.raises(RunError, match="nothing to learn from.*'truncated': 2"):
        evaluate.main([str(toml), "--demonstrations", str(data)])


def test_conversations_become_sequences_of_the_policys_tokens():
    tokenizer = toy.make_tokenizer()
    talk = []
    for i in range(2):
        talk += [{"role": "user", "content": f"q{i}"}, *say(f"a{i}")]
    (one,) = toy.tokenize_conversation(tokenizer, talk)
    sampled = [t for t, is_sampled in zip(one["tokens"], one["mask"]) if is_sampled]
    assert tokenizer.decode(sampled) == "a0<|end|>a1<|end|>"
    assert one["tokens"] == tokenizer.apply_chat_template(talk, return_dict=False)
    assert {turn for turn, is_sampled in zip(one["turn"], one["mask"]) if is_sampled} == {0, 1}
    tokenizer.chat_template += "\n"  # written after the end token: never the policy's to say
    assert toy.tokenize_conversation(tokenizer, talk[:2])[0]["tokens"][-1] == tokenizer.eos_token_id


def test_offline_trains_what_the_policy_said_and_nothing_else(tmp_path, toml):
    """Answers in the prompt (few-shot) are not the policy's; a truncated one never said its end."""
    shots = [{"role": "user", "content": "1"}, *say("one"), {"role": "user", "content": "2"}]
    data = [{"prompt": shots, "completion": say(text), "reward": reward, "truncated": text == "tw"}
            for text, reward in (("two", 1.0), ("tw", 0.0), ("no", 0.5))]  # fmt: skip
    (tmp_path / "data.jsonl").write_text("\n".join(map(json.dumps, data)))
    evaluate.main([str(toml), "--offline", str(tmp_path / "data.jsonl")])
    (batch,) = all_batches(tmp_path / "run-offline")
    assert texts_with("mask", batch) == ["two<|end|>", "", "no<|end|>"] and set(texts_with("ce", batch)) == {""}
    assert [(s["reward"], s["num_turns"]) for s in batch.sequences] == [(1.0, 1), (0.0, 1), (0.5, 1)]
    evaluate.main([str(toml), "--demonstrations", str(tmp_path / "data.jsonl")])
    (batch,) = all_batches(tmp_path / "run-demonstrations")
    assert texts_with("ce", batch) == ["two<|end|>", "no<|end|>"] and set(texts_with("mask", batch)) == {""}
    assert not any("reward" in s for s in batch.sequences)


def test_intervals_and_pass_at_k():
    low, high = wilson(0.0, 20)
    assert low == pytest.approx(0, abs=1e-12) and 0.15 < high < 0.17
    assert pass_at(2, [[1, 0, 0, 0]])[0] == pytest.approx(0.5) and pass_at(1, [[1, 0], [0, 0]])[0] == 0.25
    assert pass_at(2, [[1, 0.5], [0, 0], [2]]) == (0.5, 2)  # the third has too few


# --- what tasks import ------------------------------------------------------------------------------------------------


def test_servers_on_this_machine_are_asked_without_a_proxy(toml, monkeypatch, capsys):
    """But others by it."""
    for name in ("http_proxy", "HTTP_PROXY", "ALL_PROXY"):
        monkeypatch.setenv(name, f"http://127.0.0.1:{free_port()}")
    monkeypatch.setenv("no_proxy", "")
    with PlainServer(lambda body: "<score>7</score>") as server:
        for url in (server.url, server.url.replace("127.0.0.1", "localhost")):
            scores = Judge(["a"], url, max_retries=0).judge("q", "a", "")
            assert asyncio.run(scores) == 0.7
        evaluate.main([str(toml), "--eval", "--base-url", server.url, "--n", "1"])
    assert "lost to errors 0" in capsys.readouterr().out
    with pytest.raises(openai.APIConnectionError):
        asyncio.run(Judge(["a"], "http://judge.example/v1", max_retries=0, timeout=5).judge("q", "a", ""))


@pytest.mark.parametrize("text, expected", [
    ("a</think>b", 1.0), ("\na\n</think>\n\nb", 1.0), ("<think>a</think>b", 0.0), ("a</think>", 0.0), ("a", 0.0),
])  # fmt: skip
def test_the_format_of_a_thought_that_the_prompt_opens(text, expected):
    parser = ThinkParser(prompt_opens_thought=True)
    assert parser.get_format_reward_func()(say(text)) == expected and parser.parse("a</think>b") == "b"


class Shelf:
    """Finds books.

    Args:
        title: of the book
    """

    def __init__(self, books):
        self.books = books

    async def __call__(self, title: str, state):
        return f"{self.books[title]} {state['answer']}"


def search(index: dict, most: int, *, query: str, secret: object = None) -> str:
    """Searches.

    Args:
        query: what to look for
        most: at most so many
    """
    return f"{index[query]} {most} {secret}"


def undescribed(a: int):
    """Says nothing of a."""


@pytest.mark.parametrize("tool, name, arguments, said", [
    (functools.partial(search, {"a": 1}, secret=object), "search", {"query": "a", "most": 2}, "1 2 <class 'object'>"),
    (functools.partial(search, {}, 3, secret=None), "search", {"query": "a"}, "error: KeyError: 'a'"),
    (Shelf({"b": 2}), "Shelf", {"title": "b"}, "2 4"),
    (functools.partial(Shelf({"b": 2}), "b"), "Shelf", {}, "2 4"),
])  # fmt: skip
def test_a_partial_or_an_object_is_a_tool(tool, name, arguments, said):
    env = ToolEnv([{"question": "q", "answer": "4"}], [tool], rubric=Rubric())
    about = env.tools[0]["function"]
    assert about["name"] == name and about["parameters"]["properties"].keys() >= arguments.keys()
    assert not about["parameters"]["properties"].keys() & {"state", "secret", "index"}
    call = {"id": "1", "function": {"name": name, "arguments": json.dumps(arguments)}}
    state, _, _ = play(env, env.dataset[0], {"role": "assistant", "content": "", "tool_calls": [call]}, "done")
    assert state["completion"][1]["content"] == said


@pytest.mark.parametrize("tools, problem", [
    ([undescribed], "tool 'undescribed': .* no description for the argument 'a'; a tool needs type hints"),
    ([functools.partial(lambda a: a)], "tool '<lambda>': .* no docstring"),
    ([Shelf({}), Shelf({})], "two tools are called 'Shelf'"),
])  # fmt: skip
def test_what_is_wrong_with_a_tool_is_said(tools, problem):
    with pytest.raises(DataError, match=problem):
        ToolEnv([{"question": "q"}], tools)


def test_rows_with_one_prompt_are_told_apart_by_columns():
    def right(completion, answer):
        return float(completion[-1]["content"] == answer)

    def share(completions):
        return [1 / len(completions)] * len(completions)

    rows = [{"question": "q", "answer": "1"}, {"question": "q", "answer": "2"}]
    env = SingleTurnEnv(rows, rows[:1], rubric=GroupRubric([right, share], [1.0, 0.5]))
    with pytest.raises(DataError, match=r"prompts\[1\] is in several rows, which differ in answer"):
        score(env, ["q2", "q"], ["2", "2"], info=[{}, {}])
    # Each row is a group of its own, however often it is among the rows. A new answer replaces both.
    assert score(env, ["q", "q"], ["2", "2"], answer=["2", "1"]) == [1.5, 0.5]
    assert score(env, ["q", "q"], ["2", "2"], answer=["3", "2"]) == [0.5, 1.5]


# --- tmux -------------------------------------------------------------------------------------------------------------


def test_tmux_opens_a_pane_per_role(models, tmp_path):
    """A stand-in writes down what tmux is asked for."""
    toml = write_run(tmp_path, models["untied"], 1, '{ kind = "noise" }')
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "tmux").write_text(f'#!/bin/sh\necho "$TMUX|$*" >> {tmp_path}/asked\n')
    (tmp_path / "bin" / "tmux").chmod(0o755)
    path = f"{tmp_path / 'bin'}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    command = ["bash", "tools/tmux.sh", str(toml), "trainer.loss=grpo"]
    env = os.environ | {"TMUX": "1", "PATH": path}
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=env)
    assert done.returncode == 0 and "attach" in done.stdout, done.stderr
    asked = (tmp_path / "asked").read_text().splitlines()
    assert all(x.startswith("|-L rolemodel-run-") for x in asked)  # TMUX is not handed on
    assert "new-session" in asked[0] and f"bash launch.sh {toml} trainer.loss=grpo" in asked[0]
    for role in ("trainer", "orchestrator", "inference"):
        assert sum("split-window" in x and f"run/logs/{role}.log" in x for x in asked) == 1
    assert not list((tmp_path / "run" / "batches").iterdir())


# --- one wrong line at a time: each of these alone saw a change of one line -------------------------------------------


TWO = '[[env]]\nid = "a"\nratio = 3.0\n[[env]]\nid = "b"\n'


def test_what_is_rolled_out_is_as_the_configuration_says(tmp_path, models):
    """The first eval.num_examples rows, or each environment's share of the rollouts, sampled as eval or training."""
    own = ["eval.num_examples=2", "eval.max_tokens=5", "eval.temperature=0.5", "orchestrator.sampling.max_tokens=9"]
    own += ["orchestrator.sampling.allow_biased_sampling=true", "orchestrator.sampling.top_p=0.75"]
    cfg = load_config(write_run(tmp_path, models["untied"], 1, TWO), own)
    env = SimpleNamespace(dataset=[0, 1, 2, 3], eval_dataset=[4, 5, 6])
    for num, n, expected in ((0, None, [4, 5]), (0, 3, [4, 5, 6]), (16, None, [0, 1, 2, 3, 0, 1])):
        args = SimpleNamespace(num=num, n=n)
        assert evaluate.rows_of(env, cfg.env[0], args, 2, cfg) == expected
    shown = [evaluate.sampling_of(cfg, is_training) for is_training in (False, True)]
    assert [(x["temperature"], x["max_tokens"], x["top_p"]) for x in shown] == [(0.5, 5, 0.75), (1.0, 9, 0.75)]


def test_an_environments_own_limit_can_only_lower_that_of_an_evaluation():
    asked = []

    async def create(**options):
        asked.append(options["max_tokens"])
        choice = {"message": {"content": "a"}, "finish_reason": "stop"}
        return SimpleNamespace(model_dump=lambda: {"choices": [choice]})

    client = SimpleNamespace(chat=SimpleNamespace(completions=SimpleNamespace(create=create)))
    ask = evaluate.make_ask(client, "m", {"max_tokens": 9})
    for most in (3, 99):
        asyncio.run(ask([], own={"max_tokens": most}))
    assert asked == [3, 9]


def test_rows_of_two_environments_are_two_groups_and_a_reward_at_the_limit_is_kept(tmp_path, toml):
    data = [{"env": env, "example": 0, "prompt": ASK, "completion": say(text), "reward": reward}
            for env in "ab" for text, reward in (("x", 0.5), ("y", 1.0), ("z", 0.25))]  # fmt: skip
    (tmp_path / "data.jsonl").write_text("\n".join(map(json.dumps, data)))
    more = ["--min-reward", "0.5", "orchestrator.sampling.temperature=0.75"]
    evaluate.main([str(toml), "--offline", str(tmp_path / "data.jsonl"), *more])
    (batch,) = all_batches(tmp_path / "run-offline")
    found = [(s["env"], s["group"], s["reward"]) for s in batch.sequences]
    assert found == [("a", 0, 0.5), ("a", 0, 1.0), ("b", 1, 0.5), ("b", 1, 1.0)]
    assert {s["temperature"] for s in batch.sequences} == {0.75}


def test_an_interval_of_pass_at_k_is_over_examples_and_what_was_cut_off_at_once_is_lost(capsys):
    groups = [[Rollout({}, reward=float(i)), Rollout({}, reward=float(i))] for i in (0, 1)]
    evaluate.print_report("e", [*groups, [Rollout({}, error="X: why"), Rollout({}, truncated=True)]], 2, 1.0)
    out = capsys.readouterr().out
    assert "pass@2 0.500 (95 %: 0.095 to 0.905)" in out and "with 2 lost rollouts as 0 (over 3 examples)" in out
