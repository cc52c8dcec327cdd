"""configs/algorithms/advantages.py against numbers by hand, and the running baseline through a run."""

import asyncio
import json
from types import SimpleNamespace

import numpy as np
import pytest
from conftest import all_batches

import orchestrator
import trainer
from configs.algorithms.orders import ByParts, RunningBaseline
from configs.runtime.role import RunError
from orchestrator import Order, Rollout


def group_of(*rewards, agent="", **metrics):
    """Rollouts with these rewards, and with a list of values for each metric or number."""
    group = []
    for i, reward in enumerate(rewards):
        own = {name: values[i] for name, values in metrics.items() if not name.startswith("num_")}
        numbers = {name: values[i] for name, values in metrics.items() if name.startswith("num_")}
        group.append({"reward": reward, "agent": agent, "metrics": own} | numbers)
    return group


def found(name, *groups):
    return trainer.compute_advantages(list(groups), f"advantages:{name}")


def test_maxrl():
    assert found("maxrl", group_of(0.0, 0.0, 0.0, 1.0), group_of(0.0, 0.0)) == [[-1, -1, -1, 3], [0, 0]]


# TRL 1.16.0's lines for multi_objective_aggregation = "normalize_then_sum" on these numbers.
WIDE, NARROW, BAD = [100, 0, 0, 100, 3, 5, 5, 9], [1, 0, 1, 0, 0, 0, 1, 1], [0.2, 0.9, 0.4, 0.4, 0.1, 0.1, 0.2, 0.3]
OF_TRL = [1.448228227, -1.677499059, 0.668056579, -0.438785748, -0.705502661, -0.487805861, 0.617142865, 0.576165657]


def test_gdpo_equals_trls_normalization_by_function_and_batch():
    """But for the batch's deviation, in which TRL divides by n - 1. Weights matter, a negative one above all; what the
    rubric only logs does not."""
    groups = []
    for at in (slice(0, 4), slice(4, 8)):
        metrics = {"wide": WIDE[at], "narrow": NARROW[at], "bad": BAD[at], "agent_requests": [1, 2, 3, 9]}
        group = group_of(*[0.0] * 4, **metrics)
        for rollout in group:
            rollout["reward_weights"] = {"wide": 0.3, "narrow": 1.0, "bad": -0.5}
        groups.append(group)
    table = found("gdpo", *groups)
    assert [*table[0], *table[1]] == pytest.approx([a * (8 / 7) ** 0.5 for a in OF_TRL], abs=2e-4)
    alone = [group_of(1.0, wide=[1.0])[0] | {"reward_weights": {"wide": 1.0}}]
    assert found("gdpo", alone) == [[0.0]] and found("gdpo") == []
    with pytest.raises(RunError, match="reward_weights") as e:
        found("gdpo", group_of(1.0, 2.0, wide=[1.0, 2.0]))
    assert e.value.code == 2


def test_brief_takes_from_long_successes_where_the_task_is_solved():
    rewards = np.array([1 - 0.25 * 0.5 * 0.5, 1 - 0.25 * 0.5, 0.0, 0.0])
    group = group_of(1.0, 1.0, 0.0, 0.0, num_tokens=[50, 100, 100, 10])
    assert found("brief", group)[0] == pytest.approx(list(rewards - rewards.mean()))
    unsolved = group_of(0.0, 0.0, num_tokens=[50, 100])
    assert found("brief", unsolved) == [[0.0, 0.0]]


def test_groups_of_equal_rewards_in_which_an_advantage_sees_more_are_kept(make_cfg):
    def keep(advantage, *rollouts):
        cfg = make_cfg(f"trainer.advantage=advantages:{advantage}", "orchestrator.order=orders:ByParts")
        return ByParts([{}], cfg).keep(list(rollouts))

    def one(reward, num_tokens=5, **metrics):
        weights = {name: float(name != "logged") for name in metrics}
        return Rollout({}, [], reward=reward, num_tokens=num_tokens, metrics=metrics, reward_weights=weights)

    assert keep("gdpo", one(1.0, a=1.0, logged=0.0), one(1.0, a=1.0, logged=7.0)) == "flat"
    assert keep("gdpo", one(1.0, a=1.0, b=0.0), one(1.0, a=0.0, b=1.0)) == ""
    assert keep("gdpo", one(1.0, a=1.0, b=0.0), one(1.0, 9, a=1.0, b=0.0)) == "flat"
    assert keep("brief", one(1.0, 5), one(1.0, 9)) == "" and keep("brief", one(1.0, 5), one(1.0, 5)) == "flat"
    assert keep("brief", one(0.0, 5), one(0.0, 9)) == "flat"


@pytest.mark.parametrize("order", ["", "orders:Difficulty"])
def test_an_order_that_drops_what_an_advantage_learns_from_is_refused(order, make_cfg):
    cfg = make_cfg("trainer.advantage=advantages:brief", f"orchestrator.order={order}", "eval.every=0")
    with pytest.raises(RunError, match="learns from groups of equal rewards.*orders:ByParts"):
        asyncio.run(orchestrator.run(cfg))


def test_rewards_of_truncated_rollouts_by_part_are_refused(make_cfg):
    more = ["orchestrator.order=orders:ByParts", "orchestrator.zero_truncated_completions=true"]
    with pytest.raises(RunError, match="zero_truncated.*must be false with trainer.advantage"):
        make_cfg("trainer.advantage=advantages:gdpo", *more)


def test_agents_that_swap_their_rewards_make_no_flat_group(make_cfg):
    rewards = ({"a": 1.0, "b": 0.0}, {"b": 1.0, "a": 0.0})  # in the order of a dict, by winner
    group = [Rollout({}, [], reward=0.5, agent_rewards=found) for found in rewards]
    assert Order([{}], make_cfg()).keep(group) == ""
    assert Order([{}], make_cfg()).keep([group[0], group[0]]) == "flat"


def rollout(reward, *agents, **agent_rewards):
    return Rollout({}, [{"agent": agent} for agent in agents], reward=reward, agent_rewards=agent_rewards)


def test_the_running_baseline_is_before_the_rollout_by_agent_and_survives_a_kill(make_cfg):
    cfg = make_cfg("orchestrator.order=orders:RunningBaseline")
    order = RunningBaseline([{}] * 9, cfg)
    rollouts = [rollout(1.0, "a", "b", a=2.0), rollout(1.0, "a", "b", a=0.0), rollout(None, "a")]
    order.commit(SimpleNamespace(index=0, rollouts=rollouts, dropped=""))
    assert [r.metrics for r in rollouts] == [
        {"baseline_a": 0.0, "baseline_b": 0.0},
        {"baseline_a": 0.1, "baseline_b": 0.05},
        {},
    ]
    state = json.loads(json.dumps(order.state()))
    again = RunningBaseline([{}] * 9, cfg, state)
    assert again.memory == order.memory == {"a": pytest.approx(0.095), "b": pytest.approx(0.0975)}
    group = group_of(3.0, 3.0, agent="a", baseline_a=[1.0, 2.0])
    assert found("running", group) == [[2.0, 1.0]]


def test_groups_whose_rewards_are_equal_are_kept_and_learn(run, make_cfg):
    keys = ["orchestrator.order=orders:RunningBaseline", "trainer.advantage=advantages:running"]
    run_dir = run(3, '{ kind = "constant" }', *keys)
    t = make_cfg(*keys).trainer
    for step, batch in enumerate(all_batches(run_dir)):
        trainer.add_advantages(batch.sequences, t)
        advantages = [s["adv"][-1].item() for s in batch.sequences]
        baselines = [s["metrics"]["baseline_"] for s in batch.sequences]
        assert advantages == pytest.approx([1 - b for b in baselines])
        assert len(advantages) == 16 and min(baselines) >= 1 - 0.95 ** (16 * step) - 1e-9
