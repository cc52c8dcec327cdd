"""Beside the loop: evaluate a model before anything is trained, make data with it, turn data into batches.

    python orchestrator.py config.toml --eval [--base-url URL] [--model NAME] [--n 50] [--rollouts-per-example 4]
    python orchestrator.py config.toml --generate 1000 out.jsonl [--base-url URL] [--model NAME]
    python orchestrator.py config.toml --offline out.jsonl [--min-reward 0.5]

Any OpenAI-compatible endpoint will do; the key comes from OPENAI_API_KEY. --offline needs no server: lines with prompt,
completion and reward become batch files for trainer.py --replay, with trainer.loss=sft as demonstrations."""

import argparse
import asyncio
import json
import math
import os
import time
from collections import Counter
from pathlib import Path

import orchestrator
from configs.lib.metrics import eval_metrics, function_means, pass_at, wilson
from configs.lib.offline import write_offline
from configs.lib.process import UserThreads
from configs.lib.runtime import RunError, load_config
from env import load_environment
from trainer import compute_advantages


def arguments(argv):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config")
    parser.add_argument("overrides", nargs="*", metavar="table.key=value")
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--eval", action="store_true", help="on the eval split, or the dataset where there is none")
    what.add_argument("--generate", nargs=2, metavar=("N", "OUT"), help="N rollouts of the dataset as JSON Lines")
    what.add_argument("--offline", type=Path, metavar="FILE", help="JSON Lines -> batch files")
    parser.add_argument("--base-url", help="default: OPENAI_BASE_URL, else the server of the configuration")
    parser.add_argument("--model", help="default: the first that the server lists")
    parser.add_argument("--n", type=int, help="examples; default: eval.num_examples, else all")
    parser.add_argument("--rollouts-per-example", type=int, help="k; default: eval's, or with --generate training's")
    parser.add_argument("--out", type=Path, help="with --eval: the rollouts as JSON Lines")
    parser.add_argument("--min-reward", type=float, default=-math.inf, help="--offline leaves lines below it out")
    args = parser.parse_intermixed_args(argv)
    return args, load_config(args.config, args.overrides)


# --- rollouts against any server --------------------------------------------------------------------------------------


def connect(args, cfg):
    import openai

    urls = cfg.inference.urls or [f"http://127.0.0.1:{cfg.inference.port}"]
    url = args.base_url or os.environ.get("OPENAI_BASE_URL") or f"{urls[0]}/v1"
    timeout = cfg.orchestrator.generation_timeout
    return openai.AsyncOpenAI(
        base_url=url, api_key=os.environ.get("OPENAI_API_KEY", "none"), max_retries=5, timeout=timeout
    )


def bind(client, model, sampling):
    """-> ask(prompt, n, tools) for orchestrator.run_group, with nothing in the request that only vLLM knows, and so
    without token ids: one request per completion, since not every server knows n."""

    async def one(prompt, tools):
        if isinstance(prompt, str):
            reply = await client.completions.create(model=model, prompt=prompt, **sampling)
            message, choice = reply.choices[0].text, reply.choices[0]
        else:
            more = {"tools": tools} if tools else {}
            reply = await client.chat.completions.create(model=model, messages=prompt, **sampling, **more)
            choice = reply.choices[0]
            message = {"role": "assistant", "content": choice.message.content or ""}
            if reasoning := getattr(choice.message, "reasoning", None) or getattr(
                choice.message, "reasoning_content", None
            ):
                message["reasoning"] = reasoning
            if choice.message.tool_calls:
                message["tool_calls"] = [call.model_dump() for call in choice.message.tool_calls]
        return message, [], [], [], choice.finish_reason, [0, 0]

    async def ask(prompt, n, tools=None):
        return await asyncio.gather(*(one(prompt, tools) for _ in range(n)))

    return ask


async def roll_out(env, rows, k, ask, cfg, on_group):
    """k rollouts of each row -> groups in the order of rows; on_group(i, group) as each is done."""
    slots = asyncio.Semaphore(max(1, cfg.orchestrator.max_concurrent // k))

    async def one(i, row):
        async with slots:
            group = await orchestrator.run_group(env, row, k, ask, 0, cfg)
        on_group(i, group)
        return group

    return await asyncio.gather(*(one(i, row) for i, row in enumerate(rows)))


def as_lines(name, i, group):
    for j, r in enumerate(group):
        line = {"env": name, "example": i, "rollout": j, "tools": r.state["tools"]}
        line |= {key: r.state[key] for key in ("prompt", "completion", "answer", "info")}
        yield line | {key: getattr(r, key) for key in "reward turn_rewards num_turns metrics truncated error".split()}


async def run(args, cfg):
    asyncio.get_running_loop().set_default_executor(UserThreads(256))
    client, num, e = connect(args, cfg), int(args.generate[0]) if args.generate else 0, cfg.eval
    model = args.model or (await client.models.list()).data[0].id
    k = args.rollouts_per_example or (cfg.orchestrator.rollouts_per_example if num else e.rollouts_per_example)
    max_tokens = cfg.sampling.max_tokens if num else e.max_tokens or cfg.sampling.max_tokens
    sampling = {"temperature": cfg.sampling.temperature if num else e.temperature, "max_tokens": max_tokens}
    sampling |= {"stop": cfg.sampling.stop} if cfg.sampling.stop else {}
    sampling |= {"top_p": cfg.sampling.top_p} if cfg.sampling.top_p < 1 else {}
    if cfg.sampling.chat_template_kwargs:  # not every server knows it, but then what is asked for is not to be had
        sampling["extra_body"] = {"chat_template_kwargs": cfg.sampling.chat_template_kwargs}
    out = open(args.generate[1] if num else args.out or os.devnull, "w")
    for spec in cfg.env:
        env = load_environment(spec.id, spec.args, cfg.path.parent)
        share = math.ceil(num / k * spec.ratio / sum(s.ratio for s in cfg.env))
        split = env.dataset if num else env.eval_dataset or env.dataset
        rows = [split[i % len(split)] for i in range(share)] if num else split[: args.n or e.num_examples or None]

        def write(i, group, name=spec.name):
            out.writelines(json.dumps(line, default=str) + "\n" for line in as_lines(name, i, group))
            out.flush()

        started = time.monotonic()
        print(f"{spec.name}: {len(rows)} examples x {k} rollouts, {model} at {client.base_url}", flush=True)
        groups = await roll_out(env, rows, k, bind(client, model, sampling), cfg, write)
        report(spec.name, groups, k, time.monotonic() - started)
    if num:
        print(f"wrote {args.generate[1]}")


# --- what it means ----------------------------------------------------------------------------------------------------


def report(name, groups, k, seconds):
    errors = Counter(r.error for group in groups for r in group if r.error)
    scored = [rewards for group in groups if (rewards := [r.reward for r in group if r.reward is not None])]
    if not scored:
        raise RunError(4, f"{name}: every rollout failed: {dict(errors)}")
    m, num = eval_metrics(groups), sum(map(len, scored))
    print(f"  avg@{k} {m['reward/mean']:.3f} +- {m['ci95']:.3f} (95 %, over {len(scored)} examples)")
    for size in sorted({1, k} | {2**i for i in range(k.bit_length()) if 2**i < k}):
        p, n = pass_at(size, scored)
        if not n:
            print(f"  pass@{size}: no example has {size} scored rollouts")
            continue
        low, high = wilson(p, n)
        print(f"  pass@{size} {p:.3f} (95 %: {low:.3f} to {high:.3f})")
    functions = function_means([r for group in groups for r in group])
    print("  " + ", ".join(f"{key} {value:.3f}" for key, value in functions.items()))
    print(f"  truncated {m['truncated']:.3f}, errors {dict(errors) or 0}, {seconds:.0f} s")
    varied = sum(len(set(rewards)) > 1 for rewards in scored) / len(scored)
    if num >= 10 and max(map(max, scored)) <= 0:
        print(f"  too hard: no reward in {num} attempts. Begin with easier rows, demonstrations or a stronger model.")
    elif num >= 10 and m["pass@k"] == 0:
        print(f"  too hard, if a reward of 1 is to be had: none in {num} attempts.")
    elif m["reward/mean"] >= 0.8:
        print("  too easy: 0.8 and more is left little to learn. Take harder rows.")
    elif k > 1:
        print(f"  {varied:.0%} of the examples have rewards that differ; only these teach.")


def main(argv):
    args, cfg = arguments(argv)
    if args.offline:
        place = write_offline(args.offline, args.min_reward, compute_advantages, cfg)
        print(f"next: torchrun trainer.py {args.config} --replay {place} {' '.join(args.overrides)}")
    else:
        asyncio.run(run(args, cfg))
