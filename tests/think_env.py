"""An environment for runs of launch.sh, and templates that keep or drop earlier thoughts."""

import random

from env import MultiTurnEnv, Rubric, SingleTurnEnv

KEEPS = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
KEEPS += "{% if add_generation_prompt %}<|assistant|>{% endif %}"
# As Qwen3 and DeepSeek-R1 do it: only the last half of earlier answers is kept (a random model has no </think>).
DROPS = KEEPS.replace(
    "{{ m.content }}",
    "{% if m.role == 'assistant' %}{{ m.content[(m.content|length + 1) // 2:] }}{% else %}{{ m.content }}{% endif %}",
)


def rows(num, prompt="hello"):
    return [{"question": f"{prompt} {i}", "answer": str(i)} for i in range(num)]


class Turns(MultiTurnEnv):
    def env_response(self, messages, state):
        return [{"role": "user", "content": f"turn {state['turn']}"}]


def letters(completion):
    """Equal for two random answers one time in five."""
    return float(sum(map(ord, completion[-1]["content"])) % 5)


def noise(answer):
    """Two rollouts never get the same."""
    return float(answer) + random.random()


def chance(rewards, rollouts):
    """orchestrator.advantage: no group is flat, whatever a random model says."""
    return [random.random() for _ in rewards]


def load_environment(kind="turns", num_turns=4):
    if kind == "noise":
        return SingleTurnEnv(rows(37), rows(3), rubric=Rubric([noise]))
    return Turns(rows(37), eval_dataset=rows(3), max_turns=num_turns, rubric=Rubric([letters]))
