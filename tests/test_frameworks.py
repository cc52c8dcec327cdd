"""Agents as people write them, on the real vLLM through launch.sh: the stock openai client, and four frameworks and a
shell script as commands. Long: a venv with all of them is made first."""

import json
import subprocess
import sys

import pytest
import torch
from conftest import ROOT, all_batches, launch, lines
from transformers import AutoModelForCausalLM

pytestmark = [pytest.mark.long, pytest.mark.real]
FRAMEWORKS = ROOT / "tests" / "frameworks"
SMALL = ["max_steps=5", "eval.every=0", "orchestrator.batch_size=16", "orchestrator.rollouts_per_example=4"]


@pytest.fixture(scope="module")
def python(tmp_path_factory):
    """The interpreter of a venv with the frameworks."""
    path = tmp_path_factory.mktemp("frameworks")
    subprocess.run([sys.executable, "-m", "venv", path], check=True)
    pip = [path / "bin" / "pip", "install", "-q", "-r", FRAMEWORKS / "requirements.txt"]
    subprocess.run(pip, check=True, capture_output=True)
    return path / "bin" / "python"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """wiki_search's toy, which knows how to search."""
    path = tmp_path_factory.mktemp("model") / "wiki"
    maker = [sys.executable, "configs/models/toy.py", "configs/wiki_search.toml", f"model={path}"]
    subprocess.run(maker, cwd=ROOT, check=True, capture_output=True)
    config = json.loads((path / "config.json").read_text())
    config["max_position_embeddings"] = 8192  # frameworks have long prompts
    (path / "config.json").write_text(json.dumps(config))
    return path


@pytest.fixture
def train(tmp_path, model):
    """train("env.id=...", ...): five steps of wiki_search's toy with another environment."""

    def go(*overrides):
        more = [f"model={model}", f"output_dir={tmp_path}", "run_name=run"]
        launch(ROOT / "configs" / "wiki_search.toml", *SMALL, *more, *overrides, timeout=900, SERVER="")
        check(tmp_path / "run", model)

    return go


def check(run_dir, model):
    """Nothing is lost, and what is trained on is what the policy sampled."""
    rollouts = lines(run_dir / "rollouts.jsonl")
    metrics = lines(run_dir / "metrics.jsonl")
    assert len(metrics) == 5 and not any(r["error"] for r in rollouts), {r["error"] for r in rollouts}
    assert metrics[0]["policy/kl_sampler"] < 1e-6
    network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    for s in all_batches(run_dir)[0].sequences:
        with torch.no_grad():
            logits = network(s["tokens"][None].long()).logits[0, :-1]
        logp = logits.log_softmax(-1).gather(-1, s["tokens"][1:, None].long())[:, 0]
        is_own = s["mask"][1:].bool()
        assert (logp - s["old_logp"][1:])[is_own].abs().max() < 1e-4
    turns = [r["num_turns"] for r in rollouts]
    forks = sum(m["rollout/forks"] for m in metrics)
    print(f"{len(rollouts)} rollouts, {sum(turns) / len(turns):.2f} turns, {forks} forks", end=" ")
    print({name: value for name, value in metrics[-1].items() if "agent_" in name})


def test_the_stock_client_with_tools(train):
    train("env.id=wiki_agent", "env.args={}")


@pytest.mark.parametrize("agent", ["openai_agents.py", "pydantic_typed.py", "langgraph_react.py", "smol.py"])
def test_a_framework(python, train, agent):
    room = 8192 if agent == "smol.py" else 1024  # its own prompt has 5,000 characters, which are tokens of the toy
    args = f'env.args={{ program = "{python}", agent = "{agent}" }}'
    train("env.id=framework_tasks", args, f"max_seq_len={room}", "trainer.micro_batch_size=1")


def test_a_shell_script(train):
    train("env.id=framework_tasks", 'env.args={ program = "bash", agent = "ask.sh" }')
