"""Makes a model of Qwen3-0.6B's shape with random weights, without a hub: python configs/models/shaped.py config.toml

It is for measuring memory and speed: what it learns says nothing about Qwen3. Its tokens are the characters of the toy
models; all other ids have names that match no text. It is warmed up on the task's demonstrations, so that rewards
differ."""

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import toy

from rolemodel.role import run_main

QWEN3 = {"layers": 28, "hidden": 1024, "intermediate_size": 3072, "num_attention_heads": 16, "num_key_value_heads": 8}
QWEN3 |= {"head_dim": 128, "vocab": 151936, "max_position_embeddings": 40960}


def make_shaped(path: Path, tokenizer):
    """Saves the model, and a tokenizer that has a name for each id of the large vocabulary."""
    toy.make_model(path, tokenizer, tied=True, **QWEN3)
    file = path / "tokenizer.json"
    tokens = json.loads(file.read_text())
    known = {*tokens["model"]["vocab"].values(), *(token["id"] for token in tokens["added_tokens"])}
    tokens["model"]["vocab"] |= {f"<{i}>": i for i in range(QWEN3["vocab"]) if i not in known}
    file.write_text(json.dumps(tokens))


def main(argv):
    # After the toy's 95 steps, a model of this size would answer 99% of reverse_text, and the rewards in a group would
    # not differ.
    toy.main(argv, make_shaped, ["trainer.dtype=bf16", "trainer.learning_rate=2e-4"], steps=50)


if __name__ == "__main__":
    run_main("prepare", main)
