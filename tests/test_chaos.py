"""200 random mixes of bad rewards, completions and replies: the loss stays finite or the run ends with exit code 4, and
every rollout is counted once."""

import asyncio
import json
import random
import time
from collections import Counter

import pytest
import torch
import transformers
from conftest import RUN_TOML, all_batches, lines, orchestrate, some

import orchestrator
import trainer
from configs import load_config
from configs.environments.rubrics import GroupRubric
from configs.models.demonstrations import as_template_sees
from configs.runtime.role import RunError
from env import MultiTurnEnv, Truncated

REWARDS = {
    "nan": float("nan"), "inf": float("inf"), "-inf": -float("inf"), "none": None, "text": "1", "true": True,
    "huge": 1e30, "list": [1.0, 2.0, 3.0, 4.0, 5.0],
}  # fmt: skip
TEXTS = {"plain": "hello", "empty": "", "nothing": None, "surrogate": "a\ud800b", "nul": "a\0b", "long": "x" * 10**4}
TOKENS = {"some": 3, "eos": 1, "none": 0, "most": 20}
FAULTS = ["logprobs none", "logprobs nan", "logprobs -inf", "logprobs short", "logprobs long", "logprobs positive",
          "no ids", "no choices", "raise", "hang"]  # fmt: skip


class Talk(MultiTurnEnv):
    def is_completed(self, messages, state):
        return len(messages[-1]["content"]) % 2

    def env_response(self, messages, state):
        return [{"role": "user", "content": messages[-1]["content"][::-1]}]


class Chaos:
    """An environment and a server that misbehave, each time otherwise, as often as `share` says."""

    def __init__(self, seed, tokenizer):
        self.rng, self.tokenizer = random.Random(seed), tokenizer
        self.share = self.rng.choice([0.0, 0.1, 0.3, 0.6, 0.95])
        self.issued = 0

    def bad(self):
        return self.rng.random() < self.share

    def environment(self):
        def reward(completion):
            if not self.bad():
                return self.rng.random()
            kind = self.rng.choice([*REWARDS, "raise", "hang"])
            if kind == "hang":
                time.sleep(0.1)
            if kind == "raise":
                raise ZeroDivisionError
            return REWARDS.get(kind, 0.5)

        def of_group(completions):
            return [1.0] * (len(completions) - (self.bad() and self.bad()))

        rows = [{"question": f"row {i}"} for i in range(17)]
        rubric = GroupRubric([reward, of_group][: self.rng.choice([1, 2])])
        return Talk(rows, max_turns=3, rubric=rubric)

    async def post(self, client, server, path, body):
        fault = self.rng.choice(FAULTS) if self.bad() else ""
        if fault == "raise":
            raise ConnectionError("the server is gone")
        if fault == "hang":
            await asyncio.sleep(5)
        messages = [message | {"content": message["content"].encode(errors="replace").decode()}
                    for message in map(as_template_sees, body["messages"])]  # fmt: skip
        prompt_ids = self.tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        room = client.cfg.run.max_seq_len - len(prompt_ids)
        if room < 1:
            raise Truncated
        choices = [] if fault == "no choices" else [self.choice(min(body["max_tokens"], room), fault)]
        return {"choices": choices, "prompt_token_ids": prompt_ids}

    def choice(self, max_tokens, fault):
        num = min(TOKENS[self.rng.choice([*TOKENS])] if self.bad() else 4, max_tokens)
        ids, logps = [self.rng.randrange(7, 102) for _ in range(num)], [-self.rng.random() * 5 for _ in range(num)]
        wrong = {"nan": float("nan"), "-inf": -float("inf"), "positive": 0.5}.get(fault.removeprefix("logprobs "))
        logps = [wrong] * num if wrong is not None else logps
        logps = {"logprobs short": logps[:-1], "logprobs long": [*logps, -1.0]}.get(fault, logps)
        message = {"content": TEXTS[self.rng.choice([*TEXTS])] if self.bad() else "hello"}
        content = None if fault == "logprobs none" else [{"logprob": x} for x in logps]
        done = "length" if num == max_tokens else "stop"
        ids = None if fault == "no ids" else ids
        return {"message": message, "token_ids": ids, "logprobs": {"content": content}, "finish_reason": done}


@pytest.fixture(scope="module")
def policy(models, tmp_path_factory):
    path = tmp_path_factory.mktemp("chaos") / "chaos.toml"
    path.write_text(RUN_TOML.format(model=models["untied"], out=path.parent, steps=1, env='[env]\nid = "think_env"'))
    return trainer.build_policy(load_config(path))


@pytest.mark.parametrize("block", some(range(10), 1))
def test_random_mixes(block, policy, models, tmp_path, monkeypatch):
    tokenizer = transformers.AutoTokenizer.from_pretrained(models["untied"])
    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", lambda path, **_: tokenizer)
    ends = Counter()
    for seed in range(20 * block, 20 * block + 20):
        chaos = Chaos(seed, tokenizer)
        ends[one_mix(seed, chaos, policy, models, tmp_path / str(seed), monkeypatch)] += 1
    assert sum(ends.values()) == 20 and ends["trained"] >= 5, ends


def one_mix(seed, chaos, policy, models, path, monkeypatch):
    path.mkdir()
    env = '[env]\nid = "think_env"'
    (path / "run.toml").write_text(RUN_TOML.format(model=models["untied"], out=path, steps=1, env=env))
    more = (f"orchestrator.max_error_share={seed % 3 / 2}", "orchestrator.generation_timeout=0.3", f"seed={seed}")
    cfg = load_config(
        path / "run.toml", [*more, "orchestrator.sampling.max_tokens=20", 'inference.urls=["http://127.0.0.1"]']
    )
    monkeypatch.setattr(orchestrator.Client, "post", lambda self, *args: chaos.post(self, *args))
    monkeypatch.setattr("orchestrator.load_environment", lambda *args: chaos.environment())
    try:
        run_dir = orchestrate(cfg)
    except RunError as e:
        assert e.code == 4, e
        return "exit 4"
    rollouts = lines(run_dir / "rollouts.jsonl")
    for n, batch in enumerate(all_batches(run_dir)):
        m, mine = batch.info["metrics"], [r for r in rollouts if r["step"] == n]
        scored, failed = ([r for r in mine if bool(r["error"]) == is_bad] for is_bad in (False, True))
        assert len(scored) + len(failed) == len(mine) == m["rollout/num"] and len(failed) == m["rollout/errors"]
        assert m["rollout/errors"] == sum(v for k, v in m.items() if k.startswith("error/"))
        assert all(r["reward"] is None for r in failed) and all(abs(r["reward"]) <= 2 for r in scored)
        groups = Counter(r["group"] for r in mine)
        kept_or_not = sum(m[f"group/{why}"] for why in ("kept", "flat", "failed", "empty"))
        assert set(groups.values()) == {4} and len(groups) == kept_or_not
        trained = {(s["group"], s["rollout"]) for s in batch.sequences}
        assert trained <= {(r["group"], r["rollout"]) for r in scored if not r["dropped"]}
        params = list(policy.trained().values())
        metrics, _ = trainer.train_step(policy, torch.optim.AdamW(params, 1e-4), batch, n, cfg)
        assert metrics["loss"] == metrics["loss"] and abs(metrics["loss"]) < 1e3 and not metrics["optim/skipped"]
        assert all(p.isfinite().all() for p in params)
    json.dumps(rollouts, allow_nan=False)
    return "trained"
