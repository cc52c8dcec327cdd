"""tools/evaluate.py: services that know OpenAI's API alone, evaluations like the run's own, batches from data."""

import json
import math

import numpy as np
import pytest
from conftest import all_batches, lines, write_run
from plain_server import PlainServer

from configs.models import toy
from configs.runtime.role import DataError
from tools import evaluate
from trainer import load_batch

# Answers to a question are right if they have more than three letters.
TASK = """
from env import Rubric, SingleTurnEnv

def long_answer(completion):
    if completion[-1]["content"] == "bad":
        raise ValueError("no such thing")
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


def by_turns(*answers):
    """A server that gives these answers to each question, in turn."""
    asked = {}

    def answer(body):
        question = body["messages"][-1]["content"]
        asked[question] = asked.get(question, -1) + 1
        return answers[asked[question] % len(answers)]

    return PlainServer(answer)


def ask(text="b"):
    return [{"role": "user", "content": text}]


def say(text):
    return [{"role": "assistant", "content": text}]


def write_lines(path, *rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def trained_text(s):
    return toy.make_tokenizer().decode(s["tokens"][s["mask"]].tolist())


# --- rollouts ---------------------------------------------------------------------------------------------------------


def test_a_service_that_knows_openais_api_alone(tmp_path, toml, capsys, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    out = tmp_path / "eval.jsonl"
    with by_turns("abcd", "a", "b", "abcdef") as server:
        evaluate.main([toml, "--eval", "--base-url", server.url, "--n", "3", "--rollouts-per-example", "4",
                       "--out", str(out)])  # fmt: skip
    shown = capsys.readouterr().out
    assert "3 examples x 4 rollouts of plain at" in shown and "avg@4 0.500 +- 0.000" in shown
    assert "pass@1 0.500" in shown and "pass@2 0.833" in shown and "pass@4 1.000" in shown  # 1 - (2 of 4, 2) / (4, 2)
    assert "rewards differ within 3 of 3 examples" in shown and "truncated 0.250" in shown  # "abcdef" has max_tokens
    assert {body["authorization"] for body in server.bodies} == {"Bearer secret"} and "secret" not in shown
    written = lines(out)
    assert [line["example"] for line in written] == [0] * 4 + [1] * 4 + [2] * 4
    assert [line["reward"] for line in written] == [1, 0, 0, 1] * 3
    assert {json.dumps(line["completion"]) for line in written if line["truncated"]} == {json.dumps(say("abcdef"))}


def test_lost_rollouts_are_named(toml, capsys):
    with by_turns("abcd", "bad") as server:
        evaluate.main([toml, "--eval", "--base-url", server.url, "--n", "1", "--rollouts-per-example", "2"])
    shown = capsys.readouterr().out
    assert "avg@2 1.000" in shown and "reward/lost_as_0 0.500" in shown
    assert "1 rollouts are lost" in shown and "ValueError: no such thing" in shown
    with by_turns("bad") as server, pytest.raises(DataError, match="no such thing"):
        evaluate.main([toml, "--eval", "--base-url", server.url, "--n", "1"])


def test_what_the_configuration_asks_for_beyond_openais_api_is_sent(toml):
    more = ["orchestrator.sampling.chat_template_kwargs={enable_thinking=false}", "eval.temperature=0.0"]
    server = PlainServer(lambda body: "abcd", also=["chat_template_kwargs"])
    with server:
        evaluate.main([toml, "--eval", "--base-url", server.url, "--n", "1", *more])
    (body,) = server.bodies
    assert body["chat_template_kwargs"] == {"enable_thinking": False} and body["temperature"] == 0


def test_vllm_is_sampled_as_the_runs_own_evaluations_sample(run, fake_servers, capsys):
    """The same rows, random numbers, limits and rewards."""
    more = ["eval.every=1", "eval.num_examples=6", "eval.rollouts_per_example=2", "eval.max_tokens=4"]
    run_dir = run(1, '[env]\nid = "reverse_text"', *more, fake={"uniform": False})
    url = fake_servers() + "/v1"
    out = run_dir / "again.jsonl"
    evaluate.main([str(run_dir.parent / "run.toml"), "--eval", "--base-url", url, "--out", str(out), *more])
    first = [line for line in lines(run_dir / "eval_rollouts.jsonl") if line["step"] == 0]
    again = sorted(lines(out), key=lambda line: (line["example"], line["rollout"]))
    assert [line | {"version": 0} for line in again] == first and any(line["truncated"] for line in first)
    assert f"avg@2 {lines(run_dir / 'eval.jsonl')[0]['reward/mean']:.3f}" in capsys.readouterr().out


def test_pass_at_k_by_hand():
    assert evaluate.pass_at(2, [[1, 0, 0, 0]]) == (0.5, 1)  # 3 of 6 pairs hold the success
    assert evaluate.pass_at(1, [[1, 0], [0, 0]]) == (0.25, 2)
    assert evaluate.pass_at(2, [[0.7 + 0.2 + 0.1, 0.5], [0, 0], [2]]) == (0.5, 2)  # the third has too few


# --- batches from data ------------------------------------------------------------------------------------------------


def test_generated_data_is_trained_on_for_its_rewards(tmp_path, toml):
    data = str(tmp_path / "data.jsonl")
    with by_turns("abcd", "a", "b", "c") as server:
        evaluate.main([toml, "--generate", "40", data, "--base-url", server.url])
    assert len(lines(data)) == 40 and {line["example"] for line in lines(data)} == set(range(10))
    assert lines(data)[0]["tools"][0]["function"]["name"] == "look"  # they are a part of the prompt
    evaluate.main([toml, "--offline", data])
    batches = all_batches(tmp_path / "run-offline")
    assert sum(len(batch.sequences) for batch in batches) == 40 and len(batches) == 3  # of 16, 16 and 8
    for s in batches[0].sequences:
        is_right = trained_text(s) == "abcd<|end|>"
        assert is_right or trained_text(s) in ("a<|end|>", "b<|end|>", "c<|end|>")
        assert (s["adv"] == np.where(s["mask"], 0.75 if is_right else -0.25, 0)).all()  # reward - mean of the group
        assert np.isnan(s["old_logp"]).all()  # nobody knows it
    assert batches[0].info["metrics"]["reward/mean"] == 0.25
    batch = load_batch(tmp_path / "run-offline" / "batches" / "step_000000.safetensors", "cpu")
    assert sum(batch.counts) == sum(int(s["mask"].sum()) for s in batches[0].sequences)
    with pytest.raises(Exception, match="has batches already"):
        evaluate.main([toml, "--offline", data])


def test_a_truncated_line_only_shapes_the_baseline(tmp_path, toml):
    line = {"prompt": ask(), "completion": say("a")}
    data = write_lines(tmp_path / "data.jsonl", line | {"reward": 1}, line | {"reward": 0, "truncated": True})
    evaluate.main([toml, "--offline", data])
    (batch,) = all_batches(tmp_path / "run-offline")
    assert [trained_text(s) for s in batch.sequences] == ["a<|end|>", ""]
    assert batch.sequences[0]["adv"].max() == 0.5


def test_the_best_are_imitated(tmp_path, toml):
    """A conversation, of which the answer in the prompt is not the policy's, and text for a base model."""
    few_shot = ask("1") + say("one") + ask("2")
    talk = {"prompt": few_shot, "completion": say("two") + ask("3") + say("six"), "reward": 1.0}
    rows = [talk, {"prompt": "2+2=", "completion": "4", "reward": 1.0}]
    rows += [talk | {"reward": 0.5}, talk | {"truncated": True}, talk | {"reward": None}]
    data = write_lines(tmp_path / "data.jsonl", *rows)
    evaluate.main([toml, "--demonstrations", data, "--min-reward", "1"])
    (batch,) = all_batches(tmp_path / "run-demonstrations")
    assert [trained_text(s) for s in batch.sequences] == ["two<|end|>six<|end|>", "4<|end|>"]
    for s in batch.sequences:
        assert (s["adv"] == s["mask"]).all() and np.isnan(s["old_logp"]).all()


@pytest.mark.parametrize("line, reason", [
    ({"reward": 1}, "'without a gradient': 1"),  # nothing to compare it with
    ({}, "'unscored': 1"),
    ({"reward": 1, "completion": say("a" * 99)}, "'longer than max_seq_len': 1"),
    ({"reward": 1, "error": "TimeoutError"}, "'failed': 1"),
    ({"reward": 1, "completion": []}, "'failed': 1"),
    ({"reward": 1, "completion": [{"content": "a"}]}, "line 1: KeyError"),
])  # fmt: skip
def test_lines_that_are_left_out_are_counted(tmp_path, toml, line, reason):
    data = write_lines(tmp_path / "data.jsonl", {"prompt": ask(), "completion": say("a")} | line)
    with pytest.raises(DataError, match=reason):
        evaluate.main([toml, "--offline", data])


def test_rows_of_two_environments_are_two_groups(tmp_path, toml):
    rows = []
    for env, rewards in (("a", (0, 1)), ("b", (2, 4))):
        rows += [{"env": env, "example": 0, "prompt": ask(), "completion": say("x"), "reward": x} for x in rewards]
    evaluate.main([toml, "--offline", write_lines(tmp_path / "data.jsonl", *rows)])
    (batch,) = all_batches(tmp_path / "run-offline")
    found = [(s["env"], s["group"], s["adv"][s["mask"]][0]) for s in batch.sequences]
    assert found == [("a", 0, -0.5), ("a", 0, 0.5), ("b", 1, -1.0), ("b", 1, 1.0)]
    assert not any(math.isnan(s["temperature"]) for s in batch.sequences)
