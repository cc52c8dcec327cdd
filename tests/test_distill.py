"""Distillation: what the teacher is asked, and what it says of each token."""

import asyncio
import json
from types import SimpleNamespace

import httpx
import numpy as np
import pytest
import torch
from conftest import all_batches, launch, lines, write_run
from safetensors.torch import load_file
from think_env import DROPS
from transformers import AutoModelForCausalLM

import trainer
from configs import served_name
from configs.algorithms import distill
from configs.runtime.role import RunError

TASK = '[env]\nid = "distill_tasks"\nargs = {{ kind = "{}" }}'
ON = ["teacher.weight=0.5", "orchestrator.max_staleness=0"]


@pytest.fixture
def distilled(run):
    def go(kind, *overrides, steps=2, **kwargs):
        run_dir = run(steps, TASK.format(kind), *ON, *overrides, **kwargs)
        return lines(run_dir / "rollouts.jsonl"), all_batches(run_dir)

    return go


def logp_of(network, ids):
    with torch.no_grad():
        logits = network(torch.tensor([ids])).logits[0, :-1]
    return [0.0, *logits.log_softmax(-1).gather(-1, torch.tensor(ids[1:])[:, None])[:, 0].tolist()]


@pytest.fixture
def network(models):
    return AutoModelForCausalLM.from_pretrained(models["untied"], dtype=torch.float32).eval()


@pytest.mark.parametrize("kind", ["single", "turns"])
def test_each_token_has_the_teachers_log_probability(distilled, network, kind):
    """The policy itself with the same prompt: also what the sampler said. Groups without any reward are trained on."""
    found, batches = distilled(kind)
    assert {r["dropped"] for r in found} == {""} and {r["reward"] for r in found} == {0.0}
    for s in batches[0].sequences + batches[1].sequences:
        expected = np.array(logp_of(network, s["tokens"].tolist()))
        is_own = s["mask"].numpy()
        assert np.abs(s["teacher_logp"].numpy() - expected)[is_own].max() < 1e-4
        assert (s["teacher"].numpy() == 0.5 * is_own).all() and is_own.any()
        assert np.abs(s["teacher_logp"] - s["old_logp"]).numpy()[is_own].max() < 1e-4


@pytest.mark.parametrize("prompt", ["hint", "sibling"])
@pytest.mark.parametrize("kind", ["single", "turns"])
def test_a_teacher_that_knows_more_reads_another_prompt(distilled, network, run, kind, prompt):
    """Of the same tokens, those after the policy's own prompt."""
    import distill_tasks

    found, batches = distilled(kind, f"teacher.prompt=distill_tasks:{prompt}", template="", steps=1)
    groups = {}
    for r in found:
        groups.setdefault(r["group"], []).append(r)
    by_rollout = {(r["group"], r["rollout"]): r for r in found}
    differ = 0
    for s in batches[0].sequences:
        state = by_rollout[s["group"], s["rollout"]]
        if prompt == "hint":
            messages = distill_tasks.hint(state)
        else:
            messages = distill_tasks.sibling(state, groups[s["group"]])
        prefix = run.tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        first = int(s["mask"].int().argmax())
        ids = prefix + s["tokens"].tolist()[first:]
        expected = np.array(logp_of(network, ids))[len(prefix) :]
        is_own = s["mask"].numpy()[first:]
        assert np.abs(s["teacher_logp"].numpy()[first:] - expected)[is_own].max() < 1e-4
        differ += np.abs(s["teacher_logp"] - s["old_logp"]).numpy()[first:][is_own].max() > 1e-3
    assert differ == len(batches[0].sequences)


def test_the_last_token_of_a_full_sequence_is_not_taught(distilled):
    """vLLM answers no prompt of max_seq_len tokens: without this the rollouts that fill the context would be lost."""
    found, batches = distilled("single", "orchestrator.sampling.max_tokens=63")
    assert not any(r["error"] for r in found)
    full = [s for batch in batches for s in batch.sequences if len(s["tokens"]) == 64]
    assert full and all(s["teacher"][-1] == 0 and s["teacher"][-2] == 0.5 and s["mask"][-1] for s in full)


def test_a_prompt_for_the_teacher_stands_for_one_conversation(run, tmp_path):
    """The template drops what the policy said, so each turn is a sequence of its own."""
    template = tmp_path / "drops.jinja"
    template.write_text(DROPS)
    with pytest.raises(RunError, match="DataError: teacher.prompt stands for one prompt, but the rollout has") as e:
        on = [*ON, "teacher.prompt=distill_tasks:hint", "orchestrator.max_error_share=0.5"]
        run(9, TASK.format("turns"), *on, f"chat_template={template}", template=str(template))
    assert e.value.code == 4


@pytest.mark.parametrize(
    "overrides, fake, error",
    [
        ([], {"teacher": "short"}, "DataError: the teacher scored"),
        ([], {"teacher": "404"}, "ServerError: teacher: http"),
        (["orchestrator.generation_timeout=0.5"], {"teacher": "hang"}, "TimeoutError"),
        (["teacher.prompt=distill_tasks:fails"], {}, "LookupError: no hint in fails, distill_tasks.py"),
    ],
)
def test_a_teacher_that_fails_loses_the_rollout_and_is_named(run, overrides, fake, error):
    with pytest.raises(RunError, match=f"were lost, mostly by {error}") as e:
        run(9, TASK.format("single"), *ON, *overrides, "orchestrator.max_error_share=0.5", fake=fake)
    assert e.value.code == 4


def test_a_teacher_elsewhere_is_checked_before_a_server_starts(run, fake_servers, models, tmp_path, monkeypatch):
    url = fake_servers()
    httpx.post(f"{url}/fake", json={})
    run_dir = run(1, TASK.format("single"), *ON, f"teacher.base_url={url}")
    assert all_batches(run_dir)[0].sequences[0]["teacher"].any()
    for override, code, what in (
        ("teacher.base_url=http://127.0.0.1:9", 3, "no vLLM answers there"),
        (f"teacher.base_url={url} teacher.model=other", 2, "the teacher has only .'run'."),
    ):
        with pytest.raises(RunError, match=what) as e:
            run(1, TASK.format("single"), *ON, *override.split())
        assert e.value.code == code
    from configs.algorithms import distill

    monkeypatch.setattr(httpx.Response, "json", without_tokens(httpx.Response.json))
    with pytest.raises(RunError, match="its /tokenize answered .*: no vLLM, or another model") as e:
        run(1, TASK.format("single"), *ON, f"teacher.base_url={url}")
    monkeypatch.undo()
    monkeypatch.setattr(distill, "SAMPLE", "\U0001f600 never seen <|user|>")
    monkeypatch.setattr("transformers.AutoTokenizer.from_pretrained", other_vocabulary(models["tools"]))
    with pytest.raises(RunError, match="its vocabulary is another than the policy's") as e:
        run(1, TASK.format("single"), *ON, f"teacher.base_url={url}")
    assert e.value.code == 2


def without_tokens(json):
    """Replies of a server that has no /tokenize."""

    def changed(reply):
        found = json(reply)
        return found if "data" in found else {"detail": "Not Found"}

    return changed


def other_vocabulary(path):
    """A tokenizer that shifts every id by one."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(path)
    encode = tokenizer.encode
    tokenizer.encode = lambda text, **options: [token + 1 for token in encode(text, **options)]
    return lambda *args, **kwargs: tokenizer


@pytest.mark.parametrize(
    "overrides, what",
    [
        (["teacher.prompt=distill_tasks:hint"], "left out without teacher.weight"),
        (["teacher.weight=1.0", "orchestrator.sampling.temperature=0.7"], "1.0 with teacher.weight"),
        (["teacher.weight=1.0", "teacher.prompt=distill_tasks:hnit"], "does not define 'hnit'"),
        (["teacher.weight=1.0", "teacher.frozen=true"], "false unless LoRA in 16 bits"),
    ],
)
def test_keys_that_do_nothing_or_cannot_go_together_are_refused(make_cfg, overrides, what):
    with pytest.raises(RunError, match=what):
        make_cfg(*overrides)


@pytest.mark.long
@pytest.mark.parametrize("kind", ["teacher", "demonstrations"])
def test_a_run_that_is_resumed_is_the_same_bit_for_bit(kind, models, tmp_path):
    """Four steps at once, and two and two: batches, with a teacher's words or with demonstrations, and the model."""
    talk = {"prompt": [{"role": "user", "content": "say a"}], "completion": [{"role": "assistant", "content": "a b"}]}
    (tmp_path / "talks.jsonl").write_text(json.dumps(talk))
    more = [*ON, "teacher.prompt=distill_tasks:hint"]
    if kind == "demonstrations":
        more = [
            f'orchestrator.order_args={{path="{tmp_path}/talks.jsonl"}}',
            "orchestrator.order=orders:Demonstrations",
        ]
    more += ["orchestrator.max_staleness=0", "checkpoint.every=2", "trainer.lr_scheduler_type=constant"]
    ends = []
    for name, starts in (("once", [4]), ("twice", [2, 4])):
        folder = tmp_path / name
        folder.mkdir()
        toml = write_run(
            folder, models["untied"], 4, TASK.format("single") if kind == "teacher" else "{ num_turns = 2 }"
        )
        for max_steps in starts:
            launch(toml, *more, f"max_steps={max_steps}")
        ends.append((all_batches(folder / "run"), load_file(folder / "run" / "final" / "model.safetensors")))
    (batches, model), (again, same) = ends
    for one, two in zip(batches, again, strict=True):
        for a, b in zip(one.sequences, two.sequences, strict=True):
            for field in ("tokens", "old_logp", "ce", "teacher", "teacher_logp"):
                assert field not in a or torch.equal(a[field], b[field]), field
    assert len(batches) == 4 and all(torch.equal(model[name], same[name]) for name in model)


# --- imitation of what the environment answers ------------------------------------------------------------------------


def test_echo_imitates_what_others_say_after_the_first_turn_and_leaves_the_policys_term_alone(run, make_cfg, tmp_path):
    """A rollout of three turns is one sequence here, with two answers of the environment."""
    run_dir = run(
        1, '[env]\nid = "distill_tasks"\nargs = { kind = "echo" }', "orchestrator.max_staleness=0", template=""
    )
    (batch,) = all_batches(run_dir)
    num = 0
    for s in batch.sequences:
        first = int(s["mask"].int().argmax())
        expected = ~s["mask"]
        expected[:first] = False
        assert torch.equal(s["ce"], 0.25 * expected) and not s["ce"][0]
        num += int(expected.sum())
    assert num > 0
    cfg = make_cfg("max_seq_len=128")

    def gradient(sequences):
        policy = trainer.build_policy(cfg)
        trainer.add_advantages(sequences, cfg.trainer)
        (micro,) = trainer.make_micros(policy, sequences, batch.info | {"max_tokens": 9}, cfg)
        logp_N, entropy_N = policy(micro)
        terms, _ = trainer.compute_loss(micro, logp_N, entropy_N, cfg.trainer)
        terms["policy"].sum().backward()
        return torch.cat([p.grad.flatten() for p in policy.parameters()]), terms

    with_echo, terms = gradient(batch.sequences)
    without, none = gradient([s | {"ce": 0 * s["ce"]} for s in batch.sequences])
    assert "ce" in terms and "ce" not in none
    assert (with_echo - without).abs().max() < 1e-6 < without.abs().max()


# --- one wrong line at a time: each of these alone saw a change of one line -------------------------------------------


def test_a_teacher_has_no_cache_of_another_version(make_cfg):
    """A policy that teaches itself changes at every sync; cached keys and values would be those of an older one."""
    asked = []

    class Client:
        cfg, attempt = make_cfg("teacher.weight=0.5"), 3

        async def post(self, group, path, body, base_url):
            asked.append(body)
            return {"choices": [{"prompt_logprobs": [None, {"2": {"logprob": -1.0}}]}]}

    client = Client()
    for client.version in (4, 5):
        assert asyncio.run(distill.log_probabilities(client, 0, [1, 2])) == [0.0, -1.0]
    assert asked[0]["cache_salt"] != asked[1]["cache_salt"]


def asks(state):
    return [{"role": "user", "content": "a"}]


@pytest.mark.parametrize("frozen", [True, False])
def test_a_frozen_teacher_is_the_base_and_reads_the_rollouts_tools(frozen, make_cfg):
    lora = ["trainer.use_lora=true", "trainer.dtype=bf16", "teacher.weight=0.5", "teacher.prompt=test_distill:asks"]
    asked = []

    class Client:
        cfg, attempt, version = make_cfg(*lora, f"teacher.frozen={str(frozen).lower()}"), 0, 7

        async def post(self, group, path, body, base_url):
            asked.append(body)
            return {"tokens": [1], "choices": [{"prompt_logprobs": [None, {"6": {"logprob": -1.0}}]}]}

    sequence = {"trainable": True, "tokens": np.array([5, 6]), "mask": np.array([False, True])}
    rollout = SimpleNamespace(state={"tools": [{"type": "function"}]}, sequences=[sequence])
    asyncio.run(distill.teach_one(rollout, [rollout.state], 0, Client()))
    assert sequence["teacher_logp"].tolist() == [0.0, -1.0] and asked[0]["tools"] == rollout.state["tools"]
    name = served_name(Client.cfg, None if frozen else 7)
    assert [body["model"] for body in asked] == [name, name] and name != served_name(Client.cfg, 8)


def test_a_teacher_elsewhere_is_asked_there_by_its_name_and_reads_as_the_run_does(make_cfg):
    elsewhere = ["teacher.weight=0.5", "teacher.base_url=http://127.0.0.1:9", "teacher.model=large"]
    keys = ["teacher.prompt=test_distill:asks", "orchestrator.sampling.chat_template_kwargs={think=true}"]
    asked = []

    class Client:
        cfg, attempt, version = make_cfg(*elsewhere, *keys), 0, 7

        async def post(self, group, path, body, base_url):
            asked.append((base_url, body["model"], body.get("chat_template_kwargs")))
            return {"tokens": [1], "choices": [{"prompt_logprobs": [None, {"6": {"logprob": -1.0}}]}]}

    sequence = {"trainable": True, "tokens": np.array([5, 6]), "mask": np.array([False, True])}
    rollout = SimpleNamespace(state={}, sequences=[sequence])
    asyncio.run(distill.teach_one(rollout, [rollout.state], 0, Client()))
    there = ("http://127.0.0.1:9", "large")
    assert asked == [(*there, {"think": True}), (*there, None)]
