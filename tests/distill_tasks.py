"""Tasks for tests of distillation: no reward, one turn or several, and prompts for a teacher."""

from think_env import Turns, noise

from configs.environments.echo import echo
from env import Rubric, SingleTurnEnv


def nothing():
    return 0.0


def hint(state):
    return [{"role": "system", "content": "psst"}, *state["prompt"], {"role": "user", "content": state["answer"]}]


def sibling(state, states):
    """The longest answer of the group."""
    best = max(states, key=lambda other: len(other["completion"][-1]["content"]))
    return [*state["prompt"], best["completion"][-1]]


def fails(state):
    raise LookupError("no hint")


def load_environment(kind="single"):
    rows = [{"question": f"hello {i}", "answer": str(i)} for i in range(37)]
    if kind == "echo":
        return echo(Turns(rows, max_turns=3, rubric=Rubric([noise])), 0.25)
    if kind == "turns":
        return Turns(rows, max_turns=3, rubric=Rubric([nothing]))
    return SingleTurnEnv(rows, rows[:3], rubric=Rubric([nothing]))
