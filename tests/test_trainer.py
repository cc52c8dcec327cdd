"""trainer.py: losses against float64 by hand, and the equalities that rectangles, ranks, LoRA and resume must keep."""

import functools
import itertools
import json
import math
import os
import shutil
import statistics
import subprocess
import sys
import time
import traceback
from datetime import timedelta
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import transformers
from conftest import BASE, ROOT, lines, make_samples, run_trainer, some
from ranks import replays
from safetensors.torch import load_file
from torch.utils._python_dispatch import TorchDispatchMode

import trainer
from configs import RunError
from configs.algorithms import reference
from orchestrator import save_batch

CPU = torch.device("cpu")
INFO = {"run": {"run": "test"}, "step": 0, "rollouts": 12, "max_tokens": 16}


def ragged(num=24, seed=0, longest=24):
    """With all that a rectangle may hold: temperatures, forks (two samples of a rollout), samples of no loss token."""
    samples = make_samples(num, seed, longest=longest)
    for i, s in enumerate(samples):
        s["temperature"] = (1.0, 0.7, 1.3)[i % 3]
    for i in (3, 8):
        fork = make_samples(num, seed + 100, longest=longest)[i]
        samples.append(samples[i] | {k: fork[k] for k in ("tokens", "mask", "old_logp", "turn")})
    for i in (1, 5):
        samples[i]["mask"] = [0] * len(samples[i]["mask"])
    samples[0]["mask"][1:] = [1] * (len(samples[0]["mask"]) - 1)  # its prompt has one token
    return samples


def batch_of(path, samples, **info):
    file = path / "step_000000.safetensors"
    save_batch(file, samples, INFO | {"rollouts": len(samples)} | info)
    return trainer.load_batch(file)


def write_batches(path, num):
    path.mkdir()
    for n in range(num):
        save_batch(path / f"step_{n:06d}.safetensors", ragged(12, seed=n), INFO | {"step": n})
    return path


# --- losses and advantages --------------------------------------------------------------------------------------------

LOG_R = [-25.0, -1.0, -0.3, -0.1, 0.0, 0.1, 0.3, 1.0, 1.7, 25.0]  # logp - old_logp, on either side of each edge


def micro_of(old, adv, **counts):
    """One micro-batch that is the whole step."""
    micro = {"old_logp_N": old, "adv_N": adv, "mask_N": torch.ones(len(old), dtype=torch.bool), "tokens": len(old)}
    return micro | counts


def by_hand(loss, r, log_r, adv, delta):
    """d loss_N / d logp_N, from the formulas of the papers."""
    low, high = {"grpo": (0.8, 1.28), "dr_grpo": (0.8, 1.2)}.get(loss, (0, 0))
    inside = abs(log_r) < 20  # the clamp of the log ratio has no gradient outside
    if loss == "cispo":
        return -min(r, 5) * adv
    if loss == "sft":
        return -1.0
    capped = min(r, delta or math.inf)
    if capped * adv <= min(max(r, low), high) * adv:
        return -r * adv * inside * (r <= (delta or math.inf))
    return -r * adv * inside * (low < r < high)


@pytest.mark.parametrize("loss", ["cispo", "grpo", "grpo+delta", "dr_grpo", "sft"])
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_losses_have_the_gradients_of_their_papers(loss, sign, make_cfg):
    name, _, extra = loss.partition("+")
    cfg = make_cfg(f"trainer.loss={name}", *["trainer.delta=4.0"] * bool(extra)).trainer
    old = torch.tensor([-30.0, -2.0, -0.5, -1.0, -1.0, -1.0, -1.5, -1.5, -3.0, -30.0], dtype=torch.float64)
    logp = (old + torch.tensor(LOG_R, dtype=torch.float64)).requires_grad_()
    micro = micro_of(old, torch.full_like(old, 0.7 * sign), rollouts=5, max_tokens=2)  # 10 tokens could have been
    loss_N, logs = trainer.compute_loss(micro, logp, None, cfg)
    loss_N.sum().backward()
    r = np.exp(np.clip(LOG_R, -20, 20))
    expected = [by_hand(name, r[i], LOG_R[i], 0.7 * sign, cfg.delta) for i in range(len(LOG_R))]
    np.testing.assert_allclose(logp.grad.numpy(), expected, rtol=1e-9, atol=1e-9)
    edges = {"cispo": (0, 5), "sft": (0, math.inf), "dr_grpo": (0.8, 1.2)}.get(name, (0.8, 1.28))
    is_out = r > edges[1] if name == "cispo" or sign > 0 else r < edges[0]
    assert loss_N.isfinite().all() and logs["policy/clip_frac"].tolist() == is_out.tolist()


# TRL 1.16.0's GRPOTrainer._compute_loss on the same numbers (its names: cispo, dapo, dapo with delta, dr_grpo): the
# loss, then its gradient on each of the seven tokens.
TRL = {
    "cispo": (0.4807455692620833, [-0.1884252881, -0.0766080053, -0.1263052478, -0.5714285714,
                                   0.0634987046, 0.0995857922, 0.4285714286]),
    "grpo": (0.1912137504279583, [0, -0.0766080053, -0.1263052478, 0, 0, 0.0995857922, 0.5185412112]),
    "grpo+delta": (0.015529682049705729, [0, -0.0766080053, -0.1263052478, 0, 0, 0.0995857922, 0]),
    "dr_grpo": (0.04582800790611588, [0, -0.0167580012, -0.027629273, 0, 0, 0.0217843921, 0.11343089]),
}  # fmt: skip


@pytest.mark.parametrize("loss", TRL)
def test_losses_equal_trls(loss, make_cfg):
    name, _, extra = loss.partition("+")
    cfg = make_cfg(f"trainer.loss={name}", *["trainer.delta=4.0"] * bool(extra)).trainer
    old = torch.tensor([-1.0, -2.0, -0.5, -3.0, -1.5, -0.2, -2.5], dtype=torch.float64)
    shift = torch.tensor([0.5, -0.4, 0.1, 2.0, -0.3, 0.15, 1.8], dtype=torch.float64)
    logp = (old + shift).requires_grad_()
    adv = torch.tensor([0.8] * 4 + [-0.6] * 3, dtype=torch.float64)
    value = trainer.compute_loss(micro_of(old, adv, rollouts=2, max_tokens=16), logp, None, cfg)[0].sum() / 7
    value.backward()
    assert value.item() == pytest.approx(TRL[loss][0], abs=1e-9)
    np.testing.assert_allclose(logp.grad.numpy(), TRL[loss][1], atol=1e-9)


@pytest.mark.parametrize("loss", ["cispo", "grpo", "dr_grpo", "sft"])
def test_losses_stay_finite_for_any_ratio(loss, make_cfg):
    for gap in (-1e4, 1e4):
        logp = torch.tensor([-1.0, min(0.0, -1 + gap)], requires_grad=True)
        micro = micro_of(torch.tensor([-1.0, -1.0 - gap]), torch.ones(2), rollouts=2, max_tokens=1)
        loss_N, _ = trainer.compute_loss(micro, logp, None, make_cfg(f"trainer.loss={loss}").trainer)
        loss_N.sum().backward()
        assert loss_N.isfinite().all() and logp.grad.isfinite().all()


def member(reward, turns=None, num_turns=None):
    return {"reward": reward, "turn_rewards": turns, "num_turns": num_turns or len(turns or [0])}


def by_turn(groups, name="mean", gamma=1.0):
    """-> [[[advantage of each turn], ...] of each rollout, ...]: a token for each turn."""
    samples = [
        m | {"env": "e", "group": g, "rollout": i} for g, group in enumerate(groups) for i, m in enumerate(group)
    ]
    lens = torch.tensor([s["num_turns"] for s in samples])
    batch = trainer.Batch({"turn": torch.cat([torch.arange(n) for n in lens])}, lens, samples, {})
    t = SimpleNamespace(advantage=name, gamma=gamma, loss="cispo")
    rows = iter(x.tolist() for x in trainer.add_advantages(batch, t).columns["adv"].split(lens.tolist()))
    return [[next(rows) for _ in group] for group in groups]


def first_is_one(rewards_G, group):
    assert len(rewards_G) == len(group) and "reward" in group[0]
    return torch.tensor([1.0] + [0.0] * (len(group) - 1))


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


def test_advantages_by_turn_are_returns_to_go_over_the_whole_group():
    """By hand: gamma 1/2, returns 1.5, 1, 2 and 0.5, 1; the second ended before turn 2, where it counts 0."""
    group = [member(3.0, [1.0, 0.0, 2.0]), member(1.0, [0.0, 1.0])]
    assert by_turn([group], gamma=0.5) == [[[0.5, 0.0, 1.0], [-0.5, 0.0]]]
    assert by_turn([group], "leave_one_out", 0.5) == [[[1.0, 0.0, 2.0], [-1.0, 0.0]]]
    # without turn rewards the reward is the last turn's; with gamma 1 it is the whole rollout's: one number
    other = [member(4.0, num_turns=3), member(2.0, num_turns=1)]
    assert by_turn([other], gamma=0.5) == [[[-0.5, 1.0, 2.0], [0.5]]]
    assert by_turn([other, other]) == [[[1.0] * 3, [-1.0]]] * 2
    mixed = [member(4.0, num_turns=2), member(1.0, [1.0, 0.0])]
    assert by_turn([mixed, other]) == [[[1.5, 2.0], [-1.5, -2.0]], [[1.0] * 3, [-1.0]]]
    # over the batch: by the deviation of the four whole rewards, whatever the turn
    scale = np.std([4, 1, 4, 2]) + 1e-4
    for a, b in zip(by_turn([mixed, other], "batch_std"), by_turn([mixed, other]), strict=True):
        assert [x for row in a for x in row] == pytest.approx([x / scale for row in b for x in row])


def test_demonstrations_have_no_credit_by_turn():
    """Of a TOML whose gamma is for what comes after them."""
    batch = trainer.Batch({"turn": torch.zeros(3)}, torch.tensor([3]), [{"env": "e", "turn_rewards": [0.0, 5.0]}], {})
    t = SimpleNamespace(advantage="mean", gamma=0.5, loss="sft")
    assert trainer.add_advantages(batch, t).columns["adv"].tolist() == [1.0] * 3


def test_credit_by_turn_is_unbiased_where_the_policy_chooses_when_to_stop():
    """Every pair of rollouts of a policy that goes on with probability p: the expected gradient is the true one, times
    (G - 1) / G as for the mean over a group. A baseline over those still going would not be."""
    theta = torch.tensor(0.3, dtype=torch.float64, requires_grad=True)
    reward_of = {"stop": 0.2, "go": 0.7}  # per turn; at most 3 turns
    plays = [["stop"], ["go", "stop"], ["go", "go", "stop"], ["go", "go", "go"]]

    def logp(action):
        return torch.nn.functional.logsigmoid(theta if action == "go" else -theta)

    def chance(play):
        return torch.stack([logp(a) for a in play]).sum().exp()

    true = sum(chance(play) * sum(reward_of[a] for a in play) for play in plays)
    (true_grad,) = torch.autograd.grad(true, theta)
    expected = 0.0
    for one, two in itertools.product(plays, plays):
        group = [member(sum(r), r) for r in ([reward_of[a] for a in play] for play in (one, two))]
        (table,) = by_turn([group])
        loss = sum(adv * logp(a) for play, row in zip((one, two), table) for a, adv in zip(play, row))
        (grad,) = torch.autograd.grad(loss, theta)
        expected += (chance(one) * chance(two)).item() * grad.item() / 2
    assert expected == pytest.approx(true_grad.item() / 2, abs=1e-7)


def test_each_turns_tokens_get_their_turns_advantage(make_cfg, tmp_path):
    sample = {"tokens": [5, 6, 7, 8, 9], "mask": [0, 1, 0, 0, 1], "old_logp": [0.0] * 5, "turn": [0, 0, 0, 1, 1]}
    sample |= {"env": "e", "group": 0}
    two = [sample | {"rollout": 0} | member(3.0, [1.0, 2.0]), sample | {"rollout": 1} | member(1.0, num_turns=2)]
    batch = trainer.add_advantages(batch_of(tmp_path, two), make_cfg("trainer.gamma=0.5").trainer)
    assert batch.columns["adv"].tolist() == [0.75] * 3 + [0.5] * 2 + [-0.75] * 3 + [-0.5] * 2


def test_a_fork_has_its_rollouts_advantage_and_counts_once(make_cfg, tmp_path):
    samples = make_samples(8)
    samples.append(samples[-1] | {"tokens": [1, 2, 3], "mask": [0, 1, 1], "old_logp": [0.0, -1, -1], "turn": [1] * 3})
    batch = batch_of(tmp_path, samples)
    adv_T = trainer.add_advantages(batch, make_cfg("trainer.advantage=leave_one_out").trainer).columns["adv"]
    rewards = [s["reward"] for s in samples[4:7]]
    assert adv_T[-1].item() == adv_T[-4].item() == pytest.approx(samples[7]["reward"] - sum(rewards) / 3, abs=1e-6)
    assert trainer.add_advantages(batch, make_cfg("trainer.loss=sft").trainer).columns["adv"].unique().tolist() == [1.0]
    batch.samples[2]["reward"] = math.nan
    with pytest.raises(RunError, match="trainer.advantage = 'mean': not finite") as e:
        trainer.add_advantages(batch, make_cfg().trainer)
    assert e.value.code == 4


# --- cuts -------------------------------------------------------------------------------------------------------------


def log_normal(num, seed=0):
    """Lengths with a mean of 3,000, sigma 0.9, at most 16,384 tokens."""
    draw = np.random.default_rng(seed).lognormal(math.log(3000) - 0.9**2 / 2, 0.9, num)
    return np.clip(draw.round(), 1, 16384).astype(int).tolist()


def area(lens, indices, ranks, multiple):
    """-> rows per rank, width."""
    return -(-len(indices) // ranks), -(-max(lens[i] for i in indices) // multiple) * multiple


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_cuts_keep_the_budget_and_every_sample_and_waste_little(ranks):
    rng = np.random.default_rng(0)
    cases = [(rng.integers(1, 65, num).tolist(), 128) for num in (1, 2, 5, 300)] + [([9, 200, 3], 128)]
    shapes_of = [trainer.SHAPES["cpu"], (8, 128)]
    for (lens, budget), (multiple, overhead) in itertools.product([*cases, (log_normal(512), 65536)], shapes_of):
        rectangles = trainer.cut(lens, budget, ranks, multiple, overhead)
        assert sorted(i for indices in rectangles for i in indices) == list(range(len(lens)))
        assert [lens[i] for indices in rectangles for i in indices] == sorted(lens)
        shapes = [area(lens, indices, ranks, multiple) for indices in rectangles]
        assert all(rows * width <= budget or rows == 1 for rows, width in shapes)
        assert len(lens) < 512 or ranks * sum(rows * width for rows, width in shapes) <= 1.03 * sum(lens)


def test_4096_samples_are_cut_in_a_fifth_of_a_second():
    seconds = []
    for seed in range(5):
        lens, began = log_normal(4096, seed), time.perf_counter()
        trainer.cut(lens, 65536, 1, 8, 128)
        seconds.append(time.perf_counter() - began)
    assert statistics.median(seconds) < 0.2


# --- equalities of the step -------------------------------------------------------------------------------------------


def gradients(cfg, batch, policy=None):
    """-> metrics, {parameter: gradient} of one step, logp_T."""
    policy, kept = policy or trainer.build_policy(cfg), {}

    class Keep(torch.optim.SGD):
        def step(self):
            grads = {k: p.grad for k, p in trainer.trained(policy).items() if p.grad is not None}
            kept.update({k: trainer.full(grad).float().clone() for k, grad in grads.items()})

    optimizer = Keep(list(trainer.trained(policy).values()), 0.0)
    metrics, logp_T = trainer.train_step(policy, optimizer, batch, 0, cfg)
    return metrics, kept, logp_T


def adamw(policy, lr=1e-3):
    return torch.optim.AdamW(trainer.trained(policy).values(), lr, weight_decay=0.0)


def same(a, b, tol=1e-5):
    worst = max((a[k] - b[k]).abs().max().item() for k in a)
    assert worst < tol and a.keys() == b.keys() and max(x.abs().max().item() for x in a.values()) > 1e-3, worst


UNCLIPPED = "trainer.max_grad_norm=1e9"


@pytest.mark.parametrize("loss", ["cispo", "grpo", "dr_grpo", "sft", "losses:gspo"])
def test_a_rectangle_is_one_by_one(loss, make_cfg, tmp_path, monkeypatch):
    cfg, batch = make_cfg(f"trainer.loss={loss}", UNCLIPPED), batch_of(tmp_path, ragged())
    together = gradients(cfg, batch)
    monkeypatch.setattr(trainer, "cut", lambda lens, *_: [[i] for i in range(len(lens))] + [[]])  # and a filler
    alone = gradients(cfg, batch)
    same(together[1], alone[1])
    assert together[0]["loss"] == pytest.approx(alone[0]["loss"], abs=1e-5)
    torch.testing.assert_close(together[2], alone[2], atol=1e-5, rtol=0)
    assert torch.equal(together[2] != 0, batch.columns["mask"])


def test_the_budget_of_a_micro_batch_does_not_matter(make_cfg, tmp_path):
    batch = batch_of(tmp_path, ragged(200, longest=40))
    small, large = make_cfg("trainer.micro_batch_size=8", UNCLIPPED), make_cfg("trainer.micro_batch_size=64", UNCLIPPED)
    policy = trainer.build_policy(small)
    assert len(trainer.make_micros(policy, batch, small)) > len(trainer.make_micros(policy, batch, large))  # 512, 4,096
    same(gradients(small, batch, policy)[1], gradients(large, batch, policy)[1])


def plain_model(cfg):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(cfg.run.model, dtype=torch.float32).eval()


def scored(model, samples):
    """The model's own forward, a sample at a time and no filler -> logp and entropy of the loss tokens."""
    logp, entropy = [], []
    for s in samples:
        ids, at = torch.tensor(s["tokens"]), torch.tensor(s["mask"]).nonzero()[:, 0]
        log_p = (model(ids[None]).logits[0] / s["temperature"]).log_softmax(-1)
        logp.append(log_p[at - 1, ids[at]])
        entropy.append(-(log_p.exp() * log_p).sum(-1)[at - 1])
    return torch.cat(logp), torch.cat(entropy)


def assert_gradients_of(plain, policy, tol):
    ours = dict(policy.named_parameters())
    for name, p in plain.named_parameters():
        torch.testing.assert_close(ours[f"model.{name}"].grad, p.grad, atol=tol, rtol=tol, msg=lambda m: f"{name}: {m}")


@pytest.mark.parametrize("chunk", [7 * 102, 1 << 26])
def test_a_head_in_chunks_is_a_full_log_softmax(chunk, make_cfg, tmp_path, monkeypatch):
    cfg, samples = make_cfg(), ragged(12, longest=18)
    monkeypatch.setattr(trainer.Policy, "CHUNK", chunk)
    policy, plain = trainer.build_policy(cfg), plain_model(cfg)
    ours = policy(trainer.collate(batch_of(tmp_path, samples), list(range(len(samples))), CPU))
    theirs = scored(plain, samples)
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)
    (ours[0].sum() + ours[1].sum()).backward()
    (theirs[0].sum() + theirs[1].sum()).backward()
    assert_gradients_of(plain, policy, 1e-4)


@pytest.mark.long
@pytest.mark.parametrize("mode", ["full", "lora, recomputed", "bf16"])
def test_compiled_blocks_have_the_gradients_of_plain_ones(mode, make_cfg, tmp_path):
    more = {"full": [], "bf16": ["trainer.dtype=bf16"]}.get(mode, [*LORA, "trainer.gradient_checkpointing=true"])
    batch = batch_of(tmp_path, make_samples(24))
    plain, compiled = (gradients(make_cfg(f"trainer.compile={x}", UNCLIPPED, *more), batch) for x in ("false", "true"))
    same(plain[1], compiled[1], 2e-2 if mode == "bf16" else 1e-5)
    assert compiled[0]["loss"] == pytest.approx(plain[0]["loss"], abs=2e-3 if mode == "bf16" else 1e-5)


@pytest.mark.long
def test_nothing_is_compiled_after_twenty_steps(make_cfg, monkeypatch):
    """CUDA's rectangles of 100 batches of 512 log-normal lengths: three of each, of shorter rows. They waste little.
    The graphs are Dynamo's, since Inductor's code for CPUs has guards of its own; one row has its own."""
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
    torch._dynamo.reset()
    policy, graphs, waste = trainer.build_policy(make_cfg("trainer.compile=true")), [], []
    draw, seen = np.random.default_rng(0), torch._dynamo.utils.counters["stats"]
    for _ in range(100):
        lens = np.minimum(draw.lognormal(np.log(3000) - 0.9**2 / 2, 0.9, 512).astype(int) + 16, 16384)
        rectangles = trainer.cut(lens, 65536, 1, *trainer.SHAPES["cuda"])
        waste.append(sum(len(r) * -(-max(lens[r]) // 64) * 64 for r in rectangles) / lens.sum() - 1)
        lens = torch.tensor(lens // 32 + 1)
        tokens_T = torch.randint(64, [int(lens.sum())])
        columns = {"tokens": tokens_T, "mask": torch.ones(len(tokens_T), dtype=torch.bool)}
        columns["mask"][lens.cumsum(0) - lens] = False
        batch = trainer.Batch(columns, lens, [], {})
        for rectangle in (rectangles[0], rectangles[len(rectangles) // 2], min(rectangles, key=len)):
            logp_N, entropy_N = policy(trainer.collate(batch, rectangle, CPU))
            (logp_N + entropy_N).sum().backward()
        graphs.append(seen["unique_graphs"])
    assert graphs[0] > 1 and graphs[19] == graphs[-1], graphs
    assert np.mean(waste) <= 0.04
    print(f"{graphs[-1]} graphs, {np.mean(waste):.1%} waste")


LONG = [["trainer.use_lora=true"], ["trainer.use_lora=true", "trainer.dtype=bf16"]]


@pytest.mark.parametrize("how", [[], *some(LONG, 0)])
def test_every_pass_of_a_run_is_compiled(how, make_cfg, monkeypatch):
    """Dynamo runs a block as it is, without a word, once its code has more graphs than a limit. Those of all blocks
    count together: in training and not, with gradients and without, for one row and more."""
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    torch._dynamo.reset()
    cfg = make_cfg("trainer.compile=true", "trainer.gradient_checkpointing=true", *how)
    policy, draw = trainer.build_policy(cfg), torch.Generator().manual_seed(0)
    with torch._dynamo.config.patch(fail_on_recompile_limit_hit=True):
        trainer.check_policy(policy, cfg)
        for _ in range(4):
            with torch.no_grad():  # the canary
                trainer.score(policy.eval(), trainer.random_rows(policy, cfg))
            policy.train()
            for num, width in ((1, 40), (3, 33), (8, 9)):
                trainer.score(policy, torch.randint(64, [num, width], generator=draw).tolist()).sum().backward()


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
            # Transformers looks for packed rows once a pass, where it makes a mask: a bubble of one launch
            is_ours = not any("masking_utils" in frame.filename for frame in traceback.extract_stack())
            self.found += [name] * is_ours
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("is_plain", [True, False])
def test_nothing_waits_for_the_device_inside_the_micro_batch_loop(is_plain, make_cfg, tmp_path, monkeypatch):
    more = [] if is_plain else [*LORA, "trainer.beta=0.1", "trainer.gradient_checkpointing=true"]
    cfg, seen = make_cfg("trainer.micro_batch_size=1", *more), Waits()
    policy, batch = trainer.build_policy(cfg), batch_of(tmp_path, ragged())
    forward, clip = trainer.Policy.forward, torch.nn.utils.clip_grad_norm_
    passes = []

    def begin(policy, micro):
        seen.is_on = len(passes) > 0  # the reference's pass, and the first, are before it
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


def test_samples_of_no_loss_token_still_pass(make_cfg, tmp_path):
    samples = [s | {"mask": [0] * len(s["mask"])} for s in make_samples(3)]
    metrics, grads, logp_T = gradients(make_cfg(), batch_of(tmp_path, samples))
    assert metrics["loss"] == 0 and all((g == 0).all() for g in grads.values()) and not logp_T.any()


def test_columns_and_fields_arrive_at_the_loss_tokens(tmp_path):
    """Whatever their names: numbers per token, and numbers of a sample. sample_N is the row."""
    samples = make_samples(6)
    for i, s in enumerate(samples):
        s |= {"teacher_logp": [i + j / 100 for j in range(len(s["tokens"]))], "weight": i / 2, "note": "no number"}
    for i in (0, 3):
        samples[i]["mask"] = [0] * len(samples[i]["mask"])
    micro, rows = trainer.collate(batch_of(tmp_path, samples), [0, 1, 3, 5], CPU), {1: 1, 3: 5}
    at = [(row, i, j) for row, i in rows.items() for j, m in enumerate(samples[i]["mask"]) if m]
    assert micro["sample_N"].tolist() == [row for row, _, _ in at] and micro["mask_N"].all()
    torch.testing.assert_close(micro["teacher_logp_N"], torch.tensor([i + j / 100 for _, i, j in at]))
    assert micro["weight_N"].tolist() == [i / 2 for _, i, _ in at] and "note_N" not in micro
    assert micro["target_N"].tolist() == [samples[i]["tokens"][j] for _, i, j in at]
    assert micro["ids_BW"].flatten()[micro["index_N"] + 1].tolist() == micro["target_N"].tolist()
    assert micro["ids_BW"].shape[1] % trainer.SHAPES["cpu"][0] == 0
    filler = trainer.collate(batch_of(tmp_path, samples), [], CPU)
    assert filler["mask_N"].tolist() == [False] and filler["ids_BW"].shape == (1, trainer.SHAPES["cpu"][0])


def test_updates_per_batch(make_cfg, tmp_path):
    batch = batch_of(tmp_path, make_samples())
    for updates in (1, 3):
        cfg = make_cfg(f"trainer.updates_per_batch={updates}")
        policy = trainer.build_policy(cfg)
        optimizer = adamw(policy)
        trainer.train_step(policy, optimizer, batch, 0, cfg)
        assert {int(s["step"]) for s in optimizer.state.values()} == {updates}


def test_text_of_unknown_origin_has_ratio_one(make_cfg, tmp_path):
    """old_logp is nan in offline batches: the first update is the same as with the policy's own logp."""
    cfg, results = make_cfg("trainer.loss=grpo", "trainer.updates_per_batch=2"), []
    unknown = [s | {"old_logp": [math.nan] * len(s["tokens"])} for s in make_samples()]
    with pytest.raises(RunError, match="old_logp is not finite"):
        batch_of(tmp_path, unknown)
    batch = batch_of(tmp_path, unknown, offline=True)
    own_logp = gradients(cfg, batch)[2]
    for old_logp in (batch.columns["old_logp"], own_logp):
        policy = trainer.build_policy(cfg)
        have = batch._replace(columns=batch.columns | {"old_logp": old_logp})
        metrics, _ = trainer.train_step(policy, adamw(policy), have, 0, cfg)
        assert metrics["policy/kl_sampler"] == pytest.approx(0, abs=1e-9)
        results.append((metrics["loss"], torch.cat([p.detach().flatten() for p in policy.parameters()])))
    assert results[0][0] == pytest.approx(results[1][0], abs=1e-7)
    assert (results[0][1] - results[1][1]).abs().max() < 1e-5


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_what_is_trained_in_16_bits_is_fp32_and_the_files_own(dtype, make_cfg, models, tmp_path):
    """The files are mapped as they are, for all ranks of a node; a file in fp32 loses nothing."""
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
    policy.head, head = lambda *x: seen.append(x[3]) or head(*x), policy.head
    policy(trainer.collate(batch_of(tmp_path, [make_samples(1)[0] | {"temperature": 0.6}]), [0], CPU))
    assert seen[0].dtype == torch.float32 and set(seen[0].tolist()) == {torch.tensor(0.6).item()}


# --- LoRA and the reference -------------------------------------------------------------------------------------------

LORA = ("trainer.use_lora=true", UNCLIPPED)


@pytest.mark.parametrize("more", [LORA, ()], ids=["lora", "full"])
def test_blocks_that_are_compiled_sharded_and_recomputed(more, make_cfg, tmp_path, monkeypatch):
    """FSDP2 hands a block views of its inputs in the first pass and none when it is recomputed. Dynamo must not compile
    two graphs for them: they save different tensors, and torch.utils.checkpoint refuses that."""
    how = ["trainer.dtype=bf16", "trainer.gradient_checkpointing=true", UNCLIPPED, *more]
    batch = batch_of(tmp_path, make_samples(24))
    plain = gradients(make_cfg("trainer.compile=false", *how), batch)
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
    torch._dynamo.reset()
    compiled = gradients(make_cfg("trainer.compile=true", *how), batch)
    same(plain[1], compiled[1], 2e-2)



def test_lora_starts_as_the_base_and_merges_exactly(make_cfg, tmp_path):
    micro = trainer.collate(batch_of(tmp_path, make_samples()), list(range(12)), CPU)
    base, policy = trainer.build_policy(make_cfg()), trainer.build_policy(make_cfg(*LORA))
    torch.testing.assert_close(policy(micro), base(micro), atol=1e-5, rtol=0)
    for module in policy.modules():
        if isinstance(module, trainer.LoRALinear):
            torch.nn.init.normal_(module.lora_B, std=0.02)
    before = {k: v.clone() for k, v in policy.state_dict().items()}
    with torch.no_grad():
        assert (policy(micro)[0] - base(micro)[0]).abs().max() > 1e-2
        merged = dict(trainer.sampler_weights(policy.model, torch.float32, False, CPU))
        assert set(merged) == {k for k, _ in base.model.named_parameters()}
        base.model.load_state_dict(merged, strict=False)
        torch.testing.assert_close(policy(micro), base(micro), atol=1e-5, rtol=0)
    assert all(torch.equal(v, before[k]) for k, v in policy.state_dict().items())  # the base was not touched


def test_lora_trains_its_factors_alone(make_cfg, models, tmp_path):
    _, grads, _ = gradients(make_cfg(*LORA), batch_of(tmp_path, make_samples()))
    assert grads and all("lora_" in name for name in grads)
    with pytest.raises(RunError, match="'q_prj' is none of the untied linear layers, .*q_proj"):
        trainer.build_policy(make_cfg(*LORA, 'trainer.lora_target_modules=["q_prj"]'))
    with pytest.raises(RunError, match="'lm_head' is none of the untied linear layers"):
        trainer.build_policy(make_cfg(*LORA, 'trainer.lora_target_modules=["lm_head"]', model=models["tied"]))


def move_reference(policy, scale):
    for name in [name for name in policy.extra if name.startswith("ref/")]:
        policy.extra[name] = policy.extra[name] + scale * torch.randn_like(policy.extra[name])


def k3(logp, ref):
    return (ref - logp).exp() - (ref - logp) - 1


@pytest.mark.parametrize("lora", [True, False])
def test_the_reference_is_the_policy_as_it_began(lora, make_cfg, tmp_path):
    cfg = make_cfg(f"trainer.use_lora={str(lora).lower()}", "trainer.beta=0.1", "trainer.learning_rate=1e-2")
    batch, policy = batch_of(tmp_path, make_samples()), trainer.build_policy(cfg)
    micro, optimizer = trainer.collate(batch, list(range(12)), CPU), adamw(policy)
    start = policy(micro)[0].detach()
    first, _ = trainer.train_step(policy, optimizer, batch, 0, cfg)
    now, held = policy(micro)[0].detach(), [p.detach().clone() for p in policy.parameters()]
    second, _, _ = gradients(cfg, batch, policy)
    assert first["policy/kl_ref"] == pytest.approx(0, abs=1e-6) and k3(now, start).mean() > 1e-4
    assert second["policy/kl_ref"] == pytest.approx(k3(now, start).mean().item(), rel=1e-4)
    assert all(torch.equal(a, b.detach()) for a, b in zip(held, policy.parameters()))  # swapped back to the bit


def test_the_reference_has_no_dropout(make_cfg, tmp_path):
    cfg = make_cfg("trainer.use_lora=true", "trainer.lora_dropout=0.5", "trainer.beta=0.1")
    policy = trainer.build_policy(cfg)
    move_reference(policy, 1)
    micro = trainer.collate(batch_of(tmp_path, make_samples()), list(range(12)), CPU)
    one, two = (trainer.add_columns(policy, [micro], cfg)[0]["ref_logp_N"] for _ in range(2))
    reference.swap(policy)  # whose B is not 0
    assert torch.equal(one, two) and not torch.equal(policy(micro)[0], policy(micro)[0])


def test_a_reference_begins_where_a_run_is_resumed_with_it(make_cfg, tmp_path):
    """beta may be turned on or off between two starts; the checkpoint has no reference, or one too many."""
    cfg, batch = make_cfg(), batch_of(tmp_path, make_samples())
    (tmp_path / "checkpoints").mkdir()
    for betas in ((0, 0.1), (0.1, 0)):
        before, after = (make_cfg(f"trainer.beta={beta}") for beta in betas)
        policy, optimizer = trained_once(before, batch)
        trainer.save_checkpoint(tmp_path, 1, policy, optimizer, cfg, {})
        fresh = trainer.build_policy(after)
        again = adamw(fresh)
        assert trainer.load_checkpoint(tmp_path / "checkpoints" / "step_000001", fresh, again, after) == 1
        metrics, _ = trainer.train_step(fresh, again, batch, 1, after)
        assert (metrics.get("policy/kl_ref", 0) > 1e-9) == (betas[1] > 0)
        shutil.rmtree(tmp_path / "checkpoints" / "step_000001")


def with_bonus(micro, logp_N, entropy_N, cfg):
    """Dr. GRPO, which divides by a constant, and a bonus for entropy."""
    loss_N, logs = trainer.compute_loss(micro, logp_N, entropy_N, cfg._replace(loss="dr_grpo"))
    return loss_N - 0.5 * entropy_N, logs


@pytest.mark.parametrize("loss", ["cispo", "grpo", "dr_grpo", "sft", "losses:gspo", "bonus"])
def test_kl_and_bonus_are_token_means_whatever_the_loss_divides_by(loss, make_cfg, tmp_path):
    """What beta adds to loss and gradient is beta times the mean of k3 over all loss tokens, in several rectangles."""
    batch, found, torch_seed = batch_of(tmp_path, ragged()), [], 1
    plain, more = ("dr_grpo", "test_trainer:with_bonus") if loss == "bonus" else (loss, loss)
    with_it, without = (
        make_cfg(f"trainer.loss={name}", f"trainer.beta={beta}", UNCLIPPED, "trainer.micro_batch_size=2")
        for name, beta in ((more, 0 if loss == "bonus" else 0.5), (plain, 0))
    )
    for cfg in (with_it, without):
        policy = trainer.build_policy(cfg)
        torch.manual_seed(torch_seed)
        move_reference(policy, 0.02)
        found.append(gradients(cfg, batch, policy))
        if cfg is with_it:
            micro = trainer.collate(batch, list(range(len(batch.lens))), CPU)
            logp_N, entropy_N = policy(micro)
            ref_N = trainer.add_columns(policy, [micro], cfg)[0].get("ref_logp_N")
            added = -0.5 * entropy_N.mean() if loss == "bonus" else 0.5 * k3(logp_N, ref_N).mean()
            names = trainer.trained(policy)
            expected = dict(zip(names, torch.autograd.grad(added, list(names.values()))))
    assert found[0][0]["loss"] - found[1][0]["loss"] == pytest.approx(added.item(), abs=1e-5)
    same(expected, {k: found[0][1][k] - found[1][1][k] for k in expected})


# --- numerics and schedule --------------------------------------------------------------------------------------------


def test_a_non_finite_gradient_changes_nothing(make_cfg, tmp_path):
    cfg, batch = make_cfg(), batch_of(tmp_path, make_samples())
    policy = trainer.build_policy(cfg)
    params, optimizer = list(policy.parameters()), adamw(policy)
    params[3].register_hook(lambda grad: grad * float("nan"))
    before = [p.detach().clone() for p in params]
    assert trainer.train_step(policy, optimizer, batch, 0, cfg)[0]["optim/skipped"] == 1
    assert all(torch.equal(a, b) for a, b in zip(before, params)) and not optimizer.state


def nan_on_rank_1(micro, logp_N, entropy_N, cfg):
    return logp_N * (float("nan") if os.environ["RANK"] == "1" else 1.0), {}


def nan_loss(micro, logp_N, entropy_N, cfg):
    return logp_N * float("nan"), {}


@pytest.mark.slow
def test_three_steps_without_a_finite_gradient_end_the_run(make_cfg, tmp_path):
    make_cfg()
    saved = write_batches(tmp_path / "saved", 3)
    own = ["trainer.loss=test_trainer:nan_loss", f"output_dir={tmp_path}"]
    done = run_trainer(tmp_path / "test.toml", "--replay", saved, *own, check=False)
    last = done.stderr.splitlines()[-1]
    assert done.returncode == 5
    assert last.startswith("[trainer] exit=5 no finite gradient, or a KL above 1, in three steps in a row; step 2: ")
    (metrics,) = tmp_path.glob("**/metrics.jsonl")
    assert [line["loss"] for line in lines(metrics)] == [None, None] and "NaN" not in metrics.read_text()


def test_a_replay_of_nothing_is_refused(make_cfg, tmp_path):
    make_cfg()
    with pytest.raises(RunError, match=f"--replay {tmp_path}: no step_.*safetensors there") as e:
        trainer.main([str(tmp_path / "test.toml"), "--replay", str(tmp_path)])
    assert e.value.code == 2 and not list(tmp_path.glob("**/*-replay-*"))


@pytest.mark.parametrize("key", ["loss", "importance", "optimizer", "advantage"])
@pytest.mark.parametrize("name, message", [("my_los:f", "No module named 'my_los'"), ("losses:gsp", "no attribute")])
def test_a_misspelled_function_is_told_before_a_model_is_loaded(key, name, message, make_cfg, tmp_path, monkeypatch):
    make_cfg()
    saved = write_batches(tmp_path / "saved", 1)
    monkeypatch.setattr(trainer, "build_policy", None)
    with pytest.raises(RunError, match=f"'{name}'.*{message}") as e:
        replays([[tmp_path / "test.toml", "--replay", saved, f"trainer.{key}={name}", f"output_dir={tmp_path}"]])
    assert e.value.code == 2


def test_gpus_that_torch_cannot_use_are_no_reason_to_train_on_the_cpu(make_cfg, monkeypatch):
    """A driver too old for this build of torch; a build for CPUs was asked for."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    with pytest.raises(RunError, match="finds no GPU, but CUDA_VISIBLE_DEVICES is set: is the driver too old") as e:
        trainer.start_distributed(make_cfg())
    assert e.value.code == 2


def test_the_learning_rates_schedule():
    t = SimpleNamespace(learning_rate=1.0, lr_scheduler_type="linear", warmup_steps=3, warmup_ratio=0.0)
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
    first, *others = trainer.trained(policy).values()
    optimizer = torch.optim.AdamW([{"params": [first], "lr": 0.5}, {"params": others, "lr": 0.1}])
    for step, share in enumerate((1.0, 0.75, 0.5)):
        metrics, _ = trainer.train_step(policy, optimizer, batch_of(tmp_path, make_samples()), step, cfg)
        assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([0.5 * share, 0.1 * share])
        assert metrics["optim/lr"] == pytest.approx(0.5 * share)


# --- batch files ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("change, message", [
    ({"old_logp": [math.nan] * 9}, "old_logp is not finite"), ({"old_logp": [-math.inf] * 9}, "old_logp is not finite"),
    ({"mask": [1] * 9}, "first token is a loss token"), ({"old_logp": [0.0] * 8}, "8 values for 9 tokens"),
])  # fmt: skip
def test_bad_batches_are_refused(change, message, tmp_path):
    sample = {"tokens": [5] * 9, "mask": [0] + [1] * 8, "old_logp": [-1.0] * 9, "turn": [0] * 9, "reward": 1.0}
    with pytest.raises(RunError, match=message) as e:
        batch_of(tmp_path, [sample | change])
    assert e.value.code == 4


@pytest.mark.parametrize("change, message", [
    ({"tokens": [5] * 8 + [103]}, "ids from 5 to 103; the vocabulary has 103"), ({"tokens": [-1] * 9}, "ids from -1"),
    ({"tokens": [], "mask": [], "old_logp": [], "turn": []}, "a sample of 0 tokens"),
])  # fmt: skip
def test_tokens_that_the_model_has_not_are_refused(change, message, make_cfg, tmp_path, monkeypatch):
    sample = {"tokens": [5] * 9, "mask": [0] + [1] * 8, "old_logp": [-1.0] * 9, "turn": [0] * 9, "reward": 1.0}
    batch = batch_of(tmp_path, [sample, sample | {"reward": 0.0}, sample])
    last = {k: torch.tensor(v, dtype=batch.columns[k].dtype) for k, v in (sample | change).items() if k != "reward"}
    columns = {k: torch.cat([x[:18], last[k]]) for k, x in batch.columns.items() if k in last}
    batch = batch._replace(columns=columns, lens=torch.tensor([9, 9, len(last["tokens"])]))
    with pytest.raises(RunError, match=message) as e:
        gradients(make_cfg(), batch)
    assert e.value.code == 4


def test_numbers_that_were_wrong_or_infinite(make_cfg, tmp_path):
    """A file that does not count its rollouts; a group of one; samples that the policy would never draw."""
    samples = make_samples(8)
    bare = {k: v for k, v in INFO.items() if k not in ("rollouts", "max_tokens")}
    save_batch(tmp_path / "a.safetensors", samples, bare)
    batch = trainer.load_batch(tmp_path / "a.safetensors")
    assert batch.info["rollouts"] == 8 and batch.info["max_tokens"] == max(len(s["tokens"]) for s in samples)
    assert math.isfinite(gradients(make_cfg("trainer.loss=dr_grpo"), batch)[0]["loss"])
    for name in ("std", "leave_one_out"):
        with pytest.raises(RunError, match=f"trainer.advantage = '{name}': not finite"):
            gradients(make_cfg(f"trainer.advantage={name}"), batch_of(tmp_path, samples[:1]))
    strange = [s | {"old_logp": [-200.0 * m for m in s["mask"]]} for s in samples]
    metrics = gradients(make_cfg(), batch_of(tmp_path, strange))[0]
    assert all(math.isfinite(v) for v in metrics.values()) and metrics["policy/kl_sampler"] > 1e8
    masked = [s | {"mask": [0] * len(s["mask"])} for s in samples]
    assert gradients(make_cfg("trainer.loss=losses:gspo"), batch_of(tmp_path, masked))[0]["loss"] == 0


def test_the_gradient_of_the_head_adds_up_in_fp32(make_cfg, tmp_path, monkeypatch):
    """bf16, a chunk for every 2 tokens or one for all: in bf16 the sum of so many parts would lose what each adds."""
    batch, found = batch_of(tmp_path, make_samples(24)), []
    for chunk in (2 * 102, 1 << 26):
        monkeypatch.setattr(trainer.Policy, "CHUNK", chunk)
        found.append(gradients(make_cfg("trainer.dtype=bf16", UNCLIPPED), batch)[1]["model.lm_head.weight"])
    assert (found[0] - found[1]).norm() < 3e-3 * found[1].norm()


def test_batches_of_another_step_or_run_and_damaged_ones_are_refused(make_cfg, tmp_path):
    from configs import identity

    cfg, path = make_cfg(), tmp_path / "step_000000.safetensors"
    batch_of(tmp_path, make_samples(), run=identity(cfg))
    assert len(trainer.load_batch(path, cfg, 0).lens) == 12
    for code, message, *given in [
        (4, "holds batch 0", cfg, 1), (2, "seed was 0, now 5", make_cfg("seed=5"), 0),
    ]:  # fmt: skip
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


def trained_once(cfg, batch):
    policy = trainer.build_policy(cfg)
    optimizer = adamw(policy)
    trainer.train_step(policy, optimizer, batch, 0, cfg)
    return policy, optimizer


def test_checkpoints_are_kept_and_resumed_from_with_what_a_recipe_adds(make_cfg, tmp_path):
    cfg = make_cfg("checkpoint.keep=2")
    policy, optimizer = trained_once(cfg, batch_of(tmp_path, make_samples()))
    (tmp_path / "checkpoints").mkdir()
    for step in (1, 2, 3):
        policy.extra = {"count": step, "mean": torch.full((2, 3), float(step))}
        trainer.save_checkpoint(tmp_path, step, policy, optimizer, cfg, {"ledger": {"next": step, "open": []}})
    assert sorted(p.name for p in (tmp_path / "checkpoints").iterdir()) == ["step_000002", "step_000003"]
    last = tmp_path / "checkpoints" / "step_000003"
    assert json.loads((last / "state.json").read_text())["ledger"]["next"] == 3
    with pytest.raises(RunError, match="seed was 0, now 5") as e:
        trainer.load_checkpoint(last, policy, optimizer, make_cfg("seed=5"))
    assert e.value.code == 2
    fresh = trainer.build_policy(cfg)
    again = adamw(fresh)
    assert trainer.load_checkpoint(last, fresh, again, cfg) == 3
    a, b = (trainer.state_of(p, o) for p, o in ((policy, optimizer), (fresh, again)))
    assert a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)
    assert fresh.extra["count"] == 3 and fresh.extra["mean"].tolist() == [[3.0] * 3] * 2


def test_a_checkpoint_before_any_step_has_succeeded_loads(make_cfg, tmp_path):
    """Steps whose gradient is not finite are skipped; by then AdamW has no moments."""
    cfg = make_cfg()
    policy = trainer.build_policy(cfg)
    (tmp_path / "checkpoints").mkdir()
    trainer.save_checkpoint(tmp_path, 1, policy, adamw(policy), cfg, {})
    again = adamw(policy)
    assert trainer.load_checkpoint(tmp_path / "checkpoints" / "step_000001", policy, again, cfg) == 1
    assert not any(again.state.values())


@pytest.mark.parametrize("how", ["truncated", "missing"])
def test_a_damaged_checkpoint_is_named(how, make_cfg, tmp_path):
    cfg = make_cfg()
    policy, optimizer = trained_once(cfg, batch_of(tmp_path, make_samples()))
    (tmp_path / "checkpoints").mkdir()
    for step in (1, 2):
        trainer.save_checkpoint(tmp_path, step, policy, optimizer, cfg, {})
    last = tmp_path / "checkpoints" / "step_000002"
    file = next(last.glob("*.safetensors"))
    if how == "missing":
        file.unlink()
    else:
        os.truncate(file, file.stat().st_size // 2)
    with pytest.raises(RunError, match=rf"{file} is damaged.* Remove {last}, then the one before it") as e:
        trainer.load_checkpoint(last, policy, optimizer, cfg)
    assert e.value.code == 6


@pytest.mark.parametrize("where", ["shards", "rename", "rmtree"])
def test_every_instant_of_a_save_leaves_a_checkpoint_to_load(where, make_cfg, tmp_path, monkeypatch):
    """The process ends there: what is found then loads, and the next save goes through."""
    cfg = make_cfg("checkpoint.keep=1")
    policy, optimizer = trained_once(cfg, batch_of(tmp_path, make_samples()))
    (tmp_path / "checkpoints").mkdir()
    trainer.save_checkpoint(tmp_path, 1, policy, optimizer, cfg, {})
    owner, honest = {"shards": (trainer, trainer.shards), "rename": (os, os.rename)}.get(where, (shutil, shutil.rmtree))

    def die(*given, **more):
        if where != "rmtree" or given[0].name == "step_000001":  # not: the leftovers of an earlier save
            raise KeyboardInterrupt
        honest(*given, **more)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(owner, where, die)
        trainer.save_checkpoint(tmp_path, 2, policy, optimizer, cfg, {})
    found = max((tmp_path / "checkpoints").glob("step_??????"))
    assert trainer.load_checkpoint(found, policy, optimizer, cfg) == (2 if where == "rmtree" else 1)
    trainer.save_checkpoint(tmp_path, 3, policy, optimizer, cfg, {})
    left = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert [name for name in left if not name.endswith(".tmp")] == ["step_000003"]


# --- whole replays: one rank here, two in one torchrun ----------------------------------------------------------------

RESUMED = ["trainer.use_lora=true", "trainer.lora_dropout=0.2", "trainer.beta=0.1", "trainer.ref_sync_steps=2"]
RESUMED += ["checkpoint.every=2", "checkpoint.keep=9"]
MODES = {
    "full": ["trainer.beta=0.1", "trainer.ref_sync_steps=2", "checkpoint.every=2"],
    "updates": ["trainer.updates_per_batch=2"],
    "lora": ["trainer.use_lora=true", "trainer.beta=0.1"],
    "bf16": ["trainer.dtype=bf16"],
    "replicas": ["trainer.replicas=2", "checkpoint.every=2"],
    "broken": ["trainer.loss=test_trainer:nan_on_rank_1", "max_steps=2"],
    "a": [*RESUMED, "trainer.dtype=bf16", "max_steps=6"],
    "b": [*RESUMED, "trainer.dtype=bf16", "max_steps=4"],
    "b again": [*RESUMED, "trainer.dtype=bf16", "max_steps=6"],
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


def on_ranks(num, path, modes):
    runs = [[str(word) for word in arguments_of(path, str(num), mode)] for mode in modes]
    (path / "runs.json").write_text(json.dumps(runs))
    command = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={num}", "--standalone"]
    command += [str(ROOT / "tests" / "ranks.py"), str(path / "runs.json")]
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=180, env=env)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="module")
def two_ranks(saved):
    """The directory in which all modes ran on two ranks, under 2/."""
    on_ranks(2, saved, MODES)
    return saved


def run_of(path, mode):
    return next(path.glob(f"{mode}-replay-*"))


def tensors_of(folder):
    """{name: tensor}, of the shards of two ranks put side by side."""
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
    assert max((a[k].float() - b[k].float()).abs().max().item() for k in a) < weights


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["full", "updates", "lora", "bf16", "replicas"])
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
    assert [m["optim/skipped"] for m in lines(run / "metrics.jsonl")] == [1, 1]
    before, after = (load_file(path / "model.safetensors") for path in (models["untied"], run / "final"))
    assert all(before[key].equal(after[key]) for key in before)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", ["1", "2"])
def test_resume_is_bit_for_bit(ranks, two_ranks):
    """Six steps in one go, and after four of them from the checkpoint: LoRA, dropout, a reference that moves."""
    if ranks == "1":
        replays([arguments_of(two_ranks, "1", mode) for mode in ("a", "b", "b again")])
    a, b = (run_of(two_ranks / ranks, name) for name in "ab")
    for folder in ("checkpoints/step_000006", "final"):
        one, two = tensors_of(a / folder), tensors_of(b / folder)
        assert one.keys() == two.keys() and all(torch.equal(one[k], two[k]) for k in one), folder
    assert not torch.equal(*(x["logp"] for x in (load_file(p) for p in sorted((a / "batches").glob("logp*"))[:2])))
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
    assert max((a[k] - b[k]).abs().max().item() for k in a) < 1e-5


@pytest.mark.parametrize("lora", [False, True])
@pytest.mark.parametrize("model", ["untied", "tied"])
def test_final_loads_in_transformers_and_peft(model, lora, make_cfg, models, tmp_path):
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoTokenizer

    cfg = make_cfg(f"trainer.use_lora={str(lora).lower()}", "trainer.learning_rate=1e-2", model=models[model])
    samples = make_samples(8)
    batch = batch_of(tmp_path, samples)
    policy, _ = trained_once(cfg, batch)
    trainer.write_final(tmp_path, policy, cfg)
    base = AutoModelForCausalLM.from_pretrained(models[model] if lora else tmp_path / "final", dtype="auto")
    if not lora:
        trainer.write_final(tmp_path / "half", policy, make_cfg("trainer.dtype=bf16", model=models[model]))
        half = AutoModelForCausalLM.from_pretrained(tmp_path / "half" / "final", dtype="auto")
        assert half.dtype == half.config.dtype == torch.bfloat16
        policy.model.config.dtype = torch.float32
    theirs, untrained = PeftModel.from_pretrained(base, tmp_path / "final") if lora else base, plain_model(cfg)
    assert AutoTokenizer.from_pretrained(tmp_path / "final").chat_template and base.dtype == torch.float32
    with torch.no_grad():
        ours_N = policy.eval()(trainer.collate(batch, list(range(8)), CPU))[0]
        torch.testing.assert_close(ours_N, scored(theirs.eval(), samples)[0], atol=1e-5, rtol=0)
        assert (ours_N - scored(untrained, samples)[0]).abs().max() > 1e-3


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
    same(grads, {f"model.{k}": before[k] - after[k] for k in after})


def test_an_optimizer_that_cannot_be_saved_is_refused_after_one_step(make_cfg, tmp_path):
    """And not with the first checkpoint, which is the last step's in a short run."""
    make_cfg(UNCLIPPED)
    saved = write_batches(tmp_path / "saved", 2)
    more = ["trainer.optimizer=test_trainer:adafactor", UNCLIPPED, f"output_dir={tmp_path}"]
    with pytest.raises(RunError, match="trainer.optimizer: not all of .*'RMS'.* are tensors") as e:
        replays([[tmp_path / "test.toml", "--replay", saved, *more]])
    run = run_of(tmp_path, "test")
    assert e.value.code == 2 and not lines(run / "metrics.jsonl") and not any((run / "checkpoints").iterdir())


# --- a column of one's own, from the environment to the loss ----------------------------------------------------------


@pytest.mark.slow
def test_a_column_of_the_environment_reaches_a_loss_of_ones_own(run, tmp_path, models):
    """Batches of a real orchestrator; the trainer learns from them by the loss of tests/distill.py."""
    run_dir = run(8, '[env]\nid = "distill"', "orchestrator.max_staleness=0")
    batch = trainer.load_batch(run_dir / "batches" / "step_000000.safetensors")
    teacher_T, mask_T = batch.columns["teacher_logp"], batch.columns["mask"]
    assert teacher_T[mask_T].unique().tolist() == [-6.0, -2.5] and not teacher_T[~mask_T].any()
    own = ["trainer.loss=distill:loss", "trainer.learning_rate=2e-2", "trainer.warmup_steps=0"]
    run_trainer(tmp_path / "run.toml", "--replay", run_dir / "batches", *own)
    metrics = lines(tmp_path / "run-replay-distill.loss" / "metrics.jsonl")
    assert len(metrics) == 8 and metrics[-1]["teacher/gap"] < metrics[0]["teacher/gap"] - 0.5


# --- broadcast --------------------------------------------------------------------------------------------------------


def test_weights_arrive_as_sent(make_cfg, tmp_path, monkeypatch):
    """Both ends in this process, with tensors of odd sizes."""
    arrived, worker = {}, trainer.WeightReceiver()
    worker.rank, worker.device = 0, CPU
    worker.vllm_config = SimpleNamespace(model_config=SimpleNamespace(dtype=torch.bfloat16), lora_config=None)
    worker.model_runner = SimpleNamespace(model=torch.nn.Module())
    worker.reload_weights = lambda weights_iterator: arrived.update((k, w.clone()) for k, w in weights_iterator)

    def post(sender, url, path, body=None):
        return {"results": [getattr(worker, body["method"])(*body["args"])]} if path == "/collective_rpc" else {}

    monkeypatch.setattr(trainer.WeightSender, "post", post)
    monkeypatch.setattr(trainer.WeightSender, "wait_ready", lambda sender, url: trainer.served_name(sender.cfg))
    sender = trainer.WeightSender(
        make_cfg("trainer.dtype=bf16", 'inference.urls=["http://127.0.0.1:1"]'), tmp_path, CPU
    )
    draw = torch.Generator().manual_seed(0)
    shapes = {"a": (3,), "large": (1000, 777), "b": (7, 11, 13), "c": (1 << 19,), "d": (1, 1)}
    sent = {k: torch.randn(shape, generator=draw).bfloat16() for k, shape in shapes.items()}
    for version in (1, 2):
        sender.send(version, sent)
        assert arrived.keys() == sent.keys() and all(torch.equal(arrived[k], sent[k]) for k in sent)
        sent = {k: v + 1 for k, v in sent.items()}
    with pytest.raises(RunError, match="sync of version 3: 1 of 5 tensors are not finite, the first is c") as e:
        sender.send(3, sent | {"c": sent["c"] / 0})
    assert e.value.code == 5


def test_what_lies_side_by_side_is_one_message():
    room, memory = torch.arange(70.0), bytearray(16)
    tensors = {"empty": room[:0], "a": room[:10], "b": room[10:30].view(4, 5), "other": torch.ones(3).half()}
    tensors |= {"gap": room[40:50], "alone": room[60:], "before": room[30:40]}  # in memory, of "gap"
    # a storage that begins where another ends
    tensors |= {f"at {at}": torch.frombuffer(memory, dtype=torch.float32, count=2, offset=at) for at in (0, 8)}
    found = trainer.messages(tensors)
    names = [[name for name, *_ in part] for part in found]
    assert names == [["empty"], ["a", "b", "before", "gap"], ["other"], ["alone"], ["at 0"], ["at 8"]]
    assert found[1][1:3] == [("b", [4, 5], "float32"), ("before", [10], "float32")]
    waits, sent, spec = [], [], {"timeout_s": 5.0, "messages": found}
    work = SimpleNamespace(wait=waits.append)
    group = SimpleNamespace(broadcast=lambda x, root: sent.append(x.clone()) or work)
    meant = {k: (x.shape, x.dtype) for k, x in tensors.items()}
    for given in (tensors, None):
        arrived = dict(trainer.stream(group, CPU, spec, given))
        assert {k: (x.shape, x.dtype) for k, x in arrived.items()} == meant
        assert [len(x) for x in sent] == [0, 200, 6, 40, 8, 8] and waits == [timedelta(seconds=5)] * 6
        assert given is None or all(torch.equal(arrived[k], x) for k, x in given.items())
        waits.clear(), sent.clear()


def test_weights_lie_side_by_side(make_cfg, models):
    """In the order of the model, and without the rest of a piece that the next one does not fit in."""
    cfg = make_cfg(*LORA, "trainer.dtype=bf16")
    policy = trainer.build_policy(cfg)
    for adapters in (False, True):
        weights = dict(trainer.sampler_weights(policy.model, torch.bfloat16, adapters, CPU))
        assert [[(name, [*w.shape], "bfloat16") for name, w in weights.items()]] == trainer.messages(weights)
        assert all(
            w.device.type == "meta" for _, w in trainer.sampler_weights(policy.model, torch.bfloat16, adapters, "meta")
        )
    sizes = dict(zip("abcdefghijkl", [4] * 8 + [3, 5, 1, 4]))  # the eight fill a piece; 5 is no small one
    model = torch.nn.ParameterDict({name: torch.empty(size << 20).bfloat16() for name, size in sizes.items()})
    weights = dict(trainer.sampler_weights(model, torch.bfloat16, False, CPU))
    found = ["".join(name for name, *_ in part) for part in trainer.messages(weights)]
    assert found == ["abcdefgh", "ikl", "j"]
    assert weights["l"].data_ptr() - weights["i"].data_ptr() == 4 << 21  # the rest of its piece was not left


def test_final_has_the_models_generation_config(make_cfg, models, tmp_path):
    """Also one that Transformers reads, but refuses to write."""
    shutil.copytree(models["untied"], path := tmp_path / "model")
    theirs = {"do_sample": False, "temperature": 0.6, "eos_token_id": [0, 5]}
    (path / "generation_config.json").write_text(json.dumps(theirs))
    cfg = make_cfg(model=path)
    trainer.write_final(tmp_path, trainer.build_policy(cfg), cfg)
    assert json.loads((tmp_path / "final" / "generation_config.json").read_text()) == theirs


def test_final_has_the_runs_chat_template(make_cfg, tmp_path):
    from transformers import AutoTokenizer

    (tmp_path / "mine.jinja").write_text("{{ messages[0]['content'] }} mine")
    cfg = make_cfg(f"chat_template={tmp_path / 'mine.jinja'}")
    trainer.write_final(tmp_path, trainer.build_policy(cfg), cfg)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "final")
    assert tokenizer.apply_chat_template([{"role": "user", "content": "a"}], tokenize=False) == "a mine"


def test_the_canary_asks_for_the_plain_distribution(make_cfg):
    """What a request leaves out, vLLM would take from a model's generation_config.json, unless it is told not to."""
    asked = []
    sender = SimpleNamespace(cfg=make_cfg(), post_all=lambda path, body: asked.append(body) or [])
    assert trainer.WeightSender.say(sender, 0, [[1, 2]]) == []
    assert not asked[0].keys() & {"temperature", "top_p", "top_k", "min_p", "repetition_penalty"}
    assert make_cfg("inference.args.enforce_eager=true").inference.args["generation_config"] == "vllm"
