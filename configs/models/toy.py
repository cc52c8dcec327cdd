"""Makes a tiny character-level model for a task, without a network: python configs/models/toy.py config.toml

It is a Qwen3 of about 1M parameters whose chat template has one token per role. trainer.py --replay warms it up on the
task's demonstrations(): enough to get some answers right, so that RL has something to reinforce. launch.sh runs this
script, a TOML's `prepare`, if the model's directory does not exist yet. README.md, beside this file, says what a task
of your own needs for it."""

import hashlib
import importlib
import inspect
import math
import os
import re
import shutil
import subprocess
import sys
import traceback
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from configs import DEFAULTS, arguments, load_config, to_toml
from configs.models.demonstrations import as_demonstration, tokenize_conversation
from configs.runtime.role import CONFIG, DATA, DIED, NUMERICS, STORAGE, RunError, require, run_role
from env import load_environment
from orchestrator import save_batch

BATCH_SIZE = 64  # demonstrations per step of the warm-up
WARM_UP_STEPS = 95  # unless the task says otherwise
NUM_TESTED = 64  # unseen demonstrations on which the model is tested
# Tool calls are written as Qwen writes them, which vLLM's "hermes" parser reads. The tools' schemas are left out: at
# one token per character they would fill most of the prompt, and the warm-up has shown the model which tools exist.
TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content or '' }}"
    "{% for c in m.tool_calls or [] %}<tool_call>\n"
    '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}'
    "\n</tool_call>{% endfor %}<|end|>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
# Keys of [trainer] that belong to the reinforcement learning that comes later; the warm-up uses their defaults.
RL_KEYS = (
    "optimizer",
    "loss",
    "loss_args",
    "importance",
    "importance_args",
    "beta",
    "ref_sync_steps",
    "gamma",
    "updates_per_batch",
    "minibatches",
    "replicas",
)


def make_tokenizer(tokens=()):
    """Returns a tokenizer with one token per printable ASCII character, one per role, and the strings in `tokens`."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    special = ["<|end|>", "<|pad|>", "<|system|>", "<|user|>", "<|assistant|>", "<|tool|>", "<unk>"]
    printable = [chr(code) for code in range(32, 127)]
    vocab = {token: i for i, token in enumerate([*special, "\n", *printable])}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in tokens])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|end|>",
        pad_token="<|pad|>",
        unk_token="<unk>",
        additional_special_tokens=special[2:6],
    )
    fast.chat_template = TEMPLATE
    return fast


def make_model(path, tokenizer, layers=4, hidden=128, tied=False, seed=0, vocab=0, **more):
    """Saves a Qwen3 with random weights and its tokenizer. more: further fields of its Qwen3Config."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(seed)
    shape = {
        "intermediate_size": 3 * hidden,
        "num_attention_heads": hidden // 32,
        "num_key_value_heads": hidden // 64,
        "head_dim": 32,
        "max_position_embeddings": 512,
    }
    config = Qwen3Config(
        vocab_size=vocab or len(tokenizer),
        hidden_size=hidden,
        num_hidden_layers=layers,
        tie_word_embeddings=tied,
        bos_token_id=None,
        eos_token_id=0,
        pad_token_id=1,
        **(shape | more),
    )
    Qwen3ForCausalLM(config).save_pretrained(path)
    tokenizer.save_pretrained(path)


def load_task(cfg):
    """Returns the first environment's module, after it has loaded every environment: fail now, not after minutes.

    Raises RunError: with CONFIG if there is no such module, otherwise with DATA or the code of the task's own error."""
    for env in cfg.env:
        try:
            load_environment(env.id, env.args)
        except Exception as e:  # from the task's own code
            traceback.print_exc()
            is_missing = isinstance(e, ModuleNotFoundError) and e.name.split(".")[-1] == name_of(env.id)
            code = CONFIG if is_missing else getattr(e, "code", DATA)
            code = code if code in (CONFIG, DATA) else DATA
            raise RunError(code, f"env.id = {env.id!r}: {type(e).__name__}: {e}") from e
    name = name_of(cfg.env[0].id)
    ours = f"configs.tasks.{name}"
    task = importlib.import_module(name if find_spec(name) else ours)
    return task if hasattr(task, "load_environment") else importlib.import_module(ours)  # as in env.load_environment


def name_of(env_id):
    """The module's name: my_env for the id org/my-env."""
    return env_id.rsplit("/", 1)[-1].replace("-", "_")


def write_demonstrations(path, tokenizer, demonstrations, batch_size=BATCH_SIZE):
    """Writes batch files of conversations whose assistant's tokens are to be imitated."""
    path.mkdir(parents=True)
    for step in range(len(demonstrations) // batch_size):
        sequences = []
        for messages in demonstrations[step * batch_size : (step + 1) * batch_size]:
            sequences += map(as_demonstration, tokenize_conversation(tokenizer, messages))
        save_batch(path / f"step_{step:06d}.safetensors", sequences, {"step": step, "offline": True})


def warm_up(config, work, steps, more):
    """Runs trainer.py on the demonstrations in `work` and returns the directory of the model."""
    cfg = load_config(config)
    cfg.flat |= {f"trainer.{name}": DEFAULTS[f"trainer.{name}"] for name in RL_KEYS}
    cfg.flat |= {
        "model": str(work / "random"),
        "output_dir": str(work),
        "run_name": "warmup",
        "max_steps": steps,
        "trainer.use_lora": False,
        "trainer.dtype": "fp32",
        "trainer.learning_rate": 1e-3,
        "trainer.lr_scheduler_type": "linear",
        "trainer.compile": False,
        "checkpoint.every": 0,
    }
    file = work / "warmup.toml"
    file.write_text(to_toml(cfg))
    command = [sys.executable, str(ROOT / "trainer.py"), str(file), *more, "--replay", str(work / "batches")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, errors="replace") as process:
        show_progress(process.stdout, steps)
    code = process.returncode
    exit_code = code if code in (CONFIG, DATA, NUMERICS, STORAGE) else DIED
    require(code == 0, exit_code, f"the warm-up of the toy model ended with exit code {code}")
    return work / f"warmup-replay-{DEFAULTS['trainer.loss']}" / "final"


def show_progress(output, steps):
    """Prints the trainer's lines, indented, since the console shows those that begin with `step`: they would look like
    the run's. At each tenth of the steps it prints a line for the console."""
    for line in output:
        print(f"    {line}", end="", flush=True)
        found = re.match(r"step +(\d+) \| (loss \S+)", line)
        if found:
            done = int(found[1]) + 1
            if done * 10 // steps > (done - 1) * 10 // steps:
                print(f"time: warm-up: {done} of {steps} steps are done, {found[2]}", flush=True)


def rates(model, talks):
    """What a model has learned from other demonstrations than these: how likely it says all answers of one exactly as
    shown, on average, and how many of their tokens. Both for sampling at temperature 1 after what is shown before."""
    import torch
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(model)
    policy = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    by_talk = []
    by_token = []
    for talk in talks:
        total = 0.0
        for sequence in tokenize_conversation(tokenizer, talk):
            ids = torch.tensor(sequence["tokens"])
            is_said = torch.tensor(sequence["mask"][1:]) > 0
            with torch.no_grad():
                logits = policy(ids[None, :-1]).logits[0]
            logp = logits.log_softmax(-1).gather(1, ids[1:, None])
            said = logp[is_said, 0]
            total += said.sum().item()
            by_token += said.exp().tolist()
        by_talk.append(math.exp(total))
    return sum(by_talk) / len(by_talk), sum(by_token) / len(by_token)


def report_rates(model, task, demonstrations):
    """Prints what the model does on demonstrations that it was not trained on."""
    seen = set(map(str, demonstrations))
    more = task.demonstrations(len(demonstrations) + 4 * NUM_TESTED)
    unseen = [talk for talk in more if str(talk) not in seen][-NUM_TESTED:]
    if not unseen:
        print("result: warm-up: demonstrations() has none that was not trained on, so the model was not tested")
        return
    whole, tokens = rates(model, unseen)
    shown = (
        f"{whole:.3f} of {len(unseen)} unseen demonstrations are answered exactly as shown, and {tokens:.3f} of their"
    )
    print(f"result: warm-up: {shown} tokens (at temperature 1, each token after the right ones before it)", flush=True)


def checksums(task, make):
    """What a model is made from, as sha256sum writes it: this folder, the script, and the task's module, with what it
    has imported from its own folder and from configs/tasks/. Paths start at the repository's directory."""
    files = {Path(inspect.getsourcefile(make)).resolve()}
    folders = [Path(task.__file__).resolve().parent, ROOT / "configs" / "tasks", ROOT / "configs" / "models"]
    for module in list(sys.modules.values()):
        path = Path(getattr(module, "__file__", None) or "").resolve()
        if path.parent in folders and path.is_file():
            files.add(path)
    text = ""
    for path in sorted(files):
        name = path.relative_to(ROOT) if path.is_relative_to(ROOT) else path
        text += f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {name}\n"
    return text


def main(argv, make=make_model, more=(), steps=None):
    """argv: config.toml [table.key=value ...]; makes the directory `model`, or makes it again if it was made from other
    code. more: overrides of the warm-up; steps: its length, if it is not the task's.

    The file `made_from` in it holds checksums: `sha256sum -c` in the repository's directory says FAILED if the code has
    changed since."""
    cfg = arguments(__doc__, argv)
    task = load_task(cfg)
    problem = f"prepare = {cfg.run.prepare!r}: {task.__name__} has no demonstrations() to warm a model up on"
    require(hasattr(task, "demonstrations"), CONFIG, problem)
    model = Path(cfg.run.model)
    made_from = checksums(task, make)
    file = model / "made_from"
    is_ours = file.exists() or not model.exists()
    require(is_ours, CONFIG, f"model = {cfg.run.model!r} exists and has no file made_from: remove it to make it again")
    if file.exists() and file.read_text() == made_from:
        print(f"{model} is up to date")
        return
    steps = steps or getattr(task, "WARM_UP_STEPS", WARM_UP_STEPS)
    demonstrations = task.demonstrations(steps * BATCH_SIZE)

    work = Path(f"{model}.work")
    shutil.rmtree(work, ignore_errors=True)
    tokenizer = make_tokenizer(getattr(task, "TOKENS", ()))
    make(work / "random", tokenizer)
    write_demonstrations(work / "batches", tokenizer, demonstrations)
    final = warm_up(cfg.run.origin, work, steps, more)
    report_rates(final, task, demonstrations)
    (final / "made_from").write_text(made_from)
    shutil.rmtree(model, ignore_errors=True)  # one from other code
    os.rename(final, model)
    shutil.rmtree(work)


if __name__ == "__main__":
    run_role("prepare", "configs.models.toy")
