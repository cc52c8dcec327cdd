"""Makes a tiny character-level model for a task, without a network: python configs/tiny_model.py config.toml

A Qwen3 of about 1M parameters with a chat template of one token per role, warmed up on the task's demonstrations()
through trainer.py --replay with loss=sft: enough to get some answers right, so that RL has something to reinforce."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))
# Tool calls are written as Qwen writes them, which vLLM's "hermes" parser reads. The tools' schemas are left out: at a
# token per character they would be most of the prompt, and the warm-up has shown the model what there is.
TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content or '' }}"
    "{% for c in m.tool_calls or [] %}<tool_call>\n"
    '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}'
    "\n</tool_call>{% endfor %}<|end|>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def make_tokenizer(tokens=()):
    """One token per printable ASCII character, one per role, no merges but the strings in `tokens`."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    special = ["<|end|>", "<|pad|>", "<|system|>", "<|user|>", "<|assistant|>", "<|tool|>", "<unk>"]
    vocab = {token: i for i, token in enumerate(special + ["\n"] + [chr(c) for c in range(32, 127)])}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in tokens])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|end|>", pad_token="<|pad|>", unk_token="<unk>",
        additional_special_tokens=special[2:6],
    )  # fmt: skip
    fast.chat_template = TEMPLATE
    return fast


def make_model(path, tokenizer, layers=4, hidden=128, tied=False, seed=0, vocab=0):
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=vocab or len(tokenizer), hidden_size=hidden, intermediate_size=3 * hidden, num_hidden_layers=layers,
        num_attention_heads=hidden // 32, num_key_value_heads=hidden // 64, head_dim=32, max_position_embeddings=512,
        tie_word_embeddings=tied, bos_token_id=None, eos_token_id=0, pad_token_id=1,
    )  # fmt: skip
    Qwen3ForCausalLM(config).save_pretrained(path)
    tokenizer.save_pretrained(path)


def write_demonstrations(path, tokenizer, demonstrations, batch_size):
    """Conversations -> batch files with the assistant's tokens as loss tokens."""
    from configs.lib.batch import save_batch
    from configs.lib.text import tokenize_conversation

    path.mkdir(parents=True, exist_ok=True)
    for n in range(len(demonstrations) // batch_size):
        talks = demonstrations[n * batch_size : (n + 1) * batch_size]
        samples = [s | {"advantage": 1.0} for talk in talks for s in tokenize_conversation(tokenizer, talk)]
        save_batch(path / f"step_{n:06d}.safetensors", samples, {"step": n, "offline": True})


def main(config, batch_size=64):
    from configs.lib.runtime import load_config
    from env import load_environment  # noqa: F401  the task's module imports it

    cfg = load_config(config)
    model, work = Path(cfg.run.model), Path(cfg.run.model + ".work")
    shutil.rmtree(work, ignore_errors=True)
    sys.path.insert(0, str(cfg.path.parent))
    task = __import__(cfg.env[0].id)
    steps = getattr(task, "WARM_UP_STEPS", 95)
    tokenizer = make_tokenizer(getattr(task, "TOKENS", ()))
    make_model(work / "random", tokenizer)
    write_demonstrations(work / "demonstrations", tokenizer, task.demonstrations(steps * batch_size), batch_size)
    overrides = [
        f"model={work / 'random'}", f"output_dir={work}", "run_name=warmup", f"max_steps={steps}", "trainer.loss=sft",
        "trainer.use_lora=false", "trainer.dtype=fp32", "trainer.learning_rate=1e-3",
        "trainer.lr_scheduler_type=linear",
        "checkpoint.every=0",
    ]  # fmt: skip
    command = [sys.executable, "trainer.py", config, *overrides, "--replay", str(work / "demonstrations")]
    subprocess.run(command, cwd=ROOT, check=True, env=os.environ | {"PYTHONPATH": str(ROOT)})
    model.parent.mkdir(parents=True, exist_ok=True)
    os.rename(work / "warmup-replay-sft" / "final", model)
    shutil.rmtree(work)


if __name__ == "__main__":
    main(sys.argv[1])
