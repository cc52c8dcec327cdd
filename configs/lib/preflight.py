"""Pre-flight: what would spoil a run, found before step 1. A line per check, PASS or FAIL with what to change.

What makes training wrong or impossible ends the run; a task that teaches little only with --check, which ends then."""

import asyncio
import contextlib
import functools

import torch

from configs.lib.batch import Batch
from configs.lib.runtime import RunError

NUM_ROWS = 8  # for the baseline: enough for 0 % and 80 %, little enough for half a minute


def tell(is_ok, what, remedy=""):
    print(f"check: {'PASS' if is_ok else 'FAIL'} {what}" + (f"; {remedy}" if remedy and not is_ok else ""), flush=True)
    return is_ok


@contextlib.contextmanager
def passes(rank, what, remedy):
    """What fails inside is told with its remedy, and ends the run; else what the block put into its list."""
    done = []
    try:
        yield done
    except (RunError, RuntimeError) as e:  # CUDA's OutOfMemoryError is one of the latter
        if not isinstance(e, RunError) and "memory" not in str(e):
            raise
        text = " ".join(str(e).split())[:600]
        tell(False, f"{what}: {text}", remedy)
        raise RunError(getattr(e, "code", 2), f"pre-flight: {what}: {text}; {remedy}") from e
    if rank == 0:
        tell(True, f"{what}{': ' if done else ''}{', '.join(done)}")


# --- the trainer's part: collective -----------------------------------------------------------------------------------


def longest_batch(cfg, world, vocab):
    """For every rank one micro-batch that is full: rows of max_seq_len, of which all but the first token is trained."""
    length, num = cfg.run.max_seq_len, cfg.trainer.micro_batch_size * world
    tokens = torch.randint(vocab, (num * length,), generator=torch.Generator().manual_seed(0), dtype=torch.int32)
    mask, adv = (torch.arange(length) > 0).repeat(num), torch.tensor([1.0, -1.0]).repeat(num)[:num]
    unknown, zero = torch.full((num * length,), torch.nan), torch.zeros(num * length, dtype=torch.int32)
    info = {"rollouts": num, "max_tokens": length}
    lens = torch.full((num,), length)
    return Batch(tokens, mask, unknown, adv.repeat_interleave(length), zero, lens, [{}] * num, info)


def check_memory(train_step, policy, ref, optimizer, cfg, rank, world, device):
    """A whole step of the largest micro-batch, Adam's state included, at a learning rate of 0."""
    idle = type(cfg)(**vars(cfg) | {"trainer": cfg.trainer._replace(learning_rate=0.0, weight_decay=0.0)})
    batch = longest_batch(cfg, world, policy.model.config.get_text_config().vocab_size)
    tokens = cfg.trainer.micro_batch_size * cfg.run.max_seq_len
    what = f"a micro-batch of {tokens:,} tokens (trainer.micro_batch_size x max_seq_len) fits in memory"
    remedy = (
        "lower trainer.micro_batch_size or max_seq_len, or set trainer.gradient_checkpointing, offload_optimizer or "
    )
    remedy += "use_lora, or raise trainer.gpus"
    with passes(rank, what, remedy) as done:
        metrics, _ = train_step(policy, ref, optimizer, batch, 0, idle, rank, world, device)
        done.append(f"{metrics['perf/peak_gib']:.1f} GiB, {metrics['time/train_s']:.1f} s")
    optimizer.state.clear()


def check_sync(publish, sender, policy, cfg, rank, device):
    """Other weights, broadcast as version -1, which nobody samples from: the server must move as the trainer says.

    The first real version is the very model that the server loaded by itself, so it would pass without a broadcast."""
    kept = [(p, p.detach().cpu().clone()) for p in policy.parameters() if p.requires_grad]
    torch.manual_seed(cfg.run.seed)
    what = "a broadcast moves the servers as predicted, and trainer and servers agree on logprobs"
    remedy = "compare the versions of torch, transformers and vLLM with requirements-*.txt, and the servers' flags"
    with passes(rank, what, remedy) as done:
        with torch.no_grad():
            for p, _ in kept:
                p.add_(torch.randn_like(p) * 0.02)
        metrics = publish(sender, policy, -1, 0, cfg, rank, device)
        with torch.no_grad():
            for p, values in kept:
                p.copy_(values)
        if rank == 0:
            done.append(f"largest difference {metrics['sync/dlogp_max']:.1e} nats, {metrics['time/sync_s']:.1f} s")


# --- the orchestrator's part ------------------------------------------------------------------------------------------


def check_template(client, envs):
    """Does the prompt of a second turn begin with that of the first and what was answered? If not, turns fork."""
    if not client.tokenizer.chat_template or all(type(env).__name__ == "SingleTurnEnv" for env in envs.values()):
        return tell(True, "chat template keeps its prefix: not needed, one turn")
    answer = "<think>\nWhy?\n</think>\n\nSo."
    first = [{"role": "user", "content": "What?"}]
    more = [*first, {"role": "assistant", "content": answer}, {"role": "user", "content": "And?"}]
    render = functools.partial(client.tokenizer.apply_chat_template, tokenize=False, add_generation_prompt=True)
    one, two = (render(m, **client.cfg.sampling.chat_template_kwargs) for m in (first, more))
    remedy = (
        "each turn will be a sample of its own: correct, but slower (rollout/forks); set chat_template to one that "
    )
    remedy += "keeps earlier answers as they were"
    return tell(two.startswith(one) and answer in two, "chat template keeps its prefix", remedy)


def check_baseline(name, groups):
    """Rollouts of some rows: can anything be learned from them?"""
    rollouts = [r for group in groups for r in group]
    rewards = [[r.reward for r in group if r.reward is not None] for group in groups]
    scored = [x for group in rewards for x in group]
    if not scored:
        errors = sorted({r.error for r in rollouts})
        return tell(
            False, f"{name}: none of {len(rollouts)} rollouts was scored: {errors}", "see logs/orchestrator.log"
        )
    mean, cut = sum(scored) / len(scored), sum(r.truncated for r in rollouts) / len(rollouts)
    low, high = min(scored), max(scored)
    solved = mean if 0 <= low and high <= 1 else scored.count(high) / len(scored)  # rewards may have any scale
    varied = sum(len(set(group)) > 1 for group in rewards)
    about = f"{name}: reward {mean:.3f} ({low:.3g} to {high:.3g}) of {len(scored)} rollouts"
    easier = "too hard: take easier rows (env.args), a stronger model, a finer reward, or demonstrations first"
    harder = 'too easy: take harder rows (env.args), or orchestrator.buffer = "online-difficulty" and retire_after'
    ok = tell(high > 0 or low < 0, f"{about}: not all 0", easier)
    ok &= tell(solved < 0.8, f"{about}: under 80 % solved", harder)
    more = "raise orchestrator.rollouts_per_example or sampling.temperature, or make the reward finer"
    ok &= tell(varied > len(groups) / 10, f"{name}: rewards differ within {varied} of {len(groups)} groups", more)
    longer = "raise orchestrator.sampling.max_tokens or max_seq_len, or reward brevity"
    return ok & tell(cut <= 0.5, f"{name}: {cut:.0%} of the rollouts are cut off", longer)


async def check_task(run_group, sample, envs, client, cfg):
    """--check: template, and the first rows of each environment at version 0. RunError 4 where a check fails. (A run
    looks at the groups of its first batch instead, which cost nothing.)"""
    await client.until(0)
    ok = check_template(client, envs)
    for name, env in envs.items():
        asks = [functools.partial(sample, client, i) for i in range(min(NUM_ROWS, len(env.dataset)))]
        n = cfg.orchestrator.rollouts_per_example
        jobs = [run_group(env, env.dataset[i], n, ask, 0, cfg) for i, ask in enumerate(asks)]
        ok &= check_baseline(name, await asyncio.gather(*jobs))
    if not ok:
        raise RunError(4, "pre-flight: a check failed, see above")
