"""reverse_text without a reward in the gradient: a teacher scores each letter (configs/algorithms/distill.py), and
reads the answer before the word. Rewards only measure."""

from configs.tasks import reverse_text

WARM_UP_STEPS = 240


def hint(state):
    """What the teacher reads: teacher.prompt."""
    return with_answer(state["prompt"][-1]["content"], state["answer"])


def with_answer(word, answer):
    return [{"role": "system", "content": answer}, {"role": "user", "content": word}]


def demonstrations(num):
    """One in 128 reverses a word. The others show that an answer is to be copied: it is another word's, so that they
    teach nothing about reversing."""
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


load_environment = reverse_text.load_environment
