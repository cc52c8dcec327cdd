"""configs/algorithms/orders.py: curriculum, retirement, difficulty; and that a resumed run takes the same rows."""

import asyncio
import json
import tomllib
from collections import Counter
from types import SimpleNamespace

import pytest
from conftest import all_batches, make_sequences
from test_trainer import batch_of

import trainer
from configs import load_config
from configs.algorithms.orders import Curriculum, Demonstrations, Difficulty, put_back
from configs.models import toy
from configs.runtime.role import RunError
from orchestrator import Order, Rollout

ROWS = [{"question": str(i)} for i in range(40)]


def commit(order, rows, *rewards, dropped="", times=1):
    rollouts = [Rollout({}, reward=reward) for reward in rewards]
    for row in list(rows) * times:
        order.commit(SimpleNamespace(env="e", index=row, row=row, rollouts=rollouts, dropped=dropped))


def taken(order, num, step=0):
    return [row for _, row in (order.take(step) for _ in range(num))]


@pytest.fixture
def make_order(make_cfg):
    """make_order(Difficulty, rows, state, "retire_after=2", ...) -> an order of that class."""

    def make(kind, rows=ROWS, state=None, *keys):
        keys = [f"orchestrator.{key}" for key in (f"order=orders:{kind.__name__}", *keys)]
        return kind(rows, make_cfg(*keys), state)

    return make


def test_difficulty_prefers_the_middle_and_retires_what_is_always_flat(make_order):
    order = make_order(Difficulty, ROWS, None, "retire_after=2")
    assert sorted(taken(order, 40)) == list(range(40))  # nothing is known yet
    commit(order, range(10), 1.0, 1.0, dropped="flat", times=2)  # always solved
    commit(order, range(10, 20), 0.0, 0.0, dropped="flat", times=2)  # never
    commit(order, range(20, 30), *[1.0] * 9, 0.0)  # easy
    commit(order, range(30, 40), 1.0, 0.0)
    commit(order, [9], 1.0, 0.0)  # it is not always solved after all
    commit(order, [39], None, None)  # lost rollouts say nothing
    assert [order.memory[row] for row in ("0", "20", "9", "39")] == [[1.0, 2], [0.9, 0], [0.75, 0], [0.5, 0]]
    state = json.loads(json.dumps(order.state()))  # as a batch file has it
    rows = taken(order, 300)
    assert rows == taken(make_order(Difficulty, ROWS, state, "retire_after=2"), 300)
    counts = Counter(rows)
    assert not {*range(9), *range(10, 20)} & set(counts)
    easy, middle = (sum(counts[i] for i in part) for part in (range(20, 30), range(30, 40)))
    assert 1.5 < middle / easy < 3  # chances 1 and 4 x 0.9 x 0.1 + 0.1
    commit(order, range(9, 40), 1.0, 1.0, dropped="flat", times=2)
    with pytest.raises(RunError, match="no row is left at step 3") as e:
        taken(order, 99, step=3)
    assert e.value.code == 4


def test_curriculum_goes_by_difficulty_and_step(make_order):
    rows = [row | {"difficulty": ["easy", 2, "hard", None][i % 4]} for i, row in enumerate(ROWS)]
    order = make_order(Curriculum, rows, None, 'curriculum={easy=[0, 10], "2"=[5, 20], hard=[10, 100]}')
    for step, allowed in {0: {0, 3}, 5: {0, 1, 3}, 10: {1, 2, 3}, 30: {2, 3}}.items():
        assert {row % 4 for row in taken(order, 60, step)} == allowed
    with pytest.raises(RunError, match="no row is left at step 7"):
        make_order(Curriculum, rows[2:3], None, "curriculum={hard=[10, 100]}").take(7)


@pytest.mark.parametrize("curriculum, message", [
    ("{esay=[0, 10]}", r"curriculum names \['esay'\]; the rows' difficulties are \['None'\]"),
    ("{None=[10, 5]}", r"curriculum = {'None': \[10, 5\]}: must be { difficulty = \[first step"),
    ("{None=10}", "curriculum = {'None': 10}: must be"),
])  # fmt: skip
def test_a_wrong_curriculum_is_refused(curriculum, message, make_order):
    with pytest.raises(RunError, match=message) as e:
        make_order(Curriculum, ROWS, None, f"curriculum={curriculum}")
    assert e.value.code == 2


def test_retirement_alone(make_order):
    order = make_order(Curriculum, ROWS[:4], None, "retire_after=1")
    commit(order, [2], 1.0, 1.0, dropped="flat")
    assert set(taken(order, 30)) == {0, 1, 3}


def test_bad_luck_is_no_end(make_order):
    """If only a row of a small chance is left, it is taken all the same."""
    order = make_order(Difficulty, ROWS[:4], None, "retire_after=2")
    commit(order, (1, 2, 3), 1.0, 1.0, dropped="flat", times=2)
    commit(order, [0], 0.0, 0.0)  # a chance of 0.1
    for seed in range(8):
        order.cfg.run = order.cfg.run._replace(seed=seed)
        for _ in range(100):
            index, row = order.take(0)
            assert row == 0 and index in order.open


def test_what_oversampling_leaves_over_is_taken_again(make_order):
    """A row is put back only while its period and its retirement allow it at the step when it would be taken."""
    rows = [row | {"difficulty": ["easy", "hard"][i % 2]} for i, row in enumerate(ROWS)]
    order = make_order(Curriculum, rows, None, "curriculum={easy=[0, 3]}")
    issued = dict(order.take(0) for _ in range(8))
    put_back(order, set(issued), 2)
    assert order.requeued == sorted(issued) and order.open == set(issued)
    order.requeued = []
    put_back(order, set(issued), 3)
    hard = [index for index, row in sorted(issued.items()) if row % 2]
    assert order.requeued == hard and order.open == set(hard)
    plain = Order(ROWS, order.cfg)
    issued = dict(plain.take(0) for _ in range(3))
    put_back(plain, set(issued), 3)
    assert plain.requeued == sorted(issued)


TALKS = [[{"role": "user", "content": f"say {i}"}, {"role": "assistant", "content": f"it is {i}"}] for i in range(7)]


@pytest.fixture
def demonstrations(tmp_path):
    """Overrides for a run in which a quarter as many demonstrations as rollouts are imitated with weight 1/2."""
    file = tmp_path / "talks.jsonl"
    file.write_text("".join(json.dumps({"prompt": talk[:1], "completion": talk[1:]}) + "\n" for talk in TALKS))
    args = f'orchestrator.order_args={{ path = "{file}", share = 0.25, weight = 0.5 }}'
    return ["orchestrator.order=orders:Demonstrations", args]


def test_demonstrations_are_a_share_of_each_batch(run, demonstrations):
    """4 for 16 rollouts: their tokens are those of the template, imitated and nothing else. All seven come before one
    comes again, and a run that is resumed goes on with the next."""
    batches = all_batches(run(2, '{ kind = "turns" }', *demonstrations))
    said = []
    for batch in batches:
        shown = [s for s in batch.sequences if s["group"] == -1]
        assert len(shown) == 4 and len(batch.sequences) == 20
        for s in shown:
            answer = s["ce"] != 0
            assert not s["mask"].any() and set(s["ce"][answer].tolist()) == {0.5}
            said.append(run.tokenizer.decode(s["tokens"][answer]))
            assert s["reward"] is None and s["staleness"] == 0
    assert sorted(set(said)) == sorted(f"it is {i}<|end|>" for i in range(7)) and len(said) == 8
    assert batches[0].info["metrics"]["rollout/num"] == 16
    again = all_batches(run(3, '{ kind = "turns" }', *demonstrations))
    order = Demonstrations([], load_config(run.run_dir / "config.toml"), **args_of(demonstrations))
    for n, batch in enumerate(again):
        expected = [r.sequences[0]["tokens"] for r in order.extra(n)[0].rollouts]
        assert [s["tokens"].tolist() for s in batch.sequences if s["group"] == -1] == expected


def test_demonstrations_are_read_as_the_run_reads_prompts(run, tmp_path):
    """Its template, the line's tools, arguments as objects, blank lines, and characters that end a line elsewhere."""
    template = tmp_path / "own.jinja"
    template.write_text("{% if tools %}TOOLS{% endif %}{% for m in messages %}<|{{ m.role }}|>{{ m.content }}"
                        "{% if m.tool_calls %}{{ m.tool_calls[0].function.arguments.a }}{% endif %}<|end|>{% endfor %}"
                        "{% if add_generation_prompt %}<|assistant|>{% endif %}")  # fmt: skip
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": {"a": 7}}}
    answer = {"role": "assistant", "content": "b\u2028c", "tool_calls": [call]}
    talk = {"prompt": [{"role": "user", "content": "a"}], "completion": [answer], "tools": [{"type": "function"}]}
    file = tmp_path / "talks.jsonl"
    file.write_text(json.dumps(talk, ensure_ascii=False) + "\n\n", encoding="utf-8")
    args = f'orchestrator.order_args={{ path = "{file}", share = 0.25 }}'
    run(1, '{ kind = "turns" }', "orchestrator.order=orders:Demonstrations", args, f"chat_template={template}")
    order = Demonstrations([], load_config(run.run_dir / "config.toml"), path=str(file))
    ((_, s),) = order.talks
    assert run.tokenizer.decode(s["tokens"]).startswith("TOOLS<|user|>a<|end|><|assistant|>b")
    assert run.tokenizer.decode(s["tokens"]).endswith("c7<|end|>")


def test_one_of_several_environments_adds_the_demonstrations(run, demonstrations):
    two = '[[env]]\nid = "think_env"\n[[env]]\nid = "think_env"\nname = "b"'
    batches = all_batches(run(2, two, *demonstrations))
    shown = [s["tokens"].tolist() for batch in batches for s in batch.sequences if s["group"] == -1]
    assert len(shown) == 8 and len({*map(tuple, shown)}) == 7
    with pytest.raises(RunError, match="share = 0.01 of batch_size = 16 is none") as e:
        run(2, two, demonstrations[0], demonstrations[1].replace("0.25", "0.01"))
    assert e.value.code == 2


def args_of(overrides):
    return tomllib.loads(overrides[1].partition("=")[2].join(["args = ", ""]))["args"]


@pytest.mark.parametrize("advantage", ["mean", "batch_std", "advantages:gdpo"])
def test_demonstrations_have_no_part_in_an_advantage(make_cfg, tmp_path, advantage):
    """A rollout's advantage is the same with and without them."""
    cfg = make_cfg(f"trainer.advantage={advantage}", "orchestrator.order=orders:ByParts")
    rollouts = make_sequences(12)
    for s in rollouts:
        s |= {"metrics": {"a": s["reward"], "b": 1 - s["reward"] ** 2}, "reward_weights": {"a": 1.0, "b": 0.5}}
    shown = [toy.as_demonstration(s) | {"reward": None, "group": -1, "metrics": {}} for s in make_sequences(3, seed=9)]
    found = []
    for sequences in (rollouts, rollouts + shown):
        batch = batch_of(tmp_path, sequences)
        trainer.add_advantages(batch.sequences, cfg.trainer)
        found.append([s["adv"].tolist() for s in batch.sequences[:12]])
        assert all(not s["adv"].any() for s in batch.sequences[12:])
    assert found[0] == found[1]


def test_arguments_that_an_order_does_not_know(make_cfg):
    for kind in (Order, Difficulty, Curriculum):
        with pytest.raises(RunError, match=r"order_args: .* knows no \['shares'\]"):
            kind(ROWS, make_cfg(), None, shares=1)


@pytest.mark.parametrize(
    "line, what",
    [
        (None, "path = '.*' is no file"),
        ("", "has no demonstration"),
        ("no JSON", "line 1: JSONDecodeError"),
        ('{"prompt": []}', "line 1: KeyError.'completion'"),
        (
            json.dumps({"prompt": TALKS[0][:1], "completion": [{"role": "assistant", "content": "a" * 99}]}),
            "line 1: .* 64",
        ),
    ],
)
def test_demonstrations_that_are_not_there_or_wrong(line, what, make_cfg, tmp_path):
    file = tmp_path / "talks.jsonl"
    if line is not None:
        file.write_text(line)
    with pytest.raises(RunError, match=what) as e:
        Demonstrations(ROWS, make_cfg(), path=str(file))
    assert e.value.code == 2


def test_arguments_need_an_order(make_cfg):
    with pytest.raises(RunError, match="orchestrator.order_args.* left out without"):
        make_cfg("orchestrator.order_args={path='x'}")


# --- one wrong line at a time: each of these alone saw a change of one line -------------------------------------------


def test_demonstrations_are_shuffled_anew_in_every_epoch(demonstrations, make_cfg):
    order = Demonstrations([], make_cfg(), path=args_of(demonstrations)["path"], share=7 / 16)
    epochs = [[r.sequences[0]["tokens"] for r in order.extra(step)[0].rollouts] for step in range(3)]
    assert all(sorted(epoch) == sorted(epochs[0]) for epoch in epochs)
    assert not epochs[0] == epochs[1] == epochs[2]


from configs.algorithms.orders import oversample


def test_a_mean_reward_beyond_0_to_1_counts_as_the_end_of_it(make_order):
    """Otherwise the row's chance would be below 0, and it would never come again."""
    order = make_order(Difficulty)
    commit(order, [0], 5.0, 3.0)
    commit(order, [1], -5.0)
    assert (order.memory["0"], order.memory["1"]) == ([1.0, 0], [0.0, 0]) and order.chance(0) == order.chance(1) == 0.1


def test_what_is_refused_is_not_open(make_order):
    """A run that is resumed would take it first."""
    order = make_order(Curriculum, ROWS[:4], None, "retire_after=1")
    commit(order, [2], 1.0, 1.0, dropped="flat")
    issued = {order.take(0)[0] for _ in range(9)}
    assert order.open == issued


def test_demonstrations_are_read_and_end_as_the_run_asks(demonstrations, make_cfg, tmp_path):
    """With sampling.stop, chat_template_kwargs, and the stop tokens of the model's generation_config.json."""
    template, path = tmp_path / "own.jinja", args_of(demonstrations)["path"]
    template.write_text("{{ mark }}{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
                        "{% if add_generation_prompt %}<|assistant|>{% endif %}")  # fmt: skip
    tokenizer = toy.make_tokenizer()
    toy.make_model(tmp_path / "model", tokenizer, layers=1, hidden=64)
    (tmp_path / "model" / "generation_config.json").write_text(json.dumps({"eos_token_id": tokenizer.encode("s")}))
    keys = [f"chat_template={template}", "orchestrator.sampling.chat_template_kwargs={mark='M'}"]
    for stop, said in (("['t ']", "it "), ("[]", "it is")):
        cfg = make_cfg(*keys, f"orchestrator.sampling.stop={stop}", model=tmp_path / "model")
        _, s = Demonstrations([], cfg, path=path).talks[0]
        whole = tokenizer.decode(s["tokens"])
        assert whole == f"M<|user|>say 0<|end|><|assistant|>{said}"


def test_what_oversampling_leaves_over_is_taken_again_if_its_step_is_in_the_rows_period(make_order):
    """It is taken for a batch that is a step and max_staleness later."""
    rows, left = [row | {"difficulty": "easy"} for row in ROWS], []

    async def job(index, row):
        return SimpleNamespace(index=index, dropped="")

    for step in (0, 1):
        keys = ("curriculum={easy=[0, 3]}", "oversampling_factor=2.0", "max_staleness=1")
        order = make_order(Curriculum, rows, None, *keys)
        assert [group.index for group in asyncio.run(oversample(order, 2, step, job))] == [0, 1]
        left.append(order.requeued)
    assert left == [[2, 3], []]
