"""wiki_search by agents that frameworks make, each a command in a venv of its own: tests/frameworks/."""

import json
import tempfile
from pathlib import Path

from wiki_agent import PAGES, TOKENS, correct, demonstrations  # noqa: F401  the toy model's maker asks for two of them

from configs.environments.agents import AgentEnv
from configs.tasks import wiki_search
from env import Rubric

AGENTS = Path(__file__).parent / "frameworks"
FAULT = 17


def said_something(result):
    return float(bool(result))


def letters(completion):
    """Equal for two answers of a random model one time in seven."""
    return sum(map(ord, completion[-1]["content"] or "")) % 7


def load_environment(program, agent, num_rows=100, max_turns=4):
    env = wiki_search.load_environment(num_eval=200 - num_rows, max_turns=max_turns)
    file = tempfile.NamedTemporaryFile("w", suffix=".json", delete=False)
    with file:
        json.dump(PAGES, file)
    command = [program, AGENTS / agent, "{question}", file.name]
    rubric = Rubric([correct, letters, said_something], [1.0, 0.1, 0.0])
    return AgentEnv(command, env.dataset, allow_code=True, rubric=rubric, forgive=[FAULT], max_requests=6)
