"""Makes a model of Qwen3-0.6B's shape with random weights, without a hub: python configs/models/shaped.py config.toml

For memory and speed: what it learns says nothing about Qwen3. It has the toy models' characters, and names that no
text matches for the other ids; the warm-up on the task's demonstrations lets rewards differ. SHAPE=toy: a small one."""

import json
import os

from configs import run_role
from configs.models import toy as tiny_model

SHAPES = {  # layers, hidden, inner, heads, key-value heads, head_dim, vocabulary
    "0.6B": (28, 1024, 3072, 16, 8, 128, 151936),
    "toy": (2, 64, 128, 2, 1, 32, 1000),
}


def make_shaped(path, tokenizer):
    layers, hidden, inner, heads, kv, dim, vocab = SHAPES[os.environ.get("SHAPE", "0.6B")]
    tiny_model.make_model(
        path, tokenizer, layers, hidden, tied=True, vocab=vocab, intermediate_size=inner, num_attention_heads=heads,
        num_key_value_heads=kv, head_dim=dim, max_position_embeddings=40960,
    )  # fmt: skip
    file = path / "tokenizer.json"
    about = json.loads(file.read_text())
    known = set(about["model"]["vocab"].values()) | {token["id"] for token in about["added_tokens"]}
    about["model"]["vocab"] |= {f"<{i}>": i for i in range(vocab) if i not in known}
    file.write_text(json.dumps(about))


def main(argv):
    is_toy = os.environ.get("SHAPE") == "toy"
    tiny_model.main(argv, make_shaped, [] if is_toy else ["trainer.dtype=bf16", "trainer.learning_rate=2e-4"])


if __name__ == "__main__":
    run_role("prepare", main)
