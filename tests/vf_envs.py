"""Environments written for the real verifiers package, and the same three written for ours: kind -> Environment."""

import numpy as np
import verifiers as vf
from datasets import Dataset

import env as ours
from configs.environments.tools import ToolEnv

ROWS = [{"question": f"row {i}", "answer": str(i), "info": {"number": i}} for i in range(13)]


def letters(completion):
    last = completion[-1]
    text = last["content"] if isinstance(last, dict) else last.content
    return float(sum(map(ord, text or "")) % 7)


def number(info):
    return float(info["number"])


async def sometimes(answer):
    if int(answer) % 3 == 0:
        raise ValueError("user code fails")
    return 1.0


def nothing(answer):
    return None if int(answer) % 3 == 0 else 1.0


def array(answer):
    return np.array([float(answer)])


def listed(answer):
    return [0.5]


def step(answer):
    """A name that metrics of the run have."""
    return 1.0


CLEANED = []


class Cleans(vf.Rubric):
    @vf.cleanup
    async def clean(self, state):
        CLEANED.append(state["answer"])


class Fails(vf.MultiTurnEnv):
    async def env_response(self, messages, state, **kwargs):
        raise vf.ToolError("the tool is gone")


def spread(completions):
    return [float(i) for i in range(len(completions))]


def double(a: int) -> str:
    """Double a number.

    Args:
        a: the number
    """
    return str(2 * a)


class Turns(vf.MultiTurnEnv):
    async def env_response(self, messages, state, **kwargs):
        return [{"role": "user", "content": f"turn {len(state['trajectory'])}"}]


class OurTurns(ours.MultiTurnEnv):
    def env_response(self, messages, state):
        return [{"role": "user", "content": f"turn {state['turn']}"}]


def load_environment(kind="single"):
    data = {"dataset": Dataset.from_list(ROWS), "eval_dataset": Dataset.from_list(ROWS[:2]), "system_prompt": "S"}
    mine = {"dataset": ROWS, "eval_dataset": ROWS[:2], "system_prompt": "S"}
    rubric, same = vf.Rubric([letters, number], [1.0, 0.5]), ours.Rubric([letters, number], [1.0, 0.5])
    match kind:
        case "single":
            return vf.SingleTurnEnv(**data, rubric=rubric)
        case "our single":
            return ours.SingleTurnEnv(**mine, rubric=same)
        case "multi":
            return Turns(**data, rubric=rubric, max_turns=3)
        case "our multi":
            return OurTurns(**mine, rubric=same, max_turns=3)
        case "tool":
            return vf.ToolEnv(**data, tools=[double], rubric=rubric, max_turns=3)
        case "our tool":
            # verifiers takes a call that the server cannot read for an answer; ours would tell the policy
            return ToolEnv(**mine, tools=[double], rubric=same, max_turns=3, call_tag="never")
        case "raises":
            return vf.SingleTurnEnv(**data, rubric=vf.RubricGroup([rubric, vf.Rubric([sometimes])]))
        case "nothing":
            return vf.SingleTurnEnv(**data, rubric=vf.Rubric([letters, nothing]))
        case "array":
            limits = {"stop": ["e"], "max_tokens": 3}
            return vf.SingleTurnEnv(**data, rubric=vf.Rubric([letters, array, step]), sampling_args=limits)
        case "listed":
            return vf.SingleTurnEnv(**data, rubric=vf.Rubric([listed]))
        case "no rewards":
            env = vf.SingleTurnEnv(**data)
            env.rubric = vf.Rubric()
            return env
        case "fails":
            return Fails(**data, rubric=Cleans([letters]), max_turns=3)
        case "group":
            return vf.SingleTurnEnv(**data, rubric=vf.Rubric([letters, spread]))
        case "env group":
            tools = vf.ToolEnv(**data, tools=[double], rubric=rubric, max_turns=2)
            return vf.EnvGroup([vf.SingleTurnEnv(**data, rubric=rubric), tools], env_names=["plain", "tools"])
        case "completion":
            return vf.SingleTurnEnv(dataset=Dataset.from_list(ROWS), rubric=rubric, message_type="completion")
    return object()
