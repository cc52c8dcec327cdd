"""trainer.py: losses against hand-made gradients, and the equalities that packing, ranks, LoRA and resume must keep."""

import itertools
import json
import math
import os
import shutil
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import lines, make_samples, run_trainer, some
from safetensors.torch import load_file

import trainer
from configs.lib import broadcast
from configs.lib.attention import Packing, packed_attention, padded
from configs.lib.batch import load_batch, replace_advantages, save_batch
from configs.lib.checkpoint import load_checkpoint, save_checkpoint
from configs.lib.runtime import RunError

CPU = torch.device("cpu")
LOG_R = np.array(
    [-25.0, -1.0, -0.3, -0.1, 0.0, 0.1, 0.3, 1.0, 1.7, 25.0]
)  # logp - old_logp, on either side of each edge


def by_hand(loss, r, log_r, adv, p, p_old, delta):
    """d loss_N / d logp_N, from the formulas of the papers."""
    low, high = {"grpo": (0.8, 1.28), "dr_grpo": (0.8, 1.2)}.get(loss, (0, 0))
    inside = abs(log_r) < 20  # the clamp of the log ratio has no gradient outside
    if loss == "cispo":
        return -min(r, 5) * adv
    if loss in ("grpo", "dr_grpo"):
        capped = min(r, delta or math.inf)
        if capped * adv <= min(max(r, low), high) * adv:
            return -r * adv * inside * (r <= (delta or math.inf))
        return -r * adv * inside * (low < r < high)
    if loss == "dppo":
        moved = p - p_old
        masked = (adv > 0 and moved > 0.2) or (adv < 0 and moved < -0.2)
        return (-(not masked) * r * adv + 2e-3 * log_r) * inside
    if loss == "icepop":
        return -r * adv if 0.5 <= r <= 5 else 0.0
    return -1.0  # sft


@pytest.mark.parametrize("loss", ["cispo", "grpo", "grpo+delta", "dr_grpo", "dppo", "icepop", "sft"])
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_token_losses_have_the_gradients_of_their_papers(loss, sign, make_cfg):
    name, _, extra = loss.partition("+")
    cfg = make_cfg(f"trainer.loss={name}", *["trainer.delta=4.0"] * bool(extra)).trainer
    old = torch.tensor([-30.0, -2.0, -0.5, -1.0, -1.0, -1.0, -1.5, -1.5, -3.0, -30.0], dtype=torch.float64)
    logp = (old + torch.tensor(LOG_R)).requires_grad_()
    adv = torch.full_like(old, 0.7 * sign)
    x = {
        "mask_N": torch.ones(10, dtype=torch.bool),
        "sample_N": torch.arange(10),
        "entropy_N": None,
        "ref_logp_N": None,
    }
    loss_N, _ = trainer.compute_loss(logp, old, adv, cfg=cfg, **x)
    loss_N.sum().backward()
    log_r = np.clip(LOG_R, -20, 20)
    expected = [
        by_hand(name, math.exp(log_r[i]), LOG_R[i], adv[i].item(), logp[i].exp().item(), old[i].exp().item(), cfg.delta)
        for i in range(10)
    ]
    np.testing.assert_allclose(logp.grad.numpy(), expected, rtol=1e-9, atol=1e-9)
    assert loss_N.isfinite().all()


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_gspo_has_the_gradient_of_its_paper(sign, make_cfg):
    """Three samples: inside the range, above, below."""
    cfg, adv = make_cfg("trainer.loss=gspo").trainer, 0.7 * sign
    shift = {0: [1e-4, -2e-4, 3e-4], 1: [0.01, 0.02], 2: [-0.01, -0.03, 0.0, -0.01]}
    sample_N = torch.tensor([i for i, row in shift.items() for _ in row])
    old = torch.linspace(-3, -1, len(sample_N), dtype=torch.float64)
    logp = (old + torch.tensor([x for row in shift.values() for x in row], dtype=torch.float64)).requires_grad_()
    mask = torch.ones(len(old), dtype=torch.bool)
    loss_N, _ = trainer.compute_loss(logp, old, torch.full_like(old, adv), mask, sample_N, None, None, cfg)
    loss_N.sum().backward()
    value, expected = 0.0, []
    for row in shift.values():
        s = math.exp(sum(row) / len(row))
        clipped = min(max(s, 1 - 3e-4), 1 + 4e-4)
        value -= min(s * adv, clipped * adv)
        expected += [-s * adv / len(row) if s * adv <= clipped * adv else 0.0] * len(row)
    assert loss_N.sum().item() == pytest.approx(value, abs=1e-12)
    np.testing.assert_allclose(logp.grad.numpy(), expected, rtol=1e-9, atol=1e-12)


# TRL 1.16.0's GRPOTrainer._compute_loss on the same numbers (its names: cispo, dapo, dapo with delta, dr_grpo, grpo
# with importance_sampling_level="sequence"): the loss, then its gradient on each of the seven tokens.
TRL = {
    "cispo": (0.4807455692620833, [-0.1884252881, -0.0766080053, -0.1263052478, -0.5714285714,
                                   0.0634987046, 0.0995857922, 0.4285714286]),
    "grpo": (0.1912137504279583, [0, -0.0766080053, -0.1263052478, 0, 0, 0.0995857922, 0.5185412112]),
    "grpo+delta": (0.015529682049705729, [0, -0.0766080053, -0.1263052478, 0, 0, 0.0995857922, 0]),
    "dr_grpo": (0.04582800790611588, [0, -0.0167580012, -0.027629273, 0, 0, 0.0217843921, 0.11343089]),
    "gspo": (-0.09999495461668018, [0, 0, 0, 0, 0.1000550151, 0.1000550151, 0.1000550151]),
}  # fmt: skip


@pytest.mark.parametrize("loss", TRL)
def test_losses_equal_trls(loss, make_cfg):
    name, _, extra = loss.partition("+")
    cfg = make_cfg(f"trainer.loss={name}", *["trainer.delta=4.0"] * bool(extra)).trainer
    old = torch.tensor([-1.0, -2.0, -0.5, -3.0, -1.5, -0.2, -2.5], dtype=torch.float64)
    shift = torch.tensor([0.5, -0.4, 0.1, 2.0, -0.3, 0.15, 1.8], dtype=torch.float64)
    logp = (old + shift * (1e-3 if name == "gspo" else 1)).requires_grad_()
    adv = torch.tensor([0.8] * 4 + [-0.6] * 3, dtype=torch.float64)
    sample_N, mask = torch.tensor([0] * 4 + [1] * 3), torch.ones(7, dtype=torch.bool)
    loss_N, _ = trainer.compute_loss(logp, old, adv, mask, sample_N, None, None, cfg)
    value = loss_N.sum() / {"gspo": 2, "dr_grpo": 2 * 16}.get(name, 7)
    value.backward()
    assert value.item() == pytest.approx(TRL[loss][0], abs=1e-9)
    np.testing.assert_allclose(logp.grad.numpy(), TRL[loss][1], atol=1e-9)


def test_losses_stay_finite_for_any_ratio(make_cfg):
    for name in ("cispo", "grpo", "dr_grpo", "dppo", "icepop", "gspo", "sft"):
        cfg = make_cfg(f"trainer.loss={name}").trainer
        for gap in (-1e4, 1e4):
            logp = torch.tensor([-1.0, min(0.0, -1 + gap)], requires_grad=True)
            old, mask = torch.tensor([-1.0, -1.0 - gap]), torch.ones(2, dtype=torch.bool)
            loss, _ = trainer.compute_loss(logp, old, torch.ones(2), mask, torch.tensor([0, 1]), None, None, cfg)
            loss.sum().backward()
            assert loss.isfinite().all() and logp.grad.isfinite().all(), name


def test_advantages():
    groups = [[{"reward": r} for r in (0.0, 1.0, 1.0, 0.0)], [{"reward": r} for r in (0.2, 0.4, 0.9)]]
    assert trainer.compute_advantages(groups, "mean") == [[-0.5, 0.5, 0.5, -0.5], pytest.approx([-0.3, -0.1, 0.4])]
    std = np.std([0, 1, 1, 0], ddof=1) + 1e-4
    assert trainer.compute_advantages(groups, "std")[0] == pytest.approx([-0.5 / std, 0.5 / std, 0.5 / std, -0.5 / std])
    std = np.std([0, 1, 1, 0, 0.2, 0.4, 0.9]) + 1e-4
    assert trainer.compute_advantages(groups, "batch_std")[1] == pytest.approx([-0.3 / std, -0.1 / std, 0.4 / std])
    assert trainer.compute_advantages(groups, "leave_one_out")[1][2] == pytest.approx(0.9 - (0.2 + 0.4) / 2)
    assert trainer.compute_advantages(groups, "test_trainer:first_is_one")[1] == [1.0, 0.0, 0.0]


def first_is_one(rewards_G, group):
    assert len(rewards_G) == len(group) and "reward" in group[0]
    return torch.tensor([1.0] + [0.0] * (len(group) - 1))


# --- equalities of the step -------------------------------------------------------------------------------------------


def batch_of(tmp_path, samples, **info):
    path = tmp_path / "step_000000.safetensors"
    save_batch(path, samples, {"run": "test", "step": 0, "rollouts": len(samples), "max_tokens": 16} | info)
    return load_batch(path)


def gradients(cfg, batch, policy=None, one_by_one=False):
    """-> loss, {name: gradient} of one step, before clipping (the norm's bound is out of reach)."""
    policy = policy or trainer.build_policy(cfg, CPU, 1)
    params = [p for p in policy.parameters() if p.requires_grad]
    kept = {}

    class Keep(torch.optim.SGD):
        def step(self):
            kept.update({name: p.grad.clone() for name, p in policy.named_parameters() if p.requires_grad})

    if one_by_one:
        original = trainer.pack
        trainer.pack = lambda lens, *_: [[i] for i in range(len(lens))]
    metrics, _ = trainer.train_step(policy, None, Keep(params, 0.0), batch, 0, cfg, 0, 1, CPU)
    if one_by_one:
        trainer.pack = original
    return metrics, kept


def same(a, b, tol=1e-5):
    worst = max((a[k] - b[k]).abs().max().item() for k in a)
    assert worst < tol and a.keys() == b.keys() and max(x.abs().max().item() for x in a.values()) > 1e-3, worst


@pytest.mark.parametrize("loss", ["cispo", "grpo", "dr_grpo", "dppo", "icepop", "gspo", "sft"])
def test_packed_is_one_by_one(loss, make_cfg, tmp_path):
    cfg = make_cfg(f"trainer.loss={loss}", "trainer.max_grad_norm=1e9")
    batch = batch_of(tmp_path, make_samples(24))
    packed, alone = gradients(cfg, batch), gradients(cfg, batch, one_by_one=True)
    same(packed[1], alone[1])
    assert packed[0]["loss"] == pytest.approx(alone[0]["loss"], abs=1e-5)


def test_micro_batch_budget_does_not_matter(make_cfg, tmp_path):
    batch = batch_of(tmp_path, make_samples(200, longest=40))
    small = make_cfg("trainer.micro_batch_size=8", "trainer.max_grad_norm=1e9")  # 8 x 64 = 512 tokens
    large = make_cfg("trainer.micro_batch_size=64", "trainer.max_grad_norm=1e9")  # 4096 tokens
    assert len(trainer.pack(batch.sample_lens.tolist(), 512, 1, 64)) > len(
        trainer.pack(batch.sample_lens.tolist(), 4096, 1, 64)
    )
    same(gradients(small, batch)[1], gradients(large, batch)[1])


def test_pack_keeps_budget_and_every_sample():
    rng = np.random.default_rng(0)
    for ranks in (1, 2, 3):
        for num in (1, 2, 5, 300):
            lens = rng.integers(1, 65, num).tolist()
            bins = trainer.pack(lens, 128, ranks, 64)
            assert sorted(i for b in bins for i in b) == list(range(num)) and len(bins) % ranks == 0
            assert all(sum(lens[i] for i in b) <= 128 for b in bins)
            assert all([lens[i] for i in b] == sorted(lens[i] for i in b) for b in bins)


def test_logp_and_entropy_have_their_true_gradients():
    """Each alone, and both: what is not used costs nothing, and changes nothing. Exact also in fp32, where many logits
    are far from 0."""
    wide = torch.randn(3, 150_000) * 3 + torch.tensor([[0.0], [1000.0], [-50.0]])
    logp, entropy = trainer.TokenLogp.apply(wide, torch.tensor([5, 7, 9]))
    expected = wide.double().log_softmax(-1)
    torch.testing.assert_close(logp.double(), expected[range(3), [5, 7, 9]], atol=2e-5, rtol=0)
    torch.testing.assert_close(entropy.double(), -(expected.exp() * expected).sum(-1), atol=2e-5, rtol=0)
    logits, target = torch.randn(5, 11, dtype=torch.float64, requires_grad=True), torch.tensor([0, 3, 3, 10, 7])
    logp, entropy = trainer.TokenLogp.apply(logits, target)
    expected = logits.log_softmax(-1)
    torch.testing.assert_close(logp, expected[range(5), target])
    torch.testing.assert_close(entropy, -(expected.exp() * expected).sum(-1))
    for part in (lambda pair: pair, lambda pair: pair[0], lambda pair: pair[1]):
        assert torch.autograd.gradcheck(lambda x: part(trainer.TokenLogp.apply(x, target)), (logits,))  # noqa: B023


@pytest.mark.parametrize("chunk", [7 * 102, 1 << 26])
def test_chunked_head_is_a_full_log_softmax(chunk, make_cfg, tmp_path, monkeypatch):
    cfg, batch = make_cfg(), batch_of(tmp_path, make_samples(8) + [make_samples(1, seed=9)[0] | {"temperature": 0.7}])
    policy = trainer.build_policy(cfg, CPU, 1).eval()
    monkeypatch.setattr(trainer.Policy, "CHUNK", chunk)
    micro = trainer.collate(batch, list(range(9)), CPU)
    logp_N, entropy_N = policy(micro)
    (logp_N.sum() + entropy_N.sum()).backward()
    chunked = {k: p.grad.clone() for k, p in policy.named_parameters()}
    policy.zero_grad()
    expected_logp, expected_entropy = [], []
    plain = plain_model(cfg)
    for i in range(9):
        start = int(batch.sample_lens[:i].sum())
        row = batch.tokens[start : start + batch.sample_lens[i]].long()
        log_p = (plain(row[None]).logits[0] / batch.samples[i]["temperature"]).log_softmax(-1)
        at = batch.loss_mask[start : start + batch.sample_lens[i]].nonzero()[:, 0]
        expected_logp.append(log_p[at - 1, row[at]])
        expected_entropy.append(-(log_p.exp() * log_p).sum(-1)[at - 1])
    torch.testing.assert_close(logp_N, torch.cat(expected_logp), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(entropy_N, torch.cat(expected_entropy), atol=1e-5, rtol=1e-5)
    (torch.cat(expected_logp).sum() + torch.cat(expected_entropy).sum()).backward()
    for name, p in plain.named_parameters():
        torch.testing.assert_close(chunked[f"model.{name}"], p.grad, atol=1e-4, rtol=1e-4)


def plain_model(cfg):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(cfg.run.model, dtype=torch.float32, attn_implementation="eager")


@pytest.mark.parametrize("family", ["Qwen3", "Llama", "Gemma3", "Qwen2", "Gemma2", "GptOss"])
def test_packed_attention_on_other_families(family, make_cfg, tmp_path):
    """Equal to Transformers' eager attention one by one, or refused by name."""
    import transformers

    config = getattr(transformers, {"Gemma3": "Gemma3TextConfig"}.get(family, f"{family}Config"))
    more = {"sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"]} if "Gemma" in family else {}
    torch.manual_seed(0)
    c = config(
        vocab_size=102, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, head_dim=16,
        num_key_value_heads=2, max_position_embeddings=128, tie_word_embeddings=False, **more,
    )  # fmt: skip
    model = getattr(transformers, f"{family}ForCausalLM")(c)
    torch.nn.init.normal_(model.lm_head.weight, std=0.5)
    model.save_pretrained(tmp_path / "model")
    cfg = make_cfg("trainer.max_grad_norm=1e9", model=tmp_path / "model")
    batch = batch_of(tmp_path, make_samples(10, longest=30))
    if family in ("Gemma2", "GptOss"):
        with pytest.raises(RunError, match="softcap|packed attention|dense decoder"):
            gradients(cfg, batch)
        return
    policy = trainer.build_policy(cfg, CPU, 1).eval()
    logp_N, _ = policy(trainer.collate(batch, list(range(10)), CPU))
    plain, expected = plain_model(cfg).eval(), []
    for row, mask in zip(
        batch.tokens.split(batch.sample_lens.tolist()), batch.loss_mask.split(batch.sample_lens.tolist())
    ):
        log_p, at = plain(row.long()[None]).logits[0].log_softmax(-1), mask.nonzero()[:, 0]
        expected.append(log_p[at - 1, row[at].long()])
    assert max(len(m) for m in batch.loss_mask.split(batch.sample_lens.tolist())) > 20  # the window is shorter
    torch.testing.assert_close(logp_N, torch.cat(expected), atol=1e-5, rtol=1e-5)
    logp_N.sum().backward()
    torch.cat(expected).sum().backward()
    for name, p in plain.named_parameters():
        torch.testing.assert_close(dict(policy.named_parameters())[f"model.{name}"].grad, p.grad, atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("window", [None, 7])
def test_packed_attention_pads_like_lengths_without_a_trace(window):
    """Lengths in several rectangles of several lengths each, in no order: values and gradients as one by one."""
    lens, draw = [40, 33, 1, 5, 32, 64, 64, 70, 3], torch.Generator().manual_seed(0)
    module, total = SimpleNamespace(is_causal=True), sum(lens)
    q, k, v = (torch.randn(1, h, total, 8, generator=draw, requires_grad=True) for h in (4, 2, 2))
    weight = torch.randn(total, 4, 8, generator=draw)
    cu_lens = torch.tensor([0, *np.cumsum(lens)], dtype=torch.int32)
    more = {"scaling": 0.3, "sliding_window": window}
    out, _ = packed_attention(module, q, k, v, None, packing=Packing(lens, cu_lens), **more)
    grads = torch.autograd.grad((out[0] * weight).sum(), (q, k, v))
    shapes, token_P, place_T, _ = padded(tuple(lens), CPU)
    assert [n for n, _ in shapes] == [2, 3, 2, 1, 1] and len(token_P) > len(place_T) == total
    alone = []
    for a, b in zip(cu_lens, cu_lens[1:]):
        near = torch.ones(b - a, b - a, dtype=torch.bool).tril().triu(1 - (window or 100))
        rows = (q[:, :, a:b], k[:, :, a:b].repeat_interleave(2, 1), v[:, :, a:b].repeat_interleave(2, 1))
        p = (rows[0] @ rows[1].mT * 0.3).masked_fill(~near, -math.inf).softmax(-1)
        alone.append((p @ rows[2])[0].transpose(0, 1))
    torch.testing.assert_close(out[0], torch.cat(alone), atol=1e-5, rtol=1e-5)
    expected = torch.autograd.grad((torch.cat(alone) * weight).sum(), (q, k, v))
    for found, wanted in zip(grads, expected):
        torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-5)


@pytest.mark.long
@pytest.mark.parametrize("mode", ["full", "lora, recomputed", "bf16"])
def test_compiled_blocks_have_the_gradients_of_plain_ones(mode, make_cfg, tmp_path):
    more = {"full": [], "bf16": ["trainer.dtype=bf16"]}.get(
        mode, ["trainer.use_lora=true", "trainer.gradient_checkpointing=true"]
    )
    batch = batch_of(tmp_path, make_samples(24))
    plain, compiled = (
        gradients(make_cfg(f"trainer.compile={flag}", "trainer.max_grad_norm=1e9", *more), batch)
        for flag in ("false", "true")
    )
    local = {k: {n: trainer.full(g).float() for n, g in grads.items()} for k, (_, grads) in
             {"plain": plain, "compiled": compiled}.items()}  # fmt: skip
    same(local["plain"], local["compiled"], 2e-2 if mode == "bf16" else 1e-5)
    assert compiled[0]["loss"] == pytest.approx(plain[0]["loss"], abs=2e-3 if mode == "bf16" else 1e-5)


def test_samples_of_no_tokens_still_pass(make_cfg, tmp_path):
    samples = [s | {"mask": [0] * len(s["mask"])} for s in make_samples(3)]
    metrics, grads = gradients(make_cfg(), batch_of(tmp_path, samples))
    assert metrics["loss"] == 0 and all((g == 0).all() for g in grads.values())


# --- LoRA and the reference -------------------------------------------------------------------------------------------

LORA = ("trainer.use_lora=true", "trainer.max_grad_norm=1e9")


def test_lora_starts_as_the_base_and_merges_exactly(make_cfg, tmp_path):
    batch = batch_of(tmp_path, make_samples())
    base, policy = trainer.build_policy(make_cfg(), CPU, 1), trainer.build_policy(make_cfg(*LORA), CPU, 1)
    micro = trainer.collate(batch, list(range(12)), CPU)
    torch.testing.assert_close(policy(micro)[0], base(micro)[0], atol=1e-5, rtol=0)
    for module in policy.modules():
        if isinstance(module, trainer.LoRALinear):
            torch.nn.init.normal_(module.lora_B, std=0.02)
    before = {k: v.clone() for k, v in policy.state_dict().items()}
    with torch.no_grad():
        assert (policy(micro)[0] - base(micro)[0]).abs().max() > 1e-2
        names = {k for k, _ in base.model.named_parameters()}
        merged = dict(trainer.sampler_weights(policy.model, torch.float32, adapters=False))
        assert set(merged) == names
        base.model.load_state_dict(merged, strict=False)
        torch.testing.assert_close(policy(micro)[0], base(micro)[0], atol=1e-5, rtol=0)
    assert all(torch.equal(v, before[k]) for k, v in policy.state_dict().items())  # the base was not touched


def test_lora_trains_its_factors_alone(make_cfg, tmp_path):
    _, grads = gradients(make_cfg(*LORA), batch_of(tmp_path, make_samples()))
    assert grads and all("lora_" in name for name in grads)
    with pytest.raises(RunError, match="'q_prj' matches no linear layer; there are .*q_proj"):
        trainer.build_policy(make_cfg(*LORA, 'trainer.lora_target_modules=["q_prj"]'), CPU, 1)


class Idle(torch.optim.SGD):
    def step(self):
        """Leaves the parameters alone."""


@pytest.mark.parametrize("lora", [True, False])
def test_reference_kl(lora, make_cfg, tmp_path):
    """At the start the reference is the policy; after a step its KL is the k3 estimate; alpha moves it back."""
    cfg = make_cfg(f"trainer.use_lora={str(lora).lower()}", "trainer.beta=0.1", "trainer.learning_rate=1e-2")
    batch = batch_of(tmp_path, make_samples())
    policy = trainer.build_policy(cfg, CPU, 1)
    micro = trainer.collate(batch, list(range(12)), CPU)
    params = [p for p in policy.parameters() if p.requires_grad]
    ref, optimizer = [p.detach().clone() for p in params], torch.optim.AdamW(params, 1e-2)
    start = policy(micro)[0].detach()
    first, _ = trainer.train_step(policy, ref, optimizer, batch, 0, cfg, 0, 1, CPU)
    now, held = policy(micro)[0].detach(), [p.detach().clone() for p in params]
    second, _ = trainer.train_step(policy, ref, Idle(params), batch, 1, cfg, 0, 1, CPU)
    assert first["policy/kl_ref"] == pytest.approx(0, abs=1e-6)
    k3 = ((start - now).exp() - (start - now) - 1).mean().item()
    assert k3 > 1e-4 and second["policy/kl_ref"] == pytest.approx(k3, rel=1e-4)
    assert all(torch.equal(a, b.detach()) for a, b in zip(held, params))  # swapped back to the bit


def test_samples_of_a_micro_batch_count_from_0(tmp_path):
    """Also where some have no loss token; gspo sums over them."""
    samples = make_samples(6)
    for i in (0, 3):
        samples[i]["mask"] = [0] * len(samples[i]["mask"])
    micro = trainer.collate(batch_of(tmp_path, samples), [0, 1, 3, 5], CPU)
    sizes = [sum(samples[i]["mask"]) for i in (1, 5)]
    assert micro["sample_N"].tolist() == [0] * sizes[0] + [1] * sizes[1]


def test_the_reference_has_no_dropout(make_cfg, tmp_path):
    cfg = make_cfg("trainer.use_lora=true", "trainer.lora_dropout=0.5", "trainer.beta=0.1")
    policy, batch = trainer.build_policy(cfg, CPU, 1), batch_of(tmp_path, make_samples())
    params = [p for p in policy.parameters() if p.requires_grad]
    ref = [torch.randn_like(p) for p in params]
    micro = trainer.collate(batch, list(range(12)), CPU)
    one, two = (trainer.with_reference(policy, ref, params, [micro])[0]["ref_logp_N"] for _ in range(2))
    trainer.swap(params, ref)  # whose B is not 0
    assert torch.equal(one, two) and not torch.equal(policy(micro)[0], policy(micro)[0])


def test_kl_to_the_reference_has_k3s_gradient(make_cfg, tmp_path):
    """d/dlogp of exp(ref - logp) - (ref - logp) - 1 is 1 - exp(ref - logp); zero advantages leave nothing else."""
    samples = [s | {"advantage": 0.0} for s in make_samples()]
    cfg, batch = make_cfg("trainer.beta=0.5", "trainer.max_grad_norm=1e9"), batch_of(tmp_path, samples)
    policy = trainer.build_policy(cfg, CPU, 1)
    params = list(policy.parameters())
    ref = [p.detach() + 0.02 * torch.randn(p.shape) for p in params]
    micro = trainer.collate(batch, list(range(12)), CPU)
    trainer.swap(params, ref)
    with torch.no_grad():
        ref_logp = policy(micro)[0]
    trainer.swap(params, ref)
    logp = policy(micro)[0]
    expected = torch.autograd.grad(logp, params, 0.5 * (1 - (ref_logp - logp).exp()).detach() / len(logp))
    kept = {}

    class Keep(torch.optim.SGD):
        def step(self):
            kept["grads"] = [p.grad.clone() for p in params]

    trainer.train_step(policy, ref, Keep(params, 0.0), batch, 0, cfg, 0, 1, CPU)
    for a, b in zip(kept["grads"], expected):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-4)


# --- numerics, schedule, files ----------------------------------------------------------------------------------------


def test_a_non_finite_gradient_changes_nothing(make_cfg, tmp_path):
    cfg, batch = make_cfg(), batch_of(tmp_path, make_samples())
    policy = trainer.build_policy(cfg, CPU, 1)
    params = list(policy.parameters())
    optimizer = torch.optim.AdamW(params, 1e-3)
    params[3].register_hook(lambda grad: grad * float("nan"))
    before = [p.detach().clone() for p in params]
    assert trainer.train_step(policy, None, optimizer, batch, 0, cfg, 0, 1, CPU)[0]["optim/skipped"] == 1
    assert all(torch.equal(a, b) for a, b in zip(before, params)) and not optimizer.state


@pytest.mark.slow
def test_three_steps_without_a_finite_gradient_end_the_run(make_cfg, batches, tmp_path):
    make_cfg()
    done = run_trainer(
        tmp_path / "test.toml", "--replay", batches(3), "trainer.loss=test_trainer:nan_loss", check=False
    )
    assert (
        done.returncode == 5
        and "no finite gradient, or a KL above 1, in steps 0 to 2: at last loss nan" in done.stderr.splitlines()[-1]
    )


@pytest.mark.slow
def test_a_non_finite_gradient_on_one_rank_changes_nothing_on_any(make_cfg, batches, tmp_path, models):
    make_cfg()
    args = ["--replay", batches(2), "trainer.loss=test_trainer:nan_on_rank_1", f"output_dir={tmp_path}"]
    run_trainer(tmp_path / "test.toml", *args, ranks=2)
    run_dir = tmp_path / "test-replay-test_trainer.nan_on_rank_1"
    assert [m["optim/skipped"] for m in lines(run_dir / "metrics.jsonl")] == [1, 1]
    before, after = (
        load_file(models["untied"] / "model.safetensors"),
        load_file(run_dir / "final" / "model.safetensors"),
    )
    assert all(before[key].equal(after[key]) for key in before)


def nan_on_rank_1(logp_N, **_):
    return logp_N * (float("nan") if os.environ["RANK"] == "1" else 1.0), {}


def nan_loss(logp_N, **_):
    return logp_N * float("nan"), {}


def test_updates_per_batch(make_cfg, tmp_path):
    batch = batch_of(tmp_path, make_samples())
    for updates in (1, 3):
        cfg = make_cfg(f"trainer.updates_per_batch={updates}")
        policy = trainer.build_policy(cfg, CPU, 1)
        optimizer = torch.optim.AdamW(policy.parameters(), 1e-3)
        trainer.train_step(policy, None, optimizer, batch, 0, cfg, 0, 1, CPU)
        assert {int(s["step"]) for s in optimizer.state.values()} == {updates}


def test_learning_rate():
    t = SimpleNamespace(learning_rate=1.0, lr_scheduler_type="linear", warmup_steps=3, warmup_ratio=0.0)
    rates = [trainer.learning_rate(step, t, 10) for step in range(10)]
    assert rates[:4] == [0.25, 0.5, 0.75, 1.0] and rates[-1] == pytest.approx(1 / 7)
    t.lr_scheduler_type, t.warmup_ratio = "cosine", 0.5
    assert trainer.learning_rate(5, t, 10) == 1 and trainer.learning_rate(9, t, 10) == pytest.approx(0.0955, abs=1e-3)
    t.lr_scheduler_type = "constant"
    assert trainer.learning_rate(0, t, 10) == 1


@pytest.mark.parametrize("change, message", [
    ({"logp": [float("nan")] * 9}, "finite"), ({"advantage": float("inf")}, "finite"),
    ({"mask": [1] * 9}, "first token"), ({"logp": [0.0] * 8}, "columns"),
])  # fmt: skip
def test_bad_batches_are_refused(change, message, tmp_path):
    sample = {"tokens": [5] * 9, "mask": [0] + [1] * 8, "logp": [-1.0] * 9, "turns": [0] * 9, "advantage": 1.0}
    sample |= change
    with pytest.raises(RunError, match=message) as e:
        batch_of(tmp_path, [sample])
    assert e.value.code == 4


# --- whole runs on saved batches --------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("mode", some(["full", "lora", "bf16 lora", "replicas", "2 replicas of 2 ranks"], 1))
def test_ranks_are_one(mode, make_cfg, batches, tmp_path):
    make_cfg()
    more = ["trainer.dtype=bf16"] * ("bf16" in mode) + ["trainer.use_lora=true", "trainer.beta=0.1"] * ("lora" in mode)
    found = {}
    num = 4 if "of 2" in mode else 2
    for ranks in (1, num):
        out = [f"output_dir={tmp_path}/{ranks}", "max_steps=3", "trainer.micro_batch_size=1", *more]
        out += [f"trainer.replicas={min(ranks, 2)}"] * ("replicas" in mode)  # of 2 ranks: two whole copies
        run_trainer(tmp_path / "test.toml", "--replay", batches(3), *out, ranks=ranks)
        run = tmp_path / str(ranks) / "test-replay-cispo"
        found[ranks] = lines(run / "metrics.jsonl"), load_file(next((run / "final").glob("*.safetensors")))
    tolerance = 2e-2 if "bf16" in mode else 1e-5
    for one, two in zip(found[1][0], found[num][0]):
        for key in ("loss", "optim/grad_norm", "policy/entropy"):
            assert one[key] == pytest.approx(two[key], abs=tolerance, rel=tolerance), key
    worst = max((found[1][1][k].float() - found[num][1][k].float()).abs().max() for k in found[1][1])
    assert worst < (1e-2 if "bf16" in mode else 1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", some([1, 2], 1))
def test_resume_is_bit_for_bit(ranks, make_cfg, batches, tmp_path):
    make_cfg()
    saved = batches(6)
    args = [
        "--replay",
        saved,
        "trainer.use_lora=true",
        "trainer.lora_dropout=0.2",
        "trainer.beta=0.1",
        "checkpoint.every=2",
    ]
    args += ["trainer.ref_sync_steps=2", "max_steps=6", "checkpoint.keep=9"]
    args += ["trainer.dtype=bf16"] * (ranks > 1)  # with FSDP2 and the reference in shards
    run_trainer(tmp_path / "test.toml", *args, f"output_dir={tmp_path}/a", ranks=ranks)
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    run = tmp_path / "b" / "test-replay-cispo"
    for name in ("step_000004", "step_000006"):
        shutil.rmtree(run / "checkpoints" / name)
    run_trainer(tmp_path / "test.toml", *args, f"output_dir={tmp_path}/b", ranks=ranks)
    for file in ("checkpoints/step_000006/policy.safetensors", "checkpoints/step_000006/adam.safetensors",
                 "checkpoints/step_000006/ref.safetensors", "final/adapter_model.safetensors"):  # fmt: skip
        a, b = (load_file(tmp_path / x / "test-replay-cispo" / file) for x in "ab")
        assert a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a), file
    a, b = (lines(tmp_path / x / "test-replay-cispo" / "metrics.jsonl") for x in "ab")
    assert [x["step"] for x in b] == list(range(6)) and [x["loss"] for x in a] == [x["loss"] for x in b]


def test_checkpoints_are_verified_and_kept(make_cfg, tmp_path):
    cfg = make_cfg("checkpoint.keep=2")
    policy = trainer.build_policy(cfg, CPU, 1)
    optimizer = torch.optim.AdamW(policy.parameters(), 1e-3)
    trainer.train_step(policy, None, optimizer, batch_of(tmp_path, make_samples()), 0, cfg, 0, 1, CPU)
    for step in (1, 2, 3):
        save_checkpoint(tmp_path, step, policy, None, optimizer, cfg, {"ledger": {"next": step, "open": []}}, 0)
    names = sorted(p.name for p in (tmp_path / "checkpoints").iterdir())
    assert names == ["step_000002", "step_000003"]
    last = tmp_path / "checkpoints" / "step_000003"
    assert json.loads((last / "state.json").read_text())["ledger"]["next"] == 3
    with pytest.raises(RunError, match="another configuration") as e:
        load_checkpoint(last, policy, None, optimizer, make_cfg("seed=5"), 0)
    assert e.value.code == 2
    blob = bytearray((last / "adam.safetensors").read_bytes())
    blob[len(blob) // 2] ^= 1
    (last / "adam.safetensors").write_bytes(blob)
    with pytest.raises(RunError, match="adam.safetensors is damaged") as e:
        load_checkpoint(last, policy, None, optimizer, cfg, 0)
    assert e.value.code == 6


@pytest.mark.slow
@pytest.mark.parametrize("lora", [False, True])
def test_final_loads_in_transformers_and_peft(lora, make_cfg, batches, tmp_path):
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoTokenizer

    cfg = make_cfg(f"trainer.use_lora={str(lora).lower()}")
    saved = batches(2)
    args = [f"output_dir={tmp_path}", f"trainer.use_lora={str(lora).lower()}", "trainer.learning_rate=1e-2"]
    run_trainer(tmp_path / "test.toml", "--replay", saved, *args)
    final = tmp_path / "test-replay-cispo" / "final"
    if lora:
        model = PeftModel.from_pretrained(
            AutoModelForCausalLM.from_pretrained(cfg.run.model, dtype=torch.float32), final
        )
    else:
        model = AutoModelForCausalLM.from_pretrained(final)
    assert AutoTokenizer.from_pretrained(final).chat_template
    policy = trainer.build_policy(cfg, CPU, 1).eval()
    before = load_batch(saved / "step_000000.safetensors")
    micro = trainer.collate(before, [0], CPU)
    untrained = policy(micro)[0]
    params = [p for p in policy.parameters() if p.requires_grad]
    load_checkpoint(
        tmp_path / "test-replay-cispo" / "checkpoints" / "step_000002", policy, None, torch.optim.AdamW(params), cfg, 0
    )
    log_p = model(micro["ids_T"][None]).logits[0].log_softmax(-1)
    ours, theirs = policy(micro)[0], log_p[micro["index_N"], micro["target_N"]]
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=0)
    assert (ours - untrained).abs().max() > 1e-3


def test_lora_on_a_tied_head_is_refused(make_cfg, models):
    cfg = make_cfg(*LORA, 'trainer.lora_target_modules=["lm_head"]', model=models["tied"])
    with pytest.raises(RunError, match="'lm_head' is tied to the embedding"):
        trainer.build_policy(cfg, CPU, 1)


def test_temperatures_are_not_rounded_in_bf16(make_cfg, tmp_path):
    """FSDP2 casts inputs to the compute dtype; 0.6 would become 0.6016 and bias every ratio."""
    seen = []
    policy = trainer.build_policy(make_cfg("trainer.dtype=bf16"), CPU, 1)
    policy.head, head = lambda *x: seen.append(x[2]) or head(*x), policy.head
    batch = batch_of(tmp_path, [make_samples(1)[0] | {"temperature": 0.6}])
    policy(trainer.collate(batch, [0], CPU))
    assert seen[0].dtype == torch.float32 and set(seen[0].tolist()) == {torch.tensor(0.6).item()}


def test_replay_recomputes_advantages(make_cfg, tmp_path):
    from configs.lib.batch import replace_advantages

    samples = make_samples(8)
    samples.append(samples[-1] | {"tokens": [1, 2, 3], "mask": [0, 1, 1], "logp": [0.0, -1, -1], "turns": [1] * 3})
    batch = replace_advantages(  # the last is a fork
        batch_of(tmp_path, samples, advantage="mean"), trainer.compute_advantages, "leave_one_out", 1.0
    )
    rewards = [s["reward"] for s in samples[4:8]]
    expected = samples[7]["reward"] - (sum(rewards) - samples[7]["reward"]) / 3
    assert batch.advantages[-1].item() == pytest.approx(expected, abs=1e-6)
    assert batch.advantages[-4].item() == pytest.approx(expected, abs=1e-6)


# --- credit by turn ---------------------------------------------------------------------------------------------------


def member(reward, turns=None, num_turns=None):
    return {"reward": reward, "turn_rewards": turns, "num_turns": num_turns or len(turns or [0])}


def test_advantages_by_turn_are_returns_to_go_over_the_whole_group():
    """By hand: gamma 1/2, returns 1.5, 1, 2 and 0.5, 1; the second ended before turn 2, where it counts 0."""
    group = [member(3.0, [1.0, 0.0, 2.0]), member(1.0, [0.0, 1.0])]
    assert trainer.compute_advantages([group], "mean", 0.5) == [[[0.5, 0.0, 1.0], [-0.5, 0.0]]]
    assert trainer.compute_advantages([group], "leave_one_out", 0.5) == [[[1.0, 0.0, 2.0], [-1.0, 0.0]]]
    # without turn rewards the reward is the last turn's; with gamma 1 it is the whole rollout's: one number
    group = [member(4.0, num_turns=3), member(2.0, num_turns=1)]
    assert trainer.compute_advantages([group], "mean", 0.5) == [[[-0.5, 1.0, 2.0], [0.5]]]
    assert trainer.compute_advantages([group, group], "mean") == [[1.0, -1.0]] * 2
    mixed = [member(4.0, num_turns=2), member(1.0, [1.0, 0.0])]
    assert trainer.compute_advantages([mixed], "mean") == [[[1.5, 2.0], [-1.5, -2.0]]]


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
    for one in plays:
        for two in plays:
            group = [member(sum(r), r) for r in ([reward_of[a] for a in play] for play in (one, two))]
            (table,) = trainer.compute_advantages([group], "mean", 1.0)
            loss = sum(adv * logp(a) for play, row in zip((one, two), table) for a, adv in zip(play, row))
            (grad,) = torch.autograd.grad(loss, theta)
            expected += (chance(one) * chance(two)).item() * grad.item() / 2
    assert expected == pytest.approx(true_grad.item() / 2, abs=1e-12)


def test_each_turns_tokens_get_their_turns_advantage(tmp_path):
    turns = [0, 0, 0, 1, 1]
    about = {
        "tokens": [5, 6, 7, 8, 9],
        "mask": [0, 1, 0, 0, 1],
        "logp": [0.0] * 5,
        "turns": turns,
        "env": "e",
        "group": 0,
    }
    two = [about | {"rollout": 0, "advantage": [0.5, -1.0]} | member(3.0, [1.0, 2.0]),
           about | {"rollout": 1, "advantage": 2.0} | member(1.0, num_turns=2)]  # fmt: skip
    save_batch(tmp_path / "step_000000.safetensors", two, {"step": 0})
    batch = load_batch(tmp_path / "step_000000.safetensors")
    assert batch.advantages.tolist() == [0.5] * 3 + [-1.0] * 2 + [2.0] * 5 and batch.turns.tolist() == turns * 2
    again = replace_advantages(batch, trainer.compute_advantages, "mean", 0.5)
    assert again.advantages.tolist() == [0.75] * 3 + [0.5] * 2 + [-0.75] * 3 + [-0.5] * 2


def test_text_of_unknown_origin_has_ratio_one(make_cfg, tmp_path):
    """old_logp is nan in offline batches: the first update is the same as with the policy's own logp."""
    cfg = make_cfg("trainer.loss=grpo", "trainer.updates_per_batch=2")
    samples, results = make_samples(), {}
    save_batch(
        tmp_path / "a.safetensors", [s | {"logp": [math.nan] * len(s["logp"])} for s in samples], {"offline": True}
    )
    with pytest.raises(RunError, match="old_logp or advantages not finite"):
        save_batch(tmp_path / "b.safetensors", [s | {"logp": [math.nan] * len(s["logp"])} for s in samples], {})
        load_batch(tmp_path / "b.safetensors")
    batch = load_batch(tmp_path / "a.safetensors")
    for kind in ("unknown", "own"):
        torch.manual_seed(0)
        policy = trainer.build_policy(cfg, CPU, 1)
        params = [p for p in policy.parameters() if p.requires_grad]
        if kind == "own":
            order = sorted(range(len(samples)), key=lambda i: len(samples[i]["tokens"]))
            micro = trainer.collate(batch, order, CPU)
            own_logp = torch.zeros_like(batch.old_logp)
            starts = (batch.sample_lens.cumsum(0) - batch.sample_lens).tolist()
            at = [starts[i] + j for i in order for j, m in enumerate(samples[i]["mask"]) if m]
            own_logp[at] = policy(micro)[0].detach()
            batch = batch._replace(old_logp=own_logp)
        metrics, _ = trainer.train_step(policy, None, torch.optim.AdamW(params, 1e-3), batch, 0, cfg, 0, 1, CPU)
        assert metrics["policy/kl_sampler"] == pytest.approx(0, abs=1e-9)
        results[kind] = metrics["loss"], torch.cat([p.detach().flatten() for p in params])
    assert results["unknown"][0] == pytest.approx(results["own"][0], abs=1e-7)
    assert (results["unknown"][1] - results["own"][1]).abs().max() < 1e-5


# --- broadcast --------------------------------------------------------------------------------------------------------


def test_weights_of_several_buckets_arrive_as_sent(make_cfg, tmp_path, monkeypatch):
    """Both ends of configs/lib/broadcast.py in this process, with tensors of odd sizes and three dtypes."""
    arrived, worker = {}, broadcast.WeightReceiver()
    worker.rank, worker.device = 0, CPU
    worker.vllm_config = SimpleNamespace(model_config=SimpleNamespace(dtype=torch.bfloat16), lora_config=None)
    worker.model_runner = SimpleNamespace(
        model=None, reload_weights=lambda weights_iterator: arrived.update(weights_iterator)
    )

    class Here:
        urls, run_id, pool = ["here"], "here", ThreadPoolExecutor(2)
        __init__ = wait_ready = metrics = post_all = lambda self, *_: None

        def rpc(self, method, specs):
            return [self.pool.submit(lambda: [getattr(worker, method)(json.dumps(spec))]) for spec in specs]

        def score(self, name, rows):
            return [[-1.0]]

    monkeypatch.setattr(broadcast, "Servers", Here)
    cfg = make_cfg("trainer.dtype=bf16")
    sender = broadcast.WeightSender(cfg, tmp_path, CPU)
    draw = torch.Generator().manual_seed(0)
    sizes = {"a": 3, "large": 30 << 20, "b": 5 << 20, "c": 12345677, "d": 1}
    kinds = itertools.cycle([torch.uint8, torch.bfloat16, torch.float32])
    sent = {k: torch.randint(100, (n,), generator=draw, dtype=torch.uint8).to(next(kinds)) for k, n in sizes.items()}
    cut = broadcast.buckets({k: v.nbytes for k, v in sent.items()}, "gloo")
    assert cut == [["a"], ["large"], ["b"], ["c", "d"]]
    for version in (1, 2):
        sender.send(version, sent, [[1, 2]], [-1.0], 0)
        assert (tmp_path / "version").read_text() == str(version)
        assert arrived.keys() == sent.keys() and all(torch.equal(arrived[k], sent[k]) for k in sent)
        sent = {k: v + 1 for k, v in sent.items()}
