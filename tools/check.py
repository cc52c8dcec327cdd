"""What would spoil a run, found before its first step: `bash launch.sh config.toml --check` starts this in place of
trainer.py, with servers up and after orchestrator.py has looked at the environments. A line per check, PASS or FAIL
with what to change; exit code 2 or 3 where training is impossible or would be wrong, 4 where a task teaches little.

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
from configs.algorithms.sleep import asleep

import orchestrator
import trainer
from configs import arguments
from env import load_environment
from tools.watch import judge, say, tell

NO_MEMORY = ("out of memory", "can't allocate memory", "not enough memory")
LESS_MEMORY = "lower trainer.micro_batch_size or max_seq_len, or set trainer.gradient_checkpointing, "
LESS_MEMORY += "offload_optimizer or use_lora, or raise trainer.gpus"
NUM_ROWS = 8  # of each environment: enough for 0 % and 80 %, little enough for half a minute


@contextlib.contextmanager
def passes(what, remedy=""):
    """What fails inside is told with its remedy, and ends the run; else what the block put into its list."""
    done = []
    try:
        yield done
    except (RunError, RuntimeError) as e:  # CUDA's OutOfMemoryError is one of the latter
        if any(text in str(e) for text in NO_MEMORY):
            remedy = LESS_MEMORY
        elif not isinstance(e, RunError):
            raise
        text = " ".join(str(e).split())[:600]
        tell(False, f"{what}: {text}", remedy)
        raise RunError(getattr(e, "code", 2), f"{what}: {text}; {remedy}") from e
    if dist.get_rank() == 0:
        tell(True, f"{what}{': ' if done else ''}{', '.join(done)}")


# --- memory -----------------------------------------------------------------------------------------------------------


def longest_batch(cfg, vocab):
    """For every rank two full micro-batches: rows of max_seq_len, of which all but the first token is trained."""
    length, num = cfg.run.max_seq_len, 2 * cfg.trainer.micro_batch_size * dist.get_world_size()
    tokens = torch.randint(vocab, (num * length,), generator=torch.Generator().manual_seed(0), dtype=torch.int32)
    columns = {
        "tokens": tokens,
        "mask": (torch.arange(length) > 0).repeat(num),
        "old_logp": torch.full((num * length,), torch.nan),
        "turn": torch.zeros(num * length, dtype=torch.int32),
    }
    about = {"reward": 0.5, "age": 0.0, "temperature": cfg.sampling.temperature, "num_turns": 1.0, "truncated": 0.0}
    columns |= {name: torch.full((num * length,), value) for name, value in about.items()}
    samples = [{"group": 0, "rollout": i, "reward": i % 2, "num_turns": 1} for i in range(num)]
    info = {"rollouts": num, "max_tokens": length}
    return trainer.Batch(columns, torch.full((num,), length), samples, info)


def check_memory(policy, cfg):
    """Two steps of two of the largest micro-batches at a learning rate of 0: the second step's second one runs beside
    Adam's state and the first one's gradients, as all do later."""
    t = cfg.trainer._replace(learning_rate=0.0, weight_decay=0.0, updates_per_batch=1)
    optimizer = trainer.make_optimizer(policy, t)
    idle = type(cfg)(**vars(cfg) | {"trainer": t})
    batch = longest_batch(cfg, policy.model.config.get_text_config().vocab_size)
    tokens = t.micro_batch_size * cfg.run.max_seq_len
    what = f"a micro-batch of {tokens:,} tokens (trainer.micro_batch_size x max_seq_len) fits in memory"
    try:
        with passes(what) as done:
            for _ in range(2):
                metrics, _ = trainer.train_step(policy, optimizer, batch, 0, idle)
            peak = metrics["perf/peak_gib"]  # of CUDA
            done.append(f"{f'{peak:.1f} GiB, ' * (peak > 0)}{metrics['time/train_s'] / 2:.1f} s")
    except KeyError as e:  # a column that an environment adds is not here
        if dist.get_rank() == 0:
            say(f"check: SKIP {what}: trainer.loss = {t.loss!r} wants {e}, which no batch made here has")


# --- broadcast --------------------------------------------------------------------------------------------------------


def check_sync(sender, policy, cfg):
    """Versions 0 (the weights), 1 (other ones) and 2 (the weights again) to the servers, which must follow.

    Version 0 alone would pass without a broadcast: it is what the servers loaded by themselves. So the trainer's
    weights are disturbed until its logprobs are far from the servers', by far more than publish() allows."""
    params = [trainer.local(p.data) for p in trainer.trained(policy).values()]
    anything = type(cfg)(**vars(cfg) | {"trainer": cfg.trainer._replace(max_sync_dlogp=1e9)})
    enough = 0.02 if cfg.trainer.dtype == "fp32" else 0.2  # nats
    torch.manual_seed(cfg.run.seed)
    remedy = "compare the versions of torch, transformers and vLLM with requirements-*.txt, and the servers' flags"
    with passes(
        "a broadcast moves the servers as predicted, and trainer and servers agree on logprobs", remedy
    ) as done:
        trainer.publish(sender, policy, 0, cfg)
        kept, noise, moved = [p.to("cpu", copy=True) for p in params], 0.1, torch.zeros(1)
        while moved < enough and noise < 10:
            for p in params:
                spread = p.float().std(correction=0).item() if p.numel() else 0.0
                p.add_(torch.randn_like(p) * (noise * (spread or 0.2)))  # LoRA's B is 0
            noise *= 2
            metrics = trainer.canary(sender, policy, 0, anything)
            moved[0] = metrics.get("sync/dlogp_mean", 0.0)
            dist.broadcast(moved, 0)
            beat()
        metrics = trainer.publish(sender, policy, 1, cfg)
        for p, values in zip(params, kept):
            p.copy_(values)
        trainer.publish(sender, policy, 2, cfg)
        if sender:
            diff, seconds = metrics["sync/dlogp_max"], metrics["time/sync_s"]
            done.append(f"by {moved.item():.2f} nats, to within {diff:.1e}, in {seconds:.1f} s")


# --- the task ---------------------------------------------------------------------------------------------------------


def check_template(tokenizer, envs, cfg):
    """Does the prompt of a second turn begin with that of the first and what was answered? If not, turns fork."""
    several = [env for env in envs.values() if type(env).__name__ != "SingleTurnEnv"]
    if not tokenizer.chat_template or not several:
        return tell(True, "chat template keeps its prefix: not needed, one turn")
    answer, is_ok = "<think>\nWhy?\n</think>\n\nSo.", True
    for env in several:
        first = [{"role": "user", "content": "What?"}]
        said, reply = {"role": "assistant", "content": answer}, {"role": "user", "content": "And?"}
        if env.tools:  # with an id as strict templates want it
            function = {"name": env.tools[0]["function"]["name"], "arguments": {}}
            said |= {"tool_calls": [{"id": "call12345", "type": "function", "function": function}]}
            reply = {"role": "tool", "tool_call_id": "call12345", "content": "And?"}
        how = {
            "tokenize": False,
            "add_generation_prompt": True,
            "tools": env.tools,
            **cfg.sampling.chat_template_kwargs,
        }
        one, two = (tokenizer.apply_chat_template(m, **how) for m in (first, [*first, said, reply]))
        is_ok &= two.startswith(one) and answer in two
    remedy = "each turn will be a sample of its own: correct, but slower (rollout/forks); set chat_template to "
    return tell(is_ok, "chat template keeps its prefix", remedy + "one that keeps earlier answers as they were")


async def check_rollouts(envs, cfg):
    """Some rows of each environment, as training would sample them."""
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(256))  # for blocking user code
    client, is_ok, slots = orchestrator.Client(cfg), True, asyncio.Semaphore(NUM_ROWS)
    client.version = 2  # which check_sync left live
    for name, env in envs.items():
        rows = env.dataset[:: max(1, len(env.dataset) // NUM_ROWS)][:NUM_ROWS]

        async def group(i, row, env=env):
            ask = functools.partial(orchestrator.sample, client, i)
            size = cfg.orchestrator.rollouts_per_example
            rollouts = await orchestrator.run_group(env, row, size, ask, 0, cfg, slots)
            beat()
            return [vars(r) for r in rollouts]

        is_ok &= judge(name, await asyncio.gather(*(group(i, row) for i, row in enumerate(rows))))
    await client.session.close()
    return is_ok


def check_task(cfg):
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(cfg.run.model)
    if cfg.run.chat_template:
        tokenizer.chat_template = Path(cfg.run.chat_template).read_text()
    envs = {e.name: load_environment(e.id, e.args) for e in cfg.env}
    is_ok = check_template(tokenizer, envs, cfg)
    is_ok &= asyncio.new_event_loop().run_until_complete(check_rollouts(envs, cfg))  # user code may hang in threads
    if not is_ok:
        raise RunError(4, "a check failed: see the lines that begin with check: FAIL")


def main(argv):
    cfg = arguments(__doc__, argv)
    trainer.start_distributed(cfg)
    policy = trainer.build_policy(cfg)
    with passes("the policy, in training and in rectangles, is the model's own forward, a row at a time"):
        trainer.check_policy(policy, cfg)
    is_first = dist.get_rank() == 0
    sender = trainer.WeightSender(cfg, run_directory(cfg), policy.device) if is_first else None
    with asleep(sender if cfg.inference.sleep else None):  # as in a step of the run
        check_memory(policy, cfg)
    check_sync(sender, policy, cfg)
    if is_first:
        check_task(cfg)
    dist.destroy_process_group()


if __name__ == "__main__":
    run_role("trainer", main)
