"""The configuration, its errors, and the run directory that it names."""

import argparse
import difflib
import importlib.util
import json
import os
import re
import tomllib
from collections import namedtuple
from pathlib import Path
from types import SimpleNamespace


class RunError(Exception):
    """Ends the run. code: 2 configuration, 3 a role died or hung, 4 data or environment, 5 numerics, 6 storage."""

    def __init__(self, code, cause):
        super().__init__(cause)
        self.code = code


def arguments(doc, argv):
    """config.toml [table.key=value ...] [--replay DIR | --check] -> cfg, the batch files in DIR."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config")
    parser.add_argument("overrides", nargs="*", metavar="table.key=value")
    parser.add_argument("--replay", type=Path, metavar="DIR", help="trainer: train on saved batches, without a server")
    parser.add_argument("--check", action="store_true", help="the pre-flight alone: no step, no evaluation")
    args = parser.parse_intermixed_args(argv)
    files = sorted(args.replay.glob("step_*.safetensors")) if args.replay else []
    if args.replay and not files:
        raise RunError(2, f"--replay {args.replay}: no step_*.safetensors there")
    cfg = load_config(args.config, args.overrides)
    if args.check:
        cfg.run = cfg.run._replace(max_steps=0, preflight=True, run_name=cfg.run.run_name + "-check", tracker="")
        cfg.eval = cfg.eval._replace(every=0)
    return cfg, files


def load_config(path, overrides=()):
    """TOML and `table.key=value` overrides -> frozen tuples: cfg.trainer.loss, cfg.run.model (the top level), ...

    configs/defaults.toml is the schema. Raises RunError 2 that names the key and, if unknown, the nearest known one."""
    schema = tomllib.loads((Path(__file__).parent.parent / "defaults.toml").read_text())
    about = ("limits", "renamed", "renamed_values", "refused", "prime_rl")
    limits, renamed, values, refused, foreign = map(schema.pop, about)
    defaults = flatten(schema)
    open_tables = {key for key, value in defaults.items() if type(value) is dict}
    try:
        raw = tomllib.loads(Path(path).read_text())
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as e:
        raise RunError(2, f"{path}: {e}") from None
    mix = raw.pop("env") if isinstance(raw.get("env"), list) else []  # [[env]] tables
    given = flatten(raw, open_tables)
    override(given, overrides, open_tables)
    hits = [k for k in flatten(foreign) if any(f"{g}.".startswith(f"{k}.") for g in given)]
    if hits:
        table = "".join(f"\n  {k} -> {flatten(foreign)[k]}" for k in hits)
        raise RunError(2, f"{path} is a prime-rl configuration; its keys are here:{table}")
    final = dict(defaults)

    def turn(item):  # what turns something on gives way to the number for it, what turns it off does not
        stands_for = values.get(item[0].rpartition(".")[2], {}).get(str(item[1]))
        return 1 if stands_for is None else 0 if all(stands_for.values()) else 2

    for key, value in sorted(given.items(), key=turn):
        name = key.removeprefix("trainer.args.")
        if name == key:
            final[key] = value
        elif name in refused or str(value) not in values.get(name, {str(value): 0}):
            raise RunError(2, f"key {key!r} = {value!r}: {refused.get(name) or f'must be one of {list(values[name])}'}")
        else:
            final |= values[name][str(value)] if name in values else {renamed.get(name, f"trainer.{name}"): value}
    one = {key: final.pop(key) for key in list(final) if key.startswith("env.")}
    if mix and one != {key: defaults[key] for key in one}:
        raise RunError(2, f"{path} has several [[env]] tables, so {[k for k in one if k in given]} does not say which")
    envs = [{k: v for k, v in defaults.items() if k in one} | flatten({"env": table}, open_tables) for table in mix]
    for keys in (final, *(envs or [one])):
        for key in keys:
            keys[key] = checked(key, keys[key], defaults, limits, renamed)
    tables = {}
    for key, value in final.items():
        table, _, name = key.rpartition(".")
        tables.setdefault(table.rpartition(".")[2] or "run", {})[name] = value
    cfg = SimpleNamespace(**{table: namedtuple(table, keys)(**keys) for table, keys in tables.items()})
    cfg.env = [
        namedtuple("env", [k[4:] for k in keys])(**{k[4:]: v for k, v in keys.items()}) for keys in envs or [one]
    ]
    cfg.env = [e._replace(name=e.name or e.id) for e in cfg.env]
    cfg.run = cfg.run._replace(run_name=cfg.run.run_name or Path(path).stem)
    cfg.path = Path(path)
    cfg.inference = cfg.inference._replace(args={k.replace("-", "_"): v for k, v in cfg.inference.args.items()})
    # Merging LoRA into 16-bit weights rounds early updates away; in fp32 it is exact, and vLLM samples faster.
    cfg.sends_adapters = cfg.trainer.use_lora and cfg.trainer.dtype != "fp32"
    check(cfg)
    return cfg


def override(given, items, open_tables):
    """Adds table.key=value items to `given`; a bare word is a string."""
    for item in items:
        key, equals, text = item.partition("=")
        if not equals:
            raise RunError(2, f"override {item!r}: must be key=value, e.g. trainer.learning_rate=3e-5")
        try:
            nested = tomllib.loads(f"{key} = {text}")
        except tomllib.TOMLDecodeError:
            nested = tomllib.loads(f"{key} = {json.dumps(text)}")
        for full, value in flatten(nested, open_tables).items():
            is_open = full in open_tables and type(value) is dict  # env.args.x=1 leaves the other args
            given[full] = given.get(full, {}) | value if is_open else value


def flatten(raw, tables=(), prefix=""):
    """Nested dict -> {dotted key: value}; stops at keys whose value is a table by itself, such as env.args."""
    flat = {}
    for name, value in raw.items():
        key = prefix + name
        nested = isinstance(value, dict) and value and key not in tables
        flat |= flatten(value, tables, key + ".") if nested else {key: value}
    return flat


def checked(key, value, defaults, limits, renamed):
    """The value as the schema wants it (1 becomes 1.0 for a float)."""
    name, start = key.rpartition(".")[2], f"key {key!r} = {value!r}: "
    if key not in defaults:
        near = difflib.get_close_matches(name, [k.rpartition(".")[2] for k in defaults], 1)
        known = [renamed[name]] if name in renamed else [k for k in defaults if k.rpartition(".")[2] in near]
        raise RunError(2, start + "unknown" + (f", did you mean {known[0]!r}?" if known else ""))
    kind = type(defaults[key])
    value = float(value) if kind is float and type(value) is int else value
    if type(value) is not kind or (kind is list and any(type(item) is not str for item in value)):
        raise RunError(
            2, start + f"must be {kind.__name__}{' of strings' * (kind is list)}, not {type(value).__name__}"
        )
    if kind in (int, float) and not 0 <= value <= (1 if name in limits["at_most_1"].split() else 1e300):
        raise RunError(2, start + f"must be at least 0{' and at most 1' * (name in limits['at_most_1'].split())}")
    if not value and {name, key} & set(limits["positive"].split()):
        raise RunError(2, start + ("must be above 0" if kind in (int, float) else "must be given"))
    if value not in limits["choices"].get(name, [value]) and not (name in ("loss", "advantage") and ":" in value):
        raise RunError(2, start + f"must be one of {limits['choices'][name]}")
    return value


def check(cfg):
    """Impossible combinations, each named with both numbers."""
    run, t, o, s, inf = cfg.run, cfg.trainer, cfg.orchestrator, cfg.sampling, cfg.inference
    owned = "host port logprobs_mode served_model_name worker_extension_cls model max_model_len dtype seed".split()
    clash = [key for key in inf.args if key in (*owned, "data_parallel_size", "chat_template")]
    hosts = [*(url.split("//")[-1].split(":")[0] for url in inf.urls), t.sync_host]
    remote = [host for host in hosts if host not in ("127.0.0.1", "localhost")]
    tp, g = inf.args.get("tensor_parallel_size", 1), o.rollouts_per_example
    names = [e.name for e in cfg.env]
    missing = [e.id for e in cfg.env if not find_module(e.id, cfg.path.parent)[2]]
    periods = {k: v for k, v in o.curriculum.items() if not is_period(v)}
    biased = s.top_p < 1 or s.top_k or s.min_p or s.repetition_penalty != 1
    rules = [
        (clash,
         f"inference.args.{clash}: set by launch.sh; see inference.gpus and port, max_seq_len, trainer.dtype, seed"),
        (inf.gpus % tp, f"inference.gpus = {inf.gpus} is no multiple of inference.args.tensor_parallel_size = {tp}"),
        (remote and not inf.allow_remote, f"inference.urls or sync_host: {remote} needs inference.allow_remote = true"),
        (set(t.shadow_losses) - {"cispo", "grpo", "dr_grpo", "dppo", "icepop", "gspo"},
         f"trainer.shadow_losses = {t.shadow_losses}: only the built-in losses that clip"),
        (g < 2, f"orchestrator.rollouts_per_example = {g}: a group needs at least 2 for its baseline"),
        (o.batch_size % g, f"orchestrator.batch_size = {o.batch_size} is no multiple of rollouts_per_example = {g}"),
        (o.max_concurrent < g, f"orchestrator.max_concurrent = {o.max_concurrent} is below rollouts_per_example = {g}"),
        (s.max_tokens >= run.max_seq_len,
         f"orchestrator.sampling.max_tokens = {s.max_tokens} leaves no prompt in max_seq_len = {run.max_seq_len}"),
        (o.max_prompt_len >= run.max_seq_len,
         f"orchestrator.max_prompt_len = {o.max_prompt_len} leaves no answer in max_seq_len = {run.max_seq_len}"),
        (biased and not s.allow_biased_sampling,
         "orchestrator.sampling: top_p, top_k, min_p and repetition_penalty change the distribution, so the "
         "importance ratio is biased; allow_biased_sampling = true trains all the same"),
        (missing, f"env.id = {missing}: no such module beside {cfg.path} and none that Python can import"),
        (len(set(names)) < len(names), f"[[env]]: {names} must differ, give each table a name"),
        (periods, f"orchestrator.curriculum = {periods}: must be {{ difficulty = [first step, step after the last] }}"),
        (o.oversampling_factor < 1, f"orchestrator.oversampling_factor = {o.oversampling_factor} must be at least 1"),
        (t.ref_sync_steps and not t.beta, "trainer.ref_sync_steps needs trainer.beta > 0: there is no reference"),
        (t.use_lora and not t.lora_target_modules, "trainer.lora_target_modules is empty"),
        (cfg.sends_adapters and t.lora_rank > 512,
         f"trainer.lora_rank = {t.lora_rank}: vLLM's adapters have at most 512"),
        (t.lora_dropout == 1, "trainer.lora_dropout = 1.0 drops everything"),
        (run.chat_template and not Path(run.chat_template).is_file(), f"chat_template: no file {run.chat_template!r}"),
        ("/" in run.run_name, f"run_name = {run.run_name!r} must be a plain name; output_dir has the directory"),
    ]  # fmt: skip
    for broken, message in rules:
        if broken:
            raise RunError(2, message)


def find_module(id, beside):
    """env.id -> its module's name, its file (None: Python imports it), whether it is there. Beside the TOML, else
    importable, else in configs/."""
    name = id.rsplit("/", 1)[-1].replace("-", "_")
    files = [folder / f"{name}.py" for folder in (Path(beside), Path(__file__).parent.parent)]
    if not files[0].is_file() and importlib.util.find_spec(name):
        return name, None, True
    file = next((file for file in files if file.is_file()), None)
    return name, file, file is not None


def is_period(value):
    return isinstance(value, list) and [type(x) for x in value] == [int, int] and 0 <= value[0] < value[1]


def run_directory(cfg, suffix=""):
    path = Path(cfg.run.output_dir) / (cfg.run.run_name + suffix.replace(":", "."))
    for part in ("batches", "checkpoints", "logs"):
        (path / part).mkdir(parents=True, exist_ok=True)
    return path


def identity(cfg):
    """What must not change between a run and its resumption."""
    t = cfg.trainer
    lora = [t.lora_rank, t.lora_alpha, list(t.lora_target_modules)] if t.use_lora else None
    env = [[e.name, e.id, redacted("args", e.args), e.ratio] for e in cfg.env]
    return {"run": cfg.run.run_name, "model": cfg.run.model, "seed": cfg.run.seed, "lora": lora, "env": env}


SECRET = re.compile(r"(^|_)(key|token|secret|password)$", re.IGNORECASE)


def redacted(key, value):
    """The value, without strings that are named like secrets: they are not for the disk."""
    if type(value) is dict:
        return {k: redacted(k, v) for k, v in value.items()}
    return "REDACTED" if type(value) is str and SECRET.search(key) else value


def difference(old, new):
    """Of two identities -> text, or ""."""
    return "; ".join(f"{key} was {old.get(key)!r}, now {new[key]!r}" for key in new if old.get(key) != new[key])


def read_lines(path):
    """A JSONL file -> its lines as text; what a killed process left of a last one is no line."""
    text = path.read_text(errors="replace") if path.exists() else ""
    return text[: text.rfind("\n") + 1].splitlines()


def cut_lines(path, keep, rank=0):
    """Drops lines of a JSONL file that a resumed run will write again, line by line: it may have gigabytes."""
    if rank:
        return
    path.touch()
    with open(path, errors="replace") as old, open(tmp := path.with_suffix(".tmp"), "w") as new:
        new.writelines(line for line in old if line.endswith("\n") and keep(json.loads(line)))
    os.replace(tmp, path)
