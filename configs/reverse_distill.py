"""reverse_text without rewards in the gradient: a teacher, which reads the answer before the word, scores each letter
(rolemodel/teacher.py). The rewards are only measured."""

import reverse_text

from env import Messages, SingleTurnEnv
from rolemodel.teacher import taught

WARM_UP_STEPS = 240


def hint(state: dict) -> Messages:
    """Returns the messages that the teacher reads in place of the prompt."""
    return with_answer(state["prompt"][-1]["content"], state["answer"])


def with_answer(word: str, answer: str) -> Messages:
    return [{"role": "system", "content": answer}, {"role": "user", "content": word}]


def demonstrations(num: int) -> list[Messages]:
    """Returns conversations for the toy model's warm-up. One in 128 reverses a word. In the others, an answer is given
    and has to be copied. It is the answer to another word, so these show nothing about reversing."""
    rows = reverse_text.rows("warmup", num)
    talks = []
    for i, row in enumerate(rows):
        question = [{"role": "user", "content": row["question"]}]
        answer = row["answer"]
        if i % 128:
            answer = rows[i - 1]["answer"]
            question = with_answer(row["question"], answer)
        talks.append([*question, {"role": "assistant", "content": answer}])
    return talks


def load_environment(**args) -> SingleTurnEnv:
    return taught(reverse_text.load_environment(**args), weight=1.0, prompt=hint)
