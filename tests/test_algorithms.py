"""rolemodel/: losses and advantages against formulas and other people's numbers, orders, distillation and the
reference by what they do."""

import asyncio
import json
import math
from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import all_batches, lines, write_batches
from think_env import Turns, letters, rows
from transformers import AutoModelForCausalLM

import trainer
from env import Rubric, SingleTurnEnv
from orchestrator import Rollout, Sequence, add_advantages, to_arrays
from rolemodel import advantages, losses, orders, teacher, turns
from rolemodel.role import ConfigError, DataError

# --- losses -----------------------------------------------------------------------------------------------------------

CLIPPING = ["cispo", "grpo", *(f"losses:{name}" for name in "dr_grpo dppo ipo icepop truncated".split())]
LOG_R = [-25.0, -1.0, -0.3, -0.1, 0.0, 0.1, 0.3, 1.0, 1.7, 1e4]  # logp - old_logp, on either side of each edge
OLD = [-30.0, -0.3, -0.5, -1.0, -1.0, -1.0, -1.5, -1.5, -3.0, -1e4]


def double(values):
    return torch.tensor(values, dtype=torch.float64)


def micro_of(old, adv, rows=None, **more):
    """A micro-batch as collate makes it, which is the whole of an optimizer step."""
    rows_N = torch.tensor(rows or [0] * len(old))
    micro = {"old_logp_N": old, "adv_N": adv, "sequence_N": rows_N, "ids_BW": torch.zeros(int(rows_N.max()) + 1, 8)}
    micro |= {"num_tokens": len(old), "num_sequences": len(rows_N.unique()), "max_tokens": 16, "prox_logp_N": old}
    micro |= {"share_N": torch.ones_like(old), "is_sampled_N": ~old.isnan()}
    return micro | more


def step_loss(name, micro, logp, **args):
    """The loss of the step, after its gradient went to logp, and what is logged."""
    t = SimpleNamespace(loss=name, loss_args=args, beta=0.0, updates_per_batch=2, minibatches=1)
    loss_N, logs = trainer.compute_loss(dict(micro), logp, -logp, t)
    loss = loss_N.sum() / micro["num_tokens"]
    loss.backward()
    return loss.item(), logs


def by_hand(name, log_r, adv, old):
    """d loss / d logp of a token, by the papers' formulas, and whether it is clipped. Beyond 20 nats there is no
    gradient through the ratio."""
    r = math.exp(min(max(log_r, -20), 20))
    free = -r * adv * (abs(log_r) < 20)
    moved = math.exp(old + log_r) - math.exp(old)
    if name == "cispo":
        return -min(r, 5) * adv, r > 5
    if name == "losses:ipo":
        return (0.0, True) if abs(moved) > 0.3 else (-min(r, 1e4) * adv, False)
    if name == "losses:icepop":
        return (0.0, True) if not 0.5 <= r <= 5 else (-r * adv, False)
    if name == "losses:dppo":
        is_out = moved > 0.2 if adv > 0 else moved < -0.2
        return (0.0 if is_out else free) + 2e-3 * log_r * (abs(log_r) < 20), is_out
    is_out = r > (1.2 if name == "losses:dr_grpo" else 1.28) if adv > 0 else r < 0.8
    return 0.0 if is_out else free, is_out


@pytest.mark.parametrize("name", CLIPPING)
@pytest.mark.parametrize("adv", [0.7, -0.7])
def test_clipped_losses_have_the_gradients_of_their_papers(name, adv):
    logp = (double(OLD) + double(LOG_R)).requires_grad_()
    # dr_grpo's divisor is the number of tokens here.
    _, logs = step_loss(name, micro_of(double(OLD), double([adv] * len(OLD)), max_tokens=len(OLD)), logp)
    expected = [by_hand(name, log_r, adv, old) for log_r, old in zip(LOG_R, OLD)]
    np.testing.assert_allclose(logp.grad * len(OLD), [grad for grad, _ in expected], rtol=1e-6, atol=1e-9)
    assert logs["policy/clip_frac"].tolist() == [is_out for _, is_out in expected]


# The numbers of TRL 1.16.0's GRPOTrainer._compute_loss for cispo, dapo, dr_grpo, sapo, importance_sampling_level =
# "sequence" and vllm_importance_sampling_mode = "sequence_mask": the loss, then its gradient on each of the seven
# tokens of two sequences. TRL takes a mean of sapo over sequences; here is the one over tokens of the same terms.
TRL = {
    ("cispo", 1): (0.4807455692620833, [-0.1884252881, -0.0766080053, -0.1263052478, -0.5714285714,
                                        0.0634987046, 0.0995857922, 0.4285714286]),
    ("grpo", 1): (0.1912137504279583, [0, -0.0766080053, -0.1263052478, 0, 0, 0.0995857922, 0.5185412112]),
    ("losses:dr_grpo", 1): (0.04582800790611588, [0, -0.0167580012, -0.027629273, 0, 0, 0.0217843921, 0.11343089]),
    ("losses:sapo", 1): (-0.5452016918001392, [-0.1699129841, -0.0745635313, -0.1259566275, -0.0056552424,
                                               0.0623373771, 0.0988703571, 0.0102292069]),
    ("losses:gspo", 1e-3): (-0.09999495461668018, [0, 0, 0, 0, 0.1000550151, 0.1000550151, 0.1000550151]),
    ("losses:sequence_masked", 0): (0.037855798269048786, [0, 0, 0, 0, 0.0156585878, 0, 0.0124412742]),
}  # fmt: skip
SAMPLER = double([-1.0, -2.0, -0.5, -3.0, -1.5, -0.2, -2.5])
SHIFT = double([0.5, -0.4, 0.1, 2.0, -0.3, 0.15, 1.8])  # policy - sampler
BEFORE = double([0.5, -0.4, 0.1, 0.9, -0.3, 0.15, -1.8])  # the policy before the batch's first update - sampler
SINCE = double([0.1, 0.4, -0.3, 0.0, 0.25, -0.4, 0.02])  # policy - policy before


@pytest.mark.parametrize("case", TRL, ids=str)
def test_losses_equal_trls(case):
    name, scale = case
    logp = (SAMPLER + (scale * SHIFT if scale else BEFORE + SINCE)).requires_grad_()
    adv = double([0.8] * 4 + [-0.6] * 3)
    loss, _ = step_loss(name, micro_of(SAMPLER, adv, [0] * 4 + [1] * 3, prox_logp_N=SAMPLER + BEFORE), logp)
    assert loss == pytest.approx(TRL[case][0], abs=1e-9)
    np.testing.assert_allclose(logp.grad, TRL[case][1], atol=1e-9)


@pytest.mark.parametrize("high, expected", [(2.0, [1.5, 2, 0.5]), (4.0, [1.5, 2.5, 0.5])])
def test_truncated_weights(high, expected):
    """The policy is prox, so the gradient of a token is its weight."""
    logp = double([math.log(x) for x in (1.5, 2.5, 0.5)]).requires_grad_()
    zero = torch.zeros_like(logp)
    step_loss("losses:truncated", micro_of(zero, zero - 3, prox_logp_N=logp.detach()), logp, high=high)
    assert logp.grad.tolist() == pytest.approx(expected)


@pytest.mark.parametrize("limit", [0.04, 0.4])
def test_m2po_masks_what_has_moved_most(limit):
    """By the paper's loop, for each sequence. The gradient of a token that is left is that of -r A."""
    draw = torch.Generator().manual_seed(0)
    log_r, adv = torch.randn(2, 40, generator=draw, dtype=torch.float64)
    rows = [0] * 15 + [1] * 24 + [2]
    logp = (log_r - 3).requires_grad_()
    _, logs = step_loss("losses:m2po", micro_of(double([-3.0] * 40), adv, rows), logp, m2_limit=limit)
    expected = set()
    for row in range(3):
        moved = [i for i in range(40) if rows[i] == row and adv[i] * log_r[i] > 0]
        while moved and np.mean([log_r[i] ** 2 for i in moved]) > limit:
            expected.add(max(moved, key=lambda i: abs(log_r[i])))
            moved.remove(max(moved, key=lambda i: abs(log_r[i])))
    assert set(logs["policy/clip_frac"].nonzero().flatten().tolist()) == expected and 0 < len(expected) < 20
    left = torch.tensor([i not in expected for i in range(40)])
    torch.testing.assert_close(logp.grad * 40, -log_r.exp() * adv * left)


def distributions(size, k):
    """Random logits of a policy and log-probabilities of a sampler over a vocabulary, and the k likeliest ids."""
    draw = torch.Generator().manual_seed(1)
    logits = 2 * torch.randn(size, generator=draw, dtype=torch.float64)
    log_q = (logits + torch.randn(size, generator=draw, dtype=torch.float64)).log_softmax(-1)
    return logits.requires_grad_(), log_q, log_q.topk(k).indices


@pytest.mark.parametrize("low, high", [(1, 1), (0, 1), (0.9, 1.1)])
def test_a_centered_loss_has_no_drift(low, high):
    """By expectation: where all but one of nine tokens are known, the gradient by the logits has mean 0 over what the
    sampler draws, and without centering it has not."""
    logits, log_q, head = distributions(9, 8)
    log_p = logits.log_softmax(-1).expand(9, 9)  # a row for each token that may be drawn
    micro = micro_of(log_q, torch.ones_like(log_q), head_ids_NK=head.expand(9, 8))
    micro |= {"old_head_logp_NK": log_q[head].expand(9, 8), "head_logp_NK": log_p[:, head]}
    loss_N, logs = losses.centered(micro, log_p.diagonal(), log_p.diagonal(), ratio_low=low, ratio_cap=high)
    for x_N, drifts in ((loss_N, False), (loss_N - logs["policy/centering"], True)):
        (gradient,) = torch.autograd.grad((log_q.exp() * x_N).sum(), logits, retain_graph=True)
        assert (gradient.abs().max() > 0.01) == drifts and (gradient.abs().max() > 1e-12) == drifts


def test_with_cispos_cap_centering_does_nothing():
    logits, log_q, head = distributions(9, 3)
    micro = {"head_ids_NK": head[None], "old_head_logp_NK": log_q[None, head]}
    micro["head_logp_NK"] = logits.log_softmax(-1)[None, head]
    assert not losses.score_centering(micro, 0, 5).any()


def reads_nan(micro, logp_N, entropy_N):
    """trainer.loss: it multiplies by a field that is nan where there is none."""
    return -micro["adv_N"] * logp_N * micro["prox_logp_N"] * entropy_N, {}


@pytest.mark.parametrize("name", ["losses:gspo", "test_algorithms:reads_nan"])
def test_imitated_tokens_have_their_own_loss_and_no_part_in_a_ratio(name):
    """One among others, without a sampler's log-probability, changes nothing about theirs. (Of every other loss
    test_certify.py checks this.)"""
    logp = (SAMPLER[:3] + 1e-4).requires_grad_()
    alone, _ = step_loss(name, micro_of(SAMPLER[:3], double([0.5, 0.5, -1.0]), [0, 0, 1], num_tokens=4), logp)
    old = torch.cat([SAMPLER[:1], double([math.nan]), SAMPLER[1:3]])
    longer = torch.cat([logp.detach()[:1], double([-7.0]), logp.detach()[1:]]).requires_grad_()
    both, logs = step_loss(name, micro_of(old, double([0.5, 9.0, 0.5, -1.0]), [0, 0, 0, 1]), longer)
    assert both == pytest.approx(alone + 9 * 7 / 4) and longer.grad[1] == -9 / 4
    assert logs["policy/kl_sampler"][1] == 0
    torch.testing.assert_close(longer.grad[[0, 2, 3]], logp.grad)


def test_kl_by_hand(make_cfg):
    """One improbable token in 100,000 must not dominate the mean; the reference adds its k3 to each token's loss."""
    logp_N = double([-1.0, -2.0, -1.0])
    micro = micro_of(double([-1.5, -2.0, -13.0]), double([0.0] * 3), ref_logp_N=double([-1.0, -1.0, -2.0]))
    loss_N, logs = trainer.compute_loss(micro, logp_N, -logp_N, make_cfg("trainer.beta=0.1").trainer)
    k3 = lambda x: math.exp(x) - 1 - x  # noqa: E731
    assert logs["policy/kl_sampler"].tolist() == pytest.approx([k3(0.5), 0, k3(5)])
    assert loss_N.tolist() == pytest.approx([0, 0.1 * k3(1), 0.1 * k3(-1)])


# --- advantages -------------------------------------------------------------------------------------------------------


def group_of(rewards, **more):
    """Rollouts of one row, each with one turn of two tokens. more: lists with the value of each."""
    group = []
    for i, reward in enumerate(rewards):
        s = to_arrays(Sequence([1, 2, 3], [False, True, True], [np.nan, -1.0, -1.0], [0] * 3, [0.0] * 3))
        r = Rollout("e", 0, 0, 0, i, sequences=[s], reward=reward, num_turns=1, num_tokens=2)
        vars(r).update({name: values[i] for name, values in more.items()})
        group.append(r)
    return group


R = [1.0, 1.0, 0.0, 0.0]
PARTS = [{"a": 1.0, "b": 10.0}, {"a": 1.0, "b": 0.0}, {"a": 0.0, "b": 0.0}, {"a": 0.0, "b": 10.0}]
UNIT = 0.5 / (1 / math.sqrt(3) + 1e-4)  # (1 - 1/2) / (standard deviation + 1e-4) of two ones and two zeros
WIDE = 5 / (10 / math.sqrt(3) + 1e-4)
ADVANTAGES = {  # name: rewards, fields of the rollouts, expected
    "leave_one_out": ([3.0, 0.0, 0.0], {}, [3, -1.5, -1.5]),
    "maxrl": ([1.0, 0.0, 0.0, 0.0], {}, [3, -1, -1, -1]),
    "gdpo": ([6.0, 1.0, 0.0, 5.0], {"metrics": PARTS, "state": [{"reward_weights": {"a": 1.0, "b": 0.5}}] * 4},
             [UNIT + WIDE / 2, UNIT - WIDE / 2, -UNIT - WIDE / 2, -UNIT + WIDE / 2]),
    "brief": (R, {"num_tokens": [10, 20, 5, 20]}, [0.9375 - 0.453125, 0.875 - 0.453125, -0.453125, -0.453125]),
}  # fmt: skip


@pytest.mark.parametrize("name", ADVANTAGES)
def test_advantages_by_hand(name):
    rewards, fields, expected = ADVANTAGES[name]
    group = group_of(rewards, **fields)
    add_advantages(group, getattr(advantages, name))
    assert [r.sequences[0].adv.tolist() for r in group] == pytest.approx(np.outer(expected, [0, 1, 1]))


def test_permuted_rewards_and_those_that_are_refused():
    rewards = np.arange(8.0)
    found = [advantages.permuted(rewards, group_of(rewards, slot=[number] * 8)).tolist() for number in (*range(20), 0)]
    assert found[0] == found[-1] and len({tuple(row) for row in found}) > 15
    assert all(sorted(row) == (rewards - 3.5).tolist() for row in found)
    cut = group_of(R, metrics=PARTS, state=[{"reward_weights": {"a": 1.0, "b": 0.5}}] * 4)  # of zeroed rewards
    for wrong in (lambda: advantages.gdpo(np.array([0.0, 1.0, 0.0, 5.0]), cut), lambda: advantages.maxrl(-rewards, [])):
        with pytest.raises(ConfigError):
            wrong()


def test_credit_by_turn(monkeypatch):
    """The baseline of a turn counts rollouts that ended before it as 0. What no turn earned is the last one's."""
    group = group_of([3.5, 4.0], state=[{"turn_rewards": [1.0, 2.0]}, {"turn_rewards": [4.0]}], num_turns=[2, 1])
    group[0].sequences[0].turn = np.array([0, 0, 1], np.int32)
    monkeypatch.setattr(turns, "GAMMA", 0.5)
    add_advantages(group, turns.by_turn)  # returns: 1 + 2.5 / 2, 2.5; and 4
    assert [r.sequences[0].adv.tolist() for r in group] == [[0, 2.25 - 3.125, 2.5 - 1.25], [0, 0.875, 0.875]]


# --- orders -----------------------------------------------------------------------------------------------------------

ROWS = [{"question": str(i), "difficulty": ["easy", "hard"][i % 2]} for i in range(8)]


def commit(order, rewards):
    """A group for each row of {row: reward}."""
    order.commit(0, [group_of(r_G, example=[row] * 2) for row, r_G in rewards.items()])


def picks(order, step=0, num=400):
    return Counter(order.pick(step, slot, 0) for slot in range(num))


def test_difficulty_prefers_rows_that_are_solved_half_of_the_time(make_cfg):
    order = orders.Difficulty("e", ROWS, make_cfg(), {})
    assert set(picks(order, num=8).values()) == {1}  # nothing is known: each once
    commit(order, dict(enumerate([[1, 0], [0, 0.9], [1, 1], [1, 1], [-1, 0], [0, 1], [1, None], [0, 0]])))
    commit(order, {1: [1, 1]})  # moves from 0 to 1/2
    found = picks(order)
    assert min(found[row] for row in (0, 1, 5, 6)) > 4 * max(found[row] for row in (2, 3, 4, 7)) > 0
    again = orders.Difficulty("e", ROWS, make_cfg(), json.loads(json.dumps(order.memory)))
    assert picks(again) == found  # a resumed run goes on with the same rows
    other = orders.Difficulty("other", ROWS, make_cfg(), {})
    commit(other, {0: [1, 1]})
    assert not other.memory


def test_a_curriculum_has_periods(make_cfg):
    order = orders.Curriculum("e", ROWS, make_cfg(), {}, periods={"hard": [2, 4]})
    for step, expected in ((1, {0, 2, 4, 6}), (2, set(range(8))), (3, set(range(8))), (4, {0, 2, 4, 6})):
        assert set(picks(order, step)) == expected
    order.periods["easy"] = [0, 1]
    with pytest.raises(DataError, match="no example of e is left at step 1"):
        picks(order, 1)


QUESTIONS = rows(9)


def test_demonstrations_are_imitated_in_each_batch(run, tmp_path):
    """A quarter as many as rollouts, with the run's template and stop token; all of them before one comes again."""
    talks = [{"prompt": [{"role": "user", "content": f"say {i}"}],
              "completion": [{"role": "assistant", "content": f"{i} it is"}]} for i in range(7)]  # fmt: skip
    (tmp_path / "talks.jsonl").write_text("\n".join(map(json.dumps, talks)))
    args = f'orchestrator.order_args={{ path = "{tmp_path}/talks.jsonl", share = 0.25, weight = 0.5 }}'
    env = SingleTurnEnv(QUESTIONS, rubric=Rubric([letters]))
    said = []
    for _, sequences in all_batches(run(2, env, "orchestrator.order=orders:Demonstrations", args)):
        shown = [s for s in sequences if s["env"] == "demonstrations"]
        assert len(sequences) == 20 and len(shown) == 4
        for s in shown:
            assert np.isnan(s["old_logp"]).all() and (s["adv"] == 0.5 * s["mask"]).all()
            said.append(run.tokenizer.decode(s["tokens"][s["mask"]]))
            whole = run.tokenizer.decode(s["tokens"])
            assert whole == f"<|user|>say {said[-1][0]}<|end|><|assistant|>{said[-1]}"
    assert len(said) == 8 and set(said) == {f"{i} it is<|end|>" for i in range(7)}


# --- distillation -----------------------------------------------------------------------------------------------------


def hint(state):
    """The answer, and what the policy said last."""
    return [*state["prompt"], {"role": "user", "content": state["answer"]}, state["completion"][-1]]


DISTILL = "trainer.loss=losses:distill"
TEACHER = ["orchestrator.advantage=advantages:zero", "orchestrator.max_staleness=0", DISTILL]


@pytest.mark.parametrize("kind, prompt", [(SingleTurnEnv, None), (Turns, hint)])
def test_each_token_is_taught_by_what_the_teacher_thinks_of_it(run, models, kind, prompt):
    """adv = weight x (log p_teacher - log p_sampler), where the teacher may read another prompt."""
    more = [] if prompt else ["orchestrator.sampling.max_tokens=63"]
    task = teacher.taught(kind(QUESTIONS, rubric=Rubric([lambda: 0.0])), 0.5, prompt=prompt)
    run_dir = run(2, task, *TEACHER, *more)
    network = AutoModelForCausalLM.from_pretrained(models["untied"], dtype=torch.float32)
    states = {(r["step"], r["slot"], r["member"]): r for r in lines(run_dir / "rollouts.jsonl")}
    assert not any(r["error"] for r in states.values())
    lens = []
    for step, (_, sequences) in enumerate(all_batches(run_dir)):
        for s in sequences:
            first = int(s["mask"].argmax())
            prefix, said = np.split(s["tokens"], [first])
            if prompt:
                messages = hint(states[step, s["slot"], s["member"]])
                prefix = run.tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
            ids = torch.tensor([[*prefix, *said]]).long()
            with torch.no_grad():
                logp = network(ids).logits[0, :-1].log_softmax(-1).gather(-1, ids[0, 1:, None])[len(prefix) - 1 :, 0]
            expected = np.where(s["mask"][first:], 0.5 * (logp.numpy() - s["old_logp"][first:]), 0)
            expected[63 - len(prefix) :] = 0  # vLLM scores no prompt that fills its context
            np.testing.assert_allclose(s["adv"][first:], expected, atol=1e-4)
            assert expected.any() and not s["adv"][:first].any()
            assert (s["taught"] == 0.5 * (s["adv"] != 0)).all()
            lens.append(len(s["tokens"]))
    assert max(lens) == 64 or prompt


def test_a_teachers_advantage_is_over_the_policy_of_now():
    """The gradient of KL(policy || teacher) is r (logp - teacher_logp) dlogp, however far the policy is from the one
    that sampled. The sequence of the last token has no teacher."""
    teacher, old, adv = double([-1.0, -2.0, -0.5]), double([-1.5, -1.0, -1.0]), double([0.25, 0.0, 0.5])
    weight = double([0.5, 0.5, math.nan])
    logp = double([-1.25, -1.5, -2.0]).requires_grad_()
    micro = micro_of(old, adv + (weight * (teacher - old)).nan_to_num(), taught_N=weight)
    step_loss("losses:distill", micro, logp)
    expected = -(logp - old).exp() * (adv + double([0.5 * 0.25, 0.5 * -0.5, 0.0])) / 3
    torch.testing.assert_close(logp.grad, expected.detach())


def test_a_token_without_the_teachers_opinion_loses_the_rollout(run):
    env = teacher.taught(SingleTurnEnv(QUESTIONS, rubric=Rubric([lambda: 0.0])), 0.5)
    with pytest.raises(DataError, match="rollouts were lost, mostly: ValueError: zip"):
        run(9, env, *TEACHER, "orchestrator.max_error_share=0.5", fake={"teacher": "short"})


def test_who_is_asked_as_a_teacher(make_cfg, monkeypatch):
    """One elsewhere, of its own name and the same vocabulary, or the version that sampled. What the environment adds
    itself stays."""
    asked = []

    class Client:
        tokens = [1]

        def __init__(self, cfg):
            self.load = dict.fromkeys(cfg.inference.urls, 0)

        async def post(self, url, path, body):
            asked.append((url, body["model"]))
            logprobs = [None, {"6": {"logprob": -1.5}}]
            return {"tokens": [1] if url in self.load else self.tokens, "choices": [{"prompt_logprobs": logprobs}]}

    class Adds(SingleTurnEnv):
        def add_fields(self, sequences):
            sequences[0].adv[1] = 1.0

    monkeypatch.setattr(teacher, "Client", Client)

    def teach(*overrides, urls=("http://127.0.0.1:8",), **how):
        cfg = make_cfg(f"inference.urls={json.dumps(urls)}", DISTILL, *overrides)
        s = Sequence([5, 6], [False, True], [np.nan, -1.0], [0, 0], [0.0, 0.0])
        state = {"cfg": cfg, "replies": [{"model": "test-v7"}]}
        asyncio.run(teacher.taught(Adds(QUESTIONS), 0.5, **how).add_fields(state, [s]))
        assert s.adv == [0, 0.75 if urls else 1.0]
        return asked[-1] if asked else None

    assert teach(urls=()) is None  # a program that trains nothing
    assert teach("trainer.use_lora=true", "trainer.dtype=bf16") == ("http://127.0.0.1:8", "test-v7")
    elsewhere = {"base_url": "http://127.0.0.1:9", "model": "large"}
    assert teach(**elsewhere) == ("http://127.0.0.1:9", "large")
    for wrong in ("orchestrator.sampling.temperature=0.5", "trainer.loss=cispo"):
        with pytest.raises(ConfigError, match="a teacher needs"):
            teach(wrong)
    Client.tokens = [2]
    with pytest.raises(ConfigError, match="its vocabulary is not the policy's"):
        teach(**elsewhere)


# --- reference --------------------------------------------------------------------------------------------------------


def test_the_reference_is_the_first_policy_and_moves_toward_the_later_ones(make_cfg, tmp_path):
    cfg = make_cfg("trainer.beta=0.5", "trainer.ref_sync_steps=2", "trainer.ref_sync_alpha=0.25")
    policy, reference = trainer.build_policy(cfg), trainer.build_policy(make_cfg())
    optimizer = trainer.make_optimizer(policy, cfg.trainer)
    path = write_batches(tmp_path / "saved") / "step_000000.safetensors"
    for step in range(4):
        batch = trainer.load_batch(path)
        if step == 2:
            with torch.no_grad():
                for own, other in zip(policy.parameters(), reference.parameters(), strict=True):
                    other.lerp_(own, 0.25)
        ref_T, logp_T = (trainer.score(p, batch, list(range(len(batch.lens))), cfg) for p in (reference, policy))
        metrics, table = trainer.train_step(policy, optimizer, batch, step, cfg)
        x_T = (ref_T - logp_T).double()
        torch.testing.assert_close(table["policy/kl_ref"].double(), x_T.exp() - 1 - x_T, atol=1e-5, rtol=1e-4)
    assert metrics["policy/kl_ref"] > 1e-4
