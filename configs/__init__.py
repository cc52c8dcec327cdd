"""The configuration, and how a program of ours begins, shows progress and ends. defaults.toml documents every key.

PYTHONPATH=. python configs/__init__.py config.toml [table.key=value ...]    # what launch.sh asks: shell assignments
"""

import argparse
import ctypes
import difflib
import importlib
import json
import math
import os
import re
import shlex
import sys
import tomllib
from collections import namedtuple
from contextlib import suppress
from pathlib import Path
from urllib.parse import urlsplit

HERE = Path(__file__).resolve().parent
SCHEMA = tomllib.loads((HERE / "defaults.toml").read_text())
LIMITS, DEFAULTS = SCHEMA.pop("limits"), {}  # DEFAULTS: {dotted key: value}, filled below
ORIGIN = "# all keys of "  # how a run's config.toml begins; the path of the file that it is from follows
STORAGE = (5, 13, 17, 20, 28, 30, 122)  # errno: EIO, EACCES, EEXIST, ENOTDIR, ENOSPC, EROFS, EDQUOT


class RunError(Exception):
    """Ends the run. code: 2 configuration, 3 a role died or hung, 4 data or environment, 5 numerics, 6 storage."""

    def __init__(self, code, cause):
        super().__init__(cause)
        self.code = code


def require(is_so, code, cause):
    """The run ends where this is not so."""
    if not is_so:
        raise RunError(code, cause)


# --- the configuration ------------------------------------------------------------------------------------------------


def arguments(doc, argv):
    """config.toml [table.key=value ...] [--replay DIR | --check] -> cfg; cfg.replay is DIR or None."""
    how = {"formatter_class": argparse.RawDescriptionHelpFormatter, "allow_abbrev": False}
    parser = argparse.ArgumentParser(description=doc, **how)
    parser.add_argument("config")
    parser.add_argument("overrides", nargs="*", metavar="table.key=value")
    parser.add_argument("--replay", type=Path, metavar="DIR", help="trainer.py: train on saved batches, no server")
    parser.add_argument("--check", action="store_true", help="look for what would spoil the run; train nothing")
    args = parser.parse_intermixed_args(argv)
    cfg = load_config(args.config, args.overrides, args.check)
    cfg.replay = args.replay
    return cfg


def load_config(path, overrides=(), is_check=False):
    """TOML and `table.key=value` overrides -> frozen tuples: cfg.trainer.loss, cfg.run.model (the top level), ...;
    cfg.env is a list, cfg.flat has all but further environments as {dotted key: value}. Raises RunError 2 that names
    the key and, where it is unknown, the nearest known one.

    Modules beside the file come first on Python's path, as beside a script; those of configs/ come last. config.toml in
    a run's directory stands for the file that it is from."""
    # 1. The file.
    try:
        given = flatten(tomllib.loads(text := Path(path).read_text()))
    except (OSError, ValueError) as e:  # no such file, no text, no TOML
        raise RunError(2, f"{path}: {e}") from None
    path = text.removeprefix(ORIGIN).splitlines()[0] if text.startswith(ORIGIN) else path
    sys.path[:] = [str(Path(path).resolve().parent), *sys.path, str(HERE)]
    mix = given.pop("env") if isinstance(given.get("env"), list) else []  # [[env]] tables
    if len(mix) == 1:  # as in a run's config.toml: env.args.x=1 says enough
        given, mix = given | flatten({"env": mix[0]}), []
    # 2. The overrides: a bare word is a string, env.args.x=1 leaves the other args. launch.sh's are of this run alone.
    own, before = os.environ.get("ROLEMODEL_OVERRIDES", "").split(), {}
    for item in (*overrides, *own):
        key, equals, text = item.partition("=")
        is_key = equals and re.fullmatch(r'("[^"]*"|[\w-]+)(\.("[^"]*"|[\w-]+))*', key.strip())
        require(is_key, 2, f"override {item!r}: must be key=value, e.g. trainer.learning_rate=3e-5")
        try:
            nested = tomllib.loads(item)
        except ValueError:
            nested = tomllib.loads(f"{key} = {json.dumps(text)}")
        for name, value in flatten(nested).items():
            before |= {name: given.get(name, DEFAULTS.get(name))} if item in own else {}
            given[name] = merged(given.pop(name, None), value)  # the last: of two names for one key it holds
    require(not (mix and any(k.startswith("env.") for k in given)), 2, "env.*=... does not say which [[env]] is meant")
    # 3. Names of vf-rl and of TRL's GRPOTrainer, in a file that has their table.
    if any(key.startswith("trainer.args.") for key in given):
        given = importlib.import_module("configs.old_names").translate(given)
    # 4. One configuration for each environment, of which the first gets all environments.
    envs = [flatten({"env": table}) for table in mix] or [{}]
    cfg, *others = [resolve(given | env, Path(path), is_check) for env in envs]
    cfg.env = [cfg.env, *(other.env for other in others)]
    cfg.flat |= before
    require(len({env.name for env in cfg.env}) == len(cfg.env), 2, f"{path}: each [[env]] needs a name of its own")
    return cfg


def flatten(raw, prefix=""):
    """Nested dict -> {dotted key: value}. What a key of ours stands for, such as the table env.args, stays whole."""
    flat = {}
    for name, value in raw.items():
        is_table = isinstance(value, dict) and value and prefix + name not in DEFAULTS
        flat |= flatten(value, f"{prefix}{name}.") if is_table else {prefix + name: value}
    return flat


def merged(old, new):
    """new, or of two dicts old with what new has, at every depth."""
    if not (isinstance(old, dict) and isinstance(new, dict)):
        return new
    return old | {key: merged(old.get(key), value) for key, value in new.items()}


DEFAULTS |= flatten(SCHEMA)


def resolve(given, path, is_check):
    """{dotted key: value} with one environment -> the configuration of all keys, checked."""
    # 1. Each value by itself, those that are given first; then what stands for "" and how vLLM's flags are written.
    flat = DEFAULTS | {key: checked(key, (DEFAULTS | given)[key]) for key in (*given, *DEFAULTS)}
    args = {flag.replace("-", "_"): value for flag, value in flat["inference.args"].items()}
    name = (flat["run_name"] or path.stem) + "-check" * is_check
    flat |= {"inference.args": args, "run_name": name, "env.name": flat["env.name"] or flat["env.id"]}
    # 2. Combinations, each named with both values.
    require(name[0] not in "./", 2, f"run_name = {name!r}: must be a directory's name, under output_dir")
    redacted("inference.args", args)  # refuses what is no JSON
    owned = sorted(set(args) & set(LIMITS["owned"].split()))
    require(not owned, 2, f"inference.args.{owned}: set by launch.sh, from inference.gpus, max_seq_len, dtype, seed")
    urls = flat["inference.urls"]
    is_http = all(url.startswith(("http://", "https://")) for url in urls)
    require(is_http, 2, f"inference.urls = {urls}: each must begin with http:// or https://")
    far = {flat["trainer.sync_host"], *(urlsplit(url).hostname for url in urls)} - {"127.0.0.1", "localhost"}
    is_allowed = flat["inference.allow_remote"] or not far
    require(is_allowed, 2, f"inference.urls or trainer.sync_host: {far} needs inference.allow_remote = true")
    values = {(split := "inference.args.tensor_parallel_size"): args.get("tensor_parallel_size", 1)} | flat
    is_split = type(values[split]) is int and values[split] > 0
    require(is_split, 2, f"{split} = {values[split]!r}: must be an int above 0")
    for key, relation, other in LIMITS["relations"]:
        a, b, usual = flat[key], values.get(other, other), DEFAULTS[key]
        holds = {"below": lambda: a < b, "at least": lambda: a >= b, "a multiple of": lambda: not a % b}
        holds |= {"left out without": lambda: b or a == usual, "0 with": lambda: not (a and b)}
        require(holds[relation](), 2, f"{key} = {a} must be {relation} {other}{f' = {b}' * (other in values)}")
    loss, known = flat["trainer.loss"], {"sft"}.union(*LIMITS["knobs"].values())
    for key, losses in LIMITS["knobs"].items():  # one of the user's own may use any
        is_used = loss in losses or loss not in known or flat[key] == DEFAULTS[key]
        require(is_used, 2, f"{key} = {flat[key]}: trainer.loss = {loss!r} does not use it, only {losses}")
    # 3. The tables.
    flat |= {"max_steps": 0, "tracker": "", "eval.every": 0} if is_check else {}
    cfg = argparse.Namespace(path=path, flat=flat, replay=None)
    for table in ("run", "env", "orchestrator", "sampling", "inference", "trainer", "eval", "checkpoint"):
        values = {k.rpartition(".")[2]: v for k, v in flat.items() if f"run.{k}".split(".")[-2] == table}
        setattr(cfg, table, namedtuple(table, values)(**values))
    # Merging LoRA into 16-bit weights rounds early updates away; in fp32 it is exact, and vLLM samples faster.
    cfg.sends_adapters = cfg.trainer.use_lora and cfg.trainer.dtype != "fp32"
    return cfg


def checked(key, value):
    """The value as the schema wants it (1 becomes 1.0 for a float), or RunError 2."""
    name, start = key.rpartition(".")[2], f"key {key!r} = {value!r}: must be"
    if key not in DEFAULTS:
        names = {known.rpartition(".")[2]: known for known in reversed(DEFAULTS)}
        hints = [text for word, text in LIMITS["moved"].items() if word in key.split(".")]
        hints += [f"did you mean {names[near]!r}?" for near in difflib.get_close_matches(name, names, 1)]
        raise RunError(2, f"key {key!r} = {value!r}: unknown; {[*hints, 'configs/defaults.toml has all keys'][0]}")
    kind, most, choices = type(DEFAULTS[key]), LIMITS["at_most"].get(name, 1e300), LIMITS["choices"].get(name, [value])
    value = float(value) if kind is float and type(value) is int else value
    is_kind = type(value) is kind and (kind is not list or all(type(item) is str for item in value))
    require(is_kind, 2, f"{start} {kind.__name__}{' of strings' * (kind is list)}, not {type(value).__name__}")
    is_number, is_needed = kind in (int, float), {name, key} & set(LIMITS["positive"].split())
    require(not is_number or 0 <= value <= most, 2, f"{start} at least 0{f' and at most {most}' * (most < 1e300)}")
    require(value or not is_needed, 2, f"{start} {'above 0' if is_number else 'given'}")
    require(value in choices or ("module:function" in choices and ":" in value), 2, f"{start} one of {choices}")
    return value


def named(name, table):
    """An entry of the table, or what "module:function" names. RunError 2 where there is none."""
    module, colon, attribute = name.partition(":")
    try:
        return getattr(importlib.import_module(module), attribute) if colon else table[name]
    except (ImportError, AttributeError, KeyError) as e:
        raise RunError(2, f"{name!r} is no module:function that can be used: {type(e).__name__}: {e}") from e


def served_name(cfg, version=None):
    """What the servers are called; with a version, what a request calls that one: adapters have names of their own."""
    name = os.environ.get("ROLEMODEL_RUN_ID", cfg.run.run_name)
    return f"{name}-v{version}" if cfg.sends_adapters and version is not None else name


# --- the run directory ------------------------------------------------------------------------------------------------


def run_directory(cfg, suffix=""):
    path = Path(cfg.run.output_dir) / (cfg.run.run_name + suffix.replace(":", "."))
    for part in ("batches", "checkpoints", "logs"):
        (path / part).mkdir(parents=True, exist_ok=True)
    return path


def identity(cfg):
    """What must not change between a run and its resumption."""
    t = cfg.trainer
    lora = [t.lora_rank, t.lora_alpha, t.lora_target_modules] if t.use_lora else None
    env = [[e.name, e.id, redacted("args", e.args), e.ratio] for e in cfg.env]
    replay = cfg.replay and str(cfg.replay.resolve())  # of other batches it would go on where those ended
    found = {"run": cfg.run.run_name, "model": cfg.run.model, "seed": cfg.run.seed, "lora": lora, "env": env}
    return found | {"replay": replay}


def refuse_other(found, cfg, what):
    """RunError 2 where the identity found in `what` is not this run's."""
    differs = [f"{k} was {found.get(k)!r}, now {mine!r}" for k, mine in identity(cfg).items() if found.get(k) != mine]
    require(not differs, 2, f"{what} is of another run: {'; '.join(differs)}. Choose another run_name, or remove it")


def redacted(key, value):
    """The value, without strings that are named like secrets: they are not for the disk. RunError 2 for what JSON has
    not: dates, inf, nan."""
    if type(value) is dict:
        return {k: redacted(k, v) for k, v in value.items()}
    if type(value) is list:
        return [redacted(key, v) for v in value]
    is_plain = isinstance(value, str | int) or (type(value) is float and math.isfinite(value))
    require(is_plain, 2, f"key {key!r} = {value}: must be a string, true or false, or a finite number")
    is_secret = key.lower().split("_")[-1] in ("key", "token", "secret", "password")
    return "REDACTED" if is_secret and type(value) is str else value


def to_toml(cfg):
    """The resolved configuration, for config.toml in the run directory. With = for : JSON's objects are TOML's."""
    text = lambda value: json.dumps(value, ensure_ascii=False, separators=(", ", " = "))
    parts = [{k: v for k, v in cfg.flat.items() if not k.startswith("env.")}, *(env._asdict() for env in cfg.env)]
    lines = [[f"{k} = {text(v)}\n" for k, v in redacted("", part).items()] for part in parts]
    return f"{ORIGIN}{cfg.path.resolve()}\n" + "\n[[env]]\n".join(map("".join, lines))


def cut_lines(path, keep):
    """Drops lines of a JSONL file that a resumed run will write again, and what a killed process left of a last one;
    line by line: it may have gigabytes."""
    path.touch()
    with open(path, errors="replace") as old, open(tmp := path.with_suffix(".tmp"), "w") as new:
        new.writelines(line for line in old if line.endswith("\n") and keep(json.loads(line)))
    os.replace(tmp, path)


# --- a program of ours ------------------------------------------------------------------------------------------------


def run_role(role, main):
    """main(sys.argv[1:]), then the exit code of what it raised, and why, in one line to launch.sh and to the log.

    PYTHONFAULTHANDLER, which launch.sh sets, prints every thread's stack on the SIGABRT that it sends to what hangs."""
    code = 0
    try:
        main(sys.argv[1:])
        sys.stdout.flush()
    except (SystemExit, KeyboardInterrupt):
        raise
    except BaseException as e:
        # torch's CheckpointException, which is no Exception, has what each rank met; asyncio.TaskGroup raises groups
        while hasattr(e, "failures") or isinstance(e, BaseExceptionGroup):
            e = next(iter(e.failures.values()))[0] if hasattr(e, "failures") else e.exceptions[0]
        text = f"{type(e).__name__}: {' '.join(str(e).split())}".removeprefix("RunError: ")
        # safetensors raises an error of its own, with the system's number in its text
        is_storage = getattr(e, "errno", 0) in STORAGE or any(f"os error {n})" in text for n in STORAGE)
        code = 6 if is_storage else getattr(e, "code", 3)
        code = code if code in (2, 4, 5, 6) else 3  # other people's errors have codes, too
        tell_launcher(f"[{role}] exit={code} pid={os.getpid()} rank={os.environ.get('RANK', 0)} {text}")
        with suppress(OSError):  # the disk may be full, which must not change the code
            if not (isinstance(e, RunError) or is_storage):
                sys.__excepthook__(type(e), e, e.__traceback__)
            print(f"[{role}] exit={code} {text}".encode(errors="replace").decode(), file=sys.stderr, flush=True)
    os._exit(code)  # not sys.exit: threads that wait for a dead peer must not hold the process


def tell_launcher(line):
    """To launch.sh by its pipe: a full disk cannot close it, and torchrun turns every exit code into 1."""
    if pipe := os.environ.get("ROLEMODEL_PIPE"):
        with suppress(OSError), open(os.open(pipe, os.O_WRONLY | os.O_NONBLOCK), "w", errors="replace") as f:
            f.write(f"{line[:300]}{line[300:][-1200:]}\n")  # a worker's traceback ends in its cause


def beat():
    """Shows progress to the watchdog of launch.sh, which ends a run in which no role's file gets a new time."""
    if folder := os.environ.get("ROLEMODEL_PROGRESS"):
        Path(folder, str(os.getpid())).touch()  # a file written anew takes milliseconds, for each of many rollouts


if launcher := os.environ.get("ROLEMODEL_LAUNCHER"):
    # The kernel is to end this process when its parent dies, be it launch.sh, torchrun or vLLM's server. It is asked
    # here, since vLLM's workers import trainer.py, too; by then, seconds after the start, launch.sh may be gone.
    ctypes.CDLL(None).prctl(1, 9)  # PR_SET_PDEATHSIG, SIGKILL
    if not Path(f"/proc/{launcher}").exists():
        os._exit(3)


def for_launch(argv):
    """Prints run_dir, sends_adapters, and every key as an array <table>_<key>; vLLM's args as its flags."""
    cfg = arguments(__doc__, argv)
    require(not cfg.replay, 2, "--replay needs no servers: torchrun trainer.py config.toml --replay DIR")
    for found in sorted(run_directory(cfg).glob("checkpoints/step_??????/state.json"))[-1:]:
        with suppress(OSError, ValueError, KeyError):  # a damaged one is the orchestrator's to tell of
            refuse_other(json.loads(found.read_text())["run"], cfg, found.parent)
    args, words = dict(cfg.inference.args), {"run_dir": run_directory(cfg), "sends_adapters": cfg.sends_adapters}
    if cfg.trainer.head_dtype:  # beside the user's own
        own = args.get("hf_overrides", {})
        require(type(own) is dict, 2, f"inference.args.hf_overrides = {own!r}: must be a table")
        args["hf_overrides"] = own | {"head_dtype": "float32"}
    words["inference_flags"] = ["--enable-sleep-mode"] * cfg.inference.sleep
    for key, value in args.items():  # true is --flag, false --no-flag
        flag = f"--{'no-' if value is False else ''}{key.replace('_', '-')}"
        values = {bool: [], list: value, dict: [json.dumps(value)]}.get(type(value), [value])
        words["inference_flags"] += [flag, *values]
    for key, value in cfg.flat.items():  # bash does not know 1e-05
        name = (key if "." in key else f"run.{key}").replace(".", "_")
        words[name] = f"{value:f}" if type(value) is float else value
    for name, value in words.items():
        print(f"{name}=({shlex.join(map(str, value if isinstance(value, list) else [value]))})")


if __name__ == "__main__":
    import configs  # this file as the package, whose RunError the others raise

    configs.run_role("config", configs.for_launch)
