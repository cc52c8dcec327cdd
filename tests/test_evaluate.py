"""tools/evaluate.py: services that know OpenAI's API alone, evaluations like the run's own, batches from data."""

import json
from collections import defaultdict
from itertools import cycle

import numpy as np
import pytest
import toy
from conftest import all_batches, append, lines, write_run
from plain_server import PlainServer

from orchestrator import Rollout
from rolemodel.role import ConfigError, DataError
from tools import evaluate

# Answers to a question are right if they have more than three letters.
TASK = """
from env import Rubric, SingleTurnEnv
def long_answer(completion):
    assert completion[-1]["content"] != "bad", "no such thing"
    return float(len(completion[-1]["content"]) > 3)
def load_environment():
    rows = [{"question": str(i)} for i in range(10)]
    env = SingleTurnEnv(rows, rows[:5], rubric=Rubric([long_answer]))
    env.tools = [{"type": "function", "function": {"name": "look", "parameters": {}}}]
    return env
"""


@pytest.fixture
def toml(tmp_path, models):
    (tmp_path / "letters_task.py").write_text(TASK)
    return str(write_run(tmp_path, models["untied"], 1, '[env]\nid = "letters_task"'))


def by_turns(*answers, also=()):
    """A server that gives these answers to each question, in turn."""
    left = defaultdict(lambda: cycle(answers))
    return PlainServer(lambda body: next(left[body["messages"][-1]["content"]]), also=also)


ASK = [{"role": "user", "content": "b"}]


def say(text):
    return [{"role": "assistant", "content": text}]


def trained_text(s):
    return toy.make_tokenizer().decode(s["tokens"][s["mask"]].tolist())


# --- rollouts ---------------------------------------------------------------------------------------------------------


def test_a_service_that_knows_openais_api_alone(tmp_path, toml, capsys, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    args = [toml, *"--eval --n 3 --rollouts-per-example 4 eval.temperature=0.0 --out".split(), f"{tmp_path}/out"]
    args.append("orchestrator.sampling.chat_template_kwargs={enable_thinking=false}")  # sent because it is asked for
    with by_turns("abcd", "a", "bad", "abcdef", also=["chat_template_kwargs"]) as server:
        evaluate.main([*args, "--base-url", server.url])
    shown = capsys.readouterr().out
    assert "avg@4 0.667 (95 %" in shown
    assert "pass@1 0.667" in shown and "pass@2 1.000" in shown and "pass@4" not in shown  # of each example one is lost
    assert "reward/lost_as_0 0.500" in shown and "truncated 0.333" in shown  # "abcdef" has max_tokens
    assert {body["authorization"] for body in server.bodies} == {"Bearer secret"} and "secret" not in shown
    assert server.bodies[0]["temperature"] == 0 and not server.bodies[0]["chat_template_kwargs"]["enable_thinking"]
    written = lines(tmp_path / "out")
    assert [line["example"] for line in written] == [0] * 4 + [1] * 4 + [2] * 4
    assert [line["reward"] for line in written] == [1, 0, None, 1] * 3
    assert {json.dumps(line["completion"]) for line in written if line["truncated"]} == {json.dumps(say("abcdef"))}


def test_a_stop_string_ends_the_answer_of_any_service(tmp_path, toml):
    args = [toml, *"--eval --n 1 --rollouts-per-example 1 --out".split(), f"{tmp_path}/out"]
    with by_turns("abcdef") as server:
        evaluate.main([*args, "--base-url", server.url, 'orchestrator.sampling.stop=["d","f"]'])
    (line,) = lines(tmp_path / "out")
    assert line["completion"] == say("abcd") and not line["truncated"] and "stop" not in server.bodies[0]


def test_vllm_is_sampled_as_the_runs_own_evaluations_sample(run, fake_servers, capsys):
    """The same rows, random numbers, limits and rewards."""
    more = ["eval.every=1", "eval.num_examples=6", "eval.rollouts_per_example=2", "eval.max_tokens=4"]
    run_dir = run(1, '[env]\nid = "reverse_text"', *more, fake={"uniform": False})
    args = [f"{run_dir}.toml", "--eval", "--base-url", f"{fake_servers()}/v1", "--out", f"{run_dir}/again.jsonl"]
    evaluate.main([*args, *more])
    first = [line for line in lines(run_dir / "eval_rollouts.jsonl") if line["step"] == 0]
    again = sorted(lines(run_dir / "again.jsonl"), key=lambda line: (line["example"], line["member"]))
    assert [line | {"version": 0} for line in again] == first and any(line["truncated"] for line in first)
    assert f"avg@2 {lines(run_dir / 'eval.jsonl')[0]['reward/mean']:.3f}" in capsys.readouterr().out


def test_pass_at_k_by_hand():
    assert evaluate.pass_at(2, [[1, 0, 0, 0]]) == [0.5]  # 3 of 6 pairs hold the success
    assert evaluate.pass_at(1, [[1, 0], [0, 0]]) == [0.5, 0.0]
    assert evaluate.pass_at(2, [[1, 1], [0, 0], [1]]) == [1.0, 0.0]  # the third has too few


def test_a_report_is_over_the_same_examples_throughout(capsys):
    """An example of which a rollout is lost has no pass@2, and is rarely like the others."""
    groups = []
    for rewards in ([1.0, 0.0], [1.0, None], [None, None]):
        groups.append([Rollout("e", 0, 0, 0, i, reward=reward, truncated=True) for i, reward in enumerate(rewards)])
    evaluate.print_report("e", groups, 2)
    shown = capsys.readouterr().out
    assert "pass@1 0.750" in shown and "pass@2" not in shown
    assert "3 rollouts have no reward and count only in reward/lost_as_0: its prompt is too long" in shown


# --- batches from data ------------------------------------------------------------------------------------------------


def test_generated_data_is_trained_on_for_its_rewards(tmp_path, toml):
    data = str(tmp_path / "data.jsonl")
    with by_turns("abcd", "a", "b", "c") as server:
        evaluate.main([toml, "--generate", "40", data, "--base-url", server.url])
    assert len(lines(data)) == 40 and {line["example"] for line in lines(data)} == set(range(10))
    assert lines(data)[0]["tools"][0]["function"]["name"] == "look"  # they are a part of the prompt
    with pytest.raises(ConfigError, match="data.jsonl exists"):
        evaluate.main([toml, "--generate", "4", data])
    evaluate.main([toml, "--offline", data])
    batches = all_batches(tmp_path / "run-offline")
    assert sum(len(batch.sequences) for batch in batches) == 40 and len(batches) == 3  # of 16, 16 and 8
    for s in batches[0].sequences:
        adv = 0.75 if trained_text(s) == "abcd<|end|>" else -0.25  # reward - mean of the group
        assert (s["adv"] == np.where(s["mask"], adv, 0)).all()
        assert np.isnan(s["old_logp"]).all()  # it is unknown
    with pytest.raises(Exception, match="has batches already"):
        evaluate.main([toml, "--offline", data])


def test_groups_are_of_one_example_of_one_environment_of_one_generation(tmp_path, toml):
    """slime #2062: files that were put together number their examples from 0 each. A line need not have the number of
    a rollout, and one that is truncated only shapes the baseline: it never said its end."""
    rows = [{"env": "b", "example": 0, "reward": reward} for reward in (2.0, 4.0)]
    for rewards in ([None, 1.0, 0.0], [5.0, 1.0, 3.0, 3.0]):  # of the first, a rollout is lost
        for i, reward in enumerate(rewards):
            place = {"env": "a", "step": 0, "example": 0, "slot": 0, "attempt": 0, "member": i}
            rows.append(place | {"reward": reward, "truncated": reward == 0})
    append(tmp_path / "data.jsonl", [row | {"prompt": ASK, "completion": say("a")} for row in rows])
    evaluate.main([toml, "--offline", f"{tmp_path}/data.jsonl"])
    (batch,) = all_batches(tmp_path / "run-offline")
    found = [(s["slot"], s["env"], s["adv"].tolist()[-1]) for s in batch.sequences]
    first = [(0, "b", -1), (0, "b", 1), (1, "a", 0.5), (1, "a", 0)]
    assert found == [*first, (2, "a", 2), (2, "a", -2), (2, "a", 0), (2, "a", 0)]
    assert [trained_text(s) for s in batch.sequences] == ["a<|end|>"] * 3 + [""] + ["a<|end|>"] * 4


def test_the_same_prompt_with_other_tools_is_another(tmp_path, toml):
    """prime-rl #600."""
    tools = [[{"type": "function", "function": {"name": name, "parameters": {}}}] for name in "xy"]
    rows = [{"tools": tools[i // 2], "reward": reward} for i, reward in enumerate((0, 1, 4, 5))]
    append(tmp_path / "data.jsonl", [row | {"prompt": ASK, "completion": say("a")} for row in rows])
    evaluate.main([toml, "--offline", f"{tmp_path}/data.jsonl"])
    (batch,) = all_batches(tmp_path / "run-offline")
    assert [s["adv"][-1] for s in batch.sequences] == [-0.5, 0.5, -0.5, 0.5]


def test_the_best_are_imitated(tmp_path, toml):
    """A conversation, of which the answer in the prompt is not the policy's."""
    talk = {"prompt": ASK + say("one") + ASK, "completion": say("two") + ASK + say("six"), "reward": 1.0}
    others = [talk | {"reward": 0.5}, talk | {"truncated": True}, talk | {"reward": None}]
    append(tmp_path / "data.jsonl", [talk, *others])
    evaluate.main([toml, "--demonstrations", f"{tmp_path}/data.jsonl", "--min-reward", "1"])
    (batch,) = all_batches(tmp_path / "run-demonstrations")
    assert [trained_text(s) for s in batch.sequences] == ["two<|end|>six<|end|>"]
    for s in batch.sequences:
        assert (s["adv"] == s["mask"]).all() and np.isnan(s["old_logp"]).all()


@pytest.mark.parametrize("line, reason", [
    ({"reward": 1}, "'without a gradient': 1"),  # nothing to compare it with
    ({}, "'unscored': 1"),
    ({"reward": 1, "completion": say("a" * 99)}, "'longer than max_seq_len': 1"),
    ({"reward": 1, "error": "TimeoutError"}, "'failed': 1"),
    ({"reward": "1"}, "data.jsonl: line 1: TypeError"),
])  # fmt: skip
def test_lines_that_are_left_out_are_counted(tmp_path, toml, line, reason):
    append(tmp_path / "data.jsonl", [{"prompt": ASK, "completion": say("a")} | line])
    with pytest.raises(DataError, match=reason):
        evaluate.main([toml, "--offline", f"{tmp_path}/data.jsonl"])
