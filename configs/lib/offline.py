"""Texts of other people, or of --generate, -> batch files: the data side of supervised warm-up and of offline RL."""

import json
import math
from collections import Counter
from pathlib import Path

from configs.lib.batch import save_batch
from configs.lib.data import read_json_lines
from configs.lib.runtime import RunError, identity, run_directory
from configs.lib.text import tokenize_conversation


def to_samples(line, tokenizer, cfg):
    """One conversation -> samples; text prompts (base models) are continued by text."""
    if isinstance(line["prompt"], str):
        prompt, answer = (tokenizer.encode(t) for t in (line["prompt"], "".join(line["completion"])))
        answer = [t for t in answer if t != tokenizer.bos_token_id] + [tokenizer.eos_token_id]
        tokens, n = prompt + answer, len(answer)
        logp = [0.0] * len(prompt) + [math.nan] * n
        return [{"tokens": tokens, "mask": [0] * len(prompt) + [1] * n, "logp": logp, "turns": [0] * len(tokens)}]
    messages, more = line["prompt"] + line["completion"], cfg.sampling.chat_template_kwargs
    return tokenize_conversation(tokenizer, messages, line.get("tools"), len(line["prompt"]), **more)


def read_groups(path, min_reward, cfg):
    """-> [[line, ...], ...]: the lines of an example, with samples; without those that nothing can be learned from,
    which are counted by why."""
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(cfg.run.model)
    if cfg.run.chat_template:
        tokenizer.chat_template = Path(cfg.run.chat_template).read_text()
    is_sft, groups, dropped = cfg.trainer.loss == "sft", {}, Counter()
    for i, line in enumerate(read_json_lines(path, str(path))):
        if line.get("error"):  # of the rollout
            dropped["failed"] += 1
            continue
        if not (line.get("prompt") and line.get("completion")):
            raise RunError(4, f"{path}: line {i + 1} has no prompt or no completion: {str(line)[:200]}")
        samples, reward = to_samples(line, tokenizer, cfg), line.get("reward")
        if line.get("truncated"):  # where it was cut nobody knows; it was no end: it shapes the baseline only
            samples = [s | {"mask": [0] * len(s["mask"])} for s in samples]
            reward = 0.0 if cfg.orchestrator.zero_truncated_completions and reward is not None else reward
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
            turns = {"num_turns": len({t for s in samples for t in s["turns"]}), "reward": reward or 0.0}
            groups.setdefault(key, []).append(line | turns | {"samples": samples})
    for key, group in [] if is_sft else list(groups.items()):
        same = {(x["reward"], *(x.get("turn_rewards") or ()), x["num_turns"] * (cfg.trainer.gamma < 1)) for x in group}
        dropped["flat"] += len(groups.pop(key)) if len(same) == 1 else 0
    return list(groups.values()), dropped


def write_offline(path, min_reward, compute_advantages, cfg):
    """JSON Lines with prompt, completion and reward -> batches in outputs/<run_name>-offline, their directory."""
    groups, dropped = read_groups(path, min_reward, cfg)
    t, place, n, batch, size = cfg.trainer, run_directory(cfg, "-offline") / "batches", 0, [], 0
    if any(place.iterdir()):
        raise RunError(2, f"{place} holds batches: choose another run_name, or remove them")
    for group in groups + [[]]:
        batch, size = batch + [group] * bool(group), size + len(group)
        if batch and (size >= cfg.orchestrator.batch_size or not group):
            samples, table = [], [[1.0] * len(b) for b in batch]
            if t.loss != "sft":
                table = compute_advantages(batch, t.advantage, t.gamma)
            for g, (lines, row) in enumerate(zip(batch, table)):
                for i, (line, adv) in enumerate(zip(lines, row)):
                    about = {"env": line.get("env", ""), "example": line.get("example"), "group": g, "rollout": i}
                    about |= {"advantage": adv, "temperature": cfg.sampling.temperature, "reward": line["reward"]}
                    about |= {"turn_rewards": line.get("turn_rewards"), "num_turns": line["num_turns"]}
                    samples += [about | s for s in line["samples"]]
            info = {"run": identity(cfg), "step": n, "offline": True, "rollouts": size, "advantage": t.advantage}
            info |= {"gamma": t.gamma, "max_tokens": cfg.sampling.max_tokens, "max_staleness": 0}
            save_batch(place / f"step_{n:06d}.safetensors", samples, info)
            n, batch, size = n + 1, [], 0
    print(f"{n} batches in {place}; left out: {dict(+dropped) or 'nothing'}")
    if not n:
        raise RunError(4, f"{path}: nothing to learn from: {dict(dropped)}")
    return place
