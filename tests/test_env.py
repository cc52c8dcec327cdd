"""env.py, and the words of the default task."""

import asyncio
import functools
import json
import re
import subprocess
import sys
import threading
from typing import Literal

import numpy as np
import pytest
from conftest import ROOT
from scripted import play

import orchestrator
from configs import RunError, load_config
from configs.environments.rubrics import GroupRubric, TurnRubric
from configs.environments.scoring import score
from configs.environments.tools import ToolEnv
from env import DataError, MultiTurnEnv, Rubric, SingleTurnEnv, Truncated, call, load_environment, load_rows

ROWS = [{"question": "2 + 2?", "answer": "4", "info": {"hard": True}}]


def test_single_turn_and_rubric():
    async def slow(answer, info):
        await asyncio.sleep(0)
        return len(answer) + info["hard"]

    def exact(completion, answer):
        return completion[-1]["content"] == answer  # a bool is a number

    env = SingleTurnEnv(ROWS, system_prompt="Short.", rubric=Rubric([exact, slow], [1.0, 0.0]))
    state, reward, metrics = play(env, ROWS[0], "4")
    assert state["asked"][0] == [{"role": "system", "content": "Short."}, {"role": "user", "content": "2 + 2?"}]
    assert reward == 1.0 and metrics == {"exact": 1.0, "slow": 2.0} and state["turn"] == 1


def test_multi_turn():
    """is_completed sees the last message as well, and may record how the rollout ended for a reward to read."""

    class Guess(MultiTurnEnv):
        def setup_state(self, state):
            state["tries"] = 0

        async def env_response(self, messages, state):
            state["tries"] += 1
            return [{"role": "user", "content": "no"}], state  # verifiers' older signature

        def is_completed(self, messages, state):
            state["solved"] = messages[-1]["content"] == "4"
            return state["solved"]

    env = Guess(ROWS, max_turns=5, rubric=Rubric([lambda tries, solved: tries + solved / 2]))
    state, reward, _ = play(env, ROWS[0], "3", "5", "4")
    assert reward == 2.5 and state["turn"] == 3 and len(state["completion"]) == 5 and len(state["asked"][-1]) == 5
    for replies, expected in (("12354", 4.5), ("12356789", 4.0)):
        state, reward, _ = play(env, ROWS[0], *replies)
        assert state["turn"] == 5 and reward == expected


@pytest.mark.parametrize("value", [None, float("nan"), float("inf"), "1", [1.0, float("inf")], [], 1e30])
def test_what_is_no_number_is_no_reward(value):
    with pytest.raises(ValueError, match="no finite number"):
        play(SingleTurnEnv(ROWS, rubric=Rubric([lambda: value])), ROWS[0], "x")


def test_functions_get_the_arguments_they_name_and_run_in_threads():
    here = threading.get_ident()
    assert asyncio.run(call(lambda b: b, a=1, b=2)) == 2
    assert asyncio.run(call(lambda **all: sorted(all), a=1, b=2)) == ["a", "b"]
    assert asyncio.run(call(lambda function: function + 1, function=1)) == 2  # a name of call's own
    assert asyncio.run(call(lambda: threading.get_ident())) != here


def test_weights_by_step_and_groups_of_rubrics():
    def right(completion, answer):
        return completion[-1]["content"] == answer

    def short(completion, limit):
        return len(completion[-1]["content"]) < limit

    def style(completion):
        return 0.5

    def rise(step):
        return "high"

    rubric = Rubric([right], [lambda step: 1 + step], rubrics=[Rubric([short, style], [0.25, 0], limit=3)])
    env = SingleTurnEnv(ROWS, rubric=rubric)
    state, reward, metrics = play(env, ROWS[0], "4")
    assert reward == 1.25 and metrics == {"right": 1.0, "short": 1.0, "style": 0.5}
    assert asyncio.run(rubric.score(state | {"step": 3}))[0] == 4.25
    with pytest.raises(ValueError, match="reward function rise returned high, no finite number"):
        asyncio.run(Rubric([style], [rise]).score(state))
    rubric = GroupRubric([right, lambda completions: [1.0] * len(completions)], np.array([0.5, 0.25], "f4"))
    state, reward, _ = play(SingleTurnEnv(ROWS, rubric=rubric), ROWS[0], "4")  # rewards are written as JSON
    (added, _) = asyncio.run(rubric.score_group([state]))[0]
    assert (reward, added) == (0.5, 0.25) and type(reward) is type(added) is float
    with pytest.raises(DataError, match="another function, or a number of the run, is called .'right'. as well"):
        Rubric([right], rubrics=[rubric])


def test_functions_of_a_group_see_all_its_rollouts():
    def best(completions, answer):  # of the group: its longest answer
        lens = [len(c[-1]["content"]) for c in completions]
        return [float(n == max(lens)) for n in lens]

    async def names_states(states, step, state):
        assert state is states[0]
        return [s["turn"] + step for s in states]

    def alone(completion):
        return 1.0

    rubric = GroupRubric([best, names_states], [2.0, 0.1], rubrics=[Rubric([alone])])
    env = SingleTurnEnv(ROWS, rubric=rubric)
    states = [play(env, ROWS[0], text)[0] for text in ("a", "bbb", "cc")]
    assert asyncio.run(rubric.score(states[0])) == (1.0, {"alone": 1.0})
    scores = asyncio.run(rubric.score_group(states))
    assert [reward for reward, _ in scores] == pytest.approx([0.1, 2.1, 0.1])
    assert scores[1][1] == {"best": 1.0, "names_states": 1.0}
    for kind in (Rubric, GroupRubric):
        assert asyncio.run(kind([alone]).score_group(states)) == []
    wrong = {"not a number for each of 3": [[1.0], 1.0, None, np.array(1.0)], "no finite number": [[1.0, None, 2.0]]}
    for problem, values in wrong.items():
        for value in values:
            with pytest.raises(ValueError, match=f"reward function <lambda> returned .*{problem}"):
                asyncio.run(GroupRubric([lambda states: value]).score_group(states))


def test_a_function_of_a_group_in_a_plain_rubric_is_told_where_it_belongs():
    def best(completions):
        return [1.0 for _ in completions]

    wants = r"best\(\) wants \['completions'\] \(groups: configs/environments/rubrics.py\)"
    for rubric in (Rubric([best]), Rubric(rubrics=[GroupRubric([best])])):
        with pytest.raises(DataError, match=wants):
            SingleTurnEnv(ROWS, rubric=rubric)
        with pytest.raises(DataError, match=wants):  # whose setup_state may add anything, so it is told when it runs
            play(MultiTurnEnv(ROWS, max_turns=1, rubric=rubric), ROWS[0], "x")


def test_rewards_by_turn_add_up_and_the_rest_counts_at_the_last_turn():
    class Echo(MultiTurnEnv):
        def env_response(self, messages, state):
            return [{"role": "user", "content": "more"}]

    def each(completion):
        return [float(m["content"]) for m in completion if m["role"] == "assistant"]

    def whole(completion):
        return 10.0

    class Both(GroupRubric, TurnRubric):
        """Of the group, too."""

    for kind in (TurnRubric, Both):
        env = Echo(ROWS, max_turns=3, rubric=kind([each, whole], [0.5, 1.0]))
        state, reward, metrics = play(env, ROWS[0], "1", "2", "3")
        assert reward == 13.0 and state["turn_rewards"] == [0.5, 1.0, 11.5]
        assert metrics == {"each": 6.0, "whole": 10.0}
    for kind in (np.int64, np.float32):  # JSON has neither
        numbers = TurnRubric([lambda completion, kind=kind: [kind(x) for x in each(completion)]])
        metrics = play(Echo(ROWS, max_turns=3, rubric=numbers), ROWS[0], "1", "2", "3")[2]
        assert json.dumps(metrics) == '{"<lambda>": 6.0}'
    with pytest.raises(DataError, match="<lambda> returned 2 rewards for 3 turns"):
        play(Echo(ROWS, max_turns=3, rubric=TurnRubric([each, lambda: [1.0, 2.0]])), ROWS[0], "1", "2", "3")
    with pytest.raises(ValueError, match="each returned .1.0, 2.0, 3.0., no finite number"):
        play(Echo(ROWS, max_turns=3, rubric=Rubric([each])), ROWS[0], "1", "2", "3")


def test_a_rollout_may_change_its_row_and_no_other_sees_it():
    rows = [{"question": "q", "info": {"n": 0}, "more": [1]}]
    env = SingleTurnEnv(rows)
    state = env.start(env.dataset[0])
    state["task"]["info"]["n"] += 1
    state["task"]["more"].append(2)
    assert env.start(env.dataset[0])["task"] == rows[0] == {"question": "q", "info": {"n": 0}, "more": [1]}


def test_text_for_base_models_takes_no_messages_before_it():
    for own in ({"system_prompt": "s"}, {"few_shot": [{"role": "user", "content": "a"}]}):
        with pytest.raises(DataError, match="a prompt that is text takes no system_prompt and no few_shot"):
            SingleTurnEnv([{"prompt": "2 + 2 ="}], **own)
    with pytest.raises(DataError, match="MultiTurnEnv: a prompt for several turns must be messages, not text"):
        MultiTurnEnv([{"prompt": "2 + 2 ="}])


# --- tools ------------------------------------------------------------------------------------------------------------


def add(a: int, b: int = 1, note: str = "") -> str:
    """Add two numbers.

    Args:
        a: the first
        b: the second
        note: for the log
    """
    return str(a + b)


async def shout(text: str, state: dict) -> str:
    """Make it loud.

    Args:
        text: what to shout
    """
    state["shouted"] = text
    return text.upper() * 5000


def fails(text: str):
    """Fails.

    Args:
        text: of the error
    """
    raise RuntimeError(f"no {text} \ud800")


def leaves(code: int) -> str:
    """Leaves.

    Args:
        code: 0 for the iteration
    """
    return sys.exit(code) if code else next(iter(()))


def calls(*requests):
    functions = [{"id": str(i), "function": {"name": n, "arguments": a}} for i, (n, a) in enumerate(requests)]
    return {"role": "assistant", "content": "", "tool_calls": functions}


def test_tool_schemas_come_from_signature_and_docstring():
    schema = ToolEnv(ROWS, [add, shout]).tools
    assert schema[0] == {"type": "function", "function": {
        "name": "add", "description": "Add two numbers.",
        "parameters": {"type": "object", "required": ["a"], "properties": {
            "a": {"type": "integer", "description": "the first"},
            "b": {"type": "integer", "description": "the second"},
            "note": {"type": "string", "description": "for the log"},
        }},
    }}  # fmt: skip
    seen = schema[1]["function"]["parameters"]
    assert list(seen["properties"]) == seen["required"] == ["text"]  # state is not the policy's to give


def test_types_of_a_tools_arguments_are_checked():
    def look(where: list[str], how: Literal["near", "far"], most: int | None = None, more: dict[str, int] = None):
        """Look around.

        Args:
            where: places
            how: near or far
            most: at most so many
            more: weights
        """
        return f"{where} {how} {most} {more}"

    env = ToolEnv(ROWS, [look], max_turns=2)
    asked = ['{"where": ["a"], "how": "far", "more": {"x": "2"}}', '{"where": ["a"], "how": "up"}']
    _, texts = tool_texts(env, calls(*(("look", text) for text in asked)))
    assert texts == ["['a'] far None {'x': 2}", "error: how: Input should be 'near' or 'far'"]


def test_a_tools_state_may_have_any_annotation_or_none():
    class Notes:
        """A class that pydantic makes no schema of."""

        def note(self, text: str, state: "NoSuchName") -> "NoSuchName":  # noqa: F821
            """Write it down.

            Args:
                text: what
            """
            state["notes"] = text
            return text + state["answer"]

    def bare(state):
        """Needs nothing."""
        return state["notes"]

    env = ToolEnv(ROWS, [Notes().note, bare], max_turns=3)
    said = calls(("note", '{"text": "a"}'), ("bare", ""), ("note", '{"text": "a", "state": {}}'))
    state, texts = tool_texts(env, said)
    assert texts == ["a4", "a", "error: state: Unexpected keyword argument"] and state["notes"] == "a"


BARE_TOOL = """
from configs.environments.tools import ToolEnv

def load_environment():
    return ToolEnv([{"question": "q"}], [lambda a: a])
"""


def test_what_a_tools_schema_needs_is_told_before_a_server_starts(make_cfg, tmp_path, monkeypatch):
    (tmp_path / "bare_tool.py").write_text(BARE_TOOL)
    monkeypatch.syspath_prepend(tmp_path)
    problem = "Cannot generate JSON schema for <lambda> because it has no docstring"
    with pytest.raises(RunError, match=f"env.id = 'bare_tool': .*{problem}.* in load_environment, bare_tool.py:5") as e:
        orchestrator.prepare(make_cfg("env.id=bare_tool"))
    assert e.value.code == 4


def tool_texts(env, *requests):
    state, _, _ = play(env, ROWS[0], *requests, "done")
    return state, [m["content"] for m in state["completion"] if m["role"] == "tool"]


def test_tools_run_and_whatever_goes_wrong_goes_back_as_text():
    wrong = {
        ("add", "{"): "JSONDecodeError", ("add", '{"a": "x"}'): "a: Input should be a valid integer",
        ("add", '{"b": 1}'): "a: Missing required argument", ("add", "[1]"): "TypeError",
        ("add", '{"a": 1, "c": 2}'): "c: Unexpected keyword argument", ("state", "{}"): "there is no tool 'state'",
        ("nothing", "{}"): "there is no tool 'nothing', only add, shout, fails", ("add", ""): "a: Missing required",
        ("fails", '{"text": "luck"}'): "RuntimeError: no luck ?", ("leaves", '{"code": 3}'): "SystemExit: 3",
        ("leaves", '{"code": 0}'): "RuntimeError: leaves raised StopIteration()",
    }  # fmt: skip
    env = ToolEnv(ROWS, [add, shout, fails, leaves], max_turns=3, max_output=100)
    first = calls(("add", '{"a": 3}'), ("shout", '{"text": "hi"}'))
    state, texts = tool_texts(env, first, calls(*wrong))
    assert texts[0] == "4" and texts[1] == "HI" * 50 + "\n[cut at 100 characters]" and state["shouted"] == "hi"
    for text, want in zip(texts[2:], wrong.values(), strict=True):
        assert text.startswith("error: ") and want in text, (text, want)
    assert state["turn"] == 3
    assert [m["tool_call_id"] for m in state["completion"] if m["role"] == "tool"][:3] == ["0", "1", "0"]


def test_calls_that_the_server_cannot_read_go_back_as_text_and_endless_ones_end():
    state, _, _ = play(ToolEnv(ROWS, [add], max_turns=3), ROWS[0], '<tool_call>{"name": "add", "arg', "4")
    assert [m["role"] for m in state["completion"]] == ["assistant", "user", "assistant"]
    assert state["completion"][1]["content"].startswith("error: the tool call is not valid JSON")
    state, _, _ = play(ToolEnv(ROWS, [add]), ROWS[0], *[calls(("add", '{"a": 1}'))] * 9)
    assert state["turn"] == 8  # the default


def test_an_environment_may_have_the_last_word_or_run_out_of_room():
    class Ends(MultiTurnEnv):
        def env_response(self, messages, state):
            state["final_env_response"] = True
            return [{"role": "user", "content": "over"}]

    state, _, _ = play(Ends(ROWS), ROWS[0], "1", "2")
    assert [m["content"] for m in state["completion"]] == ["1", "over"]

    async def no_room(prompt, tools=None, **about):
        raise Truncated

    with pytest.raises(Truncated):
        asyncio.run(Ends(ROWS).rollout(Ends(ROWS).start(ROWS[0]), no_room))


# --- rows, and scoring without a server -------------------------------------------------------------------------------


def test_rows_come_from_lists_files_and_hugging_face(tmp_path):
    from datasets import Dataset

    (tmp_path / "rows.jsonl").write_text(
        '{"question": "a", "info": "{\\"x\\": 1}"}\n\n{"prompt": "b", "difficulty": 3}\n'
    )
    rows = load_rows(str(tmp_path / "rows.jsonl"))
    assert rows == [{"question": "a", "info": {"x": 1}}, {"prompt": "b", "difficulty": 3}]
    assert load_rows([{"question": "a", "info": "{}"}])[0]["info"] == {}
    env = SingleTurnEnv(tmp_path / "rows.jsonl", eval_dataset=Dataset.from_list([{"question": "c", "answer": "d"}]))
    assert env.eval_dataset == [{"question": "c", "answer": "d"}] and len(env.dataset) == 2
    assert SingleTurnEnv(lambda: ROWS).dataset == ROWS
    chat = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
    state = SingleTurnEnv(ROWS, system_prompt="S", few_shot=chat).start(ROWS[0])
    assert [m["content"] for m in state["prompt"]] == ["S", "q", "a", "2 + 2?"]
    needs = r"needs a question \(text\) or a prompt \(messages or text\)"
    empty = [{"answer": "1"}, {"question": 3}, {"prompt": [1]}, {"prompt": []}, {"question": ""}]
    bad = {"is no dict": ["text"], needs: empty,
           "no dict": [{"question": "a", "info": [1]}], "Expecting": [{"question": "a", "info": "{"}]}  # fmt: skip
    for problem, row in [(problem, row) for problem, found in bad.items() for row in found]:
        with pytest.raises(DataError, match=rf"dataset\[2\].*{problem}"):
            SingleTurnEnv([*ROWS, *ROWS, row])
    (tmp_path / "broken.jsonl").write_text('{"question": "a"}\n{"question"\n')
    with pytest.raises(DataError, match="line 2 of .*broken.jsonl: Expecting"):
        load_rows(tmp_path / "broken.jsonl")
    with pytest.raises(DataError, match="no file .*missing.jsonl"):
        load_rows(tmp_path / "missing.jsonl", "eval_dataset")
    assert DataError.code == 4


def test_a_rollout_does_not_change_the_rows_and_a_new_state_counts():
    class Notes(MultiTurnEnv):
        def setup_state(self, state):
            state["info"]["seen"] = True
            return {"more": 1}

        def env_response(self, messages, state):
            return [{"role": "user", "content": "?"}], {"more": state["more"] + 1}

    rows = [{"question": "q", "info": {"a": 1}}]
    state, _, _ = play(Notes(rows, max_turns=3), rows[0], "x", "y", "z")
    assert rows == [{"question": "q", "info": {"a": 1}}] and state["info"]["seen"] and state["more"] == 3


def test_shipped_environments_load_as_the_orchestrator_loads_them(tmp_path):
    """In a process of its own, without what the tests put on the path. What the hub has, a file has here."""
    (tmp_path / "rows.jsonl").write_text('{"prompt": "ab"}\n' * 200)
    code = ("import sys\nfrom pathlib import Path\nfrom configs import load_config\nfrom env import load_environment\n"
            "for path in sorted(Path('configs').glob('*.toml')):\n"
            "    sandboxed = ('defaults', 'math_python', 'qwen3_4b_8gpu')\n"
            "    files = {'qwen3_0.6b_1gpu': 'configs/tasks/gsm8k_sample.jsonl', 'reverse_text_qwen3': sys.argv[1]}\n"
            "    more = [f'env.args.path={files[path.stem]}'] if path.stem in files else []\n"
            "    for e in load_config(path, more).env if path.stem not in sandboxed else ():\n"
            "        print(path.stem, len(load_environment(e.id, e.args).dataset))")  # fmt: skip
    env = {"PATH": "/usr/bin:/bin", "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-c", code, tmp_path / "rows.jsonl"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) >= 11


def test_score_without_a_server():
    def exact(completion, answer):
        return {"4": 1.0, "5": None}.get(completion[-1]["content"], 0.0)

    def first(completions):
        return [float(i == 0) for i in range(len(completions))]

    env = SingleTurnEnv(ROWS, system_prompt="Short.", rubric=GroupRubric([exact, first], [1.0, 0.5]))
    asked = "2 + 2?"
    prompts = [asked, [{"role": "user", "content": asked}], asked, env.start(ROWS[0])["prompt"]]
    rewards = score(env, prompts, ["4", "4", "5", [{"role": "assistant", "content": "4"}]])
    assert rewards == [1.5, 1.0, None, 1.0]
    assert score(env, ["new"], ["4"], answer=["4"]) == [1.5]
    with pytest.raises(ValueError, match=r"prompts\[1\] is in no row"):
        score(env, [asked, "other"], ["4", "4"])


def test_score_of_turns_of_texts_and_with_a_function_that_raises(capsys):
    from configs.tasks import alphabet_sort

    def broken(completions):
        raise KeyError(len(completions))

    def whole(completion, prompt):
        return float((prompt, completion) == ("once upon", [" a time"]))

    def num_system(prompt):
        return float(sum(message["role"] == "system" for message in prompt))

    env = SingleTurnEnv(ROWS, rubric=GroupRubric([broken]))
    assert score(env, ["2 + 2?", "2 + 2?"], ["4", "5"]) == [None, None] and "KeyError: 2" in capsys.readouterr().err
    env = SingleTurnEnv([{"prompt": "once upon", "answer": ""}], rubric=Rubric([whole]))
    assert score(env, ["once upon", "once upon"], [" a time", "x"]) == [1.0, 0.0]
    env = SingleTurnEnv(ROWS, system_prompt="Short.", rubric=Rubric([num_system]))
    assert score(env, ["2 + 2?", env.start(ROWS[0])["prompt"]], ["4", "4"]) == [1.0, 1.0]
    env = load_environment("alphabet_sort", {"num_train": 9})
    row = env.dataset[0]
    assert score(env, [row["question"]], [alphabet_sort.conversation(row["question"], row["info"])[1:]]) == [1.0]


def test_bad_rubrics_and_no_rows_are_named():
    with pytest.raises(ValueError, match=r"eval_dataset\[0\]: is no dict"):
        SingleTurnEnv(ROWS, ["text"])
    with pytest.raises(ValueError, match="dataset is empty"):
        SingleTurnEnv([])

    def right(completion, reply, **more):
        return 1.0

    with pytest.raises(ValueError, match=r"right\(\) wants \['reply'\] .*; given: \['prompt', 'answer', "):
        SingleTurnEnv(ROWS, rubric=Rubric([right]))
    MultiTurnEnv(ROWS, rubric=Rubric([right]))  # its setup_state may add it
    SingleTurnEnv(ROWS, rubric=Rubric([right], reply=1))
    with pytest.raises(ValueError, match="2 weights for 1 func"):
        Rubric([len], [1, 2])
    with pytest.raises(ValueError, match="a number of the run, is called .'<lambda>'"):
        Rubric([lambda: 1, lambda: 0])
    for name in ("tokens", "mean", "step"):
        right.__name__ = name
        with pytest.raises(DataError, match=f"is called .'{name}'"):
            Rubric([right])


def test_environments_load_by_name(tmp_path, monkeypatch):
    """Beside the TOML, which load_config puts on Python's path, or in configs/tasks/."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "mine.toml").write_text((ROOT / "configs" / "reverse_text.toml").read_text())
    load_config(tmp_path / "mine.toml")
    assert len(load_environment("reverse_text", {"num_train": 9, "num_eval": 3}).dataset) == 9
    (tmp_path / "my_task.py").write_text((ROOT / "configs" / "tasks" / "reverse_text.py").read_text())
    assert load_environment("someone/my-task", {"num_train": 5}).dataset[0]["answer"]
    with pytest.raises(ModuleNotFoundError, match="no_such_task"):
        load_environment("no-such-task", {})


def test_a_task_of_ones_own_needs_no_folder_of_ours(tmp_path):
    """Nor does it lack what the server says: `replies` comes with the rollout."""
    (tmp_path / "configs" / "runtime").mkdir(parents=True)
    (tmp_path / "env.py").write_text((ROOT / "env.py").read_text())
    task = "from env import *\n\ndef r(replies):\n    return len(replies)\n\n"
    task += "def load_environment():\n    return SingleTurnEnv([{'question': '?'}], rubric=Rubric([r]))\n"
    (tmp_path / "mine.py").write_text(task)
    code = "import env; env.load_environment('mine', {})"
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=True)


def test_env_needs_no_torch_and_no_side_effects():
    code = "import sys; import env; assert 'torch' not in sys.modules and 'numpy' not in sys.modules\n"
    code += "import configs, orchestrator; assert 'torch' not in sys.modules and 'transformers' not in sys.modules\n"
    code += "import trainer, torch; assert not torch.distributed.is_initialized()"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, capture_output=True, text=True)
    assert not done.stdout and not re.search("Error|Traceback", done.stderr)


def test_the_readmes_environment_is_short_and_does_what_it_says(tmp_path, monkeypatch):
    """A researcher's environment in at most 25 lines, as the README has it."""
    readme = (ROOT / "README.md").read_text()
    code = readme.split("```python\n")[1].split("```")[0]
    assert len(code.splitlines()) <= 25 and "def load_environment" in code
    (tmp_path / "higher_lower.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    env = load_environment("higher_lower", {"num": 60, "max_turns": 3})
    answer = env.dataset[0]["answer"]
    replies = ["<guess>101</guess>", "no idea", f"<think>so</think><guess>{answer}</guess>"]
    state, reward, metrics = play(env, env.dataset[0], *replies)
    assert [m["content"] for m in state["completion"][1::2]] == ["Lower.", "Write a number: <guess>50</guess>"]
    assert metrics["found"] == pytest.approx(1 / 3) and reward > metrics["found"]


# --- one wrong line at a time: each of these alone saw a change of one line -------------------------------------------


def test_a_negative_weight_is_a_penalty():
    def long(completion):
        return float(len(completion[-1]["content"]))

    def alike(completions):
        return [3.0 for _ in completions]

    rubric = GroupRubric([long, alike], [-0.5, -1.0])
    state, reward, _ = play(SingleTurnEnv(ROWS, rubric=rubric), ROWS[0], "four")
    assert reward == -2.0 and asyncio.run(rubric.score_group([state])) == [(-3.0, {"alike": 3.0})]


def test_a_partial_may_set_the_state_of_a_tool():
    def note(text: str, state: dict):
        """Write it down.

        Args:
            text: what
        """
        return text + state["answer"]

    env = ToolEnv(ROWS, [functools.partial(note, state={"answer": "mine"})], max_turns=2)
    state, _, _ = play(env, ROWS[0], calls(("note", '{"text": "a"}')), "done")
    assert state["completion"][1]["content"] == "amine"


def test_a_row_with_a_question_and_a_prompt_is_asked_by_its_prompt():
    row = {"question": "2 + 2?", "prompt": [{"role": "user", "content": "Add 2 and 2."}]}
    assert SingleTurnEnv([row]).start(row)["prompt"] == row["prompt"]


def test_what_is_set_for_a_function_holds_against_what_the_rollout_has():
    """A rubric's own parser against the environment's, and a partial's answer against the row's."""

    def right(answer, parser):
        return float((answer, parser) == ("mine", "the rubric's"))

    rubric = Rubric([functools.partial(right, answer="mine")], parser="the rubric's")
    assert play(SingleTurnEnv(ROWS, rubric=rubric, parser="another"), ROWS[0], "x")[1] == 1.0


def test_a_module_of_the_users_hides_a_shipped_task_of_its_name(tmp_path, monkeypatch):
    task = "import env\n\ndef load_environment():\n    return env.SingleTurnEnv([{'question': 'mine'}])\n"
    (tmp_path / "judge_style.py").write_text(task)
    monkeypatch.syspath_prepend(tmp_path)
    assert load_environment("judge_style", {}).dataset == [{"question": "mine"}]
    del sys.modules["judge_style"]


def test_half_of_the_default_tasks_reward_is_for_the_whole_word():
    for id in ("reverse_text", "reverse_vf"):
        env = load_environment(id, {"num_train": 1, "num_eval": 1})
        row = env.dataset[0]
        _, reward, metrics = play(env, row, row["answer"][:-1])
        assert 0.8 < metrics["similarity"] < 1 and reward == metrics["similarity"] / 2, id
        assert play(env, row, row["answer"])[1] == 1


def test_no_row_of_a_shipped_task_is_both_trained_on_and_held_out(tmp_path):
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({"prompt": word}) + "\n" for word in ("ab", "cd", "ef")))
    args = {"reverse_text_qwen3": {"path": str(tmp_path / "rows.jsonl"), "num_eval": 1}, "judge_style": {}}
    for id, given in args.items():
        env = load_environment(id, given)
        questions = [{row["question"] for row in rows} for rows in (env.dataset, env.eval_dataset)]
        assert all(questions) and questions[0].isdisjoint(questions[1]), id
