"""configs/algorithms/orders.py: curriculum, retirement, difficulty; and that a resumed run takes the same rows."""

import json
from collections import Counter
from types import SimpleNamespace

import pytest
from conftest import all_batches, lines

import configs.algorithms.orders
from configs import RunError
from configs.algorithms.orders import Curriculum, Difficulty, put_back
from orchestrator import Order, Rollout

ROWS = [{"question": str(i)} for i in range(40)]


def group_of(row, *rewards, dropped=""):
    rollouts = [Rollout({}, reward=reward) for reward in rewards]
    return SimpleNamespace(env="e", index=row, row=row, rollouts=rollouts, dropped=dropped)


def taken(order, num, step=0):
    return [row for _, row in (order.take(step) for _ in range(num))]


def test_difficulty_prefers_the_middle_and_retires_what_is_always_flat(make_cfg):
    cfg = make_cfg("orchestrator.order=orders:Difficulty", "orchestrator.retire_after=2")
    order = Difficulty(ROWS, cfg)
    assert sorted(taken(order, 40)) == list(range(40))  # nothing is known yet
    for i in range(10):
        for _ in range(2):
            order.settle(group_of(i, 1.0, 1.0, dropped="flat at reward 1"))  # always solved
            order.settle(group_of(10 + i, 0.0, 0.0, dropped="flat at reward 0"))  # never
        order.settle(group_of(20 + i, *[1.0] * 9, 0.0))  # easy
        order.settle(group_of(30 + i, 1.0, 0.0))
    order.settle(group_of(9, 1.0, 0.0))  # it is not always solved after all
    order.settle(group_of(39, None, None))  # of lost rollouts nothing is known
    assert order.extra["0"] == [1.0, 2] and order.extra["20"] == [0.9, 0] and order.extra["9"] == [0.75, 0]
    assert order.extra["39"] == [0.5, 0]
    again = Difficulty(ROWS, cfg, json.loads(json.dumps(order.ledger())))  # as a batch file has it
    rows = taken(order, 300)
    assert rows == taken(again, 300)
    counts = Counter(rows)
    assert not {*range(9), *range(10, 20)} & set(counts)
    easy, middle = (sum(counts[i] for i in part) for part in (range(20, 30), range(30, 40)))
    assert 1.5 < middle / easy < 3  # chances 1 and 4 x 0.9 x 0.1 + 0.1
    for i in range(9, 40):
        for _ in range(2):
            order.settle(group_of(i, 1.0, 1.0, dropped="flat at reward 1"))
    with pytest.raises(RunError, match="no row is left at step 3") as e:
        taken(order, 99, step=3)
    assert e.value.code == 4


def test_curriculum_goes_by_difficulty_and_step(make_cfg):
    rows = [row | {"difficulty": ["easy", 2, "hard", None][i % 4]} for i, row in enumerate(ROWS)]
    wanted = 'orchestrator.curriculum={easy=[0, 10], "2"=[5, 20], hard=[10, 100]}'
    order = Curriculum(rows, make_cfg("orchestrator.order=orders:Curriculum", wanted))
    for step, allowed in {0: {0, 3}, 5: {0, 1, 3}, 10: {1, 2, 3}, 30: {2, 3}}.items():
        assert {row % 4 for row in taken(order, 60, step)} == allowed
    late = make_cfg("orchestrator.order=orders:Curriculum", "orchestrator.curriculum={hard=[10, 100]}")
    with pytest.raises(RunError, match="no row is left at step 7"):
        Curriculum(rows[2:3], late).take(7)


@pytest.mark.parametrize("curriculum, message", [
    ("{esay=[0, 10]}", r"curriculum names \['esay'\]; the rows' difficulties are \['None'\]"),
    ("{None=[10, 5]}", r"curriculum = {'None': \[10, 5\]}: must be { difficulty = \[first step"),
    ("{None=10}", "curriculum = {'None': 10}: must be"),
])  # fmt: skip
def test_a_wrong_curriculum_is_refused(curriculum, message, make_cfg):
    cfg = make_cfg("orchestrator.order=orders:Curriculum", f"orchestrator.curriculum={curriculum}")
    with pytest.raises(RunError, match=message) as e:
        Curriculum(ROWS, cfg)
    assert e.value.code == 2


def test_retirement_alone(make_cfg):
    order = Curriculum(ROWS[:4], make_cfg("orchestrator.order=orders:Curriculum", "orchestrator.retire_after=1"))
    order.settle(group_of(2, 1.0, 1.0, dropped="flat at reward 1"))
    assert set(taken(order, 30)) == {0, 1, 3}


@pytest.mark.parametrize("seed", range(8))
def test_bad_luck_is_no_end(seed, make_cfg):
    """Where only a row of a small chance is left, it is taken all the same."""
    order = Difficulty(
        ROWS[:4], make_cfg("orchestrator.order=orders:Difficulty", "orchestrator.retire_after=2", f"seed={seed}")
    )
    for row in (1, 2, 3):
        for _ in range(2):
            order.settle(group_of(row, 1.0, 1.0, dropped="flat at reward 1"))
    order.settle(group_of(0, 0.0, 0.0))  # a chance of 0.1
    for _ in range(300):
        index, row = order.take(0)
        assert row == 0 and index in order.open


@pytest.mark.parametrize("Curriculum", [Curriculum, configs.algorithms.orders.Curriculum])  # two modules to Python
def test_what_ahead_leaves_over_is_asked_again(Curriculum, make_cfg):
    """A row is put back only while its period and its retirement allow it at the step where it would be taken."""
    rows = [row | {"difficulty": ["easy", "hard"][i % 2]} for i, row in enumerate(ROWS)]
    order = Curriculum(rows, make_cfg("orchestrator.order=orders:Curriculum", "orchestrator.curriculum={easy=[0, 3]}"))
    issued = dict(order.take(0) for _ in range(8))
    put_back(order, set(issued), 2)
    assert order.again == sorted(issued) and order.open == set(issued)
    order.again = []
    put_back(order, set(issued), 3)
    hard = [index for index, row in sorted(issued.items()) if row % 2]
    assert order.again == hard and order.open == set(hard)
    plain = Order(ROWS, order.cfg)
    issued = dict(plain.take(0) for _ in range(3))
    put_back(plain, set(issued), 3)
    assert plain.again == sorted(issued)


def test_difficulty_is_carried_in_the_batches(run):
    env = '{ kind = "turns", num_turns = 1, num_rows = 9 }'
    run_dir = run(4, env, "orchestrator.order=orders:Difficulty")
    extra = all_batches(run_dir)[-1].info["ledger"]["think_env"]["extra"]
    assert set(extra) == {str(r["example"]) for r in lines(run_dir / "rollouts.jsonl")}
    assert all(0 <= rate <= 1 for rate, _ in extra.values())
