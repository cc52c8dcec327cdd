"""Beside a run: evaluate a model before anything is trained, make data with it, turn data into batches.

    python tools/evaluate.py config.toml --eval [--base-url URL] [--model NAME] [--n 50] [--rollouts-per-example 4]
    python tools/evaluate.py config.toml --generate 1000 out.jsonl [--base-url URL] [--model NAME]
    python tools/evaluate.py config.toml --offline out.jsonl [--min-reward 0.5]

Any OpenAI-compatible endpoint will do; the key comes from OPENAI_API_KEY. --offline needs no server: lines with prompt,
completion and reward become batch files for trainer.py --replay, with trainer.loss=sft as demonstrations."""

import argparse
import asyncio
import json
import math
import os
import shlex
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import configs
from configs import RunError, require
from env import load_environment, load_rows
from orchestrator import eval_metrics, means, run_group, save_batch
from tools.plot import wilson
from tools.show import eval_statistics, with_interval


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
    if args.generate and not (args.generate[0].isdecimal() and int(args.generate[0])):
        parser.error(f"--generate N OUT: N must be a number above 0, not {args.generate[0]!r}")
    return args, configs.load_config(args.config, args.overrides)


# --- rollouts against any server --------------------------------------------------------------------------------------


async def connect(args, cfg):
    """-> client, the model's name."""
    import openai

    urls = cfg.inference.urls or [f"http://127.0.0.1:{cfg.inference.port}"] * (cfg.inference.port > 0)
    url = args.base_url or os.environ.get("OPENAI_BASE_URL") or (f"{urls[0]}/v1" if urls else "")
    if not url:
        raise RunError(2, "where is the server? Give --base-url, OPENAI_BASE_URL, inference.urls or inference.port")
    key, timeout = os.environ.get("OPENAI_API_KEY", "none"), cfg.orchestrator.generation_timeout
    client = openai.AsyncOpenAI(base_url=url, api_key=key, max_retries=5, timeout=timeout)
    try:
        return client, args.model or (await client.models.list()).data[0].id
    except (openai.OpenAIError, IndexError) as e:
        raise RunError(2, f"{url} does not list a model ({type(e).__name__}: {e}): give another --base-url") from None


def bind(client, model, sampling):
    """-> ask(prompt, n, tools) for orchestrator.run_group, with nothing in the request that only vLLM knows, and so
    without token ids: one request per completion, since not every server knows n."""

    async def one(prompt, tools):
        if isinstance(prompt, str):
            reply = await client.completions.create(model=model, prompt=prompt, **sampling)
            choice = reply.choices[0]
            return choice.text, [], [], [], choice.finish_reason, [0, 0]
        more = {"tools": tools} if tools else {}
        reply = await client.chat.completions.create(model=model, messages=prompt, **sampling, **more)
        choice = reply.choices[0]
        message = {"role": "assistant", "content": choice.message.content or ""}
        for key in ("reasoning", "reasoning_content"):
            if text := getattr(choice.message, key, None):
                message["reasoning"] = text
        if choice.message.tool_calls:
            message["tool_calls"] = [call.model_dump() for call in choice.message.tool_calls]
        return message, [], [], [], choice.finish_reason, [0, 0]

    async def ask(prompt, n, tools=None):
        return await asyncio.gather(*(one(prompt, tools) for _ in range(n)))

    return ask


def sampling_of(cfg, is_training):
    """What goes into each request: of training for --generate, of eval for --eval."""
    s, e = cfg.sampling, cfg.eval
    sampling = {"temperature": s.temperature if is_training else e.temperature}
    sampling["max_tokens"] = s.max_tokens if is_training else e.max_tokens or s.max_tokens
    if s.stop:
        sampling["stop"] = s.stop
    sampling["top_p"] = s.top_p  # else vLLM takes the one of the model's generation_config.json
    if s.chat_template_kwargs:  # not every server knows it, but then what is asked for is not to be had
        sampling["extra_body"] = {"chat_template_kwargs": s.chat_template_kwargs}
    return sampling


async def roll_out(env, rows, k, ask, cfg, on_group):
    """k rollouts of each row -> groups in the order of rows; on_group(i, group) as each is done."""
    slots = asyncio.Semaphore(max(1, cfg.orchestrator.max_concurrent // k))

    async def one(i, row):
        group = await run_group(env, row, k, ask, 0, cfg, slots)
        on_group(i, group)
        return group

    return await asyncio.gather(*(one(i, row) for i, row in enumerate(rows)))


def as_line(name, i, j, rollout):
    line = {"env": name, "example": i, "rollout": j, "tools": rollout.state["tools"]}
    line |= {key: rollout.state[key] for key in ("prompt", "completion", "answer", "info")}
    return line | {
        key: getattr(rollout, key) for key in "reward turn_rewards num_turns metrics truncated error".split()
    }


async def run(args, cfg):
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(256))  # for blocking user code
    (client, model), num = await connect(args, cfg), int(args.generate[0]) if args.generate else 0
    k = args.rollouts_per_example or (cfg.orchestrator if num else cfg.eval).rollouts_per_example
    ask = bind(client, model, sampling_of(cfg, num > 0))
    out = open(args.generate[1] if num else args.out or os.devnull, "w")
    for spec in cfg.env:
        env = load_environment(spec.id, spec.args)
        if num:
            share = math.ceil(num / k * spec.ratio / sum(s.ratio for s in cfg.env))
            rows = [env.dataset[i % len(env.dataset)] for i in range(share)]
        else:
            rows = (env.eval_dataset or env.dataset)[: args.n or cfg.eval.num_examples or None]

        def write(i, group, name=spec.name):
            for j, rollout in enumerate(group):
                out.write(json.dumps(as_line(name, i, j, rollout), default=str) + "\n")
            out.flush()

        started = time.monotonic()
        print(f"{spec.name}: {len(rows)} examples x {k} rollouts, {model} at {client.base_url}", flush=True)
        groups = await roll_out(env, rows, k, ask, cfg, write)
        report(spec.name, groups, k, time.monotonic() - started)
    if num:
        print(f"wrote {args.generate[1]}")


# --- what it means ----------------------------------------------------------------------------------------------------


def pass_at(k, groups):
    """Unbiased: the chance that k of an example's n rollouts, drawn without replacement, hold one with reward >= 1
    (2107.03374) -> mean over examples with k rollouts or more, their number."""
    chances = []
    for rewards in groups:
        n, c = len(rewards), sum(r > 1 - 1e-6 for r in rewards)
        if n >= k:
            chances.append(1 - math.comb(n - c, k) / math.comb(n, k))
    return sum(chances) / len(chances) if chances else math.nan, len(chances)


def report(name, groups, k, seconds):
    errors = Counter(r.error for group in groups for r in group if r.error)
    scored = [rewards for group in groups if (rewards := [r.reward for r in group if r.reward is not None])]
    if not scored:
        raise RunError(4, f"{name}: every rollout failed: {dict(errors)}")
    m, num = eval_metrics(groups), sum(map(len, scored))
    value = with_interval(m["reward/mean"], eval_statistics(m["rows"])["ci95"])
    print(f"  avg@{k} {value} (95 %, over {len(scored)} examples)")
    for size in sorted({1, k} | {2**i for i in range(k.bit_length()) if 2**i < k}):
        p, n = pass_at(size, scored)
        if n:
            low, high = wilson(p, n)
            print(f"  pass@{size} {p:.3f} (95 %: {low:.3f} to {high:.3f})")
        else:
            print(f"  pass@{size}: no example has {size} scored rollouts")
    functions = means([r.metrics for group in groups for r in group])
    print("  " + ", ".join(f"{key} {value:.3f}" for key, value in functions.items()))
    print(f"  truncated {m['truncated']:.3f}, lost to errors {errors.total()}{f' {dict(errors)}' if errors else ''}, "
          f"{seconds:.0f} s")  # fmt: skip
    varied = sum(len(set(rewards)) > 1 for rewards in scored) / len(scored)
    if num >= 10 and max(map(max, scored)) <= 0:
        print(f"  too hard: no reward in {num} attempts. Begin with easier rows, demonstrations or a stronger model.")
    elif num >= 10 and m["pass@k"] == 0:
        print(f"  too hard, if a reward of 1 is to be had: none in {num} attempts.")
    elif m["reward/mean"] >= 0.8:
        print("  too easy: 0.8 and more is left little to learn. Take harder rows.")
    elif k > 1:
        print(f"  {varied:.0%} of the examples have rewards that differ; only these teach.")


# --- texts of other people, or of --generate, as batches --------------------------------------------------------------


def to_samples(line, tokenizer, cfg):
    """One conversation -> samples; text prompts (base models) are continued by text."""
    from configs.models.toy import tokenize_conversation

    if not isinstance(line["prompt"], str):
        messages, more = line["prompt"] + line["completion"], cfg.sampling.chat_template_kwargs
        return tokenize_conversation(tokenizer, messages, line.get("tools"), len(line["prompt"]), **more)
    prompt, answer = tokenizer.encode(line["prompt"]), tokenizer.encode("".join(line["completion"]))
    answer = [t for t in answer if t != tokenizer.bos_token_id] + [tokenizer.eos_token_id]
    return [{
        "tokens": prompt + answer,
        "mask": [0] * len(prompt) + [1] * len(answer),
        "old_logp": [0.0] * len(prompt) + [math.nan] * len(answer),  # nobody knows
        "turn": [0] * (len(prompt) + len(answer)),
    }]  # fmt: skip


def check_line(line, where):
    """RunError 4 names what is wrong with it."""
    prompt, completion, reward = (line.get(key) for key in ("prompt", "completion", "reward"))
    require(prompt, 4, f"{where} has no prompt: {str(line)[:200]}")
    require(completion, 4, f"{where} has no completion: {str(line)[:200]}")
    kind, what = (str, "text, as its prompt is") if isinstance(prompt, str) else (dict, "messages, as its prompt has")
    parts = [completion] if isinstance(completion, str) else completion
    is_kind = isinstance(parts, list) and all(isinstance(x, kind) and (kind is str or "role" in x) for x in parts)
    require(is_kind, 4, f"{where}: its completion must be {what}, not {str(completion)[:200]!r}")
    is_number = reward is None or (isinstance(reward, int | float) and math.isfinite(reward))
    require(is_number, 4, f"{where}: reward = {reward!r} must be a finite number")


def read_groups(path, min_reward, cfg):
    """-> [[line, ...], ...]: the lines of an example, with samples; without those that nothing can be learned from,
    which are counted by why."""
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(cfg.run.model)
    if cfg.run.chat_template:
        tokenizer.chat_template = Path(cfg.run.chat_template).read_text()
    is_sft, groups, dropped = cfg.trainer.loss == "sft", {}, Counter()
    for i, line in enumerate(load_rows(path, str(path))):
        if line.get("error"):  # of the rollout
            dropped["failed"] += 1
            continue
        check_line(line, f"{path}: line {i + 1}")
        samples, reward = to_samples(line, tokenizer, cfg), line.get("reward")
        if line.get("truncated"):  # where it was cut nobody knows; it was no end: it shapes the baseline only
            samples = [s | {"mask": [0] * len(s["mask"])} for s in samples]
            if cfg.orchestrator.zero_truncated_completions and reward is not None:
                reward, line["turn_rewards"] = 0.0, None
        if reward is None and not is_sft:
            dropped["unscored"] += 1
        elif line.get("truncated") and is_sft:
            dropped["truncated"] += 1
        elif reward is not None and reward < min_reward:
            dropped["below --min-reward"] += 1
        elif max(len(s["tokens"]) for s in samples) > cfg.run.max_seq_len:
            dropped["longer than max_seq_len"] += 1
        else:
            key = line.get("env", ""), line.get("example", json.dumps(line["prompt"]))
            num_turns = len({turn for s in samples for turn in s["turn"]})
            more = {"num_turns": num_turns, "reward": reward or 0.0, "samples": samples}
            groups.setdefault(key, []).append(line | more)
    for key, group in [] if is_sft else list(groups.items()):
        same = {(x["reward"], *(x.get("turn_rewards") or ()), x["num_turns"] * (cfg.trainer.gamma < 1)) for x in group}
        dropped["flat"] += len(groups.pop(key)) if len(same) == 1 else 0
    return list(groups.values()), dropped


def write_offline(path, min_reward, cfg):
    """JSON Lines with prompt, completion and reward -> batches in outputs/<run_name>-offline, their directory."""
    groups, dropped = read_groups(path, min_reward, cfg)
    place = configs.run_directory(cfg, "-offline") / "batches"
    if any(place.iterdir()):
        raise RunError(2, f"{place} holds batches: choose another run_name, or remove them")
    n, samples, size = 0, [], 0
    for g, group in enumerate(groups):
        for i, line in enumerate(group):
            about = {"env": line.get("env", ""), "example": line.get("example"), "group": g, "rollout": i}
            about |= {"turn_rewards": line.get("turn_rewards"), "num_turns": line["num_turns"]}
            about |= {"reward": line["reward"], "age": 0, "temperature": cfg.sampling.temperature}
            samples += [about | s for s in line["samples"]]
        size += len(group)
        if size >= cfg.orchestrator.batch_size or g == len(groups) - 1:
            info = {"run": configs.identity(cfg), "step": n, "offline": True, "rollouts": size}
            info |= {"max_tokens": cfg.sampling.max_tokens}
            save_batch(place / f"step_{n:06d}.safetensors", samples, info)
            n, samples, size = n + 1, [], 0
    print(f"{n} batches in {place}; left out: {dict(+dropped) or 'nothing'}")
    if not n:
        raise RunError(4, f"{path}: nothing to learn from: {dict(dropped)}")
    return place


def main(argv):
    args, cfg = arguments(argv)
    if args.offline:
        place = write_offline(args.offline, args.min_reward, cfg)
        print(f"next: torchrun {shlex.join(['trainer.py', args.config, '--replay', str(place), *args.overrides])}")
    else:
        asyncio.new_event_loop().run_until_complete(run(args, cfg))  # not closed: user code may hang in threads


if __name__ == "__main__":
    configs.run_role("evaluate", main)
