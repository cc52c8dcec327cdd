"""RLAIF: make up a word with many a's; a language model judges how many there are. Only the reward for the first
letters is exact.

The rule is simple, so that one can see how good the judge is: true_score, which is only logged, counts the letters."""

import random

from configs.environments.judge import JudgeRubric
from env import Rubric, SingleTurnEnv

CONSONANTS = "bcdfghjklmnprstvwz"
VOWELS = "aeiou"
OTHERS = "bcdefghiklmnoprstuvwz"
TEMPLATE = "score {completion}"  # the warm-up teaches the toy model to answer it
SCALE = 10  # points at most
MOST = 5  # a's that score
NUM_EVAL = 18
TOKENS = ["<score>", "</score>"]  # tokens of the toy model; it spells out everything else
WARM_UP_STEPS = 300


def rows():
    """A row for each consonant and vowel that a word may begin with, always in the same shuffled order."""
    starts = [c + v for c in CONSONANTS for v in VOWELS]
    random.Random("judge_style").shuffle(starts)
    return [{"question": f"word {start}", "answer": start} for start in starts]


def text_of(completion):
    return completion[-1]["content"] or ""


def true_score(completion):
    """The share of points that the word deserves by the rule."""
    return min(text_of(completion).count("a"), MOST) / MOST


def first_letters(completion, answer):
    return float(text_of(completion).startswith(answer))


def made_up(rng, start, num_a):
    """A word with `num_a` a's after its start, and one to three other letters."""
    letters = ["a"] * num_a + [rng.choice(OTHERS) for _ in range(rng.randint(1, 3))]
    rng.shuffle(letters)
    return start + "".join(letters)


def demonstrations(num):
    """Conversations for the toy model's supervised warm-up: in turn, it judges any word and writes a mostly poor
    one."""
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


def load_environment(
    judge_models=(), base_url="", template=TEMPLATE, max_tokens=16, max_concurrent=32, num_eval=NUM_EVAL, **judge
):
    """Without judge_models and base_url the policy's own server is the judge, which works only while training.
    max_tokens: for the judge's reply, including its reasoning. judge: further arguments of Judge
    (configs/environments/judge.py)."""
    judge = {"scale": SCALE} | judge
    score = JudgeRubric(
        judge_models=judge_models,
        base_url=base_url,
        template=template,
        max_concurrent=max_concurrent,
        sampling={"max_tokens": max_tokens},
        **judge,
    )
    rubric = Rubric([first_letters, true_score], [0.2, 0.0], rubrics=[score])
    return SingleTurnEnv(rows()[num_eval:], rows()[:num_eval], rubric=rubric)
