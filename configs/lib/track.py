"""python configs/lib/track.py outputs/run wandb|trackio|tensorboard: sends what a run writes, until it is done or TERM.

launch.sh starts it where `tracker` is set. The run does not depend on it: the files are the truth, and what has been
sent is remembered in tracker.json, so that it can be started again, or later; steps that a resumed run trains again are
not sent again. Metrics and evaluations by version; of every 10th batch a table of 64 rollouts. Account and place are
the tracker's own business: WANDB_PROJECT, WANDB_MODE=offline, TRACKIO_DIR, ..."""

import json
import os
import signal
import sys
import time
import tomllib
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))
from configs.lib.metrics import as_messages
from configs.lib.runtime import redacted

COLUMNS = ("step", "env", "example", "rollout", "reward", "advantage", "truncated", "prompt", "completion")
EVERY, ROWS = 10, 64


def wandb(run_dir, config, project):
    import wandb

    run = wandb.init(project=project, name=run_dir.name, id=config["id"], resume="allow", dir=run_dir, config=config)
    run.define_metric("*", step_metric="version")
    table = lambda rows: {"rollouts": wandb.Table(columns=list(COLUMNS), data=rows)}  # noqa: E731
    return lambda version, values: run.log(values | {"version": version}), table, run.finish


def trackio(run_dir, config, project):
    import pandas
    import trackio

    trackio.init(project=project, name=run_dir.name, config=config, resume="allow", embed=False)
    table = lambda rows: {"rollouts": trackio.Table(dataframe=pandas.DataFrame(rows, columns=COLUMNS))}  # noqa: E731
    return lambda version, values: trackio.log(values, step=version), table, trackio.finish


def tensorboard(run_dir, config, project):
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(run_dir / "tensorboard")
    writer.add_text("config", f"```\n{json.dumps(config, indent=1)}\n```")

    def log(version, values):
        for key, value in values.items():
            add = writer.add_text if isinstance(value, str) else writer.add_scalar
            add(key, value, version)

    cell = lambda x: str(x).replace("|", "\\|").replace("\n", "<br>")  # noqa: E731
    markdown = lambda rows: "\n".join("| " + " | ".join(map(cell, r)) + " |" for r in rows)  # noqa: E731
    table = lambda rows: {"rollouts": markdown([COLUMNS, ["---"] * len(COLUMNS), *rows])}  # noqa: E731
    return log, table, writer.close


def flat(line):
    text = lambda x: "\n".join(f"{m['role']}: {m.get('content') or ''}" for m in as_messages(x))  # noqa: E731
    return [
        text(line[c]) if c in ("prompt", "completion") else str(line[c]) if c == "advantage" else line[c]
        for c in COLUMNS
    ]


def fresh(path, at):
    """Yields the whole lines since the last call; at: {path: bytes read}. A shorter file was cut by a resumed run."""
    if not path.exists():
        return
    at[path] = at.get(path, 0) if path.stat().st_size >= at.get(path, 0) else 0
    with open(path, "rb") as f:
        f.seek(at[path])
        for line in f:
            if not line.endswith(b"\n"):
                return
            at[path] += len(line)
            yield json.loads(line)


def send(run_dir, sent, at, waiting, is_last, log, table):
    """What is new. sent: {file: its last version, or step}; waiting: a table's rows, of maybe half a batch."""
    for file, key in (("metrics", "version"), ("eval", "step")):
        last = sent.get(file, -1)
        for line in fresh(run_dir / f"{file}.jsonl", at):
            if line[key] > last:
                start, sent[file] = f"eval/{line['env']}/" if file == "eval" else "", line[key]
                numbers = {k: v for k, v in line.items() if type(v) in (int, float) and k not in ("time", key)}
                log(line[key], {start + k: v for k, v in numbers.items()})
    for line in fresh(run_dir / "rollouts.jsonl", at):
        if line["step"] > sent.get("rollouts", -1) and line["step"] % EVERY == 0 and len(waiting) < 100 * ROWS:
            waiting.append(line)
        newest = line["step"]
        if waiting and newest > waiting[0]["step"]:
            log(waiting[0]["step"], table([flat(x) for x in waiting if x["step"] < newest][:ROWS]))
            sent["rollouts"] = waiting[0]["step"]
            waiting[:] = [x for x in waiting if x["step"] == newest]
    if waiting and is_last:
        log(waiting[0]["step"], table([flat(x) for x in waiting][:ROWS]))
        sent["rollouts"] = waiting[0]["step"]
    (tmp := run_dir / "tracker.tmp").write_text(json.dumps(sent))
    os.replace(tmp, run_dir / "tracker.json")


def main(run_dir, name):
    run_dir, state, done = Path(run_dir), Path(run_dir) / "tracker.json", []
    signal.signal(signal.SIGTERM, lambda *_: done.append(True))
    config = redacted("", tomllib.loads((run_dir / "config.toml").read_text()))
    sent = json.loads(state.read_text()) if state.exists() else {"id": f"{run_dir.name}-{os.urandom(4).hex()}"}
    begin = {"wandb": wandb, "trackio": trackio, "tensorboard": tensorboard}[name]
    log, table, finish = begin(run_dir, config | {"id": sent["id"]}, os.environ.get("WANDB_PROJECT") or "rolemodel")
    at, waiting, is_last = {}, [], False
    while not is_last:
        is_last = bool(done) or (run_dir / "done").exists()
        send(run_dir, sent, at, waiting, is_last, log, table)
        time.sleep(0 if is_last else 1)
    finish()


if __name__ == "__main__":
    main(*sys.argv[1:3])
