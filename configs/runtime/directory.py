"""The directory of a run: where it is, to which run it belongs, and what of it a resumed run writes again."""

import json
import os
import re
from pathlib import Path

from configs.runtime.role import CONFIG, require, say

# These must not change between a run and its resumption.
FIXED = "run_name model seed env trainer.use_lora trainer.lora_rank trainer.lora_alpha trainer.lora_target_modules"
SECRET = "(?i)(.*_)?(key|token|secret|password)"


def run_directory(cfg, suffix=""):
    """output_dir/run_name, made with its folders. With max_steps = 0, which --check sets, a directory beside it."""
    name = cfg.run.run_name if cfg.run.max_steps else f"{cfg.run.run_name}-check"
    path = Path(cfg.run.output_dir, name + suffix.replace(":", "."))
    for part in ("batches", "checkpoints", "logs"):
        (path / part).mkdir(parents=True, exist_ok=True)
    return path


def identity(cfg):
    """{key: value} of what makes a run this run and no other; a replay of other batches is another run."""
    fixed = {key: cfg.flat[key] for key in FIXED.split()}
    return redacted(fixed | {"replay": str(cfg.replay)})


def refuse_other(found, cfg, what):
    """Raises RunError if the identity found in `what` belongs to another run."""
    differences = []
    for key, value in identity(cfg).items():
        if found.get(key) != value:
            differences.append(f"{key} was {found.get(key)!r}, now {value!r}")
    text = "; ".join(differences)
    require(not differences, CONFIG, f"{what} belongs to another run: {text}. Choose another run_name, or remove it")


def report_changes(run_dir, text):
    """Says which keys differ from the run's last start; text: the configuration as config.toml will have it. Raises
    RunError with CONFIG if a run that has begun would go on with another loss, advantage or optimizer, unless
    allow_changes is set."""
    path = run_dir / "config.toml"
    old = values_in(path.read_text()) if path.exists() else {}
    new = values_in(text)
    changed = [key for key in new if new[key] != old.get(key, new[key])]
    for key in changed:
        say(f"run: {key} was {old[key]}, now {new[key]}")
    refused = {"trainer.loss", "trainer.advantage", "trainer.optimizer"} & set(changed)
    has_begun = any(run_dir.glob("batches/*.safetensors"))
    is_allowed = new["allow_changes"] == "true" or not has_begun
    remedy = "choose another run_name, or set allow_changes"
    require(is_allowed or not refused, CONFIG, f"{run_dir} began with another {sorted(refused)}: {remedy}")


def write_config(run_dir, text):
    """Writes config.toml by a rename: a killed process leaves the old one or the new one."""
    tmp = run_dir / "config.tmp"
    tmp.write_text(text)
    os.replace(tmp, run_dir / "config.toml")


def values_in(text):
    """{key: value} of a config.toml, which has a line for each key, and perhaps a comment by hand."""
    lines = text.split("\n")  # values may have other line breaks
    return dict(line.split(" = ", 1) for line in lines if " = " in line)


def redacted(value):
    """A copy that is fit for the disk: strings that are named like secrets are hidden, tables sorted, dates text."""

    def hide(table):
        for key, item in table.items():
            if re.fullmatch(SECRET, key) and isinstance(item, str | list):
                table[key] = "REDACTED"
        return table

    return json.loads(json.dumps(value, default=str, sort_keys=True), object_hook=hide)


def cut_lines(path, end):
    """Cuts off a JSON Lines file before its first line of step `end` or later, since a resumed run writes those again,
    and before the half line of a killed process. Its lines begin with their step, and steps ascend."""
    path.touch()
    size = 0
    with open(path, "rb") as file:
        for line in file:  # the file may have gigabytes
            found = re.match(rb'\{"step": (\d+)\b.*\n', line)
            if not found or int(found[1]) >= end:
                break
            size += len(line)
    os.truncate(path, size)
