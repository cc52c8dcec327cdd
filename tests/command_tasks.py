"""Commands as agents, for tests: a shell script with curl, and the modes of command_agent.py."""

import random
from pathlib import Path

from configs.environments.agents import AgentEnv
from configs.environments.sandbox import find_python
from env import Rubric, SingleTurnEnv

PYTHON = [find_python()[0], "-I", "-S", "-c", Path(__file__).with_name("command_agent.py").read_text()]
SLEEP = [*PYTHON[:-1], "import time; time.sleep(3600)"]
CURL = r"""curl -sSf "$OPENAI_BASE_URL/chat/completions" -H "Content-Type: application/json" \
    -d "{\"messages\": [{\"role\": \"user\", \"content\": \"$1\"}], \"model\": \"m\"}" """
COMMANDS = {
    "curl": ["sh", "-c", CURL, "sh", "{prompt}"],
    "python": [*PYTHON, "turns", "{prompt}"],
    "mode": [*PYTHON, "{mode}", "{mark}"],
    "missing": ["no-such-agent"],
}
MODES = ["environment", "killed", "hangs", "leaves_a_daemon", "floods"]


def noise(answer):
    """Two rollouts never get the same."""
    return float(answer) + random.random()


def result(state):
    """Only so that a run shows what a command printed."""
    return float(len(state["result"] or ""))


def load_environment(kind, mark="", modes=MODES, num_rows=37, **options):
    rows = [{"question": f"hello {i}", "answer": str(i), "mark": mark} for i in range(num_rows)]
    for i, row in enumerate(rows):
        row["mode"] = modes[i % len(modes)]
    if kind == "single":
        return SingleTurnEnv(rows, rubric=Rubric([noise]))
    return AgentEnv(COMMANDS[kind], rows, rubric=Rubric([noise, result], [1, 0]), **options)
