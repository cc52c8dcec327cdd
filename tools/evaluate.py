"""Evaluates a model before anything is trained, generates data with it, and makes batches from data.

    python tools/evaluate.py config.toml --eval [--base-url URL] [--model NAME] [--n 50] [--rollouts-per-example 4]
    python tools/evaluate.py config.toml --generate 1000 out.jsonl [--base-url URL] [--model NAME]
    python tools/evaluate.py config.toml --offline out.jsonl [--min-reward 0.5]
    python tools/evaluate.py config.toml --demonstrations out.jsonl [--min-reward 0.5]

Any OpenAI-compatible endpoint will do; the key comes from OPENAI_API_KEY. The last two need no server. They turn lines
with a prompt and a completion into batch files for trainer.py --replay: --offline for reinforcement learning from the
lines' rewards, --demonstrations for imitation of each completion."""

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
from configs.algorithms.evaluation import eval_metrics
from configs.environments.judge import http_client
from configs.models.demonstrations import as_demonstration, stop_ids, tokenize_conversation, tokenize_text
from configs.runtime.directory import identity, run_directory
from configs.runtime.role import CONFIG, DATA, RunError, require, run_role
from env import Truncated, load_environment, load_rows
from orchestrator import FULL, Reply, means, run_group, save_batch, stop_string, to_json
from tools.advice import is_hopeless, lost_in_evaluation, share_solved
from tools.plot import wilson
from tools.show import eval_statistics, from_root, with_interval

EASIER = "Begin with easier rows, demonstrations or a stronger model."
SOLVED = 1 - 1e-6  # in floats 0.7 + 0.2 + 0.1 is below 1


def parse_arguments(argv):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config")
    parser.add_argument("overrides", nargs="*", metavar="table.key=value")
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--eval", action="store_true", help="on the eval split, or on the dataset if there is none")
    what.add_argument("--generate", nargs=2, metavar=("N", "OUT"), help="N rollouts of the dataset as JSON Lines")
    what.add_argument("--offline", type=Path, metavar="FILE", help="JSON Lines with rewards -> batch files")
    what.add_argument("--demonstrations", type=Path, metavar="FILE", help="JSON Lines to imitate -> batch files")
    parser.add_argument("--base-url", help="default: OPENAI_BASE_URL, or the server of the configuration")
    parser.add_argument("--model", help="default: the first that the server lists")
    parser.add_argument("--n", type=int, help="with --eval: examples; default: eval.num_examples, or all")
    parser.add_argument("--rollouts-per-example", type=int, help="k; default: eval's, or with --generate training's")
    parser.add_argument("--out", type=Path, help="with --eval: write the rollouts as JSON Lines")
    parser.add_argument("--min-reward", type=float, default=-math.inf, help="leave out lines with a lower reward")
    args = parser.parse_intermixed_args(argv)
    args.num = 0
    if args.generate:
        count, args.out = args.generate
        if not count.isdecimal() or int(count) == 0:
            parser.error(f"--generate N OUT: N must be a number above 0, not {count!r}")
        args.num = int(count)
    cfg = configs.load_config(args.config, args.overrides)
    cfg.trainer = cfg.trainer._replace(replay_routing=False)  # which needs what only vLLM says
    return args, cfg


# --- rollouts against any server --------------------------------------------------------------------------------------


async def connect(args, cfg):
    """Returns a client and the model's name."""
    import openai

    urls = cfg.inference.urls
    if not urls and cfg.inference.port:
        urls = [f"http://127.0.0.1:{cfg.inference.port}"]
    url = args.base_url or os.environ.get("OPENAI_BASE_URL") or (f"{urls[0]}/v1" if urls else "")
    hint = "where is the server? Give --base-url, OPENAI_BASE_URL, inference.urls or inference.port"
    require(url, CONFIG, hint)
    options = {"base_url": url, "api_key": os.environ.get("OPENAI_API_KEY", "none"), "max_retries": 5}
    options |= {"timeout": cfg.orchestrator.generation_timeout, "http_client": http_client()}
    client = openai.AsyncOpenAI(**options)
    if args.model:
        return client, args.model
    try:
        models = await client.models.list()
        return client, models.data[0].id
    except (openai.OpenAIError, IndexError) as e:
        what = f"{url} does not list a model ({type(e).__name__}: {e}): give another --base-url"
        raise RunError(CONFIG, what) from None


def message_of(reply):
    """The message of a chat completion, with the fields that the next prompt must repeat."""
    message = {"role": "assistant", "content": reply["content"]}
    for key in ("reasoning", "reasoning_content"):
        if reply.get(key):
            message["reasoning"] = reply[key]
    if reply.get("tool_calls"):
        message["tool_calls"] = reply["tool_calls"]
    return message


def make_ask(client, model, sampling):
    """Returns what run_group calls in place of orchestrator.sample. Its requests have nothing that only vLLM knows, so
    replies come without token ids."""
    import openai

    async def ask(*args, **kwargs):
        try:
            return await send(*args, **kwargs)
        except openai.BadRequestError as e:
            if any(words in str(e) for words in FULL):
                raise Truncated from e
            raise

    async def send(prompt, tools=None, user="", own=()):
        options = sampling | dict(own)
        if "max_tokens" in own:
            options["max_tokens"] = min(sampling["max_tokens"], options["max_tokens"])
        if isinstance(prompt, str):
            reply = await client.completions.create(model=model, prompt=prompt, **options)
            raw = reply.model_dump()
            choice = raw["choices"][0]
            choice["text"] += stop_string(choice)  # as in training; only vLLM says which it was
            message = choice["text"]
        else:
            more = {"tools": tools} if tools else {}
            reply = await client.chat.completions.create(model=model, messages=prompt, **options, **more)
            raw = reply.model_dump()
            choice = raw["choices"][0]
            choice["message"]["content"] = (choice["message"]["content"] or "") + stop_string(choice)
            message = message_of(choice["message"])
        return Reply(message, [], [], [], raw, choice["finish_reason"] == "length", [0, 0])

    return ask


def sampling_of(cfg, is_training):
    """The sampling in each request: training's for --generate, eval's for --eval."""
    sampling = {"temperature": cfg.eval.temperature, "max_tokens": cfg.eval.max_tokens or cfg.sampling.max_tokens}
    if is_training:
        sampling = {"temperature": cfg.sampling.temperature, "max_tokens": cfg.sampling.max_tokens}
    sampling["top_p"] = cfg.sampling.top_p  # without it vLLM takes that of the model's generation_config.json
    if cfg.sampling.stop:
        sampling["stop"] = cfg.sampling.stop
    # Not of OpenAI's API: a server that does not know them cannot do what was asked for.
    more = {}
    if cfg.sampling.chat_template_kwargs:
        more["chat_template_kwargs"] = cfg.sampling.chat_template_kwargs
    if cfg.sampling.allow_biased_sampling:
        more |= {key: getattr(cfg.sampling, key) for key in ("top_k", "min_p", "repetition_penalty")}
    if not cfg.sampling.skip_special_tokens:
        more["skip_special_tokens"] = False
    return sampling | {"extra_body": more} if more else sampling


async def roll_out(env, rows, k, ask, cfg, on_group):
    """k rollouts of each row. Returns the groups in the order of the rows; calls on_group(i, group) as each ends."""
    places = asyncio.Semaphore(cfg.orchestrator.max_concurrent)

    async def one(i, row):
        group = await run_group(env, row, k, ask, 0, cfg, places)
        on_group(i, group)
        return group

    return await asyncio.gather(*(one(i, row) for i, row in enumerate(rows)))


def as_line(name, example, i, rollout):
    line = {"env": name, "example": example, "rollout": i}
    for key in ("tools", "prompt", "completion", "answer", "info"):
        line[key] = rollout.state.get(key)
    for key in ("reward", "turn_rewards", "num_turns", "metrics", "truncated", "error"):
        line[key] = getattr(rollout, key)
    return line


def rows_of(env, spec, args, k, cfg):
    """The rows to roll out: the evaluation's, or with --generate enough for the environment's share of N rollouts."""
    if not args.num:
        rows = env.eval_dataset or env.dataset
        return rows[: args.n or cfg.eval.num_examples or None]
    share = spec.ratio / sum(other.ratio for other in cfg.env)
    num = math.ceil(args.num / k * share)
    return [env.dataset[i % len(env.dataset)] for i in range(num)]


async def run(args, cfg):
    """Rolls out every environment, writes the rollouts and prints what they say."""
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(256))  # for user code that blocks
    client, model = await connect(args, cfg)
    is_training = args.num > 0
    k = args.rollouts_per_example
    if not k:
        k = cfg.orchestrator.rollouts_per_example if is_training else cfg.eval.rollouts_per_example
    ask = make_ask(client, model, sampling_of(cfg, is_training))
    with open(args.out or os.devnull, "w") as out:
        for spec in cfg.env:

            def write(example, group, name=spec.name):
                for i, rollout in enumerate(group):
                    out.write(to_json(as_line(name, example, i, rollout)))
                out.flush()

            env = load_environment(spec.id, spec.args)
            rows = rows_of(env, spec, args, k, cfg)
            started = time.monotonic()
            print(f"{spec.name}: {len(rows)} examples x {k} rollouts, {model} at {client.base_url}", flush=True)
            groups = await roll_out(env, rows, k, ask, cfg, write)
            print_report(spec.name, groups, k, time.monotonic() - started)
    if is_training:
        print(f"wrote {args.out}")


# --- what the rollouts say --------------------------------------------------------------------------------------------


def pass_at(k, groups):
    """The chance that k of an example's n rollouts, drawn without replacement, hold one with a reward of 1 or more: the
    unbiased estimate (2107.03374). Returns its mean over the examples with k rollouts or more, and their number."""
    chances = []
    for rewards in groups:
        n = len(rewards)
        num_solved = sum(reward > SOLVED for reward in rewards)
        if n >= k:
            chances.append(1 - math.comb(n - num_solved, k) / math.comb(n, k))
    mean = sum(chances) / len(chances) if chances else math.nan
    return mean, len(chances)


def print_report(name, groups, k, seconds):
    rollouts = sum(groups, [])
    errors = Counter(r.error for r in rollouts if r.error)
    scored = []
    for group in groups:
        rewards = [r.reward for r in group if r.reward is not None]
        if rewards:
            scored.append(rewards)
    require(scored, DATA, f"{name}: every rollout failed: {dict(errors)}")
    metrics = eval_metrics(groups)
    as_zero = metrics["reward/lost_as_0"]
    value = with_interval(metrics["reward/mean"], eval_statistics(metrics["rows"])["ci95"])
    print(f"  avg@{k} {value} (95 %, over {len(scored)} examples)")
    num_lost = sum(r.reward is None for r in rollouts)
    if num_lost:
        print(f"  avg@{k} {as_zero:.3f} with {num_lost} lost rollouts as 0 (over {len(groups)} examples)")
    powers = {2**i for i in range(k.bit_length())}
    for size in sorted(powers | {k}):
        share, n = pass_at(size, scored)
        if n:
            low, high = wilson(share, n)
            print(f"  pass@{size} {share:.3f} (95 %: {low:.3f} to {high:.3f})")
        else:
            print(f"  pass@{size}: no example has {size} scored rollouts")
    functions = means([r.metrics for r in rollouts])
    print("  " + ", ".join(f"{key} {value:.3f}" for key, value in functions.items()))
    causes = f" {dict(errors)}" if errors else ""
    print(f"  truncated {metrics['truncated']:.3f}, lost to errors {errors.total()}{causes}, {seconds:.0f} s")
    warning = lost_in_evaluation(name, num_lost, len(rollouts), metrics["reward/mean"], as_zero)
    if warning:
        print(f"  warning: {warning}")
    advice = advise(scored, metrics, k)
    if advice:
        print(f"  {advice}")


def advise(scored, metrics, k):
    """Whether the task is one to learn from; "" if that cannot be said. scored: the rewards of each example."""
    num = sum(map(len, scored))
    varied = sum(len(set(rewards)) > 1 for rewards in scored) / len(scored)
    best = max(map(max, scored))
    if num >= 10 and best <= 0:
        return f"too hard: no reward in {num} attempts. {EASIER}"
    if num >= 10 and k > 1 and is_hopeless(scored):
        return f"too hard: the best of {num} rewards is {best:.3g}, and those of an example hardly differ. {EASIER}"
    if num >= 10 and metrics["pass@k"] == 0:
        return f"too hard, if a reward of 1 can be reached: none in {num} attempts, the best is {best:.3g}."
    if share_solved(sum(scored, [])) >= 0.8:
        return "too easy: above 0.8 little is left to learn. Take harder rows."
    if k > 1:
        return f"{varied:.0%} of the examples have rewards that differ; only these teach."
    return ""


# --- batches from other people's text, or from --generate -------------------------------------------------------------


def to_sequences(line, tokenizer, stops, cfg):
    """Returns the training sequences of one conversation. For a base model, prompt and completion are text."""
    prompt = line["prompt"]
    if isinstance(prompt, str):
        text = "".join(line["completion"])
        return tokenize_text(tokenizer, prompt, text, stops, cfg.sampling.stop, bool(line.get("truncated")))
    messages = prompt + line["completion"]
    first = len(prompt)  # answers in the prompt are not the policy's
    more = {"stop_strings": cfg.sampling.stop} | cfg.sampling.chat_template_kwargs
    return tokenize_conversation(tokenizer, messages, line.get("tools"), first, stops, **more)


def check_line(line, where):
    """Raises RunError with DATA, which says what is wrong with a line."""
    prompt = line.get("prompt")
    completion = line.get("completion")
    reward = line.get("reward")
    require(prompt, DATA, f"{where} has no prompt: {str(line)[:200]}")
    require(completion, DATA, f"{where} has no completion: {str(line)[:200]}")
    parts = [completion] if isinstance(completion, str) else completion
    if isinstance(prompt, str):
        what = "text, like its prompt"
        is_right = isinstance(parts, list) and all(isinstance(part, str) for part in parts)
    else:
        what = "messages, like its prompt"
        is_right = isinstance(parts, list) and all(isinstance(part, dict) and "role" in part for part in parts)
    require(is_right, DATA, f"{where}: its completion must be {what}, not {str(completion)[:200]!r}")
    is_number = reward is None or (isinstance(reward, int | float) and math.isfinite(reward))
    require(is_number, DATA, f"{where}: reward = {reward!r} must be a finite number")


def load_tokenizer(cfg):
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(cfg.run.model)
    if cfg.run.chat_template:
        tokenizer.chat_template = Path(cfg.run.chat_template).read_text()
    return tokenizer


def as_rollout(line, tokenizer, stops, cfg):
    """A line with its sequences and the number of its turns, and its reward as training would have it.

    Nobody knows where a truncated completion was cut, and it never said its end: it only shapes the baseline."""
    sequences = to_sequences(line, tokenizer, stops, cfg)
    turns = set()
    for s in sequences:
        turns.update(s["turn"])
    line = line | {"sequences": sequences, "num_turns": len(turns)}
    if line.get("truncated"):
        for s in sequences:
            s["mask"] = [0] * len(s["mask"])
        if cfg.orchestrator.zero_truncated_completions and line.get("reward") is not None:
            line |= {"reward": 0.0, "turn_rewards": None}
    return line


def why_left_out(rollout, min_reward, is_imitation, cfg):
    """A word or two, or "" if there is something to learn from the rollout."""
    reward = rollout.get("reward")
    if reward is None and not is_imitation:
        return "unscored"
    if rollout.get("truncated") and is_imitation:
        return "truncated"
    if reward is not None and reward < min_reward:
        return "below --min-reward"
    longest = max(len(s["tokens"]) for s in rollout["sequences"])
    return "longer than max_seq_len" if longest > cfg.run.max_seq_len else ""


def is_flat(group, cfg):
    """Whether nothing that an advantage depends on differs within a group."""
    earned = set()
    for rollout in group:
        turns = rollout["num_turns"] if cfg.trainer.gamma < 1 else 0
        earned.add((rollout["reward"], *(rollout.get("turn_rewards") or ()), turns))
    return len(earned) == 1


def read_groups(path, min_reward, is_imitation, cfg):
    """Returns groups, each a list of the rollouts of one example, and how many lines were left out, by reason."""
    tokenizer = load_tokenizer(cfg)
    stops = stop_ids(cfg.run.model, tokenizer)
    groups = {}
    left_out = Counter()
    for i, line in enumerate(load_rows(path, str(path))):
        if line.get("error"):
            left_out["failed"] += 1
            continue
        where = f"{path}: line {i + 1}"
        check_line(line, where)
        try:
            rollout = as_rollout(line, tokenizer, stops, cfg)
        except Exception as e:  # what others have written
            raise RunError(DATA, f"{where}: {e!r}") from e
        why = why_left_out(rollout, min_reward, is_imitation, cfg)
        if why:
            left_out[why] += 1
            continue
        example = line.get("example", json.dumps(line["prompt"]))
        groups.setdefault((line.get("env", ""), example), []).append(rollout)
    kept = []
    for group in groups.values():
        if not is_imitation and is_flat(group, cfg):
            left_out["flat"] += len(group)
        else:
            kept.append(group)
    return kept, left_out


def to_batches(groups, size):
    """Yields lists of (number, group) with at least `size` rollouts, but for the last."""
    batch = []
    num = 0
    for numbered in enumerate(groups):
        batch.append(numbered)
        num += len(numbered[1])
        if num >= size:
            yield batch
            batch = []
            num = 0
    if batch:
        yield batch


def sequences_of(batch, is_imitation, cfg):
    """The training sequences of a batch. Demonstrations have weights `ce` instead of a `mask`, and no reward."""
    sequences = []
    for number, group in batch:
        for i, rollout in enumerate(group):
            about = {"env": rollout.get("env", ""), "example": rollout.get("example")}
            about["temperature"] = cfg.sampling.temperature
            if is_imitation:
                sequences += [about | as_demonstration(s) for s in rollout["sequences"]]
                continue
            about |= {"group": number, "rollout": i, "staleness": 0}
            for key in ("reward", "turn_rewards", "num_turns"):
                about[key] = rollout.get(key)
            sequences += [about | s for s in rollout["sequences"]]
    return sequences


def write_batches(path, min_reward, is_imitation, cfg):
    """Writes JSON Lines as batches to outputs/<run_name>-offline or -demonstrations, and returns their directory."""
    groups, left_out = read_groups(path, min_reward, is_imitation, cfg)
    require(groups, DATA, f"{path}: nothing to learn from: {dict(left_out)}")
    place = run_directory(cfg, "-demonstrations" if is_imitation else "-offline") / "batches"
    is_empty = not any(place.iterdir())
    require(is_empty, CONFIG, f"{place} holds batches: choose another run_name, or remove them")
    num = 0
    for batch in to_batches(groups, cfg.orchestrator.batch_size):
        info = {"run": identity(cfg), "step": num, "offline": True, "max_tokens": cfg.sampling.max_tokens}
        save_batch(place / f"step_{num:06d}.safetensors", sequences_of(batch, is_imitation, cfg), info)
        num += 1
    print(f"{num} batches in {place}; left out: {dict(left_out) or 'nothing'}")
    return place


def main(argv):
    args, cfg = parse_arguments(argv)
    file = args.offline or args.demonstrations
    if not file:
        asyncio.new_event_loop().run_until_complete(run(args, cfg))  # never closed: user code may hang in threads
        return
    place = write_batches(file, args.min_reward, args.offline is None, cfg)
    command = [from_root(sys.executable), "trainer.py", args.config, "--replay", str(place), *args.overrides]
    print(f"next: {shlex.join(command)}")


if __name__ == "__main__":
    run_role("evaluate", "tools.evaluate")
