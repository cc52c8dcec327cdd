"""trainer.py: one step against float64 by hand, and what micro-batches, ranks, LoRA and a resume must not change."""

import functools
import itertools
import json
import math
import os
import re
import shutil
import statistics
import subprocess
import sys
import traceback
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import transformers
from conftest import BASE, ROOT, lines, make_sequences, run_trainer, some
from ranks import replays
from safetensors.torch import load_file, save_file
from torch.utils._python_dispatch import TorchDispatchMode

import trainer
from configs.algorithms import reference
from configs.models import toy
from configs.runtime.directory import identity, run_directory
from configs.runtime.role import RunError
from configs.serving import adapters
from orchestrator import save_batch

CPU = torch.device("cpu")
INFO = {"run": {"run": "test"}, "step": 0, "max_tokens": 16}
UNCLIPPED = "trainer.max_grad_norm=1e9"
LORA = ("trainer.use_lora=true", UNCLIPPED)


def ragged(num=24, seed=0, longest=24):
    """Everything that a batch may hold: temperatures, forks (two sequences of a rollout), sequences without a loss
    token, words to imitate (in a prompt as well), a teacher, and a demonstration, which has neither group nor
    reward."""
    sequences = make_sequences(num, seed, longest=longest)
    for i, s in enumerate(sequences):
        s["temperature"] = (1.0, 0.7, 1.3)[i % 3]
        s["ce"] = [0.0] * len(s["tokens"])
    for i in (3, 8):
        fork = make_sequences(num, seed + 100, longest=longest)[i]
        sequences.append(sequences[i] | {key: fork[key] for key in ("tokens", "mask", "old_logp", "turn")})
        sequences[-1]["ce"] = [0.0] * len(fork["tokens"])
    for i in (1, 5):
        sequences[i]["mask"] = [0] * len(sequences[i]["mask"])
    for i in (2, 5, 7):
        sequences[i]["ce"][1:] = [0.5 * (k % 3) for k in range(len(sequences[i]["ce"]) - 1)]
    sequences[0]["mask"][1:] = [1] * (len(sequences[0]["mask"]) - 1)  # its prompt has one token
    for i in (2, 4, 6, 9):
        s = sequences[i]
        s["teacher"] = [0.25 * (i % 3 + 1) * sampled for sampled in s["mask"]]
        s["teacher_logp"] = [-4.0 - 0.3 * (k % 4) for k in range(len(s["mask"]))]
    shown = {key: sequences[9][key] for key in ("tokens", "old_logp", "turn", "temperature")}
    shown |= {"mask": [0] * len(shown["tokens"]), "ce": [0.0] + [1.0] * (len(shown["tokens"]) - 1)}
    return [*sequences, shown]


def batch_of(path, sequences, **info):
    file = path / "step_000000.safetensors"
    save_batch(file, sequences, INFO | info)
    return trainer.load_batch(file)


def write_batches(path, num):
    path.mkdir()
    for n in range(num):
        save_batch(path / f"step_{n:06d}.safetensors", ragged(12, seed=n), INFO | {"step": n})
    return path


# --- advantages -------------------------------------------------------------------------------------------------------


def member(reward, turns=None, num_turns=None):
    return {"reward": reward, "turn_rewards": turns, "num_turns": num_turns or len(turns or [0])}


def by_turn(groups, name="mean", gamma=1.0):
    """[[[advantage of each turn], ...] of each rollout, ...], from one token per turn."""
    sequences = []
    for g, group in enumerate(groups):
        for i, m in enumerate(group):
            sequences.append(m | {"baseline_key": ("e", g, ""), "rollout": i, "turn": torch.arange(m["num_turns"])})
            sequences[-1]["tokens"] = sequences[-1]["turn"]
    trainer.add_advantages(sequences, SimpleNamespace(advantage=name, gamma=gamma))
    rows = iter(s["adv"].tolist() for s in sequences)
    return [[next(rows) for _ in group] for group in groups]


def first_is_one(rewards_G, group):
    assert len(rewards_G) == len(group) and "reward" in group[0]
    return torch.tensor([1.0] + [0.0] * (len(group) - 1))


def endless(rewards_G, group):
    return rewards_G / 0


def test_advantages():
    groups = [[member(r) for r in (0.0, 1.0, 1.0, 0.0)], [member(r) for r in (0.2, 0.4, 0.9)]]

    def found(name):
        return trainer.compute_advantages(groups, name)

    assert found("mean") == [[-0.5, 0.5, 0.5, -0.5], pytest.approx([-0.3, -0.1, 0.4])]
    std = np.std([0, 1, 1, 0], ddof=1) + 1e-4
    assert found("std")[0] == pytest.approx([-0.5 / std, 0.5 / std, 0.5 / std, -0.5 / std])
    std = np.std([0, 1, 1, 0, 0.2, 0.4, 0.9]) + 1e-4
    assert found("batch_std")[1] == pytest.approx([-0.3 / std, -0.1 / std, 0.4 / std])
    assert found("leave_one_out")[1][2] == pytest.approx(0.9 - (0.2 + 0.4) / 2)
    assert found("test_trainer:first_is_one")[1] == [1.0, 0.0, 0.0]


@pytest.mark.parametrize("name", ["mean", "std", "batch_std", "leave_one_out"])
def test_an_agent_that_spoke_in_one_rollout_alone_has_no_advantage(name):
    assert trainer.compute_advantages([[member(1.0)], [member(0.0), member(1.0)]], name)[0] == [0.0]
    assert trainer.compute_advantages([], name) == []  # a batch of demonstrations


def test_an_advantage_that_knows_no_turns_is_refused_with_gamma():
    with pytest.raises(RunError, match="advantages:gdpo' knows no turns") as e:
        by_turn([[member(1.0, num_turns=2), member(0.0)]], "advantages:gdpo", gamma=0.5)
    assert e.value.code == 2


def test_advantages_by_turn_are_returns_to_go_over_the_whole_group():
    """By hand: gamma 1/2, returns 1.5, 1, 2 and 0.5, 1; the second ended before turn 2, where it counts 0."""
    group = [member(3.0, [1.0, 0.0, 2.0]), member(1.0, [0.0, 1.0])]
    assert by_turn([group], gamma=0.5) == [[[0.5, 0.0, 1.0], [-0.5, 0.0]]]
    assert by_turn([group], "leave_one_out", 0.5) == [[[1.0, 0.0, 2.0], [-1.0, 0.0]]]
    # Without turn rewards the reward is the last turn's; with gamma 1 it is the whole rollout's: one number.
    other = [member(4.0, num_turns=3), member(2.0, num_turns=1)]
    assert by_turn([other], gamma=0.5) == [[[-0.5, 1.0, 2.0], [0.5]]]
    assert by_turn([other, other]) == [[[1.0] * 3, [-1.0]]] * 2
    mixed = [member(4.0, num_turns=2), member(1.0, [1.0, 0.0])]
    assert by_turn([mixed, other]) == [[[1.5, 2.0], [-1.5, -2.0]], [[1.0] * 3, [-1.0]]]
    # Over the batch: the deviation of the four whole rewards, whatever the turn.
    scale = np.std([4, 1, 4, 2]) + 1e-4
    for a, b in zip(by_turn([mixed, other], "batch_std"), by_turn([mixed, other]), strict=True):
        assert sum(a, []) == pytest.approx([x / scale for x in sum(b, [])])


def test_each_turns_tokens_get_their_turns_advantage(make_cfg, tmp_path):
    """A demonstration in such a batch has none."""
    sequence = {"tokens": [5, 6, 7, 8, 9], "mask": [0, 1, 0, 0, 1], "old_logp": [0.0] * 5, "turn": [0, 0, 0, 1, 1]}
    one = sequence | {"env": "e", "group": 0}
    three = [one | {"rollout": 0} | member(3.0, [1.0, 2.0]), one | {"rollout": 1} | member(1.0, num_turns=2), sequence]
    batch = batch_of(tmp_path, three)
    trainer.add_advantages(batch.sequences, make_cfg("trainer.gamma=0.5").trainer)
    found = [s["adv"].tolist() for s in batch.sequences]
    assert found == [[0.75] * 3 + [0.5] * 2, [-0.75] * 3 + [-0.5] * 2, [0.0] * 5]


def test_a_baseline_is_over_the_rollouts_of_an_agent_in_a_group(make_cfg, tmp_path):
    """Two agents of one group with rewards of their own; the other group and environment do not count. A fork has its
    rollout's advantage, and its rollout counts once."""
    sequences = make_sequences(8)
    for i, s in enumerate(sequences):
        s |= {"agent": "ab"[i % 2], "group": 0, "rollout": i // 2}
    sequences += [sequences[0] | {"env": "other"}, sequences[0] | {"group": 1}, sequences[6] | {"turn": [1] * 9}]
    sequences[-1] |= {"tokens": [1] * 9, "mask": [0] + [1] * 8, "old_logp": [-1.0] * 9}
    batch = batch_of(tmp_path, sequences)
    trainer.add_advantages(batch.sequences, make_cfg().trainer)
    means = [statistics.mean(s["reward"] for s in sequences[i:8:2]) for i in (0, 1)]
    expected = [s["reward"] - means[i % 2] for i, s in enumerate(sequences[:8])]
    expected += [0.0, 0.0, expected[6]]
    for s, adv in zip(batch.sequences, expected, strict=True):
        assert len(s["adv"]) == len(s["tokens"]) and s["adv"].unique().tolist() == [pytest.approx(adv, abs=1e-6)]
    batch.sequences[2]["reward"] = math.nan
    with pytest.raises(RunError, match="trainer.advantage = 'mean': not finite in group") as e:
        trainer.add_advantages(batch.sequences, make_cfg().trainer)
    assert e.value.code == 4


# --- micro-batches ----------------------------------------------------------------------------------------------------


def log_normal(num, seed=0):
    """Lengths with a mean of 3,000, sigma 0.9, at most 16,384 tokens."""
    draw = np.random.default_rng(seed).lognormal(math.log(3000) - 0.9**2 / 2, 0.9, num)
    return np.clip(draw.round(), 1, 16384).astype(int).tolist()


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_micro_batches_keep_the_budget_and_every_sequence_and_waste_little(ranks):
    rng = np.random.default_rng(0)
    cases = [(rng.integers(1, 65, num).tolist(), 128) for num in (1, 2, 5, 300)] + [([9, 200, 3], 128)]
    shapes_of = [trainer.PADDING["cpu"], (8, 128)]
    for (lens, budget), (multiple, overhead) in itertools.product([*cases, (log_normal(512), 65536)], shapes_of):
        parts = trainer.partition_by_length(lens, budget, ranks, multiple, overhead)
        assert sorted(sum(parts, [])) == list(range(len(lens)))
        assert [lens[i] for i in sum(parts, [])] == sorted(lens)
        area = 0
        for part in parts:
            rows = -(-len(part) // ranks)
            width = -(-max(lens[i] for i in part) // multiple) * multiple
            assert rows * width <= budget or rows == 1
            area += ranks * rows * width
        assert len(lens) < 512 or area <= 1.03 * sum(lens)


def test_fields_and_numbers_arrive_at_the_loss_tokens(tmp_path):
    """Whatever their names: fields per token, and numbers of a sequence."""
    sequences = make_sequences(6)
    for i, s in enumerate(sequences):
        s |= {"teacher_logp": [i + j / 100 for j in range(len(s["tokens"]))], "weight": i / 2, "note": "no number"}
        s["ce"] = [0.0] * len(s["tokens"])
    for i in (0, 3, 4):
        sequences[i]["mask"] = [0] * len(sequences[i]["mask"])
    sequences[4]["ce"][1] = 0.25  # a token outside of the policy's words
    batch = batch_of(tmp_path, sequences)
    rows = [0, 1, 3, 4, 5]
    micro = trainer.collate([batch.sequences[i] for i in rows], CPU)
    at = []
    for row, i in enumerate(rows):
        is_loss = zip(sequences[i]["mask"], sequences[i]["ce"])
        at += [(row, i, j) for j, (mask, ce) in enumerate(is_loss) if mask or ce]
    assert micro["row_N"].tolist() == [row for row, _, _ in at]
    assert micro["mask_N"].tolist() == [i != 4 for _, i, _ in at] and micro["ce_N"].sum() == 0.25
    torch.testing.assert_close(micro["teacher_logp_N"], torch.tensor([i + j / 100 for _, i, j in at]))
    assert micro["weight_N"].tolist() == [i / 2 for _, i, _ in at] and "note_N" not in micro
    assert micro["tokens_N"].tolist() == [sequences[i]["tokens"][j] for _, i, j in at]
    assert micro["ids_BW"].flatten()[micro["index_N"] + 1].tolist() == micro["tokens_N"].tolist()
    assert micro["ids_BW"].shape[1] % trainer.PADDING["cpu"][0] == 0
    whole = trainer.collate([s | {"reward": 1, "group": 7} for s in batch.sequences[1:3]], CPU)  # whole, as JSON may be
    assert whole["reward_N"].dtype == whole["group_N"].dtype == torch.float32
    untrained = trainer.collate(batch.sequences[:1], CPU)
    assert untrained["mask_N"].tolist() == [False] and untrained["ce_N"].tolist() == [0.0]


# --- a step is what it is by hand, however it is divided --------------------------------------------------------------


def keep_gradients(policy):
    """An optimizer that changes nothing, and the list to which each of its steps adds {parameter: gradient}."""
    kept = []

    class Keep(torch.optim.SGD):
        def step(self):
            grads = {name: p.grad for name, p in policy.trained().items() if p.grad is not None}
            kept.append({name: trainer.full(grad).float().clone() for name, grad in grads.items()})

    return Keep(list(policy.trained().values()), 0.0), kept


def gradients(cfg, batch, policy=None):
    """Returns the metrics of one step, {parameter: gradient} and logp_T."""
    policy = policy or trainer.build_policy(cfg)
    optimizer, kept = keep_gradients(policy)
    metrics, logp_T = trainer.train_step(policy, optimizer, batch, 0, cfg)
    return metrics, kept[-1], logp_T


def adamw(policy, lr=1e-3):
    return torch.optim.AdamW(policy.trained().values(), lr, weight_decay=0.0)


def same(a, b, tol=1e-5):
    worst = max((a[key] - b[key]).abs().max().item() for key in a)
    assert worst < tol and a.keys() == b.keys() and max(x.abs().max().item() for x in a.values()) > 1e-3, worst


def plain_model(cfg):
    return transformers.AutoModelForCausalLM.from_pretrained(cfg.run.model, dtype=torch.float32).eval()


def scored(model, sequences):
    """Log-probabilities and entropies of the loss tokens by the model's own forward, a sequence at a time, unpadded."""
    logp, entropy = [], []
    for s in sequences:
        ids = torch.as_tensor(s["tokens"]).long()
        is_loss = torch.as_tensor(s["mask"]).bool()
        if "ce" in s:
            is_loss = is_loss | (torch.as_tensor(s["ce"]) != 0)
        at = is_loss.nonzero()[:, 0]
        log_p = (model(ids[None]).logits[0] / s["temperature"]).log_softmax(-1)
        logp.append(log_p[at - 1, ids[at]])
        entropy.append(-(log_p.exp() * log_p).sum(-1)[at - 1])
    return torch.cat(logp), torch.cat(entropy)


def assert_gradients_of(plain, policy, tol):
    ours = dict(policy.named_parameters())
    for name, p in plain.named_parameters():
        torch.testing.assert_close(ours[f"model.{name}"].grad, p.grad, atol=tol, rtol=tol, msg=lambda m: f"{name}: {m}")


def loss_by_hand(model, sequences):
    """CISPO, imitation and KL(policy || teacher), each over the number of its own tokens, as a loop over sequences."""
    terms = {"mask": [], "ce": [], "teacher": []}
    for s in sequences:
        if not s["mask"].any() and not s["ce"].any():
            continue
        is_loss = s["mask"] | (s["ce"] != 0)
        logp, _ = scored(model, [s])
        r = (logp.detach() - s["old_logp"][is_loss]).exp().clamp(max=5)
        terms["mask"].append(-(r * s["adv"][is_loss] * logp)[s["mask"][is_loss]])
        terms["ce"].append(-s["ce"][is_loss] * logp)
        is_taught = s["teacher"][is_loss] != 0
        if is_taught.any():
            k1 = logp.detach() - s["teacher_logp"][is_loss]
            terms["teacher"].append((s["teacher"][is_loss] * r * k1 * logp)[is_taught])
    loss = 0.0
    for name, parts in terms.items():
        num = max(1, sum(int(s[name].count_nonzero()) for s in sequences))
        loss += sum(part.sum() for part in parts) / num
    return loss


@pytest.mark.parametrize("minibatches", [1, 3])
@pytest.mark.parametrize("budget", [1, 64])
def test_each_term_has_a_divisor_of_its_own(budget, minibatches, make_cfg, tmp_path):
    """In float64: the gradient of every optimizer step, and the loss that is logged."""
    cfg = make_cfg(f"trainer.micro_batch_size={budget}", f"trainer.minibatches={minibatches}", UNCLIPPED)
    policy, plain, batch = trainer.build_policy(cfg), plain_model(cfg).double(), batch_of(tmp_path, ragged())
    optimizer, kept = keep_gradients(policy)
    metrics, _ = trainer.train_step(policy, optimizer, batch, 0, cfg)
    parts = trainer.draw_minibatches(batch.sequences, (cfg.run.seed, 0, 0), minibatches)
    losses = []
    for part, found in zip(parts, kept, strict=True):
        losses.append(loss_by_hand(plain, part))
        names = {f"model.{name}": p for name, p in plain.named_parameters()}
        expected = torch.autograd.grad(losses[-1], list(names.values()))
        same(dict(zip(names, expected)), found, 1e-6)
    shares = [len(part) / len(batch.sequences) for part in parts]
    assert metrics["loss"] == pytest.approx(sum(x.item() * share for x, share in zip(losses, shares)), abs=1e-6)


def test_demonstrations_are_imitated_alone_and_beside_rollouts(make_cfg, tmp_path):
    """Their loss is a mean of logp. They have no temperature, no reward, and no one's probabilities; beside them a
    rollout without a field for imitation is not imitated, and its temperature is not theirs."""
    cfg, shown = make_cfg(UNCLIPPED), [toy.as_demonstration(s) for s in make_sequences()]
    for s in shown:
        s["old_logp"] = [math.nan] * len(s["tokens"])
        for key in ("reward", "group", "rollout", "temperature"):
            del s[key]
    policy, plain = trainer.build_policy(cfg), plain_model(cfg).double()
    expected = -scored(plain, [s | {"temperature": 1.0} for s in shown])[0].mean()
    expected.backward()
    metrics, found, logp_T = gradients(cfg, batch_of(tmp_path, shown, offline=True), policy)
    assert metrics["loss"] == pytest.approx(expected.item(), abs=1e-6) and metrics["policy/kl_sampler"] == 0
    assert (logp_T != 0).sum() == sum(sum(s["ce"]) for s in shown)
    same({f"model.{name}": p.grad for name, p in plain.named_parameters()}, found, 1e-6)

    sampled = [s | {"temperature": 0.5} for s in make_sequences()]
    batch = batch_of(tmp_path, [*sampled, shown[0] | {"old_logp": [0.0] * len(shown[0]["tokens"])}])
    assert [s["ce"].sum().item() for s in batch.sequences] == [0.0] * 12 + [sum(shown[0]["ce"])]
    metrics, grads, _ = gradients(cfg, batch)
    assert math.isfinite(metrics["loss"]) and all(grad.isfinite().all() for grad in grads.values())
    micro = trainer.collate(batch.sequences[11:], CPU)
    assert set(zip(micro["row_N"].tolist(), micro["temperature_N"].tolist())) == {(0, 0.5), (1, 1.0)}


def with_hint(micro, logp_N, entropy_N):
    """A loss that reads a field of the environment's."""
    return -micro["hint_N"] * micro["adv_N"] * logp_N, {}


@pytest.mark.parametrize("loss", ["losses:gspo", "dr_grpo", "cispo", "test_trainer:with_hint"])
def test_demonstrations_leave_the_policys_term_alone(loss, make_cfg, tmp_path):
    """They are no sequences to divide by, and the fields that they lack, which are nan there, reach no gradient."""
    cfg = make_cfg(f"trainer.loss={loss}", UNCLIPPED)
    sampled = [s | {"hint": [0.5] * len(s["tokens"])} for s in make_sequences()]
    shown = []
    for s in make_sequences(seed=9):
        demonstration = toy.as_demonstration(s) | {"reward": None, "group": -1, "rollout": 0}
        shown.append(demonstration | {"ce": [1e-12 * weight for weight in demonstration["ce"]]})
    _, alone, _ = gradients(cfg, batch_of(tmp_path, sampled))
    batch = batch_of(tmp_path, sampled + shown)
    metrics, beside, _ = gradients(cfg, batch)
    same(alone, beside)
    assert trainer.collate(batch.sequences[12:], CPU)["reward_N"].isnan().all()  # a loss may read it; others have one
    assert metrics["optim/skipped"] == 0 and math.isfinite(metrics["loss"])


@pytest.mark.parametrize("loss, weight", [
    ("cispo", ""), ("grpo", "sequence_mask"), ("dr_grpo", "geometric_mask"), ("losses:gspo", "off_policy_mask"),
    ("losses:dppo", "token_truncate"), ("losses:icepop", ""),
])  # fmt: skip
def test_a_micro_batch_is_one_by_one(loss, weight, make_cfg, tmp_path, monkeypatch):
    more = [f"trainer.importance=importance:{weight}", "trainer.updates_per_batch=2"] if weight else []
    cfg, batch = make_cfg(f"trainer.loss={loss}", UNCLIPPED, *more), batch_of(tmp_path, ragged())
    together = gradients(cfg, batch)
    monkeypatch.setattr(trainer, "partition_by_length", lambda lens, *_: [[i] for i in range(len(lens))] + [[]])
    alone = gradients(cfg, batch)  # with one more of padding
    same(together[1], alone[1])
    for key in ["loss", "policy/clip_frac"] + ["policy/importance"] * bool(weight):
        assert together[0][key] == pytest.approx(alone[0][key], abs=1e-5)
    torch.testing.assert_close(together[2], alone[2], atol=1e-5, rtol=0)
    is_loss = torch.cat([s["mask"] | (s["ce"] != 0) for s in batch.sequences])
    assert torch.equal(together[2] != 0, is_loss)


def test_what_is_not_trainable_is_kept_in_the_file_and_not_trained(make_cfg, tmp_path):
    cfg, sequences = make_cfg(UNCLIPPED), ragged()
    without = gradients(cfg, batch_of(tmp_path, sequences))
    others = [s | {"trainable": False, "agent": "opponent"} for s in make_sequences(4, seed=5)]
    batch = batch_of(tmp_path, [*others[:2], *sequences, *others[2:]])
    metrics, grads, logp_T = gradients(cfg, batch)
    same(without[1], grads, 1e-6)
    assert metrics["loss"] == pytest.approx(without[0]["loss"], abs=1e-6)
    first, second = (sum(len(s["tokens"]) for s in part) for part in (others[:2], others[2:]))
    (tmp_path / "batches").mkdir()
    trainer.log_step(tmp_path, 0, metrics | {"time/step_s": 1.0}, logp_T)
    kept = load_file(tmp_path / "batches" / "logp_000000.safetensors")["logp"]
    assert not kept[:first].any() and not kept[-second:].any()
    torch.testing.assert_close(kept[first:-second], without[2], atol=1e-6, rtol=0)


def test_a_head_in_chunks_is_a_full_log_softmax(make_cfg, tmp_path, monkeypatch):
    cfg, batch = make_cfg(), batch_of(tmp_path, ragged(12, longest=18))
    monkeypatch.setattr(trainer.Policy, "CHUNK", 7 * 102)
    policy, plain = trainer.build_policy(cfg), plain_model(cfg)
    ours = policy(trainer.collate(batch.sequences, CPU))
    theirs = scored(plain, batch.sequences)
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)
    (ours[0].sum() + ours[1].sum()).backward()
    (theirs[0].sum() + theirs[1].sum()).backward()
    assert_gradients_of(plain, policy, 1e-4)


def test_the_gradient_of_the_head_adds_up_in_fp32(make_cfg, tmp_path, monkeypatch):
    """bf16, in chunks of 2 tokens or all at once: a sum in bf16 would lose what each of so many chunks adds."""
    batch, found = batch_of(tmp_path, make_sequences(24)), []
    for chunk in (2 * 102, 1 << 26):
        monkeypatch.setattr(trainer.Policy, "CHUNK", chunk)
        found.append(gradients(make_cfg("trainer.dtype=bf16", UNCLIPPED), batch)[1]["model.lm_head.weight"])
    assert (found[0] - found[1]).norm() < 3e-3 * found[1].norm()


# --- several optimizer steps on a batch -------------------------------------------------------------------------------


def test_minibatches_partition_a_batch():
    sequences = [{"number": i} for i in range(11)]

    def drawn(seed, num):
        return [[s["number"] for s in part] for part in trainer.draw_minibatches(sequences, seed, num)]

    parts = drawn((0, 3, 1), 4)
    assert sorted(sum(parts, [])) == list(range(11)) and sorted(map(len, parts)) == [2, 3, 3, 3]
    assert parts == drawn((0, 3, 1), 4) and parts not in (drawn((0, 3, 0), 4), drawn((0, 4, 1), 4), drawn((1, 3, 1), 4))
    assert len(drawn((0, 0, 0), 20)) == 11 and drawn((0, 0, 0), 1) == [list(range(11))]


def test_a_rank_without_a_row_computes_the_shortest_of_the_pass(make_cfg, tmp_path, monkeypatch):
    """Not the first of the batch, which may be the longest."""
    cfg = make_cfg("trainer.micro_batch_size=1", "max_seq_len=40")
    batch = batch_of(tmp_path, ragged(11, longest=36))
    lens = [len(s["tokens"]) for s in batch.sequences]
    monkeypatch.setattr(trainer.dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(trainer.dist, "get_rank", lambda: 1)
    parts = trainer.partition_by_length(lens, 40, 2, *trainer.PADDING["cpu"])
    policy = SimpleNamespace(device=CPU)
    for part, micro in zip(parts, trainer.make_micros(policy, batch.sequences, batch.info, cfg), strict=True):
        longest = max(lens[i] for i in part)
        assert micro["ids_BW"].shape[1] <= 4 * math.ceil(longest / 4)
        if len(part) == 1:
            assert not micro["mask_N"].any() and not micro["ce_N"].any()


@pytest.mark.parametrize("updates, minibatches", [(1, 1), (1, 3), (2, 3)])
@pytest.mark.parametrize("weight, is_known", [("sequence_mask", True), ("sequence_mask", False), ("", False)])
def test_pi_old_is_the_policy_before_the_first_update(
    weight, is_known, updates, minibatches, make_cfg, tmp_path, monkeypatch
):
    """With an importance weight, and if nobody knows the sampler's probabilities, so that the ratio starts at 1;
    whichever part comes first. And the batch gets as many optimizer steps as asked for."""
    more = [f"trainer.updates_per_batch={updates}", f"trainer.minibatches={minibatches}", "trainer.learning_rate=1e-2"]
    cfg = make_cfg(*more, f"trainer.importance={'importance:' * bool(weight)}{weight}")
    sequences = ragged()
    if not is_known:
        sequences = [s | {"old_logp": [math.nan] * len(s["tokens"])} for s in sequences]
        with pytest.raises(RunError, match="old_logp is not finite"):
            batch_of(tmp_path, sequences)
    batch = batch_of(tmp_path, sequences, offline=True)
    is_loss = torch.cat([s["mask"] | (s["ce"] != 0) for s in batch.sequences])
    before_T = torch.zeros(len(is_loss))
    before_T[is_loss] = scored(plain_model(cfg), batch.sequences)[0].detach()
    honest, moved = trainer.compute_loss, []

    def spy(micro, logp_N, entropy_N, t):
        returned = honest(micro, logp_N, entropy_N, t)
        trained_N = micro["mask_N"] | (micro["ce_N"] != 0)
        for name in ["prox_logp_N"] * bool(weight) + ["old_logp_N"] * (not is_known):
            expected_N = before_T[micro["at_N"]][trained_N]
            torch.testing.assert_close(micro[name][trained_N], expected_N, atol=1e-5, rtol=0)
        moved.append((logp_N - before_T[micro["at_N"]])[trained_N].abs().max().item())
        return returned

    monkeypatch.setattr(trainer, "compute_loss", spy)
    policy = trainer.build_policy(cfg)
    optimizer = adamw(policy, 1e-2)
    trainer.train_step(policy, optimizer, batch, 0, cfg)
    assert {int(state["step"]) for state in optimizer.state.values()} == {updates * minibatches}
    assert (max(moved) > 1e-2) == (updates * minibatches > 1)


def test_prox_logp_is_there_with_importance_alone(make_cfg, tmp_path, monkeypatch):
    """Otherwise a loss that reads it would get the policy's own log-probabilities, and a ratio that is always 1."""

    def loss(micro, logp_N, entropy_N):
        return (logp_N - micro["prox_logp_N"]).exp() * -micro["adv_N"], {}

    monkeypatch.setitem(trainer.LOSSES, "cispo", loss)
    cfg = make_cfg("trainer.minibatches=2")
    policy = trainer.build_policy(cfg)
    with pytest.raises(KeyError, match="prox_logp_N"):
        trainer.train_step(policy, adamw(policy, 1e-2), batch_of(tmp_path, ragged()), 0, cfg)


def test_a_demonstration_alone_costs_no_pass_before_the_first_update(make_cfg, tmp_path):
    """Nobody sampled it, so its old_logp is nan, but no ratio is taken of it."""
    sequences = ragged()
    num = len(sequences[0]["tokens"])
    shown = {"mask": np.zeros(num), "ce": np.arange(num) > 0, "old_logp": [math.nan] * num}
    batch = batch_of(tmp_path, [sequences[0] | shown, *sequences[1:]], offline=True)
    cfg = make_cfg("trainer.minibatches=2")
    trainer.add_fields(trainer.build_policy(cfg), batch.sequences, batch.info, cfg)
    assert not any("prox_logp" in s for s in batch.sequences)


# --- compiled, cast, without waiting ----------------------------------------------------------------------------------


COMPILED = {  # backend, tolerance, configuration
    "lora, sharded, recomputed": ("aot_eager", 2e-2, [*LORA, "trainer.dtype=bf16"]),
    "full": ("inductor", 1e-5, ["trainer.gradient_checkpointing=false"]),
    "lora, recomputed": ("inductor", 1e-5, [*LORA]),
    "bf16": ("inductor", 2e-2, ["trainer.gradient_checkpointing=false", "trainer.dtype=bf16"]),
}


@pytest.mark.parametrize(
    "mode", [pytest.param(m, marks=pytest.mark.long) if "ind" in COMPILED[m][0] else m for m in COMPILED]
)
def test_compiled_blocks_have_the_gradients_of_plain_ones(mode, make_cfg, tmp_path, monkeypatch):
    """FSDP2 hands a block views of its inputs in the first pass and none when it is recomputed. Dynamo must not compile
    two graphs for them: they save different tensors, and torch.utils.checkpoint refuses that."""
    backend, tolerance, more = COMPILED[mode]
    how, batch = ["trainer.gradient_checkpointing=true", UNCLIPPED, *more], batch_of(tmp_path, make_sequences(24))
    plain = gradients(make_cfg("trainer.compile=false", *how), batch)
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=backend))
    torch._dynamo.reset()
    compiled = gradients(make_cfg("trainer.compile=true", *how), batch)
    same(plain[1], compiled[1], tolerance)
    assert compiled[0]["loss"] == pytest.approx(plain[0]["loss"], abs=tolerance)


LONG = [["trainer.use_lora=true"], ["trainer.use_lora=true", "trainer.dtype=bf16"]]


@pytest.mark.parametrize("how", [[], *some(LONG, 0)])
def test_every_pass_of_a_run_is_compiled(how, make_cfg, monkeypatch):
    """Dynamo runs a block uncompiled, without a word, once its code has more graphs than a limit. Those of all blocks
    count together: in training and not, with gradients and without, for one row and more."""
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    torch._dynamo.reset()
    cfg = make_cfg("trainer.compile=true", "trainer.gradient_checkpointing=true", *how)
    policy, draw = trainer.build_policy(cfg), torch.Generator().manual_seed(0)
    with torch._dynamo.config.patch(fail_on_recompile_limit_hit=True):
        trainer.check_policy(policy, cfg)
        for _ in range(4):
            with torch.no_grad():  # the canary
                trainer.score(policy.eval(), trainer.random_rows(policy, cfg), 10**6)
            policy.train()
            for num, width in ((1, 40), (3, 33), (8, 9)):
                rows = torch.randint(64, [num, width], generator=draw).tolist()
                trainer.score(policy, rows, 10**6).sum().backward()


class Waits(TorchDispatchMode):
    """Notes what makes a CPU wait for a GPU: numbers that leave it, and shapes that depend on values."""

    def __init__(self):
        super().__init__()
        self.found, self.is_on = [], False

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.overloadpacket.__name__
        indices = args[1] if name in ("index", "index_put_", "index_put", "_index_put_impl_") else ()
        is_masked = any(x is not None and x.dtype == torch.bool for x in indices)
        if self.is_on and (is_masked or name in ("_local_scalar_dense", "nonzero", "masked_select", "_unique2")):
            # Transformers looks for packed rows once a pass, where it makes a mask: a bubble of one launch.
            if not any("masking_utils" in frame.filename for frame in traceback.extract_stack()):
                self.found.append(name)
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("is_plain", [True, False])
def test_nothing_waits_for_the_device_inside_the_micro_batch_loop(is_plain, make_cfg, tmp_path, monkeypatch):
    more = ["trainer.beta=0.1", "trainer.gradient_checkpointing=true", "trainer.importance=importance:sequence_mask"]
    cfg, seen = make_cfg("trainer.micro_batch_size=1", *([] if is_plain else [*LORA, *more])), Waits()
    policy, batch = trainer.build_policy(cfg), batch_of(tmp_path, ragged())
    forward, clip = trainer.Policy.forward, torch.nn.utils.clip_grad_norm_
    passes = []

    def begin(policy, micro):
        seen.is_on = len(passes) > 0 and policy.training  # not in the reference's passes
        passes.append(1)
        return forward(policy, micro)

    def end(params, norm):
        seen.is_on = False
        return clip(params, norm)

    monkeypatch.setattr(trainer.Policy, "forward", begin)
    monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", end)
    with seen:
        trainer.train_step(policy, adamw(policy), batch, 0, cfg)
        assert len(passes) > 2 and not seen.found
        seen.is_on = True
        assert torch.ones(3)[torch.tensor([True, False, True])].sum().item() == 2
    assert seen.found == ["index", "_local_scalar_dense"]  # it can find them


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_full_training_in_16_bits_maps_the_files_and_trains_in_fp32(dtype, make_cfg, tmp_path):
    """Files are mapped in their own dtype, once for all ranks of a node; a file in fp32 loses nothing."""
    plain_model(make_cfg()).to(dtype).save_pretrained(tmp_path / "saved")
    cfg = make_cfg("trainer.dtype=bf16", model=tmp_path / "saved")
    assert {p.dtype for p in trainer.load_model(cfg).parameters()} == {dtype}
    policy, file = trainer.build_policy(cfg), load_file(tmp_path / "saved" / "model.safetensors")
    for name, p in policy.model.named_parameters():
        assert p.dtype == torch.float32 and trainer.full(p).equal(file[name].float()), name


def test_temperatures_are_not_rounded_in_bf16(make_cfg, tmp_path):
    """FSDP2 casts inputs to the compute dtype; 0.6 would become 0.6016 and bias every ratio."""
    seen = []
    policy = trainer.build_policy(make_cfg("trainer.dtype=bf16"))
    head = policy.head
    policy.head = lambda *x: seen.append(x[3]) or head(*x)
    batch = batch_of(tmp_path, [make_sequences(1)[0] | {"temperature": 0.6}])
    policy(trainer.collate(batch.sequences, CPU))
    assert seen[0].dtype == torch.float32 and set(seen[0].tolist()) == {torch.tensor(0.6).item()}


def test_gradients_in_fp16_keep_their_direction_however_many_tokens_a_step_has(make_cfg, tmp_path, monkeypatch):
    """4M tokens, and a residual stream of 50, as large models have. Divided by the tokens, gradients would be below
    what fp16 can hold: the embedding's cosine would be 0.98."""
    model = plain_model(make_cfg())
    weight = model.get_input_embeddings().weight
    weight.data.mul_(50 / weight.square().mean().sqrt().item())
    model.save_pretrained(tmp_path / "large")
    batch = batch_of(tmp_path, make_sequences(32))
    monkeypatch.setattr(trainer, "count_weights", lambda sequences, weight: 4_000_000 if weight == "mask" else 0)
    found = []
    for dtype in ("fp32", "fp16"):
        cfg = make_cfg(f"trainer.dtype={dtype}", UNCLIPPED, model=tmp_path / "large")
        policy = trainer.build_policy(cfg)
        before = {name: trainer.full(p.detach()).clone() for name, p in policy.trained().items()}
        trainer.train_step(policy, torch.optim.SGD(policy.trained().values(), lr=1e9), batch, 0, cfg)
        found.append({name: trainer.full(p.detach()) - before[name] for name, p in policy.trained().items()})
    for name, step in found[0].items():
        if "layers.0.self_attn" not in name:  # with such inputs its attention hardly matters
            assert torch.cosine_similarity(step.flatten(), found[1][name].flatten(), 0) > 0.999, name


def test_gradients_that_overflow_fp16_do_so_once_or_twice(make_cfg, tmp_path):
    """Large rewards: a step is skipped, and those after it have a smaller scale, which a checkpoint keeps."""
    sequences = [s | {"reward": 3e3 * s["reward"]} for s in make_sequences(32)]
    cfg = make_cfg("trainer.dtype=fp16", "trainer.advantage=mean")
    policy = trainer.build_policy(cfg)
    skipped = []
    for step in range(3):
        metrics, _ = trainer.train_step(policy, adamw(policy), batch_of(tmp_path, sequences), step, cfg)
        skipped.append(metrics["optim/skipped"])
    assert skipped[0] == 1 and skipped[-1] == 0 and trainer.full(policy.extra["fp16_scale"]) < 1


# --- LoRA and the reference -------------------------------------------------------------------------------------------


def weights_of(policy, dtype=torch.float32, adapters=False):
    found = {}
    for group in trainer.stream_weights(policy.model, dtype, adapters):
        assert not group.keys() & found.keys()
        found |= group
    return found


def test_lora_starts_as_the_base_and_merges_exactly(make_cfg, tmp_path):
    micro = trainer.collate(batch_of(tmp_path, make_sequences()).sequences, CPU)
    base, policy = trainer.build_policy(make_cfg()), trainer.build_policy(make_cfg(*LORA))
    torch.testing.assert_close(policy(micro), base(micro), atol=1e-5, rtol=0)
    for module in policy.modules():
        if isinstance(module, trainer.LoRALinear):
            torch.nn.init.normal_(module.lora_B, std=0.02)
    before = {name: w.clone() for name, w in policy.state_dict().items()}
    with torch.no_grad():
        assert (policy(micro)[0] - base(micro)[0]).abs().max() > 1e-2
        merged = weights_of(policy)
        assert set(merged) == {name for name, _ in base.model.named_parameters()}
        base.model.load_state_dict(merged, strict=False)
        torch.testing.assert_close(policy(micro), base(micro), atol=1e-5, rtol=0)
    assert all(torch.equal(w, before[name]) for name, w in policy.state_dict().items())  # the base was not touched


def test_lora_trains_its_factors_alone(make_cfg, models, tmp_path):
    _, grads, _ = gradients(make_cfg(*LORA), batch_of(tmp_path, make_sequences()))
    assert grads and all("lora_" in name for name in grads)
    for target, model in (("q_prj", "untied"), ("proj", "untied"), ("lm_head", "tied")):
        with pytest.raises(RunError, match=f"'{target}' is none of the untied linear layers, .*q_proj"):
            trainer.build_policy(make_cfg(*LORA, f'trainer.lora_target_modules=["{target}"]', model=models[model]))


def move_reference(policy, scale):
    for name in [name for name in policy.extra if name.startswith("ref/")]:
        policy.extra[name] = policy.extra[name] + scale * torch.randn_like(policy.extra[name])


def k3(logp, ref):
    return (ref - logp).exp() - (ref - logp) - 1


@pytest.mark.parametrize("lora", [True, False])
def test_the_reference_is_the_policy_as_it_began(lora, make_cfg, tmp_path):
    cfg = make_cfg(f"trainer.use_lora={str(lora).lower()}", "trainer.beta=0.1", "trainer.learning_rate=1e-2")
    batch, policy = batch_of(tmp_path, make_sequences()), trainer.build_policy(cfg)
    micro = trainer.collate(batch.sequences, CPU)
    start = policy(micro)[0].detach()
    first, _ = trainer.train_step(policy, adamw(policy), batch, 0, cfg)
    now, held = policy(micro)[0].detach(), [p.detach().clone() for p in policy.parameters()]
    second, _, _ = gradients(cfg, batch, policy)
    assert first["policy/kl_ref"] == pytest.approx(0, abs=1e-6) and k3(now, start).mean() > 1e-4
    assert second["policy/kl_ref"] == pytest.approx(k3(now, start).mean().item(), rel=1e-4)
    assert all(torch.equal(a, b.detach()) for a, b in zip(held, policy.parameters()))  # swapped back to the bit


def test_the_reference_has_no_dropout(make_cfg, tmp_path):
    cfg = make_cfg("trainer.use_lora=true", "trainer.lora_dropout=0.5", "trainer.beta=0.1")
    policy, batch = trainer.build_policy(cfg), batch_of(tmp_path, make_sequences())
    move_reference(policy, 1)
    found = []
    for _ in range(2):
        trainer.add_fields(policy, batch.sequences, batch.info, cfg)
        found.append(torch.cat([s["ref_logp"] for s in batch.sequences]))
    reference.swap(policy)  # whose B is not 0
    micro = trainer.collate(batch.sequences, CPU)
    assert found[0].any() and torch.equal(*found) and not torch.equal(policy(micro)[0], policy(micro)[0])


def with_bonus(micro, logp_N, entropy_N):
    """Dr. GRPO, which divides by a constant, and a bonus for entropy."""
    loss_N, logs = trainer.dr_grpo(micro, logp_N, entropy_N)
    return loss_N - 0.5 * entropy_N, logs


@pytest.mark.parametrize("loss", ["cispo", "grpo", "dr_grpo", "losses:gspo", "bonus"])
def test_kl_and_bonus_are_token_means_whatever_the_loss_divides_by(loss, make_cfg, tmp_path):
    """What beta adds to loss and gradient is beta times the mean of k3 over the policy's tokens, in several
    micro-batches."""
    batch, found = batch_of(tmp_path, ragged()), []
    has_bonus = loss == "bonus"
    with_it = ["trainer.loss=test_trainer:with_bonus"] if has_bonus else [f"trainer.loss={loss}", "trainer.beta=0.5"]
    for more in (with_it, [f"trainer.loss={'dr_grpo' if has_bonus else loss}"]):
        cfg = make_cfg(*more, UNCLIPPED, "trainer.micro_batch_size=2")
        policy = trainer.build_policy(cfg)
        torch.manual_seed(1)
        move_reference(policy, 0.02)
        found.append(gradients(cfg, batch, policy))
        if more is with_it:
            trainer.add_fields(policy, batch.sequences, batch.info, cfg)
            micro = trainer.collate(batch.sequences, CPU)
            logp_N, entropy_N = policy(micro)
            added_N = -0.5 * entropy_N if has_bonus else 0.5 * k3(logp_N, micro["ref_logp_N"])
            added = added_N[micro["mask_N"]].mean()
            names = policy.trained()
            expected = dict(zip(names, torch.autograd.grad(added, list(names.values()))))
    assert found[0][0]["loss"] - found[1][0]["loss"] == pytest.approx(added.item(), abs=1e-5)
    same(expected, {name: found[0][1][name] - found[1][1][name] for name in expected})


# --- numerics and schedule --------------------------------------------------------------------------------------------


def nan_on_rank_1(micro, logp_N, entropy_N):
    """Each rank logs something of its own as well."""
    rank = os.environ["RANK"]
    return logp_N * (math.nan if rank == "1" else 1.0), {f"policy/of_{rank}": torch.ones_like(logp_N)}


def nan_loss(micro, logp_N, entropy_N):
    return logp_N * math.nan, {}


def test_three_steps_without_a_finite_gradient_end_the_run(make_cfg, tmp_path):
    make_cfg()
    saved = write_batches(tmp_path / "saved", 3)
    own = ["trainer.loss=test_trainer:nan_loss", f"output_dir={tmp_path}"]
    with pytest.raises(RunError, match="a KL above 1, in three consecutive steps; step 2: ") as e:
        replays([[tmp_path / "test.toml", "--replay", saved, *own]])
    assert e.value.code == 5
    (metrics,) = tmp_path.glob("**/metrics.jsonl")
    assert [line["step"] for line in lines(metrics)] == [0, 1] and "NaN" not in metrics.read_text()


def test_a_step_of_several_that_is_skipped_makes_no_batch_useless():
    metrics = trainer.norm_metrics([math.inf, 1.0, 2.0]) | {"policy/kl_sampler": 0.0}
    assert metrics["optim/skipped"] == 1 and trainer.count_useless(2, metrics, 0, False) == 0
    metrics |= trainer.norm_metrics([math.inf, math.nan])
    assert trainer.count_useless(1, metrics, 0, False) == 2


def test_one_improbable_token_is_no_policy_far_away(make_cfg, tmp_path):
    """One of 200 tokens that the sampler found e^12 times less probable, step after step."""
    cfg = make_cfg()
    policy = trainer.build_policy(cfg)
    sequences = make_sequences(32)
    logp = iter(scored(policy.model, sequences)[0].tolist())
    for s in sequences:
        s["old_logp"] = [next(logp) if is_said else 0.0 for is_said in s["mask"]]
    sequences[0]["old_logp"][-1] -= 12
    idle = trainer.make_optimizer(policy, cfg.trainer._replace(learning_rate=0.0))
    metrics, _ = trainer.train_step(policy, idle, batch_of(tmp_path, sequences), 0, cfg)
    num = sum(sum(s["mask"]) for s in sequences)
    assert 0.1 < metrics["policy/kl_sampler"] < 1 and metrics["policy/beyond_2_nats"] == pytest.approx(1 / num)
    assert trainer.count_useless(2, metrics, 0, False) == 0


def test_a_replay_of_nothing_is_refused(make_cfg, tmp_path):
    make_cfg()
    with pytest.raises(RunError, match=f"--replay {tmp_path}: no step_.*safetensors there") as e:
        trainer.main([str(tmp_path / "test.toml"), "--replay", str(tmp_path)])
    assert e.value.code == 2 and not list(tmp_path.glob("**/*-replay-*"))


def test_a_replay_has_the_schedule_of_its_batches_and_says_what_it_leaves_out(make_cfg, tmp_path):
    """Of 150 steps that are planned, three exist; of three, two are wanted."""
    keys = ("max_steps=150", "trainer.lr_scheduler_type=linear", "trainer.warmup_steps=10")
    make_cfg()
    saved = write_batches(tmp_path / "saved", 4)
    run_trainer(tmp_path / "test.toml", f"output_dir={tmp_path}", *keys, "--replay", saved)
    rates = [line["optim/lr"] for line in lines(tmp_path / "test-replay-cispo" / "metrics.jsonl")]
    assert rates == pytest.approx([1e-3 / 3, 2e-3 / 3, 1e-3, 0.5e-3])
    done = run_trainer(tmp_path / "test.toml", f"output_dir={tmp_path}/b", *keys, "max_steps=2", "--replay", saved)
    assert "warning: max_steps = 2 leaves out 2 of the 4 batches" in done.stdout


@pytest.mark.parametrize("override, message", [
    *((f"trainer.{key}=my_los:f", "'my_los:f'.*there is no module 'my_los'")
      for key in ("loss", "importance", "optimizer", "advantage")),
    ("trainer.loss=losses:gsp", "'losses:gsp'.*does not define 'gsp'"),
    ("trainer.loss_args.epsilon=0.3", r"trainer.loss_args = {'epsilon': 0.3}: got an unexpected.* ratio_cap=5.0\)"),
    ("trainer.loss=hooks:needs", r"trainer.loss_args = {}: missing a required argument: 'cap'; the function takes"),
    ("trainer.advantage=hooks:lonely", r"trainer.advantage = {}: too many positional arguments; .* takes \(r_G\)"),
])  # fmt: skip
def test_what_a_hook_lacks_is_reported_before_a_model_is_loaded(override, message, make_cfg, tmp_path, monkeypatch):
    make_cfg()
    (tmp_path / "hooks.py").write_text(
        "def needs(micro, logp_N, entropy_N, cap):\n    return logp_N, {}\n\n\ndef lonely(r_G):\n    return r_G\n"
    )
    saved = write_batches(tmp_path / "saved", 1)
    monkeypatch.setattr(trainer, "build_policy", None)
    with pytest.raises(RunError, match=message) as e:
        replays([[tmp_path / "test.toml", "--replay", saved, override, f"output_dir={tmp_path}"]])
    assert e.value.code == 2


HOOK = """
import trainer

trainer.ADVANTAGES["mean"] = lambda r_G, group: 0 * r_G + 2.0


def write_final(run_dir, policy, cfg):
    layer = policy.model.model.layers[0].self_attn.q_proj
    (run_dir / "layer").write_text(str(type(layer) is trainer.LoRALinear))


trainer.write_final = write_final


def loss(micro, logp_N, entropy_N, scale=1.0):
    return -scale * micro["adv_N"] * logp_N, {"mine/adv": micro["adv_N"], "mine/scale": 0 * logp_N + scale}
"""


@pytest.mark.slow
def mean_loss(micro, logp_N, entropy_N):
    return (micro["adv_N"] * logp_N).mean(), {}


def no_logs(micro, logp_N, entropy_N):
    return micro["adv_N"] * logp_N


def number_as_log(micro, logp_N, entropy_N):
    return micro["adv_N"] * logp_N, {"mine": 1.0}


def one_advantage(rewards_G, group):
    return rewards_G[:1]


def no_weights(micro, logp_N):
    return None


class NoClosure(torch.optim.SGD):
    def step(self):
        super().step()


def no_closure(params, t):
    return NoClosure(params, lr=0.1)


@pytest.mark.parametrize("override, message", [
    ("trainer.loss=test_trainer:mean_loss", r":mean_loss', loss returned \(\), not a tensor of shape \(\d+,"),
    ("trainer.loss=test_trainer:no_logs", r"no_logs' returned no pair: loss_N and \{metric: value_N\}"),
    ("trainer.loss=test_trainer:number_as_log", r"number_as_log', mine returned 1.0, not a tensor"),
    ("trainer.advantage=test_trainer:one_advantage", r"one_advantage' returned \(1,\), not a tensor of shape \(4,\)"),
    ("trainer.importance=test_trainer:no_weights", "no_weights' returned None, not a tensor"),
])  # fmt: skip
def test_what_a_hook_returns_is_never_broadcast(override, message, make_cfg, tmp_path):
    """A loss of one number would count once for each token, an advantage for the first rollout alone."""
    cfg = make_cfg(override)
    policy = trainer.build_policy(cfg)
    with pytest.raises(RunError, match=message) as e:
        trainer.train_step(policy, adamw(policy), batch_of(tmp_path, make_sequences()), 0, cfg)
    assert e.value.code == 4


def test_an_optimizer_that_could_not_be_resumed_is_refused_at_the_start(make_cfg):
    cfg = make_cfg("trainer.optimizer=test_trainer:no_closure")
    with pytest.raises(RunError, match="step.. takes no closure, and could not be resumed") as e:
        trainer.make_optimizer(trainer.build_policy(cfg), cfg.trainer)
    assert e.value.code == 2


def test_what_is_logged_is_a_mean_over_all_passes(make_cfg, tmp_path):
    """The clip only works in the second pass, which the first alone would never show."""
    sequences = make_sequences()
    for s in sequences:
        s["old_logp"] = [x if not m else math.nan for x, m in zip(s["old_logp"], s["mask"])]
    clips, norms = [], []
    for passes in (1, 2):
        cfg = make_cfg("trainer.loss=grpo", "trainer.loss_args.epsilon=1e-6", f"trainer.updates_per_batch={passes}")
        policy = trainer.build_policy(cfg)
        metrics, _ = trainer.train_step(policy, adamw(policy), batch_of(tmp_path, sequences, offline=True), 0, cfg)
        clips.append(metrics["policy/clip_frac"])
        norms.append(metrics["optim/grad_norm"])
    assert clips[0] == 0.0 and 0.1 < clips[1] <= 0.5 and norms[0] != norms[1]


def test_a_hook_that_imports_trainer_gets_the_module_that_runs(make_cfg, tmp_path):
    """A module beside the TOML changes a table and a function of `python trainer.py`; its loss takes an argument."""
    make_cfg()
    (tmp_path / "hook.py").write_text(HOOK)
    saved = write_batches(tmp_path / "saved", 1)
    more = ["trainer.loss=hook:loss", "trainer.loss_args.scale=3", f"output_dir={tmp_path}", *LORA]
    run_trainer(tmp_path / "test.toml", "--replay", saved, *more)
    run = run_of(tmp_path, "test")
    (metrics,) = lines(run / "metrics.jsonl")
    assert metrics["mine/adv"] == 2.0 and metrics["mine/scale"] == 3.0 and (run / "layer").read_text() == "True"


def test_gpus_that_torch_cannot_use_are_no_reason_to_train_on_the_cpu(make_cfg, monkeypatch):
    """The driver is too old for this build of torch; a build for CPUs would have been asked for."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    with pytest.raises(RunError, match="finds no GPU: is the driver too old") as e:
        trainer.start_distributed(make_cfg())
    assert e.value.code == 2


def test_the_learning_rates_schedule():
    t = SimpleNamespace(lr_scheduler_type="linear", warmup_steps=3, warmup_ratio=0.0)
    rates = [trainer.schedule(step, t, 10) for step in range(10)]
    assert rates[:4] == [0.25, 0.5, 0.75, 1.0] and rates[-1] == pytest.approx(1 / 7)
    t.lr_scheduler_type, t.warmup_ratio = "cosine", 0.5
    assert trainer.schedule(5, t, 10) == 1 and trainer.schedule(9, t, 10) == pytest.approx(0.0955, abs=1e-3)
    t.lr_scheduler_type = "constant"
    assert trainer.schedule(0, t, 10) == 1


def test_every_group_of_an_optimizer_follows_the_schedule(make_cfg, tmp_path):
    """Each from its own rate: a recipe may give matrices another one than the rest."""
    cfg = make_cfg("trainer.lr_scheduler_type=linear", "trainer.warmup_ratio=0.0", "max_steps=4")
    policy = trainer.build_policy(cfg)
    first, *others = policy.trained().values()
    optimizer = torch.optim.AdamW([{"params": [first], "lr": 0.5}, {"params": others, "lr": 0.1}])
    for step, share in enumerate((1.0, 0.75, 0.5)):
        metrics, _ = trainer.train_step(policy, optimizer, batch_of(tmp_path, make_sequences()), step, cfg)
        assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([0.5 * share, 0.1 * share])
        assert metrics["optim/lr"] == pytest.approx(0.5 * share)


# --- batch files ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("change, message", [
    ({"old_logp": [math.nan] * 9}, "old_logp is not finite"), ({"old_logp": [-math.inf] * 9}, "old_logp is not finite"),
    ({"mask": [1] * 9}, "first token is a loss token"), ({"ce": [1.0] * 9}, "first token is a loss token"),
    ({"old_logp": [0.0] * 8}, "8 values for 9 tokens"),
])  # fmt: skip
def test_bad_batches_are_refused(change, message, tmp_path):
    sequence = {"tokens": [5] * 9, "mask": [0] + [1] * 8, "old_logp": [-1.0] * 9, "turn": [0] * 9, "reward": 1.0}
    with pytest.raises(RunError, match=message) as e:
        batch_of(tmp_path, [sequence | change])
    assert e.value.code == 4


@pytest.mark.parametrize("tokens", [[5] * 8 + [103], [-1] * 9, []])
def test_tokens_that_the_model_does_not_know_are_refused(tokens):
    sequences = [{"tokens": torch.tensor([5, 102])}, {"tokens": torch.tensor(tokens)}]
    with pytest.raises(RunError, match="cannot be trained on: a sequence of") as e:
        trainer.check_tokens(SimpleNamespace(vocab=103), sequences)
    unknown = [token for token in tokens if not 0 <= token < 103]
    assert e.value.code == 4 and f"ids {unknown} in" in str(e.value)


def test_batches_that_were_once_wrong_or_infinite(make_cfg, tmp_path):
    """No limit of tokens in the file; a group of one; tokens that the policy would never say; no loss token."""
    sequences = make_sequences(8)
    save_batch(tmp_path / "a.safetensors", sequences, {"run": {"run": "test"}, "step": 0})
    batch = trainer.load_batch(tmp_path / "a.safetensors")
    assert batch.info["max_tokens"] == max(len(s["tokens"]) for s in sequences)
    assert math.isfinite(gradients(make_cfg("trainer.loss=dr_grpo"), batch)[0]["loss"])
    with pytest.raises(RunError, match="trainer.advantage = 'test_trainer:endless': not finite"):
        gradients(make_cfg("trainer.advantage=test_trainer:endless"), batch_of(tmp_path, sequences))
    strange = [s | {"old_logp": [-200.0 * m for m in s["mask"]]} for s in sequences]
    metrics = gradients(make_cfg(), batch_of(tmp_path, strange))[0]
    assert all(math.isfinite(value) for value in metrics.values()) and metrics["policy/kl_sampler"] > 100
    masked = [s | {"mask": [0] * len(s["mask"])} for s in sequences]
    for loss in ("cispo", "losses:gspo"):
        metrics, grads, logp_T = gradients(make_cfg(f"trainer.loss={loss}"), batch_of(tmp_path, masked))
        assert metrics["loss"] == 0 and not logp_T.any() and not any(grad.any() for grad in grads.values())


def test_batch_files_of_former_versions_are_read(make_cfg, tmp_path):
    """`samples` with an age, no weights for imitation, no agents, a ledger."""
    sequences = make_sequences()
    new = batch_of(tmp_path, sequences)
    flat = {"tokens": torch.int32, "mask": torch.bool, "old_logp": torch.float32, "turn": torch.int32}
    data = {name: torch.tensor(sum((s[name] for s in sequences), []), dtype=dtype) for name, dtype in flat.items()}
    data["lens"] = torch.tensor([len(s["tokens"]) for s in sequences], dtype=torch.int32)
    samples = [{key: s[key] for key in s if key not in (*flat, "staleness")} | {"age": 1} for s in sequences]
    info = INFO | {"rollouts": 12, "ledger": {"test": {"next": 12, "open": []}}}
    save_file(data, tmp_path / "old.safetensors", {"samples": json.dumps(samples), "info": json.dumps(info)})
    old = trainer.load_batch(tmp_path / "old.safetensors")
    cfg = make_cfg()
    same(gradients(cfg, new)[1], gradients(cfg, old)[1], 1e-9)


def test_batches_of_another_step_or_run_and_damaged_ones_are_refused(make_cfg, tmp_path):
    cfg, path = make_cfg(), tmp_path / "step_000000.safetensors"
    batch_of(tmp_path, make_sequences(), run=identity(cfg))
    assert len(trainer.load_batch(path, cfg, 0).sequences) == 12
    other = make_cfg("seed=5")
    for code, message, *given in [(4, "holds batch 0", cfg, 1), (2, "seed was 0, now 5", other, 0)]:
        with pytest.raises(RunError, match=message) as e:
            trainer.load_batch(path, *given)
        assert e.value.code == code
    blob = path.read_bytes()
    for damaged in (blob[:-1], blob[:100], b"", blob[:9] + bytes([blob[9] ^ 1]) + blob[10:]):
        path.write_bytes(damaged)
        with pytest.raises(RunError, match="step_000000.safetensors is damaged") as e:
            trainer.load_batch(path)
        assert e.value.code == 6


# --- checkpoints ------------------------------------------------------------------------------------------------------


@pytest.fixture
def trained(make_cfg, tmp_path):
    """trained(cfg) -> a policy after one step and its optimizer; tmp_path is ready for checkpoints."""
    (tmp_path / "checkpoints").mkdir()

    def go(cfg):
        policy = trainer.build_policy(cfg)
        optimizer = adamw(policy)
        trainer.train_step(policy, optimizer, batch_of(tmp_path, make_sequences()), 0, cfg)
        return policy, optimizer

    return go


def test_checkpoints_are_kept_and_resumed_from_with_what_a_recipe_adds(trained, make_cfg, tmp_path):
    cfg = make_cfg("checkpoint.keep=2")
    policy, optimizer = trained(cfg)
    for step in (1, 2, 3):
        policy.extra = {"count": torch.tensor(step), "mean": torch.full((2, 3), float(step))}
        trainer.save_checkpoint(tmp_path, step, policy, optimizer, cfg)
    assert sorted(p.name for p in (tmp_path / "checkpoints").iterdir()) == ["step_000002", "step_000003"]
    last = tmp_path / "checkpoints" / "step_000003"
    with pytest.raises(RunError, match="seed was 0, now 5") as e:
        trainer.load_checkpoint(last, policy, optimizer, make_cfg("seed=5"))
    assert e.value.code == 2
    fresh = trainer.build_policy(cfg)
    again = adamw(fresh)
    assert trainer.load_checkpoint(last, fresh, again, cfg) == 3
    a, b = (trainer.state_of(p, o) for p, o in ((policy, optimizer), (fresh, again)))
    assert a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)
    assert fresh.extra["count"] == 3 and fresh.extra["mean"].tolist() == [[3.0] * 3] * 2


def test_a_checkpoint_is_written_in_files_that_fit_into_memory(trained, make_cfg, tmp_path, monkeypatch):
    """Each goes through host memory twice: a rank of a 4B model would need 24 GB for a single one."""
    monkeypatch.setattr(trainer, "FILE", 1 << 17)
    cfg = make_cfg()
    policy, optimizer = trained(cfg)
    trainer.save_checkpoint(tmp_path, 1, policy, optimizer, cfg)
    last = tmp_path / "checkpoints" / "step_000001"
    sizes = [path.stat().st_size for path in last.glob("*.safetensors")]
    tensors = trainer.state_of(policy, optimizer)
    largest = max(tensor.nbytes for tensor in tensors.values())
    assert len(sizes) > 3 and max(sizes) < (1 << 17) + largest + 20_000
    fresh = trainer.build_policy(cfg)
    again = adamw(fresh)
    trainer.load_checkpoint(last, fresh, again, cfg)
    loaded = trainer.state_of(fresh, again)
    assert tensors.keys() == loaded.keys() and all(torch.equal(tensors[key], loaded[key]) for key in tensors)


def test_what_a_recipe_makes_of_a_parameter_comes_back_sharded_like_it(trained, make_cfg, tmp_path):
    cfg = make_cfg("trainer.dtype=bf16")
    policy, optimizer = trained(cfg)
    name, p = list(policy.trained().items())[0]
    policy.extra[f"ema/{name}"] = p.detach().clone()
    policy.extra[f"count/{name}"] = torch.tensor(3)
    trainer.save_checkpoint(tmp_path, 1, policy, optimizer, cfg)
    fresh = trainer.build_policy(cfg)
    trainer.load_checkpoint(tmp_path / "checkpoints" / "step_000001", fresh, adamw(fresh), cfg)
    ema = fresh.extra[f"ema/{name}"]
    assert type(ema) is type(p.detach()) and ema.lerp_(fresh.trained()[name].detach(), 0.5).shape == p.shape
    assert torch.equal(trainer.full(ema), trainer.full(p.detach())) and fresh.extra[f"count/{name}"] == 3


def test_state_that_an_optimizer_makes_late_is_not_lost_without_a_word(trained, make_cfg, tmp_path):
    cfg = make_cfg()
    policy, optimizer = trained(cfg)
    for p, state in optimizer.state.items():
        state["slow"] = p.detach().clone()
    trainer.save_checkpoint(tmp_path, 1, policy, optimizer, cfg)
    with pytest.raises(RunError, match="tensors that this optimizer does not make in its first step: .*slow") as e:
        trainer.load_checkpoint(tmp_path / "checkpoints" / "step_000001", policy, adamw(policy), cfg)
    assert e.value.code == 2


def test_a_checkpoint_before_any_step_has_succeeded_loads(trained, make_cfg, tmp_path):
    """Steps whose gradient is not finite are skipped; by then AdamW has no moments."""
    cfg = make_cfg()
    policy = trainer.build_policy(cfg)
    trainer.save_checkpoint(tmp_path, 1, policy, adamw(policy), cfg)
    again = adamw(policy)
    assert trainer.load_checkpoint(tmp_path / "checkpoints" / "step_000001", policy, again, cfg) == 1
    assert not any(again.state.values())


@pytest.mark.parametrize("betas", [(0, 0.1), (0.1, 0)])
def test_a_reference_begins_where_a_run_is_resumed_with_it(betas, trained, make_cfg, tmp_path):
    """beta may be turned on or off between two starts; the checkpoint has no reference, or one too many."""
    before, after = (make_cfg(f"trainer.beta={beta}") for beta in betas)
    trainer.save_checkpoint(tmp_path, 1, *trained(before), before)
    policy = trainer.build_policy(after)
    optimizer = adamw(policy)
    assert trainer.load_checkpoint(tmp_path / "checkpoints" / "step_000001", policy, optimizer, after) == 1
    metrics, _ = trainer.train_step(policy, optimizer, batch_of(tmp_path, make_sequences()), 1, after)
    assert (metrics.get("policy/kl_ref", 0) > 1e-9) == (betas[1] > 0)


@pytest.mark.parametrize("kind", ["*.safetensors", "state.json"])
@pytest.mark.parametrize("is_cut", [True, False])
def test_a_damaged_checkpoint_is_named(is_cut, kind, trained, make_cfg, tmp_path):
    cfg = make_cfg()
    policy, optimizer = trained(cfg)
    trainer.save_checkpoint(tmp_path, 2, policy, optimizer, cfg)
    last = tmp_path / "checkpoints" / "step_000002"
    (file,) = last.glob(kind)
    if is_cut:
        os.truncate(file, file.stat().st_size // 2)
    else:
        file.unlink()
    with pytest.raises(RunError, match=rf"{file} is damaged.* Remove {last}, then the one before it") as e:
        trainer.load_checkpoint(last, policy, optimizer, cfg)
    assert e.value.code == 6


# --- whole replays: one rank here, two in one torchrun ----------------------------------------------------------------

RESUMED = ["trainer.use_lora=true", "trainer.lora_dropout=0.2", "trainer.beta=0.1", "trainer.ref_sync_steps=2"]
RESUMED += ["checkpoint.every=2", "checkpoint.keep=9", "trainer.dtype=bf16", "trainer.minibatches=2"]
MODES = {
    "full": ["trainer.beta=0.1", "trainer.ref_sync_steps=2", "checkpoint.every=2"],
    "minibatches": ["trainer.minibatches=3", "trainer.updates_per_batch=2", "trainer.importance=importance:token_mask"],
    "lora": ["trainer.use_lora=true", "trainer.beta=0.1"],
    "bf16": ["trainer.dtype=bf16"],
    "replicas": ["trainer.replicas=2", "checkpoint.every=2"],
    "broken": ["trainer.loss=test_trainer:nan_on_rank_1", "max_steps=2"],
    "a": [*RESUMED, "max_steps=6"],
    "b": [*RESUMED, "max_steps=4"],
    "b again": [*RESUMED, "max_steps=6"],
}


def arguments_of(path, out, mode):
    saved = ["--replay", path / "saved", f"output_dir={path / out}", f"run_name={mode.split()[0]}"]
    return [path / "test.toml", *saved, "trainer.micro_batch_size=1", "max_steps=3", *MODES[mode]]


@pytest.fixture(scope="module")
def saved(models, tmp_path_factory):
    """A directory with six batches, and their configuration."""
    path = tmp_path_factory.mktemp("replays")
    (path / "test.toml").write_text(BASE.format(model=models["untied"]))
    write_batches(path / "saved", 6)
    return path


def torchrun(num, *args, **env):
    """Runs ranks.py. Returns what it prints."""
    command = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={num}", "--standalone"]
    command += [str(ROOT / "tests" / "ranks.py"), *map(str, args)]
    env = os.environ | {"OMP_NUM_THREADS": "1"} | env
    done = subprocess.run(command, capture_output=True, text=True, timeout=180, env=env)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def on_ranks(num, path, modes):
    runs = [[str(word) for word in arguments_of(path, str(num), mode)] for mode in modes]
    (path / "runs.json").write_text(json.dumps(runs))
    torchrun(num, path / "runs.json")


@pytest.fixture(scope="module")
def two_ranks(saved):
    """The directory in which all modes ran on two ranks, under 2/."""
    on_ranks(2, saved, MODES)
    return saved


def run_of(path, mode):
    return next(path.glob(f"{mode}-replay-*"))


def tensors_of(folder):
    """{(file, name): tensor}, one file per rank."""
    files = [load_file(path) for path in sorted(folder.glob("*.safetensors"))]
    return {(i, name): x for i, file in enumerate(files) for name, x in file.items()}


def assert_same_run(one, two, tolerance, weights):
    for a, b in zip(lines(one / "metrics.jsonl"), lines(two / "metrics.jsonl"), strict=True):
        for key in ("loss", "optim/grad_norm", "policy/entropy", "policy/kl_sampler", "policy/kl_ref"):
            assert a.get(key, 0) == pytest.approx(b.get(key, 0), abs=tolerance, rel=tolerance), key
    for step in range(3):
        a, b = (load_file(run / "batches" / f"logp_{step:06d}.safetensors")["logp"] for run in (one, two))
        torch.testing.assert_close(a, b, atol=10 * tolerance, rtol=0)
        assert torch.equal(a != 0, b != 0)
    a, b = (tensors_of(run / "final") for run in (one, two))
    assert a.keys() == b.keys()
    assert max((a[key].float() - b[key].float()).abs().max().item() for key in a) < weights


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["full", "minibatches", "lora", "bf16", "replicas"])
def test_two_ranks_are_one(mode, two_ranks):
    replays([[*arguments_of(two_ranks, "1", mode), "trainer.replicas=1"]])
    one, two = (run_of(two_ranks / ranks, mode) for ranks in "12")
    assert_same_run(one, two, *((2e-2, 1e-2) if mode == "bf16" else (1e-5, 1e-5)))


@pytest.mark.long
def test_two_replicas_of_two_ranks_are_one(saved):
    on_ranks(4, saved, ["replicas"])
    replays([[*arguments_of(saved, "1 for 4", "replicas"), "trainer.replicas=1"]])
    assert_same_run(*(run_of(saved / ranks, "replicas") for ranks in ("1 for 4", "4")), 1e-5, 1e-5)


@pytest.mark.slow
def test_a_non_finite_gradient_on_one_rank_changes_nothing_on_any(two_ranks, models):
    run = run_of(two_ranks / "2", "broken")
    for m in lines(run / "metrics.jsonl"):
        assert m["optim/skipped"] == 1
        assert m["policy/of_0"] > 0 < m["policy/of_1"] and m["policy/of_0"] + m["policy/of_1"] == pytest.approx(1)
    before, after = (load_file(path / "model.safetensors") for path in (models["untied"], run / "final"))
    assert all(before[key].equal(after[key]) for key in before)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", ["1", "2"])
def test_resume_is_bit_for_bit(ranks, two_ranks):
    """Six steps in one go, and after four of them from the checkpoint: LoRA, dropout, minibatches, a reference that
    moves."""
    if ranks == "1":
        replays([arguments_of(two_ranks, "1", mode) for mode in ("a", "b", "b again")])
    a, b = (run_of(two_ranks / ranks, name) for name in "ab")
    for folder in ("checkpoints/step_000006", "final"):
        one, two = tensors_of(a / folder), tensors_of(b / folder)
        assert one.keys() == two.keys() and all(torch.equal(one[key], two[key]) for key in one), folder
    assert not torch.equal(*(load_file(path)["logp"] for path in sorted((a / "batches").glob("logp*"))[:2]))
    one, two = (lines(run / "metrics.jsonl") for run in (a, b))
    assert [x["step"] for x in two] == list(range(6)) and [x["loss"] for x in one] == [x["loss"] for x in two]


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["full", "replicas"])
def test_a_checkpoint_of_two_ranks_resumes_on_one_and_holds_no_pickle(mode, two_ranks):
    two = run_of(two_ranks / "2", mode)
    alone = two_ranks / "alone" / two.name
    shutil.copytree(two / "checkpoints" / "step_000002", alone / "checkpoints" / "step_000002")
    files = list((alone / "checkpoints" / "step_000002").iterdir())
    assert len([file for file in files if file.suffix == ".safetensors"]) >= 2
    assert {file.suffix for file in files} == {".safetensors", ".json"}
    replays([[*arguments_of(two_ranks, "alone", mode), "trainer.replicas=1"]])
    assert [m["step"] for m in lines(alone / "metrics.jsonl")] == [2]
    a, b = (load_file(run / "final" / "model.safetensors") for run in (alone, two))
    assert max((a[key] - b[key]).abs().max().item() for key in a) < 1e-5


def test_an_optimizer_may_ask_for_the_names_of_its_parameters(make_cfg):
    cfg = make_cfg("trainer.optimizer=test_trainer:sgd_with_names")
    policy = trainer.build_policy(cfg)
    named = trainer.make_optimizer(policy, cfg.trainer).named
    assert len(named) > 20 and all(p is policy.get_parameter(name) for name, p in named.items())


def sgd_with_names(params, t, names):
    optimizer = torch.optim.SGD(params, t.learning_rate)
    optimizer.named = dict(zip(names, params))
    return optimizer


def of_the_last(params, t):
    return torch.optim.AdamW(params[-2:], torch.tensor(0.0))


def test_gradients_that_an_optimizer_leaves_out_do_not_pile_up(make_cfg, tmp_path):
    """Nor is its rate, a tensor, a line of metrics.jsonl that cannot be written."""
    cfg = make_cfg("trainer.optimizer=test_trainer:of_the_last", UNCLIPPED)
    policy = trainer.build_policy(cfg)
    optimizer = trainer.make_optimizer(policy, cfg.trainer)
    batch = batch_of(tmp_path, make_sequences())
    found = [trainer.train_step(policy, optimizer, batch, step, cfg)[0] for step in (0, 1, 2)]
    norms = [metrics["optim/grad_norm"] for metrics in found]
    assert norms[0] > 0 and norms == pytest.approx([norms[0]] * 3, rel=1e-5)
    assert type(found[0]["optim/lr"]) is float


def test_the_check_of_the_policy_holds_two_long_rows_at_most(make_cfg, monkeypatch):
    cfg = make_cfg()
    policy = trainer.build_policy(cfg)
    asked = []
    score = trainer.score
    monkeypatch.setattr(trainer, "score", lambda policy, rows, most: asked.append(rows) or score(policy, rows, most))
    trainer.check_policy(policy, cfg)
    longest = [max(map(len, rows)) for rows in asked]
    assert max(longest) == cfg.run.max_seq_len and [len(rows) for rows in asked][longest.index(max(longest))] == 2


def sgd(params, t):
    return torch.optim.SGD(params, t.learning_rate)


def adafactor(params, t):
    return transformers.Adafactor(params, lr=t.learning_rate, relative_step=False, scale_parameter=False)


def test_another_optimizer(make_cfg, models, tmp_path):
    """One step of plain gradient descent."""
    cfg, saved = make_cfg(UNCLIPPED), write_batches(tmp_path / "saved", 1)
    _, grads, _ = gradients(cfg, trainer.load_batch(saved / "step_000000.safetensors"))
    more = ["trainer.optimizer=test_trainer:sgd", "trainer.learning_rate=1", UNCLIPPED, f"output_dir={tmp_path}"]
    replays([[tmp_path / "test.toml", "--replay", saved, *more]])
    before, after = (load_file(p / "model.safetensors") for p in (models["untied"], run_of(tmp_path, "test") / "final"))
    same(grads, {f"model.{name}": before[name] - after[name] for name in after})


@pytest.mark.parametrize("returned, error", [
    ("micro['no_such_N'], {}", "KeyError: 'no_such_N'"),
    ("logp_N + logp_N[1:], {}", "RuntimeError: The size of tensor a .*"),
])  # fmt: skip
def test_a_mistake_in_a_hook_is_named_and_no_death(returned, error, make_cfg, tmp_path):
    """The exit code says that it is for the user to mend, the last line where."""
    make_cfg()
    (tmp_path / "mine.py").write_text(f"def loss(micro, logp_N, entropy_N):\n    return {returned}\n")
    saved = write_batches(tmp_path / "saved", 1)
    more = [f"output_dir={tmp_path}", "--replay", saved, "trainer.loss=mine:loss"]
    done = run_trainer(tmp_path / "test.toml", *more, check=False)
    assert done.returncode == 4 and re.search(f"exit=4 {error} in loss, mine.py:2\n", done.stderr)
    assert "Traceback" in done.stderr


def test_a_replay_goes_on_with_the_same_advantage_or_not_at_all(make_cfg, tmp_path):
    make_cfg()
    saved = write_batches(tmp_path / "saved", 2)
    more = [tmp_path / "test.toml", f"output_dir={tmp_path}", "--replay", saved]
    second = (saved / "step_000001.safetensors").rename(tmp_path / "second")
    replays([more])
    second.rename(saved / "step_000001.safetensors")
    with pytest.raises(RunError, match=r"test-replay-cispo began with another \['trainer.advantage'\]"):
        replays([[*more, "trainer.advantage=std"]])
    replays([more])
    assert len(lines(tmp_path / "test-replay-cispo" / "metrics.jsonl")) == 2


def test_an_optimizer_that_cannot_be_saved_is_refused_after_one_step(make_cfg, tmp_path):
    """And not with the first checkpoint, which in a short run is the last step's."""
    make_cfg(UNCLIPPED)
    saved = write_batches(tmp_path / "saved", 2)
    more = ["trainer.optimizer=test_trainer:adafactor", UNCLIPPED, f"output_dir={tmp_path}"]
    with pytest.raises(RunError, match="trainer.optimizer: step in its state is no tensor") as e:
        replays([[tmp_path / "test.toml", "--replay", saved, *more]])
    run = run_of(tmp_path, "test")
    assert e.value.code == 2 and not (run / "metrics.jsonl").read_text() and not any((run / "checkpoints").iterdir())


# --- final/ -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lora", [False, True])
@pytest.mark.parametrize("model", ["untied", "tied"])
def test_final_loads_in_transformers_and_peft(model, lora, trained, make_cfg, models, tmp_path):
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoTokenizer

    cfg = make_cfg(f"trainer.use_lora={str(lora).lower()}", "trainer.learning_rate=1e-2", model=models[model])
    policy, _ = trained(cfg)
    trainer.write_final(tmp_path, policy, cfg)
    theirs = AutoModelForCausalLM.from_pretrained(models[model] if lora else tmp_path / "final", dtype="auto")
    assert AutoTokenizer.from_pretrained(tmp_path / "final").chat_template and theirs.dtype == torch.float32
    if lora:
        theirs = PeftModel.from_pretrained(theirs, tmp_path / "final")
    else:
        (tmp_path / "half").mkdir()
        trainer.write_final(tmp_path / "half", policy, make_cfg("trainer.dtype=bf16"))
        half = AutoModelForCausalLM.from_pretrained(tmp_path / "half" / "final", dtype="auto")
        assert half.dtype == half.config.dtype == torch.bfloat16
        policy.model.config.dtype = torch.float32
    batch = batch_of(tmp_path, make_sequences(8))
    with torch.no_grad():
        ours_N = policy.eval()(trainer.collate(batch.sequences, CPU))[0]
        torch.testing.assert_close(ours_N, scored(theirs.eval(), batch.sequences)[0], atol=1e-5, rtol=0)
        assert (ours_N - scored(plain_model(cfg), batch.sequences)[0]).abs().max() > 1e-3


def test_final_has_the_models_generation_config_and_the_runs_chat_template(make_cfg, models, tmp_path):
    """The former even if it is one that Transformers reads, but refuses to write."""
    shutil.copytree(models["untied"], tmp_path / "model")
    theirs = {"do_sample": False, "temperature": 0.6, "eos_token_id": [0, 5]}
    (tmp_path / "model" / "generation_config.json").write_text(json.dumps(theirs))
    (tmp_path / "mine.jinja").write_text("{{ messages[0]['content'] }} mine")
    cfg = make_cfg(f"chat_template={tmp_path / 'mine.jinja'}", model=tmp_path / "model")
    trainer.write_final(tmp_path, trainer.build_policy(cfg), cfg)
    assert json.loads((tmp_path / "final" / "generation_config.json").read_text()) == theirs
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "final")
    assert tokenizer.apply_chat_template([{"role": "user", "content": "a"}], tokenize=False) == "a mine"


# --- weights to the servers -------------------------------------------------------------------------------------------


def test_weights_arrive_as_sent(make_cfg, tmp_path, monkeypatch):
    """Both ends in this process, with tensors of odd sizes in two groups, one of them not in the policy's dtype."""
    arrived, worker = {}, trainer.WeightReceiver()
    worker.rank, worker.device = 0, CPU
    worker.reload_weights = lambda weights_iterator: arrived.update((name, w.clone()) for name, w in weights_iterator)
    routes = []

    def post(sender, url, path, body=None):
        routes.append(path)
        return {"results": [getattr(worker, body["method"])(*body["args"])]} if path == "/collective_rpc" else {}

    monkeypatch.setattr(trainer.WeightSender, "post", post)
    monkeypatch.setattr(trainer.WeightSender, "wait_ready", lambda sender, url: trainer.configs.served_name(sender.cfg))
    cfg = make_cfg("trainer.dtype=bf16", 'inference.urls=["http://127.0.0.1:1"]', "trainer.sync_timeout_s=5")
    sender = trainer.WeightSender(cfg, tmp_path, CPU)
    sender.connect()
    draw = torch.Generator().manual_seed(0)
    shapes = {"a": (3,), "large": (1000, 777), "b": (7, 11, 13), "c": (1 << 19,), "d": (1, 1), "e": ()}
    sent = {name: torch.randn(shape, generator=draw).bfloat16() for name, shape in shapes.items()}
    sent["d"] = sent["d"].float()

    def stream(model, dtype, adapters):
        yield {name: sent[name] for name in ("a", "large")}
        yield {name: sent[name] for name in ("b", "c", "d", "e")}

    monkeypatch.setattr(trainer, "stream_weights", stream)
    for version in (1, 2):
        trainer.send_weights(sender, SimpleNamespace(model=None), version, cfg)
        assert arrived.keys() == sent.keys() and all(torch.equal(arrived[name], sent[name]) for name in sent)
        assert all(arrived[name].dtype == sent[name].dtype for name in sent)
        sent = {name: w + 1 for name, w in sent.items()}
    pause = "/pause?mode=keep&clear_cache=false"
    assert routes == ["/collective_rpc", *[pause, "/collective_rpc", "/resume"] * 2]
    sent["c"] /= 0
    with pytest.raises(RunError, match=r"sync of version 3: 1 of 4 tensors are not finite: c") as e:
        trainer.send_weights(sender, SimpleNamespace(model=None), 3, cfg)
    assert e.value.code == 5 and routes[-1] != "/resume"


@pytest.mark.slow
def test_a_sync_holds_one_group_at_a_time(make_cfg, tmp_path):
    """Two ranks, ten blocks of a tenth of the parameters each. A sync that kept all groups would be noticed."""
    toy.make_model(tmp_path / "model", toy.make_tokenizer(), layers=10, hidden=512)
    make_cfg(model=tmp_path / "model")
    said = torchrun(2, "--memory", tmp_path / "test.toml", MALLOC_MMAP_THRESHOLD_="65536")
    for rank in json.loads(said.splitlines()[-1]):
        assert rank["largest_mib"] == pytest.approx(rank["all_mib"] / 10, rel=0.1)
        assert rank["streamed_mib"] < 2 * rank["largest_mib"] and rank["kept_mib"] > 8 * rank["largest_mib"], rank


@pytest.mark.slow
@pytest.mark.long
def test_200_syncs_of_two_ranks_that_are_never_in_step(make_cfg, fake_servers, tmp_path):
    """Random sleeps before each: a gather of the ranks and the broadcast to the server never wait for each other."""
    make_cfg()
    more = f'output_dir = "{tmp_path}"\nmax_steps = 300\ninference.urls = ["{fake_servers()}"]\n'
    (tmp_path / "test.toml").write_text(more + (tmp_path / "test.toml").read_text())
    torchrun(2, "--syncs", tmp_path / "test.toml", ROLEMODEL_RUN_ID="run")
    assert (tmp_path / "test" / "version").read_text() == "199"


def test_a_node_that_knows_no_server_takes_part_in_the_canary(make_cfg, tmp_path):
    batch = batch_of(tmp_path, make_sequences())
    assert len(trainer.canary_rows(batch, make_cfg("inference.urls=[]"))) > 0


def test_a_worker_that_fails_ends_a_trainer_that_waits_for_nccl():
    """In NCCL no error reaches rank 0, which here waits for ever."""
    code = """
import time
from concurrent.futures import ThreadPoolExecutor
import trainer
def post(*_):
    raise trainer.RunError(trainer.DIED, "no weights today")
sender = trainer.WeightSender.__new__(trainer.WeightSender)
sender.spec, sender.urls, sender.pool, sender.post = {"backend": "nccl"}, ["a"], ThreadPoolExecutor(1), post
with sender.workers_do("receive_weights", [{}]):
    time.sleep(3600)
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 3 and "[trainer] exit=3 no weights today" in done.stderr, done.stderr


def test_the_canary_asks_for_the_plain_distribution(make_cfg):
    """What a request leaves out, a server that was started by hand takes from a model's generation_config.json."""
    asked = []
    sender = SimpleNamespace(cfg=make_cfg(), post_all=lambda path, body: asked.append(body) or [])
    assert trainer.WeightSender.ask(sender, 0, [[1, 2]], 4) == []
    plain = {"temperature": 1, "top_p": 1, "top_k": 0, "min_p": 0, "repetition_penalty": 1, "presence_penalty": 0}
    assert asked[0] == asked[0] | plain
    assert make_cfg("inference.args.enforce_eager=true").inference.args["generation_config"] == "vllm"


@pytest.mark.parametrize("is_honest", [True, False])
def test_in_16_bits_eight_times_as_many_tokens_decide_at_the_limit(is_honest, make_cfg, monkeypatch):
    """32 tokens of an honest server may be above it by chance."""
    cfg = make_cfg("trainer.dtype=bf16", 'inference.urls=["http://127.0.0.1:1"]', "max_seq_len=256")
    policy = trainer.build_policy(cfg)
    asked = []

    def say(version, rows, num):
        asked.append(num)
        ids = [[5] * num for _ in rows]
        true_N = trainer.score(policy, [row + said for row, said in zip(rows, ids)], num)
        off = 0.3 if num == 4 or not is_honest else 0.01
        return list(zip(ids, (true_N + off).view(len(rows), num).tolist()))

    sender = SimpleNamespace(urls=cfg.inference.urls, ask=say)
    if is_honest:
        assert trainer.canary(sender, policy, 0, cfg, None)["sync/dlogp_mean"] == pytest.approx(0.01, abs=1e-3)
    else:
        with pytest.raises(RunError, match="canary after sync of version 0.*may be at most 0.2"):
            trainer.canary(sender, policy, 0, cfg, None)
    assert asked == [4, 32]


def test_in_fp32_there_is_no_second_look_and_prompts_keep_their_length(make_cfg, tmp_path):
    """In fp32 the largest difference decides, which no further token makes smaller."""
    cfg = make_cfg('inference.urls=["http://127.0.0.1:1"]', "max_seq_len=256", "trainer.micro_batch_size=1")
    policy = trainer.build_policy(cfg)
    asked = []

    def say(version, rows, num):
        asked.append(max(map(len, rows)))
        return [([5] * num, [-50.0] * num) for _ in rows]

    sequences = make_sequences(longest=200)
    for s in sequences:
        s["mask"] = [0] * (len(s["mask"]) - 1) + [1]
    sender = SimpleNamespace(urls=cfg.inference.urls, ask=say)
    with pytest.raises(RunError, match="canary after sync of version 0"):
        trainer.canary(sender, policy, 0, cfg, batch_of(tmp_path, sequences))
    assert len(asked) == 1 and asked[0] == 256 // 8 - 4


def test_old_batches_go_with_the_checkpoints_that_need_them(trained, make_cfg, tmp_path):
    cfg = make_cfg("checkpoint.keep_batches=1", "checkpoint.keep=2")
    policy, optimizer = trained(cfg)
    (tmp_path / "batches").mkdir()
    for n in range(12):
        for name in ("step", "logp"):
            (tmp_path / "batches" / f"{name}_{n:06d}.safetensors").touch()
    for step in (4, 8, 12):
        trainer.save_checkpoint(tmp_path, step, policy, optimizer, cfg)
    left = sorted(path.name for path in (tmp_path / "batches").iterdir())
    assert left == sorted(f"{name}_{n:06d}.safetensors" for name in ("step", "logp") for n in range(7, 12))


def test_an_adapter_that_no_request_can_name_is_removed_where_it_lies(make_cfg, tmp_path):
    """On the server's machine, which need not be the trainer's."""
    cfg = make_cfg(*LORA, "trainer.dtype=bf16", "orchestrator.max_staleness=1")
    for version in range(6):
        old = adapters.no_longer_named(tmp_path, version, cfg)
        path = adapters.directory(tmp_path, version, cfg)
        adapters.write(path, {"a": torch.zeros(1)}, cfg.trainer._asdict(), "m", str(old))
    assert {path.name[-1] for path in (tmp_path / "adapters").iterdir()} == {"3", "4", "5"}


def test_whatever_answers_before_the_server_is_waited_for(make_cfg, tmp_path, monkeypatch):
    cfg = make_cfg('inference.urls=["http://127.0.0.1:1"]', "inference.startup_timeout=1")
    sender = trainer.WeightSender(cfg, tmp_path, CPU)
    good = SimpleNamespace(status_code=200, json=lambda: {"data": [{"id": "mine"}]})
    replies = [SimpleNamespace(status_code=503, text="<html>starting</html>"), good]
    monkeypatch.setattr(sender, "http", SimpleNamespace(get=lambda url: replies.pop(0)))
    assert sender.wait_ready(cfg.inference.urls[0]) == "mine"
    bad = SimpleNamespace(status_code=502, text="<html>bad gateway")
    monkeypatch.setattr(sender, "http", SimpleNamespace(get=lambda url: bad))
    with pytest.raises(RunError, match="502 <html>bad gateway, for inference.startup_timeout = 1 s"):
        sender.wait_ready(cfg.inference.urls[0])


# --- one wrong line at a time: each of these alone saw a change of one line -------------------------------------------


@pytest.mark.parametrize("dtype", ["fp32", "fp16"])
def test_gradients_are_clipped_to_a_norm_over_all_parameters(dtype, make_cfg, tmp_path):
    """The optimizer gets the direction at the length max_grad_norm; what is logged is the length before."""
    batch = batch_of(tmp_path, make_sequences())
    before, whole, _ = gradients(make_cfg(f"trainer.dtype={dtype}", UNCLIPPED), batch)
    norm = math.sqrt(sum(grad.square().sum().item() for grad in whole.values()))
    after, clipped, _ = gradients(make_cfg(f"trainer.dtype={dtype}", f"trainer.max_grad_norm={norm / 3}"), batch)
    assert before["optim/grad_norm"] == pytest.approx(norm, rel=1e-3) == after["optim/grad_norm"]
    same({name: grad / 3 for name, grad in whole.items()}, clipped)


def test_adamw_has_the_rate_the_decay_and_the_beta_of_the_config(make_cfg):
    cfg = make_cfg("trainer.learning_rate=0.01", "trainer.weight_decay=0.1", "trainer.adam_beta2=0.95")
    (group,) = trainer.make_optimizer(trainer.build_policy(cfg), cfg.trainer).param_groups
    assert (group["lr"], group["weight_decay"], group["betas"]) == (0.01, 0.1, (0.9, 0.95))


def test_dropout_is_another_on_every_rank_and_at_every_step(make_cfg, monkeypatch):
    """With another seed as well, and the same if a step is made again."""
    optimizer = torch.optim.SGD([torch.zeros(1)], 0.1)

    def drawn(step, rank, seed=0):
        monkeypatch.setattr(trainer.dist, "get_rank", lambda: rank)
        trainer.begin_step(optimizer, step, make_cfg(f"seed={seed}"))
        return torch.rand(1).item()

    found = [drawn(step, rank) for step in (0, 1, 2) for rank in (0, 1)]
    assert len({*found, drawn(0, 0, seed=1)}) == 7 and drawn(1, 1) == found[3]


def test_every_pass_divides_the_batch_anew(make_cfg, tmp_path, monkeypatch):
    cfg, drawn, honest = make_cfg("trainer.updates_per_batch=2", "trainer.minibatches=3"), [], trainer.draw_minibatches

    def spy(sequences, seed, num):
        parts = honest(sequences, seed, num)
        drawn.append([[int(s["at"][0]) for s in part] for part in parts])
        return parts

    monkeypatch.setattr(trainer, "draw_minibatches", spy)
    policy = trainer.build_policy(cfg)
    for step in (0, 1):
        trainer.train_step(policy, adamw(policy), batch_of(tmp_path, make_sequences()), step, cfg)
    assert len(drawn) == len({str(parts) for parts in drawn}) == 4


def test_the_log_probability_that_is_kept_is_that_of_the_first_pass(make_cfg, tmp_path):
    cfg, batch = make_cfg("trainer.updates_per_batch=2"), batch_of(tmp_path, ragged())
    policy = trainer.build_policy(cfg)
    _, logp_T = trainer.train_step(policy, adamw(policy, 1e-2), batch, 0, cfg)
    torch.testing.assert_close(logp_T[logp_T != 0], scored(plain_model(cfg), batch.sequences)[0], atol=1e-5, rtol=0)


def test_the_reference_moves_by_alpha_after_every_so_many_batches(make_cfg, tmp_path):
    cfg = make_cfg("trainer.beta=0.1", "trainer.ref_sync_steps=2", "trainer.ref_sync_alpha=0.25")
    policy, batch = trainer.build_policy(cfg), batch_of(tmp_path, make_sequences())
    optimizer = adamw(policy, 1e-2)
    name, p = next(iter(policy.trained().items()))
    expected = p.detach().clone()
    for step in range(5):
        if step in (2, 4):
            expected.lerp_(p.detach(), 0.25)
        trainer.train_step(policy, optimizer, batch, step, cfg)
        torch.testing.assert_close(policy.extra[f"ref/{name}"], expected, atol=0, rtol=0)


def test_where_the_samplers_log_probability_is_unknown_the_ratio_is_one_and_has_a_gradient(make_cfg, tmp_path):
    sequences = [s | {"old_logp": [math.nan] * len(s["tokens"])} for s in make_sequences()]
    batch = batch_of(tmp_path, sequences, offline=True)
    same(*(gradients(make_cfg(f"trainer.loss={loss}", UNCLIPPED), batch)[1] for loss in ("cispo", "grpo")), 1e-6)


def test_the_scale_of_fp16_rises_again_to_what_it_was():
    policy = SimpleNamespace(extra={"fp16_scale": torch.tensor(8.0)})
    found = []
    for grad_norm in (math.inf, 1.0, *[1.0] * 200):
        trainer.adapt_loss_scale(policy, grad_norm)
        found.append(policy.extra["fp16_scale"].item())
    assert found[:2] == [0.5, pytest.approx(0.51)] and found[-1] == max(found) == 8.0


def test_the_canary_hears_every_server(make_cfg):
    cfg = make_cfg('inference.urls=["http://127.0.0.1:1", "http://127.0.0.1:2"]')
    policy = trainer.build_policy(cfg)

    def say(version, rows, num):
        true_N = trainer.score(policy, [[*row, *[5] * num] for row in rows], num)
        answers = [([5] * num, logps) for logps in true_N.view(len(rows), num).tolist()]
        return answers + [(ids, [x - off for x in logps]) for ids, logps in answers]

    sender = SimpleNamespace(urls=cfg.inference.urls, ask=say)
    off = 0.0
    assert trainer.canary(sender, policy, 0, cfg, None)["sync/dlogp_max"] < 1e-5
    off = 0.1
    with pytest.raises(RunError, match="canary after sync of version 0"):
        trainer.canary(sender, policy, 0, cfg, None)


@pytest.mark.parametrize("dtype, key", [("fp32", "sync/dlogp_max"), ("bf16", "sync/dlogp_mean")])
def test_max_sync_dlogp_overrides_the_limit(dtype, key, make_cfg):
    logp_N, other_N = torch.zeros(4), torch.tensor([0.0, 0.0, 0.0, 0.4])
    for limit, is_within in ((0.0, False), (0.09, False), (0.5, True)):
        t = make_cfg(f"trainer.dtype={dtype}", f"trainer.max_sync_dlogp={limit}").trainer
        numbers, problem = trainer.compare(logp_N, other_N, t, 0.05, "it")
        assert (not problem) == is_within and (is_within or key in problem.rpartition(";")[2])


def test_a_step_far_from_the_sampler_is_useless_unless_it_is_a_replay():
    far = {"optim/grad_norm": 1.0, "policy/kl_sampler": 1.1}
    assert trainer.count_useless(1, far, 0, False) == 2 and trainer.count_useless(1, far, 0, True) == 0
    assert trainer.count_useless(1, far | {"policy/kl_sampler": 0.9}, 0, False) == 0


def test_a_head_in_fp32_computes_in_fp32(make_cfg):
    model = plain_model(make_cfg()).bfloat16()
    policy = trainer.Policy(model, CPU, torch.float32)
    hidden_ND, target_N = torch.randn(9, 64).bfloat16(), torch.arange(9)
    weight_VD = model.get_output_embeddings().weight.float()
    found, _ = policy.head({"weight": weight_VD}, hidden_ND, target_N, torch.ones(9))
    expected = (hidden_ND.float() @ weight_VD.T).log_softmax(-1)[target_N, target_N]
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)


def test_no_version_is_live_before_its_canary(make_cfg, tmp_path, monkeypatch):
    def canary(*args):
        raise RunError(3, "differs")

    monkeypatch.setattr(trainer, "canary", canary)
    monkeypatch.setattr(trainer, "send_weights", lambda *args: None)
    with pytest.raises(RunError, match="differs"):
        trainer.sync_weights(SimpleNamespace(run_dir=tmp_path), None, 3, make_cfg())
    assert not (tmp_path / "version").exists()


def test_a_cap_on_logits_comes_before_the_temperature(make_cfg):
    """As in a sampler of Gemma 2, whose logits are capped before they are divided."""
    model = plain_model(make_cfg())
    model.config.final_logit_softcapping = 0.5
    hidden_ND, target_N, temperature_N = torch.randn(9, 64), torch.arange(9), torch.linspace(0.5, 1.5, 9)
    weight_VD = model.get_output_embeddings().weight
    found, _ = trainer.Policy(model, CPU).head({"weight": weight_VD}, hidden_ND, target_N, temperature_N)
    capped_NV = torch.tanh(hidden_ND @ weight_VD.T / 0.5) * 0.5
    expected = (capped_NV / temperature_N[:, None]).log_softmax(-1)[range(9), target_N]
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)


def test_what_is_not_trainable_has_no_part_in_a_baseline(make_cfg, tmp_path):
    """A rollout of the same group and agent, in which another version of the policy spoke."""
    cfg, sequences = make_cfg(UNCLIPPED), make_sequences(4)
    other = make_sequences(1, seed=5)[0] | {"trainable": False, "rollout": 4, "reward": 100.0}
    same(*(gradients(cfg, batch_of(tmp_path, found))[1] for found in (sequences, [*sequences, other])))


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_difference_that_is_no_number_is_a_problem(dtype, make_cfg):
    t = make_cfg(f"trainer.dtype={dtype}").trainer
    assert trainer.compare(torch.zeros(2), torch.tensor([0.0, math.nan]), t, 0.2, "it")[1]


def test_loras_factors_are_trained_in_fp32(make_cfg):
    policy = trainer.build_policy(make_cfg("trainer.use_lora=true", "trainer.dtype=bf16"))
    assert {p.dtype for p in policy.trained().values()} == {torch.float32}


def test_the_canary_has_no_dropout(make_cfg, monkeypatch):
    cfg, modes = make_cfg('inference.urls=["http://127.0.0.1:1"]'), []
    policy, score = trainer.build_policy(cfg), trainer.score
    monkeypatch.setattr(trainer, "score", lambda policy, *rest: modes.append(policy.training) or score(policy, *rest))

    def say(version, rows, num):
        true_N = score(policy, [[*row, *[5] * num] for row in rows], num)
        return [([5] * num, logps) for logps in true_N.view(len(rows), num).tolist()]

    trainer.canary(SimpleNamespace(urls=cfg.inference.urls, ask=say), policy, 0, cfg, None)
    assert modes == [False] and policy.training


def test_weights_whose_sum_overflows_are_finite():
    trainer.refuse_non_finite({"a": torch.full((4,), 3e38)}, "it")


def test_the_longer_of_two_warm_ups_counts():
    t = SimpleNamespace(lr_scheduler_type="linear", warmup_steps=3, warmup_ratio=0.2)
    assert trainer.schedule(3, t, 100) == 4 / 21 and trainer.schedule(20, t, 100) == 1


def test_loras_dropout_is_on_its_own_input_alone(make_cfg, tmp_path):
    """As long as B = 0 it changes nothing; the frozen layer always gets the whole input."""
    micro = trainer.collate(batch_of(tmp_path, make_sequences()).sequences, CPU)
    policy = trainer.build_policy(make_cfg("trainer.use_lora=true", "trainer.lora_dropout=0.5"))
    assert policy.training and torch.equal(policy(micro)[0], policy(micro)[0])


def test_after_known_prompts_the_canary_is_stricter(make_cfg, tmp_path):
    """0.1 nats are too many after a batch's prompts, and few after random ids."""
    cfg = make_cfg("trainer.dtype=bf16", 'inference.urls=["http://127.0.0.1:1"]')
    policy, batch = trainer.build_policy(cfg), batch_of(tmp_path, make_sequences())

    def say(version, rows, num):
        true_N = trainer.score(policy, [[*row, *[5] * num] for row in rows], num)
        return [([5] * num, logps) for logps in (true_N - 0.1).view(len(rows), num).tolist()]

    sender = SimpleNamespace(urls=cfg.inference.urls, ask=say)
    assert trainer.canary(sender, policy, 0, cfg, None)
    with pytest.raises(RunError, match="may be at most 0.05"):
        trainer.canary(sender, policy, 1, cfg, batch)


def test_a_policy_that_is_not_finite_is_written_into_no_checkpoint(trained, make_cfg, tmp_path):
    cfg = make_cfg()
    policy, optimizer = trained(cfg)
    next(iter(policy.trained().values())).data[0] = math.nan
    with pytest.raises(RunError, match="1 of .* tensors are not finite: policy/model") as e:
        trainer.save_checkpoint(tmp_path, 1, policy, optimizer, cfg)
    assert e.value.code == 5 and not any((tmp_path / "checkpoints").iterdir())


def test_a_replay_takes_batches_in_the_order_of_their_steps(make_cfg, tmp_path):
    for n in (2, 0, 10, 1):
        (tmp_path / f"step_{n:06d}.safetensors").touch()
    files = trainer.saved_batches(SimpleNamespace(replay=tmp_path, run=make_cfg("max_steps=9").run))
    assert [int(path.stem[5:]) for path in files] == [0, 1, 2, 10]


def test_every_worker_of_every_server_has_a_rank_of_its_own(make_cfg, tmp_path, monkeypatch):
    urls = 'inference.urls=["http://127.0.0.1:1", "http://127.0.0.1:2"]'
    keys = (urls, "inference.args.tensor_parallel_size=2", "inference.gpus=4")
    sender = trainer.WeightSender(make_cfg(*keys), tmp_path, CPU)
    asked = []
    monkeypatch.setattr(sender, "wait_ready", lambda url: trainer.configs.served_name(sender.cfg))
    monkeypatch.setattr(sender, "post", lambda url, path, body: asked.append((url[-1], body["args"][0]["first_rank"])))
    monkeypatch.setattr(trainer, "make_process_group", lambda store, rank, spec: asked.append(spec["size"]))
    sender.connect()
    assert sorted(asked, key=str) == [("1", 1), ("2", 3), 5]


def test_a_run_goes_on_from_the_last_checkpoint(trained, make_cfg, tmp_path):
    cfg = make_cfg("checkpoint.keep=9")
    policy, optimizer = trained(cfg)
    for step in (2, 4, 10):
        trainer.save_checkpoint(tmp_path, step, policy, optimizer, cfg)
    (tmp_path / "metrics.jsonl").write_text('{"step": 9}\n{"step": 10}\n')
    assert trainer.resume(tmp_path, policy, optimizer, cfg) == 10
    assert lines(tmp_path / "metrics.jsonl") == [{"step": 9}]


def test_gradients_of_several_ranks_add_up_in_fp32(make_cfg):
    policy = trainer.build_policy(make_cfg("trainer.dtype=bf16"))
    sharded = [module for module in policy.modules() if isinstance(module, trainer.fsdp.FSDPModule)]
    groups = [module._get_fsdp_state()._fsdp_param_group for module in sharded]
    assert len(groups) > 2 and {group.mp_policy.reduce_dtype for group in groups} == {torch.float32}


def test_max_tokens_is_the_runs_limit_and_not_the_longest_sequence(tmp_path):
    """dr_grpo divides by it: a constant, whatever the batch."""
    assert batch_of(tmp_path, make_sequences(), max_tokens=999).info["max_tokens"] == 999


def test_a_reward_of_zero_is_a_reward(make_cfg, tmp_path):
    """It counts in the baseline, and dr_grpo divides by its sequence."""
    sequences = [s | {"reward": reward} for s, reward in zip(make_sequences(4), (0.0, 0.0, 0.0, 1.0))]
    batch = batch_of(tmp_path, sequences)
    trainer.add_advantages(batch.sequences, make_cfg().trainer)
    assert [s["adv"][0].item() for s in batch.sequences] == [-0.25, -0.25, -0.25, 0.75]
    assert trainer.count_all(batch.sequences, batch.info)["num_sequences"] == 4


def test_a_checkpoint_that_lacks_a_parameter_does_not_load(trained, make_cfg, tmp_path):
    """It would keep what it began with, among others that are trained."""
    cfg = make_cfg()
    policy, optimizer = trained(cfg)
    p = next(iter(policy.trained().values())).requires_grad_(False)
    trainer.save_checkpoint(tmp_path, 1, policy, optimizer, cfg)
    p.requires_grad_(True)
    with pytest.raises(trainer.dcp.CheckpointException, match="Missing key .*policy/model"):
        trainer.load_checkpoint(tmp_path / "checkpoints" / "step_000001", policy, adamw(policy), cfg)


def test_all_batches_are_kept_unless_a_number_is_given(trained, make_cfg, tmp_path):
    cfg = make_cfg("checkpoint.keep=1")
    policy, optimizer = trained(cfg)
    (tmp_path / "batches").mkdir()
    first = tmp_path / "batches" / "step_000000.safetensors"
    first.touch()
    trainer.save_checkpoint(tmp_path, 9, policy, optimizer, cfg)
    assert first.exists()


def test_a_run_sends_the_weights_it_goes_on_with_and_each_steps_with_its_batch(make_cfg, tmp_path, monkeypatch):
    """Two steps, and a third in another start: the last step has a checkpoint, whatever checkpoint.every is."""
    keys, sent = ('inference.urls=["http://127.0.0.1:1"]', "checkpoint.every=0", f"output_dir={tmp_path}"), []
    folder = run_directory(make_cfg(*keys)) / "batches"
    for n in range(3):
        info = INFO | {"run": identity(make_cfg(*keys)), "step": n}
        save_batch(folder / f"step_{n:06d}.safetensors", make_sequences(seed=n), info)

    def sync(sender, policy, version, cfg, batch=None):
        sent.append((version, batch and batch.info["step"], policy.model.lm_head.weight.detach().clone()))
        return {}

    monkeypatch.setattr(trainer, "sync_weights", sync)
    monkeypatch.setattr(trainer.WeightSender, "connect", lambda sender: None)
    for steps in (2, 3):
        replays([[tmp_path / "test.toml", *keys, f"max_steps={steps}"]])
    assert [found[:2] for found in sent] == [(0, None), (1, 0), (2, 1), (2, None), (3, 2)]
    weights = [weight for _, _, weight in sent]
    assert weights[2].equal(weights[3]) and not weights[1].equal(weights[2])


def test_a_weight_below_zero_is_a_weight(tmp_path):
    """ce = -1 makes a token less probable."""
    (s,) = make_sequences(1)
    num = len(s["tokens"])
    batch = batch_of(tmp_path, [s | {"mask": [0] * num, "ce": [0.0] + [-1.0] * (num - 1)}])
    assert trainer.collate(batch.sequences, CPU)["ce_N"].tolist() == [-1.0] * (num - 1)


def test_sequences_that_name_no_rollout_are_rollouts_of_their_own(make_cfg, tmp_path):
    """Those that others have written may not."""
    sequences = [s | {"reward": reward} for s, reward in zip(make_sequences(2), (0.0, 1.0))]
    for s in sequences:
        del s["rollout"]
    batch = batch_of(tmp_path, sequences)
    trainer.add_advantages(batch.sequences, make_cfg().trainer)
    assert [s["adv"][0].item() for s in batch.sequences] == [-0.5, 0.5]


def test_a_server_that_refuses_a_request_of_the_trainers_ends_the_run(make_cfg, tmp_path, monkeypatch):
    """vLLM without its development mode knows no /pause."""
    sender = trainer.WeightSender(make_cfg('inference.urls=["http://127.0.0.1:1"]'), tmp_path, CPU)
    refusal = SimpleNamespace(status_code=404, text="Not Found")
    monkeypatch.setattr(sender, "http", SimpleNamespace(post=lambda url, json: refusal))
    with pytest.raises(RunError, match="/pause answered 404: Not Found") as e:
        sender.post_all("/pause")
    assert e.value.code == 3
