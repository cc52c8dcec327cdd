"""The configuration of a run: one TOML, overrides of it, and the checks that hold for both.

defaults.toml documents every key; an unknown key, or a value of another type, ends the run before it starts."""

import ast
import json
import os
import re
import sys
import tomllib
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from collections import defaultdict, namedtuple
from contextlib import suppress
from difflib import SequenceMatcher
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

from configs.runtime.directory import redacted
from configs.runtime.role import CONFIG, RunError, place_of, require

HERE = Path(__file__).resolve().parent
# Tables whose keys are not ours to know.
OPEN = {"env.args", "inference.args", "orchestrator.curriculum", "orchestrator.sampling.chat_template_kwargs"}
OPEN |= {"trainer.loss_args", "trainer.importance_args", "orchestrator.order_args"}
TYPES = {str: "a string", bool: "true or false", int: "an int", float: "a finite number"}
TYPES |= {list: "a list of strings", dict: "a table, without dates, inf and nan"}
# Flags of vLLM that the launcher sets.
TAKEN = "host port model dtype seed max_model_len chat_template served_model_name logprobs_mode"
TAKEN += " worker_extension_cls data_parallel_size"


def arguments(doc, argv, replay=False):
    """Parses config.toml [table.key=value ...], with `replay` also --replay DIR. Returns what load_config returns."""
    parser = ArgumentParser(description=doc, formatter_class=RawDescriptionHelpFormatter, allow_abbrev=False)
    parser.add_argument("path", metavar="config.toml")
    parser.add_argument("overrides", nargs="*", metavar="table.key=value")
    if replay:
        parser.add_argument("--replay", type=Path, metavar="DIR", help="train on the batch files of a directory")
    return load_config(**vars(parser.parse_intermixed_args(argv)))


def load_config(path, overrides=(), replay=None):
    """Returns the configuration as tuples: cfg.trainer.loss, cfg.run.model (the top level of the file), ...

    cfg.env is a list with one entry for each [[env]]; cfg.flat holds all keys as {dotted key: value}; cfg.replay is the
    directory of saved batches or None. Raises RunError with CONFIG, which names the key and the nearest known one.

    The directory of the file comes last on Python's path: modules beside it are found, but never replace ours. The
    config.toml in a run's directory stands for the file it was made from."""
    from configs.compat import vf_rl  # names from vf-rl, from TRL's GRPOTrainer and from former versions

    # 1. The file and the overrides.
    source = path
    try:
        given = flatten(tomllib.loads(Path(path).read_text("utf-8-sig")))  # some editors begin a file with a mark
        envs = [{}]
        if isinstance(given.get("env"), list):
            envs = [flatten({"env": env}) for env in given.pop("env")]
        for source in overrides:
            new = parse_override(source)
            given = overridden(vf_rl.without_ours(given, new), new)
    except (OSError, ValueError) as e:  # no such file, not text, not TOML
        raise RunError(CONFIG, f"{source}: {e}") from None
    origin = Path(str(given.get("origin") or path)).resolve()
    sys.path.append(str(origin.parent))
    # 2. Other people's names become ours.
    given = vf_rl.translate(given)
    # 3. One configuration for each [[env]]; the first gets all environments. An override holds for each of them.
    resolved = [resolve(overridden(env, given), origin) for env in envs]
    cfg = resolved[0]
    cfg.replay = replay and replay.resolve()
    cfg.env = [other.env for other in resolved]
    cfg.flat["env"] = [env._asdict() for env in cfg.env]
    names = {env.name for env in cfg.env}
    require(len(names) == len(cfg.env), CONFIG, f"{path}: each [[env]] needs a name of its own")
    return cfg


def flatten(raw, prefix=""):
    """Returns a nested dict as {dotted key: value}. A table whose keys are not ours, such as env.args, stays whole."""
    flat = {}
    for name, value in raw.items():
        key = prefix + name
        if isinstance(value, dict) and key not in OPEN:
            flat |= flatten(value, f"{key}.")
        else:
            flat[key] = value
    return flat


def merged(old, new):
    """`new`; or, of two dicts, `old` updated by `new` at every depth: env.args.x=1 leaves the other args alone."""
    if not (isinstance(old, dict) and isinstance(new, dict)):
        return new
    return old | {key: merged(old.get(key), value) for key, value in new.items()}


def overridden(old, new):
    """`old` merged with `new`, in which an empty table clears an open one: env.args={}."""
    return merged({key: value for key, value in old.items() if new.get(key) != {}}, new)


def parse_override(item):
    """Returns 'table.key=value' as {dotted key: value}. A bare word is a string. Raises ValueError for anything else,
    and for words that look like a value of Python's."""
    with suppress(ValueError):
        return flatten(tomllib.loads(item))
    key, equals, word = item.partition("=")
    if word in ("True", "False", "None") or word[:1] in ("[", "{"):
        raise ValueError(f'{word} is no value of TOML: write true, false, ["a"], {{ a = 1 }}, or quotes around text')
    return flatten(tomllib.loads(f"{key}{equals}{to_toml_value(word)}" if equals else item))


def to_toml_value(value):
    """JSON with = in place of : is TOML, except for an unescaped DEL."""
    text = json.dumps(value, ensure_ascii=False, separators=(", ", " = "))
    return text.replace("\x7f", "\\u007f")


def to_toml(cfg):
    """The resolved configuration as text, for config.toml in the run's directory; secrets are hidden."""
    return "".join(f"{key} = {to_toml_value(value)}\n" for key, value in redacted(cfg.flat).items())


DEFAULTS = flatten(tomllib.loads((HERE / "defaults.toml").read_text()))  # {dotted key: value}


def resolve(given, path):
    """Returns the checked configuration with all keys, from {dotted key: value} with one environment."""
    given = {key: checked(key, value) for key, value in given.items()}
    flat = merged(DEFAULTS | {"origin": str(path)}, given)
    flat["run_name"] = flat["run_name"] or path.stem
    flat["env.name"] = flat["env.name"] or flat["env.id"]
    check(flat)
    check_pairs(flat)
    what = "env.args holds REDACTED, which stands for a secret: give it again, env.args.NAME=..."
    require('"REDACTED"' not in json.dumps(flat["env.args"]), CONFIG, what)
    # What the launcher found out about this machine belongs to this start alone, not into config.toml.
    values = flat | flatten(tomllib.loads(os.environ.get("ROLEMODEL_OVERRIDES", "")))
    # Absolute once: user code may change the working directory.
    values["output_dir"] = str(Path(flat["output_dir"]).expanduser().absolute())
    for key in ("model", "chat_template"):
        with suppress(OSError, RuntimeError):  # a name too long for a file, ~nobody
            file = Path(flat[key]).expanduser()
            if flat[key] and file.exists():
                values[key] = str(file.absolute())
    shared = {key: value for key, value in flat.items() if not key.startswith("env.")}
    cfg = Namespace(flat=shared)
    tables = defaultdict(dict)
    for key, value in values.items():
        *_, table, field = f"run.{key}".split(".")
        tables[table][field] = value
    for table, fields in tables.items():
        setattr(cfg, table, namedtuple(table, fields)(**fields))
    # In 16 bits merging LoRA would round early updates away. In fp32 it is exact, and vLLM samples faster without it.
    cfg.sends_adapters = cfg.trainer.use_lora and cfg.trainer.dtype != "fp32"
    return cfg


def checked(key, value):
    """The value, if it has the type of the key's default (1 becomes 1.0 for a float) and JSON can hold it."""
    shown = redacted({key.split(".")[-1]: value})
    what = f"key {key!r} = {[*shown.values()][0]!r}"
    if key not in DEFAULTS:
        raise RunError(CONFIG, f"{what}: unknown; the nearest in configs/defaults.toml is {nearest(key)!r}")
    kind = type(DEFAULTS[key])
    if kind is float and type(value) is int:
        value = float(value)
    is_kind = type(value) is kind
    if kind is list:
        is_kind = is_kind and all(type(item) is str for item in value)
    is_json = json.loads(json.dumps(value, default=str), parse_constant=str) == value
    require(is_kind and is_json, CONFIG, f"{what}: must be {TYPES[kind]}")
    return value


def nearest(key):
    """The known key that is most like this one; the part after the last dot counts twice."""

    def likeness(known):
        doubled = [name.split(".")[-1] + name for name in (known, key)]
        return SequenceMatcher(None, *doubled).ratio()

    return max(DEFAULTS, key=likeness)


def check(flat):
    """Raises RunError with CONFIG unless every value is in its range."""

    def must(is_right, keys, condition):
        for key in keys.split():
            require(is_right(flat[key]), CONFIG, f"key {key!r} = {flat[key]!r}: must be {condition}")

    # 1. Ranges.
    must(bool, "model env.id trainer.lora_target_modules", "given")
    above_0 = """
        max_seq_len prepare_timeout env.ratio inference.gpus eval.rollouts_per_example eval.hold_s checkpoint.keep
        orchestrator.batch_size orchestrator.max_concurrent orchestrator.generation_timeout
        orchestrator.sampling.max_tokens orchestrator.sampling.temperature orchestrator.sampling.top_p
        orchestrator.sampling.repetition_penalty
        trainer.gpus trainer.replicas trainer.learning_rate trainer.max_grad_norm trainer.updates_per_batch
        trainer.minibatches trainer.micro_batch_size trainer.lora_rank trainer.lora_alpha trainer.sync_timeout_s
    """
    must(lambda x: x > 0, above_0, "above 0")
    must(lambda x: x >= 1, "watchdog inference.startup_timeout orchestrator.oversampling_factor", "at least 1")
    must(lambda x: x >= 2, "orchestrator.rollouts_per_example", "at least 2")
    for key, value in flat.items():
        if isinstance(value, int | float):
            must(lambda x: x >= 0, key, "at least 0")
    must(lambda x: x < 1, "trainer.lora_dropout trainer.adam_beta2", "below 1")
    shares = "orchestrator.max_error_share orchestrator.sampling.top_p orchestrator.sampling.min_p"
    shares += " trainer.warmup_ratio trainer.gamma trainer.ref_sync_alpha"
    must(lambda x: x <= 1, shares, "at most 1")
    must(lambda x: x <= 512, "trainer.lora_rank", "at most 512, as vLLM's adapters are")
    must(lambda x: x <= 65535, "inference.port", "at most 65535")
    must(lambda x: x <= 999999, "max_steps", "at most 999999: names of files have six digits")
    must(lambda x: x < 2**32, "seed", "at most 4294967295, as numpy's are")
    must(lambda x: len(x) <= 4 and all(x), "orchestrator.sampling.stop", "at most four strings, none of them empty")
    seconds = "watchdog prepare_timeout inference.startup_timeout trainer.sync_timeout_s"
    must(lambda x: x <= 1e9, seconds, "at most 1000000000")
    # 2. Words.
    for key, words in {
        "tracker": ("", "wandb", "trackio", "tensorboard"),
        "trainer.dtype": ("bf16", "fp16", "fp32"),
        "trainer.head_dtype": ("", "fp32"),
        "trainer.lr_scheduler_type": ("constant", "constant_with_warmup", "linear", "cosine"),
        "trainer.sync_backend": ("auto", "gloo", "nccl"),
        "trainer.loss": ("cispo", "grpo", "dr_grpo", "module:function"),
        "trainer.advantage": ("mean", "std", "batch_std", "leave_one_out", "module:function"),
        "trainer.importance": ("", "module:function"),
        "trainer.optimizer": ("", "module:function"),
        "orchestrator.order": ("", "module:class"),
        "teacher.prompt": ("", "module:function"),
    }.items():
        if words[-1].startswith("module:") and re.fullmatch(r"[^:]+:[^:]+", flat[key]):
            problem = not_found(flat[key])
            require(not problem, CONFIG, f"key {key!r} = {flat[key]!r}: {problem}")
        else:
            must(words.__contains__, key, f"one of {words}")
    must(lambda name: re.fullmatch(r"[^./][^/]*", name), "run_name", "the name of a directory")
    is_url = re.compile("https?://.*[^/]").fullmatch
    must(lambda urls: all(map(is_url, urls)), "inference.urls", "like http://host:port")
    for flag in flat["inference.args"]:
        is_free = flag not in TAKEN.split() and re.fullmatch("[a-z0-9_]+", flag)
        what = f"key 'inference.args.{flag}': must be a flag of vLLM, written with _, that is not set by launch.sh"
        require(is_free, CONFIG, what)


def check_pairs(flat):
    """Raises RunError with CONFIG unless every key goes with the others."""
    flat = flat | {f"inference.args.{flag}": value for flag, value in flat["inference.args"].items()}

    def together(is_right, keys, condition, other):
        value = flat.get(other)
        for key in keys.split():
            what = f"key {key!r} = {flat[key]!r}: must be {condition} {other} = {value!r}"
            require(is_right(flat[key], value), CONFIG, what)

    def is_multiple(x, y):  # y is anything, if it comes from inference.args
        return type(y) is int and y > 0 and x % y == 0

    together(is_multiple, "orchestrator.batch_size", "a multiple of", "orchestrator.rollouts_per_example")
    together(is_multiple, "inference.gpus", "a multiple of", "inference.args.tensor_parallel_size")
    together(lambda x, y: x >= y, "orchestrator.max_concurrent", "at least", "orchestrator.rollouts_per_example")
    lengths = "orchestrator.sampling.max_tokens orchestrator.max_prompt_len eval.max_tokens"
    together(lambda x, y: x < y, lengths, "below", "max_seq_len")
    together(lambda x, y: x < y, "orchestrator.generation_timeout", "below", "watchdog")
    # Each API server knows only the adapters that it has loaded itself.
    together(lambda x, y: not x or y in (None, 1), "trainer.use_lora", "false with", "inference.args.api_server_count")
    # Most keys that would do nothing because of another one are refused, not ignored.
    for key, other in {
        "orchestrator.sampling.top_p": "orchestrator.sampling.allow_biased_sampling",
        "orchestrator.sampling.top_k": "orchestrator.sampling.allow_biased_sampling",
        "orchestrator.sampling.min_p": "orchestrator.sampling.allow_biased_sampling",
        "orchestrator.sampling.repetition_penalty": "orchestrator.sampling.allow_biased_sampling",
        "orchestrator.order_args": "orchestrator.order",
        "orchestrator.retire_after": "orchestrator.order",
        "orchestrator.curriculum": "orchestrator.order",
        "trainer.importance_args": "trainer.importance",
        "trainer.ref_sync_steps": "trainer.beta",
        "teacher.base_url": "teacher.weight",
        "teacher.prompt": "teacher.weight",
        "teacher.frozen": "teacher.weight",
        "teacher.model": "teacher.base_url",
    }.items():
        together(lambda x, y: x == DEFAULTS[key] or y, key, "left out without", other)
    for key, other in {
        "inference.sleep": "orchestrator.max_staleness",
        "trainer.head_dtype": "inference.args.hf_overrides",
    }.items():
        together(lambda x, y: not (x and y), key, "left out with", other)
    together(lambda x, y: x == 1 or not y, "orchestrator.sampling.temperature", "1.0 with", "teacher.weight")
    zeroed = "orchestrator.zero_truncated_completions"
    together(lambda x, y: not x or y != "advantages:gdpo", zeroed, "false with", "trainer.advantage")
    has_base = flat["trainer.use_lora"] and flat["trainer.dtype"] != "fp32" and not flat["teacher.base_url"]
    must = "false unless LoRA in 16 bits, with"
    together(lambda x, _: has_base or not x, "teacher.frozen", must, "trainer.dtype")
    is_local = re.compile(r"(https?://)?(127\.0\.0\.1|localhost)(:\d+)?/?").fullmatch
    must = "left out without"
    together(lambda urls, remote: remote or all(map(is_local, urls)), "inference.urls", must, "inference.allow_remote")
    together(lambda host, remote: remote or is_local(host), "trainer.sync_host", must, "inference.allow_remote")


def not_found(name):
    """Why "module:function" names nothing, or "". Nothing is imported: this must be known before a server starts, and
    the module may need seconds and a GPU."""
    module, _, function = name.partition(":")
    path = HERE / "algorithms" / f"{module}.py"
    if not path.exists():
        top = module.split(".")[0]
        spec = find_spec(top) if top != "__main__" else None
        if spec is None:
            return f"there is no module {top!r}, neither beside the TOML nor installed"
        path = Path(spec.origin or "")
    if path.suffix != ".py" or not path.is_file() or "." in module:  # a package, an archive, a library in C
        return ""
    try:
        tree = ast.parse(path.read_bytes())
    except SyntaxError as e:
        return f"{path}, line {e.lineno}: {e.msg}"
    names = set()
    for node in ast.walk(tree):
        names |= {getattr(node, key, None) for key in ("name", "id", "asname")}
    names |= set(dir(sys.modules.get(module)))
    may_be_there = {function, "*", "globals", "setattr", "exec", "__getattr__"} & names
    return "" if may_be_there else f"{path} does not define {function!r}"


def find(name, table=None):
    """What a key names: an entry of `table`, or "module:function" of configs/algorithms/ or of the user's own module.

    Raises RunError with CONFIG if there is none, or if ours and theirs have the same name."""
    if ":" not in name:
        return table[name]
    module, _, function = name.partition(":")
    ours = f"configs.algorithms.{module}"
    try:
        is_ours = (HERE / "algorithms" / f"{module}.py").exists()
        is_theirs = find_spec(module) is not None
        clash = (
            f"there is a module {module!r} beside your TOML or installed, and one in configs/algorithms: rename yours"
        )
        require(not (is_ours and is_theirs), CONFIG, clash)
        return getattr(import_module(ours if is_ours else module), function)
    except RunError:
        raise
    except (Exception, SystemExit) as e:  # also what the user's module raises when it is imported
        what = f"{name!r} cannot be used as module:function"
        raise RunError(CONFIG, f"{what}: {type(e).__name__}: {e}{place_of(e)}") from e


def served_name(cfg, version=None):
    """The name of the servers' model; with a version, the name of that one: adapters have names of their own."""
    name = os.environ.get("ROLEMODEL_RUN_ID", cfg.run.run_name)
    if cfg.sends_adapters and version is not None:
        return f"{name}-v{version}"
    return name
