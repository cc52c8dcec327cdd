"""Pre-flight: what would spoil a run, found before step 1. A line per check, PASS or FAIL with what to change.

What makes training wrong or impossible ends the run; a task that teaches little only with --check, which ends then."""

import asyncio
import contextlib
import functools

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from configs.lib.batch import Batch
from configs.lib.order import Order
from configs.lib.runtime import RunError

NO_MEMORY = ("out of memory", "can't allocate memory", "not enough memory")
LESS_MEMORY = "lower trainer.micro_batch_size or max_seq_len, or set trainer.gradient_checkpointing, "
LESS_MEMORY += "offload_optimizer or use_lora, or raise trainer.gpus"
NUM_ROWS = 8  # for the baseline: enough for 0 % and 80 %, little enough for half a minute


def tell(is_ok, what, remedy=""):
    print(f"check: {'PASS' if is_ok else 'FAIL'} {what}" + (f"; {remedy}" if remedy and not is_ok else ""), flush=True)
    return is_ok


@contextlib.contextmanager
def passes(rank, what, remedy=""):
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
        raise RunError(getattr(e, "code", 2), f"pre-flight: {what}: {text}; {remedy}") from e
    if rank == 0:
        tell(True, f"{what}{': ' if done else ''}{', '.join(done)}")


# --- the trainer's part: collective -----------------------------------------------------------------------------------


def longest_batch(cfg, world, vocab):
    """For every rank two full micro-batches: rows of max_seq_len, of which all but the first token is trained."""
    length, num = cfg.run.max_seq_len, 2 * cfg.trainer.micro_batch_size * world
    tokens = torch.randint(vocab, (num * length,), generator=torch.Generator().manual_seed(0), dtype=torch.int32)
    mask, adv = (torch.arange(length) > 0).repeat(num), torch.tensor([1.0, -1.0]).repeat(num)[:num]
    unknown, zero = torch.full((num * length,), torch.nan), torch.zeros(num * length, dtype=torch.int32)
    info = {"rollouts": num, "max_tokens": length}
    lens = torch.full((num,), length)
    return Batch(tokens, mask, unknown, adv.repeat_interleave(length), zero, lens, [{}] * num, info)


def check_memory(train_step, policy, ref, optimizer, cfg, rank, world, device):
    """Two steps of two of the largest micro-batches at a learning rate of 0: the second step's second one runs beside
    Adam's state and the first one's gradients, as all do later."""
    trainer = cfg.trainer._replace(learning_rate=0.0, weight_decay=0.0, updates_per_batch=1)
    idle = type(cfg)(**vars(cfg) | {"trainer": trainer})
    batch = longest_batch(cfg, world, policy.model.config.get_text_config().vocab_size)
    tokens = cfg.trainer.micro_batch_size * cfg.run.max_seq_len
    what = f"a micro-batch of {tokens:,} tokens (trainer.micro_batch_size x max_seq_len) fits in memory"
    with passes(rank, what) as done:
        for _ in range(2):
            metrics, _ = train_step(policy, ref, optimizer, batch, 0, idle, rank, world, device)
        done.append(f"{metrics['perf/peak_gib']:.1f} GiB, {metrics['time/train_s'] / 2:.1f} s")


def check_sync(publish, canary_logp, sender, policy, cfg, rank, device):
    """Other weights, broadcast as version -1, which nobody samples from: the server must move as the trainer says.

    The first real version is the very model that the server loaded by itself, so it would pass without a broadcast.
    The noise grows until the canary moves by far more than the difference that a broadcast is allowed."""
    params = [p.data for p in policy.parameters() if p.requires_grad]
    params = [p.to_local() if isinstance(p, DTensor) else p for p in params]
    kept = [p.to("cpu", copy=True) for p in params]
    noise, moved, before = 0.1, 0.0, canary_logp(policy, cfg, device)[1]
    torch.manual_seed(cfg.run.seed)
    what = "a broadcast moves the servers as predicted, and trainer and servers agree on logprobs"
    remedy = "compare the versions of torch, transformers and vLLM with requirements-*.txt, and the servers' flags"
    with passes(rank, what, remedy) as done:
        while moved < (0.02 if cfg.trainer.dtype == "fp32" else 0.2) and noise < 10:
            for p in params:
                spread = p.float().std(correction=0).item() if p.numel() else 0.0
                p.add_(torch.randn_like(p) * (noise * (spread or 0.2)))  # LoRA's B is 0
            after = canary_logp(policy, cfg, device)[1]
            mine = torch.tensor(sum(abs(a - b) for a, b in zip(after, before)) / len(after))
            dist.broadcast(mine, 0)  # ranks of other kernels must not go on by themselves
            noise, moved = 2 * noise, mine.item()
        metrics = publish(sender, policy, -1, 0, cfg, rank, device)
        if rank == 0:
            diff = metrics["sync/dlogp_max"]
            done.append(f"by {moved:.2f} nats, to within {diff:.1e}, in {metrics['time/sync_s']:.1f} s")
    for p, values in zip(params, kept):
        p.copy_(values)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()  # the console's peak is training's own


# --- the orchestrator's part ------------------------------------------------------------------------------------------


def check_template(client, envs):
    """Does the prompt of a second turn begin with that of the first and what was answered? If not, turns fork."""
    several = [env for env in envs.values() if type(env).__name__ != "SingleTurnEnv"]
    if not client.tokenizer.chat_template or not several:
        return tell(True, "chat template keeps its prefix: not needed, one turn")
    answer, ok = "<think>\nWhy?\n</think>\n\nSo.", True
    render = functools.partial(client.tokenizer.apply_chat_template, tokenize=False, add_generation_prompt=True)
    for env in several:
        first = [{"role": "user", "content": "What?"}]
        said, reply = {"role": "assistant", "content": answer}, {"role": "user", "content": "And?"}
        if env.tools:  # with an id as strict templates want it
            function = {"name": env.tools[0]["function"]["name"], "arguments": {}}
            said |= {"tool_calls": [{"id": "call12345", "type": "function", "function": function}]}
            reply = {"role": "tool", "tool_call_id": "call12345", "content": "And?"}
        more = [*first, said, reply]
        one, two = (render(m, tools=env.tools, **client.cfg.sampling.chat_template_kwargs) for m in (first, more))
        ok &= two.startswith(one) and answer in two
    remedy = "each turn will be a sample of its own: correct, but slower (rollout/forks); set chat_template to "
    return tell(ok, "chat template keeps its prefix", remedy + "one that keeps earlier answers as they were")


def check_baseline(name, groups):
    """Rollouts of some rows: can anything be learned from them?"""
    rollouts = [r for group in groups for r in group]
    rewards = [[r.reward for r in group if r.reward is not None] for group in groups]
    scored = [x for group in rewards for x in group]
    if not scored:
        what = f"{name}: none of {len(rollouts)} rollouts was scored: {sorted({r.error for r in rollouts})}"
        return tell(False, what, "see logs/orchestrator.log")
    mean, cut = sum(scored) / len(scored), sum(r.truncated for r in rollouts) / len(rollouts)
    low, high = min(scored), max(scored)
    if 0 <= low and high <= 1:
        solved = mean
    else:  # another scale: how many reach the highest; where all are equal, one of 1 or more counts as solved
        solved = scored.count(high) / len(scored) if low < high else float(high >= 1)
    varied = sum(len(set(group)) > 1 for group in rewards)
    about = f"{name}: reward {mean:.3f} ({low:.3g} to {high:.3g}) of {len(scored)} rollouts"
    easier = "too hard: take easier rows (env.args), a stronger model, a finer reward, or demonstrations first"
    harder = 'too easy: take harder rows (env.args), or orchestrator.buffer = "online-difficulty" and retire_after'
    more = "raise orchestrator.rollouts_per_example or sampling.temperature, or make the reward finer"
    longer = "raise orchestrator.sampling.max_tokens or max_seq_len, or reward brevity"
    return all([
        tell(solved > 0, f"{about}: some of it is solved", easier),
        tell(solved < 0.8, f"{about}: less than 80 % is solved", harder),
        tell(varied > len(groups) / 10, f"{name}: rewards differ within {varied} of {len(groups)} groups", more),
        tell(cut <= 0.5, f"{name}: {cut:.0%} of the rollouts are cut off", longer),
    ])  # fmt: skip


def watch_first(name, seen, rollouts, num):
    """A run judges the first groups of its first batch that end, which costs nothing; seen: those before."""
    seen.append(rollouts)
    if len(seen) == min(NUM_ROWS, num):
        check_baseline(name, seen)


async def check_task(run_group, sample, envs, client, cfg):
    """--check: template, and some rows of each environment at version 0. RunError 4 where a check fails."""
    await client.until(0)
    ok = check_template(client, envs)
    for name, env in envs.items():
        order, n = Order(env.dataset, cfg), cfg.orchestrator.rollouts_per_example
        rows = [env.dataset[order.row(i)] for i in range(min(NUM_ROWS, len(env.dataset)))]
        asks = [functools.partial(sample, client, i) for i in range(len(rows))]
        jobs = [run_group(env, row, n, ask, 0, cfg) for row, ask in zip(rows, asks)]
        ok &= check_baseline(name, await asyncio.gather(*jobs))
    if not ok:
        raise RunError(4, "pre-flight: a check failed, see above")
