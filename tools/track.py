"""Trackers: wandb, trackio and tensorboard get what watch.py reads. Everything is by version, batch n under the n + 1
that it made; of every 10th batch a table of 64 rollouts. Account and place are the tracker's own business:
WANDB_PROJECT, WANDB_MODE=offline, TRACKIO_DIR, ..."""

import json
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from configs import redacted
from tools.show import as_messages, said

COLUMNS = ("step", "env", "example", "rollout", "reward", "truncated", "prompt", "completion")
EVERY, ROWS = 10, 64  # steps between tables, rollouts in one


class Wandb:
    def __init__(self, run, config, project):
        import wandb

        self.wandb, place = wandb, {"name": run.name, "id": config["id"], "dir": run}
        self.run = wandb.init(project=project, resume="allow", config=config, **place)
        self.run.define_metric("*", step_metric="version")

    def log(self, version, values):
        self.run.log(values | {"version": version})

    def table(self, version, rows):
        self.log(version, {"rollouts": self.wandb.Table(columns=list(COLUMNS), data=rows)})

    def flush(self):
        return False  # it cannot be asked, and may have the last 32 KiB in memory

    def finish(self):
        self.run.finish()
        self.wandb.teardown()  # finish() does not wait for wandb's own process, which writes its file


class Trackio:
    def __init__(self, run, config, project):
        import trackio

        self.trackio = trackio
        trackio.init(project=project, name=run.name, config=config, resume="allow", embed=False)

    def log(self, version, values):
        self.trackio.log(values, step=version)

    def table(self, version, rows):
        import pandas

        self.log(version, {"rollouts": self.trackio.Table(dataframe=pandas.DataFrame(rows, columns=COLUMNS))})

    def flush(self):
        return True

    def finish(self):
        self.trackio.finish()


class Tensorboard:
    def __init__(self, run, config, project):
        from torch.utils.tensorboard import SummaryWriter

        self.writer = SummaryWriter(run / "tensorboard")
        self.writer.add_text("config", f"```\n{json.dumps(config, indent=1)}\n```")

    def log(self, version, values):
        for key, value in values.items():
            self.writer.add_scalar(key, value, version)

    def table(self, version, rows):
        cells = [COLUMNS, ["---"] * len(COLUMNS), *rows]
        lines = [" | ".join(str(x).replace("|", "\\|").replace("\n", "<br>") for x in row) for row in cells]
        self.writer.add_text("rollouts", "\n".join(f"| {line} |" for line in lines), version)

    def flush(self):
        self.writer.flush()
        return True

    def finish(self):
        self.writer.close()


KINDS = {"wandb": Wandb, "trackio": Trackio, "tensorboard": Tensorboard}


class Tracker:
    """tracker.json remembers what has been sent: a run can be sent later, or in parts, and a step that a resumed run
    trains again is not sent again."""

    def __init__(self, name, run, config):
        self.file = run / "tracker.json"
        self.sent = {"id": f"{run.name}-{os.urandom(4).hex()}"}  # and of each kind of line the last one's number
        if self.file.exists():
            self.sent |= json.loads(self.file.read_text())
        self.write()  # the name, for the next attempt
        about = redacted(config) | {"id": self.sent["id"]}
        self.kind = KINDS[name](run, about, os.environ.get("WANDB_PROJECT") or "rolemodel")

    def add_metrics(self, line):
        self.log("metrics", line["version"], line)

    def add_evaluation(self, line):
        start = f"eval/{line['env']}"
        self.log(start, line["step"], {f"{start}/{key}": value for key, value in line.items()})

    def log(self, what, version, values):
        if version > self.sent.get(what, -1):
            skipped = ("time", "step", "version")
            numbers = {k: v for k, v in values.items() if type(v) in (int, float) and k.split("/")[-1] not in skipped}
            self.kind.log(version, numbers)
            self.sent[what] = version

    def add_rollouts(self, step, lines):
        """Of one batch."""
        if step % EVERY or step <= self.sent.get("rollouts", -1):
            return
        rows = []
        for line in lines[:ROWS]:
            texts = {key: "\n".join(f"{m['role']}: {said(m)}" for m in as_messages(line[key])) for key in COLUMNS[-2:]}
            rows.append([(line | texts)[column] for column in COLUMNS])
        self.kind.table(step + 1, rows)  # beside the numbers of that batch
        self.sent["rollouts"] = step

    def save(self):
        """What is not on the disk yet is not said to be sent: after a crash it is sent again, maybe twice."""
        if self.kind.flush():
            self.write()

    def finish(self):
        self.kind.finish()
        self.write()

    def write(self):
        tmp = self.file.with_suffix(".tmp")
        tmp.write_text(json.dumps(self.sent))
        os.replace(tmp, self.file)
