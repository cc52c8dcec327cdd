"""Sort words, over several turns: each turn adds some, and all are to be sorted again. Partial credit, by turn."""

import difflib
import random

from configs.environments.rubrics import TurnRubric
from env import DataError, MultiTurnEnv

LETTERS = "abcdefghijklmnopqrstuvwxyz"
NAMES = """adam alma amir anna ben bela cara chen dan dora elsa emil fay finn gina goran hana hugo ida igor iris jack
jana kai kira lars lena leo lucy mara max mia milo nina noah nora olga omar otto paul petra quin rosa ruth sam sara tara
theo tim ugo ula vera viktor wanda will xenia yara yusuf zara zoe""".split()
WARM_UP_STEPS = 205


def rows(split, num, words=LETTERS, first=4, more=3, turns=2):
    """Distinct rows; a checksum of what is to be sorted names its split, so no two splits share a row."""
    rng, found = random.Random(f"alphabet_sort {split}"), {}
    owner = {"eval": (0,), "warmup": (1, 2, 3), "train": range(4, 10)}[split]
    for _ in range(100 * num):
        if len(found) == num:
            break
        drawn = rng.sample(list(words), first + more * (turns - 1))
        if sum(ord(c) * 31**i for i, c in enumerate("".join(drawn))) % 10 in owner:
            found[" ".join(drawn)] = drawn
    if len(found) < num:
        raise DataError(f"alphabet_sort: only {len(found)} of {num} rows of the {split} split differ: more words a row")
    return [row(drawn, first, more) for drawn in found.values()]


def row(drawn, first, more):
    cuts = range(first, len(drawn) + 1, more)
    parts = [drawn[:first], *(drawn[cut : cut + more] for cut in cuts if cut < len(drawn))]
    answers = [" ".join(sorted(drawn[:cut])) for cut in cuts]
    return {"question": "Sort: " + " ".join(drawn[:first]), "info": {"added": parts[1:], "answers": answers}}


def demonstrations(num):
    """For the supervised warm-up of the toy model."""
    return [conversation(r["question"], r["info"]) for r in rows("warmup", num)]


def conversation(question, info):
    talk = [{"role": "user", "content": question}, {"role": "assistant", "content": info["answers"][0]}]
    for words, answer in zip(info["added"], info["answers"][1:]):
        talk += [{"role": "user", "content": added(words)}, {"role": "assistant", "content": answer}]
    return talk


def added(words):
    return "Add: " + " ".join(words)


class AlphabetSort(MultiTurnEnv):
    def is_completed(self, messages, state):
        return state["turn"] == len(state["info"]["answers"])

    def env_response(self, messages, state):
        return [{"role": "user", "content": added(state["info"]["added"][state["turn"] - 1])}]


def said(completion):
    return [m["content"].lower().split() for m in completion if m["role"] == "assistant"]


def in_order(completion, info):
    """A number per turn, in all 0 to 1: four fifths for all of it in order, the rest for how much of it is."""
    scores = []
    for words, answer in zip(said(completion), info["answers"]):
        alike = difflib.SequenceMatcher(None, words, answer.split()).ratio()
        scores.append((0.2 * alike + 0.8 * (words == answer.split())) / len(info["answers"]))
    return scores


def exact(completion, info):
    """Every turn is right."""
    return float(said(completion) == [answer.split() for answer in info["answers"]])


def load_environment(words="letters", first=4, more=3, turns=2, num_train=4096, num_eval=128, system_prompt=""):
    """words: "letters" (for toy models) or "names"; `first` words in the first turn, `more` in each of the others."""
    kind = {"letters": LETTERS, "names": NAMES}[words]
    train, held_out = (rows(s, n, kind, first, more, turns) for s, n in (("train", num_train), ("eval", num_eval)))
    rubric = TurnRubric([in_order, exact], [1.0, 0.0])
    return AlphabetSort(train, turns, eval_dataset=held_out, rubric=rubric, system_prompt=system_prompt)
