"""RLAIF: make up a word with many a's; a language model judges how many there are. Only the reward for the first
letters is exact.

The rule is simple, so that one can see how good the judge is: true_score, which is only logged, counts the letters."""

import random

from configs.environments.judge import Judge
from configs.tasks.reverse_text import CONSONANTS, VOWELS
from env import Messages, Rubric, SingleTurnEnv

OTHERS = "bcdefghiklmnoprstuvwz"
TEMPLATE = "score {completion}"  # the warm-up teaches the toy model to answer it
SCALE = 10  # the most points
MOST = 5  # a's that score
NUM_EVAL = 18
TOKENS = ["<score>", "</score>"]  # tokens of the toy model; it spells everything else
WARM_UP_STEPS = 300


def rows() -> list[dict]:
    """A row for each consonant and vowel that a word may begin with, always in the same shuffled order."""
    starts = [c + v for c in CONSONANTS for v in VOWELS]
    random.Random("judge_style").shuffle(starts)
    return [{"question": f"word {start}", "answer": start} for start in starts]


def true_score(completion: Messages) -> float:
    """The share of the points that the word deserves by the rule."""
    return min(completion[-1]["content"].count("a"), MOST) / MOST


def first_letters(completion: Messages, answer: str) -> float:
    return float(completion[-1]["content"].startswith(answer))


def made_up(rng: random.Random, start: str, num_a: int) -> str:
    """A word with `num_a` a's after its start, and one to three other letters."""
    letters = ["a"] * num_a + [rng.choice(OTHERS) for _ in range(rng.randint(1, 3))]
    rng.shuffle(letters)
    return start + "".join(letters)


def demonstrations(num: int) -> list[Messages]:
    """Conversations for the toy model's supervised warm-up: it judges any word, and writes a mostly poor one, by
    turns."""
    rng = random.Random(0)
    starts = [row["answer"] for row in rows()[NUM_EVAL:]]
    talks = []
    for i in range(num):
        if i % 2:
            start = rng.choice(starts)
            question = f"word {start}"
            reply = made_up(rng, start, rng.choice([0, 0, 0, 1, 1, 2, 3]))
        else:
            start = rng.choice(CONSONANTS) + rng.choice(VOWELS)
            word = made_up(rng, start, rng.randint(0, MOST + 2))
            question = TEMPLATE.format(completion=word)
            points = SCALE * true_score([{"content": word}])
            reply = f"<score>{points:.0f}</score>"
        talks.append([{"role": "user", "content": question}, {"role": "assistant", "content": reply}])
    return talks


def load_environment(num_eval=NUM_EVAL, **judge) -> SingleTurnEnv:
    """judge: arguments of Judge in configs/environments/judge.py. Without judge_models and base_url the policy's own
    server is the judge, which works only while training."""
    judge = {"template": TEMPLATE, "scale": SCALE, "sampling": {"max_tokens": 16}} | judge
    rubric = Rubric([first_letters, true_score, Judge(**judge)], [0.2, 0.0, 1.0])
    return SingleTurnEnv(rows()[num_eval:], rows()[:num_eval], rubric=rubric)
