"""The directory of a run: where it is, to which run it belongs, and what of it a resumed run writes again."""

import json
import os
import re
from pathlib import Path

from configs.runtime.role import CONFIG, require

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


def redacted(value):
    """A copy that is fit for the disk: strings that are named like secrets are hidden, tables sorted, dates text."""

    def hide(table):
        hidden = {}
        for key, item in sorted(table.items()):
            is_secret = re.fullmatch(SECRET, key) and isinstance(item, str | list)
            hidden[key] = "REDACTED" if is_secret else item
        return hidden

    return json.loads(json.dumps(value, default=str), object_hook=hide)


def cut_lines(path, keep):
    """Drops the lines of a JSON Lines file that a resumed run will write again, and the half line of a killed process.
    It reads line by line, since the file may have gigabytes."""
    path.touch()
    tmp = path.with_suffix(".tmp")
    with open(path, errors="replace") as old, open(tmp, "w") as new:
        for line in old:
            if line.endswith("\n") and keep(json.loads(line)):
                new.write(line)
    os.replace(tmp, path)
