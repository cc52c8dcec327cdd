"""Losses and importance weights: values and gradients by hand in float64, and TRL's numbers."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import configs
import trainer
from configs.algorithms import importance, losses

HARD = ["cispo", "grpo", "dr_grpo", "losses:dppo", "losses:icepop"]  # these clip or mask a token by itself
NAMES = [*HARD, "losses:gspo", "losses:sapo"]
LOG_R = [-25.0, -1.0, -0.3, -0.1, 0.0, 0.1, 0.3, 1.0, 1.7, 25.0]  # logp - old_logp, on either side of each edge
OLD = [-30.0, -0.3, -0.5, -1.0, -1.0, -1.0, -1.5, -1.5, -3.0, -30.0]


def double(values):
    return torch.tensor(values, dtype=torch.float64)


def micro_of(old, adv, row=None, mask=None, **numbers):
    """Fields of loss tokens as collate makes them, and the numbers of a step that consists of this micro-batch."""
    mask_N = torch.tensor(mask or [True] * len(old))
    row_N = torch.tensor(row or [0] * len(old))
    micro = {"old_logp_N": old, "adv_N": adv, "mask_N": mask_N, "row_N": row_N, "ce_N": torch.zeros_like(old)}
    micro["ids_BW"] = torch.zeros(int(row_N.max()) + 1, 8)
    micro |= {"num_mask": max(1, int(mask_N.sum())), "num_ce": 0, "num_teacher": 0, "max_tokens": 2}
    return micro | {"num_sequences": max(1, len(row_N[mask_N].unique()))} | numbers


def step_loss(name, micro, logp, args=None, weight="", weight_args=None):
    """The loss, a number with its graph, and what is logged."""
    t = {"loss": name, "loss_args": args or {}, "importance": weight, "importance_args": weight_args or {}, "beta": 0}
    terms, logs = trainer.compute_loss(micro, logp, None, SimpleNamespace(**t))
    return sum(terms.values()).sum(), logs


def by_hand(name, log_r, adv, p, p_old, delta):
    """d loss_N / d logp_N and whether the token is clipped, from the formulas of the papers."""
    r = math.exp(min(max(log_r, -20), 20))
    is_inside = abs(log_r) < 20  # the clamp of the log ratio has no gradient outside
    if name == "cispo":
        return -min(r, 5) * adv, r > 5
    if name == "losses:icepop":
        is_out = not 0.5 <= r <= 5
        return 0.0 if is_out else -r * adv, is_out
    if name == "losses:dppo":
        is_out = (adv > 0 and p - p_old > 0.2) or (adv < 0 and p - p_old < -0.2)
        return ((0.0 if is_out else -r * adv) + 2e-3 * log_r) * is_inside, is_out
    high = 1.28 if name == "grpo" else 1.2
    is_out = r > min(high, delta) if adv > 0 else r < 0.8 or r > delta
    return 0.0 if is_out else -r * adv * is_inside, is_out


@pytest.mark.parametrize("name, delta", [*((name, math.inf) for name in HARD), ("grpo", 4.0)])
@pytest.mark.parametrize("adv", [0.7, -0.7])
def test_losses_by_token_have_the_gradients_of_their_papers(name, delta, adv):
    old = double(OLD)
    logp = (old + double(LOG_R)).requires_grad_()
    micro = micro_of(
        old, torch.full_like(old, adv), num_sequences=5
    )  # of 2 tokens at most: dr_grpo's divisor is 10 as well
    args = {"delta": delta} if delta < math.inf else {}
    loss, logs = step_loss(name, micro, logp, args)
    loss.backward()
    rows = zip(LOG_R, logp.exp().tolist(), old.exp().tolist())
    expected = [by_hand(name, log_r, adv, p, p_old, delta) for log_r, p, p_old in rows]
    np.testing.assert_allclose(logp.grad.numpy() * len(OLD), [grad for grad, _ in expected], rtol=1e-9, atol=1e-9)
    assert logs["policy/clip_frac"].tolist() == [is_out for _, is_out in expected]
    assert loss.isfinite() and any(is_out for _, is_out in expected)
    if name in ("losses:dppo", "losses:icepop"):  # what is masked is not in the loss either
        loss_N, _ = configs.find(name)(micro, logp, None)
        masked_N = loss_N[logs["policy/clip_frac"]]
        log_r_N = double(LOG_R).clamp(-20, 20)[logs["policy/clip_frac"]]
        torch.testing.assert_close(masked_N, 1e-3 * log_r_N**2 if "dppo" in name else 0 * log_r_N)


@pytest.mark.parametrize("adv", [0.7, -0.7])
def test_sapo_has_the_gradient_of_its_paper(adv):
    """4 sigmoid(x) (1 - sigmoid(x)) r A with x = tau (r - 1): on policy r A, and the further from it the less."""
    old = double(OLD)
    logp = (old + double(LOG_R)).requires_grad_()
    loss_N, logs = losses.sapo({"old_logp_N": old, "adv_N": torch.full_like(old, adv)}, logp, None, 1.5, 2.5)
    loss_N.sum().backward()
    tau = 1.5 if adv > 0 else 2.5
    gate = []
    expected = []
    for log_r in LOG_R:
        r = math.exp(min(max(log_r, -20), 20))
        sigmoid = 1 / (1 + math.exp(-min(tau * (r - 1), 700)))
        gate.append(4 / tau * sigmoid)
        expected.append(-4 * sigmoid * (1 - sigmoid) * r * adv * (abs(log_r) < 20))
    np.testing.assert_allclose(logp.grad.numpy(), expected, rtol=1e-7, atol=1e-12)
    np.testing.assert_allclose(logs["policy/gate"].detach().numpy(), gate, rtol=1e-7)
    assert expected[LOG_R.index(0.0)] == -adv


SEQUENCES = [[1e-4, -2e-4, 3e-4], [0.01, 0.02], [-0.01, -0.03, 0.0, -0.01]]  # log r: inside the range, above, below


@pytest.mark.parametrize("adv", [0.7, -0.7])
def test_gspo_is_a_mean_over_sequences_with_the_gradient_of_its_paper(adv):
    row = [i for i, log_r in enumerate(SEQUENCES) for _ in log_r]
    old = torch.linspace(-3, -1, len(row), dtype=torch.float64)
    logp = (old + double(sum(SEQUENCES, []))).requires_grad_()
    loss, logs = step_loss("losses:gspo", micro_of(old, torch.full_like(old, adv), row), logp)
    loss.backward()
    value, grad, out = 0.0, [], []
    for log_r in SEQUENCES:
        s = math.exp(sum(log_r) / len(log_r))
        clipped = min(max(s, 1 - 3e-4), 1 + 4e-4)
        is_out = clipped * adv < s * adv
        value -= min(s * adv, clipped * adv) / len(SEQUENCES)
        grad += [0.0 if is_out else -s * adv / len(log_r) / len(SEQUENCES)] * len(log_r)
        out += [is_out] * len(log_r)
    assert loss.item() == pytest.approx(value, abs=1e-12) and logs["policy/clip_frac"].tolist() == out
    np.testing.assert_allclose(logp.grad.numpy(), grad, rtol=1e-9, atol=1e-12)


# TRL 1.16.0's GRPOTrainer._compute_loss on the same numbers (cispo, dapo, dapo with delta, dr_grpo, grpo with
# importance_sampling_level="sequence", sapo): the loss, then its gradient on each of the seven tokens of two sequences.
# Of sapo TRL takes a mean over sequences; here is the one over tokens of the same terms.
TRL = {
    ("cispo", None, 1): (0.4807455692620833, [-0.1884252881, -0.0766080053, -0.1263052478, -0.5714285714,
                                              0.0634987046, 0.0995857922, 0.4285714286]),
    ("grpo", None, 1): (0.1912137504279583, [0, -0.0766080053, -0.1263052478, 0, 0, 0.0995857922, 0.5185412112]),
    ("grpo", 4.0, 1): (0.015529682049705729, [0, -0.0766080053, -0.1263052478, 0, 0, 0.0995857922, 0]),
    ("dr_grpo", None, 1): (0.04582800790611588, [0, -0.0167580012, -0.027629273, 0, 0, 0.0217843921, 0.11343089]),
    ("losses:sapo", None, 1): (-0.5452016918001392, [-0.1699129841, -0.0745635313, -0.1259566275, -0.0056552424,
                                                     0.0623373771, 0.0988703571, 0.0102292069]),
    ("losses:gspo", None, 1e-3): (-0.09999495461668018, [0, 0, 0, 0, 0.1000550151, 0.1000550151, 0.1000550151]),
}  # fmt: skip
# The same with vllm_importance_sampling_mode, or with off_policy_mask_threshold=0.5.
WEIGHTED = {
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
SAMPLER = double([-1.0, -2.0, -0.5, -3.0, -1.5, -0.2, -2.5])
SHIFT = double([0.5, -0.4, 0.1, 2.0, -0.3, 0.15, 1.8])  # pi - mu
BEFORE = double([0.5, -0.4, 0.1, 0.9, -0.3, 0.15, -1.8])  # pi_old - mu
SINCE = double([0.1, 0.4, -0.3, 0.0, 0.25, -0.4, 0.02])  # pi - pi_old
TWO = {"adv": double([0.8] * 4 + [-0.6] * 3), "row": [0] * 4 + [1] * 3}


def assert_equals(loss, logp, expected):
    loss.backward()
    assert loss.item() == pytest.approx(expected[0], abs=1e-9)
    np.testing.assert_allclose(logp.grad.numpy(), expected[1], atol=1e-9)


@pytest.mark.parametrize("case", TRL, ids=str)
def test_losses_equal_trls(case):
    name, delta, scale = case
    logp = (SAMPLER + scale * SHIFT).requires_grad_()
    loss, _ = step_loss(name, micro_of(SAMPLER, **TWO, max_tokens=16), logp, {"delta": delta} if delta else {})
    assert_equals(loss, logp, TRL[case])


@pytest.mark.parametrize("case", WEIGHTED, ids=str)
def test_weighted_losses_equal_trls(case):
    """TRL's dr_grpo has epsilon_high = 0.28, where ours has 0.2: no ratio here lies between them."""
    name, weight, high = case
    micro = micro_of(SAMPLER, **TWO, max_tokens=6, prox_logp_N=SAMPLER + BEFORE)
    logp = (SAMPLER + BEFORE + SINCE).requires_grad_()
    loss, logs = step_loss(name, micro, logp, {}, f"importance:{weight}", {"high": high} if high else {})
    assert_equals(loss, logp, WEIGHTED[case])
    assert logs["policy/importance"].shape == logp.shape and micro["old_logp_N"] is SAMPLER


def test_gspo_takes_sequences_without_a_loss_token():
    """Row 2 of five is the only one that has some."""
    old = double([-1.0, -2.0])
    micro = micro_of(old, torch.ones_like(old), [2, 2]) | {"ids_BW": torch.zeros(5, 8)}
    assert step_loss("losses:gspo", micro, old)[0].item() == -1.0


@pytest.mark.parametrize("name", NAMES)
def test_padding_changes_nothing_and_alone_it_is_zero(name):
    old, adv = double([-1.0, -2.0, -3.0, math.nan]), double([0.5, 0.5, -1.0, 9.0])
    logp = double([-1.1, -1.9, -2.9, -5.0]).requires_grad_()
    padded, _ = step_loss(name, micro_of(old, adv, [0, 0, 1, 0], [True, True, True, False]), logp)
    alone, _ = step_loss(name, micro_of(old[:3], adv[:3], [0, 0, 1]), logp[:3])
    padded.backward()
    assert padded.item() == alone.item() and logp.grad[:3].isfinite().all()
    assert step_loss(name, micro_of(old[:1], adv[:1], [0], [False]), logp[:1])[0].item() == 0.0


@pytest.mark.parametrize("gap", [-1e4, 1e4])
@pytest.mark.parametrize("name", NAMES)
def test_losses_stay_finite_for_any_ratio(name, gap):
    logp = torch.tensor([-1.0, min(0.0, -1 + gap)], requires_grad=True)
    loss, _ = step_loss(name, micro_of(torch.tensor([-1.0, -1.0 - gap]), torch.ones(2)), logp)
    loss.backward()
    assert loss.isfinite() and logp.grad.isfinite().all()


# --- importance weights -----------------------------------------------------------------------------------------------

LOG = math.log
EDGES = {  # name, low, high (0: the function's own) -> log(pi_old / mu) of two sequences of two tokens, and the weights
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


def weights(name, log_w, row, adv=-1.0, **args):
    """Weights of tokens whose pi_old / mu is exp(log_w), before the first update: pi is pi_old."""
    zero = torch.zeros_like(log_w)
    micro = micro_of(zero, zero + adv, row, prox_logp_N=log_w)
    return getattr(importance, name)(micro, log_w, **args).tolist()


@pytest.mark.parametrize("case", EDGES, ids=str)
@pytest.mark.parametrize("adv", [-1.0, 0.0, 1.0])
def test_weights_on_either_side_of_their_edges(case, adv):
    """off_policy_mask leaves sequences with A >= 0 alone."""
    (name, low, high), (log_w, expected) = case, EDGES[case]
    args = {key: value for key, value in (("low", low), ("high", high)) if value}
    is_free = name == "off_policy_mask" and adv >= 0
    found = weights(name, double(log_w), [0, 0, 1, 1], adv, **args)
    assert found == pytest.approx([1.0] * 4 if is_free else expected)


def test_permuted_rewards_are_the_same_on_every_rank():
    """Each group has a permutation of its own, whatever the state of torch's generator."""
    rewards, found = torch.arange(8.0), []
    for seed in (0, 1):
        torch.manual_seed(seed)
        found.append([losses.permuted(rewards, [{"env": "e", "group": g}] * 8).tolist() for g in range(20)])
        assert torch.initial_seed() == seed  # which dropout draws from
    assert found[0] == found[1] and len({tuple(row) for row in found[0]}) > 15
    assert all(sorted(row) == (rewards - 3.5).tolist() for row in found[0])


TAKES = {
    "cispo": {"ratio_cap"}, "grpo": {"epsilon", "epsilon_high", "delta"}, "dr_grpo": {"epsilon", "epsilon_high"},
    "losses:gspo": {"epsilon", "epsilon_high"}, "losses:dppo": {"dppo_mask", "dppo_kl"},
    "losses:icepop": {"icepop_low", "ratio_cap"},
}  # fmt: skip


@pytest.mark.parametrize("name", TAKES)
def test_an_argument_is_taken_or_refused_and_changes_what_it_says(name, make_cfg):
    """With arguments below the default ones, every edge moves into the range of these ratios."""
    old = torch.linspace(-4, -0.5, 16, dtype=torch.float64)
    micro = micro_of(old, double([1.0, -1.0] * 8), list(range(16)))
    moved = torch.linspace(-3, 3, 16, dtype=torch.float64)[torch.randperm(16, generator=torch.manual_seed(0))]

    def gradient(args):
        logp = (old + moved).requires_grad_()
        step_loss(name, micro, logp, args)[0].backward()
        return logp.grad

    for key in set.union(*TAKES.values()):
        t = make_cfg(f"trainer.loss={name}", f"trainer.loss_args.{key}=0.9").trainer
        if key in TAKES[name]:
            trainer.check_hooks(t)
            assert not torch.equal(gradient({}), gradient(t.loss_args)), key
            continue
        with pytest.raises(
            configs.RunError, match=f"trainer.loss_args = .* argument '{key}'; the function takes "
        ) as e:
            trainer.check_hooks(t)
        assert e.value.code == 2 and all(f"{known}=" in str(e.value) for known in TAKES[name])


def test_k3_never_pushes_away_from_the_reference():
    """Where the difference is cut, at 20 nats, the gradient is 0, not the other way round."""
    log_r_N = torch.tensor([-30.0, -1.0, 0.0, 1.0, 30.0]).requires_grad_()
    trainer.k3(log_r_N).sum().backward()
    expected = [0.0, math.expm1(-1.0), 0.0, math.expm1(1.0), 0.0]
    assert log_r_N.grad.tolist() == pytest.approx(expected)


# --- one wrong line at a time: each of these alone saw a change of one line -------------------------------------------


def test_with_a_single_update_the_ratio_is_one_and_has_a_gradient():
    """No pass before it has made prox_logp: it is the policy's own, without gradient."""
    old, adv = double([-1.0, -2.0, -3.0]), double([1.0, -1.0, 0.5])
    logp = (old + double([0.1, -0.2, 0.3])).requires_grad_()
    step_loss("grpo", micro_of(old, adv), logp, {}, "importance:token_truncate", {"high": 1.05})[0].backward()
    expected = -adv * double([1.05, math.exp(-0.2), 1.05]) / 3
    assert logp.grad.tolist() == pytest.approx(expected.tolist())


def test_an_importance_weight_leaves_the_kl_to_the_reference_alone():
    old = double([-1.0, -2.0])
    logp = (old + 0.5).requires_grad_()
    micro = micro_of(old, 0 * old) | {"ref_logp_N": old}
    t = {"loss": "cispo", "loss_args": {}, "importance": "importance:token_mask", "importance_args": {}, "beta": 0.5}
    terms, _ = trainer.compute_loss(micro, logp, None, SimpleNamespace(**t))
    assert terms["policy"].tolist() == pytest.approx([0.5 * (math.exp(-0.5) - 1 + 0.5) / 2] * 2)


def test_a_teachers_reward_is_weighted_by_a_capped_ratio_without_a_gradient():
    logp_N = double([-1.0, -1.0, -1.0]).requires_grad_()
    micro = {"teacher_N": double([0.5, 0.5, 0.0]), "teacher_logp_N": double([-2.0, -2.0, -2.0])}
    loss_N, k1_N = trainer.distillation(micro | {"old_logp_N": double([-1 - math.log(2), -9.0, -9.0])}, logp_N)
    loss_N.sum().backward()
    assert logp_N.grad.tolist() == pytest.approx([0.5 * 2 * 1, 0.5 * 5 * 1, 0]) and k1_N.tolist() == [1, 1, 0]


def test_off_policy_mask_goes_by_the_policy_as_it_is_now():
    """Two sequences with A < 0: since the first update one has come back to the sampler, one has gone."""
    zero = double([0.0, 0.0])
    micro = micro_of(zero, zero - 1, [0, 1], prox_logp_N=double([-1.0, 0.0]))
    assert importance.off_policy_mask(micro, double([0.0, -1.0])).tolist() == [1, 0]
