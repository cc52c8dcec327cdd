"""The configuration, and how a program of ours begins, shows progress and ends. defaults.toml documents every key.

PYTHONPATH=. python configs/__init__.py config.toml [table.key=value ...]    # what launch.sh asks: shell assignments
"""

import ctypes
import json
import os
import pkgutil
import re
import shlex
import sys
import tomllib
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from collections import namedtuple
from contextlib import suppress
from difflib import SequenceMatcher
from pathlib import Path

SCHEMA = tomllib.loads(Path(__file__).with_name("defaults.toml").read_text())
LIMITS = SCHEMA.pop("limits")
STORAGE = r"(Errno|os error) (5|13|17|20|28|30|122)\b"  # EIO, EACCES, EEXIST, ENOTDIR, ENOSPC, EROFS, EDQUOT


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
    """config.toml [table.key=value ...] [--replay DIR] -> cfg, as load_config's."""
    parser = ArgumentParser(description=doc, formatter_class=RawDescriptionHelpFormatter, allow_abbrev=False)
    parser.add_argument("path", metavar="config.toml")
    parser.add_argument("overrides", nargs="*", metavar="table.key=value")
    parser.add_argument("--replay", type=lambda name: Path(name).resolve(), metavar="DIR", help="of saved batches")
    return load_config(**vars(parser.parse_intermixed_args(argv)))


def load_config(path, overrides=(), replay=None):
    """TOML and `table.key=value` overrides -> frozen tuples: cfg.trainer.loss, cfg.run.model (the top level), ...;
    cfg.env is a list, cfg.flat has all as {dotted key: value}, cfg.replay is the directory or None. Raises RunError 2
    that names the key and, where it is unknown, the nearest known one.

    Modules beside the file come first on Python's path, as beside a script; those of configs/ come last. config.toml in
    a run's directory stands for the file that it is from."""
    # 1. The file and the overrides.
    try:
        given = flatten(tomllib.loads(Path(source := path).read_text()))
        envs = [flatten({"env": env}) for env in given.pop("env")] if type(given.get("env")) is list else []
        for source in overrides:
            given = merged(given, parsed(source))
    except (OSError, ValueError) as e:  # no such file, no text, no TOML
        raise RunError(2, f"{source}: {e}") from None
    origin = Path(str(given.get("origin") or path)).resolve()
    sys.path[:] = [str(origin.parent), *sys.path, str(Path(__file__).resolve().parent)]
    # 2. Names of vf-rl and of TRL's GRPOTrainer, in a file that has their table.
    if any(key.startswith("trainer.args.") for key in given):
        given = named("old_names:translate", {})(given)
    # 3. One configuration for each [[env]], of which the first gets all environments. An override is for each.
    cfg, *others = [resolve(merged(env, given), origin, replay) for env in envs or [{}]]
    cfg.env = [cfg.env, *(other.env for other in others)]
    cfg.flat["env"] = [env._asdict() for env in cfg.env]
    require(len({env.name for env in cfg.env}) == len(cfg.env), 2, f"{path}: each [[env]] needs a name of its own")
    return cfg


# JSON with = for : is TOML, but for surrogates and for an unescaped DEL
toml = lambda value: json.dumps(value, ensure_ascii=False, separators=(", ", " = ")).replace("\x7f", "\\u007f")


def parsed(item):
    """An override -> {dotted key: value}. A bare word is a string. ValueError where it is no key=value."""
    with suppress(ValueError):
        return flatten(tomllib.loads(item))
    return flatten(tomllib.loads(re.sub("(?s)=(.*)", lambda text: f"={toml(text[1])}", item)))


def flatten(raw, prefix=""):
    """Nested dict -> {dotted key: value}. A table whose keys are not ours, such as env.args, stays whole."""
    flat = {}
    for key, value in ((prefix + name, value) for name, value in raw.items()):
        flat |= flatten(value, f"{key}.") if isinstance(value, dict) and key not in LIMITS["open"] else {key: value}
    return flat


def merged(old, new):
    """new, or of two dicts old with what new has, at every depth: env.args.x=1 leaves the other args."""
    is_deep = isinstance(old, dict) and isinstance(new, dict)
    return old | {key: merged(old.get(key), value) for key, value in new.items()} if is_deep else new


DEFAULTS = flatten(SCHEMA)  # {dotted key: value}


def resolve(given, path, replay):
    """{dotted key: value} with one environment -> the configuration of all keys, checked."""
    flat = merged(DEFAULTS | {"origin": str(path)}, {key: checked(key, value) for key, value in given.items()})
    flat |= {"run_name": flat["run_name"] or path.stem, "env.name": flat["env.name"] or flat["env.id"]}
    check_rules(flat)
    # What launch.sh has found out is of this run alone: not for config.toml.
    values = flat | flatten(tomllib.loads(os.environ.get("ROLEMODEL_OVERRIDES", "")))
    cfg = Namespace(flat={k: v for k, v in flat.items() if not k.startswith("env.")}, replay=replay)
    for table in ("run", "env", "orchestrator", "sampling", "inference", "trainer", "eval", "checkpoint"):
        fields = {k.rpartition(".")[2]: v for k, v in values.items() if f"run.{k}".split(".")[-2] == table}
        setattr(cfg, table, namedtuple(table, fields)(**fields))
    # Merging LoRA into 16-bit weights rounds early updates away; in fp32 it is exact, and vLLM samples faster.
    cfg.sends_adapters = cfg.trainer.use_lora and cfg.trainer.dtype != "fp32"
    return cfg


def checked(key, value):
    """The value, of the default's type (1 becomes 1.0 for a float) and of what JSON can hold, or RunError 2."""
    what, kind = f"key {key!r} = {redacted(value)!r}", type(DEFAULTS.get(key))
    if key not in DEFAULTS:
        # what comes after the last dot counts twice
        likeness = lambda known: SequenceMatcher(None, known.split(".")[-1] + known, key.split(".")[-1] + key).ratio()
        raise RunError(2, f"{what}: unknown; the nearest in configs/defaults.toml is {max(DEFAULTS, key=likeness)!r}")
    value = float(value) if kind is float and type(value) is int else value
    is_kind = type(value) is kind and (kind is not list or all(type(item) is str for item in value))
    is_plain = json.loads(json.dumps(value, default=str), parse_constant=str) == value
    require(is_kind and is_plain, 2, f"{what}: must be {LIMITS['types'][kind.__name__]}")
    return value


def check_rules(flat):
    """RunError 2 where a rule of the schema's [limits] does not hold."""
    values = {flat["trainer.loss"]: True} | flat | {f"inference.args.{k}": v for k, v in flat["inference.args"].items()}
    for key, must, other in [(key, *rule) for keys, *rule in LIMITS["rules"] for key in keys.split()]:
        a, b = flat[key], values.get(str(other), other)
        matches = lambda text: all(re.fullmatch(text, str(x)) for x in (a if type(a) in (list, dict) else [a]))
        is_out = a == DEFAULTS[key] or matches(LIMITS["local"])
        is_there = any(values.get(name) for name in str(other).split())
        holds = {"above": lambda: a > b, "at least": lambda: a >= b, "below": lambda: a < b, "at most": lambda: a <= b}
        holds |= {"left out with": lambda: is_out or not is_there, "left out without": lambda: is_out or is_there}
        holds |= {"a multiple of": lambda: b in range(1, a + 1) and a % b == 0, "like": lambda: matches(b)}
        require(holds[must](), 2, f"key {key!r} = {redacted(a)!r}: must be {must} {other}{f' = {b!r}' * (b != other)}")


def named(name, table):
    """An entry of the table, or what "module:function" names. RunError 2 where there is none."""
    try:
        return pkgutil.resolve_name(name) if ":" in name else table[name]
    except (Exception, SystemExit) as e:  # also what its module raises
        raise RunError(2, f"{name!r} is no module:function that can be used: {type(e).__name__}: {e}") from e


def served_name(cfg, version=None):
    """What the servers are called; with a version, what a request calls that one: adapters have names of their own."""
    name = os.environ.get("ROLEMODEL_RUN_ID", cfg.run.run_name)
    return f"{name}-v{version}" if cfg.sends_adapters and version is not None else name


# --- the run directory ------------------------------------------------------------------------------------------------


def run_directory(cfg, suffix=""):
    """With max_steps = 0 one beside it, which leaves the run alone."""
    path = Path(cfg.run.output_dir, cfg.run.run_name + "-check" * (not cfg.run.max_steps) + suffix.replace(":", "."))
    for part in ("batches", "checkpoints", "logs"):
        (path / part).mkdir(parents=True, exist_ok=True)
    return path


def identity(cfg):
    """What must not change between a run and its resumption; a replay of other batches would go on in the middle."""
    return redacted({key: cfg.flat[key] for key in LIMITS["fixed"].split()} | {"replay": str(cfg.replay)})


def refuse_other(found, cfg, what):
    """RunError 2 where the identity found in `what` is not this run's."""
    differs = [f"{k} was {found.get(k)!r}, now {mine!r}" for k, mine in identity(cfg).items() if found.get(k) != mine]
    require(not differs, 2, f"{what} is of another run: {'; '.join(differs)}. Choose another run_name, or remove it")


def redacted(value):
    """The value, without strings that are named like secrets: they are not for the disk. Tables are sorted, and
    dates text."""
    is_secret = lambda key, value: re.fullmatch(LIMITS["secret"], key) and type(value) in (str, list)
    hide = lambda table: {k: "REDACTED" if is_secret(k, v) else v for k, v in sorted(table.items())}
    return json.loads(json.dumps(value, default=str), object_hook=hide)


def to_toml(cfg):
    """The resolved configuration, for config.toml in the run directory."""
    return "".join(f"{key} = {toml(value)}\n" for key, value in redacted(cfg.flat).items())


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
    except BaseException as e:  # no sys.excepthook: torch.distributed puts one of its own before it
        # torch's CheckpointException, which is no Exception, has what each rank met; asyncio.TaskGroup raises groups
        while hasattr(e, "failures") or isinstance(e, BaseExceptionGroup):
            e = next(iter(e.failures.values()))[0] if hasattr(e, "failures") else e.exceptions[0]
        text = f"{type(e).__name__}: {' '.join(str(e).split())}".removeprefix("RunError: ")
        # a code of ours, not just any that an error has; safetensors has the system's number in the text alone
        code = {2: 2, 4: 4, 5: 5, 6: 6}.get(getattr(e, "code", 0), 6 if re.search(STORAGE, text) else 3)
        tell_launcher(f"[{role}] exit={code} pid={os.getpid()} rank={os.environ.get('RANK', 0)} {text}")
        with suppress(OSError):  # the disk may be full, which must not change the code
            if code == 3:
                sys.__excepthook__(type(e), e, e.__traceback__)
            print(f"[{role}] exit={code} {text}", file=sys.stderr, flush=True)
    os._exit(code)  # not sys.exit: threads that wait for a dead peer must not hold the process


def tell_launcher(line):
    """To launch.sh by its pipe: a full disk cannot close it, and torchrun turns every exit code into 1."""
    with suppress(OSError, KeyError), open(os.environ["ROLEMODEL_PIPE"], "w", errors="replace") as pipe:
        pipe.write(f"{line[:300]}{line[300:][-1200:]}\n")  # a worker's traceback ends in its cause


def beat():
    """Shows progress to the watchdog of launch.sh, which ends a run in which no role's file gets a new time."""
    if folder := os.environ.get("ROLEMODEL_PROGRESS"):
        Path(folder, str(os.getpid())).touch()  # a file written anew takes milliseconds, for each of many rollouts


if pipe_of_launcher := os.environ.get("ROLEMODEL_PIPE"):
    # The kernel is to end this process when its parent dies, be it launch.sh, torchrun or vLLM's server. It is asked
    # here, since whatever they start imports this, too (serve.py); by then launch.sh may be gone.
    ctypes.CDLL(None).prctl(1, 9)  # PR_SET_PDEATHSIG, SIGKILL
    os.stat(pipe_of_launcher)  # raises where it is gone, or a zombie, which a signal would still reach


def for_launch(argv):
    """Prints run_dir, sends_adapters, identity, and every key as an array <table>_<key>; vLLM's args as its flags."""
    cfg = arguments(__doc__, argv)
    words = {"run_dir": run_directory(cfg), "sends_adapters": cfg.sends_adapters, "identity": json.dumps(identity(cfg))}
    words |= {"_".join(f"run.{key}".split(".")[-2:]): value for key, value in cfg.flat.items()}
    flags = words["inference_flags"] = ["--enable-sleep-mode"] * cfg.inference.sleep
    for key, value in cfg.inference.args.items():  # true is --flag, false --no-flag
        flags.append(f"--{'no-' * (value is False)}{key.replace('_', '-')}")
        flags += {bool: [], list: value, dict: [json.dumps(value)]}.get(type(value), [value])
    for name, value in words.items():
        print(f"{name}=({shlex.join(map(str, value if isinstance(value, list) else [value]))})")


if __name__ == "__main__":
    run_role("config", for_launch)
