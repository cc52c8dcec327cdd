"""Makes a tiny character-level model for a task, without a network: python configs/models/toy.py config.toml

A Qwen3 of about 1M parameters with a chat template of one token per role, warmed up on the task's demonstrations()
through trainer.py --replay with loss=sft: enough to get some answers right, so that RL has something to reinforce.
launch.sh runs it as a TOML's `prepare` where the model is not there yet."""

import importlib
import json
import os
import shutil
import subprocess
import sys
import traceback
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from configs import DEFAULTS, RunError, arguments, run_role
from env import load_environment
from orchestrator import extend_or_fork, save_batch

BATCH_SIZE = 64  # demonstrations per step of the warm-up
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


def make_model(path, tokenizer, layers=4, hidden=128, tied=False, seed=0, vocab=0, **more):
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(seed)
    shape = {"intermediate_size": 3 * hidden, "num_attention_heads": hidden // 32, "num_key_value_heads": hidden // 64}
    shape |= {"head_dim": 32, "max_position_embeddings": 512} | more
    config = Qwen3Config(
        vocab_size=vocab or len(tokenizer), hidden_size=hidden, num_hidden_layers=layers, tie_word_embeddings=tied,
        bos_token_id=None, eos_token_id=0, pad_token_id=1, **shape,
    )  # fmt: skip
    Qwen3ForCausalLM(config).save_pretrained(path)
    tokenizer.save_pretrained(path)


def tokenize_conversation(tokenizer, messages, tools=None, first=0, **template_kwargs):
    """A conversation that no policy of ours sampled -> samples as orchestrator.py makes them. Loss tokens are those of
    the assistant's messages from number `first` on, each message a turn.

    Their old_logp is nan: nobody knows it. What a template writes after the end-of-sequence token (a newline, mostly)
    was never the policy's to say."""

    def ids_of(part, **more):
        part = [as_template_sees(message) for message in part]
        return tokenizer.apply_chat_template(part, tools=tools, return_dict=False, **template_kwargs, **more)

    samples = []
    said = [i for i, message in enumerate(messages) if message["role"] == "assistant" and i >= first]
    for turn, i in enumerate(said):
        prompt_ids = ids_of(messages[:i], add_generation_prompt=True)
        ids = ids_of(messages[: i + 1])
        if ids[: len(prompt_ids)] != prompt_ids:
            raise ValueError(f"the chat template writes message {i} otherwise than its generation prompt begins it")
        ids = ids[len(prompt_ids) :]
        if tokenizer.eos_token_id in ids:
            ids = ids[: ids.index(tokenizer.eos_token_id) + 1]
        extend_or_fork(samples, prompt_ids, ids, [float("nan")] * len(ids), turn)
    return samples


def as_template_sees(message):
    """A message in OpenAI's format as vLLM hands it to the chat template: arguments of tool calls are objects."""
    message = dict(message)
    if message.get("reasoning"):
        message["reasoning_content"] = message["reasoning"]
    if message.get("tool_calls"):
        message["tool_calls"] = [with_object(call) for call in message["tool_calls"]]
    return message


def with_object(call):
    """A tool call whose arguments, JSON text, are read; what is no JSON object becomes an empty one."""
    try:
        value = json.loads(call["function"]["arguments"])
    except json.JSONDecodeError:
        value = {}
    value = value if isinstance(value, dict) else {}
    return call | {"function": call["function"] | {"arguments": value}}


def load_task(cfg):
    """-> the module of the first environment. What is wrong with one is told before the minutes that follow: RunError 2
    where there is no such module, else 4, or the code that the task's own error has."""
    names = [env.id.rsplit("/", 1)[-1].replace("-", "_") for env in cfg.env]
    for name, env in zip(names, cfg.env):
        try:
            load_environment(env.id, env.args)
        except Exception as e:  # the task's own code
            traceback.print_exc()
            is_missing = isinstance(e, ModuleNotFoundError) and e.name == name
            code = 2 if is_missing else getattr(e, "code", 4)
            what = f"env.id = {env.id!r}: {type(e).__name__}: {e}"
            raise RunError(code if code in (2, 4) else 4, what) from e
    return importlib.import_module(names[0])


def write_demonstrations(path, tokenizer, demonstrations, batch_size=BATCH_SIZE):
    """Conversations -> batch files with the assistant's tokens as loss tokens."""
    path.mkdir(parents=True)
    for step in range(len(demonstrations) // batch_size):
        talks = demonstrations[step * batch_size : (step + 1) * batch_size]
        samples = [sample for talk in talks for sample in tokenize_conversation(tokenizer, talk)]
        save_batch(path / f"step_{step:06d}.safetensors", samples, {"step": step, "offline": True})


def warm_up(config, work, steps, more):
    """trainer.py on the demonstrations in `work` -> directory of the model. What the TOML says of the reinforcement
    learning that comes later is not for these."""
    rl = "optimizer importance importance_low importance_high beta ref_sync_steps gamma updates_per_batch replicas"
    rl += " epsilon epsilon_high delta ratio_cap icepop_low dppo_mask dppo_kl"
    overrides = [f"trainer.{name}={json.dumps(DEFAULTS[f'trainer.{name}'])}" for name in rl.split()] + [
        f"model={work / 'random'}",
        f"output_dir={work}",
        "run_name=warmup",
        f"max_steps={steps}",
        "trainer.loss=sft",
        "trainer.use_lora=false",
        "trainer.dtype=fp32",
        "trainer.learning_rate=1e-3",
        "trainer.lr_scheduler_type=linear",
        "trainer.compile=false",
        "checkpoint.every=0",
        *more,
    ]
    command = [sys.executable, str(ROOT / "trainer.py"), str(config), *overrides, "--replay", str(work / "batches")]
    code = subprocess.run(command).returncode
    if code:
        raise RunError(code if code in (2, 4, 5, 6) else 3, f"the warm-up of the toy model ended with exit code {code}")
    return work / "warmup-replay-sft" / "final"


def main(argv, make=make_model, more=()):
    """argv: config.toml [table.key=value ...]; makes the directory `model`. more: overrides of the warm-up."""
    cfg = arguments(__doc__, argv)
    task = load_task(cfg)
    if not hasattr(task, "demonstrations"):
        raise RunError(
            2, f"prepare = {cfg.run.prepare!r}: {task.__name__} has no demonstrations() to warm a model up on"
        )
    steps = getattr(task, "WARM_UP_STEPS", 95)
    demonstrations = task.demonstrations(steps * BATCH_SIZE)

    model = Path(cfg.run.model)
    work = Path(f"{model}.work")
    shutil.rmtree(work, ignore_errors=True)
    tokenizer = make_tokenizer(getattr(task, "TOKENS", ()))
    make(work / "random", tokenizer)
    write_demonstrations(work / "batches", tokenizer, demonstrations)
    final = warm_up(cfg.run.origin, work, steps, more)
    os.rename(final, model)
    shutil.rmtree(work)


if __name__ == "__main__":
    run_role("prepare", main)
