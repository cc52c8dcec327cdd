"""Finds what would spoil a run before its first step. `bash launch.sh config.toml --check` starts this in place of
trainer.py, with servers up and after orchestrator.py has looked at the environments.

It prints a line per check: PASS, or FAIL with what to change. The exit code is 2 or 3 if training is impossible or
would be wrong, 4 if there is little to learn from a task, or if the chat template makes every turn fork.

    torchrun tools/check.py config.toml [table.key=value ...] max_steps=0"""

import asyncio
import contextlib
import functools
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import configs
import orchestrator
import trainer
from configs.runtime.directory import run_directory
from configs.runtime.role import CONFIG, DATA, RunError, heartbeat, require, run_role
from env import load_environment
from tools.advice import judge, report_check, say

NO_MEMORY = ("out of memory", "can't allocate memory", "not enough memory")
LESS_MEMORY = (
    "lower trainer.micro_batch_size or max_seq_len, or set trainer.gradient_checkpointing, offload_optimizer or "
    "use_lora, or raise trainer.gpus"
)
NUM_ROWS = 8  # of each environment: enough to tell 0 % from 80 %, few enough for half a minute


@contextlib.contextmanager
def passes(what, remedy=""):
    """Reports the check that runs inside: PASS with the details that it puts into the list, or FAIL with the remedy,
    which ends the run."""
    details = []
    try:
        yield details
    except (RunError, RuntimeError) as e:  # torch's OutOfMemoryError is a RuntimeError
        if any(text in str(e) for text in NO_MEMORY):
            remedy = LESS_MEMORY
        elif not isinstance(e, RunError):
            raise
        problem = " ".join(str(e).split())[:600]
        report_check(False, f"{what}: {problem}", remedy)
        text = f"{what}: {problem}; {remedy}" if remedy else f"{what}: {problem}"
        raise RunError(getattr(e, "code", CONFIG), text) from e
    if dist.get_rank() == 0:
        report_check(True, f"{what}: {', '.join(details)}" if details else what)


def with_trainer(cfg, **changes):
    """A copy of the configuration with other values in [trainer]."""
    return type(cfg)(**vars(cfg) | {"trainer": cfg.trainer._replace(**changes)})


# --- memory -----------------------------------------------------------------------------------------------------------


def longest_batch(cfg, vocab):
    """Two full micro-batches for each rank: sequences of max_seq_len, in which all tokens but the first are trained.

    The sequences are as load_batch returns them."""
    length = cfg.run.max_seq_len
    num = 2 * cfg.trainer.micro_batch_size * dist.get_world_size()
    draw = torch.Generator().manual_seed(0)
    sequences = []
    for i in range(num):
        sequence = {"env": "check", "example": 0, "group": 0, "rollout": i, "agent": "", "trainable": True}
        sequence |= {"reward": i % 2, "num_turns": 1, "num_tokens": length - 1, "truncated": False}
        sequence |= {"staleness": 0, "temperature": cfg.sampling.temperature, "baseline_key": ("check", 0, "")}
        sequence["tokens"] = torch.randint(vocab, [length], generator=draw, dtype=torch.int32)
        sequence["mask"] = torch.arange(length) > 0
        sequence["old_logp"] = torch.full([length], torch.nan)
        sequence["turn"] = torch.zeros(length, dtype=torch.int32)
        sequence["ce"] = sequence["teacher"] = torch.zeros(length)
        sequence["at"] = torch.arange(i * length, (i + 1) * length)
        sequences.append(sequence)
    return trainer.Batch(sequences, {"max_tokens": length, "num_tokens": num * length})


def check_memory(policy, cfg):
    """Takes two steps with two of the largest micro-batches each, at a learning rate of 0. The last micro-batch runs
    beside AdamW's state and gradients, as all later ones do. Returns the optimizer, whose state lives as long."""
    idle = with_trainer(cfg, learning_rate=0.0, weight_decay=0.0, updates_per_batch=1, minibatches=1)
    optimizer = trainer.make_optimizer(policy, idle.trainer)
    batch = longest_batch(cfg, policy.vocab)
    tokens = cfg.trainer.micro_batch_size * cfg.run.max_seq_len
    what = f"a micro-batch of {tokens:,} tokens (trainer.micro_batch_size x max_seq_len) fits in memory"
    try:
        with passes(what) as details:
            for _ in range(2):
                metrics, _ = trainer.train_step(policy, optimizer, batch, 0, idle)
            details += peak()
            details.append(f"{metrics['time/train_s'] / 2:.1f} s")
    except KeyError as e:  # a field that an environment adds, which no batch made here has
        if dist.get_rank() == 0:
            say(f"check: SKIP {what}: trainer.loss = {cfg.trainer.loss!r} needs {e}, which environments add")
    return optimizer


def peak():
    """The peak of the GPU's memory, in words, if there is a GPU."""
    if not torch.cuda.is_available():
        return []
    return [f"{torch.cuda.max_memory_allocated() / 2**30:.1f} GiB"]


# --- sync -------------------------------------------------------------------------------------------------------------


def disturb(params, noise):
    """Adds noise to all parameters, relative to how much each varies."""
    for p in params:
        spread = p.float().std(correction=0).item() if p.numel() else 0.0
        scale = noise * (spread or 0.2)  # LoRA's B is all 0
        p.add_(torch.randn_like(p) * scale)


def check_sync(sender, policy, optimizer, cfg):
    """Syncs versions 0 (the weights), 1 (disturbed ones) and 2 (the weights again); the servers must follow.

    Version 0 alone would pass without any sync, since the servers have loaded it by themselves. Version 1 is far enough
    from it, by the servers' own log-probabilities, to notice a server that has not followed. The optimizer is not used,
    but it must be alive: in a run its state is in memory during a sync as well."""
    params = [trainer.local(p.data) for p in policy.trained().values()]
    unlimited = with_trainer(cfg, max_sync_dlogp=1e9)
    enough = 0.02 if cfg.trainer.dtype == "fp32" else 0.2  # nats
    torch.manual_seed(cfg.run.seed)
    what = "a sync moves the servers as predicted, and trainer and servers agree on logprobs"
    remedy = "compare the versions of torch, transformers and vLLM with requirements-*.txt, and the servers' flags"
    with passes(what, remedy) as details:
        trainer.sync_weights(sender, policy, 0, cfg)
        kept = [p.to("cpu", copy=True) for p in params]
        noise = 0.1
        moved = torch.zeros(1)
        while moved < enough and noise < 10:
            disturb(params, noise)
            noise *= 2
            metrics = trainer.canary(sender, policy, 0, unlimited, None)
            moved[0] = metrics.get("sync/dlogp_mean", 0.0)
            dist.broadcast(moved, 0)
            heartbeat()
        metrics = trainer.sync_weights(sender, policy, 1, cfg)
        for p, saved in zip(params, kept):
            p.copy_(saved)
        trainer.sync_weights(sender, policy, 2, cfg)
        if sender:
            details.append(f"by {moved.item():.2f} nats, to within {metrics['sync/dlogp_max']:.1e}")
            details.append(f"in {metrics['time/sync_s']:.1f} s")
            details += peak()


# --- the task ---------------------------------------------------------------------------------------------------------


def example_turn(env):
    """A conversation of two turns, without its end: what the policy answers to it, and the reply to that."""
    answer = {"role": "assistant", "content": "<think>\nWhy?\n</think>\n\nSo."}
    reply = {"role": "user", "content": "And?"}
    if env.tools:
        function = {"name": env.tools[0]["function"]["name"], "arguments": {}}
        call = {"id": "call12345", "type": "function", "function": function}  # strict templates want nine characters
        answer["tool_calls"] = [call]
        reply = {"role": "tool", "tool_call_id": call["id"], "content": "And?"}
    return answer, reply


def check_template(tokenizer, envs, cfg):
    """Does the prompt of a second turn begin with that of the first and the answer to it? If not, rollouts fork."""
    several = [env for env in envs.values() if type(env).__name__ != "SingleTurnEnv"]
    if not tokenizer.chat_template or not several:
        return report_check(True, "chat template keeps its prefix: not needed, one turn")
    is_kept = True
    for env in several:
        question = {"role": "user", "content": "What?"}
        answer, reply = example_turn(env)
        options = {"tokenize": False, "add_generation_prompt": True, "tools": env.tools}
        options |= cfg.sampling.chat_template_kwargs
        first = tokenizer.apply_chat_template([question], **options)
        second = tokenizer.apply_chat_template([question, answer, reply], **options)
        is_kept = is_kept and second.startswith(first) and answer["content"] in second
    remedy = "each turn will be a sequence of its own, which is correct but slower (rollout/forks); set chat_template "
    return report_check(is_kept, "chat template keeps its prefix", remedy + "to one that keeps earlier answers")


async def check_rollouts(envs, cfg):
    """Judges some rows of each environment, sampled as in training."""
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(256))  # for user code that blocks
    client = orchestrator.Client(cfg)
    client.version = 2  # which check_sync left live
    places = asyncio.Semaphore(cfg.orchestrator.max_concurrent)
    size = cfg.orchestrator.rollouts_per_example
    is_right = True

    async def roll_out(env, i, row):
        ask = functools.partial(orchestrator.sample, client, i)
        rollouts = await orchestrator.run_group(env, row, size, ask, 0, cfg, places)
        heartbeat()
        return [vars(rollout) for rollout in rollouts]

    for name, env in envs.items():
        stride = max(1, len(env.dataset) // NUM_ROWS)
        rows = env.dataset[::stride][:NUM_ROWS]
        groups = await asyncio.gather(*(roll_out(env, i, row) for i, row in enumerate(rows)))
        is_right = judge(name, groups) and is_right
    await client.session.close()
    return is_right


def check_task(cfg):
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(cfg.run.model)
    if cfg.run.chat_template:
        tokenizer.chat_template = Path(cfg.run.chat_template).read_text()
    envs = {e.name: load_environment(e.id, e.args) for e in cfg.env}
    is_kept = check_template(tokenizer, envs, cfg)
    # The loop is never closed: that would wait for user code in threads.
    is_right = asyncio.new_event_loop().run_until_complete(check_rollouts(envs, cfg))
    require(is_kept and is_right, DATA, "a check failed: see the lines that begin with check: FAIL")


def main(argv):
    cfg = configs.arguments(__doc__, argv)
    trainer.start_distributed(cfg)
    policy = trainer.build_policy(cfg)
    with passes("the policy, training on padded rows, is the model's own forward, one row at a time"):
        trainer.check_policy(policy, cfg)
    is_first = dist.get_rank() == 0
    sender = None
    if is_first:
        sender = trainer.WeightSender(cfg, run_directory(cfg), policy.device)
        sender.connect()
    with trainer.servers_asleep(sender, cfg):  # as in a step of the run
        optimizer = check_memory(policy, cfg)
    check_sync(sender, policy, optimizer, cfg)
    if is_first:
        check_task(cfg)
    dist.destroy_process_group()


if __name__ == "__main__":
    run_role("trainer", "tools.check")
