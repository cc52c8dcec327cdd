"""Sort words over several turns: each turn adds some, and all of them must be sorted again. Each turn has its own
reward, with partial credit."""

import difflib
import random

from configs.environments.rubrics import TurnRubric
from env import MultiTurnEnv, ensure

LETTERS = "abcdefghijklmnopqrstuvwxyz"
NAMES = """adam alma amir anna ben bela cara chen dan dora elsa emil fay finn gina goran hana hugo ida igor iris jack
jana kai kira lars lena leo lucy mara max mia milo nina noah nora olga omar otto paul petra quin rosa ruth sam sara tara
theo tim ugo ula vera viktor wanda will xenia yara yusuf zara zoe""".split()
WARM_UP_STEPS = 205
SPLITS = {"eval": (0,), "warmup": (1, 2, 3), "train": range(4, 10)}  # {split: checksums of its rows}


def checksum(text):
    """A number from 0 to 9."""
    return sum(ord(c) * 31**i for i, c in enumerate(text)) % 10


def rows(split, num, words=LETTERS, first=4, more=3, turns=2):
    """Returns distinct rows. A checksum of the words decides on the split, so that no two splits share a row."""
    rng = random.Random(f"alphabet_sort {split}")
    found = {}
    for _ in range(100 * num):
        if len(found) == num:
            break
        drawn = rng.sample(list(words), first + more * (turns - 1))
        if checksum("".join(drawn)) in SPLITS[split]:
            found[" ".join(drawn)] = drawn
    problem = f"only {len(found)} of {num} rows of the {split} split differ: sort more words in a row"
    ensure(len(found) == num, f"alphabet_sort: {problem}")
    return [row(drawn, first, more) for drawn in found.values()]


def row(drawn, first, more):
    cuts = range(first, len(drawn) + 1, more)
    added_words = [drawn[cut : cut + more] for cut in cuts if cut < len(drawn)]
    answers = [" ".join(sorted(drawn[:cut])) for cut in cuts]
    question = "Sort: " + " ".join(drawn[:first])
    return {"question": question, "info": {"added": added_words, "answers": answers}}


def demonstrations(num):
    """Conversations for the toy model's supervised warm-up."""
    return [conversation(row["question"], row["info"]) for row in rows("warmup", num)]


def conversation(question, info):
    questions = [question, *map(added, info["added"])]
    talk = []
    for text, answer in zip(questions, info["answers"], strict=True):
        talk.append({"role": "user", "content": text})
        talk.append({"role": "assistant", "content": answer})
    return talk


def added(words):
    return "Add: " + " ".join(words)


class AlphabetSort(MultiTurnEnv):
    def is_completed(self, messages, state):
        return state["turn"] == len(state["info"]["answers"])

    def env_response(self, messages, state):
        words = state["info"]["added"][state["turn"] - 1]
        return [{"role": "user", "content": added(words)}]


def words_of(completion):
    """The words of each turn."""
    return [message["content"].lower().split() for message in completion if message["role"] == "assistant"]


def in_order(completion, info):
    """A number per turn; together they are 0 to 1. Four fifths are for a turn that is exactly right, the rest for how
    similar it is."""
    scores = []
    for words, answer in zip(words_of(completion), info["answers"]):
        wanted = answer.split()
        alike = difflib.SequenceMatcher(None, words, wanted).ratio()
        is_right = float(words == wanted)
        scores.append(0.2 * alike + 0.8 * is_right)
    return [score / len(info["answers"]) for score in scores]


def exact(completion, info):
    """1 if every turn is right."""
    wanted = [answer.split() for answer in info["answers"]]
    return float(words_of(completion) == wanted)


def load_environment(words="letters", first=4, more=3, turns=2, num_train=4096, num_eval=128, system_prompt=""):
    """words: "letters" (for toy models) or "names"; the first turn has `first` of them, each other turn adds `more`."""
    kind = {"letters": LETTERS, "names": NAMES}[words]
    train = rows("train", num_train, kind, first, more, turns)
    held_out = rows("eval", num_eval, kind, first, more, turns)
    rubric = TurnRubric([in_order, exact], [1.0, 0.0])
    return AlphabetSort(train, turns, eval_dataset=held_out, rubric=rubric, system_prompt=system_prompt)
