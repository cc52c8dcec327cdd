"""trainer.py: log-probabilities, losses and steps against float64, ranks, resumption, final/, the canary and syncs."""

import fcntl
import gzip
import json
import math
import os
import shutil
import subprocess
import sys
from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import BASE, ROOT, final, lines, sent, write_batches
from plain_server import PlainServer
from ranks import replays
from safetensors.torch import load_file, save_file
from torch import nn
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM, AutoTokenizer

import trainer
from rolemodel import checkpoints, losses, speed
from rolemodel.config import load_config
from rolemodel.distributed import dither
from rolemodel.role import ConfigError, DataError, NumericsError, RunError
from rolemodel.trees import Costs, cut_into_trees
from tools import start_from

FREE = Costs(0.0, 0.0, 0.0, math.inf)
CPU = torch.device("cpu")
EXACT = {"rtol": 0, "atol": 0}
EPOCHS = ["trainer.updates_per_batch=2", "trainer.minibatches=2"]
LORA = ["trainer.use_lora=true", "trainer.beta=0.1", "trainer.learning_rate=1e-2"]


def sgd(parameters, t):
    """trainer.optimizer = "test_trainer:sgd"; at a rate of 1 the weights change by their gradient."""
    return torch.optim.SGD(parameters.values(), t.learning_rate)


def poisoned(micro, logp_N, entropy_N):
    """trainer.loss: its gradient is nan at one token of batch 1. On the first of two ranks alone it logs something."""
    loss_N, logs = trainer.cispo(micro, logp_N, entropy_N)
    is_alone = torch.distributed.get_world_size() == 2 and torch.distributed.get_rank() == 0
    return loss_N * micro["poison_N"], logs | ({"policy/alone": logp_N} if is_alone else {})


def mixed(sequences):
    """The second is a demonstration without a reward, the first has a field of its own, and temperatures differ."""
    sequences[1].old_logp[:] = np.nan
    del sequences[1].info["reward"]
    sequences[0].fields["mine"] = np.ones(len(sequences[0].tokens), np.float32)
    for i, s in enumerate(sequences):
        s.info |= {"num_turns": 1 + i, "temperature": 0.7 + 0.05 * i, "truncated": i == 2}
        s.fields["poison"] = np.ones(len(s.tokens), np.float32)


def save(folder, steps=1, change=lambda sequences: None):
    return write_batches(folder, steps, lambda sequences: (mixed(sequences), change(sequences)), num=13)


def load(tmp_path, **kwargs):
    return trainer.load_batch(save(tmp_path / "saved", **kwargs) / "step_000000.safetensors")


@pytest.fixture
def replay(make_cfg, tmp_path):
    """replay(DIR, override, ...) -> the directory of a replay in this process."""

    def go(saved, *overrides, model=None):
        make_cfg(model=model)
        replays([[tmp_path / "test.toml", saved, f"output_dir={tmp_path}", *overrides]])
        return next(tmp_path.glob("test-replay-*"))

    return go


def reference(model, batch):
    """logp_T and entropy_T of a batch's loss tokens by a Transformers model, best in float64, sequence by sequence; 0
    at other tokens."""
    found = []
    start = 0
    for size in batch.lens:
        at = slice(start, start := start + size)
        logits = model(batch.fields["tokens"][at][None].long(), use_cache=False).logits[0, :-1]
        log_p = (logits / batch.fields["temperature"][at][1:, None].double()).log_softmax(-1)
        logp = log_p.gather(-1, batch.fields["tokens"][at][1:, None].long())[:, 0]
        both = torch.stack((logp, -(log_p.exp() * log_p).sum(-1))) * batch.fields["mask"][at][1:]
        found.append(torch.cat((both.new_zeros(2, 1), both), 1))
    return torch.cat(found, 1)


def in_float64(path):
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64).eval()


# --- batches ----------------------------------------------------------------------------------------------------------


def test_numbers_of_sequences_are_fields(tmp_path):
    batch = load(tmp_path)
    reward = [x_L[0].item() for x_L in batch.fields["reward"].split(batch.lens)]
    assert math.isnan(reward[1]) and all(map(math.isfinite, reward[2:]))
    assert batch.fields["num_turns"][-1] == 13 and batch.fields["truncated"].sum() == batch.lens[2]
    assert "env" not in batch.fields and batch.fields["mine"].isnan().sum() == sum(batch.lens[1:])
    assert batch.counts == [int(mask_L.sum()) for mask_L in batch.fields["mask"].split(batch.lens)]
    with pytest.raises(DataError, match="not finite"):
        load(tmp_path, change=lambda sequences: sequences[3].adv.put(2, np.nan))


def test_a_tree(make_cfg):
    """Two rows that fork, in the order of their tokens. What each position sees: test_a_step_against_float64."""
    fields = {"tokens": torch.tensor([7, 8, 9, 4, 7, 8, 5, 6]), "mask": torch.tensor([0, 0, 1, 1, 0, 0, 1, 1])}
    batch = trainer.Batch(fields, [4, 4], [2, 2], [1.0, 1.0], {})
    ids = fields["tokens"].split(batch.lens)
    assert cut_into_trees(ids, [0, 1], 6, None) == [(4, [0]), (4, [1])]
    assert cut_into_trees(ids, [0, 1], 6, FREE) == [(6, [1, 0])]
    assert len(cut_into_trees(ids, [0, 1], 5, FREE)) == 2  # it has six tokens
    assert len(cut_into_trees(ids, [0, 1], 6, Costs(1.0, 1.0, math.inf, 99))) == 2  # a tree has more attention
    assert len(cut_into_trees(ids, [0, 1], 6, Costs(1.0, 1.0, 0.0, 99))) == 1  # unless it is cut into blocks
    micro = trainer.collate(fields, batch.lens, [[1, 0]], 8, CPU)
    assert micro["tokens_N"].tolist() == [5, 6, 9, 4] and micro["sequence_N"].tolist() == [0, 0, 1, 1]


@pytest.mark.parametrize("shares", [False, True])
@pytest.mark.parametrize("world", [1, 3])
def test_micro_batches_hold_each_row_once(world, shares, make_cfg, tmp_path, monkeypatch):
    cfg = make_cfg("trainer.micro_batch_size=1")
    batch = load(tmp_path)
    monkeypatch.setattr(trainer.dist, "get_world_size", lambda: world)
    seen = Counter()
    shapes = []
    policy = Policy()
    policy.tree_costs = FREE if shares else None
    for rank in range(world):
        monkeypatch.setattr(trainer.dist, "get_rank", lambda: rank)
        micros = trainer.make_micros(batch, list(range(13)), cfg, policy)
        shapes.append([micro["ids_BW"].shape[1] for micro in micros])
        for micro in micros:
            seen.update(micro["at_N"].tolist())
            assert shares or micro["sequence_N"].equal(micro["index_N"] // micro["ids_BW"].shape[1])
            assert micro["ids_BW"].numel() <= 64  # and one of the sequences is imitated
            assert (micro["num_tokens"], micro["num_sequences"], micro["max_tokens"]) == (sum(batch.counts), 12, 16)
            assert (micro["num_computed"] < sum(batch.lens)) == shares
    assert all(widths == shapes[0] for widths in shapes) and shapes[0] == sorted(shapes[0], reverse=True)
    assert seen == Counter(batch.fields["mask"].nonzero().flatten().tolist())
    assert len(shapes[0]) <= math.ceil(1.6 * sum(batch.lens) / 64 / world) + 1  # little is padding


# --- the policy and its losses ----------------------------------------------------------------------------------------


def test_in_16_bits_masters_and_temperatures_stay_in_fp32(make_cfg, tmp_path):
    """FSDP2 casts inputs to the compute dtype: 0.6 would become 0.6016, and bias every ratio."""
    seen = []
    policy = trainer.build_policy(make_cfg("trainer.dtype=bf16"))
    head = policy.head
    policy.head = lambda *given: seen.append(given) or head(*given)
    batch = load(tmp_path)
    logp_N, _ = policy(trainer.collate(batch.fields, batch.lens, [[0]], max(batch.lens), CPU))
    logp_N.sum().backward()
    weights, hidden_ND, target_N, temperature_N = seen[0]
    logits_NV = (hidden_ND @ weights["weight"].bfloat16().T).double() / temperature_N[:, None]
    expected_N = logits_NV.log_softmax(-1).gather(1, target_N[:, None])[:, 0]
    torch.testing.assert_close(expected_N, logp_N.double(), atol=1e-5, rtol=0)
    assert hidden_ND.dtype == torch.bfloat16 and set(temperature_N.tolist()) == {np.float32(0.7)}
    assert {p.dtype for p in policy.parameters()} == {p.grad.dtype for p in policy.parameters()} == {torch.float32}


def test_in_16_bits_masters_begin_anywhere_in_their_cell(make_cfg, models, tmp_path):
    """Version 0 is the file bit for bit, and a small update shows in as many weights as its size demands."""
    AutoModelForCausalLM.from_pretrained(models["untied"], dtype=torch.bfloat16).save_pretrained(tmp_path / "model")
    written = load_file(tmp_path / "model" / "model.safetensors")
    policy = trainer.build_policy(make_cfg("trainer.dtype=bf16", model=tmp_path / "model"))
    torch.testing.assert_close(sent(policy, torch.bfloat16), written, **EXACT)
    master = policy.model.model.layers[0].mlp.up_proj.weight.to_local().detach()
    start = written["model.layers.0.mlp.up_proj.weight"].float()
    step = 2 ** (start.abs().log2().floor() - 7)
    place = (master - start) / step
    assert place.abs().max() <= 0.5 and place.std().item() == pytest.approx(12**-0.5, rel=0.02)
    assert (((master + 0.1 * step).bfloat16().float() - start) / step).mean().item() == pytest.approx(0.1, abs=0.01)


@pytest.mark.parametrize("x", [1.0, -2.0, 1.5, 1 + 2**-7, 0.3, 2.0**-126, 0.0])
def test_a_master_is_uniform_in_its_cell(x):
    """StochasticRounding.jl #74. Below a power of two the cell is half as wide as above; by Kolmogorov and Smirnov."""
    master_N = torch.full([100_000], x)
    rounded = torch.tensor(x).bfloat16()
    dither([SimpleNamespace(to_local=lambda: master_N)], torch.bfloat16)
    assert (master_N.bfloat16() == rounded).all()
    low, high = (rounded.nextafter(torch.tensor(end).bfloat16()).double() for end in (-math.inf, math.inf))
    place_N = ((master_N.double() - (low + rounded) / 2) / ((high - low) / 2)).sort().values
    assert (place_N - torch.linspace(0, 1, 100_000)).abs().max() < 2 / 100_000**0.5


SEEN = []


def remembers(micro, logp_N, entropy_N):
    SEEN.append(micro | {"logp_N": logp_N.detach()})
    return losses.grpo(micro, logp_N, entropy_N)


remembers.uses_prox = True


@pytest.mark.parametrize("updates", [1, 2])
def test_minibatches_and_the_policy_before_the_first(updates, make_cfg, tmp_path):
    SEEN.clear()
    more = ("trainer.loss=test_trainer:remembers", "trainer.minibatches=3", "trainer.optimizer=test_trainer:sgd")
    cfg = make_cfg(*more, f"trainer.updates_per_batch={updates}")
    batch = load(tmp_path)
    policy = trainer.build_policy(cfg)
    before = reference(in_float64(cfg.run.model), batch)[0]
    trainer.train_step(policy, trainer.make_optimizer(policy, cfg.trainer), batch, 0, cfg)
    ends_S = torch.tensor(batch.lens).cumsum(0)
    rows = [sorted({int((ends_S <= at).sum()) for at in micro["at_N"].tolist()}) for micro in SEEN]
    assert len(SEEN) == 3 * updates and (rows[0] != rows[-3] or updates == 1)
    assert sorted(sum(rows[:3], [])) == list(range(13)) == sorted(sum(rows[-3:], []))
    for micro in SEEN:
        torch.testing.assert_close(micro["prox_logp_N"].double(), before[micro["at_N"]], atol=1e-5, rtol=0)
    assert (SEEN[-1]["logp_N"] - SEEN[-1]["prox_logp_N"]).abs().max() > 1e-4
    assert sum(micro["num_sequences"] for micro in SEEN[:3]) == 12
    assert all(micro["num_tokens"] == len(micro["at_N"]) for micro in SEEN)  # each is a whole minibatch


class Keeps(torch.optim.SGD):
    """trainer.optimizer = "test_trainer:keeps" keeps each step's gradient of the head, and changes nothing."""

    def step(self):
        SEEN[-1]["gradient"] = self.param_groups[0]["params"][-1].grad.clone()


def keeps(parameters, t):
    return Keeps(parameters.values(), t.learning_rate)


def test_minibatches_add_up_to_the_batch(make_cfg, tmp_path):
    total = []
    for num in (1, 3):
        SEEN.clear()
        more = ("trainer.loss=test_trainer:remembers", "trainer.optimizer=test_trainer:keeps")
        cfg = make_cfg(*more, f"trainer.minibatches={num}", "trainer.max_grad_norm=1e9")
        policy = trainer.build_policy(cfg)
        trainer.train_step(policy, trainer.make_optimizer(policy, cfg.trainer), load(tmp_path), 0, cfg)
        steps = [micro for micro in SEEN if "gradient" in micro]
        assert len(steps) == num
        total.append(sum(micro["gradient"] * micro["num_tokens"] for micro in steps))
    torch.testing.assert_close(*total, atol=1e-4, rtol=1e-4)


# --- a step -----------------------------------------------------------------------------------------------------------


def with_entropy(micro, logp_N, entropy_N):
    loss_N, logs = trainer.cispo(micro, logp_N, entropy_N)
    return loss_N + 2 * entropy_N * micro["adv_N"], logs


@pytest.mark.parametrize("size, shares, chunk", [
    (1, "true", 102 * 3), (1, "true", 1 << 26), (8, "true", 1 << 26), (8, "false", 102 * 3)])  # fmt: skip
def test_a_step_against_float64(size, shares, chunk, replay, models, tmp_path, monkeypatch):
    """Gradient and metrics, whatever the micro-batches and trees, with the head in chunks of three tokens or in one
    piece; clipped to a norm over all parameters."""
    monkeypatch.setattr(trainer.Policy, "CHUNK", chunk)
    more = (f"trainer.micro_batch_size={size}", "trainer.optimizer=test_trainer:sgd", "trainer.max_grad_norm=0.05")
    more += ("trainer.loss=test_trainer:with_entropy", "trainer.gradient_checkpointing=true", "trainer.learning_rate=1")
    saved = save(tmp_path / "saved")
    run_dir = replay(saved, *more, f"trainer.share_prefixes={shares}", model=models["tied"])
    batch = trainer.load_batch(saved / "step_000000.safetensors")
    model = in_float64(models["tied"])
    logp_T, entropy_T = reference(model, batch)
    mask_T = batch.fields["mask"]
    old_T = batch.fields["old_logp"].double()
    is_sampled_T = mask_T & ~old_T.isnan()
    r_T = torch.where(is_sampled_T, (logp_T - old_T).exp().clamp(max=5), 1).detach()
    value_T = torch.where(is_sampled_T, 2 * entropy_T, 0) - r_T * logp_T
    loss = (value_T * batch.fields["adv"])[mask_T].sum() / mask_T.sum()
    loss.backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.05).item()
    after = load_file(run_dir / "final" / "model.safetensors")
    for name, p in model.named_parameters():
        torch.testing.assert_close(p.detach() - after[name].double(), p.grad, atol=1e-7, rtol=1e-3)
    (line,) = lines(run_dir / "metrics.jsonl")
    log_r = (logp_T - old_T)[is_sampled_T]
    expected = {"loss": loss, "optim/grad_norm": norm, "policy/entropy": entropy_T[is_sampled_T].mean()}
    expected |= {"policy/logp": logp_T[is_sampled_T].mean(), "policy/kl_sampler": (log_r.exp() - 1 - log_r).mean()}
    for key, x in expected.items():
        assert line[key] == pytest.approx(float(torch.as_tensor(x).detach()), rel=1e-4), key
    assert line["optim/skipped"] == 0 and line["version"] == 1 and norm > 0.05
    rows = [ids_L.tolist() for ids_L in batch.fields["tokens"].split(batch.lens)]
    different = {tuple(row[:size]) for row in rows for size in range(1, len(row) + 1)}  # positions, by all up to them
    assert 0 <= line["perf/shared"] <= 1 - len(different) / sum(batch.lens)
    assert (line["perf/shared"] > 0.1) == (shares == "true")
    logp = load_file(run_dir / "batches" / "logp_000000.safetensors")["logp"]
    torch.testing.assert_close(logp.double(), logp_T.detach(), atol=1e-5, rtol=0)


def with_heads(sequences):
    """Heads of three tokens and of the sampled one, which are all that was kept, a part of what was kept, or none; in
    every third sequence nothing was cut off. The last one has no head at all."""
    rng = np.random.default_rng(0)
    for i, s in enumerate(sequences[:-1]):
        others = np.stack([rng.choice(100, 3, replace=False) for _ in s.tokens])
        ids = np.concatenate([s.tokens[:, None], (s.tokens[:, None] + 1 + others) % 101], 1).astype(np.int32)
        q = rng.dirichlet([1.0] * 4, len(ids)) * (0.9 if i % 3 else 1)
        ids[::5, 1:] = ids[::7] = ids[~s.mask] = -1
        logp = np.where(ids < 0, np.nan, np.log(q))
        s.fields |= {"head_ids": ids, "old_head_logp": logp.astype(np.float32)}
        s.old_logp = np.where(np.isnan(logp[:, 0]) | np.isnan(s.old_logp), s.old_logp, logp[:, 0]).astype(np.float32)
        s.info["top_k"] = 4 * (i % 3 < 2)


@pytest.mark.parametrize("size, shares, chunk", [(1, "true", 102 * 3), (8, "true", 1 << 26), (8, "false", 102 * 3)])
def test_heads_against_float64(size, shares, chunk, replay, models, tmp_path, monkeypatch):
    """A step with score centering, by the policy's distribution over what the sampler kept."""
    monkeypatch.setattr(trainer.Policy, "CHUNK", chunk)
    more = [f"trainer.micro_batch_size={size}", f"trainer.share_prefixes={shares}"]
    more += ["trainer.optimizer=test_trainer:sgd", "trainer.max_grad_norm=1e9"]
    more += ["trainer.loss=losses:centered", "trainer.loss_args.ratio_low=0.5", "trainer.learning_rate=1"]
    saved = save(tmp_path / "saved", change=with_heads)
    run_dir = replay(saved, *more)
    fields = (batch := trainer.load_batch(saved / "step_000000.safetensors")).fields
    assert fields["head_ids"].dtype == torch.int32 and fields["old_head_logp"].shape == (sum(batch.lens), 4)
    model = in_float64(models["untied"])
    rows = fields["tokens"].split(batch.lens)
    logits = torch.cat([model(ids_L[None].long(), use_cache=False).logits[0].roll(1, 0) for ids_L in rows])
    log_p_TV = (logits / fields["temperature"][:, None].double()).log_softmax(-1)
    loss = 0.0
    logp_T = torch.zeros(sum(batch.lens), dtype=torch.float64)
    for i in fields["mask"].nonzero().flatten().tolist():
        ids = [x for x in fields["head_ids"][i].tolist() if x >= 0]
        q = fields["old_head_logp"][i].double().exp().nansum()
        log_p = log_p_TV[i] - (log_p_TV[i, ids].logsumexp(-1) - q.log() if ids and fields["top_k"][i] else 0)
        logp, adv = log_p[int(fields["tokens"][i])], fields["adv"][i]
        logp_T[i] = logp.detach()
        weight = (logp - fields["old_logp"][i].double()).exp().clamp(0.5, 1).detach()
        loss -= (weight if fields["is_sampled"][i] else 1) * adv * logp
        if ids and fields["is_sampled"][i]:
            known = fields["old_head_logp"][i][: len(ids)].double().exp()
            rho = (1 - q).clamp(min=1e-6) / (1 - log_p[ids].exp().sum()).clamp(min=1e-6)
            alpha = torch.ones(()).clamp(0.5 * rho, rho)
            coefficient = log_p[ids].exp().clamp(0.5 * known, known) - alpha * log_p[ids].exp()
            loss += adv * (coefficient.detach() * log_p[ids]).sum()
    (loss / fields["mask"].sum()).backward()
    found_T = load_file(run_dir / "batches" / "logp_000000.safetensors")["logp"].double()
    torch.testing.assert_close(found_T, logp_T, atol=1e-4, rtol=0)
    (line,) = lines(run_dir / "metrics.jsonl")
    norm = math.sqrt(sum(p.grad.square().sum() for p in model.parameters()))
    assert line["optim/grad_norm"] == pytest.approx(norm, rel=1e-3) and 0 < line["policy/head_short"] < 1
    assert line["loss"] == pytest.approx(loss.item() / fields["mask"].sum().item(), rel=1e-3)


def test_adamw_and_its_rate(make_cfg, tmp_path):
    how = ("trainer.weight_decay=0.1", "trainer.adam_beta2=0.95", "trainer.warmup_steps=3", "max_steps=100")
    cfg = make_cfg(*how)
    policy = trainer.build_policy(cfg)
    before = {name: p.detach().double().clone() for name, p in policy.trained().items()}
    optimizer = trainer.make_optimizer(policy, cfg.trainer)
    batch = load(tmp_path)
    metrics, _ = trainer.train_step(policy, optimizer, batch, 1, cfg)
    assert metrics["optim/lr"] == 0.5e-3
    for name, p in policy.trained().items():
        state = optimizer.state[p]
        grad = state["exp_avg"].double() / (1 - 0.9)
        torch.testing.assert_close(state["exp_avg_sq"].double(), (1 - 0.95) * grad**2, rtol=1e-4, atol=0)
        expected = before[name] * (1 - 0.5e-3 * 0.1) - 0.5e-3 * grad / (grad.abs() + 1e-8)
        torch.testing.assert_close(p.detach().double(), expected, atol=1e-7, rtol=1e-6)
    # A norm that overflows changes no weight.
    batch.fields["adv"] *= 1e25
    after = {name: p.detach().clone() for name, p in policy.trained().items()}
    metrics, _ = trainer.train_step(policy, optimizer, batch, 2, cfg)
    assert metrics["optim/skipped"] == 1 and all(p.equal(after[name]) for name, p in policy.trained().items())


@pytest.mark.parametrize("lora", ["false", "true"])
def test_the_share_of_the_peak_against_a_count(lora, make_cfg, tmp_path, monkeypatch):
    """Of one row without padding. What is counted in attention has no causal half."""
    cfg = make_cfg(f"trainer.use_lora={lora}")
    batch = load(tmp_path)
    only = max(range(13), key=lambda row: (batch.lens[row] % 4 == 0, batch.lens[row]))
    batch = batch._replace(counts=[num * (row == only) for row, num in enumerate(batch.counts)])
    policy = trainer.build_policy(cfg)
    monkeypatch.setattr(speed, "PEAKS", {"": 1e-12})  # on CPUs it is unknown
    with FlopCounterMode(display=False) as counter:
        metrics, _ = trainer.train_step(policy, trainer.make_optimizer(policy, cfg.trainer), batch, 1, cfg)
    assert metrics["perf/mfu"] * metrics["time/train_s"] == pytest.approx(counter.get_total_flops(), rel=0.1)


def test_the_schedule(make_cfg):
    def rates(name, *overrides):
        t = make_cfg(f"trainer.lr_scheduler_type={name}", *overrides).trainer
        return [trainer.schedule(step, t, 10) for step in range(10)]

    warm = ("trainer.warmup_steps=3", "trainer.warmup_ratio=0.1")
    assert rates("constant", *warm) == [1.0] * 10
    assert rates("constant_with_warmup", *warm) == [0.25, 0.5, 0.75] + [1.0] * 7
    assert rates("linear", *warm)[3:] == pytest.approx([1 - step / 7 for step in range(7)])
    assert rates("cosine") == pytest.approx([(1 + math.cos(math.pi * step / 10)) / 2 for step in range(10)])
    assert rates("constant_with_warmup", "trainer.warmup_ratio=0.9")[4:6] == [5 / 6, 1.0]  # at most half of them


# --- LoRA and final/ --------------------------------------------------------------------------------------------------


def test_lora_starts_as_the_base_trains_its_factors_and_merges_exactly(make_cfg, models, tmp_path):
    cfg = make_cfg(*LORA, "trainer.dtype=bf16", "trainer.lora_alpha=24")
    policy = trainer.build_policy(cfg)
    assert all("lora_" in name and p.dtype == torch.float32 for name, p in policy.trained().items())
    base = {name: w.bfloat16().float() for name, w in load_file(models["untied"] / "model.safetensors").items()}
    torch.testing.assert_close(sent(policy, torch.float32), base, **EXACT)
    trainer.train_step(policy, trainer.make_optimizer(policy, cfg.trainer), load(tmp_path), 0, cfg)
    factors = sent(policy, torch.float32, only_lora=True)
    name = "model.layers.1.mlp.up_proj"
    low_rank = factors[f"{name}.lora_B.weight"].double() @ factors[f"{name}.lora_A.weight"].double() * 24 / 8
    merged = base[f"{name}.weight"].double() + low_rank
    torch.testing.assert_close(sent(policy, torch.float32)[f"{name}.weight"].double(), merged, atol=1e-6, rtol=0)
    assert low_rank.abs().max() > 1e-3 and len(factors) == 2 * 7 * 2
    policy.model.model.layers[0].register_buffer("bias", torch.ones(3))  # e.g. of a router
    kept = [name for name, w in sent(policy, torch.bfloat16).items() if w.dtype != torch.bfloat16]
    assert kept == ["model.layers.0.bias"]
    cfg = make_cfg("trainer.use_lora=true", 'trainer.lora_target_modules=["lm_head"]', model=models["tied"])
    with pytest.raises(ConfigError, match="'lm_head'"):
        trainer.build_policy(cfg)


def test_dropout_is_another_at_each_step_and_never_in_scores(make_cfg, tmp_path):
    how = ("trainer.use_lora=true", "trainer.optimizer=test_trainer:sgd", "trainer.learning_rate=0")
    cfg = make_cfg(*how, "trainer.lora_dropout=0.5")
    policy = trainer.build_policy(cfg)
    for p in policy.trained().values():
        nn.init.normal_(p)
    batch = load(tmp_path)
    optimizer = trainer.make_optimizer(policy, cfg.trainer)
    tables = [trainer.train_step(policy, optimizer, batch, step, cfg)[1] for step in (0, 1, 0)]
    first, other, again = (table["policy/logp"] for table in tables)
    scores = [trainer.score(policy, batch, list(range(13)), cfg) for _ in range(2)]
    assert first.equal(again) and not first.equal(other)
    assert scores[0].equal(scores[1]) and not scores[0].equal(first)


@pytest.mark.parametrize("kind", ["tied", "lora"])
def test_final_loads_in_transformers_and_peft(kind, replay, models, tmp_path):
    from peft import PeftModel

    model = tmp_path / "model"
    shutil.copytree(models["untied" if kind == "lora" else "tied"], model)
    (model / "generation_config.json").write_text('{"do_sample": false, "temperature": 0.6}')
    (tmp_path / "mine.jinja").write_text("{{ messages[0]['content'] }} mine")
    saved = save(tmp_path / "saved", 2)
    more = LORA if kind == "lora" else ["trainer.learning_rate=1e-2"]
    final = replay(saved, f"chat_template={tmp_path / 'mine.jinja'}", *more, model=model) / "final"
    if kind == "lora":
        found = PeftModel.from_pretrained(in_float64(model), final).double()
    else:
        found = AutoModelForCausalLM.from_pretrained(final, dtype="auto")
        assert found.dtype == torch.float32 and (final / "generation_config.json").read_text().startswith('{"do_sample')
    # A step at rate 0 scores a batch by what the run's checkpoint holds.
    cfg = load_config(tmp_path / "test.toml", more)
    policy = trainer.build_policy(cfg)
    checkpoints.resume(final.parent, policy, trainer.make_optimizer(policy, cfg.trainer))
    batch = trainer.load_batch(saved / "step_000000.safetensors")
    ours = trainer.score(policy, batch, list(range(13)), cfg).double()
    torch.testing.assert_close(reference(found.double().eval(), batch)[0].detach(), ours, atol=1e-5, rtol=0)
    assert (reference(in_float64(model), batch)[0] - ours).abs().max() > 1e-2
    tokenizer = AutoTokenizer.from_pretrained(final)
    assert tokenizer.apply_chat_template([{"role": "user", "content": "a"}], tokenize=False) == "a mine"


# --- ranks and resumption ---------------------------------------------------------------------------------------------


def poison(sequences):
    if len(sequences[4].tokens) > 9:  # in the first and third batch
        sequences[4].fields["poison"][-1] = np.nan


@pytest.fixture(scope="module")
def ranks(models, tmp_path_factory):
    """Runs with one rank and with two: where they are; of (name, ranks) the run's directory; its arguments."""
    path = tmp_path_factory.mktemp("ranks")
    (path / "test.toml").write_text(BASE.format(model=models["untied"]))
    saved = save(path / "saved", 3, poison)
    often = ["checkpoint.every=2", "checkpoint.keep=9", "trainer.micro_batch_size=2"]
    lossy = "trainer.loss=test_trainer:poisoned"
    dropout = [*LORA, "trainer.lora_dropout=0.2", "trainer.ref_sync_steps=1", *EPOCHS]
    slow = [*LORA, *EPOCHS, "trainer.learning_rate=1e-3"]
    runs = {"full": EPOCHS, "lora": slow, "poisoned": [lossy], "whole": dropout}

    def argv(name, more, ranks):
        where = [path / "test.toml", saved, f"output_dir={path / str(ranks)}", f"run_name={name}", "env.name=Grüße"]
        return [*where, *often, *more]

    two = [argv(name, more, 2) for name, more in runs.items()]
    two += [argv("half", [*dropout, "max_steps=2"], 2), argv("half", dropout, 2)]
    (path / "runs.json").write_text(json.dumps(two, default=str))
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone"]
    command += [ROOT / "tests" / "ranks.py", path / "runs.json"]
    ascii = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}  # a locale without umlauts
    running = subprocess.Popen(command, env=os.environ | {"OMP_NUM_THREADS": "1"} | ascii)
    replays([argv(name, runs[name], 1) for name in ("full", "lora", "poisoned")])
    assert running.wait(240) == 0
    return path, lambda name, num: next((path / str(num)).glob(f"{name}-replay-*")), argv


@pytest.mark.parametrize("name", ["full", "lora", "poisoned"])
def test_two_ranks_are_one(name, ranks):
    """Two epochs of two minibatches; a metric that one rank alone logs; a gradient that is nan on one of them."""
    one, two = (ranks[1](name, num) for num in (1, 2))
    for a, b in zip(lines(one / "metrics.jsonl"), lines(two / "metrics.jsonl"), strict=True):
        assert ("policy/alone" in b) == (name == "poisoned")
        for key in [key for key in a if key.split("/")[0] not in ("time", "perf")]:
            assert b[key] == pytest.approx(a[key], rel=1e-3, abs=1e-6), key
    for step in range(3):
        logps = [load_file(path / "batches" / f"logp_{step:06d}.safetensors")["logp"] for path in (one, two)]
        torch.testing.assert_close(*logps, atol=1e-4, rtol=1e-4)
        assert logps[0].min() > -9  # not the sum of two epochs
    # A step moves a weight by 1e-3 at most; AdamW magnifies the rounding of gradients that are nearly 0.
    torch.testing.assert_close(final(one), final(two), atol=1e-4, rtol=1e-4)
    if name == "poisoned":
        metrics = lines(two / "metrics.jsonl")
        assert [(line["optim/skipped"], "optim/grad_norm" in line) for line in metrics] == [(1, 0), (0, 1), (1, 0)]
        assert all(w.isfinite().all() for w in final(two).values())


def test_a_resumed_run_is_the_same_on_two_ranks(ranks):
    """Bit for bit: LoRA with dropout, a reference that moves, epochs and minibatches."""
    whole, half = (ranks[1](name, 2) for name in ("whole", "half"))
    torch.testing.assert_close(final(half), final(whole), **EXACT)
    assert [x["loss"] for x in lines(half / "metrics.jsonl")] == [x["loss"] for x in lines(whole / "metrics.jsonl")]


def test_a_checkpoint_of_two_ranks_goes_on_with_one(ranks):
    path, run_of, argv = ranks
    run_dir = run_of("full", 2)
    copy = shutil.copytree(run_dir, path / "3" / run_dir.name)
    shutil.rmtree(copy / "checkpoints" / "step_000003")
    replays([argv("full", [*EPOCHS, "checkpoint.keep=1"], 3)])
    torch.testing.assert_close(final(copy), final(run_dir), atol=2e-5, rtol=1e-4)
    assert [old.name for old in (copy / "checkpoints").iterdir()] == ["step_000003"]


def test_a_resumed_run_is_the_same(replay, tmp_path, monkeypatch):
    """Bit for bit, with a parameter that never has a gradient, and after a resume before any parameter had one."""
    build = trainer.build_policy

    def with_idle_parameter(cfg):
        policy = build(cfg)
        policy.idle = nn.Parameter(torch.ones(3))
        return policy

    monkeypatch.setattr(trainer, "build_policy", with_idle_parameter)
    saved = save(tmp_path / "saved", 3)
    run_dir = replay(saved, "checkpoint.every=1", "checkpoint.keep=9")
    whole = final(run_dir)
    metrics = lines(run_dir / "metrics.jsonl")
    for last in (1, 2):
        for step in range(last + 1, 4):
            shutil.rmtree(run_dir / "checkpoints" / f"step_{step:06d}")
        (run_dir / "checkpoints" / "step_backup").mkdir(exist_ok=True)
        replay(saved, "checkpoint.every=1", "checkpoint.keep=9")
        torch.testing.assert_close(final(run_dir), whole, **EXACT)
        before, metrics = metrics, lines(run_dir / "metrics.jsonl")
        assert metrics[:last] == before[:last] and metrics[last]["time"] > before[last]["time"]
        assert [line["loss"] for line in metrics] == [line["loss"] for line in before]


def test_a_run_goes_on_with_the_model_that_it_began_with(replay, models, tmp_path):
    """miles #2733: an adapter on another revision of its base."""
    model = shutil.copytree(models["untied"], tmp_path / "model")
    saved = save(tmp_path / "saved", 2)
    replay(saved, *LORA, "max_steps=1", model=model)
    weights = load_file(model / "model.safetensors")
    weights["model.layers.1.mlp.up_proj.weight"][3, 5] += 0.01
    save_file(weights, model / "model.safetensors", {"format": "pt"})
    with pytest.raises(ConfigError, match="model.json: not what the run has begun with"):
        replay(saved, *LORA, model=model)
    shutil.copytree(models["untied"], model, dirs_exist_ok=True)
    assert len(lines(replay(saved, *LORA, model=model) / "metrics.jsonl")) == 2


# --- the loop ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("useless", [{"optim/grad_norm": math.nan}, {"policy/kl_sampler": 1.1}])
def test_three_useless_steps_in_a_row_end_a_run(useless, make_cfg, tmp_path, monkeypatch):
    """Until then it syncs the version that it starts with, and each further one."""
    make_cfg()
    (tmp_path / "test").mkdir()
    write_batches(tmp_path / "test" / "batches", 5)
    synced = []

    def sync(sender, policy, version, cfg):
        synced.append(version)
        return {}

    def step(policy, optimizer, batch, step, cfg):
        fine = {"loss": 0.0, "policy/kl_sampler": 0.0, "policy/entropy": 1.0, "optim/grad_norm": 1.0}
        return fine | ({} if step == 1 else useless), {"policy/logp": torch.zeros(1)}

    monkeypatch.setattr(trainer, "WeightSender", lambda *given: object())
    monkeypatch.setattr(trainer, "sync_weights", sync)
    monkeypatch.setattr(trainer, "train_step", step)
    monkeypatch.setattr(trainer, "start_distributed", lambda cfg: None)
    with pytest.raises(NumericsError, match="three steps; step 4"):
        trainer.main(
            [
                str(tmp_path / "test.toml"),
                f"output_dir={tmp_path}",
                "max_steps=5",
                'inference.urls=["http://127.0.0.1:9"]',
            ]
        )
    assert synced == [0, 1, 2, 3, 4]
    assert [line["step"] for line in lines(tmp_path / "test" / "metrics.jsonl")] == [0, 1, 2, 3]


def test_replays(replay, tmp_path):
    """The schedule ends with the batches. One that has nothing to do leaves nothing."""
    with pytest.raises(ConfigError, match="there is no batch"):
        replay(tmp_path)
    assert not list(tmp_path.glob("test-*"))
    run_dir = replay(save(tmp_path / "saved", 3), "trainer.lr_scheduler_type=linear", "trainer.profile_step=1")
    assert [line["optim/lr"] for line in lines(run_dir / "metrics.jsonl")] == pytest.approx([1e-3, 2e-3 / 3, 1e-3 / 3])
    assert json.loads(gzip.decompress((run_dir / "profile_000001.json.gz").read_bytes()))["traceEvents"]
    with pytest.raises(ConfigError, match="# batches was .*saved.*, now .*moved"):
        replay((tmp_path / "saved").rename(tmp_path / "moved"), "trainer.lr_scheduler_type=linear", "max_steps=9")
    (tmp_path / "other-replay-cispo" / "batches").mkdir(parents=True)
    with open(tmp_path / "other-replay-cispo" / ".lock", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(ConfigError, match="belongs to another replay"):
            replay(tmp_path / "moved", "run_name=other")


def test_old_batches_go(replay, tmp_path, capfd):
    """What is left leads to the last checkpoint alone: the one before lacks what orders remember."""
    saved = tmp_path / "test-replay-cispo" / "batches"
    run_dir = replay(save(saved, 5), "checkpoint.every=2", "checkpoint.keep_batches=1")
    assert sorted(path.stem for path in saved.iterdir()) == ["logp_000004", "step_000004"]
    assert start_from.reachable(run_dir) == {0: 0, 5: 5} and (run_dir / "checkpoints" / "step_000004").exists()
    replay(saved, "run_name=other")
    assert "replay: begins with" in capfd.readouterr().out


# --- servers and the canary -------------------------------------------------------------------------------------------


def test_a_server_of_another_run_is_not_taken(make_cfg, tmp_path):
    with PlainServer(None) as server:
        cfg = make_cfg(f'inference.urls=["{server.url.removesuffix("/v1")}"]', "inference.startup_timeout=600")
        with pytest.raises(RunError, match='must serve "test" .ROLEMODEL_RUN_ID.*second'):
            trainer.WeightSender(cfg, tmp_path, CPU)
    assert not server.bodies


class Policy:
    """Says 0 of every token, and remembers how it was asked."""

    vocab = 100
    device = CPU
    tree_costs = None

    def train(self, mode=True):
        self.training = mode

    def __call__(self, micro):
        self.mode = self.training
        self.micro = micro
        return torch.zeros(len(micro["at_N"])), None


def sender_that_says(number):
    def extend(version, rows, num):
        sender.rows = rows
        return [row + [1] * num for row in rows], torch.full([num * len(rows)], number)

    sender = SimpleNamespace(extend=extend)
    return sender


def test_how_the_canary_asks(make_cfg):
    """With the run's temperature, without dropout but at the start, and with rows that begin alike and end apart."""
    cfg = make_cfg("orchestrator.sampling.temperature=0.7", "trainer.use_lora=true", "trainer.lora_dropout=0.1")
    policy = Policy()
    sender = sender_that_says(0.0)
    asked = []
    for version in (0, 1):
        trainer.canary(sender, policy, version, cfg)
        assert policy.mode == (version == 0) and policy.training
        assert set(policy.micro["temperature_N"].tolist()) == {np.float32(0.7)}
        lens = [len(row) for row in sender.rows]
        assert lens == [28, 24, 21, 17, 14, 10, 7, 3]
        assert all(row == sender.rows[i % 2][: len(row)] for i, row in enumerate(sender.rows))
        asked.append(sender.rows)
    assert asked[0] != asked[1]


@pytest.mark.parametrize("override, limit", [
    ("trainer.dtype=fp32", 1e-3), ("trainer.dtype=bf16", 0.2), ("trainer.max_sync_dlogp=1.0", 1.0)])  # fmt: skip
def test_the_canarys_limit(override, limit, make_cfg):
    trainer.canary(sender_that_says(0.99 * limit), Policy(), 5, make_cfg(override))
    for number in (1.01 * limit, math.nan):
        with pytest.raises(RunError, match="canary of version 5"):
            trainer.canary(sender_that_says(number), Policy(), 5, make_cfg(override))
