"""On-policy distillation: a teacher scores what the policy says, and each token learns from the difference (the term
"teacher" of trainer.compute_loss). [teacher] in a TOML turns it on; no reward is needed.

    [teacher]
    weight = 1.0
    base_url = "http://127.0.0.1:9000"    # any vLLM with the same tokenizer
    prompt = ""                           # "module:function": what the teacher reads in place of the prompt

Without base_url the policy is its own teacher, on the run's servers. That makes sense with a prompt that tells it more,
e.g. the answer, an error message, or what another rollout of the group did well (SDFT, 2601.19897; OPSD, 2601.18734;
SDPO, 2601.20802):

    def prompt(state, states):            # this rollout's state, and those of its group
        return state["prompt"] + [{"role": "user", "content": f"The answer is {state['answer']}."}]

Token ids are sent, never text, so the teacher scores exactly the tokens that the policy sampled."""

import asyncio

import httpx
import numpy as np

from configs import find, served_name
from configs.runtime.role import CONFIG, DIED, RunError, require
from env import Truncated, call, ensure
from orchestrator import ServerError, guard

SAMPLE = "Hello, wörld! def f(x):\n    return 2 * x  # 数学, 1234567 <think>"


def check(cfg, tokenizer):
    """Raises RunError if a teacher elsewhere does not answer, or has another vocabulary."""
    t = cfg.teacher
    if not t.base_url:
        return
    try:
        with httpx.Client(base_url=t.base_url, timeout=30, trust_env=False) as http:
            names = [model["id"] for model in http.get("/v1/models").json()["data"]]
            body = {"model": t.model or names[0], "prompt": SAMPLE, "add_special_tokens": False}
            reply = http.post("/tokenize", json=body).json()
    except (httpx.TransportError, ValueError, LookupError) as e:
        raise RunError(DIED, f"teacher.base_url = {t.base_url!r}: no vLLM answers there: {e!r}") from e
    require(not t.model or t.model in names, CONFIG, f"teacher.model = {t.model!r}: the teacher has only {names}")
    no_ids = f"teacher.base_url = {t.base_url!r}: its /tokenize answered {str(reply)[:200]}: no vLLM, or another model?"
    require("tokens" in reply, CONFIG, no_ids)
    what = f"teacher.base_url = {t.base_url!r}: its vocabulary is another than the policy's"
    require(reply["tokens"] == tokenizer.encode(SAMPLE, add_special_tokens=False), CONFIG, what)


async def teach(rollouts, group, client):
    """Gives the sequences of a group's rollouts the fields teacher and teacher_logp. A rollout is lost if its teacher
    fails. group: the group's index."""
    states = [r.state for r in rollouts]
    timeout = client.cfg.orchestrator.generation_timeout
    work = [guard([r], teach_one(r, states, group, client), timeout) for r in rollouts if r.reward is not None]
    await asyncio.gather(*work)


async def teach_one(r, states, group, client):
    t = client.cfg.teacher
    taught = [s for s in r.sequences if s["trainable"] and s["mask"].any()]
    what = f"teacher.prompt stands for one prompt, but the rollout has {len(taught)} sequences: forks, or agents"
    ensure(len(taught) < 2 or not t.prompt, what)
    for s in taught:
        tokens = s["tokens"].tolist()
        first = int(s["mask"].argmax())  # the first token that the policy said
        prefix = tokens[:first]
        if t.prompt:
            messages = await call(find(t.prompt), state=r.state, states=states)
            kwargs = client.cfg.sampling.chat_template_kwargs
            body = {"messages": messages, "add_generation_prompt": True, "chat_template_kwargs": kwargs}
            body["tools"] = r.state.get("tools")
            prefix = (await post(client, group, "/tokenize", body))["tokens"]
        s["teacher"] = t.weight * s["mask"].astype(np.float32)
        ids = prefix + tokens[first:]
        missing = 0
        if len(ids) == client.cfg.run.max_seq_len:  # vLLM wants room for a token of its own
            missing = 1
            s["teacher"][-1] = 0.0
        logps = await log_probabilities(client, group, ids[: len(ids) - missing])
        s["teacher_logp"] = np.array([0.0] * first + logps[len(prefix) :] + [0.0] * missing, np.float32)


async def log_probabilities(client, group, ids):
    """The teacher's log-probability of each token, given those before it; 0 for the first."""
    body = {"prompt": ids, "max_tokens": 1, "prompt_logprobs": 0, "temperature": 1.0}
    body["cache_salt"] = f"{client.attempt}.{client.version}"
    reply = await post(client, group, "/v1/completions", body)
    found = reply["choices"][0]["prompt_logprobs"]
    ensure(len(found) == len(ids), f"the teacher scored {len(found)} tokens of {len(ids)}")
    logps = [0.0]
    for token, candidates in zip(ids[1:], found[1:]):
        logps.append(candidates[str(token)]["logprob"])
    ensure(np.isfinite(logps).all(), "the teacher's log-probabilities are not finite")
    return logps


async def post(client, group, path, body):
    """The reply of the teacher, here or elsewhere, to a request."""
    t = client.cfg.teacher
    name = t.model
    if not t.base_url:
        name = served_name(client.cfg, None if t.frozen else client.version)
    body = {"model": name} | body if name else body
    try:
        return await client.post(group, path, body, t.base_url)
    except Truncated:
        raise ServerError(400, f"teacher: {path} answered that the prompt is too long") from None
    except ServerError as e:
        raise ServerError(e.status, f"teacher: {e}") from None
