"""An environment written for the package verifiers, as its users write them; only the words are ours."""

import difflib

import verifiers as vf
from datasets import Dataset

from configs.tasks import reverse_text
from configs.tasks.reverse_text import demonstrations  # noqa: F401  for the toy's warm-up


def load_environment(num_train=2048, num_eval=64) -> vf.Environment:
    parser = vf.Parser()

    def similarity(completion, answer, parser):
        found = parser.parse_answer(completion) or ""
        return difflib.SequenceMatcher(None, found, answer).ratio()

    def exact(completion, answer, parser):
        return float(parser.parse_answer(completion) == answer)

    rubric = vf.Rubric(funcs=[similarity, exact], weights=[0.5, 0.5], parser=parser)
    train = Dataset.from_list(reverse_text.rows("train", num_train))
    held_out = Dataset.from_list(reverse_text.rows("eval", num_eval))
    return vf.SingleTurnEnv(dataset=train, eval_dataset=held_out, parser=parser, rubric=rubric)
