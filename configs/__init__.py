"""The configuration, and how a program of ours begins, shows progress and ends. defaults.toml documents every key.

python configs/__init__.py config.toml [table.key=value ...]     # what launch.sh asks: shell assignments
"""

import argparse
import ctypes
import difflib
import faulthandler
import importlib
import json
import os
import shlex
import signal
import sys
import time
import tomllib
import traceback
from collections import namedtuple
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

HERE = Path(__file__).resolve().parent
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
    """config.toml [table.key=value ...] [--replay DIR | --check] -> cfg, DIR or None."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config")
    parser.add_argument("overrides", nargs="*", metavar="table.key=value")
    parser.add_argument(
        "--replay", type=Path, metavar="DIR", help="trainer.py: train on saved batches, without a server"
    )
    parser.add_argument("--check", action="store_true", help="look for what would spoil the run; train nothing")
    args = parser.parse_intermixed_args(argv)
    cfg = load_config(args.config, args.overrides)
    if args.check:
        cfg.run = cfg.run._replace(max_steps=0, run_name=f"{cfg.run.run_name}-check", tracker="")
        cfg.eval = cfg.eval._replace(every=0)
    return cfg, args.replay


def load_config(path, overrides=()):
    """TOML and `table.key=value` overrides -> frozen tuples: cfg.trainer.loss, cfg.run.model (the top level), ...;
    cfg.env is a list. Raises RunError 2 that names the key and, where it is unknown, the nearest known one.

    Modules beside the file come first on Python's path, as beside a script; those of configs/ come last."""
    schema = tomllib.loads((HERE / "defaults.toml").read_text())
    limits, defaults = schema.pop("limits"), flatten(schema)
    open_tables = {key for key, value in defaults.items() if type(value) is dict}
    try:
        raw = tomllib.loads(Path(path).read_text())
    except (OSError, ValueError) as e:  # no such file, no text, no TOML
        raise RunError(2, f"{path}: {e}") from None
    sys.path[:] = [str(Path(path).resolve().parent), *sys.path, str(HERE)]
    mix = raw.pop("env") if isinstance(raw.get("env"), list) else []  # [[env]] tables
    given = flatten(raw, open_tables)
    override(given, overrides, open_tables)
    if any(key.startswith("trainer.args.") for key in given):  # a file of vf-rl, or names of TRL's GRPOTrainer
        given = importlib.import_module("configs.old_names").translate(given)
    of_env = {key: value for key, value in defaults.items() if key.startswith("env.")}
    whole = given | {k: v for k, v in defaults.items() if k not in given and not (mix and k in of_env)}
    flat = {k: checked(k, v, defaults, limits) for k, v in whole.items()}
    cfg, envs = SimpleNamespace(path=Path(path), env=[]), [flatten({"env": table}, open_tables) for table in mix]
    if mix and (unclear := set(of_env) & set(given)):
        raise RunError(2, f"{path} has several [[env]] tables, so {sorted(unclear)} does not say which")
    for table in ("run", "orchestrator", "sampling", "inference", "trainer", "eval", "checkpoint"):
        values = {k.rpartition(".")[2]: v for k, v in flat.items() if (f"run.{k}".split(".")[-2]) == table}
        setattr(cfg, table, namedtuple(table, values)(**values))
    for keys in envs or [flat]:
        values = {k[4:]: checked(k, (of_env | keys)[k], defaults, limits) for k in of_env | keys if k[:4] == "env."}
        cfg.env.append(namedtuple("env", values)(**values | {"name": values["name"] or values["id"]}))
    cfg.run = cfg.run._replace(run_name=cfg.run.run_name or cfg.path.stem)
    cfg.inference = cfg.inference._replace(args={k.replace("-", "_"): v for k, v in cfg.inference.args.items()})
    # Merging LoRA into 16-bit weights rounds early updates away; in fp32 it is exact, and vLLM samples faster.
    cfg.sends_adapters = cfg.trainer.use_lora and cfg.trainer.dtype != "fp32"
    check(cfg, flat, limits)
    return cfg


def flatten(raw, open_tables=(), prefix=""):
    """Nested dict -> {dotted key: value}; stops at keys whose value is a table by itself, such as env.args."""
    flat = {}
    for name, value in raw.items():
        is_nested = isinstance(value, dict) and value and prefix + name not in open_tables
        flat |= flatten(value, open_tables, f"{prefix}{name}.") if is_nested else {prefix + name: value}
    return flat


def override(given, items, open_tables):
    """Adds table.key=value items to `given`; a bare word is a string, env.args.x=1 leaves the other args."""
    for item in items:
        key, equals, text = item.partition("=")
        if not equals:
            raise RunError(2, f"override {item!r}: must be key=value, e.g. trainer.learning_rate=3e-5")
        try:
            nested = tomllib.loads(item)
        except tomllib.TOMLDecodeError:
            nested = tomllib.loads(f"{key} = {json.dumps(text)}")
        for name, value in flatten(nested, open_tables).items():
            is_open = name in open_tables and type(value) is dict
            given[name] = given.get(name, {}) | value if is_open else value


def checked(key, value, defaults, limits):
    """The value as the schema wants it (1 becomes 1.0 for a float), or RunError 2."""
    name, start = key.rpartition(".")[2], f"key {key!r} = {value!r}: "
    if key not in defaults:
        near = difflib.get_close_matches(name, [k.rpartition(".")[2] for k in defaults], 1)
        hints = [text for old, text in limits["moved"].items() if old in key.split(".")]
        hints += [f"did you mean {k!r}?" for k in defaults if k.rpartition(".")[2] in near]
        raise RunError(2, f"{start}unknown; {[*hints, 'configs/defaults.toml has all keys'][0]}")
    kind, most = type(defaults[key]), limits["at_most"].get(name, 1e300)
    value = float(value) if kind is float and type(value) is int else value
    if type(value) is not kind or (kind is list and not all(type(item) is str for item in value)):
        wanted = "list of strings" if kind is list else kind.__name__
        raise RunError(2, f"{start}must be {wanted}, not {type(value).__name__}")
    if kind in (int, float) and not 0 <= value <= most:
        raise RunError(2, f"{start}must be at least 0{f' and at most {most}' * (most < 1e300)}")
    if not value and {name, key} & set(limits["positive"].split()):
        raise RunError(2, start + ("must be above 0" if kind in (int, float) else "must be given"))
    is_ours = ":" not in str(value) or name not in ("loss", "advantage")  # "module:function"
    if is_ours and value not in limits["choices"].get(name, [value]):
        raise RunError(2, f"{start}must be one of {limits['choices'][name]}")
    return value


def check(cfg, flat, limits):
    """Impossible combinations, each named with both numbers."""
    holds = {"below": lambda a, b: a < b, "at least": lambda a, b: a >= b, "a multiple of": lambda a, b: not a % b}
    holds["left out without"] = lambda a, b: not a or b
    for key, relation, other in limits["relations"]:
        a, b = flat[key], flat.get(other, other)
        if not holds[relation](a, b):
            raise RunError(2, f"{key} = {a} must be {relation} {other}{f' = {b}' * (other in flat)}")
    s, inf, names = cfg.sampling, cfg.inference, [env.name for env in cfg.env]
    clash, tp = sorted(set(inf.args) & set(limits["owned"].split())), inf.args.get("tensor_parallel_size", 1)
    hosts = [url.split("//")[-1].split(":")[0] for url in (*inf.urls, cfg.trainer.sync_host)]
    is_remote = not inf.allow_remote and set(hosts) - {"127.0.0.1", "localhost"}
    is_biased = not s.allow_biased_sampling and (s.top_p < 1 or s.top_k or s.min_p or s.repetition_penalty != 1)
    rules = {
        f"inference.args.{clash}: set by launch.sh, from inference.gpus, max_seq_len, trainer.dtype, seed": clash,
        f"inference.gpus = {inf.gpus} must be a multiple of inference.args.tensor_parallel_size = {tp}": inf.gpus % tp,
        f"inference.urls or trainer.sync_host: {hosts} needs inference.allow_remote = true": is_remote,
        "orchestrator.sampling: top_p, top_k, min_p and repetition_penalty change the distribution, so the importance "
        "ratio is biased; allow_biased_sampling = true trains all the same": is_biased,
        f"[[env]]: {names} must differ, give each table a name": len(set(names)) < len(names),
    }
    for message, is_broken in rules.items():
        if is_broken:
            raise RunError(2, message)


def named(name, table):
    """An entry of the table, or what "module:function" names."""
    module, colon, attribute = name.partition(":")
    return getattr(importlib.import_module(module), attribute) if colon else table[name]


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
    return {"run": cfg.run.run_name, "model": cfg.run.model, "seed": cfg.run.seed, "lora": lora, "env": env}


def refuse_other(found, cfg, what):
    """RunError 2 where the identity found in `what` is not this run's."""
    differs = [f"{k} was {found.get(k)!r}, now {mine!r}" for k, mine in identity(cfg).items() if found.get(k) != mine]
    if differs:
        raise RunError(2, f"{what} is of another run: {'; '.join(differs)}. Choose another run_name, or remove it")


def redacted(key, value):
    """The value, without strings that are named like secrets: they are not for the disk."""
    if type(value) is dict:
        return {k: redacted(k, v) for k, v in value.items()}
    is_secret = key.lower().split("_")[-1] in ("key", "token", "secret", "password")
    return "REDACTED" if is_secret and type(value) is str else value


def to_toml(cfg):
    """The resolved configuration, for config.toml in the run directory."""

    def lines(table):
        for key, value in flatten(redacted("", table._asdict())).items():
            yield ".".join(map(json.dumps, key.split("."))) + f" = {json.dumps(value, ensure_ascii=False)}\n"

    tables = {
        f"[{name}]\n": getattr(cfg, name) for name in ("orchestrator", "inference", "trainer", "eval", "checkpoint")
    }
    tables = {"": cfg.run, **tables, "[orchestrator.sampling]\n": cfg.sampling}
    parts = [*tables.items(), *(("[[env]]\n", env) for env in cfg.env)]
    return "\n".join(header + "".join(lines(table)) for header, table in parts)


def cut_lines(path, keep):
    """Drops lines of a JSONL file that a resumed run will write again, and what a killed process left of a last one;
    line by line: it may have gigabytes."""
    path.touch()
    with open(path, errors="replace") as old, open(tmp := path.with_suffix(".tmp"), "w") as new:
        new.writelines(line for line in old if line.endswith("\n") and keep(json.loads(line)))
    os.replace(tmp, path)


# --- a program of ours ------------------------------------------------------------------------------------------------


def run_role(role, main):
    """main(sys.argv[1:]), then the exit code of what it raised, and why, in one line to launch.sh and to the log."""
    faulthandler.enable()  # SIGABRT, which launch.sh sends to what hangs, prints every thread's stack
    code = 0
    try:
        fault(f"start_{role}")
        main(sys.argv[1:])
        sys.stdout.flush()
    except (SystemExit, KeyboardInterrupt):
        raise
    except BaseException as e:
        if hasattr(e, "failures"):  # torch's CheckpointException, which is no Exception: what a rank met is in it
            e = next(iter(e.failures.values()))[0]
        while isinstance(e, BaseExceptionGroup):  # from asyncio.TaskGroup
            e = e.exceptions[0]
        text = (
            " ".join(str(e).split()) if isinstance(e, RunError) else f"{type(e).__name__}: {' '.join(str(e).split())}"
        )
        # safetensors raises an error of its own, with the system's number in its text
        is_storage = getattr(e, "errno", 0) in STORAGE or any(f"os error {n})" in text for n in STORAGE)
        code = 6 if is_storage else getattr(e, "code", 3)
        code = code if code in (2, 4, 5, 6) else 3  # other people's errors have codes, too
        tell_launcher(f"[{role}] exit={code} pid={os.getpid()} rank={os.environ.get('RANK', 0)} {text}")
        with suppress(OSError):  # the disk may be full, which must not change the code
            if not isinstance(e, RunError):
                traceback.print_exception(e)
            print(f"[{role}] exit={code} {text}", file=sys.stderr, flush=True)
    os._exit(code)  # not sys.exit: threads that wait for a dead peer must not hold the process


def tell_launcher(line):
    """To launch.sh by its pipe: a full disk cannot close it, and torchrun turns every exit code into 1."""
    line = line if len(line) <= 1500 else f"{line[:300]} ... {line[-1200:]}"  # a worker's traceback ends in its cause
    if pipe := os.environ.get("ROLEMODEL_PIPE"):
        with suppress(OSError), open(os.open(pipe, os.O_WRONLY | os.O_NONBLOCK), "w") as f:
            f.write(line + "\n")


def beat(count=[0]):  # noqa: B006  one counter for the process
    """Shows progress to the watchdog of launch.sh, which ends a run in which no role's counter moves."""
    count[0] += 1
    if folder := os.environ.get("ROLEMODEL_PROGRESS"):
        Path(folder, str(os.getpid())).write_text(str(count[0]))


if launcher := os.environ.get("ROLEMODEL_LAUNCHER"):
    # The kernel is to end this process when its parent dies, be it launch.sh, torchrun or vLLM's server. It is asked
    # here, since vLLM's workers import trainer.py, too; by then, seconds after the start, launch.sh may be gone.
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    if not Path(f"/proc/{launcher}").exists():
        os._exit(3)


def fault(point, step=0):
    """For tests: FAULT=point[@rank,step]:action breaks this process at exactly this point. The action is a signal's
    number (9: killed, 19: stopped, 0: held for a minute), or enospc for a full disk."""
    where, _, action = os.environ.get("FAULT", "").partition(":")
    if where in (point, f"{point}@{os.environ.get('RANK', 0)},{step}"):
        print(f"[fault] {where} in process {os.getpid()}", file=sys.stderr, flush=True)
        if action == "enospc":
            raise OSError(28, os.strerror(28))
        os.kill(os.getpid(), int(action))
        time.sleep(60)


def for_launch(argv):
    """Prints run_dir, sends_adapters, and every key as an array <table>_<key>; vLLM's args as its flags."""
    cfg, replay = arguments(__doc__, argv)
    if replay:
        raise RunError(2, "--replay needs no servers: torchrun trainer.py config.toml --replay DIR")
    words = {"run_dir": run_directory(cfg), "sends_adapters": cfg.sends_adapters, "inference_flags": []}
    for key, value in cfg.inference.args.items():  # true is --flag, false --no-flag
        flag = f"--{'no-' if value is False else ''}{key.replace('_', '-')}"
        words["inference_flags"] += [flag] if isinstance(value, bool) else [flag, value]
    for table in (cfg.run, cfg.inference, cfg.orchestrator, cfg.trainer):
        words |= {f"{type(table).__name__}_{k}": v for k, v in table._asdict().items() if type(v) is not dict}
    for name, value in words.items():
        quoted = [shlex.quote(str(word)) for word in (value if isinstance(value, list) else [value])]
        print(f"{name}=({' '.join(quoted)})")


if __name__ == "__main__":
    import configs  # this file as the package, whose RunError the others raise

    configs.run_role("config", configs.for_launch)
