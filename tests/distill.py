"""A task whose environment adds a field of its own, and the loss that uses it; for test_trainer.py.

A teacher that likes vowels gives each sampled token a log-probability (of no distribution, but a field all the same),
and the loss pulls the policy's log-probability toward it."""

from env import Rubric, SingleTurnEnv

VOWELS = [8 + ord(c) - 32 for c in "aeiouAEIOU"]  # ids of the toy model's characters


class Taught(SingleTurnEnv):
    def add_fields(self, state, sequences):
        for s in sequences:
            said = zip(s["tokens"], s["mask"])
            s["teacher_logp"] = [(-2.5 if token in VOWELS else -6.0) if sampled else 0.0 for token, sampled in said]


def letters(completion):
    return sum(map(ord, completion[-1]["content"]))


def load_environment():
    return Taught([{"question": f"hello {i}"} for i in range(16)], rubric=Rubric([letters]))


def loss(micro, logp_N, entropy_N):
    gap_N = logp_N - micro["teacher_logp_N"]
    return gap_N**2, {"teacher/gap": gap_N.abs()}
