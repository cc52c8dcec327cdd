"""tools/evaluate.py: a plain OpenAI-compatible server, data from it, and training on that data without a server. And
tools/show.py and tmux.sh."""

import asyncio
import json
import math
import os
import re
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from aiohttp import web
from conftest import ROOT, all_batches, free_port, lines, make_samples, run_trainer, write_run
from safetensors.numpy import save_file

from configs import RunError
from configs.models import toy as tiny_model
from orchestrator import save_batch
from tools import evaluate, show
from tools.evaluate import pass_at, wilson

OPENAI = {
    "top_p",
    "model",
    "messages",
    "prompt",
    "temperature",
    "max_tokens",
    "stop",
    "tools",
}  # and no more: no n, no vLLM


class PlainServer:
    """Only what every OpenAI-compatible server has; anything else in a request is refused. answer(body) -> message."""

    def __init__(self, answer):
        self.answer, self.bodies, self.port, self.loop = answer, [], free_port(), asyncio.new_event_loop()
        self.url = f"http://127.0.0.1:{self.port}/v1"

    async def models(self, request):
        return web.json_response({"object": "list", "data": [{"id": "plain-model", "object": "model"}]})

    async def chat(self, request):
        body = await request.json()
        self.bodies.append(body | {"authorization": request.headers["Authorization"]})
        if set(body) - OPENAI:
            return web.json_response({"error": {"message": f"unknown keys {set(body) - OPENAI}"}}, status=400)
        message = {"role": "assistant"} | self.answer(body)
        choice = {"index": 0, "finish_reason": "stop", "message": message, "text": message["content"]}
        return web.json_response(
            {"id": "1", "object": "chat.completion", "created": 0, "model": "m", "choices": [choice]}
        )

    def __enter__(self):
        async def serve():
            app = web.Application()
            app.add_routes([web.get("/v1/models", self.models), web.post("/v1/chat/completions", self.chat)])
            app.add_routes([web.post("/v1/completions", self.chat)])
            self.runner = web.AppRunner(app, shutdown_timeout=0.1)
            await self.runner.setup()
            await web.TCPSite(self.runner, "127.0.0.1", self.port).start()
            up.set()

        up = threading.Event()
        self.loop.create_task(serve())
        threading.Thread(target=self.loop.run_forever, daemon=True).start()
        assert up.wait(10)
        return self

    def __exit__(self, *_):
        asyncio.run_coroutine_threadsafe(self.runner.cleanup(), self.loop).result(10)
        self.loop.call_soon_threadsafe(self.loop.stop)


def counting():
    """Every third answer is longer."""
    count = iter(range(10**6))
    return lambda body: {"content": "abc" if next(count) % 3 else "abcdef"}


def trained_texts(batch, tokenizer):
    """What is trained of each sample."""
    parts = zip(*(batch.columns[name].split(batch.lens.tolist()) for name in ("tokens", "mask")))
    return [tokenizer.decode(tokens[mask].tolist()) for tokens, mask in parts]


def test_eval_on_a_plain_server(tmp_path, models, monkeypatch):
    """The command line as a user gives it, in a process of its own."""
    toml = write_run(tmp_path, models["untied"], 1, '{ kind = "letter" }')
    with PlainServer(counting()) as server:
        command = [sys.executable, "tools/evaluate.py", str(toml), "--eval", "--base-url", server.url, "--n", "5",
                   "--rollouts-per-example", "4", "--out", str(tmp_path / "eval.jsonl")]  # fmt: skip
        env = {"PATH": "/usr/bin:/bin", "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}", "OPENAI_API_KEY": "secret"}
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=ROOT, env=env)
    assert done.returncode == 0, done.stderr
    assert "think_env: 5 examples x 4 rollouts, plain-model at " + server.url in done.stdout
    written = lines(tmp_path / "eval.jsonl")
    mean = sum(line["reward"] for line in written) / 20
    assert len(written) == 20 and f"avg@4 {mean:.3f} +- " in done.stdout
    assert "pass@1 " in done.stdout and "pass@2 " in done.stdout and "pass@4 " in done.stdout and "(95 %" in done.stdout
    assert "of the examples have rewards that differ" in done.stdout and "long_answer 0.3" in done.stdout
    assert {body["authorization"] for body in server.bodies} == {"Bearer secret"} and "secret" not in done.stdout
    assert {body["top_p"] for body in server.bodies} == {1.0}  # else vLLM takes generation_config.json's
    assert len(server.bodies) == 20 and not list(tmp_path.glob("run/batches/*"))


@pytest.mark.parametrize(
    "kind, advice", [("zero", "too hard: no reward in 12 attempts"), ("constant", "too easy: 0.8")]
)
def test_rules_of_thumb(kind, advice, tmp_path, models, capsys):
    toml = write_run(tmp_path, models["untied"], 1, f'{{ kind = "{kind}" }}')
    with PlainServer(counting()) as server:
        args = ["--base-url", server.url, "--model", "m", "--n", "3", "--rollouts-per-example", "4"]
        evaluate.main([str(toml), "--eval", *args])
    assert advice in capsys.readouterr().out and {body["model"] for body in server.bodies} == {"m"}


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


def test_a_server_that_always_fails_ends_with_4(tmp_path, models):
    toml = write_run(tmp_path, models["untied"], 1, '{ kind = "letter" }')
    with PlainServer(lambda body: 1 / 0) as server, pytest.raises(RunError, match="every rollout failed") as e:
        evaluate.main([str(toml), "--eval", "--base-url", server.url, "--n", "1", "orchestrator.generation_timeout=2"])
    assert e.value.code == 4


def test_an_address_without_a_server_or_a_count_that_is_none_ends_with_2(tmp_path, models, capsys):
    toml, url = write_run(tmp_path, models["untied"], 1, '{ kind = "letter" }'), f"http://127.0.0.1:{free_port()}/v1"
    with pytest.raises(RunError, match=f"{url} does not list a model") as e:
        evaluate.main([str(toml), "--eval", "--base-url", url])
    assert e.value.code == 2
    for count in ("x", "0", "-3"):
        with pytest.raises(SystemExit) as e:
            evaluate.main([str(toml), "--generate", count, "out.jsonl"])
        assert e.value.code == 2
        assert f"must be a number above 0, not '{count}'" in capsys.readouterr().err


def test_the_readmes_commands(tmp_path, models):
    """Those of tools/README.md, as they stand there but for the placeholders, by a shell."""
    toml = write_run(tmp_path, models["untied"], 1, '{ kind = "letter" }')
    text, out = (ROOT / "tools" / "README.md").read_text(), tmp_path / "out.jsonl"
    commands = re.findall(r"^python tools/evaluate.py .*", text, re.MULTILINE)
    with PlainServer(counting()) as server:
        given = {"config.toml": toml, "out.jsonl": out, "https://.../v1": server.url, "NAME": "mine", " 1000 ": " 80 "}
        for command in commands:
            for placeholder, value in given.items():
                command = command.replace(placeholder, str(value))
            env = os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
            subprocess.run(command, shell=True, cwd=ROOT, env=env, check=True, capture_output=True, timeout=120)
    assert len(commands) == 3 and {body["model"] for body in server.bodies} == {"mine"}
    assert len(lines(out)) == 80 and len(server.bodies) > 80 and list((tmp_path / "run-offline" / "batches").iterdir())


def test_generate_then_train_offline(tmp_path, models, capsys):
    """Rollouts of a plain server -> JSON Lines -> batches -> trainer.py, as rewards and as demonstrations."""
    toml = write_run(tmp_path, models["untied"], 1, '{ kind = "letter" }')
    with PlainServer(counting()) as server:
        more = ["--base-url", server.url, "--rollouts-per-example", "4"]
        evaluate.main([str(toml), "--generate", "40", str(tmp_path / "data.jsonl"), *more])
    written = lines(tmp_path / "data.jsonl")
    assert len(written) == 40 and {line["example"] for line in written} == set(range(10))
    evaluate.main([str(toml), "--offline", str(tmp_path / "data.jsonl")])
    batches = all_batches(tmp_path / "run-offline")
    assert sum(b.info["rollouts"] for b in batches) == 40 and batches[0].info["offline"]
    tokenizer = tiny_model.make_tokenizer()
    for batch in batches:
        for s, text in zip(batch.samples, trained_texts(batch, tokenizer)):
            assert text in ("abc<|end|>", "abcdef<|end|>") and (s["reward"] == 1) == (text == "abcdef<|end|>")
            assert len({x["reward"] for x in batch.samples if x["group"] == s["group"]}) == 2
        assert batch.columns["old_logp"][batch.columns["mask"]].isnan().all()  # nobody knows it
    with pytest.raises(RunError, match="holds batches: choose another run_name"):
        evaluate.main([str(toml), "--offline", str(tmp_path / "data.jsonl")])
    assert "next: torchrun trainer.py" in capsys.readouterr().out
    replay = tmp_path / "run-offline" / "batches"
    run_trainer(toml, "--replay", replay, "max_steps=9")
    again = run_trainer(toml, "--replay", replay, "max_steps=9", "trainer.learning_rate=1e-9", check=False)
    assert again.returncode == 2 and "choose another run_name" in again.stderr  # and not: nothing done, without a word
    shutil.copytree(replay, tmp_path / "more")
    shutil.copy(replay / "step_000000.safetensors", tmp_path / "more" / "step_000009.safetensors")
    other = run_trainer(toml, "--replay", tmp_path / "more", "max_steps=9", check=False)
    assert other.returncode == 2 and f"replay was '{replay}', now '{tmp_path}/more'" in other.stderr
    metrics = lines(tmp_path / "run-replay-cispo" / "metrics.jsonl")
    assert len(metrics) == len(batches) and metrics[0]["policy/kl_sampler"] == pytest.approx(0, abs=1e-6)
    sft = ["run_name=sft", "trainer.loss=sft"]
    evaluate.main([str(toml), "--offline", str(tmp_path / "data.jsonl"), "--min-reward", "1", *sft])
    assert sum(b.info["rollouts"] for b in all_batches(tmp_path / "sft-offline")) == 14
    run_trainer(toml, "--replay", tmp_path / "sft-offline" / "batches", *sft, "trainer.learning_rate=1e-2")
    assert (tmp_path / "sft-replay-sft" / "final" / "model.safetensors").is_file()


def test_bad_lines_of_offline_files_are_named(tmp_path, models, capsys):
    toml = write_run(tmp_path, models["untied"], 1, '{ kind = "letter" }')
    say = [{"role": "assistant", "content": "a"}]
    ask = [{"role": "user", "content": "b"}]
    for text, problem in {
        '{"prompt": "a"}': "line 1 has no completion",
        '{"question": "a", "completion": "b"}': "line 1 has no prompt",
        json.dumps({"prompt": ask, "completion": "a", "reward": 1}): "line 1: its completion must be messages.*'a'",
        json.dumps({"prompt": "a", "completion": say, "reward": 1}): "line 1: its completion must be text",
        json.dumps({"prompt": ask, "completion": [{"content": "a"}], "reward": 1}): "line 1: .* be messages",
        json.dumps({"prompt": ask, "completion": say, "reward": "x"}): "line 1: reward = 'x' must be a finite number",
        json.dumps({"prompt": ask, "completion": say, "reward": math.nan}): "line 1: reward = nan must be",
        "{": "line 1 of .*: Expecting",
        json.dumps({"prompt": ask, "completion": say}): "nothing to learn from.*'unscored': 1",
        json.dumps({"prompt": ask, "completion": say, "reward": 1}): "nothing to learn from.*'flat': 1",
        json.dumps(
            {"prompt": ask, "completion": [say[0] | {"content": "a" * 99}], "reward": 1}
        ): "longer than max_seq_len",
        json.dumps({"prompt": ask, "completion": [], "error": "TimeoutError"}): "'failed': 1",
    }.items():
        (tmp_path / "data.jsonl").write_text(text + "\n")
        with pytest.raises((RunError, ValueError), match=problem) as e:
            evaluate.main([str(toml), "--offline", str(tmp_path / "data.jsonl")])
        assert e.value.code == 4
    cut = {"prompt": ask, "completion": say, "truncated": True}  # with rewards by turn, which go with the whole one
    rows = [json.dumps(cut | {"reward": x, "turn_rewards": [x]}) + "\n" for x in (1.0, 2.0)]
    (tmp_path / "data.jsonl").write_text("".join(rows))
    with pytest.raises(RunError, match="nothing to learn from.*'flat': 2"):
        more = ["orchestrator.zero_truncated_completions=true"]
        evaluate.main([str(toml), "--offline", str(tmp_path / "data.jsonl"), *more])


def test_conversations_become_samples_of_the_policys_tokens():
    tokenizer, talk = tiny_model.make_tokenizer(), []
    for i in range(2):
        talk += [{"role": "user", "content": f"q{i}"}, {"role": "assistant", "content": f"a{i}"}]
    (one,) = tiny_model.tokenize_conversation(tokenizer, talk)
    said = [t for t, m in zip(one["tokens"], one["mask"]) if m]
    assert tokenizer.decode(said) == "a0<|end|>a1<|end|>" and tokenizer.decode(one["tokens"]) == tokenizer.decode(
        tokenizer.apply_chat_template(talk, return_dict=False)
    )
    assert {t for t, m in zip(one["turn"], one["mask"]) if m} == {0, 1}
    tokenizer.chat_template += "\n"  # written after the end token: never the policy's to say
    assert tiny_model.tokenize_conversation(tokenizer, talk[:2])[0]["tokens"][-1] == tokenizer.eos_token_id


def test_offline_trains_what_the_policy_said_and_nothing_else(tmp_path, models):
    """Answers in the prompt (few-shot) are not the policy's; a truncated one never said its end."""
    toml = write_run(tmp_path, models["untied"], 1, '{ kind = "letter" }')
    shots = [
        {"role": "user", "content": "1"},
        {"role": "assistant", "content": "one"},
        {"role": "user", "content": "2"},
    ]
    data = [{"prompt": shots, "completion": [{"role": "assistant", "content": c}], "reward": r, "truncated": c == "tw"}
            for c, r in (("two", 1.0), ("tw", 0.0), ("no", 0.5))]  # fmt: skip
    (tmp_path / "data.jsonl").write_text("\n".join(map(json.dumps, data)))
    evaluate.main([str(toml), "--offline", str(tmp_path / "data.jsonl")])
    (batch,) = all_batches(tmp_path / "run-offline")
    tokenizer = tiny_model.make_tokenizer()
    assert trained_texts(batch, tokenizer) == ["two<|end|>", "", "no<|end|>"]
    assert [s["reward"] for s in batch.samples] == [1.0, 0.0, 0.5] and {s["num_turns"] for s in batch.samples} == {1}
    evaluate.main([str(toml), "--offline", str(tmp_path / "data.jsonl"), "trainer.loss=sft", "run_name=sft"])
    (batch,) = all_batches(tmp_path / "sft-offline")
    assert trained_texts(batch, tokenizer) == ["two<|end|>", "no<|end|>"]


def test_intervals_and_pass_at_k():
    low, high = wilson(0.5, 10)  # the textbook's 5 of 10
    assert (round(low, 4), round(high, 4)) == (0.2366, 0.7634)
    low, high = wilson(0.0, 20)
    assert low == pytest.approx(0, abs=1e-12) and 0.15 < high < 0.17
    assert pass_at(2, [[1, 0, 0, 0]])[0] == pytest.approx(0.5) and pass_at(1, [[1, 0], [0, 0]])[0] == 0.25
    assert pass_at(2, [[1, 0.5], [0, 0], [2]]) == (0.5, 2)  # the third has too few


def test_nothing_needs_tools():
    """tools/ may be deleted: nothing imports it."""
    for path in [*ROOT.glob("*.py"), *(ROOT / "configs").glob("**/*.py")]:
        imports = re.findall(r"^\s*(?:import|from) tools\b", path.read_text(), re.MULTILINE)
        assert not imports, path


# --- reading rollouts -------------------------------------------------------------------------------------------------


@pytest.fixture
def small_run(models, tmp_path):
    """Two steps of two groups of two, of which the second group of a step is flat; the second step is not trained."""
    (tmp_path / "batches").mkdir()
    config = f'model = "{models["untied"]}"\nenv.id = "mine"\n[trainer]\nloss = "cispo"\nadvantage = "mean"\n'
    (tmp_path / "config.toml").write_text(config)
    told = []
    for step in range(2):
        samples = make_samples(4, seed=step, group=2)
        for i, s in enumerate(samples):
            s |= {"env": "task", "reward": [0.0, 1.0, 0.5, 0.5][i], "num_turns": 1}
            about = {key: s[key] for key in ("env", "group", "rollout", "reward", "num_turns")}
            about |= {
                "step": step,
                "example": 7 + s["group"],
                "truncated": False,
                "error": "",
                "metrics": {"exact": 0.5},
            }
            about |= {"prompt": [{"role": "user", "content": "why"}], "answer": "so"}
            about |= {"completion": [{"role": "assistant", "content": f"\x1b[2J {step} {i}"}]}
            told.append(about | {"dropped": "flat at reward 0.5" if s["group"] else ""})
        kept = [s for s in samples if not s["group"]]
        save_batch(tmp_path / "batches" / f"step_{step:06d}.safetensors", kept, {"rollouts": 2})
    (tmp_path / "rollouts.jsonl").write_text("".join(json.dumps(x) + "\n" for x in told) + '{"step": 2, "rew')
    logp = np.concatenate([np.array(s["old_logp"]) - 0.05 * np.array(s["mask"]) for s in make_samples(4, group=2)[:2]])
    save_file({"logp": logp.astype(np.float32)}, tmp_path / "batches" / "logp_000000.safetensors")
    return tmp_path


def shown(capsys, run, *args):
    show.main([str(run), *args])
    return capsys.readouterr().out


def test_reading_rollouts(small_run, capsys):
    text = shown(capsys, small_run, "--n", "3")
    assert text.count("=== step 1, ") == 3 and "\x1b" not in text and "\\x1b[2J 1 " in text
    assert "reward 1.000 (exact 0.5)" in shown(capsys, small_run, "--sort", "reward", "--n", "1")
    assert shown(capsys, small_run, "--min-reward", "2").strip() == "no such rollout"
    text = shown(capsys, small_run, "--max-reward", "0", "--step", "0")
    assert text.count("===") == 1 and "[answer wanted] so" in text
    assert "dropped: flat at reward 0.5" in shown(capsys, small_run, "--row", "8", "--n", "1")


def test_each_sampled_token_has_the_shade_of_its_value(small_run, capsys):
    masks = [s["mask"] for s in make_samples(4, group=2)[:2]]
    text = shown(capsys, small_run, "--step", "0", "--color", "advantage", "--n", "99")
    assert text.count("[---]") == sum(masks[0]) and text.count("[+++]") == sum(masks[1]) and text.count("===") == 2
    text = shown(capsys, small_run, "--step", "0", "--color", "diff", "--n", "99")
    assert text.count("[--]") == sum(map(sum, masks))  # 0.05 nats
    assert "[--]" not in shown(capsys, small_run, "--step", "1", "--color", "diff", "--n", "99")  # not trained yet


def test_an_advantage_of_a_module_is_found(small_run, capsys, monkeypatch):
    """Of configs/, or beside the TOML of the run, as the run found it."""
    config = (small_run / "config.toml").read_text()
    (small_run / "elsewhere").mkdir()
    own = "def negative(r_G, group):\n    return r_G.mean() - r_G\n"
    (small_run / "elsewhere" / "own_advantage.py").write_text(own)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path != str(ROOT / "configs")])
    monkeypatch.delitem(sys.modules, "losses", raising=False)
    for name in ("losses:permuted", "own_advantage:negative"):
        text = f'origin = "{small_run}/elsewhere/my.toml"\n{config}'.replace('"mean"', f'"{name}"')
        (small_run / "config.toml").write_text(text)
        show.values_of.cache_clear()
        colored = shown(capsys, small_run, "--step", "0", "--color", "advantage", "--n", "99", "--sort", "reward")
        assert "[+++]" in colored and "[---]" in colored
    assert colored.index("[---]") < colored.index("[+++]")  # the better one comes first, with less than the mean


@pytest.mark.parametrize("low, high, rewards", [(None, None, [-1, 0, 1, None]), (0, None, [0, 1]), (None, 0, [-1, 0])])
def test_rollouts_are_chosen_by_reward(low, high, rewards, tmp_path):
    rows = [json.dumps({"step": 0, "env": "a", "example": 1, "dropped": "flat", "reward": x}) for x in (-1, 0, 1, None)]
    (tmp_path / "rollouts.jsonl").write_text("\n".join(rows) + '\n{"step": 1, "rew')  # and half of one
    args = SimpleNamespace(step=None, env="a", row=None, min_reward=low, max_reward=high, color=None)
    assert [line["reward"] for line in show.chosen(tmp_path, args)] == rewards
    args.color = "advantage"
    assert not list(show.chosen(tmp_path, args))  # none was trained on


# --- tmux -------------------------------------------------------------------------------------------------------------


def test_tmux_opens_a_pane_per_role(models, tmp_path):
    """What tmux is asked for; a stand-in notes it."""
    toml = write_run(tmp_path, models["untied"], 1, '{ kind = "noise" }')
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "tmux").write_text(f'#!/bin/sh\necho "$TMUX|$*" >> {tmp_path}/asked\n')
    (tmp_path / "bin" / "tmux").chmod(0o755)
    path = f"{tmp_path / 'bin'}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    command, env = ["bash", "tools/tmux.sh", str(toml), "trainer.loss=grpo"], os.environ | {"TMUX": "1", "PATH": path}
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=env)
    assert done.returncode == 0 and "attach" in done.stdout, done.stderr
    asked = (tmp_path / "asked").read_text().splitlines()
    assert all(x.startswith("|-L rolemodel-run-") for x in asked)  # TMUX is not handed on
    assert "new-session" in asked[0] and f"bash launch.sh {toml} trainer.loss=grpo" in asked[0]
    for role in ("trainer", "orchestrator", "inference"):
        assert sum("split-window" in x and f"run/logs/{role}.log" in x for x in asked) == 1
    assert not list((tmp_path / "run" / "batches").iterdir())
