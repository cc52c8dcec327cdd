"""configs/tasks/wiki_search.py and configs/tasks/alphabet_sort.py with scripted policies."""

import json

import pytest
from scripted import play

from configs.tasks import alphabet_sort, wiki_search
from env import DataError, load_environment


def test_wiki_search_finds_views_and_answers():
    env = load_environment("wiki_search", {"max_turns": 4})
    assert len(env.dataset) == 160 and len(env.eval_dataset) == 40 and len(env.tools) == 2
    for row in (env.dataset[7], env.eval_dataset[7]):
        name = row["info"]["title"]
        search = wiki_search.call("search_pages", {"query": name})
        page_id = str([p for p, (title, _) in pages_of(env).items() if title == name][0])
        view = wiki_search.call("view_page", {"page_id": page_id})
        state, reward, metrics = play(env, row, search, view, row["answer"] + ".")
        assert metrics == {"correct": 1.0, "progress": 2.0} and state["turn_rewards"] == pytest.approx([0.2, 0.2, 0.6])
        texts = [m["content"] for m in state["completion"] if m["role"] == "tool"]
        assert texts == [f"{page_id}: {name}", f"{name} lives in {row['answer']}."]
        # the same search again earns nothing; an answer that says more than the answer is none
        state, _, metrics = play(env, row, search, search, view, f"it is {row['answer']} or not")
        assert state["turn_rewards"] == pytest.approx([0.2, 0, 0.2, 0]) and metrics["correct"] == 0
        wrong = wiki_search.call("view_page", {"page_id": "900"})
        state, _, _ = play(env, row, wrong, wiki_search.call("search_pages", {"query": "zz"}), "x")
        texts = [m["content"] for m in state["completion"] if m["role"] == "tool"]
        assert texts == ["error: ValueError: no page '900'", "nothing found"] and state["turn_rewards"] == [0, 0, 0]
        # an error that repeats the call earns nothing
        echo = [wiki_search.call("search_pages", {name: ""}), wiki_search.call("view_page", {"page_id": row["answer"]})]
        assert play(env, row, *echo, "x")[0]["turn_rewards"] == [0, 0, 0]


def pages_of(env):
    return env.functions["view_page"].__self__.pages


def test_wiki_search_reads_a_directory(tmp_path):
    (tmp_path / "a.md").write_text("# Lake Como\n\nA lake in Lombardy, 146 square kilometers.\n")
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "b.txt").write_text("Mount Etna\nA volcano in Sicily.\n")
    rows = [{"question": f"{i}?", "answer": "Sicily"} for i in range(3)]
    (tmp_path / "q.jsonl").write_text("\n".join(map(json.dumps, rows)))
    args = {"corpus": str(tmp_path), "questions": str(tmp_path / "q.jsonl"), "num_eval": 1}
    env = load_environment("wiki_search", args)
    search = wiki_search.call("search_pages", {"query": "which volcano?"})
    state, reward, _ = play(env, env.dataset[0], search, wiki_search.call("view_page", {"page_id": "1"}), "sicily")
    assert state["completion"][1]["content"] == "1: Mount Etna" and reward == pytest.approx(0.8)
    assert len(load_environment("wiki_search", args | {"num_eval": 0}).dataset) == 3
    with pytest.raises(DataError, match="3 questions, none left to train on"):
        load_environment("wiki_search", args | {"num_eval": 3})
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="no .txt or .md pages"):
        load_environment("wiki_search", args | {"corpus": str(tmp_path / "empty")})


def test_alphabet_sort_asks_again_and_credits_each_turn():
    env = load_environment("alphabet_sort", {"words": "names", "first": 3, "more": 2, "turns": 3})
    row = env.dataset[0]
    first, second, third = row["info"]["answers"]
    state, reward, metrics = play(env, row, first, second, third.upper())
    assert state["turn_rewards"] == pytest.approx([1 / 3] * 3) and reward == pytest.approx(1.0)
    assert metrics == {"in_order": pytest.approx(1.0), "exact": 1.0}
    asked = [m["content"] for m in state["prompt"] + state["completion"] if m["role"] == "user"]
    said = " ".join(asked).replace("Sort: ", "").replace("Add: ", "").split()
    assert sorted(said) == third.split() and len(asked) == 3 and set(said) <= set(alphabet_sort.NAMES)
    swapped = " ".join(reversed(second.split()))
    state, _, metrics = play(env, row, first, swapped, third)
    reward = state["turn_rewards"]
    assert reward[0] == reward[2] == pytest.approx(1 / 3) and 0 < reward[1] < 1 / 15 and metrics["exact"] == 0


def test_alphabet_sort_says_where_there_are_too_few_rows():
    with pytest.raises(DataError, match="only 3.. of 4096 rows of the train split differ"):
        alphabet_sort.load_environment(first=2, turns=1)


def test_what_a_function_of_the_group_adds_is_the_last_turns():
    from configs.algorithms.turns import returns

    assert returns({"reward": 3.5, "turn_rewards": [1.0, 2.0], "num_turns": 2}, 1.0) == [3.5, 2.5]
    assert returns({"reward": 3.5, "turn_rewards": None, "num_turns": 2}, 0.5) == [1.75, 3.5]


# --- one wrong line at a time: each of these alone saw a change of one line -------------------------------------------


def test_turns_that_a_rollout_did_not_reach_earn_nothing():
    info = load_environment("alphabet_sort", {"num_train": 1}).dataset[0]["info"]
    said = [{"role": "assistant", "content": info["answers"][0]}]
    assert alphabet_sort.in_order(said, info) == [0.5] and alphabet_sort.exact(said, info) == 0


def test_what_a_tool_found_is_not_yet_an_answer():
    assert wiki_search.correct([{"role": "tool", "content": "rome"}], "Rome") == 0
