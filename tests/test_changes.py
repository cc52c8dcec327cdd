"""The examples of configs/README.md and README.md: each is taken out of the document, has as many lines as it says, and
runs. Patches must apply to a file that has moved."""

import asyncio
import importlib
import json
import random
import re
import subprocess
import sys
import threading
import types
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace

import conftest
import numpy as np
import pytest
import torch
from conftest import ROOT, all_batches, lines, make_sequences

import trainer
from orchestrator import Group, Rollout, save_batch

PAGE = (ROOT / "configs" / "README.md").read_text()
README = (ROOT / "README.md").read_text()
# Lines in the core and lines of one's own that each change took before this page was written.
MOST = {
    "A loss": (0, 10),
    "An advantage": (0, 3),
    "Only the fifth": (2, 22),
    "Replay": (0, 19),
    "Distillation": (0, 32),
    "An optimizer": (0, 52),
    "A critic": (5, 32),
    "A curriculum": (0, 8),
    "PPO's loop": (0, 0),
    "The temperature": (7, 0),
    "Rollouts that branch": (4, 31),
    "A second reward model": (0, 16),
}
SECTIONS = {}
for section in re.split(r"^### ", PAGE, flags=re.MULTILINE)[1:]:
    title = section.partition("\n")[0]
    SECTIONS[title] = re.split(r"^## ", section, flags=re.MULTILINE)[0]


def section_of(start):
    """Returns the title and the text of the section whose title begins so."""
    found = [title for title in SECTIONS if title.startswith(start)]
    assert len(found) == 1, f"{start!r}: {found}"
    return found[0], SECTIONS[found[0]]


def blocks(kind, text):
    return re.findall(rf"```{kind}\n(.*?)```", text, re.DOTALL)


PATCHES = {}
for text in (README, PAGE):
    for diff in blocks("diff", text):
        PATCHES[re.search(r"^\+ *(.+)$", diff.partition("@@")[2], re.MULTILINE)[1][:40]] = diff


# --- the page ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("start", MOST)
def test_a_change_has_as_many_lines_as_its_title_says(start):
    title, text = section_of(start)
    core = 0
    for diff in blocks("diff", text):
        core += sum(line.startswith("+") and not line.startswith("+++") for line in diff.splitlines())
    own = 0
    for code in blocks("python", text):
        own += sum(bool(line.strip()) for line in code.splitlines()[1:])  # the first line names the file
    said = re.search(r"\(core (\d+), own (\d+)\)$", title)
    assert (core, own) == (int(said[1]), int(said[2])), title
    assert core <= MOST[start][0] and own <= MOST[start][1]


def test_the_page_has_no_other_changes():
    titles = [title for title in SECTIONS if title.endswith(")")]
    assert len(titles) == len(MOST)


@pytest.fixture
def module(tmp_path, monkeypatch):
    """module("topr") -> the module that the page shows under this name, imported from tmp_path, beside the TOML."""
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    before = set(sys.modules)

    def get(name):
        found = [code for code in blocks("python", PAGE) if code.startswith(f"# {name}.py: ")]
        assert len(found) == 1, name
        (tmp_path / f"{name}.py").write_text(found[0])
        importlib.invalidate_caches()
        return importlib.import_module(name)

    yield get
    for name in set(sys.modules) - before:  # another test has another tmp_path, or another trainer
        if str(tmp_path) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]


def patched(diff, folder):
    """Returns the name and the source of the file that a patch changes, after 30 blank lines were put at its top."""
    name = re.search(r"^\+\+\+ b/(\S+)$", diff, re.MULTILINE)[1]
    file = folder / "patched" / name
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("\n" * 30 + (ROOT / name).read_text())
    (folder / "one.diff").write_text(diff)
    command = ["git", "apply", "--verbose", str(folder / "one.diff")]
    done = subprocess.run(command, cwd=folder / "patched", capture_output=True, text=True)
    assert done.returncode == 0, diff + done.stderr
    assert "Applied patch" in done.stderr  # inside of a repository git skips what lies elsewhere
    return name, file.read_text()


def patched_module(diff, folder, monkeypatch, takes_its_place=True):
    """Returns the patched file as a module; `import trainer` gets it if it takes the place of the other one."""
    name, source = patched(diff, folder)
    name = name.removesuffix(".py").replace("/", ".")
    new = types.ModuleType(name if takes_its_place else f"patched_{name}")
    new.__file__ = str(ROOT / f"{name}.py")
    monkeypatch.setitem(sys.modules, new.__name__, new)
    exec(compile(source, new.__file__, "exec"), new.__dict__)
    return new


@pytest.mark.parametrize("name", PATCHES)
def test_patches_apply_after_30_blank_lines(name, tmp_path):
    _, source = patched(PATCHES[name], tmp_path)
    compile(source, "patched", "exec")


def test_the_first_lines_of_modules_set_keys_that_exist(make_cfg, module):
    """Whoever writes these keys and overrides has a checked configuration, and hooks that are found."""
    for code in blocks("python", PAGE):
        first = code.partition("\n")[0]
        name, keys = re.fullmatch(r"# (\w+)\.py: (.*)", first).groups()
        module(name)
        settings = re.findall(r"([\w.]+) = (\{.*?\}|\"[^\"]*\"|\w+)", keys)
        cfg = make_cfg(*(f"{key} = {value}" for key, value in settings))
        trainer.check_hooks(cfg.trainer)
        for key, value in settings:
            if ":" in value and not value.startswith("{"):
                assert callable(trainer.configs.find(value.strip('"')))
                assert cfg.flat[key] == value.strip('"')


@pytest.mark.parametrize("name", ["Order", "Group", "Rollout", "Batch"])
def test_the_tables_name_what_is_there(name):
    """Each field that the tables list exists, and each that exists is listed."""
    if name == "Order":
        import orchestrator

        methods = set(re.findall(r"^\| `(\w+)\(", PAGE, re.MULTILINE))
        assert methods == {"take", "keep", "extra", "commit"}
        assert all(hasattr(orchestrator.Order, method) for method in methods)
        return
    row = re.search(rf"^\| `{name}` \| (.*) \|$", PAGE, re.MULTILINE)[1]
    fields = {"Group": Group._fields, "Rollout": Rollout.__dataclass_fields__, "Batch": trainer.Batch._fields}[name]
    assert set(fields) <= set(re.findall(r"`(\w+)`", row)), row


def test_the_tables_name_every_field_of_a_sequence(tmp_path):
    sequence, micro = trained_sequence(tmp_path)
    for kind, names in (("a sequence", sequence), ("`micro`", micro)):
        row = re.search(rf"^\| {kind} \| (.*) \|$", PAGE, re.MULTILINE)[1]
        named = set(re.findall(r"`(\w+)`", row))
        unnamed = {name for name in names if name not in named}
        if kind == "`micro`":  # fields of a sequence are in it under their own names
            unnamed = {name for name in unnamed if name.removesuffix("_N") not in sequence}
        assert unnamed <= {"baseline_key", "error", "dropped", "index_N", "ids_BW"}, unnamed


def trained_sequence(tmp_path):
    batch = batch_of(tmp_path, make_sequences(2))
    for s in batch.sequences:
        s["adv"] = torch.zeros(len(s["tokens"]))
    return batch.sequences[0], trainer.collate(batch.sequences, torch.device("cpu"))


def batch_of(tmp_path, sequences):
    path = tmp_path / "step_000000.safetensors"
    save_batch(path, sequences, {"run": {}, "step": 0, "max_tokens": 16})
    return trainer.load_batch(path)


# --- losses and advantages --------------------------------------------------------------------------------------------


def micro_of(**fields):
    micro = {f"{name}_N": torch.tensor(values, dtype=torch.float64) for name, values in fields.items()}
    return micro | {"mask_N": torch.ones(len(micro["adv_N"]), dtype=torch.bool)}


def test_topr(module):
    """By numpy, and its gradient is that of REINFORCE where A > 0."""
    old = np.array([-1.0, -2.0, -0.5, -3.0])
    logp = old + [0.5, 0.3, -0.4, 1.0]
    adv = np.array([1.0, -1.0, -0.5, -2.0])
    weight = np.where(adv < 0, np.minimum(np.exp(logp - old), 0.9), 1.0)
    logp_N = torch.tensor(logp, requires_grad=True)
    loss_N, logs = module("topr").topr(micro_of(old_logp=old, adv=adv), logp_N, None, ratio_cap=0.9)
    assert loss_N.tolist() == pytest.approx((-weight * adv * logp).tolist(), rel=1e-9)
    assert logs["policy/weight"].tolist() == pytest.approx(weight.tolist())
    loss_N.sum().backward()
    assert logp_N.grad.tolist() == pytest.approx((-weight * adv).tolist())


def test_quantile(module):
    quantile = module("quantile").quantile
    assert quantile(torch.tensor([9.0, 0.0, 1.0, 2.0], dtype=torch.float64), None).tolist() == [8.0, -1.0, 0.0, 1.0]


def with_patch(start, tmp_path, monkeypatch):
    """The trainer with the patch of a section, in the place of the trainer."""
    (diff,) = blocks("diff", section_of(start)[1])
    return patched_module(diff, tmp_path, monkeypatch)


def test_the_fifth_with_the_highest_entropy(module, make_cfg, tmp_path, monkeypatch):
    new = with_patch("Only the fifth", tmp_path, monkeypatch)
    module("high_entropy")
    cfg = make_cfg("trainer.loss=high_entropy:loss", "trainer.micro_batch_size=1")
    batch = batch_of(tmp_path, make_sequences())
    policy = new.build_policy(cfg)
    everything = new.collate(batch.sequences, policy.device)
    entropy_N = policy(everything)[1]
    metrics, _ = new.train_step(policy, new.make_optimizer(policy, cfg.trainer), batch, 0, cfg)
    said = sum(int(s["mask"].sum()) for s in batch.sequences)
    num = int(0.2 * said)
    assert metrics["policy/top"] == pytest.approx(num / said)
    top_T = torch.cat([s["top"] for s in batch.sequences])
    chosen = set(everything["at_N"][entropy_N.topk(num).indices].tolist())
    assert {i for i in range(len(top_T)) if top_T[i]} >= chosen
    assert metrics["policy/clip_frac"] == 0 and metrics["optim/grad_norm"] > 0


class Values:
    """Stands in for the policy with a critic: the value of a token is its place in the batch, over 10."""

    device = torch.device("cpu")

    def __call__(self, micro):
        return None, None, micro["at_N"] / 10


def test_gae_by_hand(module, tmp_path, make_cfg):
    sequence = make_sequences(1)[0] | {"tokens": [9] * 4, "mask": [0, 1, 0, 1], "old_logp": [0.0, -1.0, 0.0, -1.0]}
    batch = batch_of(tmp_path, [sequence | {"turn": [0] * 4, "reward": 2.0}])
    module("critic").add_gae(Values(), batch.sequences, batch.info, make_cfg(), gamma=0.9, lam=0.5)
    last = 2.0 - 0.3  # tokens 1 and 3 are the policy's, with values of 0.1 and 0.3
    first = 0.9 * 0.3 - 0.1 + 0.9 * 0.5 * last
    (s,) = batch.sequences
    assert s["adv"].tolist() == pytest.approx([0.0, first, 0.0, last])
    assert s["target"].tolist() == pytest.approx([0.0, first + 0.1, 0.0, 2.0])


def test_a_critic_learns_and_is_resumed(module, tmp_path, make_cfg, monkeypatch):
    new = with_patch("A critic", tmp_path, monkeypatch)
    module("critic")
    cfg = make_cfg("trainer.loss=critic:loss", "trainer.learning_rate=1e-2")
    batch = batch_of(tmp_path, [s | {"reward": 3.0} for s in make_sequences()])
    errors = []
    policy, optimizer = trained(new, cfg, batch, 10, errors)
    assert errors[-1]["critic/error"] < 0.8 * errors[0]["critic/error"]
    assert "critic.weight" in policy.trained()
    weights = [name for group in new.stream_weights(policy.model, torch.float32, False) for name in group]
    assert not any("critic" in name for name in weights)  # the servers do not know it
    check_resume(new, policy, optimizer, cfg, batch, tmp_path)


def trained(core, cfg, batch, num, metrics=None):
    policy = core.build_policy(cfg)
    optimizer = core.make_optimizer(policy, cfg.trainer)
    for step in range(num):
        found, _ = core.train_step(policy, optimizer, batch, step, cfg)
        if metrics is not None:
            metrics.append(found)
    return policy, optimizer


def check_resume(core, policy, optimizer, cfg, batch, tmp_path):
    """A step after a checkpoint and a step after loading it end at the same bits."""
    (tmp_path / "checkpoints").mkdir(exist_ok=True)
    core.save_checkpoint(tmp_path, 2, policy, optimizer, cfg)
    fresh = core.build_policy(cfg)
    again = core.make_optimizer(fresh, cfg.trainer)
    assert core.load_checkpoint(tmp_path / "checkpoints" / "step_000002", fresh, again, cfg) == 2
    found = []
    for one, its_optimizer in ((policy, optimizer), (fresh, again)):
        core.train_step(one, its_optimizer, batch, 2, cfg)
        found.append(core.state_of(one, its_optimizer))
    assert found[0].keys() == found[1].keys()
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])


def test_muon_is_resumed_bit_for_bit(module, make_cfg, tmp_path):
    module("muon")
    cfg = make_cfg("trainer.optimizer=muon:Muon")
    batch = batch_of(tmp_path, make_sequences())
    policy, optimizer = trained(trainer, cfg, batch, 2)
    state = {name.removeprefix("optimizer/model.") for name in trainer.state_of(policy, optimizer)}
    assert "model.layers.0.mlp.up_proj.weight/momentum_buffer" in state
    assert {"lm_head.weight/exp_avg", "model.embed_tokens.weight/exp_avg", "model.norm.weight/exp_avg"} <= state
    untrained = trainer.build_policy(cfg)
    everything = trainer.collate(batch.sequences, policy.device)
    gains_N = policy(everything)[0] - untrained(everything)[0]
    assert (gains_N * everything["adv_N"]).sum() > 0  # what was better than its group became more likely
    check_resume(trainer, policy, optimizer, cfg, batch, tmp_path)


def test_minibatches_are_a_key(make_cfg, tmp_path):
    """Two passes of four minibatches are eight optimizer steps."""
    cfg = make_cfg("trainer.minibatches=4", "trainer.updates_per_batch=2", "trainer.loss=grpo")
    batch = batch_of(tmp_path, make_sequences())
    policy, optimizer = trained(trainer, cfg, batch, 1)
    steps = {int(state["step"]) for state in optimizer.state.values()}
    assert steps == {8}


# --- orders, sampling, environments -----------------------------------------------------------------------------------


def test_replay_of_solved_groups(module, make_cfg):
    """Only groups that were solved now and then come again, and not before their batch is sure to be committed."""
    order = module("replay").Replay([{}] * 8, make_cfg("orchestrator.max_staleness=1"))
    for step, solved in enumerate((1, 4, 0, 2)):
        rollouts = [Rollout({"step": step}, reward=float(i < solved)) for i in range(8)]
        index, row = order.take(step)
        order.commit(Group("test", index, row, rollouts, ""))
    assert order.open == set()
    assert [len(order.extra(step)) for step in range(8)] == [0, 0, 1, 1, 1, 2, 2, 2]
    assert [group.index for group in order.extra(3)] == [0]
    assert order.extra(7) == order.extra(7)


def test_replay_in_a_run(module, run):
    """A batch holds groups of earlier ones, with the versions that they were sampled from."""
    replay = module("replay")

    class Often(replay.Replay):
        def commit(self, group):
            super().commit(group)
            self.solved[group.index] = group

    replay.Often = Often
    run_dir = run(4, '{ kind = "noise" }', "orchestrator.order=replay:Often")
    batches = all_batches(run_dir)
    groups = [{s["group"] for s in batch.sequences} for batch in batches]
    assert [len(found) for found in groups] == [4, 4, 8, 8]
    assert groups[0] <= groups[2]
    assert max(s["staleness"] for s in batches[2].sequences) == 2


def test_a_curriculum(module, run, tmp_path):
    module("lengths")
    run_dir = run(2, '[env]\nid = "reverse_text"', "orchestrator.order=lengths:ShortFirst", fake={"stop": True})
    words = [line["prompt"][-1]["content"] for line in lines(run_dir / "rollouts.jsonl")]
    assert {len(word) for word in words} == {4}


def test_the_temperature_falls(run, tmp_path, monkeypatch):
    (diff,) = blocks("diff", section_of("The temperature")[1])
    new = patched_module(diff, tmp_path, monkeypatch, takes_its_place=False)
    monkeypatch.setattr(conftest, "orchestrator", new)
    log = tmp_path / "asked"
    run_dir = run(3, '{ kind = "noise" }', "eval.every=0", fake={"log": str(log)})
    batches = all_batches(run_dir)
    falls = [{s["temperature"] for s in batch.sequences} for batch in batches]
    assert falls == [{1.0}, {0.99}, {0.98}]
    asked = [json.loads(line) for line in log.read_text().splitlines()]
    assert {body["temperature"] for body in asked} == {1.0, 0.99, 0.98}


def test_rollouts_that_branch(module, run, monkeypatch):
    branches = module("branches")
    monkeypatch.setattr(branches.reverse_text, "similarity", lambda completion, answer: random.random())
    env = '[env]\nid = "branches"'
    keys = ("orchestrator.order=branches:KeepTrees", "trainer.advantage=branches:tree")
    (batch,) = all_batches(run(1, env, *keys))
    by_rollout = {}
    for s in batch.sequences:
        agents = by_rollout.setdefault((s["group"], s["rollout"]), {})
        assert s["agent"] not in agents
        agents[s["agent"]] = s
    cfg = SimpleNamespace(advantage="branches:tree", gamma=1.0)
    trainer.add_advantages(batch.sequences, cfg)
    assert len(by_rollout) == 16
    for agents in by_rollout.values():
        trunk = agents.pop("")
        assert sorted(agents) == [f"branch {i}" for i in range(4)]
        assert sum(s["reward"] for s in agents.values()) == pytest.approx(0, abs=1e-9)
        for s in agents.values():
            num = len(trunk["tokens"])
            assert s["tokens"][:num].equal(trunk["tokens"]) and not s["mask"][:num].any()
            assert s["adv"].tolist() == pytest.approx([s["reward"]] * len(s["tokens"]))
    assert all(s["reward"] for s in batch.sequences)
    assert branches.tree(torch.tensor([1.0, 3.0]), [{"agent": ""}] * 2).tolist() == [-1.0, 1.0]


@pytest.fixture
def model_server():
    """model_server(answer) -> the address of a server that answers each POST by answer(body)."""
    servers = []

    def serve(answer):
        class Handler(BaseHTTPRequestHandler):
            def do_POST(self):
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                reply = json.dumps(answer(body)).encode()
                self.send_response(200)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(reply)))
                self.end_headers()
                self.wfile.write(reply)

            def log_message(self, *args):
                pass

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        servers.append(server)
        return f"http://127.0.0.1:{server.server_port}"

    yield serve
    for server in servers:
        server.shutdown()
        server.server_close()


def test_distillation(module, run, model_server, models):
    """The teacher is a network; the student's batch has its log-probabilities, and the loss is the reverse KL's."""
    from transformers import AutoModelForCausalLM

    teacher = AutoModelForCausalLM.from_pretrained(models["tied"]).eval()

    @torch.no_grad()
    def logps_of(ids):
        logits = teacher(torch.tensor([ids])).logits[0].float()
        return logits[:-1].log_softmax(-1).gather(1, torch.tensor(ids)[1:, None])[:, 0]

    def answer(body):  # in the form of vLLM's
        assert body["prompt_logprobs"] == 0 and body["model"] == "teacher"
        tables = [{str(token): {"logprob": float(x)}} for token, x in zip(body["prompt"][1:], logps_of(body["prompt"]))]
        return {"choices": [{"prompt_logprobs": [None, *tables]}]}

    taught = module("taught")
    taught.TEACHER = model_server(answer)
    (batch,) = all_batches(run(1, '[env]\nid = "taught"', "orchestrator.order=taught:KeepAll"))
    assert len(batch.sequences) == 16
    for s in batch.sequences:
        expected = logps_of(s["tokens"].tolist())
        assert s["teacher_logp"][1:].tolist() == pytest.approx(expected.tolist(), abs=1e-5)
    logp_N = torch.tensor([-1.0, -1.5], dtype=torch.float64, requires_grad=True)
    micro = micro_of(adv=[0.0, 0.0], old_logp=[-1.0, -2.0], teacher_logp=[-3.0, -1.0])
    loss_N, logs = taught.distill(micro, logp_N, None)
    loss_N.sum().backward()
    assert logp_N.grad.tolist() == pytest.approx([2.0, -np.exp(0.5)])
    assert logs["teacher/kl"].tolist() == [2.0, -1.0]


def test_a_second_reward_model(module, model_server):
    def answer(body):
        assert [m["role"] for m in body["messages"]] == ["user", "assistant"]
        return {"data": [{"probs": [len(body["messages"][1]["content"]) / 10]}]}

    two_models = module("two_models")
    two_models.URL = model_server(answer)
    env = two_models.load_environment(4)
    state = env.start(env.dataset[0])
    state["completion"] = [{"role": "assistant", "content": state["answer"]}]
    reward, metrics = asyncio.run(env.rubric.score(state))
    assert metrics == {"exact": 1.0, "preferred": len(state["answer"]) / 10}
    assert reward == pytest.approx(1 + 0.5 * metrics["preferred"])


# --- the patches of the README ----------------------------------------------------------------------------------------


def readme_patch(word):
    (diff,) = [diff for diff in blocks("diff", README) if word in diff]
    return diff


def test_the_entropy_bonus(make_cfg, tmp_path, monkeypatch):
    new = patched_module(readme_patch("bonus"), tmp_path, monkeypatch)
    cfg = make_cfg()
    batch = batch_of(tmp_path, make_sequences())
    metrics = []
    trained(new, cfg, batch, 1, metrics)
    trained(trainer, cfg, batch, 1, metrics)
    assert metrics[0]["policy/bonus"] == pytest.approx(0.01 * metrics[0]["policy/entropy"], rel=1e-4)
    assert metrics[0]["loss"] == pytest.approx(metrics[1]["loss"] - metrics[0]["policy/bonus"], abs=1e-5)


def test_the_reward_for_short_answers(tmp_path, monkeypatch):
    new = patched_module(readme_patch("short"), tmp_path, monkeypatch, takes_its_place=False)
    env = new.load_environment(4, 4)
    state = env.start(env.dataset[0])
    state["completion"] = [{"role": "assistant", "content": state["answer"]}]
    reward, metrics = asyncio.run(env.rubric.score(state))
    assert metrics["short"] == pytest.approx(1 - len(state["answer"]) / 16)
    assert reward == pytest.approx(1 + 0.1 * metrics["short"])
