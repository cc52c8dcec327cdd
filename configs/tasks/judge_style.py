"""RLAIF: make up a word with many a's, as a language model judges it. No reward but one for the first letters is exact.

The rule is simple so that one sees what a judge is worth: true_score, which only logs, counts the letters."""

import random

from configs.environments.judge import JudgeRubric
from env import Rubric, SingleTurnEnv

CONSONANTS, VOWELS, OTHERS = "bcdfghjklmnprstvwz", "aeiou", "bcdefghiklmnoprstuvwz"
TEMPLATE = "score {completion}"  # as the toy's warm-up has it
SCALE, MOST = 10, 5  # 2 points for each a, up to MOST of them
NUM_EVAL = 18
TOKENS = ["<score>", "</score>"]  # of the toy model's vocabulary; the rest is spelled out
WARM_UP_STEPS = 300


def rows():
    """A row for each consonant and vowel that a word may begin with, in one fixed shuffle."""
    starts = [c + v for c in CONSONANTS for v in VOWELS]
    random.Random("judge_style").shuffle(starts)
    return [{"question": f"word {start}", "answer": start} for start in starts]


def text_of(completion):
    return completion[-1]["content"] or ""


def true_score(completion):
    """The rule itself."""
    return min(text_of(completion).count("a"), MOST) / MOST


def first_letters(completion, answer):
    return float(text_of(completion).startswith(answer))


def made_up(rng, start, num_a):
    """A word with `num_a` a's after its start, and up to three other letters."""
    letters = ["a"] * num_a + [rng.choice(OTHERS) for _ in range(rng.randint(1, 3))]
    rng.shuffle(letters)
    return start + "".join(letters)


def demonstrations(num):
    """For the supervised warm-up of the toy model, by turns: it writes words, mostly poor ones, and judges all."""
    rng, talks, starts = random.Random(0), [], [row["answer"] for row in rows()[NUM_EVAL:]]
    for i in range(num):
        if i % 2:
            start = rng.choice(starts)
            asked, reply = f"word {start}", made_up(rng, start, rng.choice([0, 0, 0, 1, 1, 2, 3]))
        else:
            word = made_up(rng, rng.choice(CONSONANTS) + rng.choice(VOWELS), rng.randint(0, MOST + 2))
            asked = TEMPLATE.format(completion=word)
            reply = f"<score>{SCALE * true_score([{'content': word}]):.0f}</score>"
        talks.append([{"role": "user", "content": asked}, {"role": "assistant", "content": reply}])
    return talks


def load_environment(
    judge_models=(), base_url="", template=TEMPLATE, max_tokens=16, max_concurrent=32, num_eval=NUM_EVAL, **judge
):
    """Without judge_models and base_url the policy's own server judges, while training. max_tokens: of the judge's
    reply, with whatever it reasons first. judge: more of Judge's arguments (configs/environments/judge.py)."""
    judge = {"judge_models": judge_models, "base_url": base_url, "template": template, "scale": SCALE} | judge
    score = JudgeRubric(sampling={"max_tokens": max_tokens}, max_concurrent=max_concurrent, **judge)
    rubric = Rubric([first_letters, true_score], [0.2, 0.0], rubrics=[score])
    return SingleTurnEnv(rows()[num_eval:], rows()[:num_eval], rubric=rubric)
