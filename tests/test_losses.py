"""configs/algorithms/losses.py: values and gradients by hand, in float64."""

import math

import numpy as np
import pytest
import torch

import trainer
from configs import LIMITS, RunError, named
from configs.algorithms import losses


def micro_of(old, adv, sample=None, mask=None):
    """Columns of loss tokens as trainer.py's collate makes them, and the counts of a step of this micro-batch alone."""
    mask = torch.ones(len(old), dtype=torch.bool) if mask is None else torch.tensor(mask)
    sample = torch.arange(len(old)) if sample is None else torch.tensor(sample)
    columns = {"old_logp_N": old, "adv_N": adv, "mask_N": mask, "sample_N": sample}
    columns["ids_BW"] = torch.zeros(int(sample.max()) + 1, 8)
    return columns | {"tokens": int(mask.sum()), "samples": len(set(sample[mask].tolist()))}


def step_loss(name, micro, logp, cfg):
    """As the step does it -> the loss, a number with its graph, and the metrics."""
    loss_N, metrics = losses.LOSSES[name](micro, logp, None, cfg.trainer)
    total = torch.where(micro["mask_N"], loss_N, 0).sum()
    return total / max(micro["tokens"], 1), metrics


@pytest.fixture
def cfg(make_cfg):
    return make_cfg()


@pytest.mark.parametrize("name", losses.LOSSES)
def test_losses_are_named_by_the_configuration(name, make_cfg):
    cfg = make_cfg(f"trainer.loss=losses:{name}")
    assert named(cfg.trainer.loss, {}) is losses.LOSSES[name]


LOG_R = [-25.0, -1.0, -0.3, -0.1, 0.0, 0.1, 0.3, 1.0, 1.7, 25.0]  # logp - old_logp, on either side of each edge
OLD = [-30.0, -0.3, -0.5, -1.0, -1.0, -1.0, -1.5, -1.5, -3.0, -30.0]


def by_hand(name, log_r, adv, p, p_old):
    """-> d loss / d logp of a token, whether it is clipped; from the papers' formulas."""
    r = math.exp(min(max(log_r, -20), 20))
    if name == "icepop":
        is_out = not 0.5 <= r <= 5
        return 0.0 if is_out else -r * adv, is_out
    is_out = (adv > 0 and p - p_old > 0.2) or (adv < 0 and p - p_old < -0.2)
    is_inside = abs(log_r) < 20  # the clamp of the log ratio has no gradient outside
    return ((0.0 if is_out else -r * adv) + 2e-3 * log_r) * is_inside, is_out


@pytest.mark.parametrize("name", ["dppo", "icepop"])
@pytest.mark.parametrize("adv", [0.7, -0.7])
def test_token_losses_have_the_gradients_of_their_papers(name, adv, cfg):
    old = torch.tensor(OLD, dtype=torch.float64)
    logp = (old + torch.tensor(LOG_R, dtype=torch.float64)).requires_grad_()
    loss, metrics = step_loss(name, micro_of(old, torch.full_like(old, adv)), logp, cfg)
    loss.backward()
    rows = zip(LOG_R, logp.exp().tolist(), old.exp().tolist())
    expected = [by_hand(name, log_r, adv, p, p_old) for log_r, p, p_old in rows]
    np.testing.assert_allclose(logp.grad.numpy() * len(LOG_R), [grad for grad, _ in expected], rtol=1e-9, atol=1e-9)
    assert metrics["policy/clip_frac"].tolist() == [is_out for _, is_out in expected]
    assert loss.isfinite() and any(is_out for _, is_out in expected)
    at_N, _ = losses.LOSSES[name](micro_of(old, torch.full_like(old, adv)), logp, None, cfg.trainer)
    kl = [1e-3 * min(max(x, -20), 20) ** 2 * (name == "dppo") for x in LOG_R]
    assert [x for x, (_, is_out) in zip(at_N.tolist(), expected) if is_out] == pytest.approx(
        [x for x, (_, is_out) in zip(kl, expected) if is_out]  # what is left out is not in the loss, either
    )


SAMPLES = [[1e-4, -2e-4, 3e-4], [0.01, 0.02], [-0.01, -0.03, 0.0, -0.01]]  # log r: inside the range, above, below


@pytest.mark.parametrize("adv", [0.7, -0.7])
def test_gspo_is_a_mean_over_samples_with_the_gradient_of_its_paper(adv, cfg):
    sample = [i for i, row in enumerate(SAMPLES) for _ in row]
    old = torch.linspace(-3, -1, len(sample), dtype=torch.float64)
    logp = (old + torch.tensor(sum(SAMPLES, []), dtype=torch.float64)).requires_grad_()
    loss, metrics = step_loss("gspo", micro_of(old, torch.full_like(old, adv), sample), logp, cfg)
    loss.backward()
    value, grad, out = 0.0, [], []
    for row in SAMPLES:
        s = math.exp(sum(row) / len(row))
        clipped = min(max(s, 1 - 3e-4), 1 + 4e-4)
        is_out = clipped * adv < s * adv
        value -= min(s * adv, clipped * adv) / len(SAMPLES)
        grad += [0.0 if is_out else -s * adv / len(row) / len(SAMPLES)] * len(row)
        out += [is_out] * len(row)
    assert loss.item() == pytest.approx(value, abs=1e-12) and metrics["policy/clip_frac"].tolist() == out
    np.testing.assert_allclose(logp.grad.numpy(), grad, rtol=1e-9, atol=1e-12)


def test_gspo_equals_trls(cfg):
    """TRL 1.16.0's GRPOTrainer._compute_loss with loss_type="grpo" and importance_sampling_level="sequence" on the same
    numbers: the loss, then its gradient on each of the seven tokens."""
    old = torch.tensor([-1.0, -2.0, -0.5, -3.0, -1.5, -0.2, -2.5], dtype=torch.float64)
    shift = torch.tensor([0.5, -0.4, 0.1, 2.0, -0.3, 0.15, 1.8], dtype=torch.float64)
    logp = (old + 1e-3 * shift).requires_grad_()
    adv = torch.tensor([0.8] * 4 + [-0.6] * 3, dtype=torch.float64)
    loss, _ = step_loss("gspo", micro_of(old, adv, [0] * 4 + [1] * 3), logp, cfg)
    loss.backward()
    assert loss.item() == pytest.approx(-0.09999495461668018, abs=1e-9)
    np.testing.assert_allclose(logp.grad.numpy(), [0.0] * 4 + [0.1000550151] * 3, atol=1e-9)


def test_gspo_takes_samples_without_a_loss_token(cfg):
    """Row 2 of five rows is the only one that has some."""
    old = torch.tensor([-1.0, -2.0], dtype=torch.float64)
    micro = micro_of(old, torch.ones_like(old), [2, 2]) | {"ids_BW": torch.zeros(5, 8)}
    assert step_loss("gspo", micro, old, cfg)[0].item() == -1.0


def test_filler_changes_nothing_and_a_batch_of_filler_is_zero(cfg):
    old = torch.tensor([-1.0, -2.0, -3.0, float("nan")], dtype=torch.float64)
    adv = torch.tensor([0.5, 0.5, -1.0, 9.0], dtype=torch.float64)
    for name in losses.LOSSES:
        logp = torch.tensor([-1.1, -1.9, -2.9, -5.0], dtype=torch.float64, requires_grad=True)
        padded, _ = step_loss(name, micro_of(old, adv, [0, 0, 1, 0], [True, True, True, False]), logp, cfg)
        alone, _ = step_loss(name, micro_of(old[:3], adv[:3], [0, 0, 1]), logp[:3], cfg)
        assert padded.item() == alone.item()
        padded.backward()
        assert logp.grad[:3].isfinite().all()
        filler, _ = step_loss(name, micro_of(old[:1], adv[:1], [0], [False]), logp[:1], cfg)
        assert filler.item() == 0.0


@pytest.mark.parametrize("gap", [-1e4, 1e4])
@pytest.mark.parametrize("name", losses.LOSSES)
def test_losses_stay_finite_for_any_ratio(name, gap, cfg):
    logp = torch.tensor([-1.0, min(0.0, -1 + gap)], requires_grad=True)
    micro = micro_of(torch.tensor([-1.0, -1.0 - gap]), torch.ones(2))
    loss, _ = step_loss(name, micro, logp, cfg)
    loss.backward()
    assert loss.isfinite() and logp.grad.isfinite().all()


@pytest.mark.parametrize("name", losses.LOSSES)
def test_the_cut_into_rectangles_does_not_matter(name, make_cfg, batches):
    """One rectangle of all samples, or many: the same loss, gradient and share of clipped tokens."""
    found = []
    for budget in (1, 64):
        cfg = make_cfg(f"trainer.loss=losses:{name}", f"trainer.micro_batch_size={budget}")
        policy = trainer.build_policy(cfg)
        batch = trainer.load_batch(batches(1) / "step_000000.safetensors")
        metrics, _ = trainer.train_step(policy, torch.optim.AdamW(policy.parameters()), batch, 0, cfg)
        found.append([metrics[key] for key in ("loss", "optim/grad_norm", "policy/clip_frac")])
    assert found[0] == pytest.approx(found[1], rel=1e-4, abs=1e-6) and found[0][1] > 0


# --- importance weights -----------------------------------------------------------------------------------------------

# TRL 1.16.0's GRPOTrainer._compute_loss on the same numbers, with vllm_importance_sampling_mode, or with
# off_policy_mask_threshold=0.5: the loss, then its gradient on each of seven tokens of two samples.
WEIGHED = {
    ("grpo", "sequence_mask", 0): (0.037855798269048786, [0, 0, 0, 0, 0.0156585878, 0, 0.0124412742]),
    ("grpo", "sequence_truncate", 0): (-1.376769049304905, [-0.3789157433, 0, -0.2539948185, -0.3428571429,
                                                            0.0156585878, 0, 0.0124412742]),
    ("grpo", "token_mask", 0): (-0.5053098398956692, [-0.2082421486, 0, -0.0935692289, -0.2810974984, 0.0815339507, 0,
                                                      0.0144546983]),
    ("cispo", "token_truncate", 1.1): (0.3966532866369378, [-0.1389357726, -0.1142857143, -0.0931314335, -0.1257142857,
                                                            0.0815339507, 0.0632016043, 0.0144546983]),
    ("grpo", "off_policy_mask", 0): (-0.47154161585798465, [-0.1263052478, 0, -0.0846649395, -0.1142857143, 0, 0, 0]),
    ("dr_grpo", "sequence_mask", 0): (0.02208254899027846, [0, 0, 0, 0, 0.0091341762, 0, 0.0072574099]),
    ("cispo", "sequence_mask", 0): (-0.08119798926759818, [0, 0, 0, 0, 0.0156585878, 0.0081744996, 0.0124412742]),
}  # fmt: skip
SAMPLER = [-1.0, -2.0, -0.5, -3.0, -1.5, -0.2, -2.5]
BEFORE = [0.5, -0.4, 0.1, 0.9, -0.3, 0.15, -1.8]  # pi_old - mu
SINCE = [0.1, 0.4, -0.3, 0.0, 0.25, -0.4, 0.02]  # pi - pi_old


@pytest.mark.parametrize("case", WEIGHED, ids=str)
def test_weighed_losses_equal_trls(case, make_cfg):
    loss, weight, high = case
    cfg = make_cfg(f"trainer.loss={loss}", f"trainer.importance=losses:{weight}", f"trainer.importance_high={high}")
    sampler, before, since = (torch.tensor(x, dtype=torch.float64) for x in (SAMPLER, BEFORE, SINCE))
    adv = torch.tensor([0.8] * 4 + [-0.6] * 3, dtype=torch.float64)
    micro = micro_of(sampler, adv, [0] * 4 + [1] * 3) | {"rollouts": 2, "max_tokens": 6}
    weighed = named(cfg.trainer.importance, {})(trainer.compute_loss)
    weighed(micro, sampler + before, None, cfg.trainer)  # the first update, which says what pi_old is
    logp = (sampler + before + since).requires_grad_()
    loss_N, logs = weighed(micro, logp, None, cfg.trainer)
    total = loss_N.sum() / 7
    total.backward()
    # TRL's dapo here has epsilon_high = 0.28, as ours; its dr_grpo, too, where ours has 0.2: nothing is between them
    assert total.item() == pytest.approx(WEIGHED[case][0], abs=1e-9)
    np.testing.assert_allclose(logp.grad.numpy(), WEIGHED[case][1], atol=1e-9)
    assert logs["policy/importance"].shape == logp.shape and micro["old_logp_N"] is sampler


LOG = math.log
EDGES = {  # name, low, high (0: its own) -> of tokens in pairs, a sample each: [(log of pi_old / mu) ...], the weights
    ("token_truncate", 0, 0): ([LOG(1.9), LOG(2.1), LOG(0.1), 0], [1.9, 2, 0.1, 1]),
    ("token_truncate", 0.5, 1.2): ([LOG(1.1), LOG(1.3), LOG(0.4), 0], [1.1, 1.2, 0.5, 1]),
    ("token_mask", 0, 0): ([LOG(2.9), LOG(3.1), LOG(0.1), 0], [2.9, 0, 0.1, 1]),
    ("token_mask", 0.5, 2): ([LOG(1.9), LOG(2.1), LOG(0.4), 0], [1.9, 0, 0, 1]),
    ("sequence_truncate", 0, 0): ([LOG(1.4), LOG(2), LOG(2), LOG(2)], [2.8, 2.8, 3, 3]),
    ("sequence_truncate", 0.5, 2): ([LOG(1.4), LOG(2), LOG(0.4), 0], [2, 2, 0.5, 0.5]),
    ("sequence_mask", 0, 0): ([LOG(1.4), LOG(2), LOG(2), LOG(2)], [2.8, 2.8, 0, 0]),
    ("sequence_mask", 0.5, 2): ([LOG(1.4), LOG(1.4), LOG(0.4), 0], [1.96, 1.96, 0, 0]),
    ("geometric_mask", 0, 0): ([LOG(1.017), 0, LOG(1.024), 0], [1, 1, 0, 0]),
    ("geometric_mask", 0.99, 1.2): ([LOG(0.982), 0, LOG(0.977), 0], [1, 1, 0, 0]),
    ("geometric_mask", 0.8, 1.2): ([LOG(0.7), 0, LOG(1.5), 0], [1, 1, 0, 0]),
    ("off_policy_mask", 0, 0): ([-0.98, 0, -1.02, 0], [1, 1, 0, 0]),
    ("off_policy_mask", 0, 0.2): ([-0.38, 0, -0.42, 0], [1, 1, 0, 0]),
}


@pytest.mark.parametrize("case", EDGES, ids=str)
def test_weights_on_either_side_of_their_edges(case, make_cfg):
    """Both the weight's own edges and given ones; off_policy_mask leaves samples with A >= 0 alone."""
    (name, low, high), (log_w, expected) = case, EDGES[case]
    given = [f"trainer.importance_low={low}", f"trainer.importance_high={high}"]
    t = make_cfg("trainer.loss=grpo", f"trainer.importance=losses:{name}", *given).trainer
    for adv in (-1.0, 0.0, 1.0):
        old = torch.zeros(4, dtype=torch.float64)
        micro = micro_of(old, torch.full_like(old, adv), [0, 0, 1, 1])
        weighed = named(t.importance, {})(lambda micro, logp_N, entropy_N, cfg: (logp_N, {}))
        _, logs = weighed(micro, torch.tensor(log_w, dtype=torch.float64), None, t)
        is_free = name == "off_policy_mask" and adv >= 0
        assert logs["policy/importance"].tolist() == pytest.approx([1.0] * 4 if is_free else expected)


def test_a_geometric_mean_does_not_depend_on_the_length(make_cfg):
    """A sample of three tokens, and one of 300 with the same ratio at each: kept alike, where a product drops one."""
    cfg = make_cfg("trainer.loss=grpo", "trainer.importance=losses:geometric_mask").trainer
    sample = [0] * 3 + [1] * 300
    micro = micro_of(torch.zeros(303, dtype=torch.float64), torch.ones(303, dtype=torch.float64), sample)

    def weights(name, ratio):
        found = {}
        spy = lambda micro, logp_N, entropy_N, cfg: (logp_N, {})  # noqa: E731
        found = named(f"losses:{name}", {})(spy)(dict(micro), micro["old_logp_N"] + math.log(ratio), None, cfg)[1]
        return {w for i, w in zip(sample, found["policy/importance"].tolist()) if i == 0}, \
            {w for i, w in zip(sample, found["policy/importance"].tolist()) if i == 1}  # fmt: skip

    assert weights("geometric_mask", 1.009) == ({1.0}, {1.0}) and weights("geometric_mask", 0.989) == ({0.0}, {0.0})
    short, long = weights("sequence_mask", 1.009)
    assert short.pop() == pytest.approx(1.009**3) and long == {0.0}


@pytest.mark.parametrize("loss", ["cispo", "grpo", "dr_grpo", "losses:gspo"])
@pytest.mark.parametrize("weight", ["sequence_mask", "geometric_mask", "off_policy_mask", "token_truncate"])
def test_weights_go_with_any_loss_through_the_step(loss, weight, make_cfg, batches):
    """Cut into rectangles of one row or many, with two updates a batch: the same numbers."""
    found = []
    for budget in (1, 64):
        more = [f"trainer.loss={loss}", f"trainer.importance=losses:{weight}", "trainer.updates_per_batch=2"]
        cfg = make_cfg(*more, f"trainer.micro_batch_size={budget}")
        policy = trainer.build_policy(cfg)
        batch = trainer.load_batch(batches(1) / "step_000000.safetensors")
        metrics, _ = trainer.train_step(policy, torch.optim.AdamW(policy.parameters(), 1e-3), batch, 0, cfg)
        found.append([metrics[key] for key in ("loss", "optim/grad_norm", "policy/importance")])
    assert found[0] == pytest.approx(found[1], rel=1e-3, abs=1e-6) and found[0][2] >= 0


def test_permuted_rewards_are_the_same_on_every_rank():
    """Of each group another permutation, whatever torch's own generator is at."""
    rewards, found = torch.arange(8.0), []
    for seed in (0, 1):
        torch.manual_seed(seed)
        found.append([losses.permuted(rewards, [{"env": "e", "group": g}] * 8).tolist() for g in range(20)])
    assert found[0] == found[1] and len({tuple(row) for row in found[0]}) > 15
    assert all(sorted(row) == (rewards - 3.5).tolist() for row in found[0])


def test_an_edge_without_a_weight_is_refused(make_cfg):
    with pytest.raises(trainer.RunError, match="trainer.importance_high' = 2.0: must be left out without"):
        make_cfg("trainer.importance_high=2.0")


@pytest.mark.parametrize("name", ["cispo", "grpo", "dr_grpo", "sft", *(f"losses:{name}" for name in losses.LOSSES)])
def test_a_key_that_a_loss_does_not_use_is_refused(name, make_cfg):
    """What is refused is just what changes nothing: neither the loss nor its gradient."""
    old = torch.linspace(-4, -0.5, 16, dtype=torch.float64)
    adv = torch.tensor([1.0, -1.0] * 8, dtype=torch.float64)

    def gradient(t):
        logp = (
            old + torch.linspace(-3, 3, 16, dtype=torch.float64)[torch.randperm(16, generator=draw)]
        ).requires_grad_()
        micro = micro_of(old, adv) | {"rollouts": 5, "max_tokens": 2}
        loss_N, _ = named(name, {name: trainer.compute_loss})(micro, logp, None, t)
        loss_N.sum().backward()
        return torch.cat([loss_N.detach(), logp.grad])

    usual = make_cfg(f"trainer.loss={name}").trainer
    rules = [(keys, other) for keys, must, other in LIMITS["rules"] if must == "left out with" and "cispo" in other]
    knobs = ["trainer.ratio_cap", *" ".join(keys for keys, _ in rules).split()]
    assert len(knobs) == 7 and {key.rpartition(".")[2] for key in knobs} <= set(usual._fields)
    for key in knobs:
        value = 0.3 if key != "trainer.delta" else 1.5
        draw = torch.Generator().manual_seed(0)
        before, draw = gradient(usual), torch.Generator().manual_seed(0)
        is_used = not torch.equal(before, gradient(usual._replace(**{key.rpartition(".")[2]: value})))
        if is_used:
            make_cfg(f"trainer.loss={name}", f"{key}={value}")
            continue
        with pytest.raises(RunError, match=f"'{key}' = {value}: must be left out with .*{name}") as e:
            make_cfg(f"trainer.loss={name}", f"{key}={value}")
        assert e.value.code == 2


def test_a_loss_of_ones_own_may_use_any_key(make_cfg):
    assert make_cfg("trainer.loss=mine:loss", "trainer.icepop_low=0.3", "trainer.delta=2.0").trainer.delta == 2.0
